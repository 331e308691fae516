# SPDX-License-Identifier: MIT
"""Tests how the driver's sources are found: versions, locations, and Debian's signed archive."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import apt_area
import driver_debian
import driver_source
import pytest
from apt_area import AptArea, Source, archive_source, parse_deb822, parse_one_line
from kernel_common import KernelBuildError, branch_of, check_version

VERSION = "535.261.03"
KBUILD = 'ccflags-y += -DNV_VERSION_STRING=\\"{}\\"\n'


def write_tree(folder: Path, version: str) -> Path:
    """Writes the smallest directory that is accepted as a kernel-open tree."""
    (folder / "nvidia-uvm").mkdir(parents=True)
    (folder / "nvidia-uvm" / "uvm.c").write_text("int uvm;\n")
    (folder / "Kbuild").write_text(KBUILD.format(version))
    return folder


@pytest.fixture(autouse=True)
def nothing_given(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Unsets the variables that name a source, and uses a private build directory."""
    build = tmp_path / "build"
    monkeypatch.delenv("NV_SRC", raising=False)
    monkeypatch.delenv("VMEM_DRIVER_SRC_DIR", raising=False)
    for module in (apt_area, driver_debian, driver_source):
        monkeypatch.setattr(module, "KERNEL_BUILD", build)
    return build


@pytest.mark.parametrize("version", ["535.261.03", "580.142", "595.45.04"])
def test_versions_of_nvidia_are_taken(version: str) -> None:
    assert check_version(version) == version
    assert branch_of(version) == int(version[:3])


@pytest.mark.parametrize("version", ["", "535", "535.261.03-1", "../535.261.03", "535.261.03\n"])
def test_other_words_are_not(version: str) -> None:
    with pytest.raises(KernelBuildError, match="not a driver version"):
        check_version(version)


def test_a_named_tree_is_copied_and_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    tree = write_tree(tmp_path / "clone" / "kernel-open", VERSION)
    monkeypatch.setenv("NV_SRC", str(tmp_path / "clone"))
    made = driver_source.driver_source(VERSION)
    assert (made / "nvidia-uvm" / "uvm.c").read_text() == "int uvm;\n"
    (tree / "nvidia-uvm" / "uvm.c").write_text("int changed;\n")
    assert (driver_source.driver_source(VERSION) / "nvidia-uvm/uvm.c").read_text() == "int uvm;\n"
    # Without NV_SRC the earlier copy is still found.
    monkeypatch.delenv("NV_SRC")
    assert driver_source.driver_source(VERSION) == made


def test_another_named_tree_replaces_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    write_tree(tmp_path / "one", VERSION)
    two = write_tree(tmp_path / "two", VERSION)
    (two / "nvidia-uvm" / "uvm.c").write_text("int two;\n")
    monkeypatch.setenv("NV_SRC", str(tmp_path / "one"))
    driver_source.driver_source(VERSION)
    monkeypatch.setenv("NV_SRC", str(two))
    assert (driver_source.driver_source(VERSION) / "nvidia-uvm/uvm.c").read_text() == "int two;\n"


def test_a_tree_of_another_version_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    write_tree(tmp_path / "tree", "550.163.01")
    monkeypatch.setenv("NV_SRC", str(tmp_path / "tree"))
    with pytest.raises(KernelBuildError, match=r"is driver 550\.163\.01, not 535\.261\.03"):
        driver_source.driver_source(VERSION)


def test_a_folder_that_is_no_tree_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("NV_SRC", str(tmp_path))
    with pytest.raises(KernelBuildError, match="holds no driver sources"):
        driver_source.driver_source(VERSION)


