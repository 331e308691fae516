# SPDX-License-Identifier: MIT
"""A cache for a model whose layers differ: in heads, head size, window, or in having values."""

from __future__ import annotations

import errno
import operator
from collections.abc import Hashable, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from pyvmem.context import Context
from pyvmem.errors import BadHandle, Busy
from pyvmem.kvcache import idle, integrity, manager, swap, truncate
from pyvmem.kvcache.budget import Budget
from pyvmem.kvcache.cache import Closing, KVCache, half_closed
from pyvmem.kvcache.config import KVCacheConfig, LayerShape, Place, classes_of, invalid
from pyvmem.kvcache.events import record
from pyvmem.kvcache.group import Group, pool_low
from pyvmem.kvcache.integrity import IntegrityError
from pyvmem.kvcache.journal import Books
from pyvmem.kvcache.metrics import CacheStats, together
from pyvmem.kvcache.prefix_cache import PrefixCache
from pyvmem.kvcache.prefix_tree import Change
from pyvmem.streams import check

if TYPE_CHECKING:
    import torch

    from pyvmem.context import Context
    from pyvmem.kvcache.cache import KVCache
    from pyvmem.kvcache.prefix_cache import PrefixMatch
    from pyvmem.kvcache.swap import SwappedRequest

__all__ = ["LayeredCache"]


def _agreed(groups: list[Group]) -> list[Group]:
    """The same, with the same free slots: one that a failure broke in one class is none's."""
    for group in groups:
        group.reclaimer.poll()
        group.pager.poll()
    if len({len(group.table.free) for group in groups}) > 1:
        broken = {slot.index for group in groups for slot in group.table if slot.broken}
        for group in groups:
            for index in broken:
                group.table.condemn(group.table[index])
    return groups


def _alloc(groups: list[Group], seq_len: int) -> int | None:
    """Takes the slot that fits the first class best, in all of them."""
    found = groups[0].fit(seq_len)
    if found is None:
        return None
    for group in groups:
        group.take(group.table[found.index])
    for group in groups:
        group.prepare()
    return found.index


