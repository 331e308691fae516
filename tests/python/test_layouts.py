# SPDX-License-Identifier: MIT
"""Tests the layout adviser: shapes, traces, the cost of a layout, and the choice."""

from __future__ import annotations

import argparse
import json
import os
import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pyvmem import Context, InvalidArgument
from pyvmem.commands import cli
from pyvmem.kvcache import KVCache, LayeredCache, LayerShape
from pyvmem.kvcache.layout import Layout
from pyvmem.layouts import (
    PAGE_SIZES,
    SHAPES,
    Choice,
    Limits,
    ModelShape,
    Request,
    advise,
    choices,
    cost,
    generate,
    options,
    read_trace,
    shape_of,
)
from pyvmem.layouts.adviser import CALL_US, name
from pyvmem.layouts.cli import budget
from pyvmem.layouts.cost import page_table_bytes
from pyvmem.layouts.entries import attention_time
from pyvmem.layouts.workload import read_arrivals

KB, MB, GB = 1 << 10, 1 << 20, 1 << 30
LLAMA = SHAPES["Llama-3-8B"]
SMALL = ModelShape("small", 4, 2, 64, "float16")  # rows of 256 bytes
ONE = [Request(1000, 200)]
MANY = [Request(context, 200) for context in range(300, 1600, 7)]


# ---- numbers in the documentation ------------------------------------------------------------


@pytest.mark.parametrize(
    ("choice", "bound_mb", "at_once", "tokens"),
    [
        (Choice(1, 64 * KB), 4, 64, 32),
        (Choice(8, 64 * KB, run=8), 4, 8, 32),
        (Choice(8, 64 * KB), 0.5, 8, 4),
    ],
    ids=("a tensor per layer", "groups of 8 in runs", "groups of 8"),
)
def test_llama_3_8b(choice: Choice, bound_mb: float, at_once: int, tokens: int) -> None:
    found = cost(LLAMA, choice, ONE, 40 * GB)
    assert found.waste_bound == bound_mb * MB
    assert found.calls_per_growth == found.tensors == at_once
    assert found.tokens_per_growth == tokens


@pytest.mark.parametrize(
    ("model", "ranks", "megabytes"),
    [("Llama-3-8B", 1, (4, 8, 16, 128)), ("Yi-34B", 2, (7.5, 15, 30, 240))],
)
def test_waste_by_page_size(model: str, ranks: int, megabytes: tuple[float, ...]) -> None:
    """Compares the bound with table 8 of the vAttention paper, which counts Yi-34B's two ranks."""
    shape = SHAPES[model].on_ranks(ranks)
    found = [cost(shape, Choice(1, size), ONE, GB).waste_bound / MB for size in PAGE_SIZES]
    assert found == list(megabytes)


def test_rows_that_do_not_divide_the_page_share_in_larger_units() -> None:
    small = SHAPES["SmolLM2-135M"]
    assert cost(small, Choice(1, 64 * KB), ONE, GB).sharing_unit == 512  # rows of 384 bytes
    assert cost(LLAMA, Choice(1, 64 * KB), ONE, GB).sharing_unit == 32
    assert cost(LLAMA, Choice(32, 64 * KB), ONE, GB).sharing_unit == 1


def test_page_tables() -> None:
    assert [page_table_bytes(size) for size in (4 * KB, *PAGE_SIZES)] == [8, 8, 16, 32, 16]


def test_presets_are_the_public_models() -> None:
    billions = {name: shape.weight_bytes / 2e9 for name, shape in SHAPES.items()}
    assert billions == pytest.approx(
        {"Yi-6B": 6.06, "Llama-3-8B": 8.03, "Yi-34B": 34.4, "SmolLM2-135M": 0.1345}, rel=2e-3
    )
    kilobytes = {name: shape.token_bytes / KB for name, shape in SHAPES.items()}
    assert kilobytes == {"Yi-6B": 64, "Llama-3-8B": 128, "Yi-34B": 240, "SmolLM2-135M": 22.5}


