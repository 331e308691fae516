# SPDX-License-Identifier: MIT
"""A recorded prefix that ends in the middle of a large page: that part of it is copied."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from pyvmem.errors import VMemError
from pyvmem.kvcache.plan import Source
from pyvmem.kvcache.spans import Block, Span
from pyvmem.ops import OpBatch

if TYPE_CHECKING:
    from pyvmem.kvcache.core import Core
    from pyvmem.kvcache.slots import Slot

__all__ = ["attach_copy"]


def attach_copy(core: Core, slot: Slot, span: Span, rows: int) -> bool:
    """`Sharing.attach` in one slot, where the span may end in the middle of a large page.

    What the span has of that page is copied into pages of the slot's own.

    Args:
        slot: empty, from `Sharing.vacate`.
        span: the pages; they begin a slot.
        rows: tokens that they hold.

    Returns:
        Whether memory was enough; where not, the slot is free again.
    """
    layout = core.layout
    whole = span.floor(span.pages)
    core.sharing.attach([slot], span.cut(0, whole))
    if whole == span.pages:
        return True
    last = span.parts[-1]
    done = False
    try:
        with _reading(core, last.block, last.high - (span.pages - whole)) as address:
            source = Source(
                address - whole * layout.page_size,
                last.block.kind.unit * layout.page_size,
                rows * layout.row_bytes,
            )
            want = [(slot, layout.pages_for(rows))]
            events = last.block.events
            done = core.pager.grow(want, background=False, source=source, after=events)
            if done:
                core.pager.release(slot)
    except VMemError:
        core.sharing.detach([slot])
        raise
    if not done:
        core.sharing.detach([slot])
    return done


@contextmanager
def _reading(core: Core, block: Block, page: int) -> Iterator[int]:
    """Addresses of one large page of a block, tensor after tensor, for as long as inside."""
    layout = core.layout
    size = block.kind.unit * layout.page_size
    addresses = core.scratch.take(size * layout.num_tensors)
    ops = OpBatch(layout.num_tensors)
    for tensor in range(layout.num_tensors):
        offset = (tensor * block.pages + page) * layout.page_size
        ops.map(addresses.addr + tensor * size, size, block.handle, offset, readonly=True)
    try:
        core.mapper.run(ops)
    except VMemError:
        core.scratch.give(addresses)
        raise
    try:
        yield addresses.addr
    except VMemError:
        core.scratch.give_mapped(addresses, size * layout.num_tensors)
        raise
    core.scratch.give_mapped(addresses, size * layout.num_tensors)
