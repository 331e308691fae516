# SPDX-License-Identifier: MIT
"""Statistics, snapshots and the integrity check."""

from __future__ import annotations

import errno
from collections import Counter
from collections.abc import Sequence

from pyvmem.errors import VMemError
from pyvmem.kvcache.group import Group
from pyvmem.kvcache.pages import ALL_ON_DEVICE, DEVICE, Tier
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
    in_flight = [slot.job is not None and not slot.job.done() for slot in group.table]
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
            away_pages=slot.mapped - slot.head - slot.here_from(slot.head),
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
    ahead = sum(one.mapped - one.granted for one in group.table if one.active and not one.stale)
    waits = counters.waits.struct
    grown, reused, zeroed = group.pager.under_way()
    now, host = group.context.stats(), group.prefixes.host
    calls, ns = counters.driver(now)
    return CacheStats(
        **counters.shown(),
        total_pages=reclaimer.free + reclaimer.device_pages,
        free_pages=reclaimer.free,
        cached_pages=reclaimer.device_pages - active_pages,
        ahead_pages=ahead * layout.num_tensors,
        active_pages=active_pages,
        shared_pages=reclaimer.shared.pages * layout.num_tensors,
        moving_pages=group.mover.pages()[DEVICE] * layout.num_tensors,
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
        grown_pages=counters.grown - grown,
        zeroed_pages=counters.zeroed - zeroed,
        reused_pages=counters.reused - reused,
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
    layout, found = group.layout, 0
    if not layout.block:
        return 0
    for page in range(0, slot.large_end, layout.block):
        places = [slot.addr + layout.offset(0, page, one) for one in range(layout.num_tensors)]
        found += all(group.context.query(at).entry_bytes > layout.page_size for at in places)
    return found * layout.block


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
    in_flight = (one.pager.growths or one.reclaimer.unmaps or one.mover.moves for one in groups)
    if not any(in_flight):
        groups[0].context.check()


def check(group: Group) -> list[str]:
    """Describes each mismatch within a group's records or between them and libvmem's."""
    found: list[str] = []
    table, pager, reclaimer, layout = group.table, group.pager, group.reclaimer, group.layout
    for slot in table:
        texts = _check_slot(group, slot)
        if not slot.broken:
            texts += _check_pages(group, slot) + check_places(group, slot)
        found += [f"slot {slot.index}: {text}" for text in texts]
    running = [slot for slot in table if slot.active and not slot.stale]
    shared = reclaimer.shared
    spans = [one.span for one in (*table, *reclaimer.unmaps)] + group.prefixes.spans(group.place)
    found += shared.check(spans, [slot.span for slot in running])
    if not group.place:
        found += group.prefixes.check()
    returning = sum(one.pages for one in reclaimer.unmaps)
    held = sum(slot.here_from(slot.shared) for slot in table)
    held += returning + shared.pages + group.mover.pages()[DEVICE]
    granted = sum(slot.granted for slot in table)
    for what, recorded, counted in (
        ("pages", reclaimer.device_pages, held * layout.num_tensors),
        ("granted pages per tensor", pager.granted_pages, granted),
        ("unmaps, pages per tensor", reclaimer.coming, returning),
        ("pages per tensor outside windows", reclaimer.slid, sum(slot.head for slot in running)),
        ("tokens", group.used_tokens, sum(group.rows)),
    ):
        if recorded != counted:
            found.append(f"{what}: recorded {recorded}, counted {counted}")
    found += check_away(group)
    if reclaimer.device_pages > reclaimer.limit:
        found.append(f"{reclaimer.device_pages} pages held, above the limit of {reclaimer.limit}")
    if reclaimer.share is not None:
        found += reclaimer.share.check()
    return found


def _check_slot(group: Group, slot: Slot) -> list[str]:
    """Returns a description of each contradiction between the fields of a slot."""
    found = []
    granted, mapped, large, layout = slot.granted, slot.mapped, slot.large_end, group.layout
    rows, capacity = group.rows[slot.index], group.pager.capacity[slot.index]
    if not 0 <= granted <= mapped <= layout.slot_pages:
        found.append(f"granted {granted}, mapped {mapped} of {layout.slot_pages}")
    if not 0 <= slot.head <= slot.shared <= mapped:
        found.append(f"head {slot.head}, shared up to page {slot.shared}, mapped {mapped}")
    if large > mapped or (large and large % layout.block):
        found.append(f"large entries up to page {large}, mapped {mapped}")
    if not slot.active and (granted or rows):
        found.append(f"free, but {granted} pages are granted, and it holds {rows} tokens")
    if capacity != layout.capacity(granted):
        found.append(f"capacity {capacity} with {granted} pages")
    if slot.job is not None and slot.job not in (*group.pager.growths, *group.reclaimer.unmaps):
        found.append("its batch is not listed as in flight")
    return found


def _check_together(groups: Sequence[Group]) -> list[str]:
    """Returns a description of each inconsistency between groups, which share their requests."""
    found = []
    for place in range(len(groups[0].table)):
        rows = [group.rows[place] for group in groups]
        active = [group.table[place].active for group in groups]
        if len(set(rows)) > 1 or len(set(active)) > 1:
            found.append(f"slot {place}, by group: {rows} tokens, active {active}")
    return found


def _check_pages(group: Group, slot: Slot) -> list[str]:
    """Compares a slot's pages with the context's own view, in every tensor.

    Skips pages that an in-flight batch is changing: they may or may not be mapped.
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
    # A stale slot's pages may still have the access rights of its previous owner.
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
                    where = f"tensor {tensor}, page {page}"
                    found.append(f"{where}: expected {wanted}, found {is_now}")
                    break
                at += info.run_bytes
        quiet = layout.block and slot.job is None
        for page in range(slot.large_end, slot.mapped, layout.block) if quiet else ():
            if group.context.query(start + page * size).entry_bytes > size:
                found.append(f"an entry of 2 MiB at page {page} of {slot.large_end}")
    return found


def check_places(group: Group, slot: Slot) -> list[str]:
    """Returns a description of each mismatch between a slot's pages and their recorded tiers."""
    found, tier_map = [], slot.tier_map
    for low, high, tier in tier_map.noted:
        if low < slot.head or high > slot.mapped:
            found.append(f"pages {low} to {high} recorded in {tier}, mapped {slot.mapped}")
        elif slot.job is None:
            found += _check_memory(group, slot, low, high, tier)
    shared = ALL_ON_DEVICE.put(*slot.span.stretches(slot.head))
    if list(shared.noted) != list(tier_map.within(slot.head, slot.shared).noted):
        found.append("its shared pages are not in the recorded tiers")
    if slot.active and tier_map.off_device_end > slot.granted and not slot.stale:
        end = tier_map.off_device_end
        found.append(f"pages up to {end} are off the device, {slot.granted} granted")
    return found


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
    counted.update(group.mover.pages())
    del counted[DEVICE]
    found = []
    own = group.own_off_device()
    if group.reclaimer.own_off_device not in (None, own):
        pages = sum(high - low for _, low, high in own)
        found.append(f"off-device pages per tensor of requests: counted {pages}, not as recorded")
    recorded = group.reclaimer.off_device
    for tier in {*counted, *recorded}:
        if (pages := counted[tier] * tensors) != recorded[tier]:
            found.append(f"pages in {tier}: recorded {recorded[tier]}, counted {pages}")
    return found
