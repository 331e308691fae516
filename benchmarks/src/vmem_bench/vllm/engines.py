# SPDX-License-Identifier: MIT
"""Engines of `vmem bench vllm`: model shapes, vLLM's options and the engines' processes."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pyvmem.bench.record import Part
from pyvmem.bench.timing import Deadline
from pyvmem.ledger.accounts import EngineInfo, Ledger, devices
from vmem_bench.command import Command, WrongResult
from vmem_bench.engine_path import engine_path

__all__ = [
    "LLAMA",
    "LONGEST",
    "SHAPES",
    "Engine",
    "Fleet",
    "Plan",
    "TimeUp",
    "kill_group",
    "until_time_up",
]

LONGEST = 4096
"""The maximum number of tokens in a request, unless a fleet sets its own."""

LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
"""The configuration fields that all models of this architecture share."""

_LLAMA_3: dict[str, Any] = {
    **LLAMA,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
    "rope_theta": 500000.0,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}

SHAPES: dict[str, dict[str, Any]] = {
    "Llama-3-8B": {
        **_LLAMA_3,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
    },
    "Llama-3-70B": {
        **_LLAMA_3,
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
    },
    "Qwen3-4B": {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": 2560,
        "intermediate_size": 9728,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
        "rope_theta": 1000000.0,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
        "attention_bias": False,
    },
    # Latent attention and experts. Only the first 12 of 27 layers, so that two engines fit.
    "DeepSeek-V2-Lite": {
        "architectures": ["DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v2",
        "hidden_size": 2048,
        "intermediate_size": 10944,
        "num_hidden_layers": 12,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "head_dim": 64,
        "q_lora_rank": None,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "moe_intermediate_size": 1408,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "num_experts_per_tok": 6,
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "n_group": 1,
        "topk_group": 1,
        "topk_method": "greedy",
        "scoring_func": "softmax",
        "norm_topk_prob": False,
        "routed_scaling_factor": 1.0,
        "vocab_size": 102400,
        "rope_theta": 10000.0,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "attention_bias": False,
    },
    # Three gated delta net layers per attention layer. Only 12 of 48 layers and 64 of 512 experts.
    "Qwen3-Next": {
        "architectures": ["Qwen3NextForCausalLM"],
        "model_type": "qwen3_next",
        "hidden_size": 2048,
        "intermediate_size": 5120,
        "num_hidden_layers": 12,
        "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 3,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "partial_rotary_factor": 0.25,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "num_experts": 64,
        "num_experts_per_tok": 10,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "norm_topk_prob": True,
        "vocab_size": 151936,
        "rope_theta": 10000000.0,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
    },
    "tiny": {
        **LLAMA,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "vocab_size": 512,
        "initializer_range": 0.3,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
    },
}


class TimeUp(RuntimeError):
    """The command's deadline has passed."""


@contextmanager
def until_time_up(part: Part) -> Iterator[None]:
    """Ends a part at the deadline and keeps its rows.

    Raises:
        TimeUp: the deadline passed before the part had any rows.
    """
    try:
        yield
    except TimeUp as error:
        if not part.rows:
            raise
        part.not_run("rest", str(error))


@dataclass(frozen=True)
class Plan:
    """The options for starting an engine.

    Attributes:
        elastic: whether to use the elastic pool.
        kv_memory: size of the KV cache in bytes; for an elastic engine, of its address range.
        options: options for vLLM, in addition to those of the `Fleet`.
        env: environment variables of the engine's process.
    """

    elastic: bool
    kv_memory: int
    options: Mapping[str, Any] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)


