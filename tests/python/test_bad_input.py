# SPDX-License-Identifier: MIT
"""Each bad input raises a specific error that names the value and the limit, and changes
nothing."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import errno
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from conftest import open_context

import pyvmem
from pyvmem import _native

U64 = 2**64


@contextlib.contextmanager
def refused(
    context: pyvmem.Context, error: type[pyvmem.VMemError], *, calls: bool = False
) -> Iterator[pytest.ExceptionInfo[pyvmem.VMemError]]:
    """Checks that the block raises exactly `error` and leaves the context unchanged.

    If `calls` is true, the call may reach the driver or the pool, so counters and high-water marks
    may change, but all other state must be unchanged.
    """

    def state() -> dict[str, int]:
        record = dataclasses.asdict(context.stats())
        ignored = {"driver_ns", "worker_driver_ns"}
        if context.cuda_device is not None:  # pages may be zeroed in the background
            ignored |= {"dirty_bytes", "mappings", "slab_calls", "fill_calls"}
        if calls:
            ignored |= {"slab_calls", "map_calls", "unmap_calls", "fill_calls"}
            ignored |= {"peak_used_bytes", "peak_mapped_bytes"}
        return {name: value for name, value in record.items() if name not in ignored}

    before = state()
    with pytest.raises(error) as caught:
        yield caught
    assert type(caught.value) is error
    assert caught.value.errno == getattr(errno, caught.value.errno_name)
    assert state() == before
    context.check()


@pytest.fixture
def rsv(context: pyvmem.Context) -> pyvmem.Reservation:
    return context.reserve(16 * context.info.granule)


# ---- sizes -------------------------------------------------------------------------------------


def test_reserve_size_zero(context: pyvmem.Context) -> None:
    with refused(context, pyvmem.InvalidArgument):
        context.reserve(0)


def test_reserve_unaligned_size(context: pyvmem.Context, page: int) -> None:
    with refused(context, pyvmem.InvalidArgument) as caught:
        context.reserve(page + 1)
    assert caught.value.op == "vMemReserve"
    assert str(page + 1) in str(caught.value)


def test_reserve_overflowing_size(context: pyvmem.Context, page: int) -> None:
    with refused(context, pyvmem.OutOfMemory):
        context.reserve(U64 - page)


def test_reserve_more_than_the_address_space(context: pyvmem.Context) -> None:
    with refused(context, pyvmem.OutOfMemory):
        context.reserve(1 << 60)


@pytest.mark.parametrize("size", [-1, U64, 1 << 70])
def test_reserve_number_outside_64_bits(context: pyvmem.Context, size: int) -> None:
    with refused(context, pyvmem.InvalidArgument) as caught:
        context.reserve(size)
    assert str(size) in str(caught.value)


def test_reserve_align_not_a_power_of_two(context: pyvmem.Context, page: int) -> None:
    with refused(context, pyvmem.InvalidArgument):
        context.reserve(page, align=3 * page)


def test_create_size_zero(context: pyvmem.Context) -> None:
    with refused(context, pyvmem.InvalidArgument):
        context.create(0)


def test_create_unaligned_size(context: pyvmem.Context, page: int) -> None:
    with refused(context, pyvmem.InvalidArgument) as caught:
        context.create(page + 1)
    assert caught.value.bytes == page + 1
    assert caught.value.limit == page


@pytest.mark.parametrize("scale", [3, 0.5, 1 << 20])
def test_create_unsupported_page_size(context: pyvmem.Context, page: int, scale: float) -> None:
    with refused(context, pyvmem.NotSupported) as caught:
        context.create(page << 21, page_size=int(page * scale))
    assert caught.value.bytes == int(page * scale)


def test_create_more_than_device_memory(context: pyvmem.Context) -> None:
    """Checks that no slab is allocated, since that would leave other processes short of memory."""
    before = context.stats().slab_calls
    with refused(context, pyvmem.OutOfMemory, calls=True) as caught:
        context.create(1 << 56)
    assert 0 < caught.value.limit < caught.value.bytes <= 1 << 56
    assert context.stats().slab_calls == before


def test_driver_out_of_memory_is_passed_on(context: pyvmem.Context, page: int) -> None:
    """Checks that the driver's error is raised once smaller slabs have failed too, and that the
    context works again afterwards.
    """
    context.trim()
    context.inject(pyvmem.Inject.SLAB, 0, 100, errno.ENOMEM)
    with refused(context, pyvmem.OutOfMemory, calls=True):
        context.create(page)
    context.inject(0, 0, 0)
    context.create(page).release()


def test_create_beyond_the_limit(backend: str) -> None:
    probe = open_context(backend)
    granule = probe.info.granule
    probe.close()
    slab = {} if backend == "cuda" else {"slab_size": 4 * granule}
    with open_context(backend, mem_limit=4 * granule, **slab) as ctx:
        pages = ctx.create(3 * granule)
        with refused(ctx, pyvmem.OutOfMemory, calls=True) as caught:
            ctx.create(2 * granule)
        assert caught.value.limit == 4 * granule
        pages.release()


def test_create_unknown_location(context: pyvmem.Context, page: int) -> None:
    with refused(context, pyvmem.InvalidArgument):
        context.create(page, location=9)  # type: ignore[arg-type]


def test_create_in_a_peer_without_peers(host: pyvmem.Context) -> None:
    with refused(host, pyvmem.NotSupported):
        host.create(4096, location=pyvmem.Location.PEER, device=1)


# ---- mapping -----------------------------------------------------------------------------------


def test_map_size_zero(context: pyvmem.Context, rsv: pyvmem.Reservation, page: int) -> None:
    with context.create(page) as pages, refused(context, pyvmem.InvalidArgument):
        context.map(rsv.addr, 0, pages)


@pytest.mark.parametrize("what", ["addr", "size", "offset"])
def test_map_unaligned(
    context: pyvmem.Context, rsv: pyvmem.Reservation, page: int, what: str
) -> None:
    off = {"addr": 0, "size": 0, "offset": 0, what: 1}
    with context.create(2 * page) as pages, refused(context, pyvmem.InvalidArgument):
        context.map(rsv.addr + off["addr"], page + off["size"], pages, off["offset"])


def test_map_overflowing_range(context: pyvmem.Context, rsv: pyvmem.Reservation, page: int) -> None:
    with context.create(page) as pages:
        with refused(context, pyvmem.OutOfRange):
            context.map(rsv.addr, U64 - page, pages)
        with refused(context, pyvmem.AddressOverflow):
            context.map(U64 - page, page, pages)
        with refused(context, pyvmem.AddressOverflow):
            context.unmap(rsv.addr, U64 - page)


def test_map_outside_any_reservation(context: pyvmem.Context, page: int) -> None:
    with context.create(page) as pages, refused(context, pyvmem.NotReserved) as caught:
        context.map(page, page, pages)
    assert caught.value.addr == page


def test_map_over_the_end_of_a_reservation(
    context: pyvmem.Context, rsv: pyvmem.Reservation, page: int
) -> None:
    with context.create(2 * page) as pages, refused(context, pyvmem.NotReserved):
        context.map(rsv.addr + rsv.nbytes - page, 2 * page, pages)


def test_map_over_a_live_mapping(
    context: pyvmem.Context, rsv: pyvmem.Reservation, page: int
) -> None:
    with context.create(page) as pages, context.create(2 * page) as other:
        rsv.map(page, pages)
        with refused(context, pyvmem.AlreadyMapped) as caught:
            rsv.map(0, other)
        assert caught.value.addr == rsv.addr + page


def test_map_released_handle(context: pyvmem.Context, rsv: pyvmem.Reservation, page: int) -> None:
    pages = context.create(page)
    pages.release()
    other = context.create(page)  # may reuse the first handle's entry
    with refused(context, pyvmem.BadHandle):
        rsv.map(0, pages)
    other.release()


def test_map_handle_of_another_context(
    backend: str, context: pyvmem.Context, rsv: pyvmem.Reservation, page: int
) -> None:
    with open_context(backend) as other, other.create(page) as foreign:
        with refused(context, pyvmem.BadHandle):
            rsv.map(0, foreign)
        with refused(other, pyvmem.NotReserved):
            other.map(rsv.addr, page, foreign)


def test_map_invalid_handle(context: pyvmem.Context, rsv: pyvmem.Reservation, page: int) -> None:
    with context.create(page) as pages:
        for handle in (0, 1, pages.handle ^ 1 << 40, pages.handle ^ 1 << 60, U64 - 1):
            made_up = _native.Outcome()
            made_up.cell.value = handle
            forged = pyvmem.Pages(context, made_up, page)
            with refused(context, pyvmem.BadHandle):
                rsv.map(0, forged)
            forged._done = True


@pytest.mark.parametrize(("size", "offset"), [(3, 0), (1, 2), (2, 1), (1, 1 << 20)])
def test_map_beyond_the_handle(
    context: pyvmem.Context, rsv: pyvmem.Reservation, page: int, size: int, offset: int
) -> None:
    with context.create(2 * page) as pages, refused(context, pyvmem.OutOfRange) as caught:
        context.map(rsv.addr, size * page, pages, offset * page)
    assert caught.value.limit == 2 * page


def test_unmap_nothing(context: pyvmem.Context, rsv: pyvmem.Reservation, page: int) -> None:
    with refused(context, pyvmem.NotMapped) as caught:
        rsv.unmap(0, page)
    assert caught.value.addr == rsv.addr


def test_unmap_with_a_hole(context: pyvmem.Context, rsv: pyvmem.Reservation, page: int) -> None:
    with context.create(page) as pages:
        rsv.map(0, pages)
        with refused(context, pyvmem.NotMapped) as caught:
            rsv.unmap(0, 2 * page)
        assert caught.value.addr == rsv.addr + page


def test_readonly_without_support(
    context: pyvmem.Context, rsv: pyvmem.Reservation, page: int
) -> None:
    if pyvmem.Caps.READONLY in context.info.caps:
        pytest.skip("this back end supports read-only mappings")
    with context.create(page) as pages, refused(context, pyvmem.NotSupported):
        rsv.map(0, pages, readonly=True)


class Fraction:
    """A number like numpy's float32 or a Decimal, which `int` would truncate."""

    def __int__(self) -> int:
        return 4096


