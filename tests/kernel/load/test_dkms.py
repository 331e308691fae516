# SPDX-License-Identifier: MIT
"""Tests the DKMS package with dkms in private directories, and a driver of two small modules."""

from __future__ import annotations

import shutil
from pathlib import Path

import module_dkms
import pytest
from driver_source import driver_source
from kernel_common import KernelBuildError
from kernel_headers import KernelHeaders
from kernel_tree import Tree, build_tree
from machines import VERSION, found
from mini_driver import write_driver
from module_dkms import Dkms, make_package, providers
from module_elf import read_module
from module_kbuild import tree_version
from module_refuse import PREFIX, wrong_symbols
from module_source import DriverSource, stage
from module_system import System


@pytest.fixture
def dkms(machine: System) -> Dkms:
    if not shutil.which("dkms"):
        pytest.skip("dkms is not installed")
    return Dkms(machine, own_folders=True)


def modules_of(machine: System) -> set[str]:
    return {path.name for path in (machine.root / "lib/modules").rglob("*.ko*")}


# A DKMS package like the one for Debian's driver. In alphabetical order, ours would come first.
OTHER = "nvidia-workstation"
DRIVER_CONF = """\
PACKAGE_NAME="{name}"
PACKAGE_VERSION="{version}"
AUTOINSTALL="yes"
MAKE[0]="'make' modules SYSSRC=$(sed -n 's,^include \\(.*\\)/Makefile$,\\1,p' \
$kernel_source_dir/Makefile) SYSOUT=$kernel_source_dir NV_KERNEL_MODULES='nvidia nvidia-uvm'"
CLEAN="true"
BUILT_MODULE_NAME[0]="nvidia"
DEST_MODULE_NAME[0]="{name}"
DEST_MODULE_LOCATION[0]="/updates/dkms"
BUILT_MODULE_NAME[1]="nvidia-uvm"
DEST_MODULE_NAME[1]="{name}-uvm"
DEST_MODULE_LOCATION[1]="/updates/dkms"
"""
STOCK = {"nvidia-current.ko", "nvidia-current-uvm.ko"}
RULE = "etc/modprobe.d/00-nvidia-uvm-vmem.conf"


def test_dkms_there_and_back(
    machine: System, dkms: Dkms, staged: Path, headers: KernelHeaders, tmp_path: Path
) -> None:
    package = make_package(staged, tmp_path / "packages", [])
    stock = (machine.root / "lib/modules").rglob("nvidia-current-uvm.ko")
    before = next(stock).read_bytes()
    dkms.install(package, headers.release, headers.build)
    assert dkms.versions() == [VERSION]
    assert modules_of(machine) == STOCK | {"nvidia-uvm-vmem.ko"}
    (ours,) = (machine.root / "lib/modules").rglob("nvidia-uvm-vmem.ko")
    built = read_module(ours)
    assert wrong_symbols(built, found(machine, headers.release)) == []
    # DKMS signs with the machine's key if it can; under Secure Boot that key is the enrolled one.
    assert built.signed == (dkms.tree / "mok.pub").exists()
    assert (machine.root / RULE).is_file()
    # Install again, as after an update of this project.
    dkms.install(package, headers.release, headers.build)
    assert dkms.versions() == [VERSION]
    assert dkms.uninstall() == [VERSION]
    assert modules_of(machine) == STOCK
    (stock_file,) = (machine.root / "lib/modules").rglob("nvidia-current-uvm.ko")
    assert stock_file.read_bytes() == before
    assert not (machine.root / RULE).exists()
    assert list((machine.root / "usr/src").iterdir()) == []
    assert dkms.uninstall() == []


def test_a_distributions_package_has_the_rule_itself(
    machine: System, dkms: Dkms, staged: Path, headers: KernelHeaders, tmp_path: Path
) -> None:
    """The rule's file belongs to that package: it is neither created nor removed."""
    theirs = machine.root / RULE
    theirs.parent.mkdir(parents=True)
    theirs.write_text("theirs", encoding="utf-8")
    package = make_package(staged, tmp_path / "packages", [])
    packaged = Dkms(machine, own_folders=True, packaged=True)
    packaged.install(package, headers.release, headers.build)
    assert modules_of(machine) == STOCK | {"nvidia-uvm-vmem.ko"}
    assert packaged.uninstall() == [VERSION]
    assert theirs.read_text(encoding="utf-8") == "theirs"
    assert not (machine.root / "usr/local").exists()


