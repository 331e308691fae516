# SPDX-License-Identifier: MIT
"""Runs random operations and compares the memory with a plain model after each step.

The memory is accessed only through Context.read, write, fill and copy, so that the same test runs
on back ends whose memory the CPU cannot touch.
"""

from __future__ import annotations

import errno
import os
from typing import Any, cast

import pytest
from conftest import open_context
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from model import QUARTERS, Handle, Model, Op, Phys, Refused

import pyvmem

SIZES = [24, 16]  # sizes of the reservations, in granules
SLAB = 16
LIMIT = 6 * SLAB
BEYOND = 128  # granules that an operation may extend past the end of its reservation

index = st.integers(0, 63)
small = st.integers(1, 4)
byte = st.integers(0, 255)


@st.composite
def operations(draw: st.DrawFn) -> list[dict[str, Any]]:
    """Draws raw numbers for a batch; the machine turns them into operations on existing objects."""
    one = st.fixed_dictionaries(
        {
            "kind": st.sampled_from(["map", "populate", "populate", "unmap", "fill"]),
            "space": st.integers(0, len(SIZES) - 1),
            "at": st.integers(0, 17),
            "size": small,
            "count": st.sampled_from([1, 1, 2, 3]),
            "gap": st.integers(0, 3),
            "handle": index,
            "offset": st.integers(0, 3),
            "flags": st.integers(0, 15),
            "value": byte,
        }
    )
    return draw(st.lists(one, min_size=1, max_size=5))


