# SPDX-License-Identifier: MIT
"""`vmem bench vllm`, quick: two engines alive at once, their tokens and their memory."""

from __future__ import annotations

import json
from pathlib import Path

from pyvmem.cli import main


def test_elastic_beside_stock(tmp_path: Path) -> None:
    out = tmp_path / "vllm.json"
    words = ["bench", "vllm", "--quick", "--backend", "host", "--rounds", "2", "--out", str(out)]
    assert main(words) == 0
    data = json.loads(out.read_text())
    assert data["format"] == "vmem-bench-vllm/1"
    rows = {row["id"]: row for row in data["parts"]["vllm"]["rows"]}
    for arm in ("stock", "elastic", "stock again"):
        assert rows[f"vllm/same/{arm}"]["value"] == rows[f"vllm/same/{arm}"]["of"] == 18
        assert rows[f"vllm/load/{arm}"]["n"] == 2
    assert 0 < rows["vllm/rest/mapped"]["value"] < rows["vllm/peak"]["value"]
    assert [one["id"] for one in data["parts"]["vllm"]["missing"]] == ["vllm/rest/held"]
