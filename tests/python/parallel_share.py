# SPDX-License-Identifier: MIT
"""A plain model of one rank's cache: the pages that requests own, and the contents of their rows.

One seed, the same on every rank, determines the calls; each rank's own seed determines how long its
work takes. The model numbers the pages, so it knows whether there is enough memory for a call.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from share_helpers import read_rows, write_rows

from pyvmem import FdEvent
from pyvmem.kvcache import SwappedRequest
from pyvmem.kvcache.distributed import ParallelKVCache

__all__ = ["RankModel"]


class Request:
    """A request: the ids and tags of its rows, and the numbers of its pages."""

    def __init__(self, ids: list[int], tags: list[int], pages: list[int]) -> None:
        self.ids = ids
        self.tags = tags
        self.pages = pages


class RankModel:
    """Drives a cache at random and checks every answer; the ranks compare `answers`.

    Args:
        cache: has no window and eight rows per page.
        rank: this rank's index, and the number of ranks; every rank writes different rows.
        seed: seeds the random choices; it is the same on every rank.
        work: starts GPU work that completes later, at a different time on every rank.
        dawdle: sleeps for a different length of time on every rank.
    """

    def __init__(
        self,
        cache: ParallelKVCache,
        rank: tuple[int, int],
        seed: int,
        work: Callable[[], FdEvent],
        dawdle: Callable[[], None],
    ) -> None:
        self.cache = cache
        self.rank, self.ranks = rank
        self.random = random.Random(seed)
        self.work = work
        self.dawdle = dawdle
        self.rows = cache.sharing_unit
        self.budget = cache.available_pages
        self.requests: dict[int, Request] = {}
        self.swapped: list[tuple[SwappedRequest, Request]] = []
        # the page of each recorded sharing unit, keyed by all ids up to the unit's end
        self.recorded: dict[tuple[int, ...], int] = {}
        self.known: dict[tuple[int, ...], int] = {(0,): 0}
        self.numbers = 0
        self.answers: list[Any] = []

    # ---- expected state --------------------------------------------------------------------------

    def new_pages(self, count: int) -> list[int]:
        self.numbers += count
        return list(range(self.numbers - count, self.numbers))

    def pages_for(self, rows: int) -> int:
        return -(-rows // self.rows)

    def left(self) -> int:
        """Returns the number of pages per tensor that no request owns."""
        owned = {page for one in self.requests.values() for page in one.pages}
        return self.budget // self.cache.layout.num_tensors - len(owned)

    def slots_left(self) -> int:
        return self.cache.config.max_batch - len(self.requests)

    def said(self, name: str, answer: Any) -> Any:
        self.answers.append([name, answer])
        return answer

    def lens(self) -> list[int]:
        out = [0] * self.cache.config.max_batch
        for reqid, one in self.requests.items():
            out[reqid] = len(one.ids)
        return out

    def prompt(self) -> list[int]:
        """Returns a prompt: all or part of a system prompt or an earlier turn, then a few more ids.

        There are three system prompts.
        """
        system = [self.random.choice((1, 2, 3))] * 3 * self.rows
        known = [*map(list, self.known), system, system, system]
        seen = self.random.choice(known)
        keep = self.random.choice((len(seen), self.random.randint(0, len(seen))))
        ids = [self.random.randint(0, 1) for _ in range(self.random.randint(1, 2 * self.rows))]
        return [*seen[:keep], *ids][: self.cache.config.max_seq_len]

    def event(self) -> FdEvent | None:
        return self.work() if self.random.random() < 0.6 else None

    def any_request(self) -> int:
        return self.random.choice(list(self.requests)) if self.requests else -1

    # ---- calls -----------------------------------------------------------------------------------

    def enter(self, reqid: int, one: Request) -> None:
        assert reqid not in self.requests
        self.requests[reqid] = one
        assert read_rows(self.cache, reqid, 0, one.tags)

    def write(self, reqid: int, ids: list[int]) -> None:
        """Writes the rows of new tokens; a row's contents depend on all ids up to its own, and on
        the rank.
        """
        one = self.requests[reqid]
        low = len(one.ids)
        for token in ids:
            one.ids.append(token)
            tag = self.known.setdefault(tuple(one.ids), len(self.known))
            one.tags.append(self.ranks * tag + self.rank)
        write_rows(self.cache, reqid, low, one.tags[low:])

    def grow(self, more: dict[int, list[int]]) -> None:
        """Calls `step`, sometimes after `step_async` with other calls in between."""
        longest = self.cache.config.max_seq_len
        want = self.lens()
        for reqid, ids in more.items():
            want[reqid] = min(want[reqid] + len(ids), longest)
        if not self.requests:
            return
        calls = ["step_async"] * self.random.choice((0, 0, 1, 2)) + ["step"]
        for name in calls:
            had = {
                reqid: max(0, self.pages_for(want[reqid]) - len(one.pages))
                for reqid, one in self.requests.items()
            }
            fits = sum(had.values()) <= self.left()
            assert (self.said(name, getattr(self.cache, name)(want)) == 0) == fits, (name, want)
            if not fits:
                self.give_up()
                return
            for reqid, count in had.items():
                self.requests[reqid].pages += self.new_pages(count)
            if name == "step_async" and self.random.random() < 0.5:
                self.random.choice((self.admit, self.fork, self.record))(self.any_request())
                for reqid, one in self.requests.items():  # including any that a fork created
                    want[reqid] = max(want[reqid], len(one.ids))
        for reqid, ids in more.items():
            self.write(reqid, ids[: want[reqid] - len(self.requests[reqid].ids)])

    def start(self) -> None:
        """Starts a request with the cached prefix of its prompt."""
        prompt = self.prompt()
        match: Any = prompt
        if self.random.random() < 0.5:
            match = self.cache.match(prompt)
        taken = self.said("alloc_prefix", self.cache.alloc_prefix(match))
        assert (taken is None) == (not self.slots_left())
        if match is not prompt:
            match.release()
        if taken is None:
            return
        reqid, length = taken
        tags = [self.ranks * self.known[tuple(prompt[: n + 1])] + self.rank for n in range(length)]
        units = range(self.rows, length + 1, self.rows)
        pages = [self.recorded[tuple(prompt[:end])] for end in units]
        self.enter(reqid, Request(prompt[:length], tags, pages))
        self.grow({reqid: prompt[length:]})

    def alloc(self) -> None:
        reqid = self.said("alloc", self.cache.alloc_reqid(self.random.randint(0, self.rows)))
        assert (reqid is None) == (not self.slots_left())
        if reqid is not None:
            self.enter(reqid, Request([], [], []))
            self.grow({reqid: self.prompt()})

    def fork(self, reqid: int) -> None:
        one = self.requests[reqid]
        held = self.cache.snapshot()[reqid].seq_len
        length, count = self.random.randint(held // 2, held), self.random.choice((1, 1, 2, 3))
        full, pages = length // self.rows, self.pages_for(length)
        into = None
        if self.random.random() < 0.4 and count <= self.slots_left():
            free = [i for i in range(self.cache.config.max_batch) if i not in self.requests]
            into = self.random.sample(free, count)
        forked = self.cache.fork_many(reqid, count, length, self.event(), into)
        self.said("fork", forked)
        fits = (pages - full) * count <= self.left() and count <= self.slots_left()
        assert (forked is not None) == fits
        assert into is None or forked in (None, into)
        for child in forked or ():
            own = one.pages[:full] + self.new_pages(pages - full)
            self.enter(child, Request(one.ids[:length], one.tags[:length], own))

    def note_record(self, reqid: int, ids: list[int]) -> None:
        """Notes which of the request's pages hold the rows that a recording adds."""
        with self.cache.match(ids, leave=0) as found:
            before = self.said("match", found.length)
        for end in range(before + self.rows, len(ids) + 1, self.rows):
            self.recorded[tuple(ids[:end])] = self.requests[reqid].pages[end // self.rows - 1]

    def record(self, reqid: int) -> None:
        ids = self.requests[reqid].ids[: self.cache.snapshot()[reqid].seq_len]
        self.note_record(reqid, ids)
        recorded = self.said("record", self.cache.record(reqid, ids, self.event()))
        assert recorded == len(ids) // self.rows * self.rows

    def free(self, reqid: int, record: bool = False) -> None:
        ids = None
        if record:
            ids = self.requests[reqid].ids[: self.cache.snapshot()[reqid].seq_len]
            self.note_record(reqid, ids)
        self.cache.free_reqid(reqid, self.event(), ids)
        del self.requests[reqid]

    def give_up(self) -> None:
        """Preempts the longest request: swaps it out or frees it."""
        reqid = max(self.requests, key=lambda one: len(self.requests[one].pages))
        if self.random.random() < 0.5:
            self.swap_out(reqid)
        else:
            self.free(reqid)

    def swap_out(self, reqid: int) -> None:
        swapped = self.said("swap_out", self.cache.swap_out(reqid, self.event()))
        self.answers[-1][1] = str(swapped)
        one = self.requests.pop(reqid)
        kept = swapped.seq_len
        self.swapped.append((swapped, Request(one.ids[:kept], one.tags[:kept], [])))

    def swap_in(self) -> None:
        swapped, one = self.swapped.pop(self.random.randrange(len(self.swapped)))
        pages = self.pages_for(swapped.seq_len)
        fits = pages <= self.left() and self.slots_left() > 0
        reqid = self.said("swap_in", self.cache.swap_in(swapped, self.event()))
        assert (reqid is not None) == fits
        if reqid is None:
            self.swapped.append((swapped, one))
            return
        one.pages = self.new_pages(pages)
        self.enter(reqid, one)

    def admit(self, _: int = 0) -> None:
        lengths = [self.random.randint(1, 2 * self.rows) for _ in range(self.random.randint(1, 3))]
        fits = sum(map(self.pages_for, lengths)) <= self.left()
        fits = fits and len(lengths) <= self.slots_left()
        assert self.said("can_admit", self.cache.can_admit(lengths)) == fits

    # ---- calls -----------------------------------------------------------------------------------

    def any_call(self) -> None:
        """Makes one random call that an engine might make."""
        self.dawdle()
        pick = self.random.random()
        reqid = self.any_request()
        if pick < 0.18 or not self.requests:
            self.start()
        elif pick < 0.23:
            self.alloc()
        elif pick < 0.5:
            more = (0, 1, self.rows)
            self.grow({one: self.prompt()[: self.random.choice(more)] for one in self.requests})
        elif pick < 0.62:
            self.fork(reqid)
        elif pick < 0.7:
            self.record(reqid)
        elif pick < 0.84:
            self.free(reqid, record=self.random.random() < 0.7)
        elif pick < 0.89:
            self.swap_out(reqid)
        elif pick < 0.95 and self.swapped:
            self.swap_in()
        elif pick < 0.98:
            self.admit()
        else:
            self.cache.trim(prefixes=self.random.random() < 0.3)
        tensors = self.cache.layout.num_tensors
        assert self.cache.available_pages == self.left() * tensors + self.budget % tensors

    def check(self) -> None:
        """Checks every row of every request, the page counts, and that all ranks gave the same
        answers."""
        self.cache.check_integrity()
        for reqid, one in self.requests.items():
            assert read_rows(self.cache, reqid, 0, one.tags), f"wrong rows in reqid {reqid}"
        self.cache.check_step()

    def play(self, count: int) -> list[Any]:
        """Makes `count` calls and returns the answers; then frees everything."""
        for number in range(count):
            self.any_call()
            if number % 10 == 0:
                self.check()
        self.check()
        for reqid in list(self.requests):
            self.free(reqid)
        for swapped, _ in self.swapped:
            swapped.close()
        return self.answers