# ---- costs compared with a plain calculation
# -----------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(
    group=st.sampled_from((1, 2, 4)),
    page=st.sampled_from((4 * KB, 64 * KB)),
    run=st.sampled_from((1, 2, 8)),
    requests=st.lists(st.builds(Request, st.integers(1, 400), st.integers(1, 60)), min_size=1),
)
def test_means_are_over_all_iterations(
    group: int, page: int, run: int, requests: list[Request]
) -> None:
    held = [r.context + k for r in requests for k in range(r.output)]
    row, tensors, unit = 256 * group, 2 * 4 // group, page * run
    mapped = sum(-(-tokens * row // unit) * unit * tensors for tokens in held) / len(held)
    used = sum(tokens * row * tensors for tokens in held) / len(held)
    found = cost(SMALL, Choice(group, page, run), requests, 10 * MB)
    assert found.held.mapped == pytest.approx(mapped)
    assert found.held.used == pytest.approx(used)
    assert found.waste == pytest.approx(mapped - used)
    assert found.waste < found.waste_bound
    assert found.batch == pytest.approx(10 * MB / mapped)
    assert found.page_table_bytes == pytest.approx(mapped / page * 8)
    assert found.books_bytes == pytest.approx(mapped / unit * 2360)


def test_sharing_unit_is_the_first_token_at_a_page_boundary() -> None:
    for shape in SHAPES.values():
        for choice in choices(shape, (64 * KB,)):
            config = shape.config(max_batch=1, max_seq_len=4096, group_size=choice.group_size)
            row = Layout(config, choice.page_size).row_bytes
            unit = cost(shape, choice, ONE, GB).sharing_unit
            assert unit * row % choice.page_size == 0
            assert not any(n * row % choice.page_size == 0 for n in range(1, unit))


# ---- unequal layers, sliding windows, latents ---------------------------------------------

SLIDING = {"layer_types": ["sliding_attention"] * 2 + ["full_attention", "sliding_attention"] * 2}
MIXED = {"num_hidden_layers": 6, "sliding_window": 24, **SLIDING}
LATENT = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "model_type": "deepseek_v3"}
FEW = {
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "dtype": "float16",
}


def model(tmp_path: Path, **values: Any) -> ModelShape:
    (tmp_path / "config.json").write_text(json.dumps({**FEW, **values}))
    return shape_of(str(tmp_path))


@pytest.mark.parametrize("kind", [MIXED, {"sliding_window": 24, "model_type": "mistral"}, LATENT])
def test_computed_pages_match_the_cache(
    tmp_path: Path, host: Context, kind: dict[str, Any]
) -> None:
    if "model_type" in kind:
        pytest.importorskip("transformers", reason="the extra 'serve' is not installed")
    shape, choice, request = model(tmp_path, **kind), Choice(2, 4096), Request(230, 90)
    found = cost(shape, choice, [request], GB)
    policy = {"dtype": shape.dtype, "max_batch": 1, "max_seq_len": 320, "group_size": 2}
    layers = shape.layers or [LayerShape(2, 64)] * 4
    pages = 0
    with LayeredCache(layers, host, page_size=4096, **policy) as cache:
        assert sum(len(part.tensors) for part in cache.caches) == found.tensors
        cache.alloc_reqid()
        for tokens in range(request.context, request.longest + 1):
            assert cache.step([tokens]) == 0
            for part in cache.caches:
                layout, rows = part.layout, part.first_rows([0])[0]
                first = rows * layout.row_bytes // layout.page_size
                pages += (layout.pages_for(tokens) - first) * layout.num_tensors
    assert found.held.mapped == pytest.approx(pages * 4096 / request.output)
    assert found.waste < found.waste_bound


@pytest.mark.parametrize("group", [1, 4])
def test_computed_calls_match_the_cache(host: Context, group: int) -> None:
    requests, page = [Request(400, 1600)] * 2, 4096
    found = cost(SMALL, Choice(group, page), requests, GB)
    config = SMALL.config(max_batch=2, max_seq_len=2000, group_size=group, page_size=page)
    with KVCache(config, host) as cache:
        for _ in requests:
            cache.alloc_reqid()
        assert cache.step([400, 400]) == 0
        before = host.stats().map_calls
        for tokens in range(401, 2001):
            assert cache.step([tokens, tokens]) == 0
        calls = (host.stats().map_calls - before) / sum(one.output for one in requests)
    assert calls <= found.calls_per_token <= 1.5 * calls, (
        "the call rate must match that of nearly full memory"
    )
    assert calls < 0.5 * SMALL.token_bytes / page, "runs must be longer than a page"


def test_windows_and_latents_cost_only_kept_rows(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="the extra 'serve' is not installed")
    choice, long = Choice(1, 64 * KB), [Request(9000, 10)]
    mixed, whole = model(tmp_path, **MIXED), model(tmp_path, num_hidden_layers=6)
    assert (whole.layers, mixed.largest_group, whole.largest_group) == ((), 2, 6)
    assert {one.group_size for one in choices(mixed)} == {1, 2}
    assert mixed.token_bytes == whole.token_bytes == 6 * 2 * 2 * 64 * 2
    slid, kept = (cost(shape, choice, long, GB) for shape in (mixed, whole))
    assert slid.held.mapped < 0.5 * kept.held.mapped
    assert slid.sharing_unit == kept.sharing_unit == 256
    latent = model(tmp_path, **LATENT)
    assert latent.token_bytes == 4 * 576 * 2
    assert latent.on_ranks(8).token_bytes == latent.token_bytes, "whole on every rank"
    with pytest.raises(InvalidArgument, match="2 KV heads cannot be shared evenly by 4 ranks"):
        mixed.on_ranks(4)
    assert mixed.on_ranks(2).token_bytes == mixed.token_bytes // 2
    with pytest.raises(InvalidArgument, match="its layers differ, slide or have a state"):
        mixed.config()
    with pytest.raises(InvalidArgument, match="group_size 4 does not divide num_layers 2"):
        cost(mixed, Choice(4, 4096), ONE, GB)


def test_sliding_layers_match_transformers(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="the extra 'serve' is not installed")
    old = {"num_hidden_layers": 12, "sliding_window": 24, "model_type": "gemma3_text"}
    found = model(tmp_path, **old, sliding_window_pattern=6)
    assert [one.window for one in found.layers] == [24, 24, 24, 24, 24, 0] * 2
    mistral = model(tmp_path, sliding_window=24, model_type="mistral")
    assert [one.window for one in mistral.layers] == [24] * 4
    with pytest.raises(InvalidArgument, match="a sliding_window of 24 without layer_types"):
        model(tmp_path, sliding_window=24, model_type="of nobody")
    with pytest.raises(InvalidArgument, match="block_types: transformers is needed"):
        model(tmp_path, block_types=["recurrent", "attention"], model_type="of nobody")
    off = model(tmp_path, sliding_window=24, use_sliding_window=False)
    assert off.layers == ()
    state = {"layer_types": ["linear_attention"] + ["full_attention"] * 3}
    with pytest.raises(
        InvalidArgument, match="layer 0 is linear_attention: the state's description"
    ):
        model(tmp_path, **state)


LINEAR = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
}


