# SPDX-License-Identifier: MIT
"""Maps the same pages at the start of every slot (for vAttention's artifact)."""

from __future__ import annotations

import errno
import operator

from pyvmem.errors import NotSupported, OutOfMemory, VMemError
from pyvmem.features.table import FORK
from pyvmem.kvcache.checks import invalid
from pyvmem.kvcache.group import Loan, lend
from pyvmem.kvcache.manager import Manager
from pyvmem.kvcache.pages import EMPTY
from pyvmem.kvcache.requests import claim, free
from pyvmem.kvcache.steps import step
from pyvmem.plumbing.units import counted

__all__ = ["CommonPages"]

_WRITER = 0


class CommonPages:
    """The shared pages that every slot starts with; see `CacheSlots.map_common_pages`.

        reqid 0   | common, writable  | its own ...
        reqid 1   | common, read-only | its own ...

    vAttention's artifact maps these pages writable in every slot, just to show that several
    requests can share a page. Here, writes fault except through slot 0.

    `renew` ends a slot's request and leaves only the common pages in the slot.

    Attributes:
        pages: number of common pages per tensor.
        rows: number of rows that the common pages hold.
        idle: reqids of the slots without a request.
    """

    def __init__(self, owner: Manager, tokens: int) -> None:
        groups = (group,) = owner.groups
        config, layout = group.config, group.layout
        tokens = operator.index(tokens)
        if not 0 < tokens <= config.max_seq_len:
            raise invalid(
                f"map_common_pages({tokens}): not between 0 and {config.max_seq_len}",
                limit=config.max_seq_len,
            )
        self._owner = owner
        with owner.lock, owner.journal:
            owner.open()
            group.sharing.require(FORK, "map_common_pages")
            if layout.state or group.window is not None:
                what = "a state, which every token updates"
                if group.window is not None:
                    what = "a window, which the common pages would leave"
                text = f"map_common_pages: the layers have {what}"
                raise NotSupported(text, errno=errno.EOPNOTSUPP, op="KVCache")
            unit = group.sharing.unit_pages
            self.pages = min(-(-layout.pages_for(tokens) // unit) * unit, layout.slot_pages)
            lengths = [0] * config.max_batch
            self.rows = lengths[_WRITER] = layout.capacity(self.pages)
            claim(groups, _WRITER)
            slot = group.table[_WRITER]
            try:
                if step(groups, lengths, None) == -1:
                    raise OutOfMemory(
                        f"map_common_pages({tokens}) needs {self.pages} pages in every tensor",
                        errno=errno.ENOMEM,
                        op="map_common_pages",
                        bytes=self.pages * layout.page_bytes,
                    )
                group.enter(slot, 0)
                group.pager.release(slot)
                own = group.sharing.gather(slot, slot.shared, self.pages)
                owner.journal.change(group.sharing.adopt_edits(slot, own))
                group.table.change(slot, writer=True)
                self._span = slot.span
                others = group.table.emptiest(config.max_batch - 1)
                if len(others) < config.max_batch - 1:
                    raise invalid(f"map_common_pages({tokens}): a slot is retired or taken")
                for one in others:
                    group.sharing.empty(one)
                if others:
                    lend([Loan(group, one, self._span, 0) for one in others])
            except VMemError:  # on any other exception, the journal undoes everything
                free(groups, _WRITER, None, None, None)
                raise
            self.idle = set(range(config.max_batch))

    def __repr__(self) -> str:
        idle = counted(len(self.idle), "slot")
        return f"<CommonPages: the first {self.rows} rows of every slot, {idle} idle>"

    def renew(self, reqid: int) -> None:
        """Ends a request; its slot keeps only the common pages. Waits for the request's GPU work.

        Also restores a slot that an earlier failed call left free.

        Raises:
            VMemError: the slot could not be emptied or remapped; it is free and has no pages.
        """
        owner = self._owner
        with owner.lock, owner.journal:
            groups = (group,) = owner.open()
            slot = group.slot(reqid, taken=False)
            group.reclaimer.lend(self._span)  # in case only this slot holds the pages
            if slot.active:
                free(groups, reqid, None, None, None)
            group.sharing.empty(slot)
            lend([Loan(group, slot, self._span, 0)])
            group.reclaimer.lend(EMPTY)
        self.idle.add(reqid)
