# SPDX-License-Identifier: MIT
"""VMemCache behaves exactly like DynamicCache, on random models and operations."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import random
import warnings
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="the extra 'serve' is not installed")

from serve_helpers import VOCABULARY, one_thread, tiny_model
from transformers import DynamicCache, LlamaConfig, MistralConfig, MistralForCausalLM

import pyvmem
from pyvmem import BadHandle, Busy, InvalidArgument, NotSupported, OutOfMemory
from pyvmem.hf import VMemCache, cb_options
from pyvmem.hf.ancestry import Ancestry
from pyvmem.hf.keyword import CACHE
from pyvmem.hf.rows import move_rows
from pyvmem.kvcache import Budget

__all__ = ["one_thread"]
pytestmark = pytest.mark.needs_tensors

LAYERS, HEADS, DIM = 3, 2, 24


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_model(LAYERS).model


def device_of(context: pyvmem.Context) -> torch.device:
    ordinal = context.cuda_device
    return torch.device("cpu") if ordinal is None else torch.device("cuda", ordinal)


def make(
    context: pyvmem.Context, config: Any, rows: int = 12, length: int = 96, **more: Any
) -> Any:
    return VMemCache(config, rows, length, context=context, **more)


def prompts(rows: int, length: int, device: torch.device) -> dict[str, torch.Tensor]:
    """Returns left-padded prompts, as in a batch of different lengths."""
    dice = torch.Generator().manual_seed(5)
    ids = torch.randint(1, VOCABULARY, (rows, length), generator=dice)
    mask = torch.ones_like(ids)
    for row in range(rows):
        mask[row, : 3 * row] = 0
    return {"input_ids": (ids * mask).to(device), "attention_mask": mask.to(device)}


# ---- generate ------------------------------------------------------------------------------------

WAYS: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "sampling": {"do_sample": True, "temperature": 1.3, "top_k": 20},
    "parallel": {"do_sample": True, "num_return_sequences": 3},
    "beams": {"do_sample": False, "num_beams": 4, "num_return_sequences": 2},
    "beam sampling": {"do_sample": True, "num_beams": 3},
}


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_generate_matches_dynamic_cache(
    model: Any, context: pyvmem.Context, attention: str
) -> None:
    device = device_of(context)
    model = model.to(device)
    inputs = prompts(3, 13, device)
    model.set_attn_implementation(attention)
    try:
        for way in WAYS.values() if attention == "sdpa" else [WAYS["greedy"], WAYS["beams"]]:
            answers = []
            with make(context, model.config) as cache:
                for past in (DynamicCache(config=model.config), cache):
                    torch.manual_seed(11)
                    run = {"max_new_tokens": 24, "pad_token_id": 0, **way}
                    answers.append(model.generate(**inputs, **{CACHE: past}, **run))
                assert cache.kvcache.stats().grown_pages > 0
                cache.kvcache.check_integrity()
            assert torch.equal(*answers), way
            assert answers[0].shape[1] == 13 + 24
    finally:
        model.set_attn_implementation("sdpa")
        model.to("cpu")


def test_a_second_turn_continues_and_reset_starts_over(model: Any, host: pyvmem.Context) -> None:
    inputs = prompts(2, 9, torch.device("cpu"))
    dynamic = DynamicCache(config=model.config)
    with make(host, model.config) as cache:
        for _ in range(2):
            cache.reset()
            assert cache.get_seq_length() == 0
            dynamic = DynamicCache(config=model.config)
            turn = dict(inputs)
            for _ in range(3):
                want = model.generate(**turn, **{CACHE: dynamic}, max_new_tokens=6, do_sample=False)
                got = model.generate(**turn, **{CACHE: cache}, max_new_tokens=6, do_sample=False)
                assert torch.equal(got, want)
                more = torch.full((2, 2), 7)
                ids = torch.cat([got, more], 1)
                mask = torch.cat(
                    [inputs["attention_mask"], torch.ones(2, ids.shape[1] - 9, dtype=torch.long)], 1
                )
                turn = {"input_ids": ids, "attention_mask": mask}


def test_a_sliding_window_slides(host: pyvmem.Context) -> None:
    torch.manual_seed(2)
    config = MistralConfig(
        vocab_size=VOCABULARY,
        hidden_size=48,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=12,
        sliding_window=8,
        eos_token_id=None,
        initializer_range=0.4,
    )
    model = MistralForCausalLM(config).eval()
    inputs = prompts(2, 14, torch.device("cpu"))
    run = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    want = model.generate(**inputs, **run, **{CACHE: DynamicCache(config=config)})
    with make(host, config) as cache:
        assert torch.equal(model.generate(**inputs, **run, **{CACHE: cache}), want)


def test_a_cache_is_not_pickled(model: Any, host: pyvmem.Context) -> None:
    with VMemCache(model.config, 1, 64, context=host) as cache:
        with pytest.raises(TypeError, match="have a single owner"):
            pickle.dumps(cache)
        with pytest.raises(TypeError, match="have a single owner"):
            torch.save(cache, io.BytesIO())


def test_assisted_generation_crops(model: Any, host: pyvmem.Context) -> None:
    assistant = tiny_model(1).model
    ids = prompts(1, 10, torch.device("cpu"))["input_ids"]
    run = {"max_new_tokens": 20, "do_sample": False, "pad_token_id": 0}
    want = model.generate(ids, **run)
    with make(host, model.config) as cache:
        got = model.generate(ids, **run, assistant_model=assistant, **{CACHE: cache})
        assert torch.equal(got, want)


# ---- every operation, compared with DynamicCache
# --------------------------------------------------


class Pair:
    """Performs the same random operations on a VMemCache and a DynamicCache; compares the two."""

    def __init__(self, config: Any, cache: Any, device: torch.device, seed: int) -> None:
        self.dynamic, self.cache = DynamicCache(config=config), cache
        self.device, self.dice = device, random.Random(seed)
        self.noise = torch.Generator().manual_seed(seed)
        self.batch = 0

    def update(self, new: int) -> None:
        batch = self.batch = self.batch or self.dice.randint(1, 4)
        for layer in range(LAYERS):
            states = [
                torch.randn(batch, HEADS, new, DIM, generator=self.noise).to(self.device)
                for _ in range(2)
            ]
            got = self.cache.update(*states, layer)
            want = self.dynamic.update(*states, layer)
            assert torch.equal(got[0], want[0])
            assert torch.equal(got[1], want[1])

    def both(self, name: str, *arguments: Any) -> None:
        for cache in (self.dynamic, self.cache):
            getattr(cache, name)(*arguments)

    def any_operation(self) -> None:
        pick, length = self.dice.random(), self.cache.get_seq_length()
        if pick < 0.5 or not self.batch:
            self.update(min(self.dice.choice((1, 1, 2, 9)), 96 - length))
        elif pick < 0.6 and length > 1:
            self.both("crop", -self.dice.randint(0, length - 1))
        elif pick < 0.72:
            order = [self.dice.randrange(self.batch) for _ in range(self.batch)]
            self.both("reorder_cache", torch.tensor(order, device=self.device))
        elif pick < 0.82:
            kept = [self.dice.randrange(self.batch) for _ in range(self.dice.randint(1, 5))]
            self.both("batch_select_indices", torch.tensor(kept, device=self.device))
            self.batch = len(kept)
        elif pick < 0.88:
            kept_mask = torch.zeros(self.batch, dtype=torch.bool, device=self.device)
            kept_mask[self.dice.randrange(self.batch)] = True
            self.both("batch_select_indices", kept_mask)
            self.batch = 1
        elif pick < 0.96 and self.batch <= 4:
            repeats = self.dice.randint(1, 3)
            self.both("batch_repeat_interleave", repeats)
            self.batch *= repeats
        elif pick >= 0.96:
            self.both("reset")
            self.batch = 0
            # In transformers 5.17, DynamicCache holds zeros after `reset`, so use a new one.
            self.dynamic = DynamicCache(config=self.cache._config)

    def check(self) -> None:
        assert self.cache.get_seq_length() == self.dynamic.get_seq_length()
        assert self.cache.get_mask_sizes(3, 0) == self.dynamic.get_mask_sizes(3, 0)
        assert self.cache.batch_size == (self.batch or -1)
        for mine, its in zip(self.cache.layers, self.dynamic.layers, strict=True):
            if self.batch:
                assert torch.equal(mine.keys, its.keys)
                assert torch.equal(mine.values, its.values)
        if self.cache.kvcache is not None:
            self.cache.kvcache.check_integrity()
            assert self.cache.kvcache.stats().active_slots == self.batch


def test_random_operations_match_dynamic_cache(model: Any, context: pyvmem.Context) -> None:
    for seed in range(4):
        with make(context, model.config) as cache:
            pair = Pair(model.config, cache, device_of(context), seed)
            for _ in range(80):
                pair.any_operation()
                pair.check()
            del pair


def test_a_reorder_copies_only_rows_that_differ() -> None:
    """Compares a reorder by ancestry with a copy of whole rows, token by token."""
    dice = random.Random(8)
    tokens = iter(range(10**6))
    for _ in range(30):
        rows = [[next(tokens) for _ in range(3)] for _ in range(3)]
        ancestry = Ancestry(len(rows))
        for _ in range(40):
            pick, length = dice.random(), len(rows[0])
            if pick < 0.5:
                rows = [[*row, next(tokens)] for row in rows]
            elif pick < 0.6:
                ancestry.crop(length := dice.randrange(length + 1))
                rows = [row[:length] for row in rows]
            else:
                source = [dice.randrange(len(rows)) for _ in range(dice.randint(1, 5))]
                first = ancestry.take(source, length)
                before = [*rows, *([[]] * len(source))]
                for new, old in enumerate(source):
                    assert before[new][:first] == rows[old][:first] or new == old
                moved = [(before[new], rows[old]) for new, old in enumerate(source) if new != old]
                assert first == length or any(a[: first + 1] != b[: first + 1] for a, b in moved)
                rows = [list(rows[old]) for old in source]


def test_beams_copy_rows_after_their_last_common_token(
    model: Any, host: pyvmem.Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    copied = []

    def counting(rows: torch.Tensor, first: int, last: int, source: list[int]) -> None:
        copied.append(last - first)
        move_rows(rows, first, last, source)

    monkeypatch.setattr("pyvmem.hf.layer.move_rows", counting)
    states = torch.randn(2, HEADS, 50, DIM)
    with make(host, model.config) as cache:
        for layer in range(LAYERS):
            cache.update(states, states, layer)
        for order, tokens in (([0, 0], 50), ([1, 1], 1), ([1, 0], 1), ([1, 1], 2), ([0, 1], 0)):
            cache.reorder_cache(torch.tensor(order))
            assert copied == [tokens] * 2 * LAYERS
            copied.clear()
            for layer in range(LAYERS):
                cache.update(states[:, :, :1], states[:, :, :1], layer)


def test_flags_and_sizes(model: Any, host: pyvmem.Context) -> None:
    with make(host, model.config, 2, 50) as cache:
        assert len(cache) == LAYERS
        assert (cache.is_compileable, cache.is_croppable, cache.is_initialized) == (
            False,
            True,
            False,
        )
        assert cache.is_sliding == [False] * LAYERS
        assert cache.batch_size == -1
        assert cache.get_max_length() == cache.get_max_length(1) == 50
        cache.early_initialization(2, HEADS, DIM, torch.float32, torch.device("cpu"))
        assert cache.is_initialized
        assert (cache.batch_size, cache.get_seq_length()) == (2, 0)
        assert cache.kvcache.stats().active_slots == 2
        states = torch.ones(2, HEADS, 5, DIM)
        assert cache.update(states, states, 0)[0].shape == (2, HEADS, 5, DIM)
        assert (cache.get_seq_length(0), cache.get_seq_length(1)) == (5, 0)


def test_the_past_is_never_copied(model: Any, host: pyvmem.Context) -> None:
    """`update` returns the slots' own memory, whose address never changes."""
    with make(host, model.config) as cache:
        states = torch.ones(2, HEADS, 1, DIM)
        places = set()
        for _ in range(40):
            keys, values = cache.update(states, states, 1)
            places.add((keys.data_ptr(), values.data_ptr()))
        assert places == {(cache.kvcache.k(1).data_ptr(), cache.kvcache.v(1).data_ptr())}
        # one step when the slots are allocated, then one per token
        assert cache.kvcache.stats().steps == 41
        del keys, values


