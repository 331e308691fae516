# SPDX-License-Identifier: MIT
"""Tests which patch series is used for which version, and that a patch must apply exactly."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import check_patches
import driver_patches
import pytest
from check_patches import Clone, check_clone, check_contracts, check_letters, check_on
from driver_patches import (
    MUTANTS,
    PATCHES,
    ambiguous_hunks,
    apply_patch,
    built_versions,
    changed_lines,
    kernel_files,
    series_folder,
    series_for,
)
from driver_source import driver_source
from kernel_common import KernelBuildError
from module_source import DEFAULT_VERSION
from uvm_contracts import digest, known_texts

FOLDERS = sorted(path for path in PATCHES.iterdir() if path.is_dir())

FILE = "int first;\nint one;\nint two;\nint three;\nint last;\n"
PATCH = """\
From 0 Mon Sep 17 00:00:00 2001
Subject: [PATCH 1/1] uvm: A hook

Forwarded: not-needed
---
diff --git a/kernel-open/nvidia-uvm/uvm.c b/kernel-open/nvidia-uvm/uvm.c
--- a/kernel-open/nvidia-uvm/uvm.c
+++ b/kernel-open/nvidia-uvm/uvm.c
@@ -2,3 +2,4 @@
 int one;
-int two;
+int two; // with ours
+int ours;
 int three;
"""


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A source tree with one file."""
    (tmp_path / "tree" / "nvidia-uvm").mkdir(parents=True)
    (tmp_path / "tree" / "nvidia-uvm" / "uvm.c").write_text(FILE)
    return tmp_path / "tree"


@pytest.fixture
def patch(tmp_path: Path) -> Path:
    path = tmp_path / "0001-a.patch"
    path.write_text(PATCH)
    return path


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda path: path.name)
def test_letters_are_in_order(folder: Path) -> None:
    assert check_letters(folder) == []


def test_each_folder_is_in_the_table_and_serves_itself() -> None:
    assert {path.name for path in FOLDERS} == set(driver_patches.series_table())
    for version, folder in built_versions().items():
        assert version in driver_patches.series_table()[folder]["applies"]
    for folder in FOLDERS:
        assert series_folder(folder.name) == folder
        assert folder.name in driver_patches.series_table()[folder.name]["applies"]


def test_no_version_is_served_twice() -> None:
    served = [v for known in driver_patches.series_table().values() for v in known["applies"]]
    assert len(served) == len(set(served))


@pytest.mark.parametrize(
    ("version", "folder"),
    [
        ("535.261.03", "535.261.03"),
        ("535.300.01", "535.261.03"),
        ("545.29.06", "535.261.03"),
        ("550.54.15", "550.54.15"),
        ("550.78", "555.58.02"),
        ("550.200.01", "550.163.01"),
        ("565.77", "570.124.06"),
        ("570.86.10", "570.124.06"),
        ("570.144", "570.133.20"),
        ("570.144.01", "570.133.20"),
        ("570.211.01", "580.105.08"),
        ("570.300.01", "580.105.08"),
        ("575.51.03", "570.133.20"),
        ("580.159.04", "580.105.08"),
        ("595.45.04", "580.105.08"),
        ("595.50.01", "580.105.08"),
        ("540.10", "535.261.03"),
        ("610.43.02", "580.105.08"),
        ("620.10", "580.105.08"),
    ],
)
def test_a_version_finds_its_series(version: str, folder: str) -> None:
    assert series_folder(version).name == folder


@pytest.mark.parametrize("version", ["470.10.01", "530.41.03"])
def test_a_version_before_all_series_is_told(version: str) -> None:
    message = rf"no patches for driver {re.escape(version)}: the oldest supported is 535\.43\.02"
    with pytest.raises(KernelBuildError, match=message):
        series_for(version)


