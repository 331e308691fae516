# SPDX-License-Identifier: MIT
"""Description: what set-up installs, and how it goes on without a package that nothing needs."""

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


def test_pins_of_a_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = ["# why", "", "one==1.0+cpu", 'two==2; python_version < "3.11"']
    lines += ['two==2.5; python_version >= "3.11"']
    (tmp_path / "some.txt").write_text("\n".join(lines))
    monkeypatch.setattr(environment, "REQUIREMENTS", tmp_path)
    for minor, version in {10: "2", 11: "2.5", 13: "2.5"}.items():
        assert environment.read_pins("some", minor) == {"one": "1.0+cpu", "two": version}
    (tmp_path / "some.txt").write_text("one>=1\n")
    with pytest.raises(SystemExit, match=r"some\.txt: no pin: one>=1"):
        environment.read_pins("some")


@pytest.mark.parametrize(
    "path", sorted(environment.REQUIREMENTS.glob("*.txt")), ids=lambda path: path.stem
)
def test_every_python_has_the_same_packages(path: Path) -> None:
    (_, first), (_, last) = environment.PYTHONS
    names = [set(environment.read_pins(path.stem, minor)) for minor in range(first, last + 1)]
    assert names[0]
    assert all(one == names[0] for one in names)