def test_a_deep_copy_has_its_own_memory(model: Any, host: pyvmem.Context) -> None:
    with make(host, model.config) as cache:
        states = torch.randn(2, HEADS, 7, DIM)
        for layer in range(LAYERS):
            cache.update(states, -states, layer)
        with copy.deepcopy(cache) as other:
            for layer in range(LAYERS):
                other.update(states, states, layer)
            other.layers[0].keys[:, :, :7].zero_()
            assert torch.equal(cache.layers[0].keys, states)
            assert torch.equal(other.layers[1].values, torch.cat([-states, states], 2))


# ---- memory, close, errors -----------------------------------------------------------------------


def test_the_cache_continues_after_out_of_memory(model: Any, host: pyvmem.Context) -> None:
    limit = 4 * 2 * LAYERS * 4096  # four pages of 21 tokens in every tensor
    with make(host, model.config, 4, 96, memory_limit=limit) as cache:
        states = torch.ones(2, HEADS, 42, DIM)
        cache.update(states, states, 0)
        with pytest.raises(OutOfMemory, match="2 rows of 43 tokens need 36 pages"):
            cache.update(states[:, :, :1], states[:, :, :1], 0)
        with pytest.raises(OutOfMemory, match="4 rows of 42 tokens"):
            cache.batch_repeat_interleave(2)
        assert (cache.get_seq_length(), cache.batch_size) == (42, 2)
        cache.kvcache.check_integrity()
        cache.crop(-40)
        cache.update(states[:, :, :1], states[:, :, :1], 0)
        assert bool((cache.layers[0].keys == 1).all())


