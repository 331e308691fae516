# SPDX-License-Identifier: MIT
"""Request objects, which engines hold instead of slot numbers, since slots are reused."""

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

    RUNNING = "running"  # has a slot
    SWAPPED = "swapped"  # its rows are in host memory; `RequestCache.swap_in` restores them
    BUSY = "busy"  # a background call is using it; wait until that call is done
    ENDED = "ended"  # released; every call rejects it


@dataclass(eq=False, slots=True)
class Request:
    """A request of a `RequestCache`, created and changed only by it.

    Requests compare by identity, so they can be dictionary keys. A request outlives its slot: after
    being swapped out and in, it is the same request in another slot. Once released, it has ended
    for good.

    Attributes:
        number: increases with every new request of the cache; never reused.
        namespace: where its prefix is looked up and recorded; None for the default namespace.
        length: its number of rows: tokens whose keys and values are in its slot, or will be written
            there by the work that the engine launches next. For its pages, see
            `RequestCache.capacity`.
        owner: the slot's owner number (`CacheSlots.owner`) when the request got the slot; if the
            number has changed since, the slot belongs to another request.
        rows: its rows in host memory while it is swapped out.
        base_state: its state, not counting background calls; never `State.BUSY`.
        calls: its background calls, some of which may have finished.
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
        """The current state; `State.BUSY` while a background call on the request is unfinished."""
        # read `calls` before base_state: a call sets base_state before it finishes
        busy = self.calls and self.pending
        base = self.base_state
        return State.BUSY if busy and base is not State.ENDED else base

    @property
    def slot(self) -> int:
        """The request's index into the cache's tensors: ``cache.k(layer)[request.slot]``.

        Raises:
            BadHandle: the request has ended. Busy: a background call is using it. InvalidArgument:
                it is swapped out.
        """
        self.require(State.RUNNING)
        slot = self._slot
        if slot is None:  # another thread has just swapped it out or ended it
            ended = self.base_state is State.ENDED
            raise self.refusal(State.ENDED if ended else State.SWAPPED, State.RUNNING)
        return slot

    def require(self, state: State) -> None:
        """Raises the same errors as `slot` unless the request is in the given state."""
        now = self.state  # read only once: a background call may change the state
        if now is not state:
            raise self.refusal(now, state)

    @property
    def pending(self) -> bool:
        """True while a background call on the request is unfinished."""
        return not all(one.over for one in self.calls)

    def refusal(self, now: State, state: State) -> VMemError:
        """Returns the exception for a request in state `now` when `state` is required."""
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
