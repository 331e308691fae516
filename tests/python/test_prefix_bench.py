# SPDX-License-Identifier: MIT
"""Tests the replay of prompts against two prefix caches, and the benchmark that uses it."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from kvcache_helpers import eventually

from pyvmem import Context, InvalidArgument
from pyvmem.commands import cli
from pyvmem.kvcache import LayeredCache, LayerShape
from vmem_bench import prefixes
from vmem_bench.prefix_replay import (
    TRACE_BLOCK,
    Blocks,
    Prompt,
    Sliding,
    Tree,
    Turns,
    bound,
    common_tokens,
    conversations,
    hit_tokens,
    read_prompts,
    token_ids,
)

TOKEN = 1024  # bytes
PROMPTS = conversations(150, seed=2)
WHOLE = 1 << 40


def test_equal_ids_mean_equal_tokens() -> None:
    ids = list(token_ids(Prompt(700, (3, 1))))
    assert len(ids) == 700
    assert ids[:2] == [3 * TRACE_BLOCK, 3 * TRACE_BLOCK + 1]
    assert ids[512] == TRACE_BLOCK
    assert len(set(ids)) == 700


def test_synthetic_conversations_share_prefixes() -> None:
    assert conversations(50, seed=3) == conversations(50, seed=3)
    for length, ids in PROMPTS:
        assert (len(ids) - 1) * TRACE_BLOCK < length <= len(ids) * TRACE_BLOCK
        assert ids[0] == 0
        assert len(set(ids)) == len(ids)
    assert 0.1 < bound(PROMPTS) / sum(prompt.length for prompt in PROMPTS) < 0.95
    with pytest.raises(InvalidArgument, match="count is 0"):
        conversations(0, 1)


@pytest.mark.parametrize("unit", [16, 64, 512])
def test_both_agree_with_a_set_of_prefixes(unit: int) -> None:
    """Given ample memory, both find the longest prefix shared with any earlier prompt, in whole
    units."""
    seen: set[tuple[int, int]] = set()
    expected = 0
    for length, ids in PROMPTS:
        whole = [(ids[at * unit // TRACE_BLOCK], at) for at in range(length // unit)]
        known = next((at for at, one in enumerate(whole) if one not in seen), len(whole))
        expected += min(known, (length - 1) // unit) * unit
        seen.update(whole)
    tree, blocks = Tree(unit, TOKEN, WHOLE), Blocks(unit, TOKEN, WHOLE)
    held = len(seen) * unit * TOKEN
    assert hit_tokens(PROMPTS, tree) == (expected, held)
    assert hit_tokens(PROMPTS, blocks) == (expected, held)
    assert tree.evicted == blocks.evicted == 0
    assert tree.tree.check() == []


@pytest.mark.parametrize("units", [12, 40, 200])
def test_budgets_are_kept(units: int) -> None:
    budget = units * 64 * TOKEN
    for cache in (Tree(64, TOKEN, budget), Blocks(64, TOKEN, budget)):
        found, most = hit_tokens(PROMPTS, cache)
        assert most <= budget
        assert cache.evicted > 0
        assert 0 < found < bound(PROMPTS)
        if isinstance(cache, Tree):
            assert cache.tree.check() == []
            assert not any(node.pins for node in cache.tree)


def test_blocks_agree_with_a_plain_queue() -> None:
    """The next block to evict is the least recently used request's last block."""
    rng = random.Random(4)
    cache = Blocks(512, TOKEN, 30 * 512 * TOKEN)
    queue: list[int] = []
    for _ in range(300):
        base = rng.randrange(8) * 100
        ids = [base + at for at in range(rng.randint(1, 12))]
        found = 0
        while found < len(ids) and ids[found] in queue:
            found += 1
        queue = [one for one in queue if one not in ids]
        queue = queue[max(0, len(queue) + len(ids) - 30) :] + ids[::-1]
        expected = min(found, len(ids) - 1) * TRACE_BLOCK
        assert cache.serve(Prompt(len(ids) * TRACE_BLOCK, tuple(ids))) == expected
        assert list(cache._queue) == queue


