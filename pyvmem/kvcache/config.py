# SPDX-License-Identifier: MIT
"""What a KV cache is made from: the model's shape, the limits, and the policy."""

from __future__ import annotations

import contextlib
import errno
import math
import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, NamedTuple

from pyvmem.errors import InvalidArgument
from pyvmem.expect import shown
from pyvmem.units import parse_bytes

if TYPE_CHECKING:
    import torch

__all__ = [
    "AHEAD_TOKENS",
    "DTYPE_BYTES",
    "LONGEST",
    "MOST_BYTES",
    "MOST_SLOTS",
    "PREFILL_TOKENS",
    "EmptyShape",
    "KVCacheConfig",
    "LayerClass",
    "LayerShape",
    "Place",
    "Shape",
    "StateShape",
    "bounded",
    "classes_of",
    "dtype_of",
    "invalid",
    "layer_shapes",
    "longest_of",
    "policy_of",
    "real",
    "switched",
    "text_config",
]

AHEAD_TOKENS = 8
"""The `KVCacheConfig.ahead_tokens` that engines and plugs use: at 20 ms a token, long enough to
hide a driver call that stalls for 100 ms."""

PREFILL_TOKENS = 16
"""A step that adds more tokens than this to a request is a prefill, or a chunk of one; others are
decoding (speculative decoding included)."""

DTYPE_BYTES = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int8": 1,
    "uint8": 1,
}

MOST_SLOTS, LONGEST = 1 << 16, 1 << 30
"""The most that `KVCacheConfig.max_batch` and `KVCacheConfig.max_seq_len` can be."""

MOST_BYTES = 1 << 62
"""The most that a limit of memory can be."""

# Far above any model: they catch nonsense before any arithmetic or address reservation.
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
    "large_page_size": (0, 1 << 30),
    "promote_tokens": (0, 1 << 30),
    "memory_limit": (0, MOST_BYTES),
    "memory_floor": (0, MOST_BYTES),
    "host_limit": (0, MOST_BYTES),
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


def invalid(message: str, *, limit: int = 0, size: int = 0) -> InvalidArgument:
    """An `InvalidArgument` raised by the cache itself, in the same form as libvmem's."""
    return InvalidArgument(message, errno=errno.EINVAL, op="KVCache", bytes=size, limit=limit)


def _number(value: Any) -> str:
    """Names the number to write for a string such as "64K"."""
    with contextlib.suppress(ValueError):
        return f": write {parse_bytes(value)}" if isinstance(value, str) else ""
    return ""


def bounded(name: str, value: Any, low: int, high: int) -> int:
    """A whole number within its bounds; raises InvalidArgument otherwise."""
    try:
        number = operator.index(value)
    except TypeError:
        what = shown(value) + _number(value)
        raise invalid(f"{name} must be a whole number, not {what}") from None
    if not low <= number <= high:
        raise invalid(
            f"{name} is {shown(number)}; it must lie between {low} and {high}", limit=high
        )
    return number


def real(name: str, value: Any, high: int, *, positive: bool = False) -> float:
    """A number from 0 to a bound, or with `positive` above 0; raises InvalidArgument otherwise.

    A string that spells one is none.
    """
    try:
        if isinstance(value, (str, bytes, bytearray)):
            raise TypeError
        number = float(value)
    except OverflowError:
        number = math.inf
    except (TypeError, ValueError, RuntimeError):  # the last is torch's, for several in a tensor
        raise invalid(f"{name} must be a number, not {shown(value)}") from None
    if not 0.0 <= number <= high or (positive and not number):  # also refuses NaN
        bounds = "be above 0 and at most" if positive else "lie between 0 and"
        what = shown(value) if math.isinf(number) else number
        raise invalid(f"{name} is {what}; it must {bounds} {high}", limit=high)
    return number


def switched(name: str, value: Any) -> bool:
    """True or False; raises InvalidArgument otherwise: "off" would count as on."""
    if not (isinstance(value, int) and value in (0, 1)):
        raise invalid(f"{name} must be True or False, not {shown(value)}")
    return bool(value)