@pytest.mark.parametrize(
    ("call", "name"),
    [
        ("reserve", "size"),
        ("create", "size"),
        ("warm", "nbytes"),
        ("trim", "keep"),
        ("compact", "nbytes"),
    ],
)
def test_size_not_an_integer(context: pyvmem.Context, call: str, name: str) -> None:
    before = context.stats()
    with pytest.raises(TypeError, match=f"^{name}: expected a whole number, not <.*Fraction"):
        getattr(context, call)(Fraction())
    with pytest.raises(TypeError, match=f"^{name}: expected a whole number, not '64K': write 655"):
        getattr(context, call)("64K")
    assert context.stats().reservations == before.reservations
    assert context.stats().handles == before.handles


def test_options_not_integers(backend: str) -> None:
    for name in ("granule", "slab_size", "mem_limit", "pool_low", "pool_high", "max_mappings"):
        with pytest.raises(TypeError, match=f"^{name}: expected a whole number, not <.*Fraction"):
            pyvmem.Context(backend, **{name: Fraction()})  # type: ignore[arg-type]


def test_page_size_not_an_integer(context: pyvmem.Context, page: int) -> None:
    with pytest.raises(TypeError, match=r"^page_size: .*, not '64K': write 65536"):
        context.create(page, page_size="64K")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="not '2M': write 2097152"):
        context.reserve(page, align="2M")  # type: ignore[arg-type]


