# SPDX-License-Identifier: MIT
"""Small models with random weights, and engines that run them in this process."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

os.environ.update(
    VLLM_NO_USAGE_STATS="1",
    HF_HUB_OFFLINE="1",
    VLLM_LOGGING_LEVEL="WARNING",
    VLLM_CPU_OMP_THREADS_BIND="nobind",
    # The computations are too small for two threads, which would only wait for each other.
    OMP_NUM_THREADS="1",
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VMEM_BACKEND="host",
)

import pytest
import torch
from model_shapes import MADE, SHAPES, predict_a_token_more, save_draft

MODELS: dict[str, dict[str, Any]] = {
    # A block of 32 tokens takes 8 KiB per layer, so eight blocks share a page.
    "llama": {"model_type": "llama", "head_dim": 32, "num_hidden_layers": 2},
    # A block takes 24 KiB, so blocks straddle pages.
    "straddling": {"model_type": "llama", "head_dim": 96, "num_hidden_layers": 1},
    # Two groups of layers with separate blocks. One group frees its oldest blocks.
    "gemma": {
        "model_type": "gemma3_text",
        "head_dim": 32,
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
        "sliding_window": 64,
        "query_pre_attn_scalar": 32,
    },
}
MODELS["gemma"]["layer_types"] = MODELS["gemma"]["layer_types"][:4]
MODELS["uneven"] = MODELS["llama"] | {"num_hidden_layers": 3}  # does not split evenly into 2 stages
MODELS["draft"] = MODELS["llama"] | {"num_hidden_layers": 1}
MODELS |= SHAPES
_CHANGED = {"draft": save_draft, "deepseek": predict_a_token_more}

# The default options of an engine.
SIZES: dict[str, Any] = {
    "skip_tokenizer_init": True,
    "dtype": "float32",
    "block_size": 32,
    "seed": 0,
    "enforce_eager": True,
    "kv_cache_memory_bytes": 256 << 20,
    "max_num_batched_tokens": 64,
    "max_num_seqs": 8,
    "max_model_len": 512,
    "disable_log_stats": True,
}

# Encoder models, which have no KV cache.
ENCODERS = {"encoder": "BertModel", "classifier": "BertForSequenceClassification"}


def tokenizer() -> Any:
    """Creates a tokenizer that writes token 7 as t7."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({f"t{i}": i for i in range(512)}, unk_token="t0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=words, unk_token="t0", bos_token="t1", eos_token="t2"
    )


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """Returns a function that maps a model's name to its folder, created on first use.

    It returns the path of an existing folder unchanged. The random weights are large enough that
    each token depends on all keys and values.
    """
    made: dict[str, str] = {}

    def of(name: str) -> str:
        if Path(name).is_dir():
            return name
        if name in ENCODERS and name not in made:
            import transformers

            shape = {"hidden_size": 64, "intermediate_size": 128, "vocab_size": 512}
            layers = {"num_hidden_layers": 2, "num_attention_heads": 2, "initializer_range": 0.3}
            torch.manual_seed(0)
            kind = getattr(transformers, ENCODERS[name])
            folder = tmp_path_factory.mktemp(name)
            kind(transformers.BertConfig(**shape, **layers)).save_pretrained(folder)
            tokenizer().save_pretrained(folder)
            made[name] = str(folder)
        elif name in MADE and name not in made:
            torch.manual_seed(0)
            folder = tmp_path_factory.mktemp(name)
            tokenizer().save_pretrained(folder)
            MADE[name](folder)
            made[name] = str(folder)
        elif name not in made:
            from transformers import AutoConfig, AutoModelForCausalLM

            settings = {
                "hidden_size": 64,
                "intermediate_size": 128,
                "num_attention_heads": 2,
                "num_key_value_heads": 1,
                "vocab_size": 512,
                "max_position_embeddings": 1024,
                "bos_token_id": 1,
                "eos_token_id": 2,
                "pad_token_id": 0,
                "initializer_range": 0.3,
                "tie_word_embeddings": False,
            } | MODELS[name]
            torch.manual_seed(0)
            config = AutoConfig.for_model(settings.pop("model_type"), **settings)
            folder = tmp_path_factory.mktemp(name)
            AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
            tokenizer().save_pretrained(folder)
            if name in _CHANGED:
                _CHANGED[name](folder)
            made[name] = str(folder)
        return made[name]

    return of


@pytest.fixture
def ledger(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Creates a folder that only this user can read, with a path short enough for sockets."""
    return tmp_path_factory.mktemp("l")


Open = Callable[..., Any]


@pytest.fixture
def start(models: Callable[[str], str], ledger: Path, monkeypatch: pytest.MonkeyPatch) -> Open:
    """Returns a context manager: ``with start("llama", VMEM_VLLM="1", block_size=32) as llm``."""

    @contextmanager
    def opened(model: str, **options: Any) -> Iterator[Any]:
        from vllm import LLM
        from vllm.distributed import cleanup_dist_env_and_memory
        from vllm.engine.arg_utils import EngineArgs

        from pyvmem.vllm import plugin

        env = {k: options.pop(k) for k in list(options) if k.startswith("VMEM_")}
        original = EngineArgs.create_engine_config
        with monkeypatch.context() as patch:
            patch.setenv("VMEM_LEDGER", str(ledger))
            for key, value in env.items():
                patch.setenv(key, value)
            # vLLM loads plug-ins only once per process, but this process runs engines both with and
            # without the pool.
            plugin.register()
            # When vLLM 0.32 starts, it reads every attribute of every module. That fails for this
            # llvmlite module, which n-gram speculation loads and which is not needed again.
            sys.modules.pop("llvmlite.binding.ffi", None)
            try:
                llm = LLM(
                    models(model),
                    **{
                        **SIZES,
                        **options,
                    },
                )
                scheduler = llm.llm_engine.engine_core.engine_core.scheduler
                elastic = env.get("VMEM_VLLM") == "1" and model not in ENCODERS
                assert hasattr(scheduler, "elastic") == elastic
                try:
                    yield llm
                finally:
                    llm.llm_engine.engine_core.shutdown()
            finally:
                EngineArgs.create_engine_config = original
                cleanup_dist_env_and_memory()

    return opened
