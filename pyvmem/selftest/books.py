# SPDX-License-Identifier: MIT
"""Checks calls: batches, the worker thread, unmapping, and whether all memory is returned."""

from __future__ import annotations

import errno
import subprocess
import sys

from pyvmem import Caps, Context, NotMapped, OpBatch
from pyvmem.commands.cumem import Cuda, CudaUnavailable
from pyvmem.errors import VMemError
from pyvmem.memory.info import Inject
from pyvmem.selftest.check import Failed, NotRun, expect, raises, reserve

__all__ = ["CHECKS"]

_TENSORS = 64
_SMALL = 4 << 20  # tolerated change in free device memory, in bytes
_TRIES = 8


def one_call_per_batch(context: Context) -> str:
    """Mapping a page in each of 64 tensors takes one driver call, and so does unmapping."""
    page, stride = context.info.granule, max(2 << 20, 4 * context.info.granule)
    with reserve(context, stride * _TENSORS) as range_:
        ops = OpBatch(2)
        ops.populate(range_.addr, page, _TENSORS, stride)
        context.batch(ops)
        before = context.stats()
        ops.clear()
        ops.populate(range_.addr + page, page, _TENSORS, stride)
        ops.unmap(range_.addr, page, _TENSORS, stride)
        context.batch(ops)
        now = context.stats()
        context.unmap(range_.addr + page, page)
        calls = now.map_calls + now.unmap_calls - before.map_calls - before.unmap_calls
    if Caps.ONE_CALL not in context.info.caps:
        raise NotRun(f"this back end makes a call for each run: {calls} for 128 changes")
    expect(calls == 1, f"128 changes took {calls} calls")
    return "128 changes"


def worker(context: Context) -> str:
    """Batches on the worker thread finish in order, and their effects are visible."""
    page, count = context.info.granule, 100
    with reserve(context, 2 * count * page) as range_:
        tickets = []
        ops = OpBatch(1)
        for i in range(count):
            ops.clear()
            ops.populate(range_.addr + 2 * i * page, page)
            tickets.append(context.submit(ops))
        for ticket in tickets:
            ticket.wait(60)
        for i in range(0, count, 7):
            context.write(range_.addr + 2 * i * page, bytes([i + 1]))
        for i in range(0, count, 7):
            got = context.read(range_.addr + 2 * i * page, 1)
            expect(got == bytes([i + 1]), f"page {i} of the worker holds {got.hex()}")
    return f"{count} batches"


def unmapped(context: Context) -> str:
    """Unmapped ranges cannot be read or unmapped again."""
    page = context.info.granule
    with context.create(page) as pages, reserve(context, 4 * page) as range_:
        context.map(range_.addr, page, pages)
        context.unmap(range_.addr, page)
        raises(NotMapped, lambda: context.read(range_.addr, 1))
        raises(NotMapped, lambda: context.unmap(range_.addr, page))
    return "see `device faults` for accesses by a kernel"


def failed_batch(context: Context) -> str:
    """A batch that fails halfway changes nothing."""
    page = context.info.granule
    with reserve(context, 64 * page) as range_:
        ops = OpBatch(2)
        ops.populate(range_.addr, page, 4, 2 * page)
        context.batch(ops)
        context.fill(range_.addr, page, 0x3C)
        before = context.stats()
        ops.clear()
        ops.unmap(range_.addr, page, 4, 2 * page)
        ops.populate(range_.addr + page, page, 4, 2 * page)
        context.inject(Inject.UNMAP, 2, 1)
        try:
            context.batch(ops)
        except VMemError as error:
            expect(error.errno == errno.EIO, f"another error: {error}")
        else:
            raise Failed("the injected failure did not happen")
        finally:
            context.inject(Inject.UNMAP, 0, 0)
        after = context.stats()
        expect(after.mapped_bytes == before.mapped_bytes, "mappings were not rolled back")
        expect(context.read(range_.addr, 1) == b"\x3c", "contents have changed")
        context.batch(ops)
    return "its third unmap fails"


def accounting(context: Context) -> str:
    """After everything is freed, neither the context nor the device holds memory."""
    if context.cuda_device is None:
        _take_and_give_back(context)
        return "by the context's own statistics; there is no GPU"
    context.trim(0)
    lost = 0
    try:
        with Cuda(context.cuda_device) as cuda:
            # A leak shows up on every try; an allocation by another process does not.
            for _ in range(_TRIES):
                before = cuda.memory()[0]
                _take_and_give_back(context)
                lost = before - cuda.memory()[0]
                if lost < _SMALL:
                    break
    except CudaUnavailable:
        _take_and_give_back(context)
        return "by the context's own statistics; without CUDA the device's are not known"
    expect(
        lost < _SMALL,
        f"the device has {lost} bytes less free memory than before, and had less in each of "
        f"{_TRIES} tries: either memory leaks, or other processes keep allocating it",
    )
    return f"the device's free memory differs by {lost} bytes"


def _take_and_give_back(context: Context) -> None:
    context.trim(0)
    with reserve(context, 256 << 20) as range_:
        ops = OpBatch(1)
        ops.populate(range_.addr, 8 << 20, 4, 64 << 20)
        context.batch(ops)
        expect(context.stats().slab_bytes >= 32 << 20, "32 MB were allocated, but not counted")
    context.trim(0)
    now = context.stats()
    for name in ("reserved_bytes", "mapped_bytes", "used_bytes", "slab_bytes", "handles"):
        expect(getattr(now, name) == 0, f"{name} is {getattr(now, name)}, not 0")
    expect(now.quarantined_bytes == 0, f"{now.quarantined_bytes} bytes are quarantined")


def device_faults(context: Context) -> str:
    """A kernel that reads unmapped or writes read-only memory is stopped (in a child process)."""
    if context.cuda_device is None:
        raise NotRun("there is no GPU")
    kinds = ["unmapped", *(["readonly"] if Caps.READONLY in context.info.caps else [])]
    for kind in kinds:
        words = [sys.executable, "-m", "pyvmem.selftest.fault"]
        words += [context.info.backend, str(context.cuda_device), kind]
        done = subprocess.run(words, capture_output=True, text=True, timeout=120, check=False)
        said = (done.stdout.strip() or done.stderr.strip()).splitlines()[-1:]
        if done.returncode == 77:
            raise NotRun(said[0] if said else "the child could not run")
        if done.returncode:
            raise Failed(f"{kind}: {said[0] if said else f'exit status {done.returncode}'}")
    return ", ".join(kinds)


CHECKS = (one_call_per_batch, worker, unmapped, failed_batch, device_faults, accounting)
