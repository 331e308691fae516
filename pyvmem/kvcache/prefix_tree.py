# SPDX-License-Identifier: MIT
"""A radix tree over token ids: recorded prefixes, and the longest match of a prompt.

All nodes except roots are in a list ordered by last use. A use moves the whole path to the end,
deepest node first, so a node follows its children, and eviction normally finds a leaf at the front.
A node at the front that cannot be evicted (pinned, an ancestor of a pinned node, or out of order
after an interrupted use) is moved to the end, so the ancestors of a pinned node need no marking.

Ids are compared in *units*. A unit is the smallest number of tokens that requests can share; fewer
tokens would end in the middle of a page. A node holds a run of units, and the caller's *span* for
them (the pages with their keys and values). Children are keyed by the first unit of their runs:

    root --[system prompt: 6 units]--+--[question A: 2 units]
                                     +--[question B: 3 units]--[next turn: 4 units]

Every namespace (`TokenIds.namespace`) has its own root; the order, the counts and eviction cover
all namespaces. If a new prefix diverges in the middle of a run, the run is split, and each half
gets its part of the span. The old node becomes the lower half, so that its end and its pins stay
valid.

Except for changes to the order, every change is a list of edits (see `Outcome`) made by one C call.
The tree does not manage memory and makes no driver calls. Not thread-safe: the caller must hold a
lock.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from pyvmem import _native
from pyvmem.kvcache.checks import bounded, invalid

__all__ = ["Change", "ID_BYTES", "Inserted", "MAX_ID", "Match", "Node", "PrefixTree", "TokenIds"]

ID_BYTES = 4
MAX_ID = (1 << 32) - 1


class TokenIds:
    """A sequence of token ids in the form that `PrefixTree` compares. Immutable.

    Create it once per prompt to use it in several calls: converting the ids takes longer than
    comparing them (`vmem bench prefixes` measures both).

    Args:
        tokens: ids from 0 to 2**32 - 1: a list or another sequence of whole numbers, an
            ``array.array``, a one-dimensional numpy array or torch tensor of integers (a GPU tensor
            is copied, which waits for its stream), or a `TokenIds`.
        namespace: whatever the keys and values depend on in addition to the ids, such as an
            adapter, an image or a tenant. The same ids in another namespace are a different prefix.
            None, the default, is also a namespace; but for a `TokenIds`, None keeps its own
            namespace.

    Raises:
        InvalidArgument: an id out of range or not a whole number, more than one dimension, or text;
            a namespace that cannot be hashed, or that differs from the namespace of the `TokenIds`.
    """

    __slots__ = ("data", "namespace")

    data: bytes  #: the ids as native 32-bit words
    namespace: Hashable

    def __init__(self, tokens: Any, namespace: Hashable = None) -> None:
        self.data = _encode(tokens)
        self.namespace = _namespace(tokens, namespace)

    @classmethod
    def of(cls, tokens: Any, namespace: Hashable = None) -> TokenIds:
        """Returns `tokens` itself if it is a `TokenIds` in that namespace, or converts it."""
        if isinstance(tokens, cls) and (namespace is None or namespace == tokens.namespace):
            return tokens
        return cls(tokens, namespace)

    @classmethod
    def from_bytes(cls, data: bytes, namespace: Hashable = None) -> TokenIds:
        """Creates ids from native 32-bit words.

        Raises InvalidArgument if the size of `data` is not a multiple of 4 bytes.
        """
        if len(data) % ID_BYTES:
            raise invalid(f"{len(data)} bytes are not a whole number of ids of {ID_BYTES} bytes")
        out = object.__new__(cls)
        out.data = bytes(data)
        out.namespace = _namespace(data, namespace)
        return out

    def __len__(self) -> int:
        return len(self.data) // ID_BYTES

    def __iter__(self) -> Iterator[int]:
        return iter(memoryview(self.data).cast("I"))

    def __add__(self, more: Any) -> TokenIds:
        """Returns a copy of these ids followed by `more`."""
        return TokenIds.from_bytes(self.data + TokenIds.of(more).data, self.namespace)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, TokenIds):
            return NotImplemented
        return self.data == other.data and self.namespace == other.namespace

    def __hash__(self) -> int:
        return hash((self.data, self.namespace))

    def __repr__(self) -> str:
        of = "" if self.namespace is None else f" of {self.namespace!r:.40}"
        return f"<TokenIds: {len(self)} ids{of}>"


def _namespace(tokens: Any, namespace: Hashable) -> Hashable:
    """Returns the namespace passed with the ids or, if None, their own."""
    try:
        hash(namespace)
    except TypeError:
        raise invalid(f"namespace {_brief(namespace)} cannot be hashed") from None
    try:
        same = bool(namespace == namespace)
    except (TypeError, ValueError, RuntimeError):
        same = False
    if not same:  # such as NaN or an array, which cannot serve as a key
        raise invalid(f"namespace {_brief(namespace)} does not equal itself")
    own = tokens.namespace if isinstance(tokens, TokenIds) else None
    if own is None or namespace is None or namespace == own:
        return own if namespace is None else namespace
    raise invalid(f"namespace {namespace!r:.40}: the ids belong to {own!r:.40}")


def _encode(tokens: Any) -> bytes:
    if isinstance(tokens, TokenIds):
        return tokens.data
    if hasattr(tokens, "is_floating_point"):  # torch tensor; numpy has no bfloat16
        if tokens.is_floating_point():
            raise invalid(f"token ids must be whole numbers, not a tensor of {tokens.dtype}")
        tokens = tokens.detach().cpu().numpy()
    if hasattr(tokens, "__array_interface__"):
        return _encode_numpy(tokens)
    # Bytes could be ids or text; for ids, the caller must pass an array.
    if isinstance(tokens, (str, bytes, bytearray)) or not isinstance(tokens, (Sequence, array)):
        raise invalid(f"token ids must be a sequence of whole numbers, not {_brief(tokens)}")
    try:
        return array("I", tokens).tobytes()
    except (TypeError, OverflowError):
        raise _wrong(tokens) from None


def _encode_numpy(tokens: Any) -> bytes:
    if tokens.dtype.kind not in "iu":
        raise invalid(f"token ids must be whole numbers, not an array of {tokens.dtype}")
    if tokens.ndim != 1:
        raise invalid(f"token ids must have one dimension, not the shape {tuple(tokens.shape)}")
    if tokens.dtype.str[1:] != "u4" and len(tokens):
        for bound in (int(tokens.min()), int(tokens.max())):
            if not 0 <= bound <= MAX_ID:
                raise _out_of_range(bound)
    return bytes(tokens.astype("=u4", copy=False).tobytes())


def _wrong(tokens: Sequence[Any]) -> Exception:
    """Returns the error for an invalid sequence; names the first bad element."""
    for place, value in enumerate(tokens):
        try:
            array("I", [value])
        except OverflowError:
            return _out_of_range(int(value), f"token id {place}")
        except TypeError:
            return invalid(f"token id {place} is {_brief(value)}; it must be a whole number")
    return invalid("the token ids changed while they were read")


def _out_of_range(value: int, what: str = "a token id") -> Exception:
    return invalid(f"{what} is {value}; it must be between 0 and {MAX_ID}", limit=MAX_ID)


def _brief(value: Any) -> str:
    return f"{value!r:.40} of type {type(value).__name__}"


class Change(NamedTuple):
    """Units that were recorded or evicted.

    Attributes:
        stored: True if recorded, False if evicted.
        ids: the prefix that ends with the units.
        first: index of the first changed unit; earlier units are unchanged.
        number: sequence number of the change, starting at 0.
    """

    stored: bool
    ids: TokenIds
    first: int
    number: int


class Span(Protocol):
    """The caller's payload for a run of units; the tree uses only these members."""

    @property
    def pages(self) -> int:
        """The number of pages in the span; must not change while the span is in the tree."""

    def split(self: S, units: int) -> tuple[S, S]:
        """Splits off the first `units` units; neither of the two spans returned is empty.

        Together they hold the pages of the original, which is not used afterwards. Must not fail,
        or `PrefixTree.evict` would lose spans already evicted.
        """


