# SPDX-License-Identifier: MIT
"""Statistics, snapshots and the integrity check."""

from __future__ import annotations

import errno
from collections import Counter
from collections.abc import Sequence

from pyvmem.errors import VMemError
from pyvmem.kvcache.group import Group
from pyvmem.kvcache.pages import Tier
from pyvmem.kvcache.slots import Growth, Slide, Slot, Unmap
from pyvmem.kvcache.stats import CacheStats, SlotInfo
from pyvmem.memory.info import Location, RangeFlags

__all__ = ["IntegrityError", "check", "check_away", "check_places", "snapshot", "stats", "verify"]


class IntegrityError(VMemError):
    """The cache's records contradict each other or the context: a bug in this package.

    Attributes:
        found: a description of each contradiction.
    """

    def __init__(self, found: list[str]) -> None:
        super().__init__("; ".join(found), errno=errno.EIO, op="KVCache.check_integrity")
        self.found = found


def _state(slot: Slot) -> str:
    if slot.active:
        return "active"
    if slot.broken:
        return "broken"
    return "cached" if slot.mapped else "empty"


def snapshot(group: Group) -> list[SlotInfo]:
    """Returns every slot's state, after recording the results of finished batches."""
    jobs = [slot.job for slot in group.table]
    in_flight = [job is not None and not job.done() for job in jobs]
    group.reclaimer.poll()
    return [
        SlotInfo(
            reqid=slot.index,
            state=_state(slot),
            seq_len=group.rows[slot.index],
            granted_pages=max(0, slot.granted - slot.head),
            mapped_pages=slot.mapped - slot.head,
            shared_pages=slot.span.pages,
            large_pages=_large(group, slot),
            away_pages=sum(slot.tier_map.off_device(slot.head, slot.mapped).values()),
            moving_pages=group.mover.moving(slot),
            in_flight=in_flight[slot.index],
        )
        for slot in group.table
    ]


def stats(group: Group) -> CacheStats:
    """Returns a group's current state and counters."""
    counters, reclaimer, layout = group.counters, group.reclaimer, group.layout
    counters.peak_mapped = max(counters.peak_mapped, reclaimer.device_pages)
    active_pages, used = group.note_use()  # an interrupted call may have skipped this
    states = [_state(slot) for slot in group.table]
    calls, ns = counters.driver()
    waits = counters.waits.struct
    grown, reused, zeroed = group.pager.under_way()
    now, host = group.context.stats(), group.prefixes.host
    return CacheStats(
        total_pages=reclaimer.free + reclaimer.device_pages,
        free_pages=reclaimer.free,
        cached_pages=reclaimer.device_pages - active_pages,
        ahead_pages=sum(
            slot.mapped - slot.granted for slot in group.table if slot.active and not slot.stale
        )
        * layout.num_tensors,
        active_pages=active_pages,
        shared_pages=reclaimer.shared.pages * layout.num_tensors,
        moving_pages=group.mover.pages()[0] * layout.num_tensors,
        host_pages=_away(group, Location.HOST),
        peer_pages=_away(group, Location.PEER),
        prefix_pages=group.prefixes.pages(group.place) * layout.num_tensors,
        prefix_tokens=group.prefixes.tree.tokens,
        prefix_host_bytes=host.nbytes,
        mapped_bytes=reclaimer.device_pages * layout.page_size,
        used_bytes=used,
        wasted_bytes=active_pages * layout.page_size - used,
        peak_mapped_bytes=counters.peak_mapped * layout.page_size,
        peak_used_bytes=counters.peak_used,
        peak_wasted_bytes=counters.peak_wasted,
        active_slots=states.count("active"),
        cached_slots=states.count("cached"),
        empty_slots=states.count("empty"),
        broken_slots=states.count("broken"),
        segments=group.context.query(group.reservation.addr).segments,
        mappings=now.mappings,
        large_entries=now.large_entries,
        steps=counters.steps,
        steps_async=counters.steps_async,
        short=counters.short,
        grown_pages=counters.grown - grown,
        zeroed_pages=counters.zeroed - zeroed,
        reclaimed_pages=counters.reclaimed,
        reused_pages=counters.reused - reused,
        moved_pages=counters.moved,
        promoted_pages=counters.promoted,
        evicted_pages=counters.evicted,
        prefix_queries=counters.queries,
        prefix_query_tokens=counters.query_tokens,
        prefix_hits=counters.hits,
        prefix_hit_tokens=counters.hit_tokens,
        prefix_resumed=counters.resumed,
        prefix_stored_bytes=host.stored,
        prefix_loaded_bytes=host.loaded,
        prefix_dropped_bytes=host.dropped,
        waits=waits.count,
        wait_ns=waits.ns,
        wait_counts=tuple(waits.lengths),
        last_wait_ns=waits.last_ns,
        driver_calls=calls,
        driver_ns=ns,
        critical_driver_ns=waits.driver_ns,
        background_driver_ns=max(0, ns - waits.driver_ns),
    )


