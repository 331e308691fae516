# SPDX-License-Identifier: MIT
"""vLLM on the elastic pool generates stock vLLM's tokens and frees its memory."""

from __future__ import annotations

import dataclasses
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from vllm import SamplingParams

from pyvmem import Inject
from pyvmem.ledger.orders import order

Tokens = list[list[int]]
Open = Callable[..., Any]


def prompts(seed: int = 0, count: int = 10, vocabulary: int = 500) -> list[dict[str, Any]]:
    """Returns prompts of different lengths, some of which share a prefix."""
    rng = random.Random(seed)
    begin = [rng.randrange(3, vocabulary) for _ in range(150)]
    found = []
    for i in range(count):
        own = [rng.randrange(3, vocabulary) for _ in range(rng.choice([1, 31, 32, 33, 90, 200]))]
        found.append({"prompt_token_ids": begin + own if i % 3 == 0 else own})
    return found


def greedy(count: int = 20) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, detokenize=False)


def answer(llm: Any, asked: list[dict[str, Any]], count: int = 20) -> Tokens:
    outputs = llm.generate(asked, greedy(count), use_tqdm=False)
    return [list(one.outputs[0].token_ids) for one in outputs]


def elastic_of(llm: Any) -> Any:
    return llm.llm_engine.engine_core.engine_core.scheduler.elastic


def memory_of(llm: Any) -> Any:
    return elastic_of(llm).ranks.ranks[0].memory


def another(ledger: Any) -> Any:
    """Opens an account for another engine, without a floor and practically without a limit."""
    from pyvmem.ledger.accounts import Ledger

    return Ledger("host", folder=ledger).join(
        "other", floor=0, limit=1 << 40, least=1, virtual=1 << 40
    )


def check(llm: Any) -> None:
    """Checks that the records, the ledger and libvmem agree."""
    elastic, stats = elastic_of(llm), memory_of(llm).context.stats()
    with elastic.lock:
        assert elastic.backing.check() == []
        assert elastic.quota.used == elastic.backing.mapped_bytes
        assert stats.mapped_bytes == elastic.backing.mapped_bytes
    memory_of(llm).context.check()


def at_rest(llm: Any) -> None:
    """Checks that exactly the live memory is mapped and that slabs take only a little more."""
    elastic = elastic_of(llm)
    elastic.settle()
    check(llm)
    live = elastic.live_bytes()
    assert elastic.used_blocks() == 0
    assert elastic.backing.mapped_bytes == live
    end = time.monotonic() + 20
    context = memory_of(llm).context
    while time.monotonic() < end:  # a later keeper round empties the slabs
        stats = context.stats()
        if stats.slab_bytes <= 1.05 * live + context.info.slab_size:
            break
        time.sleep(0.05)
    assert stats.slab_bytes <= 1.05 * live + context.info.slab_size


@pytest.fixture(scope="session")
def stock() -> dict[Any, Tokens]:
    """Returns a cache of stock vLLM's answers, keyed by model, answer length and options."""
    return {}


@pytest.fixture
def expected(start: Open, stock: dict[Any, Tokens]) -> Callable[..., Tokens]:
    def of(model: str, count: int = 20, **options: Any) -> Tokens:
        key = (model, count, repr(sorted(options.items())))
        if key not in stock:
            with start(model, **options) as llm:
                stock[key] = answer(llm, prompts(), count)
        return stock[key]

    return of


@pytest.mark.parametrize("model", ["llama", "straddling", "gemma"])
def test_tokens_and_memory(start: Open, expected: Callable[..., Tokens], model: str) -> None:
    wanted = expected(model)
    # Prompts that are longer than a step's 64 tokens test chunked prefill.
    assert max(len(one["prompt_token_ids"]) for one in prompts()) > 3 * 64
    with start(model, VMEM_VLLM="1", VMEM_RESERVE="1M") as llm:
        assert answer(llm, prompts()) == wanted
        check(llm)
        assert elastic_of(llm).hits > 0
        assert answer(llm, prompts()) == wanted
        at_rest(llm)
        assert elastic_of(llm)._cached_bytes() > 0
        assert llm.reset_prefix_cache()
        at_rest(llm)
        geometry = elastic_of(llm).backing.geometry
        null = sum(len(geometry.pages(k, 0)) * geometry.page_bytes(k) for k in range(1))
        assert elastic_of(llm).backing.mapped_bytes == null
        assert answer(llm, prompts()) == wanted


