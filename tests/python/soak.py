#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Runs random engines over one context for a long time, against models that track every row.

    python tests/python/soak.py --seconds 600 --backend stock --seed 7
    python tests/python/soak.py --steps 1000000 --log soak.log      # resumes from the log

A run consists of rounds. Each has a context and one to three caches: a single cache, several that
share a budget, or one of unequal layers, some with a window; each is driven by a model
(share_helpers.py, test_kvcache_mixed_model.py). The GPU work of a freed request is an FdEvent that
a thread signals late. In a quiet phase, one cache is left alone while the others run more batches
than a context remembers. With ``--interrupts``, calls are interrupted at random points
(interrupts_helpers.py), and the model then reads the cache's state to learn what the calls did.

The last line sums up the run; after an error, the run stops and prints the state of the caches and
the seed and step that reproduce it.
"""

from __future__ import annotations

import argparse
import random
import re
import sys
import threading
import time
import zlib
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from conftest import open_context
from engine_model import EngineModel
from interrupts_helpers import Interrupted, Interrupts
from kvcache_helpers import ROWS, has_tensors, small_config
from share_helpers import ShareModel, WindowModel, row_bytes
from test_kvcache_layers import layered
from test_kvcache_mixed_model import LayeredModel, MixedModel
from test_kvcache_window_prefix import gemma_like

from pyvmem import Caps, Context, FdEvent, KVCache, OutOfMemory
from pyvmem.kvcache import Budget, LayeredCache, PrefixEvicted, PrefixMatch

__all__ = ["Soak", "main"]

TENSORS = 4  # per page of `small_config`
# token ids per namespace in the cache; the model combines namespace and id into one number
IDS = 4
QUIET = 4500  # calls to the other caches while one cache is quiet; each runs at least one batch

POLICIES: tuple[dict[str, Any], ...] = (
    {},
    {"deferred_reclaim": False},
    {"deferred_reclaim": False, "zero_fill": False},
    {"eager_pages": 2},
    {"ahead_tokens": 5, "low_watermark": 0.1},
    {"low_watermark": 0.3, "reclaim_steps": 5},
    {"overread_rows": 3, "group_size": 2},
    {"window_tile": 2, "ahead_tokens": 3},
)


class LateEvents:
    """GPU work that a thread completes a few milliseconds after its creation."""

    def __init__(self, rng: random.Random) -> None:
        self._random = rng
        self._lock = threading.Condition()
        self._waiting: deque[tuple[float, FdEvent]] = deque()
        self._ended: deque[FdEvent] = deque()
        self._over = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def create(self) -> FdEvent:
        event = FdEvent.create()
        with self._lock:
            late = time.monotonic() + self._random.choice((0.0, 0.0002, 0.002))
            self._waiting.append((late, event))
            self._lock.notify()
        return event

    def fire(self) -> None:
        """Completes all work."""
        with self._lock:
            while self._waiting:
                self._end()

    def close(self) -> None:
        self.fire()
        with self._lock:
            self._over = True
            self._lock.notify()
        self._thread.join()
        for event in self._ended:
            event.close()

    def _end(self) -> None:
        event = self._waiting[0][1]
        event.set()  # repeated if it is interrupted
        self._waiting.popleft()
        self._ended.append(event)
        if len(self._ended) > 16:  # the call that waited for the oldest has returned by now
            self._ended.popleft().close()

    def _run(self) -> None:
        with self._lock:
            while not self._over:
                if not self._waiting:
                    self._lock.wait()
                    continue
                left = self._waiting[0][0] - time.monotonic()
                if left > 0:
                    self._lock.wait(left)
                else:
                    self._end()


@dataclass
class Lease:
    """A lease on a match for a prefix of `tokens`; if `lost`, the match may have been evicted."""

    match: PrefixMatch
    tokens: list[int]
    lost: bool = False


class Endless:
    """Makes a `ShareModel` run forever, alongside others.

    A token of the model stands for a token of the cache and a namespace; a row's content depends on
    both. Matches are leased for a while, and steps may leave requests out.
    """

    late: LateEvents
    seen: deque[list[int]]
    cache: KVCache
    waits = True

    def begin(self, late: LateEvents, seed: int) -> None:
        self.late, self.seen = late, deque([[]], maxlen=100)
        self.ahead: list[int] | None = None
        self.leaving: set[int] = set()
        self.shorter: dict[int, int] = {}
        self.leases: list[Lease] = []

    def tag(self: Any, tokens: list[int]) -> int:
        return zlib.crc32(bytes(tokens)) & 0x3FFFFFF

    def prompt(self: Any) -> list[int]:
        longest = self.first.config.max_seq_len
        seen = self.random.choice(self.seen)
        kept = seen[: self.random.randint(0, len(seen))]
        more = [self.random.randint(0, 2) for _ in range(self.random.randint(1, self.more))]
        prompt = self.alike(kept or [IDS * self.random.choice((0, 0, 1, 2))], more)
        prompt = [*kept, *prompt][:longest]
        self.seen.append(prompt)
        return prompt

    def alike(self: Any, tokens: list[int], more: list[int]) -> list[int]:
        """Moves the new tokens to the first token's namespace."""
        space = (tokens or more or [0])[0] // IDS
        return [space * IDS + token % IDS for token in more]

    def named(self: Any, tokens: list[int]) -> tuple[list[int], Any]:
        space = tokens[0] // IDS if tokens else 0
        return [token % IDS for token in tokens], f"space {space}" if space else None

    def lens(self: Any, more: dict[int, int] | None = None) -> list[int]:
        """Returns lengths for a step; some requests that do not grow get a smaller length, which
        steps ignore.
        """
        out: list[int] = super().lens(more)  # type: ignore[misc]
        if more is not None and self.random.random() < 0.3:
            for reqid in self.tokens:
                if not more.get(reqid) and self.random.random() < 0.5:
                    out[reqid] = self.random.randint(0, out[reqid])
        return out

    def grow(self: Any, more: dict[int, list[int]]) -> None:
        alike = {reqid: self.alike(self.tokens[reqid], ids) for reqid, ids in more.items()}
        super().grow(alike)  # type: ignore[misc]

    # ---- held matches ----------------------------------------------------------------------------

    def hold(self: Any) -> None:
        """Leases the cached prefix of a prompt."""
        tokens = self.prompt()
        ids, space = self.named(tokens)
        match = self.cache.match(ids, namespace=space)
        if match.length:
            self.leases.append(Lease(match, tokens[: match.length]))
            self.count("lease")

    def begin_with(self: Any, lease: Lease) -> None:
        """Starts a request from a lease; only a trim may have evicted the leased match."""
        self.fire()
        self.leases.remove(lease)
        try:
            if self.random.random() < 0.5:
                self.cache.can_admit([len(lease.tokens) + 1, 1], [lease.match, None])
            if self.random.random() < 0.2:
                lease.match.release()
                return
            taken = self.cache.alloc_prefix(lease.match)
        except PrefixEvicted:
            assert lease.lost, "a lease was lost"
            self.count("lease lost")
            return
        if taken is None:
            self.count("lease refused")
            return
        reqid, length = taken
        assert length in (0, len(lease.tokens))
        assert reqid not in self.tokens
        if not length:  # the free slots still wait for GPU work
            self.count("lease held up")
            self.leases.append(lease)
        self.tokens[reqid] = lease.tokens[:length]
        self.tags[reqid] = [self.tag(lease.tokens[: n + 1]) for n in range(length)]
        assert self.holds(reqid), "wrong rows of a lease"
        if length:
            self.count("lease used")

    def trim(self: Any) -> None:
        prefixes = self.random.random() < 0.3
        for lease in self.leases if prefixes else ():
            lease.lost = True
        self.fire()
        self.cache.trim(prefixes=prefixes)

    def give_up(self: Any) -> None:
        if self.leases and self.random.random() < 0.5:
            self.leases.pop(0).match.release()
        else:
            super().give_up()  # type: ignore[misc]

    def truncate(self: Any, reqid: int) -> None:
        self.shorter = {reqid: 0}
        super().truncate(reqid)  # type: ignore[misc]

    def stream(self: Any) -> FdEvent | None:
        return None if self.random.random() < 0.5 else self.late.create()

    def fire(self: Any) -> None:
        """Usually leaves completion to the thread, so that calls often wait for unfinished work."""
        if self.random.random() < 0.2:
            self.late.fire()

    def free(self: Any, reqid: int, record: bool) -> None:
        self.leaving = {reqid}
        super().free(reqid, record)  # type: ignore[misc]

    def swap_out(self: Any, reqid: int) -> None:
        self.leaving = {reqid}
        super().swap_out(reqid)  # type: ignore[misc]

    def step_ahead(self: Any) -> None:
        """Grows requests in the background, possibly by rows that no step ever uses."""
        longest = self.first.config.max_seq_len
        want = self.lens()
        for reqid, tokens in self.tokens.items():
            want[reqid] = min(longest, len(tokens) + self.random.choice((0, 1, 8, 20)))
        if self.cache.step_async(want) == -1:
            self.count("short ahead")
        self.count("ahead")

    def any_step(self: Any) -> None:
        if self.tokens and self.random.random() < 0.1:
            self.step_ahead()
        elif len(self.leases) < 3 and self.random.random() < 0.03:
            self.hold()
        elif self.leases and self.random.random() < 0.04:
            self.begin_with(self.random.choice(self.leases))
        elif isinstance(self.cache, LayeredCache) or self.first.layout.block:
            super().any_step()  # type: ignore[misc]
        else:
            ShareModel.any_step(self)

    def check(self: Any) -> None:
        super().check()  # type: ignore[misc]
        if self.random.random() < 0.2:
            for part in self.parts:
                self._check_tensors(part)

    def _check_tensors(self: Any, part: KVCache) -> None:
        """Reads the rows as a kernel would, and checks them."""
        if not has_tensors(part):
            return
        size = part.layout.row_bytes
        for reqid, tags in self.tags.items():
            if not tags:
                continue
            (low,) = part.first_rows([reqid])
            count = len(tags) - low
            for number, tensor in enumerate(part.tensors):
                rows = tensor[reqid, low : len(tags)].reshape(count, -1).cpu()
                want = b"".join(row_bytes(part, number, tag) for tag in tags[low:])
                found = rows.contiguous().view(torch.uint8).numpy().tobytes()
                assert len(found) == count * size
                assert found == want, f"reqid {reqid}, tensor {number}"

    def move(self: Any, reqid: int) -> None:
        """Moves pages to the host or back. Moves that were already in flight complete even if
        memory is short.
        """
        before = self.cache.snapshot()[reqid]
        held = before.seq_len
        tokens = None
        if self.random.random() < 0.5:
            tokens = sorted((self.random.randint(0, held), self.random.randint(0, held)))
        place = "device" if before.away_pages and self.random.random() < 0.5 else "host"
        wait = self.random.random() < 0.5
        try:
            moved = self.cache.move(reqid, place, tokens=tokens, wait=wait)
        except OutOfMemory:
            self.count(f"{place} full")
            after = self.cache.snapshot()[reqid]
            assert before.moving_pages or after.away_pages == before.away_pages
            return
        if moved.pages:
            self.count(f"to the {place}")

    def settle(self: Any, before: tuple[Any, ...]) -> None:
        """Adopts the cache's state after an interruption."""
        tokens, tags, swapped = before
        slots = self.first.snapshot()
        self.tokens, self.tags, self.swapped = {}, {}, []
        for lease in self.leases:  # the call may have used the lease or trimmed the cache
            lease.lost = True
        for one in swapped:
            if one[0].is_open:
                self.swapped.append(one)
        for reqid, ids in tokens.items():
            slot = slots[reqid]
            if slot.state != "active":
                assert reqid in self.leaving, f"reqid {reqid} became {slot.state}"
                continue
            least = self.shorter.get(reqid, len(ids))
            assert slot.seq_len >= least, f"reqid {reqid} has lost rows"
            kept = min(slot.seq_len, len(ids))
            assert {part.snapshot()[reqid].seq_len for part in self.parts} == {slot.seq_len}
            self.tokens[reqid], self.tags[reqid] = ids[:kept], tags[reqid][:kept]
            assert self.holds(reqid), f"rows of reqid {reqid}"
            if slot.seq_len > len(ids):  # the step completed, but its rows were not written
                self.free(reqid, record=False)
        for slot in slots:
            if slot.state == "active" and slot.reqid not in tokens:
                self.cache.free_reqid(slot.reqid)


