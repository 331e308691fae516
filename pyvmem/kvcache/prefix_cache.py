# SPDX-License-Identifier: MIT
"""Recorded prefixes: the tokens whose rows are kept in every group of layers, and leases on them.

A match may be dropped on any thread, or by Python's garbage collector at any point, even in the
middle of a call to the cache. Dropping a match therefore only queues its lease; the next call to
the cache that uses prefixes ends it.

With several ranks (distributed.py), the result of a call must not depend on when the garbage
collector runs, so a lease ends when the match is used or released, or at the latest with the next
`step`.

The sharing unit is the fewest tokens that fill whole pages of a tensor, ``lcm(row_bytes, page_size)
/ row_bytes``: 32 tokens if rows are 2 KiB and pages 64 KiB. With rows of 384 bytes, which do not
divide 64 KiB evenly, it is 512 tokens: anywhere else, the last row in a page extends into the next
page, and a request that continues after it would write into a shared page.

Row sizes differ between groups, so the same tokens fill a different number of pages in each:

    tokens   | unit 0                   | unit 1                   |
    group 0  | page 0      | page 1     | page 2      | page 3     |   rows of 2 KiB
    group 1  | page 0                   | page 1                   |   rows of 1 KiB

The cache's unit is the least common multiple of the groups' units. A tree node has a span in every
group, so splitting, matching and evicting apply to all groups.

A group with a *window* has only the last pages of a node's run: those that the recording request
still held. A match can therefore end only where every such group has the last window, that is, the
last ``window + window_tile`` tokens, possibly spread over several consecutive nodes:

    tokens   | system prompt | question A                | ends: a request of A was recorded
    full     | page 0        | page 1   page 2   page 3  |
    sliding  | -             | -        page 2   page 3  | a prompt with question B matches nothing

    sliding  | page 0        | -        page 2   page 3  | once B was recorded with all its rows:
                                                           B then matches the system prompt

Nodes end where a request was recorded and where prompts diverge, so matches end there. Recording a
request also fills in missing windows of nodes on its path from the rows that it still holds: those
computed in its last step and those of its last window. Rows that it no longer holds stay missing,
which makes matches shorter. A leaf is evicted as a whole, since a run without its end has no
window.

A group with a state (linear attention, state-space models) has only the state after a request's
last token, not the states after earlier tokens, from which another prompt could continue. A cache
with such a group neither records nor matches prefixes: its requests share memory only through
forks.
"""

from __future__ import annotations

import errno
import logging
import math
import operator
from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from pyvmem.errors import BadHandle
from pyvmem.features.table import PREFIXES
from pyvmem.kvcache.checks import invalid
from pyvmem.kvcache.events import PriorWork
from pyvmem.kvcache.host_prefixes import HostPrefixes, Key, unit_keys
from pyvmem.kvcache.journal import Journal
from pyvmem.kvcache.layout import Layout
from pyvmem.kvcache.pages import Span
from pyvmem.kvcache.prefix_tree import ID_BYTES, Match, Node, PrefixTree, TokenIds
from pyvmem.kvcache.sharing import Sharing
from pyvmem.kvcache.slots import Slot
from pyvmem.kvcache.window import Window
from pyvmem.plumbing.closing import Scoped

__all__ = ["Lease", "Leases", "PrefixCache", "PrefixEvicted", "PrefixMatch"]


_log = logging.getLogger(__name__)


@dataclass(eq=False, slots=True)
class _Spans:
    """The payload of a tree node: pages of consecutive units in every group of layers.

    Attributes:
        each: a span for each group; with a window, it may have only the last pages.
        pages: number of units, which is what the tree counts.
        keys: the units' keys for host memory; empty if prefixes are not kept there.
    """

    each: Sequence[Span]
    pages: int
    keys: Sequence[Key] = ()

    def missing(self, place: int) -> int:
        """Returns how many of a group's first pages are missing because they left the window."""
        span = self.each[place]
        return self.pages * span.unit_pages - span.pages

    def split(self, units: int) -> tuple[_Spans, _Spans]:
        """Splits every group's span; see `Span.split`."""
        both = [span.split(units, self.missing(place)) for place, span in enumerate(self.each)]
        upper, lower = zip(*both, strict=True)
        above = _Spans(upper, units, self.keys[:units])
        return above, _Spans(lower, self.pages - units, self.keys[units:])


