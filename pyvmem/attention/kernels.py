# SPDX-License-Identifier: MIT
"""The kernels, none of them ours, and what each needs; asked before the first call, not by failing.

A kernel reads either exactly the valid rows or whole tiles (`Reads`). FlashAttention-3's contiguous
call loads tiles with TMA, whose bounds are the tensor's and not the request's length, of up to 192
rows (``tile_size.h`` of its ``hopper`` folder); FlexAttention reads blocks of 128. What lies behind
the length must then be mapped and finite: `KVCacheConfig.overread_rows`, or a sparse cache where
that is enough (`KVCache.safe_overread`). FlashAttention-2, FlashAttention-3's paged call with small
blocks, and SDPA over a view of the valid rows read no more than these.

"auto" takes a kernel for each phase. Decoding takes one that reads exactly: the paged call over the
trivial block table of a contiguous slot is as fast as the contiguous one or faster. A prefill takes
the contiguous call, 6 to 25 % faster there, where the cache maps the rows that it may read.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

from pyvmem.attention import flash, flex, sdpa
from pyvmem.attention.reads import EXACT, Reads
from pyvmem.kvcache.config import invalid

if TYPE_CHECKING:
    from pyvmem.attention.batch import Batch
    from pyvmem.kvcache import KVCache

__all__ = ["KERNELS", "Choice", "choose", "overread_rows", "probe"]

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
    reads: Callable[[torch.device], Reads]


def _exact(device: torch.device) -> Reads:
    return EXACT


KERNELS: dict[str, _Kernel] = {
    "fa3": _Kernel(flash.why_not_fa3, flash.fa3, lambda device: Reads(tile=191)),
    "fa3-paged": _Kernel(flash.why_not_fa3_paged, flash.fa3_paged, _exact),
    "fa2": _Kernel(flash.why_not_fa2, flash.fa2, _exact),
    "flex": _Kernel(
        flex.why_not,
        flex.flex,
        lambda device: Reads(block=flex.BLOCK) if device.type == "cuda" else EXACT,
    ),
    "sdpa": _Kernel(lambda cache, device: "", sdpa.sdpa, _exact),
}
_PREFILL = {"cuda": ("fa3", "fa3-paged", "fa2", "flex", "sdpa"), "cpu": ("sdpa", "flex")}
_DECODE = {"cuda": ("fa3-paged", "fa2", "fa3", "flex", "sdpa"), "cpu": ("sdpa", "flex")}


def overread_rows(kernel: str, device: torch.device) -> int:
    """What `KVCacheConfig.overread_rows` must be for a kernel of `KERNELS` on a device.

    If the kernel is named for all batches, `KVCacheConfig.overread_decode` must be set, too.
    """
    return KERNELS[kernel].reads(device).past


@dataclass(frozen=True)
class Choice:
    """What was chosen, and why not another.

    Attributes:
        name: of `KERNELS`; for prefills, also in chunks.
        why_not: for every kernel, why it cannot be used on this cache; "" where it can.
        decode: of `KERNELS`; for batches of no more than `PREFILL_TOKENS` new tokens a request.
    """

    name: str
    why_not: dict[str, str]
    decode: str

    def __str__(self) -> str:
        others = "; ".join(f"{name}: {why}" for name, why in self.why_not.items() if why)
        decode = "" if self.decode == self.name else f", decoding by {self.decode}"
        return f"attention by {self.name}{decode}" + (f" ({others})" if others else "")


def probe(cache: KVCache, device: torch.device) -> dict[str, str]:
    """For every kernel, why it cannot be used on this cache; "" where it can."""
    return {name: _why_not(name, cache, device) for name in KERNELS}


def choose(cache: KVCache, device: torch.device, kernel: str = "auto") -> Choice:
    """The named kernel for all, or the first usable ones for prefills and for decoding.

    A kernel that reads tiles is usable for prefills alone, unless the cache keeps their rows in
    decoding, too (`KVCacheConfig.overread_decode`).

    The choice is logged once a process (logger ``pyvmem.attention``).

    Raises:
        InvalidArgument: no such kernel, or it cannot be used; the text says why.
    """
    if kernel != "auto" and kernel not in KERNELS:
        raise invalid(f"kernel {kernel!r} is none of auto, {', '.join(KERNELS)}")
    found = probe(cache, device)
    if kernel == "auto":
        prefill = next(name for name in _PREFILL[device.type] if not found[name])
        decode = next(
            name
            for name in _DECODE[device.type]
            if not found[name] and not _why_not_decode(name, cache, device)
        )
        choice = Choice(prefill, found, decode)
    elif why := found[kernel] or _why_not_decode(kernel, cache, device):
        raise invalid(f"kernel {kernel} cannot be used: {why}")
    else:
        choice = Choice(kernel, found, kernel)
    if str(choice) not in _said:
        _said.add(str(choice))
        _log.info("%s", choice)
    return choice


def _why_not(name: str, cache: KVCache, device: torch.device) -> str:
    one = KERNELS[name]
    why = one.why_not(cache, device)
    need, have = one.reads(device).past, cache.config.overread_rows
    if not why and have < need and not cache.safe_overread:
        why = f"it reads whole tiles: it needs overread_rows of {need}, the cache has {have}"
    return why


def _why_not_decode(name: str, cache: KVCache, device: torch.device) -> str:
    """Why a kernel that can be used for prefills cannot be used for decoding; "" where it can."""
    exact = not KERNELS[name].reads(device).past
    if exact or cache.config.overread_decode or cache.safe_overread:
        return ""
    return "it reads whole tiles in decoding, too: it needs overread_decode"
