# SPDX-License-Identifier: MIT
"""Blocks whose memory stays because a store to host memory needs it: the scheduler's side.

vLLM frees a request's blocks as soon as it ends, stores them a step or two later, and relies on
their contents until then. Here memory may be gone by that time. So a block is *held*

    from its release by a request that ended to the next step, which says what is stored of it
    from the step that orders a store to the report that it has ended

and is neither given back, nor evicted to be given back, nor moved. Blocks that are loaded are the
request's until the load has ended, also when it is aborted: vLLM sees to that.

Where no step comes for `WORTH` seconds that could carry the stores on, what has not begun is
dropped: the workers copy nothing, and once they say so vLLM's manager hears that the store failed.
So is a store whose source is not what vLLM left there any more.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

__all__ = ["WORTH", "Holds"]

WORTH = 1.0  # s that memory waits for stores, after the last step


@dataclass
class _Store:
    """A store that was ordered.

    Attributes:
        step: which orders it; the workers begin it a step later at most.
        blocks: what it reads.
        keys: by which vLLM's manager knows it.
        pending: ranks that have yet to report.
    """

    step: int
    blocks: list[int]
    keys: frozenset[Any]
    pending: int


@dataclass
class Transfers:
    """Blocks since the start, of one KV cache group each.

    Attributes:
        stored, loaded, dropped: how many.
    """

    stored: int = 0
    loaded: int = 0
    dropped: int = 0


class Holds:
    """The holds of one engine. Its lock is held wherever this is called.

    Args:
        connector: vLLM's, or None. Blocks are held for OffloadingConnector alone: others tell vLLM
            of each request when its blocks may be freed.
        ranks: how many report each transfer.
    """

    def __init__(self, connector: Any, ranks: int) -> None:
        offloading: Any = getattr(connector, "connector_scheduler", None)
        self.on = offloading is not None
        self.counters = Transfers()
        self.dropped: list[int] = []  # for the next step to tell the workers
        self._ranks = ranks
        self._held: Counter[int] = Counter()
        self._fresh: set[int] = set()  # freed by ended requests since the last step
        self._intact: set[int] = set()  # handed out to vLLM, and neither given back nor moved into
        self._stores: dict[int, _Store] = {}
        self._loads: dict[int, tuple[int, int]] = {}  # blocks, and ranks to report
        self._keys: dict[int, tuple[Any, frozenset[Any]]] = {}  # by the id of where they go
        self._failed: dict[frozenset[Any], bool] = {}  # of stores that were dropped
        self._told = 0  # dropped blocks that the statistics have
        self._chunks = 0  # in host memory
        self.scheduling = False
        if self.on:
            self._manager = offloading.manager
            self._prepare_store = self._manager.prepare_store
            self._complete_store = self._manager.complete_store
            self._get_stats = self._manager.get_stats
            self._manager.prepare_store = self._note_keys
            self._manager.complete_store = self._note_failure
            self._manager.get_stats = self._add_stats
            if (host := getattr(self._manager, "primary_tier", None)) is not None:
                self._count_lower_tiers(host)

    def _count_lower_tiers(self, host: Any) -> None:
        """Counts what vLLM's other tiers, which write to host memory by these, bring there."""
        prepare, complete = host.prepare_write, host.complete_write

        def prepare_write(keys: Any, req_context: Any) -> Any:
            output = prepare(keys, req_context)
            if output is not None:
                self._chunks -= len(output.evicted_keys)
            return output

        def complete_write(keys: Any, req_context: Any, success: bool = True) -> None:
            self._chunks += len(keys) if success else 0
            complete(keys, req_context, success)

        host.prepare_write, host.complete_write = prepare_write, complete_write

    # ---- what vLLM's manager is asked ------------------------------------------------------------

    def _note_keys(self, keys: Any, req_context: Any) -> Any:
        output = self._prepare_store(keys, req_context)
        if output is not None and output.keys_to_store:
            self._chunks -= len(output.evicted_keys)
            spec = output.store_spec
            self._keys[id(spec)] = spec, frozenset(output.keys_to_store)
        return output

    def _note_failure(self, keys: Any, req_context: Any, success: bool = True) -> None:
        # Until here the keys were pending: no other store has had the same.
        failed = self._failed.pop(frozenset(keys), False) if self._failed else False
        success = success and not failed
        if success:
            self._chunks += len(keys)
        self._complete_store(keys, req_context, success=success)

    def _add_stats(self) -> Any:
        from pyvmem.vllm.offload_spec import DROPPED, HELD

        stats = self._get_stats()
        if stats is not None:
            stats.increase_counter(DROPPED, self.counters.dropped - self._told)
            self._told = self.counters.dropped
            stats.set_gauge(HELD, len(self._held) + len(self._fresh))
        return stats

    # ---- questions -------------------------------------------------------------------------------

    @property
    def host_cached(self) -> int:
        """Bytes of prefixes in host memory, of each rank."""
        return self._chunks * self._manager.chunk_bytes if self.on else 0

    def __contains__(self, block: int) -> bool:
        return block in self._held or block in self._fresh

    def __bool__(self) -> bool:
        return bool(self._held or self._fresh)

    # ---- blocks ----------------------------------------------------------------------------------

    def hand_out(self, blocks: Iterable[int]) -> None:
        """VLLM takes blocks: what is in them is its own from now on."""
        self._intact.update(blocks)

    def overwrite(self, blocks: Iterable[int]) -> None:
        """The contents of blocks are gone."""
        self._intact.difference_update(blocks)

    def free(self, blocks: Iterable[int]) -> None:
        """No request has these blocks any more."""
        if self.on and not self.scheduling:
            self._fresh.update(blocks)

    # ---- steps -----------------------------------------------------------------------------------

    def order(self, step: int, metadata: Any) -> list[int]:
        """A step was scheduled, with these transfers; returns blocks that may be let go."""
        before, self._fresh = self._fresh, set()
        for number, job in metadata.load_jobs.items():
            self._loads[number] = len(job.dst_spec.block_ids), self._ranks
        for number, job in metadata.store_jobs.items():
            _, keys = self._keys.pop(id(job.dst_spec))
            blocks = job.src_spec.block_ids.tolist()
            store = _Store(step, blocks, keys, self._ranks)
            if self._intact.issuperset(blocks):
                self._stores[number] = store
                self._held.update(blocks)
            else:
                self._drop(number, store)
        self._keys.clear()
        return [one for one in before if one not in self._held]

    def report(self, completed: dict[int, int]) -> list[int]:
        """Ranks have ended transfers; returns blocks that may be let go."""
        found: list[int] = []
        for number, ranks in completed.items():
            if number in self._loads:
                blocks, pending = self._loads.pop(number)
                if pending > ranks:
                    self._loads[number] = blocks, pending - ranks
                else:
                    self.counters.loaded += blocks
            elif number in self._stores:
                store = self._stores[number]
                store.pending -= ranks
                if not store.pending:
                    del self._stores[number]
                    self.counters.stored += len(store.blocks)
                    found += self._let_go(store.blocks)
        return found

    def expire(self, ended: int) -> list[int]:
        """No step comes: returns blocks that may be let go, all of them.

        Args:
            ended: the last step whose output was taken. The workers began what was ordered before;
                that is done to the end, as their unmapping waits for it.
        """
        found, self._fresh = [*self._fresh], set()
        for number, store in [*self._stores.items()]:
            found += self._let_go(store.blocks)
            del self._stores[number]
            if store.step < ended:
                self.counters.stored += len(store.blocks)
            else:
                self._drop(number, store)
        return found

    def _drop(self, number: int, store: _Store) -> None:
        self.counters.dropped += len(store.blocks)
        self.dropped.append(number)
        self._failed[store.keys] = True

    def _let_go(self, blocks: list[int]) -> list[int]:
        self._held.subtract(blocks)
        gone = [one for one in set(blocks) if self._held[one] <= 0]
        for one in gone:
            del self._held[one]
        return gone

    def forget(self) -> None:
        """VLLM has forgotten all stores; the ranks end those that are under way."""
        self._failed.clear()
        self._chunks = 0

    def take_dropped(self) -> list[int]:
        """The stores that the workers must not begin, once."""
        found, self.dropped = self.dropped, []
        return found
