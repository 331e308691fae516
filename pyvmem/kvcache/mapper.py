# SPDX-License-Identifier: MIT
"""The one module through which a cache makes mapping calls to its context.

    mapper.commit(edits, ops, after)    # one C call: runs the batch and, on success, the edits

If the batch fails, or an asynchronous exception prevents it, the records are unchanged; once it has
succeeded, they contain all edits, whatever happens next (journal.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from pyvmem._native import Outcome, Waits
from pyvmem.errors import NotRecoverable, VMemError
from pyvmem.kvcache.journal import Journal
from pyvmem.memory.context import Context
from pyvmem.memory.info import Caps
from pyvmem.memory.ops import OpBatch
from pyvmem.memory.pages import Pages, Ticket
from pyvmem.memory.reservation import Reservation

__all__ = ["Mapper", "Scratch"]


class Mapper:
    """A group's access to its context. The caller holds the cache's lock and journal."""

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
        """Runs a batch or, with a ticket, submits it; C applies the edits on success.

        Args:
            edits: changes to the records; see `Outcome`.
            ops: the batch.
            after: GPU work that the batch waits for.
            ticket: a new ticket to submit the batch with; None: run the batch in the calling
                thread.
            late: as for `Context.submit`.
            waits: as for `Context.batch`.

        Raises:
            VMemError: nothing has changed.
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
        """Returns a new handle to pages that are already mapped.

        It is released when the cache's current call ends, unless an edit has recorded it by then.
        """
        pages = Pages(self.context, Outcome(), size * count)
        self.journal.unrecorded[pages] = None
        return self.context.gather(addr, size, count, stride, pages)

    def relocate(
        self, ops: OpBatch, size: int, count: int, source: tuple[int, int], target: tuple[int, int]
    ) -> Pages:
        """Adds operations to `ops` that remap pages elsewhere, replacing any pages already there.

        Args:
            ops: the batch.
            size: bytes per tensor.
            count: number of tensors.
            source: where the pages are mapped now: the address in the first tensor, and the
                distance between tensors.
            target: where they will be mapped instead.

        Returns:
            A handle to the pages, which the batch consumes.
        """
        (old, old_stride), (new, stride) = source, target
        pages = self.gather(old, size, count, old_stride)
        ops.map(new, size, pages, 0, count, stride, consume=True, replace=True, split=True)
        ops.unmap(old, size, count, old_stride)
        return pages

    def drop_range(
        self, edits: list[list[Any]], pages: Pages, offset: int, size: int, count: int, stride: int
    ) -> None:
        """Drops part of a handle and applies the edits; if it fails, nothing has changed."""
        outcome = Outcome(edits)
        self.journal.entries.append(outcome)
        pages.drop_range(offset, size, count, stride, outcome)

    # ---- calls that change no records ------------------------------------------------------------

    def join(self, addr: int, size: int) -> int:
        """See `Context.join`; if interrupted, some runs may already be joined."""
        self.journal.made()
        return self.context.join(addr, size)

    def copy(
        self, size: int, addresses: Sequence[int], host: Sequence[memoryview], *, out: bool
    ) -> None:
        """Copies pieces of `size` bytes between mapped addresses and host memory, synchronously.

        Args:
            size: size of each piece in bytes.
            addresses: device addresses of the pieces: a list or a numpy array.
            host: buffers that hold the pieces back to back.
            out: copy to host memory instead of from it.
        """
        if not len(addresses):
            return
        if not out:  # written pages must stay granted if the call fails: they are no longer zero
            self.journal.made()
        try:
            import numpy as np

            from pyvmem.memory.host_copies import Pieces, copy_now
        except ImportError:
            pass
        else:  # the copy kernel, if available, is fast for scattered pages
            starts = [
                np.frombuffer(part, dtype=np.uint8).ctypes.data + np.arange(0, part.nbytes, size)
                for part in host
            ]
            pieces = Pieces(
                np.array(addresses, dtype=np.int64),
                np.concatenate(starts).astype(np.int64),
                np.full(len(addresses), size, dtype=np.int64),
            )
            if copy_now(self.context, out, pieces):
                return
        parts = (part[at : at + size] for part in host for at in range(0, part.nbytes, size))
        for address, piece in zip(map(int, addresses), parts, strict=True):
            if out:
                self.context.read_into(address, piece)
            else:
                self.context.write(address, piece)


class Scratch:
    """Provides temporary reservations; reuses the last one, since most moves have the same size.

    The reservations are plain if the back end supports that, since visible addresses are scarce and
    only libvmem accesses temporary reservations.

    Args:
        mapper: the group's mapper.
        align: page size in bytes.
    """

    def __init__(self, mapper: Mapper, align: int) -> None:
        self._mapper = mapper
        self._align = max(align, 2 << 20)
        self._kept: Reservation | None = None
        self._full: list[Reservation] = []  # reservations whose pages could not be unmapped yet

    def take(self, nbytes: int) -> Reservation:
        """Returns an unmapped range of at least `nbytes`, freed after the call unless recorded.

        Raises:
            VMemError: no address space is available.
        """
        if self._full:
            self.retry()
        kept, context, journal = self._kept, self._mapper.context, self._mapper.journal
        if kept is not None:
            journal.change([[self, "_kept", None], [journal.unrecorded, kept, None]])
            if kept.nbytes >= nbytes:
                return kept  # if too small, it is freed when the call ends
        visible = False if Caps.PLAIN in context.info.caps else None
        made = Reservation(context, Outcome())
        journal.unrecorded[made] = None
        return context.reserve(nbytes, visible=visible, align=self._align, into=made)

    def give_edits(self, addresses: Reservation) -> list[list[Any]]:
        """Returns the edits that take back unmapped addresses for reuse.

        Returns none if another range is already kept or the addresses had to be abandoned.
        """
        if self._kept is None and addresses.is_open:  # otherwise they are freed when the call ends
            return [[self, "_kept", addresses], [self._mapper.journal.unrecorded, addresses, ...]]
        return []

    def give_mapped(
        self, addresses: Reservation, nbytes: int, edits: Sequence[list[Any]] = ()
    ) -> None:
        """Unmaps the first `nbytes` and takes the addresses back for reuse.

        If the unmap fails, it is retried later. `edits` are applied in either case.
        """
        ops = OpBatch(1)
        ops.unmap(addresses.addr, nbytes)
        try:
            self._mapper.commit([*edits, *self.give_edits(addresses)], ops)
        except VMemError:
            journal = self._mapper.journal
            full = [[self, "_full", [*self._full, addresses]], [journal.unrecorded, addresses, ...]]
            journal.change([*edits, *full])

    def retry(self) -> None:
        """Retries failed unmaps."""
        for addresses in list(self._full):
            try:
                addresses.close(unmap=True)
            except NotRecoverable:
                addresses.leave()  # quarantined
            except VMemError:
                continue
            self._full.remove(addresses)

    def owns(self, made: object) -> bool:
        """Returns whether the reservation is recorded here."""
        return made is self._kept or any(made is one for one in self._full)

    def close(self) -> None:
        """Frees all addresses."""
        if self._kept is not None:
            self._full.append(self._kept)
        self.retry()
        for addresses in self._full:
            addresses.leave()
        self._kept, self._full = None, []
