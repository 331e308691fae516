# SPDX-License-Identifier: MIT
"""What requests of a `LayeredCache` share: forks, and one tree of prefixes for all classes.

A class has rows of its own size, so the same tokens fill a different number of pages in each:

    tokens   | unit 0                   | unit 1                   |
    class 0  | page 0      | page 1     | page 2      | page 3     |   rows of 2 KiB
    class 1  | page 0                   | page 1                   |   rows of 1 KiB

All have the same pages, a power of two, so a class's own unit is one too, and the greatest of them
is the least common multiple. The tree is the first class's. Its spans name that class's pages and
have those of the others beside them, so that what is split, matched or evicted is so in all.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from pyvmem.errors import OutOfMemory, TooManyBatches, VMemError
from pyvmem.features.table import FORK, PREFIXES
from pyvmem.kvcache import fork
from pyvmem.kvcache.partly import attach_copy
from pyvmem.kvcache.prefixes import Prefixes
from pyvmem.kvcache.spans import Span

if TYPE_CHECKING:
    from pyvmem.kvcache.core import Core
    from pyvmem.kvcache.prefix_node import Node
    from pyvmem.kvcache.prefixes import PrefixMatch
    from pyvmem.kvcache.slots import Slot

__all__ = ["JointPrefixes", "fork_all"]


class _JointSpan(Span):
    """The first class's pages for some units, and those of the others in turn."""

    __slots__ = ("parts_of",)

    def __init__(self, parts_of: Sequence[Span]) -> None:
        super().__init__(parts_of[0].parts, parts_of[0].unit_pages, parts_of[0].lead)
        self.parts_of = tuple(parts_of)

    def split(self, units: int) -> tuple[Span, Span]:
        """As `Span.split`, in every class."""
        upper, lower = zip(*(span.split(units) for span in self.parts_of), strict=True)
        return _JointSpan(upper), _JointSpan(lower)


def _of(span: Span) -> tuple[Span, ...]:
    """The spans of all classes."""
    assert isinstance(span, _JointSpan)
    return span.parts_of


