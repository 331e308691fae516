# SPDX-License-Identifier: MIT
"""Request objects, which engines hold instead of slot numbers: slot numbers are reused."""

from __future__ import annotations

import enum
import errno
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pyvmem.errors import BadHandle, Busy, VMemError
from pyvmem.plumbing.units import counted
from pyvmem.plumbing.validation import invalid

if TYPE_CHECKING:
    from pyvmem.engine.background import Pending
    from pyvmem.engine.prefix import Namespace
    from pyvmem.kvcache import SwappedRequest

__all__ = ["Request", "State"]


class State(enum.Enum):
    """The state of a request, which determines the calls it accepts."""

    RUNNING = "running"  # it has a slot
    SWAPPED = "swapped"  # its rows are in host memory; `RequestCache.swap_in`
    BUSY = "busy"  # a background call works on it; wait for that first
    ENDED = "ended"  # released; no call accepts it any more


@dataclass(eq=False, slots=True)
class Request:
    """A request of a `RequestCache`, created and changed only by it.

    Equal only to itself, so it can be a key. It outlives its slot: swapped out and in, it is the
    same request in another slot; once released, it has ended for good.

    Attributes:
        number: increases with every request of the cache; never reused.
        namespace: whose prefixes it begins with and records; None: the common one.
        length: rows that it holds: tokens whose keys and values are in its slot, or will be by the
            work that the engine launches next. Pages are counted apart: `RequestCache.capacity`.
        owner: the slot's owner number (`CacheSlots.owner`) at admission; if it differs now, the
            slot is another request's.
        rows: its rows in host memory while it is swapped out.
        base_state: `state`, ignoring background calls.
        calls: its background calls; some may be over.
    """

    number: int
    namespace: Namespace | None = None
    length: int = 0
    rows: SwappedRequest | None = None
    owner: int | None = None
    _slot: int | None = None
    base_state: State = State.RUNNING
    calls: tuple[Pending, ...] = ()

    @property
    def state(self) -> State:
        """See `State`."""
        busy = self.calls and self.pending  # read first: a finished call has set the state below
        base = self.base_state
        return State.BUSY if busy and base is not State.ENDED else base

    @property
    def slot(self) -> int:
        """Its index into the cache's tensors, ``cache.k(layer)[request.slot]``.

        Raises:
            BadHandle: it has ended. Busy: a background call is using it. InvalidArgument: it is
                swapped out.
        """
        self.require(State.RUNNING)
        slot = self._slot
        if slot is None:  # another thread has swapped it out since, or ended it
            ended = self.base_state is State.ENDED
            raise self.refusal(State.ENDED if ended else State.SWAPPED, State.RUNNING)
        return slot

    def require(self, state: State) -> None:
        """Raises what `slot` raises if the request is in another state."""
        now = self.state  # read once: a background call may change it meanwhile
        if now is not state:
            raise self.refusal(now, state)

    @property
    def pending(self) -> bool:
        """True while a background call on it is unfinished."""
        return not all(one.over for one in self.calls)

    def refusal(self, now: State, state: State) -> VMemError:
        """The exception for a request in state `now` where `state` is required."""
        tokens = counted(self.length, "token")
        if now is State.ENDED:
            text = f"request {self.number} of {tokens} has ended"
            return BadHandle(text, errno=errno.EBADF, op="Request")
        text = f"request {self.number} of {tokens} is {now.value}, not {state.value}"
        if now is State.BUSY:
            return Busy(f"{text}: wait for its background call", errno=errno.EBUSY, op="Request")
        return invalid(text, op="Request")

    def __repr__(self) -> str:
        return f"<Request {self.number}: {counted(self.length, 'token')}, {self.state.value}>"
