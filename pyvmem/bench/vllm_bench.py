# SPDX-License-Identifier: MIT
"""`vmem bench vllm`: vLLM on the elastic pool beside stock vLLM, both alive on one device.

Two engines of the same shape with the same random weights, each a process (`vllm_arm`), get the
same requests in turns: stock, elastic, stock again. Compared are the tokens, the time, and what the
keys and values of each keep from other processes when nothing runs, seen from this process.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from pyvmem.bench.command import Command, WrongResult, add_common, conducted, open_command
from pyvmem.bench.record import Part
from pyvmem.bench.timing import Samples, interleave
from pyvmem.layouts.workload import Request, generate, read_trace
from pyvmem.ledger import Ledger, devices

__all__ = ["ARMS", "SHAPES", "add_parser", "run"]

# In the order of a round. The engine, and what is compared with the first.
ARMS = {"stock": "stock", "elastic": "elastic", "stock again": "stock"}

SHAPES: dict[str, dict[str, Any]] = {
    "Llama-3-8B": {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 128256,
        "rope_theta": 500000.0,
    },
    "tiny": {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "vocab_size": 512,
        "initializer_range": 0.3,
    },
}
_MIB = 1 << 20
_SEED = 5
_LONGEST = 4096
_REST = 10.0  # s that memory may take to come back
_METHOD = {
    "engines": "both alive on the device, each its own process; LLM() in it, greedy, dummy weights",
    "order": "stock, elastic, stock again take turns, rotated; the first round is left out",
    "load": "all requests at once, which is a rate above saturation; no prefix is known",
    "elastic": "its prefixes of the last load stay mapped until the next one begins",
    "held": "what the device lacks against before the engine's first request, seen from outside",
}


class _Engine:
    """A running engine."""

    def __init__(self, name: str, process: subprocess.Popen[str], answers: Any, log: Path) -> None:
        self.name, self.process, self.answers, self.log = name, process, answers, log
        self.scheduler: str = self.receive()["scheduler"]

    def receive(self) -> dict[str, Any]:
        """The next answer."""
        line = self.answers.readline()
        if not line:
            end = self.log.read_text(errors="replace").strip().splitlines()[-8:]
            raise WrongResult(f"the engine {self.name} has ended: " + " | ".join(end))
        answer: dict[str, Any] = json.loads(line)
        return answer

    def order(self, **what: Any) -> dict[str, Any]:
        """Gives an order and waits for its answer."""
        assert self.process.stdin is not None
        print(json.dumps(what), file=self.process.stdin, flush=True)
        return self.receive()


@contextmanager
def _started(name: str, options: dict[str, Any], folder: Path, page: int) -> Iterator[_Engine]:
    """An engine until the end of the block; `name` is of `ARMS`' values."""
    out, log = folder / f"{name}.json", folder / f"{name}.log"
    out.write_text(json.dumps(options), encoding="utf-8")
    read, write = os.pipe()
    env = {**os.environ, "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    env |= {"VLLM_LOGGING_LEVEL": "WARNING", "VMEM_LEDGER": str(folder / "ledger")}
    env |= {"VMEM_VLLM": str(int(name == "elastic")), "VMEM_NAME": "elastic"}
    env |= {"VMEM_PAGE_SIZE": str(page)} if page else {}
    words = [sys.executable, "-m", "pyvmem.bench.vllm_arm", "--options", str(out)]
    with log.open("w") as said, os.fdopen(read, encoding="utf-8") as answers:
        try:
            process = subprocess.Popen(
                [*words, "--answers", str(write)],
                env=env,
                stdin=subprocess.PIPE,
                stdout=said,
                stderr=said,
                pass_fds=(write,),
                text=True,
            )
        finally:
            os.close(write)
        try:
            yield _Engine(name, process, answers, log)
        finally:
            process.kill()
            process.wait()
            assert process.stdin is not None
            process.stdin.close()


def _requests(args: argparse.Namespace, quick: bool) -> list[Request]:
    """Those of the trace, or like them, without the ones that do not fit."""
    if quick:  # few requests are as short as a tiny model's memory
        return [Request(17 + 13 * i, 9 + i) for i in range(min(args.requests, 6))]
    found = read_trace(args.trace) if args.trace else generate(16 * args.requests, _SEED)
    return [one for one in found if one.context + one.output <= _LONGEST][: args.requests]


def _shape(command: Command) -> dict[str, Any]:
    return SHAPES["tiny" if command.quick else command.args.shape]


def _load(requests: Sequence[Request], vocabulary: int, seed: int) -> dict[str, Any]:
    draw = random.Random(seed)
    return {
        "load": [[draw.randrange(3, vocabulary) for _ in range(r.context)] for r in requests],
        "tokens": [r.output for r in requests],
    }


def _free(command: Command) -> int | None:
    """Bytes that a process may have now; None where there is no GPU."""
    if command.backend == "host":
        return None
    import torch

    return int(torch.cuda.mem_get_info(command.args.device)[0])


def _options(command: Command, folder: Path) -> dict[str, Any]:
    quick = command.quick
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "max_position_embeddings": 2 * _LONGEST,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": "float32" if quick else "bfloat16",
        "bos_token_id": 1,
        "eos_token_id": 2,
        **_shape(command),
    }
    model = folder / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(config), encoding="utf-8")
    options: dict[str, Any] = {
        "model": str(model),
        "dtype": config["torch_dtype"],
        "kv_cache_memory_bytes": command.args.kv_memory or (16 * _MIB if quick else 16 << 30),
        "max_model_len": 512 if quick else _LONGEST,
        "max_num_batched_tokens": 64 if quick else 8192,
        "max_num_seqs": 8 if quick else 128,
    }
    if command.backend == "host":
        options |= {"enforce_eager": True, "block_size": 32}
    else:
        options |= {"block_size": command.args.block_size, "gpu_memory_utilization": 0.45}
        # Graphs of decoding, as in serving; no compiler, which would take longer than the runs.
        graphs = [1, 2, 4, *range(8, 129, 8)]
        options["compilation_config"] = {
            "mode": 0,
            "cudagraph_mode": "FULL_DECODE_ONLY",
            "cudagraph_capture_sizes": graphs,
        }
    return options


