# SPDX-License-Identifier: MIT
"""What is done for requests in every group of layers, or in none: steps, forks, admission."""

from __future__ import annotations

import errno
import logging
import operator
from array import array
from collections.abc import Sequence
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple

from pyvmem.errors import OutOfMemory, TooManyMappings, VMemError
from pyvmem.features.table import FORK, HOST_PAGES, PEER_PAGES
from pyvmem.info import Location
from pyvmem.kvcache.config import invalid
from pyvmem.kvcache.events import record, wait_for
from pyvmem.kvcache.group import Group
from pyvmem.kvcache.growth import Source
from pyvmem.kvcache.journal import put
from pyvmem.kvcache.pages import DEVICE, Kind, Span, Stretch, Tier
from pyvmem.kvcache.prefix_cache import PrefixMatch
from pyvmem.kvcache.slots import Growth, Move, Slot
from pyvmem.logs import warn
from pyvmem.streams import device_ordinal

if TYPE_CHECKING:
    from pyvmem.kvcache.prefix_tree import Node

__all__ = [
    "Moved",
    "alloc_prefix",
    "can_admit",
    "fork",
    "fork_all",
    "grow",
    "move",
    "reach",
    "step",
    "step_async",
    "tier_of",
]

_Want = list[tuple[Slot, int]]

_log = logging.getLogger(__name__)


def step(groups: Sequence[Group], seq_lens: Sequence[int], stream: Any) -> int:
    """`KVCache.step` of groups with the same requests: all of them or none."""
    begun = []
    lacking = False
    try:
        for group in groups:
            rows, total, short = _begin(group, seq_lens, stream)
            begun.append((group, rows, total, short))
            lacking = lacking or bool(short)
        if lacking:
            done = len(groups) == 1 and group.pager.extend(background=False)
            if not done and not _grow_for(begun, stream):
                _note_short(groups)
                return -1
            for group in groups:
                own = group.reclaimer
                if own.share is not None or own.limit - own.held < own.watermark * own.limit:
                    group.keep_watermark()
    except TooManyMappings:
        if groups[0].table.lockstep:  # the other ranks do not know
            raise
        _note_crowded(groups)
        return -1
    # What calls the context comes before or after the rows of all groups: a call in between, and
    # an interruption behind it, would leave some groups with the new rows and some with the old.
    for group, rows, _, _ in begun:
        if group.moves_on:
            _move_on(group, rows, stream)
        if group.pager.runs.joins:
            group.pager.runs.step(stream)
    for group, rows, total, _ in begun:
        _commit(group, rows, total)
    for group in groups:
        if group.table.lockstep:
            group.prefixes.leases.end_all()  # a collector must not decide when they end
        if group.untidy:
            group.tidy()
    return 0


def step_async(groups: Sequence[Group], seq_lens: Sequence[int]) -> int:
    """`KVCache.step_async` of groups with the same requests: all of them or none."""
    begun = []
    lacking = False
    for group in groups:
        _, _, short = group.pager.scan(seq_lens)
        if group.reclaimer.cuts:
            group.reclaimer.poll()
        begun.append((group, short))
        lacking = lacking or bool(short)
    if lacking and not _begin_growing(begun):
        _note_short(groups)
        return -1
    for group, short in begun:
        own = group.reclaimer
        scarce = own.share is not None or own.limit - own.held < own.watermark * own.limit
        if short and scarce:
            group.keep_watermark()
        group.counters.steps_async += 1
    return 0


# ---- the parts of a step -------------------------------------------------------------------------


def _begin(group: Group, seq_lens: Sequence[int], stream: Any) -> tuple[array[int], int, list[int]]:
    """Checks the numbers and ends what is under way.

    Returns:
        The rows held after the step, the sum of these, and the slots that lack pages.
    """
    pager, reclaimer = group.pager, group.reclaimer
    rows, total, short = pager.scan(seq_lens)
    group.counters.waits.struct.last_ns = 0
    if pager.growths:
        _settle(group, stream)
        if short:
            rows, total, short = pager.scan(seq_lens)
    if group.mover.moves or group.mover.given_up:
        group.mover.step(stream)
    if reclaimer.cuts:
        reclaimer.poll()
    if reclaimer.errors:
        reclaimer.raise_errors()
    return rows, total, short


