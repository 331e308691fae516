# SPDX-License-Identifier: MIT
"""After a fork, calls in the child raise an error, and the parent's objects keep working.

Uses os.fork on ``host``, because CUDA does not survive a fork.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable

import pytest

import pyvmem
from pyvmem.kvcache import Budget


def in_child(work: Callable[[], None]) -> None:
    """Runs `work` in a forked child; if it raises, the test fails with the child's traceback."""
    read, write = os.pipe()
    with warnings.catch_warnings():
        # Python 3.12 and later warn if a process with several threads forks.
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid == 0:
        status = 1
        try:
            os.close(read)
            work()
            status = 0
        except BaseException:
            os.write(write, traceback.format_exc().encode()[-60000:])
        finally:
            sys.stdout.flush()
            os._exit(status)
    os.close(write)
    with os.fdopen(read) as pipe:
        said = pipe.read()
    _, status = os.waitpid(pid, 0)
    assert status == 0, f"child: status {status}\n{said}"


@pytest.fixture
def rsv(host: pyvmem.Context) -> pyvmem.Reservation:
    reservation = host.reserve(16 * 4096)
    pages = host.create(4 * 4096)
    reservation.map(0, pages)
    pages.drop()
    reservation.fill(0, 4 * 4096, 7)
    return reservation


def test_child_gets_forked_process(host: pyvmem.Context, rsv: pyvmem.Reservation) -> None:
    pages = host.create(4096)
    batch = pyvmem.OpBatch(1)
    batch.populate(rsv.addr + 8 * 4096, 4096)
    known, ticket = host.submit(batch), host.submit(pyvmem.OpBatch(1))
    known.wait()
    arrays = [rsv.array((1,), "uint8")]  # in the parent, it would make `rsv.close` raise Busy

    def child() -> None:
        assert arrays
        known.wait()  # the object already holds the result
        for call in (
            host.stats,
            host.check,
            host.trim,
            host.close,
            lambda: host.reserve(4096),
            lambda: host.create(4096),
            lambda: host.retain(rsv.addr, 4096),
            lambda: host.submit(batch),
            lambda: host.batch(batch),
            lambda: host.query(rsv.addr),
            lambda: host.fill(rsv.addr, 4096, 1),
            lambda: rsv.map(4 * 4096, pages),
            lambda: rsv.unmap(0, 4096),
            lambda: rsv.read(0, 1),
            lambda: rsv.write(0, b"x"),
            lambda: rsv.close(unmap=True),
            lambda: pages.info,
            pages.release,
            ticket.wait,
            ticket.done,
        ):
            with pytest.raises(pyvmem.ForkedProcess) as caught:
                call()
            assert caught.value.errno_name == "ECHILD"
        assert not host.is_open

    in_child(child)
    arrays.clear()
    host.check()
    assert rsv.read(0, 4 * 4096) == b"\x07" * (4 * 4096)
    assert host.stats().mapped_bytes == 5 * 4096
    pages.release()
    rsv.close(unmap=True)
    assert host.stats().used_bytes == 0


@pytest.mark.parametrize("of_a_budget", [False, True])
def test_a_call_of_another_thread_does_not_hang_the_child(
    host: pyvmem.Context, of_a_budget: bool
) -> None:
    """When the process forks, another thread waits for GPU work and holds the cache's lock."""
    budget = Budget(host, 64 << 20) if of_a_budget else None
    config = pyvmem.KVCacheConfig(1, 1, 64, "float16", max_batch=1, max_seq_len=64, page_size=4096)
    place = {"budget": budget} if of_a_budget else {"context": host}
    with pyvmem.FdEvent.create() as work, pyvmem.KVCache(config, **place) as cache:  # type: ignore[arg-type]
        assert cache.alloc_reqid() == 0
        assert cache.step([64]) == 0
        cache.free_reqid(0, stream=work)
        assert cache.alloc_reqid() == 0
        waiting = threading.Thread(target=lambda: cache.step([64]))
        waiting.start()
        while cache.internals.lock.acquire(blocking=False):
            cache.internals.lock.release()
            time.sleep(0.001)

        def child() -> None:
            signal.alarm(20)
            for call in (cache.alloc_reqid, lambda: cache.step([64])):
                with pytest.raises(pyvmem.ForkedProcess):
                    call()
            cache.close()

        try:
            in_child(child)
        finally:
            work.set()
            waiting.join()
        assert cache.step([64]) == 0
        cache.check_integrity()
    if budget is not None:
        budget.close()


def test_child_leaves_with_blocks_quietly(rsv: pyvmem.Reservation) -> None:
    context = rsv.context

    def child() -> None:
        warnings.simplefilter("error")
        with context, rsv:
            pass

    in_child(child)
    assert context.is_open
    assert rsv.read(0, 1) == b"\x07"
    rsv.close(unmap=True)


def test_child_may_open_its_own_context(host: pyvmem.Context, rsv: pyvmem.Reservation) -> None:
    def child() -> None:
        with pyvmem.Context("host", granule=4096) as own, own.reserve(8 * 4096) as mine:
            pages = own.create(4096)
            mine.map(0, pages)
            mine.fill(0, 4096, 9)
            batch = pyvmem.OpBatch(1)
            batch.populate(mine.addr + 4096, 4096)
            own.submit(batch).wait(60)
            assert mine.read(0, 1) == b"\x09"
            own.check()
            pages.release()

    in_child(child)
    assert rsv.read(0, 1) == b"\x07"
    batch = pyvmem.OpBatch(1)
    batch.populate(rsv.addr + 8 * 4096, 4096)
    host.submit(batch).wait(60)  # the parent's worker is alive
    rsv.close(unmap=True)


def test_child_that_dies_leaves_the_parent_alone(
    host: pyvmem.Context, rsv: pyvmem.Reservation
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(pid, 0)
    host.check()
    rsv.fill(0, 4096, 8)
    assert rsv.read(0, 1) == b"\x08"
    rsv.close(unmap=True)


def test_tensor_dies_in_the_child(host: pyvmem.Context, rsv: pyvmem.Reservation) -> None:
    pytest.importorskip("torch")
    tensor = rsv.tensor((4096,), "uint8")

    def child() -> None:
        nonlocal tensor
        del tensor
        assert rsv.live_arrays == 0

    in_child(child)
    assert rsv.live_arrays == 1
    assert int(tensor.sum()) == 7 * 4096
    del tensor
    rsv.close(unmap=True)
