# SPDX-License-Identifier: MIT
"""The cache and attention benchmarks in their quick form: structure and results."""

from __future__ import annotations

import argparse
import functools
import json
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import pyvmem
from pyvmem.attention import infer
from pyvmem.commands.cli import main
from vmem_bench import deferred, fill, overlap, overlap_modes, paged, prefix_map
from vmem_bench.command import Command
from vmem_bench.footprint import Footprint
from vmem_bench.fragments import Fragments
from vmem_bench.paged_flashinfer import FlashInfer
from vmem_bench.paged_kernels import (
    CASES,
    SETS,
    TINY_CASES,
    TINY_SETS,
    Call,
    Case,
    Gather,
    of_slots,
)

torch = pytest.importorskip("torch")


def conduct(
    name: str, folder: Path, backend: str, *options: str, status: int = 0
) -> dict[str, Any]:
    """Returns the raw results of one quick run."""
    out = folder / f"{name}.json"
    words = ["bench", name, "--quick", "--backend", backend, "--out", str(out), *options]
    assert main(words) == status
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


def test_the_models_size_matches_its_public_configuration() -> None:
    from pyvmem.layouts.shapes import SHAPES
    from vmem_bench.decoder import LLAMA_3_8B

    shape = SHAPES["Llama-3-8B"]
    assert 2 * LLAMA_3_8B.weights == shape.weight_bytes
    assert LLAMA_3_8B.token_bytes == shape.token_bytes == 128 << 10


@pytest.mark.needs_tensors
def test_decoding_agrees_with_one_prefill(backend: str) -> None:
    """Computes the last token's logits by decoding through the cache and with a single prefill; the
    two must agree.
    """
    from pyvmem.attention import Attention
    from vmem_bench.decoder import TINY, Decoder

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
    lengths = overlap_modes.Lengths(4, 64, 640)
    for iteration in range(1200):
        now, after = lengths.at(iteration), lengths.at(iteration + 1)
        assert all(64 < length <= 640 for length in now)
        for request, (a, b) in enumerate(zip(now, after, strict=True)):
            assert b == (65 if request in lengths.ended(iteration) else a + 1)
    assert lengths.at(0) == [65, 65 + 191, 65 + 2 * 191, 65 + 3 * 191]
    assert lengths.replaced(0) == [False] * 4
    assert lengths.replaced(2) == [False] * 4
    assert lengths.replaced(3) == [False, False, False, True]
    assert lengths.replaced(600) == [True] * 4
    assert overlap_modes.Lengths(1, 4, 8).at(0) == [5]


@pytest.mark.needs_tensors
@pytest.mark.parametrize("name", ["overlap", "deferred"])
def test_the_requested_page_size_is_used(tmp_path: Path, name: str) -> None:
    """With larger pages, the same lengths need fewer of them."""
    pages = []
    for page in ("4K", "16K"):
        fewer = ["--modes", "sync", "--iterations", "20"] if name == "overlap" else []
        data = conduct(name, tmp_path, "host", "--page", page, *fewer)
        assert data["options"]["page"] == int(page[:-1]) << 10
        part = "iterations" if name == "overlap" else "prefill"
        pages.append(rows(data)[f"{part}/grown_pages/sync"]["value"])
    assert pages[0] > pages[1] > 0


def test_spikes_are_counted_against_the_median() -> None:
    assert overlap_modes.spikes([1.0] * 9 + [1.19, 1.21, 5.0]) == 2


