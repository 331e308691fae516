# SPDX-License-Identifier: MIT
"""A radix tree of prefixes over token ids: what is recorded, and what of a prompt is there already.

Ids are compared in whole *units*, the tokens that can be shared with one another request: fewer
would begin in the middle of a page. A node holds a run of units, and the caller's *span* for them
(the pages that hold their keys and values). The first unit of a run tells children apart:

    root --[system prompt: 6 units]--+--[question A: 2 units]
                                     +--[question B: 3 units]--[next turn: 4 units]

A run that a new prefix leaves in its middle is split; both halves get a part of the span. The node
stays the lower half, so that what was said of it (its end, a pin) stays true.

Eviction takes leaves, least recently used first, without a search. All nodes that may go stand in
one order of use, in which a node always follows its children: a use moves the whole path to the
end, the deepest node first. So the first of the order has no children. Pinned nodes and their
ancestors stand outside it.

The tree knows nothing of memory and calls no driver. No locks: the caller's.
"""

from __future__ import annotations

import errno
import operator
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from pyvmem.errors import Busy
from pyvmem.kvcache.config import invalid
from pyvmem.kvcache.token_ids import ID_BYTES, TokenIds

__all__ = ["Inserted", "Match", "Node", "PrefixTree", "Span"]

_MAX_UNIT = 1 << 30  # tokens; what it stops is arithmetic on nonsense


class Span(Protocol):
    """What a tree keeps for a run of units: the caller's, opaque but for this."""

    @property
    def pages(self) -> int:
        """Pages that the span stands for; the same number for as long as it is in the tree."""
        ...

    def split(self: S, units: int) -> tuple[S, S]:
        """The span of the first `units` units and that of the rest; both are at least one unit.

        The pages of the two are those of the whole. The whole is not used again. Must not fail:
        `evict` would lose the spans that it had taken out.
        """
        ...


S = TypeVar("S", bound=Span)


class Node(Generic[S]):
    """A run of units behind its parent's. A handle: only the tree changes it.

    Attributes:
        parent: None for the root, and for a node that left the tree.
        span: the caller's payload; the root has none.
        units: length of the run.
        end: tokens from the first of the prefix to the last of this run.
        pins: `pin` calls on this node without their `unpin`.
        used: `PrefixTree.now` at the last use.
    """

    __slots__ = ("_children", "_locks", "_run", "_span", "end", "parent", "pins", "units", "used")

    def __init__(self, parent: Node[S] | None, run: bytes, units: int, end: int, used: int) -> None:
        self.parent = parent
        self.units = units
        self.end = end
        self.pins = 0
        self.used = used
        self._run = run
        self._span: S | None = None
        self._children: dict[bytes, Node[S]] = {}
        self._locks = 0  # pins of this node and of all below

    @property
    def span(self) -> S:
        """The caller's payload. InvalidArgument for the root."""
        if self._span is None:
            raise invalid("the root of a prefix tree has no span")
        return self._span

    @property
    def is_leaf(self) -> bool:
        """Nothing is recorded behind it."""
        return not self._children

    @property
    def children(self) -> list[Node[S]]:
        """The runs that may follow, in the order they were recorded."""
        return list(self._children.values())

    def path(self) -> list[Node[S]]:
        """The nodes from below the root to this one."""
        nodes = []
        node: Node[S] = self
        while node.parent is not None:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]

    def tokens(self) -> TokenIds:
        """The whole prefix, up to `end`."""
        return TokenIds.from_bytes(b"".join(node._run for node in self.path()))

    def __repr__(self) -> str:
        return f"<Node: {self.units} units, to token {self.end}, {len(self._children)} children>"


@dataclass(frozen=True)
class Match(Generic[S]):
    """What of a prompt is recorded.

    Attributes:
        length: tokens, a multiple of the unit.
        parts: the spans in order, each with the units used of it: all, but perhaps of the last.
        node: the last span's node; the root for no match.
    """

    length: int
    parts: list[tuple[S, int]]
    node: Node[S]


