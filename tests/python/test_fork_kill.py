# SPDX-License-Identifier: MIT
"""Checks that a process killed in the middle of its batches leaves no memory behind."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from kvcache_helpers import eventually

# Two threads, each with 128 MiB in 64 scattered pieces, run batches until the process is killed.
CHILD = """
import sys, threading, pyvmem
context = pyvmem.Context(sys.argv[1])
page = context.info.granule
pieces, piece = 64, 2 << 20
base = context.reserve(2 * 2 * pieces * piece)

def work(part):
    start = base.addr + part * 2 * pieces * piece
    populate, fill, unmap = (pyvmem.OpBatch(1) for _ in range(3))
    populate.populate(start, piece, count=pieces, stride=2 * piece)
    fill.fill(start, piece, part + 1, count=pieces, stride=2 * piece)
    unmap.unmap(start, piece, count=pieces, stride=2 * piece)
    context.batch(populate)
    context.batch(fill)
    sys.stdout.write("full\\n")
    sys.stdout.flush()
    while True:
        context.submit(unmap).wait()
        context.submit(populate).wait()
        context.batch(fill)

for part in (0, 1):
    threading.Thread(target=work, args=(part,)).start()
"""


File = tuple[int, int]  # device and inode


def memory_files(pid: str) -> dict[File, int]:
    """Returns the library's memory files that a process has open, and the bytes in each."""
    found = {}
    with contextlib.suppress(OSError):
        for fd in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                if os.readlink(fd).startswith("/memfd:"):
                    one = fd.stat()
                    found[one.st_dev, one.st_ino] = one.st_blocks * 512
    return found


def holders(files: set[File]) -> list[str]:
    """Returns the processes that have any of these files open."""
    pids = [one.name for one in Path("/proc").iterdir() if one.name.isdigit()]
    return [pid for pid in pids if not files.isdisjoint(memory_files(pid))]


def device_memory() -> int:
    """Returns the GPU memory in use, in bytes, as the driver reports it."""
    import torch

    if not torch.cuda.is_available():
        pytest.skip("only the library itself counts this device's memory")
    if "PYTEST_XDIST_WORKER" in os.environ:
        pytest.skip("other tests use the device at the same time")
    free, total = torch.cuda.mem_get_info(0)
    return int(total - free)


@contextlib.contextmanager
def killed(backend: str) -> Iterator[str]:
    """Yields the pid of a process that is running batches, and kills the process when the block
    ends.
    """
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, backend], stdout=subprocess.PIPE, text=True
    )
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == "full\n"
        assert child.stdout.readline() == "full\n"
        yield str(child.pid)
        assert child.poll() is None
    finally:
        child.send_signal(signal.SIGKILL)
        child.wait()
        assert child.stdout is not None
        child.stdout.close()
    assert not Path(f"/proc/{child.pid}").exists()


@pytest.mark.parametrize("delay", [0.0, 0.05, None])
def test_killed_process_leaves_no_memory(backend: str, delay: float | None) -> None:
    """On `host`, memory lives in files that disappear when their last holder exits; on a GPU, the
    test compares how much memory is in use.
    """
    rest = random.uniform(0, 0.2) if delay is None else delay
    if backend == "host":
        with killed(backend) as pid:
            # Each thread has 128 MiB, except just after it has unmapped its memory.
            eventually(lambda: sum(memory_files(pid).values()) > 100 << 20)
            files = memory_files(pid)
            assert holders(set(files)) == [pid]
            time.sleep(rest)
            files |= memory_files(pid)
        eventually(lambda: not holders(set(files)))
        return
    device_memory()  # the first call creates this process's own CUDA context
    start = device_memory()
    with killed(backend) as pid:
        assert not memory_files(pid)
        eventually(lambda: device_memory() - start > 100 << 20)
        time.sleep(rest)
        full = device_memory()
    # The child's CUDA context must also be freed.
    eventually(lambda: full - device_memory() >= (full - start) * 9 // 10)