def test_a_prompt_larger_than_the_budget_is_kept_in_part() -> None:
    prompt = Prompt(10 * TRACE_BLOCK, tuple(range(10)))
    for cache in (
        Tree(512, TOKEN, 4 * TRACE_BLOCK * TOKEN),
        Blocks(512, TOKEN, 4 * TRACE_BLOCK * TOKEN),
    ):
        assert cache.serve(prompt) == 0
        assert cache.serve(prompt) == 4 * TRACE_BLOCK
        assert cache.held_bytes() == 4 * TRACE_BLOCK * TOKEN


def test_blocks_must_divide_the_traces() -> None:
    for block in (0, 24, 1024):
        with pytest.raises(InvalidArgument, match=f"block is {block}; it must divide 512"):
            Blocks(block, TOKEN, WHOLE)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("", "no request"),
        ("{", "Expecting"),
        ("{}", "KeyError: 'input_length'"),
        ("[]", "TypeError"),
        ('{"input_length": 513, "hash_ids": [1]}', "1 ids do not cover 513 tokens"),
        ('{"input_length": 0, "hash_ids": []}', "0 ids do not cover 0 tokens"),
        ('{"input_length": "1", "hash_ids": [1]}', "must be a number"),
        ('{"input_length": 1, "hash_ids": [8388607]}', "not between 0 and 8388606"),
        ('{"input_length": 1, "hash_ids": [-1]}', "not between"),
        (None, "No such file"),
    ],
)
def test_bad_traces(tmp_path: Path, line: str | None, message: str) -> None:
    path = tmp_path / "trace.jsonl"
    if line is not None:
        path.write_text(line)
    with pytest.raises(InvalidArgument, match=message):
        read_prompts(path)


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "mooncake.jsonl"
    lines = [json.dumps({"input_length": n, "hash_ids": ids}) for n, ids in PROMPTS]
    trace.write_text("\n".join(lines))
    assert read_prompts(trace) == PROMPTS
    out = tmp_path / "prefixes.json"
    words = ["bench", "prefixes", "--trace", str(trace), "--budgets", "10G,100G"]
    words += ["--prefixes", "50", "--prompt", "2000", "--rounds", "2", "--out", str(out)]
    assert cli.main(words) == 0
    text = capsys.readouterr().out
    assert "tree, units of 32 tokens, 10G: hit rate" in text
    assert "match of 2,000 tokens: list of int" in text
    kept = json.loads(out.read_text())
    assert kept["format"] == prefixes.FORMAT
    rows = {row["id"]: row for row in kept["parts"]["hits"]["rows"]}
    assert len(rows) == 1 + 2 * 4
    row = rows["hits/tree/g1/64K/10G"]
    total = sum(prompt.length for prompt in PROMPTS)
    found, most = hit_tokens(PROMPTS, Tree(32, 128 << 10, 10 << 30))
    assert row["value"] == pytest.approx(100 * found / total, rel=1e-5)
    assert row["most_bytes"] == most
    assert [aim["applies"] for aim in kept["aims"]] == [False]
    assert (tmp_path / "raw" / "prefixes.json").exists()


def test_command_with_bad_input(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["bench", "prefixes", "--trace", "/nonexistent.jsonl"])
    assert caught.value.code == 2
    assert "/nonexistent.jsonl: No such file or directory" in capsys.readouterr().err
    words = ["bench", "prefixes", "--requests", "5", "--budgets", "10G", "--prompt", "9"]
    assert cli.main(words) == 1
    assert "a prompt of 200 tokens" in capsys.readouterr().err


def conversation(turns: int, start: int, blocks: int = 3) -> list[Prompt]:
    """Returns the prompts of a conversation: each starts with block 0, continues the previous
    prompt, and ends in a partial block.
    """
    ids = [0, *range(start, start + turns * blocks)]
    return [
        Prompt((1 + at * blocks) * TRACE_BLOCK + 7, tuple(ids[: 1 + at * blocks] + [9000 + start]))
        for at in range(1, turns + 1)
    ]


