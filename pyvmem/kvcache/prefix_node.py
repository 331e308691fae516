# SPDX-License-Identifier: MIT
"""What a prefix tree is made of: nodes, the spans in them, and the order in which they go.

The order of use holds every node that may be evicted, and a node always follows its children: a use
moves the whole path to the end, the deepest node first. So the first of the order has no children,
and eviction needs no search. Pinned nodes and their ancestors stand outside it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import count as count_up
from typing import Generic, Protocol, TypeVar

from pyvmem.kvcache.config import invalid
from pyvmem.kvcache.token_ids import TokenIds

__all__ = ["Inserted", "Match", "Node", "Order", "S", "Span", "walk"]


class Span(Protocol):
    """What a tree keeps for a run of units: the caller's, opaque but for this."""

    @property
    def pages(self) -> int:
        """Pages that the span stands for; the same number for as long as it is in the tree."""
        ...

    def split(self: S, units: int) -> tuple[S, S]:
        """The span of the first `units` units and that of the rest; both are at least one unit.

        The pages of the two are those of the whole. The whole is not used again. Must not fail:
        `PrefixTree.evict` would lose the spans that it had taken out.
        """
        ...


S = TypeVar("S", bound=Span)


class Node(Generic[S]):
    """A run of units behind its parent's. A handle: only the tree changes it.

    Attributes:
        parent: None for the root, and for a node that left the tree.
        units: length of the run.
        end: tokens from the first of the prefix to the last of this run.
        pins: `PrefixTree.pin` calls on this node without their `unpin`.
        used: `PrefixTree.now` at the last use.
    """

    __slots__ = (
        *("_children", "_locks", "_run", "_span", "_stamp"),
        *("end", "parent", "pins", "units", "used"),
    )

    def __init__(self, parent: Node[S] | None, run: bytes, units: int, end: int, used: int) -> None:
        self.parent = parent
        self.units = units
        self.end = end
        self.pins = 0
        self.used = used
        self._run = run
        self._span: S | None = None
        self._children: dict[bytes, Node[S]] = {}  # by the first unit of their runs
        self._locks = 0  # pins of this node and of all below
        self._stamp = 0  # counts up with every use, children before parents

    @property
    def span(self) -> S:
        """The caller's payload. InvalidArgument for the root, which has none."""
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

    def top(self) -> Node[S]:
        """The root of its tree; of a node that left, the node."""
        node: Node[S] = self
        while node.parent is not None:
            node = node.parent
        return node

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

    def below(self) -> Iterator[Node[S]]:
        """This node and all behind it, parents before children."""
        waiting: list[Node[S]] = [self]
        while waiting:
            node = waiting.pop()
            yield node
            waiting.extend(reversed(node._children.values()))

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


class Order(Generic[S]):
    """The order of use, and the locks that keep nodes out of it.

    Attributes:
        locked_pages: pages of the nodes that are pinned or have a pinned node below.
    """

    def __init__(self) -> None:
        self.nodes: OrderedDict[Node[S], None] = OrderedDict()  # least recently used first
        self.locked_pages = 0
        self._stamps = count_up(1)

    def rebuild(self, root: Node[S], nodes: Iterable[Node[S]], pins: Iterable[Node[S]]) -> None:
        """Makes pins, locks and order again.

        Args:
            root: of the tree.
            nodes: all others.
            pins: of these, one for each pin.
        """
        every = list(nodes)
        for node in (root, *every):
            node.pins = node._locks = 0
        self.locked_pages = 0
        for node in pins:
            node.pins += 1
            for one in (root, *node.path()):
                one._locks += 1
        self.locked_pages = sum(node.span.pages for node in every if node._locks)
        free = sorted((node for node in every if not node._locks), key=lambda n: n._stamp)
        self.nodes = OrderedDict.fromkeys(free)

    def first(self) -> Node[S] | None:
        """The leaf to be evicted next."""
        return next(iter(self.nodes), None)

    def touch(self, node: Node[S], now: int) -> None:
        """Moves a path to the end, children before parents."""
        step = node
        while step.parent is not None:
            step.used = now
            step._stamp = next(self._stamps)
            if not step._locks:
                self.nodes[step] = None
                self.nodes.move_to_end(step)
            step = step.parent

    def lock(self, node: Node[S]) -> None:
        """Pins a node, and takes it and its ancestors out."""
        node.pins += 1
        step: Node[S] | None = node
        while step is not None:
            step._locks += 1
            if step._locks == 1 and step.parent is not None:
                self.locked_pages += step.span.pages
                del self.nodes[step]
            step = step.parent

    def unlock(self, node: Node[S]) -> None:
        """Takes a pin back; `touch` must follow, which puts the free part of the path in."""
        node.pins -= 1
        step: Node[S] | None = node
        while step is not None:
            step._locks -= 1
            if not step._locks and step.parent is not None:
                self.locked_pages -= step.span.pages
            step = step.parent


def walk(
    root: Node[S], data: bytes, end: int, width: int
) -> tuple[Node[S], list[tuple[S, int]], int]:
    """Down the tree for as far as it agrees with `data`.

    Args:
        root: where to begin.
        data: ids as bytes.
        end: bytes of them to look at, whole units.
        width: bytes of a unit.

    Returns:
        The last node; the spans on the way, each with the units of it that agree; the bytes that
        agree.
    """
    node, at = root, 0
    parts: list[tuple[S, int]] = []
    while at < end:
        child = node._children.get(data[at : at + width])
        if child is None:
            break
        node = child
        if data.startswith(child._run, at, end):
            parts.append((child.span, child.units))
            at += len(child._run)
            continue
        units = _common(data, at, end, child._run, width)
        parts.append((child.span, units))
        at += units * width
        break
    return node, parts, at


def _common(data: bytes, at: int, end: int, run: bytes, width: int) -> int:
    """Units that a run and the ids have in common; the first one is known to be.

    Bisection: each half is compared as a whole, and only one of the halves is looked at again.
    """
    low, high = 1, min(len(run), end - at) // width
    while low < high:
        middle = (low + high + 1) // 2
        if data.startswith(run[low * width : middle * width], at + low * width):
            low = middle
        else:
            high = middle - 1
    return low
