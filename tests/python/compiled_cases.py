# SPDX-License-Identifier: MIT
"""Runs every integration with compiled models, a few cases per process, because reading unmapped
memory crashes the process.

    python compiled_cases.py BACKEND DYNAMIC CASE...

Each case asserts that the outputs match those of the uncompiled model, and prints its name.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from kinds_helpers import model_of
from serve_helpers import VOCABULARY, expected, make_requests, tiny_model
from transformers import ContinuousBatchingConfig, DynamicCache, GenerationConfig

from pyvmem import KVCache, KVCacheConfig
from pyvmem.attention import Attention
from pyvmem.compiled import Writer
from pyvmem.engine import RequestCache
from pyvmem.hf import VMemCache, vmem_continuous_batching
from pyvmem.hf.keyword import CACHE
from pyvmem.kvcache import LayeredCache, layer_shapes
from pyvmem.serve import Engine

ROOT = Path(__file__).resolve().parents[2]
BACKEND, DYNAMIC = sys.argv[1], {"auto": None, "yes": True, "no": False}[sys.argv[2]]
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
WHERE = "host" if DEVICE.type == "cpu" else "auto"


def compiled(function: Any, **more: Any) -> Any:
    torch._dynamo.reset()
    how = {"mode": BACKEND} if BACKEND == "reduce-overhead" else {"backend": BACKEND}
    return torch.compile(function, dynamic=DYNAMIC, **how, **more)


def generates(model: Any, rows: int, length: int) -> None:
    """Checks `generate` with a VMemCache against the plain model, with greedy and beam search."""
    model = model.to(DEVICE)
    dice = torch.Generator().manual_seed(5)
    ids = torch.randint(1, VOCABULARY, (2, 9), generator=dice).to(DEVICE)
    same = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "do_sample": False}
    forward = model.forward
    for beams in (1, 2):
        way = same | {"max_new_tokens": 6, "num_beams": beams, "pad_token_id": 0}
        model.forward = forward
        want = model.generate(**way, **{CACHE: DynamicCache(config=model.config)})
        model.forward = compiled(forward)
        with VMemCache(model.config, rows, length, backend=WHERE) as past:
            assert model.generate(**way, **{CACHE: past}).equal(want), beams
    model.forward = forward


def small() -> None:
    generates(tiny_model(2).model, 4, 256)


def large() -> None:
    generates(tiny_model(2).model, 4, 4096)


def window() -> None:
    generates(model_of("gemma3"), 4, 1024)


def latent() -> None:
    generates(model_of("deepseek"), 4, 1024)


def states() -> None:
    """Checks a model that writes its convolution states itself."""
    generates(model_of("lfm2"), 4, 1024)


def recurrent() -> None:
    generates(model_of("qwen3next"), 4, 1024)


def attention() -> None:
    """Checks `Attention` and `Writer` in a single graph without graph breaks; each token overwrites
    its own row.
    """
    config = KVCacheConfig(2, 2, 16, "float32", max_batch=4, max_seq_len=65536)
    with KVCache(config, backend=WHERE) as cache:
        attend, values = Attention(cache), Writer(cache.v(1))

        def model(x: torch.Tensor, batch: Any) -> torch.Tensor:
            for layer in range(2):
                key, value = (x * (layer + 2))[:, :2] * 1, (x + layer)[:, :2] * 1
                attend.write(layer, key, value + 1, batch)
                if layer:
                    values.write(value, batch.slots, batch.positions)
                x = x + attend(x, layer, batch)
            return x * 2

        fast = compiled(model, fullgraph=True)
        slots = [cache.alloc_reqid(), cache.alloc_reqid()]
        lengths = [0] * 4
        for step in range(6):
            new = [1, 1] if step else [5, 3]
            for slot, count in zip(slots, new, strict=True):
                lengths[slot] += count
            assert cache.step(lengths) == 0
            batch = attend.batch(slots, new, [lengths[slot] for slot in slots])
            with torch.inference_mode():
                x = torch.randn(sum(new), 4, 16, device=DEVICE)
                want = model(x, batch)
                for slot, count in zip(slots, new, strict=True):
                    for layer in range(2):
                        for rows in (cache.k(layer), cache.v(layer)):
                            rows[slot, lengths[slot] - count : lengths[slot]] = float("nan")
                del rows
                torch.testing.assert_close(fast(x, batch), want)
        attend.close()
        values.close()


def writer() -> None:
    """Checks that `Writer` writes keys that require gradients, and states, which have no
    positions.
    """
    shapes = layer_shapes(model_of("lfm2").config)
    state = next(layer for layer, one in enumerate(shapes) if hasattr(one, "states"))
    keys = next(layer for layer, one in enumerate(shapes) if not hasattr(one, "states"))
    policy: dict[str, Any] = {"dtype": "float32", "max_batch": 3, "max_seq_len": 32768}
    with LayeredCache(shapes, backend=WHERE, **policy) as cache:
        lengths = [0] * 3
        slot = cache.alloc_reqid()
        lengths[slot] = 20
        assert cache.step(lengths) == 0
        rows, held = Writer(cache.k(keys)), Writer(next(iter(cache.states(state).values())))

        def write(new: torch.Tensor, more: torch.Tensor, slots: Any, positions: Any) -> None:
            rows.write(new * 2, slots, positions)
            held.write(more + 1, slots[:1])

        fast = compiled(write, fullgraph=True)
        positions = torch.arange(20, device=DEVICE)
        slots = torch.full_like(positions, slot)
        for count in (20, 7):
            new = torch.randn(count, *rows.tensor.shape[2:], device=DEVICE, requires_grad=True)
            more = torch.randn(1, *held.tensor.shape[1:], device=DEVICE)
            fast(new, more, slots[:count], positions[:count])
            assert rows.tensor[slot, :count].equal(new * 2)
            assert held.tensor[slot].equal(more[0] + 1)
            assert not rows.tensor.requires_grad
        rows.close()
        held.close()


def engine() -> None:
    """Checks the demo's engine, compiled as a whole."""
    loaded = tiny_model()
    model, jobs = loaded.model.to(DEVICE), make_requests(5)
    wanted = expected(loaded, jobs)
    config = KVCacheConfig.from_hf(model.config, dtype="float32", max_batch=3, max_seq_len=192)
    with KVCache(config, backend=WHERE) as cache:
        with Engine(model, cache) as serving:
            model.forward = compiled(model.forward)
            found = {one.request_id: one.completion for one in serving.run(jobs) if one.completion}
        del model.forward
    assert found.keys() == wanted.keys()
    for number, answer in found.items():
        assert tuple(answer.tokens) == tuple(wanted[number].tokens)