class LayeredCache(Closing):
    """One `KVCache` for each class of equal layers, behind one reqid and one `step`.

    The classes share a budget. What changes a request is all or nothing over all of them. Prefixes
    are recorded in one tree, in units that fill whole pages in every class (prefix_cache.py).

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
                ready = sum(map(pool_low, configs))
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
                prefixes = PrefixCache([cache._group.sharing for cache in caches])
                for place, cache in enumerate(caches):
                    cache._group.use_prefixes(prefixes, place)
            undo.pop_all()
        self._lock = budget.lock
        self._journal = budget.journal
        self._closed = False

    caches: tuple[KVCache, ...]
    """One for each class, in the order in which the layers name them. For tensors, layouts and
    reports; requests are taken, stepped and given back through the whole."""

    def _open(self) -> list[Group]:
        if self._closed:
            raise BadHandle("the LayeredCache is closed", errno=errno.EBADF, op="LayeredCache")
        if self._closing:
            raise half_closed("LayeredCache")
        return [cache._open_group() for cache in self.caches]

    def _gone(self) -> bool:
        return super()._gone() or not self.budget.context.is_open

    # ---- requests --------------------------------------------------------------------------------

    def alloc_reqid(self, seq_len: int = 0) -> int | None:
        """As `KVCache.alloc_reqid`; the slot fits the class of the first layer best."""
        with self._lock, self._journal:
            return _alloc(_agreed(self._open()), seq_len)

    def free_reqid(
        self, reqid: int, stream: Any = None, tokens: Any = None, namespace: Hashable = None
    ) -> None:
        """As `KVCache.free_reqid`; with `tokens`, all classes record the request's rows."""
        with self._lock, self._journal:
            groups = self._open()
            slots = [group.slot(reqid) for group in groups]
            event = record(stream, groups[0].device)
            first = [slot.shared for slot in slots]
            goes_on = tokens is not None and groups[0].prefixes.record_last(
                slots[0], tokens, event, namespace
            )
            for group, slot in zip(groups, slots, strict=True):
                group.mover.abandon(slot)
            for group, slot in zip(groups, slots, strict=True):
                group.release(slot, event)
            if goes_on:
                for group, slot, pages in zip(groups, slots, first, strict=True):
                    group.keep(slot, pages)
            for group in groups:
                group.prepare()
                group.tidy()

    def truncate(self, reqid: int, length: int, stream: Any = None) -> int:
        """As `KVCache.truncate`, in all classes or in none."""
        with self._lock, self._journal:
            return truncate.truncate(self._open(), reqid, length, stream)

    # ---- forks -----------------------------------------------------------------------------------

    def fork(self, reqid: int, length: int | None = None, stream: Any = None) -> int | None:
        """As `KVCache.fork`: in every class the full pages are shared, and the last one copied."""
        forked = self.fork_many(reqid, 1, length, stream)
        return None if forked is None else forked[0]

    def fork_many(
        self, reqid: int, count: int, length: int | None = None, stream: Any = None
    ) -> list[int] | None:
        """`fork` for `count` new requests: all of them, in all classes, or none.

        Where a class fails, the others have given up what they forked; the parent's full pages may
        be read-only already.
        """
        check(stream)
        with self._lock, self._journal:
            groups = _agreed(self._open())
            forked = manager.fork_all(groups, reqid, operator.index(count), length, stream)
            for group in groups:
                group.prepare()
            return forked

    # ---- prefixes --------------------------------------------------------------------------------

    @property
    def sharing_unit(self) -> int:
        """As `KVCache.sharing_unit`: the fewest tokens that fill whole pages in every class."""
        return self.caches[0].sharing_unit

    def record(
        self, reqid: int, tokens: Any, stream: Any = None, namespace: Hashable = None
    ) -> int:
        """As `KVCache.record`. After a failure, pages of the request may be read-only already."""
        check(stream)
        with self._lock, self._journal:
            group = self._open()[0]
            return group.prefixes.record(group.slot(reqid), tokens, stream, namespace)

    def prefix_changes(self) -> list[Change]:
        """As `KVCache.prefix_changes`."""
        with self._lock, self._journal:
            return self._open()[0].prefixes.tree.take_changes()

    def match(self, tokens: Any, leave: int = 1, namespace: Hashable = None) -> PrefixMatch:
        """As `KVCache.match`."""
        with self._lock, self._journal:
            return self._open()[0].prefixes.match(tokens, leave, namespace)

    def alloc_prefix(
        self, tokens: Any, leave: int = 1, stream: Any = None, namespace: Hashable = None
    ) -> tuple[int, int] | None:
        """As `KVCache.alloc_prefix`."""
        check(stream)
        with self._lock, self._journal:
            groups = _agreed(self._open())
            prefixes = groups[0].prefixes
            match, length = prefixes.wanted(tokens, leave, namespace)
            try:
                begins = prefixes.can_begin(match)
                if begins:
                    reqid = manager.alloc_prefix(groups, match, stream)
                    for group in groups:
                        group.prepare()
                else:
                    reqid = _alloc(groups, length)
            finally:
                if match is not tokens:
                    match.release()
            return None if reqid is None else (reqid, match.length if begins else 0)

    # ---- preemption and admission ----------------------------------------------------------------

    def swap_out(self, reqid: int, stream: Any = None) -> SwappedRequest:
        """As `KVCache.swap_out`."""
        check(stream)
        with self._lock, self._journal:
            groups = self._open()
            return swap.swap_out(groups, reqid, stream)

    def swap_in(self, swapped: SwappedRequest, stream: Any = None) -> int | None:
        """As `KVCache.swap_in`; the slot fits the class of the first layer best."""
        check(stream)
        with self._lock, self._journal:
            return swap.swap_in(_agreed(self._open()), swapped, stream)

    def can_admit(
        self, seq_lens: Sequence[int], matches: Sequence[PrefixMatch | None] | None = None
    ) -> bool:
        """As `KVCache.can_admit`."""
        with self._lock, self._journal:
            return manager.can_admit(self._open(), seq_lens, matches)

    def trim(self, prefixes: bool = False, compact: bool = False, stream: Any = None) -> int:
        """As `KVCache.trim`; returns the bytes given back to the device."""
        check(stream)
        with self._lock, self._journal:
            groups = self._open()
            before = groups[0].context.stats().slab_bytes
            for cache in self.caches:
                cache.trim(prefixes)
            if compact:
                idle.compact(groups[0], stream, owned=self._owned is not None)
            return max(0, before - groups[0].context.stats().slab_bytes)

    def capacity(self, reqid: int) -> int:
        """As `KVCache.capacity`: of the class whose pages are enough for the fewest tokens."""
        return min(cache.capacity(reqid) for cache in self.caches)

    def missing_bytes(self, reqid: int | None, seq_len: int) -> int:
        """As `KVCache.missing_bytes`, of all classes together."""
        return sum(cache.missing_bytes(reqid, seq_len) for cache in self.caches)

    def obtainable_bytes(self) -> tuple[int, int]:
        """As `KVCache.obtainable_bytes`: what the classes can have of their budget at once."""
        with self._lock, self._journal:
            groups = self._open()
            for group in groups:
                group.reclaimer.poll()
            return manager.reach(groups), self.budget.total_bytes

    @property
    def num_free_slots(self) -> int:
        """As `KVCache.num_free_slots`."""
        with self._lock, self._journal:
            return len(_agreed(self._open())[0].table.free)

    @property
    def context(self) -> Context:
        """The context that the pages are of."""
        return self.budget.context

    # ---- steps ---------------------------------------------------------------------------------

    def step(self, seq_lens: Sequence[int], stream: Any = None) -> int:
        """As `KVCache.step`, over all classes: where one is short, none has changed."""
        check(stream)
        with self._lock, self._journal:
            return manager.step(self._open(), seq_lens, stream)

    def step_async(self, seq_lens: Sequence[int], stream: Any = None) -> int:
        """As `KVCache.step_async`, over all classes."""
        check(stream)
        with self._lock, self._journal:
            return manager.step_async(self._open(), seq_lens)

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
            groups = self._open()
            for group in groups:
                group.reclaimer.poll()
            share = groups[0].reclaimer.share
            assert share is not None
            room = share.room() // groups[0].layout.page_size
            return together([integrity.stats(group) for group in groups], room)

    def check_integrity(self) -> None:
        """As `KVCache.check_integrity`, for every class; and all hold the same requests."""
        with self._lock, self._journal:
            groups = self._open()
            for cache in self.caches:
                cache.check_integrity()
            found = integrity.check_together(groups)
            if found:
                raise IntegrityError(found)

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
        for group in [one for one in journal.books if one not in books]:
            assert isinstance(group, Group)
            group.close(None)
            budget.leave(group.pager)


def _shape_free(policy: dict[str, Any]) -> dict[str, Any]:
    """The policy without what only a class with all its layers can check."""
    for name in ("num_layers", "num_kv_heads", "head_dim", "tensors_per_layer", "window"):
        if name in policy:
            raise invalid(f"{name} is told by the layers")
    return {**policy, "group_size": 1}
