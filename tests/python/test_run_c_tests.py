# SPDX-License-Identifier: MIT
"""Tests scripts/run_c_tests.sh with programs that pass, fail, hang or cannot run."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "run_c_tests.sh"


def program(folder: Path, name: str, text: str) -> str:
    path = folder / name
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


def run(*programs: str, wrapper: str = "", **env: str) -> tuple[int, str]:
    done = subprocess.run(
        ["sh", str(SCRIPT), "2", wrapper, *programs],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **env},
    )
    return done.returncode, done.stdout


def test_the_output_of_each_program_stays_together(tmp_path: Path) -> None:
    fine = program(tmp_path, "fine", 'echo "3 passed, $WORD failed"')
    absent = program(tmp_path, "absent", "echo no GPU; exit 77")
    status, said = run(fine, absent, wrapper="env WORD=0")
    assert status == 0
    assert "== fine\n3 passed, 0 failed\n" in said
    assert "== absent\nno GPU\nabsent: not run here\n" in said


def test_one_failed_or_hung_program_fails_the_run(tmp_path: Path) -> None:
    fine = program(tmp_path, "fine", "true")
    broken = program(tmp_path, "broken", "echo words >&2; exit 3")
    slow = program(tmp_path, "slow", "sleep 60")
    status, said = run(fine, broken, slow, COUNT="1")
    assert status == 1
    assert "== broken\nwords\nbroken: FAILED, exit status 3\n" in said
    assert "== slow\nslow: FAILED, still running after 2 s\n" in said
    assert said.endswith("1 passed, 2 failed\n")


def test_a_missing_program_fails(tmp_path: Path) -> None:
    assert run(str(tmp_path / "none"))[0] == 1


def test_two_programs_run_in_parallel_if_allowed(tmp_path: Path) -> None:
    """Each program waits for a file that the other program creates."""
    one, two = tmp_path / "one.made", tmp_path / "two.made"
    wait = "touch {}; until [ -e {} ]; do sleep 0.01; done"
    programs = (program(tmp_path, "a", wait.format(one, two)),)
    programs += (program(tmp_path, "b", wait.format(two, one)),)
    assert run(*programs, JOBS="2")[0] == 0