def _grow_for(begun: Sequence[tuple[Group, array[int], int, list[int]]], stream: Any) -> bool:
    """Gives slots that are short their pages, in all groups or in none."""
    wants = [(group, group.pager.wants(short)) for group, *_, short in begun]
    if not grow(wants, background=False):
        return False
    for group, _ in wants:
        _settle(group, stream)
    return True


def _settle(group: Group, stream: Any) -> None:
    """Waits for the growths that the step needs; ranks wait for all, as one."""
    group.pager.settle(stream, lens=None if group.table.lockstep else group.pager.columns.needs)


def _begin_growing(begun: Sequence[tuple[Group, list[int]]]) -> bool:
    """Begins to give slots that are short their pages, in all groups or in none."""
    group = begun[0][0]
    busy = group.pager.growths or group.reclaimer.cuts
    if len(begun) == 1 and not busy and group.pager.extend(background=True):
        return True
    wants = [(group, _not_promised(group, group.pager.wants(short))) for group, short in begun]
    return grow(wants, background=True)


def _not_promised(group: Group, want: _Want) -> _Want:
    """What no growth under way will give, but for what must be waited for."""
    pager = group.pager
    if want and not group.table.lockstep:
        # What an earlier owner's GPU work holds up is left to `step`, which must wait for it.
        want = [(slot, pages) for slot, pages in want if not _is_left(group, slot)]
    if want and (pager.growths or group.reclaimer.cuts):
        promised = {
            (slot, owner): pages for job in pager.growths for slot, owner, pages in job.grants
        }
        want = [
            (slot, pages) for slot, pages in want if promised.get((slot, slot.owner), 0) < pages
        ]
    return want


def _is_left(group: Group, slot: Slot) -> bool:
    """Whether a slot can only grow after a wait, be it for a map call that the request began."""
    job = slot.job
    if isinstance(job, Growth) and job.filling is None and not job.handover:
        mine = any(one is slot and owner == slot.owner for one, owner, _ in job.grants)
        return not mine and not job.done()
    return group.pager.is_held_up(slot)


def _grow(group: Group, want: _Want, *, background: bool, tentative: bool = False) -> bool:
    """Begins to give slots their pages, once nothing is in flight over them."""
    pager, reclaimer = group.pager, group.reclaimer
    for slot, _ in want:
        if slot.job is not None or slot.mapped > slot.granted:  # else there is nothing to wait for
            pager.release(slot)
    lacking = sum([pages - slot.mapped for slot, pages in want if pages > slot.mapped])
    lacking *= group.layout.num_tensors
    if lacking > reclaimer.free and not pager.can_have(lacking, dict(want)):
        return False  # known before anything is planned
    return pager.grow(want, background=background, tentative=tentative)


def grow(wants: Sequence[tuple[Group, _Want]], *, background: bool) -> bool:
    """Begins to give slots of several groups their pages; False where one is short.

    What the others have mapped is no request's then.
    """
    if len(wants) == 1:
        group, want = wants[0]
        return not want or _grow(group, want, background=background)
    if _grow_each(wants, background):
        return True
    # What a growing slot has beyond its request, another group cannot take meanwhile.
    cut = [_cut_surplus(group, want) for group, want in wants]
    return any(cut) and _grow_each(wants, background)


def _note_short(groups: Sequence[Group]) -> None:
    for group in groups:
        group.counters.short += 1
    if _log.isEnabledFor(logging.DEBUG):
        for group in groups:
            reclaimer = group.reclaimer
            _log.debug(
                "short: -1 with %d of %d pages free, %d more obtainable, %d requests running",
                reclaimer.free,
                reclaimer.limit,
                reclaimer.obtainable({}) - reclaimer.free,
                len(group.table) - len(group.table.free),
            )


def _note_crowded(groups: Sequence[Group]) -> None:
    """The driver had no mapping left for what was begun in the background; that was undone."""
    _note_short(groups)
    runs = groups[0].pager.runs
    warn(
        _log,
        "mappings",
        "the driver has no mapping left (%d of the context's %d in use): requests cannot grow "
        "until some end; larger pages or promote_tokens need fewer",
        runs.used,
        runs.limit,
    )
    for group in groups:
        group.pager.runs.relieve()


def _grow_each(wants: Sequence[tuple[Group, _Want]], background: bool) -> bool:
    grown: list[tuple[Group, _Want]] = []

    def disown() -> None:
        for group, want in grown:
            _disown(group, want)

    try:
        for group, want in wants:
            if want:
                group.journal.on_abort(partial(_disown, group, want))
                if not _grow(group, want, background=background, tentative=True):
                    disown()
                    return False
                grown.append((group, want))
    except VMemError:
        disown()
        raise
    return True


