# SPDX-License-Identifier: MIT
"""The engines of `vmem bench sglang`: their models, their options and a process for each turn."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vmem_bench.command import Command, WrongResult
from vmem_bench.engine_path import engine_path
from vmem_bench.vllm.engines import SHAPES as VLLM_SHAPES
from vmem_bench.vllm.engines import kill_group

__all__ = ["SHAPES", "Turns", "engine_environment", "engine_options"]

SHAPES: dict[str, dict[str, Any]] = {
    "8b": VLLM_SHAPES["Llama-3-8B"],
    "1b": {
        **VLLM_SHAPES["Llama-3-8B"],
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "head_dim": 64,
        "tie_word_embeddings": True,
    },
    "mla": VLLM_SHAPES["DeepSeek-V2-Lite"],
    "tiny": {**VLLM_SHAPES["tiny"], "num_hidden_layers": 4},
}
"""Models by name, most of them from vLLM's benchmark; mla has latent attention."""

_ENDING = 5.0  # seconds allowed for stopping an engine's processes
_AHEAD = min(4, os.cpu_count() or 1)  # number of processes that import in parallel
_PREFILL = [size for k in range(6, 13) for size in (1 << k, 3 << k - 1)] + [8192]
_LEAST = 2048  # minimum size of the KV cache and of the longest request, in tokens

Found = dict[str, Any]


def engine_options(
    command: Command, model: Path, longest: int, tokens: int, most: int, graphs: int
) -> dict[str, Any]:
    """Returns the options for `sglang.Engine`.

    Args:
        command: the run's command.
        model: directory with the model's configuration.
        longest: number of tokens in the longest request.
        tokens: size of the KV cache in tokens.
        most: maximum number of concurrent requests.
        graphs: number of requests in the largest CUDA graph.
    """
    args = command.args
    given: dict[str, Any] = {
        "model_path": str(model),
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "page_size": args.page_size,
        "context_length": longest,
        "max_total_tokens": tokens,
        "max_running_requests": most,
        "grammar_backend": "none",
        "sampling_backend": "pytorch",
        "random_seed": 1,
        "log_level": "info",
    }
    if command.backend != "host":
        given |= {
            "dtype": "bfloat16",
            "attention_backend": args.attention or "triton",
            "chunked_prefill_size": _PREFILL[-1],
            "cuda_graph_max_bs_decode": graphs,
            # A quarter as many sizes as in SGLang, so that an engine starts half a minute faster.
            "cuda_graph_bs_prefill": sorted({*_PREFILL, min(args.prompt, _PREFILL[-1])}),
            "mem_fraction_static": 0.8,
            "base_gpu_id": args.device,
        }
    else:
        given |= {
            "dtype": "float32",
            "attention_backend": args.attention or "torch_native",
            "device": "cpu",
            "disable_cuda_graph": True,
            "disable_overlap_schedule": True,
            "mem_fraction_static": 0.2,
        }
    return given | dict(args.option)


def engine_environment(command: Command, path: str) -> dict[str, str]:
    """Returns the environment for an engine process, with the back end as the only VMEM variable.

    Args:
        command: the run's command.
        path: the engine's PYTHONPATH, from `engine_path`.
    """
    env = {name: value for name, value in os.environ.items() if not name.startswith("VMEM_")}
    env.pop("SGLANG_PLUGINS", None)
    env |= {"PYTHONPATH": path, "VMEM_BACKEND": command.backend}
    env |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    if command.backend == "host":
        env["SGLANG_USE_CPU_ENGINE"] = "1"
    return env


