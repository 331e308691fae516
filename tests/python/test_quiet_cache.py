# SPDX-License-Identifier: MIT
"""Checks that a cache learns its own batches' results, however many batches others submit.

Each program runs in its own process: if a page is recorded as mapped but is not, writing a row
crashes the process.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from kvcache_helpers import LAYERS, ROWS, lens, small_cache

from pyvmem import Context

BATCHES = 4200  # more than the number of results that a context stores

QUIET = f"""
import sys
from pyvmem import Context, KVCache, KVCacheConfig
from pyvmem.kvcache import Budget

def config(**policy):
    return KVCacheConfig(
        num_layers=1, num_kv_heads=4, head_dim=64, dtype="float16", max_batch=4,
        max_seq_len=8192, page_size=4096, low_watermark=0, **policy,
    )

def lens(**by_reqid):
    out = [0] * 4
    for name, value in by_reqid.items():
        out[int(name[1:])] = value
    return out

def quiet(name):
    with Context("host", granule=4096) as context:
        budget = Budget(context, 20 << 20)
        with (
            KVCache(config(deferred_reclaim=False, zero_fill=False), budget=budget) as one,
            KVCache(config(), budget=budget) as other,
        ):
            assert one.alloc_reqid() == 0
            assert one.step(lens(r0=4096)) == 0
            one.k(0)[0, :4096] = 1
            one.free_reqid(0)  # unmapped in the background; no call reads the result
            batches = 0
            while batches < {BATCHES}:
                reqid = other.alloc_reqid()
                for rows in range(64, 4096, 8):
                    want = lens(**{{f"r{{reqid}}": rows}})
                    assert other.step_async(want) == 0
                    assert other.step(want) == 0
                    batches += 1
                other.free_reqid(reqid)
                other.trim()
            CALLS[name](one, other)
            one.check_integrity()
            other.check_integrity()
            fill(one)
            one.check_integrity()

def fill(cache):
    reqid = cache.alloc_reqid(4096)
    assert cache.step(lens(**{{f"r{{reqid}}": 4096}})) == 0
    cache.k(0)[reqid, :4096] = 1
    cache.v(0)[reqid, :4096] = 2
    assert (cache.k(0)[reqid, :4096] == 1).all()
    assert (cache.v(0)[reqid, :4096] == 2).all()

def shortage(one, other):
    # This needs the memory that the quiet cache is unmapping.
    reqids = [other.alloc_reqid() for _ in range(3)]
    wanted = dict(zip(reqids, (8192, 4096, 8192)))
    if other.step([wanted.get(reqid, 0) for reqid in range(4)]) != 0:
        wanted[reqids[2]] = 4096
        assert other.step([wanted.get(reqid, 0) for reqid in range(4)]) == 0
    for reqid, rows in wanted.items():
        other.k(0)[reqid, :rows] = 3
    for reqid in reqids:
        other.free_reqid(reqid)

CALLS = {{
    "alloc": lambda one, other: one.free_reqid(one.alloc_reqid()),
    "stats": lambda one, other: one.stats(),
    "step": lambda one, other: one.step([0] * 4),
    "admit": lambda one, other: one.can_admit([10]),
    "trim": lambda one, other: one.trim(),
    "nothing": lambda one, other: None,
    "shortage": shortage,
}}
for name in sys.argv[1:]:
    quiet(name)
    print(name, "holds", flush=True)
"""

ROLLOUT = f"""
import os, time
import pyvmem.memory.context
from pyvmem import FdEvent, KVCache, KVCacheConfig

real = pyvmem.memory.context.after_items

def after_items(after, device):
    items, keep = real(after, device)
    return items, keep or list(after)  # kept until the batch has completed, like CUDA events

pyvmem.memory.context.after_items = after_items

def over():
    return FdEvent(os.eventfd(1))

lens = [0] * 8
with KVCache(
    KVCacheConfig(
        num_layers=1, num_kv_heads=4, head_dim=64, max_batch=8, max_seq_len=32768,
        page_size=4096, deferred_reclaim=False, zero_fill=False, low_watermark=0,
    ),
    backend="host",
) as cache:
    first = cache.alloc_reqid()
    lens[first] = 100
    assert cache.step(lens) == 0
    cache.free_reqid(first, stream=over())
    lens[first] = 0
    running = [cache.alloc_reqid() for _ in range(6)]
    for step in range({BATCHES} + 100):  # no request ends
        for reqid in running[:4] if step % 2 == 0 else running[4:]:
            lens[reqid] = min(32768, lens[reqid] + 8)
        assert cache.step_async(lens) == 0
        assert cache.step(lens) == 0
    victim = running[0]
    rows, lens[victim] = lens[victim], 0
    cache.free_reqid(victim, stream=over())
    time.sleep(0.1)
    cache.check_integrity()
    reqid = cache.alloc_reqid(rows)
    lens[reqid] = rows
    assert cache.step(lens) == 0
    cache.k(0)[reqid, :rows] = 1
    assert (cache.k(0)[reqid, :rows] == 1).all()
    cache.check_integrity()
print("holds", flush=True)
"""


def run(program: str, *arguments: str) -> str:
    """Runs a program in its own process; if it fails, the test fails with the last lines of its
    output.
    """
    done = subprocess.run(
        [sys.executable, "-X", "faulthandler", "-c", program, *arguments],
        cwd=Path(__file__).resolve().parents[2],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=240,
        check=False,
    )
    last = "\n".join(done.stdout.splitlines()[-12:])
    assert done.returncode == 0, f"exit status {done.returncode}:\n{last}"
    return done.stdout


def test_a_quiet_caches_unmap_is_finished_by_its_next_call() -> None:
    names = ["alloc", "stats", "step", "admit", "trim", "nothing"]
    assert run(QUIET, *names).splitlines() == [f"{name} holds" for name in names]


def test_a_quiet_caches_unmap_is_finished_by_a_shortage() -> None:
    assert run(QUIET, "shortage") == "shortage holds\n"


def test_an_event_kept_over_a_long_rollout_delays_no_free() -> None:
    assert run(ROLLOUT) == "holds\n"


def test_trim_unmaps_pages_requested_by_a_freed_fork(context: Context) -> None:
    """The fork is freed while its growth is in flight; no request waits for that growth."""
    with small_cache(context) as cache:
        parent = cache.alloc_reqid()
        assert parent == 0
        assert cache.step(lens(cache, r0=2 * ROWS)) == 0
        child = cache.fork(parent)
        assert child == 1
        assert cache.step_async(lens(cache, r0=2 * ROWS, r1=6 * ROWS)) == 0
        assert cache.stats().mapped_bytes >= 6 * 2 * LAYERS * context.info.granule
        cache.free_reqid(child)
        cache.free_reqid(parent)
        cache.trim(prefixes=True)
        assert cache.stats().mapped_bytes == 0