def test_dkms_after_the_driver_was_upgraded(
    machine: System, dkms: Dkms, staged: Path, headers: KernelHeaders, tmp_path: Path
) -> None:
    """A package for an older driver does not build, and leaves no files behind."""
    (nvidia,) = (machine.root / "lib/modules").rglob("nvidia-current.ko")
    content = nvidia.read_bytes()
    nvidia.write_bytes(content.replace(b"version=535.261.03", b"version=535.261.99"))
    package = make_package(staged, tmp_path / "packages", [])
    with pytest.raises(KernelBuildError, match="dkms"):
        dkms.install(package, headers.release, headers.build)
    assert modules_of(machine) == STOCK
    assert dkms.versions() == []
    assert not (machine.root / RULE).exists()


def test_dkms_for_another_kernel(
    machine: System, dkms: Dkms, staged: Path, headers: KernelHeaders, tmp_path: Path
) -> None:
    """When a new kernel is installed, the driver's package is built first, then ours."""
    for path in (machine.root / "lib/modules").rglob("*.ko"):
        path.unlink()
    driver = write_driver(machine.root / f"usr/src/{OTHER}-{VERSION}", patched=False)
    (driver / "dkms.conf").write_text(
        DRIVER_CONF.format(name=OTHER, version=VERSION), encoding="utf-8"
    )
    dkms.dkms("add", "-m", OTHER, "-v", VERSION)
    package = make_package(staged, machine.root / "usr/src", providers(dkms.tree))
    dkms.dkms("add", "-m", module_dkms.NAME, "-v", VERSION)
    assert package.parent == dkms.sources
    dkms.dkms("autoinstall", "-k", headers.release, "--kernelsourcedir", str(headers.build))
    assert modules_of(machine) == {f"{OTHER}.ko", f"{OTHER}-uvm.ko"} | {"nvidia-uvm-vmem.ko"}
    (ours,) = (machine.root / "lib/modules").rglob("nvidia-uvm-vmem.ko")
    assert wrong_symbols(read_module(ours), found(machine, headers.release)) == []


def test_package_names_the_drivers_package(tmp_path: Path, staged: Path) -> None:
    source = tmp_path / "dkms/nvidia-current/535.261.03/source"
    source.mkdir(parents=True)
    (source / "dkms.conf").write_text('PACKAGE_NAME="nvidia-current"\n', encoding="utf-8")
    names = providers(tmp_path / "dkms")
    assert names == ["nvidia-current"]
    package = make_package(staged, tmp_path / "packages", names)
    conf = (package / "dkms.conf").read_text(encoding="utf-8")
    assert 'BUILD_DEPENDS[0]="nvidia-current"' in conf
    assert f'PACKAGE_VERSION="{VERSION}"' in conf
    assert "@" not in conf
    assert tree_version(package) == VERSION


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_dkms_with_the_real_driver(tmp_path: Path, headers: KernelHeaders) -> None:
    """Builds NVIDIA's patched sources; the installed driver is the software GPU's nvidia.ko."""
    if not shutil.which("dkms"):
        pytest.skip("dkms is not installed")
    tree = build_tree(Tree(version=VERSION, headers=headers, patched=False))
    root = tmp_path / "root"
    modules = root / "lib/modules" / headers.release / "updates/dkms"
    for folder in (modules, root / "usr/src", root / "var/lib/dkms"):
        folder.mkdir(parents=True)
    shutil.copyfile(tree / "nvidia.ko", modules / "nvidia-current.ko")
    stage(DriverSource(driver_source(VERSION), VERSION, "as published"), tmp_path / "tree")
    package = make_package(tmp_path / "tree", tmp_path / "packages", [])
    machine = System(root)
    Dkms(machine, own_folders=True).install(package, headers.release, headers.build)
    built = read_module(modules / "nvidia-uvm-vmem.ko")
    assert wrong_symbols(built, found(machine, headers.release)) == []
    assert any(name.startswith(PREFIX) for name in built.parameters)