def test_batch_of_malformed_operations() -> None:
    ops = pyvmem.OpBatch(4)
    with pytest.raises(TypeError, match="cannot be interpreted as an integer"):
        ops.wrote(1.5)  # type: ignore[arg-type]
    assert len(ops) == 0


@pytest.mark.parametrize("kind", ["context", "reservation", "pages"])
def test_reservation_and_handle_cannot_be_copied(context: pyvmem.Context, kind: str) -> None:
    page = context.info.granule
    with context.reserve(page) as addresses, context.create(page) as pages:
        one = {"context": context, "reservation": addresses, "pages": pages}[kind]
        for make in (copy.copy, copy.deepcopy, pickle.dumps):
            with pytest.raises(TypeError, match="have a single owner"):
                make(one)


def test_an_event_cannot_be_copied() -> None:
    with pyvmem.FdEvent.create() as event:
        for make in (copy.copy, copy.deepcopy, pickle.dumps):
            with pytest.raises(TypeError, match="have a single owner"):
                make(event)


# ---- ends --------------------------------------------------------------------------------------


def test_double_release(context: pyvmem.Context, page: int) -> None:
    pages = context.create(page)
    pages.release()
    with refused(context, pyvmem.BadHandle):
        pages.release()
    with refused(context, pyvmem.BadHandle):
        pages.drop()
    with refused(context, pyvmem.BadHandle):
        _ = pages.info


