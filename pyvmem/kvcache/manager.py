# SPDX-License-Identifier: MIT
"""What is done for requests in every group of layers, or in none: steps, forks, admission."""

from __future__ import annotations

import errno
import operator
from array import array
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

from pyvmem.errors import OutOfMemory, TooManyMappings, VMemError
from pyvmem.features.table import FORK, HOST_PAGES, PEER_PAGES
from pyvmem.info import Location
from pyvmem.kvcache.config import invalid
from pyvmem.kvcache.events import record, wait_for
from pyvmem.kvcache.group import Core
from pyvmem.kvcache.growth import Source
from pyvmem.kvcache.pages import DEVICE, Kind, Stretch, Tier
from pyvmem.kvcache.prefix_cache import PrefixMatch
from pyvmem.kvcache.slots import Growth, Move, Slot
from pyvmem.streams import device_ordinal

__all__ = [
    "Moved",
    "alloc_prefix",
    "can_admit",
    "fork",
    "fork_all",
    "grow_all",
    "move",
    "step",
    "step_all",
    "step_async",
    "step_async_all",
    "tier_of",
]

_Want = list[tuple[Slot, int]]


def step(core: Core, seq_lens: Sequence[int], stream: Any) -> int:
    """See `KVCache.step`."""
    try:
        rows, total, want = _begin(core, seq_lens, stream)
        if want:
            if not _grow(core, want, background=False):
                core.counters.short += 1
                return -1
            _settle(core, stream)
            core.keep_watermark()
    except TooManyMappings:
        if core.table.lockstep:  # the other ranks do not know
            raise
        _note_crowded([core])
        return -1
    _commit(core, rows, total, stream)
    return 0


def step_async(core: Core, seq_lens: Sequence[int]) -> int:
    """See `KVCache.step_async`."""
    short, want = _begin_async(core, seq_lens)
    if want and not _grow(core, want, background=True):
        core.counters.short += 1
        return -1
    if short:
        core.keep_watermark()
    core.counters.steps_async += 1
    return 0


def step_all(cores: Sequence[Core], seq_lens: Sequence[int], stream: Any) -> int:
    """`step` of several caches with the same requests: all of them or none."""
    try:
        begun = [(core, *_begin(core, seq_lens, stream)) for core in cores]
        if any(want for *_, want in begun):
            if not grow_all([(core, want) for core, *_, want in begun], background=False):
                _note_short(cores)
                return -1
            for core in cores:
                _settle(core, stream)
            for core in cores:
                core.keep_watermark()
    except TooManyMappings:
        _note_crowded(cores)
        return -1
    for core, rows, total, _ in begun:
        _commit(core, rows, total, stream)
    return 0


def step_async_all(cores: Sequence[Core], seq_lens: Sequence[int]) -> int:
    """`step_async` of several caches with the same requests: all of them or none."""
    begun = [(core, *_begin_async(core, seq_lens)) for core in cores]
    if not grow_all([(core, want) for core, _, want in begun], background=True):
        _note_short(cores)
        return -1
    for core, short, _ in begun:
        if short:
            core.keep_watermark()
        core.counters.steps_async += 1
    return 0


# ---- the parts of a step -------------------------------------------------------------------------


def _begin(core: Core, seq_lens: Sequence[int], stream: Any) -> tuple[array[int], int, _Want]:
    """Checks the numbers and ends what is under way.

    Returns:
        The rows held after the step, the sum of these, and what pages are missing.
    """
    pager, reclaimer = core.pager, core.reclaimer
    rows, total, want = core.scan(seq_lens)
    core.counters.last_wait_ns = 0
    if pager.growths:
        _settle(core, stream)
        if want:
            rows, total, want = core.scan(seq_lens)
    if core.mover.moves or core.mover.given_up:
        core.mover.step(stream)
    if reclaimer.cuts:
        reclaimer.poll()
    if reclaimer.errors:
        reclaimer.raise_errors()
    return rows, total, want


def _settle(core: Core, stream: Any) -> None:
    """Waits for the growths that the step needs; ranks wait for all, as one."""
    core.pager.settle(stream, lens=None if core.table.lockstep else core.needs)


