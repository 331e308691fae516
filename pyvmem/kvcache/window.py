# SPDX-License-Identifier: MIT
"""Sliding windows: pages whose rows no later token attends to are unmapped while a request runs.

A step from `old` to `new` tokens computes the tokens from `old` on. The first of them attends to
rows from ``old - window + 1`` on, and its kernel reads the whole tile that this row lies in:

    0 ............... head ..... old - window - window_tile ..... old - window ..... old .... new
    | unmapped, pages | slack    | kernel's tile                 | attended to      | computed |

So when a step asks for `new`, pages wholly below ``old - window - window_tile`` go, after the work
that was launched before: that step's work is the last that read them. A prefill of more tokens than
the window has all of them mapped until the next step.
"""

from __future__ import annotations

import errno
import operator
from collections.abc import Sequence
from itertools import compress
from typing import TYPE_CHECKING, Any

from pyvmem.errors import TooManyBatches
from pyvmem.kvcache.config import invalid
from pyvmem.kvcache.events import record

if TYPE_CHECKING:
    from pyvmem.kvcache.core import Core
    from pyvmem.kvcache.slots import Slot

__all__ = ["Window"]


class Window:
    """Decides which pages leave the window."""

    def __init__(self, core: Core) -> None:
        self._core = core
        config, self._layout = core.config, core.layout
        self._window = config.window
        self._kept = config.window + config.window_tile
        self._first = self._kept + self._rows(1)
        # By slot: the length at which the next page can go, and the least that may be asked for.
        self._next = [self._first] * config.max_batch
        self._least = [0] * config.max_batch

    def _rows(self, pages: int) -> int:
        """Rows that so many pages hold a byte of."""
        return -(-pages * self._layout.page_size // self._layout.row_bytes)

    def check(self, slot: Slot, length: int) -> None:
        """Raises InvalidArgument for a length whose window is not there any more."""
        least = self._least[slot.index]
        if length < least:
            raise invalid(
                f"length {length}: with fewer than {least} tokens the window of "
                f"{self._window} of reqid {slot.index} begins in rows that are gone",
                limit=least,
            )

    def slide(self, lens: Sequence[int], stream: Any) -> None:
        """Begins to unmap what the step to `lens` no longer needs; does not wait."""
        core = self._core
        old = core.rows
        events: list[Any] | None = None
        for index in compress(core.indices, map(operator.ge, old, self._next)):
            slot = core.table[index]
            if lens[index] <= old[index]:
                continue  # the same length again: perhaps its work has not been launched yet
            if slot.job is not None:
                if not core.table.lockstep:
                    continue  # the next step is soon enough
                core.pager.release(slot)
            if events is None:
                event = record(stream, core.device)
                events = [] if event is None else [event]
            layout = self._layout
            head = (old[index] - self._kept) * layout.row_bytes // layout.page_size
            places = slot.places
            if not core.mover.make_way(slot, head):
                continue
            if places and places.floor(head) != head:  # in the middle of a large page
                end, head = places.ceil(head), places.floor(head)
                if head <= slot.head:
                    self._set(index, self._kept + self._rows(end), self._least[index])
                    continue
            if head <= slot.head:  # they went in a step that an exception ended
                self._set(index, self._kept + self._rows(head + 1), self._window + self._rows(head))
                continue
            after = [*slot.events, *events]
            if not core.reclaimer.try_slide(slot, head, after):  # the queue is full
                if not core.table.lockstep:
                    return  # the next step tries again
                core.reclaimer.finish_all()
                if not core.reclaimer.try_slide(slot, head, after):
                    raise TooManyBatches(
                        "pages behind the window could not be unmapped",
                        errno=errno.EAGAIN,
                        op="KVCache",
                    )
            self._set(index, self._kept + self._rows(head + 1), self._window + self._rows(head))

    def forget(self, slot: Slot) -> None:
        """Ends a request; call it while the slot is still its own."""
        if not slot.stale:
            self._core.reclaimer.slid -= slot.head
        self._set(slot.index, self._first, 0)

    def _set(self, index: int, later: int, least: int) -> None:
        for numbers, value in ((self._next, later), (self._least, least)):
            self._core.journal.undo(numbers.__setitem__, index, numbers[index])
            numbers[index] = value
