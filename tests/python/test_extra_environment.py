# SPDX-License-Identifier: MIT
"""Extra environments are created once, and recreated when their pins change."""

from __future__ import annotations

import subprocess
from pathlib import Path

import extra_environment
import pytest
from extra_environment import CANNOT, make


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Creates a tree whose pip records its arguments and exits with the status stored in the file
    `status`.
    """
    pip = tmp_path / "base" / "bin" / "python"
    pip.parent.mkdir(parents=True)
    pip.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/asked\nexit $(cat {tmp_path}/status)\n')
    pip.chmod(0o755)
    (tmp_path / "status").write_text("0")
    (tmp_path / "plain.txt").write_text("one==1\n")
    (tmp_path / "model.txt").write_text("two==2\n")
    for name, value in {"ROOT": tmp_path, "REQUIREMENTS": tmp_path}.items():
        monkeypatch.setattr(extra_environment, name, value)
    monkeypatch.setattr(extra_environment, "VENV", tmp_path / "base")
    return tmp_path


def asked(tree: Path) -> list[str]:
    """Returns the files passed to pip since the last call; "alone" marks calls with --no-deps."""
    log = tree / "asked"
    lines = [line.split() for line in log.read_text().splitlines()] if log.exists() else []
    log.unlink(missing_ok=True)
    return [("alone " if "--no-deps" in one else "") + Path(one[-1]).name for one in lines]


def test_created_once_and_again_when_its_pins_change(tree: Path) -> None:
    venv, groups = tree / "one", ["plain", "model"]
    for _ in range(2):
        assert make(venv, groups, size="9 MB") == 0
    assert asked(tree) == ["plain.txt", "alone model.txt"]
    told = subprocess.check_output([venv / "bin/python", "-c", "import sys; print(sys.path)"])
    assert repr(str(tree)) in told.decode(), "pyvmem comes from the tree"
    left = venv / "left"
    left.touch()
    (tree / "plain.txt").write_text("one==1.1\n")
    assert make(venv, groups, size="9 MB") == 0
    assert asked(tree) == ["plain.txt", "alone model.txt"]
    assert not left.exists()


def test_additional_requirements_are_installed_with_their_dependencies(tree: Path) -> None:
    for version in ("three==3", "three==3", "three==4"):
        assert make(tree / "one", ["model"], more=[version], size="9 MB") == 0
    assert asked(tree) == ["alone model.txt", "three==3", "alone model.txt", "three==4"]


def test_packages_of_base_environments_are_visible(tree: Path) -> None:
    below, venv = tree / "below", tree / "above"
    assert make(below, [], size="9 MB") == 0
    (extra_environment.packages(below) / "its_module.py").write_text("said = 25\n")
    assert make(venv, [], [below], size="9 MB") == 0
    program = "import its_module; print(its_module.said)"
    assert extra_environment.ask(venv / "bin" / "python", program) == "25"


def test_a_failed_install_is_retried(tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tree / "status").write_text("1")
    for _ in range(2):
        assert make(tree / "one", ["plain", "model"], size="9 MB") == CANNOT
        assert asked(tree) == ["plain.txt"]
    assert "setup: making one (9 MB)" in capsys.readouterr().out