class SoakModel(Endless, MixedModel):
    """The model for a run with a single cache."""


class SoakLayers(Endless, LayeredModel):
    """The model for a run with several classes of layers."""


class SoakWindows(Endless, WindowModel):
    """The model for sliding and full layers together. Prompts often continue finished requests."""

    def free(self, reqid: int, record: bool) -> None:
        if record:
            self.seen.append(list(self.tokens[reqid]))
        super().free(reqid, record)

    def prompt(self) -> list[int]:
        seen = self.random.choice(self.seen)
        if not seen or self.random.random() < 0.5:
            return list(super().prompt())
        longest = self.first.config.max_seq_len
        return [*seen, *self.alike(seen, [self.random.randint(0, 2)])][:longest]


class SoakEngine(EngineModel):
    """The model for a run of `RequestCache`, with calls in the background."""

    def begin(self, late: LateEvents, seed: int) -> None:
        dice = random.Random(seed)
        self.stream = lambda: late.create() if dice.random() < 0.4 else None


def described(cache: KVCache) -> Iterator[str]:
    """Yields the state of a cache line by line: first the plain records, then values whose reading
    polls batches.
    """
    for group in cache._groups:
        yield str(group.config)
        for slot in group.table:
            yield f"slot {slot.index}: {group.rows[slot.index]} rows, {slot!r}, stale {slot.stale}"
        for node in group.prefixes.tree:
            yield f"{node!r}: {node.span.each[group.place]!r}, {node.pins} pins"
        yield f"leased: {group.prefixes.leases.nodes()}"
        yield f"left for later: {[(slot.index, *left) for slot, left in group.left.items()]}"
        yield f"moves: {list(group.mover.moves.values())}, cancelled: {group.mover.cancelled}"
        yield f"errors: {group.reclaimer.errors}, refused: {group.pager.runs.refused!r}"
    for part in cache.caches:
        yield str(part.stats())
    some, every = cache.memory.obtainable()
    yield f"{some} of {every} bytes are obtainable"


