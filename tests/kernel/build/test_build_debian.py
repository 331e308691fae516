# SPDX-License-Identifier: MIT
"""Tests where kernel_debian unpacks kernels from other suites, and which compiler it uses."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import kernel_debian
import pytest
from kernel_common import KernelBuildError
from kernel_debian import debian_headers, use_libraries
from kernel_headers import KernelHeaders

RELEASE = "9.9.1+deb13-cloud-amd64"
COMMON = "9.9.1+deb13"
SOURCES = "usr/src/linux-headers-"
LIBRARIES = "usr/lib/x86_64-linux-gnu"
PROGRAM = Path("/bin/true")
META = f"Package: linux-headers-cloud-amd64\nDepends: linux-headers-{RELEASE} (= 9.9.1-1)\n"


def package(name: str, files: dict[str, str | Path], folder: Path) -> Path:
    """Builds a package from files, each given as text or as the path of a file to copy."""
    inside = folder / f"{name}.inside"
    for path, content in files.items():
        (inside / path).parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, Path):
            shutil.copy(content, inside / path)
        else:
            (inside / path).write_text(content)
    (inside / "DEBIAN").mkdir()
    (inside / "DEBIAN/control").write_text(
        f"Package: {name}\nVersion: 1\nArchitecture: all\n"
        "Maintainer: nobody <nobody@localhost>\nDescription: a test\n"
    )
    made = folder / f"{name}_1_all.deb"
    subprocess.run(["dpkg-deb", "--build", inside, made], check=True, capture_output=True)
    shutil.rmtree(inside)
    return made


def loader() -> Path:
    return Path(kernel_debian.LOADER)


def libc() -> Path:
    said = subprocess.check_output(["ldd", PROGRAM], text=True)
    return Path(next(line.split()[2] for line in said.splitlines() if "libc.so.6" in line))


def kernel(*, parts: bool) -> dict[str, dict[str, str | Path]]:
    """Returns a kernel's packages; with `parts`, its image and modules are in separate packages."""
    image = f"boot/vmlinuz-{RELEASE}"
    files: dict[str, dict[str, str | Path]] = {
        f"linux-headers-{RELEASE}": {
            f"{SOURCES}{RELEASE}/Makefile": f"include /{SOURCES}{COMMON}-common/Makefile\n",
            f"{SOURCES}{RELEASE}/.kernelvariables": "CC = $(CROSS_COMPILE)gcc-77\n",
            f"{SOURCES}{RELEASE}/include/generated/utsrelease.h": (
                f'#define UTS_RELEASE "{RELEASE}"\n'
            ),
        },
        f"linux-headers-{COMMON}-common": {f"{SOURCES}{COMMON}-common/Makefile": "all:\n"},
        f"linux-kbuild-{COMMON}": {f"usr/lib/linux-kbuild-{COMMON}/scripts/modpost": PROGRAM},
        f"linux-image-{RELEASE}": {"usr/share/doc/x": ""} if parts else {image: "the image"},
    }
    if parts:
        where = f"usr/lib/modules/{RELEASE}"
        files[f"linux-binary-{RELEASE}"] = {f"{where}/vmlinuz": "the image"}
        files[f"linux-modules-{RELEASE}"] = {f"{where}/kernel/x.ko": "a module"}
    return files


class Area:
    """A fake AptArea whose archive is a dictionary of packages."""

    packages: dict[str, dict[str, str | Path]]
    asked: list[str]

    def __init__(self, suite: str, components: Sequence[str]) -> None:
        self.suite = suite

    def options(self) -> list[str]:
        return []

    def update(self) -> None:
        self.asked.append(f"update {self.suite}")

    def versions(self, name: str) -> list[str]:
        return ["1"] if name in self.packages else []

    def download(self, name: str, version: str, folder: Path) -> Path:
        return package(name, self.packages[name], folder)

    def download_closure(self, names: Sequence[str], folder: Path) -> list[Path]:
        folder.mkdir()
        self.asked.append(f"{names[0]} of {self.suite}")
        there = {
            "usr/bin/x86_64-linux-gnu-gcc-77": PROGRAM,
            f"{LIBRARIES}/{loader().name}": loader(),
            f"{LIBRARIES}/libc.so.6": libc(),
        }
        return [package(names[0], there, folder)]


