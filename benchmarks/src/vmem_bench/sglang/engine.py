# SPDX-License-Identifier: MIT
"""An engine process of `vmem bench sglang`: ``python -m vmem_bench.sglang.engine PLAN``.

PLAN is a JSON file, written by `turns`. The process imports SGLang, then waits for a line on
standard input, which means that no other engine is using the device. After each step it appends a
line with the result to the file that the plan names, so that the results of completed steps survive
when the process is stopped at the deadline.
"""

from __future__ import annotations

import json
import os
import random
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any

__all__ = ["STEPS", "flush", "greedy", "main"]

STEPS = ("start", "tokens", "rate", "memory", "first", "sleep")
"""The steps in order; only elastic engines sleep."""

_NEW = 48  # tokens per answer that is compared
_LOOK = 0.05  # seconds between memory samples under load
_IDLE = 20.0  # seconds to wait for SGLang to become idle
_EMPTY = 1.5  # seconds to wait for memory to be returned after a flush

Ids = list[list[int]]


def greedy(new: int) -> dict[str, Any]:
    """Returns sampling parameters that generate `new` tokens greedily."""
    return {"temperature": 0, "max_new_tokens": new, "ignore_eos": True}


def flush(sglang: Any) -> None:
    """Drops all prefixes; retries while SGLang refuses, which it may do right after an answer."""
    end = time.monotonic() + _IDLE
    while not sglang.flush_cache().success:
        if time.monotonic() > end:
            raise RuntimeError(f"the cache could not be flushed within {_IDLE:.0f} s")
        time.sleep(0.01)


class _Engine:
    """A running engine, with methods that send prompts and read its memory."""

    def __init__(self, plan: dict[str, Any]) -> None:
        self.plan, self.count = plan, 0
        self.before = self._device()
        from sglang.srt.entrypoints.engine import Engine

        self.sglang = Engine(**plan["options"])

    def _device(self) -> int:
        """Returns the device memory in use, in bytes; 0 if there is no GPU."""
        import torch

        if not self.plan["gpu"]:
            return 0
        free, total = torch.cuda.mem_get_info(self.plan["device"])
        return int(total - free)

    def account(self) -> Any:
        """Returns the engine's account in the ledger, or None for stock SGLang."""
        from pyvmem.ledger.accounts import engines_in

        found = engines_in(Path(self.plan["ledger"])).values()
        return next((one for engines in found for one in engines), None)

    def memory(self) -> dict[str, int]:
        """Returns the engine's memory in bytes.

        `device` is the device memory allocated since just before the engine started, and `mapped`
        the amount that the ledger records.
        """
        account = self.account() if self.plan["elastic"] else None
        found = {"mapped": account.used} if account is not None else {}
        return found | ({"device": self._device() - self.before} if self.plan["gpu"] else {})

    def prompts(self, count: int, length: int) -> Ids:
        """Returns new prompts, which are identical in every engine and never repeat."""
        self.count += 1
        draw = random.Random(self.count)
        tokens = range(3, self.plan["vocabulary"])
        return [draw.choices(tokens, k=length) for _ in range(count)]

    def ask(self, ids: Ids, new: int) -> Ids:
        """Returns greedy answers of `new` tokens to prompts that are submitted together."""
        found = self.sglang.generate(input_ids=ids, sampling_params=greedy(new))
        answers = [one["output_ids"] for one in found]
        if any(len(one) != new for one in answers):
            raise RuntimeError(f"answers of {sorted(map(len, answers))} tokens instead of {new}")
        return answers

    def alone(self, ids: Ids) -> Ids:
        """Returns greedy answers to requests sent one at a time, which batching cannot affect."""
        return [self.ask([one], _NEW)[0] for one in ids]

    def highest(self, ids: Ids, new: int) -> dict[str, int]:
        """Returns the peak memory, sampled while the engine answers."""
        most, done = self.memory(), threading.Event()

        def look() -> None:
            while not done.wait(_LOOK):
                for key, value in self.memory().items():
                    most[key] = max(most.get(key, 0), value)

        thread = threading.Thread(target=look)
        thread.start()
        try:
            self.ask(ids, new)
        finally:
            done.set()
            thread.join()
        return most