def _begin_async(core: Core, seq_lens: Sequence[int]) -> tuple[bool, _Want]:
    """Whether slots are short, and what no growth under way will give them."""
    pager, reclaimer = core.pager, core.reclaimer
    _, _, want = core.scan(seq_lens)
    short = bool(want)
    if reclaimer.cuts:
        reclaimer.poll()
    if want and not core.table.lockstep:
        # What an earlier owner's GPU work holds up is left to `step`, which must wait for it.
        want = [(slot, pages) for slot, pages in want if not _is_left(core, slot)]
    if want and (pager.growths or reclaimer.cuts):
        promised = {
            (slot, owner): pages for job in pager.growths for slot, owner, pages in job.grants
        }
        want = [
            (slot, pages) for slot, pages in want if promised.get((slot, slot.owner), 0) < pages
        ]
    return short, want


def _is_left(core: Core, slot: Slot) -> bool:
    """Whether a slot can only grow after a wait, be it for a map call that the request began."""
    job = slot.job
    if isinstance(job, Growth) and job.filling is None and not job.handover:
        mine = any(one is slot and owner == slot.owner for one, owner, _ in job.grants)
        return not mine and not job.done()
    return core.pager.is_held_up(slot)


def _grow(core: Core, want: _Want, *, background: bool, tentative: bool = False) -> bool:
    """Begins to give slots their pages, once nothing is in flight over them."""
    pager, reclaimer = core.pager, core.reclaimer
    for slot, _ in want:
        if slot.job is not None or slot.mapped > slot.granted:  # else there is nothing to wait for
            pager.release(slot)
    lacking = sum([pages - slot.mapped for slot, pages in want if pages > slot.mapped])
    lacking *= core.layout.num_tensors
    if lacking > reclaimer.free and not pager.can_have(lacking, dict(want)):
        return False  # known before anything is planned
    return pager.grow(want, background=background, tentative=tentative)


def grow_all(wants: Sequence[tuple[Core, _Want]], *, background: bool) -> bool:
    """Begins to give slots of several caches their pages; False where one is short.

    What the others have mapped is no request's then.
    """
    if _grow_each(wants, background):
        return True
    # What a growing slot has beyond its request, another cache cannot take meanwhile.
    cut = [_cut_surplus(core, want) for core, want in wants]
    return any(cut) and _grow_each(wants, background)


def _note_short(cores: Sequence[Core]) -> None:
    for core in cores:
        core.counters.short += 1


def _note_crowded(cores: Sequence[Core]) -> None:
    """The driver had no mapping left for what was begun in the background; that was undone."""
    _note_short(cores)
    for core in cores:
        core.pager.runs.relieve()


def _grow_each(wants: Sequence[tuple[Core, _Want]], background: bool) -> bool:
    grown: list[tuple[Core, _Want]] = []

    def disown() -> None:
        for core, want in grown:
            _disown(core, want)

    try:
        for core, want in wants:
            if want:
                core.journal.on_abort(partial(_disown, core, want))
                if not _grow(core, want, background=background, tentative=True):
                    disown()
                    return False
                grown.append((core, want))
    except VMemError:
        disown()
        raise
    return True


def _cut_surplus(core: Core, want: _Want) -> bool:
    """Begins to unmap what slots have beyond what they are to have; whether there was something."""
    found = False
    for slot, pages in want:
        core.pager.release(slot)
        keep = max(pages, slot.granted)
        if slot.mapped > keep:
            found |= core.reclaimer.try_cut(slot, keep)
    return found


def _disown(core: Core, want: _Want) -> None:
    """Makes a growth in flight one that no request waits for; its pages can be taken back."""
    for slot, _ in want:
        if isinstance(slot.job, Growth):
            core.journal.keep(slot.job, "grants", "handover")
            slot.job.grants = []
            slot.job.handover = []  # the slot keeps these events for its next owner
    core.pager.poll()


def _commit(core: Core, rows: array[int], total: int, stream: Any) -> None:
    """Notes what the slots hold from now on."""
    if core.window is not None:
        core.window.slide(rows, stream)
    if core.config.promote_tokens and core.promoter is not None:
        core.promoter.step(rows, stream)
    core.pager.runs.step(stream)
    core.journal.keep(core, "used_tokens", "clock")
    core.journal.keep(core.pager.lengths, "held")
    core.pager.lengths.held = rows
    core.used_tokens = total
    core.note_peaks()
    core.counters.steps += 1
    core.clock += 1
    if core.table.lockstep:
        core.prefixes.leases.end_all()  # a collector must not decide when they end
    if core.untidy:
        core.tidy()


