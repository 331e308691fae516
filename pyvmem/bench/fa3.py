# SPDX-License-Identifier: MIT
"""FlashAttention-3 as vLLM compiles it: one torch op in a shared object, `_vllm_fa3_C.fwd`.

The schema matches vLLM 0.24.0, whose op is built for torch 2.11 and compute capability 9.0.
"""

from __future__ import annotations

import tempfile
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

__all__ = ["call", "load"]

_FILE = "_vllm_fa3_C.abi3.so"


def load(source: Path | None, device: torch.device) -> Any:
    """Loads the op from a shared object or a wheel that contains one; it is never unloaded.

    Raises:
        ValueError: the file does not exist, or the device is not a GPU.
        OSError, RuntimeError: the op cannot be loaded.
    """
    import torch

    load_library: Any = torch.ops.load_library
    if device.type != "cuda":
        raise ValueError("needs a GPU")
    if source is None:
        raise ValueError("no FlashAttention-3 op was named (--fa3)")
    if not source.exists():
        raise ValueError(f"{source} does not exist")
    if source.suffix in (".zip", ".whl"):
        with zipfile.ZipFile(source) as archive, tempfile.TemporaryDirectory() as folder:
            names = [n for n in archive.namelist() if n.endswith(_FILE)]
            if not names:
                raise ValueError(f"{source} has no {_FILE}")
            load_library(archive.extract(names[0], folder))
    else:
        load_library(str(source))
    return torch.ops._vllm_fa3_C.fwd


def call(
    op: Any,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    starts: torch.Tensor,
    used: torch.Tensor,
    max_q: int,
    max_kv: int,
    table: torch.Tensor | None = None,
    splits: int = 0,
) -> torch.Tensor:
    """Runs causal attention, with the mask aligned to the bottom right corner.

    Args:
        op: the op from `load`.
        q: ``[tokens, heads, dim]``, with the requests concatenated.
        k, v: ``[requests, rows, kv_heads, dim]`` or, with a table, ``[blocks, block, kv_heads,
            dim]``.
        starts: index in `q` of each request's first token, then the total; int32 ``[requests +
            1]``.
        used: number of rows per request, int32 ``[requests]``.
        max_q, max_kv: maximum number of new tokens, and of rows, in any request.
        table: each request's blocks, int32 ``[requests, blocks per request]``.
        splits: number of parts into which a request's rows are divided; 0 lets the op choose.

    Returns:
        The output, in the shape of `q`.
    """
    lengths = (None, None, None, used, max_q, max_kv, table)
    unused = (None,) * 8  # batch indices, left padding, rotary embedding, scales of 8-bit types
    window = (True, -1, -1, 0.0, True, None, splits, None, 0, None, 1, 0, None)
    head = (q, k, v, None, None, None, None, starts)
    scale = q.shape[-1] ** -0.5
    out: torch.Tensor = op(*head, *lengths, *unused, scale, *window)[0]
    return out