def test_a_real_model(start: Open) -> None:
    """Runs SmolLM2-135M, whose blocks of 32 tokens take 48 KiB per layer in float32."""
    from pyvmem.serve import model

    pytest.importorskip("gguf", reason="the package gguf is not installed")
    try:
        folder = str(model.model_folder())
    except model.ModelNotFound as error:
        pytest.skip(str(error))
    asked = prompts(count=3, vocabulary=40_000)
    with start(folder) as llm:
        wanted = answer(llm, asked, 8)
    assert len({tuple(one) for one in wanted}) == len(asked)
    with start(folder, VMEM_VLLM="1", VMEM_RESERVE="8M") as llm:
        assert answer(llm, asked, 8) == wanted
        assert elastic_of(llm)._cached_bytes() > 0
        assert answer(llm, asked, 8) == wanted
        at_rest(llm)


def test_prefixes_are_cut_to_the_block(start: Open) -> None:
    """Eight blocks share a page, so most evictions free no page; the cap counts blocks."""
    with start("llama", VMEM_VLLM="1", VMEM_IDLE="3600") as llm:
        answer(llm, prompts())
        elastic = elastic_of(llm)
        elastic.settle()
        block, cached = elastic.backing.geometry.block_bytes, elastic._cached_bytes()
        assert cached > 20 * block
        for cap in (cached - 3 * block, cached - 10 * block - 1, 0):
            elastic.settings = dataclasses.replace(elastic.settings, prefix=cap)
            elastic.tick(force=True)
            assert elastic._cached_bytes() == cap // block * block
            elastic.settle()
            check(llm)


def test_without_prefixes(start: Open, expected: Callable[..., Tokens]) -> None:
    wanted = expected("llama", enable_prefix_caching=False)
    with start("llama", VMEM_VLLM="1", enable_prefix_caching=False) as llm:
        assert answer(llm, prompts()) == wanted
        at_rest(llm)
        assert elastic_of(llm)._cached_bytes() == 0


def test_tokens_depend_on_the_cache(start: Open) -> None:
    """Checks that the comparison fails if a block loses its contents."""
    with start("llama", VMEM_VLLM="1", enable_prefix_caching=False) as llm:
        asked = prompts()[5]["prompt_token_ids"] * 3
        (wanted,) = answer(llm, [{"prompt_token_ids": asked}])
        engine = llm.llm_engine
        engine.add_request("0", {"prompt_token_ids": asked}, greedy())
        found: list[int] = []
        for step in range(60):
            for one in engine.step():
                found = list(one.outputs[0].token_ids)
            if step == len(asked) // 64 + 2:
                memory = memory_of(llm)
                scheduler = engine.engine_core.engine_core.scheduler
                (request,) = scheduler.running
                ids = scheduler.kv_cache_manager.get_block_ids(request.request_id)
                page, size = memory.geometry.pages(0, ids[0][0])[0], memory.geometry.page_size
                memory.context.fill(memory._reservation.addr + page * size, size)
            if not engine.has_unfinished_requests():
                break
        assert len(found) == len(wanted)
        assert found != wanted


def test_a_limit_forces_preemption(start: Open, expected: Callable[..., Tokens]) -> None:
    wanted = expected("straddling", 100)
    with start("straddling", VMEM_VLLM="1", VMEM_LIMIT="576K", VMEM_RESERVE="0") as llm:
        scheduler = llm.llm_engine.engine_core.engine_core.scheduler
        preempted = 0
        preempt = scheduler._preempt_request

        def counting(*args: Any, **kwargs: Any) -> Any:
            nonlocal preempted
            preempted += 1
            return preempt(*args, **kwargs)

        scheduler._preempt_request = counting
        assert answer(llm, prompts(), 100) == wanted
        assert preempted > 0
        assert memory_of(llm).context.stats().peak_mapped_bytes <= 576 << 10
        at_rest(llm)
        assert llm.reset_prefix_cache()


