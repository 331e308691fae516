# SPDX-License-Identifier: MIT
"""Tests the contents of build directories, incremental rebuilds, and reuse between directories."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import kernel_reuse
import kernel_tree
import pytest
from driver_edits import edits
from kernel_common import KernelBuildError, tree_digest, write_if_changed
from kernel_headers import KernelHeaders, kernel_headers
from kernel_reuse import copy_build, keep_conftests, take_conftests
from kernel_tree import Tree, exports, publish, softgpu_files, update_work

VERSION = "535.261.03"


@pytest.fixture(autouse=True)
def build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "build"
    for module in (kernel_tree, kernel_reuse):
        monkeypatch.setattr(module, "KERNEL_BUILD", folder)
    return folder


@pytest.fixture
def headers(tmp_path: Path) -> KernelHeaders:
    """A kernel build directory like Debian's: its Makefile includes the sources' Makefile."""
    folder = tmp_path / "headers"
    (folder / "include" / "generated").mkdir(parents=True)
    (folder / "include" / "config").mkdir()
    (folder / "include/generated/utsrelease.h").write_text('#define UTS_RELEASE "6.1.0-9-x"\n')
    (folder / "include/config/kernel.release").write_text("6.1.77\n")
    (folder / "Makefile").write_text(f"include {tmp_path}/common/Makefile\n")
    return kernel_headers(folder)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """The smallest kernel-open tree."""
    tree = tmp_path / "source"
    for name in ("common/inc", "nvidia", "nvidia-uvm"):
        (tree / name).mkdir(parents=True)
    (tree / "Kbuild").write_text(f'ccflags-y += -DNV_VERSION_STRING=\\"{VERSION}\\"\n')
    (tree / "conftest.sh").write_text("exit 0\n")
    (tree / "nvidia/nvidia.Kbuild").write_text(
        "NVIDIA_SOURCES += nvidia/nv.c\nNV_CONFTEST_TYPE_COMPILE_TESTS += proc_ops\n"
    )
    (tree / "nvidia-uvm/nvidia-uvm.Kbuild").write_text("NVIDIA_UVM_CFLAGS += -DDEBUG -O1 -g\n")
    (tree / "nvidia/nv.h").write_text("int nv;\n")
    (tree / "nvidia/nv.c").write_text("int nv;\n")
    (tree / "nvidia-uvm/uvm.c").write_text("nvUvmInterfaceB ();\nx(nvUvmInterfaceA(1));\n")
    return tree


@pytest.fixture
def softgpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "softgpu"
    folder.mkdir()
    for name in ("one.c", "two.c", "softgpu_user.c", "softgpu.h"):
        (folder / name).write_text(f"int {name.partition('.')[0]};\n")
    monkeypatch.setenv("VMEM_SOFTGPU_DIR", str(folder))
    return folder


def test_release_and_sources_of_headers(headers: KernelHeaders, tmp_path: Path) -> None:
    assert headers == KernelHeaders(tmp_path / "headers", tmp_path / "common", "6.1.0-9-x")


def test_a_folder_without_headers_is_told(tmp_path: Path) -> None:
    with pytest.raises(KernelBuildError, match="not the build directory of a configured kernel"):
        kernel_headers(tmp_path)


def test_names_of_trees(headers: KernelHeaders) -> None:
    named = [
        Tree(VERSION, headers),
        Tree(VERSION, headers, type="debug"),
        Tree(VERSION, headers, patched=False),
        Tree(VERSION, headers, mutant="no-zero"),
        Tree(VERSION, headers, mutant="no-wait"),
        Tree(VERSION, headers, own_kernel=True),
        Tree(VERSION, headers, suite="trixie"),
        Tree(VERSION, headers, patches=2),
    ]
    assert [tree.name for tree in named] == [
        f"{VERSION}-release",
        f"{VERSION}-debug",
        f"{VERSION}-release-unpatched",
        f"{VERSION}-release-mutant-no-zero",
        f"{VERSION}-release-mutant-no-wait",
        f"{VERSION}-release-6.1.0-9-x",
        f"{VERSION}-release-trixie",
        f"{VERSION}-release-steps",
    ]
    assert named[3].work == named[4].work
    assert len({tree.work for tree in named}) == len(named) - 1


def test_nvidia_ko_is_the_software_gpu(source: Path, softgpu: Path) -> None:
    files = softgpu_files(VERSION, source)
    kbuild = files["nvidia.Kbuild"].decode()
    assert "nvidia/softgpu/one.o nvidia/softgpu/two.o" in kbuild
    assert "softgpu_user.o" not in kbuild
    assert "NV_CONFTEST_TYPE_COMPILE_TESTS += proc_ops" in kbuild
    assert "nv.c" not in kbuild
    assert "-DSOFTGPU_BRANCH=535" in kbuild
    assert "softgpu/softgpu_user.c" not in files
    (softgpu / "softgpu.Kbuild").write_text("SOFTGPU_OBJECTS := nvidia/softgpu/one.o\n")
    files = softgpu_files(VERSION, source)
    assert "include $(src)/nvidia/softgpu/softgpu.Kbuild" in files["nvidia.Kbuild"].decode()
    assert "softgpu/softgpu.Kbuild" in files


def test_exports_are_the_calls_of_this_uvm(source: Path, softgpu: Path) -> None:
    both = "EXPORT_SYMBOL(nvUvmInterfaceA);\nEXPORT_SYMBOL(nvUvmInterfaceB);\n"
    assert exports(softgpu, source) == both
    (softgpu / "exports.txt").write_text("nvUvmInterfaceB\nnvUvmInterfaceC\n")
    assert exports(softgpu, source) == "EXPORT_SYMBOL(nvUvmInterfaceB);\n"


def test_the_interface_tells_what_it_has(source: Path, softgpu: Path) -> None:
    def told() -> set[str]:
        lines = softgpu_files(VERSION, source)["softgpu/softgpu_features.h"].decode().splitlines()
        assert len(lines) == len(kernel_tree.FEATURES)
        return {line.split()[1] for line in lines if line.endswith(" 1")}

    assert told() == set()
    interface = source / "common/inc/nv_uvm_interface.h"
    interface.write_text("NV_STATUS nvUvmInterfaceRegisterUvmEvents(struct UvmEventsLinux *e);\n")
    assert told() == {"SG_HAS_EVENTS"}


@pytest.mark.parametrize(
    ("header", "text", "file", "before", "after"),
    [
        (
            "string.h",
            "extern char * strncpy(char *,const char *, __kernel_size_t);\n",
            "nvidia-uvm/uvm_pmm_gpu.c",
            "strncpy(name, text, size);\n",
            "strscpy(name, text, size);\n",
        ),
        (
            "of_gpio.h",
            "/* lines on a board */\n",
            "common/inc/nv-linux.h",
            "#include <linux/gpio.h>\n#include <linux/of_gpio.h>\n",
            "#include <linux/gpio.h>\n",
        ),
        (
            "memremap.h",
            "void (*page_free)(struct page *page);\n",
            "nvidia-uvm/uvm_pmm_gpu.c",
            "for (; pfn <= __phys_to_pfn(devmem_end); pfn++) {\n",
            "for (; pfn < __phys_to_pfn(devmem_end); pfn++) {\n",
        ),
    ],
)
def test_what_a_newer_kernel_lacks_is_edited_out(
    tmp_path: Path, header: str, text: str, file: str, before: str, after: str
) -> None:
    headers = tmp_path / "include/linux"
    headers.mkdir(parents=True)
    (headers / "string.h").write_text("extern char * strncpy(char *);\n")
    (headers / "of_gpio.h").touch()
    (headers / "memremap.h").write_text("void (*page_free)(struct page *page);\n")
    (headers / header).write_text(text)
    files = {file: before.encode(), "nvidia-uvm/uvm.c": before.encode()}
    assert edits(files, tmp_path) == {}
    (headers / header).write_text("/* strscpy() is preferred to strncpy() */\n")
    if header == "of_gpio.h":
        (headers / header).unlink()
    assert edits(files, tmp_path) == {file: after.encode()}
    assert edits({file: after.encode()}, tmp_path) == {}


def test_a_file_gets_all_its_edits(tmp_path: Path) -> None:
    file, text = "nvidia-uvm/uvm_pmm_gpu.c", b"strncpy(a, b, c); pfn <= __phys_to_pfn(devmem_end);"
    edited = b"strscpy(a, b, c); pfn < __phys_to_pfn(devmem_end);"
    assert edits({file: text}, tmp_path) == {file: edited}


def test_no_software_gpu_is_told(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VMEM_SOFTGPU_DIR", str(tmp_path / "none"))
    with pytest.raises(KernelBuildError, match="no software GPU"):
        softgpu_files(VERSION, source)


def test_only_what_changed_is_written(
    headers: KernelHeaders, source: Path, softgpu: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernel_tree, "driver_source", lambda version: source)
    tree = Tree(VERSION, headers, patched=False)
    tree.work.mkdir(parents=True)
    update_work(tree)
    assert not (tree.work / "nvidia" / "nv.c").exists()
    assert (tree.work / "nvidia" / "nv.h").exists()
    flags = (tree.work / "nvidia-uvm/nvidia-uvm.Kbuild").read_text()
    assert flags == "NVIDIA_UVM_CFLAGS += -DDEBUG -O1\n"
    (tree.work / "nvidia-uvm" / "uvm.o").write_text("built")
    old = 10**18
    for path in tree.work.rglob("*"):
        os.utime(path, ns=(old, old))
    (softgpu / "two.c").unlink()
    (source / "nvidia/nv.h").write_text("int changed;\n")
    update_work(tree)
    changed = {p.name for p in tree.work.rglob("*") if p.is_file() and p.stat().st_mtime_ns > old}
    assert changed == {"nvidia.Kbuild", "nv.h", ".sources"}
    assert not (tree.work / "nvidia/softgpu/two.c").exists()
    assert (tree.work / "nvidia-uvm" / "uvm.o").exists()


def test_a_file_of_the_same_content_keeps_its_time(tmp_path: Path) -> None:
    path = tmp_path / "new" / "file"
    assert write_if_changed(path, b"1")
    os.utime(path, ns=(1, 1))
    assert not write_if_changed(path, b"1")
    assert path.stat().st_mtime_ns == 1
    assert write_if_changed(path, b"2")


def test_digests_see_names_and_contents(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("1")
    one = tree_digest(tmp_path)
    os.utime(tmp_path / "a", ns=(1, 1))
    assert tree_digest(tmp_path) == one
    (tmp_path / "a").rename(tmp_path / "b")
    two = tree_digest(tmp_path)
    (tmp_path / "b").write_text("2")
    assert len({one, two, tree_digest(tmp_path)}) == 3


def test_modules_are_put_out_when_they_are_new(headers: KernelHeaders) -> None:
    tree = Tree(VERSION, headers)
    tree.work.mkdir(parents=True)
    for module in ("nvidia", "nvidia-uvm"):
        shutil.copy("/bin/true", tree.work / f"{module}.ko")
    publish(tree)
    first = (tree.out / "nvidia.ko").stat().st_ino
    publish(tree)
    assert (tree.out / "nvidia.ko").stat().st_ino == first
    os.utime(tree.work / "nvidia.ko")
    publish(tree)
    assert (tree.out / "nvidia.ko").stat().st_ino != first
    assert (tree.out / "nvidia-uvm").is_symlink()
    assert sorted(path.name for path in tree.out.glob("*.ko*")) == ["nvidia-uvm.ko", "nvidia.ko"]


@pytest.fixture
def work(tmp_path: Path) -> Path:
    """A build directory with conftest results."""
    folder = tmp_path / "work"
    (folder / "conftest" / "compile-tests").mkdir(parents=True)
    (folder / "conftest" / "generic.h").write_text("#define NV_X\n")
    (folder / "conftest" / "compile-tests" / "x.h").write_text("#define NV_X\n")
    (folder / "conftest.sh").write_text("exit 0\n")
    (folder / "Kbuild").write_text("all:\n")
    (folder / "nvidia-uvm").mkdir()
    (folder / "nvidia-uvm/nvidia-uvm.Kbuild").write_text("NV_CONFTEST_X += x\n")
    return folder


def fresh(work: Path, name: str) -> Path:
    """Returns a copy of a build directory without its conftest results."""
    other = work.with_name(name)
    shutil.copytree(work, other)
    shutil.rmtree(other / "conftest")
    return other


def test_conftests_are_taken_over(work: Path, headers: KernelHeaders) -> None:
    assert not take_conftests(fresh(work, "before"), headers)
    keep_conftests(work, headers)
    other = fresh(work, "other")
    script = (other / "conftest.sh").stat().st_mtime_ns
    assert take_conftests(other, headers)
    times = {path.stat().st_mtime_ns for path in (other / "conftest").rglob("*.h")}
    # A conftest older than its dependency would be rerun.
    assert len(times) == 1
    assert times.pop() >= script


@pytest.mark.parametrize("changed", ["conftest.sh", "Kbuild", "nvidia-uvm/nvidia-uvm.Kbuild"])
def test_conftests_are_asked_again_after_a_change(
    work: Path, headers: KernelHeaders, changed: str
) -> None:
    keep_conftests(work, headers)
    other = fresh(work, "other")
    (other / changed).write_text("NV_CONFTEST_X += y\n")
    assert not take_conftests(other, headers)


def test_conftests_of_another_kernel_are_not_taken(work: Path, headers: KernelHeaders) -> None:
    keep_conftests(work, headers)
    (headers.build / "Module.symvers").write_text("0x1\tone\n")
    assert not take_conftests(fresh(work, "other"), headers)


def test_unanswered_conftests_are_not_kept(work: Path, headers: KernelHeaders, build: Path) -> None:
    (work / "conftest" / "generic.h").unlink()
    keep_conftests(work, headers)
    assert not build.exists()


def test_a_copied_build_is_up_to_date_under_its_own_name(tmp_path: Path) -> None:
    base = tmp_path / "535-release"
    (base / "nvidia-uvm").mkdir(parents=True)
    notes = base / "nvidia-uvm" / ".uvm.o.cmd"
    notes.write_text(f"cmd_{base}/nvidia-uvm/uvm.o := gcc -I{base} {base}-mutants/x\n")
    for name in ("modules.order", "Module.symvers", "nvidia.mod"):
        (base / name).write_text(f"{base}/nvidia.ko\n")
    for path in base.rglob("*"):
        os.utime(path, ns=(5, 5))
    work = tmp_path / "535-release-mutants"
    copy_build(base, work)
    text = (work / "nvidia-uvm" / ".uvm.o.cmd").read_text()
    assert text == f"cmd_{work}/nvidia-uvm/uvm.o := gcc -I{work} {base}-mutants/x\n"
    assert (work / "modules.order").read_text() == f"{work}/nvidia.ko\n"
    assert {path.stat().st_mtime_ns for path in work.rglob("*") if path.is_file()} == {5}
