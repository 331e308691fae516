# SPDX-License-Identifier: MIT
"""SGLang CPU engines in processes forked from one that has imported SGLang.

SGLang spawns its processes, each of which spends ten seconds on imports. All tests but one fork
them instead, from a process that has no engine and has not loaded SGLang's plug-ins.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
PAGE_BYTES = 16 * 2 * 32 * 4 * 8  # 16 tokens, 2 heads of 32 floats, K and V of 4 layers
FORK = multiprocessing.get_context("fork")


def environment() -> dict[str, str]:
    """Returns the environment for a process that imports SGLang."""
    found = importlib.util.find_spec("sglang")
    assert found is not None
    assert found.submodule_search_locations
    models = Path(found.submodule_search_locations[0], "srt", "models")
    names = sorted(path.stem for path in models.iterdir())
    kept = ("llama", "minicpm3", "gemma3_causal", "mellum", "qwen3_next", "llama_eagle")
    kept += ("registry", "utils", "__pycache__")
    left_out = (name for name in names if name not in kept)
    return {
        "SGLANG_USE_CPU_ENGINE": "1",
        "SGLANG_DISABLED_MODEL_ARCHS": ",".join(left_out),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "OMP_NUM_THREADS": "1",
        "OMP_WAIT_POLICY": "passive",
        "PYTHONPATH": os.pathsep.join(
            [str(HERE / "stand_ins"), str(HERE.parents[1]), os.environ.get("PYTHONPATH", "")]
        ),
    }


def options(model: Path, **more: Any) -> dict[str, Any]:
    """Returns the options of an engine that runs a model from `make_model`."""
    given = {
        "model_path": str(model),
        "device": "cpu",
        "attention_backend": "torch_native",
        "sampling_backend": "pytorch",
        "grammar_backend": "none",
        "skip_tokenizer_init": True,
        "dtype": "float32",
        "disable_cuda_graph": True,
        "disable_overlap_schedule": True,
        "page_size": 16,
        "max_total_tokens": 2048,
        "mem_fraction_static": 0.2,
        "max_running_requests": 8,
        "log_level": "warning",
        "random_seed": 1,
    }
    return {**given, **more}


_WINDOWS = {
    "sliding_window": 32,
    "layer_types": [*["sliding_attention"] * 2, "full_attention", "sliding_attention"],
}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
_KINDS: dict[str, dict[str, Any]] = {
    "llama": {},
    "minicpm3": {
        "num_key_value_heads": 4,
        "head_dim": None,
        "q_lora_rank": 48,
        "kv_lora_rank": 64,
        "qk_rope_head_dim": 16,
        "qk_nope_head_dim": 32,
        "v_head_dim": 32,
    },
    "gemma3_text": _WINDOWS,
    "mellum": {**_WINDOWS, **_EXPERTS},
    "qwen3_next": {
        **_EXPERTS,
        "layer_types": [*["linear_attention"] * 3, "full_attention"],
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 32,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "shared_expert_intermediate_size": 64,
    },
}


def make_model(folder: Path, kind: str = "llama") -> Path:
    """Creates a 4-layer model with random weights; returns its folder.

    Args:
        folder: parent of the model's folder.
        kind: llama, with 2 KV heads of 32; minicpm3, whose latent attention stores 80 values per
            token; gemma3_text and mellum, with a window of 32 tokens in 3 of 4 layers, for which
            SGLang uses one pool and two pools, respectively; or qwen3_next, with a state in 3 of 4
            layers.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    given: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
    given |= _KINDS[kind]
    torch.manual_seed(7)
    config = AutoConfig.for_model(
        kind,
        vocab_size=512,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        max_position_embeddings=2048,
        tie_word_embeddings=False,
        initializer_range=0.2,
        **{name: value for name, value in given.items() if value is not None},
    )
    made = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for name, weight in made.named_parameters():
        if kind == "gemma3_text" and "post_" in name:
            weight.data.fill_(8.0)  # otherwise every answer would repeat one token
    made.save_pretrained(folder / kind)
    if kind == "qwen3_next":
        file = folder / kind / "config.json"
        text = {**json.loads(file.read_text("utf-8")), "full_attention_interval": 4}
        file.write_text(json.dumps(text), "utf-8")
    return folder / kind


def prompts(count: int = 4) -> list[list[int]]:
    """Returns `count` prompts with a common prefix, plus a four-token prompt without it."""
    shared = [(i * 37 + 11) % 500 + 3 for i in range(70)]
    own = [[(i * (k + 3)) % 500 + 3 for i in range(10 + 7 * k)] for k in range(count)]
    return [*(shared + one for one in own), [5, 6, 7, 8]]


def _prepare(log: Path, env: dict[str, str]) -> None:
    os.setsid()
    sys.stdout = sys.stderr = file = log.open("a", buffering=1)
    os.dup2(file.fileno(), 1)
    os.dup2(file.fileno(), 2)
    for name in [name for name in os.environ if name.startswith("VMEM_")]:
        del os.environ[name]
    os.environ.update(env)