@dataclass(frozen=True)
class KVCacheConfig:
    """Shape, limits and policy of a `KVCache`. Checked on construction.

    Attributes:
        num_layers: layers of the model that have keys and values.
        num_kv_heads: key/value heads of a layer (on this device).
        head_dim: elements of one head.
        tensors_per_layer: 2: keys and values; 1: one tensor, such as MLA's latent (one head of the
            latent and the rotary part together), which `KVCache.k` returns.
        window: tokens that every layer attends to, the present one included; 0: all. Pages of rows
            before it are unmapped while a request runs, and no kernel may read them. By growing a
            request, a `step` states that the work on its rows so far was launched on the step's
            stream. The window before the end of a request's last whole sharing unit
            (`KVCache.sharing_unit`) stays mapped as well, so that its rows can be recorded as a
            prefix.
        window_tile: rows before the window that stay mapped: the most that a kernel reads there,
            since it reads whole tiles, and the most tokens that an engine may take back. Background
            promotion (`promote_tokens`) leaves this many of the last rows alone.
        dtype: name of the elements' type (see `DTYPE_BYTES`), or a `torch.dtype`.
        max_batch: slots, the most requests at a time.
        max_seq_len: tokens that a slot can hold; addresses for all of them are reserved.
        page_size: bytes of a page, a power of two; 0 takes the context's granule. Pages below
            2 MiB slow attention on a full card, see `group_size`.
        large_page_size: size in bytes of the pages that back whole aligned parts of a growing
            request, and that `KVCache.promote` makes out of small ones; the rest uses `page_size`.
            A power of two above `page_size`, such as 2 MiB: fewer driver calls, and one GPU
            page-table entry each (on ``uvm`` not with `sparse`). Where none is available, small
            pages take its place. 0: small pages only. A large page is shared and given back as a
            whole.
        promote_tokens: requests with more tokens than this get large pages for their full parts in
            the background; 0: only when `KVCache.promote` is called.
        group_size: layers that share one K and one V tensor, a divisor of `num_layers`. 1 is a
            tensor per layer; `num_layers` is vAttention's megacache. A row of a tensor is
            ``group_size * num_kv_heads * head_dim`` elements. In a cache of more than 8 GiB, layers
            that share a tensor need pages of 2 MiB: with smaller ones decode attention takes 1.1 to
            9.4 times as long (benchmarks/kernels, on a full card); `pyvmem.layouts.advise` weighs
            it.
        memory_limit: the most physical memory behind the cache, in bytes, rounded down to pages. 0:
            0.9 of what is free on the GPU when the cache is made; on host, all that is available;
            no more than a given context's `mem_limit`.
        memory_floor: bytes that the other caches of its `Budget` must leave to it.
        host_limit: the most host memory that `KVCache.move` uses, in bytes, for all layers
            together; 0: no limit but the machine's.
        peer_limit: the same for all peer devices together.
        zero_fill: zero pages before they go to another request.
        deferred_reclaim: a freed slot keeps its pages for the next request; otherwise they are
            unmapped in the background as soon as the slot's last GPU work is over.
        keep_mapped: what `KVCache.free_reqid` records stays mapped in the freed slot, read-only,
            while slots are not scarce and until it is evicted: the next turn of a conversation
            takes that slot without a driver call.
        reclaim_steps: unmap pages of slots that have been free for this many steps; 0: never by
            age.
        eager_pages: keep one free slot with this many pages per tensor mapped, prepared in the
            background while memory is ample and nothing else is being mapped.
        low_watermark: with less than this fraction of the memory free, pages of free slots are
            unmapped in the background, least recently used first; 0 to 1.
        overread_rows: rows to map past a request's length, since a kernel may read them: 191 for
            FlashAttention-3's contiguous call, 127 for FlexAttention on a GPU, 0 for all others
            (`pyvmem.attention.overread_rows`). A step that adds more than `PREFILL_TOKENS` tokens
            to a request maps them, zeroed or with the request's own contents; the request then
            grows into them. They count as waste in every report. `KVCache.truncate` to the present
            length releases them.
        overread_decode: keep `overread_rows` ahead of the length in every step, for a kernel that
            reads whole tiles in decoding as well.
        sparse: reads of unmapped rows return zeros, where the back end can do that
            (`pyvmem.Caps.SPARSE`). Writes there fault (host) or are dropped (GPU). A kernel may
            read past the mapped rows while memory grows only with `pyvmem.Caps.SPARSE_ATOMIC`, and
            with large pages on ``uvm`` alone (`KVCache.safe_overread`); elsewhere a page is invalid
            for a moment while it is being mapped, and a read of it kills the process's context.
        packed_slots: place slots without gaps, so that every tensor is contiguous
            (``stride(0) == max_seq_len * stride(1)``); a full slot must then be whole pages.
            Otherwise slots are aligned to 2 MiB where that costs few addresses, so that a run of
            small pages can become one big mapping.
        growth_fraction: with ample memory, a request that lacks a page gets up to this fraction of
            what it has, rounded to a power of two of pages and at most 2 MiB per tensor: fewer
            driver calls and mappings. Pages beyond its need are mapped but unowned (`CacheStats`:
            cached); the request gets them next, and they are unmapped when memory is short. Where
            mappings run out before memory (`ContextInfo.max_mappings`), runs get longer
            automatically. 0: page by page, whatever the limit.
        ahead_tokens: `KVCache.step` starts mapping, in the background, the next pages of each
            request that it names whose pages end within this many tokens (at most a page's worth).
            No later step then waits for a driver call, stalled or not, that has finished by then.
            It uses only free memory above the watermark: nothing is reclaimed for it, and its
            failure is not reported. The pages are unowned (`CacheStats.ahead_pages`) until a step
            needs them. Not on several ranks. 0: a request grows only when `KVCache.step` or
            `KVCache.step_async` needs it to.
        join_at: with more than this fraction of the context's mappings used, a `step` remaps in one
            piece what grew in pieces, where the back end can (`pyvmem.Caps.JOIN`). It waits
            for all work on the device first, and other threads must not launch work on the cache
            meanwhile. 1: only a `step` that would otherwise return -1; 0: never.
        max_mappings: limit on mappings of the context that the cache opens (`Context`); 0: its
            default. For several caches on one machine, whose defaults may add up to more than the
            driver allows.
        idle_seconds: after this long without a call that allocates, frees or steps a request, unmap
            unowned pages and return the pool's memory to the device; 0: never. None: 0.5 where the
            cache owns its context; never in a shared context, whose other users may be about to use
            its free memory, and never on several ranks, which have no common clock.
        idle_prefixes: evict recorded prefixes then as well.
        state: the layers keep one row per request instead of one per token: the whole row is there
            from the first token on, and every token updates it. For linear attention, state spaces
            and convolutions. What requests hold is still counted in tokens. Forks copy the state;
            it cannot be rolled back, and recorded prefixes do not include it (`KVCache.match`).
        idle_compact: compact live pages then, so that the memory between them returns to the
            device, slab by slab: an incoming call waits for one slab at most. None: only while no
            request is active, or when the last `step` named none (all zeros), so that nothing can
            be reading what moves. A request that was named may have work queued on the GPU, or
            about to be launched, for as long as its prefill takes. True: whatever the last `step`
            named; the engine promises to launch no work on the cache from `idle_seconds` after its
            last call until its next `step`. False: never. Only in a context that the cache owns,
            where nothing else has reservations.
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
    memory_floor: int = 0
    zero_fill: bool = True
    deferred_reclaim: bool = True
    keep_mapped: bool = True
    reclaim_steps: int = 0
    eager_pages: int = 0
    low_watermark: float = 0.1
    overread_rows: int = 0
    overread_decode: bool = False
    sparse: bool = False
    packed_slots: bool = False
    idle_seconds: float | None = None
    idle_prefixes: bool = False
    idle_compact: bool | None = None
    tensors_per_layer: int = 2
    window: int = 0
    window_tile: int = 192
    large_page_size: int = 0
    promote_tokens: int = 0
    host_limit: int = 0
    peer_limit: int = 0
    growth_fraction: float = 1 / 16
    join_at: float = 0.75
    max_mappings: int = 0
    state: bool = False
    ahead_tokens: int = 0

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
        for name in ("page_size", "large_page_size"):
            size = getattr(self, name)
            if size & (size - 1):
                raise invalid(f"{name} {size} is not a power of two", size=size)
        if self.promote_tokens and not self.large_page_size:
            raise invalid(f"promote_tokens {self.promote_tokens} without a large_page_size")
        if self.state and (self.window or self.tensors_per_layer != 1):
            raise invalid(
                f"state with a window of {self.window} and {self.tensors_per_layer} tensors a "
                "layer: a state has no window, and each is one tensor"
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

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return DTYPE_BYTES[str(self.dtype)]

    @property
    def row_bytes(self) -> int:
        """One token in one tensor, of all layers that share it."""
        return self.group_size * self.num_kv_heads * self.head_dim * self.itemsize

    @classmethod
    def from_hf(cls, config: Any, **overrides: Any) -> KVCacheConfig:
        """The configuration for a transformers model whose layers are all alike.

        Where every layer has a sliding window, `window` is the model's; for a model with both kinds
        all rows are kept (`layer_shapes` tells its layers apart, for `LayeredCache`). MLA's latent
        is one tensor per layer; transformers itself stores keys and values: for those, pass the
        three fields.

        Args:
            config: a transformers ``PreTrainedConfig`` (or anything with its attributes); for a
                multi-modal model, the part that ``get_text_config`` returns.
            **overrides: any field of this class, taken instead of the model's own value.

        Raises:
            InvalidArgument: an attribute is missing and was not overridden, or a value is refused.
        """
        text = text_config(config)
        values = dict(overrides)

        def default(field: str, value: Callable[[], Any]) -> None:
            if field not in values:
                values[field] = value()

        kinds = set(_attribute(text, "layer_types") or ()) - {*_FULL, _CHUNKED, _SLIDING}
        if kinds and "num_layers" not in values:
            raise invalid(
                f"{type(config).__name__} has layers of kind {', '.join(sorted(kinds))}, which "
                "keep something else; layer_shapes tells its layers apart, for LayeredCache"
            )
        rank = _attribute(text, "kv_lora_rank")
        if rank and not {"num_kv_heads", "head_dim", "tensors_per_layer"} & set(values):
            values.update(num_kv_heads=1, head_dim=_latent(text), tensors_per_layer=1)
        default("window", lambda: _window(text))
        default("num_layers", lambda: _num_layers(text))
        default("num_kv_heads", lambda: _num_kv_heads(text))
        default("head_dim", lambda: _head_dim(text))
        default("dtype", lambda: dtype_of(config))
        default("max_seq_len", lambda: longest_of(text))
        return cls(**values)


_OF_THE_LAYERS = (
    *("num_layers", "num_kv_heads", "head_dim", "tensors_per_layer", "window", "state"),
)


def policy_of(options: Mapping[str, Any], given: Collection[str] = ()) -> KVCacheConfig:
    """The policy alone, checked: for layers that differ, or are not known yet.

    Args:
        options: fields of `KVCacheConfig`.
        given: those that come from elsewhere, and are no option.

    Raises:
        InvalidArgument: no field, one that the layers or the caller give, or a value out of range.
    """
    for name in _OF_THE_LAYERS:
        if name in options:
            raise invalid(f"{name} is given by the layers")
    known = {one.name for one in fields(KVCacheConfig)} - {*_OF_THE_LAYERS, *given}
    for name in options:
        if name not in known:
            raise invalid(f"{name!r} is none of the options {', '.join(sorted(known))}")
    bounded("group_size", options.get("group_size", 1), *_BOUNDS["group_size"])
    return KVCacheConfig(1, 1, 1, **{**options, "group_size": 1})


def text_config(config: Any) -> Any:
    """The language model's part of a transformers configuration.

    Raises InvalidArgument where there are several.
    """
    get_text_config = getattr(config, "get_text_config", None)
    try:
        return get_text_config() if callable(get_text_config) else config
    except ValueError as error:
        raise invalid(f"{type(config).__name__}: {error}") from None


def _attribute(text: Any, name: str) -> Any:
    """None where a configuration does not have it.

    Raises InvalidArgument where its layers differ in it, which transformers reports as an error.
    """
    try:
        return getattr(text, name, None)
    except RuntimeError:
        raise invalid(
            f"{type(text).__name__}: its layers differ in {name}; layer_shapes tells them apart"
        ) from None
    except ValueError as error:
        raise invalid(f"{type(text).__name__}: {error}") from None


def _first(text: Any, field: str, *names: str) -> Any:
    """The first of these attributes that is set."""
    for name in names:
        value = _attribute(text, name)
        if value is not None:
            return value
    raise invalid(f"{type(text).__name__} has no {' or '.join(names)}; give {field} yourself")


def _num_layers(text: Any) -> Any:
    return _first(text, "num_layers", "num_hidden_layers", "n_layer")


def _num_kv_heads(text: Any) -> Any:
    """Over all ranks. Falcon has a flag that says there is one."""
    own = _attribute(text, "num_key_value_heads")
    if own is None and _attribute(text, "multi_query"):
        return _attribute(text, "num_kv_heads") if text.new_decoder_architecture else 1
    return _first(text, "num_kv_heads", "num_key_value_heads", "num_attention_heads", "n_head")


def _head_dim(text: Any) -> Any:
    own = _attribute(text, "head_dim")
    if own is not None:
        return own
    hidden = _first(text, "head_dim", "hidden_size", "n_embd")
    heads = _first(text, "head_dim", "num_attention_heads", "n_head")
    if heads < 1 or hidden % heads:
        raise invalid(f"hidden size {hidden} is not a multiple of {heads} heads; give head_dim")
    return hidden // heads


def _latent(text: Any) -> Any:
    """Elements of MLA's latent with its rotary part."""
    return text.kv_lora_rank + _first(text, "head_dim", "qk_rope_head_dim")