class Soak:
    """A run; it stops after `steps` or `seconds`, whichever comes first (0: no limit)."""

    def __init__(self, backend: str, seed: int, *, interrupts: bool = False) -> None:
        self.backend, self.seed, self.interrupts = backend, seed, interrupts
        self.random = random.Random(seed)
        self.done = self.rounds = self.interrupted = self.quiet = 0
        self.counts: Counter[str] = Counter()

    def run(self, steps: int = 0, seconds: float = 0.0) -> None:
        self._until = time.monotonic() + seconds if seconds else float("inf")
        self._last = steps or sys.maxsize
        while not self._over():
            self._round()
            self.rounds += 1

    def _over(self) -> bool:
        return self.done >= self._last or time.monotonic() >= self._until

    def _round(self) -> None:
        rng = self.random
        late = LateEvents(random.Random(rng.random()))
        try:
            with open_context(self.backend) as context:
                page = context.info.granule
                pages = rng.choice((0, 16 * page))
            with open_context(self.backend, slab_size=pages) as context:
                with self._models(context, late) as models:
                    try:
                        self._drive(models, late)
                    except Exception:
                        self._tell(context, models)
                        raise
                    for one in models:
                        self.counts.update(one.counts)
                left = context.stats()
                for name in ("mapped_bytes", "used_bytes", "handles", "pending"):
                    assert getattr(left, name) == 0, f"{name} left after close: {left}"
                context.check()
        finally:
            late.close()

    @contextmanager
    def _models(self, context: Context, late: LateEvents) -> Iterator[list[Any]]:
        """Yields the caches of a round, each with its model."""
        rng, made = self.random, []
        kind = rng.choice(("one", "two", "three", "layers", "two", "windows", "engine"))
        try:
            if kind == "layers":
                options: dict[str, Any] = {"max_seq_len": 80, "max_batch": 6}
                options["ahead_tokens"] = rng.choice((0, 0, 3))
                page = context.info.granule
                if Caps.HOST_PAGES in context.info.caps:
                    options["host_limit"] = 100 * page
                cache = layered(context, rng.choice((260, 500)), **options)
                made.append(SoakLayers(cache, rng.randint(0, 1 << 30)))
            elif kind == "windows":
                cache = gemma_like(context, rng.choice((130, 250, 600)))
                made.append(SoakWindows(cache, rng.randint(0, 1 << 30)))
            elif kind == "engine" and not self.interrupts:
                windows = rng.random() < 0.3
                limit = rng.choice((24, 40, 60)) * TENSORS * context.info.granule
                cache = gemma_like(context, 250) if windows else self._cache(context, None, limit)
                made.append(SoakEngine(cache, rng.randint(0, 1 << 30)))
            else:
                count = {"two": 2, "three": 3}.get(kind, 1)
                limit = rng.choice((24, 40, 60)) * TENSORS * context.info.granule
                budget = Budget(context, limit * count) if count > 1 else None
                for _ in range(count):
                    one = self._cache(context, budget, limit)
                    made.append(SoakModel(one, rng.randint(0, 1 << 30)))
            for one in made:
                one.begin(late, rng.randint(0, 1 << 30))
                one.more = rng.choice((12, 30, 60))
            yield made
        finally:
            late.fire()
            for one in made:
                one.cache.close()

    def _cache(self, context: Context, budget: Budget | None, limit: int) -> KVCache:
        policy = dict(self.random.choice(POLICIES))
        page = context.info.granule
        if Caps.HOST_PAGES in context.info.caps:
            policy["host_limit"] = 24 * TENSORS * page
        config = small_config(
            page,
            max_batch=6,
            max_seq_len=11 * ROWS,
            memory_limit=0 if budget else limit,
            **policy,
        )
        return KVCache(config, context, budget=budget)

    def _drive(self, models: list[Any], late: LateEvents) -> None:
        rng = self.random
        end = self.done + rng.choice((1000, 3000, 3000, 2 * QUIET))
        resting: Any = None
        wakes = self.done
        while self.done < end and not self._over():
            if self.done >= wakes:
                if resting is not None:
                    resting.check()
                    self.quiet += 1
                resting = rng.choice(models) if len(models) > 1 and rng.random() < 0.5 else None
                wakes = self.done + (QUIET if resting else 500)
            self._step(rng.choice([one for one in models if one is not resting]))
            self.done += 1
            if self.done % 40 == 0:
                for one in models:
                    one.check()
        for one in models:
            one.check()
        late.fire()
        for one in models:
            one.end()

    def _step(self, model: Any) -> None:
        if not self.interrupts or self.random.random() > 0.05:
            model.any_step()
            return
        before = (
            {reqid: list(ids) for reqid, ids in model.tokens.items()},
            {reqid: list(tags) for reqid, tags in model.tags.items()},
            list(model.swapped),
        )
        model.leaving, model.shorter = set(), {}
        try:
            Interrupts(int(2 ** self.random.uniform(0, 10))).run(model.any_step)
        except Interrupted:
            self.interrupted += 1
            model.settle(before)

    def _tell(self, context: Context, models: list[Any]) -> None:
        """Prints the parts of the state that can still be read after a failure."""
        device = context.cuda_device
        print(f"soak: round {self.rounds}, {context!r}, {context.stats()}")
        print(f"soak: {context.memory()} of {device=}")
        for model in models:
            print(f"soak: {type(model).__name__}, {model.counts}")
            for line in described(model.cache):
                print(f"soak:   {line}")

    def told(self) -> str:
        """Returns the line that sums up the run."""
        what = ", ".join(f"{name} {count}" for name, count in sorted(self.counts.items()))
        return (
            f"soak: {self.backend}, seed {self.seed}: {self.done} steps in {self.rounds} rounds, "
            f"{self.quiet} quiet phases, {self.interrupted} interruptions; {what}"
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=0.0)
    parser.add_argument("--backend", default="host")
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--interrupts", action="store_true")
    parser.add_argument(
        "--log",
        type=Path,
        help="logs each finished part; a later run with the same file continues after these",
    )
    parser.add_argument("--part", type=int, default=20_000, help="steps of a part, with --log")
    options = parser.parse_args()
    if options.log is not None:
        return _in_parts(options)
    if not options.steps and not options.seconds:
        options.seconds = 60.0
    seed = random.randrange(1 << 30) if options.seed is None else options.seed
    _run(options, seed, options.steps, options.seconds)
    return 0


