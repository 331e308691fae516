# SPDX-License-Identifier: MIT
"""Description: the index of results takes no file that does not say where it comes from."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import readme_index

HEAD = "# commit 0123456, NVIDIA H100; python3 -m pytest tests/python\n# date 2026-11-23\n"


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder of results, in place of the real one."""
    folder = tmp_path / "results"
    (folder / "logs").mkdir(parents=True)
    recovered = folder / "recovered.json"
    recovered.write_text("{}", encoding="utf-8")
    monkeypatch.setattr(readme_index, "ROOT", tmp_path)
    monkeypatch.setattr(readme_index, "RESULTS", folder)
    monkeypatch.setattr(readme_index, "LOGS", folder / "logs")
    monkeypatch.setattr(readme_index, "RECOVERED", recovered)
    monkeypatch.setattr(readme_index, "KEPT", folder / "kept.json")
    keep(folder)
    return folder


def recover(results: Path, **origins: dict[str, str]) -> None:
    """Writes what the history tells of the log h100-x.log."""
    text = json.dumps({f"logs/h100-{name}.log": origin for name, origin in origins.items()})
    (results / "recovered.json").write_text(text, encoding="utf-8")


def keep(results: Path, **why: str) -> None:
    """Writes what is whole in the log h100-x.log."""
    text = json.dumps({f"logs/h100-{name}.log": one for name, one in why.items()})
    (results / "kept.json").write_text(text, encoding="utf-8")


def log(results: Path, text: str) -> None:
    """Writes a log."""
    (results / "logs" / "h100-x.log").write_text(text, encoding="utf-8")


def test_a_log_that_says_all(results: Path) -> None:
    log(results, HEAD + "3 passed, 1 skipped in 2.0s\n")
    assert readme_index.part()[-1].endswith(
        "| NVIDIA H100 80GB HBM3 | 0123456 | 2026-11-23 | `python3 -m pytest tests/python` "
        "| 3 passed, 1 skipped in 2.0s |  |"
    )


def test_what_the_history_tells_is_marked(results: Path) -> None:
    log(results, "# commit 0123456, NVIDIA H100; make check\n")
    recover(results, x={"date": "2026-11-22"})
    assert "| 0123456 | 2026-11-22 † | `make check` |" in readme_index.part()[-1]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("3 passed\n", "says no commit"),
        ("# commit 0123456, NVIDIA H100; make check\n", "says no date"),
        ("commit 0123456\n# date 2026-11-23\n", "says no command"),
        (HEAD + "1 failed, 3 passed in 2.0s\n", "is the log of a failure: 1 failed"),
        (HEAD + "Traceback (most recent call last):\n", "is the log of a failure: Traceback"),
        (HEAD + "3 passed\nrc 139\n", "is the log of a failure: rc 1"),
    ],
)
def test_logs_that_are_refused(results: Path, text: str, said: str) -> None:
    log(results, text)
    with pytest.raises(ValueError, match=said):
        readme_index.part()


def test_what_the_history_tells_is_not_kept_in_vain(results: Path) -> None:
    log(results, HEAD)
    recover(results, x={"date": "2026-11-22"})
    with pytest.raises(ValueError, match=r"says its date itself: take it out of recovered\.json"):
        readme_index.part()
    recover(results, y={"date": "2026-11-22"})
    with pytest.raises(ValueError, match=r"has logs/h100-y\.log, and there is no such file"):
        readme_index.part()


def test_what_was_not_measured_is_named_with_the_reason(results: Path) -> None:
    log(results, HEAD + "== live: pages (partial, 1 s)\n")
    keep(results, x="the calls")
    assert readme_index.part()[-1].endswith("| `live` partial; whole: the calls |")
    part = {"status": "partial", "missing": [{"id": "calls/a", "why": "no | GPU"}] * 2}
    assert readme_index.gaps({"parts": {"calls": part}}) == r"`calls` partial: no \| GPU"
    assert readme_index.gaps({"parts": {"calls": {"status": "failed"}}}) == "`calls` failed"
    assert readme_index.gaps({"parts": {"calls": {"status": "done"}}}) == ""
    killed = {"status": "not run", "rows": [{"id": "calls/map"}]}
    assert readme_index.gaps({"parts": {"calls": killed}}) == "`calls` broken off"
    assert readme_index.gaps({"tests": [{"name": "gap", "result": "FAIL"}]}) == "`gap` FAIL"
    assert readme_index.short("a few words " * 20).endswith("words a few ...")


def test_a_partial_result_is_kept_for_something_or_not_at_all(results: Path) -> None:
    log(results, HEAD + "== live: pages (partial, 1 s)\n")
    with pytest.raises(ValueError, match=r"not complete \(`live` partial\): run it again, remove"):
        readme_index.part()
    log(results, HEAD)
    keep(results, x="the calls")
    with pytest.raises(ValueError, match=r"has no gap: take it out of kept\.json"):
        readme_index.part()
    keep(results, y="the calls")
    with pytest.raises(ValueError, match=r"kept\.json has logs/h100-y\.log, and there is no such"):
        readme_index.part()


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
    rows = [row for row in readme_index.part() if "results/logs/" in row]
    assert len(rows) == sum(path.is_file() for path in readme_index.LOGS.iterdir())
    assert not [row for row in rows if "not recorded" in row]
