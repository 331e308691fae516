# SPDX-License-Identifier: MIT
"""Tests KVCacheConfig and the layout: defaults, limits and errors, mostly without a cache."""

from __future__ import annotations

from dataclasses import FrozenInstanceError
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from kvcache_helpers import small_config

from pyvmem import Context, InvalidArgument, KVCache, KVCacheConfig
from pyvmem.kvcache import StateShape
from pyvmem.kvcache.layout import Layout

GOOD: dict[str, Any] = {"num_layers": 4, "num_kv_heads": 2, "head_dim": 64}


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"num_layers": 0}, "num_layers is 0; it must be between 1 and 16384"),
        ({"num_layers": -3}, "num_layers is -3"),
        ({"num_layers": 2.5}, "num_layers must be a whole number, not 2.5"),
        ({"num_kv_heads": 10**9}, "num_kv_heads is 1000000000; it must be between 1 and 65536"),
        ({"num_kv_heads": 0}, "num_kv_heads is 0"),
        ({"head_dim": 1 << 62}, "head_dim is 4611686018427387904"),
        ({"page_size": "64K"}, "page_size must be a whole number, not '64K': write 65536"),
        ({"dtype": "fp16"}, "dtype 'fp16' is not one of float64, float32, float16, bfloat16"),
        ({"head_dim": None}, "head_dim must be a whole number, not None"),
        ({"dtype": "float3"}, "dtype 'float3' is not one of float64, float32"),
        ({"dtype": torch.complex64}, "dtype 'complex64' is not one of"),
        ({"dtype": None}, "dtype 'None'"),
        ({"max_batch": 0}, "max_batch is 0; it must be between 1 and 65536"),
        ({"max_seq_len": 0}, "max_seq_len is 0"),
        ({"max_seq_len": 1 << 40}, "max_seq_len is 1099511627776; it must be between 1 and"),
        ({"group_size": 3}, "group_size 3 does not divide num_layers 4"),
        ({"group_size": 0}, "group_size is 0"),
        ({"group_size": 8}, "group_size 8 does not divide num_layers 4"),
        ({"page_size": 5000}, "page_size 5000 is not a power of two"),
        ({"page_size": -4096}, "page_size is -4096"),
        ({"memory_limit": -1}, "memory_limit is -1"),
        ({"low_watermark": 1.5}, "low_watermark is 1.5; it must be between 0 and 1"),
        ({"low_watermark": float("nan")}, "low_watermark is nan"),
        ({"low_watermark": "much"}, "low_watermark must be a number, not 'much'"),
        ({"low_watermark": "0.5"}, "low_watermark must be a number, not '0.5'"),
        ({"growth_fraction": b"0.5"}, "growth_fraction must be a number, not b'0.5'"),
        ({"join_at": 10**400}, "join_at is an int of 1329 bits; it must be between 0 and 1"),
        ({"idle_seconds": -(10**5000)}, "idle_seconds is an int of 16610 bits; it must be"),
        ({"idle_seconds": torch.zeros(2)}, "idle_seconds must be a number, not tensor([0., 0.])"),
        ({"max_batch": 10**5000}, "max_batch is an int of 16610 bits; it must be between 1 and"),
        ({"head_dim": [10**5000]}, "head_dim must be a whole number, not a list that is too long"),
        ({"zero_fill": 10**5000}, "zero_fill must be True or False, not an int of 16610 bits"),
        ({"overread_rows": -1}, "overread_rows is -1"),
        ({"eager_pages": -1}, "eager_pages is -1"),
        ({"reclaim_steps": -1}, "reclaim_steps is -1"),
    ],
)
def test_absurd_parameters(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        KVCacheConfig(**{**GOOD, **changes})
    assert str(caught.value).startswith(text) or text in str(caught.value)
    assert isinstance(caught.value, ValueError)
    assert caught.value.errno_name == "EINVAL"


def test_defaults_and_types() -> None:
    config = KVCacheConfig(**GOOD, dtype=torch.bfloat16)
    assert config.dtype == "bfloat16"
    assert config.itemsize == 2
    assert (config.zero_fill, config.deferred_reclaim, config.group_size) == (True, True, 1)
    assert config == KVCacheConfig(**GOOD, dtype="bfloat16")
    compacts = [KVCacheConfig(**GOOD, idle_compact=value).idle_compact for value in (0, 1, None)]
    assert [*map(repr, compacts)] == ["False", "True", "None"]
    with pytest.raises(FrozenInstanceError):
        config.num_layers = 5  # type: ignore[misc]


# ---- against a context --------------------------------------------------------------------------


def test_an_unsupported_page_size(context: Context) -> None:
    size = context.info.granule // 2
    before = context.stats()
    with pytest.raises(
        InvalidArgument, match=f"page_size must be one of this context's .*, not {size}"
    ):
        KVCache(small_config(context.info.granule, page_size=size), context)
    assert context.stats() == before


def test_a_memory_limit_below_one_page_in_every_tensor(context: Context) -> None:
    page = context.info.granule
    before = context.stats()
    with pytest.raises(InvalidArgument, match="is less than one page of") as caught:
        KVCache(small_config(page, memory_limit=4 * page - 1), context)
    assert caught.value.limit == 4 * page
    assert context.stats() == before
    KVCache(small_config(page, memory_limit=4 * page), context).close()


def test_more_addresses_than_a_process_has(context: Context) -> None:
    before = context.stats()
    with pytest.raises(InvalidArgument, match="bytes of address space; a process has") as caught:
        KVCache(
            KVCacheConfig(1 << 14, 1 << 16, 1 << 16, "float64", 1 << 16, 1 << 30, group_size=1),
            context,
        )
    assert caught.value.bytes > caught.value.limit == 1 << 47
    assert context.stats() == before


def test_without_a_memory_limit_all_free_memory_is_used(context: Context) -> None:
    with KVCache(small_config(context.info.granule, memory_limit=0), context) as cache:
        assert cache.stats().total_pages == 4 * 6 * 4, (
            "all that the slots can hold, if that much is free"
        )


# ---- from a model -------------------------------------------------------------------------------


def _model(**attributes: Any) -> SimpleNamespace:
    values = {
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "hidden_size": 576,
        "head_dim": 64,
        "dtype": torch.float16,
        "max_position_embeddings": 8192,
    }
    return SimpleNamespace(**{**values, **attributes})


def test_from_hf() -> None:
    config = KVCacheConfig.from_hf(_model(), max_batch=8, group_size=30)
    assert config == KVCacheConfig(
        30, 3, 64, "float16", max_batch=8, max_seq_len=8192, group_size=30
    )
    assert KVCacheConfig.from_hf(_model(), dtype="float32", max_seq_len=100).max_seq_len == 100
    assert KVCacheConfig.from_hf(_model(), dtype="float32").itemsize == 4


def test_from_hf_with_missing_fields() -> None:
    model = _model(num_key_value_heads=None, head_dim=None)
    config = KVCacheConfig.from_hf(model)
    assert (config.num_kv_heads, config.head_dim) == (9, 64)
    old = SimpleNamespace(
        n_layer=12, n_head=12, n_embd=768, torch_dtype="float32", n_positions=1024
    )
    config = KVCacheConfig.from_hf(old)
    assert config == KVCacheConfig(12, 12, 64, "float32", max_seq_len=1024)


def test_from_hf_uses_the_text_config() -> None:
    whole = SimpleNamespace(get_text_config=lambda: _model(num_hidden_layers=7))
    assert KVCacheConfig.from_hf(whole).num_layers == 7


@pytest.mark.parametrize(
    ("attributes", "text"),
    [
        ({"num_hidden_layers": None}, "no num_hidden_layers or n_layer; pass num_layers"),
        ({"dtype": None}, "no dtype or torch_dtype; pass dtype"),
        ({"head_dim": None, "hidden_size": 577}, "hidden size 577 is not a multiple of 9 heads"),
        ({"head_dim": None, "num_attention_heads": 0}, "not a multiple of 0 heads"),
    ],
)
def test_from_hf_without_required_fields(attributes: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidArgument, match=text):
        KVCacheConfig.from_hf(_model(**attributes))


def test_from_a_real_transformers_config() -> None:
    transformers = pytest.importorskip("transformers")
    model = transformers.LlamaConfig(
        num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, hidden_size=128
    )
    config = KVCacheConfig.from_hf(model, dtype="float32")
    assert (config.num_layers, config.num_kv_heads, config.head_dim) == (2, 2, 32)
    assert config.max_seq_len == model.max_position_embeddings


# ---- layout -------------------------------------------------------------------------------------

SHAPES = st.fixed_dictionaries(
    {
        "num_kv_heads": st.integers(1, 40),
        "head_dim": st.integers(1, 300),
        "dtype": st.sampled_from(["float32", "bfloat16", "int8"]),
        "max_batch": st.integers(1, 300),
        "max_seq_len": st.integers(1, 20000),
        "overread_rows": st.sampled_from([0, 1, 191]),
        "overread_decode": st.booleans(),
    }
)


@given(shape=SHAPES, log_page=st.integers(12, 21), groups=st.integers(1, 5), size=st.integers(1, 4))
def test_layout(shape: dict[str, Any], log_page: int, groups: int, size: int) -> None:
    page = 1 << log_page
    config = KVCacheConfig(num_layers=groups * size, group_size=size, page_size=page, **shape)
    layout = Layout(config, page)
    rows = config.max_seq_len
    assert layout.row_bytes == size * config.num_kv_heads * config.head_dim * config.itemsize
    assert layout.slot_bytes % page == 0
    assert rows * layout.row_bytes <= layout.slot_pages * page <= layout.slot_bytes
    assert (layout.slot_pages - 1) * page < rows * layout.row_bytes
    assert layout.slot_bytes <= layout.slot_pages * page * 9 // 8
    assert layout.total_bytes == 2 * groups * config.max_batch * layout.slot_bytes
    last = config.max_batch - 1
    end = layout.offset(last, layout.slot_pages, 2 * groups - 1)
    assert end <= layout.total_bytes
    assert layout.offset(0, 0, 1) == config.max_batch * layout.slot_bytes


@given(
    shape=SHAPES, log_page=st.integers(12, 21), length=st.integers(0, 20000), pages=st.integers(0)
)
def test_pages_and_capacity_agree(
    shape: dict[str, Any], log_page: int, length: int, pages: int
) -> None:
    config = KVCacheConfig(num_layers=1, **shape)
    layout = Layout(config, 1 << log_page)
    assume(length <= config.max_seq_len)
    need = layout.pages_for(length)
    behind = config.overread_rows if config.overread_decode else 0
    covered = min(length + behind, config.max_seq_len) if length else 0
    assert need * layout.page_size >= covered * layout.row_bytes
    assert need == 0 or (need - 1) * layout.page_size < covered * layout.row_bytes
    assert layout.capacity(need) >= length
    for held in (0, max(0, length - 17), max(0, length - 16)):
        step = layout.pages_for_step(held, length)
        prefill = config.overread_decode or length - held > 16
        covered = min(length + prefill * config.overread_rows, config.max_seq_len) if length else 0
        assert step == -(-covered * layout.row_bytes // layout.page_size)
    assert layout.capacity(0) == 0
    pages = pages % (layout.slot_pages + 1)
    longest = layout.capacity(pages)
    assert layout.pages_for(longest) <= pages
    assert longest == config.max_seq_len or layout.pages_for(longest + 1) > pages


def test_slots_are_aligned_for_big_pages_where_it_is_cheap() -> None:
    many = Layout(KVCacheConfig(1, 8, 128, "float16", max_seq_len=32001), 64 << 10)
    assert many.slot_bytes % (2 << 20) == 0
    few = Layout(KVCacheConfig(1, 1, 64, "float16", max_seq_len=512), 64 << 10)
    assert few.slot_bytes == 64 << 10


@given(log_page=st.integers(12, 21), pages=st.integers(1, 600), groups=st.integers(1, 3))
def test_packed_slots_have_no_gap(log_page: int, pages: int, groups: int) -> None:
    page = 1 << log_page
    config = KVCacheConfig(
        num_layers=2 * groups,
        num_kv_heads=2,
        head_dim=64,
        dtype="float32",
        group_size=2,
        max_seq_len=pages * page // 1024,
        packed_slots=True,
    )
    layout = Layout(config, page)
    assert layout.slot_bytes == config.max_seq_len * layout.row_bytes == pages * page
    assert layout.tensor_bytes == config.max_batch * layout.slot_bytes


def test_packed_slots_must_be_whole_pages(context: Context) -> None:
    page = context.info.granule
    before = context.stats()
    with pytest.raises(InvalidArgument, match=rf"not a multiple of page_size {page}"):
        KVCache(small_config(page, max_seq_len=12, packed_slots=True), context)
    assert context.stats() == before


@pytest.mark.needs_tensors
def test_tensors_of_packed_slots_are_contiguous(context: Context) -> None:
    page = context.info.granule
    # one page short of 16 MiB, because larger slots are aligned to 16 MiB
    rows = 8 * ((16 << 20) // page - 1)
    for packed in (False, True):
        config = small_config(page, max_seq_len=rows, packed_slots=packed)
        with KVCache(config, context) as cache:
            assert cache.tensors[0].is_contiguous() == (packed or page >= 2 << 20)
            assert cache.step([0] * config.max_batch) == 0


@pytest.mark.parametrize("name", ["zero_fill", "sparse", "state", "idle_compact", "keep_mapped"])
@pytest.mark.parametrize("value", ["off", 2, 0.5, []])
def test_a_switch_is_on_or_off(name: str, value: Any) -> None:
    with pytest.raises(InvalidArgument, match=f"{name} must be True or False, not"):
        KVCacheConfig(2, 2, 8, **{name: value})


@pytest.mark.parametrize("value", [None, 3, 1.5])
def test_a_state_of_no_sizes(value: Any) -> None:
    for name in ("conv", "recurrent"):
        with pytest.raises(InvalidArgument, match=f"{name} is {value}; it must be a tuple"):
            StateShape(**{name: value})
