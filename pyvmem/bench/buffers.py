# SPDX-License-Identifier: MIT
"""Creates torch tensors with the same contents in several kinds of memory.

The kinds are buffers that torch allocates separately (with cudaMalloc on a GPU), small pages in
random physical order, and small pages that form one run.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

from pyvmem.bench.native import MAP, Native

if TYPE_CHECKING:
    import torch

    from pyvmem.memory.context import Context
    from pyvmem.memory.reservation import Reservation

__all__ = ["Buffers", "malloc_names", "vmem_names"]

_BASELINES = 4
_SHUFFLES = 2
_OPS = 4096  # pages mapped per batch


def malloc_names() -> list[str]:
    """Returns the names of the baseline buffers."""
    return [f"malloc{i}" for i in range(_BASELINES)]


def vmem_names() -> list[str]:
    """Returns the names of the buffers on vmem pages."""
    return [*(f"random{i}" for i in range(_SHUFFLES)), "runs"]


class Buffers:
    """Tensors of `nbytes` bytes each, all filled with the same random bfloat16 values.

    Attributes:
        tensors: one-dimensional tensors, keyed by the names from `malloc_names` and `vmem_names`.
        nbytes: size of each tensor in bytes.
    """

    def __init__(self, context: Context, nbytes: int, page: int, device: torch.device) -> None:
        import torch

        self.context, self.nbytes, self.page, self.device = context, nbytes, page, device
        self._native = Native(context)
        self._reservations: list[Reservation] = []
        self.tensors: dict[str, torch.Tensor] = {}
        pads: list[torch.Tensor] = []
        for i, name in enumerate(malloc_names()):
            self.tensors[name] = torch.empty(nbytes // 2, dtype=torch.bfloat16, device=device)
            # Allocate an odd size after each, so that the baselines are aligned differently.
            pads.append(torch.empty((37 * (i + 1)) << 20, dtype=torch.uint8, device=device))
        first = self.tensors["malloc0"]
        first.normal_(generator=torch.Generator(device=device).manual_seed(1))
        for name in malloc_names()[1:]:
            self.tensors[name].copy_(first)
        for seed, name in enumerate(vmem_names()):
            tensor = self._vmem(seed, shuffled=name.startswith("random"))
            self.tensors[name] = tensor
            tensor.copy_(first)
        self._finish()

    def _finish(self) -> None:
        import torch

        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _vmem(self, seed: int, *, shuffled: bool) -> torch.Tensor:
        import torch

        n, page, nbytes = self._native, self.page, self.nbytes
        reservation = self.context.reserve(nbytes)
        self._reservations.append(reservation)
        handle, base = n.create(nbytes, page), reservation.addr
        order = list(range(nbytes // page))
        if shuffled:
            random.Random(seed).shuffle(order)
            for first in range(0, len(order), _OPS):
                some = enumerate(order[first : first + _OPS], first)
                ops: list[dict[str, Any]] = [
                    {
                        "op": MAP,
                        "addr": base + at * page,
                        "bytes": page,
                        "handle": handle,
                        "offset": piece * page,
                    }
                    for at, piece in some
                ]
                n.batch(n.ops(ops))
        else:
            n.map(base, nbytes, handle)
        n.drop(handle)
        tensor: torch.Tensor = reservation.tensor((nbytes // 2,), torch.bfloat16)
        return tensor

    def close(self) -> None:
        """Frees all memory, including torch's cache; no views of the tensors may be alive."""
        import torch

        self._finish()
        self.tensors.clear()
        for reservation in self._reservations:
            self._native.unmap(reservation.addr, self.nbytes)
            reservation.close()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