class PrefixEvicted(BadHandle):
    """The match has lost its lease and the prefix was evicted: match again.

    `KVCache.trim` with ``prefixes=True`` ends all leases, and `PrefixMatch.release` ends one; the
    leases of a `ParallelKVCache` end with the next `step`.
    """


@dataclass(eq=False, frozen=True)
class Lease:
    """A match's pin on a prefix.

    Attributes:
        node: the last node of the prefix.
    """

    node: Node[_Spans]


@dataclass(eq=False)
class PrefixMatch(Scoped):
    """A lease on the part of a prompt that was recorded when `KVCache.match` was called.

    Its pages are not evicted until the match is used by `alloc_prefix`, released or
    garbage-collected. As a context manager it releases itself.

    Attributes:
        length: number of tokens matched, a multiple of the sharing unit; 0: none.
        asked: number of tokens in the prompt.
        in_host: number of following tokens whose rows are in host memory
            (`KVCacheConfig.host_prefixes`). `alloc_prefix` loads them unless memory is short. They
            are not leased.
        ids: the prompt; set only if prefixes are kept in host memory.
    """

    length: int
    asked: int
    _lease: Lease = field(repr=False)
    _owner: Leases = field(repr=False)
    in_host: int = 0
    ids: TokenIds = field(default=TokenIds(()), repr=False)

    def release(self) -> None:
        """Ends the lease, so that the prefix may be evicted. Idempotent.

        Has no effect if the match was used.
        """
        self._owner.drop(self._lease)

    _leave = release

    def __del__(self) -> None:
        owner: Leases | None = getattr(self, "_owner", None)
        if owner is not None and not owner.lockstep:
            owner.drop(self._lease)


class Leases:
    """The leases on a cache's prefixes. All calls except `drop` require the cache's lock.

    Args:
        tree: the recorded prefixes.
        journal: the cache's journal.
        lockstep: True if several ranks must return the same results.
    """

    def __init__(self, tree: PrefixTree[_Spans], journal: Journal, *, lockstep: bool) -> None:
        self.lockstep = lockstep
        self._journal = journal
        self._tree = tree
        self._open: dict[Lease, None] = {}
        self._dropped: dict[Lease, None] = {}  # the next `collect` ends these

    def __bool__(self) -> bool:
        self.collect()
        return bool(self._open)

    def has(self, lease: Lease) -> bool:
        """True if a lease still pins its node.

        That is, it has neither ended nor been undone after an exception.
        """
        return lease in self._open

    def add(self, node: Node[_Spans]) -> Lease:
        """Leases a node and pins it; a root needs no pin."""
        lease = Lease(node)
        if node.parent is not None:
            self._journal.change([*self._tree.pin_edits([node], ()), [self._open, lease, None]])
        return lease

    def drop(self, lease: Lease) -> None:
        """Queues a lease to be ended. May be called from any thread, at any time. Idempotent."""
        if lease in self._open:
            self._dropped[lease] = None

    def collect(self) -> None:
        """Ends the leases that were dropped."""
        while self._dropped:
            self.end(next(iter(self._dropped)))

    def end(self, lease: Lease) -> None:
        """Ends one lease. Idempotent."""
        edits = self.end_lease_edits(lease)
        if lease in self._open:
            edits += self._tree.pin_edits((), [lease.node])
            self._tree.touch(lease.node)
        self._journal.change(edits)

    def end_lease_edits(self, lease: Lease) -> list[list[Any]]:
        """Returns the edits that end a lease but leave its pin to the caller."""
        return [[self._open, lease, ...], [self._dropped, lease, ...]]

    def end_all(self) -> None:
        """Ends every lease."""
        for lease in list(self._open):
            self.end(lease)

    def nodes(self) -> list[Node[_Spans]]:
        """Returns the leased nodes, each once per lease."""
        self.collect()
        return [lease.node for lease in self._open]

    def kept(self) -> dict[Node[_Spans], None]:
        """Returns all nodes on the paths to leased nodes, each once, in order."""
        return {one: None for node in self.nodes() for one in node.path()}