def test_release_with_two_mappings(
    context: pyvmem.Context, rsv: pyvmem.Reservation, page: int
) -> None:
    pages = context.create(page)
    rsv.map(0, pages)
    rsv.map(page, pages)
    with refused(context, pyvmem.Busy) as caught:
        pages.release()
    assert caught.value.limit == 2
    rsv.unmap(0, page)
    pages.release()


def test_close_reservation_with_live_mappings(
    context: pyvmem.Context, rsv: pyvmem.Reservation, page: int
) -> None:
    with context.create(page) as pages:
        rsv.map(0, pages)
        with refused(context, pyvmem.Busy):
            rsv.close()
        assert rsv.is_open
    rsv.close()


def test_double_free_of_a_reservation(context: pyvmem.Context, rsv: pyvmem.Reservation) -> None:
    rsv.close()
    with refused(context, pyvmem.NotReserved):
        _native.free(context.handle, rsv.addr, 0)
    rsv.close()  # already closed, so this does nothing


def test_free_in_the_middle(context: pyvmem.Context, rsv: pyvmem.Reservation, page: int) -> None:
    with refused(context, pyvmem.InvalidArgument):
        _native.free(context.handle, rsv.addr + page, 0)


def test_use_of_a_closed_reservation(
    context: pyvmem.Context, rsv: pyvmem.Reservation, page: int
) -> None:
    rsv.close()
    with context.create(page) as pages:
        for call in (
            lambda: rsv.map(0, pages),
            lambda: rsv.unmap(0, page),
            lambda: rsv.read(0, 1),
            lambda: rsv.write(0, b"x"),
            lambda: rsv.fill(0, page),
            lambda: rsv.query(),
            lambda: rsv.array((1,), "uint8"),
        ):
            with refused(context, pyvmem.BadHandle):
                call()


def test_use_after_close(backend: str) -> None:
    context = open_context(backend)
    page = context.info.granule
    rsv, pages = context.reserve(page), context.create(page)
    batch = pyvmem.OpBatch(1)
    batch.fill(rsv.addr, page)
    ticket, known = context.submit(pyvmem.OpBatch(1)), context.submit(pyvmem.OpBatch(1))
    known.wait()
    addr = rsv.addr
    context.close()
    known.wait()  # the object already holds the result
    calls: list[Callable[[], Any]] = [
        context.stats,
        context.check,
        context.trim,
        lambda: context.reserve(page),
        lambda: context.create(page),
        lambda: context.retain(addr, page),
        lambda: context.map(addr, page, pages),
        lambda: context.unmap(addr, page),
        lambda: context.batch(batch),
        lambda: context.submit(batch),
        lambda: context.read(addr, 1),
        lambda: context.write(addr, b"x"),
        lambda: context.copy(addr, addr, 1),
        lambda: context.fill(addr, page),
        lambda: context.query(addr),
        lambda: context.warm(page),
        lambda: context.join(addr, page),
        lambda: context.compact(),
        lambda: context.inject(pyvmem.Inject.MAP),
        lambda: rsv.map(0, pages),
        lambda: rsv.array((1,), "uint8"),
        lambda: pages.info,
        pages.release,
        pages.drop,
        ticket.wait,
        ticket.done,
    ]
    for call in calls:
        with pytest.raises(pyvmem.BadHandle) as caught:
            call()
        assert type(caught.value) is pyvmem.BadHandle
    context.close()  # a second close does nothing
    rsv.close()


