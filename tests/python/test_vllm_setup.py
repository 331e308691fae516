# SPDX-License-Identifier: MIT
"""Description: what setting up vLLM for the CPU needs of the system."""

from __future__ import annotations

import sys
from typing import NoReturn

import pytest
import vllm_setup


def test_a_library_that_is_missing_names_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    libraries = {"libc.so.6": "libc6", "libvmem-of-no-package.so.9": "its-package"}
    monkeypatch.setattr(vllm_setup, "LIBRARIES", libraries)
    assert vllm_setup.missing_libraries() == ["its-package"]


def test_what_is_missing_is_installed_first(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = []

    def refuse(packages: list[str]) -> NoReturn:
        asked.append(packages)
        sys.exit("not root")

    monkeypatch.setattr(vllm_setup, "missing_libraries", lambda: ["libnuma1"])
    monkeypatch.setattr(vllm_setup, "install_debian_packages", refuse)
    monkeypatch.setattr(
        vllm_setup, "make", lambda *arguments, **_: pytest.fail("made all the same")
    )
    assert vllm_setup.main() == vllm_setup.CANNOT
    assert asked == [["libnuma1"]]
    assert "not root" in capsys.readouterr().out
