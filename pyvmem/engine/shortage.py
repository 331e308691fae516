# SPDX-License-Identifier: MIT
"""What every call returns that does not find the memory, slots or mappings it needs."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Shortage"]


@dataclass(frozen=True)
class Shortage:
    """Something is short; nothing changed, but idle memory may have been reclaimed.

    Every call of `RequestCache` that can be short returns one of these, and raises nothing:
    ``isinstance(result, Shortage)`` is the same test for all. It is true, so
    ``while short := cache.extend(...):`` preempts until there is enough.

    Attributes:
        needed: bytes that the call needs beyond what the requests it names have.
        available: bytes that it could have had, reclaimable memory included.
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
        """What is short: ``"slots"``, ``"memory"`` or ``"mappings"``.

        Mappings: by the cache's count memory is not short. The driver has no room for more of them;
        or others have taken the device's memory; or an earlier `admit` or `prepare` was promised
        it; or (rarely) pages came back while the call was on its way, and it may be made again.
        """
        if self.slots:
            return "slots"
        return "memory" if self.missing else "mappings"

    def __str__(self) -> str:
        """Names what lacks."""
        if self.slots:
            return f"short of slots: {self.slots} missing; max_batch or other requests limit them"
        if self.missing:
            beyond = f", of at most {self.limit}" if self.never else ""
            return (
                f"short of memory: {self.needed} bytes needed{beyond}, {self.available} available, "
                f"{self.missing} missing"
            )
        return f"short of mappings, or of the device's memory, for {self.needed} bytes"
