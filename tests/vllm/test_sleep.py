# SPDX-License-Identifier: MIT
"""A sleeping engine has no KV memory; weights sleep through vLLM's interface.

vLLM has no sleep mode on a CPU and does not move the weights there, so the tests call the back end
directly and allocate weights through the C symbols that torch calls, as test_torch_pool.py does.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from test_engine import answer, at_rest, check, elastic_of, greedy, memory_of, prompts

import pyvmem
from pyvmem import Inject, OutOfMemory, _vmem
from pyvmem._native import torch_alloc
from pyvmem.torch_pool.pool import VMemPool

SIZE = 2 << 20


def test_kv_sleeps_and_wakes(start: Callable[..., Any]) -> None:
    """Slabs are freed before `sleep` returns, because a trainer allocates that memory next."""
    with start("llama", VMEM_VLLM="1", VMEM_RESERVE="1M", VMEM_IDLE="3600") as llm:
        wanted = answer(llm, prompts())
        elastic, memory = elastic_of(llm), memory_of(llm)
        null = 2 * memory.geometry.page_size  # a page in each of two layers
        assert elastic.backing.mapped_bytes > null
        for level, tags in ((1, None), (2, ["kv_cache", "weights"]), (0, ["scheduling"])):
            llm.sleep(level=level)
            if level:
                stats = memory.context.stats()
                assert (elastic.backing.mapped_bytes, stats.mapped_bytes) == (null, null)
                assert stats.slab_bytes <= null + memory.context.info.slab_size
                check(llm)
            engine = llm.llm_engine  # gets a request while it sleeps
            engine.add_request("0", prompts()[0], greedy())
            for _ in range(5):
                assert engine.step() == []
            llm.wake_up(tags)
            found: list[int] = []
            while engine.has_unfinished_requests():
                for one in engine.step():
                    found = list(one.outputs[0].token_ids)
            assert found == wanted[0]
            assert answer(llm, prompts()) == wanted


Call = Callable[[Any], Any]


def on_workers(method: str, **named: Any) -> Call:
    """Returns a function that calls a method on all workers, bypassing the scheduler."""
    return lambda llm: llm.collective_rpc(method, kwargs=named)


def reset(llm: Any) -> None:
    assert llm.reset_prefix_cache()


def release(llm: Any) -> None:
    llm.llm_engine.step()  # tells the workers that requests have finished, as a server's loop does
    llm.sleep(level=0)  # pauses the engine, as the next call requires
    llm.release_kv_cache_memory()


# The calls that trainers make between two rollouts, before and after the training step (from their
# 2026 sources). Trainers send new weights by calling the workers; here, the workers reload theirs
# instead.
LOOPS: dict[str, tuple[list[Call], list[Call]]] = {
    # verl with trainer and rollout on the same GPUs. The scheduler does not know that its workers
    # sleep, and prefixes are reset after the weights have changed.
    "verl-hybrid": (
        [on_workers("sleep", level=2)],
        [
            on_workers("wake_up", tags=["weights"]),
            on_workers("reload_weights"),
            reset,
            on_workers("wake_up", tags=["kv_cache"]),
        ],
    ),
    # verl with a frozen model, such as a reward model, on the trainer's GPUs.
    "verl-colocated": (
        [lambda llm: llm.sleep(level=1)],
        [lambda llm: llm.wake_up(tags=["kv_cache", "weights"]), reset],
    ),
    # OpenRLHF first wakes only the weights. Before the rollout it wakes every tag, and thus the
    # weights again.
    "openrlhf": (
        [lambda llm: llm.sleep(level=1)],
        [
            lambda llm: llm.wake_up(tags=["weights"]),
            reset,
            on_workers("reload_weights"),
            lambda llm: llm.wake_up(tags=["weights"]),
            lambda llm: llm.wake_up(tags=["kv_cache"]),
        ],
    ),
    # vLLM's own call (since 0.31) for trainers that need only the KV cache's memory.
    "kv-cache-alone": ([release], [lambda llm: llm.wake_up()]),
}


def check_loop(llm: Any, name: str) -> None:
    """Runs a trainer's loop: the engine sleeps, its memory is checked, and it wakes up."""
    elastic, memory = elastic_of(llm), memory_of(llm)
    null = 2 * memory.geometry.page_size
    assert elastic.backing.mapped_bytes > null
    before, after = LOOPS[name]
    for call in before:
        call(llm)
    stats = memory.context.stats()  # checked immediately, because a trainer would allocate now
    assert (elastic.backing.mapped_bytes, stats.mapped_bytes) == (null, null)
    assert stats.slab_bytes <= null + memory.context.info.slab_size
    check(llm)
    for call in after:
        call(llm)