@pytest.fixture
def newest(tmp_path: Path, patch: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A table with one series, for version 595.45.04."""
    folder = tmp_path / "patches" / "595.45.04"
    folder.mkdir(parents=True)
    patch.rename(folder / patch.name)
    table = {"595.45.04": {"built": [], "applies": ["595.45.04"]}}
    monkeypatch.setattr(driver_patches, "PATCHES", tmp_path / "patches")
    monkeypatch.setattr(driver_patches, "series_table", lambda: table)


@pytest.mark.usefixtures("newest")
def test_a_newer_driver_gets_the_newest_series(tree: Path) -> None:
    (tree / "nvidia-uvm/uvm.c").write_text("int more;\n" + FILE)
    driver_patches.apply_series("610.57.04", tree)
    assert "int ours;\n" in (tree / "nvidia-uvm/uvm.c").read_text()


@pytest.mark.usefixtures("newest")
@pytest.mark.parametrize(
    ("content", "hunk"),
    [
        (FILE.replace("int two;", "long two;"), "nvidia-uvm/uvm.c, hunk 1 fits no place"),
        (FILE + FILE, "nvidia-uvm/uvm.c, hunk 1 fits 2 places"),
        (None, "nvidia-uvm/uvm.c does not exist"),
    ],
)
def test_a_newer_driver_that_it_does_not_fit_is_refused_by_hunk(
    tree: Path, content: str | None, hunk: str
) -> None:
    file = tree / "nvidia-uvm/uvm.c"
    if content is None:
        file.unlink()
    else:
        file.write_text(content)
    with pytest.raises(KernelBuildError) as error:
        driver_patches.apply_series("610.57.04", tree)
    said = str(error.value)
    assert "driver 610.57.04 is not supported: no series was made for it" in said
    assert f"595.45.04, does not fit:\n    0001-a.patch: {hunk}" in said
    assert content is None or file.read_text() == content


def test_a_version_that_nothing_fits_is_refused_by_name(tree: Path) -> None:
    with pytest.raises(KernelBuildError, match=r"driver 570\.999\.01 is not supported: no series"):
        driver_patches.apply_series("570.999.01", tree)


def test_lines_are_counted(patch: Path) -> None:
    assert changed_lines(patch) == 3


def test_a_patch_goes_in_and_out(tree: Path, patch: Path) -> None:
    apply_patch(patch, tree)
    assert "int ours;\n" in (tree / "nvidia-uvm/uvm.c").read_text()
    with pytest.raises(KernelBuildError, match="does not apply"):
        apply_patch(patch, tree)
    apply_patch(patch, tree, reverse=True)
    assert (tree / "nvidia-uvm/uvm.c").read_text() == FILE
    assert [path.name for path in (tree / "nvidia-uvm").iterdir()] == ["uvm.c"]


def test_a_patch_that_has_moved_is_taken(tree: Path, patch: Path) -> None:
    (tree / "nvidia-uvm/uvm.c").write_text("int more;\n" * 50 + FILE)
    apply_patch(patch, tree)


@pytest.mark.parametrize("line", ["int one;", "int two;", "int three;"])
def test_context_that_fits_nearly_is_refused(tree: Path, patch: Path, line: str) -> None:
    (tree / "nvidia-uvm/uvm.c").write_text(FILE.replace(line, line + " // changed"))
    with pytest.raises(KernelBuildError, match="does not apply"):
        apply_patch(patch, tree)


def test_a_hunk_that_fits_twice_is_found(tree: Path, patch: Path) -> None:
    assert ambiguous_hunks(patch, tree) == []
    (tree / "nvidia-uvm/uvm.c").write_text(FILE + FILE)
    assert ambiguous_hunks(patch, tree) == ["0001-a.patch: nvidia-uvm/uvm.c, hunk 1 fits 2 places"]


def test_a_patch_that_adds_a_file_is_refused(tree: Path, patch: Path) -> None:
    patch.write_text(PATCH.replace("--- a/kernel-open/nvidia-uvm/uvm.c", "--- /dev/null"))
    with pytest.raises(KernelBuildError, match="only hooks"):
        ambiguous_hunks(patch, tree)


def test_the_check_finds_what_is_wrong(
    tree: Path, patch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check_patches, "series_for", lambda version: [patch])
    assert check_on(tree, "535.261.03") == []
    (tree / "nvidia-uvm/uvm.c").write_text(FILE + FILE)
    assert len(check_on(tree, "535.261.03")) == 1
    (tree / "nvidia-uvm/uvm.c").write_text("int other;\n")
    assert "does not apply" in check_on(tree, "535.261.03")[-1]


TABLES = """\
static bool put(int *tree,
                int size)
{
    if (size) { // of a page
        return true; /* yes */
    }
    return false;
}

static void other(void)
{
}
"""


def test_digest_is_of_what_is_compiled() -> None:
    text = digest(TABLES, "put")
    assert text
    assert digest(TABLES.replace(" // of a page", "").replace("    ", "  "), "put") == text
    assert digest(TABLES.replace("if (size)", "if (!size)"), "put") != text
    assert digest(TABLES.replace("other(void)", "other(int)"), "put") == text
    assert digest(TABLES, "pu") is None
    assert digest(TABLES, "tree") is None


def test_what_the_module_relies_on_is_as_it_was_read(tmp_path: Path) -> None:
    version = DEFAULT_VERSION
    try:
        source = driver_source(version)
    except KernelBuildError as error:
        pytest.skip(str(error).splitlines()[0])
    assert check_contracts(source, version) == []
    # A version in which get_ptes would overwrite other callers' entries.
    (tmp_path / "nvidia-uvm").mkdir()
    text = (source / "nvidia-uvm/uvm_mmu.c").read_text(encoding="utf-8")
    early = "    if (range->page_size != UVM_PAGE_SIZE_512M)\n        return NV_OK;\n"
    assert early in text
    (tmp_path / "nvidia-uvm/uvm_mmu.c").write_text(text.replace(early, ""), encoding="utf-8")
    (problem,) = check_contracts(tmp_path, version)
    assert problem.startswith(f"{version}: map_remap of uvm_mmu.c differs from all reviewed")


def test_contracts_name_versions_that_are_served() -> None:
    served = {v for known in driver_patches.series_table().values() for v in known["applies"]}
    for texts in known_texts().values():
        assert texts
        for versions in texts.values():
            assert set(versions.split(" to ")) <= served


@pytest.fixture
def clone(tmp_path: Path) -> Clone:
    """A repository like NVIDIA's, with four tags from supported branches and two other tags."""
    path = tmp_path / "clone"

    def git(*words: str) -> None:
        identity = ["-c", "user.name=nobody", "-c", "user.email=nobody@localhost"]
        subprocess.run(["git", *identity, "-C", path, *words], check=True, capture_output=True)

    (path / "kernel-open" / "nvidia-uvm").mkdir(parents=True)
    git("init")
    versions = {
        "515.43.04": FILE,
        "535.98": FILE,
        "535.104.05": "int more;\n" + FILE,
        "570.86.15": FILE.replace("one", "1"),
        "610.10.01": FILE.replace("two", "2"),
        "not-a-version": FILE,
    }
    for version, content in versions.items():
        (path / "kernel-open/nvidia-uvm/uvm.c").write_text(content)
        (path / "kernel-open/version").write_text(version)
        git("add", ".")
        git("commit", "-m", version)
        git("tag", version)
    return Clone(path)


@pytest.mark.parametrize(
    ("applies", "problem"),
    [
        (["535.98", "535.104.05"], None),
        (["535.98"], "535.104.05: 535.98 fits, series.json says None"),
        (
            ["535.98", "535.104.05", "535.104.06"],
            "535.104.06: in series.json, but has no public tag",
        ),
    ],
)
def test_every_public_version_is_in_the_table_or_found(
    tmp_path: Path,
    patch: Path,
    clone: Clone,
    monkeypatch: pytest.MonkeyPatch,
    applies: list[str],
    problem: str | None,
) -> None:
    folder = tmp_path / "patches" / "535.98"
    folder.mkdir(parents=True)
    patch.rename(folder / patch.name)
    table = {"535.98": {"built": [], "applies": applies}}
    monkeypatch.setattr(check_patches, "PATCHES", tmp_path / "patches")
    monkeypatch.setattr(check_patches, "series_table", lambda: table)
    assert clone.versions() == ["535.98", "535.104.05", "570.86.15", "610.10.01"]
    expected = {f"{one}: no series fits" for one in ("570.86.15", "610.10.01")}
    expected |= {problem} if problem else set()
    assert set(check_clone(clone)) == expected


def test_two_series_for_one_version_are_found(
    tmp_path: Path, clone: Clone, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = {name: {"built": [], "applies": [name]} for name in ("535.98", "535.104.05")}
    for name in table:
        (tmp_path / "patches" / name).mkdir(parents=True)
        (tmp_path / "patches" / name / "0001-a.patch").write_text(PATCH)
    monkeypatch.setattr(check_patches, "PATCHES", tmp_path / "patches")
    monkeypatch.setattr(check_patches, "series_table", lambda: table)
    found = check_clone(clone)
    assert [one.partition(":")[0] for one in found] == clone.versions()
    assert "fit; only one should" in found[0]


def test_a_folder_that_is_no_clone_is_refused(tmp_path: Path) -> None:
    with pytest.raises(KernelBuildError, match="is not a clone of NVIDIA's repository"):
        check_clone(Clone(tmp_path))


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ("[PATCH 1/1]", "[PATCH 2/1]", "subject without"),
        ("uvm: A hook", "uvm: " + "x" * 70, "longer than"),
        ("Forwarded: not-needed\n", "", "no line Forwarded"),
        ("+int ours;\n", "+int ours;\n" * 40, "more than 40"),
        ("+int ours;\n", "", "does not say 2 changed lines"),
    ],
)
def test_the_check_of_letters(
    tmp_path: Path, patch: Path, old: str, new: str, problem: str
) -> None:
    cover = tmp_path / "0000-cover-letter.patch"
    cover.write_text("Subject: [PATCH 0/1] uvm: hooks\n\n3 changed lines\n")
    assert check_letters(tmp_path) == []
    patch.write_text(PATCH.replace(old, new))
    assert any(problem in one for one in check_letters(tmp_path))