def dtype_of(config: Any) -> Any:
    """The type of a model's weights, and so of its keys and values.

    Raises InvalidArgument where neither the text part nor the whole configuration has it.
    """
    text = text_config(config)
    for one in (text, config):
        for name in ("dtype", "torch_dtype"):
            value = _attribute(one, name)
            if value is not None:
                return value
    raise invalid(f"{type(text).__name__} has no dtype or torch_dtype; give dtype yourself")


def longest_of(config: Any) -> Any:
    """Tokens of the longest sequence that a model was made for."""
    return _first(
        text_config(config),
        "max_seq_len",
        "max_position_embeddings",
        "n_positions",
        "model_max_length",
    )


def _kinds(text: Any) -> Any:
    """The kind of every layer; None: all are alike. RecurrentGemma has a name of its own for it."""
    return _attribute(text, "layer_types") or _attribute(text, "layers_block_type")


def _window(text: Any) -> int:
    """The window that every layer has; 0 where one attends to everything."""
    kinds = _kinds(text)
    if kinds is not None and set(kinds) != {_SLIDING}:
        return 0
    if getattr(text, "use_sliding_window", True) is False:
        return 0
    return _attribute(text, "sliding_window") or 0


@dataclass(frozen=True)
class LayerShape:
    """What one layer keeps for a token. Checked on construction.

    Attributes:
        num_kv_heads: key/value heads of the layer (on this device).
        head_dim: elements of a key's head. MLA: those of the latent with its rotary part, as one
            head.
        v_head_dim: elements of a value's head; None: as `head_dim`; 0: no values (MLA).
        window: tokens that the layer attends to, the present one included; 0: all.
    """

    num_kv_heads: int
    head_dim: int
    v_head_dim: int | None = None
    window: int = 0

    def __post_init__(self) -> None:
        if self.v_head_dim is None:
            object.__setattr__(self, "v_head_dim", self.head_dim)
        for name, low, high in (
            ("num_kv_heads", 1, 1 << 16),
            ("head_dim", 1, 1 << 16),
            ("v_head_dim", 0, 1 << 16),
            ("window", 0, 1 << 30),
        ):
            object.__setattr__(self, name, bounded(name, getattr(self, name), low, high))