# ---- batches -----------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["batch", "submit"])
@pytest.mark.parametrize("bad", ["unmap", "populate", "map", "fill"])
def test_batch_with_one_bad_entry_in_the_middle(
    context: pyvmem.Context, rsv: pyvmem.Reservation, page: int, how: str, bad: str
) -> None:
    with context.create(page) as pages, context.create(page) as other:
        rsv.map(0, pages)
        rsv.fill(0, page, 7)
        batch = pyvmem.OpBatch(5)
        batch.populate(rsv.addr + 2 * page, page, count=3, stride=2 * page)
        batch.fill(rsv.addr, page, 9)
        if bad == "unmap":
            batch.unmap(rsv.addr + page, page)
            error: type[pyvmem.VMemError] = pyvmem.NotMapped
        elif bad == "populate":
            batch.populate(rsv.addr, page)
            error = pyvmem.AlreadyMapped
        elif bad == "map":
            batch.map(rsv.addr + page, 2 * page, other)
            error = pyvmem.OutOfRange
        else:
            batch.fill(rsv.addr + rsv.nbytes, page, 1)
            error = pyvmem.NotReserved
        batch.map(rsv.addr + 8 * page, page, other)
        batch.unmap(rsv.addr, page)
        with refused(context, error, calls=True):
            getattr(context, how)(batch)
        assert rsv.read(0, page) == b"\x07" * page


def test_batch_maps_where_it_unmaps(
    context: pyvmem.Context, rsv: pyvmem.Reservation, page: int
) -> None:
    with context.create(page) as pages:
        rsv.map(0, pages)
        batch = pyvmem.OpBatch(2)
        batch.unmap(rsv.addr, page)
        batch.populate(rsv.addr, page)
        with refused(context, pyvmem.AlreadyMapped, calls=True):
            context.batch(batch)


def test_batch_holes_are_reported_in_the_order_of_the_operations(
    context: pyvmem.Context, rsv: pyvmem.Reservation, page: int
) -> None:
    batch = pyvmem.OpBatch(2)
    batch.fill(rsv.addr, page, 7, holes=True)
    batch.populate(rsv.addr, page)
    context.batch(batch)
    assert rsv.read(0, page) == bytes(page)
    rsv.unmap(0, page)
    batch.clear()
    batch.populate(rsv.addr, page)
    batch.fill(rsv.addr, page, 7, holes=True)
    with refused(context, pyvmem.Busy, calls=True):
        context.batch(batch)


@pytest.mark.parametrize("stride", [0, 1])
def test_batch_pieces_that_overlap(
    context: pyvmem.Context, rsv: pyvmem.Reservation, page: int, stride: int
) -> None:
    batch = pyvmem.OpBatch(1)
    batch.populate(rsv.addr, 2 * page, count=2, stride=stride * page)
    with refused(context, pyvmem.InvalidArgument):
        context.batch(batch)


def test_batch_overflowing_pieces(
    context: pyvmem.Context, rsv: pyvmem.Reservation, page: int
) -> None:
    batch = pyvmem.OpBatch(1)
    batch.populate(rsv.addr, page, count=1 << 60, stride=page)
    with refused(context, pyvmem.AddressOverflow):
        context.batch(batch)


def test_batch_fill_value_not_a_byte(
    context: pyvmem.Context, rsv: pyvmem.Reservation, page: int
) -> None:
    batch = pyvmem.OpBatch(1)
    batch.fill(rsv.addr, page, 256)
    with refused(context, pyvmem.InvalidArgument) as caught:
        context.batch(batch)
    assert caught.value.limit == 255
    with refused(context, pyvmem.InvalidArgument):
        context.fill(rsv.addr, page, 256)


