# SPDX-License-Identifier: MIT
"""A radix tree of prefixes over token ids: what is recorded, and what of a prompt is there already.

Ids are compared in whole *units*, the tokens that can be shared with one another request: fewer
would begin in the middle of a page. A node holds a run of units, and the caller's *span* for them
(the pages that hold their keys and values). The first unit of a run tells children apart:

    root --[system prompt: 6 units]--+--[question A: 2 units]
                                     +--[question B: 3 units]--[next turn: 4 units]

A run that a new prefix leaves in its middle is split; both halves get a part of the span. The node
stays the lower half, so that what was said of it (its end, a pin) stays true. Eviction takes
leaves, least recently used first (`prefix_node.Order`).

The tree knows nothing of memory and calls no driver. No locks: the caller's.
"""

from __future__ import annotations

import errno
import operator
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Generic

from pyvmem.errors import Busy
from pyvmem.kvcache import prefix_check
from pyvmem.kvcache.config import invalid
from pyvmem.kvcache.prefix_node import Inserted, Match, Node, Order, S, Span, walk
from pyvmem.kvcache.token_ids import ID_BYTES, TokenIds

__all__ = ["Inserted", "Match", "Node", "PrefixTree", "Span"]

_MAX_UNIT = 1 << 30  # tokens; what it stops is arithmetic on nonsense


