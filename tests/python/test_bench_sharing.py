# SPDX-License-Identifier: MIT
"""Checks `vmem bench sharing` and `vmem bench swap`: the memory that forks save, and two ways to
preempt.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pyvmem import KVCache, KVCacheConfig
from pyvmem.commands.cli import main
from pyvmem.kvcache.layout import Layout
from pyvmem.serve import model
from vmem_bench import sharing
from vmem_bench.sharing import Family, saved

SHAPE: dict[str, Any] = {"num_layers": 2, "num_kv_heads": 2, "head_dim": 64, "dtype": "bfloat16"}


def blocks(rows: int, longest: int = 1024) -> Layout:
    config = KVCacheConfig(**SHAPE, max_batch=1, max_seq_len=longest)
    return Layout(config, rows * 256)


def test_samples_share_the_full_blocks_of_their_prompt() -> None:
    family = Family(blocks(16), 40, 3)
    # two shared full blocks, and a partly filled block for each request
    assert (family.held, family.alone) == (2 + 3, 9)
    for _ in range(9):
        family.step([0, 1, 2])
    assert (family.held, family.alone) == (2 + 3 * 2, 12)


def test_dropped_beams_free_their_blocks() -> None:
    family = Family(blocks(4), 4, 2)
    for _ in range(8):
        family.step([0, 1])
    assert family.held == 1 + 2 * 2
    family.step([1, 1])  # both continue from the second: its full blocks are shared
    assert (family.held, family.alone) == (3 + 2, 8)
    assert saved(blocks(4), 4, [[0, 0]] * 2) == pytest.approx(1 - (1 + 3 + 3) / (2 + 4 + 4))


@pytest.mark.parametrize("seed", range(3))
def test_a_real_cache_holds_as_many_pages(seed: int) -> None:
    rng = random.Random(seed)
    width, prompt = 4, rng.randrange(1, 70)
    config = KVCacheConfig(**SHAPE, max_batch=2 * width, max_seq_len=256, page_size=4096)
    with KVCache(config, backend="host") as cache:
        tensors = cache.layout.num_tensors
        family = Family(cache.layout, prompt, width)
        slot = cache.alloc_reqid(prompt)
        assert slot is not None
        lengths = [0] * config.max_batch
        lengths[slot] = prompt
        assert cache.step(lengths) == 0
        forked = cache.fork_many(slot, width - 1)
        assert forked is not None
        beams = [slot, *forked]
        for _ in range(60):
            parents = [rng.randrange(width) for _ in range(width)]
            family.step(parents)
            after = []
            for place, parent in enumerate(parents):
                if parent in parents[:place]:
                    child = cache.fork(beams[parent])
                    assert child is not None
                    after.append(child)
                else:
                    after.append(beams[parent])
            for slot in set(beams) - set(after):
                cache.free_reqid(slot)
            beams = after
            lengths = [0] * config.max_batch
            for slot in beams:
                lengths[slot] = family.length
            assert cache.step(lengths) == 0
            assert cache.stats().active_pages == family.held * tensors
        for slot in beams:
            cache.free_reqid(slot)


class Words:
    """A tokenizer with only a few ids."""

    chat_template = None

    def __call__(self, text: str) -> dict[str, list[int]]:
        return {"input_ids": [1 + ord(letter) % 60 for letter in text[:12]]}


def test_beams_match_transformers_search(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(1)
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
    )
    tiny = transformers.LlamaForCausalLM(config).eval()
    loaded = SimpleNamespace(model=tiny, tokenizer=Words())
    monkeypatch.setattr(model, "load", lambda path: loaded)
    monkeypatch.setattr(sharing, "LOADS", {"short": sharing.Load("few", 20, 7)})
    out = tmp_path / "sharing.json"
    words = ["bench", "sharing", "--widths", "3", "--prompts", "2", "--blocks", "4"]
    assert main([*words, "--out", str(out)]) == 0
    data = json.loads(out.read_text())
    assert data["parts"]["beams"]["status"] == "done", data["parts"]["beams"]
    raw = json.loads((tmp_path / "raw/sharing.json").read_text())
    (kept,) = [row for row in raw["parts"]["beams"]["rows"] if "samples" in row]
    assert len(kept["samples"]) == 2
    for parents in kept["samples"]:
        assert len(parents) == 7
        assert all(len(step) == 3 and set(step) <= {0, 1, 2} for step in parents)
    found = {row["id"]: row for row in data["parts"]["beams"]["rows"]}
    row = found["beams/short/Llama-3-8B/3/blocks/4"]
    system = next(iter(sharing.systems(sharing.MODELS["Llama-3-8B"], [], [], [4])))
    layout = system.layout(sharing.MODELS["Llama-3-8B"], 27)
    each = [100 * saved(layout, 20, parents) for parents in kept["samples"]]
    assert row["value"] == pytest.approx(sum(each) / 2, rel=1e-4)
    samples = {row["id"]: row["value"] for row in data["parts"]["sampling"]["rows"]}
    assert row["least"] >= samples["sampling/short/Llama-3-8B/3/blocks/4"]


def test_without_a_model_beams_are_not_run(tmp_path: Path, capsys: Any) -> None:
    out = tmp_path / "sharing.json"
    words = ["bench", "sharing", "--widths", "2", "--model", str(tmp_path / "none.gguf")]
    assert main([*words, "--out", str(out)]) == 0
    parts = json.loads(out.read_text())["parts"]
    assert parts["sampling"]["status"] == "done"
    assert parts["beams"]["status"] == "not run"
    assert "none.gguf" in parts["beams"]["why"]


# ---- swap ----------------------------------------------------------------------------------------


def test_swapping_and_computing_again(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    out = tmp_path / "swap.json"
    words = ["bench", "swap", "--quick", "--backend", "host", "--out", str(out)]
    assert main([*words, "--blocks", "16,64"]) == 0
    data = json.loads(out.read_text())
    part = data["parts"]["swap"]
    assert part["status"] == "done", part
    found = {row["id"]: row for row in part["rows"]}
    for way in ("pages", "prefix", "blocks/16", "blocks/64"):
        assert found[f"swap/200/{way}/out"]["n"] == found[f"swap/200/{way}/in"]["n"] == 2
    assert found["swap/200/again"]["n"] == 2
    assert found["swap/200/blocks/16/pieces"]["value"] == 13 * 4  # per tensor: 2 layers, K and V
    aims = {aim["id"]: aim["value"] for aim in data["aims"]}
    assert aims.keys() == {"200_pages", "200_blocks_16", "200_blocks_64"}
    assert all(value > 0 for value in aims.values())


@pytest.mark.parametrize("way", ["pages", "blocks"])
def test_rows_changed_by_swapping_fail_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    pytest.importorskip("torch")
    if way == "pages":
        swap_in = KVCache.swap_in

        def changed(self: KVCache, swapped: Any, stream: Any = None) -> int | None:
            slot = swap_in(self, swapped, stream)
            self.k(0)[0, 7].zero_()
            return slot

        monkeypatch.setattr(KVCache, "swap_in", changed)
    else:
        from vmem_bench import swapping

        monkeypatch.setattr(swapping.Blocks, "back", lambda self: None)
    out = tmp_path / "swap.json"
    assert main(["bench", "swap", "--quick", "--backend", "host", "--out", str(out)]) == 1
    part = json.loads(out.read_text())["parts"]["swap"]
    assert part["status"] == "failed"
    assert "the restored rows differ" in part["why"]