def test_limits_are_plain_numbers(model: Any, host: pyvmem.Context) -> None:
    with VMemCache(model.config, torch.tensor(2), torch.tensor(64), context=host) as cache:
        states = torch.zeros(1, HEADS, 5, DIM)
        cache.update(states, states, 0)
        assert repr(cache.layers[0].get_max_length()) == "64"
        assert cache.kvcache is not None
        assert repr(cache.kvcache.config.max_batch) == "2"
    options = cb_options.Options(max_batch=torch.tensor(3), keep_windows=1)  # type: ignore[arg-type]
    assert repr((options.max_batch, options.keep_windows)) == "(3, True)"


def test_errors_name_the_bad_input(model: Any, host: pyvmem.Context) -> None:
    states = torch.ones(2, HEADS, 5, DIM)
    for rows, length, name in ((0, 9, "max_batch_size is 0"), (2, -1, "max_cache_len is -1")):
        with pytest.raises(InvalidArgument, match=name):
            VMemCache(model.config, rows, length)
    with make(host, model.config, 2, 8) as cache:
        with pytest.raises(InvalidArgument, match=r"a batch of 3 rows; .* max_batch_size 2"):
            cache.update(torch.ones(3, HEADS, 1, DIM), torch.ones(3, HEADS, 1, DIM), 0)
        cache.update(states, states, 0)
        with pytest.raises(InvalidArgument, match=r"10 tokens; .* max_cache_len 8"):
            cache.update(states, states, 0)
        with pytest.raises(InvalidArgument, match="a batch of 1 rows; layer 0 has 2"):
            cache.update(states[:1], states[:1], 0)
        with pytest.raises(InvalidArgument, match="keys of 1 heads of 24 elements"):
            cache.update(states[:, :1], states[:, :1], 1)
        with pytest.raises(
            InvalidArgument, match=r"of 24 elements and values of 12, .* 2 heads of 24 and 24"
        ):
            cache.update(states, states[..., :12], 1)
        with pytest.raises(InvalidArgument, match=r"layer 0: keys of 2 heads of 24 .*bfloat16 on"):
            cache.update(states.bfloat16(), states.bfloat16(), 0)
        with pytest.raises(InvalidArgument, match="layer 0: keys of 1 heads of 24 elements"):
            cache.update(states[:, :1], states[:, :1], 0)
        with pytest.raises(InvalidArgument, match=r"24 elements and values of 12, .* and 24"):
            cache.update(states, states[..., :12], 0)
        with pytest.raises(ValueError, match=r"crop\(3\)"):
            cache.crop(3)
        with pytest.raises(InvalidArgument, match="row 2 is not between 0 and 1"):
            cache.reorder_cache(torch.tensor([0, 2]))
        with pytest.raises(InvalidArgument, match=r"rows \[0, 7\] of a batch of 2: index 7 is out"):
            cache.batch_select_indices(torch.tensor([0, 7]))
        with pytest.raises(InvalidArgument, match="no rows remain"):
            cache.batch_select_indices(torch.tensor([], dtype=torch.long))
        with pytest.raises(InvalidArgument, match=rf"a batch of {2 << 40} rows; .* 2"):
            cache.batch_repeat_interleave(1 << 40)
        for name in ("offload", "prefetch"):
            with pytest.raises(NotSupported, match="does not support offloading"):
                getattr(cache.layers[0], name)()
        assert (cache.get_seq_length(), cache.get_seq_length(1)) == (5, 0)
        cache.kvcache.check_integrity()


