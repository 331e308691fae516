# SPDX-License-Identifier: MIT
"""Description: set-up goes on without a package that nothing needs, and does not try again."""

from __future__ import annotations

from pathlib import Path

import environment
import pytest

PACKAGE = ["systemtap-sdt-dev"]


@pytest.mark.parametrize("works", [True, False])
def test_a_useful_package(works: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commands: list[list[str]] = []

    def quiet(command: list[str], *, show: bool) -> bool:
        assert not show
        commands.append(command)
        return works or command[-1] == "update"

    monkeypatch.setattr(environment, "STAMPS", tmp_path)
    monkeypatch.setattr(environment, "quiet", quiet)
    monkeypatch.setattr(environment.shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr(environment.os, "geteuid", lambda: 1000)
    for _ in range(2):
        environment.install_useful_packages(PACKAGE)
    install = [
        *("sudo", "-n", "apt-get", "install", "-y", "--no-install-recommends", "systemtap-sdt-dev")
    ]
    update = ["sudo", "-n", "apt-get", "update"]
    # A success leaves no stamp: a second call means that the package was removed since.
    assert commands == ([install] * 2 if works else [install, update, install])


def test_without_a_way_to_install_nothing_is_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(environment, "STAMPS", tmp_path)
    monkeypatch.setattr(environment, "quiet", lambda *_, **__: pytest.fail("something was run"))
    monkeypatch.setattr(environment.shutil, "which", lambda name: None)
    environment.install_useful_packages(PACKAGE)
    assert "without systemtap-sdt-dev: no USDT probes" in capsys.readouterr().out