@pytest.mark.needs_tensors
def test_overlap(tmp_path: Path, backend: str) -> None:
    data = conduct("overlap", tmp_path, backend, "--ahead", "1")
    part = data["parts"]["iterations"]
    assert part["status"] == "done", part
    found = rows(data)
    for mode in overlap_modes.MODES:
        assert found[f"iterations/time/{mode}"]["n"] == 90
        assert found[f"iterations/time/{mode}"]["rounds"] == 5
        assert found[f"iterations/spikes/{mode}"]["value"] >= 0
    # The same lengths need the same number of pages, whichever thread maps them. The number of new
    # pages depends on when the background thread unmaps a freed slot's pages.
    needed = []
    for mode in ("async", "sync"):
        grown, reused, zeroed = (
            found[f"iterations/{what}_pages/{mode}"]["value"]
            for what in ("grown", "reused", "zeroed")
        )
        needed.append(grown + reused)
        assert 0 <= zeroed <= reused
    assert needed[0] == needed[1]
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
    data = conduct("overlap", tmp_path, backend, "--deadline", "0.001")
    assert rows(data)["iterations/time/sync"]["n"] == 20
    assert "the deadline passed after 20 iterations" in data["parts"]["iterations"]["notes"]


def test_overlap_of_one_mode_names_the_missing_modes(tmp_path: Path) -> None:
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


# ---- deferred ------------------------------------------------------------------------------------


@pytest.mark.needs_tensors
def test_deferred(tmp_path: Path, backend: str) -> None:
    data = conduct("deferred", tmp_path, backend)
    part = data["parts"]["prefill"]
    assert part["status"] == "done", part
    found = rows(data)
    for mode in deferred.MODES:
        assert found[f"prefill/time/{mode}"]["n"] == (1 if mode == "pages" else 3)
    pages = found["prefill/reused_pages/reuse"]["value"]
    assert pages > 0
    for mode, grown, reused in (
        ("mapped", 0, 0),
        ("reuse", 0, pages),
        ("sync", pages, 0),
        ("pages", pages, 0),
    ):
        assert found[f"prefill/grown_pages/{mode}"]["value"] == grown
        assert found[f"prefill/reused_pages/{mode}"]["value"] == reused
    assert found["prefill/difference"]["value"] <= 0.02
    known = aims(data)
    assert known["prefill_reuse"]["aim"] == 1.01
    assert known["prefill_sync"]["value"] is not None
    assert known["prefill_sync"]["aim"] is None
    assert not any(aim["applies"] for aim in known.values())


def test_prefills_that_differ_fail_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deferred, "_compare", lambda _: float("nan"))
    out = tmp_path / "deferred.json"
    assert main(["bench", "deferred", "--quick", "--backend", "host", "--out", str(out)]) == 1
    part = json.loads(out.read_text())["parts"]["prefill"]
    assert part["status"] == "failed"
    assert "outputs differ by nan" in part["why"]
    assert part["rows"]


def test_a_mode_that_cannot_be_created_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none(*_: Any) -> None:
        raise pyvmem.OutOfMemory("the device is full", errno=12)

    monkeypatch.setattr(deferred, "Fragments", none)
    data = conduct("deferred", tmp_path, "host")
    part = data["parts"]["prefill"]
    assert part["status"] == "partial"
    assert part["missing"] == [{"id": "prefill/time/pages", "why": "the device is full"}]
    assert "prefill/time/sync" in rows(data)
    assert "prefill/time/pages" in aims(data)["prefill_pages"]["why"]