@pytest.mark.parametrize(
    ("option", "text"),
    [
        ({"wrong": 1}, r"'wrong' is not an option; options: ahead_tokens, .*, zero_fill$"),
        ({"max_batch": 4}, "'max_batch' is not an option"),
        ({"dtype": "float16"}, "'dtype' is not an option"),
        ({"window": 8}, "window is set by the layers"),
        ({"page_size": 3000}, "page_size 3000 is not a power of two"),
        ({"group_size": 0}, "group_size is 0; it must be between 1 and"),
        ({"memory_limit": "much"}, "memory_limit must be a whole number, not 'much'"),
        ({"low_watermark": float("nan")}, "low_watermark is nan"),
        ({"group_size": 2}, "group_size 2 does not divide 3 layers"),
        ({"backend": "nonsense"}, "backend 'nonsense' is not one of auto, .*host"),
        ({"memory_floor": 1 << 20}, "memory_floor 1048576: the cache has no budget"),
    ],
    ids=str,
)
def test_options_are_checked_before_the_first_keys(model: Any, option: Any, text: str) -> None:
    with pytest.raises(InvalidArgument, match=text):
        VMemCache(model.config, 2, 8, **option)


@pytest.mark.parametrize("name", ["backend", "context", "budget"])
def test_arguments_are_checked_before_the_first_keys(model: Any, name: str) -> None:
    with pytest.raises(TypeError, match=f"{name}: expected .* or None, not 4"):
        VMemCache(model.config, 2, 8, **{name: 4})


