# SPDX-License-Identifier: MIT
"""Keeps blocks mapped until they are stored to host memory; part of the scheduler.

vLLM frees a request's blocks when the request ends, stores them a step or two later, and relies on
their contents until then. The pool could unmap them in between. So a block is *held*

    from its release by a finished request until the next step, which issues the request's stores
    from the step that issues a store until the store is reported as done

A held block is not unmapped, evicted to be unmapped, or moved. vLLM ensures that blocks being
loaded belong to their request until the load is done, even if the request is aborted.

If no step comes for `WORTH` seconds, the stores that have not started are dropped: the workers skip
them, and when they report this, vLLM's manager is told that the stores failed. A store is also
dropped if one of its source blocks was overwritten.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

__all__ = ["WORTH", "Holds"]

WORTH = 1.0  # blocks are held for stores until this many seconds after the last step


@dataclass
class _Store:
    """A store to host memory that a step has issued.

    Attributes:
        step: number of that step; the workers start the store no later than the next step.
        blocks: blocks that the store reads.
        keys: the keys by which vLLM's manager identifies the store.
        pending: number of ranks that have not reported the store yet.
    """

    step: int
    blocks: list[int]
    keys: frozenset[Any]
    pending: int


@dataclass
class Transfers:
    """Counts blocks transferred or dropped since the engine started.

    Attributes:
        stored, loaded, dropped: number of blocks; each block belongs to one KV cache group.
    """

    stored: int = 0
    loaded: int = 0
    dropped: int = 0


class Holds:
    """The held blocks of one engine. The caller holds the engine's lock.

    Args:
        connector: the scheduler's KV connector, or None. Blocks are only held for
            OffloadingConnector: other connectors tell vLLM when a request's blocks may be freed.
        ranks: number of ranks, each of which reports every transfer.

    Attributes:
        on: whether the connector is an OffloadingConnector.
        counters: totals since the start.
        dropped: ids of stores that the next step tells the workers to skip.
        scheduling: whether vLLM's `schedule` is running; blocks freed meanwhile are not held.
    """

    def __init__(self, connector: Any, ranks: int) -> None:
        offloading: Any = getattr(connector, "connector_scheduler", None)
        self.on = offloading is not None
        self.counters = Transfers()
        self.dropped: list[int] = []
        self._ranks = ranks
        self._held: Counter[int] = Counter()
        self._fresh: set[int] = set()  # freed by finished requests since the last step
        self._intact: set[int] = set()  # handed out to vLLM and not overwritten since
        self._stores: dict[int, _Store] = {}
        # for each load, the number of blocks and the number of ranks that have yet to report
        self._loads: dict[int, tuple[int, int]] = {}
        # the keys of each store, by the id of its spec
        self._keys: dict[int, tuple[Any, frozenset[Any]]] = {}
        self._failed: dict[frozenset[Any], bool] = {}  # dropped stores, by their keys
        self._told = 0  # dropped blocks already reported in vLLM's statistics
        self._chunks = 0  # number of chunks in host memory
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
        """Wraps the methods with which lower tiers write to host memory, to count chunks."""
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

    # ---- replacements of the manager's methods ---------------------------------------------------

    def _note_keys(self, keys: Any, req_context: Any) -> Any:
        output = self._prepare_store(keys, req_context)
        if output is not None and output.keys_to_store:
            self._chunks -= len(output.evicted_keys)
            spec = output.store_spec
            self._keys[id(spec)] = spec, frozenset(output.keys_to_store)
        return output

    def _note_failure(self, keys: Any, req_context: Any, success: bool = True) -> None:
        # These keys were pending until now, so no other store has the same keys.
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
        """The bytes of prefixes that each rank keeps in host memory."""
        return self._chunks * self._manager.chunk_bytes if self.on else 0

    def __contains__(self, block: int) -> bool:
        return block in self._held or block in self._fresh

    def __bool__(self) -> bool:
        return bool(self._held or self._fresh)

    # ---- blocks ----------------------------------------------------------------------------------

    def hand_out(self, blocks: Iterable[int]) -> None:
        """Records that vLLM has taken blocks and may write to them from now on."""
        self._intact.update(blocks)

    def overwrite(self, blocks: Iterable[int]) -> None:
        """Records that blocks lost their contents: they were unmapped or overwritten by a move."""
        self._intact.difference_update(blocks)

    def free(self, blocks: Iterable[int]) -> None:
        """Holds blocks that no request uses any longer, until the next step."""
        if self.on and not self.scheduling:
            self._fresh.update(blocks)

    # ---- steps -----------------------------------------------------------------------------------

    def order(self, step: int, metadata: Any) -> list[int]:
        """Records the transfers of a scheduled step.

        Args:
            step: the step's number.
            metadata: the connector's metadata in its `SchedulerOutput`.

        Returns:
            Blocks that are no longer held.
        """
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
        """Records transfers that ranks have finished.

        Args:
            completed: the number of ranks that have just reported each transfer, by its id.

        Returns:
            Blocks that are no longer held.
        """
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
        """Releases and returns all held blocks, since no step has run for a while.

        Drops the stores that the workers may not have started. Stores issued before step `ended`
        have started, and workers do not unmap a block before its store is done.

        Args:
            ended: the last step whose output was processed.
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
        """Clears the records about host memory; called when vLLM's manager clears its own."""
        self._failed.clear()
        self._chunks = 0

    def take_dropped(self) -> list[int]:
        """Returns and clears the ids of the stores that the workers must skip."""
        found, self.dropped = self.dropped, []
        return found
