# SPDX-License-Identifier: MIT
"""Contexts, pages, mapping, batches and tickets from Python."""

from __future__ import annotations

import dataclasses
import errno
import os
import select
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import open_context
from interrupts_helpers import Interrupted, alarms

import pyvmem
from pyvmem import _native


@pytest.fixture
def rsv(context: pyvmem.Context) -> Iterator[pyvmem.Reservation]:
    with context.reserve(32 * context.info.granule) as reservation:
        yield reservation


# ---- context -----------------------------------------------------------------------------------


def test_info(context: pyvmem.Context, backend: str) -> None:
    info = context.info
    assert info.backend == backend
    assert info.granule in info.page_sizes
    assert list(info.page_sizes) == sorted(info.page_sizes)
    assert pyvmem.Caps.ALIAS in info.caps
    assert info.devices == (0,)
    if backend == "host":
        assert pyvmem.Caps.CPU_ACCESS in info.caps
        assert info.max_segments == int(Path("/proc/sys/vm/max_map_count").read_text())
        assert (info.uuid, info.driver) == ("", "")
    else:
        assert info.uuid.startswith("GPU-")
        assert info.driver
        assert info.device_name
    with pytest.raises(dataclasses.FrozenInstanceError):
        info.granule = 1  # type: ignore[misc]


