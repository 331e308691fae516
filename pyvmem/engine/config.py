# SPDX-License-Identifier: MIT
"""The configuration of a cache, in two parts: the model's shape and the policy.

    cache = RequestCache.open(Model.of(model.config), Policy(max_batch=64))

`Model` describes what each layer stores; it depends only on the model. `Policy` sets the number of
concurrent requests, their length and the memory. The layout (which layers share a tensor, and the
page size) depends on both and on the back end: `pyvmem.layouts.advise` picks the cheapest.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from pyvmem.kvcache import (
    KVCache,
    LayerShape,
    StateShape,
    layer_shapes,
)
from pyvmem.kvcache.budget import free_bytes
from pyvmem.kvcache.config import AHEAD_TOKENS, policy_of
from pyvmem.kvcache.layered_cache import cache_of
from pyvmem.layouts import (
    PAGE_SIZES,
    Advice,
    Limits,
    ModelShape,
    Request,
    advise,
    call_us,
    choices,
    generate,
)
from pyvmem.memory.context import Context
from pyvmem.memory.info import ContextInfo
from pyvmem.models.hf_config import dtype_of, longest_of
from pyvmem.models.shapes import DTYPE_BYTES, Shape
from pyvmem.plumbing.validation import bounded, expect, invalid, real

__all__ = ["Model", "Policy", "advised", "make_cache"]

_WORKLOAD = 200  # number of synthetic requests used to compare layouts; comparing takes 15 ms


@dataclass(frozen=True)
class Model:
    """The shape of a model's keys and values on one device.

    Attributes:
        layers: the shape of each layer, in the model's order; at least one has keys and values.
        dtype: element type, as in `KVCacheConfig`.
        max_seq_len: the longest sequence the model supports.
    """

    layers: tuple[Shape, ...]
    dtype: str
    max_seq_len: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "layers", tuple(self.layers))
        object.__setattr__(self, "dtype", str(self.dtype).removeprefix("torch."))
        if not any(isinstance(one, LayerShape) for one in self.layers):
            raise invalid("a Model needs at least one layer with keys and values", op="Model")
        if self.dtype not in DTYPE_BYTES:
            raise invalid(
                f"dtype {self.dtype!r} is not one of {', '.join(DTYPE_BYTES)}", op="Model"
            )
        longest = bounded("max_seq_len", self.max_seq_len, 1, 1 << 30, op="Model")
        object.__setattr__(self, "max_seq_len", longest)

    @classmethod
    def of(cls, config: Any, dtype: Any = None) -> Model:
        """Returns the shape of a transformers model.

        Args:
            config: a ``PreTrainedConfig``, as for `layer_shapes`.
            dtype: element type of keys and values; None for the configuration's. An 8-bit type is
                not applied to recurrent states, which keep the configuration's type.

        Raises:
            InvalidArgument: an attribute is missing, or a layer's kind is unknown.
        """
        layers = layer_shapes(config)
        found = cls(tuple(layers), dtype_of(config) if dtype is None else dtype, longest_of(config))
        if DTYPE_BYTES[found.dtype] > 1 or not any(isinstance(one, StateShape) for one in layers):
            return found
        own = str(dtype_of(config)).removeprefix("torch.")  # states are never stored in 8 bits
        return replace(
            found,
            layers=tuple(
                replace(one, dtype=own) if isinstance(one, StateShape) else one for one in layers
            ),
        )

    @property
    def first(self) -> LayerShape:
        """The first layer that stores keys and values."""
        return next(one for one in self.layers if isinstance(one, LayerShape))


@dataclass(frozen=True)
class Policy:
    """The operator's settings. 0 always means "choose from the model and the machine".

    Attributes:
        max_batch: maximum number of concurrent requests; a slot costs address space, not memory.
        max_seq_len: maximum number of tokens per request; 0 means the model's limit.
        memory: bytes for keys and values; 0 means `memory_share` of the free memory.
        memory_share: fraction of the device's free memory to use (on host, of the memory that this
            process may still allocate, see `Context.memory`). Greater than 0 and at most 1. The
            remainder is for activations and other allocations, so the default is lower than the 0.9
            of `KVCacheConfig.memory_limit`, which leaves no room for activations.
        page_size: page size in bytes; 0 lets `advise` choose.
        layers_per_tensor: as `KVCacheConfig.group_size`; 0 lets `advise` choose.
        ahead_tokens: same as `KVCacheConfig.ahead_tokens`.
        options: further fields of `KVCacheConfig`, which override all of the above.
    """

    max_batch: int = 256
    max_seq_len: int = 0
    memory: int = 0
    memory_share: float = 0.8
    page_size: int = 0
    layers_per_tensor: int = 0
    ahead_tokens: int = AHEAD_TOKENS
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, high in (
            ("max_batch", 1 << 16),
            ("max_seq_len", 1 << 30),
            ("memory", 1 << 62),
            ("page_size", 1 << 30),
            ("layers_per_tensor", 1 << 14),
            ("ahead_tokens", 1 << 30),
        ):
            number = bounded(name, getattr(self, name), int(name == "max_batch"), high, op="Policy")
            object.__setattr__(self, name, number)
        expect("options", self.options, Mapping)
        share = real("memory_share", self.memory_share, 1, positive=True, op="Policy")
        object.__setattr__(self, "memory_share", share)
        policy_of(self.options)


def advised(model: Model, policy: Policy, info: ContextInfo, memory: int) -> Advice:
    """Returns the cheapest layout for a model that the policy and the back end allow.

    Assumes a typical mix of request lengths (`pyvmem.layouts.generate`) that fit in a slot.

    Args:
        model: the model; the sliding windows, latents and kinds of its layers are taken into
            account.
        policy: the policy; a nonzero `page_size` or `layers_per_tensor` is kept.
        info: the properties of the back end, which determine the page sizes and the cost of a map
            call.
        memory: bytes for keys and values.

    Raises:
        InvalidArgument: no layout is possible, for example because `layers_per_tensor` does not
            divide the number of layers of each kind.
    """
    layer, longest = model.first, policy.max_seq_len or model.max_seq_len
    shape = ModelShape(
        "the model",
        len(model.layers),
        layer.num_kv_heads,
        layer.head_dim,
        model.dtype,
        layers=model.layers,
    )
    requests = [one for one in generate(_WORKLOAD, 1) if one.longest <= longest]
    if not requests:
        requests = [Request(max(1, longest // 2), max(1, longest // 2))]
    sizes = [size for size in PAGE_SIZES if size in info.page_sizes] or [info.granule]
    sizes = [policy.page_size] if policy.page_size else sizes
    limits = Limits(call_us=call_us(info.backend))
    group = policy.layers_per_tensor
    if group:
        limits = Limits(limits.call_us, limits.iteration_ms, max_group=group)
    considered = [
        choice
        for choice in choices(shape, sizes, max_group=limits.max_group)
        if not group or choice.group_size == group
    ]
    if not considered:
        counts = " and ".join(str(config.num_layers) for config in shape.configs())
        raise invalid(
            f"layers_per_tensor {group} does not divide {counts} layers",
            limit=shape.largest_group,
            op="Policy",
        )
    return advise(shape, requests, max(1, memory), considered, limits)


def make_cache(model: Model, policy: Policy, backend: str = "auto", device: Any = 0) -> KVCache:
    """Creates the cache for a model under a policy; the caller closes it.

    It is a `LayeredCache` if the model's layers differ.

    Raises:
        InvalidArgument: the model or the back end does not support a value. VMemError: as for
            `KVCache`.
    """
    with Context(backend, device=device) as context:  # only to query page sizes and memory
        info, free = context.info, free_bytes(context)
    memory = policy.memory or int(free * policy.memory_share)
    values: dict[str, Any] = {
        "dtype": model.dtype,
        "max_batch": policy.max_batch,
        "max_seq_len": policy.max_seq_len or model.max_seq_len,
        "memory_limit": memory,
        "ahead_tokens": policy.ahead_tokens,
    }
    best = advised(model, policy, info, memory).best.choice
    values |= {"group_size": best.group_size, "page_size": best.page_size, **policy.options}
    return cache_of(model.layers, backend=info.backend, device=device, **values)
