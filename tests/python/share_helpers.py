# SPDX-License-Identifier: MIT
"""A plain Python model of a cache whose requests share pages: the expected contents of every row.

Rows are read and written through the reservation, so the model also works where torch cannot access
the memory.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from kvcache_helpers import state

from pyvmem import FdEvent, InvalidArgument, KVCache, OutOfMemory
from pyvmem.kvcache import SlotInfo, SwappedRequest

__all__ = [
    "ShareModel",
    "WindowModel",
    "grow",
    "is_zero",
    "read_rows",
    "row_bytes",
    "start",
    "whole",
    "write_rows",
]


def row_bytes(cache: KVCache, tensor: int, tag: int) -> bytes:
    """Returns the bytes of a row with this tag in a tensor; its first four bytes are unique."""
    pattern = (tag * 64 + tensor + 1).to_bytes(4, "little")
    size = cache.layout.row_bytes
    return (pattern * (size // 4 + 1))[:size]


def write_rows(cache: KVCache, reqid: int, low: int, tags: list[int]) -> None:
    """Writes rows with these tags to every tensor, starting at row `low`."""
    size = cache.layout.row_bytes
    for tensor in range(cache.layout.num_tensors):
        data = b"".join(row_bytes(cache, tensor, tag) for tag in tags)
        if not data:
            return
        cache.reservation.write(cache.layout.offset(reqid, 0, tensor) + low * size, data)


def read_rows(cache: KVCache, reqid: int, low: int, tags: list[int]) -> bool:
    """Returns true if the rows from `low` onward have these tags in every tensor."""
    size = cache.layout.row_bytes
    return all(
        cache.reservation.read(cache.layout.offset(reqid, 0, tensor) + low * size, len(tags) * size)
        == b"".join(row_bytes(cache, tensor, tag) for tag in tags)
        for tensor in range(cache.layout.num_tensors)
        if tags
    )


def start(cache: KVCache, rows: int, first: int = 1, by: int = 0) -> int:
    """Starts a request of `rows` rows with the tags `first`, `first` + 1, and so on.

    Each step adds `by` rows, or all of them if `by` is 0.
    """
    reqid = cache.alloc_reqid(rows)
    assert reqid is not None
    grow(cache, reqid, 0, rows, first, by)
    return reqid


def grow(cache: KVCache, reqid: int, low: int, rows: int, first: int = 1, by: int = 0) -> None:
    """Grows a request to `rows` rows; row `n`, from `low` onward, gets the tag ``first + n``."""
    for end in [*range(low + by, rows, by), rows] if by else [rows]:
        want = [slot.seq_len for slot in cache.snapshot()]
        want[reqid] = end
        assert cache.step(want) == 0
    write_rows(cache, reqid, low, list(range(first + low, first + rows)))


def whole(cache: KVCache, reqid: int, rows: int, first: int = 1) -> bool:
    """Returns true if the rows are those that `start` wrote."""
    return read_rows(cache, reqid, 0, list(range(first, first + rows)))


def is_zero(cache: KVCache, reqid: int, low: int, rows: int) -> bool:
    """Returns true if the `rows` rows starting at `low` are zero in every tensor."""
    size = cache.layout.row_bytes
    return not any(
        any(cache.reservation.read(cache.layout.offset(reqid, 0, t) + low * size, rows * size))
        for t in range(cache.layout.num_tensors)
    )


class ShareModel:
    """Drives a cache at random. As in a real model, a token's row depends on all tokens before it.

    Attributes:
        parts: the cache's groups of equal layers.
        tokens: the ids whose rows each request holds, by reqid.
        tags: the contents of those rows, by reqid.
        waits: true if GPU work of freed requests may still be running when a call needs their
            slots, as is possible for work on a GPU's current stream.
    """

    waits = False

    def __init__(self, cache: KVCache, seed: int) -> None:
        self.cache = cache
        self.parts = cache.caches
        self.first = self.parts[0]
        self.waits |= cache.context.cuda_device is not None
        self.random = random.Random(seed)
        self.tokens: dict[int, list[int]] = {}
        self.tags: dict[int, list[int]] = {}
        self.swapped: list[tuple[SwappedRequest, list[int], list[int]]] = []
        self.events: list[FdEvent] = []
        self.known: dict[tuple[int, ...], int] = {}
        self.counts: dict[str, int] = {}
        self.more = 20  # the most new tokens in a prompt

    def tag(self, tokens: list[int]) -> int:
        """Returns the tag of the last token's row, which depends only on these tokens."""
        return self.known.setdefault(tuple(tokens), len(self.known) + 1)

    def named(self, tokens: list[int]) -> tuple[list[int], Any]:
        """Returns the ids passed to the cache for these tokens, and their namespace."""
        return tokens, None

    def length_of(self, tokens: list[int], leave: int = 1) -> int:
        """Returns the cached length of a prompt."""
        ids, space = self.named(tokens)
        return self.cache.match(ids, leave, space).length

    def count(self, what: str) -> None:
        self.counts[what] = self.counts.get(what, 0) + 1

    def stream(self) -> FdEvent | None:
        """Returns unfinished GPU work, or None."""
        if self.random.random() < 0.6:
            return None
        event = FdEvent.create()
        self.events.append(event)
        return event

    def lens(self, more: dict[int, int] | None = None) -> list[int]:
        out = [0] * self.first.config.max_batch
        for reqid, tokens in self.tokens.items():
            out[reqid] = len(tokens) + (more or {}).get(reqid, 0)
        return out

    def prompt(self) -> list[int]:
        """Returns a prompt, which usually starts like an earlier prompt."""
        longest = self.first.config.max_seq_len
        seen = self.random.choice(list(self.known)) if self.known else ()
        keep = self.random.randint(0, len(seen))
        more = [self.random.randint(0, 2) for _ in range(self.random.randint(1, self.more))]
        return [*seen[:keep], *more][:longest]

    # ---- calls of an engine ----------------------------------------------------------------------

    def append(self, reqid: int, ids: list[int]) -> None:
        """Writes the rows of new tokens; a step has already mapped their pages."""
        tokens, tags = self.tokens[reqid], self.tags[reqid]
        low = len(tokens)
        for one in ids:
            tokens.append(one)
            tags.append(self.tag(tokens))
        for one in self.parts:
            write_rows(one, reqid, low, tags[low:])

    def holds(self, reqid: int) -> bool:
        """Returns true if a request has all its rows, in every group."""
        return all(read_rows(one, reqid, 0, self.tags[reqid]) for one in self.parts)

    def grow(self, more: dict[int, list[int]]) -> None:
        self.fire()  # completes the model's stand-in for GPU work before a call waits for it
        longest = self.first.config.max_seq_len
        more = {r: ids[: longest - len(self.tokens[r])] for r, ids in more.items()}
        want = self.lens({reqid: len(ids) for reqid, ids in more.items()})
        ahead = self.random.random() < 0.5
        refused = ahead and self.cache.step_async(want) == -1
        if refused or self.cache.step(want) == -1:
            assert refused or not ahead, "step must succeed after step_async reserved the pages"
            self.count("short")
            self.give_up()
            return
        for reqid, ids in more.items():
            self.append(reqid, ids)

    def start(self) -> None:
        prompt = self.prompt()
        self.fire()
        before = state(self.first)
        found = self.length_of(prompt)
        ids, space = self.named(prompt)
        taken = self.cache.alloc_prefix(ids, namespace=space)
        if taken is None:
            self.refused(before)
            return
        reqid, length = taken
        if length != found:
            assert (length, self.waits) == (0, True), (
                "no prefix was used, though no GPU work held up a slot"
            )
            self.count("held up")
        assert length < len(prompt)
        assert reqid not in self.tokens
        self.count("hit" if length else "miss")
        self.tokens[reqid] = prompt[:length]
        self.tags[reqid] = [self.tag(prompt[: n + 1]) for n in range(length)]
        assert self.holds(reqid)
        self.grow({reqid: prompt[length:]})

    def refused(self, before: tuple[Any, ...]) -> None:
        """Checks that an `alloc_prefix` that returned None had no effect, except that it may have
        unmapped pages freed earlier.
        """
        self.count("no slot")
        assert len(self.tokens) == self.first.config.max_batch
        assert self.running() == self.running(before[0])

    def running(self, slots: list[SlotInfo] | None = None) -> list[tuple[int, int, int]]:
        """Returns the pages and rows of each running request."""
        slots = self.first.snapshot() if slots is None else slots
        return [(s.reqid, s.seq_len, s.granted_pages) for s in slots if s.state == "active"]

    def fork(self, reqid: int) -> None:
        length = self.random.choice((None, self.random.randint(0, len(self.tokens[reqid]))))
        count = self.random.choice((1, 1, 2))
        self.fire()
        if self.lens() != [info.seq_len for info in self.first.snapshot()]:
            length = min(len(self.tokens[reqid]), self.first.snapshot()[reqid].seq_len)
        forked = self.cache.fork_many(reqid, count, length)
        if forked is None:
            self.count("no fork")
            return
        self.count("fork")
        for child in forked:
            assert child not in self.tokens
            self.tokens[child] = self.tokens[reqid][:length]
            self.tags[child] = self.tags[reqid][:length]

    def free(self, reqid: int, record: bool) -> None:
        tokens = self.tokens.pop(reqid)
        del self.tags[reqid]
        ids, space = self.named(tokens[: self.first.snapshot()[reqid].seq_len])
        self.cache.free_reqid(reqid, self.stream(), ids if record else None, space)

    def record(self, reqid: int) -> None:
        self.fire()
        held = self.first.snapshot()[reqid].seq_len
        tokens = self.tokens[reqid][:held]
        unit = self.cache.sharing_unit
        ids, space = self.named(tokens)
        assert self.cache.record(reqid, ids, namespace=space) == len(tokens) // unit * unit
        assert self.length_of(tokens, leave=0) == len(tokens) // unit * unit

    def truncate(self, reqid: int) -> None:
        """Truncates a request; if there is no memory for a copy, nothing changes."""
        self.fire()
        held = self.first.snapshot()[reqid].seq_len
        held = min(held, len(self.tokens[reqid]))
        length = self.random.randint(self.random.choice((0, max(0, held - 6))), held)
        before = [one.snapshot()[reqid].seq_len for one in self.parts]
        if self.cache.truncate(reqid, length) == -1:
            self.count("no truncation")
            assert [one.snapshot()[reqid].seq_len for one in self.parts] == before
            assert self.holds(reqid), f"rows of reqid {reqid}"
            return
        self.count("truncation")
        del self.tokens[reqid][length:]
        del self.tags[reqid][length:]

    def swap_out(self, reqid: int) -> None:
        self.fire()
        swapped = self.cache.swap_out(reqid)
        self.count("swap")
        self.swapped.append((swapped, self.tokens.pop(reqid), self.tags.pop(reqid)))

    def swap_in(self) -> None:
        self.fire()
        swapped, tokens, tags = self.swapped[-1]
        reqid = self.cache.swap_in(swapped)
        if reqid is None:
            self.count("no swap-in")
            assert swapped.is_open
            return
        assert not swapped.is_open
        self.swapped.pop()
        self.tokens[reqid], self.tags[reqid] = tokens[: swapped.seq_len], tags[: swapped.seq_len]

    def give_up(self) -> None:
        """Preempts the longest request."""
        if self.tokens:
            reqid = max(self.tokens, key=lambda one: len(self.tokens[one]))
            self.free(reqid, record=False)
            self.fire()

    def fire(self) -> None:
        """Completes all GPU work."""
        for event in self.events:
            event.set()
            event.close()
        self.events.clear()

    def check(self) -> None:
        self.cache.check_integrity()
        for reqid in self.tags:
            assert self.holds(reqid), f"rows of reqid {reqid}"
        now = self.cache.stats()
        assert now.used_bytes <= now.active_pages * self.first.layout.page_size

    def any_step(self) -> None:
        """Makes one random call."""
        pick, requests = self.random.random(), list(self.tokens)
        any_one: Any = self.random.choice(requests) if requests else None
        if pick < 0.2 or not requests:
            self.start()
        elif pick < 0.5:
            self.grow({r: self.prompt()[: self.random.choice((0, 1, 1, 9))] for r in requests})
        elif pick < 0.65:
            self.fork(any_one)
        elif pick < 0.68:
            self.truncate(any_one)
        elif pick < 0.77:
            self.record(any_one)
        elif pick < 0.88:
            self.free(any_one, record=self.random.random() < 0.6)
        elif pick < 0.93:
            self.swap_out(any_one)
        elif pick < 0.97 and self.swapped:
            self.swap_in()
        else:
            self.trim()

    def trim(self) -> None:
        self.fire()
        self.cache.trim(prefixes=self.random.random() < 0.3)

    def run(self, steps: int) -> None:
        """Makes `steps` random calls, with periodic checks and one at the end."""
        for count in range(steps):
            self.any_step()
            if count % 8 == 0:
                self.check()
        self.check()
        self.end()

    def end(self) -> None:
        """Frees everything and checks that nothing is left."""
        self.fire()
        for reqid in list(self.tokens):
            self.free(reqid, record=False)
        self.fire()
        for swapped, _, _ in self.swapped:
            swapped.close()
        self.cache.trim(prefixes=True)
        self.cache.check_integrity()
        assert self.cache.stats().mapped_bytes == 0