@dataclass(frozen=True)
class StateShape:
    """What one layer keeps for a request instead of rows for its tokens. Checked on construction.

    Linear attention (Qwen3-Next), state spaces (Jamba, Mamba-2) and short convolutions (LFM2), on
    this device.

    Attributes:
        conv: channels and tokens of the convolution's input; (): none.
        recurrent: shape of the state, always float32, since it accumulates over all tokens; ():
            none.
        dtype: of `conv`; "": the cache's.
    """

    conv: tuple[int, ...] = ()
    recurrent: tuple[int, ...] = ()
    dtype: str = ""

    def __post_init__(self) -> None:
        for name in ("conv", "recurrent"):
            if not isinstance(getattr(self, name), Sequence):
                raise invalid(f"{name} is {getattr(self, name)!r:.80}; it must be a tuple of sizes")
        if not self.conv and not self.recurrent:
            raise invalid("a StateShape needs a conv or a recurrent state")
        if self.dtype not in ("", *DTYPE_BYTES):
            raise invalid(f"dtype {self.dtype!r} is not one of {', '.join(DTYPE_BYTES)}")
        for name in ("conv", "recurrent"):
            sizes = tuple(getattr(self, name))
            if len(sizes) == 1:
                raise invalid(f"{name} is {sizes}; it must have two sizes or more")
            sizes = tuple(bounded(name, size, 1, 1 << 16) for size in sizes)
            bounded(f"elements of a {name} channel", math.prod(sizes[1:]), 1, 1 << 16)
            object.__setattr__(self, name, sizes)

    @property
    def states(self) -> tuple[tuple[int, ...], ...]:
        """The shapes of its tensors."""
        return tuple(one for one in (self.conv, self.recurrent) if one)


