# SPDX-License-Identifier: MIT
"""Runs `vmem bench api --quick` on the back end `host`."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest

import pyvmem
from pyvmem.bench import cli
from pyvmem.bench.record import FORMAT
from pyvmem.commands.cli import main

NEEDS_GPU = {"busy"}
NEEDS_TORCH = {"step", "attention", "readbw", "hostcopy"}


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Returns the raw results of one quick run of all parts."""
    path = tmp_path_factory.mktemp("bench") / "host.json"
    arguments = ["bench", "api", "--backend", "host", "--quick", "--out", str(path)]
    assert main(arguments) == 0
    data: dict[str, Any] = json.loads((path.parent / "raw" / path.name).read_text())
    return data


def rows(data: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {row["id"]: row for part in data["parts"].values() for row in part["rows"]}


def test_every_part_ran_or_says_why(quick: dict[str, Any]) -> None:
    pytest.importorskip("torch")
    assert quick["format"] == FORMAT
    assert list(quick["parts"]) == ["noop", *cli.PARTS]
    for name, part in quick["parts"].items():
        assert part["status"] in ("done", "partial", "not run"), part
        if part["status"] != "done":
            assert part["missing"]
        assert all(item["why"] for item in part["missing"])
        if name not in NEEDS_GPU:
            assert part["rows"], name


@pytest.mark.parametrize("page", ["64K", "128K", "256K", "2M"])
def test_the_table_of_calls_is_complete(quick: dict[str, Any], page: str) -> None:
    found = rows(quick)
    for call in ("create", "create_cold", "map_access", "map_zeroed", "unmap", "release"):
        row = found[f"calls/{call}/host/{page}"]
        assert row["n"] > 0
        assert 0 < row["min"] <= row["median"] <= row["p99"] <= row["max"]
        assert row["samples"]
    assert found[f"bandwidth/single/host/{page}"]["gb_per_s"] > 0
    assert found[f"batch/map_scattered/host/{page}"]["bytes"] == 64 * found[
        f"calls/create/host/{page}"
    ].get("page", 0)


def test_rows_outside_the_table_of_calls(quick: dict[str, Any]) -> None:
    found = rows(quick)
    for name in (
        "noop/noop/host",
        "calls/reserve/host",
        "calls/free/host",
        "bytes/singles/host",
        "bytes/run_aligned/host",
        "bytes/run_offset/host",
        "pool/create/host/64K",
        "pool/run/host",
        "live/runs/host/1k/kernel_bytes",
        "live/decode/host/1k/teardown",
        "live/decode_spread/host/1k/grow",
    ):
        assert name in found, name
    assert found["bytes/singles/host"]["calls"] == 32
    assert found["pool/run/host"]["note"] == "1 physical run(s)"


@pytest.mark.needs_tensors
def test_rows_that_need_torch(quick: dict[str, Any]) -> None:
    pytest.importorskip("torch")
    found = rows(quick)
    for name in ("none", "async", "wait", "sync", "maps512", "async_dirty", "sync_dirty"):
        assert f"step/{name}/host" in found
    for name in ("malloc0", "malloc3", "random0", "random1", "runs"):
        assert f"attention/sdpa/decode_b2_1k/{name}" in found
        assert f"readbw/{name}" in found
    for way in ("to_host", "from_host"):
        assert found[f"hostcopy/{way}/host/1"]["gb_per_s"] > 0
    assert any("identical bits" in note for note in quick["parts"]["attention"]["notes"])


def test_calls_of_the_cache_by_the_number_of_slots(quick: dict[str, Any]) -> None:
    found = rows(quick)
    counts = [name.rpartition("/")[2] for name in found if name.startswith("slots/idle/host/")]
    assert counts == ["16", "64", "256"]
    for call in ("alloc", "free", "can_admit", "idle", "grow", "short", "short_many"):
        for count in counts:
            row = found[f"slots/{call}/host/{count}"]
            assert row["n"] > 0
            assert 0 <= row["min"] <= row["median"] <= row["p99"]
    for name in ("async_cold", "async_warm"):
        assert found[f"slots/{name}/host"]["median"] > 0


def test_more_live_pages_in_fewer_runs(quick: dict[str, Any]) -> None:
    found = rows(quick)
    runs = found["live/runs/host/1k/segments"]["value"]
    assert runs < found["live/decode/host/1k/segments"]["value"]


def test_a_quick_run_is_not_compared_with_the_aims(quick: dict[str, Any]) -> None:
    found = {aim["id"]: aim for aim in quick["aims"]}
    assert found["create"]["value"] > 0
    assert not any(aim["applies"] for aim in found.values())
    if not quick["machine"]["gpu"]:
        assert found["map_64K"]["value"] is None
        assert "cumem" in found["map_64K"]["why"]


def test_the_machine_is_described(quick: dict[str, Any]) -> None:
    machine = quick["machine"]
    assert machine["cores"] >= 1
    assert machine["memory_bytes"] > 1 << 20
    assert [b["name"] for b in quick["backends"]] == [r.backend for r in pyvmem.probe()]
    assert {"clock", "overheads_ns", "net"} <= quick["method"].keys()


def test_selected_parts_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["bench", "api", "--backend", "host", "--quick", "--json", "--only", "pool,bytes"]
    assert main(arguments) == 0
    data = json.loads(capsys.readouterr().out)
    assert list(data["parts"]) == ["noop", "pool", "bytes"]
    assert "samples" not in data["parts"]["pool"]["rows"][0]


def test_the_tables_name_what_was_not_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "api", "--backend", "host", "--quick", "--only", "busy,pool"]) == 0
    text = capsys.readouterr().out
    assert "vMemCreate, warm pool" in text
    assert "commit" in text
    if "GPU       none" in text:
        assert "busy: mapping while a kernel fills the GPU (not run" in text


