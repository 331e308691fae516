# SPDX-License-Identifier: MIT
"""The kernels, none of them ours, and what each needs; asked before the first call, not by failing.

A kernel reads either exactly the valid rows or whole tiles. FlashAttention-3 loads tiles with TMA,
whose bounds are the tensor's and not the request's length, of up to 192 rows (``tile_size.h`` of
its ``hopper`` folder); FlexAttention reads blocks of 128. What lies behind the length must then be
mapped and finite: `KVCacheConfig.overread_rows`, or a sparse reservation. FlashAttention-2 and SDPA
over a view of the valid rows read no more than these.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

from pyvmem.attention import flash, flex, sdpa
from pyvmem.kvcache.config import invalid

if TYPE_CHECKING:
    from pyvmem.attention.batch import Batch
    from pyvmem.kvcache import KVCache

__all__ = ["KERNELS", "Choice", "choose", "probe"]

_log = logging.getLogger("pyvmem.attention")
_said: set[str] = set()


class Run(Protocol):
    """A kernel's call."""

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, batch: Batch, scale: float
    ) -> torch.Tensor:
        """``[tokens, heads, head_dim]`` from the same and a layer's whole K and V."""


@dataclass(frozen=True)
class _Kernel:
    why_not: Callable[[KVCache, torch.device], str]
    run: Run
    overread: Callable[[torch.device], int]


KERNELS: dict[str, _Kernel] = {
    "fa3": _Kernel(flash.why_not_fa3, flash.fa3, lambda device: 191),
    "fa2": _Kernel(flash.why_not_fa2, flash.fa2, lambda device: 0),
    "flex": _Kernel(flex.why_not, flex.flex, lambda device: 127 if device.type == "cuda" else 0),
    "sdpa": _Kernel(lambda cache, device: "", sdpa.sdpa, lambda device: 0),
}
_ORDER = {"cuda": ("fa3", "fa2", "flex", "sdpa"), "cpu": ("sdpa", "flex")}


@dataclass(frozen=True)
class Choice:
    """What was chosen, and why not another.

    Attributes:
        name: of `KERNELS`.
        why_not: for every kernel, why it cannot be used on this cache; "" where it can.
    """

    name: str
    why_not: dict[str, str]

    def __str__(self) -> str:
        others = "; ".join(f"{name}: {why}" for name, why in self.why_not.items() if why)
        return f"attention by {self.name}" + (f" ({others})" if others else "")


def probe(cache: KVCache, device: torch.device) -> dict[str, str]:
    """For every kernel, why it cannot be used on this cache; "" where it can."""
    return {name: _why_not(name, cache, device) for name in KERNELS}


def choose(cache: KVCache, device: torch.device, kernel: str = "auto") -> Choice:
    """The named kernel, or the first usable of fa3, fa2, flex, sdpa (on the CPU: sdpa, flex).

    The choice is logged once a process (logger ``pyvmem.attention``).

    Raises:
        InvalidArgument: no such kernel, or it cannot be used; the text says why.
    """
    if kernel != "auto" and kernel not in KERNELS:
        raise invalid(f"kernel {kernel!r} is none of auto, {', '.join(KERNELS)}")
    found = probe(cache, device)
    if kernel == "auto":
        kernel = next(name for name in _ORDER[device.type] if not found[name])
    elif found[kernel]:
        raise invalid(f"kernel {kernel} cannot be used: {found[kernel]}")
    choice = Choice(kernel, found)
    if str(choice) not in _said:
        _said.add(str(choice))
        _log.info("%s", choice)
    return choice


def _why_not(name: str, cache: KVCache, device: torch.device) -> str:
    one = KERNELS[name]
    why = one.why_not(cache, device)
    need, have = one.overread(device), cache.config.overread_rows
    if not why and have < need and not cache.reservation.sparse:
        why = f"it reads whole tiles: it needs overread_rows of {need}, the cache has {have}"
    return why
