# SPDX-License-Identifier: MIT
"""A cache for a model whose layers differ: in heads, head size, window, or in having values."""

from __future__ import annotations

import errno
import operator
from collections.abc import Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from pyvmem.context import Context
from pyvmem.errors import BadHandle, Busy
from pyvmem.kvcache import report, setup, steps
from pyvmem.kvcache.base import half_closed
from pyvmem.kvcache.budget import Budget
from pyvmem.kvcache.cache import KVCache
from pyvmem.kvcache.config import KVCacheConfig, invalid
from pyvmem.kvcache.core import Core
from pyvmem.kvcache.joint import JointPrefixes
from pyvmem.kvcache.journal import Books
from pyvmem.kvcache.layered_requests import LayeredRequests
from pyvmem.kvcache.shapes import LayerShape, Place, classes_of
from pyvmem.kvcache.stats import CacheStats, together
from pyvmem.streams import check

if TYPE_CHECKING:
    import torch

__all__ = ["LayeredCache"]


class LayeredCache(LayeredRequests):
    """One `KVCache` for each class of equal layers, behind one reqid and one `step`.

    The classes share a budget. What changes a request is all or nothing over all of them. Prefixes
    are recorded in one tree, in units that fill whole pages in every class (joint.py).

    Thread-safe; calls take turns. A context manager.

    Args:
        layers: what every layer keeps, in the model's order.
        context: as for `KVCache`.
        backend: as for `KVCache`.
        device: as for `KVCache`.
        budget: memory to share with other caches of its context; None: one of `memory_limit`.
        **policy: the fields of `KVCacheConfig` that `LayerShape` has not, for all classes.
            `group_size` divides the layers of each class.

    Raises:
        InvalidArgument: no layer, a value that is refused, a `memory_limit` beside a budget, or one
            of less than a page in every tensor.
        VMemError: as for `KVCache`.
    """

    def __init__(
        self,
        layers: Sequence[LayerShape],
        context: Context | None = None,
        backend: str = "auto",
        device: Any = 0,
        budget: Budget | None = None,
        **policy: Any,
    ) -> None:
        self._closed = True  # until all classes are there
        self._closing = False
        self.layers = tuple(layers)
        if not self.layers:
            raise invalid("a LayeredCache needs at least one layer")
        counts, self._places = classes_of(self.layers)
        whole = KVCacheConfig(num_layers=1, num_kv_heads=1, head_dim=1, **_shape_free(policy))
        if budget is not None and (whole.memory_limit or whole.memory_floor):
            raise invalid("memory_limit and memory_floor are of the whole; the budget is given")
        if whole.max_mappings and (context is not None or budget is not None):
            raise invalid(
                f"max_mappings {whole.max_mappings}: the context is given, and has its own"
            )
        policy = {**policy, "memory_limit": 0, "memory_floor": 0, "max_mappings": 0}
        configs = [
            KVCacheConfig(num_layers=count, **kind.fields(), **policy)
            for kind, count in counts.items()
        ]
        with ExitStack() as undo:
            if context is None and budget is None:
                ready = sum(map(setup.pool_low, configs))
                context = Context(
                    backend,
                    device=device,
                    granule=whole.page_size,
                    pool_low=ready,
                    max_mappings=whole.max_mappings,
                )
                undo.callback(context.close)
                self._owned: Context | None = context
            else:
                self._owned = None
            if budget is None:
                assert context is not None
                budget = Budget(context, whole.memory_limit)
            self.budget = budget
            undo.callback(_close_others, budget, list(budget.journal.books))
            caches = []
            for config in configs:
                caches.append(KVCache(config, context, budget=budget))
                undo.callback(caches[-1].close)
            self.caches = tuple(caches)
            least = sum(cache.layout.page_size * cache.layout.num_tensors for cache in caches)
            if budget.total_bytes < least:
                raise invalid(
                    f"{budget.total_bytes} bytes are less than one page in every tensor, {least}",
                    size=budget.total_bytes,
                    limit=least,
                )
            with budget.lock, budget.journal:
                JointPrefixes([cache._core for cache in caches])
            undo.pop_all()
        self._lock = budget.lock
        self._journal = budget.journal
        self._closed = False

    caches: tuple[KVCache, ...]
    """One for each class, in the order in which the layers name them. For tensors, layouts and
    reports; requests are taken, stepped and given back through the whole."""

    def _open(self) -> list[Core]:
        if self._closed:
            raise BadHandle("the LayeredCache is closed", errno=errno.EBADF, op="LayeredCache")
        if self._closing:
            raise half_closed("LayeredCache")
        return [cache._open_core() for cache in self.caches]

    def _gone(self) -> bool:
        return super()._gone() or not self.budget.context.is_open

    # ---- steps ---------------------------------------------------------------------------------

    def step(self, seq_lens: Sequence[int], stream: Any = None) -> int:
        """As `KVCache.step`, over all classes: where one is short, none has changed."""
        check(stream)
        with self._lock, self._journal:
            return steps.step_all(self._open(), seq_lens, stream)

    def step_async(self, seq_lens: Sequence[int], stream: Any = None) -> int:
        """As `KVCache.step_async`, over all classes."""
        check(stream)
        with self._lock, self._journal:
            return steps.step_async_all(self._open(), seq_lens)

    # ---- tensors -------------------------------------------------------------------------------

    def k(self, layer: int) -> torch.Tensor:
        """Keys of a layer, or MLA's latent: ``[max_batch, max_seq_len, num_kv_heads, head_dim]``.

        Raises InvalidArgument for a layer that does not exist.
        """
        place = self._place(layer)[0]
        return self.caches[place.part].k(place.member)

    def v(self, layer: int) -> torch.Tensor:
        """Values of a layer, with `v_head_dim` elements; InvalidArgument where it has none."""
        place = self._place(layer)[1]
        if place is None:
            raise invalid(f"layer {layer} has no values")
        cache = self.caches[place.part]
        return cache.v(place.member) if place.which else cache.k(place.member)

    def _place(self, layer: int) -> tuple[Place, Place | None]:
        index, last = operator.index(layer), len(self._places) - 1
        if not 0 <= index <= last:
            raise invalid(f"layer {index} is not between 0 and {last}", limit=last)
        return self._places[index]

    # ---- reports and end -----------------------------------------------------------------------

    def stats(self) -> CacheStats:
        """As `KVCache.stats`, all classes together.

        Slots, steps and prefix tokens, which are the same in all, are the first class's. Peaks are
        the sum of the classes' peaks.
        """
        with self._lock, self._journal:
            cores = self._open()
            for core in cores:
                core.reclaimer.poll()
            share = cores[0].reclaimer.share
            assert share is not None
            room = share.room() // cores[0].layout.page_size
            return together([report.stats(core) for core in cores], room)

    def check_integrity(self) -> None:
        """As `KVCache.check_integrity`, for every class."""
        with self._lock, self._journal:
            self._open()
            for cache in self.caches:
                cache.check_integrity()

    def close(self, stream: Any = None) -> None:
        """As `KVCache.close`, for every class.

        Raises:
            Busy: tensors of a class live; nothing changed.
        """
        check(stream)
        with self._lock, self._journal:
            if self._closed:
                return
            for cache in self.caches:
                cache._views.drop()
            living = sum(cache.reservation.live_arrays for cache in self.caches)
            if living and self.budget.context.is_open:
                raise Busy(
                    f"{living} tensors of the cache live; drop them before it is closed",
                    errno=errno.EBUSY,
                    op="LayeredCache.close",
                )
            self._closing = True
            for cache in self.caches:
                cache.close(stream)
            self._closed = True
            if self._owned is not None and self._owned.is_open:
                self._owned.close()


def _close_others(budget: Budget, books: list[Books]) -> None:
    """Closes the caches of a budget that were made since, also one that nobody was told of."""
    with budget.lock, budget.journal as journal:
        for core in [one for one in journal.books if one not in books]:
            assert isinstance(core, Core)
            core.close(None)
            budget.leave(core)


def _shape_free(policy: dict[str, Any]) -> dict[str, Any]:
    """The policy without what only a class with all its layers can check."""
    for name in ("num_layers", "num_kv_heads", "head_dim", "tensors_per_layer", "window"):
        if name in policy:
            raise invalid(f"{name} is told by the layers")
    return {**policy, "group_size": 1}
