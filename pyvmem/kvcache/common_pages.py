# SPDX-License-Identifier: MIT
"""The first pages of every slot, shared by all of them (vAttention's artifact)."""

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
    """The first pages of all slots, which `CacheSlots.map_common_pages` has taken and returns.

        reqid 0   | common, writable  | its own ...
        reqid 1   | common, read-only | its own ...

    vAttention's artifact maps them writable everywhere, only to show that several requests can have
    the same page. Here a write through a second reqid is a fault, never another's rows.

    A slot is given back with `renew`, and has the common pages again.

    Attributes:
        pages: common pages per tensor.
        rows: what they hold.
        idle: slots that no request has.
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
                what = "have a state, which requests write all the time"
                if group.window is not None:
                    what = "have a window, which common pages would leave"
                raise NotSupported(
                    f"map_common_pages: the layers {what}", errno=errno.EOPNOTSUPP, op="KVCache"
                )
            unit = group.prefixes.unit_pages[0]
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
                        bytes=self.pages * layout.num_tensors * layout.page_size,
                    )
                group.enter(slot, 0)
                group.pager.release(slot)
                handles = group.sharing.handles(slot, slot.shared, self.pages)
                group.sharing.adopt(slot, handles, [], unit)
                group.table.change(slot, writer=True)
                self._span = slot.span
                others = group.sharing.make_empty(config.max_batch - 1)
                if others is None:
                    raise invalid(f"map_common_pages({tokens}): a slot is broken or taken")
                if others:
                    lend([Loan(group, one, self._span, 0) for one in others])
            except VMemError:  # after anything else the journal takes all of it back
                free(groups, _WRITER, None, None, None)
                raise
            self.idle = set(range(config.max_batch))

    def __repr__(self) -> str:
        idle = counted(len(self.idle), "slot")
        return f"<CommonPages: the first {self.rows} rows of every slot, {idle} idle>"

    def renew(self, reqid: int) -> None:
        """Ends a request; its slot has the common pages and nothing else. Waits for its GPU work.

        Does the same for a slot that is free, as after a call that failed.

        Raises:
            VMemError: the slot could not be emptied or mapped again; it is free, and has none.
        """
        owner = self._owner
        with owner.lock, owner.journal:
            groups = (group,) = owner.open()
            slot = group.slot(reqid, taken=False)
            group.reclaimer.lend(self._span)  # where the slot's reference is the last one
            if slot.active:
                free(groups, reqid, None, None, None)
            group.sharing.empty(slot)
            lend([Loan(group, slot, self._span, 0)])
            group.reclaimer.lend(EMPTY)
        self.idle.add(reqid)