def _cut_surplus(group: Group, want: _Want) -> bool:
    """Begins to unmap what slots have beyond what they are to have; whether there was something."""
    found = False
    for slot, pages in want:
        group.pager.release(slot)
        keep = max(pages, slot.granted)
        if slot.mapped > keep:
            found |= group.reclaimer.try_cut(slot, keep)
    return found


def _disown(group: Group, want: _Want) -> None:
    """Makes a growth in flight one that no request waits for; its pages can be taken back."""
    for slot, _ in want:
        if isinstance(slot.job, Growth):
            group.journal.keep(slot.job, "grants", "handover")
            slot.job.grants = []
            slot.job.handover = []  # the slot keeps these events for its next owner
    group.pager.poll()


def _move_on(group: Group, rows: array[int], stream: Any) -> None:
    """Lets windows slide and pages be replaced, as the rows after a step allow it."""
    if group.window is not None:
        group.window.slide(rows, stream)
    if group.config.promote_tokens and group.promoter is not None:
        group.promoter.step(rows, stream)


def _commit(group: Group, rows: array[int], total: int) -> None:
    """Notes what the slots hold from now on."""
    columns, counters, reclaimer = group.pager.columns, group.counters, group.reclaimer
    group.journal.entries += (
        (put, group, "used_tokens", group.used_tokens),
        (put, group, "clock", group.clock),
        (put, columns, "held", columns.held),
    )
    columns.held = rows
    group.used_tokens = total
    group.clock += 1
    if reclaimer.shared.blocks or reclaimer.away or reclaimer.slid:
        group.note_peaks()
    else:  # the same, where all pages of requests are their own, and here
        used = total * group.token_bytes
        wasted = group.pager.active_pages * group.page_bytes - used
        if used > counters.peak_used:
            counters.peak_used = used
        if wasted > counters.peak_wasted:
            counters.peak_wasted = wasted
    counters.steps += 1


def fork(
    group: Group,
    reqid: int,
    count: int,
    length: int | None,
    stream: Any,
    into: Sequence[int] | None = None,
) -> list[int] | None:
    """See `KVCache.fork_many`."""
    layout, sharing = group.layout, group.sharing
    sharing.require(FORK, "fork")
    parent = group.slot(reqid)
    held = group.rows[parent.index]
    rows = held if length is None else operator.index(length)
    if not 0 <= rows <= held:
        raise invalid(f"length {rows}: reqid {parent.index} holds {held} tokens", limit=held)
    if not 1 <= count <= len(group.table):
        raise invalid(
            f"fork of {count} requests; it must lie between 1 and {len(group.table)}",
            limit=len(group.table),
        )
    chosen = None if into is None else _chosen(group, count, into)
    group.mover.finish(parent, stream)
    group.pager.release(parent)
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
    if not group.pager.can_have(new_pages, {}):
        return None
    if rows * layout.row_bytes > parent.shared * layout.page_size:
        wait_for(record(stream, group.device))
    sharing.share(parent, full, group.prefixes.unit_pages[group.place])
    try:
        group.attach(slots, parent.span.cut(0, full), parent)
    except VMemError as error:
        if sharing.is_shortage(error):
            return None
        raise
    try:
        if pages > full:
            tail = Source(
                group.pager.base + layout.offset(parent.index),
                layout.tensor_bytes,
                rows * layout.row_bytes,
            )
            want = [(slot, pages) for slot in slots]
            if not group.pager.grow(want, background=False, source=tail):
                group.detach(slots)
                return None
            group.pager.release(slots[0])  # of one growth for all; other requests' go on
    except VMemError:
        group.detach(slots)
        raise
    for slot in slots:
        if slot.shared:
            slot.pins = group.prefixes.pin_again(parent.pins)
        group.enter(slot, rows)
    group.note_peaks()
    return [slot.index for slot in slots]


def _chosen(group: Group, count: int, into: Sequence[int]) -> list[Slot]:
    """The free slots that the caller named."""
    slots = [group.free_slot(index) for index in into]
    if len(slots) != count:
        raise invalid(f"into names {len(slots)} slots for {count} requests", limit=count)
    if len(set(slots)) != count:
        raise invalid(f"into names a slot twice: {[slot.index for slot in slots]}")
    return slots