def test_results_are_merged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = []
    for name in ("pool", "bytes"):
        path = tmp_path / f"{name}.json"
        quick_run = ["bench", "api", "--backend", "host", "--quick", "--only", name]
        assert main([*quick_run, "--out", str(path)]) == 0
        paths.append(str(path))
    whole = tmp_path / "whole.json"
    assert main(["bench", "api", "--merge", *paths, "--out", str(whole)]) == 0
    assert "vMemCreate, warm pool" in capsys.readouterr().out
    data = json.loads(whole.read_text())
    assert {"noop", "pool", "bytes"} == data["parts"].keys()
    assert data["options"]["only"] == ["pool", "bytes"]
    with pytest.raises(SystemExit) as caught:
        main(["bench", "api", "--merge", str(tmp_path / "absent.json")])
    assert caught.value.code == 2


def test_the_list_of_parts(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "api", "--list"]) == 0
    text = capsys.readouterr().out
    assert [line.split()[0] for line in text.splitlines()] == list(cli.PARTS)


def test_an_unusable_back_end_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    unusable = [r.backend for r in pyvmem.probe() if not r.usable]
    if not unusable:
        pytest.skip("every back end works here")
    assert main(["bench", "api", "--backend", unusable[0], "--quick"]) == 2
    assert capsys.readouterr().err.startswith("vmem bench: ")


@pytest.mark.parametrize(
    "arguments",
    [["--only", "calls,nothing"], ["--live", "3"], ["--live", "x"], ["--live", "1q"]],
)
def test_bad_arguments_are_named(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as found:
        main(["bench", "api", *arguments])
    assert found.value.code == 2
    assert arguments[1].split(",")[-1] in capsys.readouterr().err


def test_levels_of_live_pages() -> None:
    parser = argparse.ArgumentParser()
    cli.add_parser(parser.add_subparsers())
    args = parser.parse_args(["bench", "api", "--live", "1k,100k,1M,2048"])
    assert args.live == (1024, 102400, 1048576, 2048)


def test_what_was_measured_before_an_interrupt_is_marked(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def stopped(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    title, _, seconds = cli.PARTS["pool"]
    monkeypatch.setitem(cli.PARTS, "pool", (title, stopped, seconds))
    path = tmp_path / "x.json"
    words = ["bench", "api", "--backend", "host", "--quick", "--only", "bytes,pool"]
    assert main([*words, "--out", str(path)]) == 130
    last = capsys.readouterr().err.splitlines()[-1]
    assert last == f"vmem bench: interrupted: {path} is partial, with noop, bytes"
    data = json.loads(path.read_text())
    assert data["interrupted"] is True
    assert data["parts"].keys() == {"noop", "bytes"}
    kept = path.read_bytes()
    monkeypatch.setattr(cli, "Context", stopped)
    assert main([*words, "--out", str(path)]) == 130
    last = capsys.readouterr().err.splitlines()[-1]
    assert last == f"vmem bench: interrupted: nothing was written to {path}"
    assert path.read_bytes() == kept
    assert main(words) == 130
    assert capsys.readouterr().err.splitlines()[-1] == "vmem bench: interrupted"


def test_a_run_that_measured_nothing_says_why(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def without(setting: Any, part: Any, deadline: Any) -> None:
        part.not_run("*", "there is no GPU")

    monkeypatch.setitem(cli.PARTS, "pool", ("the pool", without, 1))
    words = ["bench", "api", "--backend", "host", "--quick", "--only"]
    assert main([*words, "pool"]) == 3
    last = capsys.readouterr().err.splitlines()[-1]
    assert last == "vmem bench: nothing was measured: there is no GPU"
    assert main([*words, "pool,bytes"]) == 0


def test_a_failing_part_leaves_the_others(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def broken(*_: Any) -> None:
        raise RuntimeError("deliberate")

    title, _, seconds = cli.PARTS["bytes"]
    monkeypatch.setitem(cli.PARTS, "bytes", (title, broken, seconds))
    path = tmp_path / "x.json"
    arguments = ["bench", "api", "--backend", "host", "--quick", "--only", "bytes,pool"]
    assert main([*arguments, "--out", str(path)]) == 1
    data = json.loads(path.read_text())
    assert data["parts"]["bytes"]["status"] == "failed"
    assert "deliberate" in data["parts"]["bytes"]["why"]
    assert data["parts"]["pool"]["status"] == "done"
