# SPDX-License-Identifier: MIT
"""Checks that `vmem selftest` passes if memory works, and otherwise names the failed check."""

from __future__ import annotations

import errno
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

import pyvmem
from pyvmem import Caps, ProbeResult
from pyvmem.commands import cli
from pyvmem.selftest import books, memory
from pyvmem.selftest import cli as selftest
from pyvmem.selftest.check import run_check
from pyvmem.selftest.cli import NOT_TESTED

CHECKS = [*memory.CHECKS, *books.CHECKS]


def result_of(report: dict[str, Any], name: str) -> dict[str, Any]:
    """Returns the report's entry for one check."""
    (found,) = [one for one in report["checks"] if one["name"] == name]
    return dict(found)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_each_check(context: pyvmem.Context, check: Callable[[pyvmem.Context], str]) -> None:
    result = run_check(check, context)
    assert result.result in ("passed", "not run"), result
    assert result.detail
    assert result.what.endswith(".")


def test_report(backend: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "report.json"
    assert cli.main(["selftest", "--backend", backend, "--out", str(file), "--samples", "3"]) == 0
    report = json.loads(file.read_text())
    assert report["passed"] is True
    assert report["tested"]["backend"] == backend
    assert {one["result"] for one in report["checks"]} <= {"passed", "not run"}
    assert len(report["checks"]) == len(CHECKS)
    assert report["times"][backend]["map"]["samples"] == 3
    assert {"commit", "kernel", "driver", "cpu"} <= set(report["machine"])
    assert capsys.readouterr().out.splitlines()[-1] == "passed"


# Machine faults; `test_faults_are_detected` names the check that must report each of them.
def _stale(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes reads return what an address held when first read, like a stale translation."""
    seen: dict[tuple[int, int], bytes] = {}
    read = pyvmem.Context.read

    def stale(self: pyvmem.Context, addr: int, size: int) -> bytes:
        return seen.setdefault((addr, size), read(self, addr, size))

    monkeypatch.setattr(pyvmem.Context, "read", stale)


def _dirty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes new pages contain their previous owner's data."""
    populate = pyvmem.OpBatch.populate

    def dirty(self: pyvmem.OpBatch, *args: Any, **options: Any) -> None:
        populate(self, *args, **{**options, "dirty": True})

    batch = pyvmem.Context.batch

    def left(self: pyvmem.Context, ops: pyvmem.OpBatch, after: Any = ()) -> None:
        batch(self, ops, after)
        for space in list(self._reservations):
            if space.is_open and space.nbytes == 32 * self.info.granule:
                self.fill(space.addr, self.info.granule, 0x5A)

    monkeypatch.setattr(pyvmem.OpBatch, "populate", dirty)
    monkeypatch.setattr(pyvmem.Context, "batch", left)


def _swallow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drops writes."""
    monkeypatch.setattr(pyvmem.Context, "write", lambda self, addr, data: None)


def _leak(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes `trim` free no memory."""
    monkeypatch.setattr(pyvmem.Context, "trim", lambda self, keep=0: 0)


@pytest.mark.parametrize(
    ("fault", "check"),
    [
        (_stale, "remap elsewhere"),
        (_dirty, "zeroing"),
        (_swallow, "map and read"),
        (_swallow, "alias"),
        (_leak, "accounting"),
    ],
)
def test_faults_are_detected(
    fault: Callable[[pytest.MonkeyPatch], None],
    check: str,
    backend: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = tmp_path / "report.json"
    fault(monkeypatch)
    assert cli.main(["selftest", "--backend", backend, "--out", str(file)]) == 1
    report = json.loads(file.read_text())
    assert report["passed"] is False
    assert result_of(report, check)["result"] == "failed"
    assert "times" not in report
    assert capsys.readouterr().out.splitlines()[-1] == "FAILED"


class Device:
    """Stands in for `Cuda`: a device whose free memory is set by the test."""

    def __init__(self, free: Iterable[int]) -> None:
        self._free = iter(free)

    def __call__(self, device: int) -> Device:
        return self

    def __enter__(self) -> Device:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def memory(self) -> tuple[int, int]:
        return next(self._free), 1 << 40


@pytest.mark.parametrize("others", [0, 7])
def test_memory_used_by_others_is_not_a_leak(others: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other processes use 60 MB in some of the attempts; the last attempt ends with as much free
    memory as it started with."""
    with pyvmem.Context("host") as context:
        context.cuda_device = 0
        free = [(1 << 36) - (k << 20) for _ in range(others) for k in (0, 60)] + [1 << 36] * 2
        monkeypatch.setattr(books, "Cuda", Device(free))
        assert books.accounting(context) == "the device's free memory differs by 0 bytes"


def test_memory_left_by_every_attempt_is_a_leak(monkeypatch: pytest.MonkeyPatch) -> None:
    with pyvmem.Context("host") as context:
        context.cuda_device = 0
        monkeypatch.setattr(books, "Cuda", Device(range(1 << 36, 0, -(32 << 20))))
        result = run_check(books.accounting, context)
    assert result.result == "failed"
    assert "33554432 bytes less" in result.detail


def test_no_such_backend(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        cli.main(["selftest", "--backend", "floppy"])
    assert "floppy" in capsys.readouterr().err


def _probed(
    monkeypatch: pytest.MonkeyPatch, error: int, reason: str, usable: Iterable[str]
) -> None:
    """Makes `probe` report that uvm fails with `error` and only the back ends in `usable` work."""

    def one(name: str) -> ProbeResult:
        works = name in usable
        code, why = (0, "a page was mapped") if works else (errno.ENODEV, "no device")
        if name == "uvm":
            code, why = error, reason
        text = errno.errorcode[code] if code else ""
        return ProbeResult(name, works, False, code, text, Caps(0), (), "", "", why)

    monkeypatch.setattr(
        selftest, "probe", lambda device: [one(n) for n in ("uvm", "stock", "cuda", "host")]
    )


@pytest.mark.parametrize(
    ("patched", "what"),
    [(False, "the patched driver is not loaded"), (True, "uvm cannot be used here")],
)
def test_without_the_patched_driver(
    patched: bool,
    what: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Prints one line, exits with a distinct status, and names back ends that can be tested."""
    file = tmp_path / "report.json"
    if patched:
        (tmp_path / "uvm_vmem_max_pinned").touch()
    monkeypatch.setattr(selftest, "_PARAMETERS", tmp_path)
    _probed(monkeypatch, errno.ENODEV, "the node is missing", ["stock", "host"])
    assert cli.main(["selftest", "--backend", "uvm"]) == NOT_TESTED == 3
    assert capsys.readouterr() == (
        "",
        f"vmem selftest: not tested: {what} (the node is missing);"
        " --backend stock or --backend host can be tested on this machine\n",
    )
    assert cli.main(["selftest", "--backend", "uvm", "--out", str(file)]) == NOT_TESTED
    report = json.loads(file.read_text())
    assert report["passed"] is False
    assert what in report["not_tested"]
    assert report["probe"]["error"] == "ENODEV"
    assert "checks" not in report


def test_a_failed_driver_test_is_a_failure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A driver that is present but maps wrongly must not be reported as "cannot be tested"."""
    _probed(monkeypatch, errno.EIO, "a byte reads as 0x00", ["host"])
    assert cli.main(["selftest", "--backend", "uvm"]) == 1
    assert capsys.readouterr().out.splitlines() == ["uvm: a byte reads as 0x00", "FAILED"]


def test_the_default_back_end_is_tested(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without --backend, the report says which back ends were passed over, and why."""
    file = tmp_path / "report.json"
    assert cli.main(["selftest", "--samples", "0", "--out", str(file)]) == 0
    report = json.loads(file.read_text())
    found = pyvmem.probe()
    used = next(one for one in found if one.used)
    assert report["tested"]["backend"] == used.backend
    assert list(report["passed_over"]) == [one.backend for one in found[: found.index(used)]]
    said = capsys.readouterr().out
    for name, reason in report["passed_over"].items():
        assert f"passed over: {name}: {reason}\n" in said


def test_without_a_usable_back_end(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _probed(monkeypatch, errno.ENODEV, "the node is missing", [])
    assert cli.main(["selftest"]) == NOT_TESTED
    said = "not tested: host cannot be used here (no device); no other back end can be tested"
    assert capsys.readouterr().err == f"vmem selftest: {said} on this machine\n"


def test_an_unusable_back_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "report.json"
    missing = next((one for one in pyvmem.probe() if not one.usable), None)
    if missing is None:
        pytest.skip("every back end works here")
    assert cli.main(["selftest", "--backend", missing.backend, "--out", str(file)]) == NOT_TESTED
    report = json.loads(file.read_text())
    assert report["passed"] is False
    assert report["probe"]["reason"] == missing.reason
    assert "checks" not in report
    assert missing.reason in capsys.readouterr().err
