# SPDX-License-Identifier: MIT
"""An engine process of `vmem bench vllm`: ``python -m vmem_bench.vllm.arm``.

Commands are lines of JSON on standard input; each is answered by a line on the descriptor given by
``--answers``. vLLM's own output goes to standard output and error.

    {"load": [[id, ...], ...], "tokens": [n, ...], "at": [s, ...], "most": n, "begin": t}
                            -> {"seconds": s, "answers": [[id, ...], ..], "added": [s, ..],
                                "times": [[s, ...], ...], "waited": s spent waiting for the GPU,
                                "cached": [tokens of each prompt that were not computed]}
    {"costs": {...}}, a load as above, during which the pool's code is timed; see `_costs`
                            -> {"steps": [{"tokens": n, "us": t}, ...]}
    {"script": {...}}, requests that arrive and are aborted at random; see `_script`
                            -> {"seconds": s, "answers": {name: [id, ...]}, "aborted": n, ...}
    {"forget": true}        -> {"forgot": true}, after dropping all prefixes
    {"sleep": level}, {"wake": true}
                            -> {"seconds": s}
    {"state": true}         -> {"torch": bytes, "live": bytes, "ranks": [{...}, ...],
                                "maps": [a digest of the mapped pages of each rank, ...]}

Times are in seconds since `begin`, a reading of CLOCK_MONOTONIC, which all processes share.
"""

from __future__ import annotations

import os
import random
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

from vmem_bench.orders import open_orders

__all__ = ["ENGINE", "main"]

# vLLM options for every engine; the command adds the model and options that depend on the machine.
ENGINE = {
    "load_format": "dummy",
    "skip_tokenizer_init": True,
    "seed": 0,
    "disable_log_stats": True,
    "enable_prefix_caching": True,
}


def _engine(options: dict[str, Any]) -> Any:
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import LLM

    return LLM(**{**ENGINE, **options})


def _greedy(count: int) -> Any:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        temperature=0,
        max_tokens=count,
        ignore_eos=True,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
    )


class _Waits:
    """The seconds that this process's threads have waited for GPU events since `install`."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def install(self) -> None:
        """Starts timing torch.cuda.Event.synchronize, with which vLLM waits for a step's tokens."""
        import torch

        event: Any = torch.cuda.Event
        wait = event.synchronize

        def synchronize(one: Any) -> None:
            began = time.monotonic()
            wait(one)
            self.seconds += time.monotonic() - began

        event.synchronize = synchronize


waits = _Waits()


