# SPDX-License-Identifier: MIT
"""Tests handles to several ranges, releasing parts of them, and reading into buffers."""

from __future__ import annotations

import pytest

from pyvmem import BadHandle, Context, InvalidArgument, NotMapped, OpBatch, OutOfRange


def test_gathered_pages_are_mapped_by_one_operation(context: Context, page: int) -> None:
    unit = 2 << 20
    step = -(-4 * page // unit) * unit
    with context.reserve(8 * step) as reservation:
        ops = OpBatch(1)
        ops.populate(reservation.addr, 2 * page, 3, step)
        context.batch(ops)
        for piece in range(3):
            reservation.write(piece * step + page, bytes([piece + 1]) * 16)
        pages = context.gather(reservation.addr + page, page, 3, step)
        assert pages.nbytes == 3 * page
        ops.clear()
        ops.map(reservation.addr + 3 * step, page, pages, 0, 3, step)
        context.batch(ops)
        used = context.stats().used_bytes
        assert used == 6 * page
        for piece in range(3):
            assert reservation.read((3 + piece) * step, 16) == bytes([piece + 1]) * 16
        context.unmap(reservation.addr + 4 * step, page)
        context.unmap(reservation.addr + step, 2 * page)
        assert context.stats().used_bytes == used - page, "the handle keeps the other part"
        pages.drop_range(page, page)
        assert context.stats().used_bytes == used - 2 * page
        with pytest.raises(OutOfRange):
            pages.drop_range(0, page, 2, page)
        with pytest.raises(InvalidArgument):
            pages.drop_range(0, page + 1)
        with pytest.raises(OutOfRange, match="were dropped"):
            context.map(reservation.addr + 4 * step, page, pages, page)
        assert pages.info.runs == 2
        pages.drop()
        with pytest.raises(BadHandle):
            pages.drop_range(0, page)
        context.check()


def test_gather_rejects_unmapped_ranges(context: Context, page: int) -> None:
    size = max(2 << 20, 4 * page)
    with context.reserve(size) as reservation, context.create(page) as pages:
        context.map(reservation.addr, page, pages)
        before = context.stats()
        with pytest.raises(NotMapped):
            context.gather(reservation.addr, page, 2, page)
        with pytest.raises(InvalidArgument):
            context.gather(reservation.addr, page, 2, page - 1)
        with pytest.raises(InvalidArgument):
            context.gather(reservation.addr, 0, 1, 0)
        assert context.stats().handles == before.handles


def test_reads_into_a_buffer(context: Context, page: int) -> None:
    with context.reserve(4 * page) as reservation, context.create(page) as pages:
        context.map(reservation.addr, page, pages)
        reservation.write(8, b"abcdef")
        buffer = bytearray(6)
        context.read_into(reservation.addr + 8, buffer)
        assert buffer == b"abcdef"
        context.read_into(reservation.addr + 9, memoryview(buffer)[2:4])
        assert buffer == b"abbcef"
        with pytest.raises(NotMapped):
            context.read_into(reservation.addr + page, buffer)
        with pytest.raises(BufferError):
            context.read_into(reservation.addr, b"read-only")
