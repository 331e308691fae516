# SPDX-License-Identifier: MIT
"""`LayeredCache`: a `KVCache` for layers that differ in shape, window or state."""

from __future__ import annotations

import math
import operator
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pyvmem._native import backend_names
from pyvmem.kvcache.budget import Budget
from pyvmem.kvcache.cache import GroupView, KVCache
from pyvmem.kvcache.checks import invalid, layer_index
from pyvmem.kvcache.config import KVCacheConfig, policy_of
from pyvmem.kvcache.manager import Manager, check_memory
from pyvmem.memory.context import Context
from pyvmem.models.shapes import LayerShape, Place, Shape, StateShape, classes_of
from pyvmem.plumbing.validation import expect

if TYPE_CHECKING:
    import torch

__all__ = ["LayeredCache", "cache_of", "check_arguments"]


class LayeredCache(KVCache):
    """A `KVCache` with one group per kind of layer; the groups share reqids and steps.

    The groups share a budget. A call that changes a request takes effect in all groups or none.
    Slots are chosen by best fit in the group of the first layer. Prefixes are recorded in one tree,
    in units that fill whole pages in every group (prefix_cache.py).

    Args:
        layers: the shape of each layer's data, in model order; a `StateShape` for a stateful
            layer, an `EmptyShape` for a layer that stores nothing.
        context: as for `KVCache`.
        backend: as for `KVCache`.
        device: as for `KVCache`.
        budget: memory to share with other caches in its context; None: a new budget of
            `memory_limit` bytes.
        **policy: fields of `KVCacheConfig` that `LayerShape` does not have, for all groups.
            `group_size` must divide the number of layers of each kind.

    Attributes:
        layers: the `layers` argument, as a tuple.
        config: the first group's configuration; all groups have the same policy.

    Raises:
        InvalidArgument: no layers, an invalid value, both a `memory_limit` and a budget, or a limit
            of less than one page per tensor.
        VMemError: as for `KVCache`.
    """

    def __init__(
        self,
        layers: Sequence[Shape],
        context: Context | None = None,
        backend: str = "auto",
        device: Any = 0,
        budget: Budget | None = None,
        **policy: Any,
    ) -> None:
        self._closed = True  # set to False once the groups exist
        self.layers = tuple(layers)
        counts, self._places = classes_of(self.layers)
        if not counts:
            raise invalid("a LayeredCache needs at least one layer that stores data")
        whole = policy_of(policy)
        policy = {**policy, "memory_limit": 0, "memory_floor": 0, "max_mappings": 0}
        configs = [
            KVCacheConfig(num_layers=count, **{**policy, **kind.fields()})
            for kind, count in counts.items()
        ]
        self._begin(Manager("LayeredCache", whole, configs, context, backend, device, budget))

    def k(self, layer: int) -> torch.Tensor:
        """Returns a layer's keys, or MLA's latent.

        Shape ``[max_batch, max_seq_len, num_kv_heads, head_dim]``. Raises InvalidArgument for a
        layer that does not exist, has a state or stores nothing.
        """
        place = self._rows_of(layer)[0]
        return self.caches[place.part].k(place.member)

    def v(self, layer: int) -> torch.Tensor:
        """Returns a layer's values, whose heads have `v_head_dim` elements.

        Raises InvalidArgument if the layer has none.
        """
        place = self._rows_of(layer)[1]
        if place is None:
            raise invalid(f"layer {layer} stores no values")
        view = self.caches[place.part]
        return view.v(place.member) if place.which else view.k(place.member)

    def layer_views(self) -> list[tuple[GroupView, GroupView | None] | None]:
        """See `KVCache.layer_views`."""
        found: list[tuple[GroupView, GroupView | None] | None] = []
        for shape, places in zip(self.layers, self._places, strict=True):
            if places is None or not isinstance(shape, LayerShape):
                found.append(None)
                continue
            keys, values = places
            other = None if values is None else self.caches[values.part]
            found.append((self.caches[keys.part], other))
        return found

    def states(self, layer: int) -> dict[str, torch.Tensor]:
        """Returns the parts of a layer's state: "conv", "recurrent" or both (see `StateShape`).

        Each has shape ``[max_batch, *shape]``; slots without a request are not mapped. With
        `KVCacheConfig.zero_fill`, a request's state is initially zero.

        Raises InvalidArgument for a layer that does not exist or stores keys and values.
        """
        places = self._place(layer)
        shape = self.layers[operator.index(layer)]
        if not isinstance(shape, StateShape):
            raise invalid(f"layer {layer} has keys and values, not a state")
        names = [name for name in ("conv", "recurrent") if getattr(shape, name)]
        found = {}
        for name, sizes, place in zip(names, shape.states, places, strict=False):
            assert place is not None
            rows = self.caches[place.part].k(place.member)[:, 0]
            found[name] = rows.view(*rows.shape[:2], *sizes[1:])
        return found

    def _rows_of(self, layer: int) -> tuple[Place, Place | None]:
        places = self._place(layer)
        if isinstance(self.layers[operator.index(layer)], StateShape):
            raise invalid(f"layer {layer} has a state; see states")
        return places

    def _place(self, layer: int) -> tuple[Place, Place | None]:
        index = layer_index(layer, len(self._places))
        places = self._places[index]
        if places is None:
            raise invalid(f"layer {index} stores nothing")
        return places


def cache_of(
    layers: Sequence[Shape],
    context: Context | None = None,
    backend: str = "auto",
    device: Any = 0,
    budget: Budget | None = None,
    **policy: Any,
) -> KVCache:
    """Creates a `KVCache` if all layers are the same, otherwise a `LayeredCache`.

    Takes the same arguments as `LayeredCache`.
    """
    layers = [*layers]
    counts = classes_of(layers)[0]
    policy_of(policy)
    if list(counts.values()) == [len(layers)]:  # one kind of layer, none empty
        (kind,) = counts
        config = KVCacheConfig(num_layers=len(layers), **{**policy, **kind.fields()})
        return KVCache(config, context, backend, device, budget)
    return LayeredCache(layers, context, backend, device, budget, **policy)


def check_arguments(
    policy: Mapping[str, Any],
    given: Collection[str],
    layers: Sequence[Shape] = (),
    context: Context | None = None,
    backend: str | None = None,
    budget: Budget | None = None,
) -> None:
    """Validates the arguments of a later `cache_of` call.

    Args:
        policy, given: as for `policy_of`.
        layers, context, budget: as for `cache_of`; if `layers` is empty, the layers are not known
            yet.
        backend: the back end; None if it is not chosen yet.

    Raises:
        InvalidArgument: an unknown option or back end, a value out of range, a `group_size` that
            does not divide the number of layers of each kind, or both a budget and a memory limit.
        TypeError: a context, back end or budget of the wrong type.
    """
    counts = classes_of(layers)[0].values()
    whole = policy_of(policy, given)
    group = operator.index(policy.get("group_size", 1))
    for count in counts:
        if count % group:
            raise invalid(
                f"group_size {group} does not divide {' and '.join(map(str, counts))} layers",
                limit=math.gcd(*counts),
            )
    expect("backend", backend, str, optional=True)
    names = ("auto", *backend_names())
    if backend is not None and backend not in names:
        raise invalid(f"backend {backend!r} is not one of {', '.join(names)}")
    expect("context", context, Context, optional=True)
    expect("budget", budget, Budget, optional=True)
    check_memory(whole, len(counts) > 1, context, budget)
