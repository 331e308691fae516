# SPDX-License-Identifier: MIT
"""The example engine generates the same tokens as transformers' `generate`."""

from __future__ import annotations

import runpy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from serve_helpers import expected, make_requests, one_thread, tiny_model  # noqa: E402

import pyvmem  # noqa: E402
from pyvmem import KVCache, KVCacheConfig  # noqa: E402
from pyvmem.engine import Model, Policy, RequestCache  # noqa: E402
from pyvmem.serve import Job, prompts  # noqa: E402
from pyvmem.serve import model as models  # noqa: E402
from pyvmem.serve.model import LoadedModel  # noqa: E402
from pyvmem.serve.verify import TIE, first_difference  # noqa: E402

__all__ = ["one_thread"]  # a fixture

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = runpy.run_path(str(ROOT / "examples" / "engine.py"), run_name="example")
TENSORS = 6


@contextmanager
def running(loaded: LoadedModel, **changes: Any) -> Iterator[tuple[Any, KVCache]]:
    settings: dict[str, Any] = {
        "dtype": "float32",
        "max_batch": 3,
        "max_seq_len": 192,
        "page_size": 4096,
    }
    config = KVCacheConfig.from_hf(loaded.model.config, **(settings | changes))
    with KVCache(config, backend="host") as cache:
        with RequestCache(cache) as requests, EXAMPLE["Engine"](loaded.model, requests) as engine:
            yield engine, cache
        cache.check_integrity()
        assert cache.stats().active_slots == 0


def answers(engine: Any, requests: list[Job]) -> tuple[list[Any], list[list[int]]]:
    """Returns the finished jobs, and the tokens streamed for each."""
    jobs = [engine.submit(one.prompt, one.max_new_tokens) for one in requests]
    streamed: list[list[int]] = [[] for _ in jobs]
    for job, token in engine.run():
        streamed[jobs.index(job)].append(token)
    for job, request, tokens in zip(jobs, requests, streamed, strict=True):
        assert job.tokens == [*request.prompt, *tokens]
    return jobs, streamed


def test_the_tokens_match_generate() -> None:
    loaded = tiny_model()
    requests = make_requests(9)
    wanted = expected(loaded, requests)
    with running(loaded) as (engine, cache):
        _, streamed = answers(engine, requests)
        assert cache.stats().short == 0
    for request, tokens in zip(requests, streamed, strict=True):
        assert tuple(tokens) == wanted[request.request_id].tokens


def test_preempted_jobs_resume() -> None:
    """With eight 21-row pages per tensor, three requests do not fit."""
    loaded = tiny_model()
    requests = make_requests(8, shortest=20, longest=40, new_tokens=(30, 40))
    wanted = expected(loaded, requests)
    with running(loaded, memory_limit=8 * TENSORS * 4096) as (engine, _):
        jobs, streamed = answers(engine, requests)
    assert sum(job.preemptions for job in jobs) > 0
    for request, tokens in zip(requests, streamed, strict=True):
        assert tuple(tokens) == wanted[request.request_id].tokens


def test_the_next_turn_reuses_the_rows_of_the_last() -> None:
    loaded = tiny_model()
    (first,) = make_requests(1, shortest=150, longest=150, new_tokens=(10, 10))
    with running(loaded) as (engine, cache):
        (job,), _ = answers(engine, [first])
        second = Job(1, (*job.tokens, 5, 6, 7), 8)
        before = cache.stats().prefix_hit_tokens
        _, streamed = answers(engine, [second])
        # two sharing units, of 64 tokens each: 192-byte rows in 4 KiB pages
        assert cache.stats().prefix_hit_tokens - before == 128
    loaded.model.set_attn_implementation("sdpa")
    assert tuple(streamed[0]) == expected(loaded, [second])[1].tokens


def test_only_the_job_that_never_fits_fails() -> None:
    loaded = tiny_model()
    long, short = make_requests(2, shortest=60, longest=60, new_tokens=(5, 5))
    long = Job(0, long.prompt * 3, 5)
    wanted = expected(loaded, [short])
    with running(loaded, memory_limit=4 * TENSORS * 4096) as (engine, _):
        jobs, streamed = answers(engine, [long, short])
    assert jobs[0].failed is not None
    assert jobs[0].failed.never
    assert not streamed[0]
    assert jobs[1].failed is None
    assert tuple(streamed[1]) == wanted[short.request_id].tokens


def test_a_prompt_longer_than_a_slot_is_rejected() -> None:
    with running(tiny_model()) as (engine, _), pytest.raises(ValueError, match="193 tokens"):
        engine.submit([1] * 193, 5)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.filterwarnings("default")  # transformers' own warnings
def test_a_real_model_matches_generate() -> None:
    """Uses the model that `make run` uses and the example's cache; tokens may differ where logits
    tie, as in `vmem serve-demo`.
    """
    pytest.importorskip("gguf", reason="the package gguf is not installed")
    try:
        loaded = models.load(dtype="float32")
    except models.ModelNotFound as error:
        pytest.skip(str(error))
    requests = [
        Job(i, models.encode(loaded.tokenizer, text), 12, loaded.eos_token_ids)
        for i, text in enumerate(prompts.load(count=6))
    ]
    wanted = expected(loaded, requests)
    shape = Model.of(loaded.model.config, "float32")
    policy = Policy(max_batch=4, max_seq_len=1024, memory=256 << 20)
    with (
        RequestCache.open(shape, policy, backend="host") as cache,
        EXAMPLE["Engine"](loaded.model, cache, loaded.eos_token_ids) as engine,
    ):
        _, streamed = answers(engine, requests)
        cache.cache.check_integrity()
    found = [
        first_difference(one.request_id, tokens, wanted[one.request_id])
        for one, tokens in zip(requests, streamed, strict=True)
    ]
    assert [one for one in found if one is not None and one.margin >= TIE] == []
    assert found.count(None) >= 5