def _call(log: Path, env: dict[str, str], function: Callable[[], None]) -> None:
    _prepare(log, env)
    function()


def outcome(log: Path, env: dict[str, str], function: Callable[[], None]) -> tuple[int, str]:
    """Calls a function in a forked process; returns the process's exit status and output."""
    process = FORK.Process(target=_call, args=(log, {"VMEM_SGLANG": "1", **env}, function))
    process.start()
    process.join(60)
    assert process.exitcode is not None
    return process.exitcode, log.read_text("utf-8")


def _serve(pipe: Any, log: Path, env: dict[str, str], given: dict[str, Any]) -> None:
    _prepare(log, env)
    from sglang.srt.entrypoints import engine as module

    multiprocessing.set_start_method("fork", force=True)
    module.mp.set_start_method = lambda *args, **kwargs: None
    try:
        engine = module.Engine(**given)
    except BaseException as error:
        print(f"{type(error).__name__}: {error}", flush=True)
        pipe.send(error if isinstance(error, Exception) else RuntimeError(repr(error)))
        os._exit(1)
    pipe.send(None)
    while True:
        name, args, named = pipe.recv()
        if name == "end":
            break
        try:
            pipe.send(getattr(engine, name)(*args, **named))
        except Exception as error:
            pipe.send(error)
    engine.shutdown()
    os._exit(0)


class Engine:
    """An `sglang.Engine` in another process.

    Args:
        log: file for the engine's output.
        env: environment variables of the engine's process.
        given: the engine's options.

    Raises:
        Exception: the engine did not start.
    """

    def __init__(self, log: Path, env: dict[str, str], given: dict[str, Any]) -> None:
        self._pipe, theirs = FORK.Pipe()
        self.log = log
        self.process = FORK.Process(target=_serve, args=(theirs, log, env, given))
        self.process.start()
        theirs.close()
        self._answer(120)

    def _answer(self, timeout: float) -> Any:
        if not self._pipe.poll(timeout):
            self.kill()
            raise TimeoutError(f"no answer in {timeout} s: {self.log.read_text('utf-8')[-3000:]}")
        try:
            found = self._pipe.recv()
        except EOFError:
            raise RuntimeError(f"it exited: {self.log.read_text('utf-8')[-3000:]}") from None
        if isinstance(found, Exception):
            raise found
        return found

    def begin(self, name: str, *args: Any, **named: Any) -> None:
        """Starts a method call, whose result `end` returns."""
        self._pipe.send((name, args, named))

    def ready(self, timeout: float = 0.01) -> bool:
        """Waits up to `timeout` seconds; returns true once `end` would return immediately."""
        return bool(self._pipe.poll(timeout))

    def end(self, timeout: float = 60) -> Any:
        """Returns the result of the call that `begin` started."""
        return self._answer(timeout)

    def call(self, name: str, *args: Any, **named: Any) -> Any:
        """Calls a method and returns its result."""
        self.begin(name, *args, **named)
        return self.end()

    def answer(self, ids: list[list[int]], new: int = 24, **more: Any) -> list[list[int]]:
        """Returns each prompt's greedy answer as a list of tokens."""
        return [one["output_ids"] for one in self.generate(ids, new, **more)]

    def generate(self, ids: list[list[int]], new: int = 24, **more: Any) -> list[dict[str, Any]]:
        """Returns SGLang's greedy answer to each prompt."""
        return list(self.call("generate", input_ids=ids, sampling_params=greedy(new, **more)))

    def release(self) -> None:
        """Waits until the engine is idle (else it would crash), then frees the KV cache memory."""
        assert becomes(lambda: self.call("flush_cache").success)
        self.call("release_memory_occupation", tags=["kv_cache"])

    def kill(self) -> None:
        """Kills all of the engine's processes."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid or 0, signal.SIGKILL)
        self.process.join(10)

    def close(self) -> None:
        """Stops the engine and its processes."""
        with contextlib.suppress(OSError):
            self._pipe.send(("end", (), {}))
        self.process.join(20)
        self.kill()


def greedy(new: int, **more: Any) -> dict[str, Any]:
    return {"temperature": 0, "max_new_tokens": new, "ignore_eos": True, **more}


@contextlib.contextmanager
def served(log: Path, env: dict[str, str], given: dict[str, Any]) -> Iterator[Engine]:
    """Runs an engine during a ``with`` block."""
    engine = Engine(log, env, given)
    try:
        yield engine
    finally:
        engine.close()


def becomes(check: Any, timeout: float = 10) -> bool:
    """Waits until a condition is true; returns false if that takes more than `timeout` seconds."""
    end = time.monotonic() + timeout
    while not check():
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True


sys.path[:0] = [str(HERE / "stand_ins")]