def example() -> None:
    """Checks examples/engine.py, compiled as a whole."""
    loaded = tiny_model()
    model, jobs = loaded.model.to(DEVICE), make_requests(5)
    wanted = expected(loaded, jobs)
    config = KVCacheConfig.from_hf(model.config, dtype="float32", max_batch=3, max_seq_len=192)
    spec = importlib.util.spec_from_file_location("example", ROOT / "examples" / "engine.py")
    assert spec is not None
    assert spec.loader is not None
    program = sys.modules["example"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(program)
    with KVCache(config, backend=WHERE) as cache:
        with RequestCache(cache) as requests, program.Engine(model, requests) as serving:
            model.forward = compiled(model.forward)
            made = [serving.submit(one.prompt, one.max_new_tokens) for one in jobs]
            for _ in serving.run():
                pass
        del model.forward
    for one, job in zip(made, jobs, strict=True):
        assert tuple(one.tokens[len(job.prompt) :]) == wanted[job.request_id].tokens


def continuous() -> None:
    """Checks transformers' continuous batching."""
    model, inputs = tiny_model(2).model.to(DEVICE), [[5, 6, 7], [8, 9], [4] * 20]
    how = GenerationConfig(max_new_tokens=6, do_sample=False, eos_token_id=-1, pad_token_id=0)
    answers = []
    for compiles in (False, True):
        if compiles:
            model.forward = compiled(model.forward)
        with vmem_continuous_batching(model, max_batch=4, backend=WHERE):
            got = model.generate_batch(
                inputs,
                generation_config=how,
                continuous_batching_config=ContinuousBatchingConfig(num_blocks=64),
                progress_bar=False,
            )
        answers.append([one.generated_tokens for one in got.values()])
    del model.forward
    assert answers[0] == answers[1]
    assert all(len(one) == 6 for one in answers[0])


CASES: dict[str, Callable[[], None]] = {
    one.__name__: one
    for one in (
        small,
        large,
        window,
        latent,
        states,
        recurrent,
        attention,
        writer,
        engine,
        example,
        continuous,
    )
}

if __name__ == "__main__":
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    torch._dynamo.config.recompile_limit = 32
    for name in sys.argv[3:]:
        torch.manual_seed(3)
        CASES[name]()
        print(name, flush=True)