def test_batch_unsupported_page_size(
    context: pyvmem.Context, rsv: pyvmem.Reservation, page: int
) -> None:
    batch = pyvmem.OpBatch(1)
    batch.populate(rsv.addr, page, page_size=3 * page)
    with refused(context, pyvmem.NotSupported):
        context.batch(batch)


def test_opbatch_that_is_full(rsv: pyvmem.Reservation, page: int) -> None:
    batch = pyvmem.OpBatch(1)
    batch.fill(rsv.addr, page)
    for append in (batch.fill, batch.unmap, batch.populate):
        with pytest.raises(pyvmem.InvalidArgument) as caught:
            append(rsv.addr, page)
        assert caught.value.limit == 1
    assert len(batch) == 1


@pytest.mark.parametrize("capacity", [0, -1, 1 << 30])
def test_opbatch_capacity(capacity: int) -> None:
    with pytest.raises(pyvmem.InvalidArgument, match=str(capacity)):
        pyvmem.OpBatch(capacity)


@pytest.mark.parametrize("value", [-1, U64])
def test_opbatch_number_outside_64_bits(value: int) -> None:
    batch = pyvmem.OpBatch(4)
    for append in (batch.fill, batch.unmap, batch.populate):
        with pytest.raises(pyvmem.InvalidArgument, match=str(value)):
            append(value, 4096)
    with pytest.raises(TypeError):
        batch.fill("x", 4096)  # type: ignore[arg-type]
    assert len(batch) == 0


def test_too_many_batches(context: pyvmem.Context) -> None:
    empty = pyvmem.OpBatch(1)
    limit = 4096
    with pyvmem.FdEvent.create() as gate:
        tickets = [context.submit(empty, after=[gate]) for _ in range(limit)]
        with refused(context, pyvmem.TooManyBatches):
            context.submit(empty, after=[gate])
        gate.set()
        for ticket in tickets:
            ticket.wait(60)
    context.submit(empty).wait(60)
    tickets[0].wait()  # a second wait is allowed


def test_ticket_of_another_context(backend: str, context: pyvmem.Context) -> None:
    with open_context(backend) as other:
        for handle in (0, 1, U64 - 1):
            with refused(other, pyvmem.BadHandle):
                _native.wait(other.handle, handle, 0)
        with refused(other, pyvmem.BadHandle):
            pyvmem.Ticket(other).wait()  # a ticket that was never submitted


def test_after_an_invalid_descriptor(context: pyvmem.Context) -> None:
    batch = pyvmem.OpBatch(1)
    with refused(context, pyvmem.InvalidArgument):
        context.submit(batch, after=[pyvmem.FdEvent(-1)])
    with pytest.raises(pyvmem.VMemError):
        context.submit(batch, after=[pyvmem.FdEvent(1 << 20)])
    for wrong in (None, "stream", 3, object()):
        with pytest.raises(TypeError):
            context.submit(batch, after=[wrong])
    assert context.stats().pending == 0


# ---- contents ----------------------------------------------------------------------------------


def test_read_and_write_unmapped(
    context: pyvmem.Context, rsv: pyvmem.Reservation, page: int
) -> None:
    with context.create(page) as pages:
        rsv.map(0, pages)
        for call in (
            lambda: rsv.read(page, 1),
            lambda: rsv.read(page - 1, 2),
            lambda: rsv.write(page - 1, b"ab"),
            lambda: rsv.fill(page, page, 1),
            lambda: context.copy(rsv.addr + page, rsv.addr, 1),
            lambda: context.copy(rsv.addr, rsv.addr + page, 1),
        ):
            with refused(context, pyvmem.NotMapped):
                call()
        with refused(context, pyvmem.NotReserved):
            context.read(page, 1)


def test_size_zero(context: pyvmem.Context, rsv: pyvmem.Reservation, page: int) -> None:
    with context.create(page) as pages:
        rsv.map(0, pages)
        for call in (
            lambda: rsv.read(0, 0),
            lambda: rsv.write(0, b""),
            lambda: rsv.fill(0, 0),
            lambda: context.copy(rsv.addr, rsv.addr, 0),
            lambda: context.unmap(rsv.addr, 0),
            lambda: context.retain(rsv.addr, 0),
        ):
            with refused(context, pyvmem.InvalidArgument):
                call()


