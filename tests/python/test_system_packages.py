# SPDX-License-Identifier: MIT
"""Tests which system packages the setup installs with each package manager."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import system_packages
from system_packages import APT, MANAGERS, PARTS

MINOR = sys.version_info[1]


@pytest.fixture
def system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Creates a system that has only the programs added by a test; each records its arguments."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.setattr(system_packages.os, "geteuid", lambda: 0)
    return folder


def program(system: Path, name: str, *answers: int) -> Path:
    """Adds a program that exits with the given statuses in turn, and repeats the last."""
    log = system.parent / "said"
    path = system / name
    count = f'$(/usr/bin/grep -c "^{name} " {log})'
    cases = "".join(f'[ "{count}" -eq {n} ] && exit {a}\n' for n, a in enumerate(answers, 1))
    last = answers[-1] if answers else 0
    path.write_text(f'#!/bin/sh\necho "{name} $*" >> {log}\n{cases}exit {last}\n')
    path.chmod(0o755)
    return log


def asked(system: Path) -> list[str]:
    log = system.parent / "said"
    return log.read_text().splitlines() if log.exists() else []


@pytest.mark.parametrize("manager", MANAGERS, ids=lambda one: one.install[0])
def test_every_part_has_a_package_on_every_manager(manager: system_packages.Manager) -> None:
    assert manager.names.keys() == PARTS.keys()
    packages = manager.packages(list(PARTS))
    assert len(packages) == len(set(packages))
    assert not any("{" in name for name in packages)
    assert any("dev" in name or name == "python" for name in packages)


@pytest.mark.parametrize(
    ("system_has", "names"),
    [
        (f"python3.{MINOR}", ["python3-venv", "python3-dev"]),
        ("python3.9", [f"python3.{MINOR}-venv", f"python3.{MINOR}-dev"]),
    ],
)
def test_a_python_other_than_the_systems_has_its_own_packages(
    system_has: str, names: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Path, "resolve", lambda self: Path("/usr/bin", system_has))
    assert APT.packages(["pip", "python"]) == names


@pytest.mark.parametrize("manager", MANAGERS, ids=lambda one: one.install[0])
def test_missing_packages_are_installed(system: Path, manager: system_packages.Manager) -> None:
    tool, *words = manager.install
    program(system, tool)
    assert system_packages.install(["compiler", "make"])
    assert asked(system) == [" ".join([tool, *words, "gcc", "make"])]


def test_no_command_changes_the_package_sources() -> None:
    for manager in MANAGERS:
        words = {*manager.install[1:], *manager.refresh[1:]}
        assert words <= {
            *("install", "-y", "--no-install-recommends", "update"),
            *("--setopt=install_weak_deps=False", "--non-interactive", "--no-recommends"),
            *("-S", "--needed", "--noconfirm"),
        }


def test_old_package_lists_are_refreshed(system: Path) -> None:
    program(system, "apt-get", 1, 0, 0)
    assert system_packages.install(["make"])
    install = "apt-get install -y --no-install-recommends make"
    assert asked(system) == [install, "apt-get update", install]


@pytest.mark.parametrize("tool", ["apt-get", "dnf"])
def test_a_failure_names_the_packages(system: Path, tool: str) -> None:
    program(system, tool, 1)
    with pytest.raises(SystemExit, match="packages could not be installed: gcc make"):
        system_packages.install(["compiler", "make"])
    assert not system_packages.install(["probes"], useful=True)


def test_without_a_known_manager_the_parts_are_named(system: Path) -> None:
    with pytest.raises(SystemExit) as error:
        system_packages.install(["compiler", "libc", "python"])
    said = str(error.value)
    assert "none of apt-get, dnf, zypper, pacman" in said
    assert "gcc; the C library's headers (stdio.h); Python's headers (Python.h)" in said
    assert not system_packages.install(["probes"], useful=True)
    with pytest.raises(SystemExit, match="install what Debian calls lintian"):
        system_packages.install_debian_packages(["lintian"])


@pytest.mark.parametrize("sudo", [True, False])
def test_without_root(sudo: bool, system: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(system_packages.os, "geteuid", lambda: 1000)
    program(system, "dnf")
    if sudo:
        program(system, "sudo")
        assert system_packages.install(["make"])
        assert asked(system)[-1].startswith("sudo -n dnf install -y")
        return
    with pytest.raises(SystemExit, match=r"not root\. .*\n  dnf install -y .* make$"):
        system_packages.install(["make"])
    assert not system_packages.install(["probes"], useful=True)
    assert asked(system) == []


def test_a_sudo_that_needs_a_password_is_not_used(
    system: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(system_packages.os, "geteuid", lambda: 1000)
    program(system, "apt-get")
    program(system, "sudo", 1)
    assert not system_packages.install(["probes"], useful=True)
    with pytest.raises(SystemExit, match="not root"):
        system_packages.install(["make"])
    assert set(asked(system)) == {"sudo -n true"}


@pytest.mark.parametrize("of_system", [True, False])
def test_parts_of_python(of_system: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(system_packages.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(system_packages.sysconfig, "get_path", lambda name: str(tmp_path))
    prefix = "/usr" if of_system else "/opt/python"
    monkeypatch.setattr(system_packages.sysconfig, "get_config_var", lambda name: prefix)
    if of_system:
        assert system_packages.missing()[-2:] == ["pip", "python"]
        return
    with pytest.raises(SystemExit) as error:
        system_packages.missing()
    assert str(error.value).startswith(f"setup: {sys.executable} lacks Python's module ensurepip")
    assert "Python.h" in str(error.value)


def test_pip_suffices_for_a_python_without_ensurepip(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = {"pip": True, "ensurepip": False}
    monkeypatch.setattr(
        system_packages.importlib.util, "find_spec", lambda name: there[name] or None
    )
    (tmp_path / "Python.h").touch()
    monkeypatch.setattr(system_packages.sysconfig, "get_path", lambda name: str(tmp_path))
    assert not {"pip", "python"} & set(system_packages.missing())


def test_the_page_names_the_same_packages() -> None:
    page = Path(__file__).parents[2] / "docs" / "operations" / "install.md"
    rows = [line.strip("| ").split(" | ") for line in page.read_text().splitlines() if "`" in line]
    found = [[cell.strip("`") for cell in row[1:]] for row in rows if len(row) == len(MANAGERS) + 1]
    names = [[m.names[part].format(python="python3", minor=12) for m in MANAGERS] for part in PARTS]
    assert found == names
