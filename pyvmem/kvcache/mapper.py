# SPDX-License-Identifier: MIT
"""The one place where a cache asks its context for pages.

    mapper.commit(edits, ops, after)      # the batch, and if it succeeds the records, in one C call

If the batch fails, or an exception from outside comes before it, the records are as before; after
it they are as intended, whatever happens next (journal.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from pyvmem._native import Outcome, Waits
from pyvmem.errors import NotRecoverable, VMemError
from pyvmem.memory.info import Caps
from pyvmem.memory.ops import OpBatch
from pyvmem.memory.pages import Pages, Ticket
from pyvmem.memory.reservation import Reservation

if TYPE_CHECKING:
    from pyvmem.kvcache.journal import Journal
    from pyvmem.memory.context import Context
    from pyvmem.memory.info import RangeInfo

__all__ = ["Mapper", "Scratch"]

_MADE = Outcome()
"""Of a call that counts as made when it begins: what is in the journal before it stays."""
_MADE.cell.called = 1


class Mapper:
    """A cache's access to its context."""

    def __init__(self, context: Context, journal: Journal) -> None:
        self.context = context
        self.journal = journal

    def commit(
        self,
        edits: list[list[Any]],
        ops: OpBatch,
        after: Iterable[Any] = (),
        *,
        ticket: Ticket | None = None,
        late: bool = False,
        waits: Waits | None = None,
    ) -> None:
        """Runs a batch, or submits it where a ticket is given; C makes the edits if it succeeds.

        Args:
            edits: of the records; see `Outcome`.
            ops: the batch.
            after: GPU work to wait for.
            ticket: of the batch; None: it runs in the calling thread.
            late: as for `Context.submit`.
            waits: as for `Context.batch`.

        Raises:
            VMemError: nothing changed.
        """
        outcome = Outcome(edits) if ticket is None else ticket.outcome.of(edits)
        self.journal.entries.append(outcome)
        try:
            if ticket is None:
                self.context.batch(ops, after, outcome, waits)
            else:
                self.context.submit(ops, after, ticket, late)
        finally:
            outcome.edits = None

    # ---- handles and addresses -------------------------------------------------------------------

    def gather(self, addr: int, size: int, count: int, stride: int) -> Pages:
        """A handle to mapped pages; dropped at the end of the call unless the records use it."""
        pages = Pages(self.context, Outcome(), size * count)
        self.journal.held[pages] = None
        return self.context.gather(addr, size, count, stride, pages)

    def drop_range(
        self,
        edits: list[list[Any]],
        pages: Pages,
        offset: int,
        size: int,
        count: int,
        stride: int,
    ) -> None:
        """Drops a part of a handle, and makes the edits; on failure nothing changed."""
        outcome = Outcome(edits)
        self.journal.entries.append(outcome)
        pages.drop_range(offset, size, count, stride, outcome)

    def reserve(self, size: int, align: int, visible: bool | None) -> Reservation:
        """Reserves addresses; freed at the end of the call unless the records refer to them."""
        found = Reservation(self.context, Outcome())
        self.journal.held[found] = None
        return self.context.reserve(size, visible=visible, align=align, into=found)

    # ---- calls that change no records ------------------------------------------------------------

    def query(self, addr: int) -> RangeInfo:
        """See `Context.query`."""
        return self.context.query(addr)

    def join(self, addr: int, size: int) -> int:
        """See `Context.join`; an interrupted one may have made some entries."""
        self.journal.entries.append(_MADE)
        return self.context.join(addr, size)

    def copy(
        self, size: int, addresses: Sequence[int], host: Sequence[memoryview], *, out: bool
    ) -> None:
        """Copies pieces of `size` bytes between mapped addresses and host memory.

        Args:
            size: of each piece.
            addresses: where the pieces are mapped: a list, or an array of numpy.
            host: the same pieces, which follow one another in each part.
            out: to host memory. Complete on return, whichever the direction.
        """
        if not len(addresses):
            return
        if not out:  # pages that are written are never clean: they stay granted
            self.journal.entries.append(_MADE)
        if self._by_kernel(size, addresses, host, out):
            return
        pieces = (part[at : at + size] for part in host for at in range(0, part.nbytes, size))
        for address, piece in zip(map(int, addresses), pieces, strict=True):
            if out:
                self.context.read_into(address, piece)
            else:
                self.context.write(address, piece)

    def _by_kernel(
        self, size: int, addresses: Sequence[int], host: Sequence[memoryview], out: bool
    ) -> bool:
        """Copies by the kernel, at PCIe's rate for scattered pages; False where it is not there."""
        try:
            import numpy as np

            from pyvmem.memory.host_copies import Pieces, copy_now
        except ImportError:
            return False
        starts = [
            np.frombuffer(part, dtype=np.uint8).ctypes.data + np.arange(0, part.nbytes, size)
            for part in host
        ]
        pieces = Pieces(
            np.array(addresses, dtype=np.int64),
            np.concatenate(starts).astype(np.int64),
            np.full(len(addresses), size, dtype=np.int64),
        )
        return copy_now(self.context, out, pieces)