def test_a_folder_of_sources_serves_its_versions(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    write_tree(tmp_path / "sources" / "595.45.04", "595.45.04")
    monkeypatch.setenv("VMEM_DRIVER_SRC_DIR", str(tmp_path / "sources"))
    assert driver_source.driver_source("595.45.04").is_dir()
    with pytest.raises(KernelBuildError, match=r"does not have driver 580\.142"):
        driver_source.driver_source("580.142")


DEB822 = """\
# the archive
Types: deb deb-src
URIs: http://mirror.example/debian http://second.example/debian
Suites: bookworm bookworm-updates
Components: main
Signed-By:
 -----BEGIN PGP PUBLIC KEY BLOCK-----
 .
 AAAA
 -----END PGP PUBLIC KEY BLOCK-----

Types: deb
Enabled: no
URIs: http://disabled.example/debian
Suites: bookworm

Types: deb-src
URIs: http://source.example/debian
Suites: bookworm

Types: deb
Trusted: yes
URIs: http://security.example/debian-security
Suites: bookworm-security
"""


def pack(tmp_path: Path, version: str) -> Path:
    """Creates the source archive that Debian's package for a version installs."""
    tree = write_tree(tmp_path / version / "modules" / "nvidia-open-kernel", version)
    (tree / "nv.o_binary").write_bytes(b"precompiled")
    archive = tmp_path / "root" / driver_debian.ARCHIVE
    archive.parent.mkdir(parents=True, exist_ok=True)
    subprocess.run(["tar", "-cJf", archive, "-C", tmp_path / version, "modules"], check=True)
    return archive


def test_the_installed_package_is_taken_and_nothing_is_fetched(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    archive = pack(tmp_path, VERSION)
    assert driver_debian.installed(tmp_path / "root") == archive
    monkeypatch.setattr(driver_debian, "installed", lambda: archive)
    monkeypatch.setattr(driver_debian, "fetch", lambda *_: pytest.fail("fetched"))
    tree = driver_source.driver_source(VERSION, download=False)
    assert driver_source.version_of(tree) == VERSION
    assert not (tree / "nv.o_binary").exists()


def test_without_download_a_version_that_is_not_here_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    archive = pack(tmp_path, "550.163.01")
    monkeypatch.setattr(driver_debian, "fetch", lambda *_: pytest.fail("fetched"))
    monkeypatch.setattr(driver_debian, "installed", lambda: None)
    with pytest.raises(KernelBuildError, match="nvidia-open-kernel-source of that version is not"):
        driver_source.driver_source(VERSION, download=False)
    monkeypatch.setattr(driver_debian, "installed", lambda: archive)
    with pytest.raises(KernelBuildError, match=r"is driver 550\.163\.01"):
        driver_source.driver_source(VERSION, download=False)


def test_sources_of_many_fields() -> None:
    found = parse_deb822(DEB822)
    assert [one.uri for one in found] == [
        "http://mirror.example/debian",
        "http://second.example/debian",
        "http://security.example/debian-security",
    ]
    assert found[0].suites == ("bookworm", "bookworm-updates")
    assert found[0].signed_by.splitlines()[1] == " -----BEGIN PGP PUBLIC KEY BLOCK-----"
    assert found[2].signed_by == ""


def test_sources_of_one_line() -> None:
    text = (
        "# deb http://comment.example/debian bookworm main\n"
        "deb-src http://source.example/debian bookworm main\n"
        "deb [arch=amd64 signed-by=/usr/share/keyrings/a.gpg] http://a.example/debian sid main\n"
        "deb [ trusted=yes ] http://b.example/debian bookworm main contrib\n"
        "deb http://c.example/debian\tbookworm main\n"
    )
    assert parse_one_line(text) == [
        Source("http://a.example/debian", ("sid",), "/usr/share/keyrings/a.gpg"),
        Source("http://b.example/debian", ("bookworm",)),
        Source("http://c.example/debian", ("bookworm",)),
    ]


def write_sources(folder: Path, text: str) -> Path:
    (folder / "sources.list.d").mkdir(parents=True)
    (folder / "sources.list.d" / "debian.sources").write_text(text)
    return folder


def test_the_main_archive_is_chosen(tmp_path: Path) -> None:
    first = "Types: deb\nURIs: http://x.example/other\nSuites: stable\n\n"
    assert archive_source(write_sources(tmp_path, first + DEB822)).uri == (
        "http://mirror.example/debian"
    )


def test_a_system_without_debian_is_told(tmp_path: Path) -> None:
    text = "Types: deb\nURIs: http://archive.example/ubuntu\nSuites: noble\n"
    with pytest.raises(KernelBuildError, match="names no archive of Debian"):
        archive_source(write_sources(tmp_path, text))


def package(folder: Path, version: str) -> Path:
    """Builds a package like Debian's, whose source consists of three files."""
    tree = write_tree(folder / "modules" / "nvidia-open-kernel", version.split("-")[0])
    (tree / "nvidia").mkdir()
    (tree / "nvidia" / "nv-kernel.o_binary").write_text("left out")
    inside = folder / "package"
    (inside / "usr" / "src").mkdir(parents=True)
    subprocess.run(
        ["tar", "-C", folder, "-cJf", inside / "usr/src/nvidia-open-kernel.tar.xz", "modules"],
        check=True,
    )
    (inside / "DEBIAN").mkdir()
    (inside / "DEBIAN" / "control").write_text(
        f"Package: nvidia-open-kernel-source\nVersion: {version}\nArchitecture: amd64\n"
        "Maintainer: nobody <nobody@localhost>\nDescription: a test\n"
    )
    made = folder / "one.deb"
    subprocess.run(["dpkg-deb", "--build", inside, made], check=True, capture_output=True)
    return made


class Archive:
    """A Debian archive in a directory, signed with a newly generated key."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "debian"
        self.home = folder / "gnupg"
        self.home.mkdir(mode=0o700)
        self.gpg("--quick-gen-key", "--passphrase", "", "test@localhost", "ed25519", "sign", "0")
        self.ring = folder / "ring.gpg"
        self.ring.write_bytes(self.gpg("--export", "test@localhost"))

    def gpg(self, *words: str) -> bytes:
        command = ["gpg", "--homedir", str(self.home), "--batch", "--quiet", *words]
        return subprocess.run(command, check=True, capture_output=True).stdout

    def write(self, suite: str, deb: Path) -> None:
        (self.root / "pool").mkdir(parents=True, exist_ok=True)
        shutil.copy(deb, self.root / "pool" / "one.deb")
        control = subprocess.check_output(["dpkg-deb", "-f", deb], text=True)
        digest = hashlib.sha256(deb.read_bytes()).hexdigest()
        packages = (
            f"{control}Filename: pool/one.deb\nSize: {deb.stat().st_size}\nSHA256: {digest}\n\n"
        )
        place = self.root / "dists" / suite / "contrib" / "binary-amd64"
        place.mkdir(parents=True)
        (place / "Packages").write_text(packages)
        self.release = self.root / "dists" / suite / "Release"
        self.release.write_text(
            f"Origin: Debian\nSuite: {suite}\nCodename: {suite}\nArchitectures: amd64\n"
            "Components: contrib\nDate: Sat, 01 Aug 2026 00:00:00 UTC\nSHA256:\n"
            f" {hashlib.sha256(packages.encode()).hexdigest()} {len(packages)} "
            "contrib/binary-amd64/Packages\n"
        )

    def sign(self) -> None:
        self.gpg("--clearsign", "-o", str(self.release.with_name("InRelease")), str(self.release))


@pytest.fixture
def archive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Archive]:
    for program in ("apt-get", "dpkg-deb", "gpg", "xz"):
        if not shutil.which(program):
            pytest.skip(f"no {program} here")
    made = Archive(tmp_path)
    text = f"Types: deb\nURIs: file:{made.root}\nSuites: stable\nSigned-By: {made.ring}\n"
    monkeypatch.setattr(apt_area, "SYSTEM", write_sources(tmp_path / "etc", text))
    yield made
    subprocess.run(["gpgconf", "--homedir", made.home, "--kill", "gpg-agent"], check=False)


def test_a_signed_archive_gives_the_source(archive: Archive, tmp_path: Path) -> None:
    archive.write("bookworm", package(tmp_path / "p", f"{VERSION}-1"))
    archive.sign()
    tree = driver_source.driver_source(VERSION)
    assert driver_source.version_of(tree) == VERSION
    assert not list(tree.rglob("*.o_binary"))
    # The second call does not use the archive.
    shutil.rmtree(archive.root)
    assert driver_source.driver_source(VERSION) == tree


def test_an_unsigned_archive_is_refused(archive: Archive, tmp_path: Path) -> None:
    archive.write("bookworm", package(tmp_path / "p", f"{VERSION}-1"))
    with pytest.raises(KernelBuildError, match="not signed"):
        driver_source.driver_source(VERSION)


def test_a_list_changed_after_signing_is_refused(archive: Archive, tmp_path: Path) -> None:
    archive.write("bookworm", package(tmp_path / "p", f"{VERSION}-1"))
    archive.sign()
    packages = archive.root / "dists/bookworm/contrib/binary-amd64/Packages"
    packages.write_text(packages.read_text().replace("a test", "a Test"))
    with pytest.raises(KernelBuildError):
        driver_source.driver_source(VERSION)


def test_a_key_that_is_not_in_the_ring_is_refused(archive: Archive, tmp_path: Path) -> None:
    archive.write("bookworm", package(tmp_path / "p", f"{VERSION}-1"))
    archive.gpg("--quick-gen-key", "--passphrase", "", "other@localhost", "ed25519", "sign", "0")
    archive.gpg(
        *("-u", "other@localhost", "--clearsign", "-o"),
        *(str(archive.release.with_name("InRelease")), str(archive.release)),
    )
    with pytest.raises(KernelBuildError, match="debian-archive-keyring is too old"):
        driver_source.driver_source(VERSION)


def test_a_suite_that_has_moved_on_says_what_it_has(archive: Archive, tmp_path: Path) -> None:
    archive.write("bookworm", package(tmp_path / "p", "535.274.02-1"))
    archive.sign()
    with pytest.raises(KernelBuildError, match=r"no longer has driver .*has: 535\.274\.02-1"):
        driver_source.driver_source(VERSION)


def test_the_systems_sources_are_left_alone(archive: Archive) -> None:
    area = AptArea("bookworm", ["contrib"])
    words = area.options()
    for key in ("Dir::Etc::sourcelist", "Dir::State", "Dir::State::lists", "Dir::Cache"):
        (value,) = [word for word in words if word.startswith(f"{key}=")]
        assert value.split("=", 1)[1].startswith(str(area.folder))
    assert "Acquire::AllowInsecureRepositories=false" in words
