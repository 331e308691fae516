# SPDX-License-Identifier: MIT
"""Models other than Llamas generate stock vLLM's tokens on the elastic pool.

Covers stateful layers, latent attention, 8-bit caches, adapters, an encoder with cross-attention,
and draft models. Each model runs in stock vLLM first.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from model_shapes import save_adapter
from test_engine import Open, Tokens, answer, at_rest, check, elastic_of, greedy, prompts
from test_moves import moving

BF16 = {"dtype": "bfloat16"}  # the type that these CPU kernels need
EAGLE = {"method": "eagle", "num_speculative_tokens": 2}
MTP = {"method": "mtp", "num_speculative_tokens": 1}


def compare(start: Open, model: str, ask: Callable[[Any], Tokens] = answer, **options: Any) -> None:
    """Compares the tokens with stock vLLM's: from an empty cache, with hits, and after a reset.

    A bfloat16 model may answer differently when a prefix is hit, even in stock vLLM.
    """
    with start(model, **options) as llm:
        wanted = ask(llm)
        hit = ask(llm)
    assert len({tuple(one) for one in wanted}) > len(wanted) // 2, "tokens depend on the prompts"
    with start(model, VMEM_VLLM="1", VMEM_RESERVE="0", **options) as llm:
        elastic = elastic_of(llm)
        assert ask(llm) == wanted
        check(llm)
        assert ask(llm) == hit
        assert elastic.backing.counters.grown_blocks < elastic.pool.num_gpu_blocks // 4
        at_rest(llm)
        assert (elastic.hits > 0) == llm.llm_engine.vllm_config.cache_config.enable_prefix_caching
        assert llm.reset_prefix_cache()
        at_rest(llm)
        geometry = elastic.backing.geometry
        null = [
            len(geometry.pages(k, 0)) * geometry.page_bytes(k) for k in range(len(geometry.classes))
        ]
        assert elastic.backing.mapped_bytes == sum(null)
        assert ask(llm) == wanted


def few(llm: Any) -> Tokens:
    return answer(llm, prompts(count=6), 10)


@pytest.mark.parametrize(
    ("model", "options"),
    [
        ("granite", {}),
        *(
            pytest.param(*one, marks=pytest.mark.long)
            for one in [("nemotron_h", {}), ("qwen3_next", BF16), ("lfm2", {}), ("mamba2", {})]
        ),
    ],
)
def test_layers_with_a_state(start: Open, model: str, options: dict[str, Any]) -> None:
    """Includes prefix hits, for which vLLM keeps the state at the end of some blocks."""
    compare(start, model, few, **options)


@pytest.mark.long
def test_a_state_that_moves(start: Open) -> None:
    """The model also has attention layers, whose blocks are larger than a state."""
    with start("granite") as llm:
        wanted = answer(llm, prompts())
    with start("granite", VMEM_VLLM="1", VMEM_RESERVE="256K", VMEM_IDLE="3600") as llm:
        elastic = elastic_of(llm)
        elastic.begin_step = moving(elastic)
        for _ in range(4):
            assert answer(llm, prompts()) == wanted
            check(llm)
        assert elastic.mover.moved > 0
        assert elastic.hits > 0


def test_latent_attention_and_multi_token_prediction(start: Open) -> None:
    """A model like DeepSeek V3, whose multi-token prediction module has its own keys and values.

    On a CPU without AMX, vLLM does not split such a model's prompts into chunks, so it never
    schedules a prompt longer than `max_num_batched_tokens`.
    """
    compare(start, "deepseek", few, speculative_config=MTP, max_num_batched_tokens=512, **BF16)


@pytest.mark.long
@pytest.mark.parametrize(("model", "options"), [("gpt_oss", BF16), ("gemma3n", {})])
def test_windows_and_layers_that_share(start: Open, model: str, options: dict[str, Any]) -> None:
    compare(start, model, few, **options)


@pytest.mark.long
def test_a_cache_of_eight_bits(start: Open) -> None:
    compare(start, "llama", few, kv_cache_dtype="fp8", **BF16)


@pytest.mark.long
def test_a_draft_model_with_the_model(start: Open, models: Callable[[str], str]) -> None:
    method = {**EAGLE, "model": models("draft")}
    compare(start, "llama", few, speculative_config=method)


@pytest.mark.long
def test_an_adapter_for_every_second_request(start: Open, tmp_path: Path) -> None:
    """Prefixes are kept per adapter, so a request with an adapter misses the base model's."""
    from vllm.lora.request import LoRARequest

    folder = tmp_path / "adapter"
    folder.mkdir()
    adapter = LoRARequest("adapter", 1, save_adapter(folder))

    def ask(llm: Any) -> Tokens:
        asked = [one for one in prompts(count=4) for _ in range(2)]
        adapters = [None, adapter] * 4
        outputs = llm.generate(asked, greedy(10), use_tqdm=False, lora_request=adapters)
        return [list(one.outputs[0].token_ids) for one in outputs]

    compare(start, "llama", ask, enable_lora=True)


def test_an_encoder_and_cross_attention(start: Open) -> None:
    """A model like Whisper, whose encoder output has blocks of its own."""
    import numpy as np

    draw = np.random.RandomState(0)
    sounds = [draw.randn(8000).astype("float32") for _ in range(3)]

    def ask(llm: Any) -> Tokens:
        asked = [
            {
                "prompt_token_ids": [1, *one["prompt_token_ids"][:40]],
                "multi_modal_data": {"audio": (sounds[i % 3], 16000)},
            }
            for i, one in enumerate(prompts(count=4))
        ]
        return answer(llm, asked, 10)

    compare(
        start,
        "whisper",
        ask,
        skip_tokenizer_init=False,
        max_num_batched_tokens=2048,
        max_model_len=448,
        limit_mm_per_prompt={"audio": 1},
    )
