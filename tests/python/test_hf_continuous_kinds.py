# SPDX-License-Identifier: MIT
"""Continuous batching of models with windows, MLA and unequal layers.

The expected tokens come from ``generate`` on each prompt alone, with transformers' own cache.
"""

from __future__ import annotations

import random
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers", reason="the extra 'serve' is not installed")

import torch
import transformers
from continuous_helpers import HERE, HOW, OLD, checked_versions
from kinds_helpers import KINDS, WINDOW, model_of
from serve_helpers import VOCABULARY, one_thread
from transformers import ContinuousBatchingConfig, GenerationConfig
from transformers.generation.continuous_batching.cache import group_layers_by_attn_type

import pyvmem
from pyvmem import NotSupported
from pyvmem.hf import cb_5_17, continuous, latent
from pyvmem.hf.continuous import vmem_continuous_batching
from pyvmem.hf.keyword import CACHE
from pyvmem.hf.named import NamedRequests
from pyvmem.kvcache import KVCache, LayeredCache

__all__ = ["one_thread"]

pytestmark = [
    pytest.mark.needs_tensors,
    pytest.mark.filterwarnings("default"),  # transformers' own warnings
    checked_versions,
]

layers_that_differ = pytest.mark.skipif(
    OLD, reason=f"layers that differ need transformers 5.18; {HERE} is here"
)
GEMMA3 = pytest.param("gemma3", marks=layers_that_differ)


def prompts(count: int, longest: int = 90) -> list[list[int]]:
    dice = random.Random(3)
    return [
        [dice.randrange(1, VOCABULARY) for _ in range(dice.randint(1, longest))]
        for _ in range(count)
    ]


def config(**more: Any) -> ContinuousBatchingConfig:
    """Configures small batches, so that long prompts are prefilled in chunks."""
    return ContinuousBatchingConfig(**{**HOW, "num_blocks": 200, "max_batch_tokens": 24, **more})


def generation(**more: Any) -> GenerationConfig:
    how = {"do_sample": False, "eos_token_id": -1, "pad_token_id": 0, "max_new_tokens": 60}
    return GenerationConfig(**{**how, **more})


def answers(model: Any, inputs: list[list[int]], **more: Any) -> list[list[int]]:
    found = model.generate_batch(
        inputs, generation_config=generation(**more), continuous_batching_config=config()
    )
    assert [one.error for one in found.values()] == [None] * len(found)
    return [one.generated_tokens for one in found.values()]


def alone(model: Any, inputs: list[list[int]], new: int = 60) -> list[list[int]]:
    run = {"do_sample": False, "max_new_tokens": new, "pad_token_id": 0}
    ids = [torch.tensor([one]) for one in inputs]
    return [model.generate(one, **run)[0, one.shape[1] :].tolist() for one in ids]


def options(context: pyvmem.Context, **more: Any) -> dict[str, Any]:
    return {"context": context, "max_batch": 3, "memory_limit": 4 << 20, "window_tile": 16, **more}


