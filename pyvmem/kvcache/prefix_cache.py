# SPDX-License-Identifier: MIT
"""Recorded prefixes: which tokens' rows are kept in every group of layers, and who leases them.

A match may be dropped in any thread, and by Python's collector at any line, also in the middle of a
call of the cache. So dropping only puts the lease aside; the cache's next call that looks at
prefixes ends it.

On several ranks (distributed.py) what a call answers must not depend on when a collector runs:
there a lease ends when the match is used or released, and at the latest with the next `step`.

The sharing unit is the fewest tokens that fill whole pages of a tensor, ``lcm(row_bytes, page_size)
/ row_bytes``: 32 tokens where rows are 2 KiB and pages 64 KiB. A row of 384 bytes does not divide
64 KiB; the row that crosses into the next page ends there, so a request that goes on after it would
write into a shared page. Only every 512 tokens do page and row end together.

A group has rows of its own size, so the same tokens fill a different number of pages in each:

    tokens   | unit 0                   | unit 1                   |
    group 0  | page 0      | page 1     | page 2      | page 3     |   rows of 2 KiB
    group 1  | page 0                   | page 1                   |   rows of 1 KiB

The unit of all is the least common multiple of theirs. A node of the tree has a span in every
group, so that what is split, matched or evicted is so in all.

A group with a *window* has only the last pages of a node's run: those that the request held which
recorded it. So a match ends where every such group has the last window,
``window + window_tile`` tokens, be it of several nodes in a row:

    tokens   | system prompt | question A                | ends: a request of A was recorded
    full     | page 0        | page 1   page 2   page 3  |
    sliding  | -             | -        page 2   page 3  | a prompt with question B matches nothing

    sliding  | page 0        | -        page 2   page 3  | after B was recorded with all its rows
                                                           there: its match is the system prompt

Nodes end where something was recorded and where prompts part, so matches end there. A request that
records fills in the windows that nodes on its path lack, as far as it holds them: all that it
computed in the last step, and else its own last window. What it does not hold stays missing, and
the match is shorter. Leaves are evicted whole: without its end a run has no window.

A group with a state (linear attention, state spaces) has that of a request's last token alone, not
of the tokens before, where another prompt would go on. A cache with such a group records nothing
and matches nothing: all that its requests share, they share by forks.
"""

from __future__ import annotations

import errno
import logging
import math
import operator
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pyvmem.errors import BadHandle
from pyvmem.features.table import PREFIXES
from pyvmem.kvcache.checks import invalid
from pyvmem.kvcache.events import PriorWork
from pyvmem.kvcache.host_prefixes import HostPrefixes, Key, unit_keys
from pyvmem.kvcache.pages import Span
from pyvmem.kvcache.prefix_tree import ID_BYTES, Match, Node, PrefixTree, TokenIds
from pyvmem.kvcache.sharing import Sharing
from pyvmem.plumbing.closing import Scoped

if TYPE_CHECKING:
    from pyvmem._native import Columns
    from pyvmem.kvcache.journal import Journal
    from pyvmem.kvcache.layout import Layout
    from pyvmem.kvcache.mapper import Scratch
    from pyvmem.kvcache.prefix_tree import Node
    from pyvmem.kvcache.slots import Slot, SlotTable
    from pyvmem.kvcache.window import Window
    from pyvmem.memory.info import ContextInfo

__all__ = ["Lease", "Leases", "PrefixCache", "PrefixEvicted", "PrefixMatch"]


_log = logging.getLogger(__name__)

_NO_IDS = TokenIds(())