def test_a_group_divides_the_layers_of_each_class() -> None:
    config = MistralConfig(num_hidden_layers=4, num_attention_heads=2, num_key_value_heads=2)
    config.layer_types = ["full_attention", *["sliding_attention"] * 3]
    with pytest.raises(InvalidArgument, match="group_size 3 does not divide 1 and 3 layers") as got:
        VMemCache(config, 2, 8, group_size=3)
    assert got.value.limit == 1
    config.layer_types = ["full_attention", "sliding_attention"] * 2
    VMemCache(config, 2, 8, group_size=2).close()


def test_a_budget_must_belong_to_the_context(model: Any, context: pyvmem.Context) -> None:
    with (
        pyvmem.Context("host") as other,
        Budget(other, 1 << 20) as budget,
        pytest.raises(InvalidArgument, match="is not the budget's context"),
    ):
        VMemCache(model.config, 2, 8, context=context, budget=budget)


@pytest.mark.parametrize("size", ["many", 2.0, None, 1 << 31])
def test_invalid_sizes(model: Any, size: Any) -> None:
    with pytest.raises(InvalidArgument, match="max_batch_size"):
        VMemCache(model.config, size, 8)
    with pytest.raises(InvalidArgument, match="max_cache_len"):
        VMemCache(model.config, 2, size)