def fork(
    core: Core,
    reqid: int,
    count: int,
    length: int | None,
    stream: Any,
    into: Sequence[int] | None = None,
) -> list[int] | None:
    """See `KVCache.fork_many`."""
    layout, sharing = core.layout, core.sharing
    sharing.require(FORK, "fork")
    parent = core.slot(reqid)
    held = core.rows[parent.index]
    rows = held if length is None else operator.index(length)
    if not 0 <= rows <= held:
        raise invalid(f"length {rows}: reqid {parent.index} holds {held} tokens", limit=held)
    if not 1 <= count <= len(core.table):
        raise invalid(
            f"fork of {count} requests; it must lie between 1 and {len(core.table)}",
            limit=len(core.table),
        )
    chosen = None if into is None else _chosen(core, count, into)
    core.mover.finish(parent, stream)
    core.pager.release(parent)
    full = parent.places.floor(rows * layout.row_bytes // layout.page_size)
    pages = layout.pages_for(rows)
    try:
        slots = sharing.vacate(count, chosen)
    except VMemError as error:
        if sharing.is_shortage(error):
            return None
        raise
    if slots is None:
        return None
    new_pages = (pages - full) * count * layout.num_tensors
    if not core.pager.can_have(new_pages, {}):
        return None
    if rows * layout.row_bytes > parent.shared * layout.page_size:
        wait_for(record(stream, core.device))
    sharing.share(parent, full, core.prefixes.unit_pages[core.place])
    try:
        core.attach(slots, parent.span.cut(0, full), parent)
    except VMemError as error:
        if sharing.is_shortage(error):
            return None
        raise
    try:
        if pages > full:
            tail = Source(
                core.pager.base + layout.offset(parent.index),
                layout.tensor_bytes,
                rows * layout.row_bytes,
            )
            want = [(slot, pages) for slot in slots]
            if not core.pager.grow(want, background=False, source=tail):
                core.detach(slots)
                return None
            core.pager.release(slots[0])  # of one growth for all; other requests' go on
    except VMemError:
        core.detach(slots)
        raise
    for slot in slots:
        if slot.shared:
            slot.pins = core.prefixes.pin_again(parent.pins)
        core.enter(slot, rows)
    core.note_peaks()
    return [slot.index for slot in slots]


def _chosen(core: Core, count: int, into: Sequence[int]) -> list[Slot]:
    """The free slots that the caller named."""
    slots = [core.free_slot(index) for index in into]
    if len(slots) != count:
        raise invalid(f"into names {len(slots)} slots for {count} requests", limit=count)
    if len(set(slots)) != count:
        raise invalid(f"into names a slot twice: {[slot.index for slot in slots]}")
    return slots


def can_admit(
    cores: Sequence[Core], seq_lens: Sequence[int], matches: Sequence[PrefixMatch | None] | None
) -> bool:
    """See `KVCache.can_admit`; of several caches with the same requests, in all of them."""
    first = cores[0]
    lengths = [operator.index(length) for length in seq_lens]
    longest = first.config.max_seq_len
    for place, length in enumerate(lengths):
        if not 0 <= length <= longest:
            raise invalid(
                f"seq_lens[{place}] is {length}; it must lie between 0 and {longest}",
                limit=longest,
            )
    found = _matches(first, lengths, matches)
    begun = [0 if match is None else match.length for match in found] or [0] * len(lengths)
    each = [list(map(core.layout.pages_for_step, begun, lengths)) for core in cores]
    pages = [_pages(core, one, found) for core, one in zip(cores, each, strict=True)]
    if len(lengths) > len(first.table.free):
        return False
    if not _find_mappings(cores, each):
        return False
    if not all(core.pager.could_have(need) for core, need in zip(cores, pages, strict=True)):
        return False
    return len(cores) == 1 or _fit_together(cores, pages)


def _matches(
    core: Core, lengths: list[int], matches: Sequence[PrefixMatch | None] | None
) -> list[PrefixMatch | None]:
    """For each length its match, leased."""
    if matches is None:
        return []
    found = list(matches)
    if len(found) != len(lengths):
        raise invalid(f"{len(found)} matches for {len(lengths)} requests", limit=len(lengths))
    for place, (match, length) in enumerate(zip(found, lengths, strict=True)):
        if match is not None and core.prefixes.own(match).length > length:
            raise invalid(
                f"matches[{place}] has {match.length} tokens, seq_lens[{place}] is {length}",
                limit=length,
            )
    for match in found:
        if match is not None:
            core.prefixes.renew(match)
    return found


def _pages(core: Core, each: list[int], matches: Sequence[PrefixMatch | None]) -> int:
    """Physical pages that requests of so many each need beside those of their prefixes."""
    kept = core.prefixes.kept_pages
    pages = sum(each) - sum(kept(core.place, match) for match in matches if match is not None)
    return pages * core.layout.num_tensors


def _find_mappings(cores: Sequence[Core], each: list[list[int]]) -> bool:
    """Whether requests of so many pages in each cache find mappings of the context they share."""
    need = sum(core.pager.runs.needed(pages) for core, pages in zip(cores, each, strict=True))
    runs = cores[0].pager.runs
    if not need or (len(cores) == 1 and need <= runs.limit - runs.used):
        return True
    room = runs.left
    return need <= room or need <= room + sum(core.pager.runs.obtainable() for core in cores)


def _fit_together(cores: Sequence[Core], pages: list[int]) -> bool:
    """Whether what each cache can have alone they can have at once, of their budget."""
    own = cores[0].reclaimer
    share = own.share
    assert share is not None
    need = sum(count * core.layout.page_size for core, count in zip(cores, pages, strict=True))
    column = own.layout.page_size * own.layout.num_tensors
    reach = share.within_reach() + own.returning * own.layout.page_size
    return need <= reach + own.spare({}) * column


def fork_all(
    cores: Sequence[Core], reqid: int, count: int, length: int | None, stream: Any
) -> list[int] | None:
    """`fork` of several caches with the same requests: all or none; the first one chooses."""
    for core in cores:
        core.sharing.require(FORK, "fork")
    done: list[Core] = []
    slots: list[int] | None = None

    def detach() -> None:
        for core in done:
            core.detach([core.table[index] for index in slots or ()])

    try:
        for core in cores:
            forked = fork(core, reqid, count, length, stream, slots)
            if forked is None:
                detach()
                return None
            slots = forked
            done.append(core)
    except VMemError:
        detach()
        raise
    return slots


class Moved(NamedTuple):
    """What `KVCache.move` did; physical pages of `Layout.page_size`, of all tensors together.

    Attributes:
        pages: pages that moved, or are on their way.
        shared: pages that stay where they are, since others have them too.
    """

    pages: int
    shared: int


def tier_of(core: Core, location: str | Location, device: Any) -> Tier:
    """The tier that a caller names."""
    names = {one.name.lower(): one for one in Location}
    place = names.get(location) if isinstance(location, str) else Location(location)
    if place is None:
        raise invalid(f"location {location!r} is not one of {', '.join(map(repr, names))}")
    if place is not Location.PEER and device is not None:
        raise invalid(f"device {device!r}: a location of {place.name.lower()!r} takes none")
    info = core.context.info
    if place is not Location.DEVICE:
        (HOST_PAGES if place is Location.HOST else PEER_PAGES).require(info, "move")
    if place is not Location.PEER:
        return Tier(place)
    if device is None:
        raise invalid("location 'peer' needs a device, one of the context's")
    ordinal, own = device_ordinal(device), info.devices[0]
    if ordinal == own or ordinal not in info.devices:
        peers = [one for one in info.devices if one != own]
        raise invalid(f"device {ordinal} is none of the context's peers, {peers}")
    return Tier(place, ordinal)


def move(
    core: Core, slot: Slot, tier: Tier, tokens: Sequence[int] | None, stream: Any, *, wait: bool
) -> Moved:
    """See `KVCache.move`."""
    core.mover.finish(slot, stream)
    core.pager.release(slot)
    low, high = _pages_of(core, slot, tokens, wait)
    tensors = core.layout.num_tensors
    shared = max(0, min(high, slot.shared) - low) * tensors
    low = max(low, slot.shared, slot.head)
    wanted: list[Stretch] = [
        (first, last, Kind(kind.unit, tier))
        for first, last, kind in slot.places.stretches(low, high)
        if kind.tier != tier
    ]
    if not wanted:
        return Moved(0, shared)
    pages = sum(last - first for first, last, _ in wanted) * tensors
    _make_tier_room(core, tier, pages)
    event = record(stream, core.device)
    after = [] if event is None else [event]
    try:
        core.mover.begin(Move(slot, wanted), after, background=not wait)
    except OutOfMemory:
        if all(kind.unit == 1 for *_, kind in wanted):
            raise
        small = [(first, last, Kind(1, tier)) for first, last, _ in wanted]
        core.mover.begin(Move(slot, small), after, background=not wait)
    if wait:
        core.mover.finish(slot, stream)
    return Moved(pages, shared)


def _pages_of(core: Core, slot: Slot, tokens: Sequence[int] | None, wait: bool) -> tuple[int, int]:
    """The pages that hold rows of these tokens alone, none of them cut."""
    layout, held = core.layout, core.rows[slot.index]
    first, last = 0, held
    if tokens is not None:
        try:
            first, last = (tokens.start, tokens.stop) if isinstance(tokens, range) else tokens
            first, last = operator.index(first), operator.index(last)
        except (TypeError, ValueError):
            raise invalid(f"tokens must be a range or (first, last), not {tokens!r:.80}") from None
        if not 0 <= first <= last <= held:
            raise invalid(
                f"tokens {first} to {last}: reqid {slot.index} holds {held} tokens", limit=held
            )
    low = slot.places.ceil(-(-first * layout.row_bytes // layout.page_size))
    high = last * layout.row_bytes // layout.page_size
    if wait and last == held:  # nothing is written meanwhile, so the last page can go, too
        high = slot.places.ceil(-(-last * layout.row_bytes // layout.page_size))
    high = slot.places.floor(min(high, slot.granted))
    return min(low, high), high


def _make_tier_room(core: Core, tier: Tier, pages: int) -> None:
    """Sees to it that a tier has room; raises OutOfMemory where it has not."""
    size = core.layout.page_size
    if tier == DEVICE:
        if not core.pager.have(pages):
            raise _tier_full(core, tier, pages, core.reclaimer.free * size)
        return
    host = tier.location is Location.HOST
    limit = core.config.host_limit if host else core.config.peer_limit
    if not limit:
        return
    taken = sum(
        count for one, count in core.reclaimer.away.items() if one.location is tier.location
    )
    if (taken + pages) * size > limit:
        raise _tier_full(core, tier, pages, max(0, limit - taken * size))


def _tier_full(core: Core, tier: Tier, pages: int, left: int) -> OutOfMemory:
    size = pages * core.layout.page_size
    return OutOfMemory(
        f"move of {pages} pages, {size} bytes: {tier} has {left} bytes left for the cache",
        errno=errno.ENOMEM,
        op="KVCache.move",
        bytes=size,
        limit=left,
    )


def alloc_prefix(cores: Sequence[Core], match: PrefixMatch, stream: Any) -> int | None:
    """A slot that begins with a match of at least a unit, in every group or in none.

    The first group chooses the slot. See `KVCache.alloc_prefix`.
    """
    prefixes = cores[0].prefixes
    prefixes.require("alloc_prefix")
    prefixes.leases.collect()
    node = prefixes.pin(match)
    taken: list[tuple[Core, Slot]] = []

    def let_be() -> None:
        for core, slot in taken:
            core.detach([slot])
        prefixes.tree.unpin(node)

    try:
        for core in cores:
            into = [core.table[taken[0][1].index]] if taken else None
            slots = core.sharing.vacate(1, into)
            if slots is None:
                break
            span = prefixes.span(core.place, node, match.length)
            core.sharing.order_after_writers(span, stream)
            if not core.attach_copy(slots[0], span, match.length):
                break
            taken.append((core, slots[0]))
    except VMemError as error:
        let_be()
        if cores[0].sharing.is_shortage(error):
            return None
        raise
    if len(taken) < len(cores):
        let_be()
        return None
    slot = taken[0][1]
    slot.pins = [node]
    prefixes.leases.end(match._lease)
    for core, one in taken:
        core.enter(one, match.length)
        core.note_peaks()
    return slot.index
