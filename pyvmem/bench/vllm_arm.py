# SPDX-License-Identifier: MIT
"""One engine of `vmem bench vllm`, a process of its own: ``python -m pyvmem.bench.vllm_arm``.

Reads a line of JSON for each order on standard input and answers each with one on the descriptor
that ``--answers`` names; what vLLM prints goes to standard output and error.

    {"load": [[id, ...], ...], "tokens": [n, ...]}  ->  {"seconds": s, "answers": [[id, ...], ..]}
    {"forget": true}, all prefixes                  ->  {"forgot": true}
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

__all__ = ["ENGINE", "main"]

# What vLLM is told beside the model; the command adds what the size of the machine asks for.
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

    from pyvmem.vllm import plugin

    plugin.register()  # without an installed entry point; again: nothing
    return LLM(**{**ENGINE, **options})


def _generate(llm: Any, order: dict[str, Any]) -> dict[str, Any]:
    from vllm import SamplingParams

    sampling = [
        SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, detokenize=False)
        for count in order["tokens"]
    ]
    prompts = [{"prompt_token_ids": ids} for ids in order["load"]]
    began = time.perf_counter()
    found = llm.generate(prompts, sampling, use_tqdm=False)
    seconds = time.perf_counter() - began
    return {"seconds": seconds, "answers": [list(one.outputs[0].token_ids) for one in found]}


def main() -> int:
    """Answers orders until standard input ends."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--options", type=Path, required=True)
    parser.add_argument("--answers", type=int, required=True)
    args = parser.parse_args()
    with os.fdopen(args.answers, "w", encoding="utf-8") as out:

        def say(answer: dict[str, Any]) -> None:
            print(json.dumps(answer), file=out, flush=True)

        llm = _engine(json.loads(args.options.read_text(encoding="utf-8")))
        scheduler = llm.llm_engine.vllm_config.scheduler_config.scheduler_cls
        say({"ready": True, "scheduler": str(scheduler)})
        for line in sys.stdin:
            order = json.loads(line)
            if "load" in order:
                say(_generate(llm, order))
            else:
                llm.reset_prefix_cache()
                say({"forgot": True})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