class Turns:
    """Runs engines with the same model, one at a time on the device.

    Args:
        command: the run's command.
        folder: directory for the model, the ledger, and the engines' results and logs.
        requests: numbers of concurrent requests to try, ascending.
        order: the arm of each turn.
    """

    def __init__(
        self, command: Command, folder: Path, requests: list[int], order: Sequence[str]
    ) -> None:
        self.command, self.folder, self.requests = command, folder, requests
        self.order = order
        self._ready: dict[int, subprocess.Popen[bytes]] = {}
        self.gpu = command.backend != "host"
        args = command.args
        self.shape = SHAPES["tiny" if command.quick else args.shape]
        self.longest = max(_LEAST, args.prompt + args.answer + 64)
        pages = -(-(args.prompt + args.answer) // args.page_size) + 1
        self.tokens = args.tokens or max(_LEAST, requests[-1] * pages * args.page_size)
        self.ledger = folder / "ledger"
        self.ledger.mkdir(mode=0o700)
        config = {
            "max_position_embeddings": self.longest,
            "hidden_act": "silu",
            "torch_dtype": "bfloat16" if self.gpu else "float32",
            "bos_token_id": 1,
            "eos_token_id": 2,
            **self.shape,
        }
        (folder / "model").mkdir()
        (folder / "model" / "config.json").write_text(json.dumps(config), encoding="utf-8")
        self.path = engine_path(folder / "site")

    def options(self) -> dict[str, Any]:
        """Returns the options for `sglang.Engine`."""
        most = max(8, self.requests[-1])
        return engine_options(
            self.command, self.folder / "model", self.longest, self.tokens, most, self.requests[-1]
        )

    def _environment(self, elastic: bool) -> dict[str, str]:
        args = self.command.args
        env = engine_environment(self.command, self.path)
        if elastic:
            page = args.page or (self.command.page if self.command.quick else 0)
            env |= {"VMEM_SGLANG": "1", "VMEM_LEDGER": str(self.ledger)}
            env |= {"VMEM_PAGE_SIZE": str(page)} if page else {}
            env |= dict(args.env)
        return env

    def prepare(self, number: int) -> None:
        """Starts processes for this and some later turns, and waits for them to import SGLang.

        An import takes as long as a load, so processes import in parallel. No process imports
        while a turn is measured.
        """
        if number in self._ready:
            return
        for one in range(number, min(number + _AHEAD, len(self.order))):
            self._ready[one] = self._start(one)
        while not all(map(self._imported, self._ready)) and self.command.deadline.allows(_ENDING):
            time.sleep(0.05)

    def _imported(self, number: int) -> bool:
        return self._ready[number].poll() is not None or "imported" in _read(self._out(number))

    def _out(self, number: int) -> Path:
        return self.folder / f"{number}.jsonl"

    def _start(self, number: int) -> subprocess.Popen[bytes]:
        args, elastic = self.command.args, self.order[number] == "elastic"
        plan = {
            "options": self.options(),
            "elastic": elastic,
            "ledger": str(self.ledger),
            "out": str(self._out(number)),
            "gpu": self.gpu,
            "device": args.device,
            "vocabulary": self.shape["vocab_size"],
            "requests": self.requests,
            **{name: getattr(args, name) for name in ("prompt", "answer", "idle", "repeats")},
        }
        path = self.folder / f"{number}.json"
        path.write_text(json.dumps(plan), encoding="utf-8")
        with (self.folder / f"{number}.log").open("w") as said:
            return subprocess.Popen(
                [sys.executable, "-m", "vmem_bench.sglang.engine", str(path)],
                env=self._environment(elastic),
                stdin=subprocess.PIPE,
                stdout=said,
                stderr=said,
                start_new_session=True,
            )

    def run(self, number: int) -> Found:
        """Runs a turn's engine until it exits or time is up; returns its results by step.

        Raises:
            WrongResult: the engine failed.
        """
        self.prepare(number)
        process = self._ready.pop(number)
        try:
            process.communicate(b"go\n", max(0.0, self.command.deadline.left - _ENDING))
        except subprocess.TimeoutExpired:
            pass
        finally:
            cut = process.poll() is None
            kill_group(process)
        found = _read(self._out(number))
        if "failed" in found or (process.returncode and not cut):
            log = self.folder / f"{number}.log"
            end = log.read_text(errors="replace").strip().splitlines()[-40:]
            why = found.get("failed", {}).get("why", f"status {process.returncode}")
            arm = self.order[number]
            raise WrongResult(f"the {arm} engine failed: {why}: " + " | ".join(end))
        time.sleep(0.0 if not self.gpu else 2.0)  # wait until the device's memory is free again
        return found

    def close(self) -> None:
        """Kills the processes of the turns that have not run."""
        for process in self._ready.values():
            kill_group(process)


def _read(out: Path) -> Found:
    """Returns the results of completed steps by name; for "rate", by number of requests."""
    found: Found = {}
    text = out.read_text(encoding="utf-8") if out.exists() else ""
    for line in text.splitlines():
        step = json.loads(line)
        name = step.pop("step")
        if name == "rate":
            found.setdefault("rate", {})[step["count"]] = step["rates"]
        else:
            found[name] = step
    return found