def can_admit(
    groups: Sequence[Group], seq_lens: Sequence[int], matches: Sequence[PrefixMatch | None] | None
) -> bool:
    """See `KVCache.can_admit`; of several caches with the same requests, in all of them."""
    first = groups[0]
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
    each = [list(map(group.layout.pages_for_step, begun, lengths)) for group in groups]
    pages = [_pages(group, one, found) for group, one in zip(groups, each, strict=True)]
    if len(lengths) > len(first.table.free):
        return False
    if not _find_mappings(groups, each):
        return False
    if not all(group.pager.could_have(need) for group, need in zip(groups, pages, strict=True)):
        return False
    return len(groups) == 1 or _fit_together(groups, pages)


def _matches(
    group: Group, lengths: list[int], matches: Sequence[PrefixMatch | None] | None
) -> list[PrefixMatch | None]:
    """For each length its match, leased."""
    if matches is None:
        return []
    found = list(matches)
    if len(found) != len(lengths):
        raise invalid(f"{len(found)} matches for {len(lengths)} requests", limit=len(lengths))
    for place, (match, length) in enumerate(zip(found, lengths, strict=True)):
        if match is not None and group.prefixes.own(match).length > length:
            raise invalid(
                f"matches[{place}] has {match.length} tokens, seq_lens[{place}] is {length}",
                limit=length,
            )
    for match in found:
        if match is not None:
            group.prefixes.renew(match)
    return found


def _pages(group: Group, each: list[int], matches: Sequence[PrefixMatch | None]) -> int:
    """Physical pages that requests of so many each need beside those of their prefixes."""
    kept = group.prefixes.kept_pages
    pages = sum(each) - sum(kept(group.place, match) for match in matches if match is not None)
    return pages * group.layout.num_tensors


def _find_mappings(groups: Sequence[Group], each: list[list[int]]) -> bool:
    """Whether requests of so many pages in each cache find mappings of the context they share."""
    need = sum(group.pager.runs.needed(pages) for group, pages in zip(groups, each, strict=True))
    runs = groups[0].pager.runs
    if not need or (len(groups) == 1 and need <= runs.limit - runs.used):
        return True
    room = runs.left
    return need <= room or need <= room + sum(group.pager.runs.obtainable() for group in groups)


def _fit_together(groups: Sequence[Group], pages: list[int]) -> bool:
    """Whether what each cache can have alone they can have at once, of their budget."""
    share = groups[0].reclaimer.share
    assert share is not None
    need = sum(count * group.layout.page_size for group, count in zip(groups, pages, strict=True))
    if need <= reach(groups):
        return True
    share.ask(need - _unshared(groups[0]))
    return False


def reach(groups: Sequence[Group]) -> int:
    """Bytes of their budget that requests in several groups could still get."""
    share = groups[0].reclaimer.share
    assert share is not None
    return share.within_reach() + _unshared(groups[0])


def _unshared(group: Group) -> int:
    """Bytes that a cache can take without asking its budget: on their way back, or held idle."""
    own, page = group.reclaimer, group.layout.page_size
    return own.returning * page + own.spare({}) * page * group.layout.num_tensors


def fork_all(
    groups: Sequence[Group], reqid: int, count: int, length: int | None, stream: Any
) -> list[int] | None:
    """`fork` of several caches with the same requests: all or none; the first one chooses."""
    for group in groups:
        group.sharing.require(FORK, "fork")
    done: list[Group] = []
    slots: list[int] | None = None

    def detach() -> None:
        for group in done:
            group.detach([group.table[index] for index in slots or ()])

    try:
        for group in groups:
            forked = fork(group, reqid, count, length, stream, slots)
            if forked is None:
                detach()
                return None
            slots = forked
            done.append(group)
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


def tier_of(group: Group, location: str | Location, device: Any) -> Tier:
    """The tier that a caller names."""
    names = {one.name.lower(): one for one in Location}
    place = names.get(location) if isinstance(location, str) else Location(location)
    if place is None:
        raise invalid(f"location {location!r} is not one of {', '.join(map(repr, names))}")
    if place is not Location.PEER and device is not None:
        raise invalid(f"device {device!r}: a location of {place.name.lower()!r} takes none")
    info = group.context.info
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
    group: Group, slot: Slot, tier: Tier, tokens: Sequence[int] | None, stream: Any, *, wait: bool
) -> Moved:
    """See `KVCache.move`."""
    group.mover.finish(slot, stream)
    group.pager.release(slot)
    low, high = _pages_of(group, slot, tokens, wait)
    tensors = group.layout.num_tensors
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
    _make_tier_room(group, tier, pages)
    event = record(stream, group.device)
    after = [] if event is None else [event]
    try:
        group.mover.begin(Move(slot, wanted), after, background=not wait)
    except OutOfMemory:
        if all(kind.unit == 1 for *_, kind in wanted):
            raise
        small = [(first, last, Kind(1, tier)) for first, last, _ in wanted]
        group.mover.begin(Move(slot, small), after, background=not wait)
    if wait:
        group.mover.finish(slot, stream)
    return Moved(pages, shared)


