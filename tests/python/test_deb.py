# SPDX-License-Identifier: MIT
"""The Debian packaging names only existing files, and its version matches the
header."""

from __future__ import annotations

import ast
import re
import tarfile
from pathlib import Path

import check_deb
import deb
import dist
import pytest
import run_tests
from kernel_headers import KernelHeaders
from vmem_header import ROOT, functions, version


def test_the_changelog_has_the_version() -> None:
    text = deb.changelog(version(), "A Person <person@example.org>", 86400)
    assert text.startswith(f"vmem ({version()}-0vmem1) unstable;")
    assert text.endswith("\n -- A Person <person@example.org>  Fri, 02 Jan 1970 00:00:00 -0000\n")


def test_the_maintainer_is_named_as_debians_tools_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEBFULLNAME", "A Person")
    monkeypatch.setenv("DEBEMAIL", "person@example.org")
    assert deb.maintainer() == "A Person <person@example.org>"


def test_the_packages_are_built_with_the_probes() -> None:
    control = (deb.FILES / "control").read_text(encoding="utf-8")
    found = re.search(r"^Build-Depends:\n((?: .*\n)+)", control, re.M)
    assert found is not None
    listed = {line.split()[0].rstrip(",") for line in found.group(1).splitlines()}
    assert "systemtap-sdt-dev" in listed


def test_every_public_function_is_in_the_symbols() -> None:
    text = (deb.FILES / "libvmem0.symbols").read_text(encoding="utf-8")
    names = set(re.findall(r"^ (\w+)@VMEM_", text, re.M))
    assert names - {"VMEM_0"} == set(functions())


def test_the_dkms_package_has_everything_its_program_imports() -> None:
    rules = (deb.FILES / "rules").read_text(encoding="utf-8")
    found = re.search(r"^SCRIPTS = ((?:.*\\\n)*.*)", rules, re.M)
    assert found is not None
    listed = set(found.group(1).replace("\\", " ").split())
    needed: set[str] = set()
    waiting = ["module_dkms"]
    while waiting:
        name = waiting.pop()
        path = ROOT / "scripts" / f"{name}.py"
        if name in needed or not path.exists():
            continue
        needed.add(name)
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module:
                waiting.append(node.module)
            elif isinstance(node, ast.Import):
                waiting += [one.name for one in node.names]
    assert listed == needed | {"module_kbuild", "module_elf"}


def test_the_upstream_archive_is_the_same_twice(tmp_path: Path) -> None:
    source = tmp_path / "source"
    (source / "b").mkdir(parents=True)
    (source / "b" / "one").write_text("1", encoding="utf-8")
    (source / "a").write_text("2", encoding="utf-8")
    made = []
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        made.append(deb.make_orig(source, tmp_path / name, "9.9", 86400).read_bytes())
        (source / "a").touch()
    assert made[0] == made[1]
    with tarfile.open(tmp_path / "first" / "vmem_9.9.orig.tar.xz") as archive:
        assert archive.getnames() == ["vmem-9.9/a", "vmem-9.9/b", "vmem-9.9/b/one"]
        assert {one.mtime for one in archive} == {86400}


def test_the_packages_are_a_stage_of_the_long_run_only() -> None:
    assert "deb" in run_tests.STAGES
    assert "deb" in run_tests.LONG


def test_the_guest_sees_the_packages_over_the_systems_disk() -> None:
    headers = KernelHeaders(Path("/build"), Path("/source"), "6.1.0-1-cloud-amd64")
    command = check_deb.guest_command(Path("/tmp/disk.ext2"), Path("/tmp/debs"), headers)
    image, kernel = command[command.index("--image") + 1], command[command.index("--kernel") + 1]
    assert (image, Path(kernel).name) == ("/tmp/disk.ext2", "vmlinuz-6.1.0-1-cloud-amd64")
    assert command[-4:] == ["--file=/tmp/debs:/debs", "--", "sh", "/check_guest.sh"]


def test_the_tree_has_uniform_times_and_the_usual_permissions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deb, "maintainer", lambda: "A Person <person@example.org>")
    with dist.elsewhere(), dist.usual_umask():
        tree = deb.prepare(tmp_path, 86400)
    assert {path.stat().st_mtime for path in tree.rglob("*")} == {86400}
    modes = {(path.is_dir(), path.stat().st_mode & 0o777) for path in tree.rglob("*")}
    assert modes == {(True, 0o755), (False, 0o755), (False, 0o644)}