class _Spans:
    """The pages of some units in every group of layers.

    Attributes:
        each: by group; with a window perhaps only the last of the pages.
        pages: units, which are what the tree counts.
        keys: of the units in host memory; none where it keeps no prefixes.
    """

    __slots__ = ("each", "keys", "pages")

    def __init__(self, each: Sequence[Span], units: int, keys: Sequence[Key] = ()) -> None:
        self.each = tuple(each)
        self.pages = units
        self.keys = keys

    def missing(self, place: int) -> int:
        """The number of a group's first pages that are not there."""
        span = self.each[place]
        return self.pages * span.unit_pages - span.pages

    def split(self, units: int) -> tuple[_Spans, _Spans]:
        """Splits the span of every group: see `Span.split`."""
        places = range(len(self.each))
        both = [self.each[place].split(units, self.missing(place)) for place in places]
        upper, lower = zip(*both, strict=True)
        first, rest = self.keys[:units], self.keys[units:]
        return _Spans(upper, units, first), _Spans(lower, self.pages - units, rest)


class PrefixEvicted(BadHandle):
    """A match whose lease was lost, and whose prefix is not recorded any more: match again.

    `KVCache.trim` with ``prefixes=True`` takes leases; `PrefixMatch.release` gives one back; of a
    `ParallelKVCache` they end with the next `step`.
    """


@dataclass(eq=False, frozen=True)
class Lease:
    """A pin of a prefix.

    Attributes:
        node: the last node of it.
    """

    node: Node[_Spans]


@dataclass(eq=False)
class PrefixMatch(Scoped):
    """A lease of the part of a prompt that was recorded when `KVCache.match` was called.

    Until the match is used by `alloc_prefix`, released or collected, its pages are not evicted. A
    context manager, which releases it.

    Attributes:
        length: tokens, a multiple of the sharing unit; 0: nothing.
        asked: tokens of the prompt.
        in_host: tokens after these whose rows are in host memory (`KVCacheConfig.host_prefixes`).
            `alloc_prefix` loads them, if memory is not short. They are not leased.
        ids: the prompt, if any.
    """

    length: int
    asked: int
    _lease: Lease = field(repr=False)
    _owner: Leases = field(repr=False)
    in_host: int = 0
    ids: TokenIds = field(default=_NO_IDS, repr=False)

    def release(self) -> None:
        """Lets the prefix be evicted again. Does nothing after its use. Idempotent."""
        self._owner.drop(self._lease)

    _leave = release

    def __del__(self) -> None:
        owner: Leases | None = getattr(self, "_owner", None)
        if owner is not None and not owner.lockstep:
            owner.drop(self._lease)


class Leases:
    """The leases of a cache's prefixes. The caller holds the cache's lock, but for `drop`.

    Args:
        tree: the prefixes.
        journal: of the cache.
        lockstep: the cache's answers are those of other ranks.
    """

    def __init__(self, tree: PrefixTree[_Spans], journal: Journal, *, lockstep: bool) -> None:
        self.lockstep = lockstep
        self._journal = journal
        self._tree = tree
        self._open: dict[Lease, None] = {}
        self._dropped: dict[Lease, None] = {}  # none of them will be used

    def __bool__(self) -> bool:
        self.collect()
        return bool(self._open)

    def has(self, lease: Lease) -> bool:
        """True if a lease still keeps its node, and was not taken back after an exception."""
        return lease in self._open

    def add(self, node: Node[_Spans]) -> Lease:
        """A lease of a node, which it pins, or of a root, which needs no pin."""
        lease = Lease(node)
        if node.parent is not None:
            self._journal.change([*self._tree.pinning([node], ()), [self._open, lease, None]])
        return lease

    def drop(self, lease: Lease) -> None:
        """Puts a lease aside; from any thread, at any time. Idempotent."""
        if lease in self._open:
            self._dropped[lease] = None

    def collect(self) -> None:
        """Ends the leases that were dropped."""
        while self._dropped:
            self.end(next(iter(self._dropped)))

    def end(self, lease: Lease) -> None:
        """Ends one lease. Idempotent."""
        edits = self.ending(lease)
        if lease in self._open:
            edits += self._tree.pinning((), [lease.node])
            self._tree.touch(lease.node)
        self._journal.change(edits)

    def ending(self, lease: Lease) -> list[list[Any]]:
        """The edits that end a lease; another has its pin from here on, or takes it back."""
        return [[self._open, lease, ...], [self._dropped, lease, ...]]

    def end_all(self) -> None:
        """Ends every lease."""
        for lease in list(self._open):
            self.end(lease)

    def nodes(self) -> list[Node[_Spans]]:
        """The leased nodes, once for each lease."""
        self.collect()
        return [lease.node for lease in self._open]

    def kept(self) -> dict[Node[_Spans], None]:
        """All nodes on the way to leased ones, each once, in order."""
        return {one: None for node in self.nodes() for one in node.path()}