S = TypeVar("S", bound=Span)


class Node(Generic[S]):
    """A run of units that continues its parent's run. Changed only by the tree.

    Attributes:
        namespace: namespace of the prefix; the root's key.
        parent: the parent node; None for a root, and for an evicted node.
        units: length of the run, in units.
        end: number of tokens from the start of the prefix to the end of this run.
        pins: number of pins; a pinned node is not evicted.
        span: the caller's payload. Raises InvalidArgument for a root, which has none.
    """

    __slots__ = ("_children", "_run", "end", "namespace", "parent", "pins", "span", "units")

    span: S

    def __init__(
        self, parent: Node[S] | None, run: bytes, units: int, end: int, namespace: Hashable = None
    ) -> None:
        self.parent = parent
        self.namespace: Hashable = namespace if parent is None else parent.namespace
        self.units = units
        self.end = end
        self.pins = 0
        self._run = run
        self._children: dict[bytes, Node[S]] = {}  # keyed by the first unit of their runs

    def __getattr__(self, name: str) -> Any:
        if name == "span":
            raise invalid("the root of a prefix tree has no span")
        raise AttributeError(name)

    @property
    def is_leaf(self) -> bool:
        """True if no recorded prefix continues from this node."""
        return not self._children

    def path(self) -> list[Node[S]]:
        """Returns the nodes on the path to this node, without the root."""
        nodes = []
        node: Node[S] = self
        while node.parent is not None:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]

    def tokens(self) -> TokenIds:
        """Returns the prefix from its start to `end`."""
        return TokenIds.from_bytes(b"".join(node._run for node in self.path()), self.namespace)

    def __repr__(self) -> str:
        return f"<Node: {self.units} units, to token {self.end}, {len(self._children)} children>"