def test_next_turns_that_resume_in_their_slot() -> None:
    one, two = conversation(4, 100), conversation(4, 200)
    prompts = [prompt for pair in zip(one, two, strict=True) for prompt in pair]
    assert common_tokens(prompts) == TRACE_BLOCK
    with Turns(32, 1 << 20, 16, 10_000, TRACE_BLOCK) as cache:
        found = [cache.serve(prompt) for prompt in prompts]
        # The first turn finds nothing, the second finds the system prompt, and the others find all
        # but their new part.
        assert found == [0, *(TRACE_BLOCK * n for n in (1, 4, 4, 7, 7, 10, 10))]
        assert (cache.served, cache.hits, cache.next_turns) == (8, 7, 6)
        assert (cache.resumed, cache.next_resumed) == (6, 6)
        assert cache.hit_tokens - cache.mapped_tokens == TRACE_BLOCK
        # Two prompts continue the same turn: the first resumes in its slot, the other is mapped.
        again = [Prompt(14 * TRACE_BLOCK, (*one[-1].hash_ids[:13], 8000 + at)) for at in (0, 1)]
        for prompt in again:
            assert cache.serve(prompt) == 13 * TRACE_BLOCK
        assert (cache.next_turns, cache.next_resumed) == (8, 7)
        cache.cache.check_integrity()


def test_part_of_a_prefix_may_be_mapped() -> None:
    long, short = conversation(3, 100)[-1], conversation(1, 100)[0]
    with Turns(32, 1 << 20, 16, 10_000, TRACE_BLOCK) as cache:
        cache.serve(short)
        other = Prompt(long.length, long.hash_ids)
        cache.serve(other)  # continues in the slot of `short`
        assert (cache.resumed, cache.mapped_tokens) == (1, 4 * TRACE_BLOCK)
        # shorter than its slot's contents, so it is mapped again
        cache.serve(Prompt(2 * TRACE_BLOCK + 1, (0, 100, 7)))
        assert (cache.hits, cache.resumed) == (2, 1)
        assert cache.hit_tokens - cache.mapped_tokens == 2 * TRACE_BLOCK
        # Two slots hold part of the next prompt; the slot with the longer part is used.
        cache.serve(Prompt(11 * TRACE_BLOCK, (*long.hash_ids[:10], 8000)))
        assert cache.resumed == 2
        cache.cache.check_integrity()


