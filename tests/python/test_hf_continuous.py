# SPDX-License-Identifier: MIT
"""Continuous batching on slots produces the same tokens as transformers' own paged path."""

from __future__ import annotations

import copy
import logging
import random
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers", reason="the extra 'serve' is not installed")

import torch
from continuous_helpers import HOW, OLD, checked_versions
from serve_helpers import VOCABULARY, one_thread, tiny_model
from transformers import ContinuousBatchingConfig, GenerationConfig

import pyvmem
from pyvmem import InvalidArgument, NotSupported, OutOfMemory
from pyvmem.hf import cb_common, cb_options
from pyvmem.hf.continuous import install, kvcache_of, uninstall, vmem_continuous_batching
from pyvmem.hf.named import NamedRequests

__all__ = ["one_thread"]

pytestmark = [
    pytest.mark.needs_tensors,
    pytest.mark.filterwarnings("default"),  # transformers' own warnings
    checked_versions,
]

STOCK = "paged|sdpa" if OLD else "sdpa"


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_model(2).model


@pytest.fixture(autouse=True)
def nothing_stays(context: pyvmem.Context) -> Iterator[None]:
    """Checks after every test that transformers is unpatched and that no pages are left."""
    from transformers.generation.continuous_batching import continuous_api as api

    before = api.PagedAttentionCache, api.ContinuousBatchingManager
    yield
    assert (api.PagedAttentionCache, api.ContinuousBatchingManager) == before
    assert context.stats().used_bytes == 0


def prompts(count: int, seed: int = 3, longest: int = 60) -> list[list[int]]:
    dice = random.Random(seed)
    return [
        [dice.randrange(1, VOCABULARY) for _ in range(dice.randint(1, longest))]
        for _ in range(count)
    ]


def config(blocks: int | None = 100, tokens: int = 24, **more: Any) -> ContinuousBatchingConfig:
    """Configures a small token budget, so that long prompts are prefilled in chunks."""
    return ContinuousBatchingConfig(**HOW, num_blocks=blocks, max_batch_tokens=tokens, **more)


def generation(new_tokens: int | None = 14, **more: Any) -> GenerationConfig:
    how = {"do_sample": False, "eos_token_id": -1, "pad_token_id": 0, **more}
    return GenerationConfig(max_new_tokens=new_tokens, **how)


def answers(
    model: Any, inputs: list[list[int]], cb_config: Any = None, config_of: Any = None
) -> list[list[int]]:
    found = model.generate_batch(
        inputs,
        generation_config=config_of or generation(),
        continuous_batching_config=cb_config or config(),
    )
    assert [one.error for one in found.values()] == [None] * len(found)
    return [one.generated_tokens for one in found.values()]


def stock(model: Any, *args: Any) -> list[list[int]]:
    model.set_attn_implementation(STOCK)
    try:
        return answers(model, *args)
    finally:
        model.set_attn_implementation("sdpa")


def options(context: pyvmem.Context, **more: Any) -> dict[str, Any]:
    enough = 4 * 80 * context.info.granule  # 80 pages each for K and V of two layers
    return {"context": context, "max_batch": 4, "memory_limit": enough, **more}


def on(context: pyvmem.Context, model: Any) -> Any:
    ordinal = context.cuda_device
    return model.to("cpu" if ordinal is None else f"cuda:{ordinal}")


def watch(monkeypatch: pytest.MonkeyPatch, name: str, what: Callable[..., Any]) -> list[Any]:
    """Collects `what(requests, result, *args)` for every call to a method of `NamedRequests`."""
    seen: list[Any] = []
    method = getattr(NamedRequests, name)

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        out = method(self, *args, **kwargs)
        seen.append(what(self, out, *args, **kwargs))
        return out

    monkeypatch.setattr(NamedRequests, name, call)
    return seen


# ---- equal tokens -----------------------------------------------------------------------------