@dataclass(frozen=True)
class Match(Generic[S]):
    """The recorded part of a prompt.

    Attributes:
        length: number of tokens, a multiple of the unit.
        parts: the spans in order, each with the number of its units that match: all of them, except
            perhaps in the last span.
        node: the last span's node; the root if nothing matches.
    """

    length: int
    parts: list[tuple[S, int]]
    node: Node[S]


@dataclass(frozen=True)
class Inserted(Generic[S]):
    """The result of `PrefixTree.insert`.

    Attributes:
        node: the node that holds the last full unit; the root if there is none.
        length: number of the prefix's tokens that the tree now holds, a multiple of the unit.
        start: number of its tokens that the tree held before; `length` if nothing is new.
    """

    node: Node[S]
    length: int
    start: int


def _common(data: bytes, at: int, end: int, run: bytes, width: int) -> int:
    """Counts the units that a run and the ids have in common; the first unit must match.

    This is a bisection: each comparison halves the remaining range.
    """
    low, high = 1, min(len(run), end - at) // width
    while low < high:
        middle = (low + high + 1) // 2
        if data.startswith(run[low * width : middle * width], at + low * width):
            low = middle
        else:
            high = middle - 1
    return low


def _change(edits: list[list[Any]]) -> None:
    """Applies edits without recording how to undo them."""
    _native.change([False, edits])


_MAX_UNIT = 1 << 30  # tokens; a sanity limit