def test_absurd_sizes(context: pyvmem.Context, rsv: pyvmem.Reservation, page: int) -> None:
    with refused(context, pyvmem.NotMapped) as caught:
        context.read(rsv.addr, 1 << 62)  # rejected before Python tries to allocate 4 EiB
    assert caught.value.limit == rsv.nbytes
    with refused(context, pyvmem.AddressOverflow):
        context.fill(rsv.addr, U64 - 1)
    with refused(context, pyvmem.InvalidArgument):
        context.fill(rsv.addr, U64)


def test_copy_onto_itself(context: pyvmem.Context, rsv: pyvmem.Reservation, page: int) -> None:
    with context.create(page) as pages:
        rsv.map(0, pages)
        with refused(context, pyvmem.InvalidArgument):
            context.copy(rsv.addr, rsv.addr + 1, 2)


def test_write_to_a_readonly_mapping(
    context: pyvmem.Context, rsv: pyvmem.Reservation, page: int
) -> None:
    if pyvmem.Caps.READONLY not in context.info.caps:
        pytest.skip("this back end does not support read-only mappings")
    calls: list[Callable[[], None]] = [
        lambda: rsv.write(0, b"x"),
        lambda: rsv.fill(0, page, 1),
        lambda: context.copy(rsv.addr, rsv.addr, page),
    ]
    with context.create(page) as pages:
        rsv.map(0, pages, readonly=True)
        for call in calls:
            with refused(context, pyvmem.ReadOnly):
                call()
        assert rsv.query().readonly


# ---- tensors -----------------------------------------------------------------------------------


def test_tensor_larger_than_the_reservation(
    context: pyvmem.Context, rsv: pyvmem.Reservation
) -> None:
    n = rsv.nbytes // 4
    for shape, strides, offset in (
        ((n + 1,), None, 0),
        ((n,), None, 4),
        ((2, 2), (n - 1, 1), 0),
        ((1 << 40, 1 << 40), None, 0),
        ((1,), None, rsv.nbytes),
    ):
        with refused(context, pyvmem.InvalidArgument) as caught:
            rsv.array(shape, "float32", strides, offset)
        assert caught.value.limit == rsv.nbytes
        assert caught.value.bytes > rsv.nbytes
        assert str(rsv.nbytes) in str(caught.value)
        assert str(caught.value.bytes) in str(caught.value)
    assert rsv.live_arrays == 0


@pytest.mark.parametrize(
    ("shape", "dtype", "strides", "offset"),
    [
        ((-1,), "float32", None, 0),
        ((1,), "float32", (-1,), 0),
        ((1,), "float32", None, -4),
        ((1,), "float32", None, 2),
        ((2, 2), "float32", (1,), 0),
        ((1,), "float31", None, 0),
        ((1,), "object", None, 0),
        ((1,) * 65, "uint8", None, 0),
        ((0, 1 << 63), "uint8", None, 0),
    ],
)
def test_malformed_tensor(
    context: pyvmem.Context,
    rsv: pyvmem.Reservation,
    shape: tuple[int, ...],
    dtype: str,
    strides: tuple[int, ...] | None,
    offset: int,
) -> None:
    with refused(context, pyvmem.InvalidArgument):
        rsv.array(shape, dtype, strides, offset)
    assert rsv.live_arrays == 0


@pytest.mark.parametrize(("offset", "size"), [(-1, 1), (0, -1), (0, 1 << 40), (1 << 40, 1)])
def test_offsets_beyond_the_reservation(
    context: pyvmem.Context, rsv: pyvmem.Reservation, offset: int, size: int
) -> None:
    for call in (lambda: rsv.read(offset, size), lambda: rsv.fill(offset, size)):
        with refused(context, pyvmem.InvalidArgument) as caught:
            call()
        assert caught.value.limit == rsv.nbytes