def test_a_failure_midway_keeps_finished_measurements(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    iterate = overlap_modes.Mode.iterate

    def failing(self: overlap_modes.Mode, iteration: int, *more: Any, **options: Any) -> None:
        if iteration == 250 and self.name == "async":
            raise RuntimeError("deliberate")
        iterate(self, iteration, *more, **options)

    monkeypatch.setattr(overlap_modes.Mode, "iterate", failing)
    out = tmp_path / "o.json"
    words = ["bench", "overlap", "--backend", "host", "--low", "64", "--high", "640"]
    words += ["--batch", "4", "--block", "20", "--iterations", "300", "--out", str(out)]
    assert main(words) == 1
    part = json.loads(out.read_text())["parts"]["iterations"]
    assert part["status"] == "failed"
    assert part["why"] == "RuntimeError: deliberate"
    assert next(r for r in part["rows"] if r["id"] == "iterations/time/sync")["n"] == 200


def test_fragments_are_single_pages(backend: str) -> None:
    page = 4096 if backend == "host" else 64 << 10
    if backend == "cuda":
        pytest.skip("pages of 2 MB")
    with Fragments(backend, 0, page, 64 * page) as fragments:
        context = fragments.context
        assert context.stats().free_bytes >= 64 * page
        reservation = context.reserve(128 * page)
        with context.create(64 * page) as pages:
            before = context.stats().map_calls
            reservation.map(0, pages)
            if backend != "uvm":  # uvm maps all pages in one call
                assert context.stats().map_calls - before == 64
            reservation.unmap(0, 64 * page)
        reservation.close()
        context.check()


# ---- prefix-map ----------------------------------------------------------------------------------


def test_prefix_map(tmp_path: Path, backend: str) -> None:
    data = conduct("prefix-map", tmp_path, backend)
    found, part = rows(data), data["parts"]["prefix"]
    if backend == "cuda":  # only 2 MB pages, and some drivers have no read-only mappings
        assert part["status"] in ("done", "not run"), part
        return
    assert part["status"] == "done", part
    for kind in prefix_map.KINDS:
        assert found[f"prefix/map/{kind}"]["n"] == 3
        assert found[f"prefix/match/{kind}"]["n"] == 3
        # the benchmark checked that no iteration made a driver call
        assert found[f"prefix/resume/{kind}"]["n"] == 3
        assert found[f"prefix/bytes/{kind}"]["value"] == 2048 * 4 * 2048
    pages = 4 * 2048 * 2048 // found["prefix/map/fragmented"]["page"]
    assert found["prefix/segments/fragmented"]["value"] >= pages
    assert found["prefix/segments/runs"]["value"] < pages
    known = aims(data)
    assert [known[f"prefix_{kind}"]["aim"] for kind in prefix_map.KINDS] == [6.0, 2.0, None]
    assert not any(aim["applies"] for aim in known.values())


def test_a_prefix_with_other_contents_fails_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    marks = iter(range(1 << 30))
    monkeypatch.setattr(prefix_map._Kind, "_mark", lambda *_: next(marks).to_bytes(16, "little"))
    out = tmp_path / "p.json"
    assert main(["bench", "prefix-map", "--quick", "--backend", "host", "--out", str(out)]) == 1
    part = json.loads(out.read_text())["parts"]["prefix"]
    assert part["status"] == "failed"
    assert "WrongResult: tensor" in part["why"]


# ---- kernels -------------------------------------------------------------------------------------


def test_footprints_have_every_layout_and_memory(tmp_path: Path) -> None:
    words = ("--kernels", "sdpa", "--footprint", "2M,16K")
    found = conduct("kernels", tmp_path, "host", *words)
    part = found["parts"]["sdpa"]
    assert found["options"]["footprint"] == [2 << 20, 16 << 10]
    assert part["missing"] == [{"id": "sdpa/16K/*/decode_64", "why": "not even one request fits"}]
    layouts = ("slots1", "slots2", "blocks1", "blocks2")
    wanted = {f"sdpa/2M/{one}/decode_64" for one in layouts}
    wanted |= {f"sdpa/2M/slots{one}/prefill_32_64" for one in (1, 2)}
    assert set(rows(found)) == {
        f"{row}/{kind}" for row in wanted for kind in ("malloc", "4K", "2M", "entries", "cache")
    }
    # Keys and values of 2 layers with 2 heads of 32 elements take 512 bytes per token; there are 64
    # requests of 64 tokens.
    row = rows(found)["sdpa/2M/slots2/decode_64/4K"]
    assert row["bytes"] == 64 * 64 * 512 == 2 << 20
    ratio = aims(found)["sdpa_2M/blocks1/decode_64_2M"]
    assert ratio["rows"] == ["sdpa/2M/blocks1/decode_64/2M", "sdpa/2M/blocks1/decode_64/malloc"]
    values = [rows(found)[one]["median"] for one in ratio["rows"]]
    assert ratio["value"] == pytest.approx(values[0] / values[1], rel=1e-4)


def test_corrupt_memory_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill, filled = Footprint._fill, []

    def spoiled(self: Footprint, flat: torch.Tensor) -> None:
        fill(self, flat)
        filled.append(flat.numel())
        if len(filled) == 2:
            flat[0] = 1e4

    monkeypatch.setattr(Footprint, "_fill", spoiled)
    words = ("--kernels", "sdpa", "--footprint", "2M")
    found = conduct("kernels", tmp_path, "host", *words, status=1)
    assert found["parts"]["sdpa"]["status"] == "failed"
    assert "slots1/decode_64, 4K: differs by" in found["parts"]["sdpa"]["why"]


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Runs all kernel benchmarks on `host`, where SDPA is the only kernel."""
    folder = tmp_path_factory.mktemp("kernels")
    return conduct("kernels", folder, "host", "--kernels", "fa3,flashinfer,fa2,sdpa")


def test_kernels_that_cannot_run_say_why(kernels: dict[str, Any]) -> None:
    for name in ("fa3", "flashinfer", "fa2"):
        part = kernels["parts"][name]
        assert part["status"] == "not run"
        assert part["why"] == "needs a GPU"
        assert part["missing"] == [{"id": f"{name}/*", "why": "needs a GPU"}]


def test_every_case_has_every_shape_and_memory(kernels: dict[str, Any]) -> None:
    assert kernels["parts"]["sdpa"]["status"] == "done"
    found = rows(kernels)
    forms = [f"contiguous/{name}" for name in ("random0", "random1", "malloc0", "malloc1")]
    forms += [f"paged{block}/{name}" for block in (16, 64) for name in ("malloc0", "malloc1")]
    wanted = {f"sdpa/{case.name}/{form}" for case in TINY_CASES for form in forms}
    slots = [f"{how}/{name}" for how in ("slots", "layered") for name in ("random0", "random1")]
    plain = [case for case in TINY_CASES if not case.tuned]
    assert set(found) == wanted | {f"sdpa/{case.name}/{form}" for case in plain for form in slots}
    note = found["sdpa/decode_b1_1k_tuned/paged16/malloc0"]["note"]
    assert note.endswith(" splits, a sample is the mean of 4 calls")
    assert "note" not in found["sdpa/prefill_512/contiguous/random0"]
    assert any("splits (0: the" in note for note in kernels["parts"]["sdpa"]["notes"])
    # Eight of the twelve cases choose the number of splits; for two requests, the last tokens are
    # compared in float32.
    notes = kernels["parts"]["sdpa"]["notes"]
    assert sum("14 outputs checked" in n for n in notes) == 3
    assert sum("10 outputs checked" in n for n in notes) == 1


def test_ours_is_compared_with_the_best_block_and_with_16(kernels: dict[str, Any]) -> None:
    found, known = rows(kernels), aims(kernels)

    def median(form: str) -> float:
        names = ("random0", "random1") if form == "contiguous" else ("malloc0", "malloc1")
        values = [found[f"sdpa/prefill_512/{form}/{name}"]["median"] for name in names]
        return sum(values) / 2

    best = min(median("paged16"), median("paged64")) / median("contiguous")
    assert known["sdpa_prefill_512_best"]["value"] == pytest.approx(best, rel=1e-3)
    expected = median("paged16") / median("contiguous")
    assert known["sdpa_prefill_512_16"]["value"] == pytest.approx(expected, rel=1e-3)
    assert known["sdpa_prefill_512_best"]["aim"] is None  # not a paged kernel


def test_decoding_reports_its_read_rate(kernels: dict[str, Any]) -> None:
    """The rate, used for the roofline, counts all keys and values: two bfloat16 heads per row."""
    row = rows(kernels)["sdpa/decode_b2_1k/contiguous/random0"]
    assert row["bytes"] == 2 * 1024 * 2 * 128 * 2 * 2
    assert row["gb_per_s"] == pytest.approx(row["bytes"] / row["median"] / 1e6, rel=1e-3)
    assert "gb_per_s" not in rows(kernels)["sdpa/prefill_512/contiguous/random0"]


def test_sets_of_cases_are_chosen_by_their_names() -> None:
    names = [case.name for cases in SETS.values() for case in cases]
    assert len(set(names)) == len(names)
    assert {case.kv_heads for case in SETS["heads"]} == {32, 8, 4, 1}
    assert max(case.kv_len for case in SETS["long"]) == 192 << 10

    def chosen(cases: str, backend: str = "stock") -> list[str]:
        args = argparse.Namespace(cases=cases)
        command: Any = SimpleNamespace(args=args, quick=False, backend=backend)
        return [case.name for case in paged._chosen(command)]

    assert chosen("base") == [case.name for case in CASES]
    assert chosen("long,decode_mqa,long") == [*(c.name for c in SETS["long"]), "decode_mqa"]
    assert chosen("prefill_64k") == ["prefill_64k"]
    assert chosen("base", "host") == [case.name for case in TINY_CASES]
    assert chosen("heads", "host") == ["decode_mha", "decode_mqa", "prefill_mha", "prefill_mqa"]
    assert chosen("nothing") == []


def test_a_stopped_run_has_written_its_finished_cases(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    measure, cases = paged._one, [case.name for case in TINY_SETS["heads"]]

    def stopped(bench: Any, part: Any, case: Case, deadline: Any) -> None:
        if case.name == cases[2]:
            raise KeyboardInterrupt
        measure(bench, part, case, deadline)

    monkeypatch.setattr(paged, "_one", stopped)
    out = str(tmp_path / "kernels.json")
    words = ("--kernels", "sdpa", "--cases", "heads", "--out", out)
    assert main(["bench", "kernels", "--quick", "--backend", "host", *words]) == 130
    last = capsys.readouterr().err.splitlines()[-1]
    assert last == f"vmem bench: interrupted: {out} is partial, with sdpa"
    data = json.loads((tmp_path / "kernels.json").read_text())
    assert data["interrupted"] is True
    assert json.loads((tmp_path / "raw/kernels.json").read_text())["interrupted"] is True
    part = data["parts"]["sdpa"]
    assert (part["status"], part["why"]) == ("partial", "it was interrupted")
    assert all(aims(data)[f"sdpa_{name}_16"]["value"] for name in cases[:2])
    assert not any(cases[2] in name for name in rows(data))


def test_heads_from_mha_to_mqa_in_other_pages(tmp_path: Path) -> None:
    options = ("--kernels", "sdpa", "--cases", "heads", "--page", "2M")
    data = conduct("kernels", tmp_path, "host", *options)
    assert data["options"]["page"] == 2 << 20
    found = rows(data)
    for name, kv_heads in (("mha", 4), ("mqa", 1)):
        row = found[f"sdpa/decode_{name}/contiguous/random0"]
        assert row["bytes"] == 2 * 512 * kv_heads * 128 * 2 * 2
    assert "contiguous 2M pages" in aims(data)["sdpa_decode_mqa_16"]["what"]


def test_unsupported_pages_are_rejected(tmp_path: Path) -> None:
    data = conduct("kernels", tmp_path, "host", "--kernels", "sdpa", "--page", "4M", status=3)
    assert data["parts"]["sdpa"]["missing"] == [{"id": "sdpa/*", "why": "host has no pages of 4M"}]


def test_decoding_is_compared_with_the_roofline(tmp_path: Path) -> None:
    args = argparse.Namespace(backend="host", device=0, quick=True, fa3=None, deadline=1, out=None)
    command = Command(args, "kernels", {})
    part = command.record.part("fa3", "")
    for memory, rate in (("random0", 2000.0), ("random1", 3000.0)):
        part.value(f"decode_b32_16k/contiguous/{memory}", "", memory, 1.0, "ms", gb_per_s=rate)
    for case in CASES:
        paged._aims(command, "fa3", case, (16,))
    found = {aim["id"]: aim for aim in command.aims.found}
    assert found["fa3_decode_b32_16k_roofline"]["value"] is None
    assert "fa3/peak" in found["fa3_decode_b32_16k_roofline"]["why"]
    assert "fa3_prefill_16k_roofline" not in found
    part.value("peak", "", "device", 5000.0, "GB/s")
    for case in CASES:
        paged._aims(command, "fa3", case, (16,))
    found = {aim["id"]: aim for aim in command.aims.found}
    assert found["fa3_decode_b32_16k_roofline"]["value"] == pytest.approx(0.5)


def test_the_goals_of_paged_kernels(tmp_path: Path) -> None:
    args = argparse.Namespace(backend="host", device=0, quick=True, fa3=None, deadline=1, out=None)
    command = Command(args, "kernels", {})
    for case in CASES:
        paged._aims(command, "fa3", case, (16, 256))
    goals = {aim["id"]: aim["aim"] for aim in command.aims.found if aim["aim"]}
    assert goals == {
        "fa3_decode_b1_16k_tuned_best": 0.97,
        "fa3_decode_b16_16k_best": 0.97,
        "fa3_decode_b32_16k_best": 0.97,
        "fa3_decode_b128_4k_best": 0.97,
        "fa3_prefill_16k_best": 0.99,
        "fa3_prefill_64k_best": 0.99,
        "fa3_chunk_2k_64k_best": 0.99,
        "fa3_chunks_512_32k_best": 0.99,
    }
    assert all(aim["value"] is None and aim["why"] for aim in command.aims.found)
    command.aims.found.clear()
    for case in (*CASES, *SETS["long"]):
        paged._aims(command, "flashinfer", case, (16,))
    goals = {aim["id"]: aim["aim"] for aim in command.aims.found if aim["id"].endswith("_slots")}
    wanted = {f"flashinfer_prefill_{n}k_slots": 1.10 for n in (64, 128, 192)}
    assert {name: aim for name, aim in goals.items() if aim} == wanted
    for case in CASES:
        paged._aims(command, "fa2", case, ())
    added = [aim["id"] for aim in command.aims.found if aim["id"].startswith("fa2_")]
    assert added == [f"fa2_{case.name}_roofline" for case in CASES if case.decodes]


@pytest.mark.parametrize("form", ["contiguous", "paged", "slots"])
def test_a_kernel_with_wrong_results_fails_the_run(
    form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = getattr(Gather, form)

    def wrong(self: Gather, case: Case, *more: Any) -> Call:
        call: Call = right(self, case, *more)
        if case.name == "prefill_512":
            return lambda q, k, v: call(q, k, v.roll(1, 1))
        return call

    monkeypatch.setattr(Gather, form, wrong)
    out = tmp_path / "k.json"
    words = ["bench", "kernels", "--quick", "--backend", "host", "--kernels", "sdpa"]
    assert main([*words, "--out", str(out)]) == 1
    part = json.loads(out.read_text())["parts"]["sdpa"]
    assert part["status"] == "failed"
    assert "prefill_512" in part["why"]
    assert [item["id"] for item in part["missing"]] == ["sdpa/prefill_512"]
    assert any(row["id"].startswith("sdpa/chunks_128_512/") for row in part["rows"])


def test_selected_cases(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--kernels", "sdpa", "--cases", "decode_b2_1k"]
    data = conduct("kernels", tmp_path, "host", *options)
    assert {name.split("/")[1] for name in rows(data)} == {"decode_b2_1k"}
    words = ["bench", "kernels", "--quick", "--backend", "host", "--cases", "nothing"]
    assert main(words) == 2
    assert "no case of nothing" in capsys.readouterr().err


class _Wrapper:
    """Mimics `plan` and `run` of FlashInfer's wrappers."""

    def __init__(self, workspace: torch.Tensor, layout: str, backend: str) -> None:
        assert layout == "NHD"
        self.backend = backend

    def plan(self, *shape: Any, **more: Any) -> None:
        self.shape, self.more = shape, more

    def run(self, q: torch.Tensor, *rows: Any, out: torch.Tensor) -> torch.Tensor:
        k, v = rows if len(rows) == 2 else rows[0]
        starts, wheres, *_ = self.shape
        batch = len(starts) - 1
        case = Case("", "", batch, int(starts[1]), 0, False, *q.shape[1:2], *k.shape[-2:])
        if len(rows) == 1:
            table, last = self.shape[2].view(batch, -1), self.shape[3]
            size = self.shape[7]
            assert k.shape[1] == size == int(last[0])
            assert int(wheres[-1]) == table.numel()
            case = replace(case, kv_len=int(wheres[1]) * size)
            return out.copy_(Gather().paged(case, table, 0)(q, k, v))
        case = replace(case, kv_len=int(wheres[1]))
        shape = (batch, case.kv_len, *k.shape[1:])
        return out.copy_(Gather().contiguous(case, 0)(q, k.view(shape), v.view(shape)))


def test_flashinfer_gets_the_right_shapes() -> None:
    flashinfer = object.__new__(FlashInfer)
    flashinfer._device = torch.device("cpu")
    flashinfer._workspace = torch.empty(0)
    flashinfer._why = {"fa2": "", "fa3": "no compiler"}
    flashinfer._prefill = SimpleNamespace(
        BatchPrefillWithRaggedKVCacheWrapper=_Wrapper, BatchPrefillWithPagedKVCacheWrapper=_Wrapper
    )
    case = TINY_CASES[1]
    q = torch.randn(2, 4, 128, dtype=torch.bfloat16)
    k, v = torch.randn(2, 2, 1024, 2, 128, dtype=torch.bfloat16)
    wanted = Gather().contiguous(case, 0)(q, k, v)
    assert torch.equal(flashinfer.contiguous(case, 0)(q, k, v), wanted)
    table = torch.randperm(32, dtype=torch.int32).view(2, 16)
    cut = (32, 64, 2, 128)
    found = flashinfer.paged(case, table, 0)(q, k.view(cut), v.view(cut))
    wanted = Gather().paged(case, table, 0)(q, k.view(cut), v.view(cut))
    assert torch.equal(found, wanted)
    assert flashinfer._plan(case, 4, 64)["fixed_split_size"] == 4
    assert flashinfer._plan(case, 1, 1)["fixed_split_size"] == 1024
    assert "fixed_split_size" not in flashinfer._plan(case, 0, 1)
    with pytest.raises(RuntimeError, match="fa3 was not compiled: no compiler"):
        flashinfer.contiguous(TINY_CASES[2], 0)


def test_flashinfer_makes_a_call_per_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts whose rows have an arbitrary stride need one call per slot; decoding uses the paged
    call.
    """
    flashinfer = object.__new__(FlashInfer)
    flashinfer._device = torch.device("cpu")
    flashinfer._why = {"fa2": "", "fa3": "", "single": "no compiler"}
    case = replace(TINY_CASES[3], batch=3)
    with pytest.raises(RuntimeError, match="single was not compiled: no compiler"):
        flashinfer.slots(case)
    flashinfer._why["single"] = ""
    seen: list[tuple[int, ...]] = []

    def single(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **more: Any) -> torch.Tensor:
        assert more["causal"]
        assert more["kv_layout"] == "NHD"
        seen.append(k.stride())
        one = replace(case, batch=1)
        return Gather().contiguous(one, 0)(q, k[None], v[None])

    monkeypatch.setitem(
        sys.modules, "flashinfer", SimpleNamespace(single_prefill_with_kv_cache=single)
    )
    q = torch.randn(case.batch * case.q_len, 4, 128, dtype=torch.bfloat16)
    wide = torch.randn(2, case.batch, case.kv_len, 8, 2, 128, dtype=torch.bfloat16)
    k, v = wide[0][:, :, 3], wide[1][:, :, 3]
    wanted = Gather().contiguous(case, 0)(q, k.contiguous(), v.contiguous())
    assert torch.equal(flashinfer.slots(case)(q, k, v), wanted)
    assert seen == [(8 * 2 * 128, 128, 1)] * 3


def test_flashinfer_uses_its_ragged_call_for_one_long_prompt(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One plan serves all layers; other lengths need a new plan."""
    monkeypatch.setattr(infer, "_LONG", 32)
    monkeypatch.setattr(infer, "_wrapper", functools.cache(infer._wrapper.__wrapped__))
    case = replace(TINY_CASES[3], batch=1)
    assert case.q_len >= 32
    plans: list[list[int]] = []

    class Counted(_Wrapper):
        def plan(self, *shape: Any, **more: Any) -> None:
            super().plan(*shape, **more)
            assert more["causal"]
            plans.append([int(starts[-1]) for starts in shape[:2]])

    module = SimpleNamespace(BatchPrefillWithRaggedKVCacheWrapper=Counted)
    monkeypatch.setitem(sys.modules, "flashinfer.prefill", module)
    q = torch.randn(case.q_len, 4, 128, dtype=torch.bfloat16)
    wide = torch.randn(2, 1, case.kv_len, 8, 2, 128, dtype=torch.bfloat16)
    call = of_slots("flashinfer", "flashinfer", case, torch.device("cpu"))
    for layer in (3, 5):
        k, v = wide[0][:, :, layer], wide[1][:, :, layer]
        wanted = Gather().contiguous(case, 0)(q, k.contiguous(), v.contiguous())
        assert torch.equal(call(q, k, v), wanted)
    assert plans == [[case.q_len, case.kv_len]]
    shorter = replace(case, kv_len=case.kv_len - 16)
    again = of_slots("flashinfer", "flashinfer", shorter, torch.device("cpu"))
    k, v = wide[0][:, :, 3], wide[1][:, :, 3]
    cut = (k[:, : shorter.kv_len].contiguous(), v[:, : shorter.kv_len].contiguous())
    assert torch.equal(again(q, k, v), Gather().contiguous(shorter, 0)(q, *cut))
    assert plans[1:] == [[case.q_len, shorter.kv_len]]


# ---- fill ----------------------------------------------------------------------------------------


def test_fill_runs_all_methods_and_fills_with_the_defaults(tmp_path: Path) -> None:
    """Runs on host, where `max_mappings` is libvmem's own limit."""
    data = conduct("fill", tmp_path, "host")
    found = rows(data)
    filled = {way: found[f"fill/filled/{way}"]["value"] for way in fill.WAYS}
    assert filled["default"] >= 98
    assert filled["pages"] < filled["default"]
    for way in fill.WAYS:
        assert found[f"fill/mappings/{way}"]["value"] <= 400
    assert found["fill/map_calls/default"]["value"] > 0
    assert len(found["fill/forks/default"]["samples"][0]) == 5
    assert aims(data)["fill_default"]["value"] == filled["default"]


def test_fill_stops_at_its_deadline(tmp_path: Path) -> None:
    data = conduct("fill", tmp_path, "host", "--deadline", "0.001", "--ways", "pages")
    assert any("deadline" in note for part in data["parts"].values() for note in part["notes"])
