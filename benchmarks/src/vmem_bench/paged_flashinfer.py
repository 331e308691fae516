# SPDX-License-Identifier: MIT
"""FlashInfer's kernels over contiguous rows (the ragged wrapper), over blocks and over slots.

The kernels are compiled on first use. The ragged wrapper needs rows without gaps, but slots have
gaps, so it is used only for a single long prompt in a slot; other prefills make a separate call
for each request (`pyvmem.attention.infer`).

The module is written for flashinfer-python 0.6.14, whose wheel includes the headers; it needs nvcc,
a C++ compiler and ninja on the PATH. Decoding uses the ``fa2`` kernels, which divide a request's
rows among multiprocessors, and prefill uses the ``fa3`` kernels. FlashInfer would choose the same
kernels: with several query heads per KV head, it decodes with its prefill kernels
(`use_tensor_cores`).
"""

from __future__ import annotations

import importlib
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from vmem_bench.paged_kernels import Call, Case, of_slots

if TYPE_CHECKING:
    import torch

__all__ = ["FlashInfer"]

_WORKSPACE = 256 << 20
_BACKENDS = ("fa2", "fa3")
_SINGLE = "single"  # the call for one request, with the same kernels as "fa3"


class FlashInfer:
    """FlashInfer's kernels, called through its batch wrappers.

    Args:
        device: a GPU.

    Attributes:
        notes: how long compiling took, and what could not be compiled.

    Raises:
        ValueError: the device is not a GPU.
        ImportError: FlashInfer or a dependency is not installed.
        RuntimeError: nothing could be compiled; the message says why.
    """

    name = "flashinfer"
    blocks: tuple[int, ...] = (16, 64, 128, 256)

    def __init__(self, device: torch.device) -> None:
        import torch

        if device.type != "cuda":
            raise ValueError("needs a GPU")
        self._device = device
        self._prefill: Any = importlib.import_module("flashinfer.prefill")
        self._workspace = torch.empty(_WORKSPACE, dtype=torch.uint8, device=device)
        start = time.monotonic()
        names = (*_BACKENDS, _SINGLE)
        with ThreadPoolExecutor(len(names)) as pool:
            self._why = dict(zip(names, pool.map(self._build, names), strict=True))
        failed = [f"{name} was not compiled: {why}" for name, why in self._why.items() if why]
        if len(failed) == len(names):
            raise RuntimeError("; ".join(failed))
        self.notes = [f"compiled in {time.monotonic() - start:.0f} s", *failed]

    def _build(self, backend: str) -> str:
        """Compiles the module for `plan` or for single calls. Returns "", or why it failed."""
        import torch

        kind, dim = torch.bfloat16, 128
        # The two head sizes; then no positional encoding, window, soft cap or 16-bit reduction.
        rest = (dim, dim, 0, False, False, False)
        try:
            if backend == _SINGLE:
                module = self._prefill.gen_single_prefill_module("fa3", kind, kind, kind, *rest)
            else:
                types = (kind, kind, kind, torch.int32)
                module = self._prefill.gen_batch_prefill_module(backend, *types, *rest)
            module.build(False)
        except Exception as error:  # file, process and version errors
            lines = [line for line in str(error).splitlines() if line.strip()]
            telling = [line for line in lines if "error" in line.lower()] or lines[:1]
            return f"{type(error).__name__}: {' '.join(telling[:2])[:400]}"
        return ""

    def splits(self, case: Case) -> tuple[int, ...]:
        """Returns the split counts to try; only decoding kernels can split."""
        return (0, 1, 2, 4, 8, 16, 32) if case.tuned else (0,)

    def contiguous(self, case: Case, splits: int) -> Call:
        """Returns a callable for the ragged wrapper, which reads requests' rows back to back."""
        wrapper = self._prefill.BatchPrefillWithRaggedKVCacheWrapper(
            self._workspace, "NHD", backend=self._backend(case)
        )
        wrapper.plan(
            self._starts(case, case.q_len),
            self._starts(case, case.kv_len),
            case.heads,
            case.kv_heads,
            case.head_dim,
            **self._plan(case, splits, 1),
        )
        rows = (case.batch * case.kv_len, case.kv_heads, case.head_dim)
        out = self._out(case)

        def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = wrapper.run(q, k.view(rows), v.view(rows), out=out)
            return found

        return call

    def paged(self, case: Case, table: torch.Tensor, splits: int) -> Call:
        """Returns a callable for the paged wrapper and requests whose blocks are all full."""
        import torch

        blocks = table.shape[1]
        size = case.kv_len // blocks
        wrapper = self._prefill.BatchPrefillWithPagedKVCacheWrapper(
            self._workspace, "NHD", backend=self._backend(case)
        )
        wrapper.plan(
            self._starts(case, case.q_len),
            self._starts(case, blocks),
            table.flatten(),
            torch.full((case.batch,), size, dtype=torch.int32),
            case.heads,
            case.kv_heads,
            case.head_dim,
            size,
            **self._plan(case, splits, size),
        )
        out = self._out(case)

        def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = wrapper.run(q, (k, v), out=out)
            return found

        return call

    def slots(self, case: Case) -> Call:
        """Returns a function that makes the same calls as `pyvmem.attention`.

        Prefill makes one call per request; decoding makes a paged call with an identity table.
        """
        for name in ("fa2",) if case.decodes else (_SINGLE, "fa3"):
            self._need(name)
        return of_slots("flashinfer", "flashinfer", case, self._device)

    def _backend(self, case: Case) -> str:
        name = "fa2" if case.decodes else "fa3"
        self._need(name)
        return name

    def _need(self, name: str) -> None:
        if self._why[name]:
            raise RuntimeError(f"{name} was not compiled: {self._why[name]}")

    def _starts(self, case: Case, each: int) -> torch.Tensor:
        """Returns start offsets in CPU memory, where `plan` reads them."""
        import torch

        return torch.arange(case.batch + 1, dtype=torch.int32) * each

    def _out(self, case: Case) -> torch.Tensor:
        """Allocates the output; without one, the paged wrapper zeroes a new output on each call."""
        import torch

        shape = (case.batch * case.q_len, case.heads, case.head_dim)
        return torch.empty(shape, dtype=torch.bfloat16, device=self._device)

    def _plan(self, case: Case, splits: int, unit: int) -> dict[str, Any]:
        """Returns the arguments for `plan`; the split size is in units of `unit` tokens."""
        import torch

        plan: dict[str, Any] = {"causal": True, "q_data_type": torch.bfloat16}
        if splits:
            plan["fixed_split_size"] = -(-case.kv_len // (splits * unit))
        return plan
