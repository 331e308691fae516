# SPDX-License-Identifier: MIT
"""Checks that scripts/vllm_internals.py lists changes in the vLLM internals that pyvmem uses."""

from __future__ import annotations

import sys
import zipfile
from pathlib import Path

import pytest
import vllm_internals

from pyvmem.elastic.engine_source import Source, Symbol
from pyvmem.vllm.internals import INTERNALS

BEFORE = {
    "a.py": "class A:\n    x: int = 0\n"
    "    def f(self, b):\n        return b\n    def g(self): pass\n",
}
AFTER = {
    "a.py": "from vllm.c import Base\nclass A(Base):\n    x: int = 0\n"
    "    def f(self, b, c=1):\n        return b + c\n",
    "c.py": "class Base:\n    def g(self): pass\n",
}


def source(root: Path, files: dict[str, str]) -> Source:
    root.mkdir()
    for name, text in files.items():
        (root / name).write_text(text, "utf-8")
    return Source(root, "vllm")


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("A", []),
        ("A.x", []),
        ("A.f", ["(self, b) -> (self, b, c=1)", "4 lines differ"]),
        ("A.g", ["moved from vllm.a to vllm.c"]),
        ("A.h", []),
    ],
)
def test_changes(tmp_path: Path, name: str, found: list[str]) -> None:
    before, after = source(tmp_path / "0", BEFORE), source(tmp_path / "1", AFTER)
    symbol = Symbol("a", name, "read", "")
    assert list(vllm_internals.changes(symbol, before, after)) == found
    shown = list(vllm_internals.changes(symbol, before, after, diff=True))
    assert ("+        return b + c" in shown) == (name == "A.f")
    gone = list(vllm_internals.changes(symbol, before, Source(tmp_path, "vllm")))
    assert gone == ([] if name == "A.h" else ["gone"])


def test_a_version_with_missing_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Uses a wheel that has none of the names."""
    source(tmp_path / "vllm", BEFORE)
    with zipfile.ZipFile(tmp_path / "after.whl", "w") as wheel:
        wheel.writestr("vllm/__init__.py", "")
    words = ["vllm_internals.py", str(tmp_path / "vllm"), str(tmp_path / "after.whl")]
    monkeypatch.setattr(sys, "argv", words)
    assert vllm_internals.main() == 1
    said = capsys.readouterr().out
    assert f"{len(INTERNALS)} of {len(INTERNALS)} are the same" in said
    assert f"missing in {tmp_path / 'after.whl'}: Scheduler.schedule (vllm.v1.core.sched" in said