def test_two_threads_close_one_reservation(
    context: pyvmem.Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only one thread may free the addresses: a second free would hit their next owner."""
    free, began, got = _native.free, threading.Event(), []
    size = context.info.granule
    one = context.reserve(size)

    def slow(*args: Any, **options: Any) -> None:
        began.set()
        free(*args, **options)
        if not got:
            got.append(context.reserve(size))  # usually at the first reservation's address
            time.sleep(0.1)

    with monkeypatch.context() as patch:
        patch.setattr(_native, "free", slow)
        thread = threading.Thread(target=one.close)
        thread.start()
        assert began.wait(60)
        one.close()
        thread.join(60)
    assert context.stats().reservations == 1
    got[0].close()


@pytest.mark.parametrize("name", ["nope", "host\0nope", "host\udcff", ""])
def test_an_unknown_back_end(name: str) -> None:
    shown = name.encode("unicode_escape").decode().replace("\\x00", "\\0")
    with pytest.raises(pyvmem.InvalidArgument) as caught:
        pyvmem.Context(name)
    assert f'"{shown}"' in str(caught.value)


def test_auto_agrees_with_probe() -> None:
    results = pyvmem.probe()
    assert [one.backend for one in results] == ["uvm", "stock", "cuda", "host"]
    used = [one for one in results if one.used]
    assert len(used) == 1
    with pyvmem.Context() as context:
        assert context.info.backend == used[0].backend
        for one in results[: results.index(used[0])]:
            assert one.backend in context.info.why
    for one in results:
        assert one.reason
        assert one.usable == (one.error == 0)
        assert (one.error_name == "") == one.usable


def test_stats_mirror_the_structure(context: pyvmem.Context) -> None:
    fields = [name for name, _ in _native.ffi.typeof("struct vmem_stats").fields]
    mine = [field.name for field in dataclasses.fields(pyvmem.Stats)]
    assert fields == ["size", *mine]
    raw = _native.get_stats(context.handle)
    assert [getattr(context.stats(), name) for name in mine] == [getattr(raw, n) for n in mine]


def test_options_are_passed_on(backend: str) -> None:
    if backend != "host":
        pytest.skip("sizes that only host has")
    options = {"granule": 8192, "slab_size": 1 << 20, "mem_limit": 1 << 21, "pool_low": 1 << 19}
    with pyvmem.Context("host", **options, pool_high=pyvmem.KEEP_ALL) as context:  # type: ignore[arg-type]
        assert context.info.granule == 8192
        assert context.info.slab_size == 1 << 20
        pages = context.create(1 << 21)
        with pytest.raises(pyvmem.OutOfMemory):
            context.create(8192)
        pages.release()
        assert context.stats().free_bytes == 1 << 21  # kept
        assert context.trim() == 1 << 21


def test_pool_low_is_kept_ready(host: pyvmem.Context) -> None:
    with pyvmem.Context("host", granule=4096, pool_low=1 << 20) as context:
        pages = context.create(4096)
        context.submit(pyvmem.OpBatch(1)).wait()
        deadline = time.monotonic() + 60
        while context.stats().free_bytes < 1 << 20:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        pages.release()


def test_device_spellings(backend: str) -> None:
    torch = pytest.importorskip("torch")
    name = "cpu" if backend == "host" else "cuda:0"
    for device in (0, name, torch.device(name)):
        with open_context(backend, device=device) as context:
            assert context.info.devices == (0,)
    with open_context(backend, devices=[torch.device(name)]) as context:
        assert context.info.devices == (0,)
    for wrong in ("gpu", "cuda:x", "mps"):
        with pytest.raises(ValueError, match="expected"):
            open_context(backend, device=wrong)
    with pytest.raises(TypeError, match="device"):
        open_context(backend, device=object())


def test_with_blocks(backend: str) -> None:
    with open_context(backend) as context:
        page = context.info.granule
        with context.reserve(2 * page) as reservation, context.create(page) as pages:
            reservation.map(page, pages)
            assert context.stats().mapped_bytes == page
        assert context.stats().mapped_bytes == 0
        assert context.stats().reserved_bytes == 0
        with context.reserve(page) as reservation:
            batch = pyvmem.OpBatch(1)
            batch.populate(reservation.addr, page)
            context.batch(batch)  # leaving the block unmaps
        assert context.stats().used_bytes == 0
        assert context.is_open
    assert not context.is_open


# ---- reservations ------------------------------------------------------------------------------


def test_reserve(context: pyvmem.Context, page: int) -> None:
    reservation = context.reserve(3 * page)
    assert reservation.nbytes == 3 * page
    assert reservation.addr % max(page, 2 << 20) == 0
    info = context.query(reservation.addr + 2 * page)
    assert (info.base, info.nbytes) == (reservation.addr, 3 * page)
    assert (info.mapped, info.readonly, info.mapped_bytes) == (False, False, 0)
    assert context.stats().reserved_bytes == 3 * page
    reservation.close()
    with pytest.raises(pyvmem.NotReserved):
        context.query(reservation.addr)
    wide = context.reserve(page, align=1 << 30)
    assert wide.addr % (1 << 30) == 0
    wide.close()


def test_sparse(context: pyvmem.Context, page: int) -> None:
    if pyvmem.Caps.SPARSE not in context.info.caps:
        with pytest.raises(pyvmem.NotSupported):
            context.reserve(page, sparse=True)
        return
    with context.reserve(page, sparse=True) as reservation:
        assert reservation.sparse
        assert pyvmem.RangeFlags.SPARSE in reservation.query().flags
    with context.reserve(page) as reservation:
        assert not reservation.sparse


# ---- pages and mapping -------------------------------------------------------------------------


def test_map_write_alias_release(
    context: pyvmem.Context, rsv: pyvmem.Reservation, page: int
) -> None:
    pages = context.create(2 * page)
    assert pages.nbytes == 2 * page
    assert pages.info == pyvmem.PagesInfo(
        2 * page, page, pages.info.runs, 0, pyvmem.Location.DEVICE, pages.info.device
    )
    rsv.map(0, pages)
    assert rsv.read(0, 2 * page) == bytes(2 * page)
    rsv.write(page - 2, b"abcd")
    rsv.map(8 * page, pages, page, page)  # maps the second page a second time
    assert rsv.read(8 * page, 2) == b"cd"
    rsv.write(8 * page, b"x")
    assert rsv.read(page - 2, 4) == b"abxd"
    assert pages.info.mappings == 2
    stats = context.stats()
    assert (stats.mapped_bytes, stats.used_bytes) == (3 * page, 2 * page)
    rsv.unmap(8 * page, page)
    pages.release()
    stats = context.stats()
    assert (stats.mapped_bytes, stats.used_bytes, stats.handles) == (0, 0, 0)


def test_pages_are_zero_for_the_next_user(
    context: pyvmem.Context, rsv: pyvmem.Reservation, page: int
) -> None:
    for _ in range(3):
        pages = context.create(4 * page)
        rsv.map(0, pages)
        assert rsv.read(0, 4 * page) == bytes(4 * page)
        rsv.fill(0, 4 * page, 0xFF)
        pages.release()


def test_drop_and_retain(context: pyvmem.Context, rsv: pyvmem.Reservation, page: int) -> None:
    pages = context.create(page)
    rsv.map(0, pages)
    pages.drop()
    rsv.fill(0, page, 5)
    again = context.retain(rsv.addr, page)
    rsv.unmap(0, page)
    assert context.stats().used_bytes == page
    rsv.map(page, again)
    assert rsv.read(page, 1) == b"\x05"
    again.release()
    assert context.stats().used_bytes == 0


def test_partial_unmap_cuts_a_mapping(
    context: pyvmem.Context, rsv: pyvmem.Reservation, page: int
) -> None:
    with context.create(page) as one, context.create(page) as two, context.create(page) as three:
        for at, pages in enumerate((one, two, three)):
            rsv.map(at * page, pages)
            rsv.fill(at * page, page, at + 1)
        context.unmap(rsv.addr + page, page)
        assert rsv.read(0, 1) + rsv.read(2 * page, 1) == b"\x01\x03"
        assert not rsv.query(page).mapped


def test_readonly(context: pyvmem.Context, rsv: pyvmem.Reservation, page: int) -> None:
    if pyvmem.Caps.READONLY not in context.info.caps:
        pytest.skip("this back end has no read-only mappings")
    with context.create(page) as pages:
        rsv.map(0, pages)
        rsv.map(page, pages, readonly=True)
        rsv.fill(0, page, 9)
        assert rsv.read(page, 1) == b"\x09"
        assert rsv.query(page).readonly
        assert not rsv.query(0).readonly
        with pytest.raises(pyvmem.ReadOnly):
            rsv.write(page, b"x")
        rsv.unmap(page, page)


def test_page_sizes(context: pyvmem.Context, backend: str) -> None:
    for size in context.info.page_sizes:
        if size < context.info.granule:
            continue
        with context.create(size, page_size=size) as pages:
            assert pages.info.page_size == size
            with context.reserve(max(size, 2 << 20), align=max(size, 2 << 20)) as reservation:
                reservation.map(0, pages)
                assert reservation.read(size - 1, 1) == b"\0"


def test_copy_and_buffers(context: pyvmem.Context, rsv: pyvmem.Reservation, page: int) -> None:
    with context.create(2 * page) as pages:
        rsv.map(0, pages)
        for data in (b"bytes", bytearray(b"array"), memoryview(b"views")):
            rsv.write(3, data)
            assert rsv.read(3, 5) == bytes(data)
        context.copy(rsv.addr + page, rsv.addr, page)
        assert rsv.read(page + 3, 5) == b"views"


# ---- batches and tickets -----------------------------------------------------------------------


def test_opbatch_matches_the_structure() -> None:
    """Sets each field to a different value and checks the fields of the C structure."""
    batch = pyvmem.OpBatch(6)
    with pyvmem.Context("host") as context, context.create(65536) as pages:
        batch.map(1, 2, pages, 3, 4, 5, readonly=True, consume=True, offset_stride=25)
        batch.populate(6, 7, 8, 9, 10, True, True, pyvmem.Location.PEER, -1)
        batch.unmap(11, 12, 13, 14, holes=True)
        batch.fill(15, 16, 17, 18, 19, holes=True)
        batch.map(1, 2, pages, replace=True)
        batch.populate(20, 21, copy_from=22, copy_stride=23, copy_bytes=24)
        handle = pages.handle
    *names, reserved = [name for name, _ in _native.ffi.typeof("struct vmem_op").fields]
    assert all(not any(getattr(batch._array[k], reserved)) for k in range(6))
    rows = [tuple(getattr(batch._array[k], name) for name in names) for k in range(6)]
    c = _native.constant
    assert rows == [
        (c("VMEM_OP_MAP"), c("VMEM_OP_READONLY") | c("VMEM_OP_CONSUME"), 1, 2, 4, 5, handle, 3)
        + (0, 0, 0, 0, 0, 0, 0, 25),
        (c("VMEM_OP_POPULATE"), c("VMEM_OP_DIRTY") | c("VMEM_OP_SPREAD"), 6, 7, 8, 9, 0, 0)
        + (2, -1, 10, 0, 0, 0, 0, 0),
        (c("VMEM_OP_UNMAP"), c("VMEM_OP_HOLES"), 11, 12, 13, 14) + (0,) * 10,
        (c("VMEM_OP_FILL"), c("VMEM_OP_HOLES"), 15, 16, 18, 19, 0, 0, 0, 0, 0, 17, 0, 0, 0, 0),
        (c("VMEM_OP_MAP"), c("VMEM_OP_REPLACE"), 1, 2, 1, 0, handle) + (0,) * 9,
        (c("VMEM_OP_POPULATE"), c("VMEM_OP_COPY"), 20, 21, 1) + (0,) * 7 + (22, 23, 24, 0),
    ]
    assert (len(batch), batch.capacity) == (6, 6)
    batch.clear()
    assert len(batch) == 0
    batch.fill(1, 2)
    assert (batch._array[0].value, batch._array[0].flags) == (0, 0)


@pytest.mark.parametrize("how", ["batch", "submit"])
def test_batch(context: pyvmem.Context, rsv: pyvmem.Reservation, page: int, how: str) -> None:
    def run(batch: pyvmem.OpBatch) -> None:
        if how == "batch":
            context.batch(batch)
        else:
            ticket = context.submit(batch)
            ticket.wait(60)
            assert ticket.done()

    batch = pyvmem.OpBatch(8)
    batch.populate(rsv.addr, page, count=4, stride=2 * page)
    run(batch)
    assert context.stats().mapped_bytes == 4 * page
    batch.clear()
    batch.fill(rsv.addr, page, 3, count=4, stride=2 * page)
    batch.populate(rsv.addr + page, page)
    run(batch)
    assert [rsv.read(2 * k * page, 1) for k in range(4)] == [b"\x03"] * 4
    assert rsv.read(page, 1) == b"\0"
    batch.clear()
    batch.unmap(rsv.addr, 8 * page, holes=True)
    run(batch)
    assert context.stats().used_bytes == 0
    run(batch)  # the same batch succeeds again, even though all ranges are now holes
    assert context.stats().mapped_bytes == 0


def test_pages_are_replaced_under_their_address(
    context: pyvmem.Context, rsv: pyvmem.Reservation, page: int
) -> None:
    """Copies contents to new pages, then maps the new pages at the old addresses."""
    batch = pyvmem.OpBatch(2)
    batch.populate(rsv.addr, page, count=2, stride=2 * page)
    context.batch(batch)
    rsv.write(0, b"one")
    rsv.write(2 * page, b"two")
    scratch = rsv.addr + 4 * page
    batch.clear()
    batch.populate(
        scratch, page, count=2, stride=2 * page, copy_from=rsv.addr, copy_stride=2 * page
    )
    context.batch(batch)
    pages = context.gather(scratch, page, 2, 2 * page)
    batch.clear()
    batch.map(rsv.addr, page, pages, count=2, stride=2 * page, consume=True, replace=True)
    batch.unmap(scratch, page, count=2, stride=2 * page)
    context.batch(batch)
    assert (rsv.read(0, 3), rsv.read(2 * page, 3)) == (b"one", b"two")
    assert context.stats().used_bytes == 2 * page
    context.check()


def test_large_pages_are_not_cut(context: pyvmem.Context) -> None:
    large = 2 << 20
    if large not in context.info.page_sizes or context.info.granule >= large:
        pytest.skip("its smallest page is as large")
    with context.reserve(4 * large, large=True) as reservation:
        batch = pyvmem.OpBatch(1)
        batch.populate(reservation.addr, large, page_size=large)
        context.batch(batch)
        assert pyvmem.RangeFlags.LARGE in reservation.query(large // 2).flags
        with pytest.raises(pyvmem.InvalidArgument, match="cuts the page of 2097152 bytes"):
            reservation.unmap(0, large // 2)
        reservation.unmap(0, large)


def test_consumed_pages_belong_to_the_mapping(
    context: pyvmem.Context, rsv: pyvmem.Reservation, page: int
) -> None:
    pages = context.create(page)
    batch = pyvmem.OpBatch(2)
    batch.map(rsv.addr, page, pages, consume=True)
    context.batch(batch)
    with pytest.raises(pyvmem.BadHandle):
        pages.release()
    rsv.unmap(0, page)
    assert context.stats().used_bytes == 0
    again = context.create(page)
    batch.clear()
    batch.map(rsv.addr, page, again, consume=True)
    context.inject(pyvmem.Inject.MAP)
    ticket = context.submit(batch)
    with pytest.raises(pyvmem.DriverError):
        ticket.wait()
    again.release()  # the batch was rolled back, so the reference was not consumed


def test_submit_waits_for_a_descriptor(
    context: pyvmem.Context, rsv: pyvmem.Reservation, page: int
) -> None:
    with context.create(page) as pages:
        rsv.map(0, pages)
        rsv.fill(0, page, 1)
        with pyvmem.FdEvent.create() as gate:
            batch = pyvmem.OpBatch(2)
            batch.unmap(rsv.addr, page)
            batch.populate(rsv.addr + page, page)
            ticket = context.submit(batch, after=[gate])
            batch.clear()  # has no effect: `submit` copied the batch
            assert not ticket.done()
            with pytest.raises(pyvmem.Timeout):
                ticket.wait(0.3)
            assert context.stats().pending == 1
            assert context.query(rsv.addr).flags & pyvmem.RangeFlags.BUSY
            with pytest.raises(pyvmem.Busy):
                rsv.unmap(0, page)
            gate.set()
            ticket.wait(60)
        assert not rsv.query(0).mapped
        assert rsv.query(page).mapped
        ticket.wait()  # the result can be read again


def test_batch_waits_for_a_descriptor_in_the_calling_thread(
    context: pyvmem.Context, rsv: pyvmem.Reservation, page: int
) -> None:
    batch = pyvmem.OpBatch(1)
    batch.populate(rsv.addr, page)
    with pyvmem.FdEvent.create() as gate:
        opener = threading.Timer(0.05, gate.set)
        opener.start()
        context.batch(batch, after=[gate])
        assert select.select([gate.fd], [], [], 0)[0]  # the gate is open on return
        opener.join()
    assert rsv.query().mapped


def test_a_waiting_batch_lets_later_ones_pass(
    context: pyvmem.Context, rsv: pyvmem.Reservation, page: int
) -> None:
    first, second = pyvmem.OpBatch(1), pyvmem.OpBatch(1)
    first.populate(rsv.addr, page)
    second.populate(rsv.addr + page, page)
    with pyvmem.FdEvent.create() as gate:
        held = context.submit(first, after=[gate])
        context.submit(second).wait(60)
        assert not held.done()
        gate.set()
        held.wait(60)


def test_wait_raises_the_error_of_a_background_batch(
    context: pyvmem.Context, rsv: pyvmem.Reservation, page: int
) -> None:
    batch = pyvmem.OpBatch(1)
    batch.populate(rsv.addr, page)
    context.inject(pyvmem.Inject.MAP, 0, 1, errno.EIO)
    ticket = context.submit(batch)
    for _ in range(2):
        with pytest.raises(pyvmem.DriverError) as caught:
            ticket.wait(60)
        assert caught.value.op
    assert ticket.done()
    with pytest.raises(pyvmem.DriverError):
        ticket.order()
    assert context.stats().used_bytes == 0
    context.submit(batch).wait(60)


def test_order(context: pyvmem.Context, rsv: pyvmem.Reservation, page: int) -> None:
    batch = pyvmem.OpBatch(1)
    batch.populate(rsv.addr, page)
    context.submit(batch).order()
    assert rsv.read(0, page) == bytes(page)


def test_after_accepts_streams_by_their_protocols(context: pyvmem.Context) -> None:
    batch = pyvmem.OpBatch(1)

    class Stream:
        def __cuda_stream__(self) -> tuple[int, int]:
            return (0, 0)

    context.submit(batch, after=[pyvmem.CurrentStream]).wait(60)
    if context.cuda_device is None:
        with pytest.raises(pyvmem.NotSupported):
            context.submit(batch, after=[Stream()])
    else:
        context.submit(batch, after=[Stream()]).wait(60)


def test_waiting_can_be_interrupted(context: pyvmem.Context) -> None:
    """A signal handler runs during an unlimited wait in C, and its exception ends the wait."""

    class Alarm(Exception):
        pass

    def ring(*_: object) -> None:
        raise Alarm

    before = signal.signal(signal.SIGALRM, ring)
    try:
        with pyvmem.FdEvent.create() as gate:
            ticket = context.submit(pyvmem.OpBatch(1), after=[gate])
            signal.setitimer(signal.ITIMER_REAL, 0.05)
            with pytest.raises(Alarm):
                ticket.wait()
            gate.set()
            ticket.wait(60)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_gil_is_released_while_a_call_waits(context: pyvmem.Context) -> None:
    """The thread that opens the gate runs while another thread is inside a C call."""
    with pyvmem.FdEvent.create() as gate:
        ticket = context.submit(pyvmem.OpBatch(1), after=[gate])
        opener = threading.Timer(0.05, gate.set)
        opener.start()
        assert _native.wait(context.handle, ticket.handle, 60 * 10**9)
        opener.join()


# ---- pool --------------------------------------------------------------------------------------


def test_warm_and_trim(backend: str) -> None:
    with open_context(backend, pool_high=pyvmem.KEEP_ALL) as context:
        page = context.info.granule
        context.warm(8 * page)
        free = context.stats().free_bytes
        assert free >= 8 * page
        slabs = context.stats().slabs
        context.create(8 * page).release()
        assert (context.stats().slabs, context.stats().free_bytes) == (slabs, free)
        assert context.trim() == free
        assert context.stats().slab_bytes == 0


def test_compact() -> None:
    page = 64 << 10
    with pyvmem.Context("host", granule=page, slab_size=1 << 20) as context:
        rsv = context.reserve(160 * page)
        for at in range(0, 160, 16):  # a larger allocation would get its own slab
            ops = pyvmem.OpBatch(1)
            ops.populate(rsv.addr + at * page, 16 * page)
            context.batch(ops)
        for k in range(160):
            if k % 8:
                rsv.unmap(k * page, page)
            else:
                rsv.fill(k * page, page, k)
        kept = context.retain(rsv.addr + 8 * page, page)
        alias = context.reserve(page)
        alias.map(0, kept, page, 0, readonly=True)
        assert context.compact(0) == 0
        assert context.compact(1 << 20) == 1 << 20
        with pyvmem.FdEvent.create() as work:
            work.set()
            assert context.compact(after=[work]) == 7 << 20
        stats = context.stats()
        assert (stats.slab_bytes, stats.used_bytes) == (2 << 20, 20 * page)
        assert [rsv.read(k * page, 1)[0] for k in range(0, 160, 8)] == list(range(0, 160, 8))
        assert alias.read(0, page) == bytes([8]) * page
        context.check()
        assert context.compact() == 0
        kept.drop()


def test_join(context: pyvmem.Context, rsv: pyvmem.Reservation, page: int) -> None:
    pages = context.create(4 * page)
    for k in range(4):
        rsv.map(k * page, pages, page, k * page)
        rsv.fill(k * page, page, k)
    before = context.stats().mapped_bytes
    if pyvmem.Caps.JOIN in context.info.caps:
        assert context.join(rsv.addr, 4 * page) >= 0
    else:
        assert context.join(rsv.addr, 4 * page) == 0
    assert context.stats().mapped_bytes == before
    assert [rsv.read(k * page, 1)[0] for k in range(4)] == [0, 1, 2, 3]
    rsv.unmap(0, 4 * page)
    pages.release()


@pytest.mark.parametrize("kind", list(pyvmem.Inject))
def test_nth_failing_call_changes_nothing(
    context: pyvmem.Context, rsv: pyvmem.Reservation, page: int, kind: pyvmem.Inject
) -> None:
    """Fails each call of this kind that a batch makes, one at a time, until the batch succeeds."""
    with context.create(2 * page) as pages:
        rsv.map(8 * page, pages)
        rsv.fill(8 * page, 2 * page, 4)
        batch = pyvmem.OpBatch(4)
        batch.populate(rsv.addr, page, count=3, stride=2 * page)
        batch.map(rsv.addr + 16 * page, 2 * page, pages)
        batch.unmap(rsv.addr + 8 * page, 2 * page)
        before = context.stats()
        for n in range(200):
            context.inject(kind, n, 1, errno.ENOMEM if kind == pyvmem.Inject.HEAP else errno.EIO)
            try:
                context.batch(batch)
            except (pyvmem.DriverError, pyvmem.OutOfMemory):
                after = context.stats()
                assert (after.mapped_bytes, after.used_bytes) == (
                    before.mapped_bytes,
                    before.used_bytes,
                )
                assert rsv.read(8 * page, 2 * page) == b"\x04" * 2 * page
                context.check()
            else:
                break
            finally:
                context.inject(0, 0, 0)
        else:
            pytest.fail("200 calls failed and the batch has still more")
        assert context.stats().mapped_bytes == 5 * page
        assert rsv.read(16 * page, 1) == b"\x04"


# ---- memory returned to the system ----------------------------------------------------------


def shmem_of_this_process() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssShmem:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no RssShmem")


def test_memory_is_returned_to_the_system(host: pyvmem.Context) -> None:
    size = 64 << 20
    start = shmem_of_this_process()
    with host.reserve(size) as rsv:
        pages = host.create(size)
        rsv.map(0, pages)
        rsv.fill(0, size, 1)
        # The kernel adds up its per-thread counters only now and then, hence the tolerance.
        assert shmem_of_this_process() - start >= size - (1 << 20)
        rsv.unmap(0, size // 2)
        pages.release()
        assert shmem_of_this_process() - start < 1 << 20
    assert host.stats().used_bytes == 0


def test_descriptors_and_mappings_do_not_leak() -> None:
    def held() -> tuple[int, int]:
        maps = Path("/proc/self/maps").read_text().count("memfd:")
        return len(os.listdir("/proc/self/fd")), maps

    with pyvmem.Context("host"):
        pass
    start = held()
    for _ in range(20):
        with pyvmem.Context("host", granule=4096) as context:
            rsv = context.reserve(1 << 20)
            batch = pyvmem.OpBatch(1)
            batch.populate(rsv.addr, 4096, count=64, stride=8192)
            with pyvmem.FdEvent.create() as gate:
                gate.set()
                context.submit(batch, after=[gate]).wait()
            rsv.close(unmap=True)
    assert held() == start


# ---- threads -----------------------------------------------------------------------------------


def test_threads_on_their_own_ranges(context: pyvmem.Context, page: int) -> None:
    errors: list[BaseException] = []

    def work(value: int) -> None:
        try:
            with context.reserve(8 * page) as rsv:
                for _ in range(20):
                    pages = context.create(4 * page)
                    rsv.map(0, pages)
                    rsv.fill(0, 4 * page, value)
                    batch = pyvmem.OpBatch(1)
                    batch.populate(rsv.addr + 4 * page, page)
                    context.submit(batch).wait(60)
                    assert rsv.read(0, 4 * page) == bytes([value]) * 4 * page
                    rsv.unmap(4 * page, page)
                    pages.release()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(k + 1,)) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    stats = context.stats()
    assert (stats.used_bytes, stats.mapped_bytes, stats.reserved_bytes) == (0, 0, 0)


def test_close_while_other_threads_call(backend: str) -> None:
    """Each call either succeeds or reports that the context is closed; none hangs or crashes."""
    for _ in range(10):
        context = open_context(backend)
        page = context.info.granule
        rsv = context.reserve(64 * page)
        surprises: list[BaseException] = []
        started = threading.Barrier(4)

        def work(
            slot: int,
            context: pyvmem.Context = context,
            rsv: pyvmem.Reservation = rsv,
            surprises: list[BaseException] = surprises,
            started: threading.Barrier = started,
            page: int = page,
        ) -> None:
            started.wait()
            batch = pyvmem.OpBatch(2)
            try:
                while True:
                    batch.clear()
                    batch.populate(rsv.addr + slot * 8 * page, 4 * page)
                    context.submit(batch).wait(60)
                    context.read(rsv.addr + slot * 8 * page, 16)
                    context.stats()
                    context.unmap(rsv.addr + slot * 8 * page, 4 * page)
            except pyvmem.BadHandle:
                pass
            except BaseException as error:
                surprises.append(error)

        threads = [threading.Thread(target=work, args=(k,)) for k in range(3)]
        for thread in threads:
            thread.start()
        started.wait()
        time.sleep(0.01)
        context.close()
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive()
        assert not surprises


def test_close_completes_or_cancels_waiting_batches(backend: str) -> None:
    context = open_context(backend)
    page = context.info.granule
    rsv = context.reserve(page)
    batch = pyvmem.OpBatch(1)
    batch.populate(rsv.addr, page)
    with pyvmem.FdEvent.create() as gate:
        context.submit(batch, after=[gate])
        context.close()  # must return even though the gate never opens


def test_two_contexts(backend: str) -> None:
    with open_context(backend) as one, open_context(backend) as two:
        page = one.info.granule
        a, b = one.reserve(4 * page), two.reserve(4 * page)
        assert a.addr + a.nbytes <= b.addr or b.addr + b.nbytes <= a.addr
        pa, pb = one.create(page), two.create(page)
        a.map(0, pa)
        b.map(0, pb)
        a.fill(0, page, 1)
        b.fill(0, page, 2)
        assert a.read(0, 1) + b.read(0, 1) == b"\x01\x02"
        two.inject(pyvmem.Inject.MAP, 0, 100)
        a.map(page, pa)
        a.unmap(page, page)
        pa.release()
        assert one.stats().used_bytes == 0
        assert two.stats().used_bytes == page
        one.close()
        assert b.read(0, 1) == b"\x02"
        two.inject(0, 0, 0)
        pb.release()
        b.close()


@pytest.mark.parametrize("call", ["batch", "compact"])
def test_a_signal_ends_the_wait_for_a_descriptor(backend: str, call: str) -> None:
    with open_context(backend) as context, pyvmem.FdEvent.create() as event, alarms() as alarm:
        late = threading.Timer(8, event.set)
        late.start()
        alarm.set(0.05, Interrupted)
        with pytest.raises(Interrupted):
            if call == "batch":
                context.batch(pyvmem.OpBatch(1), after=[event])
            else:
                context.compact(after=iter([event]))
        assert late.is_alive(), "it waited for the work"
        late.cancel()
        event.set()
        context.batch(pyvmem.OpBatch(1), after=iter([event]))
