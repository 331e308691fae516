# SPDX-License-Identifier: MIT
"""The replay of prompts against two caches of prefixes, and the benchmark around it."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from pyvmem import InvalidArgument, cli
from pyvmem.bench import prefixes
from pyvmem.bench.prefix_replay import (
    TRACE_BLOCK,
    Blocks,
    Prompt,
    Tree,
    bound,
    conversations,
    hit_tokens,
    read_prompts,
    token_ids,
)

TOKEN = 1024  # bytes
PROMPTS = conversations(150, seed=2)
WHOLE = 1 << 40


def test_equal_ids_are_equal_tokens_and_no_others() -> None:
    ids = list(token_ids(Prompt(700, (3, 1))))
    assert len(ids) == 700
    assert ids[:2] == [3 * TRACE_BLOCK, 3 * TRACE_BLOCK + 1]
    assert ids[512] == TRACE_BLOCK
    assert len(set(ids)) == 700


def test_made_up_conversations_share_prefixes() -> None:
    assert conversations(50, seed=3) == conversations(50, seed=3)
    for length, ids in PROMPTS:
        assert (len(ids) - 1) * TRACE_BLOCK < length <= len(ids) * TRACE_BLOCK
        assert ids[0] == 0
        assert len(set(ids)) == len(ids)
    assert 0.1 < bound(PROMPTS) / sum(prompt.length for prompt in PROMPTS) < 0.95
    with pytest.raises(InvalidArgument, match="count is 0"):
        conversations(0, 1)


@pytest.mark.parametrize("unit", [16, 64, 512])
def test_both_find_what_a_set_of_prefixes_finds(unit: int) -> None:
    """Without a budget: the longest prefix in whole units that some earlier prompt began with."""
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
            assert cache.tree.locked_pages == 0


def test_blocks_against_a_plain_queue() -> None:
    """The next block to go is that of the request longest ago, and of that its last."""
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
    assert cli.main(["bench", "prefixes", "--trace", "/nonexistent.jsonl"]) == 1
    assert "FileNotFoundError" in capsys.readouterr().err
    words = ["bench", "prefixes", "--requests", "5", "--budgets", "10G", "--prompt", "9"]
    assert cli.main(words) == 1
    assert "a prompt of 200 tokens" in capsys.readouterr().err