def test_the_cache_agrees_with_the_tree() -> None:
    """Uses ample memory, and prompts that consist of whole blocks."""
    longest = max(prompt.length for prompt in PROMPTS)
    whole = [Prompt(n // TRACE_BLOCK * TRACE_BLOCK, ids[: n // TRACE_BLOCK]) for n, ids in PROMPTS]
    prompts = [prompt for prompt in whole if prompt.length]
    with Turns(32, 1 << 22, 64, longest, TRACE_BLOCK) as cache:
        found = sum(cache.serve(prompt) for prompt in prompts)
        assert found == hit_tokens(prompts, Tree(32, TOKEN, WHOLE))[0] == cache.hit_tokens
        assert 0 < cache.next_resumed <= cache.resumed <= cache.hits < len(prompts)
        assert 0 < cache.mapped_tokens < found


def served(cache: LayeredCache, prompts: list[Prompt], chunk: int) -> list[int]:
    """Computes and records the prompts; returns the number of tokens that each finds cached."""
    out = []
    for prompt in prompts:
        ids = token_ids(prompt)
        taken = cache.alloc_prefix(ids)
        assert taken is not None
        reqid, found = taken
        out.append(found)
        lengths = [0] * cache.config.max_batch
        for end in [*range(found + chunk, prompt.length, chunk), prompt.length]:
            lengths[reqid] = end
            assert cache.step(lengths) == 0
            # A window slides only if no batch is in flight.
            eventually(
                lambda slot=reqid: not any(one.snapshot()[slot].in_flight for one in cache.caches)
            )
        whole = prompt.length // TRACE_BLOCK * TRACE_BLOCK
        cache.free_reqid(reqid, tokens=list(ids)[:whole])
    cache.check_integrity()
    return out


@pytest.mark.parametrize("layers", [(1, 2), (1, 1)])
@pytest.mark.parametrize("chunk", [700, 1 << 20])
def test_the_tree_of_sliding_layers_agrees_with_the_cache(
    host: Context, layers: tuple[int, int], chunk: int
) -> None:
    """Compares the tokens found for each prompt, given ample memory."""
    slides, count = layers
    prompts = PROMPTS[:90]
    tree = Sliding(64, TOKEN, WHOLE, layers, 700 + 192, chunk)
    found = [tree.serve(prompt) for prompt in prompts]
    assert tree.tree.check() == []
    windows = [700] * slides + [0] * (count - slides)
    shapes = [LayerShape(1, 4096 // 64 // 2, 0, window) for window in windows]
    longest = max(prompt.length for prompt in prompts)
    with LayeredCache(
        shapes, host, page_size=4096, max_batch=len(prompts), max_seq_len=longest
    ) as cache:
        assert cache.sharing_unit == 64
        assert served(cache, prompts, chunk) == found
    best = hit_tokens(prompts, Tree(TRACE_BLOCK, TOKEN, WHOLE))[0]
    assert 0 < sum(found) <= best


@pytest.mark.parametrize("units", [12, 40, 200])
def test_a_budget_of_sliding_layers_is_kept(units: int) -> None:
    budget = units * 64 * TOKEN
    tree = Sliding(64, TOKEN, budget, (5, 6), 700, 1 << 20)
    found, most = hit_tokens(PROMPTS, tree)
    assert 0 < most <= budget
    assert tree.evicted
    assert found <= hit_tokens(PROMPTS, Sliding(64, TOKEN, WHOLE, (5, 6), 700, 1 << 20))[0]
    assert tree.tree.check() == []


def test_the_part_windows(tmp_path: Path) -> None:
    out = tmp_path / "windows.json"
    words = ["bench", "prefixes", "--requests", "40", "--budgets", "5G", "--parts", "windows"]
    assert cli.main([*words, "--out", str(out)]) == 0
    rows = {row["id"]: row for row in json.loads(out.read_text())["parts"]["windows"]["rows"]}
    assert list(rows) == ["windows/full/5G", "windows/windows/5G"]
    for row in rows.values():
        assert 0 < row["most_bytes"] <= row["budget_bytes"]
        assert row["value"] > 0


def test_prompts_that_do_not_fit_are_skipped() -> None:
    with Turns(32, 4 * TRACE_BLOCK, 16, 10_000, TRACE_BLOCK) as cache:
        assert cache.serve(Prompt(5 * TRACE_BLOCK, tuple(range(5)))) == 0
        assert (cache.served, cache.hits) == (0, 0)
        assert cache.serve(Prompt(3 * TRACE_BLOCK, tuple(range(3)))) == 0
        assert cache.served == 1


@pytest.mark.parametrize("unit", [0, 24, 4096])
def test_units_without_a_page_size_of_host(unit: int) -> None:
    with pytest.raises(InvalidArgument, match=f"unit is {unit}; it must be a power of two"):
        Turns(unit, 1 << 20, 16, 1000, 0)


def test_parts_can_be_selected(tmp_path: Path) -> None:
    out = tmp_path / "turns.json"
    words = ["bench", "prefixes", "--requests", "60", "--budgets", "100G", "--parts", "turns"]
    assert cli.main([*words, "--slots", "32", "--out", str(out)]) == 0
    kept = json.loads(out.read_text())
    assert list(kept["parts"]) == ["turns"]
    rows = {row["id"]: row for row in kept["parts"]["turns"]["rows"]}
    assert list(rows) == [f"turns/{name}/100G" for name in ("hits", "next", "tokens")]
    for row in rows.values():
        assert row["value"] == pytest.approx(100 * row["mapped"] / row["of"], rel=1e-5)
    assert kept["aims"] == []
    with pytest.raises(SystemExit):
        cli.main(["bench", "prefixes", "--parts", "hits,misses"])
