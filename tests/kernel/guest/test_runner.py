# SPDX-License-Identifier: MIT
"""Tests that the runner relays output and exit status, and reports every failure.

These guests load no module, so the newest available kernel is used.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from manifest import Test as Entry
from suite import verdict

from guest import machine

RUN = Path(__file__).resolve().parent.parent / "run.py"


@dataclass
class Ran:
    """The result of a command that ran in a guest."""

    status: int
    output: str
    report: dict[str, Any]


def run(folder: Path, shell: str, *options: str) -> Ran:
    report = folder / "report.json"
    words = [sys.executable, RUN, "--name", f"runner-{folder.name}", "--report", report]
    done = subprocess.run(
        [*words, "--memory", "512", *options, "--", "sh", "-c", shell],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    return Ran(done.returncode, done.stdout, json.loads(report.read_text(encoding="utf-8")))


def test_output_and_status_come_out(tmp_path: Path) -> None:
    ran = run(tmp_path, "seq 1 2000; echo to-stderr >&2; exit 42")
    lines = ran.output.splitlines()
    assert lines[:2000] == [str(number) for number in range(1, 2001)]
    assert lines[2000] == "to-stderr"
    assert ran.status == ran.report["status"] == 42
    assert ran.report["failures"] == []


def test_a_signal_is_a_failure(tmp_path: Path) -> None:
    assert run(tmp_path, "kill -9 $$").status == 128 + 9


def test_a_line_of_the_log_fails_a_command_that_passed(tmp_path: Path) -> None:
    # In the same guest, the allowed warning is ignored and the other one is reported.
    say = 'echo "WARNING: one" >/dev/kmsg; echo "WARNING: two" >/dev/kmsg'
    ran = run(tmp_path, say, "--allow", "WARNING: one")
    assert ran.report["status"] == 0
    assert ran.status == 1
    (failure,) = ran.report["failures"]
    assert "WARNING: two" in failure
    assert "WARNING: one" not in failure


def test_a_forged_mark_is_no_result(tmp_path: Path) -> None:
    ran = run(tmp_path, 'echo "guest 0123456789abcdef: exit 0" >/dev/kmsg; exit 3')
    assert ran.status == 3


def test_a_crash_is_a_failure_though_the_command_printed_success(tmp_path: Path) -> None:
    ran = run(tmp_path, "echo passed; sleep 1; echo c >/proc/sysrq-trigger; sleep 100")
    assert ran.status == 1
    assert ran.report["status"] is None
    assert "sysrq triggered crash" in ran.output
    assert "the machine stopped early" in ran.output


@pytest.mark.parametrize(
    ("then", "fate", "failure"),
    [
        ("", b"died before", "it did not boot"),
        ("exec sleep 1000", b"hung before", "not at its first program after 1 s"),
    ],
)
def test_a_kernel_that_dies_or_hangs_before_its_first_program_is_booted_once_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, then: str, fate: bytes, failure: str
) -> None:
    """QEMU is replaced by a program that exits immediately, or never."""
    program, boots = tmp_path / "qemu", tmp_path / "boots"
    program.write_text(f"#!/bin/sh\necho boot >>{boots}\n{then}\n")
    program.chmod(0o755)
    monkeypatch.setattr(machine, "QEMU", str(program))
    monkeypatch.setattr(machine, "UP_TIME", 1.0)
    shown: list[bytes] = []
    guest = machine.Machine(kernel=tmp_path / "vmlinuz", command=["true"])
    outcome = machine.boot(guest, tmp_path / "log", tmp_path / "cache", shown.append)
    assert boots.read_text() == "boot\nboot\n"
    assert fate in b"".join(shown)
    assert outcome.code == 1
    assert failure in outcome.failures[0]


def test_what_hangs_is_ended_and_shown(tmp_path: Path) -> None:
    ran = run(tmp_path, "echo before; sleep 1000", "--timeout", "25")
    assert ran.status == 1
    assert ran.report["late"]
    assert ran.output.startswith("before\n")
    log = Path(ran.report["log"]).read_text(encoding="utf-8")
    assert "sysrq: Show Blocked State" in log


def test_processes_that_stay_behind_do_not_keep_the_guest(tmp_path: Path) -> None:
    ran = run(tmp_path, "setsid sleep 1000 & sleep 1000 & exit 0")
    assert (ran.status, ran.report["failures"]) == (0, [])


def test_a_module_that_is_none_is_a_failure(tmp_path: Path) -> None:
    (tmp_path / "tree").mkdir()
    for name in ("nvidia.ko", "nvidia-uvm.ko"):
        (tmp_path / "tree" / name).write_bytes(b"\x7fELF")
    release = next((RUN.parents[2] / "build/kernel/image/boot").glob("vmlinuz-*"))
    tree = ("--tree", str(tmp_path / "tree"), "--kernel", str(release), "--keep-symbols")
    ran = run(tmp_path, "echo must not run", *tree)
    assert ran.status == 1
    assert "cannot load the module nvidia" in ran.output
    assert "must not run" not in ran.output
    assert not ran.report["loaded"]


@pytest.mark.parametrize(
    ("status", "report", "output", "word"),
    [
        (1, {"loaded": True, "late": False}, "wrong data", "ok"),
        (1, {"loaded": True, "late": False}, "other trouble", "FAIL"),
        (1, {"loaded": True, "late": True}, "wrong data", "FAIL"),
        (1, {"loaded": False, "late": False}, "wrong data", "FAIL"),
        (1, {}, "wrong data", "FAIL"),
        (0, {"loaded": True, "late": False}, "wrong data", "FAIL"),
        (77, {"loaded": True, "late": False}, "wrong data", "FAIL"),
    ],
)
def test_a_seeded_bug_is_caught_only_by_its_own_failure(
    status: int, report: dict[str, Any], output: str, word: str
) -> None:
    entry = Entry(name="mutant", mutant="x", caught="wrong data")
    assert verdict(entry, status, report, output) == word