# ---- opening -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {"backend": "vulkan"},
        {"backend": ""},
        {"granule": 5000},
        {"granule": 1},
        {"granule": -1},
        {"slab_size": 12345},
        {"slab_size": 2048, "granule": 4096},
        {"mem_limit": -1},
        {"mem_limit": U64},
        {"devices": []},
        {"devices": [0] * 17},
        {"devices": [1 << 40]},
    ],
    ids=str,
)
def test_open(options: dict[str, Any]) -> None:
    with pytest.raises((pyvmem.InvalidArgument, pyvmem.NotSupported)) as caught:
        pyvmem.Context(**{"backend": "host", **options})
    assert caught.value.op == "vmem_open"


def test_open_an_unusable_back_end() -> None:
    for one in pyvmem.probe():
        if one.usable:
            continue
        with pytest.raises((pyvmem.BackendUnavailable, pyvmem.AccessDenied)) as caught:
            pyvmem.Context(one.backend)
        assert len(str(caught.value)) > 10
        assert caught.value.errno == one.error


def test_inject_arguments(context: pyvmem.Context) -> None:
    for kinds, count, error in ((0, 1, 5), (1 << 10, 1, 5), (1, 1, 0), (1, 1, -5), (1, 1, 1 << 20)):
        with refused(context, pyvmem.InvalidArgument):
            context.inject(kinds, 0, count, error)


# ---- objects of the wrong type
# ---------------------------------------------------------------------


def test_objects_of_another_type_are_named(context: pyvmem.Context, page: int) -> None:
    rsv = context.reserve(page)
    ops = pyvmem.OpBatch(1)
    calls: list[tuple[str, Callable[[], Any]]] = [
        ("backend: expected str, not None", lambda: pyvmem.Context(None)),  # type: ignore[arg-type]
        ("pages: expected Pages, not None", lambda: rsv.map(0, None)),  # type: ignore[arg-type]
        ("pages: expected Pages", lambda: context.map(rsv.addr, page, 3)),  # type: ignore[arg-type]
        ("pages: expected Pages", lambda: ops.map(rsv.addr, page, "x")),  # type: ignore[arg-type]
        ("ops: expected OpBatch", lambda: context.batch([])),  # type: ignore[arg-type]
        ("ops: expected OpBatch", lambda: context.submit(None)),  # type: ignore[arg-type]
        ("ticket: expected Ticket or None", lambda: context.submit(ops, ticket=1)),  # type: ignore[arg-type]
        ("shape: expected whole numbers, not 'x'", lambda: rsv.tensor("x", "uint8")),  # type: ignore[arg-type]
        ("cannot be interpreted as an integer", lambda: rsv.read("x", 1)),  # type: ignore[arg-type]
        ("cannot be interpreted as an integer", lambda: pyvmem.OpBatch(None)),  # type: ignore[arg-type]
        ("cannot be interpreted as an integer", lambda: pyvmem.FdEvent("x")),  # type: ignore[arg-type]
        ("interpreted as an integer", lambda: context.create(page, location="x")),  # type: ignore[arg-type]
    ]
    before = context.stats()
    for text, call in calls:
        with pytest.raises(TypeError, match=text):
            call()
    assert context.stats() == before
    rsv.close()


@pytest.mark.parametrize(
    ("fd", "text"), [(-1, "negative"), (1 << 31, "too large"), (1 << 70, "too large")]
)
def test_an_invalid_descriptor(context: pyvmem.Context, fd: int, text: str) -> None:
    with (
        refused(context, pyvmem.InvalidArgument) as caught,
        pyvmem.FdEvent(fd) as event,
    ):
        context.submit(pyvmem.OpBatch(1), after=[event])
    assert f"FdEvent({fd}) is {text}" in str(caught.value)


def test_a_negative_device() -> None:
    with pytest.raises(pyvmem.InvalidArgument, match="device = -1: expected a CUDA ordinal"):
        pyvmem.Context("host", device=-1)


def test_a_handle_ends_by_release_or_drop(context: pyvmem.Context, page: int) -> None:
    with context.create(page) as pages:
        assert not hasattr(pages, "close"), "handles have release and drop, not close"
    assert context.stats().handles == 0
