# SPDX-License-Identifier: MIT
"""The configuration of a KV cache: the model's shape, the limits, and the policy."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import KW_ONLY, dataclass, fields
from typing import TYPE_CHECKING, Any

from pyvmem.kvcache.checks import bounded, invalid, real, switched
from pyvmem.models.hf_config import uniform_layers
from pyvmem.models.shapes import DTYPE_BYTES

if TYPE_CHECKING:
    import torch

__all__ = [
    "AHEAD_TOKENS",
    "LONGEST",
    "MOST_BYTES",
    "MOST_SLOTS",
    "PREFILL_TOKENS",
    "KVCacheConfig",
    "policy_of",
]

AHEAD_TOKENS = 8
"""The `KVCacheConfig.ahead_tokens` that engines and plugins use; at 20 ms per token, enough to hide
a driver call that stalls for 100 ms."""

PREFILL_TOKENS = 16
"""A step that adds more tokens than this to a request counts as a prefill or a chunk of a prefill;
any other step counts as decoding, including speculative decoding."""

MOST_SLOTS, LONGEST = 1 << 16, 1 << 30
"""Upper bounds for `KVCacheConfig.max_batch` and `KVCacheConfig.max_seq_len`."""

MOST_BYTES = 1 << 62
"""Upper bound for memory limits, in bytes."""

# Sanity limits far beyond any model, checked before any arithmetic or address reservation.
_BOUNDS = {
    "num_layers": (1, 1 << 14),
    "num_kv_heads": (1, 1 << 16),
    "head_dim": (1, 1 << 16),
    "tensors_per_layer": (1, 2),
    "window": (0, 1 << 30),
    "window_tile": (0, 1 << 16),
    "max_batch": (1, MOST_SLOTS),
    "max_seq_len": (1, LONGEST),
    "group_size": (1, 1 << 14),
    "page_size": (0, 1 << 30),
    "memory_limit": (0, MOST_BYTES),
    "memory_floor": (0, MOST_BYTES),
    "host_limit": (0, MOST_BYTES),
    "host_prefixes": (0, MOST_BYTES),
    "peer_limit": (0, MOST_BYTES),
    "max_mappings": (0, 1 << 40),
    "overread_rows": (0, 1 << 16),
    "eager_pages": (0, 1 << 30),
    "ahead_tokens": (0, 1 << 30),
    "reclaim_steps": (0, 1 << 30),
}

_REALS = {"low_watermark": 1, "growth_fraction": 1, "join_at": 1, "idle_seconds": 10**9}

_SWITCHES = (
    *("zero_fill", "deferred_reclaim", "keep_mapped", "overread_decode", "sparse"),
    *("packed_slots", "idle_prefixes", "state"),
)


@dataclass(frozen=True, repr=False)
class KVCacheConfig:
    """Shape, limits and policy of a `KVCache`. Validated on construction.

    Most engines set the model's shape, `max_batch`, `max_seq_len` and perhaps `memory_limit`. The
    other fields are keyword-only. They describe the model (`tensors_per_layer` to `state`),
    accommodate kernels that read past the mapped rows (`overread_rows` to `packed_slots`), set
    further limits (`memory_floor` to `max_mappings`), and control when memory is mapped, kept and
    returned (the rest). The `repr` shows only fields that differ from their defaults.

    Attributes:
        num_layers: layers of the model that have keys and values.
        num_kv_heads: number of key/value heads per layer (on this device).
        head_dim: number of elements per head.
        dtype: element type, as a name (see `DTYPE_BYTES`) or a `torch.dtype`.
        max_batch: number of slots, which caps the number of concurrent requests.
        max_seq_len: maximum number of tokens in a slot; address space is reserved for all of them.
        page_size: page size in bytes, a power of two; 0: the context's granule.
        group_size: number of layers that share one K and one V tensor, a divisor of `num_layers`.
            1: each layer has its own tensors; `num_layers`: vAttention's megacache. A row of a
            tensor is ``group_size * num_kv_heads * head_dim`` elements. If layers share a tensor in
            a cache of more than 8 GiB, decode attention with 64 KB page table entries takes 1.1 to
            9.4 times as long (benchmarks/kernels, on a full card). Attention over whole 2 MiB
            blocks does not slow down if the context has `pyvmem.Caps.LARGE_ENTRIES`.
            `pyvmem.layouts.advise` takes this into account.
        memory_limit: maximum physical memory of the cache, in bytes, rounded down to pages. 0: 90%
            of the GPU's free memory at creation (on the host, all available memory), but no more
            than the `mem_limit` of a context passed in.
        tensors_per_layer: 2: keys and values; 1: a single tensor, such as MLA's latent (one head
            with the latent and the rotary part), which `KVCache.k` returns.
        window: number of tokens that every layer attends to, including the current token; 0: all.
            Pages of rows before the window are unmapped while a request runs, and no kernel may
            read them. A `step` that grows a request assumes that all earlier work on its rows was
            launched on the step's stream. The window that ends at a request's last full sharing
            unit (`KVCache.sharing_unit`) also stays mapped, so that its rows can be recorded as a
            prefix.
        window_tile: number of rows before the window that stay mapped. Must cover the rows
            that a kernel reads there (it reads whole tiles) and those that an engine may truncate.
            `step` does not join (`KVCache.promote`) the pages of the last `window_tile` rows.
        state: the layers keep one row per request instead of one per token. The row is mapped from
            the first token on, and every token updates it. For linear attention, state-space models
            and convolutions. Requests are still measured in tokens. Forks copy the state; it cannot
            be rolled back, and recorded prefixes do not include it (`KVCache.match`).
        overread_rows: number of rows to map past a request's length because a kernel may read them:
            191 for FlashAttention-3's contiguous call, 127 for FlexAttention on a GPU, 0 for all
            other kernels (`pyvmem.attention.overread_rows`). A step that adds more than
            `PREFILL_TOKENS` tokens to a request maps them, zeroed or with the request's own
            contents; the request then grows into them. They count as waste in every report.
            `KVCache.truncate` to the current length releases them.
        overread_decode: map `overread_rows` past the length on every step, for a kernel that also
            reads whole tiles when decoding.
        sparse: reads of unmapped rows return zeros, if the back end supports that
            (`pyvmem.Caps.SPARSE`). Writes there fault (host) or are dropped (GPU). Only with
            `pyvmem.Caps.SPARSE_ATOMIC` may a kernel read past the mapped rows while memory grows
            (`KVCache.safe_overread`): otherwise a page is briefly invalid while it is being mapped,
            and a read of it kills the process's CUDA context.
        packed_slots: place slots without gaps, so that every tensor is contiguous (``stride(0) ==
            max_seq_len * stride(1)``); a slot's size must then be a multiple of the page size.
            Otherwise slots are aligned to 2 MiB if that costs little address space, so that a run
            of small pages can become one large mapping.
        memory_floor: bytes that the other caches in the `Budget` must leave for this cache.
        host_limit: maximum host memory that `KVCache.move` uses, in bytes, for all layers together;
            0: limited only by the machine.
        peer_limit: the same for memory on all peer devices together.
        host_prefixes: maximum host memory for evicted prefixes, in bytes, for all layers together;
            0: their rows are lost. The least recently used prefixes make room for others, and
            `KVCache.alloc_prefix` copies prefixes back. The memory is allocated when needed,
            page-locked if the cache is on a GPU, and kept until the cache is closed. Requires
            numpy; cannot be used with a window, a state or multiple ranks.
        max_mappings: limit on the mappings of the context that the cache opens (`Context`); 0: the
            context's default. Set it if several caches run on one machine, since their defaults may
            add up to more than the driver allows.
        zero_fill: zero a page before another request gets it.
        deferred_reclaim: a freed slot keeps its pages for the next request; otherwise they are
            unmapped in the background as soon as the slot's last GPU work is complete.
        keep_mapped: prefixes that `KVCache.free_reqid` records stay mapped in the freed slot,
            read-only, until they are evicted or slots become scarce: the next turn of a
            conversation gets that slot without a driver call.
        reclaim_steps: unmap the pages of slots that have been free for this many steps; 0: pages
            are never unmapped because of their age.
        eager_pages: keep one free slot with this many pages per tensor mapped, prepared in the
            background while memory is ample and nothing else is being mapped.
        low_watermark: a fraction from 0 to 1. While less than this fraction of the memory is free,
            pages of free slots are unmapped in the background, least recently used first.
        growth_fraction: while memory is ample, a request that needs a page gets several at once, up
            to this fraction of the pages it has, rounded to a power of two and at most 2 MiB per
            tensor. This saves driver calls and mappings. Pages beyond what it needs are mapped but
            unowned (`CacheStats`: cached); the request gets them next, and they are unmapped when
            memory is short. If mappings run out before memory (`ContextInfo.max_mappings`), runs
            get longer automatically. 0: one page at a time, regardless of the limit.
        ahead_tokens: for each request in a step that has pages for fewer than this many more tokens
            (at most a page's worth), `KVCache.step` starts mapping the next pages in the
            background. A later step then need not wait for the driver call, even if the driver
            stalls. This uses only free memory above the watermark, and does not reclaim memory or
            report failures. The pages are unowned (`CacheStats.ahead_pages`) until a step needs
            them. Ignored on several ranks. 0: a request grows only when `KVCache.step` or
            `KVCache.step_async` needs it to.
        join_at: if more than this fraction of the context's mappings is used, a `step` remaps runs
            of pages that were mapped separately as one mapping each, if the back end can
            (`pyvmem.Caps.JOIN`). It waits for all work on the device first, and other threads must
            not launch work on the cache until it returns. 1: join only in a `step` that would
            otherwise return -1; 0: never join.
        idle_seconds: after this many seconds without a call that allocates, frees or steps a
            request, unmap unowned pages and return the pool's memory to the device; 0: never. None:
            0.5 if the cache owns its context; never in a shared context, whose other users may be
            about to use its free memory, and never on several ranks, which have no common clock.
        idle_prefixes: when idle, also evict recorded prefixes.
        idle_compact: when idle, also compact live pages, so that the memory between them returns to
            the device, slab by slab: an incoming call waits for at most one slab. None: only while
            no request is active, or if all lengths in the last `step` were 0, so that nothing can
            be reading the pages that move. (A request that was in the last step may have work
            queued on the GPU, or about to be launched, for as long as its prefill takes.) True:
            regardless of the last `step`; the engine promises to launch no work on the cache from
            `idle_seconds` after its last call until its next `step`. False: never. Only in a
            context that the cache owns and in which nothing else has reservations.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: str | torch.dtype = "float16"
    max_batch: int = 256
    max_seq_len: int = 4096
    page_size: int = 0
    group_size: int = 1
    memory_limit: int = 0
    _: KW_ONLY
    tensors_per_layer: int = 2
    window: int = 0
    window_tile: int = 192
    state: bool = False
    overread_rows: int = 0
    overread_decode: bool = False
    sparse: bool = False
    packed_slots: bool = False
    memory_floor: int = 0
    host_limit: int = 0
    peer_limit: int = 0
    host_prefixes: int = 0
    max_mappings: int = 0
    zero_fill: bool = True
    deferred_reclaim: bool = True
    keep_mapped: bool = True
    reclaim_steps: int = 0
    eager_pages: int = 0
    low_watermark: float = 0.1
    growth_fraction: float = 1 / 16
    ahead_tokens: int = 0
    join_at: float = 0.75
    idle_seconds: float | None = None
    idle_prefixes: bool = False
    idle_compact: bool | None = None

    def __post_init__(self) -> None:
        for name, (low, high) in _BOUNDS.items():
            object.__setattr__(self, name, bounded(name, getattr(self, name), low, high))
        dtype = str(self.dtype).removeprefix("torch.")
        if dtype not in DTYPE_BYTES:
            raise invalid(f"dtype {dtype!r} is not one of {', '.join(DTYPE_BYTES)}")
        object.__setattr__(self, "dtype", dtype)
        if self.num_layers % self.group_size:
            raise invalid(
                f"group_size {self.group_size} does not divide num_layers {self.num_layers}",
                limit=self.num_layers,
            )
        for name in _SWITCHES:
            object.__setattr__(self, name, switched(name, getattr(self, name)))
        if self.idle_compact is not None:
            object.__setattr__(self, "idle_compact", switched("idle_compact", self.idle_compact))
        if self.page_size & (self.page_size - 1):
            raise invalid(f"page_size {self.page_size} is not a power of two", size=self.page_size)
        if self.state and (self.window or self.tensors_per_layer != 1):
            raise invalid(
                "state requires window=0 and tensors_per_layer=1, not "
                f"window={self.window} and tensors_per_layer={self.tensors_per_layer}"
            )
        if self.host_prefixes and (self.window or self.state):
            raise invalid(
                f"host_prefixes {self.host_prefixes} with "
                + (f"a window of {self.window}" if self.window else "a state")
                + ": only prefixes of layers that keep all rows can be kept in host memory",
                size=self.host_prefixes,
            )
        if 0 < self.memory_limit < self.memory_floor:
            raise invalid(
                f"memory_floor {self.memory_floor} is more than memory_limit {self.memory_limit}",
                size=self.memory_floor,
                limit=self.memory_limit,
            )
        for name, high in _REALS.items():
            value = getattr(self, name)
            if name != "idle_seconds" or value is not None:
                object.__setattr__(self, name, real(name, value, high))

    def __repr__(self) -> str:
        pairs = [(one.name, getattr(self, one.name), one.default) for one in fields(self)]
        shown = [f"{name}={value!r}" for name, value, default in pairs if value != default]
        return f"KVCacheConfig({', '.join(shown)})"

    @property
    def itemsize(self) -> int:
        """Size of one element in bytes."""
        return DTYPE_BYTES[str(self.dtype)]

    @property
    def row_bytes(self) -> int:
        """Size in bytes of a token's row in one tensor, across all layers that share the tensor."""
        return self.group_size * self.num_kv_heads * self.head_dim * self.itemsize

    @classmethod
    def from_hf(cls, config: Any, **overrides: Any) -> KVCacheConfig:
        """Returns the configuration for a transformers model whose layers all have the same shape.

        If every layer has a sliding window, `window` is the model's; if only some do, all rows
        are kept (`layer_shapes` distinguishes the layers, for `LayeredCache`). An MLA model gets
        one tensor per layer, for the latent. (transformers' own code stores keys and values
        instead: for that, pass `num_kv_heads`, `head_dim` and `tensors_per_layer`.)

        Args:
            config: a transformers ``PreTrainedConfig`` (or any object with its attributes); for a
                multi-modal model, the part that ``get_text_config`` returns.
            **overrides: fields of this class that override the model's own values.

        Raises:
            InvalidArgument: an attribute is missing and was not overridden, or a value is invalid.
        """
        return cls(**uniform_layers(config, overrides), **overrides)


_OF_THE_LAYERS = ("num_layers", "num_kv_heads", "head_dim", "tensors_per_layer", "window", "state")


def policy_of(options: Mapping[str, Any], given: Collection[str] = ()) -> KVCacheConfig:
    """Checks a policy and returns a configuration that holds it, with placeholder layers.

    Args:
        options: fields of `KVCacheConfig`.
        given: fields that `options` must not contain because the caller sets them elsewhere.

    Raises:
        InvalidArgument: an unknown field, a field that the layers or the caller set, or a value out
            of range.
    """
    known = {one.name for one in fields(KVCacheConfig)} - {*_OF_THE_LAYERS, *given}
    for name in options:
        if name in _OF_THE_LAYERS:
            raise invalid(f"{name} is set by the layers")
        if name not in known:
            raise invalid(f"{name!r} is not an option; options: {', '.join(sorted(known))}")
    bounded("group_size", options.get("group_size", 1), *_BOUNDS["group_size"])
    return KVCacheConfig(1, 1, 1, **{**options, "group_size": 1})