@dataclass(frozen=True)
class EmptyShape:
    """A layer that keeps nothing.

    One without attention (Nemotron-H), or one that attends to another layer's keys and values (the
    last ones of Gemma 3n).
    """


Shape = LayerShape | StateShape | EmptyShape
"""What one layer keeps."""


class LayerClass(NamedTuple):
    """Tensors with the same row size and window: what one `KVCache` holds."""

    num_kv_heads: int
    head_dim: int
    tensors_per_layer: int
    window: int
    state: bool = False
    dtype: str = ""

    def fields(self) -> dict[str, Any]:
        """`KVCacheConfig` fields except the number of layers; "dtype" where it has its own."""
        fields = self._asdict()
        return fields if self.dtype else {k: v for k, v in fields.items() if k != "dtype"}


class Place(NamedTuple):
    """Where a layer's keys or values lie: the class, the layer's number there, K (0) or V (1).

    For a `StateShape`, the first of the two places is that of its first state.
    """

    part: int
    member: int
    which: int


def classes_of(
    layers: Sequence[Shape],
) -> tuple[dict[LayerClass, int], list[tuple[Place, Place | None] | None]]:
    """Sorts layers into classes.

    Keys and values of the same size share a class; otherwise each gets its own. Classes with a
    state come after all others.

    Returns:
        Every class with the number of its layers, and for every layer where its keys and its values
        lie (None: it has none), or its first and its second state; None: it keeps nothing.
    """
    counts: dict[LayerClass, int] = {}
    order: dict[LayerClass, int] = {}

    def put(*fields: Any) -> tuple[int, int]:
        key = LayerClass(*fields)
        member = counts.get(key, 0)
        counts[key] = member + 1
        return order.setdefault(key, len(order)), member

    places: dict[int, tuple[Place, Place | None] | None] = {}
    # Rows first: a cache's first group represents it.
    for layer, shape in sorted(enumerate(layers), key=lambda one: isinstance(one[1], StateShape)):
        if isinstance(shape, EmptyShape):
            places[layer] = None
            continue
        if isinstance(shape, StateShape):
            found = [
                Place(*put(sizes[0], math.prod(sizes[1:]), 1, 0, True, dtype), 0)
                for sizes, dtype in ((shape.conv, shape.dtype), (shape.recurrent, "float32"))
                if sizes
            ]
            places[layer] = (found[0], found[1] if len(found) > 1 else None)
            continue
        if not isinstance(shape, LayerShape):
            raise invalid(
                f"layer {layer} is {shape!r:.80}; it must be a LayerShape, StateShape or EmptyShape"
            )
        heads, dim, values, window = (
            shape.num_kv_heads,
            shape.head_dim,
            shape.v_head_dim,
            shape.window,
        )
        if values == dim:
            both = put(heads, dim, 2, window)
            places[layer] = (Place(*both, 0), Place(*both, 1))
            continue
        keys = Place(*put(heads, dim, 1, window), 0)
        places[layer] = (keys, Place(*put(heads, values, 1, window), 0) if values else None)
    return counts, [places[layer] for layer in range(len(layers))]


