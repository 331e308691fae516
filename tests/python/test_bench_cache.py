# SPDX-License-Identifier: MIT
"""The benchmarks of the cache and of attention, in their quick form: structure and results."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import pyvmem
from pyvmem.bench import overlap
from pyvmem.cli import main

pytest.importorskip("torch")


def conduct(name: str, folder: Path, backend: str, *options: str) -> dict[str, Any]:
    """The raw file of one quick run."""
    out = folder / f"{name}.json"
    words = ["bench", name, "--quick", "--backend", backend, "--out", str(out), *options]
    assert main(words) == 0
    small = json.loads(out.read_text())
    assert small["format"] == f"vmem-bench-{name}/1"
    assert not any("samples" in row for part in small["parts"].values() for row in part["rows"])
    data: dict[str, Any] = json.loads((folder / "raw" / out.name).read_text())
    return data


def rows(data: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {row["id"]: row for part in data["parts"].values() for row in part["rows"]}


def aims(data: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {aim["id"]: aim for aim in data["aims"]}


# ---- the model -----------------------------------------------------------------------------------


def test_the_models_size_is_that_of_its_public_configuration() -> None:
    from pyvmem.bench.decoder import LLAMA_3_8B
    from pyvmem.layouts.shapes import SHAPES

    shape = SHAPES["Llama-3-8B"]
    assert 2 * LLAMA_3_8B.weights == shape.weight_bytes
    assert LLAMA_3_8B.token_bytes == shape.token_bytes == 128 << 10


@pytest.mark.needs_tensors
def test_decoding_agrees_with_one_prefill(backend: str) -> None:
    """Token by token through the cache, or all at once: the last token's logits are the same."""
    import torch

    from pyvmem.attention import Attention
    from pyvmem.bench.decoder import TINY, Decoder

    config = TINY.config(max_batch=2, max_seq_len=256, overread_rows=192)
    with pyvmem.KVCache(config, backend=backend) as cache:
        attend = Attention(cache)
        model = Decoder(TINY, cache.k(0).device)
        ids = torch.randint(TINY.vocabulary, (9,)).to(cache.k(0).device)
        one, other = cache.alloc_reqid(9), cache.alloc_reqid(9)
        assert one is not None
        assert other is not None
        cache.step([9, 9])
        whole = model(ids, attend, attend.batch([one], [9], [9]))
        assert whole.shape == (1, TINY.vocabulary)
        for length in range(1, 10):
            last = model(ids[length - 1 : length], attend, attend.batch([other], [1], [length]))
        assert torch.allclose(whole.float(), last.float(), atol=0.1)
        assert not torch.equal(whole[0], torch.zeros_like(whole[0]))
        attend.close()


# ---- overlap -------------------------------------------------------------------------------------


def test_lengths_grow_and_start_again() -> None:
    lengths = overlap.Lengths(4, 64, 640)
    for iteration in range(1200):
        now, after = lengths.at(iteration), lengths.at(iteration + 1)
        assert all(64 < length <= 640 for length in now)
        for request, (a, b) in enumerate(zip(now, after, strict=True)):
            assert b == (65 if request in lengths.ended(iteration) else a + 1)
    assert lengths.at(0) == [65, 65 + 575 // 3, 65 + 2 * 575 // 3, 640]
    assert lengths.replaced(0) == [False] * 4
    assert lengths.replaced(1) == [False, False, False, True]
    assert lengths.replaced(600) == [True] * 4
    assert overlap.Lengths(1, 4, 8).at(0) == [5]


def test_spikes_are_counted_against_the_median() -> None:
    assert overlap.spikes([1.0] * 9 + [1.19, 1.21, 5.0]) == 2


@pytest.mark.needs_tensors
def test_overlap(tmp_path: Path, backend: str) -> None:
    data = conduct("overlap", tmp_path, backend)
    part = data["parts"]["iterations"]
    assert part["status"] == "done", part
    found = rows(data)
    for mode in overlap.MODES:
        assert found[f"iterations/time/{mode}"]["n"] == 90
        assert found[f"iterations/time/{mode}"]["rounds"] == 5
        assert found[f"iterations/spikes/{mode}"]["value"] >= 0
    # The same lengths need the same pages, whoever maps them.
    for what in ("grown_pages", "reused_pages", "zeroed_pages"):
        values = [found[f"iterations/{what}/{mode}"]["value"] for mode in ("async", "sync")]
        assert values[0] == values[1]
    if backend == "host":
        assert found["iterations/grown_pages/async"]["value"] > 0
    assert found["iterations/difference"]["value"] <= 0.02
    known = aims(data)
    assert known["p99_async"]["aim"] == 1.03
    assert known["p99_sync"]["aim"] is None
    assert known["spikes_async"]["value"] is not None
    assert not any(aim["applies"] for aim in known.values())
    assert any("attention by" in note for note in part["notes"])


@pytest.mark.needs_tensors
def test_overlap_stops_at_its_deadline(tmp_path: Path, backend: str) -> None:
    data = conduct("overlap", tmp_path, backend, "--deadline", "0")
    assert rows(data)["iterations/time/sync"]["n"] == 20
    assert "the deadline came after 20 iterations" in data["parts"]["iterations"]["notes"]


def test_overlap_of_one_mode_names_what_the_aims_lack(tmp_path: Path) -> None:
    data = conduct("overlap", tmp_path, "host", "--modes", "sync", "--iterations", "10")
    assert "iterations/time/mapped" in aims(data)["p99_sync"]["why"]
    assert "iterations/time/async" not in rows(data)


def test_outputs_that_differ_fail_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(overlap, "_compare", lambda *_: 0.5)
    out = tmp_path / "overlap.json"
    words = ["bench", "overlap", "--quick", "--backend", "host", "--iterations", "5"]
    assert main([*words, "--out", str(out)]) == 1
    part = json.loads(out.read_text())["parts"]["iterations"]
    assert part["status"] == "failed"
    assert "outputs differ by 0.5" in part["why"]
    assert part["rows"]


@pytest.mark.parametrize("text", ["mapped,fast", "sync,sync", ""])
def test_unknown_modes_are_named(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as found:
        main(["bench", "overlap", "--modes", text])
    assert found.value.code == 2
    assert "mapped,async,sync" in capsys.readouterr().err


def test_an_unusable_back_end(capsys: pytest.CaptureFixture[str]) -> None:
    unusable = [one.backend for one in pyvmem.probe() if not one.usable]
    if not unusable:
        pytest.skip("every back end works here")
    assert main(["bench", "overlap", "--backend", unusable[0]]) == 2
    assert capsys.readouterr().err.startswith("vmem bench: ")
