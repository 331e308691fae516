# SPDX-License-Identifier: MIT
"""Checks the fields of `CacheStats` against an independent count over a random trace of calls.

The calls succeed, run short of memory, fail in the driver (`Context.inject`) or are interrupted.
The effect of a call is derived from its result and from the slots before and after it, never from a
counter.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
from interrupts_helpers import Interrupted, Interrupts
from kvcache_helpers import ROWS, eventually, small_config

import pyvmem
from pyvmem import Context, Inject, KVCache
from pyvmem.errors import VMemError
from pyvmem.kvcache import CacheStats

SLOTS, SEEDS, CALLS = 4, 8, 250
KINDS = (Inject.MAP, Inject.UNMAP, Inject.SLAB)


def driver_calls(context: Context) -> int:
    """Returns the number of driver calls that the context has made."""
    stats = context.stats()
    return stats.map_calls + stats.unmap_calls + stats.slab_calls + stats.fill_calls


class Trace:
    """A cache, random calls to it, and the expected counts."""

    def __init__(self, cache: KVCache, seed: int, interrupts: bool) -> None:
        self.cache, self.dice, self.interrupts = cache, random.Random(seed), interrupts
        self.tokens: dict[int, list[int]] = {}  # by request
        self.want = dict.fromkeys(
            (
                *("steps", "steps_async", "short", "evicted_pages"),
                *("prefix_queries", "prefix_query_tokens", "prefix_hits", "prefix_hit_tokens"),
            ),
            0,
        )
        self.cut = False  # true if the last call was interrupted
        self.outcomes = dict.fromkeys(("answered", "refused", "failed", "interrupted"), 0)
        eventually(lambda: not any(slot.in_flight for slot in cache.snapshot()))
        self.last = cache.stats()
        self.base = driver_calls(cache.context) - self.last.driver_calls
        self.used = self.last.used_bytes
        cache.internals.prefix_changes()

    # ---- calls ----------------------------------------------------------------------------------

    def call(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[bool, Any]:
        """Makes a call, sometimes with an injected failure; returns whether it succeeded, and its
        result."""
        context, chance, self.cut = self.cache.context, self.dice.random(), False
        if chance < 0.1:
            context.inject(self.dice.choice(KINDS), self.dice.randrange(3), 1)
        try:
            if self.interrupts and chance > 0.85:
                interrupts = Interrupts(self.dice.randrange(1, 400))
                answer = interrupts.run(lambda: method(*args, **kwargs))
            else:
                answer = method(*args, **kwargs)
        except VMemError:
            self.outcomes["failed"] += 1
            return False, None
        except Interrupted:
            self.outcomes["interrupted"] += 1
            self.cut = True
            return False, None
        finally:
            context.inject(0, count=0)
        self.outcomes["refused" if answer in (None, -1) else "answered"] += 1
        return True, answer

    def prompt(self) -> list[int]:
        """Returns a prompt of one of three kinds; prompts of the same kind share a prefix."""
        kind = self.dice.randrange(3)
        return [kind * 100 + n for n in range(self.dice.randrange(1, 5 * ROWS))]

    def begin(self) -> None:
        ids, form = self.prompt(), self.dice.randrange(3)
        if form == 2:
            answered, reqid = self.call(self.cache.alloc_reqid, len(ids))
            if answered and reqid is not None:
                self.tokens[reqid] = []
            return
        asked: Any = self.cache.match(ids) if form else ids  # `match` itself is not counted
        answered, begun = self.call(self.cache.alloc_prefix, asked)
        if form:
            asked.release()
        # the interrupt may have come after the work was done, so that only the result was lost
        if self.cut:
            stats, told = self.cache.stats(), {}
            for name in ("queries", "query_tokens", "hits", "hit_tokens"):
                told[name] = getattr(stats, f"prefix_{name}") - self.want[f"prefix_{name}"]
                self.want[f"prefix_{name}"] += told[name]
            done = told["queries"]
            assert done in (0, 1)
            assert told["query_tokens"] == done * len(ids)
            assert told["hits"] == (told["hit_tokens"] > 0) <= done
        if answered and begun is not None:
            reqid, held = begun
            self.tokens[reqid] = ids[:held]
            self.want["prefix_queries"] += 1
            self.want["prefix_query_tokens"] += len(ids)
            self.want["prefix_hits"] += held > 0
            self.want["prefix_hit_tokens"] += held

    def grow(self) -> None:
        lengths, more = [0] * SLOTS, {}
        for reqid, ids in self.tokens.items():
            room = self.cache.config.max_seq_len - len(ids)
            more[reqid] = self.dice.randrange(min(room, 2 * ROWS) + 1)
            lengths[reqid] = len(ids) + more[reqid]
        ahead = self.dice.random() < 0.3
        granted, before = self.granted(), self.cache.stats()
        rows = [slot.seq_len for slot in self.cache.snapshot()]
        answered, result = self.call(self.cache.step_async if ahead else self.cache.step, lengths)
        if not answered:
            self.take_cut(lengths, rows, ahead=ahead)
            return
        self.want["short" if result else "steps_async" if ahead else "steps"] += 1
        if result or ahead:
            return
        after, kind = self.cache.stats(), self.dice.randrange(3)
        new = self.granted() - granted
        assert after.grown_pages + after.reused_pages >= before.grown_pages + before.reused_pages
        assert after.zeroed_pages - before.zeroed_pages <= max(0, new) + self.slack(before, after)
        for reqid, count in more.items():
            ids = self.tokens[reqid]
            ids += [kind * 100 + len(ids) + n for n in range(count)] if ids else self.prompt()
            del ids[lengths[reqid] :]
            ids += [99] * (lengths[reqid] - len(ids))

    def take_cut(self, lengths: list[int], rows: list[int], *, ahead: bool) -> None:
        """Counts an interrupted step if the cache did, which it must if the step took effect."""
        if not self.cut:
            return
        name = "steps_async" if ahead else "steps"
        told = getattr(self.cache.stats(), name) - self.want[name]
        now = [slot.seq_len for slot in self.cache.snapshot()]
        assert told in (0, 1)
        if now != rows:
            assert told, "the rows must be mapped"
            assert now == lengths
        self.want[name] += told

    def slack(self, before: CacheStats, after: CacheStats) -> int:
        """Returns the number of pages that the step reused, any of which it may have zeroed without
        granting a new page.
        """
        return after.reused_pages - before.reused_pages

    def granted(self) -> int:
        tensors = self.cache.layout.num_tensors
        return sum(slot.granted_pages for slot in self.cache.snapshot()) * tensors

    def free(self) -> None:
        if self.tokens:
            reqid = self.dice.choice(list(self.tokens))
            ids = self.tokens[reqid] if self.dice.random() < 0.6 else None
            self.call(self.cache.free_reqid, reqid, tokens=ids)
            self.settle()

    def fork(self) -> None:
        if self.tokens:
            reqid = self.dice.choice(list(self.tokens))
            answered, child = self.call(self.cache.fork, reqid)
            if answered and child is not None:
                self.tokens[child] = list(self.tokens[reqid])

    def truncate(self) -> None:
        if self.tokens:
            reqid = self.dice.choice(list(self.tokens))
            rows = self.dice.randrange(len(self.tokens[reqid]) + 1)
            if self.call(self.cache.truncate, reqid, rows)[0]:
                del self.tokens[reqid][rows:]

    def trim(self) -> None:
        self.call(self.cache.trim, prefixes=self.dice.random() < 0.3)

    # ---- checks after each call ---------------------------------------------------------------

    def settle(self) -> None:
        """Updates the expected tokens from the slots: an interrupted call may have changed them."""
        snapshot = self.cache.snapshot()
        for slot in snapshot:
            if slot.state == "active":
                ids = self.tokens.setdefault(slot.reqid, [])
                del ids[slot.seq_len :]
                ids += [99] * (slot.seq_len - len(ids))
            else:
                self.tokens.pop(slot.reqid, None)

    def check(self, *, settled: bool) -> None:
        cache, tensors = self.cache, self.cache.layout.num_tensors
        unit = cache.sharing_unit
        for change in cache.internals.prefix_changes():
            if not change.stored:
                pages = (len(change.ids) - change.first * unit) // ROWS
                self.want["evicted_pages"] += pages * tensors
        stats = cache.stats()
        told = {name: getattr(stats, name) for name in self.want}
        assert told == self.want
        assert stats.prefix_resumed <= stats.prefix_hits
        # Every mapped or unmapped page is counted.
        mapped = stats.mapped_bytes // cache.layout.page_size
        assert mapped == stats.active_pages + stats.cached_pages
        uncounted = mapped - (stats.grown_pages - stats.reclaimed_pages)
        # a step may already be mapping some eager pages
        settled = settled and not cache.config.eager_pages
        assert 0 <= uncounted <= (0 if settled else stats.cached_pages), "promised, not mapped yet"
        assert (stats.moved_pages, stats.promoted_pages) == (0, 0)
        assert stats.total_pages == stats.free_pages + mapped
        assert stats.peak_mapped_bytes >= stats.mapped_bytes
        self.used = max(self.used, stats.used_bytes)
        assert stats.peak_used_bytes >= self.used
        assert sum(stats.wait_counts) == stats.waits
        slots = cache.snapshot()
        for state in ("active", "cached", "empty", "broken"):
            number = getattr(stats, f"{state}_slots")
            assert number == sum(one.state == state for one in slots)
        assert stats.driver_calls == driver_calls(cache.context) - self.base
        assert stats.critical_driver_ns + stats.background_driver_ns == stats.driver_ns
        for name in ("grown_pages", "reclaimed_pages", "reused_pages", "zeroed_pages", "waits"):
            assert getattr(stats, name) >= getattr(self.last, name), name
        self.last = stats

    def run(self) -> None:
        acts = [self.begin, self.grow, self.grow, self.free, self.fork, self.truncate, self.trim]
        weights = [6, 8, 8, 4, 1, 1, 1]
        for _ in range(CALLS):
            self.dice.choices(acts, weights)[0]()
            self.settle()
            self.check(settled=self.quiet())

    def quiet(self) -> bool:
        """Waits for background work; returns true if a step has also added its results to the
        records.
        """
        eventually(lambda: not any(slot.in_flight for slot in self.cache.snapshot()))
        if self.dice.random() < 0.5:
            return False
        lengths = [len(self.tokens.get(reqid, ())) for reqid in range(SLOTS)]
        try:
            self.want["short" if self.cache.step(lengths) else "steps"] += 1
        except VMemError:  # the background work failed
            return False
        eventually(lambda: not any(slot.in_flight for slot in self.cache.snapshot()))
        return True


@pytest.mark.parametrize("seed", range(SEEDS))
@pytest.mark.parametrize("interrupts", [False, True])
def test_a_random_trace(context: Context, seed: int, interrupts: bool) -> None:
    caps = pyvmem.Caps.ALIAS | pyvmem.Caps.READONLY
    if caps not in context.info.caps:
        pytest.skip("the back end has no prefixes")
    page = context.info.granule
    limit = random.Random(seed).choice((8, 12, 64))
    config = small_config(page, memory_limit=limit * 4 * page, idle_seconds=0, eager_pages=seed % 2)
    with KVCache(config, context) as cache:
        trace = Trace(cache, seed, interrupts)
        trace.run()
        cache.check_integrity()
        print(f"seed {seed}: {trace.outcomes}, {trace.want}")
        assert all(trace.outcomes[name] for name in ("answered", "refused"))
        assert interrupts == bool(trace.outcomes["interrupted"])