def _pages_of(
    group: Group, slot: Slot, tokens: Sequence[int] | None, wait: bool
) -> tuple[int, int]:
    """The pages that hold rows of these tokens alone, none of them cut."""
    layout, held = group.layout, group.rows[slot.index]
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


def _make_tier_room(group: Group, tier: Tier, pages: int) -> None:
    """Sees to it that a tier has room; raises OutOfMemory where it has not."""
    size = group.layout.page_size
    if tier == DEVICE:
        if not group.pager.have(pages):
            raise _tier_full(group, tier, pages, group.reclaimer.free * size)
        return
    host = tier.location is Location.HOST
    limit = group.config.host_limit if host else group.config.peer_limit
    if not limit:
        return
    taken = sum(
        count for one, count in group.reclaimer.away.items() if one.location is tier.location
    )
    if (taken + pages) * size > limit:
        raise _tier_full(group, tier, pages, max(0, limit - taken * size))


def _tier_full(group: Group, tier: Tier, pages: int, left: int) -> OutOfMemory:
    size = pages * group.layout.page_size
    return OutOfMemory(
        f"move of {pages} pages, {size} bytes: {tier} has {left} bytes left for the cache",
        errno=errno.ENOMEM,
        op="KVCache.move",
        bytes=size,
        limit=left,
    )


def alloc_prefix(groups: Sequence[Group], match: PrefixMatch, stream: Any) -> int | None:
    """A slot that begins with a match of at least a unit, in every group or in none.

    That where the most of it is mapped, else an empty one, which the first group chooses. See
    `KVCache.alloc_prefix`.
    """
    prefixes = groups[0].prefixes
    prefixes.require("alloc_prefix")
    prefixes.leases.collect()
    node = prefixes.pin(match)
    taken: list[tuple[Group, Slot]] = []

    def let_be() -> None:
        for group, slot in taken:
            group.detach([slot])
        prefixes.tree.unpin(node)

    try:
        kept, whole = _kept(groups, node, match.length), True
        for group in groups:
            if kept is not None:
                slot = group.table[kept.index]
                span = prefixes.span(group.place, node, match.length)
                group.sharing.order_after_writers(span, stream)
                whole &= slot.shared == span.pages
                group.resume(slot, span)
                taken.append((group, slot))
                continue
            into = [group.table[taken[0][1].index]] if taken else None
            slots = group.sharing.vacate(1, into)
            if slots is None:
                break
            span = prefixes.span(group.place, node, match.length)
            group.sharing.order_after_writers(span, stream)
            if not group.attach_copy(slots[0], span, match.length):
                break
            taken.append((group, slots[0]))
    except VMemError as error:
        let_be()
        if groups[0].sharing.is_shortage(error):
            return None
        raise
    if len(taken) < len(groups):
        let_be()
        return None
    groups[0].counters.resumed += kept is not None and whole
    slot = taken[0][1]
    slot.pins = [node]
    prefixes.leases.end(match._lease)
    for group, one in taken:
        group.enter(one, match.length)
        group.note_peaks()
    return slot.index


def _kept(groups: Sequence[Group], node: Node[Span], length: int) -> Slot | None:
    """The free slot that has the most of a prefix mapped, in every group; None: there is none."""
    first = groups[0]
    for group in groups:
        group.reclaimer.poll()
    kept = [slot for slot in first.table.index.stale if slot.kept]
    if not kept:
        return None
    spans = [first.prefixes.span(group.place, node, length) for group in groups]
    if any(span.floor(span.pages) != span.pages for span in spans):
        return None  # the rest of a large page is to be copied
    found = [
        slot
        for slot in kept
        if all(
            group.sharing.begins(group.table[slot.index], span)
            for group, span in zip(groups, spans, strict=True)
        )
    ]
    return max(found, key=attrgetter("mapped"), default=None)
