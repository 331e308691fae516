# SPDX-License-Identifier: MIT
"""Leases: a match keeps its prefix from eviction until it is used or dropped.

A match may be dropped in any thread, and by Python's collector at any line, also in the middle of a
call of the cache. So dropping only puts the lease aside; the cache's next call that looks at
prefixes gives it up.

On several ranks (lockstep.py) what a call answers must not depend on when a collector runs: there a
lease ends when the match is used or released, and at the latest with the next `step`.
"""

from __future__ import annotations

import errno
from collections import deque
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Any

from pyvmem.errors import BadHandle
from pyvmem.kvcache.prefix_node import Node
from pyvmem.kvcache.prefix_tree import PrefixTree
from pyvmem.kvcache.spans import Span

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["Lease", "Leases", "PrefixEvicted", "PrefixMatch"]


class PrefixEvicted(BadHandle):
    """A match whose lease was lost, and whose prefix is not recorded any more: match again.

    `KVCache.trim` with ``prefixes=True`` takes leases; `PrefixMatch.release` gives one back; of a
    `ParallelKVCache` they end with the next `step`.
    """


@dataclass(eq=False)
class Lease:
    """A pin of a prefix.

    Attributes:
        node: the last node of it.
        held: the pin is there.
        dropped: nobody will use it.
    """

    node: Node[Span]
    held: bool = True
    dropped: bool = False


@dataclass(eq=False)
class PrefixMatch:
    """What of a prompt was recorded at the time of `KVCache.match`: a lease of it.

    Until the match is used by `alloc_prefix`, released or collected, its pages are not evicted. A
    context manager, which releases it.

    Attributes:
        length: tokens, a multiple of the sharing unit; 0: nothing.
    """

    length: int
    _lease: Lease = field(repr=False)
    _owner: Leases = field(repr=False)

    def release(self) -> None:
        """Gives the prefix free for eviction; again, or after its use: nothing."""
        self._owner.drop(self._lease)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()

    def __del__(self) -> None:
        owner: Leases | None = getattr(self, "_owner", None)
        if owner is not None and not owner.lockstep:
            owner.drop(self._lease)


class Leases:
    """The leases of a cache's prefixes. The caller holds the cache's lock, but for `drop`.

    Args:
        tree: the prefixes.
        log: a journal's entries (journal.py), which get how each change is taken back.
        lockstep: the cache's answers are those of other ranks.
    """

    def __init__(self, tree: PrefixTree[Span], log: list[Any], *, lockstep: bool) -> None:
        self.lockstep = lockstep
        self._log = log
        self._tree = tree
        self._open: dict[Lease, None] = {}
        self._dropped: deque[Lease] = deque()

    def __bool__(self) -> bool:
        self.collect()
        return bool(self._open)

    def has(self, lease: Lease) -> bool:
        """Whether a lease keeps its node; one that an exception took back does not."""
        return lease in self._open

    def add(self, node: Node[Span]) -> Lease:
        """A lease of a node that the caller has pinned for it, or of a root, which needs no pin."""
        lease = Lease(node, node.parent is not None)
        if lease.held:
            self._log.append((self._open.pop, lease, None))
            self._open[lease] = None
        return lease

    def drop(self, lease: Lease) -> None:
        """Puts a lease aside; from any thread, at any time."""
        if lease.held and not lease.dropped:
            lease.dropped = True
            self._dropped.append(lease)

    def collect(self) -> None:
        """Gives up what was dropped."""
        while self._dropped:
            self.end(self._dropped.popleft())

    def end(self, lease: Lease) -> None:
        """Gives one lease up; again: nothing."""
        if lease.held and lease in self._open:
            self._log.append((self._open.__setitem__, lease, None))
            del self._open[lease]  # from here on it is none of the pins that are counted again
            lease.held = False
            self._tree.unpin(lease.node)

    def end_all(self) -> None:
        """Gives every lease up."""
        for lease in list(self._open):
            self.end(lease)

    def rebuilt(self) -> list[Node[Span]]:
        """The nodes of the leases that are there, after an exception from outside."""
        for lease in self._open:
            lease.held = True
        self._dropped.extend(lease for lease in self._open if lease.dropped)
        return [lease.node for lease in self._open]

    def nodes(self) -> list[Node[Span]]:
        """The leased nodes, once for each lease."""
        self.collect()
        return [lease.node for lease in self._open]

    def kept(self) -> dict[Node[Span], None]:
        """All nodes on the way to leased ones, each once, in order."""
        return {one: None for node in self.nodes() for one in node.path()}


def evicted(length: int) -> PrefixEvicted:
    """What is raised for a match that cannot be used any more."""
    return PrefixEvicted(
        f"the match of {length} tokens has lost its lease and its prefix was evicted; match again",
        errno=errno.EBADF,
        op="KVCache",
    )