class JointPrefixes(Prefixes):
    """The prefixes of all classes; takes the place of each class's own.

    Where a method takes a slot, it is the first class's: the request's reqid is the same in all.

    Args:
        cores: the classes, before anything was recorded. They share a budget.
    """

    def __init__(self, cores: Sequence[Core]) -> None:
        super().__init__(cores[0], max(core.prefixes.tree.unit for core in cores))
        self._cores = tuple(cores)
        cores[0].prefixes = self
        for place, core in enumerate(cores[1:], 1):
            core.prefixes = _Follower(core, self, place)

    # ---- what Prefixes asks for ------------------------------------------------------------------

    def _each(self, slot: Slot) -> list[tuple[Core, Slot]]:
        return [(core, core.table[slot.index]) for core in self._cores]

    def _take(self, slot: Slot, node: Node[Span], first: int, last: int) -> Span:
        own = super()._take(slot, node, first, last)
        rest = self._each(slot)[1:]
        others = (core.prefixes._take(one, node, first, last) for core, one in rest)
        return _JointSpan([own, *others])

    def _spans_to(self, node: Node[Span]) -> list[Span]:
        return [_of(one.span)[0] for one in node.path()]

    def _any_idle(self) -> bool:
        return any(
            one.reclaimer.shared.idle(span) for one in self._cores for span in one.prefixes.spans()
        )

    # ---- matching --------------------------------------------------------------------------------

    def alloc(self, match: PrefixMatch, stream: Any) -> int | None:
        """As `Prefixes.alloc`, in every class or in none; the first one chooses the slot."""
        for core in self._cores:
            core.sharing.require(PREFIXES, "alloc_prefix")
        node = self._pin(match)
        units = match.length // self.tree.unit
        taken: list[tuple[Core, Slot]] = []
        try:
            for core in self._cores:
                span = core.prefixes._path(node, units * core.prefixes.unit_pages)
                into = [core.table[taken[0][1].index]] if taken else None
                slots = core.sharing.vacate(1, into)
                if slots is None:
                    break
                core.sharing.order_after_writers(span, stream)
                if not attach_copy(core, slots[0], span, match.length):
                    break
                taken.append((core, slots[0]))
        except (OutOfMemory, TooManyBatches):
            pass
        except VMemError:
            self._let_be(taken, node)
            raise
        if len(taken) < len(self._cores):
            self._let_be(taken, node)
            return None
        slot = taken[0][1]
        slot.pins = [node]
        for core, one in taken:
            core.enter(one, match.length)
            core.note_peaks()
        return slot.index

    def _let_be(self, taken: list[tuple[Core, Slot]], node: Node[Span]) -> None:
        for core, slot in taken:
            core.sharing.detach([slot])
        self.tree.unpin(node)

    # ---- giving up -------------------------------------------------------------------------------

    def evict(self, pages: int) -> int:
        """As `Prefixes.evict`; what comes back in other classes counts by its bytes."""
        return self.evict_for(self._core, pages)

    def evict_for(self, core: Core, pages: int) -> int:
        """`evict` for one class: its budget has room for what comes back in any of them."""
        column = _column(core)
        unit = sum(one.prefixes.unit_pages * _column(one) for one in self._cores)
        back = 0
        while back < pages * column:
            missing = pages * column - back
            spans = self.tree.evict(-(-missing // unit) * self.unit_pages)
            if not spans and not self._unpin_all():
                break
            back += sum(map(self._let_go, spans))
        return back // column

    def evict_all(self) -> None:
        """Takes every prefix out that no request uses."""
        for span in self.tree.evict(self.tree.evictable_pages):
            self._let_go(span)

    def _let_go(self, joint: Span) -> int:
        """The bytes of an evicted span that come back."""
        back = 0
        for core, span in zip(self._cores, _of(joint), strict=True):
            back += core.reclaimer.shared.returns(span) * _column(core)
            core.reclaimer.let_go(span)
        return back


class _Follower(Prefixes):
    """A class's part of what the first class's tree keeps."""

    def __init__(self, core: Core, joint: JointPrefixes, place: int) -> None:
        super().__init__(core, joint.tree.unit)
        self.tree = joint.tree
        self._joint = joint
        self._place = place

    def evict(self, pages: int) -> int:
        """As `JointPrefixes.evict`, for this class."""
        return self._joint.evict_for(self._core, pages)

    def evict_all(self) -> None:
        """As `JointPrefixes.evict_all`."""
        self._joint.evict_all()

    def rebuild(self) -> None:
        """The tree is the first class's, which does it."""

    def check(self) -> list[str]:
        """What contradicts in this class's spans; the first class checks the tree."""
        return [
            f"{node!r} has a span of {span.pages} pages"
            for node, span in zip(self.tree, self.spans(), strict=True)
            if span.pages - span.lead != node.units * self.unit_pages
        ]

    def _spans_to(self, node: Node[Span]) -> list[Span]:
        return [_of(one.span)[self._place] for one in node.path()]

    def spans(self) -> list[Span]:
        """What the tree holds of this class, for checks."""
        return [_of(node.span)[self._place] for node in self.tree]


def _column(core: Core) -> int:
    """Bytes of a page in every tensor."""
    return core.layout.page_size * core.layout.num_tensors


def fork_all(
    cores: Sequence[Core], reqid: int, count: int, length: int | None, stream: Any
) -> list[int] | None:
    """`fork.fork` of several caches with the same requests: all or none; the first one chooses."""
    for core in cores:
        core.sharing.require(FORK, "fork")
    done: list[Core] = []
    slots: list[int] | None = None

    def detach() -> None:
        for core in done:
            core.sharing.detach([core.table[index] for index in slots or ()])

    try:
        for core in cores:
            forked = fork.fork(core, reqid, count, length, stream, slots)
            if forked is None:
                detach()
                return None
            slots = forked
            done.append(core)
    except VMemError:
        detach()
        raise
    return slots