def test_states_count_from_the_first_token(tmp_path: Path) -> None:
    """Uses Qwen3-Next's shape, in which three of four layers have a state."""
    kinds = ["linear_attention"] * 3 + ["full_attention"]
    found = model(tmp_path, **LINEAR, layer_types=kinds)
    conv, recurrent = 64 * 4 * 2, 4 * 8 * 8 * 4  # in float16 and in float32
    assert found.state_bytes == 3 * (conv + recurrent)
    assert found.token_bytes == 2 * found.num_kv_heads * found.head_dim * 2
    with pytest.raises(InvalidArgument, match="have a state, which is not supported"):
        found.config()
    with pytest.raises(InvalidArgument, match="sharing a state between ranks"):
        found.on_ranks(2)
    alone = replace(found, layers=(found.layers[3],), num_layers=1)
    for requests in (ONE, [Request(1000, 400), Request(30, 7)]):
        both, rows = (cost(one, Choice(1, 4096), requests, GB) for one in (found, alone))
        assert both.held.mapped == rows.held.mapped + 6 * 4096
        assert both.held.used == pytest.approx(rows.held.used + found.state_bytes)
        assert both.waste_bound == rows.waste_bound + 6 * 4096 - found.state_bytes
        assert both.calls_per_token == rows.calls_per_token
        assert (both.sharing_unit, rows.sharing_unit > 0) == (0, True)


def test_8_bit_keys_and_values_need_half(tmp_path: Path) -> None:
    """The adviser halves the size of keys and values, but not of states."""
    wide = model(tmp_path, **LINEAR, layer_types=["linear_attention"] * 3 + ["full_attention"])
    short = wide.stored_as("float8_e4m3fn")
    assert (2 * short.token_bytes, short.state_bytes) == (wide.token_bytes, wide.state_bytes)
    assert short.name.endswith(" in float8_e4m3fn")
    assert wide.stored_as("") is wide
    plain = SHAPES["Llama-3-8B"]
    costs = [
        cost(one, Choice(1, 65536), MANY, GB) for one in (plain, plain.stored_as("float8_e4m3fn"))
    ]
    assert costs[1].held.used == costs[0].held.used / 2
    assert costs[1].sharing_unit == 2 * costs[0].sharing_unit
    assert 1.5 < costs[1].batch / costs[0].batch <= 2