def test_kernel_files_and_their_list_agree() -> None:
    names = {name for name in kernel_files() if name.endswith(".c")}
    listed = kernel_files()["uvm_vmem-sources.Kbuild"].decode()
    built = {
        line.rsplit("/", 1)[1] for line in listed.splitlines() if "NVIDIA_UVM_SOURCES +=" in line
    }
    assert built == names


def test_a_mutant_is_applied_to_our_files_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver_patches, "KERNEL_MODULE", tmp_path)
    monkeypatch.setattr(driver_patches, "MUTANTS", tmp_path / "mutants")
    (tmp_path / "uvm_vmem_x.c").write_text("int a;\nint b;\nint c;\n")
    (tmp_path / "mutants").mkdir()
    name = "kernel_module/uvm_vmem_x.c"
    (tmp_path / "mutants" / "no-b.patch").write_text(
        f"--- a/{name}\n+++ b/{name}\n@@ -1,3 +1,2 @@\n int a;\n-int b;\n int c;\n"
    )
    assert kernel_files("no-b") == {"uvm_vmem_x.c": b"int a;\nint c;\n"}
    assert kernel_files() == {"uvm_vmem_x.c": b"int a;\nint b;\nint c;\n"}
    with pytest.raises(KernelBuildError, match="no such mutant"):
        kernel_files("no-c")


@pytest.mark.parametrize("mutant", sorted(path.stem for path in MUTANTS.glob("*.patch")))
def test_every_mutant_applies(mutant: str) -> None:
    """Otherwise, editing a comment in a patch's context would break only the mutant's build."""
    assert kernel_files(mutant) != kernel_files()
