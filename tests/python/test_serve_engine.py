# SPDX-License-Identifier: MIT
"""Tests the engine over a real KV cache with a tiny model; answers match those of `generate`."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from serve_helpers import expected, make_requests, one_thread, tiny_model  # noqa: E402

import pyvmem  # noqa: E402
from pyvmem.kvcache import KVCache, KVCacheConfig  # noqa: E402
from pyvmem.serve import Completion, Engine, FinishReason, Job, StepRecord  # noqa: E402
from pyvmem.serve.attention import attention_forward  # noqa: E402
from pyvmem.serve.model import LoadedModel  # noqa: E402
from pyvmem.serve.verify import compare, references  # noqa: E402

__all__ = ["one_thread"]  # a fixture

PAGE = 4096  # holds 21 1/3 rows of 192 bytes
TENSORS = 6


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return tiny_model()


@contextmanager
def make_cache(loaded: LoadedModel, **overrides: Any) -> Iterator[KVCache]:
    settings: dict[str, Any] = {
        "dtype": "float32",
        "max_batch": 3,
        "max_seq_len": 128,
        "page_size": PAGE,
    }
    config = KVCacheConfig.from_hf(loaded.model.config, **(settings | overrides))
    with KVCache(config, backend="host") as cache:
        yield cache
        cache.check_integrity()
        stats = cache.stats()
        assert stats.active_slots == 0
        assert stats.active_pages == 0


def serve(
    loaded: LoadedModel, cache: KVCache, requests: list[Job], **options: Any
) -> tuple[dict[int, Completion], Engine]:
    done: dict[int, Completion] = {}
    seen: dict[int, list[int]] = {}
    with Engine(loaded.model, cache, **options) as engine:
        for event in engine.run(requests):
            if event.token is not None:
                seen.setdefault(event.request_id, []).append(event.token)
            if event.completion is not None:
                assert event.request_id not in done
                done[event.request_id] = event.completion
        assert engine.unfinished == 0
    assert {name: tuple(tokens) for name, tokens in seen.items()} == {
        name: completion.tokens for name, completion in done.items() if completion.tokens
    }
    assert list(done) != [] or not requests
    return done, engine


def assert_as_generated(
    loaded: LoadedModel, requests: list[Job], done: dict[int, Completion]
) -> None:
    assert sorted(done) == [request.request_id for request in requests]
    answers = {name: completion.tokens for name, completion in done.items()}
    assert answers == {name: item.tokens for name, item in expected(loaded, requests).items()}


@pytest.mark.parametrize("group_size", [1, 3])
@pytest.mark.parametrize("background", [True, False])
def test_requests_join_and_leave(loaded: LoadedModel, group_size: int, background: bool) -> None:
    requests = make_requests(9)
    records: list[StepRecord] = []
    with make_cache(loaded, group_size=group_size) as cache:
        done, engine = serve(
            loaded, cache, requests, background=background, observer=records.append
        )
        assert (cache.stats().steps_async > 0) == background
    assert_as_generated(loaded, requests, done)
    stats = engine.stats
    assert stats.peak_running == 3
    assert stats.new_tokens == sum(len(c.tokens) for c in done.values())
    assert stats.prompt_tokens == sum(len(r.prompt) for r in requests)
    assert stats.preemptions == stats.recomputed_tokens == 0
    assert stats.steps == len(records) == len(stats.model_steps_s)
    assert sum(stats.model_steps_s) == pytest.approx(stats.model_s)
    # Requests of different ages run in the same steps, and slots are reused.
    assert any(len({tokens for _, _, tokens in record.requests}) == 3 for record in records)
    slots = {request: slot for record in records for request, slot, _ in record.requests}
    assert len(slots) == 9
    assert set(slots.values()) == {0, 1, 2}
    for completion in done.values():
        name = completion.job.request_id
        running = [r.step for r in records if name in {request for request, _, _ in r.requests}]
        assert (completion.first_step, completion.last_step) == (running[0], running[-1])


def test_requests_added_while_others_run(loaded: LoadedModel) -> None:
    requests = make_requests(6, seed=2)
    done: dict[int, Completion] = {}
    with make_cache(loaded, max_batch=4) as cache, Engine(loaded.model, cache) as engine:
        for request in requests:
            engine.add(request)
            for _ in range(3):
                for event in engine.step():
                    if event.completion is not None:
                        done[event.request_id] = event.completion
        for event in engine.run([]):
            if event.completion is not None:
                done[event.request_id] = event.completion
        assert engine.step() == []
    assert_as_generated(loaded, requests, done)


@pytest.mark.parametrize("background", [True, False])
def test_memory_limit_preempts_without_changing_answers(
    loaded: LoadedModel, background: bool
) -> None:
    requests = make_requests(8, seed=3, shortest=15, longest=60, new_tokens=(30, 60))
    limit = 9 * PAGE * TENSORS
    with make_cache(loaded, max_batch=4, memory_limit=limit, low_watermark=0) as cache:
        done, engine = serve(loaded, cache, requests, background=background)
        assert cache.stats().peak_mapped_bytes <= limit
        assert cache.stats().short > 0
    assert_as_generated(loaded, requests, done)
    assert engine.stats.preemptions > 0
    assert engine.stats.recomputed_tokens > 0
    assert engine.stats.preemptions == sum(c.preemptions for c in done.values())
    prompts = sum(len(r.prompt) for r in requests)
    assert engine.stats.prompt_tokens > prompts


def test_a_request_that_never_fits_fails_and_the_others_run(loaded: LoadedModel) -> None:
    small = make_requests(3, seed=4, longest=20, new_tokens=(3, 8))
    large = Job(99, tuple([5] * 100), 5)
    growing = Job(98, tuple([5] * 30), 60)
    requests = [small[0], large, small[1], growing, small[2]]
    with make_cache(loaded, memory_limit=2 * PAGE * TENSORS, low_watermark=0) as cache:
        done, _ = serve(loaded, cache, requests)
    assert done[99].reason is FinishReason.NO_MEMORY
    assert done[99].tokens == ()
    assert done[98].reason is FinishReason.NO_MEMORY
    part = done[98].tokens  # the tokens that fit in two pages, and one more
    assert len(part) == 2 * PAGE // 192 - 30 + 1
    whole = expected(loaded, [growing])[98].tokens
    assert part == whole[: len(part)]
    assert_as_generated(loaded, small, {r.request_id: done[r.request_id] for r in small})


@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_prompts_in_chunks(loaded: LoadedModel, chunk: int) -> None:
    requests = make_requests(6, seed=5, longest=100, new_tokens=(1, 12))
    records: list[StepRecord] = []
    with make_cache(loaded) as cache:
        done, engine = serve(loaded, cache, requests, prefill_chunk=chunk, observer=records.append)
    assert_as_generated(loaded, requests, done)
    assert engine.stats.prompt_tokens == sum(len(r.prompt) for r in requests)
    lengths: dict[int, list[int]] = {}
    for record in records:
        for name, _, tokens in record.requests:
            lengths.setdefault(name, [0]).append(tokens)
    grown = [b - a for each in lengths.values() for a, b in pairwise(each)]
    assert max(grown) <= chunk


def test_chunks_under_a_memory_limit(loaded: LoadedModel) -> None:
    requests = make_requests(6, seed=6, shortest=30, longest=70, new_tokens=(20, 40))
    with make_cache(loaded, memory_limit=8 * PAGE * TENSORS, low_watermark=0) as cache:
        done, engine = serve(loaded, cache, requests, prefill_chunk=16)
    assert_as_generated(loaded, requests, done)
    assert engine.stats.preemptions > 0


def test_a_full_slot_ends_the_answer(loaded: LoadedModel) -> None:
    requests = [Job(0, tuple(range(1, 61)), 50), Job(1, tuple(range(1, 65)), 50)]
    with make_cache(loaded, max_seq_len=64) as cache:
        done, _ = serve(loaded, cache, requests)
    answers = expected(loaded, requests)
    for name, count in ((0, 5), (1, 1)):  # the last token needs no row
        assert done[name].reason is FinishReason.SLOT_FULL
        assert done[name].tokens == answers[name].tokens[:count]


def test_end_of_text_ends_the_answer(loaded: LoadedModel) -> None:
    request = make_requests(1, seed=8, shortest=20, new_tokens=(40, 40))[0]
    answer = expected(loaded, [request])[0].tokens
    last = next(token for token in answer[5:] if token not in answer[:5])
    with make_cache(loaded) as cache:
        done, _ = serve(loaded, cache, [replace(request, eos_token_ids=frozenset({last, 10**6}))])
    assert done[0].reason is FinishReason.EOS
    assert done[0].tokens == answer[: answer.index(last) + 1]


def test_teacher_forcing_keeps_the_models_own_choices(loaded: LoadedModel) -> None:
    request = make_requests(1, seed=9, shortest=10, new_tokens=(12, 12))[0]
    forced = tuple(range(40, 52))
    with make_cache(loaded) as cache:
        done, _ = serve(loaded, cache, [replace(request, forced=forced)])
    assert done[0].tokens == forced
    ids = torch.tensor([request.prompt + forced])
    with torch.inference_mode():
        logits = loaded.model(input_ids=ids, use_cache=False).logits[0]
    own = logits.argmax(-1)[len(request.prompt) - 1 : -1].tolist()
    assert list(done[0].predictions) == own
    assert own != list(forced)


def test_answers_do_not_depend_on_what_pages_hold(loaded: LoadedModel) -> None:
    """Rows past a request's length are not read: pages full of NaN do not change the answers."""
    requests = make_requests(6, seed=10)
    with make_cache(loaded, zero_fill=False) as cache:
        serve(loaded, cache, requests)
        poisoned = 0
        for slot in cache.snapshot():
            rows = min(slot.mapped_pages * PAGE // 192, 128)
            for layer in range(3):
                for tensor in (cache.k(layer), cache.v(layer)):
                    tensor[slot.reqid, :rows] = float("nan")
                    poisoned += rows
        del tensor  # a cache with live tensors cannot be closed
        assert poisoned > 0
        done, _ = serve(loaded, cache, requests)
        assert cache.stats().reused_pages > 0
    assert_as_generated(loaded, requests, done)


def test_the_models_attention_is_restored_and_the_cache_can_be_closed(
    loaded: LoadedModel,
) -> None:
    requests = make_requests(2, seed=11)
    with make_cache(loaded) as cache:
        engine = Engine(loaded.model, cache)
        assert loaded.model.config._attn_implementation == "vmem"
        with pytest.raises(ValueError, match="close the engine first"):
            references(loaded, requests)
        engine.add(requests[0])
        engine.step()
        engine.close()
        engine.close()
        assert engine.unfinished == 0
        assert loaded.model.config._attn_implementation == "sdpa"
        assert cache.stats().active_slots == 0
    with make_cache(loaded) as cache:
        done, _ = serve(loaded, cache, requests)
    assert_as_generated(loaded, requests, done)


def test_an_error_in_the_middle_leaves_a_usable_cache(loaded: LoadedModel) -> None:
    requests = make_requests(4, seed=12, new_tokens=(10, 20))

    def fail(record: StepRecord) -> None:
        if record.step == 3:
            raise RuntimeError("observer")

    with make_cache(loaded) as cache:
        with pytest.raises(RuntimeError, match="observer"):
            serve(loaded, cache, requests, observer=fail)
        cache.check_integrity()
        done, _ = serve(loaded, cache, requests)
    assert_as_generated(loaded, requests, done)


def test_a_driver_failure_is_raised_and_the_step_can_be_repeated(loaded: LoadedModel) -> None:
    requests = make_requests(5, seed=15, shortest=30, new_tokens=(20, 40))
    done: dict[int, Completion] = {}
    failures = 0
    with pyvmem.Context("host", granule=PAGE) as context:
        config = KVCacheConfig.from_hf(
            loaded.model.config, dtype="float32", max_batch=3, max_seq_len=128
        )
        with KVCache(config, context) as cache, Engine(loaded.model, cache) as engine:
            for request in requests:
                engine.add(request)
            while engine.unfinished:
                if engine.stats.steps % 7 == 0:
                    context.inject(pyvmem.Inject.MAP, 2, 1, errno.EIO)
                try:
                    events = engine.step()
                except pyvmem.DriverError:
                    failures += 1
                    context.inject(pyvmem.Inject.MAP, 0, 0)
                    events = engine.step()
                done |= {e.request_id: e.completion for e in events if e.completion is not None}
            context.inject(pyvmem.Inject.MAP, 0, 0)
            cache.check_integrity()
    assert failures > 0
    assert_as_generated(loaded, requests, done)


def test_bad_arguments_are_rejected(loaded: LoadedModel) -> None:
    with make_cache(loaded) as cache:
        with pytest.raises(ValueError, match="prefill_chunk is -1"):
            Engine(loaded.model, cache, prefill_chunk=-1)
        with pytest.raises(ValueError, match=r"kernel must be one of auto, .*, not 'fa9'"):
            Engine(loaded.model, cache, kernel="fa9")
        with (
            Engine(loaded.model, cache) as engine,
            pytest.raises(ValueError, match="129 tokens, a slot holds 128"),
        ):
            engine.add(Job(0, tuple([1] * 129), 1))
    with (
        make_cache(loaded, num_layers=2) as cache,
        pytest.raises(ValueError, match="the model has 3 layers, the cache 2"),
    ):
        Engine(loaded.model, cache)
    assert loaded.model.config._attn_implementation == "sdpa"


def test_attention_rejects_arguments_that_it_would_ignore(loaded: LoadedModel) -> None:
    layer = loaded.model.model.layers[0].self_attn
    q = torch.zeros(1, 6, 2, 24)
    kv = torch.zeros(1, 2, 2, 24)
    with pytest.raises(ValueError, match="needs the keyword argument vmem_step"):
        attention_forward(layer, q, kv, kv)
    with make_cache(loaded) as cache, Engine(loaded.model, cache) as engine:
        step: list[Any] = []
        original = loaded.model.forward

        def spy(*args: Any, **kwargs: Any) -> Any:
            step.append(kwargs["vmem_step"])
            return original(*args, **kwargs)

        loaded.model.forward = spy
        try:
            list(engine.run([Job(0, (1, 2), 1)]))
        finally:
            del loaded.model.forward
        with pytest.raises(ValueError, match="neither a mask nor dropout"):
            attention_forward(layer, q, kv, kv, torch.ones(1, 1, 2, 2), vmem_step=step[0])
        with pytest.raises(ValueError, match="neither a mask nor dropout"):
            attention_forward(layer, q, kv, kv, dropout=0.5, vmem_step=step[0])
        step.clear()


def test_compare_finds_a_wrong_token(loaded: LoadedModel) -> None:
    """The `--verify` check can fail: it reports a changed token at its position."""
    requests = make_requests(3, seed=13, new_tokens=(10, 20))
    answers = expected(loaded, requests)
    with make_cache(loaded) as cache:
        done, _ = serve(loaded, cache, requests)
        good = compare(loaded, cache, done.values(), answers)
        assert good.passed
        assert (good.identical, good.requests) == (3, 3)
        tokens = list(done[1].predictions)
        tokens[4] = (tokens[4] + 1) % 199
        done[1] = replace(done[1], predictions=tuple(tokens), tokens=tuple(tokens))
        bad = compare(loaded, cache, done.values(), answers)
        assert not bad.passed
        (difference,) = bad.differences
        assert (difference.request_id, difference.position, difference.forced) == (1, 4, False)
        assert difference.got == tokens[4]
        short = replace(done[2], predictions=done[2].predictions[:-1])
        cut = compare(loaded, cache, [short], answers)
        assert not cut.passed
        assert cut.differences[0].got is None


def test_compare_accepts_one_tie_in_32_and_forces_the_rest(loaded: LoadedModel) -> None:
    requests = make_requests(32, seed=14, longest=20, new_tokens=(6, 8))
    answers = expected(loaded, requests)

    def tied(name: int, position: int) -> None:
        item = answers[name]
        margins = list(item.margins)
        margins[position] = 5e-5
        answers[name] = replace(item, margins=tuple(margins))

    def changed(completion: Completion, position: int) -> Completion:
        tokens = list(completion.predictions)
        tokens[position:] = [(token + 1) % 199 for token in tokens[position:]]
        return replace(completion, predictions=tuple(tokens))

    with make_cache(loaded, max_batch=8) as cache:
        done, _ = serve(loaded, cache, requests)
        done[7] = changed(done[7], 2)
        # there is no tie at that position
        assert not compare(loaded, cache, done.values(), answers).passed
        tied(7, 2)
        one = compare(loaded, cache, done.values(), answers)
        assert one.passed
        assert (one.identical, one.allowed, len(one.differences)) == (31, 1, 1)
        # After the tie, the forced run must agree; here the reference is wrong at a later position.
        item = answers[7]
        wrong = list(item.tokens)
        wrong[4] = (wrong[4] + 1) % 199
        answers[7] = replace(item, tokens=tuple(wrong))
        later = compare(loaded, cache, done.values(), answers)
        assert not later.passed
        assert [(d.position, d.forced) for d in later.differences] == [(2, False), (4, True)]
        answers[7] = item
        done[9] = changed(done[9], 1)
        tied(9, 1)
        assert not compare(loaded, cache, done.values(), answers).passed  # two of 32 differ