def _run(options: argparse.Namespace, seed: int, steps: int, seconds: float = 0.0) -> Soak:
    """Executes one run, reproducible from its seed, and prints the result."""
    print(f"soak: {options.backend}, seed {seed}", flush=True)
    soak = Soak(options.backend, seed, interrupts=options.interrupts)
    begun = time.monotonic()
    try:
        soak.run(steps, seconds)
    except BaseException:
        print(f"soak: FAILED, seed {seed}, step {soak.done}", flush=True)
        raise
    print(f"{soak.told()}; {time.monotonic() - begun:.1f} s", flush=True)
    return soak


def _in_parts(options: argparse.Namespace) -> int:
    """Executes runs of `part` steps, each with its own seed, until the log adds up to `steps`
    steps.
    """
    lines = options.log.read_text().splitlines() if options.log.exists() else []
    found = [one for line in lines if (one := re.search(r"seed (\d+): (\d+) steps", line))]
    done = sum(int(one[2]) for one in found)
    first = random.randrange(1 << 30) if options.seed is None else options.seed
    seed = int(found[-1][1]) + 1 if found else first
    while done < options.steps:
        soak = _run(options, seed, min(options.part, options.steps - done))
        with options.log.open("a") as log:
            print(soak.told(), file=log)
        done, seed = done + soak.done, seed + 1
    print(f"soak: {done} steps done: {options.log}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