def _ledger_bytes(folder: Path) -> int | None:
    """What the elastic engine has mapped, as its ledger says."""
    for device in devices(folder):
        with Ledger(device, folder=folder, create=False) as ledger:
            for one in ledger.engines():
                return one.used
    return None


def _measure(command: Command, part: Part) -> None:
    with ExitStack() as stack:
        name = stack.enter_context(tempfile.TemporaryDirectory(prefix="vmem-vllm-"))
        folder = Path(name)
        (folder / "ledger").mkdir(mode=0o700)
        options = _options(command, folder)
        engines: dict[str, _Engine] = {}
        for name in dict.fromkeys(ARMS.values()):
            engine = stack.enter_context(_started(name, options, folder, command.page))
            engines[name] = engine
            command.show(f"{name}: ready, scheduler {engine.scheduler}")
        if "Elastic" not in engines["elastic"].scheduler:
            raise WrongResult("the elastic engine runs the stock scheduler")
        empty = _free(command)
        requests = _requests(command.args, command.quick)
        vocabulary = _shape(command)["vocab_size"]
        samples = {arm: Samples() for arm in ARMS}
        answers: dict[str, list[list[int]]] = {arm: [] for arm in ARMS}
        peak = 0

        def turn(arm: str) -> None:
            nonlocal peak
            load = _load(requests, vocabulary, seed=len(samples[arm].rounds))
            engines[ARMS[arm]].order(forget=True)
            found = engines[ARMS[arm]].order(**load)
            samples[arm].new_round().append(found["seconds"] * 1e9)
            answers[arm] += found["answers"]
            peak = max(peak, _ledger_bytes(folder / "ledger") or 0)
            command.show(f"{arm}: {found['seconds']:.2f} s")

        turns = [partial(turn, arm) for arm in ARMS]
        interleave(turns, 1 + command.args.rounds, command.deadline)
        made = sum(r.output for r in requests)
        for arm, one in samples.items():
            one.drop_first_round()
            row = part.time(f"load/{arm}", f"{len(requests)} requests", arm, one, unit="ms")
            rate = made / row["median"] * 1e3
            part.value(f"rate/{arm}", "new tokens a second", arm, rate, "tokens/s")
            pairs = zip(answers[arm], answers["stock"], strict=True)
            same = sum(mine == other for mine, other in pairs)
            of = len(answers[arm])
            part.value(f"same/{arm}", "answers equal to stock's", arm, same, "requests", of=of)
        part.value("peak", "keys and values mapped after a load", "elastic", peak, "bytes")
        _rest(command, part, engines["elastic"], folder / "ledger", empty)