class WindowModel(ShareModel):
    """A `ShareModel` for layers with a window: rows outside the window may be unmapped."""

    def holds(self, reqid: int) -> bool:
        """Returns true if a request has its rows in every group, except those outside a window."""
        tags = self.tags[reqid]
        return all(
            read_rows(one, reqid, low, tags[low:])
            for one in self.parts
            for low in one.first_rows([reqid])
        )

    def sees(self, reqid: int) -> bool:
        """Returns true if no window has dropped a row that the next token attends to, or that its
        kernel reads.
        """
        length = len(self.tags[reqid])
        kept = [one.config.window + one.config.window_tile for one in self.parts]
        windows = zip(self.parts, kept, strict=True)
        return all(
            one.first_rows([reqid])[0] <= max(0, length - rows)
            for one, rows in windows
            if one.config.window
        )

    def start(self) -> None:
        held = set(self.tokens)
        super().start()
        for reqid in set(self.tokens) - held:
            assert self.sees(reqid), f"the window of reqid {reqid}"

    def record(self, reqid: int) -> None:
        """Records all full units, or nothing new if the window before the end is unmapped."""
        self.fire()
        held = self.first.snapshot()[reqid].seq_len
        tokens = self.tokens[reqid][:held]
        whole = len(tokens) // self.cache.sharing_unit * self.cache.sharing_unit
        ids, space = self.named(tokens)
        before = self.length_of(tokens, leave=0)
        done = self.cache.record(reqid, ids, namespace=space)
        assert done in (before, whole)
        assert self.length_of(tokens, leave=0) == done
        self.count("recorded" if done == whole else "not recorded")

    def fork(self, reqid: int) -> None:
        self._where_it_is_there(super().fork, reqid)

    def truncate(self, reqid: int) -> None:
        self._where_it_is_there(super().truncate, reqid)

    def _where_it_is_there(self, call: Callable[[int], None], reqid: int) -> None:
        """Makes a call that may fail because a window begins in unmapped rows."""
        before = self.running()
        try:
            call(reqid)
        except InvalidArgument as error:
            assert "begins in unmapped rows" in str(error)
            assert self.running() == before
            self.count("window gone")

    def swap_out(self, reqid: int) -> None:
        try:
            super().swap_out(reqid)
        except OutOfMemory as error:
            assert "temporarily needs" in str(error)
            self.count("no swap")