_FULL = ("full_attention", "attention")
_SLIDING = "sliding_attention"
_CHUNKED = "chunked_attention"
_STATE = ("linear_attention", "mamba", "conv")
_EMPTY = ("moe", "mlp")


def layer_shapes(config: Any) -> list[Shape]:
    """What `LayeredCache` takes, for every layer of a transformers model.

    Sliding layers (``layer_types``; without it, ``sliding_window`` is every layer's) have a window.
    So do layers that attend in chunks: their window is a chunk, the most that a token sees. MLA
    (``kv_lora_rank``) has one latent tensor, as an engine that absorbs the up-projections stores
    it; transformers itself stores keys and values. Linear attention, state spaces and short
    convolutions have a `StateShape`, for models with the fields of Qwen3-Next's, Kimi Linear's,
    Jamba's, Bamba's, Nemotron-H's or LFM2's. Layers without attention, and those that read another
    layer's keys, are an `EmptyShape`.

    Args:
        config: a ``PreTrainedConfig``, or anything with its attributes; for a multi-modal model,
            the part that ``get_text_config`` returns.

    Raises:
        InvalidArgument: an attribute is missing, or a layer keeps something else.
    """
    text = text_config(config)
    count = bounded("num_layers", _num_layers(text), 1, 1 << 14)
    _refuse_cross_attention(config, text)
    kinds = _kinds(text)
    if kinds is not None and len(kinds) != count:
        raise invalid(f"layer_types names {len(kinds)} layers, the model has {count}")
    modes = _attribute(text, "kv_sharing_modes") or _shared_last(text, count)
    shapes: list[Shape] = []
    for layer in range(count):
        own = _layer_config(text, layer)
        if modes[layer] == "reuse":
            shapes.append(EmptyShape())
        elif kinds is None:
            shapes.append(_rows(own, _window(own)))
        else:
            shapes.append(_shape(own, layer, kinds[layer]))
    return shapes


