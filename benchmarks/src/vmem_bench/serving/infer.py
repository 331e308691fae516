# SPDX-License-Identifier: MIT
"""FlashInfer for a step's prompts: one call per slot, or one call over blocks, planned per step.

FlashAttention-3 does the decoding, because FlashInfer plans on the host, which a CUDA graph cannot
replay. FlashInfer's kernels are compiled when they are first called (`pyvmem.attention.infer`).
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

if TYPE_CHECKING:
    from vmem_bench.decoder import Sizes
    from vmem_bench.serving.forward import Work

__all__ = ["Prompts"]

_WORKSPACE = 256 << 20


class Prompts:
    """FlashInfer's calls for the prompts of the current step.

    Args:
        sizes: sizes of the model.
        block: rows per block, or 0 if prompts are in contiguous slots.
        device: a GPU.

    Raises:
        ImportError: FlashInfer is not installed.
    """

    def __init__(self, sizes: Sizes, block: int, device: torch.device) -> None:
        module: Any = importlib.import_module("flashinfer.prefill")
        self._sizes, self._block, self._device = sizes, block, device
        self._single = module.single_prefill_with_kv_cache
        self._works: Sequence[Work] = ()
        self._batch: Any = None
        if block:
            workspace = torch.empty(_WORKSPACE, dtype=torch.uint8, device=device)
            self._batch = module.BatchPrefillWithPagedKVCacheWrapper(
                workspace, "NHD", backend="fa3"
            )

    def plan(self, works: Sequence[Work], table: torch.Tensor | None) -> None:
        """Plans the calls of a step, once for all layers.

        `table`: the blocks of `works`, int32 ``[works, width]``.
        """
        self._works = works
        if self._batch is None:
            return
        assert table is not None, "the store has no block table"
        ends = np.array([work.end for work in works])
        counts = -(-ends // self._block)
        lines = np.repeat(np.arange(len(works)), counts)
        columns = np.concatenate([np.arange(count) for count in counts])
        where = torch.from_numpy(np.stack((lines, columns)))
        if table.is_cuda:
            where = where.pin_memory().to(table.device, non_blocking=True)
        sizes = self._sizes
        self._batch.plan(
            _sums([len(work.ids) for work in works]),
            _sums(counts),
            table[where[0], where[1]],
            torch.from_numpy(ends - (counts - 1) * self._block).int(),
            sizes.heads,
            sizes.kv_heads,
            sizes.head_dim,
            self._block,
            causal=True,
            sm_scale=sizes.head_dim**-0.5,
            q_data_type=torch.bfloat16,
            kv_data_type=torch.bfloat16,
        )

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Returns the planned prompts' attention over a layer, ``[tokens, heads, head_dim]``."""
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        if self._batch is not None:
            found: torch.Tensor = self._batch.run(q, (k, v), out=out)
            return found
        at = 0
        for work in self._works:
            new = slice(at, at + len(work.ids))
            rows = slice(
                work.end
            )  # the view ends at the request's length, so that tiles past it are not read
            keys, values = k[work.slot, rows], v[work.slot, rows]
            scale = self._sizes.head_dim**-0.5
            out[new] = self._single(
                q[new], keys, values, causal=True, kv_layout="NHD", sm_scale=scale
            )
            at = new.stop
        return out


def _sums(counts: Any) -> torch.Tensor:
    """Returns cumulative sums in CPU memory, where `plan` reads them."""
    return torch.from_numpy(np.concatenate(([0], np.cumsum(counts)))).int()
