# SPDX-License-Identifier: MIT
"""Tests `make module` with a driver of two small modules, which builds in seconds."""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import module_kbuild
import module_source
import pytest
from kernel_common import KernelBuildError, write_if_changed
from kernel_headers import KernelHeaders
from machines import VERSION, Lay, found
from mini_driver import make_driver, write_driver
from module_build import about_versions, headers_for
from module_elf import KernelModule, ModuleFileError, read_module, symvers_text
from module_kbuild import BuildError, build_uvm
from module_refuse import unknown_symbols, wrong_symbols
from module_source import choose_source, meeting
from module_system import System

SYMBOL = "nvUvmInterfaceMini"


@pytest.fixture(scope="session")
def another(tmp_path_factory: pytest.TempPathFactory, headers: KernelHeaders) -> KernelModule:
    """An nvidia.ko of the same version whose function takes a different struct as its argument."""
    fields = "int value; long more;"
    tree = write_driver(tmp_path_factory.mktemp("another"), fields=fields, patched=False)
    make_driver(tree, headers.source, headers.build)
    return read_module(tree / "nvidia.ko")


def test_reading_a_module(installed: Path, headers: KernelHeaders) -> None:
    module = read_module(installed / "nvidia.ko")
    assert (module.name, module.version, module.release) == ("nvidia", VERSION, headers.release)
    assert not module.signed
    # The kernel's own build recorded the same versions.
    line = (installed / "Module.symvers").read_text(encoding="utf-8").split("\t")
    assert {SYMBOL: int(line[0], 16)} == {n: e.crc for n, e in module.exports.items()}
    assert symvers_text(module) == f"{line[0]}\t{SYMBOL}\tnvidia\tEXPORT_SYMBOL\t\n"
    user = read_module(installed / "nvidia-uvm.ko")
    assert user.imports[SYMBOL] == int(line[0], 16)


def test_reading_compressed_modules(tmp_path: Path, installed: Path) -> None:
    plain = read_module(installed / "nvidia.ko")
    for suffix, program in ((".xz", "xz"), (".gz", "gzip"), (".zst", "zstd")):
        if not shutil.which(program):
            continue
        path = tmp_path / f"nvidia.ko{suffix}"
        with open(path, "wb") as file:
            subprocess.run([program, "-c", installed / "nvidia.ko"], stdout=file, check=True)
        assert read_module(path).exports == plain.exports