def _refuse_cross_attention(config: Any, text: Any) -> None:
    """Raises InvalidArgument for models that attend to something besides their own tokens."""
    name = type(config).__name__
    if getattr(config, "is_encoder_decoder", False) or getattr(text, "is_encoder_decoder", False):
        raise invalid(f"{name}: a decoder that attends to an encoder also keeps the encoder's rows")
    crossed = _attribute(text, "cross_attention_layers")
    if crossed:
        raise invalid(
            f"{name}: layer {crossed[0]} attends to an image alone; its rows do not grow with the "
            "tokens, which is not known here"
        )


def _shared_last(text: Any, count: int) -> list[str]:
    """Transformers' ``kv_sharing_modes``, where a configuration only counts the layers."""
    shared = _attribute(text, "num_kv_shared_layers") or 0
    return [""] * (count - shared) + ["reuse"] * shared


def _shape(own: Any, layer: int, kind: str) -> Shape:
    """What a layer of a kind keeps."""
    if kind in _FULL:
        return _rows(own, 0)
    if kind == _SLIDING:
        window = _attribute(own, "sliding_window")
        if not window:
            raise invalid(f"layer {layer} is {kind}, but sliding_window is {window}")
        return _rows(own, window)
    if kind == _CHUNKED:
        return _rows(own, _attribute(own, "attention_chunk_size") or 0)
    if kind in _EMPTY:
        return EmptyShape()
    if kind in _STATE:
        state = _state(own, kind)
        if state is not None:
            return state
        why = "its configuration does not describe the state in a way that is known here"
    elif kind.startswith("hybrid"):
        why = "it keeps keys and values and a state beside them, which is not known here"
    else:
        why = "what it keeps is not known here"
    raise invalid(f"layer {layer} is {kind}: {why}")


