# SPDX-License-Identifier: MIT
"""An SGLang engine that executes commands: ``python -m vmem_bench.sglang.arm``.

Commands are lines of JSON on standard input; replies are written to the descriptor given by
``--answers``, as in `vmem_bench.vllm.arm`:

    {"load": [[id, ...], ...], "tokens": [n, ...], "at": [s, ...], "begin": t}
                            -> {"answers": [[id, ...], ..], "times": [[s, ...], ...]}
    {"forget": true}        -> {"forgot": true}, after dropping all prefixes

Times are in seconds since `begin`, a reading of CLOCK_MONOTONIC, which all processes share.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

from vmem_bench.orders import open_orders
from vmem_bench.sglang.engine import flush, greedy

__all__ = ["main"]


async def _load(sglang: Any, order: dict[str, Any]) -> dict[str, Any]:
    """Sends each request when it is due; returns the answers and the times of their tokens."""
    begin = order["begin"] or time.monotonic()

    async def ask(ids: list[int], new: int, at: float) -> tuple[list[int], list[float]]:
        await asyncio.sleep(max(0.0, begin + at - time.monotonic()))
        answer: list[int] = []
        times: list[float] = []
        stream = await sglang.async_generate(
            input_ids=ids, sampling_params=greedy(new), stream=True
        )
        async for found in stream:
            answer = found["output_ids"]  # all tokens so far
            if answer:
                times.append(round(time.monotonic() - begin, 6))
        if len(answer) != new:
            raise RuntimeError(f"an answer has {len(answer)} tokens instead of {new}")
        return list(answer), times

    found = await asyncio.gather(*map(ask, order["load"], order["tokens"], order["at"]))
    return {"answers": [one for one, _ in found], "times": [times for _, times in found]}


def _answer(sglang: Any, order: dict[str, Any]) -> dict[str, Any]:
    if "load" in order:
        found: dict[str, Any] = sglang.loop.run_until_complete(_load(sglang, order))
        return found
    flush(sglang)
    return {"forgot": True}


def main() -> None:
    """Executes commands until stdin is closed."""
    with open_orders() as (options, say, orders):
        import sglang
        from sglang.srt.entrypoints.engine import Engine

        engine = Engine(**options)
        say({"ready": True, "version": sglang.__version__})
        for order in orders:
            say(_answer(engine, order))
    engine.shutdown()


if __name__ == "__main__":
    main()