@pytest.mark.parametrize("content", [b"", b"\x7fELF", b"\x7fELF\x02\x01" + b"\xff" * 4000])
def test_reading_what_is_no_module(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "x.ko"
    path.write_bytes(content)
    with pytest.raises(ModuleFileError):
        read_module(path)


def test_linked_against_the_installed_driver(
    machine: System, staged: Path, headers: KernelHeaders
) -> None:
    nvidia = found(machine, headers.release)
    built = read_module(build_uvm(staged, headers.build, headers.source, nvidia))
    assert built.imports[SYMBOL] == nvidia.exports[SYMBOL].crc
    assert wrong_symbols(built, nvidia) == []
    assert not (staged / "nvidia.ko").exists()


def test_another_driver_is_noticed(
    machine: System, staged: Path, headers: KernelHeaders, another: KernelModule
) -> None:
    nvidia = found(machine, headers.release)
    built = read_module(build_uvm(staged, headers.build, headers.source, another))
    (reason,) = wrong_symbols(built, nvidia)
    assert "linked against another nvidia.ko" in reason
    # Rebuilt for the right nvidia.ko, the tree keeps nothing of the earlier build's versions.
    built = read_module(build_uvm(staged, headers.build, headers.source, nvidia))
    assert wrong_symbols(built, nvidia) == []


def test_without_a_driver(machine: System, staged: Path, headers: KernelHeaders) -> None:
    nvidia = found(machine, headers.release)
    built = read_module(build_uvm(staged, headers.build, headers.source, None))
    assert built.imports[SYMBOL] is None
    assert wrong_symbols(built, nvidia) == []
    (doubt,) = unknown_symbols(built, nvidia)
    assert doubt.word == "symbols"
    assert "built without the symbol versions" in doubt.text
    assert "it cannot be loaded" in about_versions(None, True, headers.release).replace("\n", " ")


def test_a_build_that_fails(machine: System, staged: Path, headers: KernelHeaders) -> None:
    (staged / "nvidia-uvm/uvm.c").write_text("#error broken on purpose\n", encoding="utf-8")
    with pytest.raises(BuildError, match="broken on purpose"):
        build_uvm(staged, headers.build, headers.source, found(machine, headers.release))


def test_function_that_the_driver_has_not(
    machine: System, staged: Path, headers: KernelHeaders
) -> None:
    path = staged / "nvidia-uvm/uvm.c"
    text = path.read_text(encoding="utf-8").replace(SYMBOL, "nvUvmInterfaceOther")
    path.write_text("int nvUvmInterfaceOther(void *info);\n" + text, encoding="utf-8")
    with pytest.raises(BuildError, match="nvUvmInterfaceOther"):
        build_uvm(staged, headers.build, headers.source, found(machine, headers.release))


def test_nvidia_ko_given(machine: System, installed: Path, headers: KernelHeaders) -> None:
    good = str(installed / "nvidia.ko")
    module = meeting(machine, headers.release, VERSION, good)
    assert module is not None
    for path, release, version, text in (
        ("/nowhere.ko", headers.release, VERSION, "cannot be read"),
        (str(installed / "nvidia-uvm.ko"), headers.release, VERSION, "is the module nvidia_uvm"),
        (good, headers.release, "550.163.01", "is driver 535.261.03"),
        (good, "6.9.9", VERSION, "is for kernel"),
    ):
        with pytest.raises(KernelBuildError, match=text):
            meeting(machine, release, version, path)


# The driver's source


def test_nv_src_first(machine: System, tmp_path: Path, headers: KernelHeaders) -> None:
    write_driver(machine.root / f"usr/src/nvidia-{VERSION}")
    given = write_driver(tmp_path / "given/kernel-open", "580.105.08")
    source = choose_source(machine, headers.release, str(tmp_path / "given"))
    assert (source.tree, source.version) == (given, "580.105.08")
    with pytest.raises(KernelBuildError, match="holds no driver sources"):
        choose_source(machine, headers.release, str(tmp_path))
    with pytest.raises(KernelBuildError, match=r"is driver 580\.105\.08, not 535"):
        choose_source(machine, headers.release, str(given), VERSION)


@pytest.mark.parametrize(
    "place",
    [
        f"usr/src/nvidia-{VERSION}",
        f"usr/src/nvidia-current-open-{VERSION}",
        f"var/lib/dkms/nvidia/{VERSION}/source",
    ],
)
def test_the_installed_drivers_own(machine: System, headers: KernelHeaders, place: str) -> None:
    write_driver(machine.root / "usr/src/nvidia-550.163.01", "550.163.01")
    tree = write_driver(machine.root / place)
    source = choose_source(machine, headers.release)
    assert (source.tree, source.version) == (tree, VERSION)
    assert "DKMS" in source.origin


def test_the_proprietary_flavour(
    machine: System, tmp_path: Path, headers: KernelHeaders, staged: Path, installed: Path
) -> None:
    tree = write_driver(machine.root / f"usr/src/nvidia-{VERSION}", proprietary=True)
    for given in ("", str(tree)):
        with pytest.raises(KernelBuildError, match=r"usr/src/.* is of .*proprietary .*Turing"):
            choose_source(machine, headers.release, given)
    module = read_module(installed / "nvidia.ko")
    proprietary = replace(module, info={**module.info, "license": ["NVIDIA"]})
    with pytest.raises(BuildError, match=r"nvidia\.ko is of .*proprietary .*GPL-only"):
        build_uvm(staged, headers.build, headers.source, proprietary)
    assert not (staged / "build.log").exists()


def test_scripts_of_the_drivers_makefile_can_be_run(tmp_path: Path) -> None:
    tree = write_driver(tmp_path / "driver")
    (tree / "pahole.sh").write_text("#!/bin/sh\n", encoding="utf-8")
    new = tmp_path / "new"
    new.mkdir()
    module_source.copy_parts(tree, new)
    for name in ("conftest.sh", "pahole.sh"):
        content = (new / name).read_bytes()
        write_if_changed(tmp_path / "tree" / name, content)
        assert os.access(tmp_path / "tree" / name, os.X_OK)


def test_no_type_information_is_asked_for(
    staged: Path, headers: KernelHeaders, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: dict[str, str] = {}

    def make(tree: Path, variables: dict[str, str], jobs: int) -> None:
        seen.update(variables)
        raise BuildError("seen")

    monkeypatch.setattr(module_kbuild, "run_make", make)
    with pytest.raises(BuildError, match="seen"):
        build_uvm(staged, headers.build, headers.source, None)
    assert "-g0" in seen["KCFLAGS"]
    assert seen["CONFIG_DEBUG_INFO_BTF_MODULES"] == ""


def test_loaded_driver_counts_more_than_installed_ones(
    lay: Lay, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def debian(version: str, *, download: bool) -> Path:
        assert download
        asked.append(version)
        raise KernelBuildError("no network")

    monkeypatch.setattr(module_source, "driver_source", debian)
    machine = lay({"sys/module/nvidia/version": "555.58.02\n"})
    write_driver(machine.root / f"usr/src/nvidia-{VERSION}")
    with pytest.raises(KernelBuildError, match=r"driver 555\.58\.02 is loaded; its source is not"):
        choose_source(machine, "6.1.0-1-amd64")
    assert asked == ["555.58.02"]


def test_no_driver_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tree = write_driver(tmp_path / "debian")
    monkeypatch.setattr(module_source, "driver_source", lambda version, download: tree)
    source = choose_source(System(tmp_path), "6.1.0-1-amd64")
    assert (source.tree, source.version) == (tree, module_source.DEFAULT_VERSION)


def test_kernel_headers(lay: Lay) -> None:
    machine = lay()
    with pytest.raises(KernelBuildError, match=r"no headers of kernel 6\.1\.0-1-amd64"):
        headers_for(machine)
    for number in (9, 56):
        build = machine.root / f"usr/src/linux-headers-6.1.0-{number}-amd64"
        (build / "include/generated").mkdir(parents=True)
        (build / "Makefile").write_text("", encoding="utf-8")
        (build / "include/generated/autoconf.h").touch()
        release = f'#define UTS_RELEASE "6.1.0-{number}-amd64"\n'
        (build / "include/generated/utsrelease.h").write_text(release, encoding="utf-8")
    assert headers_for(machine).release == "6.1.0-56-amd64"
    older = machine.root / "usr/src/linux-headers-6.1.0-9-amd64"
    assert headers_for(machine, str(older)).release == "6.1.0-9-amd64"
    (machine.root / "lib/modules/6.1.0-1-amd64").mkdir(parents=True)
    (machine.root / "lib/modules/6.1.0-1-amd64/build").symlink_to(older)
    assert headers_for(machine).build == older.resolve()