@pytest.mark.parametrize("scheduler", ["fifo", "prefill_first"])
def test_mixed_prompts_in_chunks_and_more_requests_than_slots(
    model: Any, context: pyvmem.Context, monkeypatch: pytest.MonkeyPatch, scheduler: str
) -> None:
    model, inputs = on(context, model), prompts(9)
    want = stock(model, inputs, config(scheduler_type=scheduler))
    held = watch(monkeypatch, "hold", lambda self, out, *args: (len(self), out))
    queued = watch(monkeypatch, "queue", lambda self, out, name, past, new: (past, new))
    with vmem_continuous_batching(model, **options(context)):
        got = answers(model, inputs, config(scheduler_type=scheduler))
    assert got == want
    assert max(count for count, _ in held) == 4
    assert any(past and new > 1 for past, new in queued)  # a later chunk of a prompt
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize(
    ("scheduler", "sharing", "count"),
    [("fifo", False, 1), ("fifo", True, 3), ("prefill_first", True, 1)],
)
def test_requests_that_all_need_a_page_are_preempted(
    model: Any,
    context: pyvmem.Context,
    monkeypatch: pytest.MonkeyPatch,
    scheduler: str,
    sharing: bool,
    count: int,
) -> None:
    """Four requests fill memory and need their next page at the same time; two more wait for a
    slot.

    No request can continue, so transformers preempts the newest first, and later recomputes them.
    """
    from transformers.generation.continuous_batching.offloading_manager import OffloadingManager

    rows = context.info.granule // 192  # tokens per page
    if rows > 400:
        pytest.skip("pages hold more tokens than the model's longest sequence")
    model, dice = on(context, model), random.Random(4)
    inputs = [[dice.randrange(1, VOCABULARY) for _ in range(rows - 3)] for _ in range(6)]
    # always samples the likeliest token
    sampling = {"do_sample": True, "top_k": 1, "num_return_sequences": count}
    how = generation(14, **(sampling if count > 1 else {}))
    asked = {"tokens": 4 * rows, "scheduler_type": scheduler, "allow_block_sharing": sharing}
    want = stock(model, inputs, config(400, **asked), how)
    stuck: list[bool] = []
    preempt = OffloadingManager.offload_requests

    def offload(self: Any) -> Any:
        active = self.scheduler.active_requests
        stuck.append(len(self.scheduler.starved_requests) == len(active) > 1)
        before = len(active)
        done = preempt(self)
        assert len(active) < before or not stuck[-1], "no request was preempted"
        return done

    monkeypatch.setattr(OffloadingManager, "offload_requests", offload)
    limit = 4 * 4 * context.info.granule  # four pages each for K and V of two layers
    with vmem_continuous_batching(model, **options(context, memory_limit=limit)):
        got = answers(model, inputs, config(safety_margin=0.0, **asked), how)
    assert got == want
    assert any(stuck)


def test_answers_of_a_prompt_of_one_token(model: Any, context: pyvmem.Context) -> None:
    """A one-token prompt leaves nothing to compute before the fork; even alone in a batch, it must
    be answered.
    """
    model, inputs = on(context, model), [[5], [7, 8], [9]]
    how = generation(6, do_sample=True, top_k=1, num_return_sequences=3)
    want = stock(model, inputs, config(), how)
    with vmem_continuous_batching(model, **options(context, max_batch=9)):
        assert answers(model, inputs, config(), how) == want
        assert answers(model, inputs[:1], config(), how) == want[:3]


def test_prefixes_are_shared(model: Any, context: pyvmem.Context) -> None:
    page = context.info.granule
    dice = random.Random(9)
    unit = page // 64 if page <= 4096 else 0  # lcm(192, page) / 192
    if not unit:
        pytest.skip("pages hold more tokens than the model's longest sequence")
    model = on(context, model)
    common = [dice.randrange(1, VOCABULARY) for _ in range(3 * unit)]
    inputs = [common + one for one in prompts(3, longest=9)]
    want = stock(model, inputs)
    with vmem_continuous_batching(model, **options(context)):
        manager = model.init_continuous_batching(generation(), config())
        manager.start()
        got = []
        for one in inputs:  # one at a time, so that the second finds the prefix of the first
            manager.add_request(one, max_new_tokens=14)
            got.append(result(manager).generated_tokens)
        cache = kvcache_of(manager)
        assert cache is not None
        assert cache.stats().prefix_tokens == 3 * unit
        cache.check_integrity()
        manager.stop(block=True)
        assert kvcache_of(manager) is None
    assert got == want


