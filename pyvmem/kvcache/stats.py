# SPDX-License-Identifier: MIT
"""Cache statistics."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import partial

from pyvmem import _native
from pyvmem.memory.context import Context
from pyvmem.memory.info import Stats

__all__ = ["CacheStats", "Counters", "SlotInfo", "together"]


@dataclass(frozen=True)
class CacheStats:
    """State and counters of a `KVCache`. Bytes are physical memory; times are in nanoseconds.

    Calls and background batches are counted when complete: for a call that is rejected, fails or is
    interrupted, only the work that it did is counted.

    Attributes:
        total_pages: pages that the cache may use; always free + cached + active. With a `Budget`,
            this is the current number, which is lower while other caches hold more than their
            floors.
        free_pages: pages that the cache could allocate without reclaiming any.
        cached_pages: unowned mapped pages: pages of free slots, surplus pages of running requests,
            pages that growth in flight is mapping, pages being unmapped, and recorded prefixes that
            no request uses.
        ahead_pages: cached pages that are mapped for running requests beyond what they need
            (`KVCacheConfig.growth_fraction`).
        active_pages: pages that requests own; a shared page is counted once.
        shared_pages: active or cached pages that are mapped read-only or recorded.
        moving_pages: cached pages that are the targets of copies in progress.
        host_pages, peer_pages: pages in host memory and on peer devices; not included in any other
            field.
        prefix_pages, prefix_tokens: recorded shared pages, and their tokens.
        prefix_host_bytes: size of evicted prefixes' rows in host memory.
        mapped_bytes: size of cached and active pages.
        used_bytes: size of the rows that requests hold; shared rows count once.
        wasted_bytes: bytes in active pages that do not hold tokens (internal fragmentation).
        peak_mapped_bytes, peak_used_bytes, peak_wasted_bytes: maxima so far.
        active_slots, cached_slots, empty_slots, broken_slots: slots by state; cached slots are free
            and have pages.
        segments: number of separate mappings at the cache's addresses, as the back end counts
            them; fewer mean longer runs.
        mappings: driver mappings of the whole context, limited to `ContextInfo.max_mappings`.
        large_entries: 2 MiB entries in the whole context; all other entries map a single page.
        steps, steps_async: `step` and `step_async` calls that returned 0.
        short: `step` and `step_async` calls that returned -1.
        grown_pages, zeroed_pages, reclaimed_pages: pages mapped, zero-filled for a new owner, and
            unmapped. Pages grown minus pages reclaimed are the pages mapped now, in all tiers.
        reused_pages: pages granted to a request that were already mapped.
        moved_pages: pages that replaced other pages at the same addresses.
        promoted_pages: pages that `KVCache.promote` or a `step` joined or replaced so that 2 MiB
            entries can map them.
        evicted_pages: pages of evicted prefixes.
        prefix_queries, prefix_query_tokens: prompts that were looked up for requests that then got
            a slot, and their tokens. A rejected request counts only when it is admitted later.
        prefix_hits, prefix_hit_tokens: how many of these prompts began with a recorded prefix, and
            the tokens of those prefixes.
        prefix_resumed: hits whose prefix was still completely mapped in the slot.
        prefix_stored_bytes, prefix_loaded_bytes: bytes of prefixes' rows copied to host memory and
            back.
        prefix_dropped_bytes: bytes of evicted prefixes' rows that were replaced by others in host
            memory or could not be stored there.
        waits: number of times that a call waited for mapping, filling or reclaiming.
        wait_ns: total time of these waits.
        wait_counts: histogram of the waits: item k counts waits of more than ``2**(k-1)`` and at
            most ``2**k`` nanoseconds; the last item also counts all longer waits.
        last_wait_ns: the last `step`'s part of `wait_ns`.
        driver_calls: map, unmap, fill and slab calls in the whole context since the cache was
            created.
        driver_ns: time spent in these calls.
        critical_driver_ns: the part of `driver_ns` for which a call to the cache had to wait.
        background_driver_ns: the remainder of `driver_ns`.
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
        state: "active", "cached" (free, with pages), "empty" (free, without pages) or "broken".
        seq_len: number of tokens whose rows it holds.
        granted_pages: pages that the owner may use, excluding pages that left its window.
        mapped_pages: pages that are mapped or that growth in flight is mapping.
        shared_pages: mapped pages that are shared.
        large_pages: mapped pages that 2 MiB entries map in every tensor.
        away_pages: mapped pages that are off the device.
        moving_pages: mapped pages that a later `step` will replace.
        in_flight: True if a batch on the slot's addresses is in flight.
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
        """Returns this slot's record, summed over all groups of layers.

        `others` holds the same slot's records in the other groups.
        """
        if not others:  # a snapshot runs this for every slot
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
    """Sums statistics over groups that share a budget.

    The `_SAME` fields are not summed but taken from the first group.

    `room` is the number of pages that the budget has free for the groups.
    """
    first = each[0]
    if len(each) == 1:
        return first
    names = [one.name for one in fields(CacheStats) if one.name != "wait_counts"]
    sums = {name: sum(getattr(one, name) for one in each) for name in names}
    sums |= {name: getattr(first, name) for name in _SAME}
    # Each group reports all of the room as free, or less if its own limit is lower.
    free = min(room, sums["free_pages"])
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


_COUNTS = {one.name for one in fields(CacheStats)} - {"waits"}


class Counters:
    """Running counts behind `CacheStats`.

    Attributes:
        before: the context's statistics when the cache was created.
        last_prompt: for the last request's prompt, the number of tokens, how many of them were
            recorded, and whether these were still mapped in the slot.
        waiting: creates a context manager that counts the time inside it as waiting, and driver
            time during it as critical.
    """

    def __init__(self, context: Context) -> None:
        self.before = context.stats()
        self.steps = self.steps_async = self.short = 0
        self.grown = self.zeroed = self.reused = 0
        self.reclaimed_pages = self.moved_pages = self.promoted_pages = self.evicted_pages = 0
        self.prefix_queries = self.prefix_query_tokens = 0
        self.prefix_hits = self.prefix_hit_tokens = self.prefix_resumed = 0
        self.last_prompt: tuple[int, int, bool] | None = None
        self.waits = _native.Waits()
        self.waiting = partial(_native.Waiting, self.waits, context.handle)
        self.peak_mapped = self.peak_used = self.peak_wasted = 0

    def shown(self) -> dict[str, int]:
        """Returns the counts that have the same name in `CacheStats`."""
        return {name: count for name, count in vars(self).items() if name in _COUNTS}

    def driver(self, now: Stats) -> tuple[int, int]:
        """Returns how many driver calls were made since `before`, and the nanoseconds they took."""
        names = ("map_calls", "unmap_calls", "slab_calls", "fill_calls")
        calls = sum(getattr(now, name) - getattr(self.before, name) for name in names)
        return calls, now.driver_ns - self.before.driver_ns