def _rest(command: Command, part: Part, engine: _Engine, ledger: Path, empty: int | None) -> None:
    """How long memory takes to come back after the last request, and what never does."""
    loaded = _free(command)
    engine.order(forget=True)
    began = time.perf_counter()
    least, at = _ledger_bytes(ledger) or 0, 0.0
    while time.perf_counter() - began < (3 if command.quick else _REST):
        now = _ledger_bytes(ledger) or 0
        if now < least:
            least, at = now, time.perf_counter() - began
        time.sleep(0.02)
    part.value("rest/mapped", "mapped at rest, prefixes dropped", "elastic", least, "bytes")
    part.value("rest/seconds", "until the last page was back", "elastic", at, "s")
    free = _free(command)
    if free is None or empty is None or loaded is None:
        part.not_run("rest/held", "no GPU: nobody else can lack its memory")
        return
    part.value("loaded/held", "missing to others after the load", "both", empty - loaded, "bytes")
    part.value("rest/held", "missing to others at rest", "both", empty - free, "bytes")


def run(args: argparse.Namespace) -> int:
    """The command. 0, 1 if it failed or vLLM is not here, 2 without a back end."""
    command = open_command(
        args,
        "vllm",
        _METHOD,
        shape="tiny" if args.quick else args.shape,
        block_size=args.block_size,
        requests=args.requests,
        trace=args.trace.name if args.trace else None,
    )
    if command is None:
        return 2
    part = command.record.part("vllm", "vLLM on the elastic pool, beside stock vLLM")
    with conducted(part):
        try:
            import vllm
        except ImportError as error:
            part.not_run("*", f"vLLM cannot be imported: {error}")
        else:
            command.record.options["vllm"] = vllm.__version__
            _measure(command, part)
    return command.finish()


def add_parser(which: Any) -> None:
    """Adds `vllm` to the benchmarks."""
    parser = which.add_parser(
        "vllm",
        help="vLLM on the elastic pool, beside stock vLLM",
        description="Runs two vLLM engines of one shape with random weights on one device, one on "
        "the elastic pool, gives them the same requests in turns, and compares tokens, time, and "
        "memory at rest. Needs vLLM.",
    )
    add_common(parser, 240)
    add = parser.add_argument
    add("--shape", choices=[name for name in SHAPES if name != "tiny"], default="Llama-3-8B")
    add("--requests", type=int, default=192, help="of a round (192)")
    add("--rounds", type=int, default=5, help="after the first, which warms up (5)")
    add("--block-size", type=int, default=16, help="tokens of a block of vLLM (16)")
    add("--kv-memory", type=int, default=0, metavar="BYTES", help="of each engine (16 GiB)")
    add("--trace", type=Path, metavar="FILE", help="take the requests' lengths from a trace")
    parser.set_defaults(run=run)