def _large(group: Group, slot: Slot) -> int:
    """Returns how many of a slot's pages per tensor are mapped by 2 MiB entries in every tensor."""
    layout, block = group.layout, group.layout.block
    return block * sum(
        all(
            group.mapper.query(slot.addr + layout.offset(0, page, tensor)).entry_bytes
            > layout.page_size
            for tensor in range(layout.num_tensors)
        )
        for page in (range(0, slot.large_end, block) if block else ())
    )


def _away(group: Group, location: Location) -> int:
    off_device = group.reclaimer.off_device.items()
    return sum(pages for tier, pages in off_device if tier.location is location)


def verify(groups: Sequence[Group]) -> None:
    """Implements `KVCache.check_integrity`."""
    for group in groups:
        group.reclaimer.poll()
    found = [text for group in groups for text in check(group)]
    if found := found + _check_together(groups):
        raise IntegrityError(found)
    if not any(group.has_batches for group in groups):
        groups[0].context.check()


def check(group: Group) -> list[str]:
    """Returns a description of each mismatch in a group's records, or with libvmem's records."""
    found: list[str] = []
    table, pager, reclaimer, layout = group.table, group.pager, group.reclaimer, group.layout
    held = granted = slid = 0
    returning = sum(one.pages for one in reclaimer.unmaps)
    for slot in table:
        name = f"slot {slot.index}"
        held += slot.mapped - slot.shared
        held -= sum(slot.tier_map.off_device(slot.shared, slot.mapped).values())
        slid += slot.head if slot.active and not slot.stale else 0
        granted += slot.granted
        if not 0 <= slot.granted <= slot.mapped <= layout.slot_pages:
            found.append(
                f"{name}: granted {slot.granted}, mapped {slot.mapped} of {layout.slot_pages}"
            )
        if not 0 <= slot.head <= slot.mapped:
            found.append(f"{name}: head {slot.head}, mapped {slot.mapped}")
        if not slot.large_end <= slot.mapped or (slot.large_end and slot.large_end % layout.block):
            found.append(f"{name}: large entries up to page {slot.large_end}, mapped {slot.mapped}")
        if slot.shared > slot.mapped:
            found.append(f"{name}: shared up to page {slot.shared}, mapped {slot.mapped}")
        if not slot.active and slot.granted:
            found.append(f"{name}: free, but {slot.granted} pages are granted")
        if (
            slot.active
            and slot.granted
            and layout.capacity(slot.granted) != pager.capacity[slot.index]
        ):
            found.append(f"{name}: capacity {pager.capacity[slot.index]} with {slot.granted} pages")
        if not slot.granted and pager.capacity[slot.index]:
            found.append(f"{name}: capacity {pager.capacity[slot.index]} without a page")
        if not slot.active and group.rows[slot.index]:
            found.append(f"{name}: free, but holds {group.rows[slot.index]} tokens")
        if slot.job is not None and slot.job not in (*pager.growths, *reclaimer.unmaps):
            found.append(f"{name}: its batch is not listed as in flight")
        if not slot.broken:
            found.extend(_check_pages(group, slot))
            found.extend(check_places(group, slot))
    shared = reclaimer.shared
    holders = [*table, *reclaimer.unmaps]
    found.extend(
        shared.check(
            [one.span for one in holders] + group.prefixes.spans(group.place),
            [slot.span for slot in table if slot.active and not slot.stale],
        )
    )
    if not group.place:
        found.extend(group.prefixes.check())
    held += shared.pages + group.mover.pages()[0]
    if (
        held + returning != reclaimer.device_pages // layout.num_tensors
        or reclaimer.device_pages % layout.num_tensors
    ):
        found.append(
            f"pages: recorded {reclaimer.device_pages}, counted {held} + {returning} per tensor"
        )
    if granted != pager.granted_pages:
        found.append(f"granted pages per tensor: recorded {pager.granted_pages}, counted {granted}")
    if returning != reclaimer.coming:
        found.append(f"unmaps, pages per tensor: recorded {reclaimer.coming}, counted {returning}")
    if slid != reclaimer.slid:
        found.append(f"pages per tensor outside windows: recorded {reclaimer.slid}, counted {slid}")
    found.extend(check_away(group))
    if reclaimer.device_pages > reclaimer.limit:
        found.append(f"{reclaimer.device_pages} pages held, above the limit of {reclaimer.limit}")
    if reclaimer.share is not None:
        found.extend(reclaimer.share.check())
    if group.used_tokens != sum(group.rows):
        found.append(f"tokens: recorded {group.used_tokens}, counted {sum(group.rows)}")
    now = stats(group)
    if now.free_pages + now.cached_pages + now.active_pages != now.total_pages:
        found.append(
            f"free {now.free_pages} + cached {now.cached_pages} + active {now.active_pages} pages "
            f"do not add up to {now.total_pages}"
        )
    return found


