# SPDX-License-Identifier: MIT
"""Statistics of a cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import TYPE_CHECKING

from pyvmem import _native

if TYPE_CHECKING:
    from pyvmem.memory.context import Context

__all__ = ["CacheStats", "Counters", "SlotInfo", "together"]


@dataclass(frozen=True)
class CacheStats:
    """State and counters of a `KVCache`; bytes are physical, times are nanoseconds.

    Calls and background batches are counted when complete: a call that is rejected, fails or is
    interrupted counts only what it did.

    Attributes:
        total_pages: pages that the cache may use; always free + cached + active. With a `Budget`,
            the present number: lower while other caches hold more than their floors.
        free_pages: pages that it could allocate without reclaiming any.
        cached_pages: unowned pages that are mapped: pages of free slots, surplus pages of running
            requests, pages promised by a growth in flight or being unmapped, and recorded prefixes
            that no request uses.
        ahead_pages: of the cached ones, those mapped for running requests beyond what they need
            (`KVCacheConfig.growth_fraction`).
        active_pages: pages that requests own; a shared page is counted once.
        shared_pages: pages, active or cached, that are mapped read-only or recorded.
        moving_pages: cached pages that are the targets of copies in progress.
        host_pages, peer_pages: pages in host memory and on peer devices; no other number here
            counts them.
        prefix_pages, prefix_tokens: of the shared pages, the recorded ones, and their tokens.
        prefix_host_bytes: rows of evicted prefixes in host memory.
        mapped_bytes: cached and active pages.
        used_bytes: bytes of rows that requests hold; shared ones once.
        wasted_bytes: bytes of active pages that hold no token (internal fragmentation).
        peak_mapped_bytes, peak_used_bytes, peak_wasted_bytes: maxima so far.
        active_slots, cached_slots, empty_slots, broken_slots: slots by state; cached ones are free
            and have pages.
        segments: separate mappings in the cache's addresses as the back end sees them; fewer means
            longer runs.
        mappings: driver mappings of the whole context, which may have `ContextInfo.max_mappings`.
        large_entries: entries of 2 MiB in the whole context; other mapped memory has entries of a
            page.
        steps, steps_async: calls that returned 0.
        short: `step` and `step_async` calls that returned -1.
        grown_pages, zeroed_pages, reclaimed_pages: pages mapped, filled for a new owner, unmapped.
            Pages grown and not reclaimed are those mapped now, in all tiers.
        reused_pages: pages granted to a request that were already mapped.
        moved_pages: pages that replaced others at the same addresses.
        promoted_pages: pages that `KVCache.promote` or a `step` joined or replaced, to be mapped
            by entries of 2 MiB.
        evicted_pages: pages of evicted prefixes.
        prefix_queries, prefix_query_tokens: prompts that were looked up for requests which then got
            a slot, and their tokens. A refused request counts when it is admitted.
        prefix_hits, prefix_hit_tokens: of these, prompts that began with a recorded prefix, and the
            number of these tokens.
        prefix_resumed: hits whose whole prefix was still mapped in the slot.
        prefix_stored_bytes, prefix_loaded_bytes: rows of prefixes copied to host memory and back.
        prefix_dropped_bytes: rows of evicted prefixes that were replaced in host memory by others,
            or that could not be stored there.
        waits: times that a call waited for mapping, filling or reclaiming.
        wait_ns: time spent in them.
        wait_counts: the waits by length: item k counts those of more than ``2**(k-1)`` and at most
            ``2**k`` nanoseconds; the last item also counts all longer ones.
        last_wait_ns: the last `step`'s part of `wait_ns`.
        driver_calls: map, unmap, fill and slab calls since the cache was made (of its whole
            context).
        driver_ns: time in these calls.
        critical_driver_ns: the part of it for which a call of the cache had to wait.
        background_driver_ns: the rest.
    """

    total_pages: int
    free_pages: int
    cached_pages: int
    ahead_pages: int
    active_pages: int
    shared_pages: int
    moving_pages: int
    host_pages: int
    peer_pages: int
    prefix_pages: int
    prefix_tokens: int
    prefix_host_bytes: int
    mapped_bytes: int
    used_bytes: int
    wasted_bytes: int
    peak_mapped_bytes: int
    peak_used_bytes: int
    peak_wasted_bytes: int
    active_slots: int
    cached_slots: int
    empty_slots: int
    broken_slots: int
    segments: int
    mappings: int
    large_entries: int
    steps: int
    steps_async: int
    short: int
    grown_pages: int
    zeroed_pages: int
    reclaimed_pages: int
    reused_pages: int
    moved_pages: int
    promoted_pages: int
    evicted_pages: int
    prefix_queries: int
    prefix_query_tokens: int
    prefix_hits: int
    prefix_hit_tokens: int
    prefix_resumed: int
    prefix_stored_bytes: int
    prefix_loaded_bytes: int
    prefix_dropped_bytes: int
    waits: int
    wait_ns: int
    wait_counts: tuple[int, ...]
    last_wait_ns: int
    driver_calls: int
    driver_ns: int
    critical_driver_ns: int
    background_driver_ns: int


@dataclass(frozen=True)
class SlotInfo:
    """One slot in a `KVCache.snapshot`; pages are per tensor.

    Attributes:
        reqid: the slot.
        state: "active", "cached" (free, with pages), "empty" (free, without) or "broken".
        seq_len: rows that it holds, in tokens.
        granted_pages: pages that the owner may use, without those that left its window.
        mapped_pages: pages mapped, or promised by a growth in flight.
        shared_pages: of these, pages that are mapped read-only.
        large_pages: of the mapped pages, those that 2 MiB entries map in every tensor.
        away_pages: of the mapped pages, those outside the device.
        moving_pages: of the mapped pages, those that a later `step` replaces.
        in_flight: a batch over the slot's addresses is in flight.
    """

    reqid: int
    state: str
    seq_len: int
    granted_pages: int
    mapped_pages: int
    shared_pages: int
    large_pages: int
    away_pages: int
    moving_pages: int
    in_flight: bool

    def and_others(self, others: Sequence[SlotInfo]) -> SlotInfo:
        """Returns the sum over several groups of layers; `others`: the slot in the other groups."""
        if not others:
            return self
        each = (self, *others)
        states = {one.state for one in each}
        pages = [one.name for one in fields(SlotInfo) if one.name.endswith("_pages")]
        return replace(
            self,
            state=next(one for one in ("broken", "active", "cached", "empty") if one in states),
            in_flight=any(one.in_flight for one in each),
            **{name: sum(getattr(one, name) for one in each) for name in pages},
        )


_SAME = (
    *("prefix_tokens", "prefix_queries", "prefix_query_tokens", "prefix_hits", "prefix_hit_tokens"),
    *("active_slots", "cached_slots", "empty_slots", "broken_slots"),
    *("prefix_resumed", "steps", "steps_async", "short", "driver_calls", "driver_ns"),
    *("mappings", "large_entries", "prefix_host_bytes"),
    *("prefix_stored_bytes", "prefix_loaded_bytes", "prefix_dropped_bytes"),
)


def together(each: Sequence[CacheStats], room: int) -> CacheStats:
    """Sum statistics over groups of one budget; `_SAME` fields are the first group's.

    `room`: pages that the budget has free for them.
    """
    first = each[0]
    if len(each) == 1:
        return first
    names = [one.name for one in fields(CacheStats) if one.name != "wait_counts"]
    sums = {name: sum(getattr(one, name) for one in each) for name in names}
    sums |= {name: getattr(first, name) for name in _SAME}
    free = min(
        room, sums["free_pages"]
    )  # each group reports all the room, or what its own limit leaves
    critical = min(first.driver_ns, sums["critical_driver_ns"])
    return CacheStats(
        **{
            **sums,
            "free_pages": free,
            "total_pages": free + sums["active_pages"] + sums["cached_pages"],
            "critical_driver_ns": critical,
            "background_driver_ns": first.driver_ns - critical,
            "wait_counts": tuple(map(sum, zip(*(one.wait_counts for one in each), strict=True))),
        }
    )


def _driver_calls(context: Context) -> tuple[int, int]:
    stats = context.stats()
    calls = stats.map_calls + stats.unmap_calls + stats.slab_calls + stats.fill_calls
    return calls, stats.driver_ns


class Counters:
    """Running counts behind `CacheStats`.

    Attributes:
        last_prompt: prompt tokens and recorded tokens of the last request, and whether it resumed.
        waiting: makes a context manager that counts the time inside as waited, and the driver's
            time meanwhile as critical.
    """

    def __init__(self, context: Context) -> None:
        self.context = context
        self.base_calls, self.base_ns = _driver_calls(context)
        self.steps = self.steps_async = self.short = 0
        self.grown = self.zeroed = self.reclaimed = self.reused = 0
        self.moved = self.promoted = self.evicted = 0
        self.queries = self.query_tokens = self.hits = self.hit_tokens = self.resumed = 0
        self.last_prompt: tuple[int, int, bool] | None = None
        self.waits = _native.Waits()
        self.waiting = partial(_native.Waiting, self.waits, context.handle)
        self.peak_mapped = self.peak_used = self.peak_wasted = 0

    def driver(self) -> tuple[int, int]:
        """Returns the driver calls, and nanoseconds in them, since the cache was made."""
        calls, ns = _driver_calls(self.context)
        return calls - self.base_calls, ns - self.base_ns