def test_models_with_other_layers_are_rejected() -> None:
    config = LlamaConfig(num_hidden_layers=2)
    config.layer_types = ["full_attention", "linear_attention"]
    with pytest.raises(InvalidArgument, match="layer 1 is linear_attention: the state's"):
        VMemCache(config, 1, 8)
    config.layer_types = ["full_attention", "hybrid"]
    with pytest.raises(NotSupported, match="layers of kind hybrid"):
        VMemCache(config, 1, 8)
    with pytest.raises(NotSupported, match="an encoder"):
        VMemCache(LlamaConfig(num_hidden_layers=2, is_encoder_decoder=True), 1, 8)


def test_keys_for_a_layer_without_storage_are_rejected(model: Any, host: pyvmem.Context) -> None:
    """According to the configuration, the last layer reuses another layer's keys, but the model
    passes keys to it.
    """
    config = copy.deepcopy(model.config)
    config.num_kv_shared_layers = 1
    last, ids = config.num_hidden_layers - 1, torch.tensor([[1, 2, 3]])
    with (
        make(host, config) as cache,
        pytest.raises(InvalidArgument, match=f"layer {last} received keys, but stores nothing"),
    ):
        model(ids, **{CACHE: cache})


def test_memory_is_freed_by_close_and_by_collection(model: Any, host: pyvmem.Context) -> None:
    states = torch.ones(2, HEADS, 5, DIM)
    cache = make(host, model.config)
    keys, values = cache.update(states, states, 0)
    assert host.stats().used_bytes > 0
    with pytest.raises(Busy):
        cache.close()
    del keys, values
    cache.close()
    cache.close()
    assert host.stats().used_bytes == 0
    with pytest.raises(BadHandle, match="the VMemCache is closed"):
        cache.update(states, states, 0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cache = make(host, model.config)
        cache.update(states, states, 0)
        del cache
        gc.collect()
    assert host.stats().used_bytes == 0


def test_rows_count_once_their_pages_are_mapped(
    context: pyvmem.Context, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If a second Ctrl-C interrupts the cleanup after the first, every counted row must still have
    its pages.
    """

    def stopped(*_: Any) -> None:
        raise KeyboardInterrupt

    config = model.config
    shape = (2, config.num_key_value_heads, 5, config.head_dim)
    new = torch.ones(shape, device=device_of(context))
    with make(context, config) as cache:
        layer = cache.layers[0]
        cache.update(new, new, 0)
        rows = layer._rows
        with monkeypatch.context() as patch:
            patch.setattr(type(rows.cache), "step", stopped)
            patch.setattr(rows, "_drop", stopped)
            with pytest.raises(KeyboardInterrupt):
                layer.batch_repeat_interleave(2)
        assert rows.count == 2
        layer.batch_repeat_interleave(2)
        assert layer.keys.shape[0] == 4
        assert bool((layer.keys == 1).all())
