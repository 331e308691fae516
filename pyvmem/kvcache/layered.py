# SPDX-License-Identifier: MIT
"""A cache for a model whose layers differ: in heads, head size, window, or in having values."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from pyvmem.kvcache.budget import Budget
from pyvmem.kvcache.cache import KVCache
from pyvmem.kvcache.config import (
    KVCacheConfig,
    LayerShape,
    Place,
    StateShape,
    classes_of,
    invalid,
)
from pyvmem.kvcache.manager import Manager

if TYPE_CHECKING:
    import torch

    from pyvmem.context import Context

__all__ = ["LayeredCache"]


class LayeredCache(KVCache):
    """A `KVCache` with a group for each class of equal layers, behind one reqid and one `step`.

    The groups share a budget. What changes a request is all or nothing over all of them; the slot
    that a request gets fits the group of the first layer best. Prefixes are recorded in one tree,
    in units that fill whole pages in every group (prefix_cache.py).

    Args:
        layers: what every layer keeps, in the model's order; a `StateShape` for those with a state.
        context: as for `KVCache`.
        backend: as for `KVCache`.
        device: as for `KVCache`.
        budget: memory to share with other caches of its context; None: one of `memory_limit`.
        **policy: the fields of `KVCacheConfig` that `LayerShape` has not, for all groups.
            `group_size` divides the layers of each class.

    Attributes:
        layers: as given.
        config: the first group's; the policy is that of all.

    Raises:
        InvalidArgument: no layer, a value that is refused, a `memory_limit` beside a budget, or one
            of less than a page in every tensor.
        VMemError: as for `KVCache`.
    """

    def __init__(
        self,
        layers: Sequence[LayerShape | StateShape],
        context: Context | None = None,
        backend: str = "auto",
        device: Any = 0,
        budget: Budget | None = None,
        **policy: Any,
    ) -> None:
        self._closed = True  # until the groups are made
        self.layers = tuple(layers)
        if not self.layers:
            raise invalid("a LayeredCache needs at least one layer")
        counts, self._places = classes_of(self.layers)
        whole = KVCacheConfig(num_layers=1, num_kv_heads=1, head_dim=1, **_shape_free(policy))
        policy = {**policy, "memory_limit": 0, "memory_floor": 0, "max_mappings": 0}
        configs = [
            KVCacheConfig(num_layers=count, **{**policy, **kind.fields()})
            for kind, count in counts.items()
        ]
        manager = Manager("LayeredCache", whole, configs, context, backend, device, budget)
        self._begin(manager)

    def k(self, layer: int) -> torch.Tensor:
        """Keys of a layer, or MLA's latent: ``[max_batch, max_seq_len, num_kv_heads, head_dim]``.

        Raises InvalidArgument for a layer that does not exist, or has a state.
        """
        self._has_rows(layer)
        place = self._place(layer)[0]
        return self.caches[place.part].k(place.member)

    def v(self, layer: int) -> torch.Tensor:
        """Values of a layer, with `v_head_dim` elements; InvalidArgument where it has none."""
        self._has_rows(layer)
        place = self._place(layer)[1]
        if place is None:
            raise invalid(f"layer {layer} has no values")
        view = self.caches[place.part]
        return view.v(place.member) if place.which else view.k(place.member)

    def states(self, layer: int) -> dict[str, torch.Tensor]:
        """What a layer keeps for each request: "conv" and "recurrent", as in its `StateShape`.

        Each is ``[max_batch, *shape]``; slots without a request have no memory there. A request's
        are zero at first, with `KVCacheConfig.zero_fill`.

        Raises InvalidArgument for a layer that does not exist, or has keys and values.
        """
        places = self._place(layer)
        shape = self.layers[operator.index(layer)]
        if not isinstance(shape, StateShape):
            raise invalid(f"layer {layer} has keys and values, and no state")
        names = [name for name in ("conv", "recurrent") if getattr(shape, name)]
        found = {}
        for name, sizes, place in zip(names, shape.states, places, strict=False):
            assert place is not None
            rows = self.caches[place.part].k(place.member)[:, 0]
            found[name] = rows.view(*rows.shape[:2], *sizes[1:])
        return found

    def _has_rows(self, layer: int) -> None:
        self._place(layer)
        if isinstance(self.layers[operator.index(layer)], StateShape):
            raise invalid(f"layer {layer} has a state; see states")

    def _place(self, layer: int) -> tuple[Place, Place | None]:
        index, last = operator.index(layer), len(self._places) - 1
        if not 0 <= index <= last:
            raise invalid(f"layer {index} is not between 0 and {last}", limit=last)
        return self._places[index]


def _shape_free(policy: dict[str, Any]) -> dict[str, Any]:
    """The policy without what only a class with all its layers can check."""
    for name in ("num_layers", "num_kv_heads", "head_dim", "tensors_per_layer", "window", "state"):
        if name in policy:
            raise invalid(f"{name} is told by the layers")
    return {**policy, "group_size": 1}
