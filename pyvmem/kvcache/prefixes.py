# SPDX-License-Identifier: MIT
"""Recorded prefixes: which tokens' rows are kept, and requests that begin with them.

The sharing unit is the fewest tokens that fill whole pages of a tensor, ``lcm(row_bytes, page_size)
/ row_bytes``: 32 tokens where rows are 2 KiB and pages 64 KiB. A row of 384 bytes does not divide
64 KiB; the row that crosses into the next page ends there, so that whoever continues after it would
write into a page that is shared. Only every 512 tokens do page and row end together.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Hashable, Iterable
from typing import TYPE_CHECKING, Any

from pyvmem.errors import InvalidArgument, VMemError
from pyvmem.features.table import PREFIXES
from pyvmem.kvcache.config import invalid
from pyvmem.kvcache.events import record, wait_for
from pyvmem.kvcache.leases import Leases, PrefixMatch, evicted
from pyvmem.kvcache.partly import attach_copy
from pyvmem.kvcache.prefix_node import Node
from pyvmem.kvcache.prefix_tree import PrefixTree
from pyvmem.kvcache.spans import Span
from pyvmem.kvcache.token_ids import ID_BYTES, TokenIds

if TYPE_CHECKING:
    from pyvmem.kvcache.core import Core
    from pyvmem.kvcache.slots import Slot

__all__ = ["PrefixMatch", "Prefixes"]


class Prefixes:
    """The tree of a cache, and the references that it keeps to shared pages.

    Args:
        core: the cache.
        unit: tokens of a sharing unit, a multiple of the cache's own; 0: that.

    Attributes:
        tree: by token ids; its spans are held in `Reclaimer.shared`.
        unit_pages: pages per tensor of a sharing unit.
        leases: what matches keep from eviction.
    """

    def __init__(self, core: Core, unit: int = 0) -> None:
        self._core = core
        layout = core.layout
        whole = unit * layout.row_bytes or math.lcm(layout.row_bytes, layout.page_size)
        self.tree: PrefixTree[Span] = PrefixTree(whole // layout.row_bytes, core.journal.entries)
        self.unit_pages = whole // layout.page_size
        self.leases = Leases(self.tree, core.journal.entries, lockstep=core.table.lockstep)

    # ---- recording -------------------------------------------------------------------------------

    def record(self, slot: Slot, tokens: Any, stream: Any, namespace: Hashable = None) -> int:
        """See `KVCache.record`."""
        ids, units = self._check(slot, tokens, namespace)
        if self.tree.match(ids).length < units * self.tree.unit:
            for core, one in self._each(slot):
                core.mover.finish(one, stream)
            # The rest of a large page is still to be written.
            ready = self._ready(slot, units)
            parts = [(core, one, one.places.floor(pages)) for core, one, pages in ready]
            if any(pages > one.shared for _, one, pages in parts):
                wait_for(record(stream, self._core.device))
            for core, one, pages in parts:
                core.sharing.share(one, pages)
        return self._insert(slot, ids)

    def record_last(self, slot: Slot, tokens: Any, event: Any, namespace: Hashable = None) -> None:
        """Records what a slot holds that is freed next; `event` is its last GPU work."""
        ids, units = self._check(slot, tokens, namespace)
        if self.tree.match(ids).length < units * self.tree.unit:
            parts = self._ready(slot, units)
            handles = [core.sharing.gather(one, pages) for core, one, pages in parts]
            for (core, one, pages), held in zip(parts, handles, strict=True):
                core.sharing.bequeath(one, pages, held, event)
        self._insert(slot, ids)

    def _ready(self, slot: Slot, units: int) -> list[tuple[Core, Slot, int]]:
        """Where the units' pages are to be shared: caches, slots, pages per tensor."""
        parts = [(core, one, units * core.prefixes.unit_pages) for core, one in self._each(slot)]
        for core, one, _ in parts:
            core.pager.release(one)
        return parts

    def _each(self, slot: Slot) -> list[tuple[Core, Slot]]:
        """The caches that keep the rows of a request together, and its slot in each."""
        return [(self._core, slot)]

    def _check(self, slot: Slot, tokens: Any, namespace: Hashable) -> tuple[TokenIds, int]:
        """The ids of the rows that are held, and how many whole units they are."""
        for core, _ in self._each(slot):
            core.sharing.require(PREFIXES, "record")
        ids = TokenIds.of(tokens, namespace)
        held = self._core.rows[slot.index]
        if len(ids) > held:
            ids = TokenIds.from_bytes(ids.data[: held * ID_BYTES], ids.namespace)
        return ids, len(ids) // self.tree.unit

    def _insert(self, slot: Slot, ids: TokenIds) -> int:
        known = self.tree.match(ids)
        own = min(one.shared // core.prefixes.unit_pages for core, one in self._each(slot))
        units = max(known.length // self.tree.unit, own)
        end = units * self.tree.unit * ID_BYTES
        ids = TokenIds.from_bytes(ids.data[:end], ids.namespace)
        done = self.tree.insert(ids, lambda first, last: self._take(slot, known.node, first, last))
        # A slot whose pages were recorded by another shares none of them, and keeps nothing.
        if done.length and slot.shared and done.node not in slot.pins:
            self.tree.pin(done.node)
            slot.pins = [*slot.pins, done.node]
        return done.length

    def _take(self, slot: Slot, node: Node[Span], first: int, last: int) -> Span:
        """The pages of a slot's units from `first` to before `last`, held for the tree.

        They come behind what the tree has on the way to the node.
        """
        begin = first * self.unit_pages
        lead = self._lead(slot.span, node, begin)
        span = slot.span.cut(begin - lead, last * self.unit_pages)
        span.lead = lead
        self._core.reclaimer.shared.hold(span)
        return span

    def _lead(self, span: Span, node: Node[Span], begin: int) -> int:
        """Pages before `begin` that a span must have of its own, to follow what the tree has."""
        large = self._core.layout.large_pages
        lead = begin % large if large else 0
        if not lead:
            return 0
        before = self._path(node, begin).parts[-1]
        own = span.cut(begin, begin + 1).parts[0]
        if before.block is own.block and before.high == own.low:
            return 0  # the tree has the same page
        return lead if before.block.kind.unit > 1 or own.block.kind.unit > 1 else 0

    def _path(self, node: Node[Span], pages: int) -> Span:
        """The first pages of the way to a node, as a slot can have them mapped."""
        return sum(self._spans_to(node), Span((), self.unit_pages)).cut(0, pages)

    def _spans_to(self, node: Node[Span]) -> list[Span]:
        """The cache's own spans on the way to a node."""
        return [one.span for one in node.path()]

    def pin_again(self, pins: list[Node[Span]]) -> list[Node[Span]]:
        """Keeps prefixes for one more slot."""
        for node in pins:
            self.tree.pin(node)
        return list(pins)

    def shorten(self, slot: Slot, rows: int) -> None:
        """Keeps for a slot only what its first rows are of."""
        kept: list[Node[Span]] = []
        for node in slot.pins:
            part = node
            if node.end > rows:
                found = self.tree.match(node.tokens(), rows, pin=True)
                part = found.node
                self.tree.unpin(node)
                if not found.length:
                    self.tree.unpin(part)
                    continue
            kept.append(part)
        slot.pins = kept

    def unpin(self, slot: Slot) -> None:
        """Keeps nothing for a slot any longer; counts as a use."""
        for node in slot.pins:
            self.tree.unpin(node)
        slot.pins = []

    # ---- matching --------------------------------------------------------------------------------

    def match(self, tokens: Any, leave: int, namespace: Hashable = None) -> PrefixMatch:
        """See `KVCache.match`."""
        self.leases.collect()
        ids = TokenIds.of(tokens, namespace)
        left = operator.index(leave)
        if left < 0:
            raise invalid(f"leave is {left}; it must not be negative")
        limit = max(0, min(len(ids) - left, self._core.config.max_seq_len))
        found = self.tree.match(ids, limit)  # a use of all that the run goes on with, too
        node = self.tree.root
        if found.length:
            node = self.tree.match(ids, found.length, pin=True).node
        return PrefixMatch(found.length, self.leases.add(node), self.leases)

    def wanted(
        self, tokens: Any, leave: int, namespace: Hashable = None
    ) -> tuple[PrefixMatch, int]:
        """What of a prompt is recorded, and how long it is; of a match, the match and its length.

        Raises InvalidArgument for bad tokens, or more than `max_seq_len`.
        """
        if isinstance(tokens, PrefixMatch):
            return self.own(tokens), tokens.length
        ids = TokenIds.of(tokens, namespace)
        length, longest = len(ids), self._core.config.max_seq_len
        if length > longest:
            raise invalid(f"{length} tokens; max_seq_len is {longest}", limit=longest)
        return self.match(ids, leave), length

    def own(self, match: PrefixMatch) -> PrefixMatch:
        """A match of this cache; raises InvalidArgument for another's."""
        if match._owner is not self.leases:
            raise invalid(f"{match!r} is another cache's")
        return match

    def renew(self, match: PrefixMatch) -> None:
        """Takes a lease again that was lost, where the prefix is still there.

        Raises:
            PrefixEvicted: it is not.
        """
        self.leases.collect()
        if match.length and not self.leases.has(match._lease):
            match._lease = self.leases.add(self._pin(match))

    def _pin(self, match: PrefixMatch) -> Node[Span]:
        """Keeps what matched; raises PrefixEvicted where it is not there any more."""
        node = match._lease.node
        try:
            self.tree.pin(node, match.length)
        except InvalidArgument:
            raise evicted(match.length) from None
        if node.end > match.length:  # the rest of its run may go, so only a part of it is kept
            whole, node = node, self.tree.match(node.tokens(), match.length, pin=True).node
            self.tree.unpin(whole)
        return node

    def can_begin(self, match: PrefixMatch) -> bool:
        """Whether a request can begin with a match and no wait for GPU work of earlier owners.

        Ranks wait instead: how far that work is may differ.
        """
        if not match.length:
            return False
        cores = [core for core, _ in self._each(self._core.table[0])]
        return self._core.table.lockstep or not any(core.sharing.must_wait() for core in cores)

    def alloc(self, match: PrefixMatch, stream: Any) -> int | None:
        """See `KVCache.alloc_prefix`; for a match of at least a unit."""
        core = self._core
        core.sharing.require(PREFIXES, "alloc_prefix")
        self.leases.collect()
        node = self._pin(match)
        try:
            slots = core.sharing.vacate(1)
            if slots is not None:
                span = self._path(node, match.length // self.tree.unit * self.unit_pages)
                core.sharing.order_after_writers(span, stream)
                if not attach_copy(core, slots[0], span, match.length):
                    slots = None
        except VMemError as error:
            self.tree.unpin(node)
            if core.sharing.is_shortage(error):
                return None
            raise
        if slots is None:
            self.tree.unpin(node)
            return None
        slot = slots[0]
        slot.pins = [node]
        self.leases.end(match._lease)
        core.enter(slot, match.length)
        core.note_peaks()
        return slot.index

    # ---- giving up -------------------------------------------------------------------------------

    def evict(self, pages: int) -> int:
        """Takes least recently used prefixes out until so many pages per tensor come back.

        Those that a request began with or recorded go last, and only where there are pages among
        them that no request uses: the request keeps its own. Leased ones stay.

        Returns:
            Pages per tensor that came back, or will when the batches that unmap them are done.
        """
        self.leases.collect()
        shared, done = self._core.reclaimer.shared, 0
        while done < pages:
            spans = self.tree.evict(pages - done)
            if not spans and not self._unpin_all():
                break
            for span in spans:
                done += shared.returns(span)
                self._core.reclaimer.let_go(span)
        return done

    def _unpin_all(self) -> bool:
        """Keeps nothing for any slot; False, and nothing changed, where that would free no page."""
        holders = [slot for slot in self._core.table if slot.pins]
        if not self._any_idle():
            return False
        for slot in holders:
            self.unpin(slot)
        return bool(holders)

    def _any_idle(self) -> bool:
        """Whether a page is recorded that no request uses and no match has leased."""
        shared, kept = self._core.reclaimer.shared, self.leases.kept()
        return any(shared.idle(node.span) for node in self.tree if node not in kept)

    def leased(self) -> int:
        """Pages per tensor that no request uses, and that cannot be evicted: matches lease them."""
        if not self.leases:
            return 0
        return self.idle_pages(self.leases.kept())

    def idle_pages(self, nodes: Iterable[Node[Span]]) -> int:
        """The cache's own pages per tensor of these nodes that no request uses."""
        return sum(map(self._core.reclaimer.shared.idle, map(self._own_span, nodes)))

    def kept_pages(self, match: PrefixMatch) -> int:
        """Pages per tensor that a request which begins with the match need not find."""
        if not match.length:
            return 0
        span = self._path(match._lease.node, match.length // self.tree.unit * self.unit_pages)
        return span.floor(span.pages)

    def _own_span(self, node: Node[Span]) -> Span:
        return node.span

    def evict_all(self, leased: bool = False) -> None:
        """Takes every prefix out that no request uses; `leased`: those of matches, too."""
        self.leases.collect()
        if leased:
            self.leases.end_all()
        for span in self.tree.evict(self.tree.evictable_pages):
            self._core.reclaimer.let_go(span)

    def rebuild(self) -> None:
        """Counts again which prefixes slots keep."""
        pins = [node for slot in self._core.table for node in slot.pins]
        self.tree.rebuild([*pins, *self.leases.rebuilt()])

    def check(self) -> list[str]:
        """What contradicts in the tree, its pins and its spans, in words."""
        found = self.tree.check()
        wanted: dict[Node[Span], int] = {}
        for slot in self._core.table:
            for node in slot.pins:
                wanted[node] = wanted.get(node, 0) + 1
        for node in self.leases.nodes():
            wanted[node] = wanted.get(node, 0) + 1
        for node in self.tree:
            if node.pins != wanted.pop(node, 0):
                found.append(f"{node!r} has {node.pins} pins, other than slots and leases hold")
            if node.span.pages - node.span.lead != node.units * self.unit_pages:
                found.append(f"{node!r} has a span of {node.span.pages} pages")
        if wanted:
            found.append(f"{len(wanted)} pinned prefixes are not in the tree")
        return found

    @property
    def pages(self) -> int:
        """Pages per tensor that are recorded."""
        return self.tree.tokens // self.tree.unit * self.unit_pages

    def spans(self) -> list[Span]:
        """What the tree holds."""
        return [node.span for node in self.tree]
