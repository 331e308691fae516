# SPDX-License-Identifier: MIT
"""Checks `vmem bench devices`: mappings on several devices, pages in peer memory, ranks in
lockstep."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from pyvmem import KVCache
from pyvmem.commands.cli import main
from vmem_bench import devices


def run(out: Path) -> tuple[int, dict[str, Any]]:
    words = ["bench", "devices", "--quick", "--backend", "host", "--out", str(out)]
    return main(words), json.loads(out.read_text())["parts"]


def test_measurements_without_gpus(tmp_path: Path) -> None:
    status, parts = run(tmp_path / "devices.json")
    assert status == 0
    rows = {row["id"]: row for part in parts.values() for row in part["rows"]}
    assert {"map/map/1", "map/unmap/1", "map/kernel/1"} <= rows.keys()
    assert rows["map/kernel/1"]["mappings"] == 64
    moves = {"tiers/read/device", "tiers/out/host", "tiers/read/host", "tiers/back/host"}
    assert moves <= rows.keys()
    assert rows["tiers/out/host"]["bytes"] == 4 * (2 * 8 * 128 << 12)
    assert [one["id"] for one in parts["tiers"]["missing"]] == ["tiers/*/peer"]
    steps = {f"step/{name}/{ranks}" for name in ("step", "agreed") for ranks in (1, 2)}
    assert {"step/one", *steps} <= rows.keys()
    assert all(rows[name]["median"] > 0 for name in steps)


def test_devices_must_start_with_the_first(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "devices", "--quick", "--backend", "host", "--device", "1"]) == 2
    assert "this benchmark starts with device 0" in capsys.readouterr().err


def test_lost_rows_fail_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = KVCache.move

    def move(self: KVCache, reqid: int, location: str, *args: Any) -> Any:
        moved = real(self, reqid, location, *args)
        self.k(1)[reqid, 0] = 7
        return moved

    monkeypatch.setattr(KVCache, "move", move)
    monkeypatch.setattr(devices, "_step", lambda *_: None)
    status, parts = run(tmp_path / "devices.json")
    assert status == 1
    assert "the rows in host read" in parts["tiers"]["why"]