def test_the_command_takes_8_bit_keys_and_values(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["layouts", "--kv-memory", "1G", "--requests", "50", "--kv-dtype"]
    assert cli.main([*words, "float8_e4m3fn"]) == 0
    text = capsys.readouterr().out
    assert "Llama-3-8B in float8_e4m3fn: " in text
    assert "65,536 bytes per token" in text
    with pytest.raises(SystemExit):
        cli.main([*words, "float4"])
    assert "--kv-dtype: invalid choice: 'float4'" in capsys.readouterr().err


def test_the_command_takes_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["layouts", "--kv-memory", "1G", "--requests", "50", "--model", str(tmp_path)]
    model(tmp_path, **MIXED)
    assert cli.main(words) == 0
    text = capsys.readouterr().out
    assert "4 layers, 2 KV heads of 64 with a window of 24; 2 layers, 2 KV heads of 64, " in text
    model(tmp_path, **LATENT)
    assert cli.main(words) == 0
    assert "4 layers, rows of 576, float16; 4,608 bytes per token" in capsys.readouterr().out


# ---- the choice ----------------------------------------------------------------------------------


def test_short_requests_get_small_pages() -> None:
    found = advise(LLAMA, MANY, 40 * GB, limits=Limits(max_group=1))
    best = found.best
    assert best in found.costs
    assert best.choice == Choice(1, 64 * KB)
    assert best.batch >= 0.97 * max(one.batch for one in found.costs)
    assert found.why.startswith(name(best.choice) + f": {int(best.batch)} requests")
    assert f"{best.calls_per_token:.3g} map calls per token" in found.why


def test_layers_share_a_tensor_on_a_full_card() -> None:
    """2 MB entries map a request's whole blocks, so growth takes few calls."""
    for memory in (16 * GB, 40 * GB, 120 * GB):
        found = advise(LLAMA, MANY, memory)
        assert found.best.choice == Choice(32, 64 * KB)
        assert found.best.held.large > 0.98 * found.best.held.mapped
        assert found.best.attention < 1.03
        assert found.best.batch == max(one.batch for one in found.costs)
        [other] = [one for one in found.costs if one.choice == Choice(1, 64 * KB)]
        assert found.best.calls_per_token < other.calls_per_token / 16
    assert f"attention takes {found.best.attention:.2f} times as long" in found.why
    assert "attention" not in advise(LLAMA, MANY, 4 * GB, [Choice(1, 64 * KB)]).why


def test_partial_blocks_are_slow_if_layers_share_a_tensor() -> None:
    """A request with less than 2 MB per tensor has only 64 KB entries."""
    short = [Request(100, 20)]
    slow = advise(LLAMA, short, 40 * GB, [Choice(8, 64 * KB)]).best
    assert slow.held.large == 0
    assert slow.attention == attention_time(64 * KB, 8, 32, 40 * GB) > 1.1
    assert advise(LLAMA, short, 40 * GB).best.attention < 1.03


def test_attention_time_grows_with_the_cache_and_with_shared_layers() -> None:
    groups, sizes = (1, 2, 4, 8, 16, 32), [step * GB for step in range(1, 140, 3)]
    times = {g: [attention_time(64 * KB, g, 32, size) for size in sizes] for g in groups}
    for group, found in times.items():
        assert found[0] >= 1.0
        for before, after in pairwise(found):
            assert after >= before - 0.02, group
    for size, row in zip(sizes, zip(*times.values(), strict=True), strict=True):
        for fewer, more in pairwise(row):
            assert more >= fewer - 0.02, size
    for group in groups:
        assert attention_time(2 * MB, group, 32, 140 * GB) < 1.03
        # The time depends on the bytes that one layer reads: 64 layers in 32 GB take the same time
        # as 32 layers in 16 GB.
        assert attention_time(64 * KB, group, 64, 32 * GB) == times[group][5]


def test_the_times_match_the_kept_run() -> None:
    path = Path(__file__).parents[2] / "benchmarks" / "results" / "footprint-h100.json"
    run = json.loads(path.read_text())
    rows = {row["id"]: row["median"] for row in run["parts"]["fa3"]["rows"]}
    compared = 0
    for size in run["options"]["footprint"]:
        at = f"fa3/{size >> 30}G"
        base = rows[f"{at}/slots1/decode_1024/malloc"]
        for group in (1, 4, 8, 16, 32):
            for page, kind in ((64 * KB, "64K"), (2 * MB, "2M")):
                wanted = rows[f"{at}/slots{group}/decode_1024/{kind}"] / base
                assert attention_time(page, group, 32, size) == pytest.approx(wanted, abs=0.03)
                compared += 1
    assert compared == 50


def test_the_times_of_mixed_entries_match_the_kept_run() -> None:
    path = Path(__file__).parents[2] / "benchmarks" / "results" / "logs" / "h100-cache-entries.log"
    line = re.compile(
        r"(\d+)G, \d+ requests of 1,024, (a|\d+) (?:tensor per layer|layers .*): (\S+)"
    )
    compared = 0
    for gigabytes, layers, wanted in line.findall(path.read_text()):
        group, size = 1 if layers == "a" else int(layers), int(gigabytes) * GB
        found = attention_time(64 * KB, group, 32, size, large=0.986)
        assert found == pytest.approx(float(wanted), abs=0.03)
        compared += 1
    assert compared == 5


def test_a_tensor_per_layer_if_groups_gain_nothing() -> None:
    """Strided rows are not worth it if they save no calls and gain less than 1% in batch size."""
    considered = [Choice(group, 2 * MB) for group in (8, 1, 2)]
    best = advise(LLAMA, [Request(100_000, 10_240)], 60 * GB, considered).best
    assert best.choice == Choice(1, 2 * MB)


def test_small_pages_cost_nothing_for_long_requests() -> None:
    """Long requests grow by 2 MB at a time, and 2 MB entries map them."""
    found = advise(LLAMA, [Request(100_000, 10_240)], 60 * GB)
    assert found.best.choice == Choice(1, 64 * KB)
    [large] = [one for one in found.costs if one.choice == Choice(1, 2 * MB)]
    assert found.best.calls_per_token == pytest.approx(large.calls_per_token, rel=0.05)
    assert found.best.attention == pytest.approx(large.attention, abs=0.001)


def test_no_more_calls_than_fit_in_an_iteration() -> None:
    considered = choices(LLAMA, max_group=1)
    slow = advise(LLAMA, MANY, 40 * GB, considered, Limits(call_us=100.0))
    assert slow.best.calls_per_token < 2
    assert "but its map calls take" in slow.why
    hopeless = advise(LLAMA, MANY, 40 * GB, limits=Limits(call_us=1e6))
    assert hopeless.best.choice.page_size == 2 * MB
    assert "map calls take more than half" in hopeless.why
    free = advise(LLAMA, MANY, 40 * GB, limits=Limits(call_us=0))
    assert "in the background" not in free.why


def test_groups_only_up_to_the_limit() -> None:
    every = choices(LLAMA)
    for most in (1, 2, 8, 32):
        best = advise(LLAMA, ONE, 10 * GB, every, Limits(max_group=most)).best
        assert best.choice.group_size <= most
    with pytest.raises(InvalidArgument, match="no layout has groups of 4 layers or fewer"):
        advise(LLAMA, ONE, GB, [Choice(8, 64 * KB)], Limits(max_group=4))


def test_choices_are_all_divisors() -> None:
    assert len(choices(SHAPES["Yi-34B"], (64 * KB,))) == 12
    assert choices(SMALL, (4096,), (1, 2), 2) == [
        Choice(1, 4096),
        Choice(1, 4096, 2),
        Choice(2, 4096),
        Choice(2, 4096, 2),
    ]


# ---- bad input -----------------------------------------------------------------------------------


def test_bad_layouts_and_workloads() -> None:
    with pytest.raises(InvalidArgument, match="run is 3; it must be a power of two"):
        Choice(1, 4096, 3)
    with pytest.raises(InvalidArgument, match="page_size is 0"):
        Choice(1, 0)
    with pytest.raises(InvalidArgument, match="group_size 3 does not divide num_layers 4"):
        cost(SMALL, Choice(3, 4096), ONE, GB)
    with pytest.raises(InvalidArgument, match="at least one request"):
        cost(SMALL, Choice(1, 4096), [], GB)
    with pytest.raises(InvalidArgument, match="0 bytes of memory are left"):
        cost(SMALL, Choice(1, 4096), ONE, 0)


def test_bad_shapes(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="'Llama-9' is neither one of Yi-6B"):
        shape_of("Llama-9")
    with pytest.raises(InvalidArgument, match="8 KV heads cannot be shared evenly by 3 ranks"):
        LLAMA.on_ranks(3)
    with pytest.raises(InvalidArgument, match="evenly by 0 ranks"):
        LLAMA.on_ranks(0)
    path = tmp_path / "config.json"
    path.write_text("[1]")
    with pytest.raises(InvalidArgument, match="expected a JSON object, not list"):
        shape_of(str(path))
    path.write_text('{"time_step_limit": {"__float__": [1]}}')
    with pytest.raises(InvalidArgument, match=r"nor a readable config.json: float\(\) argument"):
        shape_of(str(path))
    with pytest.raises(InvalidArgument, match=r"use up all of 1073741824; use more ranks"):
        budget(LLAMA, GB)


def test_a_model_from_its_configuration(tmp_path: Path) -> None:
    values = {
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "hidden_size": 4096,
        "torch_dtype": "bfloat16",
        "max_position_embeddings": 8192,
    }
    (tmp_path / "config.json").write_text(json.dumps(values))
    for path in (tmp_path, tmp_path / "config.json"):
        shape = shape_of(str(path))
        assert (shape.name, shape.weight_bytes) == (tmp_path.name, 0)
        assert shape.token_bytes == LLAMA.token_bytes
    (tmp_path / "config.json").write_text(json.dumps({"text_config": values}))
    assert shape_of(str(tmp_path)).token_bytes == LLAMA.token_bytes
    assert shape_of("llama-3-8b") is LLAMA
    assert budget(LLAMA.on_ranks(2), 80 * GB) == int(72 * GB) - LLAMA.weight_bytes // 2


# ---- traces --------------------------------------------------------------------------------------


def test_the_three_formats(tmp_path: Path) -> None:
    azure = tmp_path / "azure.csv"
    azure.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\nx,374,44\nx,396,0\nx,0,9\n")
    assert read_trace(azure) == [Request(374, 44)]
    arxiv = tmp_path / "arxiv.csv"
    arxiv.write_text("num_prefill_tokens,num_decode_tokens,num_total_tokens\n71989.0,386,72375\n")
    assert read_trace(str(arxiv)) == [Request(71989, 386)]
    mooncake = tmp_path / "m.jsonl"
    mooncake.write_text('{"timestamp": 0, "input_length": 6758, "output_length": 500}\n')
    assert read_trace(mooncake) == [Request(6758, 500)]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a,b\n1,2\n", "row 1 lacks the columns ContextTokens, GeneratedTokens or"),
        ("ContextTokens,GeneratedTokens\n5,x\n", "could not convert string to float"),
        ("ContextTokens,GeneratedTokens\n5\n", "row 1 lacks"),
        ("ContextTokens,GeneratedTokens\n0,1\n", "no request"),
        ("", "no request"),
        (None, "No such file"),
    ],
)
def test_bad_traces(tmp_path: Path, text: str | None, message: str) -> None:
    path = tmp_path / "trace.csv"
    if text is not None:
        path.write_text(text)
    with pytest.raises(InvalidArgument, match=message):
        read_trace(path)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("trace.jsonl", "[1, 2]\n"),
        ("trace.jsonl", '{"input_length": [1], "output_length": 2}\n'),
        ("trace.jsonl", "[" * 100_000),
        ("trace.csv", "ContextTokens,GeneratedTokens\n1e999,2\n"),
        ("trace.csv", "ContextTokens,GeneratedTokens\n" + "5" * 200_000 + ",2\n"),
    ],
    ids=("not an object", "not a number", "nested", "infinite", "long field"),
)
def test_malformed_traces(tmp_path: Path, name: str, text: str) -> None:
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(InvalidArgument, match=name):
        read_trace(path)