class Engine:
    """A running engine. `send` sends it a command, and `wait` returns the reply."""

    def __init__(self, name: str, process: subprocess.Popen[str], answers: Any, log: Path) -> None:
        self.name, self.process, self.log = name, process, log
        self._said: queue.SimpleQueue[str] = queue.SimpleQueue()
        threading.Thread(target=self._listen, args=(answers,), daemon=True).start()

    def _listen(self, answers: Any) -> None:
        with answers:
            for line in answers:
                self._said.put(line)
        self._said.put("")

    def send(self, **what: Any) -> None:
        """Sends a command without waiting for the reply."""
        assert self.process.stdin is not None
        try:
            print(json.dumps(what), file=self.process.stdin, flush=True)
        except BrokenPipeError:
            raise self._ended() from None

    def receive(self, seconds: float) -> dict[str, Any] | None:
        """Returns the next reply, or None if none arrives within `seconds`."""
        try:
            line = self._said.get(timeout=max(seconds, 1e-3))
        except queue.Empty:
            return None
        if not line:
            raise self._ended()
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _ended(self) -> WrongResult:
        with suppress(subprocess.TimeoutExpired):  # the pipe closes before the traceback is written
            self.process.wait(10)
        end = self.log.read_text(errors="replace").strip().splitlines()[-20:]
        return WrongResult(f"the engine {self.name} exited: " + " | ".join(end))

    def wait(self, deadline: Deadline) -> dict[str, Any]:
        """Returns the next reply.

        Raises:
            TimeUp: no reply arrived before the deadline.
        """
        answer = self.receive(deadline.left)
        if answer is None:
            raise TimeUp(
                f"the deadline of {deadline.seconds:.0f} s passed while {self.name} worked"
            )
        return answer