class PrefixCache:
    """The recorded prefixes of a cache's groups of layers.

    A `slot` argument is a slot of the first group; a request has the same index in all groups.
    `place` is the index of a group. The caller holds the cache's lock.

    Args:
        layouts: the layouts of the groups, in the order in which the groups `join`.
        journal: the cache's journal.
        lockstep: see `SlotTable`.

    Attributes:
        tree: prefixes by token ids; each group's spans are held in its `Reclaimer.shared`.
        unit: number of tokens per sharing unit.
        unit_pages: for each group, the number of pages per tensor in a sharing unit.
        leases: the leases, which protect matched prefixes from eviction.
        host: the rows of evicted prefixes in host memory.
        records: True if rows can be recorded at all, that is, if no group has a state.
    """

    def __init__(self, layouts: Sequence[Layout], journal: Journal, *, lockstep: bool) -> None:
        self._journal = journal
        self._groups: list[Sharing] = []
        self._windows: dict[int, Window] = {}  # keyed by the group's place
        self._layouts = layouts
        rows = [one for one in layouts if not one.state]
        self.records = len(rows) == len(layouts)
        self.unit = math.lcm(
            *(one.page_size // math.gcd(one.row_bytes, one.page_size) for one in rows)
        )
        self.unit_pages = tuple(
            0 if one.state else self.unit * one.row_bytes // one.page_size for one in layouts
        )
        self.tree: PrefixTree[_Spans] = PrefixTree(self.unit, journal.change)
        self.leases = Leases(self.tree, journal, lockstep=lockstep)
        self._columns = [one.page_bytes for one in layouts]
        self.host = HostPrefixes(layouts, self.unit_pages, self._groups)

    def join(self, group: Sharing, window: Window | None) -> None:
        """Adds a newly created group."""
        if window is not None:
            self._windows[len(self._groups)] = window
        self._groups.append(group)

    # ---- recording -------------------------------------------------------------------------------

    def record(self, slot: Slot, tokens: Any, work: PriorWork, namespace: Hashable = None) -> int:
        """See `KVCache.record`."""
        ids, each, found, units = self._look(slot, tokens, namespace)
        if units:
            for group, one in each:
                group.pager.mover.finish(one, work)
                group.pager.release(one)
            if any(units * group.unit_pages > one.shared for group, one in each):
                work.wait()
            for group, one in each:
                group.share(one, units * group.unit_pages)
        node, length = self._insert(each, ids, found)
        # If another request recorded these tokens, the slot shares no pages with it and needs no
        # pin.
        if length and slot.span.pages and node not in slot.pins:
            self._journal.change(self.slot_pin_edits(slot, [*slot.pins, node]))
        return self._ends(self.tree.match(ids)) if self._windows else length

    def shares(self, slot: Slot, tokens: Any, namespace: Hashable = None) -> bool:
        """Returns whether `record` would share pages.

        It must then wait for the work that writes them.
        """
        _, each, _, units = self._look(slot, tokens, namespace)
        return any(units * group.unit_pages > one.shared for group, one in each)

    def _firsts(self, slot: Slot) -> list[tuple[int, int]]:
        """Returns the first page whose rows the request still holds in each group with a window.

        Each item is a group's index and that page.
        """
        return [
            (place, window.first_page(self._groups[place].table.slots[slot.index]))
            for place, window in self._windows.items()
        ]

    def record_last(self, slot: Slot, tokens: Any, event: Any, namespace: Hashable = None) -> bool:
        """Records the rows of a slot that is about to be freed; `event` is its last GPU work.

        Returns:
            True if the slot's shared pages are the recorded pages, so that a request that begins
            with them can continue in this slot.
        """
        ids, each, found, units = self._look(slot, tokens, namespace)
        if units:
            for group, one in each:
                if one.job is not None or one.stale:
                    group.pager.release(one)
            events, gathered = [] if event is None else [event], []
            for group, one in each:
                shared = one.head + one.span.pages
                gathered.append(group.gather(one, shared, units * group.unit_pages, events))
            for (group, one), own in zip(each, gathered, strict=True):
                if own:
                    self._journal.change(group.adopt_edits(one, own))
        node, length = self._insert(each, ids, found)
        if self._windows:
            length = self._ends(self.tree.match(ids))
        if not length:
            return False
        for place, (_, one) in enumerate(each):
            span = self._span(place, node, length)
            if span.slice(0, one.span.pages).parts != one.span.parts:
                return False
        return True

    def _look(
        self, slot: Slot, tokens: Any, namespace: Hashable
    ) -> tuple[TokenIds, list[tuple[Sharing, Slot]], Match[_Spans], int]:
        """Looks up, among the recorded prefixes, the tokens whose rows a request holds.

        Returns:
            The ids of these tokens; the request's slot in each group; the match; and the number of
            full units that the request holds, or 0 if there is nothing to record: the units are
            recorded already, some of their rows have left a window, or a group has a state.
        """
        self._groups[0].require(PREFIXES, "record")
        ids, index = TokenIds.of(tokens, namespace), slot.index
        held, count = self._groups[0].pager.columns.held_rows[index], len(ids.data) // ID_BYTES
        if count > held:
            ids, count = TokenIds.from_bytes(ids.data[: held * ID_BYTES], ids.namespace), held
        each = [(group, group.table.slots[index]) for group in self._groups]
        units, found = count // self.unit, self.tree.match(ids)
        length = units * self.unit
        if not self.records or (self._ends(found) if self._windows else found.length) >= length:
            units = 0
        for place, first in self._firsts(slot) if self._windows and units else ():
            if first > self._layouts[place].window_page(length):
                units = 0
        return ids, each, found, units

    def _insert(
        self, each: Sequence[tuple[Sharing, Slot]], ids: TokenIds, found: Match[_Spans]
    ) -> tuple[Node[_Spans], int]:
        """Records the rows that a request shares; `found` is the part that the tree already has.

        Returns:
            The node of the last recorded unit, and the number of tokens up to its end.
        """
        units = len(ids.data) // ID_BYTES // self.unit if self.records else 0
        for group, one in each if units else ():
            shared = one.head + one.span.pages if one.span.pages else 0
            units = min(units, shared // group.unit_pages)
        node, length = found.node, found.length
        if units * self.unit > length:

            def take(first: int, last: int) -> _Spans:
                """Returns the pages of these units, with references held for the tree."""
                spans = []
                for place, (group, one) in enumerate(each):
                    unit = group.unit_pages
                    if place in self._windows:
                        spans.append(Span((), unit))  # `_fill` adds the pages
                        continue
                    spans.append(one.span.slice(first * unit, last * unit))
                    group.reclaimer.shared.hold(spans[-1])
                keys = unit_keys(ids, self.unit, first, last) if self.host.limit else ()
                return _Spans(spans, last - first, keys)

            done = self.tree.insert(ids, take, found, units * self.unit)
            node, length = done.node, done.length
        if self._windows and length:
            node = self.tree.cut_at(node, length)
            self._fill(each, node)
        return node, length

    def _fill(self, each: Sequence[tuple[Sharing, Slot]], node: Node[_Spans]) -> None:
        """Fills in missing windows at the ends of a path's nodes, from pages that a request shares.

        Keeps a node's pages if they reach at least as far back as the request's.
        """
        for place, first in self._firsts(each[0][1]):
            group, slot = each[place]
            unit, layout, reclaimer = group.unit_pages, group.layout, group.reclaimer
            for one in node.path():
                end = one.end // self.unit * unit
                begin = max(end - one.units * unit, layout.window_page(one.end), first)
                if slot.shared < end or end - one.span.each[place].pages <= begin:
                    continue
                span = slot.shared_part(begin, end)
                spans = list(one.span.each)
                before, spans[place] = spans[place], Span(span.parts, unit)
                reclaimer.shared.hold(span)
                # Keys are not used with windows.
                self._journal.change([[one, "span", _Spans(spans, one.units)]])
                reclaimer.unref(before)
                reclaimer.release_kept(before)

    # ---- pins of requests ------------------------------------------------------------------------

    def slot_pin_edits(self, slot: Slot, pins: list[Node[_Spans]]) -> list[list[Any]]:
        """Returns the edits that replace a slot's pins with pins on these nodes."""
        for node in slot.pins:
            self.tree.touch(node)
        return [*self.tree.pin_edits(pins, slot.pins), [slot, "pins", pins]]

    def shorten_edits(self, slot: Slot, rows: int) -> list[list[Any]]:
        """Returns the edits that cut a slot's pins back to prefixes of its first `rows` rows."""
        parts = [self.tree.cut_at(node, rows) for node in slot.pins]
        return self.slot_pin_edits(slot, [node for node in parts if node.parent is not None])

    # ---- matching --------------------------------------------------------------------------------

    def match(self, ids: TokenIds, leave: int) -> PrefixMatch:
        """See `KVCache.match`."""
        count = len(ids)
        self.leases.collect()
        left = operator.index(leave)
        if left < 0:
            raise invalid(f"leave is {left}; it must not be negative")
        limit = max(0, min(count - left, self._layouts[0].max_rows))
        found = self.tree.match(ids, limit)  # also marks the part past the match as used
        length = self._ends(found) if self._windows else found.length
        node = self.tree.cut_at(found.node, length)
        match = PrefixMatch(length, count, self.leases.add(node), self.leases)
        if self.host.limit:
            match.ids = ids
            match.in_host = self.unit * len(self.host.find(ids, self.unit, length, limit))
        return match

    def in_host(self, match: PrefixMatch) -> list[Key]:
        """Returns the keys of the units after a match that are still in host memory.

        Marks these units as used.
        """
        end = match.length + match.in_host
        return self.host.find(match.ids, self.unit, match.length, end)

    def _ends(self, found: Match[_Spans]) -> int:
        """Returns the longest length at which a match can end with every group's full window."""
        units, before = found.length // self.unit, -1
        while units != before:
            before = units
            for place in self._windows:
                units = self._end(place, found.parts, units)
        return units * self.unit

    def _end(self, place: int, parts: Sequence[tuple[_Spans, int]], units: int) -> int:
        """Returns the most units, up to `units`, after which a group has the full window.

        Returns 0 if there is none.
        """
        unit, layout = self.unit_pages[place], self._layouts[place]
        found = low = end = 0  # pages [low, end) are present
        for spans, _ in parts:
            if missing := spans.missing(place):
                low = end + missing
            end += spans.pages * unit
            last = min(units, end // unit)
            if low <= layout.window_page(last * self.unit) < last * unit:
                found = last
        return found

    def wanted(self, tokens: Any, leave: int, namespace: Hashable = None) -> PrefixMatch:
        """Matches and leases the recorded part of a prompt.

        Raises InvalidArgument for bad tokens or for more than `max_seq_len` of them, and
        PrefixEvicted if `tokens` is a match whose prefix was evicted.
        """
        if isinstance(tokens, PrefixMatch):
            self.renew(self.own(tokens))
            return tokens
        ids = TokenIds.of(tokens, namespace)
        longest = self._layouts[0].max_rows
        if len(ids) > longest:
            raise invalid(f"{len(ids)} tokens; max_seq_len is {longest}", limit=longest)
        return self.match(ids, leave)

    def own(self, match: PrefixMatch) -> PrefixMatch:
        """Returns the match; raises InvalidArgument if it belongs to another cache."""
        if match._owner is not self.leases:
            raise invalid(f"{match!r} belongs to another cache")
        return match

    def renew(self, match: PrefixMatch) -> None:
        """Renews a lost lease if the prefix is still recorded.

        Raises:
            PrefixEvicted: the prefix is no longer recorded.
        """
        self.leases.collect()
        if match.length and not self.leases.has(match._lease):
            node = match._lease.node
            if node not in self.tree or node.end < match.length:
                raise PrefixEvicted(
                    f"the match of {match.length} tokens has lost its lease and its prefix was "
                    "evicted; match again",
                    errno=errno.EBADF,
                    op="KVCache",
                )
            match._lease = self.leases.add(self.tree.cut_at(node, match.length))

    def hand_over(self, match: PrefixMatch, slot: Slot) -> None:
        """Transfers a match's pin to the slot of a request that has begun with it."""
        lease = match._lease
        self._journal.change([*self.leases.end_lease_edits(lease), [slot, "pins", [lease.node]]])

    def span(self, place: int, match: PrefixMatch) -> Span:
        """Returns a group's pages for a leased match."""
        return self._span(place, match._lease.node, match.length)

    def _span(self, place: int, node: Node[_Spans], length: int) -> Span:
        """Returns a group's pages for the first `length` tokens (at least 1) on a node's path.

        With a window, returns only those pages of the window that are recorded.
        """
        unit = self.unit_pages[place]
        first, low = self._layouts[place].window_page(length), node.end // self.unit * unit
        found = None
        for one in reversed(node.path()):
            span = one.span.each[place]
            found = span if found is None else span + found
            low -= span.pages
            if low <= first or span.pages < one.units * unit:
                break
        assert found is not None
        return found.slice(first - low, length // self.unit * unit - low)

    def kept_pages(self, place: int, match: PrefixMatch) -> int:
        """Returns how many pages per tensor a request saves by beginning with the match."""
        return match.length // self.unit * self.unit_pages[place]

    # ---- evicting -------------------------------------------------------------------------------

    def evict(self, place: int, pages: int) -> int:
        """Evicts least recently used prefixes until `pages` pages per tensor are freed.

        Prefixes that a running request began with or recorded are evicted last, and only if some of
        their pages are unused; the request keeps its own pages. Leased prefixes are not evicted.
        Bytes freed in other groups also count, since the groups share a budget.

        Returns:
            The number of pages per tensor that are freed, now or once the batches that unmap them
            are complete.
        """
        self.leases.collect()
        if not self.records:
            return 0
        back, column = 0, self._columns[place]
        while back < pages * column:
            missing = pages * column - back
            more = self.evict_units(-(-missing // self.host.cell))
            if more is None and not self._unpin_all():
                break
            back += more or 0
        _log.debug("evicted prefixes: %d bytes freed, %d wanted", back, pages * column)
        return back // column

    def evict_all(self, leased: bool = False, forget: bool = False) -> None:
        """Evicts every prefix that no request pins.

        With `leased`, all leases are ended first. With `forget`, the prefixes in host memory are
        also dropped.
        """
        self.leases.collect()
        if leased:
            self.leases.end_all()
        self.evict_units(self.tree.pages, store=not forget)
        if forget:
            self.host.clear()

    def evict_units(self, units: int, *, store: bool = True) -> int | None:
        """Evicts up to `units` unpinned units.

        The tree drops its references to all of their pages before the first call into the context,
        so an interruption leaves either all or none of the pages held.

        With `store`, their rows are copied to host memory if prefixes are kept there.

        Returns:
            The number of bytes freed, now or once batches in flight are complete; None if nothing
            could be evicted.
        """
        back, found = 0, self.tree.evict(units, whole=bool(self._windows))
        reclaimers = [group.reclaimer for group in self._groups]
        each = [[one.each[place] for one in found] for place in range(len(reclaimers))]
        for reclaimer, spans, column in zip(reclaimers, each, self._columns, strict=True):
            back += sum(map(reclaimer.shared.idle, spans)) * column
            reclaimer.count_evicted(spans)
        if store:
            self.host.store((one.each, one.keys) for one in found)
        for reclaimer, spans in zip(reclaimers, each, strict=True):
            reclaimer.release_kept(*spans)
            reclaimer.drop_unheld()
        return back if found else None

    def _unpin_all(self) -> bool:
        """Removes every slot's pins. Returns False, changing nothing, if no page would be freed."""
        kept, places = self.leases.kept(), range(len(self._groups))
        if not any(self._kept_pages(at, self.tree) > self._kept_pages(at, kept) for at in places):
            return False  # all recorded pages are used or leased
        holders = [slot for slot in self._groups[0].table if slot.pins]
        for slot in holders:
            self._journal.change(self.slot_pin_edits(slot, []))
        return bool(holders)

    def leased(self, place: int) -> int:
        """Returns how many pages per tensor are protected by leases but not used by any request."""
        if not self.leases:
            return 0
        return self._kept_pages(place, self.leases.kept())

    def _kept_pages(self, place: int, nodes: Iterable[Node[_Spans]]) -> int:
        """Counts a group's pages per tensor that these nodes hold and no request uses."""
        shared = self._groups[place].reclaimer.shared
        return shared.kept(node.span.each[place] for node in nodes)

    # ---- reports and recovery --------------------------------------------------------------------

    def spans(self, place: int) -> list[Span]:
        """Returns the tree's spans for one group."""
        return [node.span.each[place] for node in self.tree]

    def pages(self, place: int) -> int:
        """Returns how many of a group's pages per tensor are recorded."""
        if place in self._windows:
            return sum(span.pages for span in self.spans(place))
        return self.tree.tokens // self.unit * self.unit_pages[place]

    def check(self) -> list[str]:
        """Returns a description of each inconsistency in the tree, its pins and its spans."""
        found = self.tree.check()
        wanted = Counter(self.leases.nodes())
        for slot in self._groups[0].table:
            wanted.update(slot.pins)
        for node in self.tree:
            if node.pins != wanted.pop(node, 0):
                found.append(f"{node!r} has {node.pins} pins, which differs from slots and leases")
            for place, span in enumerate(node.span.each):
                missing = node.span.missing(place)
                if missing < 0 or (missing and place not in self._windows):
                    found.append(f"{node!r} has a span of {span.pages} pages")
            if node.span.pages != node.units:
                found.append(f"{node!r} has spans of {node.span.pages} units")
        if wanted:
            found.append(f"{len(wanted)} pinned prefixes are not in the tree")
        return found + self.host.check()
