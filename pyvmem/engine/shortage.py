# SPDX-License-Identifier: MIT
"""The result of a call that ran out of memory, slots or mappings."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Shortage"]


@dataclass(frozen=True)
class Shortage:
    """Reports that a call did not find enough memory, slots or mappings.

    The call changed nothing, except that it may have reclaimed idle memory. Calls of `RequestCache`
    return a `Shortage` instead of raising, so one test works for all of them: ``isinstance(result,
    Shortage)``. A `Shortage` is truthy, so a loop ``while short := cache.extend(...):`` can preempt
    requests until there is enough.

    Attributes:
        needed: bytes that the call needs in addition to the pages that its requests already have.
        available: bytes that were available to the call, including reclaimable memory.
        limit: maximum bytes that the cache may use.
        largest: total bytes that the largest request in the call needs.
        slots: number of missing slots.
    """

    needed: int
    available: int
    limit: int
    largest: int
    slots: int = 0

    @property
    def missing(self) -> int:
        """Bytes that other requests would have to give up; 0 if there is enough memory."""
        return max(0, self.needed - self.available)

    @property
    def never(self) -> bool:
        """True if a request needs more than the whole cache, so preempting others cannot help."""
        return self.largest > self.limit

    @property
    def what(self) -> str:
        """The resource that ran out: ``"slots"``, ``"memory"`` or ``"mappings"``.

        ``"mappings"`` means that there is enough memory by the cache's own accounting, but the
        driver is out of mappings, another process uses the device's memory, or an earlier `admit`
        or `prepare` has reserved it. In rare cases, pages were freed during the call, and a retry
        succeeds.
        """
        if self.slots:
            return "slots"
        return "memory" if self.missing else "mappings"

    def __repr__(self) -> str:
        short = {
            "slots": f"slots: {self.slots} missing",
            "memory": f"memory: {self.missing} bytes missing",
            "mappings": "mappings or device memory",
        }[self.what]
        return (
            f"<Shortage of {short}; needed={self.needed}, available={self.available}, "
            f"limit={self.limit}, largest={self.largest}>"
        )

    def __str__(self) -> str:
        """Describes the shortage."""
        if self.slots:
            return f"short of slots: {self.slots} missing; max_batch or other requests limit them"
        if self.missing:
            beyond = f", of at most {self.limit}" if self.never else ""
            return (
                f"short of memory: {self.needed} bytes needed{beyond}, {self.available} available, "
                f"{self.missing} missing"
            )
        return f"short of mappings or device memory for {self.needed} bytes"