class _Transfers:
    """The bytes and seconds of this rank's copies to and from host memory since `install`."""

    def __init__(self) -> None:
        self.sums = {"stored": [0.0, 0.0], "loaded": [0.0, 0.0]}
        self._loads: set[int] = set()

    def install(self) -> None:
        """Hooks the transfers of vLLM's KV connector; does nothing if there is no connector."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

        if not has_kv_transfer_group():
            return
        connector: Any = get_kv_transfer_group()
        worker = connector.connector_worker.worker
        load, finished = worker.submit_load, worker.get_finished

        def submit_load(job: int, *args: Any, **kwargs: Any) -> Any:
            self._loads.add(job)
            return load(job, *args, **kwargs)

        def get_finished() -> Any:
            found = finished()
            for one in found:
                sums = self.sums["loaded" if one.job_id in self._loads else "stored"]
                self._loads.discard(one.job_id)
                sums[0] += one.transfer_size or 0
                sums[1] += one.transfer_time or 0.0
            return found

        worker.submit_load, worker.get_finished = submit_load, get_finished


transfers = _Transfers()


def _load(llm: Any, order: dict[str, Any]) -> dict[str, Any]:
    """Adds requests when they are due, up to `most` at a time, and steps until all are done.

    Returns the answers, with the times of their tokens.
    """
    engine, prompts = llm.llm_engine, order["load"]
    sampling = [_greedy(count) for count in order["tokens"]]
    at = order.get("at") or [0.0] * len(prompts)
    most = order.get("most") or len(prompts)
    due = deque(sorted(range(len(prompts)), key=at.__getitem__))
    answers: list[list[int]] = [[] for _ in prompts]
    times: list[list[float]] = [[] for _ in prompts]
    added = [0.0] * len(prompts)
    began = order.get("begin") or time.monotonic()
    running, waited, cached = 0, waits.seconds, [0] * len(prompts)
    while due or running:
        now = time.monotonic() - began
        while due and at[due[0]] <= now and running < most:
            one = due.popleft()
            engine.add_request(str(one), {"prompt_token_ids": prompts[one]}, sampling[one])
            added[one] = round(now, 6)
            running += 1
        if not running:
            time.sleep(max(0.0, at[due[0]] - now))
            continue
        outputs = engine.step()
        now = round(time.monotonic() - began, 6)
        for found in outputs:
            number, new = int(found.request_id), found.outputs[0].token_ids
            if new:
                answers[number] += new
                times[number].append(now)
            running -= found.finished
            cached[number] = found.num_cached_tokens or 0
    seconds = time.monotonic() - began
    return {
        "seconds": seconds,
        "answers": answers,
        "added": added,
        "times": times,
        "waited": waits.seconds - waited,
        "cached": cached,
    }


def _script(llm: Any, order: dict[str, Any]) -> dict[str, Any]:
    """Runs requests that arrive and are aborted at random, between prefix resets and trims.

    vLLM does not reset prefixes while requests run, so from time to time no requests are added
    until all have finished.

    `order` has these items: seed, requests (the count), vocabulary, longest (maximum tokens in a
    prompt), output (maximum tokens in an answer), most (maximum concurrent requests) and reset (the
    probability of a reset after a step). All requests, and the number of tokens after which each is
    aborted, are drawn before the first step, so that the answers of the others can be compared
    regardless of an engine's speed.
    """
    draw = random.Random(order["seed"])
    begin = [draw.randrange(3, order["vocabulary"]) for _ in range(order["longest"] // 2)]
    requests = []
    for _ in range(order["requests"]):
        length, common = draw.randrange(1, order["longest"] // 2), draw.choice([0, len(begin)])
        ids = begin[:common] + [draw.randrange(3, order["vocabulary"]) for _ in range(length)]
        count = draw.randrange(1, order["output"])
        requests.append((ids, count, draw.randrange(count) if draw.random() < 0.3 else None))
    engine, elastic = llm.llm_engine, _elastic(llm)
    left, live = list(range(len(requests))), set[int]()
    answers: dict[int, list[int]] = {n: [] for n in left}
    done: list[int] = []
    aborted = resets = trims = steps = 0
    draining = False
    began = time.monotonic()
    while left or live:
        for _ in range(draw.randrange(4)):
            if not draining and left and len(live) < order["most"]:
                number = left.pop()
                ids, count, _ = requests[number]
                engine.add_request(str(number), {"prompt_token_ids": ids}, _greedy(count))
                live.add(number)
        for found in engine.step() if live else ():
            number = int(found.request_id)
            if number in live:
                answers[number] += found.outputs[0].token_ids
                if found.finished:
                    live.discard(number)
                    done.append(number)
        steps += 1
        late = [n for n in live if (end := requests[n][2]) is not None and len(answers[n]) >= end]
        if late:
            engine.abort_request([str(n) for n in late])
            live.difference_update(late)
            aborted += len(late)
        draining = draining or draw.random() < order["reset"]
        if draining and not live:
            resets += bool(llm.reset_prefix_cache())
            draining = False
        if elastic is not None and draw.random() < 0.05:
            with elastic.lock:
                elastic._shrink(draw.choice([1 << 20, 64 << 20, 1 << 40]))
            trims += 1
    return {
        "seconds": time.monotonic() - began,
        "answers": {str(n): answers[n] for n in done},
        "aborted": aborted,
        "resets": resets,
        "trims": trims,
        "steps": steps,
    }


class _Inside:
    """The seconds spent in the pool's functions, excluding the vLLM functions that they call."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._since = 0.0
        self._ours = False  # true while the thread is in a function of the pool

    def _enter(self, ours: bool) -> bool:
        """Records that the thread enters or leaves the pool's code; returns the previous state."""
        now, before = time.perf_counter(), self._ours
        if before:
            self.seconds += now - self._since
        self._since, self._ours = now, ours
        return before

    def _count(self, owner: Any, name: str, ours: bool) -> Callable[[], None]:
        call = getattr(owner, name)

        def counted(*args: Any, **kwargs: Any) -> Any:
            before = self._enter(ours)
            try:
                return call(*args, **kwargs)
            finally:
                self._enter(before)

        setattr(owner, name, counted)
        return lambda: setattr(owner, name, call)

    def count(self, owner: Any, ours: str, names: Iterable[str]) -> list[Callable[[], None]]:
        """Times methods of `owner` that the pool's class named `ours` overrides.

        The overridden methods of vLLM are not counted. Returns functions that undo this.
        """
        order = type(owner).__mro__
        place = next(n for n, one in enumerate(order) if one.__name__ == ours)
        undo = []
        for name in names:
            stock = next(one for one in order[place + 1 :] if name in vars(one))
            undo += [self._count(owner, name, True), self._count(stock, name, False)]
        return undo

    def add(self, owner: Any, *names: str) -> list[Callable[[], None]]:
        """Times functions of the pool that vLLM calls. Returns functions that undo this."""
        return [self._count(owner, name, True) for name in names]

    def leave_out(self, owner: Any, *names: str) -> list[Callable[[], None]]:
        """Excludes vLLM functions that the pool calls. Returns functions that undo this."""
        return [self._count(owner, name, False) for name in names]