@pytest.mark.parametrize(
    ("limit", "text"),
    [
        ("256K", "VMEM_LIMIT=262144: one request of max_model_len=512"),
        ("1000T", f"VMEM_LIMIT={1000 << 40} exceeds the device's [0-9]+ bytes"),
    ],
)
def test_a_senseless_limit_is_refused(start: Open, limit: str, text: str) -> None:
    with (
        pytest.raises(ValueError, match=text),
        start("straddling", VMEM_VLLM="1", VMEM_LIMIT=limit),
    ):
        pass


@pytest.mark.long  # compiling the lookup takes half a minute
def test_ngram_speculation(start: Open, expected: Callable[..., Tokens]) -> None:
    method = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2}
    wanted = expected("llama", speculative_config=method)
    with start("llama", VMEM_VLLM="1", speculative_config=method) as llm:
        assert answer(llm, prompts()) == wanted
        at_rest(llm)


def script(llm: Any, seed: int, act: Callable[[random.Random], None]) -> dict[str, list[int]]:
    """Runs requests that arrive and are aborted at random steps, the same for every engine.

    `act` is called after each step. Returns the answers to the requests that finished, by name.
    """
    rng, own = random.Random(seed), random.Random(seed)
    engine, live, done = llm.llm_engine, set[str](), {}
    todo = [(str(i), one, rng.randrange(1, 24)) for i, one in enumerate(prompts(seed, 24))]
    while todo or live:
        if todo and rng.random() < 0.6:
            name, asked, count = todo.pop()
            engine.add_request(name, asked, greedy(count))
            live.add(name)
        for one in engine.step():
            if one.finished:
                done[one.request_id] = list(one.outputs[0].token_ids)
                live.discard(one.request_id)
        if live and rng.random() < 0.2:
            name = rng.choice(sorted(live))
            engine.abort_request([name])
            live.discard(name)
        act(own)
    return done


def test_aborts_and_trims_at_random(start: Open) -> None:
    with start("llama") as llm:
        wanted = [script(llm, seed, lambda rng: None) for seed in range(2)]
    with start("llama", VMEM_VLLM="1", VMEM_RESERVE="256K", VMEM_IDLE="0.05") as llm:
        elastic = elastic_of(llm)

        def trim(rng: random.Random) -> None:
            if rng.random() < 0.3:
                with elastic.lock:
                    elastic._shrink(rng.choice([64 << 10, 256 << 10, 4 << 20]))
            check_books(elastic)

        assert [script(llm, seed, trim) for seed in range(2)] == wanted
        assert elastic.backing.counters.releases > 10
        at_rest(llm)


def test_an_idle_engine_with_a_pending_last_output(start: Open) -> None:
    """With async scheduling, the last step's output is pending until the next request."""
    with start("llama", VMEM_VLLM="1", VMEM_RESERVE="1M", VMEM_IDLE="0.2") as llm:
        answer(llm, prompts())
        elastic, memory = elastic_of(llm), memory_of(llm)
        with elastic.lock:
            step, releases = elastic.begin_step()
            for one in releases:
                memory.release(one.number, one.runs, step - 1)
        end = time.monotonic() + 1
        while elastic.backing.mapped_bytes > elastic.live_bytes() and time.monotonic() < end:
            time.sleep(0.05)
        assert elastic.backing.mapped_bytes > elastic.live_bytes(), "the step is not launched yet"
        memory.step_ends(step)
        end = time.monotonic() + 20
        while elastic.backing.mapped_bytes > elastic.live_bytes() and time.monotonic() < end:
            time.sleep(0.05)
        assert elastic.backing.mapped_bytes == elastic.live_bytes()
        at_rest(llm)


def check_books(elastic: Any) -> None:
    with elastic.lock:
        assert elastic.backing.check() == []


def test_failures_are_shortages(start: Open, expected: Callable[..., Tokens]) -> None:
    """If mapping or unmapping fails, requests wait and their answers are still correct."""
    wanted = expected("straddling")
    with start("straddling", VMEM_VLLM="1", VMEM_RESERVE="0", VMEM_IDLE="0.01") as llm:
        elastic, context = elastic_of(llm), memory_of(llm).context
        for kind in (Inject.MAP, Inject.UNMAP, Inject.SLAB):
            before = elastic.backing.counters.failures
            for skip in (0, 2, 5):
                context.inject(kind, skip=skip, count=3, error=12)
                assert answer(llm, prompts()) == wanted
                assert llm.reset_prefix_cache()
                elastic.settle()  # unmaps something, in case nothing was unmapped before
                context.inject(kind, count=0)
                check(llm)
            if kind is not Inject.SLAB:  # the pool may already have enough slabs
                assert elastic.backing.counters.failures > before
        at_rest(llm)


