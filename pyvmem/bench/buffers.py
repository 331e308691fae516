# SPDX-License-Identifier: MIT
"""The same bytes in memory of several kinds, as torch tensors.

Separately allocated cudaMalloc buffers; 64 KB pages in random physical order; the same in one run.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

from pyvmem.bench.native import MAP, Native

if TYPE_CHECKING:
    import torch

    from pyvmem.context import Context

__all__ = ["Buffers", "malloc_names", "vmem_names"]

_BASELINES = 4
_SHUFFLES = 2
_OPS = 4096  # maps in one batch


def malloc_names() -> list[str]:
    """Names of the baselines."""
    return [f"malloc{i}" for i in range(_BASELINES)]


def vmem_names() -> list[str]:
    """Names of the buffers in our pages."""
    return [*(f"random{i}" for i in range(_SHUFFLES)), "runs"]


class Buffers:
    """`tensors` by name, all of `nbytes` bytes of random bfloat16 numbers, the same in each.

    Close gives the memory back; views of the tensors must be gone before.
    """

    def __init__(self, context: Context, nbytes: int, page: int, device: int) -> None:
        import torch

        self.context, self.nbytes, self.page = context, nbytes, page
        self._native = Native(context)
        self.reservations: list[Any] = []
        self.tensors: dict[str, torch.Tensor] = {}
        generator = torch.Generator(device=f"cuda:{device}").manual_seed(1)
        elements = nbytes // 2
        pads = []
        for i, name in enumerate(malloc_names()):
            tensor = torch.empty(elements, dtype=torch.bfloat16, device=f"cuda:{device}")
            self.tensors[name] = tensor
            # An allocation of an odd size between them, so that the baselines lie differently.
            pads.append(torch.empty((37 * (i + 1)) << 20, dtype=torch.uint8, device=tensor.device))
        first = self.tensors["malloc0"]
        first.normal_(generator=generator)
        for name in malloc_names()[1:]:
            self.tensors[name].copy_(first)
        for seed, name in enumerate(vmem_names()):
            self.tensors[name] = self._vmem(seed, shuffled=name.startswith("random"))
            self.tensors[name].copy_(first)
        torch.cuda.synchronize(device)

    def _vmem(self, seed: int, *, shuffled: bool) -> torch.Tensor:
        import torch

        n, page, nbytes = self._native, self.page, self.nbytes
        reservation = self.context.reserve(nbytes)
        self.reservations.append(reservation)
        handle = n.create(nbytes, page)
        if shuffled:
            order = list(range(nbytes // page))
            random.Random(seed).shuffle(order)
            base = reservation.addr
            for first in range(0, len(order), _OPS):
                n.batch(
                    n.ops(
                        [
                            {
                                "op": MAP,
                                "addr": base + (first + i) * page,
                                "bytes": page,
                                "handle": handle,
                                "offset": piece * page,
                            }
                            for i, piece in enumerate(order[first : first + _OPS])
                        ]
                    )
                )
        else:
            n.map(reservation.addr, nbytes, handle)
        n.drop(handle)
        tensor: torch.Tensor = reservation.tensor((nbytes // 2,), torch.bfloat16)
        return tensor

    def close(self) -> None:
        """Give all memory back, torch's cache included."""
        import torch

        self.tensors.clear()
        torch.cuda.synchronize()
        for reservation in self.reservations:
            self._native.unmap(reservation.addr, self.nbytes)
            reservation.close()
        torch.cuda.empty_cache()