@pytest.mark.parametrize("kind", [GEMMA3, *(kind for kind in KINDS if kind != "gemma3")])
def test_the_tokens_match_transformers(
    host: pyvmem.Context, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, inputs = model_of(kind), prompts(5)
    want = alone(model, inputs)
    caches: list[Any] = []
    close = NamedRequests.close

    def watch(self: NamedRequests) -> None:
        self.kvcache.check_integrity()
        caches.append((type(self.kvcache), [part.config for part in self.parts]))
        close(self)

    monkeypatch.setattr(NamedRequests, "close", watch)
    with vmem_continuous_batching(model, **options(host)):
        assert answers(model, inputs) == want
    assert model.config._attn_implementation == "sdpa"
    kinds, configs = caches[0]
    assert kinds is (LayeredCache if kind == "gemma3" else KVCache)
    windows = {"gemma3": {0, WINDOW}, "mistral": {WINDOW}}.get(kind, {0})
    assert {one.window for one in configs} == windows
    assert {one.tensors_per_layer for one in configs} == {1 if kind == "deepseek" else 2}
    assert host.stats().used_bytes == 0
    assert alone(model, inputs[:1], 5) == [want[0][:5]], "the model is unchanged"


@pytest.fixture
def shared(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Collects the length of each request's cached prefix."""
    found: list[int] = []
    match = NamedRequests.match

    def watch(self: NamedRequests, *args: Any) -> int:
        found.append(match(self, *args))
        return found[-1]

    monkeypatch.setattr(NamedRequests, "match", watch)
    return found


def gone(requests: NamedRequests, name: str) -> int:
    """Returns the number of a request's rows that have left the window and been unmapped."""
    sliding = next(part for part in requests.parts if part.config.window)
    return sliding.first_rows([requests._requests[name].request.slot])[0]


def stems(tails: list[list[int]]) -> list[list[int]]:
    """Returns prompts with a common prefix (a system prompt) longer than a chunk and a window."""
    common = prompts(1, 200)[0] * 4
    return [common[:150] + one for one in tails]


@pytest.mark.parametrize(
    ("kind", "keep"),
    [
        pytest.param("gemma3", False, marks=layers_that_differ),
        ("gemma3", True),  # with keep_windows, all layers are alike
        ("mistral", False),
    ],
)
def test_requests_share_prefixes_within_a_window(
    host: pyvmem.Context, kind: str, keep: bool, shared: list[int]
) -> None:
    """A chunked prompt is recorded at each chunk's end, where another prompt may branch off."""
    model, inputs = model_of(kind), stems(prompts(4, 60))
    want = alone(model, inputs, 20)
    with vmem_continuous_batching(model, **options(host, max_batch=1, keep_windows=keep)):
        assert answers(model, inputs, max_new_tokens=20) == want
    assert shared == [0, 128, 128, 128]  # the last whole page within the common 150 tokens
    assert host.stats().used_bytes == 0


@pytest.mark.skipif(OLD, reason=f"transformers forks answers since 5.18; {HERE} is installed")
@pytest.mark.parametrize(("kind", "tile"), [("gemma3", 0), ("mistral", 16)])
def test_answers_are_forked_behind_a_window(host: pyvmem.Context, kind: str, tile: int) -> None:
    model, inputs = model_of(kind), stems(prompts(1, 9))
    want = alone(model, inputs, 40)
    # always samples the likeliest token
    sampling = {"do_sample": True, "top_k": 1, "num_return_sequences": 3}
    forked: list[int] = []
    fork = NamedRequests.fork

    def watch(self: NamedRequests, parent: str, child: str, tokens: int) -> bool:
        forked.append(gone(self, parent))
        return fork(self, parent, child, tokens)

    with (
        pytest.MonkeyPatch.context() as patch,
        vmem_continuous_batching(model, **options(host, max_batch=9, window_tile=tile)),
    ):
        patch.setattr(NamedRequests, "fork", watch)
        assert answers(model, inputs, max_new_tokens=40, **sampling) == [want[0]] * 3
    assert len(forked) == 2
    assert all(forked), "rows had left the parent's window"


@pytest.mark.parametrize("kind", [GEMMA3, "mistral"])
def test_pages_behind_a_window_are_freed_in_continuous_batching(
    host: pyvmem.Context, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory holds two requests' windows, but not all of their rows. Covers chunks, requests that
    arrive later, and next turns.
    """
    model, tails = model_of(kind), prompts(3, 60)
    first = stems(tails)
    want = alone(model, first, 16)
    second = [one + answer + tail for one, answer, tail in zip(first, want, tails, strict=True)]
    rows: list[tuple[int, int]] = []
    step = NamedRequests.computed

    def watch(self: NamedRequests, name: str, *args: Any) -> None:
        step(self, name, *args)
        rows.append((self._requests[name].valid, gone(self, name)))

    monkeypatch.setattr(NamedRequests, "computed", watch)
    with vmem_continuous_batching(model, **options(host, memory_limit=1 << 20)):
        assert answers(model, first, max_new_tokens=16) == want
        assert answers(model, second, max_new_tokens=16) == alone(model, second, 16)
    longest, before = max(rows)
    page = 4096 // 128
    # the window before the last recordable end stays mapped
    unit_end = (longest - 1) // page * page
    assert longest > 220
    assert before == (unit_end - WINDOW - 16) // page * page > 0
    assert host.stats().used_bytes == 0


def test_a_request_must_fit_with_the_rows_that_its_window_drops(host: pyvmem.Context) -> None:
    """transformers' scheduler counts all rows; a request that is too long fails immediately."""
    model = model_of("mistral")
    memory = {"memory_limit": 4 * 6 * 4096, "max_batch": 1}  # 6 pages of 32 rows in each tensor
    with vmem_continuous_batching(model, **options(host, **memory)):
        found = model.generate_batch(
            [[5] * 60, [6] * 10],
            generation_config=generation(max_new_tokens=133),
            continuous_batching_config=config(),
        )
    bad, good = found.values()
    assert "60 prompt tokens and 133 new tokens" in bad.error
    assert "exceed the 192 tokens" in bad.error
    assert len(good.generated_tokens) == 133


@layers_that_differ
def test_a_window_other_than_configured_is_rejected(
    host: pyvmem.Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cache drops rows outside the configured window; attention with a larger window would miss
    rows.
    """
    model = model_of("gemma3")
    monkeypatch.setattr(model.model.layers[1].self_attn, "sliding_window", WINDOW + 1)
    with vmem_continuous_batching(model, **options(host)):
        found = model.generate_batch(
            [[5] * 9], generation_config=generation(), continuous_batching_config=config()
        )
    (bad,) = found.values()
    text = f"layer 1 uses a window of {WINDOW + 1}, but its configuration has {WINDOW}"
    assert text in bad.error
    assert not bad.generated_tokens


REFUSED = {
    "gemma2": "its attention scores are capped",
    "gemma4": "2 of its layers use other layers' keys",
    "llama4": "the model has layers of kind chunked_attention",
    "qwen3next": "the model has layers of kind linear_attention",
    "jamba": "the model has layers of kind linear_attention",
    "lfm2": "the model has layers of kind conv",
    "nemotron": "the model has layers of kind linear_attention, mlp, moe",
}


@pytest.mark.parametrize("kind", REFUSED)
def test_layers_that_transformers_scheduler_cannot_cache_are_rejected(kind: str) -> None:
    """transformers' own continuous batching also rejects states and layers without storage."""
    model = model_of(kind)
    with (
        pytest.raises(NotSupported, match=f"over virtual memory: {REFUSED[kind]}"),
        vmem_continuous_batching(model),
    ):
        pass
    kinds = set(getattr(model.config, "layer_types", None) or ())
    if not OLD and kinds - {"full_attention", "sliding_attention"}:  # 5.17 checks this in its cache
        with pytest.raises(ValueError, match="Invalid layer type"):
            group_layers_by_attn_type(model.config)


def test_unequal_layers_are_rejected_by_the_old_adapter(
    host: pyvmem.Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The adapter for 5.17 rejects these models when installed for a single model, and otherwise at
    first use.
    """
    monkeypatch.setattr(continuous, "_adapter", lambda: cb_5_17.SlotCache)
    model, same = model_of("gemma3"), model_of("mistral")
    text = f"layers that differ .* need transformers 5.18 or later, not {HERE}"
    with pytest.raises(NotSupported, match=text), vmem_continuous_batching(model):
        pass
    with vmem_continuous_batching(**options(host)):
        with pytest.raises(NotSupported, match=text):
            model.init_continuous_batching(generation(), config())
        assert same.init_continuous_batching(generation(), config()) is not None
        same.set_attn_implementation("sdpa")
    assert model.config._attn_implementation == "sdpa"
    assert host.stats().used_bytes == 0


def test_a_model_with_its_own_attention_is_rejected() -> None:
    config = transformers.BloomConfig(hidden_size=48, n_layer=1, n_head=4, vocab_size=9)
    model = transformers.BloomForCausalLM(config)
    with (
        pytest.raises(NotSupported, match="BloomForCausalLM has its own attention"),
        vmem_continuous_batching(model),
    ):
        pass


@layers_that_differ
def test_sinks_are_rejected_by_name(host: pyvmem.Context) -> None:
    model = model_of("gptoss")
    with vmem_continuous_batching(model, **options(host)):
        found = model.generate_batch(
            [[5] * 9], generation_config=generation(), continuous_batching_config=config()
        )
    (bad,) = found.values()
    assert "attention 'vmem' has no s_aux" in bad.error
    assert not bad.generated_tokens


def test_models_whose_latent_cannot_be_absorbed_are_named() -> None:
    model = KINDS["deepseek"]()
    layer = model.model.layers[0].self_attn
    layer.kv_b_proj = torch.nn.Sequential(layer.kv_b_proj)
    with (
        pytest.raises(NotSupported, match=r"2 of 2 layers .* plain up-projection"),
        latent.absorbed(model),
    ):
        pass
    model = KINDS["deepseek"]()
    with (
        latent.absorbed(model),
        pytest.raises(NotSupported, match="only the attention function may use the cache"),
    ):
        model(torch.tensor([[5, 6]]), **{CACHE: transformers.DynamicCache()})
    plain = model_of("qwen3")
    with latent.absorbed(plain):
        assert "forward" not in vars(plain.model.layers[0].self_attn)