class PrefixTree(Generic[S]):
    """Recorded prefixes and the spans that hold their rows. Not thread-safe.

    A `tokens` argument may be anything that `TokenIds` accepts. Tokens past the last full unit are
    ignored.

    Args:
        unit: tokens per unit, at least 1.
        change: applies edits to the tree, such as `Journal.change`; None: edits cannot be undone.

    Attributes:
        root: the root of prefixes without a namespace.
        roots: roots, keyed by a 1-tuple of the namespace, since an edit's key must not be a str. A
            root other than `root` exists only while it has a prefix.
        tokens, pages: numbers of tokens and pages in the tree.
        changes: changes not yet dropped by `changes_after`; None: not collected.
        dropped: number of earlier changes that have been dropped.
        told: number of the last change that the caller has passed on; set by the caller.

    Raises:
        InvalidArgument: `unit` is not a whole number from 1 to 2**30.
    """

    def __init__(self, unit: int, change: Callable[[list[list[Any]]], None] | None = None) -> None:
        self.unit = bounded("unit", unit, 1, _MAX_UNIT)
        self._width = self.unit * ID_BYTES
        self._change = change or _change
        self._order: OrderedDict[Node[S], None] = OrderedDict()  # least recently used first
        self.root: Node[S] = Node(None, b"", 0, 0)
        self.roots: dict[tuple[Hashable], Node[S]] = {(None,): self.root}
        self.tokens = self.pages = 0
        self.changes: list[Change] | None = None
        self.dropped, self.told = 0, -1

    # ---- looking up and recording ----------------------------------------------------------------

    def match(self, tokens: Any, limit: int | None = None) -> Match[S]:
        """Finds the longest recorded prefix of `tokens` and marks it as used.

        This takes one dictionary lookup per node on the path, and compares the matched bytes and
        copies them at most once. It changes only the order of last use.

        Args:
            tokens: the prompt.
            limit: maximum number of tokens to compare. An engine that must compute the last token
                passes the prompt's length minus 1.

        Raises:
            InvalidArgument: bad tokens, or a negative `limit`.
        """
        found = self._find(*self._whole(tokens, limit))
        self.touch(found.node)
        return found

    def _find(self, ids: TokenIds, end: int) -> Match[S]:
        """Finds the longest recorded prefix of the first `end` bytes of `ids`."""
        data, width, at = ids.data, self._width, 0
        node = self.roots.get((ids.namespace,))
        if node is None:
            node, end = self.root, 0  # nothing is recorded in this namespace
        parts: list[tuple[S, int]] = []
        while at < end and (child := node._children.get(data[at : at + width])) is not None:
            node, run, units = child, child._run, child.units
            if not data.startswith(run, at, end):
                units = _common(data, at, end, run, width)
            parts.append((node.span, units))
            at += units * width
            if units < node.units:
                break
        return Match(at // ID_BYTES, parts, node)

    def insert(
        self,
        tokens: Any,
        make: Callable[[int, int], S],
        found: Match[S] | None = None,
        limit: int | None = None,
    ) -> Inserted[S]:
        """Records a prefix and marks it as used.

        Args:
            tokens: the prefix, from its first token.
            make: if any units are new, called once with their range, (first, last + 1); returns
                their span, which the tree then owns.
            found: the result of `match` for the same tokens, if nothing was recorded or evicted
                since.
            limit: maximum number of tokens to record.

        Raises:
            InvalidArgument: bad tokens, or a negative `limit`.
            Any exception raised by `make`; the tree is then unchanged.
        """
        ids, end = self._whole(tokens, limit)
        if found is None:
            found = self._find(ids, end)
        node, parts, at = found.node, found.parts, found.length * ID_BYTES
        if at < end:
            first, last = at // self._width, end // self._width
            span = make(first, last)
            edits: list[list[Any]] = []
            if not parts:
                key = (ids.namespace,)
                node = self.roots.get(key) or Node(None, b"", 0, 0, ids.namespace)
                edits.append([self.roots, key, node])
            elif parts[-1][1] < node.units:
                node = self._split(node, parts[-1][1], edits)
            parent, run = node, ids.data[at:end]
            node = Node(parent, run, last - first, end // ID_BYTES)
            node.span = span
            edits += (
                [parent._children, run[: self._width], node],
                [self._order, node, None],
                [self, "tokens", self.tokens + node.units * self.unit],
                [self, "pages", self.pages + span.pages],
            )
            self._note(True, node, 0, edits)
            self._change(edits)
        self.touch(node)
        return Inserted(node, end // ID_BYTES, at // ID_BYTES)

    # ---- pins ------------------------------------------------------------------------------------

    def cut_at(self, node: Node[S], length: int) -> Node[S]:
        """Returns the node of a path that ends with the last full unit within `length`.

        Returns the root if there is none. Splits a run that continues past that unit, so that a pin
        on the node keeps no more than needed.
        """
        end = length // self.unit * self.unit
        while node.parent is not None and node.parent.end >= end:
            node = node.parent
        if node.end > end:
            edits: list[list[Any]] = []
            node = self._split(node, node.units - (node.end - end) // self.unit, edits)
            self._change(edits)
            self.touch(node)
        return node

    def pin(self, node: Node[S]) -> None:
        """Protects a node and its ancestors from eviction until `unpin`. Pins are counted.

        Raises:
            InvalidArgument: the node was evicted, or is a root.
        """
        self._own(node)
        self._change(self.pin_edits([node], ()))

    def unpin(self, node: Node[S]) -> None:
        """Undoes one `pin` and marks the prefix as used.

        Raises:
            InvalidArgument: the node is not pinned.
        """
        self._own(node)
        if not node.pins:
            raise invalid(f"the prefix of {node.end} tokens is not pinned")
        self._change(self.pin_edits((), [node]))
        self.touch(node)

    def pin_edits(self, new: Iterable[Node[S]], gone: Iterable[Node[S]]) -> list[list[Any]]:
        """Returns the edits that pin and unpin nodes of this tree, once per occurrence."""
        pins: dict[Node[S], int] = {}
        for nodes, by in ((new, 1), (gone, -1)):
            for node in nodes:
                pins[node] = pins.get(node, node.pins) + by
        return [[node, "pins", count] for node, count in pins.items()]

    def touch(self, node: Node[S]) -> None:
        """Marks a path as used: moves it to the end of the order, children before parents."""
        while node.parent is not None:
            self._order.move_to_end(node)
            node = node.parent

    # ---- evicting -------------------------------------------------------------------------------

    def evict(self, pages: int, *, whole: bool = False) -> list[S]:
        """Evicts leaves, least recently used first, until `pages` pages have left the tree.

        Unless `whole` is set, the last leaf loses only as many units from its end as necessary.
        Returns the evicted spans, in order, which the caller then owns. They have fewer pages than
        requested if everything else is pinned. Raises InvalidArgument if `pages` is negative.
        """
        if pages < 0:
            raise invalid(f"pages is {pages}; it must not be negative")
        spans: list[S] = []
        missing, order = pages, self._order
        kept = 0  # consecutive nodes that cannot be evicted
        while missing > 0 and kept < len(order):
            node = next(iter(order))
            if node._children or node.pins:
                order.move_to_end(node)
                kept += 1
                continue
            spans.append(self._unlink(node) if whole else self._cut(node, missing))
            missing -= spans[-1].pages
            kept = 0
        return spans

    # ---- reports ---------------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self._order)

    def __contains__(self, node: Node[S]) -> bool:
        """Returns whether the node is in this tree and is not a root."""
        return node in self._order

    def __iter__(self) -> Iterator[Node[S]]:
        """Yields all nodes except the roots, parents before children."""
        waiting = list(reversed(self.roots.values()))
        while waiting:
            node = waiting.pop()
            if node.parent is not None:
                yield node
            waiting.extend(reversed(node._children.values()))

    def check(self) -> list[str]:
        """Returns a description of each violated invariant of the tree. Visits all nodes."""
        found: list[str] = []
        nodes = list(self)
        for node in nodes:
            found += [f"{node!r}: {text}" for text in self._check(node)]
        for name, value in (
            ("tokens", sum(node.units for node in nodes) * self.unit),
            ("pages", sum(node.span.pages for node in nodes)),
        ):
            if getattr(self, name) != value:
                found.append(f"{name} is {getattr(self, name)}; the nodes have {value}")
        if self._order.keys() != set(nodes):
            found.append(f"the order of use has {len(self)} nodes, the tree {len(nodes)}")
        for (namespace,), root in self.roots.items():
            of = "" if namespace is None else f" of {namespace!r:.40}"
            if root.namespace != namespace or root.parent is not None:
                found.append(f"the root{of} is not the root of its namespace")
            if root is not self.root and root.is_leaf:
                found.append(f"the root{of} has no prefix")
        return found

    # ---- inside ----------------------------------------------------------------------------------

    def _check(self, node: Node[S]) -> Iterator[str]:
        """Yields a description of each violated invariant of a node."""
        parent, width = node.parent, self._width
        assert parent is not None  # nodes are reached through their parents
        if node.units < 1 or len(node._run) != node.units * width:
            yield f"{len(node._run)} bytes of tokens are not {node.units} units, or none"
        if parent._children.get(node._run[:width]) is not node:
            yield "its parent lists it under another unit"
        if node.end != parent.end + node.units * self.unit:
            yield f"its parent ends at token {parent.end}"
        if node.namespace != parent.namespace:
            yield f"its namespace is {node.namespace!r:.40}, its parent's differs"

    def _note(self, stored: bool, node: Node[S], skip: int, edits: list[list[Any]]) -> None:
        """Adds the edit that appends a leaf's units, without the first `skip`, to `changes`."""
        changes = self.changes
        if changes is not None:
            first = node.end // self.unit - node.units + skip
            change = Change(stored, node.tokens(), first, self.dropped + len(changes))
            edits.append([changes, slice(len(changes), None), [change]])

    def changes_after(self, number: int) -> list[Change]:
        """Returns the changes after `number` and drops the earlier ones.

        The first call starts collecting changes and reports everything recorded.
        """
        changes = self.changes
        if changes is None:
            changes = [
                Change(True, node.tokens(), node.end // self.unit - node.units, at)
                for at, node in enumerate(self)
            ]
        after = changes[max(0, number + 1 - self.dropped) :]
        dropped = self.dropped + len(changes) - len(after)
        self._change([[self, "changes", after], [self, "dropped", dropped]])
        return after[:]

    def _whole(self, tokens: Any, limit: int | None) -> tuple[TokenIds, int]:
        """Returns the ids, and the end of their last full unit, in bytes."""
        ids = tokens if isinstance(tokens, TokenIds) else TokenIds(tokens)
        if limit is not None and limit < 0:
            raise invalid(f"limit is {limit}; it must not be negative")
        end = len(ids.data) if limit is None else min(len(ids.data), limit * ID_BYTES)
        return ids, end // self._width * self._width

    def _split(self, node: Node[S], units: int, edits: list[list[Any]]) -> Node[S]:
        """Appends edits that move a run's first units into a new parent node; returns that node.

        The caller must `touch` the result, so that it precedes its ancestors in the order.
        """
        parent = node.parent
        assert parent is not None
        width = self._width
        cut = units * width
        end = node.end - (node.units - units) * self.unit
        upper: Node[S] = Node(parent, node._run[:cut], units, end)
        upper.span, lower = node.span.split(units)
        upper._children[node._run[cut : cut + width]] = node
        edits += (
            [parent._children, node._run[:width], upper],
            [self._order, upper, None],
            [node, "span", lower],
            [node, "parent", upper],
            [node, "units", node.units - units],
            [node, "_run", node._run[cut:]],
        )
        return upper

    def _unlink(self, node: Node[S]) -> S:
        """Removes a node that has no children and no pins; returns its span."""
        parent = node.parent
        assert parent is not None
        edits: list[list[Any]] = [
            [parent._children, node._run[: self._width], ...],
            [node, "parent", None],
            [self._order, node, ...],
            [self, "tokens", self.tokens - node.units * self.unit],
            [self, "pages", self.pages - node.span.pages],
        ]
        self._note(False, node, 0, edits)
        if len(parent._children) == 1 and parent.parent is None and parent is not self.root:
            edits.append([self.roots, (parent.namespace,), ...])
        self._change(edits)
        return node.span

    def _cut(self, leaf: Node[S], pages: int) -> S:
        """Removes a leaf, or just enough of its last units for `pages` pages; returns the span."""
        held = leaf.span.pages
        stay = leaf.units - -(-pages * leaf.units // held) if held > pages else 0
        if not stay:
            return self._unlink(leaf)
        left, right = leaf.span.split(stay)
        gone = (leaf.units - stay) * self.unit
        edits: list[list[Any]] = [
            [leaf, "span", left],
            [leaf, "_run", leaf._run[: stay * self._width]],
            [leaf, "units", stay],
            [leaf, "end", leaf.end - gone],
            [self, "tokens", self.tokens - gone],
            [self, "pages", self.pages - right.pages],
        ]
        self._note(False, leaf, stay, edits)
        self._change(edits)
        return right

    def _own(self, node: Node[S]) -> None:
        """Raises InvalidArgument for a root, an evicted node, or a node of another tree."""
        if node not in self:
            raise invalid(f"the prefix of {node.end} tokens is not in this tree, or was evicted")
