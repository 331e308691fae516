# SPDX-License-Identifier: MIT
"""`make module` and the DKMS package on a driver of two small modules, which builds in seconds."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import module_dkms
import module_source
import pytest
from conftest import Lay
from kernel_common import KernelBuildError
from kernel_headers import KernelHeaders, default_headers
from mini_driver import make_driver, write_driver
from module_build import about_versions, headers_for
from module_dkms import Dkms, make_package, providers
from module_elf import KernelModule, ModuleFileError, read_module, symvers_text
from module_kbuild import BuildError, build_uvm, conftests_only, find_nvidia, tree_version
from module_refuse import wrong_symbols
from module_source import choose_source, meeting
from module_system import System

VERSION = "535.261.03"
SYMBOL = "nvUvmInterfaceMini"


@pytest.fixture(scope="session")
def headers() -> KernelHeaders:
    try:
        return default_headers()
    except KernelBuildError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def installed(tmp_path_factory: pytest.TempPathFactory, headers: KernelHeaders) -> Path:
    """The files of an installed driver."""
    tree = write_driver(tmp_path_factory.mktemp("installed"), patched=False)
    make_driver(tree, headers.source, headers.build)
    return tree


@pytest.fixture(scope="session")
def another(tmp_path_factory: pytest.TempPathFactory, headers: KernelHeaders) -> KernelModule:
    """nvidia.ko of the same version whose function takes another struct."""
    fields = "int value; long more;"
    tree = write_driver(tmp_path_factory.mktemp("another"), fields=fields, patched=False)
    make_driver(tree, headers.source, headers.build)
    return read_module(tree / "nvidia.ko")


@pytest.fixture
def machine(tmp_path: Path, installed: Path, headers: KernelHeaders) -> System:
    """A machine with that driver as Debian installs it, not loaded."""
    modules = tmp_path / "root/lib/modules" / headers.release / "updates/dkms"
    modules.mkdir(parents=True)
    shutil.copyfile(installed / "nvidia.ko", modules / "nvidia-current.ko")
    shutil.copyfile(installed / "nvidia-uvm.ko", modules / "nvidia-current-uvm.ko")
    for folder in ("usr/src", "var/lib/dkms"):
        (tmp_path / "root" / folder).mkdir(parents=True)
    return System(tmp_path / "root")


@pytest.fixture
def staged(tmp_path: Path) -> Path:
    """A patched tree as `make module` lays it out."""
    tree = write_driver(tmp_path / "tree")
    conftests_only(tree)
    return tree


def found(machine: System, release: str) -> KernelModule:
    module = find_nvidia(machine.root / "lib/modules" / release, VERSION)
    assert module is not None
    return module


def test_reading_a_module(installed: Path, headers: KernelHeaders) -> None:
    module = read_module(installed / "nvidia.ko")
    assert (module.name, module.version, module.release) == ("nvidia", VERSION, headers.release)
    assert not module.signed
    # What the kernel's own build wrote down.
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
    # The same tree, for the right one: the versions are not those of the earlier build.
    built = read_module(build_uvm(staged, headers.build, headers.source, nvidia))
    assert wrong_symbols(built, nvidia) == []


def test_without_a_driver(machine: System, staged: Path, headers: KernelHeaders) -> None:
    nvidia = found(machine, headers.release)
    built = read_module(build_uvm(staged, headers.build, headers.source, None))
    assert built.imports[SYMBOL] is None
    (reason,) = wrong_symbols(built, nvidia)
    assert "built without the symbol versions" in reason
    assert "is not one to load" in about_versions(None, True, headers.release).replace("\n", " ")


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


# Where the source comes from


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


def test_loaded_driver_counts_more_than_installed_ones(
    lay: Lay, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def debian(version: str) -> Path:
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
    monkeypatch.setattr(module_source, "driver_source", lambda version: tree)
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


# DKMS


@pytest.fixture
def dkms(machine: System) -> Dkms:
    if not shutil.which("dkms"):
        pytest.skip("dkms is not installed")
    return Dkms(machine, own_folders=True)


def modules_of(machine: System) -> set[str]:
    return {path.name for path in (machine.root / "lib/modules").rglob("*.ko*")}


# As Debian's package for the driver has it. In the order of the names ours would come first.
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
    # DKMS signs with the machine's key, if it can; under Secure Boot that is the one enrolled.
    assert built.signed == (dkms.tree / "mok.pub").exists()
    assert (machine.root / RULE).is_file()
    # Again, as after an update of this project.
    dkms.install(package, headers.release, headers.build)
    assert dkms.versions() == [VERSION]
    assert dkms.uninstall() == [VERSION]
    assert modules_of(machine) == STOCK
    (stock_file,) = (machine.root / "lib/modules").rglob("nvidia-current-uvm.ko")
    assert stock_file.read_bytes() == before
    assert not (machine.root / RULE).exists()
    assert list((machine.root / "usr/src").iterdir()) == []
    assert dkms.uninstall() == []


def test_dkms_after_the_driver_was_upgraded(
    machine: System, dkms: Dkms, staged: Path, headers: KernelHeaders, tmp_path: Path
) -> None:
    """The package is for a driver that is gone: it does not build, and nothing of it is left."""
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
    """What a new kernel's installation calls: the driver's package is built first, then ours."""
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
