# SPDX-License-Identifier: MIT
"""Checks that `vmem probe --report` is complete and contains no private user data."""

from __future__ import annotations

import getpass
import platform
import re
from pathlib import Path

import pytest

from pyvmem import Context, _native, probe
from pyvmem.commands import bug_report
from pyvmem.commands.cli import main
from pyvmem.selftest.run import CHECKS


def test_the_report_has_every_back_end_and_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["probe", "--report"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("```text\n")
    assert said.endswith("```\n")
    for one in probe():
        assert f"\n{one.backend}: " in said
        what = one.reason.partition(": opened in ")[0]  # the times differ between probes
        assert bug_report.scrub(what) in said
    for word in (_native.version(), platform.release(), platform.python_version()):
        assert word in said


def test_the_report_has_no_private_data(capsys: pytest.CaptureFixture[str]) -> None:
    main(["probe", "--report"])
    said = capsys.readouterr().out
    assert str(Path.home()) not in said
    assert f"/{getpass.getuser()}/" not in said


def test_a_file_has_the_outcome_of_each_check(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In addition to the usual output, the file lists each check's outcome, without private
    data.
    """
    file = tmp_path / "report.md"
    assert main(["probe", "--report", str(file)]) == 0
    report, said = file.read_text(encoding="utf-8"), capsys.readouterr().out
    used = next(one for one in probe() if one.used)
    assert report.startswith("```text\nvmem ")
    assert f"\n{used.backend}: used\n" in report
    assert f"\nSelf-test of `{used.backend}`: passed.\n" in report
    assert said.splitlines()[-1] == f"{used.backend}: passed; report: {file}"
    for check in CHECKS:
        name = check.__name__.replace("_", " ")
        assert re.search(rf"^(passed|not run ) +{name} ", report, re.M), name
        assert re.search(rf"^(passed|not run ) +{name} ", said, re.M), name
    assert str(Path.home()) not in report


def test_a_check_that_fails_is_in_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "report.md"
    monkeypatch.setattr(Context, "write", lambda self, addr, data: None)
    assert main(["probe", "--report", str(file)]) == 1
    report = file.read_text(encoding="utf-8")
    assert ": FAILED.\n" in report
    assert re.search(r"^failed +map and read +a page: ", report, re.M)
    assert "FAILED; report: " in capsys.readouterr().out


def test_a_file_that_cannot_be_written(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as raised:
        main(["probe", "--report", "/proc/report.md"])
    assert raised.value.code == 2
    assert "/proc cannot be written to" in capsys.readouterr().err


def test_json_and_report_exclude_each_other() -> None:
    with pytest.raises(SystemExit) as raised:
        main(["probe", "--report", "--json"])
    assert raised.value.code == 2


def test_homes_and_uuids_are_taken_out() -> None:
    home = str(Path.home())
    text = f"{home}/x GPU-0a1b2c3d-0000-1111-2222-0123456789ab"
    assert bug_report.scrub(text) == "~/x UUID"


@pytest.mark.parametrize(
    ("home", "found"),
    [("/", "/dev/x /rootfs /root"), ("", "/dev/x /rootfs /root"), ("/root", "/dev/x /rootfs ~")],
)
def test_any_home(monkeypatch: pytest.MonkeyPatch, home: str, found: str) -> None:
    monkeypatch.setenv("HOME", home)
    assert bug_report.scrub("/dev/x /rootfs /root") == found


def test_modules_with_their_taints() -> None:
    lines = (
        "nvidia_uvm 4890624 2 - Live 0x0000000000000000 (OE)\n"
        "ext4 1130496 2 - Live 0x0000000000000000\n"
        "nvidia 60710912 3 nvidia_uvm, Live 0x0000000000000000 (POE)\n"
        "nvidia_drm 1 0 - Live 0x0000000000000000\n"
    )
    assert bug_report.modules_of(lines) == ["nvidia_uvm (OE)", "nvidia (POE)", "nvidia_drm"]
