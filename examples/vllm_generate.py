# SPDX-License-Identifier: MIT
"""vLLM with an elastic KV cache: answers prompts, then shows the memory that the cache held.

    VMEM_VLLM=1 python examples/vllm_generate.py MODEL [PROMPT ...]

Exits with an error if vLLM did not use the pool.
"""

from __future__ import annotations

import sys
from pathlib import Path

from pyvmem.ledger.accounts import Ledger, default_folder, devices


def show() -> int:
    """Prints a line for each of this user's engines and returns their number."""
    found = 0
    for device in devices(default_folder()):
        with Ledger(device, create=False) as ledger:
            for one in ledger.engines():
                found += 1
                print(
                    f"{device}: {one.name}: {one.used >> 20} MiB mapped, {one.in_use >> 20} in use"
                )
    return found


def main() -> None:
    """Generates an answer to each prompt."""
    if len(sys.argv) < 2:
        raise SystemExit(__doc__)
    try:
        import torch
        from vllm import LLM, SamplingParams
    except ModuleNotFoundError as error:
        raise SystemExit(f"{sys.argv[0]}: {error}; run it with a Python that has vLLM") from None
    model = Path(sys.argv[1])
    if model.is_absolute() and not (model / "config.json").is_file():
        raise SystemExit(f"{sys.argv[0]}: {model}: not a model directory: it has no config.json")
    prompts = sys.argv[2:] or ["The capital of France is"]
    # vLLM's 16-bit kernels need instructions that not every processor has.
    precision = "auto" if torch.cuda.is_available() else "float32"
    options = {"max_model_len": 512, "max_num_seqs": 8, "enforce_eager": True, "dtype": precision}
    llm = LLM(sys.argv[1], **options)
    for one in llm.generate(prompts, SamplingParams(max_tokens=16, temperature=0)):
        print(one.prompt, "->", one.outputs[0].text)
    if not show():
        raise SystemExit("vLLM did not use the pool: is VMEM_VLLM=1 set, and pyvmem importable?")


if __name__ == "__main__":  # vLLM starts processes that import this file
    main()
