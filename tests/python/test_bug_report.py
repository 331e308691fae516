# SPDX-License-Identifier: MIT
"""Description: `vmem probe --report`: complete, and without what is the user's own."""

from __future__ import annotations

import getpass
import platform
from pathlib import Path

import pytest

from pyvmem import _native, bug_report, probe
from pyvmem.cli import main


def test_every_back_end_and_version_is_in_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["probe", "--report"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("```text\n")
    assert said.endswith("```\n")
    for one in probe():
        assert f"\n{one.backend}: " in said
        what = one.reason.partition(": opened in ")[0]  # the times differ from probe to probe
        assert bug_report.scrub(what) in said
    for word in (_native.version(), platform.release(), platform.python_version()):
        assert word in said


def test_nothing_of_the_user_is_in_it(capsys: pytest.CaptureFixture[str]) -> None:
    main(["probe", "--report"])
    said = capsys.readouterr().out
    assert str(Path.home()) not in said
    assert f"/{getpass.getuser()}/" not in said


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


def test_modules_with_what_taints_them() -> None:
    lines = (
        "nvidia_uvm 4890624 2 - Live 0x0000000000000000 (OE)\n"
        "ext4 1130496 2 - Live 0x0000000000000000\n"
        "nvidia 60710912 3 nvidia_uvm, Live 0x0000000000000000 (POE)\n"
        "nvidia_drm 1 0 - Live 0x0000000000000000\n"
    )
    assert bug_report.modules_of(lines) == ["nvidia_uvm (OE)", "nvidia (POE)", "nvidia_drm"]
