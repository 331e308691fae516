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
from pyvmem.kvcache import setup, steps
from pyvmem.kvcache.base import Closing
from pyvmem.kvcache.budget import Budget
from pyvmem.kvcache.cache import KVCache
from pyvmem.kvcache.config import KVCacheConfig, invalid
from pyvmem.kvcache.core import Core
from pyvmem.kvcache.events import record
from pyvmem.kvcache.shapes import LayerShape, Place, classes_of

if TYPE_CHECKING:
    import torch

__all__ = ["LayeredCache"]


class LayeredCache(Closing):
    """One `KVCache` for each class of equal layers, behind one reqid and one `step`.

    The classes share a budget. A step is all or nothing over all of them. Forks, prefixes and
    swapping are `KVCache`'s alone: the sharing unit differs from class to class.

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
        self.layers = tuple(layers)
        if not self.layers:
            raise invalid("a LayeredCache needs at least one layer")
        counts, self._places = classes_of(self.layers)
        whole = KVCacheConfig(num_layers=1, num_kv_heads=1, head_dim=1, **_shape_free(policy))
        if budget is not None and (whole.memory_limit or whole.memory_floor):
            raise invalid("memory_limit and memory_floor are of the whole; the budget is given")
        policy = {**policy, "memory_limit": 0, "memory_floor": 0}
        configs = [
            KVCacheConfig(num_layers=count, **kind.fields(), **policy)
            for kind, count in counts.items()
        ]
        with ExitStack() as undo:
            if context is None and budget is None:
                ready = sum(map(setup.pool_low, configs))
                context = Context(backend, device=device, granule=whole.page_size, pool_low=ready)
                undo.callback(context.close)
                self._owned: Context | None = context
            else:
                self._owned = None
            if budget is None:
                assert context is not None
                budget = Budget(context, whole.memory_limit)
            self.budget = budget
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
            undo.pop_all()
        self._lock = budget.lock
        self._closed = False

    caches: tuple[KVCache, ...]
    """One for each class, in the order in which the layers name them. For tensors, layouts and
    reports; requests are taken, stepped and given back through the whole."""

    def _open(self) -> list[Core]:
        if self._closed:
            raise BadHandle("the LayeredCache is closed", errno=errno.EBADF, op="LayeredCache")
        return [cache._open_core() for cache in self.caches]

    def _gone(self) -> bool:
        return super()._gone() or not self.budget.context.is_open

    # ---- requests ------------------------------------------------------------------------------

    def alloc_reqid(self, seq_len: int = 0) -> int | None:
        """As `KVCache.alloc_reqid`; the slot fits the class of the first layer best."""
        with self._lock:
            cores = self._open()
            for core in cores:
                core.reclaimer.poll()
                core.pager.poll()
            if len({len(core.table.free) for core in cores}) > 1:
                _condemn_together(cores)
            found = cores[0].fit(seq_len)
            if found is None:
                return None
            for core in cores:
                core.table.take(core.table[found.index])
            for core in cores:
                core.prepare()
            return found.index

    def free_reqid(self, reqid: int, stream: Any = None) -> None:
        """As `KVCache.free_reqid`, but that nothing can be recorded."""
        with self._lock:
            cores = self._open()
            slots = [core.slot(reqid) for core in cores]
            event = record(stream, cores[0].device)
            for core, slot in zip(cores, slots, strict=True):
                core.release(slot, event)
            for core in cores:
                core.prepare()
                core.tidy()

    def step(self, seq_lens: Sequence[int], stream: Any = None) -> int:
        """As `KVCache.step`, over all classes: where one is short, none has changed."""
        with self._lock:
            return steps.step_all(self._open(), seq_lens, stream)

    def step_async(self, seq_lens: Sequence[int], stream: Any = None) -> int:
        """As `KVCache.step_async`, over all classes."""
        with self._lock:
            return steps.step_async_all(self._open(), seq_lens)

    def can_admit(self, seq_lens: Sequence[int]) -> bool:
        """As `KVCache.can_admit`."""
        with self._lock:
            cores = self._open()
            fit = [cache.can_admit(seq_lens) for cache in self.caches]
            need = sum(_bytes_for(core, seq_lens) for core in cores)
            share = cores[0].reclaimer.share
            assert share is not None
            own = cores[0].reclaimer
            column = own.layout.page_size * own.layout.num_tensors
            reach = share.within_reach() + own.returning * own.layout.page_size
            return all(fit) and need <= reach + own.spare({}) * column

    def trim(self) -> int:
        """As `KVCache.trim`; returns the bytes given back to the device."""
        with self._lock:
            self._open()
            return sum(cache.trim() for cache in self.caches)

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

    def check_integrity(self) -> None:
        """As `KVCache.check_integrity`, for every class."""
        with self._lock:
            self._open()
            for cache in self.caches:
                cache.check_integrity()

    def close(self, stream: Any = None) -> None:
        """As `KVCache.close`, for every class.

        Raises:
            Busy: tensors of a class live; nothing changed.
        """
        with self._lock:
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
            for cache in self.caches:
                cache.close(stream)
            self._closed = True
            if self._owned is not None and self._owned.is_open:
                self._owned.close()


def _shape_free(policy: dict[str, Any]) -> dict[str, Any]:
    """The policy without what only a class with all its layers can check."""
    for name in ("num_layers", "num_kv_heads", "head_dim", "tensors_per_layer", "window"):
        if name in policy:
            raise invalid(f"{name} is told by the layers")
    return {**policy, "group_size": 1}


def _condemn_together(cores: list[Core]) -> None:
    """A slot that a failure broke in one class is handed out in none."""
    broken = {slot.index for core in cores for slot in core.table if slot.broken}
    for core in cores:
        for index in broken:
            core.table.condemn(core.table[index])


def _bytes_for(core: Core, seq_lens: Sequence[int]) -> int:
    pages = sum(core.layout.pages_for(operator.index(length)) for length in seq_lens)
    return pages * core.layout.num_tensors * core.layout.page_size
