# SPDX-License-Identifier: MIT
"""Tests how much memory a process is told it may still allocate, including in a control group.

tests/c/test_available.c covers all formats of the kernel's files, for cgroup versions 1 and 2.
"""

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import open_context
from kvcache_helpers import LAYERS, ROWS, small_config

import pyvmem
from pyvmem import KVCache, Location, MemoryInfo
from pyvmem.errors import InvalidArgument, NotSupported
from pyvmem.kvcache import Budget
from pyvmem.kvcache.budget import available_bytes, free_bytes

GROUPS = Path("/sys/fs/cgroup")
MIB = 1 << 20


def test_memory_of_the_context_is_not_free() -> None:
    with open_context("host", pool_low=0) as context:
        before = context.memory()
        assert 0 < before.free_bytes <= before.total_bytes
        pages = context.create(256 * MIB)  # not touched yet
        assert context.memory().free_bytes < before.free_bytes - 128 * MIB
        assert context.memory().total_bytes == before.total_bytes
        pages.drop()
        context.trim()
        assert context.memory().free_bytes > before.free_bytes - 128 * MIB


def test_no_more_than_the_limit_of_the_context(backend: str) -> None:
    with open_context(backend, mem_limit=64 * MIB, pool_low=0) as context:
        begun = context.stats().slab_bytes
        assert context.memory().free_bytes == 64 * MIB - begun
        pages = context.create(context.info.granule)
        taken = context.stats().slab_bytes
        assert context.memory().free_bytes == 64 * MIB - taken
        assert free_bytes(context) == 64 * MIB - taken + context.stats().free_bytes
        pages.drop()


def test_other_locations(context: pyvmem.Context) -> None:
    if pyvmem.Caps.HOST_PAGES in context.info.caps:
        found = context.memory(Location.HOST)
        assert isinstance(found, MemoryInfo)
        assert found.free_bytes <= found.total_bytes
    if pyvmem.Caps.PEER not in context.info.caps:
        with pytest.raises(NotSupported, match="peer devices"):
            context.memory(Location.PEER)
    with pytest.raises(InvalidArgument, match="unknown location 7"):
        context.memory(7)  # type: ignore[arg-type]