def evicted(length: int) -> PrefixEvicted:
    """The error for a match that cannot be used any more."""
    return PrefixEvicted(
        f"the match of {length} tokens has lost its lease and its prefix was evicted; match again",
        errno=errno.EBADF,
        op="KVCache",
    )


class PrefixCache:
    """The recorded prefixes of one or more groups of layers with the same requests.

    A slot that a method takes is the first group's: a request's number is the same in all. `place`
    is a group's place among them.

    Args:
        layouts: of the groups, which `join` in this order; several share a budget.
        journal: of all of them.
        lockstep: see `SlotTable`.

    Attributes:
        tree: by token ids; the spans of every group are held in its `Reclaimer.shared`.
        unit: tokens of a sharing unit.
        unit_pages: for each group, pages per tensor of a sharing unit.
        leases: what matches keep from eviction.
        host: rows of evicted prefixes.
    """

    _table: SlotTable
    _rows: Columns

    def __init__(self, layouts: Sequence[Layout], journal: Journal, *, lockstep: bool) -> None:
        self._journal = journal
        self._groups: list[Sharing] = []
        self._windows: list[Window | None] = []
        self._layouts = layouts
        self._sliding = [place for place, one in enumerate(layouts) if one.config.window]
        self._restores = not any(one.state for one in layouts)
        self.unit = math.lcm(
            *(
                math.lcm(one.row_bytes, one.page_size) // one.row_bytes
                for one in layouts
                if not one.state
            )
        )
        self.unit_pages = tuple(
            0 if one.state else self.unit * one.row_bytes // one.page_size for one in layouts
        )
        self.tree: PrefixTree[_Spans] = PrefixTree(self.unit, journal.change)
        self.leases = Leases(self.tree, journal, lockstep=lockstep)
        self._columns = [one.page_size * one.num_tensors for one in layouts]
        self._supported: ContextInfo | None = None  # where each group was seen to have prefixes
        self.host = HostPrefixes(layouts, self.unit_pages)

    def join(self, group: Sharing, window: Window | None, scratch: Scratch) -> None:
        """Takes the next group in, when it is made."""
        if not self._groups:
            self._table, self._rows = group.table, group.pager.columns
        self._groups.append(group)
        self._windows.append(window)
        self.host.join(group, scratch)

    def close(self) -> None:
        """Gives host memory back. Idempotent."""
        self.host.close()

    # ---- recording -------------------------------------------------------------------------------

    def record(self, slot: Slot, tokens: Any, work: PriorWork, namespace: Hashable = None) -> int:
        """See `KVCache.record`."""
        ids, each, found, units = self._look(slot, tokens, namespace)
        if units:
            for group, one, _ in each:
                group.mover.finish(one, work)
            for group, one, _ in each:
                group.pager.release(one)
            if any(units * unit > one.shared for _, one, unit in each):
                work.wait()
            for group, one, unit in each:
                group.share(one, units * unit, unit)
        node, length = self._insert(each, ids, found)
        # A slot whose pages were recorded by another shares none of them, and keeps nothing.
        if length and slot.span.pages and node not in slot.pins:
            self._journal.change(self.keeping(slot, [*slot.pins, node]))
        return self._ends(self.tree.match(ids)) if self._sliding else length

    @property
    def records(self) -> bool:
        """True if rows can be recorded at all: no group has a state."""
        return self._restores

    def shares(self, slot: Slot, tokens: Any, namespace: Hashable = None) -> bool:
        """True if `record` would make pages shared, after the work that writes them."""
        _, each, _, units = self._look(slot, tokens, namespace)
        return any(units * unit > one.shared for _, one, unit in each)

    def _firsts(self, slot: Slot) -> list[tuple[int, int]]:
        """For each group with a window, the first page of a request whose rows are there."""
        found = []
        for place in self._sliding:
            group, window = self._groups[place], self._windows[place]
            assert window is not None
            found.append((place, window.first_page(group.table[slot.index])))
        return found

    def record_last(self, slot: Slot, tokens: Any, event: Any, namespace: Hashable = None) -> bool:
        """Records what a slot holds that is freed next; `event` is its last GPU work.

        Returns:
            Whether all that the slot shares now is what is recorded: a request that begins with it
            can go on there.
        """
        ids, each, found, units = self._look(slot, tokens, namespace)
        if units:
            for group, one, _ in each:
                if one.job is not None or one.stale:
                    group.pager.release(one)
            events, handles = [] if event is None else [event], []
            for group, one, unit in each:
                shared = one.head + one.span.pages
                handles.append(group.handles(one, shared, units * unit))
            for (group, one, unit), held in zip(each, handles, strict=True):
                if held:
                    group.adopt(one, held, events, unit)
        node, length = self._insert(each, ids, found)
        if self._sliding:
            length = self._ends(self.tree.match(ids))
        if not length:
            return False
        for place, (_, one, _) in enumerate(each):
            span = self._span(place, node, length)
            if span.parts != one.span.parts and (
                span.slice(0, one.span.pages).parts != one.span.parts
            ):
                return False
        return True

    def _look(
        self, slot: Slot, tokens: Any, namespace: Hashable
    ) -> tuple[TokenIds, list[tuple[Sharing, Slot, int]], Match[_Spans], int]:
        """The ids of the rows that a request holds, and what recording them begins with.

        Returns:
            The ids; for each group, the request's slot and the pages per tensor of a unit; what is
            recorded; the whole units, if that is less and the slot has what is missing, else 0.
        """
        if self._groups[0].mapper.context.info is not self._supported:
            self.require("record")
        ids, index = TokenIds.of(tokens, namespace), slot.index
        held, count = self._rows.held[index], len(ids.data) // ID_BYTES
        if count > held:
            ids, count = TokenIds.from_bytes(ids.data[: held * ID_BYTES], ids.namespace), held
        each, units, found = [], count // self.unit, self.tree.match(ids)
        for group, unit in zip(self._groups, self.unit_pages, strict=True):
            each.append((group, group.table.slots[index], unit))
        length = units * self.unit
        if not self._restores or (self._ends(found) if self._sliding else found.length) >= length:
            units = 0
        for place, first in self._firsts(slot) if self._sliding and units else ():
            if first > self._layouts[place].window_page(length):
                units = 0
        return ids, each, found, units

    def require(self, what: str) -> None:
        """Raises NotSupported where a group cannot have prefixes, which `what` is a call of."""
        for group in self._groups:
            group.require(PREFIXES, what)
        self._supported = self._groups[0].mapper.context.info

    def _insert(
        self, each: Sequence[tuple[Sharing, Slot, int]], ids: TokenIds, found: Match[_Spans]
    ) -> tuple[Node[_Spans], int]:
        """Records what a request shares of its ids, of which `found` is recorded.

        Returns:
            The node of the last recorded unit, and the tokens up to there.
        """
        count = units = len(ids.data) // ID_BYTES // self.unit if self._restores else 0
        for _, one, unit in each if units else ():
            units = min(units, (one.head + one.span.pages) // unit if one.span.pages else 0)
        node, length = found.node, found.length
        if units * self.unit > length:
            if units < count:
                end = units * self.unit * ID_BYTES
                ids = TokenIds.from_bytes(ids.data[:end], ids.namespace)
            done = self.tree.insert(
                ids,
                lambda first, last: _Spans(
                    [self._take(place, one, first, last) for place, (_, one, _) in enumerate(each)],
                    last - first,
                    unit_keys(ids, self.unit, first, last) if self.host.limit else (),
                ),
                found,
            )
            node, length = done.node, done.length
        if self._sliding and length:
            node = self.tree.cut_at(node, length)
            self._fill([one for _, one, _ in each], node)
        return node, length

    def _fill(self, slots: Sequence[Slot], node: Node[_Spans]) -> None:
        """Fills in the windows at the ends of a path's nodes, from pages that a request shares.

        It keeps, of the pages that the tree has, those that reach further back.
        """
        for place, first in self._firsts(slots[0]):
            slot, unit, layout = slots[place], self.unit_pages[place], self._layouts[place]
            shared = self._groups[place].reclaimer.shared
            for one in node.path():
                end = one.end // self.unit * unit
                begin = max(end - one.units * unit, layout.window_page(one.end), first)
                if slot.shared < end or end - one.span.each[place].pages <= begin:
                    continue
                span = slot.shared_part(begin, end)
                each = list(one.span.each)
                before, each[place] = each[place], Span(span.parts, unit)
                shared.hold(span)
                self.tree.replace(one, _Spans(each, one.units))  # no window has keys
                self._groups[place].reclaimer.unref(before)
                self._groups[place].reclaimer.release_kept(before)

    def _take(self, place: int, slot: Slot, first: int, last: int) -> Span:
        """A group's pages of the units from `first` to before `last`, held for the tree."""
        unit = self.unit_pages[place]
        if place in self._sliding:
            return Span((), unit)  # see `_fill`
        span = slot.span.slice(first * unit, last * unit)
        self._groups[place].reclaimer.shared.hold(span)
        return span

    def _path(self, place: int, node: Node[_Spans], pages: int) -> Span:
        """A group's first pages on the way to a node, as a slot can have them mapped."""
        first, *others = node.path()
        span = first.span.each[place]
        for one in others:
            span = span + one.span.each[place]
        return span if span.pages == pages else span.slice(0, pages)

    # ---- what requests keep ----------------------------------------------------------------------

    def keeping(self, slot: Slot, pins: list[Node[_Spans]]) -> list[list[Any]]:
        """The edits where a slot keeps these prefixes, and those before no longer."""
        for node in slot.pins:
            self.tree.touch(node)
        return [*self.tree.pinning(pins, slot.pins), [slot, "pins", pins]]

    def shortening(self, slot: Slot, rows: int) -> list[list[Any]]:
        """The edits where a slot keeps only the prefixes of its first rows."""
        parts = [self.tree.cut_at(node, rows) for node in slot.pins]
        return self.keeping(slot, [node for node in parts if node.parent is not None])

    # ---- matching --------------------------------------------------------------------------------

    def match(self, tokens: Any, leave: int, namespace: Hashable = None) -> PrefixMatch:
        """See `KVCache.match`."""
        ids = TokenIds.of(tokens, namespace)
        return self._match(ids, len(ids), leave)

    def _match(self, ids: TokenIds, count: int, leave: int) -> PrefixMatch:
        """`match` of so many ids."""
        self.leases.collect()
        left = operator.index(leave)
        if left < 0:
            raise invalid(f"leave is {left}; it must not be negative")
        limit = max(0, min(count - left, self._groups[0].config.max_seq_len))
        found = self.tree.match(ids, limit)  # a use of all that the run goes on with, too
        length, node = found.length, found.node
        if self._sliding:
            length = self._ends(found)
        node = self.tree.cut_at(node, length)
        match = PrefixMatch(length, count, self.leases.add(node), self.leases)
        if self.host.limit:
            match.ids, match.in_host = ids, limit - length
            match.in_host = self.unit * len(self.in_host(match))
        return match

    def in_host(self, match: PrefixMatch) -> list[Key]:
        """The units that host memory keeps, of those that it kept after a match; a use."""
        end = match.length + match.in_host
        return self.host.find(match.ids, self.unit, match.length, end)

    def _ends(self, found: Match[_Spans]) -> int:
        """The longest part of a match at whose end every group has its window; tokens."""
        units, before = found.length // self.unit, -1
        while units != before:
            before = units
            for place in self._sliding:
                units = self._end(place, found.parts, units)
        return units * self.unit

    def _end(self, place: int, parts: Sequence[tuple[_Spans, int]], units: int) -> int:
        """The last of so many units after which a group has its window; 0: it never has."""
        unit, layout = self.unit_pages[place], self._layouts[place]
        runs: list[tuple[int, int]] = []  # pages that are there, one after the other
        end = 0
        for spans, _ in parts:
            low, end = end + spans.missing(place), end + spans.pages * unit
            if runs and runs[-1][1] == low:
                low = runs.pop()[0]
            if low < end:
                runs.append((low, end))
        for low, high in reversed(runs):
            last = min(units, high // unit)
            if low <= layout.window_page(last * self.unit) < last * unit:
                return last
        return 0

    def wanted(
        self, tokens: Any, leave: int, namespace: Hashable = None
    ) -> tuple[PrefixMatch, int]:
        """Finds the recorded part of a prompt, and its length.

        The match is leased. Raises InvalidArgument for bad tokens, or more than `max_seq_len`, and
        PrefixEvicted for a match that is not recorded any more.
        """
        if isinstance(tokens, PrefixMatch):
            self.renew(self.own(tokens))
            return tokens, tokens.asked
        ids = TokenIds.of(tokens, namespace)
        length, longest = len(ids), self._groups[0].config.max_seq_len
        if length > longest:
            raise invalid(f"{length} tokens; max_seq_len is {longest}", limit=longest)
        return self._match(ids, length, leave), length

    def own(self, match: PrefixMatch) -> PrefixMatch:
        """A match of this cache; raises InvalidArgument for another's."""
        if match._owner is not self.leases:
            raise invalid(f"{match!r} is another cache's")
        return match

    def renew(self, match: PrefixMatch) -> None:
        """Renews a lost lease, where the prefix is still there.

        Raises:
            PrefixEvicted: it is not.
        """
        self.leases.collect()
        if match.length and not self.leases.has(match._lease):
            node = match._lease.node
            if node not in self.tree or node.end < match.length:
                raise evicted(match.length)
            match._lease = self.leases.add(self.tree.cut_at(node, match.length))

    def hand_over(self, match: PrefixMatch, slot: Slot) -> None:
        """Keeps a leased match for the slot of a request that has begun with it."""
        lease = match._lease
        self._journal.change([*self.leases.ending(lease), [slot, "pins", [lease.node]]])

    def span(self, place: int, match: PrefixMatch) -> Span:
        """A group's pages of a match, which is leased."""
        return self._span(place, match._lease.node, match.length)

    def _span(self, place: int, node: Node[_Spans], length: int) -> Span:
        """A group's pages of the first `length` tokens on the way to a node.

        With a window those that it has there, as far as they are recorded.
        """
        unit = self.unit_pages[place]
        pages = length // self.unit * unit
        if place not in self._sliding:
            return self._path(place, node, pages)
        first = self._layouts[place].window_page(length)
        found, low = Span((), unit), node.end // self.unit * unit
        for one in reversed(node.path()):
            found = one.span.each[place] + found
            low -= one.span.each[place].pages
            if low <= first or one.span.missing(place):
                break
        return found.slice(first - low, pages - low)

    def kept_pages(self, place: int, match: PrefixMatch) -> int:
        """Pages per tensor that a request which begins with the match need not find."""
        if not match.length:
            return 0
        if place in self._sliding:  # what is not shared is not there
            return match.length // self.unit * self.unit_pages[place]
        return self.span(place, match).pages

    # ---- evicting -------------------------------------------------------------------------------

    def evict(self, place: int, pages: int) -> int:
        """Takes least recently used prefixes out until so many pages per tensor come back.

        Those that a request began with or recorded go last, and only where there are pages among
        them that no request uses: the request keeps its own. Leased ones stay. What comes back in
        other groups counts by its bytes, since their budget is the same.

        Returns:
            Pages per tensor that came back, or will when the batches that unmap them are done.
        """
        self.leases.collect()
        if not self._restores:
            return 0
        column = self._columns[place]
        unit = sum(map(operator.mul, self.unit_pages, self._columns))
        back = 0
        while back < pages * column:
            missing = pages * column - back
            more = self.evict_units(-(-missing // unit), whole=bool(self._sliding))
            if more is None and not self._unpin_all():
                break
            back += more or 0
        _log.debug("evicted prefixes: %d bytes back, %d wanted", back, pages * column)
        return back // column

    def evict_all(self, leased: bool = False, forget: bool = False) -> None:
        """Takes every prefix out that no request uses.

        `leased`: those of matches, too; `forget`: host memory keeps no prefix, either.
        """
        self.leases.collect()
        if leased:
            self.leases.end_all()
        self.evict_units(self.tree.pages, store=not forget)
        if forget:
            self.host.clear()

    def evict_units(self, units: int, *, whole: bool = False, store: bool = True) -> int | None:
        """Takes so many units out that no request uses.

        The tree holds none of their pages any more before the context is called for the first: an
        interruption leaves all of them held, or none.

        `store`: host memory keeps their rows, if it keeps any.

        Returns:
            The bytes that come back, now or when batches under way are over; None: no unit is left.
        """
        back, found = 0, self.tree.evict(units, whole=whole)
        reclaimers = [group.reclaimer for group in self._groups]
        each = [[one.each[place] for one in found] for place in range(len(reclaimers))]
        for reclaimer, spans, column in zip(reclaimers, each, self._columns, strict=True):
            back += sum(map(reclaimer.shared.idle, spans)) * column
            reclaimer.count_evicted(spans)
        if store:
            self.host.store([(one.each, one.keys) for one in found])
        for reclaimer, spans in zip(reclaimers, each, strict=True):
            reclaimer.release_kept(*spans)
            reclaimer.drop_unheld()
        return back if found else None

    def _unpin_all(self) -> bool:
        """Keeps nothing for any slot; False, and nothing changed, where that would free no page."""
        kept = self.leases.kept()
        for place in range(len(self._groups)):
            if self._kept_pages(place, self.tree) > self._kept_pages(place, kept):
                break  # recorded, and neither used by a request nor kept by a match
        else:
            return False
        holders = [slot for slot in self._table if slot.pins]
        for slot in holders:
            self._journal.change(self.keeping(slot, []))
        return bool(holders)

    def leased(self, place: int) -> int:
        """Pages per tensor that no request uses, and that cannot be evicted: matches keep them."""
        if not self.leases:
            return 0
        return self._kept_pages(place, self.leases.kept())

    def _kept_pages(self, place: int, nodes: Iterable[Node[_Spans]]) -> int:
        """A group's pages per tensor that no request uses, and that these nodes keep."""
        shared = self._groups[place].reclaimer.shared
        return shared.kept(node.span.each[place] for node in nodes)

    # ---- reports and recovery --------------------------------------------------------------------

    def spans(self, place: int) -> list[Span]:
        """The spans that the tree holds of a group."""
        return [node.span.each[place] for node in self.tree]

    def pages(self, place: int) -> int:
        """A group's pages per tensor that are recorded."""
        if place in self._sliding:
            return sum(span.pages for span in self.spans(place))
        return self.tree.tokens // self.unit * self.unit_pages[place]

    def check(self) -> list[str]:
        """Lists contradictions in the tree, its pins and its spans, in words."""
        found = self.tree.check()
        wanted: dict[Node[_Spans], int] = {}
        for slot in self._table:
            for node in slot.pins:
                wanted[node] = wanted.get(node, 0) + 1
        for node in self.leases.nodes():
            wanted[node] = wanted.get(node, 0) + 1
        for node in self.tree:
            if node.pins != wanted.pop(node, 0):
                found.append(f"{node!r} has {node.pins} pins, other than slots and leases hold")
            for place, span in enumerate(node.span.each):
                missing = node.span.missing(place)
                if missing < 0 or (missing and place not in self._sliding):
                    found.append(f"{node!r} has a span of {span.pages} pages")
            if node.span.pages != node.units:
                found.append(f"{node!r} has spans of {node.span.pages} units")
        if wanted:
            found.append(f"{len(wanted)} pinned prefixes are not in the tree")
        return found + self.host.check()