@pytest.mark.parametrize("kind", [Inject.MAP, Inject.UNMAP])
def test_each_map_and_unmap_may_fail(start: Open, kind: Inject) -> None:
    """Makes the first call fail, then the second, and so on, until a run makes too few calls."""
    asked = prompts()[:3]
    with start("straddling", VMEM_VLLM="1", VMEM_RESERVE="0", VMEM_IDLE="0.01") as llm:
        elastic, context = elastic_of(llm), memory_of(llm).context
        wanted, failures, skip = answer(llm, asked, 6), -1, 0
        while elastic.backing.counters.failures > failures:
            failures = elastic.backing.counters.failures
            assert llm.reset_prefix_cache()
            elastic.settle()
            context.inject(kind, skip=skip, count=1, error=12)
            assert answer(llm, asked, 6) == wanted
            assert llm.reset_prefix_cache()
            elastic.settle()
            context.inject(kind, count=0)
            check(llm)
            skip += 1
        assert skip > 1, "nothing failed"
        at_rest(llm)


@pytest.mark.parametrize(
    ("model", "ask"),
    [("encoder", "embed"), pytest.param("classifier", "classify", marks=pytest.mark.long)],
)
def test_a_model_without_a_kv_cache(start: Open, model: str, ask: str) -> None:
    """The model runs under stock vLLM's scheduler, because it has no memory to share."""
    found = []
    options = {
        "runner": "pooling",
        "max_num_batched_tokens": 512,
        "skip_tokenizer_init": False,
    }
    for switch in ("0", "1"):
        with start(model, VMEM_VLLM=switch, **options) as llm:
            outputs = getattr(llm, ask)(prompts(count=4), use_tqdm=False)
            found.append([vars(one.outputs) for one in outputs])
    assert found[0] == found[1]
    assert len({repr(one) for one in found[0]}) == 4