class PrefixTree(Generic[S]):
    """Prefixes and the spans that hold them. Not thread-safe.

    Every method that takes tokens takes what `TokenIds` takes. Tokens behind the last whole unit
    are left out.

    Args:
        unit: tokens in a unit, at least 1.
        log: a journal's entries (journal.py), which get how each change is taken back; None: no
            such changes are asked for.

    Attributes:
        root: stands for the empty prefix.
        now: the time of the uses that follow, set by the caller in any unit (steps, seconds); it
            must not go back. Only `evict_unused` reads it.
        nodes, tokens, pages: in the tree.

    Raises:
        InvalidArgument: `unit` is no whole number or not positive.
    """

    def __init__(self, unit: int, log: list[Any] | None = None) -> None:
        try:
            self.unit = operator.index(unit)
        except TypeError:
            raise invalid(f"unit must be a whole number, not {unit!r}") from None
        if not 1 <= self.unit <= _MAX_UNIT:
            raise invalid(
                f"unit is {unit}; it must lie between 1 and {_MAX_UNIT} tokens", limit=_MAX_UNIT
            )
        self._width = self.unit * ID_BYTES
        self._log = log
        self._order: Order[S] = Order()
        self.root: Node[S] = Node(None, b"", 0, 0, 0)
        self.now = 0
        self.nodes = self.tokens = self.pages = 0

    # ---- looking up and recording ----------------------------------------------------------------

    def match(self, tokens: Any, limit: int | None = None, *, pin: bool = False) -> Match[S]:
        """The longest recorded prefix of `tokens`. Counts as a use of it.

        Args:
            tokens: the prompt.
            limit: compare so many tokens at most. An engine that must compute the last token gives
                the length less one.
            pin: pin `Match.node`. A run that matches in part is split there, so that the pin keeps
                no more than what matched.

        Cost: a dictionary look-up for each node on the path, and a comparison and at most one copy
        of the bytes matched. Without `pin`, nothing but the order of use changes.

        Raises:
            InvalidArgument: bad tokens, or a negative `limit`.
        """
        data, end = self._whole(tokens, limit)
        node, parts, at = walk(self.root, data, end, self._width)
        if pin and parts and parts[-1][1] < node.units:
            node = self._split(node, parts[-1][1])
            parts[-1] = (node.span, node.units)
        self._order.touch(node, self.now)
        if pin:
            self._order.lock(node)
        return Match(at // ID_BYTES, parts, node)

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
        node, parts, at = walk(self.root, data, end, self._width)
        if at < end:
            if parts and parts[-1][1] < node.units:
                node = self._split(node, parts[-1][1])
            span = make(at // self._width, end // self._width)
            node = self._link(node, data[at:end], end // ID_BYTES, span)
        self._order.touch(node, self.now)
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
        self._order.lock(node)

    def unpin(self, node: Node[S]) -> None:
        """Takes one `pin` back. Counts as a use.

        Raises:
            InvalidArgument: the node is not pinned.
        """
        self._own(node)
        if not node.pins:
            raise invalid(f"the prefix of {node.end} tokens is not pinned")
        self._order.unlock(node)
        self._order.touch(node, self.now)

    # ---- giving up -------------------------------------------------------------------------------

    def evict(self, pages: int) -> list[S]:
        """Takes leaves out, least recently used first, until so many pages are out of the tree.

        The last leaf is cut, not taken whole, where its first units are not needed for that.

        Returns their spans, in the order of eviction; fewer pages than asked for when the rest is
        pinned. The caller owns them. InvalidArgument: `pages` is negative.
        """
        if pages < 0:
            raise invalid(f"pages is {pages}; it must not be negative")
        spans: list[S] = []
        missing = pages
        while missing > 0 and (leaf := self._order.first()) is not None:
            spans.append(self._cut(leaf, missing))
            missing -= spans[-1].pages
        return spans

    def evict_unused(self, since: int) -> list[S]:
        """Takes everything out whose last use (`now` then) was before `since`, but what is pinned.

        Returns the spans; the caller owns them.
        """
        spans: list[S] = []
        while (leaf := self._order.first()) is not None and leaf.used < since:
            spans.append(self._unlink(leaf))
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
        below = [one for one in node.below() if one is not self.root]
        return [self._unlink(one) for one in reversed(below)]

    # ---- reports ---------------------------------------------------------------------------------

    @property
    def locked_pages(self) -> int:
        """Pages of pinned nodes and their ancestors."""
        return self._order.locked_pages

    @property
    def evictable_pages(self) -> int:
        """Pages that `evict` can give."""
        return self.pages - self.locked_pages

    def __len__(self) -> int:
        return self.nodes

    def __iter__(self) -> Iterator[Node[S]]:
        """All nodes but the root, parents before children."""
        nodes = self.root.below()
        next(nodes)
        return nodes

    def eviction_order(self) -> list[Node[S]]:
        """The nodes that may be evicted, first the one that is next."""
        return list(self._order.nodes)

    def check(self) -> list[str]:
        """Compares the tree with itself: every contradiction found, in words. Cost: all nodes."""
        return prefix_check.check(self)

    # ---- inside ----------------------------------------------------------------------------------

    def rebuild(self, pins: Iterable[Node[S]]) -> None:
        """Counts and orders again after changes were taken back; `pins` names a node for each."""
        nodes = list(self)
        self.nodes = len(nodes)
        self.tokens = sum(node.units for node in nodes) * self.unit
        self.pages = sum(node.span.pages for node in nodes)
        self._order.rebuild(self.root, nodes, pins)

    def _keep(self, node: Node[S], *names: str) -> None:
        """Notes attributes of a node before they change."""
        if self._log is not None:
            for name in names:
                self._log.append((setattr, node, name, getattr(node, name)))

    def _put(self, node: Node[S], child: Node[S]) -> None:
        """Makes a node the child for its run's first unit."""
        children, first = node._children, child._run[: self._width]
        if self._log is not None:
            before = children.get(first)
            undo = (
                (children.pop, first, None)
                if before is None
                else (children.__setitem__, first, before)
            )
            self._log.append(undo)
        children[first] = child

    def _take_out(self, node: Node[S]) -> None:
        """Takes a node from its parent's children."""
        assert node.parent is not None
        children, first = node.parent._children, node._run[: self._width]
        if self._log is not None:
            self._log.append((children.__setitem__, first, node))
        del children[first]

    def _whole(self, tokens: Any, limit: int | None) -> tuple[bytes, int]:
        """The ids, and where their last whole unit ends, in bytes."""
        data = TokenIds.of(tokens).data
        if limit is not None and limit < 0:
            raise invalid(f"limit is {limit}; it must not be negative")
        end = len(data) if limit is None else min(len(data), limit * ID_BYTES)
        return data, end // self._width * self._width

    def _split(self, node: Node[S], units: int) -> Node[S]:
        """Puts the first units of a run into a new node above; returns that one."""
        parent = node.parent
        assert parent is not None
        upper_span, lower_span = node.span.split(units)
        cut = units * self._width
        end = node.end - (node.units - units) * self.unit
        upper: Node[S] = Node(parent, node._run[:cut], units, end, node.used)
        self._keep(node, "_span")
        upper._span, node._span = upper_span, lower_span
        upper._locks = node._locks
        self._put(parent, upper)
        self._keep(node, "parent", "units", "_run")
        node.parent, node.units, node._run = upper, node.units - units, node._run[cut:]
        self._put(upper, node)
        self.nodes += 1
        self._order.touch(upper, self.now)  # its parents must follow it
        return upper

    def _link(self, parent: Node[S], run: bytes, end: int, span: S) -> Node[S]:
        """Adds a leaf; `touch` must follow."""
        node: Node[S] = Node(parent, run, len(run) // self._width, end, self.now)
        node._span = span
        self._put(parent, node)
        self.nodes += 1
        self.tokens += node.units * self.unit
        self.pages += span.pages
        return node

    def _unlink(self, node: Node[S]) -> S:
        """Takes out a node without children and without locks."""
        assert node.is_leaf
        self._take_out(node)
        del self._order.nodes[node]
        self._keep(node, "parent")
        node.parent = None
        self.nodes -= 1
        self.tokens -= node.units * self.unit
        self.pages -= node.span.pages
        return node.span

    def _cut(self, leaf: Node[S], pages: int) -> S:
        """Takes out a leaf, or only so many units at its end as `pages` are of its pages."""
        held = leaf.span.pages
        stay = leaf.units - -(-pages * leaf.units // held) if held > pages else 0
        if not stay:
            return self._unlink(leaf)
        self._keep(leaf, "_span", "_run", "units", "end")
        leaf._span, right = leaf.span.split(stay)
        gone = (leaf.units - stay) * self.unit
        leaf._run = leaf._run[: stay * self._width]
        leaf.units = stay
        leaf.end -= gone
        self.tokens -= gone
        self.pages -= right.pages
        return right

    def _own(self, node: Node[S]) -> None:
        """Refuses a node that left the tree, or is another tree's."""
        if node.top() is not self.root:
            raise invalid(f"the prefix of {node.end} tokens was evicted, or is another tree's")