def test_the_example_imports_only_public_names() -> None:
    """The example shows what a program outside the package can do."""
    import ast
    import importlib

    tree = ast.parse((ROOT / "examples" / "engine.py").read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("pyvmem"):
            module = importlib.import_module(node.module)
            assert {one.name for one in node.names} <= set(module.__all__), node.module


def test_unsupported_models_are_rejected() -> None:
    """A flat batch mixes requests, which stateful layers cannot handle, and the kernels do not
    support sinks.
    """
    from kinds_helpers import model_of

    for kind, text in (("jamba", "layers of kind linear_attention"), ("gptoss", "has no s_aux")):
        model = model_of(kind)
        before = model.config._attn_implementation
        policy = Policy(max_batch=1, max_seq_len=64, memory=16 << 20)
        with (
            RequestCache.open(Model.of(model.config, "float32"), policy, "host") as requests,
            pytest.raises(pyvmem.NotSupported, match=text),
            EXAMPLE["Engine"](model, requests) as engine,
        ):
            answers(engine, make_requests(1))
        model.set_attn_implementation(before)


def test_a_model_with_its_own_attention_is_rejected() -> None:
    """The model's own attention would bypass the engine and compute as if there were no cache."""
    from transformers import FalconConfig, FalconForCausalLM

    config = FalconConfig(
        vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, alibi=False
    )
    model = FalconForCausalLM(config)
    small = KVCacheConfig(
        num_layers=2, num_kv_heads=2, head_dim=16, dtype="float32", max_batch=1, max_seq_len=64
    )
    with (
        KVCache(small, backend="host") as cache,
        RequestCache(cache) as requests,
        pytest.raises(TypeError, match=r"FalconForCausalLM .*AttentionInterface"),
    ):
        EXAMPLE["Engine"](model, requests)


def refused(words: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> str:
    monkeypatch.setattr("sys.argv", ["engine.py", *words])
    with pytest.raises(SystemExit, match="2"):
        EXAMPLE["main"]()
    said = capsys.readouterr()
    assert said.out == ""
    return said.err.splitlines()[-1]


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--model", "/nowhere", "x"], "argument --model: /nowhere: no model folder and no .gguf"),
        (["--memory", "0", "x"], "argument --memory: 0 is not between 1 and "),
        (["--tokens", "0", "x"], "argument --tokens: 0 is not between 1 and "),
        (["x", " "], "argument prompts: an empty prompt has no answer"),
    ],
)
def test_bad_input_is_one_line(
    words: list[str],
    text: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("VMEM_CACHE_DIR", "/nowhere")
    assert refused(words, capsys, monkeypatch).startswith(f"engine.py: error: {text}")


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--memory", "1", "--tokens", "3", "1 2 3", "7 " * 1200], "1: 1200 tokens: needs 1,"),
        (["1 " * 3000], "engine.py: error: argument prompts: a prompt of 3000 tokens and 40 new"),
    ],
)
def test_an_unanswered_prompt_is_reported(
    words: list[str],
    text: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tokenizer: Any = SimpleNamespace(decode=lambda ids: "x")
    loaded = replace(tiny_model(), tokenizer=tokenizer)
    names = EXAMPLE["main"].__globals__
    monkeypatch.setitem(names, "load", lambda *_, **__: loaded)
    monkeypatch.setitem(names, "encode", lambda _, text: [int(one) for one in text.split()])
    monkeypatch.setattr("sys.argv", ["engine.py", *words])
    with pytest.raises(SystemExit) as ended:
        EXAMPLE["main"]()
    said = capsys.readouterr()
    assert ended.value.code
    assert text in said.err
    if len(words) > 1:
        assert said.out.count("0: 'x'") == 3


def test_the_model_converted_by_make_run_is_used(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The example looks for the model in its own clone, and announces slow steps."""
    clone = tmp_path / "clone"
    (clone / "build" / "cache").mkdir(parents=True)
    (clone / "examples").mkdir()
    copy = clone / "examples" / "engine.py"
    copy.write_bytes((ROOT / "examples" / "engine.py").read_bytes())
    example = runpy.run_path(str(copy), run_name="example")
    seen: list[Path] = []

    def load(path: Any, *, device: str, notify: Any) -> Any:
        seen.append(models.cache_dir())
        notify("converting")
        raise models.ModelNotFound("enough")

    monkeypatch.setitem(example["main"].__globals__, "load", load)
    monkeypatch.setattr("sys.argv", ["engine.py", "x"])
    monkeypatch.setenv("VMEM_CACHE_DIR", "")  # so that monkeypatch restores it afterwards
    monkeypatch.delenv("VMEM_CACHE_DIR")
    with pytest.raises(SystemExit, match="2"):
        example["main"]()
    assert seen == [clone / "build" / "cache"]
    assert capsys.readouterr().err.startswith("converting\n")