class Machine(RuleBasedStateMachine):
    """Applies random operations to a context and to its model."""

    def __init__(self, backend: str) -> None:
        super().__init__()
        self.backend = backend
        # true once a rollback has failed, because physical counts are then unpredictable
        self.failed = False

    @initialize(keep=st.sampled_from(["none", "all", "some"]), sparse=st.booleans())
    def open(self, keep: str, sparse: bool) -> None:
        granule = 4096 if self.backend == "host" else 0
        self.ctx = open_context(self.backend, granule=granule)
        self.g = self.ctx.info.granule
        self.ctx.close()
        high = {"none": 0, "all": pyvmem.KEEP_ALL, "some": 2 * SLAB * self.g}[keep]
        options: dict[str, int] = {"mem_limit": LIMIT * self.g, "pool_high": high}
        if self.backend != "cuda":  # on cuda, a slab is one page
            options["slab_size"] = SLAB * self.g
        self.ctx = open_context(self.backend, granule=granule, **options)
        self.readonly = pyvmem.Caps.READONLY in self.ctx.info.caps
        self.q = self.g // QUARTERS
        self.sample = min(self.q, 1024)
        sparse = sparse and pyvmem.Caps.SPARSE in self.ctx.info.caps
        first = self.ctx.reserve(SIZES[0] * self.g)
        # Some drivers place reservations next to each other, and an operation might span two. With
        # a hole between reservations, every address past the end of one is unreserved, as in the
        # model.
        near: list[pyvmem.Reservation] = []
        while True:
            second = self.ctx.reserve(SIZES[1] * self.g, sparse=sparse)
            low, high = sorted((first, second), key=lambda one: one.addr)
            if high.addr - (low.addr + low.nbytes) >= BEYOND * self.g:
                break
            near.append(second)
        for one in near:
            one.close()
        self.rsv = [first, second]
        self.model = Model(list(SIZES))

    def addr(self, space: int, at: int) -> int:
        return self.rsv[space].addr + at * self.g

    # ---- handles

    @rule(pages=small, scale=st.sampled_from([1, 1, 2, 4]), dirty=st.booleans())
    def create(self, pages: int, scale: int, dirty: bool) -> None:
        if self.backend == "cuda":
            scale = 1
        n = pages * scale
        used = len(self.model.used())
        try:
            real = self.ctx.create(n * self.g, page_size=scale * self.g, dirty=dirty)
        except pyvmem.OutOfMemory:
            assert used + n > LIMIT // 3 or self.failed
            return
        assert used + n <= LIMIT
        content: list[int | None] = [None if dirty else 0] * QUARTERS
        self.model.handles.append(Handle([Phys(list(content)) for _ in range(n)], scale, real))

    def pick(self, number: int, *, dead: bool = False) -> Handle | None:
        handles = self.model.handles if dead else self.model.live()
        return handles[number % len(handles)] if handles else None

    @rule(number=index)
    def release(self, number: int) -> None:
        handle = self.pick(number, dead=True)
        if handle is None:
            return
        if not handle.live:
            with pytest.raises(pyvmem.BadHandle):
                handle.real.release()
            return
        mappings = self.model.mappings(handle)
        if len(mappings) > 1:
            with pytest.raises(pyvmem.Busy):
                handle.real.release()
            return
        handle.real.release()
        handle.live = False
        for space, first, last in mappings:
            self.model.unmap(space, first, last)

    @rule(number=index)
    def drop(self, number: int) -> None:
        handle = self.pick(number, dead=True)
        if handle is None:
            return
        if handle.live:
            handle.real.drop()
            handle.live = False
        else:
            with pytest.raises(pyvmem.BadHandle):
                handle.real.drop()

    @rule(space=st.integers(0, 1), at=st.integers(0, 25), size=small)
    def retain(self, space: int, at: int, size: int) -> None:
        ptes = [self.model.spaces[space].get(k) for k in range(at, at + size)]
        if at + size > SIZES[space]:
            expected: type[pyvmem.VMemError] | None = pyvmem.NotReserved
        elif any(k in self.model.lost[space] for k in range(at, at + size)) or None in ptes:
            expected = pyvmem.NotMapped
        else:
            expected = None
        if expected:
            with pytest.raises((expected, pyvmem.NotRecoverable, pyvmem.Busy)):
                self.ctx.retain(self.addr(space, at), size * self.g)
            return
        real = self.ctx.retain(self.addr(space, at), size * self.g)
        pages = [pte.phys for pte in ptes if pte is not None]
        self.model.handles.append(Handle(pages, 1, real))

    @invariant()
    def handles_agree(self) -> None:
        if not hasattr(self, "model"):
            return
        for handle in self.model.live():
            info = handle.real.info
            assert info.nbytes == len(handle.pages) * self.g
            assert info.page_size == handle.page_size * self.g
            if not self.failed:
                assert info.mappings == len(self.model.mappings(handle))

    # ---- batches

    def real_ops(self, raw: list[dict[str, Any]]) -> tuple[list[Op], pyvmem.OpBatch]:
        """Builds well-formed operations, which may or may not fit the current mappings."""
        ops: list[Op] = []
        batch = pyvmem.OpBatch(max(len(raw), 1))
        for r in raw:
            size, at, handle = r["size"], r["at"], self.pick(r["handle"], dead=r["flags"] == 15)
            kind = str(r["kind"])
            if kind == "map" and handle is None:
                kind = "populate"
            unit = handle.page_size if kind == "map" and handle is not None else 1
            size, at, offset = size * unit, at // unit * unit, r["offset"] * unit
            stride = size + r["gap"] * unit
            flag = bool(r["flags"] & 1)
            op = Op(kind, r["space"], at, size, r["count"], stride, value=r["value"])
            where = self.addr(op.space, at)
            span = (size * self.g, r["count"], stride * self.g)
            if kind == "map":
                assert handle is not None
                op.handle, op.offset = handle, offset
                op.readonly = flag and self.readonly
                op.consume = bool(r["flags"] & 2)
                batch.map(
                    where, span[0], handle.real, offset * self.g, span[1], span[2],
                    readonly=op.readonly, consume=op.consume,
                )  # fmt: skip
            elif kind == "populate":
                op.dirty = flag
                batch.populate(where, *span, dirty=flag, spread=bool(r["flags"] & 2))
            elif kind == "unmap":
                op.holes = flag
                batch.unmap(where, *span, holes=flag)
            else:
                op.holes = flag
                batch.fill(where, span[0], r["value"], *span[1:], holes=flag)
            ops.append(op)
        return ops, batch

    def expect(self, ops: list[Op]) -> type[pyvmem.VMemError] | None:
        try:
            self.model.check(ops)
        except Refused as refused:
            return refused.error
        return None

    def run_batch(self, ops: list[Op], batch: pyvmem.OpBatch, how: str) -> None:
        """Runs a batch on the context and the model; `how` is "now", "submit" or "gated"."""
        expected = self.expect(ops)
        new = self.model.new_pages(ops)
        used = len(self.model.used())
        try:
            if how == "now":
                self.ctx.batch(batch)
            elif how == "submit":
                self.ctx.submit(batch).wait(60)
            else:
                self.run_gated(ops, batch)
        except pyvmem.OutOfMemory:
            # Pages are allocated one operation at a time, so an earlier operation may run short
            # first.
            assert used + new > LIMIT // 3 or self.failed
        except pyvmem.VMemError as error:
            assert expected is not None, f"unexpected {error!r} for {ops}"
            assert type(error) is expected, f"{error!r}, expected {expected.__name__} for {ops}"
        else:
            assert expected is None, f"passed, expected {expected.__name__} for {ops}"
            assert used + new <= LIMIT
            self.model.apply(ops)

    def run_gated(self, ops: list[Op], batch: pyvmem.OpBatch) -> None:
        """Submits a batch behind unfinished work: nothing may change before the work completes."""
        with pyvmem.FdEvent.create() as gate:
            ticket = self.ctx.submit(batch, after=[gate])
            try:
                assert not ticket.done()
                for op in ops:
                    if op.kind == "map" or op.kind == "populate":
                        with pytest.raises(pyvmem.Busy):
                            self.ctx.unmap(self.addr(op.space, op.at), self.g)
                        with pytest.raises((pyvmem.Busy, pyvmem.NotMapped)):
                            self.ctx.read(self.addr(op.space, op.at), 1)
                with pytest.raises(pyvmem.Timeout):
                    ticket.wait(0)
            finally:
                gate.set()
            ticket.wait(60)

    @rule(raw=operations(), how=st.sampled_from(["now", "now", "submit", "gated"]))
    def batch(self, raw: list[dict[str, Any]], how: str) -> None:
        ops, batch = self.real_ops(raw)
        self.run_batch(ops, batch, how)

    @rule(raw=operations(), where=index)
    def batch_with_a_bad_entry(self, raw: list[dict[str, Any]], where: int) -> None:
        """The batch must have no effect if one entry names an address outside every reservation."""
        where %= len(raw) + 1
        ops, before = self.real_ops(raw[:where])
        assert len(before) == where
        expected = self.model.argument_error(ops) or pyvmem.NotReserved
        full = pyvmem.OpBatch(len(raw) + 1)
        _, whole = self.real_ops(raw)
        del whole
        self.copy_ops(full, raw[:where])
        full.unmap(self.g, self.g)
        self.copy_ops(full, raw[where:])
        with pytest.raises(expected):
            self.ctx.batch(full)

    def copy_ops(self, target: pyvmem.OpBatch, raw: list[dict[str, Any]]) -> None:
        """Appends the operations that `raw` describes to another batch, one at a time."""
        for r in raw:
            ops, _ = self.real_ops([r])
            op = ops[0]
            where, size, stride = self.addr(op.space, op.at), op.size * self.g, op.stride * self.g
            if op.kind == "map":
                assert op.handle is not None
                target.map(where, size, op.handle.real, op.offset * self.g, op.count, stride,
                           readonly=op.readonly, consume=op.consume)  # fmt: skip
            elif op.kind == "populate":
                target.populate(where, size, op.count, stride, dirty=op.dirty)
            elif op.kind == "unmap":
                target.unmap(where, size, op.count, stride, holes=op.holes)
            else:
                target.fill(where, size, op.value, op.count, stride, holes=op.holes)

    @rule(
        raw=operations(),
        kinds=st.integers(1, 63),
        skip=st.integers(0, 6),
        count=st.integers(1, 3),
        worker=st.booleans(),
    )
    def batch_with_failing_calls(
        self, raw: list[dict[str, Any]], kinds: int, skip: int, count: int, worker: bool
    ) -> None:
        """Driver calls fail during the batch, and possibly again during its rollback."""
        ops, batch = self.real_ops(raw)
        expected = self.expect(ops)
        error_number = errno.ENOMEM if kinds & pyvmem.Inject.HEAP else errno.EIO
        self.ctx.inject(kinds, skip, count, error_number)
        try:
            if worker:
                self.ctx.submit(batch).wait(60)
            else:
                self.ctx.batch(batch)
        except pyvmem.NotRecoverable as error:
            if expected is not pyvmem.NotRecoverable:
                assert error.bytes > 0
                self.note_losses(ops)
        except (pyvmem.DriverError, pyvmem.OutOfMemory):
            self.model.forget_fills(ops)
        except pyvmem.VMemError as error:
            assert type(error) is expected, f"{error!r}, expected {expected} for {ops}"
        else:
            assert expected is None, f"passed, expected {expected}"
            self.model.apply(ops)
        finally:
            self.ctx.inject(0, 0, 0)

    def note_losses(self, ops: list[Op]) -> None:
        """Records the losses that the context reports; everything else must be as before."""
        self.model.forget_fills(ops)
        self.failed = True
        found = 0
        for number, space in enumerate(self.model.spaces):
            for at in range(SIZES[number]):
                info = self.ctx.query(self.addr(number, at))
                if pyvmem.RangeFlags.QUARANTINED not in info.flags:
                    continue
                if at not in self.model.lost[number]:
                    found += 1
                    self.model.lost[number].add(at)
                    self.model.unmap(number, at, at + 1)
                    assert at not in space
        assert found

    # ---- contents

    @rule(space=st.integers(0, 1), at=st.integers(0, 25), quarter=st.integers(0, 3), value=byte)
    def write(self, space: int, at: int, quarter: int, value: int) -> None:
        where = self.addr(space, at) + quarter * self.q
        data = bytes([value]) * self.q
        pte = self.model.spaces[space].get(at)
        if at in self.model.lost[space]:
            with pytest.raises(pyvmem.NotRecoverable):
                self.ctx.write(where, data)
        elif pte is None:
            with pytest.raises((pyvmem.NotMapped, pyvmem.NotReserved)):
                self.ctx.write(where, data)
        elif pte.readonly:
            with pytest.raises(pyvmem.ReadOnly):
                self.ctx.write(where, data)
        else:
            self.ctx.write(where, data)
            pte.phys.content[quarter] = value

    @rule(a=index, b=index, quarters=st.tuples(st.integers(0, 3), st.integers(0, 3)))
    def copy(self, a: int, b: int, quarters: tuple[int, int]) -> None:
        ptes = [(s, k) for s in (0, 1) for k in sorted(self.model.spaces[s])]
        if not ptes:
            return
        (sa, ka), (sb, kb) = ptes[a % len(ptes)], ptes[b % len(ptes)]
        source, target = self.model.spaces[sa][ka], self.model.spaces[sb][kb]
        if source.phys is target.phys:
            return  # source and target overlap through an alias: the result is unspecified
        src = self.addr(sa, ka) + quarters[0] * self.q
        dst = self.addr(sb, kb) + quarters[1] * self.q
        if target.readonly:
            with pytest.raises(pyvmem.ReadOnly):
                self.ctx.copy(dst, src, self.q)
            return
        self.ctx.copy(dst, src, self.q)
        target.phys.content[quarters[1]] = source.phys.content[quarters[0]]

    @rule(space=st.integers(0, 1), at=st.integers(0, 20), size=small, value=byte)
    def fill(self, space: int, at: int, size: int, value: int) -> None:
        ptes = [self.model.spaces[space].get(k) for k in range(at, at + size)]
        if at + size > SIZES[space] or None in ptes:
            errors: tuple[type[pyvmem.VMemError], ...]
            errors = (pyvmem.NotMapped, pyvmem.NotReserved, pyvmem.ReadOnly)
            if any(k in self.model.lost[space] for k in range(at, at + size)):
                errors += (pyvmem.NotRecoverable,)
            with pytest.raises(errors):
                self.ctx.fill(self.addr(space, at), size * self.g, value)
        elif any(pte is not None and pte.readonly for pte in ptes):
            with pytest.raises(pyvmem.ReadOnly):
                self.ctx.fill(self.addr(space, at), size * self.g, value)
        else:
            self.ctx.fill(self.addr(space, at), size * self.g, value)
            for pte in ptes:
                assert pte is not None
                pte.phys.content[:] = [value] * QUARTERS

    # ---- pool

    @rule(keep=st.integers(0, LIMIT))
    def trim(self, keep: int) -> None:
        before = self.ctx.stats()
        freed = self.ctx.trim(keep * self.g)
        after = self.ctx.stats()
        assert before.slab_bytes - after.slab_bytes == freed
        assert after.free_bytes >= min(keep * self.g, before.free_bytes)

    @rule(pages=st.integers(0, 8))
    def warm(self, pages: int) -> None:
        try:
            self.ctx.warm(pages * self.g)
        except pyvmem.OutOfMemory:
            assert len(self.model.used()) + pages > LIMIT // 3 or self.failed
        else:
            assert self.ctx.stats().free_bytes >= pages * self.g

    @precondition(lambda self: pyvmem.Caps.JOIN in self.ctx.info.caps)
    @rule(space=st.integers(0, 1))
    def join(self, space: int) -> None:
        self.ctx.join(self.rsv[space].addr, self.rsv[space].nbytes)

    # ---- checks after each step

    @invariant()
    def contents_agree(self) -> None:
        if not hasattr(self, "model"):
            return
        for number, space in enumerate(self.model.spaces):
            for at, pte in space.items():
                for k, value in enumerate(pte.phys.content):
                    if value is not None:
                        got = self.ctx.read(self.addr(number, at) + k * self.q, self.sample)
                        assert got == bytes([value]) * self.sample, (number, at, k, value)

    @invariant()
    def counts_agree(self) -> None:
        if not hasattr(self, "model"):
            return
        self.ctx.check()
        stats = self.ctx.stats()
        assert stats.mapped_bytes == self.model.mapped() * self.g
        assert stats.handles == len(self.model.live())
        assert stats.reservations == len(SIZES)
        assert stats.reserved_bytes == sum(SIZES) * self.g
        assert stats.pending == 0
        assert stats.slab_bytes == stats.used_bytes + stats.free_bytes + stats.quarantined_bytes
        assert stats.slab_bytes <= LIMIT * self.g
        if self.failed:
            assert stats.quarantined_bytes > 0 or any(self.model.lost)
        else:
            assert stats.used_bytes == len(self.model.used()) * self.g
            assert stats.quarantined_bytes == 0
        for number, space in enumerate(self.model.spaces):
            assert self.rsv[number].query().mapped_bytes == len(space) * self.g

    def teardown(self) -> None:
        if not hasattr(self, "model"):
            return
        for handle in self.model.live():
            handle.real.drop()
        if self.failed:
            self.ctx.close()
            return
        for reservation in self.rsv:
            reservation.close(unmap=True)
        stats = self.ctx.stats()
        assert (stats.used_bytes, stats.mapped_bytes, stats.reserved_bytes) == (0, 0, 0)
        assert self.ctx.trim() == stats.slab_bytes
        assert self.ctx.stats().slab_bytes == 0
        self.ctx.check()
        self.ctx.close()


def test_random_operations(backend: str) -> None:
    quick = os.environ.get("VMEM_TEST_LONG", "") in ("", "0")
    few = 200 if backend == "host" else 60  # opening a context on a GPU is slow
    run_state_machine_as_test(
        cast(Any, lambda: Machine(backend)),
        settings=settings(
            max_examples=few if quick else 2000,
            stateful_step_count=40,
            deadline=None,
            print_blob=True,
            suppress_health_check=list(HealthCheck),
        ),
    )
