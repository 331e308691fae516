# SPDX-License-Identifier: MIT
"""The references to shared pages (spans.py): who has them, and what goes back to the pool."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from pyvmem.errors import OutOfMemory
from pyvmem.kvcache.journal import Book
from pyvmem.kvcache.layout import Layout
from pyvmem.kvcache.places import PLAIN, Kind, Tier
from pyvmem.kvcache.spans import Block, Part, Span

if TYPE_CHECKING:
    from pyvmem.kvcache.mapper import Mapper
    from pyvmem.pages import Pages

__all__ = ["SharedPages"]


class SharedPages(Book):
    """The references to shared pages; all counts are of pages per tensor.

    Attributes:
        pages: shared pages of the device, each counted once.
        used: of these, pages that a request uses.
        uses: the same, counted once for each request.
        away_uses: uses of pages that do not lie in the device.
        blocks: those that have a page left.
    """

    def __new__(cls, layout: Layout, mapper: Mapper) -> SharedPages:
        """No page yet."""
        return cls._with(mapper.journal.entries)

    def __init__(self, layout: Layout, mapper: Mapper) -> None:
        self.layout = layout
        self._mapper = mapper
        self.pages = self.used = self.uses = self.away_uses = 0
        self.blocks: set[Block] = set()
        self._late: list[Part] = []

    def adopt(
        self, handle: Pages, pages: int, events: list[Any], unit_pages: int, kind: Kind = PLAIN
    ) -> Span:
        """A new block; it owns the handle. The span is not held yet."""
        block = Block(handle, pages, events, kind)
        self._mapper.journal.undo(self.blocks.discard, block)
        self.blocks.add(block)
        if not kind.away:
            self.pages += pages
        return Span((Part(block, 0, pages),), unit_pages)

    def hold(self, span: Span) -> None:
        """Adds a reference to each page."""
        for block, low, high in span.parts:
            refs = block.refs
            self._log.append((refs.__setitem__, slice(low, high), refs[low:high]))
            for page in range(low, high):
                refs[page] += 1

    def use(self, span: Span) -> None:
        """Notes that a request uses the pages; whoever calls it holds the span."""
        for block, low, high in span.parts:
            users = block.users
            self._log.append((users.__setitem__, slice(low, high), users[low:high]))
            first = sum(not users[page] for page in range(low, high))
            for page in range(low, high):
                users[page] += 1
            self._count(block, high - low, first)

    def unuse(self, span: Span) -> None:
        """Takes one `use` back."""
        for block, low, high in span.parts:
            users = block.users
            self._log.append((users.__setitem__, slice(low, high), users[low:high]))
            for page in range(low, high):
                users[page] -= 1
            last = sum(not users[page] for page in range(low, high))
            self._count(block, low - high, -last)

    def _count(self, block: Block, uses: int, used: int) -> None:
        if block.kind.away:
            self.away_uses += uses
        else:
            self.uses += uses
            self.used += used

    def idle(self, span: Span) -> int:
        """Pages of the device in the span that no request uses."""
        return sum(
            not block.users[page]
            for block, low, high in span.parts
            if not block.kind.away
            for page in range(low, high)
        )

    def returns(self, span: Span) -> int:
        """Pages of the device that come back with the span, now or after batches under way.

        Those that no request uses; of large ones, those that nothing else refers to.
        """
        found = 0
        for block, low, high in span.parts:
            if block.kind.away:
                continue
            unit = block.kind.unit
            if unit == 1:
                found += sum(not block.users[page] for page in range(low, high))
                continue
            for first in range(low - low % unit, high, unit):
                found += unit * all(
                    block.refs[page] == (low <= page < high) for page in range(first, first + unit)
                )
        return found

    def release(self, span: Span, away: dict[Tier, int]) -> int:
        """Takes one `hold` back.

        Args:
            span: what was held.
            away: gets the pages per tensor that went to pools of other tiers.

        Returns:
            The pages per tensor that went to the device's pool.
        """
        gone = list(self._late)
        self._late = []
        for block, low, high in span.parts:
            refs, unit = block.refs, block.kind.unit
            self._log.append((refs.__setitem__, slice(low, high), refs[low:high]))
            for page in range(low, high):
                refs[page] -= 1
            low, high = low - low % unit, high + -high % unit
            gone.extend(_unreferenced(block, low, high))
        done = 0
        for part in gone:
            pages, tier = self._drop(part), part.block.kind.tier
            if not part.block.kind.away:
                done += pages
            elif pages:
                away[tier] = away.get(tier, 0) + pages
        return done

    def _drop(self, part: Part) -> int:
        """Gives pages back that nobody refers to; returns how many."""
        block, low, high = part
        journal, pages = self._mapper.journal, high - low
        mark, here = journal.mark(), 0 if block.kind.away else pages
        whole = pages == block.live
        journal.undo(block.gone.__setitem__, slice(low, high), block.gone[low:high])
        block.gone[low:high] = [True] * pages
        self.pages -= here
        if whole:
            journal.undo(self.blocks.add, block)
            self.blocks.discard(block)
            self._mapper.drop(block.handle)
            return pages
        try:
            size, stride = self.layout.page_size, block.pages * self.layout.page_size
            tensors = self.layout.num_tensors
            self._mapper.drop_range(block.handle, low * size, pages * size, tensors, stride)
        except OutOfMemory:  # heap for the handle's books; the next release tries again
            journal.rollback(mark)
            self._late = [*self._late, part]
            return 0
        return pages

    def rebuild(self, held: list[Span], used: list[Span]) -> None:
        """Counts again who holds and who uses what.

        Args:
            held: every span that somebody holds. used: those that requests use.
        """
        for block in self.blocks:
            block.refs[:] = [0] * block.pages
            block.users[:] = [0] * block.pages
        self.pages = sum(block.live for block in self.blocks if not block.kind.away)
        self.used = self.uses = self.away_uses = 0
        for span in held:
            self.hold(span)
        for span in used:
            self.use(span)
        self._late = [
            part for block in self.blocks for part in _unreferenced(block, 0, block.pages)
        ]

    def close(self) -> None:
        """Drops every handle that is left, whoever holds its pages."""
        for block in list(self.blocks):
            self._mapper.journal.undo(self.blocks.add, block)
            self.blocks.discard(block)
            self._mapper.drop(block.handle)
        self._late = []
        self.pages = self.used = self.uses = self.away_uses = 0

    def check(self, held: list[Span], used: list[Span]) -> list[str]:
        """Compares the counts with the spans that are held and used; what contradicts, in words."""
        found = []
        for name, spans in (("refs", held), ("users", used)):
            want: dict[Block, list[int]] = {block: [0] * block.pages for block in self.blocks}
            for block, low, high in (part for span in spans for part in span.parts):
                if block not in want:
                    found.append(f"a span names a block of {block.pages} pages that is gone")
                    continue
                for page in range(low, high):
                    want[block][page] += 1
            for block, counts in want.items():
                if getattr(block, name) != counts:
                    found.append(f"a block has {name} {getattr(block, name)}, counted {counts}")
        late = sum(part.high - part.low for part in self._late)
        live = sum(map(_referenced, self.blocks)) + late
        if live != sum(block.live for block in self.blocks):
            found.append(f"shared pages per tensor: {live} counted, others are live")
        here = [block for block in self.blocks if not block.kind.away]
        if self.pages != sum(block.live for block in here):
            found.append(f"{self.pages} shared pages per tensor, other than the blocks have")
        parts = [part for span in used for part in span.parts]
        for name, away in (("uses", False), ("away_uses", True)):
            uses = sum(high - low for block, low, high in parts if block.kind.away == away)
            if getattr(self, name) != uses:
                found.append(f"{getattr(self, name)} {name} of shared pages, counted {uses}")
        busy = sum(sum(map(bool, block.users)) for block in here)
        if busy != self.used:
            found.append(f"{self.used} shared pages in use per tensor, counted {busy}")
        return found

    def away(self) -> dict[Tier, int]:
        """Pages per tensor that do not lie in the device, by tier."""
        found: dict[Tier, int] = {}
        for block in self.blocks:
            if block.kind.away:
                tier = block.kind.tier
                found[tier] = found.get(tier, 0) + block.live
        return found


def _referenced(block: Block) -> int:
    """Pages that something refers to, or to another part of their large page."""
    unit = block.kind.unit
    if unit == 1:
        return sum(map(bool, block.refs))
    return sum(unit * any(block.refs[at : at + unit]) for at in range(0, block.pages, unit))


def _unreferenced(block: Block, low: int, high: int) -> Iterator[Part]:
    """The longest stretches of [low, high) that nobody refers to, and that are still there."""
    refs, gone, unit = block.refs, block.gone, block.kind.unit
    start = low
    for page in range(low, high + 1, unit):
        held = page == high or gone[page]
        if not (held or (refs[page] if unit == 1 else any(refs[page : page + unit]))):
            continue
        if start < page:
            yield Part(block, start, page)
        start = page + unit