def test_outputs_of_another_scheduler_and_events_between_steps(
    start: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM's own scheduler outputs carry no commands; the keeper's evictions become events."""
    from vllm.config import KVEventsConfig
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT

    config = KVEventsConfig(enable_kv_cache_events=True, publisher="null")
    options = {"VMEM_IDLE": "3600", "kv_events_config": config}
    with start("llama", VMEM_VLLM="1", **options) as llm:
        scheduler, elastic = llm.llm_engine.engine_core.engine_core.scheduler, elastic_of(llm)
        index: set[Any] = set()

        class Publisher:
            def publish(self, batch: Any) -> None:
                for event in batch.events:
                    if type(event).__name__ == "BlockStored":
                        index.update(event.block_hashes)
                    elif type(event).__name__ == "BlockRemoved":
                        index.difference_update(event.block_hashes)
                    else:
                        index.clear()

            def shutdown(self) -> None:
                pass

        scheduler.kv_event_publisher = Publisher()
        answer(llm, prompts())
        block = elastic.backing.geometry.block_bytes
        cached = elastic._cached_bytes() // block
        assert len(index) == cached > 12
        elastic.settings = dataclasses.replace(elastic.settings, prefix=12 * block)
        elastic.tick(force=True)
        assert len(index) == elastic._cached_bytes() // block == 12
        step = elastic._ended
        output = SchedulerOutput.make_empty()
        assert not llm.llm_engine.engine_core.engine_core.model_executor.execute_model(
            output
        ).req_ids
        scheduler.update_from_output(output, EMPTY_MODEL_RUNNER_OUTPUT)
        assert elastic._ended == step
        assert llm.reset_prefix_cache()
        elastic.tick(force=True)
        assert not index


FORGOTTEN = """
import gc, sys, threading, time
from vllm import LLM, SamplingParams
from pyvmem.ledger import Ledger
from pathlib import Path

llm = LLM(sys.argv[1], skip_tokenizer_init=True, dtype="float32", block_size=32,
          enforce_eager=True, kv_cache_memory_bytes=64 << 20, max_model_len=512)
asked = SamplingParams(temperature=0, max_tokens=4, detokenize=False)
llm.generate([{"prompt_token_ids": [5] * 100}], asked, use_tqdm=False)
memory = llm.llm_engine.engine_core.engine_core.scheduler.elastic.ranks.ranks[0].memory
context = memory.context
del memory
assert context.stats().mapped_bytes > 0
engines = lambda: [one.name for one in Ledger("host", create=False).engines()]
assert engines(), "the engine is in the ledger"
del llm
from vllm.distributed import cleanup_dist_env_and_memory
cleanup_dist_env_and_memory()
end = time.monotonic() + 30
while True:
    gc.collect()
    threads = [one.name for one in threading.enumerate() if one.name.startswith("vmem")]
    mapped = 0 if context._closed else context.stats().mapped_bytes
    left = (threads, engines(), mapped, list(Path(sys.argv[2]).glob("*.sock")))
    if not any(left):
        print("nothing is left")
        break
    assert time.monotonic() < end, left
    time.sleep(0.1)
"""


def test_an_engine_that_is_forgotten(models: Callable[[str], str], ledger: Any) -> None:
    """``del llm`` leaves no thread, ledger account or memory behind."""
    settings = {"VMEM_VLLM": "1", "VMEM_LEDGER": str(ledger), "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    done = subprocess.run(
        [sys.executable, "-c", FORGOTTEN, models("llama"), str(ledger)],
        env=os.environ | settings,
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
    )
    assert "nothing is left" in done.stdout, done.stdout + done.stderr


def test_a_lowered_limit_shrinks_the_engine(start: Open, ledger: Any) -> None:
    from pyvmem.ledger.accounts import Ledger

    with start("llama", VMEM_VLLM="1", VMEM_NAME="one", VMEM_RESERVE="4M") as llm:
        elastic = elastic_of(llm)
        answer(llm, prompts(count=24), 40)
        grown = elastic.backing.mapped_bytes
        limit = max(elastic.least, grown // 2)
        with Ledger("host", folder=ledger, create=False) as other:
            order(other, "one", limit=limit)
        end = time.monotonic() + 20
        while elastic.backing.mapped_bytes > limit and time.monotonic() < end:
            time.sleep(0.05)
        assert elastic.backing.mapped_bytes <= limit
        assert elastic.usage() == 0


def test_a_limit_below_what_requests_hold(start: Open, ledger: Any) -> None:
    """Requests keep their blocks, and the engine shrinks as they finish."""
    from pyvmem.ledger.accounts import Ledger

    with start("straddling", VMEM_VLLM="1", VMEM_NAME="one", VMEM_RESERVE="0") as llm:
        elastic, engine = elastic_of(llm), llm.llm_engine
        asked = prompts()
        wanted = answer(llm, asked, 40)
        assert llm.reset_prefix_cache()
        for number, one in enumerate(asked):
            engine.add_request(str(number), one, greedy(40))
        for _ in range(12):
            engine.step()
        held = elastic.used_blocks() * elastic.backing.geometry.block_bytes
        assert held > elastic.least
        with Ledger("host", folder=ledger, create=False) as other:
            assert order(other, "one", limit=elastic.least).used > elastic.least
        found: dict[str, list[int]] = {}
        while engine.has_unfinished_requests():
            for one in engine.step():
                found[one.request_id] = list(one.outputs[0].token_ids)
        assert [found[str(number)] for number in range(len(asked))] == wanted
        elastic.settle()
        assert elastic.backing.mapped_bytes <= elastic.least
        check(llm)


def test_a_steady_state_maps_nothing(start: Open) -> None:
    """Memory mapped for one load serves the next, without driver calls or steps that wait."""
    off = {"enable_prefix_caching": False}
    with start("straddling", VMEM_VLLM="1", VMEM_RESERVE="4M", VMEM_IDLE="3600", **off) as llm:
        elastic, stats = elastic_of(llm), memory_of(llm).context.stats
        answer(llm, prompts())
        counters, calls, waits = elastic.backing.counters, stats().map_calls, elastic.waits
        growths = counters.growths
        assert growths > 0
        for seed in range(1, 3):
            answer(llm, prompts(seed))
        assert (counters.growths, stats().map_calls, elastic.waits) == (growths, calls, waits)
        assert counters.releases == 0


def test_prompts_larger_than_the_reserve_wait_once(start: Open, monkeypatch: Any) -> None:
    """Memory for the largest recent step is mapped ahead, even with a small reserve."""
    with start(
        "llama",
        VMEM_VLLM="1",
        VMEM_RESERVE="1M",
        VMEM_IDLE="3600",
        max_num_batched_tokens=512,
        enable_prefix_caching=False,
    ) as llm:
        elastic, engine = elastic_of(llm), llm.llm_engine
        elastic.reserve_blocks = 2
        for number in range(8):
            ids = [3 + (7 * i + number) % 400 for i in range(250)]
            engine.add_request(str(number), {"prompt_token_ids": ids}, greedy(60))
            waits = elastic.waits
            for _ in range(2):
                engine.step()
                # On a busy machine, the next step might start before the keeper's round.
                assert idle_becomes(elastic, 8), "as many blocks as a prompt takes"
            assert elastic.waits == waits + (number == 0)
        assert elastic.used_blocks() >= 8 * 8
        monkeypatch.setattr("pyvmem.vllm.engine._RECENT", 0)
        while engine.has_unfinished_requests():
            engine.step()
        assert elastic._ahead < 8, "what decoding takes"


def test_prompts_of_one_step_wait_for_one_growth(start: Open) -> None:
    """The mapping that the first request waits for also covers the other requests."""
    with start("llama", VMEM_VLLM="1", VMEM_RESERVE="1M", max_num_batched_tokens=1024) as llm:
        elastic, engine = elastic_of(llm), llm.llm_engine
        for number in range(8):
            ids = [3 + (7 * i + number) % 400 for i in range(120)]
            engine.add_request(str(number), {"prompt_token_ids": ids}, greedy(4))
        assert elastic.backing.unbacked == elastic.pool.num_gpu_blocks - 1
        elastic.reserve_blocks = elastic._batch = 2
        calls: list[str] = []
        begin = elastic.backing.begin

        def counting(count: int) -> Any:
            calls.append(threading.current_thread().name)
            return begin(count)

        elastic.backing.begin = counting
        engine.step()
        assert len(engine.engine_core.engine_core.scheduler.running) == 8
        assert elastic.used_blocks() == 8 * 4
        assert calls.count(threading.current_thread().name) == 1


def test_mapping_of_extra_blocks_may_fail(start: Open) -> None:
    """If mapping extra blocks fails, the same step maps just the blocks that the request needs."""
    with start("llama", VMEM_VLLM="1", VMEM_RESERVE="1M") as llm:
        elastic, engine = elastic_of(llm), llm.llm_engine
        memory_of(llm).context.inject(Inject.MAP, count=1, error=12)
        engine.add_request("0", {"prompt_token_ids": [5] * 40}, greedy(4))
        engine.step()
        assert elastic.backing.counters.failures == 1
        assert len(engine.engine_core.engine_core.scheduler.running) == 1
        while engine.has_unfinished_requests():
            engine.step()
        at_rest(llm)


def test_blocks_that_a_queue_may_take_in_a_step(start: Open) -> None:
    """Only blocks that a step can take within its token and request limits are counted."""
    with start("llama", VMEM_VLLM="1", max_num_seqs=2) as llm:
        engine = llm.llm_engine
        scheduler = engine.engine_core.engine_core.scheduler
        demand = scheduler._demand
        assert demand._count_waiting() == 0
        for number in range(4):
            engine.add_request(str(number), {"prompt_token_ids": [5] * 40}, greedy(4))
        assert demand._count_waiting() == 2 + 1, "40 tokens, and the remaining 24 of 64"
        engine.step()
        engine.step()
        assert (len(scheduler.running), len(scheduler.waiting)) == (2, 2)
        assert demand._count_waiting() == 0


def test_without_a_reserve_nothing_is_mapped_ahead(start: Open) -> None:
    options = {"max_num_batched_tokens": 512, "enable_prefix_caching": False}
    with start("llama", VMEM_VLLM="1", VMEM_RESERVE="0", VMEM_IDLE="3600", **options) as llm:
        elastic, engine = elastic_of(llm), llm.llm_engine
        for number in range(6):
            engine.add_request(str(number), {"prompt_token_ids": [5] * 250}, greedy(4))
        engine.step()
        engine.step()
        time.sleep(0.2)
        with elastic.lock:
            assert len(elastic.idle) < 512 // 32 + 8, "a page more"


def idle_becomes(elastic: Any, blocks: int) -> bool:
    end = time.monotonic() + 20
    while time.monotonic() < end:
        with elastic.lock:
            if elastic._background is None and len(elastic.idle) >= blocks:
                return True
        time.sleep(0.01)
    return False


def test_no_preemption_while_memory_is_free(start: Open) -> None:
    """All requests need a new block in the same step, and none is mapped yet."""
    with start("llama", VMEM_VLLM="1", VMEM_RESERVE="0", enable_prefix_caching=False) as llm:
        elastic, engine = elastic_of(llm), llm.llm_engine
        scheduler = engine.engine_core.engine_core.scheduler
        scheduler._preempt_request = None  # must not be called
        for number in range(8):
            engine.add_request(str(number), {"prompt_token_ids": [5] * 8}, greedy(60))
        grown = -1
        while engine.has_unfinished_requests():
            engine.step()
            if len(scheduler.running) == 8 and grown < 0:
                grown = elastic.backing.counters.grown_blocks
        assert elastic.backing.counters.grown_blocks - grown >= 8
        at_rest(llm)


def test_a_waiting_request_without_a_prefix_lookup(start: Open) -> None:
    """Without a lookup, its blocks are counted a step later, as for a session's next input."""
    from vllm.v1.request import RequestStatus

    with start("llama", VMEM_VLLM="1", VMEM_RESERVE="0", enable_prefix_caching=False) as llm:
        engine = llm.llm_engine
        scheduler = engine.engine_core.engine_core.scheduler
        engine.add_request("0", {"prompt_token_ids": [5] * 200}, greedy(4))
        engine.step()
        (request,) = scheduler.running
        assert 0 < request.num_computed_tokens < 200 - 64
        scheduler.running.clear()
        request.status = RequestStatus.WAITING
        scheduler.waiting.add_request(request)
        scheduler._demand._computing.clear()
        elastic = elastic_of(llm)
        with elastic.lock:
            elastic._retire(sorted(elastic.idle)[1:])
        assert not scheduler.schedule().total_num_scheduled_tokens
        assert scheduler.schedule().num_scheduled_tokens == {request.request_id: 64}
        scheduler.finish_requests([request.request_id], RequestStatus.FINISHED_ABORTED)


def test_memory_that_another_engine_is_short_of(start: Open, ledger: Any) -> None:
    """The engine evicts idle prefixes on demand, then waits while it is itself short of memory."""
    with start("straddling", VMEM_VLLM="1", VMEM_CAPACITY="3M", VMEM_RESERVE="0") as llm:
        elastic = elastic_of(llm)
        asked = max(prompts(), key=lambda one: len(one["prompt_token_ids"]))
        answer(llm, prompts(), 40)
        (wanted,) = answer(llm, [asked], 40)
        assert elastic._cached_bytes() > 0
        other = another(ledger)
        need = (3 << 20) - (64 << 10)  # all memory but the null block's page
        assert not other.take(need)
        end = time.monotonic() + 20
        while not other.take(need) and time.monotonic() < end:
            other.want(need)
            time.sleep(0.02)
        assert other.used == need
        assert elastic.backing.mapped_bytes == 64 << 10
        engine = llm.llm_engine
        engine.add_request("0", asked, greedy(40))
        for _ in range(5):
            assert engine.step() == []
        other.end_pending(need)
        other.give(need)  # memory is free from here on
        found = []
        while engine.has_unfinished_requests():
            found = [list(one.outputs[0].token_ids) for one in engine.step()] or found
        assert found == [wanted]
        other.close()


@pytest.mark.parametrize("prefixes", [False, True])
def test_scattered_blocks_are_gathered_for_a_single_request(
    start: Open, ledger: Any, monkeypatch: Any, prefixes: bool
) -> None:
    """The idle blocks of 24 KiB are scattered, and another engine uses all other pages."""
    options = {"VMEM_VLLM": "1", "VMEM_CAPACITY": "768K", "VMEM_RESERVE": "0"}
    with start("straddling", enable_prefix_caching=prefixes, **options) as llm:
        elastic, engine = elastic_of(llm), llm.llm_engine
        asked = {"prompt_token_ids": [3 + i % 400 for i in range(350)]}
        (wanted,) = answer(llm, [asked], 70)
        if prefixes:
            assert llm.reset_prefix_cache()
        elastic.settle()
        page, geometry = 64 << 10, elastic.backing.geometry
        # Keep the keeper from freeing them.
        monkeypatch.setattr(elastic, "_give_back", lambda _: None)
        with elastic.lock:
            assert elastic._back(27)
            scattered = [
                block
                for block in sorted(elastic.idle)
                if all(one % 2 for one in geometry.pages(0, block))
                or not any(geometry.pages(0, block))
            ]
            elastic._retire([one for one in elastic.idle if one not in scattered])
            elastic._send_by_call()
        other = another(ledger)
        end = time.monotonic() + 20
        while elastic.backing.mapped_bytes > 7 * page:
            assert time.monotonic() < end
            elastic.tick()
        assert other.take((768 << 10) - elastic.backing.mapped_bytes)
        # Block 2 can be used too, because it shares the pages of blocks 1 and 3.
        assert len(scattered) + 1 < 14 < elastic.backing.mapped_bytes // (24 << 10)
        engine.add_request("0", asked, greedy(70))
        found: list[int] = []
        end = time.monotonic() + 60
        while engine.has_unfinished_requests():
            assert time.monotonic() < end, "for ever"
            found = [t for one in engine.step() for t in one.outputs[0].token_ids] or found
        assert found == wanted
        other.close()


def test_prefixes_stay_while_a_request_waits_for_another_engine_s_memory(
    start: Open, ledger: Any
) -> None:
    """Even all of this engine's memory would not be enough, so evicting prefixes would not help."""
    options = {"VMEM_VLLM": "1", "VMEM_CAPACITY": "768K", "VMEM_RESERVE": "0"}
    with start("straddling", **options) as llm:
        elastic, engine = elastic_of(llm), llm.llm_engine
        answer(llm, [{"prompt_token_ids": [3 + i for i in range(200)]}], 4)
        cached = elastic._cached_bytes()
        assert cached > 0
        other = another(ledger)
        assert other.take((768 << 10) - elastic.backing.mapped_bytes)
        asked = {"prompt_token_ids": [5 + i % 300 for i in range(400)]}
        engine.add_request("0", asked, greedy(4))
        for _ in range(10):
            assert engine.step() == []
            time.sleep(0.03)  # longer than the engine remembers a refusal
        assert elastic._cached_bytes() == cached
        other.end_pending(other.used)
        other.give(other.used)
        while engine.has_unfinished_requests():
            engine.step()
        other.close()


def test_an_engine_with_a_queue_frees_memory_above_its_share(start: Open, ledger: Any) -> None:
    """While another engine is short of memory, no request is admitted; later all are answered."""
    with start("straddling", VMEM_VLLM="1", VMEM_CAPACITY="768K", VMEM_RESERVE="0") as llm:
        elastic, engine = elastic_of(llm), llm.llm_engine
        wanted = answer(llm, prompts(), 40)
        other = another(ledger)
        asked, sent = prompts(), 0
        found: dict[str, list[int]] = {}
        scheduler = engine.engine_core.engine_core.scheduler

        def step(queue: int) -> None:
            nonlocal sent
            while len(scheduler.waiting) < queue:
                engine.add_request(str(sent), asked[sent % len(asked)], greedy(40))
                sent += 1
            for one in engine.step():
                found[one.request_id] = list(one.outputs[0].token_ids)

        while len(scheduler.running) < 2:
            step(queue=8)
        elastic.tick(force=True)
        assert not elastic.has_more
        part = 384 << 10  # half of the capacity
        end = time.monotonic() + 60

        def take() -> None:
            """Polls for memory as another process would, independently of this engine's steps."""
            while not other.take(part) and time.monotonic() < end:
                other.want(part)
                time.sleep(0.001)
            other.want(0)

        taking = threading.Thread(target=take)
        taking.start()
        while taking.is_alive():
            step(queue=8)  # there is always more work, so only the fair share can end the wait
        assert other.used == part
        while engine.has_unfinished_requests():
            step(queue=0)
        other.end_pending(part)
        other.give(part)
        other.close()
        assert len(found) == sent
        for number, tokens in found.items():
            assert tokens == wanted[int(number) % len(asked)]
