# SPDX-License-Identifier: MIT
"""Checks the replay of requests against a memory limit: by arithmetic, with a real cache, and with
real traces.
"""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pyvmem import Context, InvalidArgument, KVCache
from pyvmem.bench.record import Record
from pyvmem.commands import cli
from pyvmem.kvcache.layout import Layout
from pyvmem.layouts import SHAPES, ModelShape, Request, generate, read_trace
from pyvmem.layouts.cli import budget
from vmem_bench import capacity
from vmem_bench.capacity import System, systems
from vmem_bench.replay import Lengths, Outcome, Pages, replay

KB, MB, GB = 1 << 10, 1 << 20, 1 << 30
SMALL = ModelShape("small", 2, 1, 64, "float16")  # 128 bytes per row, 512 per token


def scaled(count: int, seed: int) -> list[Request]:
    """Returns requests distributed like Azure's, but a sixteenth as long."""
    return [
        Request(max(1, context // 16), max(1, output // 16))
        for context, output in generate(count, seed)
    ]


def pages(memory: int, page: int, requests: list[Request], group: int = 1) -> Pages:
    longest = max(request.longest for request in requests)
    return Pages(
        Layout(SMALL.config(max_batch=1, max_seq_len=longest, group_size=group), page), memory
    )


# ---- other ways to compute the same number -------------------------------------------------------


def by_littles_law(trace: list[tuple[int, int]], row: int, tensors: int, page: int) -> float:
    """Computes the mean number of bytes held by a running request, from the trace alone.

    A request holds context + k tokens in iteration k; requests are weighted by their number of
    iterations.
    """
    total = iterations = 0
    for context, output in trace:
        for held in range(context, context + output):
            total += -(-held * row // page)
        iterations += output
    return total * page * tensors / iterations


def by_hand(trace: list[tuple[int, int]], row: int, tensors: int, page: int, memory: int) -> float:
    """Computes the mean batch size while requests wait, from the trace alone, by simply keeping a
    list of lengths.
    """
    waiting, running = list(reversed(trace)), list[tuple[int, int]]()
    batch = iterations = 0

    def fits(lengths: list[int]) -> bool:
        return sum(-(-held * row // page) for held in lengths) * page * tensors <= memory

    while waiting or running:
        running = [(held + 1, left - 1) for held, left in running]
        while not fits([held for held, _ in running]):
            waiting.append(running.pop())
        while waiting and fits([held for held, _ in running] + [waiting[-1][0]]):
            running.append(waiting.pop())
        if waiting:
            batch += len(running)
            iterations += 1
        running = [(held, left) for held, left in running if left > 1]
    return batch / iterations


@pytest.mark.parametrize(("page", "group"), [(4 * KB, 1), (4 * KB, 2), (32 * KB, 1), (2 * KB, 1)])
def test_replay_agrees_with_a_plain_one(page: int, group: int) -> None:
    requests = scaled(300, seed=5)
    memory = 2 * MB
    found = replay(requests, pages(memory, page, requests, group), SMALL.token_bytes)
    expected = by_hand([tuple(r) for r in requests], 128 * group, 4 // group, page, memory)
    assert found.mean_batch == pytest.approx(expected, rel=1e-9)


def test_replay_agrees_with_littles_law() -> None:
    requests = scaled(3000, seed=6)
    for page in (4 * KB, 32 * KB):
        memory = 8 * MB
        found = replay(requests, pages(memory, page, requests), SMALL.token_bytes)
        held = by_littles_law([tuple(r) for r in requests], 128, 4, page)
        assert found.mean_batch == pytest.approx(memory / held, rel=0.02)


class RealCache:
    """Backs a replay with a `KVCache` that maps real pages."""

    def __init__(self, cache: KVCache) -> None:
        self.cache = cache
        self.reqids: list[int] = []

    def hold(self, lengths: Lengths) -> bool:
        new = len(lengths) - len(self.reqids)
        assert new in (0, 1)
        reqids = list(self.reqids)
        if new:
            reqid = self.cache.alloc_reqid(int(lengths[-1]))
            assert reqid is not None
            reqids.append(reqid)
        wanted = [0] * self.cache.config.max_batch
        for reqid, length in zip(reqids, lengths.tolist(), strict=True):
            wanted[reqid] = length
        if self.cache.step(wanted) == -1:
            if new:
                self.cache.free_reqid(reqids[-1])
            return False
        self.reqids = reqids
        return True

    def leave(self, places: Sequence[int]) -> None:
        for place in sorted(places, reverse=True):
            self.cache.free_reqid(self.reqids.pop(place))

    def mapped_bytes(self) -> int:
        stats = self.cache.stats()
        return stats.used_bytes + stats.wasted_bytes


@pytest.mark.parametrize(("group", "overread"), [(1, 0), (2, 0), (1, 70)])
def test_a_real_cache_reaches_the_same_batch(
    context: Context, page: int, group: int, overread: int
) -> None:
    """Checks that real `step` calls return -1 in the same iterations in which the arithmetic finds
    memory short.
    """
    requests = scaled(60, seed=7)
    shape = ModelShape("small", 2, page // (4 * KB), 64, "float16")  # 32 rows of a layer per page
    memory = 200 * page
    config = shape.config(
        max_batch=64,
        max_seq_len=max(request.longest for request in requests),
        page_size=page,
        group_size=group,
        memory_limit=memory,
        zero_fill=False,
        overread_rows=overread,
    )
    with KVCache(config, context) as cache:
        real = replay(requests, RealCache(cache), shape.token_bytes)
        assert cache.stats().short > 0
        cache.check_integrity()
        assert real == replay(requests, Pages(cache.layout, memory), shape.token_bytes)
    assert real.preemptions > 0 or overread  # with overread, prompts have spare rows
    assert real.max_batch > real.mean_batch > 4


# ---- the replay itself ---------------------------------------------------------------------------


def test_an_example_iteration_by_iteration() -> None:
    """There is memory for 4 pages of 8 tokens. A grows from 7 to 9 tokens, B from 8 to 11, C from 1
    to 2.
    """
    requests = [Request(7, 3), Request(8, 4), Request(1, 2)]
    config = SMALL.config(max_batch=1, max_seq_len=16)
    memory = Pages(Layout(config, KB), 4 * KB * 4)
    # A, B and C start with a page each. Then B needs two pages (1 + 2 + 1 in total), and so does A
    # one iteration later; by then C has finished. A and B continue with two pages each.
    found = replay(requests, memory, SMALL.token_bytes)
    assert found == Outcome(
        iterations=4,
        limited=0,
        mean_batch=(3 + 3 + 2 + 1) / 4,
        max_batch=3,
        wasted_bytes=((24 - 16) + (32 - 19) + (32 - 19) + (16 - 11)) * 512 / 9,
        mapped_bytes=(3 + 4 + 4 + 2) * 4 * KB / 4,
        preemptions=0,
    )


def test_the_newest_request_waits_and_loses_nothing() -> None:
    """There is memory for 3 pages of 8 tokens. A (8 to 10 tokens) needs two from its second
    iteration on.
    """
    requests = [Request(8, 3), Request(8, 2), Request(8, 1)]
    config = SMALL.config(max_batch=1, max_seq_len=16)
    memory = Pages(Layout(config, KB), 3 * KB * 4)
    found = replay(requests, memory, SMALL.token_bytes)
    # Lengths by step. 1: A 8, B 8, C 8. 2: A 9 (two pages); B 9 does not fit, so B waits. 3: A 10.
    # 4: B 9.
    assert (found.iterations, found.limited, found.preemptions) == (4, 2, 1)
    assert (found.mean_batch, found.max_batch) == (1.0, 1)
    assert memory.mapped_bytes() == 0


def test_nothing_waits_if_everything_fits() -> None:
    requests = scaled(20, seed=1)
    found = replay(requests, pages(GB, 4 * KB, requests), SMALL.token_bytes)
    assert found.limited == found.preemptions == 0
    assert found.max_batch == 20


def test_requests_that_cannot_be_replayed() -> None:
    with pytest.raises(InvalidArgument, match="at least one request"):
        replay([], pages(MB, 4 * KB, [Request(1, 1)]), SMALL.token_bytes)
    # one request is too large from the start, the other once it has grown
    for request in (Request(100, 1), Request(32, 2)):
        with pytest.raises(InvalidArgument, match="tokens does not fit into the memory alone"):
            replay([request], pages(4 * 4 * KB, 4 * KB, [request]), SMALL.token_bytes)


def test_pages_hold_or_change_nothing() -> None:
    memory = pages(8 * 4 * KB, 4 * KB, [Request(64, 1)])
    assert memory.hold(np.array([32, 32]))
    assert memory.mapped_bytes() == 8 * 4 * KB
    assert not memory.hold(np.array([33, 32]))
    assert memory.mapped_bytes() == 8 * 4 * KB
    memory.leave([0])
    assert memory.mapped_bytes() == 4 * 4 * KB


# ---- the command ---------------------------------------------------------------------------------


def test_systems() -> None:
    names = [one.name for one in systems(SHAPES["Yi-34B"], [64 * KB, 2 * MB], [1, 8, 0], [16])]
    assert names == ["g1/64K", "g1/2M", "g60/64K", "g60/2M", "blocks/16"]
    layout = System("blocks/16", 1, 0, 16).layout(SHAPES["Yi-34B"], 100)
    assert layout.pages_for(17) * layout.page_size == 32 * layout.row_bytes


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "azure_small.csv"
    rows = "".join(f"t,{context},{output}\n" for context, output in generate(400, 9))
    trace.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + rows)
    out = tmp_path / "capacity.json"
    words = ["bench", "capacity", "--trace", str(trace), "--models", "Llama-3-8B,Yi-34B:2"]
    words += ["--memory", "44G", "--pages", "64K,2M", "--groups", "1", "--blocks", "16"]
    assert cli.main([*words, "--out", str(out)]) == 0
    text = capsys.readouterr().out
    assert "azure_small: Llama-3-8B, batch with 64 KB pages relative to 2 MB pages" in text
    assert "wasted MB a request" in text
    kept = json.loads(out.read_text())
    assert kept["format"] == capacity.FORMAT
    rows_by_id = {row["id"]: row for row in kept["parts"]["azure_small"]["rows"]}
    row = rows_by_id["azure_small/Llama-3-8B/g1/64K"]
    shape = SHAPES["Llama-3-8B"]
    found = replay(
        read_trace(trace),
        Pages(System("", 1, 64 * KB).layout(shape, 16000), budget(shape, 44 * GB)),
        shape.token_bytes,
    )
    assert row["value"] == pytest.approx(found.mean_batch, rel=1e-5)
    assert row["max_batch"] == found.max_batch
    assert row["wasted_bytes"] == pytest.approx(found.wasted_bytes, rel=1e-5)
    assert row["memory_bytes"] == budget(shape, 44 * GB)
    aims = {aim["id"]: aim for aim in kept["aims"]}
    aim = aims["azure_small/Llama-3-8B/g1/2M"]
    big = rows_by_id["azure_small/Llama-3-8B/g1/2M"]
    assert aim["value"] == pytest.approx(row["value"] / big["value"], rel=1e-4)
    assert (aim["op"], aim["aim"], aim["applies"]) == (">=", 1.5, True)
    assert len(aims) == 4


def test_command_without_a_trace(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["bench", "capacity", "--requests", "200", "--models", "Yi-6B", "--pages", "2M"]
    assert cli.main([*words, "--groups", "1,all", "--memory", "24G", "--json"]) == 0
    kept = json.loads(capsys.readouterr().out)
    assert list(kept["parts"]) == ["generated"]
    assert kept["options"]["seed"] == 1
    assert all(aim["aim"] is None and not aim["applies"] for aim in kept["aims"])


def test_command_with_8_bit_keys_and_values(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["bench", "capacity", "--requests", "3000", "--models", "Yi-6B", "--pages", "64K"]
    batches = []
    for more in ([], ["--kv-dtype", "float8_e4m3fn"]):
        assert cli.main([*words, "--groups", "1", "--memory", "24G", "--json", *more]) == 0
        kept = json.loads(capsys.readouterr().out)
        assert kept["options"]["kv_dtype"] == (more[1] if more else "the model's")
        rows = {row["id"]: row["value"] for row in kept["parts"]["generated"]["rows"]}
        batches.append(rows["generated/Yi-6B/g1/64K"])
    assert 1.5 < batches[1] / batches[0] <= 2.0


@pytest.mark.parametrize(
    ("words", "status"),
    [
        (["--models", "Yi-34B", "--memory", "40G"], 1),
        (["--trace", "/nonexistent.csv"], 2),
        (["--models", "Yi-6B:x"], 2),
        (["--groups", "x"], 2),
        (["--blocks", "-1"], 2),
    ],
)
def test_command_with_bad_input(words: list[str], status: int) -> None:
    if status == 1:
        assert cli.main(["bench", "capacity", *words]) == 1
        return
    with pytest.raises(SystemExit) as caught:
        cli.main(["bench", "capacity", *words])
    assert caught.value.code == status


# ---- the real traces -----------------------------------------------------------------------------


def real_trace(name: str) -> Path:
    folder = os.environ.get("VMEM_TRACES")
    if not folder:
        pytest.skip(f"VMEM_TRACES does not name the directory of {name}")
    return Path(folder) / name


def lengths(path: Path, context: str, output: str) -> list[tuple[int, int]]:
    with path.open() as lines:
        found = [(int(row[context]), int(row[output])) for row in csv.DictReader(lines)]
    return [pair for pair in found if min(pair) > 0]


def measured(path: Path, model: str, ranks: int, compared: list[System]) -> list[dict[str, Any]]:
    shape = SHAPES[model].on_ranks(ranks)
    part = Record({}, {}).part(path.stem, "")
    capacity.measure(part, shape, model, read_trace(path), budget(shape, 80 * GB), compared)
    return part.rows


@pytest.mark.parametrize(("model", "ranks"), [("Yi-6B", 1), ("Llama-3-8B", 1), ("Yi-34B", 2)])
def test_azure_within_two_percent_of_littles_law(model: str, ranks: int) -> None:
    path = real_trace("azure_2023_conv.csv")
    rows = measured(path, model, ranks, [System("g1/64K", 1, 64 * KB), System("g1/2M", 1, 2 * MB)])
    layers, heads = {"Yi-6B": (32, 4), "Llama-3-8B": (32, 8), "Yi-34B": (60, 4)}[model]
    trace = lengths(path, "ContextTokens", "GeneratedTokens")
    for row, page in zip(rows, (64 * KB, 2 * MB), strict=True):
        held = by_littles_law(trace, heads * 256, 2 * layers, page)
        assert row["value"] == pytest.approx(row["memory_bytes"] / held, rel=0.02)


@pytest.mark.parametrize("page", [64 * KB, 2 * MB])
def test_arxiv_within_two_percent_of_a_plain_replay(page: int) -> None:
    path = real_trace("vattention_arxiv_long_offline.csv")
    (row,) = measured(path, "Yi-6B", 1, [System("g1", 1, page)])
    trace = lengths(path, "num_prefill_tokens", "num_decode_tokens")
    expected = by_hand(trace, 1024, 64, page, row["memory_bytes"])
    assert row["value"] == pytest.approx(expected, rel=0.02)