def _state(text: Any, kind: str) -> StateShape | None:
    """What a layer keeps for a request; None: the configuration has none of the known fields."""

    def get(name: str) -> Any:
        return getattr(text, name, None)

    if getattr(text, "number_of_conv_states", 1) != 1:
        return None
    if kind == "conv":
        return (
            StateShape(conv=(text.hidden_size, text.conv_L_cache)) if get("conv_L_cache") else None
        )
    if get("linear_num_value_heads"):
        keys, values = get("linear_key_head_dim"), get("linear_value_head_dim")
        channels = 2 * text.linear_num_key_heads * keys + text.linear_num_value_heads * values
        return StateShape(
            (channels, text.linear_conv_kernel_dim), (text.linear_num_value_heads, keys, values)
        )
    if heads := get("linear_num_heads"):
        wide = text.linear_head_dim
        return StateShape((3 * heads * wide, text.linear_conv_kernel_dim), (heads, wide, wide))
    if heads := get("mamba_num_heads"):
        if not get("ssm_state_size"):
            return None
        wide, size = heads * text.mamba_head_dim, text.ssm_state_size
        channels = wide + 2 * text.n_groups * size
        return StateShape((channels, text.conv_kernel), (heads, text.mamba_head_dim, size))
    if not get("mamba_d_state"):
        return None
    size, tokens = text.mamba_d_state, text.mamba_d_conv
    if heads := get("mamba_n_heads"):
        wide = heads * text.mamba_d_head
        channels = wide + 2 * text.mamba_n_groups * size
        return StateShape((channels, tokens), (heads, text.mamba_d_head, size))
    wide = text.mamba_expand * text.hidden_size
    return StateShape((wide, tokens), (wide, size))


class _Own:
    """A configuration with one layer's overrides."""

    def __init__(self, text: Any, own: Mapping[str, Any]) -> None:
        self._text = text
        self._own = own

    def __getattr__(self, name: str) -> Any:
        own: Mapping[str, Any] = self.__dict__["_own"]
        return own[name] if name in own else getattr(self.__dict__["_text"], name)


def _layer_config(text: Any, layer: int) -> Any:
    """The configuration of one layer: ``per_layer_config`` holds its overrides (Gemma 4)."""
    every = getattr(text, "per_layer_config", None)
    if not every:
        return text
    if not isinstance(every, Mapping):
        return every[layer]  # transformers' own: whole configurations
    # Keys read from a file are strings with leading zeros.
    own: Any = next((one for key, one in every.items() if int(key) == layer), {})
    return _Own(text, own if isinstance(own, Mapping) else vars(own))


def _rows(own: Any, window: int) -> LayerShape:
    """A layer with keys and values, or a latent."""
    if _attribute(own, "kv_lora_rank"):
        return LayerShape(1, _latent(own), 0, window)
    heads = _num_kv_heads(own)
    if window and _attribute(own, "model_type") == "mimo_v2_flash":
        heads *= 2  # known from its code, not from its configuration
    return LayerShape(heads, _head_dim(own), _attribute(own, "v_head_dim"), window)
