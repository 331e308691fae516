# SPDX-License-Identifier: MIT
"""A plain Python model of a `RequestCache`: its requests, and the contents of their rows."""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass
from typing import Any

from share_helpers import read_rows, write_rows

from pyvmem import BadHandle, Busy, FdEvent, InvalidArgument, KVCache, OutOfMemory
from pyvmem.engine import Namespace, Prefix, Request, RequestCache, Shortage, State

__all__ = ["EngineModel"]


def told(short: Shortage) -> str:
    """Describes a shortage, including the properties computed from its fields."""
    return f"{short!r}, short of {short.what}, {short.missing} bytes"


@dataclass(eq=False)
class Life:
    """A request as seen by the engine: the ids whose rows it holds, and the rows' contents."""

    request: Request
    ids: list[int]
    tags: list[int]


@dataclass(eq=False)
class Call:
    """A background call: its request, and the function that handles its result."""

    future: Future[Any]
    life: Life | None
    take: Callable[[Any], None]


class EngineModel:
    """Drives a cache at random. A token's row depends on the namespace and all tokens before it.

    Args:
        cache: must have no other user.
        seed: seeds the random choices.

    Attributes:
        stream: unfinished GPU work, or None.
        more: the most new tokens that a prompt adds.
    """

    def __init__(self, cache: KVCache, seed: int) -> None:
        self.cache = cache
        self.random = random.Random(seed)
        self.stream: Callable[[], FdEvent | None] = lambda: None
        self.more = 20
        self.engine = RequestCache(self.cache)
        self.longest = self.engine.max_seq_len
        self.windows = [one for one in self.cache.caches if one.config.window]
        self.lives: list[Life] = []
        self.calls: list[Call] = []
        self.leases: list[Prefix] = []
        self.spaces: list[Namespace | None] = [None, self.engine.namespace("a")]
        self.known: dict[tuple[Any, ...], int] = {}
        self.seen: defaultdict[Namespace | None, list[list[int]]] = defaultdict(list)
        self.counts: Counter[str] = Counter()

    # ---- contents of rows ------------------------------------------------------------------------

    def tag(self, space: Namespace | None, ids: list[int]) -> int:
        """Returns the tag of the last id's row, determined by the namespace and all these ids."""
        return self.known.setdefault((space, *ids), len(self.known) + 1)

    def tags(self, space: Namespace | None, ids: list[int]) -> list[int]:
        return [self.tag(space, ids[: n + 1]) for n in range(len(ids))]

    def holds(self, life: Life) -> bool:
        """Returns true if the request's rows are intact, except those outside a window."""
        slot = life.request.slot
        return all(
            read_rows(one, slot, low, life.tags[low:])
            for one in self.cache.caches
            for low in one.first_rows([slot])
        )

    def born(self, request: Request, ids: list[int]) -> Life:
        """Adds a request that holds the rows of these ids, and checks their contents."""
        assert request.length == len(ids)
        assert request not in [life.request for life in self.lives]
        life = Life(request, ids, self.tags(request.namespace, ids))
        self.lives.append(life)
        assert self.holds(life), f"{request!r}: wrong rows at admission"
        return life

    def idle(self, state: State = State.RUNNING) -> list[Life]:
        """Returns the requests that have no background call in progress."""
        busy = [call.life for call in self.calls]
        return [one for one in self.lives if one not in busy and one.request.state is state]

    def prompt(self, space: Namespace | None) -> list[int]:
        """Returns a prompt, which usually starts like an earlier prompt."""
        seen = self.random.choice(self.seen[space]) if self.seen[space] else []
        keep = self.random.randint(0, len(seen))
        more = [self.random.randint(0, 2) for _ in range(self.random.randint(1, self.more))]
        return [*seen[:keep], *more][: self.longest]

    # ---- calls of an engine ----------------------------------------------------------------------

    def admit(self) -> None:
        """Admits a request, immediately or in the background, sometimes with an earlier lease."""
        options: dict[str, Any] = {
            "room": self.random.choice((0, 1, 9)),
            "stream": self.stream(),
            "reserve": self.random.random() < 0.5,
        }
        if self.leases and self.random.random() < 0.5:
            lease = self.leases.pop(self.random.randrange(len(self.leases)))
            given, space, ids = (
                lease,
                lease.namespace,
                list(memoryview(lease.tokens.data).cast("I")),
            )
        else:
            lease, space = None, self.random.choice((None, *self.spaces))
            given = ids = self.prompt(space)
        if space is not None and not space.is_open:
            try:
                self.engine.admit(given, space, **options)
            except BadHandle:
                self.counts["closed namespace"] += 1
                return
            raise AssertionError("a request was admitted to a closed namespace")

        def take(found: Request | Shortage) -> None:
            if isinstance(found, Shortage):
                self.short(found)
                if lease is not None:
                    self.leases.append(lease)
                return
            assert found.length < len(ids)
            self.counts["hit" if found.length else "miss"] += 1
            life = self.born(found, ids[: found.length])
            if options["reserve"] and not later and not self.calls:  # guaranteed by the reservation
                room = min(len(ids) + options["room"], self.longest)
                short = self.engine.extend({found: room})
                assert short is None, f"{found!r} was promised {room} tokens: {told(short)}"
                self.write(life, [*ids[len(life.ids) :], *[0] * (room - len(ids))])
            else:
                self.grow({life: ids[found.length :]})

        later = self.random.random() < 0.3
        if later:
            self.in_background(None, self.engine.admit_async(given, space, **options), take)
        else:
            take(self.engine.admit(given, space, **options))

    def lease(self) -> None:
        """Takes a lease for a later prompt; if three are held, releases or drops one instead."""
        if len(self.leases) > 2:
            lease = self.leases.pop(0)
            if self.random.random() < 0.5:
                lease.release()
            return
        space = self.random.choice([one for one in self.spaces if one is None or one.is_open])
        self.leases.append(self.engine.match(self.prompt(space), space))

    def grow(self, more: dict[Life, list[int]]) -> None:
        """Grows requests; preempts the newest when memory is short."""
        more = {life: ids[: self.longest - len(life.ids)] for life, ids in more.items()}
        want = {life.request: len(life.ids) + len(ids) for life, ids in more.items()}
        if self.random.random() < 0.4:
            self.engine.prepare(want)
        found = self.engine.extend(want, self.stream())
        if found is not None:
            self.short(found)
            for life in more:
                assert life.request.length == len(life.ids), (
                    "a call that fails because memory is short must change nothing"
                )
            victims = self.idle()
            if victims:
                self.release(victims[-1])
            return
        for life, ids in more.items():
            assert self.engine.capacity(life.request) >= life.request.length
            self.write(life, ids)

    def write(self, life: Life, ids: list[int]) -> None:
        low = len(life.ids)
        for one in ids:
            life.ids.append(one)
            life.tags.append(self.tag(life.request.namespace, life.ids))
        assert life.request.length == len(life.ids)
        for one in self.cache.caches:
            write_rows(one, life.request.slot, low, life.tags[low:])

    def short(self, found: Shortage) -> None:
        self.counts[f"short of {found.what}"] += 1
        assert found.missing or found.slots or found.what == "mappings"

    def in_background(
        self, life: Life | None, future: Future[Any], take: Callable[[Any], None]
    ) -> None:
        """Starts a background call; sometimes cancels it immediately."""
        self.calls.append(Call(future, life, take))
        if self.random.random() < 0.1 and future.cancel():
            self.counts["cancelled"] += 1
        elif life is not None and not future.done():
            try:
                _ = life.request.slot
            except Busy:
                self.counts["busy"] += 1
            except InvalidArgument:
                assert life.request.state is State.SWAPPED

    def settle(self, call: Call) -> None:
        """Waits for a background call and acts on its result."""
        self.calls.remove(call)
        try:
            result = call.future.result()
        except CancelledError:
            return
        except BadHandle as error:
            assert "Namespace" in str(error)
            self.counts["closed meanwhile"] += 1
        except InvalidArgument as error:
            self.window_gone(error)
        except OutOfMemory as error:
            self.no_swap(error)
        else:
            call.take(result)

    def window_gone(self, error: InvalidArgument) -> None:
        assert self.windows, error
        assert "begins in unmapped rows" in str(error)
        self.counts["window gone"] += 1

    def no_swap(self, error: OutOfMemory) -> None:
        assert self.windows, error
        assert "temporarily needs" in str(error)
        self.counts["no swap"] += 1

    def truncate(self, life: Life) -> None:
        length = self.random.randint(max(0, len(life.ids) - 8), len(life.ids))
        try:
            found = self.engine.truncate(life.request, length, self.stream())
        except InvalidArgument as error:
            self.window_gone(error)
            return
        if found is not None:
            self.short(found)
            assert life.request.length == len(life.ids)
            return
        self.counts["truncation"] += 1
        del life.ids[length:], life.tags[length:]

    def fork(self, life: Life) -> None:
        count = self.random.choice((1, 1, 2))
        length = self.random.choice((None, self.random.randint(0, len(life.ids))))
        ids = life.ids[:length]

        def take(found: list[Request] | Shortage) -> None:
            if isinstance(found, Shortage):
                self.short(found)
                return
            self.counts["fork"] += 1
            assert len(found) == count
            for request in found:
                self.born(request, ids.copy())

        if self.random.random() < 0.4:
            future = self.engine.fork_async(life.request, count, length, self.stream())
            self.in_background(life, future, take)
            return
        try:
            take(self.engine.fork(life.request, count, length, self.stream()))
        except InvalidArgument as error:
            self.window_gone(error)

    def record(self, life: Life) -> None:
        space = life.request.namespace
        if space is not None and not space.is_open:
            return
        done = self.engine.record(life.request, life.ids, self.stream())
        assert done <= len(life.ids)
        self.counts["recorded"] += 1

    def release(self, life: Life) -> None:
        self.lives.remove(life)
        self.seen[life.request.namespace].append(life.ids)
        ids = self.random.choice((None, life.ids, [*life.ids, 1]))
        self.engine.release(life.request, ids, self.stream())
        assert life.request.state is State.ENDED

    def swap_out(self, life: Life) -> None:
        if self.random.random() < 0.5:
            future = self.engine.swap_out_async(life.request, self.stream())
            self.in_background(life, future, lambda _: self.counts.update(["swap"]))
            return
        try:
            self.engine.swap_out(life.request, self.stream())
            self.counts["swap"] += 1
        except OutOfMemory as error:
            self.no_swap(error)

    def swap_in(self, life: Life) -> None:
        def take(found: Shortage | None) -> None:
            if found is not None:
                self.short(found)
                assert life.request.state is State.SWAPPED
            else:
                assert self.holds(life), f"{life.request!r}: wrong rows after the swap"

        if self.random.random() < 0.5:
            self.in_background(life, self.engine.swap_in_async(life.request, self.stream()), take)
        else:
            take(self.engine.swap_in(life.request, self.stream()))

    def namespace(self) -> None:
        """Closes a namespace and opens another, with the same or a different name."""
        old = self.random.choice([one for one in self.spaces if one is not None])
        old.close()
        if len(self.spaces) > 5:
            self.spaces.remove(old)
        self.spaces.append(self.engine.namespace(self.random.choice("ab")))

    def behind(self) -> None:
        """Simulates another user of the cache."""
        pick = self.random.random()
        if pick < 0.5:
            self.cache.trim(prefixes=self.random.random() < 0.3)
        elif pick < 0.8 and (idle := self.idle()):  # frees its slot behind the engine's back
            life = self.random.choice(idle)
            self.lives.remove(life)
            self.cache.free_reqid(life.request.slot)
            assert life.request not in self.engine.requests
            assert life.request.state is State.ENDED
        else:
            self.cache.memory.reclaim_free(wait=False)

    def any_step(self) -> None:
        """Makes one random call."""
        for call in self.calls[:]:
            if call.future.done() or len(self.calls) > 3:
                self.settle(call)
        pick, running = self.random.random(), self.idle()
        one = self.random.choice(running) if running else None
        if pick < 0.2 or one is None:
            swapped = self.idle(State.SWAPPED)
            if swapped and self.random.random() < 0.5:
                self.swap_in(self.random.choice(swapped))
            else:
                self.admit()
        elif pick < 0.5:
            each = {life: self.random.choice((0, 1, 1, 9)) for life in running}
            self.grow({life: [self.random.randint(0, 2)] * n for life, n in each.items()})
        elif pick < 0.62:
            self.fork(one)
        elif pick < 0.67:
            self.truncate(one)
        elif pick < 0.75:
            self.record(one)
        elif pick < 0.86:
            self.release(one)
        elif pick < 0.92:
            self.swap_out(one)
        elif pick < 0.96:
            self.lease()
        elif pick < 0.97:
            self.namespace()
        else:
            self.behind()

    def check(self) -> None:
        """Checks every row of every request, and the cache's records."""
        self.cache.check_integrity()
        for life in self.idle():
            assert life.request.length == len(life.ids) == len(life.tags)
            assert self.holds(life), f"{life.request!r}: wrong rows"
        if not self.calls:
            assert set(self.engine.requests) == {life.request for life in self.lives}

    def end(self) -> None:
        """Releases everything and checks that nothing is left."""
        while self.calls:
            self.settle(self.calls[0])
        self.check()
        for life in self.lives[:]:
            if self.random.random() < 0.5:
                self.release(life)
        self.engine.close()
        assert self.engine.requests == []
        self.leases.clear()
        self.cache.trim(prefixes=True)
        self.cache.check_integrity()
        assert self.cache.stats().mapped_bytes == 0
