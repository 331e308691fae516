# SPDX-License-Identifier: MIT
"""Checks how the Debian systems for package tests are created."""

from __future__ import annotations

import sys
from pathlib import Path

import check_containers
import check_deb
import check_wheel_debian
import debian_system
import pytest
import run_tests
from apt_area import Source
from debian_system import DebianSystem
from dist import DistError

KEY = "/usr/share/keyrings/debian-archive-keyring.gpg"


@pytest.fixture(autouse=True)
def _archive(monkeypatch: pytest.MonkeyPatch) -> None:
    source = Source("http://archive.example/debian", ("bookworm",), KEY)
    monkeypatch.setattr(debian_system, "archive_source", lambda: source)


def test_the_archive_is_checked_by_its_key() -> None:
    command = check_deb.deb_system(Path("/debs"), "6.1.0-1-amd64", None).command("unshare")
    (include,) = [word for word in command if word.startswith("--include=")]
    assert "linux-headers-6.1.0-1-amd64" in include.removeprefix("--include=").split(",")
    line = f"deb [signed-by={KEY}] http://archive.example/debian bookworm main contrib"
    assert command[-1] == line
    assert "--mode=unshare" in command
    assert not any("unauthenticated" in word.lower() for word in command)


def test_only_a_requested_image_is_kept() -> None:
    kept = check_deb.deb_system(Path("/debs"), "6.1.0-1-amd64", Path("/tmp/disk")).command("root")
    assert "--format=ext2" in kept
    assert kept[-2] == "/tmp/disk"
    gone = check_deb.deb_system(Path("/debs"), "6.1.0-1-amd64", None).command("root")
    assert "--format=null" in gone
    assert gone[-2] == "/dev/null"


def test_the_wheels_system_has_no_compiler() -> None:
    for suite in check_wheel_debian.PYTHONS:
        system = check_wheel_debian.wheel_system(suite, Path("/wheels"))
        assert system.suite == suite
        assert set(system.include) == {"python3", "python3-venv"}


def test_an_images_base_has_only_debians_essential_packages() -> None:
    command = check_containers.base_system(Path("/base.tar"), Path("/pip.conf")).command("root")
    assert not any(word.startswith("--include") for word in command)


def test_the_system_does_not_inherit_the_environment() -> None:
    assert debian_system.in_system("sh /check.sh").startswith('chroot "$1" env -i ')


def test_a_hook_that_fails_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(debian_system, "install_tools", lambda tools: None)
    system = DebianSystem("bookworm", (), ())
    failing = [sys.executable, "-c", "raise SystemExit(25)"]
    monkeypatch.setattr(DebianSystem, "command", lambda self, mode: failing)
    with pytest.raises(DistError, match=r"exit status 25: .* bookworm"):
        system.make("root")


def test_new_systems_are_created_in_the_long_run_only() -> None:
    assert {"deb", "wheel-debian"} <= set(run_tests.STAGES)
    assert {"deb", "wheel-debian"} <= set(run_tests.LONG)