def test_admission_agrees_with_step(backend: str) -> None:
    """A cache may be larger than its context, whose limit then acts like the size of the device's
    memory.
    """
    with open_context(backend, mem_limit=64 * MIB, pool_low=0) as context:
        page = context.info.granule
        tensors = 2 * LAYERS
        fits = 64 * MIB // page // tensors  # pages per tensor
        config = small_config(page, max_seq_len=2 * fits * ROWS, memory_limit=1 << 40)
        with KVCache(config, context) as cache:
            for more, admitted in ((1, False), (0, True)):
                assert cache.can_admit([(fits + more) * ROWS]) is admitted
                reqid = cache.alloc_reqid()
                lengths = [0] * config.max_batch
                lengths[reqid] = (fits + more) * ROWS
                assert cache.step(lengths) == (0 if admitted else -1)
                if not admitted:
                    cache.free_reqid(reqid)
            assert not cache.can_admit([1])
            cache.free_reqid(reqid)  # its pages stay mapped for the next request
            assert cache.can_admit([fits * ROWS])
            assert cache.can_admit([fits // 2 * ROWS] * 2)
            cache.check_integrity()


def test_defaults(backend: str) -> None:
    """Memory in the pool counts as available, because it is already allocated from the device."""
    with open_context(backend, mem_limit=64 * MIB) as context:
        context.warm(32 * MIB)
        assert available_bytes(context) >= 32 * MIB
        assert available_bytes(context) <= Budget(context).total_bytes <= 64 * MIB
        page = context.info.granule
        with KVCache(small_config(page, max_seq_len=1 << 20, memory_limit=0), context) as cache:
            assert 32 * MIB <= cache.stats().total_pages * page <= 64 * MIB


# ---- real groups --------------------------------------------------------------------------------


def _own_group() -> tuple[Path, str]:
    """Returns the directory of this process's control group and the name of its limit file."""
    lines = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
    for _, controllers, path in lines:
        if "memory" in controllers.split(","):
            return GROUPS / "memory" / path.lstrip("/"), "memory.limit_in_bytes"
    return next(
        (GROUPS / path.lstrip("/"), "memory.max") for number, _, path in lines if number == "0"
    )


@contextlib.contextmanager
def _group(limit: int) -> Iterator[tuple[Path, Path]]:
    """Yields a control group with this memory limit, and its limit file."""
    try:
        own, name = _own_group()
        group = own / f"vmem-test-{os.getpid()}"
        group.mkdir()
    except (OSError, StopIteration) as error:
        pytest.skip(f"cannot create a control group: {error}")
    try:
        if not (group / name).exists():
            pytest.skip(f"groups below {own} have no {name}")
        (group / name).write_text(str(limit))
        yield group, group / name
    finally:
        for _ in range(1000):  # an exited process may still be counted as a member
            with contextlib.suppress(OSError):
                group.rmdir()
                break
            time.sleep(0.01)


_IN_GROUP = """
import os, sys
from pathlib import Path

group, limit_file, scratch = map(Path, sys.argv[1:])
(group / "cgroup.procs").write_text(str(os.getpid()))

from pyvmem import Context, KVCache, KVCacheConfig
from pyvmem.kvcache import Budget, LayerShape
from pyvmem.engine import Model, Policy
from pyvmem.engine.config import make_cache

MIB, LIMIT = 1 << 20, int(limit_file.read_text())
with open(scratch, "wb") as file:  # the weights of a model, say: page cache of this group
    for _ in range(LIMIT // 2 // MIB):
        file.write(bytes(MIB))
    os.fsync(file.fileno())

with Context("host") as context:
    memory = context.memory()
    assert LIMIT // 2 < memory.free_bytes < memory.total_bytes == LIMIT, memory
    assert Budget(context).total_bytes < LIMIT

policy = Policy(max_batch=4, max_seq_len=1 << 16, memory_share=0.5)
model = Model([LayerShape(8, 128)] * 32, "float16", 1 << 16)
with make_cache(model, policy, "host") as cache:
    assert LIMIT // 4 < cache.config.memory_limit < LIMIT // 2, cache.config.memory_limit

config = KVCacheConfig(2, 8, 128, max_batch=8, max_seq_len=1 << 21, memory_limit=64 << 30)
per_token = 2 * 2 * 8 * 128 * 2
with KVCache(config, backend="host") as cache:
    assert not cache.can_admit([5 * LIMIT // per_token])
    lengths, reqid = [0] * 8, cache.alloc_reqid()
    lengths[reqid] = 5 * LIMIT // per_token
    assert cache.step(lengths) == -1
    lengths[reqid] = 0

    def fill():
        while True:
            free = cache.can_admit([2048])
            lengths[reqid] += 2048
            if cache.step(lengths) != 0:
                lengths[reqid] -= 2048
                assert not cache.can_admit([2048])
                return lengths[reqid] * per_token
            cache.k(0)[reqid, lengths[reqid] - 2048 : lengths[reqid]] = 1
            cache.v(0)[reqid, lengths[reqid] - 2048 : lengths[reqid]] = 1
            cache.k(1)[reqid, lengths[reqid] - 2048 : lengths[reqid]] = 1
            cache.v(1)[reqid, lengths[reqid] - 2048 : lengths[reqid]] = 1

    first = fill()
    limit_file.write_text(str(LIMIT + 256 * MIB))
    assert cache.can_admit([128 * MIB // per_token])
    second = fill()
    assert second >= first + 192 * MIB, (first, second)
    cache.check_integrity()
print("filled", first // MIB, second // MIB)
"""


def test_in_a_group(tmp_path: Path) -> None:
    """At the limit, a step returns -1 instead of getting the process killed. The page cache counts
    as free memory, and the limit may change.
    """
    pytest.importorskip("torch")
    with _group(1024 * MIB) as (group, limit):
        done = subprocess.run(
            [sys.executable, "-c", _IN_GROUP, str(group), str(limit), str(tmp_path / "weights")],
            check=False,
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, (done.returncode, done.stdout, done.stderr)
        assert "filled" in done.stdout