@pytest.mark.parametrize("row", ['"timestamp": [0]', '"timestamp": 0, "hash_ids": 7'])
def test_malformed_arrivals(tmp_path: Path, row: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(f'{{{row}, "input_length": 5, "output_length": 2}}\n')
    with pytest.raises(InvalidArgument, match=r"trace\.jsonl"):
        read_arrivals(path)


def test_synthetic_requests_have_azures_medians() -> None:
    requests = generate(5000, seed=3)
    assert requests == generate(5000, seed=3)
    assert requests != generate(5000, seed=4)
    contexts, outputs = (sorted(column) for column in zip(*requests, strict=True))
    assert contexts[2500] == pytest.approx(1020, rel=0.1)
    assert outputs[2500] == pytest.approx(129, rel=0.1)
    assert contexts[0] >= 1
    assert contexts[-1] <= 14050
    assert outputs[-1] <= 1000
    with pytest.raises(InvalidArgument, match="count is 0"):
        generate(0, 1)


# ---- the command ---------------------------------------------------------------------------------


def test_command(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["layouts", "--model", "Yi-6B", "--memory", "80G", "--requests", "200"]
    assert cli.main(words) == 0
    text = capsys.readouterr().out
    assert "65,536 bytes per token" in text
    assert "generated from seed 1" in text
    assert text.count("<-") == 1
    assert "\nTake " in text
    assert cli.main([*words, "--runs", "1,8", "--all", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert len(found["layouts"]) == 6 * len(PAGE_SIZES) * 2
    assert found["best"] in found["layouts"]
    assert found["kv_memory_bytes"] == budget(SHAPES["Yi-6B"], 80 * GB)


def test_calls_of_several_ranks_are_serialized(capsys: pytest.CaptureFixture[str]) -> None:
    """The mapping time of the best layout includes the calls of all ranks."""

    def best(ranks: int, backend: str) -> dict[str, Any]:
        words = ["layouts", "--model", "Yi-34B", "--ranks", str(ranks), "--kv-memory", "30G"]
        assert cli.main([*words, "--iteration-ms", "6", "--backend", backend, "--json"]) == 0
        found: dict[str, Any] = json.loads(capsys.readouterr().out)
        return found

    two, four = best(2, "stock"), best(4, "stock")
    for found, ranks in ((two, 2), (four, 4)):
        spent = (
            found["best"]["batch"]
            * found["best"]["calls_per_token"]
            * ranks
            * CALL_US["stock"]
            / 1e3
        )
        assert f", {spent:.1f} ms in the background of an iteration of 6 ms" in found["why"]
    assert four["best"]["calls_per_token"] < best(4, "uvm")["layouts"][0]["calls_per_token"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--model", "GPT-9"], "'GPT-9' is neither one of"),
        (["--model", "Yi-34B", "--memory", "40G"], "use more ranks"),
        (["--ranks", "3"], "cannot be shared evenly"),
        (["--runs", "3"], "run is 3"),
    ],
)
def test_command_with_bad_input(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["layouts", *words]) == 2
    said = capsys.readouterr().err
    assert said.startswith("vmem layouts: error: ")
    assert message in said


@pytest.mark.parametrize(
    "words",
    [
        ["--memory", "x"],
        ["--pages", "0"],
        ["--runs", "a"],
        ["--trace", "/nonexistent.csv"],
        ["--requests", "0"],
        ["--max-group", "0"],
    ],
)
def test_command_with_bad_words(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["layouts", *words])
    assert caught.value.code == 2


def test_azure_trace() -> None:
    folder = os.environ.get("VMEM_TRACES")
    if not folder:
        pytest.skip("VMEM_TRACES does not name the folder of azure_2023_conv.csv")
    requests = read_trace(Path(folder) / "azure_2023_conv.csv")
    assert len(requests) == 19366
    batch: dict[Any, float] = {
        size: cost(LLAMA, Choice(1, size), requests, 57 * GB).batch for size in PAGE_SIZES
    }
    assert batch[64 * KB] >= 1.5 * batch[2 * MB]


def test_numbers_on_the_command_line() -> None:
    assert options.sizes("64K,2M,1GiB,512") == [64 << 10, 2 << 20, 1 << 30, 512]
    assert options.counts("1,8") == [1, 8]
    assert options.counts("all,4", all_is=0) == [0, 4]
    assert [options.page_name(page) for page in (64 << 10, 2 << 20)] == ["64K", "2M"]
    for bad in ("1,all", "0", "-1", "", "1,,2", "1.5"):
        with pytest.raises(argparse.ArgumentTypeError, match="expected 1,8"):
            options.counts(bad)
    for bad in ("x", "0", "64Q", "9999999999G"):
        with pytest.raises(argparse.ArgumentTypeError, match=bad):
            options.size(bad)
