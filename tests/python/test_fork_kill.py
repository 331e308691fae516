# SPDX-License-Identifier: MIT
"""A process that is killed in the middle of its batches leaves no memory behind."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

# Two threads, each with 128 MiB in 64 scattered pieces, do batches until the process is killed.
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


def shared_memory() -> int:
    """Bytes of shared memory in the whole system (Shmem of /proc/meminfo)."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("Shmem:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no Shmem")


def taken(backend: str) -> int:
    """Bytes in use, as the system tells: shared memory on host, the device's memory on a GPU."""
    if backend == "host":
        return shared_memory()
    import torch

    if not torch.cuda.is_available():
        pytest.skip("nobody but the library counts this device's memory")
    if "PYTEST_XDIST_WORKER" in os.environ:
        pytest.skip("other tests use the device meanwhile")
    free, total = torch.cuda.mem_get_info(0)
    return int(total - free)


def memfds(pid: int) -> int:
    """Memory files that a process holds."""
    found = 0
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            found += os.readlink(fd).startswith("/memfd:")
    return found


@pytest.mark.parametrize("delay", [0.0, 0.05, None])
def test_killed_process_leaves_no_memory(backend: str, delay: float | None) -> None:
    rest = random.uniform(0, 0.2) if delay is None else delay
    taken(backend)  # the first call on a GPU makes a context of this process
    start = taken(backend)
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, backend], stdout=subprocess.PIPE, text=True
    )
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == "full\n"
        assert child.stdout.readline() == "full\n"
        assert (memfds(child.pid) > 0) == (backend == "host")
        assert taken(backend) - start > 100 << 20  # one of the two is always there
        time.sleep(rest)
        assert child.poll() is None
        full = taken(backend)
    finally:
        child.send_signal(signal.SIGKILL)
        child.wait()
        assert child.stdout is not None
        child.stdout.close()
    # The kernel frees a dead process's memory on its own time. Others may take shared memory
    # meanwhile; on a GPU the child's context must be gone too.
    want = min(full - start, 100 << 20) * 3 // 4 if backend == "host" else (full - start) * 9 // 10
    deadline = time.monotonic() + 60
    while (freed := full - taken(backend)) < want:
        assert time.monotonic() < deadline, f"{freed} bytes came back of {full - start}"
        time.sleep(0.05)
    assert not Path(f"/proc/{child.pid}").exists()