def _costs(llm: Any, order: dict[str, Any]) -> dict[str, Any]:
    """Serves a load; returns each step's tokens and the microseconds spent in the pool's code."""
    core = llm.llm_engine.engine_core.engine_core
    scheduler, worker = core.scheduler, core.model_executor.driver_worker.worker
    inside, steps = _Inside(), list[dict[str, Any]]()
    undo = inside.count(scheduler, "_Elastic", ("schedule", "update_from_output"))
    undo += inside.count(worker, "ElasticWorker", ("execute_model", "sample_tokens"))
    undo += inside.add(scheduler.elastic, "take")
    demand = scheduler._demand  # called for each request in steps with few free blocks
    undo += inside.add(demand, "_check", "_count", "_allocate")
    undo += inside.leave_out(demand, "_count_blocks", "_allocate_slots")
    undo += inside.add(scheduler.kv_cache_manager.block_pool, "free_blocks")
    counted = scheduler.schedule
    seen = 0.0

    def schedule(*args: Any, **kwargs: Any) -> Any:
        nonlocal seen
        if steps:
            steps[-1]["us"] = 1e6 * (inside.seconds - seen)
        seen = inside.seconds
        output = counted(*args, **kwargs)
        steps.append({"tokens": output.total_num_scheduled_tokens, "us": 0.0})
        return output

    scheduler.schedule = schedule
    try:
        _load(llm, order)
    finally:
        scheduler.schedule = counted
        for one in reversed(undo):
            one()
    return {"steps": steps[:-1]}


def _elastic(llm: Any) -> Any:
    """Returns the engine's `ElasticEngine`, or None if the engine is stock."""
    return getattr(llm.llm_engine.engine_core.engine_core.scheduler, "elastic", None)


def _state(llm: Any) -> dict[str, Any]:
    """Returns the bytes that torch reserves in this process, and the transfer totals.

    For an elastic engine, the result includes the state of the pool.
    """
    import torch

    reserved = torch.cuda.memory_reserved() if torch.cuda.is_available() else 0
    state: dict[str, Any] = {"torch": reserved, "transfers": transfers.sums}
    elastic = _elastic(llm)
    if elastic is not None:
        with elastic.lock:
            state["live"] = elastic.live_bytes()
            state["mapped"] = elastic.backing.mapped_bytes
            state["wrong"] = elastic.backing.check()
            if elastic.holds.on:
                state["blocks"] = vars(elastic.holds.counters).copy()
        state["ranks"] = elastic.ranks.stats()
        state["maps"] = [rank.fingerprint() for rank in elastic.ranks.ranks]
        memory = getattr(
            elastic.ranks.ranks[0], "memory", None
        )  # None if ranks run in other processes
        state["slab_size"] = memory.context.info.slab_size if memory is not None else 0
    return state


def _timed(call: Any) -> dict[str, Any]:
    began = time.monotonic()
    call()
    return {"seconds": time.monotonic() - began}


def _answer(llm: Any, order: dict[str, Any]) -> dict[str, Any]:
    if "load" in order:
        return _load(llm, order)
    if "script" in order:
        return _script(llm, order["script"])
    if "costs" in order:
        return _costs(llm, order["costs"])
    if "sleep" in order:
        return _timed(lambda: llm.sleep(level=order["sleep"]))
    if "wake" in order:
        return _timed(llm.wake_up)
    if "state" in order:
        return _state(llm)
    llm.reset_prefix_cache()
    return {"forgot": True}


def main() -> int:
    """Executes commands until stdin is closed."""
    with open_orders() as (options, say, orders):
        import vllm

        waits.install()
        llm = _engine(options)
        transfers.install()
        scheduler = llm.llm_engine.vllm_config.scheduler_config.scheduler_cls
        elastic = _elastic(llm)
        page = elastic.backing.geometry.page_size if elastic is not None else 0
        say(
            {
                "ready": True,
                "scheduler": str(scheduler),
                "page": page,
                "version": vllm.__version__,
            }
        )
        for order in orders:
            say(_answer(llm, order))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
