# SPDX-License-Identifier: MIT
"""Checks that the results index rejects files that do not state their origin."""

from __future__ import annotations

from pathlib import Path

import pytest
import readme_index

HEAD = "# commit 0123456, NVIDIA H100; python3 -m pytest tests/python\n# date 2026-11-23\n"


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Returns an empty results directory that replaces the real one."""
    folder = tmp_path / "results"
    (folder / "logs").mkdir(parents=True)
    monkeypatch.setattr(readme_index, "ROOT", tmp_path)
    monkeypatch.setattr(readme_index, "RESULTS", folder)
    monkeypatch.setattr(readme_index, "LOGS", folder / "logs")
    return folder


def log(results: Path, text: str) -> None:
    """Writes a log."""
    (results / "logs" / "h100-x.log").write_text(text, encoding="utf-8")


def test_a_complete_log(results: Path) -> None:
    log(results, HEAD + "3 passed, 1 skipped in 2.0s\n")
    assert readme_index.part_logs()[-1].endswith(
        "| NVIDIA H100 80GB HBM3 | 0123456 | 2026-11-23 | `python3 -m pytest tests/python` "
        "| 3 passed, 1 skipped in 2.0s |  |"
    )


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("3 passed\n", "does not state its commit"),
        ("commit 0123456\n# date 2026-11-23\n", "does not state its command"),
        (HEAD + "1 failed, 3 passed in 2.0s\n", "is the log of a failure: 1 failed"),
        (HEAD + "Traceback (most recent call last):\n", "is the log of a failure: Traceback"),
        (HEAD + "3 passed\nrc 139\n", "is the log of a failure: rc 1"),
    ],
)
def test_logs_that_are_rejected(results: Path, text: str, said: str) -> None:
    log(results, text)
    with pytest.raises(ValueError, match=said):
        readme_index.part_logs()


def test_missing_measurements_are_named_with_the_reason(results: Path) -> None:
    log(results, HEAD + "== live: pages (partial, 1 s)\n")
    assert readme_index.part_logs()[-1].endswith("| `live` partial |")
    part = {"status": "partial", "missing": [{"id": "calls/a", "why": "no | GPU"}] * 2}
    assert readme_index.gaps({"parts": {"calls": part}}) == r"`calls` partial: no \| GPU"
    assert readme_index.gaps({"parts": {"calls": {"status": "done"}}}) == ""
    assert readme_index.gaps({"tests": [{"name": "gap", "result": "FAIL"}]}) == "`gap` FAIL"
    assert readme_index.short("a few words " * 20).endswith("words a few ...")


@pytest.mark.parametrize(
    ("part", "said"),
    [
        ({"status": "failed"}, "part calls failed"),
        ({"status": "not run", "rows": [{"id": "calls/map"}]}, "part calls was aborted"),
    ],
)
def test_results_that_are_rejected(part: dict[str, object], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        readme_index.gaps({"parts": {"calls": part}})


def test_a_driver_record_names_its_sources() -> None:
    sources = {"driver": "535.1", "module_sha256": "0123456789"}
    assert readme_index.describe({"format": "vmem-driver-tests/1", "sources": sources}) == (
        "software GPU",
        {"commit": "module 0123456", "command": "make test-driver DRIVER=535.1"},
    )


def test_a_failed_test_is_named_with_the_run_that_passed() -> None:
    def run(entry: str, result: str, commit: str) -> dict[str, str]:
        return {"entry": entry, "result": result, "commit": commit}

    first, other, again = run("a", "FAIL", "1"), run("b", "ok", "2"), run("a", "ok", "3")
    assert readme_index.failures([other, again]) == "complete"
    assert readme_index.failures([first, other, again]) == "`a` failed at 1, passed at 3"
    assert readme_index.failures([again, first]) == "`a` failed at 1"


def test_a_file_without_a_place_in_the_index_is_an_error(results: Path) -> None:
    log(results, HEAD)
    assert readme_index.unlisted() == []
    (results / "notes.csv").write_text("", encoding="utf-8")
    with pytest.raises(ValueError, match=r"notes\.csv"):
        readme_index.part()


def test_no_committed_log_has_a_failure_or_an_unknown_origin() -> None:
    rows = [row for row in readme_index.part_logs() if "results/logs/" in row]
    assert len(rows) == sum(path.is_file() for path in readme_index.LOGS.iterdir())
    assert not [row for row in rows if "not recorded" in row]


def test_the_size_of_the_results_is_limited() -> None:
    """The results take at most 3 MB, so only the newest runs are kept, without their samples."""
    kept = [*readme_index.results(), *readme_index.logs()]
    assert 0 < sum(path.stat().st_size for path in kept) <= 3_000_000
