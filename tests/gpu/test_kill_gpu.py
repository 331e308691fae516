# SPDX-License-Identifier: MIT
"""If a process is killed while its kernels use a cache, its memory is freed.

Needs a CUDA device that is not in use, torch, and a GPU back end; skipped otherwise.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import time

import pytest
from gpu_helpers import BACKENDS, needs_gpu

torch = pytest.importorskip("torch")
pytestmark = needs_gpu()

HELD = 2 << 30  # bytes that the child maps and uses
SLACK = 64 << 20  # tolerance for the driver's and other processes' memory
PATIENCE_S = 60.0

CHILD = """
import sys, time
import torch
from pyvmem import Context, KVCache, KVCacheConfig

backend, held = sys.argv[1], int(sys.argv[2])
with Context(backend) as context:
    page = context.info.granule
    config = KVCacheConfig(num_layers=1, num_kv_heads=8, head_dim=128, dtype="float16", max_batch=1,
                           max_seq_len=held // 2 // 2048, growth_fraction=0)
    with KVCache(config, context) as cache:
        reqid = cache.alloc_reqid()
        assert cache.step([config.max_seq_len]) == 0
        k = cache.k(0)[reqid]
        k.fill_(1)
        torch.cuda.synchronize()
        print("mapped", cache.stats().mapped_bytes, flush=True)
        while True:  # killed while kernels write here
            k.add_(1)
            torch.cuda.synchronize()
"""


def free_bytes() -> int:
    """Returns the free device memory in bytes, as seen by this process."""
    free: int = torch.cuda.mem_get_info()[0]
    return free


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_killed_process_gives_its_memory_back(backend: str) -> None:
    torch.zeros(1, device="cuda")
    before = free_bytes()
    with subprocess.Popen(
        [sys.executable, "-c", CHILD, backend, str(HELD)], stdout=subprocess.PIPE, text=True
    ) as child:
        try:
            assert child.stdout is not None
            assert child.stdout.readline().split() == ["mapped", str(HELD)]
            time.sleep(0.5)
            during = free_bytes()
        finally:
            child.send_signal(signal.SIGKILL)
        assert child.wait() == -signal.SIGKILL
    assert before - during >= HELD
    end = time.monotonic() + PATIENCE_S
    while (free := free_bytes()) < before - SLACK and time.monotonic() < end:
        time.sleep(0.05)
    assert free >= before - SLACK