def result(manager: Any) -> Any:
    for _ in range(600):
        found = manager.get_result(timeout=0.1)
        if found is not None and found.is_finished():
            return found
    raise AssertionError("no result")


def test_prefixes_of_running_requests_and_without_sharing(
    model: Any, context: pyvmem.Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = on(context, model)
    dice = random.Random(8)
    common = [dice.randrange(1, VOCABULARY) for _ in range(200)]
    inputs = [common + one for one in prompts(6, longest=9)]
    want = stock(model, inputs)
    matched = watch(monkeypatch, "match", lambda self, out, *args: out)
    with vmem_continuous_batching(model, **options(context, max_batch=2)):
        assert answers(model, inputs) == want
        if context.info.granule <= 4096:
            assert max(matched) == 192
        del matched[:]
        assert answers(model, inputs, config(allow_block_sharing=False)) == want
    assert not any(matched)


def test_parallel_answers_are_forks(
    model: Any, context: pyvmem.Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, inputs = on(context, model), prompts(3, longest=90)
    # always samples the likeliest token
    how = generation(do_sample=True, top_k=1, num_return_sequences=3)
    want = stock(model, inputs, config(), how)
    forked = watch(monkeypatch, "fork", lambda self, out, *args: out)
    with vmem_continuous_batching(model, **options(context, max_batch=6)):
        got = answers(model, inputs, config(), how)
    assert got == want
    assert len(got) == (3 if OLD else 9)  # 5.17 returns one answer per prompt
    assert any(forked) != OLD  # on 5.17, the answers share the cached prompt instead


def test_without_a_number_of_blocks_free_memory_is_used(
    model: Any, context: pyvmem.Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, inputs = on(context, model), prompts(3)
    want = stock(model, inputs)
    pages = watch(monkeypatch, "pages", lambda self, out: out)
    with vmem_continuous_batching(model, **options(context, max_batch=2, memory_limit=0)):
        assert answers(model, inputs, config(None, max_memory_percent=0.5)) == want
    assert all(free <= total for free, total in pages)
    assert max(total for _, total in pages) > 100 * 16  # more than `config`'s default budget


# ---- life ----------------------------------------------------------------------------------------


def test_a_cancelled_request_frees_its_slot(model: Any, context: pyvmem.Context) -> None:
    model = on(context, model)
    with vmem_continuous_batching(model, **options(context, max_batch=1)):
        manager = model.init_continuous_batching(generation(), config())
        manager.start()
        first = manager.add_request([1, 2, 3], max_new_tokens=400)
        while kvcache_of(manager) is None or not kvcache_of(manager).stats().active_slots:
            time.sleep(0.01)
        manager.cancel_request(first)
        manager.add_request([4, 5, 6], max_new_tokens=5)
        assert len(result(manager).generated_tokens) == 5
        manager.stop(block=True)


def test_a_persistent_manager(model: Any, context: pyvmem.Context) -> None:
    model, inputs = on(context, model), prompts(4)
    want = stock(model, inputs)
    with vmem_continuous_batching(model, **options(context)):
        for _ in range(2):
            found = model.generate_batch(
                inputs,
                generation_config=generation(),
                continuous_batching_config=config(),
                persistent_manager=True,
            )
            assert [one.generated_tokens for one in found.values()] == want
        with pytest.raises(InvalidArgument, match="still has a persistent"):
            install(model)
        model.destroy_cached_continuous_batching_manager()


def test_install_for_one_model_for_all_and_for_none(context: pyvmem.Context) -> None:
    mine, other = on(context, tiny_model(1).model), on(context, tiny_model(1).model)
    inputs = prompts(2)
    install(mine, **options(context))
    for model, ours in ((mine, True), (other, False)):
        manager = model.init_continuous_batching(generation(), config())
        assert (model.config._attn_implementation == "vmem") is ours
        manager.start()
        manager.add_request(inputs[0])
        assert result(manager).error is None
        assert (kvcache_of(manager) is not None) is ours
        manager.stop(block=True)
    uninstall(mine)
    uninstall(mine)
    install(**options(context, max_seq_len=20))
    with pytest.raises(InvalidArgument, match="exceed max_seq_len 20"):
        other.init_continuous_batching(generation(), config()).add_request([1] * 7)
    other.set_attn_implementation("sdpa")
    uninstall()


# ---- rejected or disabled options
# -----------------------------------------------------------------


def test_bad_options_change_nothing(model: Any, context: pyvmem.Context) -> None:
    for bad, match in (
        ({"max_batch": 0}, "max_batch is 0"),
        ({"max_seq_len": -3}, "max_seq_len is -3"),
        ({"kernel": "magic"}, "'magic'"),
        ({"num_layers": 3}, "num_layers is set by the layers"),
        ({"window": 3}, "window is set by the layers"),
        ({"page_size": 3000}, "page_size 3000 is not a power of two"),
        ({"max_batch": "many"}, "max_batch must be a whole number, not 'many'"),
        ({"pages": 3}, "'pages' is not an option"),
        ({"budget": 3}, "'budget' is not an option"),
        ({"backend": "nonsense"}, "backend 'nonsense' is not one of auto, "),
        ({"keep_windows": 5}, "keep_windows must be True or False, not 5"),
        ({"group_size": 1 << 13}, "group_size 8192 does not divide"),
    ):
        with pytest.raises(InvalidArgument, match=match):
            install(model, context=context, **bad)
    with pytest.raises(TypeError, match="context: expected Context or None, not 3"):
        install(model, context=3)  # type: ignore[arg-type]
    with (
        vmem_continuous_batching(model, **options(context, memory_limit=1)),
        pytest.raises(InvalidArgument, match="less than one page"),
    ):
        answers(on(context, model), [[1]])
    assert model.config._attn_implementation == "sdpa"


def test_a_manager_that_failed_to_start_restores_the_model(
    model: Any, context: pyvmem.Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = on(context, model)
    want = stock(model, [[1, 2, 3]])

    def full(*args: Any) -> None:
        raise OutOfMemory("no memory")

    with vmem_continuous_batching(model, **options(context)):
        manager = model.init_continuous_batching(generation(), config())
        with monkeypatch.context() as patch:
            patch.setattr(cb_common, "make_requests", full)
            with pytest.raises(OutOfMemory):
                manager.warmup()
        assert model.config._attn_implementation == "sdpa"
        manager.start()
        manager.add_request([1, 2, 3])
        assert [result(manager).generated_tokens] == want, "a second attempt must succeed"
        manager.stop(block=True)
        with pytest.raises(RuntimeError, match="a processor"), monkeypatch.context() as patch:
            patch.setattr(type(model), "_get_logits_processor", _no_processor)
            model.init_continuous_batching(generation(), config())
        assert model.config._attn_implementation == "sdpa"


def _no_processor(*args: Any) -> None:
    raise RuntimeError("a processor")


def test_other_versions_and_other_attention_are_rejected(
    model: Any, context: pyvmem.Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = copy.deepcopy(model.config)
    for name, value, text in (
        ("layer_types", ["full_attention", "linear_attention"], "kind linear_attention"),
        ("num_kv_shared_layers", 1, "1 of its layers use other layers' keys"),
        ("attn_logit_softcapping", 30.0, "scores are capped"),
    ):
        other = copy.copy(config)
        setattr(other, name, value)
        with pytest.raises(NotSupported, match=text):
            cb_options.check_model(other)
    monkeypatch.setattr(sys.modules["transformers"], "__version__", "6.1.0")
    with pytest.raises(NotSupported, match=r"transformers 6\.1\.0.*checked"):
        install(model, context=context)


def test_a_request_larger_than_a_slot_is_rejected(model: Any, context: pyvmem.Context) -> None:
    model = on(context, model)
    with vmem_continuous_batching(model, **options(context, max_seq_len=32)):
        manager = model.init_continuous_batching(generation(None), config())
        with pytest.raises(
            InvalidArgument, match="30 prompt tokens and 3 new tokens exceed max_seq_len 32"
        ):
            manager.add_request([1] * 30, max_new_tokens=3)
        with pytest.raises(InvalidArgument, match="33 prompt tokens and -100 new tokens"):
            manager.add_request([1] * 33, max_new_tokens=-100)
        with pytest.raises(InvalidArgument, match="the prompt is empty"):
            manager.add_request([])
        manager.start()
        manager.add_request([1] * 30, max_new_tokens=2)
        assert len(result(manager).generated_tokens) == 2
        manager.add_request([1] * 30)  # no limit, so it runs until the slot is full
        assert len(result(manager).generated_tokens) == 2
        manager.stop(block=True)


def test_only_the_request_that_exceeds_memory_fails(model: Any, context: pyvmem.Context) -> None:
    rows = 4 * context.info.granule // 192  # the number of rows that fit in memory
    if rows > 400:
        pytest.skip("pages hold more tokens than the model's longest sequence")
    model, limit = on(context, model), 4 * 4 * context.info.granule
    inputs = [[5] * 10, [7] * (rows - 5), [9] * 10]
    want = stock(model, [inputs[0], inputs[2]], config(), generation(6))
    with vmem_continuous_batching(model, **options(context, memory_limit=limit)):
        first, bad, last = model.generate_batch(
            inputs, generation_config=generation(6), continuous_batching_config=config()
        ).values()
        assert [first.generated_tokens, last.generated_tokens] == want
        assert f"{rows - 5} prompt tokens and 6 new tokens" in bad.error
        assert f"exceed the {rows} tokens" in bad.error
        manager = model.init_continuous_batching(generation(None), config())
        manager.start()
        manager.add_request([7] * (rows - 5))  # no limit, so it runs until memory is full
        assert len(result(manager).generated_tokens) == 5
        manager.stop(block=True)


def test_disabled_options_are_logged_once(
    model: Any, context: pyvmem.Context, caplog: pytest.LogCaptureFixture
) -> None:
    cb_options._warn_once.cache_clear()
    model, inputs = on(context, model), prompts(2)
    want = stock(model, inputs)
    asked = config(use_cuda_graph=True, use_async_batching=True, cpu_offload_space=0.5)
    with (
        vmem_continuous_batching(model, **options(context)),
        caplog.at_level(logging.WARNING, "pyvmem.hf"),
    ):
        assert answers(model, inputs, config()) == want, "no such option was requested"
        assert not [record for record in caplog.records if record.name == "pyvmem.hf"]
        for _ in range(2):
            assert answers(model, inputs, asked) == want
        manager = model.init_continuous_batching(generation(), asked)
        model.set_attn_implementation("sdpa")
    said = [record.getMessage() for record in caplog.records if record.name == "pyvmem.hf"]
    assert len(said) == 3
    for option, why, text in zip(
        ("use_cuda_graph=True", "use_async_batching=True", "cpu_offload_space=0.5"),
        ("lengths", "without CUDA graphs", "recomputed"),
        said,
        strict=True,
    ):
        assert text.startswith(f"ContinuousBatchingConfig.{option} is switched off over virtual")
        assert why in text
    resolved = manager.continuous_batching_config
    assert not any(resolved.cuda_graph_booleans)
    assert not resolved.use_async_batching
    assert resolved.cpu_offload_space == 0
    assert asked.use_cuda_graph is True  # the caller's own object is unchanged


def test_our_attention_elsewhere_is_an_error(model: Any, context: pyvmem.Context) -> None:
    model = on(context, model)
    with vmem_continuous_batching(model, **options(context)):
        model.set_attn_implementation("vmem")
        with pytest.raises(NotSupported, match="only in continuous batching"):
            model(torch.tensor([[1, 2]], device=model.device))
        model.set_attn_implementation("sdpa")


def test_attention_that_is_more_than_causal_is_an_error(context: pyvmem.Context) -> None:
    with vmem_continuous_batching(**options(context)):
        from pyvmem.hf import cb_manager

        cache = object.__new__(cb_manager._slot_cache)
        rows = torch.zeros(1, 2, 3, 4)
        for name in ("softcap", "s_aux"):
            with pytest.raises(NotSupported, match=name):
                cb_manager._attention(
                    torch.nn.Identity(), rows, rows, rows, None, cache=cache, **{name: 2}
                )
