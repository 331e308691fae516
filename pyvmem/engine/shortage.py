# SPDX-License-Identifier: MIT
"""The one answer of every call that did not find what it needs."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Shortage"]


@dataclass(frozen=True)
class Shortage:
    """Something is short; nothing changed, except that memory of no request may have been given up.

    Every call of `RequestCache` that can be short answers with one of these, and raises nothing.
    It is true, so ``while short := cache.extend(...):`` preempts until there is enough.

    Attributes:
        needed: bytes of memory that the call needs beside what the requests it names have.
        available: bytes that it could have had, idle memory that can be reclaimed included.
        limit: bytes that the cache may have in all.
        largest: bytes that the largest request of the call needs in all, were it alone.
        slots: slots that were missing.
    """

    needed: int
    available: int
    limit: int
    largest: int
    slots: int = 0

    @property
    def missing(self) -> int:
        """Bytes that other requests would have to give up; 0: memory is not what is short."""
        return max(0, self.needed - self.available)

    @property
    def never(self) -> bool:
        """Whether a request needs more than the whole cache: preempting others does not help."""
        return self.largest > self.limit

    @property
    def what(self) -> str:
        """``"slots"``, ``"memory"``, or ``"mappings"``: the driver has no room for more of them."""
        if self.slots:
            return "slots"
        return "memory" if self.missing else "mappings"
