# SPDX-License-Identifier: MIT
"""Files created and packages installed by the setup, on each version of Python."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import environment
import pytest
import run_tests

ROOT = environment.ROOT


@pytest.mark.parametrize("works", [True, False])
def test_probes_are_installed_until_that_fails(
    works: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    calls: list[list[str]] = []

    def install(parts: list[str], *, useful: bool) -> bool:
        assert useful
        calls.append(parts)
        return works

    monkeypatch.setattr(environment, "STAMPS", tmp_path)
    monkeypatch.setattr(environment, "install", install)
    for _ in range(2):
        environment.install_probes()
    # A failure is remembered; a success is not, so the second call installs again.
    assert calls == [["probes"]] * (2 if works else 1)
    assert ("no USDT probes" in capsys.readouterr().out) != works


@pytest.mark.skipif(importlib.util.find_spec("pip") is None, reason="this Python has no pip")
def test_an_environment_of_a_python_without_ensurepip(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        environment.importlib.util,
        "find_spec",
        lambda name: None if name == "ensurepip" else find(name),
    )
    commands: list[list[str]] = []

    def quiet(command: list[str], *, show: bool) -> bool:
        commands.append(command)
        target = Path(command[command.index("--target") + 1])
        (target / "pip.py").write_text("")
        return True

    monkeypatch.setattr(environment, "ROOT", tmp_path)
    monkeypatch.setattr(environment, "VENV", tmp_path / "venv")
    monkeypatch.setattr(environment, "STAMPS", tmp_path / "stamps")
    monkeypatch.setattr(environment, "quiet", quiet)
    for _ in range(2):
        environment.make_venv(False)
    (command,) = commands
    assert command[:4] == [sys.executable, "-m", "pip", "install"]
    assert (environment.packages(tmp_path / "venv") / "pip.py").exists()


@pytest.mark.parametrize("version", [(3, 9, 2), (3, 15, 0)])
def test_a_python_that_is_too_old_or_too_new(
    version: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(environment.sys, "version_info", version)
    monkeypatch.setattr(environment.sys, "prefix", "/usr")
    with pytest.raises(SystemExit, match=r"Python 3\.10 to 3\.14 is needed; .*PYTHON=python3\.14"):
        environment.main()


def test_every_list_of_python_versions_agrees() -> None:
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    names = [f"{major}.{minor}" for major, minor in environment.PYTHONS]
    assert re.findall(r'"Programming Language :: Python :: (3\.\d+)"', text) == names
    assert f'requires-python = ">={names[0]}"' in text
    assert tuple(names) == run_tests.PYTHONS
    page = (ROOT / "docs" / "tutorial" / "index.md").read_text(encoding="utf-8")
    assert f"Python {names[0]} to {names[-1]}" in page


def test_torch_comes_with_numpy() -> None:
    """Without numpy, torch keeps alive the frames that import it, and thus a cache's tensors."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    (extra,) = re.findall(r"^torch = \[(.*)\]$", text, re.M)
    assert '"numpy"' in extra


def test_pins_of_a_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = ["# why", "", "one==1.0+cpu", 'two==2; python_version < "3.11"']
    lines += ['two==2.5; python_version >= "3.11"']
    (tmp_path / "some.txt").write_text("\n".join(lines))
    monkeypatch.setattr(environment, "REQUIREMENTS", tmp_path)
    for minor, version in {10: "2", 11: "2.5", 13: "2.5"}.items():
        assert environment.read_pins("some", minor) == {"one": "1.0+cpu", "two": version}
    (tmp_path / "some.txt").write_text("one>=1\n")
    with pytest.raises(SystemExit, match=r"some\.txt: not a pinned version: one>=1"):
        environment.read_pins("some")


@pytest.mark.parametrize(
    "path", sorted(environment.REQUIREMENTS.glob("*.txt")), ids=lambda path: path.stem
)
def test_every_python_has_the_same_packages(path: Path) -> None:
    names = [set(environment.read_pins(path.stem, minor)) for _, minor in environment.PYTHONS]
    assert names[0]
    assert all(one == names[0] for one in names)


@pytest.mark.parametrize(
    ("folder", "out"), [("libvmem", "BUILD"), ("tests/gpu", "OUT"), ("tests/softcuda", "OUT")]
)
def test_warnings_are_errors_only_on_request(folder: str, out: str, tmp_path: Path) -> None:
    make = ["make", "-n", "-C", str(ROOT / folder), f"{out}={tmp_path}"]
    usual, strict = (
        subprocess.check_output([*make, f"WERROR={value}"], text=True) for value in ("", "1")
    )
    assert " -Wextra " in usual
    assert "-Werror" not in usual
    assert "-Wextra -Werror " in strict
    assert "WERROR=1" in (ROOT / ".ci" / "run").read_text(encoding="utf-8")


@pytest.mark.skipif(sys.prefix != str(environment.VENV), reason="not the environment of make setup")
def test_type_checkers_find_the_package(tmp_path: Path) -> None:
    """mypy follows path entries, but not the import hooks that an editable install may use."""
    program = (
        "from importlib.machinery import PathFinder\n"
        "for name in ('pyvmem', 'pyvmem_vllm', 'vmem_bench'):\n"
        "    print(PathFinder.find_spec(name).origin)"
    )
    words = [sys.executable, "-I", "-c", program]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=True)
    first, second, third = map(Path, done.stdout.split())
    assert first == ROOT / "pyvmem" / "__init__.py"
    assert first.with_name("py.typed").exists()
    assert second == ROOT / "pyvmem_vllm" / "__init__.py"
    assert third.with_name("py.typed").exists()