@pytest.fixture
def area(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> type[Area]:
    for program in ("dpkg-deb", "patchelf"):
        if not shutil.which(program):
            pytest.skip(f"no {program} here")
    Area.asked = []
    Area.packages = kernel(parts=False)
    (tmp_path / "debian").mkdir()
    monkeypatch.setattr(kernel_debian, "FOLDER", tmp_path / "debian")
    monkeypatch.setattr(kernel_debian, "AptArea", Area)
    run = kernel_debian.run

    def shown(*command: str | Path) -> str:
        return META if command[0] == "apt-cache" else run(*command)

    monkeypatch.setattr(kernel_debian, "run", shown)
    return Area


@pytest.mark.parametrize("parts", [False, True])
def test_a_kernel_is_unpacked_with_its_compiler(area: type[Area], parts: bool) -> None:
    area.packages = kernel(parts=parts)
    headers = debian_headers("trixie-backports")
    root = kernel_debian.FOLDER / "trixie-backports"
    assert headers.release == RELEASE
    assert headers.source == root / f"{SOURCES}{COMMON}-common"
    assert (root / "boot" / f"vmlinuz-{RELEASE}").read_text() == "the image"
    if parts:
        assert (root / "lib/modules" / RELEASE / "kernel/x.ko").is_file()
    # The compiler comes from the kernel's own release, regardless of what this system has.
    assert "gcc-77 of trixie" in area.asked
    assert headers.compiler() == "x86_64-linux-gnu-gcc-77"
    subprocess.run(headers.with_tools(headers.compiler()), check=True)


def test_programs_use_the_library_that_came_with_them(area: type[Area]) -> None:
    headers = debian_headers("trixie")
    assert headers.tools is not None
    libraries = headers.tools.parent / "lib/x86_64-linux-gnu"
    modpost = kernel_debian.FOLDER / f"trixie/usr/lib/linux-kbuild-{COMMON}/scripts/modpost"
    for program in (modpost, headers.tools / headers.compiler()):
        said = subprocess.check_output(["patchelf", "--print-interpreter", program], text=True)
        assert said.strip() == str(libraries / loader().name)
        subprocess.run([program], check=True)
    # Without that library, modpost does not start: it does not fall back to the system's library.
    (libraries / "libc.so.6").rename(libraries / "gone")
    (libraries / "libc.so.6").write_text("no library")
    assert subprocess.run([modpost], check=False, capture_output=True).returncode != 0


def test_what_is_there_is_not_fetched_again(area: type[Area]) -> None:
    first = debian_headers("trixie")
    area.asked.clear()
    assert debian_headers("trixie") == first
    # For a second kernel with the same compiler, only the kernel is fetched.
    debian_headers("trixie-backports")
    assert area.asked == ["update trixie-backports"]


def test_headers_that_name_no_compiler_are_refused(area: type[Area]) -> None:
    name = f"linux-headers-{RELEASE}"
    area.packages[name][f"{SOURCES}{RELEASE}/.kernelvariables"] = "CC = cc\n"
    with pytest.raises(KernelBuildError, match=r"9\.9\.1.* name no compiler"):
        debian_headers("trixie")
    assert not (kernel_debian.FOLDER / "trixie").exists()


def test_a_folder_without_programs_is_told(tmp_path: Path) -> None:
    with pytest.raises(KernelBuildError, match="holds no programs"):
        use_libraries(tmp_path, tmp_path)


def test_only_known_suites_have_a_kernel() -> None:
    with pytest.raises(KernelBuildError, match="no kernel of Debian 'potato', only trixie"):
        debian_headers("potato")


def test_the_usual_compiler_needs_no_path(tmp_path: Path) -> None:
    headers = KernelHeaders(tmp_path, tmp_path, "6.1.0-9-x")
    assert headers.compiler() == "gcc"
    assert headers.with_tools("make", "x") == ["make", "x"]