def test_trainers_loops(start: Callable[..., Any]) -> None:
    with start("llama", VMEM_VLLM="1", VMEM_RESERVE="1M", VMEM_IDLE="3600") as llm:
        wanted = answer(llm, prompts())
        for name in LOOPS:
            check_loop(llm, name)
            assert answer(llm, prompts()) == wanted


@pytest.mark.long
def test_a_hundred_rounds_under_load(start: Callable[..., Any], ledger: Any) -> None:
    """Runs the loops in turn, each right after all running and waiting requests are aborted."""
    with start("llama", VMEM_VLLM="1", VMEM_RESERVE="1M", VMEM_LIMIT="2M") as llm:
        engine, wanted, made = llm.llm_engine, answer(llm, prompts()), 10**6
        for number in range(100):
            asked = [str(made + i) for i in range(12)]
            made += 12
            for one, prompt in zip(asked, prompts(number, 12), strict=True):
                engine.add_request(one, prompt, greedy(60))
            for _ in range(5 + number % 7):
                engine.step()
            assert elastic_of(llm).used_blocks() > 0
            engine.abort_request(asked, internal=False)
            check_loop(llm, list(LOOPS)[number % len(LOOPS)])
            assert answer(llm, prompts()) == wanted
        at_rest(llm)
        memory, null = memory_of(llm), 2 * memory_of(llm).geometry.page_size
        assert llm.reset_prefix_cache()
        elastic_of(llm).settle()
        assert memory.context.stats().mapped_bytes == null


@pytest.fixture
def pool() -> Iterator[VMemPool]:
    from pyvmem.vllm import sleep

    with pyvmem.Context("host", granule=4096) as context, VMemPool(context) as one:
        sleep.use_pool(one)
        yield one
        sleep._pools.clear()


@pytest.fixture
def weights(pool: VMemPool) -> Iterator[int]:
    """Allocates weights in the pool as torch would; yields their address."""
    library = ctypes.CDLL(_vmem.__file__)
    library.vmem_malloc.restype = ctypes.c_void_p
    library.vmem_malloc.argtypes = [ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p]
    library.vmem_free.restype = None
    library.vmem_free.argtypes = [
        ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p
    ]  # fmt: skip
    with pool._allocating("weights"):
        address: int = library.vmem_malloc(SIZE, 0, None)
    pool._context.write(address, b"weights")
    yield address
    library.vmem_free(address, SIZE, 0, None)


def backend() -> Any:
    """Creates the back end by name, as vLLM's worker does."""
    from vllm.device_allocator.sleep_mode_backend import SleepModeBackendFactory

    from pyvmem.vllm import plugin

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VMEM_VLLM", "1")
        from vllm.engine.arg_utils import EngineArgs

        original = EngineArgs.create_engine_config
        plugin.register()
        EngineArgs.create_engine_config = original
    config: Any = SimpleNamespace(sleep_mode_backend="vmem")
    return SleepModeBackendFactory.create_backend(config)


@pytest.mark.parametrize(("level", "found"), [(1, b"weights"), (2, bytes(7))])
def test_weights_sleep_and_wake(pool: VMemPool, weights: int, level: int, found: bytes) -> None:
    one, context = backend(), pool._context
    assert one.state() == "RUNNING"
    one.suspend(level)
    assert one.state() == "SUSPENDED"
    assert context.stats().mapped_bytes == 0
    one.resume(["kv_cache"])
    assert one.state() == "SUSPENDED"
    assert context.stats().mapped_bytes == 0
    one.resume(["weights"])
    assert one.state() == "RUNNING"
    assert context.read(weights, 7) == found
    one.resume()
    assert torch_alloc.owns(0, weights, SIZE)


def test_memory_is_discarded_by_its_tag(pool: VMemPool, weights: int) -> None:
    """Calls `discard`, which vLLM's `release_kv_cache_memory` uses (since 0.31)."""
    one, context = backend(), pool._context
    mapped = context.stats().mapped_bytes
    assert mapped > 0
    one.discard(("kv_cache",))
    assert one.state() == "SUSPENDED"
    assert context.stats().mapped_bytes == mapped
    one.resume(["kv_cache"])
    assert one.state() == "RUNNING"
    one.discard(("weights", "kv_cache"))
    assert one.state() == "SUSPENDED"
    assert context.stats().mapped_bytes == 0
    one.resume()
    assert context.read(weights, 7) == bytes(7)


def test_weights_stay_asleep_if_they_cannot_wake(pool: VMemPool, weights: int) -> None:
    one = backend()
    one.suspend(1)
    pool._context.inject(Inject.MAP, count=99, error=12)
    with pytest.raises(OutOfMemory):
        one.resume()
    pool._context.inject(Inject.MAP, count=0)
    one.resume()
    assert one.state() == "RUNNING"
    assert pool._context.read(weights, 7) == b"weights"