def _check_together(groups: Sequence[Group]) -> list[str]:
    """Returns a description of each inconsistency between groups that have the same requests."""
    found = []
    for slots in zip(*(group.table for group in groups), strict=True):
        place = slots[0].index
        rows = [group.rows[place] for group in groups]
        active = [slot.active for slot in slots]
        if len(set(rows)) > 1 or len(set(active)) > 1:
            found.append(f"slot {place}, by group: {rows} tokens, active {active}")
    return found


def _check_pages(group: Group, slot: Slot) -> list[str]:
    """Compares a slot's pages with the context's own view, in every tensor.

    Skips pages that a batch in flight is changing: they may be mapped or not.
    """
    layout = group.layout
    size = layout.page_size
    sure, end = slot.mapped, slot.mapped  # mapped below `sure`, unmapped from `end` on
    gone, job = slot.head, slot.job
    if isinstance(job, Slide):
        gone = job.lows[job.slots.index(slot)]
    elif isinstance(job, Unmap):
        end = job.high
    elif isinstance(job, Growth) and not job.granted:
        sure = min([slot.mapped, *(low for other, low, _ in job.pieces if other is slot)])
    # A stale slot's pages may still have the access rights of its earlier owner.
    shared, how = min(slot.shared, sure), "mapped" if slot.writer else "read-only"
    ranges = [
        (0, gone, "not mapped"),
        (slot.head, shared, how if not slot.stale or (slot.kept and slot.job is None) else None),
        (shared, sure, "mapped"),
        (end, layout.slot_pages, "not mapped"),
    ]
    found = []
    for tensor in range(layout.num_tensors):
        start = slot.addr + layout.offset(0, 0, tensor)
        for low, high, wanted in ranges:
            at, stop = start + low * size, start + high * size
            while wanted and at < stop:
                info = group.context.query(at)
                is_now = "not mapped"
                if info.mapped:
                    is_now = "read-only" if RangeFlags.READONLY in info.flags else "mapped"
                if is_now != wanted:
                    page = (at - start) // size
                    found.append(
                        f"slot {slot.index}, tensor {tensor}, page {page}: expected {wanted}, "
                        f"found {is_now}"
                    )
                    break
                at += info.run_bytes
        found += _check_entries(group, slot, start)
    return found


