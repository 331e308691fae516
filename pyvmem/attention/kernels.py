# SPDX-License-Identifier: MIT
"""The third-party kernels and their requirements, checked before the first call.

A kernel reads either exactly the valid rows or whole tiles (`Reads`). FlashAttention-3's contiguous
call loads tiles of up to 192 rows (``tile_size.h`` of its ``hopper`` folder) with TMA, bounded by
the tensor and not by the request's length; FlexAttention reads blocks of 128. The rows past the
length must then be mapped and finite: set `KVCacheConfig.overread_rows`, or use a sparse cache if
that is enough (`KVCache.safe_overread`). FlashAttention-2, FlashAttention-3's paged call with small
blocks, and SDPA over a view of the valid rows read only valid rows.

"auto" chooses a kernel for each phase. For decoding it picks a kernel that reads only valid rows:
the paged call over the trivial block table of a contiguous slot is at least as fast as the
contiguous call. For a prefill it picks the contiguous call, which is 6 to 25% faster, if the cache
maps every row that this call may read.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch

from pyvmem.attention import flash, flex, infer, sdpa
from pyvmem.attention.layers import Form, forms_of
from pyvmem.attention.reads import EXACT, Reads
from pyvmem.plumbing.validation import invalid

if TYPE_CHECKING:
    from pyvmem.kvcache import KVCache

__all__ = ["FP8_KERNELS", "KERNELS", "Choice", "check_name", "choose", "overread_rows", "probe"]

_log = logging.getLogger("pyvmem.attention")
_said: set[str] = set()


class Run(Protocol):
    """The signature of a kernel."""

    def __call__(self, q: Any, k: Any, v: Any, batch: Any, scale: float, window: int = 0) -> Any:
        """Returns ``[tokens, heads, v_head_dim]`` from queries and all slots' K and V.

        The kernels of `FP8_KERNELS` also accept ``scales``.
        """


@dataclass(frozen=True)
class _Kernel:
    why_not: Callable[[Form, torch.device], str]
    run: Run
    reads: Callable[[torch.device], Reads]


def _tiles_before(device: torch.device) -> Reads:
    """Returns `Reads` that stop at the length but load the whole tile where a window begins."""
    return Reads(before=191)


def _fa2_reads(device: torch.device) -> Reads:
    """Returns the `Reads` of `_tiles_before`, but for tiles of 256 rows.

    FlashAttention-2 uses tiles of this size for decoding with a head_dim of up to 64.
    """
    return Reads(before=255)


def _flex_reads(device: torch.device) -> Reads:
    cuda = device.type == "cuda"
    return Reads(block=flex.BLOCK, before=flex.BLOCK - 1) if cuda else EXACT


def _why_not_sdpa(form: Form, device: torch.device) -> str:
    return f"it has no {form.dtype}" if form.dtype not in _FLOATS else ""


def _why_not_flex(form: Form, device: torch.device) -> str:
    return _why_not_sdpa(form, device) or flex.why_not(form, device)


_FLOATS = ("float64", "float32", "float16", "bfloat16")
FP8_KERNELS = ("fa3", "fa3-paged")
"""The kernels that read 8-bit keys and values, `pyvmem.attention.scales.FP8`."""

KERNELS: dict[str, _Kernel] = {
    "fa3": _Kernel(flash.why_not_fa3, flash.fa3, lambda device: Reads(tile=191, before=191)),
    "fa3-paged": _Kernel(flash.why_not_fa3_paged, flash.fa3_paged, _tiles_before),
    "fa2": _Kernel(flash.why_not_fa2, flash.fa2, _fa2_reads),
    "flashinfer": _Kernel(infer.why_not, infer.flashinfer, _tiles_before),
    "flex": _Kernel(_why_not_flex, flex.flex, _flex_reads),
    "sdpa": _Kernel(_why_not_sdpa, sdpa.sdpa, lambda device: EXACT),
}
# "auto" never picks FlashInfer: its first call compiles for a minute or more.
_PREFILL = {"cuda": ("fa3", "fa3-paged", "fa2", "flex", "sdpa"), "cpu": ("sdpa", "flex")}
_DECODE = {"cuda": ("fa3-paged", "fa2", "fa3", "flex", "sdpa"), "cpu": ("sdpa", "flex")}


def overread_rows(kernel: str, device: torch.device) -> int:
    """Returns the `KVCacheConfig.overread_rows` that a kernel in `KERNELS` needs on a device.

    To use the kernel for all batches, also set `KVCacheConfig.overread_decode`.
    """
    if kernel not in KERNELS:
        raise invalid(f"kernel must be one of {', '.join(KERNELS)}, not {kernel!r}", op="Attention")
    return KERNELS[kernel].reads(device).past


@dataclass(frozen=True)
class Choice:
    """The chosen kernels, and why the others were not chosen.

    Attributes:
        name: one of `KERNELS`, for prefills, chunked or not.
        why_not: for every kernel, why it cannot be used on this cache; "" if it can.
        decode: one of `KERNELS`, for batches with at most `PREFILL_TOKENS` new tokens per request.
    """

    name: str
    why_not: dict[str, str]
    decode: str

    def __str__(self) -> str:
        others = "; ".join(f"{name}: {why}" for name, why in self.why_not.items() if why)
        decode = "" if self.decode == self.name else f", decoding by {self.decode}"
        return f"attention by {self.name}{decode}" + (f" ({others})" if others else "")


def probe(cache: KVCache | Form, device: torch.device) -> dict[str, str]:
    """Maps each kernel to the reason it cannot be used on this cache or form; "" if it can."""
    form = _form_of(cache)
    return {name: _why_not(name, form, device) for name in KERNELS}


def choose(cache: KVCache | Form, device: torch.device, kernel: str = "auto") -> Choice:
    """Picks the named kernel, or the first usable ones for prefill and for decoding.

    A kernel that reads whole tiles is usable only for prefills, unless the cache also keeps the
    rows it over-reads mapped during decoding (`KVCacheConfig.overread_decode`).

    The choice is logged once per process (logger ``pyvmem.attention``).

    Args:
        cache: a cache whose layers all have the same form, or a form of layers.
        device: device of its tensors.
        kernel: "auto", or one of `KERNELS`.

    Raises:
        InvalidArgument: the kernel does not exist or cannot be used; the message says why.
    """
    check_name(kernel)
    form = _form_of(cache)
    found = probe(form, device)
    if kernel == "auto":
        prefill = [name for name in _PREFILL[device.type] if not found[name]]
        decode = [
            name
            for name in _DECODE[device.type]
            if not found[name] and not _why_not_decode(name, form, device)
        ]
        if not prefill or not decode:
            whys = "; ".join(f"{name}: {why}" for name, why in found.items() if why)
            raise invalid(f"no kernel reads these keys and values ({whys})", op="Attention")
        choice = Choice(prefill[0], found, decode[0])
    elif why := found[kernel] or _why_not_decode(kernel, form, device):
        raise invalid(f"kernel {kernel} cannot be used: {why}", op="Attention")
    else:
        choice = Choice(kernel, found, kernel)
    if str(choice) not in _said:
        _said.add(str(choice))
        _log.info("%s", choice)
    return choice


def _form_of(cache: KVCache | Form) -> Form:
    """Returns the form of a cache's first layer with keys and values."""
    if isinstance(cache, Form):
        return cache
    return next(form for form in forms_of(cache) if form is not None)


def check_name(kernel: str) -> None:
    """Raises InvalidArgument unless `kernel` is "auto" or the name of a kernel."""
    if kernel != "auto" and kernel not in KERNELS:
        raise invalid(
            f"kernel must be one of auto, {', '.join(KERNELS)}, not {kernel!r}", op="Attention"
        )


def _why_not(name: str, form: Form, device: torch.device) -> str:
    one = KERNELS[name]
    why = one.why_not(form, device)
    config, reads = form.keys.config, one.reads(device)
    need, have = reads.past, config.overread_rows
    if not why and have < need and not form.keys.safe_overread:
        why = f"it reads whole tiles and needs overread_rows of {need}; the cache has {have}"
    if not why and config.window and config.window_tile < reads.before:
        why = (
            f"it reads whole tiles before a window and needs window_tile of {reads.before}; the "
            f"cache has {config.window_tile}"
        )
    return why


def _why_not_decode(name: str, form: Form, device: torch.device) -> str:
    """Returns why a kernel that works for prefills cannot be used for decoding; "" if it can."""
    exact = not KERNELS[name].reads(device).past
    if exact or form.keys.config.overread_decode or form.keys.safe_overread:
        return ""
    return "it also reads whole tiles in decoding and needs overread_decode"