def _tokens(engine: _Engine, few: Ids) -> dict[str, Any]:
    alone = engine.alone(few)
    again = engine.alone(few)  # this time with the first call's prefixes cached
    hits = engine.sglang.generate(input_ids=few, sampling_params=greedy(1))
    return {
        "alone": alone,
        "again": again,
        "batch": engine.ask(few, _NEW),
        "hits": sum(one["meta_info"]["cached_tokens"] for one in hits),
    }


def _measure(plan: dict[str, Any], add: Any) -> None:
    began = time.perf_counter()
    engine = _Engine(plan)
    try:
        took = time.perf_counter() - began
        add("start", seconds=took, memory=engine.memory())
        shared = engine.prompts(1, 100)[0]
        few = [shared + own for own in engine.prompts(6, 60)] + engine.prompts(2, 7)
        engine.ask(engine.prompts(8, plan["prompt"]), 8)  # warm-up
        flush(engine.sglang)
        compared = _tokens(engine, few)
        add("tokens", **compared)
        memory = {}
        for count in plan["requests"]:
            rates = []
            for turn in range(plan["repeats"] + 1):
                flush(engine.sglang)
                ids = engine.prompts(count, plan["prompt"])
                start = time.perf_counter()
                if turn:
                    engine.ask(ids, plan["answer"])
                    rates.append(count * plan["answer"] / (time.perf_counter() - start))
                else:  # this round is not timed, so memory can be sampled
                    memory["highest"] = engine.highest(ids, plan["answer"])
            add("rate", count=count, rates=rates)
        time.sleep(1)
        memory["after"] = engine.memory()
        for key, value in memory[
            "after"
        ].items():  # a short load may end between two samples, so also count the memory after it
            memory["highest"][key] = max(memory["highest"][key], value)
        time.sleep(plan["idle"])
        memory["rest"] = engine.memory()
        flush(engine.sglang)
        time.sleep(_EMPTY)
        memory["flushed"] = engine.memory()
        add("memory", **memory)
        rest: list[float] = []
        again: list[float] = []
        for _ in range(plan["repeats"]):
            flush(engine.sglang)
            time.sleep(plan["idle"])
            for times in (rest, again):
                ids = engine.prompts(1, plan["prompt"])
                start = time.perf_counter()
                engine.ask(ids, 1)
                times.append(1000 * (time.perf_counter() - start))
        add("first", rest=rest, again=again)
        if plan["elastic"]:
            add("sleep", **_sleep(engine, few), **_kept(engine))
    finally:
        engine.sglang.shutdown()


def _sleep(engine: _Engine, few: Ids) -> dict[str, Any]:
    # The flush waits until the engine is idle; a busy engine would exit on the next call.
    flush(engine.sglang)
    start = time.perf_counter()
    engine.sglang.release_memory_occupation(tags=["kv_cache"])
    slept = time.perf_counter()
    memory = engine.memory()
    woken = time.perf_counter()
    engine.sglang.resume_memory_occupation(tags=["kv_cache"])
    times = {"release": 1000 * (slept - start), "resume": 1000 * (time.perf_counter() - woken)}
    return {**times, "memory": memory, "tokens": engine.alone(few)}


def _kept(engine: _Engine) -> dict[str, int]:
    account = engine.account()
    if account is None:
        raise RuntimeError("the elastic engine has no account in the ledger")
    return {name: getattr(account, name) for name in ("maps", "waits", "handles")}


def main() -> None:
    """Runs the plan and exits, with status 1 if the plan failed."""
    plan = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    with Path(plan["out"]).open("a", encoding="utf-8") as out:

        def add(step: str, **found: Any) -> None:
            print(json.dumps({"step": step, **found}), file=out, flush=True)

        try:
            import sglang.srt.entrypoints.engine  # noqa: F401

            add("imported")
            if sys.stdin.readline():  # an empty line means that the command has exited
                _measure(plan, add)
        except BaseException as error:
            traceback.print_exc()
            add("failed", why=f"{type(error).__name__}: {error}")
            sys.stderr.flush()
            os._exit(1)
    os._exit(0)  # processes that SGLang leaves behind are killed with the process group


if __name__ == "__main__":
    main()