def _check_entries(group: Group, slot: Slot, start: int) -> list[str]:
    """Describes the unexpected 2 MiB entries past `slot.large_end` in the tensor at `start`."""
    layout, found = group.layout, []
    quiet = layout.block and slot.job is None
    for page in range(slot.large_end, slot.mapped, layout.block) if quiet else ():
        if group.context.query(start + page * layout.page_size).entry_bytes > layout.page_size:
            found.append(f"slot {slot.index}: an entry of 2 MiB at page {page} of {slot.large_end}")
    return found


def check_places(group: Group, slot: Slot) -> list[str]:
    """Returns a description of each mismatch between a slot's pages and their recorded tiers."""
    found, tier_map, name = [], slot.tier_map, f"slot {slot.index}"
    for low, high, tier in tier_map.noted:
        if low < slot.head or high > slot.mapped:
            found.append(f"{name}: pages {low} to {high} recorded in {tier}, mapped {slot.mapped}")
        elif slot.job is None:
            found += [f"{name}: {text}" for text in _check_memory(group, slot, low, high, tier)]
    if _elsewhere(slot):
        found.append(f"{name}: its shared pages are not in the recorded tiers")
    if slot.active and tier_map.off_device_end > slot.granted and not slot.stale:
        found.append(
            f"{name}: pages up to {tier_map.off_device_end} are off the device, "
            f"{slot.granted} granted"
        )
    return found


def _elsewhere(slot: Slot) -> bool:
    """Returns whether the tiers of a slot's shared pages differ from its `tier_map`."""
    head, end = slot.head, slot.shared
    tiers = [tier for low, high, tier in slot.span.stretches(head) for _ in range(low, high)]
    noted = slot.tier_map.stretches(head, end)
    return tiers != [tier for low, high, tier in noted for _ in range(low, high)]


def _check_memory(group: Group, slot: Slot, low: int, high: int, tier: Tier) -> list[str]:
    """Compares the recorded tier of pages with the context's, in every tensor."""
    found, layout = [], group.layout
    for tensor in range(layout.num_tensors):
        at = slot.addr + layout.offset(0, low, tensor)
        pages = group.mapper.gather(at, (high - low) * layout.page_size, 1, 0)
        info = pages.info
        pages.drop()
        peer = tier.location is Location.PEER
        if (info.location, info.device if peer else 0) != tier:
            found.append(f"tensor {tensor}, pages {low} to {high} are not in {tier}")
    return found


def check_away(group: Group) -> list[str]:
    """Returns a description of each inconsistency in the counts of off-device pages."""
    tensors = group.layout.num_tensors
    counted: Counter[Tier] = Counter()
    for slot in group.table:
        counted.update(slot.tier_map.off_device(slot.shared, slot.mapped))
    for unmap in group.reclaimer.unmaps:
        counted.update(unmap.off_device)
    counted.update(group.reclaimer.shared.off_device())
    counted.update(group.mover.pages()[1])
    found = []
    own = group.own_off_device()
    if group.reclaimer.own_off_device not in (None, own):
        found.append(f"off-device pages per tensor of requests: counted {own[0]}, not as recorded")
    recorded = group.reclaimer.off_device
    for tier in {*counted, *recorded}:
        if (pages := counted[tier] * tensors) != recorded[tier]:
            found.append(f"pages in {tier}: recorded {recorded[tier]}, counted {pages}")
    return found