def kill_group(process: subprocess.Popen[Any]) -> None:
    """Kills a process that leads a session, together with its process group."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


class Fleet:
    """Engines of one shape that run together on one device, until the end of the ``with`` block.

    All have the same random weights. They share a private ledger in a temporary directory, which is
    removed with them.

    Args:
        command: the run's command.
        shape: the model's shape, one of `SHAPES`.
        ranks: number of tensor-parallel ranks per engine, one GPU each.
        stages: number of pipeline-parallel stages per engine, each on `ranks` GPUs.
        block_size: tokens per vLLM block; ignored on the CPU, where it is 32.
        max_num_seqs: maximum number of concurrent requests per engine; 0 for 128, or for 8 in a
            quick run.
        longest: maximum number of tokens in a prompt and its answer; 0 for `LONGEST`, or for 512 in
            a quick run.
        batch_invariant: use vLLM's batch-invariant kernels, with which an answer does not depend on
            the other requests of a batch. They are slower.
        options: vLLM options for every engine.
    """

    def __init__(
        self,
        command: Command,
        shape: Mapping[str, Any],
        *,
        ranks: int = 1,
        stages: int = 1,
        block_size: int = 0,
        max_num_seqs: int = 0,
        longest: int = 0,
        batch_invariant: bool = False,
        **options: Any,
    ) -> None:
        self.command, self.options = command, options
        self.batch_invariant = batch_invariant
        self.longest = longest or (512 if command.quick else LONGEST)
        self.shape, self.ranks, self.stages = shape, ranks, stages
        self.block_size = 32 if command.backend == "host" else block_size or 16
        self.max_num_seqs = max_num_seqs or (8 if command.quick else 128)
        self.engines: dict[str, Engine] = {}
        self._ends: dict[str, Callable[[], None]] = {}

    def __enter__(self) -> Fleet:
        with ExitStack() as stack:
            name = stack.enter_context(tempfile.TemporaryDirectory(prefix="vmem-vllm-"))
            self.folder = Path(name)
            self.ledger = self.folder / "ledger"
            self.ledger.mkdir(mode=0o700)
            model = self.folder / "model"
            model.mkdir()
            (model / "config.json").write_text(json.dumps(self._config()), encoding="utf-8")
            self.path = engine_path(self.folder / "site")
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()

    def _config(self) -> dict[str, Any]:
        return {
            "max_position_embeddings": 2 * max(LONGEST, self.longest),
            "hidden_act": "silu",
            "torch_dtype": "float32" if self.command.quick else "bfloat16",
            "bos_token_id": 1,
            "eos_token_id": 2,
            **self.shape,
        }

    @property
    def vocabulary(self) -> int:
        """The number of token ids."""
        return int(self.shape["vocab_size"])

    @property
    def block_bytes(self) -> int:
        """The total size of a block across all layers, in bytes."""
        row = 2 * self.shape["num_key_value_heads"] * self.shape["head_dim"]
        item = 4 if self.command.quick else 2
        return int(self.block_size * row * item * self.shape["num_hidden_layers"])

    def _options(self, plan: Plan, count: int) -> dict[str, Any]:
        quick, ranks, stages = self.command.quick, self.ranks, self.stages
        options: dict[str, Any] = {
            "model": str(self.folder / "model"),
            "dtype": "float32" if quick else "bfloat16",
            "kv_cache_memory_bytes": plan.kv_memory,
            "max_model_len": self.longest,
            "max_num_batched_tokens": 64 if quick else 8192,
            "max_num_seqs": self.max_num_seqs,
            "block_size": self.block_size,
        }
        if ranks * stages > 1:
            options |= {"tensor_parallel_size": ranks, "pipeline_parallel_size": stages}
            options["distributed_executor_backend"] = "mp"
        if self.command.backend == "host":
            options["enforce_eager"] = True
        else:
            # vLLM only checks that this fraction of memory is free; the KV cache size is set.
            options["gpu_memory_utilization"] = 0.5 / count
            # CUDA graphs for decoding, as in serving, but no compiler, which would take longer than
            # the runs.
            sizes = [1, 2, 4, *range(8, 129, 8), *range(144, self.max_num_seqs + 1, 16)]
            options["compilation_config"] = {
                "mode": 0,
                "cudagraph_mode": "FULL_DECODE_ONLY",
                "cudagraph_capture_sizes": sizes,
            }
        return {**options, **self.options, **plan.options}

    def start(self, plans: Mapping[str, Plan]) -> dict[str, Engine]:
        """Starts engines in parallel, and waits until all are ready.

        Raises:
            WrongResult: an engine exited, or runs the wrong scheduler.
            TimeUp: the command's deadline has passed.
        """
        count = len(self.engines) + len(plans)
        new = {name: self._start(name, plan, count) for name, plan in plans.items()}
        for name, engine in new.items():
            self._check(name, plans[name], engine.wait(self.command.deadline))
        self.engines |= new
        return new

    def _check(self, name: str, plan: Plan, said: Mapping[str, Any]) -> None:
        """Checks that a ready engine runs the scheduler of its plan, and records its page size.

        Raises:
            WrongResult: it runs a different scheduler.
        """
        scheduler = said["scheduler"]
        self.command.show(f"{name}: ready, scheduler {scheduler}")
        if ("Elastic" in scheduler) != plan.elastic:
            raise WrongResult(f"the engine {name} runs the scheduler {scheduler}")
        if plan.elastic:
            self.command.record.options.setdefault("pages", {})[name] = said["page"]

    def _program(self, plan: Plan) -> tuple[list[str], dict[str, str]]:
        """Returns the command line and environment of an engine's process."""
        env = {**os.environ, "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
        env |= {"VLLM_LOGGING_LEVEL": "WARNING", "VMEM_VLLM": str(int(plan.elastic))}
        env |= {"PYTHONPATH": self.path}
        if self.batch_invariant:  # without vLLM's changes to how CUDA graphs are captured
            env |= {"VLLM_BATCH_INVARIANT": "1", "VLLM_USE_BREAKABLE_CUDAGRAPH": "0"}
        env.pop("VLLM_PLUGINS", None)
        return [sys.executable, "-m", "vmem_bench.vllm.arm"], env

    def _start(self, name: str, plan: Plan, count: int) -> Engine:
        plain = name.replace(" ", "-")
        out, log = self.folder / f"{plain}.json", self.folder / f"{plain}.log"
        out.write_text(json.dumps(self._options(plan, count)), encoding="utf-8")
        read, write = os.pipe()
        words, env = self._program(plan)
        env |= {"VMEM_LEDGER": str(self.ledger), "VMEM_NAME": plain}
        page = getattr(self.command.args, "page", 0)
        env |= {"VMEM_PAGE_SIZE": str(page)} if page else {}
        try:
            with log.open("w") as said:
                process = subprocess.Popen(
                    [*words, "--options", str(out), "--answers", str(write)],
                    env={**env, **plan.env},
                    stdin=subprocess.PIPE,
                    stdout=said,
                    stderr=said,
                    pass_fds=(write,),
                    text=True,
                    start_new_session=True,
                )
        except BaseException:
            os.close(read)
            raise
        finally:
            os.close(write)

        def end() -> None:
            kill_group(process)
            assert process.stdin is not None
            process.stdin.close()

        self._stack.callback(end)
        self._ends[name] = end
        return Engine(name, process, os.fdopen(read, encoding="utf-8"), log)

    def stop(self, names: Iterable[str]) -> None:
        """Stops engines. Their device memory is free when this method returns."""
        for name in names:
            del self.engines[name]
            self._ends.pop(name)()

    def order(self, name: str, **what: Any) -> dict[str, Any]:
        """Sends a command to one engine and waits for the reply."""
        self.engines[name].send(**what)
        return self.engines[name].wait(self.command.deadline)

    def together(
        self,
        orders: Mapping[str, Mapping[str, Any]],
        look: Callable[[], None] = lambda: None,
        every: float = 0.05,
    ) -> dict[str, dict[str, Any]]:
        """Sends a command to each of several engines and waits for all replies.

        While waiting, calls `look` about every `every` seconds.
        """
        for name, what in orders.items():
            self.engines[name].send(**what)
        answers: dict[str, dict[str, Any]] = {}
        while len(answers) < len(orders):
            for name in orders:
                if name not in answers:
                    answer = self.engines[name].receive(every / len(orders))
                    if answer is not None:
                        answers[name] = answer
            look()
            if not self.command.deadline.allows():
                raise TimeUp(f"the deadline of {self.command.deadline.seconds:.0f} s passed")
        return answers

    # ---- memory as seen from this process --------------------------------------------------------

    def free(self) -> int | None:
        """Returns how many bytes this process could allocate now; None if there is no GPU."""
        if self.command.backend == "host":
            return None
        import torch

        return int(torch.cuda.mem_get_info(self.command.args.device)[0])

    def shares(self, name: str) -> dict[str, EngineInfo]:
        """Returns an engine's ledger entries, by device."""
        return {device: one for device, one in self._entries() if one.name == name}

    def _entries(self) -> Iterator[tuple[str, EngineInfo]]:
        for device in devices(self.ledger):
            with Ledger(device, folder=self.ledger, create=False) as ledger:
                for one in ledger.engines():
                    yield device, one

    def booked(self) -> dict[str, EngineInfo]:
        """Returns each engine's ledger entry on the device where it uses the most memory."""
        found: dict[str, EngineInfo] = {}
        for _, one in self._entries():
            if one.name not in found or found[one.name].used < one.used:
                found[one.name] = one
        return found

    def used(self, name: str) -> int:
        """Returns the bytes that an engine uses, according to the ledger."""
        one = self.booked().get(name)
        return one.used if one is not None else 0

    def rest(self, seconds: float, step: float = 0.02) -> list[tuple[float, int | None, int]]:
        """Samples memory for `seconds`.

        Returns samples of the time since the start, the free bytes, and the bytes that all engines
        use according to the ledger.
        """
        began, found = time.monotonic(), []
        while (now := time.monotonic() - began) < seconds and self.command.deadline.allows():
            found.append((now, self.free(), sum(one.used for one in self.booked().values())))
            time.sleep(step)
        return found
