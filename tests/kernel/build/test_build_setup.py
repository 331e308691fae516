# SPDX-License-Identifier: MIT
"""Tests that kernel_setup detects missing prerequisites of the kernel tests."""

from __future__ import annotations

from pathlib import Path

import kernel_setup
import pytest
from kernel_common import KernelBuildError


def fake_programs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, *absent: str) -> None:
    """Makes all programs except `absent` seem to exist, and the guest's shell seem static."""
    busybox = tmp_path / "busybox"
    busybox.write_bytes(b"\x7fELF static")

    def which(program: str, path: str) -> str | None:
        return None if program in absent else str(busybox)

    monkeypatch.setattr(kernel_setup.shutil, "which", which)
    monkeypatch.setattr(kernel_setup, "default_headers", lambda: None)


def test_nothing_is_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fake_programs(monkeypatch, tmp_path)
    assert kernel_setup.missing_packages() == []


@pytest.mark.parametrize(
    ("program", "package"),
    [("qemu-system-x86_64", "qemu-system-x86"), ("busybox", "busybox-static"), ("dkms", "dkms")],
)
def test_a_program_names_its_package(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, program: str, package: str
) -> None:
    fake_programs(monkeypatch, tmp_path, program)
    assert kernel_setup.missing_packages() == [package]


def test_a_busybox_with_libraries_will_not_do(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fake_programs(monkeypatch, tmp_path)
    (tmp_path / "busybox").write_bytes(b"\x7fELF /lib64/ld-linux-x86-64.so.2")
    assert kernel_setup.missing_packages() == ["busybox-static"]


def test_headers_are_asked_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fake_programs(monkeypatch, tmp_path)

    def none() -> None:
        raise KernelBuildError("no headers")

    monkeypatch.setattr(kernel_setup, "default_headers", none)
    assert kernel_setup.missing_packages() == ["linux-headers-cloud-amd64"]


def test_the_kernel_of_test_long_needs_more(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fake_programs(monkeypatch, tmp_path, "flex")
    monkeypatch.setattr(kernel_setup, "FILES_LONG", {str(tmp_path / "none"): "libelf-dev"})
    assert kernel_setup.missing_packages() == []
    assert kernel_setup.missing_packages(long=True) == ["flex", "libelf-dev"]