class Scratch:
    """Temporary reservations; the last one is kept, since most moves have the same size.

    They are plain where the back end supports that: visible addresses are scarce, and only libvmem
    accesses these.

    Args:
        mapper: of the cache.
        align: bytes of a page.
    """

    def __init__(self, mapper: Mapper, align: int) -> None:
        self._mapper = mapper
        self._align = max(align, 2 << 20)
        self._kept: Reservation | None = None
        self._full: list[Reservation] = []  # pages in them could not be unmapped

    def take(self, nbytes: int) -> Reservation:
        """Unmapped addresses, at least so many bytes; freed after the call unless they are used.

        Raises:
            VMemError: none are available.
        """
        self.retry()
        kept = self._kept
        if kept is not None:
            journal = self._mapper.journal
            journal.change([[self, "_kept", None], [journal.held, kept, None]])
            if kept.nbytes >= nbytes:
                return kept  # else it is freed at the end of the call
        visible = False if Caps.PLAIN in self._mapper.context.info.caps else None
        return self._mapper.reserve(nbytes, self._align, visible)

    def give(self, addresses: Reservation) -> None:
        """Takes back addresses of the call, with nothing mapped there, unless they were left."""
        if self._kept is None and addresses.is_open:  # others are freed at the end of the call
            journal = self._mapper.journal
            journal.change([[self, "_kept", addresses], [journal.held, addresses, ...]])

    def give_mapped(
        self, addresses: Reservation, nbytes: int, edits: Sequence[list[Any]] = ()
    ) -> None:
        """Takes back addresses and unmaps their first `nbytes`; a failed unmap is retried later.

        `edits`: made in any case.
        """
        ops = OpBatch(1)
        ops.unmap(addresses.addr, nbytes)
        try:
            self._mapper.commit([*edits], ops)
        except VMemError:
            journal = self._mapper.journal
            full = [[self, "_full", [*self._full, addresses]], [journal.held, addresses, ...]]
            journal.change([*edits, *full])
        else:
            self.give(addresses)

    def retry(self) -> None:
        """Unmaps what could not be unmapped."""
        for addresses in list(self._full):
            try:
                addresses.close(unmap=True)
            except NotRecoverable:
                addresses.leave()  # quarantined
            except VMemError:
                continue
            self._full.remove(addresses)

    def owns(self, held: object) -> bool:
        """Whether it keeps this reservation."""
        return held is self._kept or any(held is one for one in self._full)

    def close(self) -> None:
        """Gives all addresses back."""
        self.retry()
        for addresses in (*self._full, *(() if self._kept is None else (self._kept,))):
            try:
                addresses.close(unmap=True)
            except VMemError:
                addresses.leave()
        self._kept, self._full = None, []