@dataclass(frozen=True)
class Inserted(Generic[S]):
    """What `PrefixTree.insert` did.

    Attributes:
        node: the node that holds the last whole unit; the root where there is not one.
        length: tokens of the prefix that the tree now holds, a multiple of the unit.
        start: of these, those that it held before; `length` when nothing is new.
    """

    node: Node[S]
    length: int
    start: int


class PrefixTree(Generic[S]):
    """Prefixes and the spans that hold them. Not thread-safe.

    Every method that takes tokens takes what `TokenIds` takes. Tokens behind the last whole unit
    are left out.

    Args:
        unit: tokens in a unit, at least 1.

    Attributes:
        now: the time of the uses that follow, set by the caller in any unit (steps, seconds); it
            must not go back. Only `evict_unused` reads it.
        nodes, tokens, pages: in the tree.
        locked_pages: of these, pages of pinned nodes and their ancestors, which cannot be evicted.

    Raises:
        InvalidArgument: `unit` is no whole number or not positive.
    """

    def __init__(self, unit: int) -> None:
        try:
            self.unit = operator.index(unit)
        except TypeError:
            raise invalid(f"unit must be a whole number, not {unit!r}") from None
        if not 1 <= self.unit <= _MAX_UNIT:
            raise invalid(
                f"unit is {unit}; it must lie between 1 and {_MAX_UNIT} tokens", limit=_MAX_UNIT
            )
        self._width = self.unit * ID_BYTES
        self.root: Node[S] = Node(None, b"", 0, 0, 0)
        self._order: OrderedDict[Node[S], None] = OrderedDict()  # least recently used first
        self.now = 0
        self.nodes = self.tokens = self.pages = self.locked_pages = 0

    # ---- looking up ------------------------------------------------------------------------------

    def match(self, tokens: Any, limit: int | None = None, *, pin: bool = False) -> Match[S]:
        """The longest recorded prefix of `tokens`. Counts as a use of it.

        Args:
            tokens: the prompt.
            limit: compare so many tokens at most. An engine that must compute the last token gives
                the length less one.
            pin: pin `Match.node`, so that nothing comes between.

        Cost: a dictionary look-up for each node on the path, and a comparison and at most one copy
        of the bytes matched. Changes nothing but the order of use, and the pins.

        Raises:
            InvalidArgument: bad tokens, or a negative `limit`.
        """
        data, end = self._whole(tokens, limit)
        node, parts, at = self._walk(data, end)
        self._touch(node)
        if pin:
            self._lock(node)
        return Match(at // ID_BYTES, parts, node)

    # ---- recording -------------------------------------------------------------------------------

    def insert(self, tokens: Any, make: Callable[[int, int], S]) -> Inserted[S]:
        """Records a prefix. Counts as a use of it.

        Args:
            tokens: all of it, from the first token.
            make: called with the first and the last + 1 unit that are new, once, if any is;
                returns their span, which the tree owns from then on.

        Raises:
            InvalidArgument: bad tokens.
            Whatever `make` raises; the tree then holds what it held.
        """
        data, end = self._whole(tokens, None)
        node, parts, at = self._walk(data, end)
        if at < end:
            if parts and parts[-1][1] < node.units:
                node = self._split(node, parts[-1][1])
            span = make(at // self._width, end // self._width)
            node = self._link(node, data[at:end], end, span)
        self._touch(node)
        return Inserted(node, end // ID_BYTES, at // ID_BYTES)

    # ---- pins ------------------------------------------------------------------------------------

    def pin(self, node: Node[S], length: int = 0) -> None:
        """Keeps a node and its ancestors from eviction until `unpin`. Pins add up.

        Args:
            node: of this tree; the root may be pinned too.
            length: `Match.length`, to be told when the node was cut shorter since then.

        Raises:
            InvalidArgument: the node was evicted, or no longer reaches to `length`.
        """
        self._own(node)
        if node.end < length:
            raise invalid(
                f"the prefix of {length} tokens was evicted down to {node.end}", limit=node.end
            )
        self._lock(node)

    def unpin(self, node: Node[S]) -> None:
        """Takes one `pin` back. Counts as a use.

        Raises:
            InvalidArgument: the node is not pinned.
        """
        self._own(node)
        if not node.pins:
            raise invalid(f"the prefix of {node.end} tokens is not pinned")
        node.pins -= 1
        step: Node[S] | None = node
        while step is not None:
            step._locks -= 1
            if not step._locks and step.parent is not None:
                self.locked_pages -= step.span.pages
                self._order[step] = None
            step = step.parent
        self._touch(node)

    # ---- giving up -------------------------------------------------------------------------------

    def evict(self, pages: int) -> list[S]:
        """Takes leaves out, least recently used first, until so many pages are out of the tree.

        The last leaf is cut, not taken whole, where its first units are not needed for that.

        Returns:
            Their spans, in the order of eviction; fewer pages than asked for when the rest is
            pinned. The caller owns them.

        Raises:
            InvalidArgument: `pages` is negative.
        """
        if pages < 0:
            raise invalid(f"pages is {pages}; it must not be negative")
        spans: list[S] = []
        missing = pages
        while missing > 0 and self._order:
            node = next(iter(self._order))
            spans.append(self._cut(node, missing))
            missing -= spans[-1].pages
        return spans

    def evict_unused(self, since: int) -> list[S]:
        """Takes everything out whose last use (`now` then) was before `since`, but what is pinned.

        Returns:
            The spans; the caller owns them.
        """
        spans: list[S] = []
        while self._order and (node := next(iter(self._order))).used < since:
            spans.append(self._unlink(node))
        return spans

    def remove(self, node: Node[S]) -> list[S]:
        """Takes a node out together with all that is recorded behind it.

        Args:
            node: of this tree; the root empties the tree.

        Returns:
            The spans, children before parents; the caller owns them.

        Raises:
            Busy: one of these nodes is pinned; nothing changed. InvalidArgument: evicted already.
        """
        self._own(node)
        if node._locks:
            raise Busy(
                f"the prefix of {node.end} tokens, or one that continues it, is pinned",
                errno=errno.EBUSY,
                op="PrefixTree.remove",
            )
        below = list(self._below(node))
        return [self._unlink(one) for one in reversed(below) if one is not self.root]

    # ---- reports ---------------------------------------------------------------------------------

    @property
    def evictable_pages(self) -> int:
        """Pages that `evict` can give."""
        return self.pages - self.locked_pages

    def __len__(self) -> int:
        return self.nodes

    def __iter__(self) -> Iterator[Node[S]]:
        """All nodes but the root, parents before children."""
        nodes = self._below(self.root)
        next(nodes)
        return nodes

    def eviction_order(self) -> list[Node[S]]:
        """The nodes that may be evicted, first the one that is next."""
        return list(self._order)

    def check(self) -> list[str]:
        """Compares the tree with itself: every contradiction found, in words. Cost: all nodes."""
        from pyvmem.kvcache.prefix_check import check

        return check(self)

    # ---- inside ----------------------------------------------------------------------------------

    def _whole(self, tokens: Any, limit: int | None) -> tuple[bytes, int]:
        """The ids, and where their last whole unit ends, in bytes."""
        data = TokenIds.of(tokens).data
        if limit is None:
            return data, len(data) // self._width * self._width
        if limit < 0:
            raise invalid(f"limit is {limit}; it must not be negative")
        return data, min(len(data), limit * ID_BYTES) // self._width * self._width

    def _walk(self, data: bytes, end: int) -> tuple[Node[S], list[tuple[S, int]], int]:
        """Down the tree as far as it agrees: the last node, the spans used, and the bytes."""
        node, at = self.root, 0
        parts: list[tuple[S, int]] = []
        while at < end:
            child = node._children.get(data[at : at + self._width])
            if child is None:
                break
            node = child
            if data.startswith(child._run, at, end):
                parts.append((child.span, child.units))
                at += len(child._run)
                continue
            units = self._common(data, at, end, child._run)
            parts.append((child.span, units))
            at += units * self._width
            break
        return node, parts, at

    def _common(self, data: bytes, at: int, end: int, run: bytes) -> int:
        """Units that a run and the ids have in common; the first one is known to be.

        Bisection: each half is compared as a whole, and only one of the halves is looked at again.
        """
        width = self._width
        low, high = 1, min(len(run), end - at) // width
        while low < high:
            middle = (low + high + 1) // 2
            if data.startswith(run[low * width : middle * width], at + low * width):
                low = middle
            else:
                high = middle - 1
        return low

    def _split(self, node: Node[S], units: int) -> Node[S]:
        """Puts the first units of a run into a new node above; returns that one."""
        parent = node.parent
        assert parent is not None
        upper_span, lower_span = node.span.split(units)
        cut = units * self._width
        end = node.end - (node.units - units) * self.unit
        upper: Node[S] = Node(parent, node._run[:cut], units, end, node.used)
        upper._span, node._span = upper_span, lower_span
        upper._locks = node._locks
        node._run = node._run[cut:]
        node.units -= units
        node.parent = upper
        upper._children[node._run[: self._width]] = node
        parent._children[upper._run[: self._width]] = upper
        self.nodes += 1
        if not upper._locks:
            self._order[upper] = None
        self._touch(upper)  # its parents must follow it
        return upper

    def _link(self, parent: Node[S], run: bytes, end: int, span: S) -> Node[S]:
        node: Node[S] = Node(parent, run, len(run) // self._width, end // ID_BYTES, self.now)
        node._span = span
        parent._children[run[: self._width]] = node
        self._order[node] = None
        self.nodes += 1
        self.tokens += node.units * self.unit
        self.pages += span.pages
        return node

    def _unlink(self, node: Node[S]) -> S:
        """Takes out a node without children and without locks."""
        assert node.parent is not None
        assert not node._children
        del node.parent._children[node._run[: self._width]]
        del self._order[node]
        node.parent = None
        self.nodes -= 1
        self.tokens -= node.units * self.unit
        self.pages -= node.span.pages
        return node.span

    def _cut(self, leaf: Node[S], pages: int) -> S:
        """Takes out a leaf, or only so many units at its end that at least `pages` come out."""
        held = leaf.span.pages
        if held <= pages:
            return self._unlink(leaf)
        units = leaf.units - -(-pages * leaf.units // held)
        if not units:
            return self._unlink(leaf)
        left, right = leaf.span.split(units)
        leaf._span = left
        gone = leaf.units - units
        leaf._run = leaf._run[: units * self._width]
        leaf.units = units
        leaf.end -= gone * self.unit
        self.tokens -= gone * self.unit
        self.pages -= right.pages
        return right

    def _own(self, node: Node[S]) -> None:
        """Refuses a node that left the tree, or is another tree's."""
        top = node
        while top.parent is not None:
            top = top.parent
        if top is not self.root:
            raise invalid(f"the prefix of {node.end} tokens was evicted, or is another tree's")

    def _lock(self, node: Node[S]) -> None:
        node.pins += 1
        step: Node[S] | None = node
        while step is not None:
            step._locks += 1
            if step._locks == 1 and step.parent is not None:
                self.locked_pages += step.span.pages
                del self._order[step]
            step = step.parent

    def _touch(self, node: Node[S]) -> None:
        """Moves a path to the end of the order, children before parents."""
        step = node
        while step.parent is not None:
            step.used = self.now
            if not step._locks:
                self._order.move_to_end(step)
            step = step.parent

    def _below(self, top: Node[S]) -> Iterator[Node[S]]:
        waiting = [top]
        while waiting:
            node = waiting.pop()
            yield node
            waiting.extend(reversed(node._children.values()))
