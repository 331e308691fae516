# SPDX-License-Identifier: MIT
"""Checks that the extension matches the header, is complete, exports only the symbols that it has
to, and is separate from a second libvmem.
"""

from __future__ import annotations

import ctypes
import json
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import pyvmem
from pyvmem import _native, _vmem
from pyvmem.commands import cli

ROOT = Path(__file__).parents[2]
HEADER = ROOT / "libvmem" / "include" / "vmem.h"
SOURCES = sorted((ROOT / "libvmem" / "src").rglob("*.c"))

needs_sources = pytest.mark.skipif(
    not SOURCES, reason="libvmem's sources are not next to the tests"
)


@needs_sources
def test_every_function_constant_and_structure_exists() -> None:
    header = HEADER.read_text()
    functions = re.findall(r"^VMEM_API [^(]*?(\w+)\(", header, flags=re.MULTILINE)
    assert len(functions) == header.count("\nVMEM_API ") > 0
    for name in functions:
        assert callable(getattr(_vmem.lib, name)), name
    constants = re.findall(
        r"^#define (VMEM_[A-Z_]+) .*(?:<<|UINT64|\d)", header, flags=re.MULTILINE
    )
    constants += re.findall(r"\b(VMEM_\w+) = \d", header)
    assert len(constants) > header.count("VMEM_CAP_")
    for name in set(constants) - {"VMEM_VERSION"}:
        assert isinstance(_native.constant(name), int), name
    for name in re.findall(r"^struct (vmem_\w+) \{", header, flags=re.MULTILINE):
        assert _native.ffi.sizeof(f"struct {name}") > 0


@needs_sources
def test_one_version() -> None:
    version = re.search(r'#define VMEM_VERSION "(.*)"', HEADER.read_text())
    assert version is not None
    assert pyvmem.__version__ == version.group(1)


@needs_sources
def test_declarations_follow_the_header() -> None:
    """If a structure changes in the header, the compiler must check the new version."""
    script = ROOT / "pyvmem" / "_build.py"
    if not script.exists():
        pytest.skip("the build script is not next to the tests")
    build = runpy.run_path(str(script))
    text = HEADER.read_text()
    declared = build["declarations"](text.replace("uint64_t limit;", "uint64_t limit, more;"))
    assert "uint64_t limit, more;" in declared
    assert "/*" not in declared
    assert "VMEM_API" not in declared
    assert "#define VMEM_CAP_ALIAS ..." in declared
    assert "int32_t devices[16];" in declared


def test_the_extension_keeps_its_libvmem_to_itself() -> None:
    if not shutil.which("nm"):
        pytest.skip("no nm")
    listed = subprocess.run(
        ["nm", "-D", "--defined-only", _vmem.__file__], capture_output=True, text=True, check=True
    )
    names = {line.split()[-1] for line in listed.stdout.splitlines()}
    assert names == {"PyInit__vmem", "vmem_malloc", "vmem_free"}  # torch looks up the last two


def test_everything_public_exists() -> None:
    for name in pyvmem.__all__:
        if not name.startswith("KVCache"):
            assert getattr(pyvmem, name) is not None, name
    with pytest.raises(AttributeError, match="nothing_like_it"):
        _ = pyvmem.nothing_like_it


def test_core_imports_no_numpy_and_no_torch() -> None:
    code = "import pyvmem, sys; assert not {'numpy', 'torch', 'cuda'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


# ---- a second copy of the library --------------------------------------------------------------


@pytest.fixture(scope="session")
def second_library(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Builds libvmem as a shared library and loads it with globally visible symbols."""
    if not SOURCES or not shutil.which("gcc"):
        pytest.skip("needs libvmem's sources and gcc")
    target = tmp_path_factory.mktemp("lib") / "libvmem.so"
    subprocess.run(
        ["gcc", "-std=c11", "-D_GNU_SOURCE", "-O1", "-fPIC", "-shared", "-fvisibility=hidden"]
        + ["-pthread", "-I", str(HEADER.parent), "-I", str(ROOT / "kernel_module")]
        + ["-I", str(ROOT / "libvmem" / "src")]
        + [*map(str, SOURCES), "-ldl", "-o", str(target)],
        check=True,
    )
    return ctypes.CDLL(str(target), mode=ctypes.RTLD_GLOBAL)


def test_two_copies_of_the_library_in_one_process(
    second_library: Any, host: pyvmem.Context
) -> None:
    class Options(ctypes.Structure):
        _fields_ = [("size", ctypes.c_size_t), ("backend", ctypes.c_char_p)]

    lib = second_library
    u64 = ctypes.c_uint64
    for name, arguments in (
        ("vmem_close", [u64]),
        ("vMemReserve", [u64, u64, ctypes.c_void_p, ctypes.POINTER(u64)]),
        ("vMemCreate", [u64, u64, ctypes.c_void_p, ctypes.POINTER(u64)]),
        ("vMemMap", [u64, u64, u64, u64, u64, ctypes.c_uint32]),
        ("vMemRelease", [u64, u64]),
        ("vmem_fill", [u64, u64, u64, ctypes.c_uint8]),
        ("vmem_check", [u64]),
    ):
        getattr(lib, name).argtypes = arguments
    vm, addr, handle = u64(), u64(), u64()
    options = Options(ctypes.sizeof(Options), b"host")
    assert lib.vmem_open(ctypes.byref(options), ctypes.byref(vm)) == 0
    assert lib.vMemReserve(vm, 1 << 20, None, ctypes.byref(addr)) == 0
    assert lib.vMemCreate(vm, 65536, None, ctypes.byref(handle)) == 0
    assert lib.vMemMap(vm, addr, 65536, handle, 0, 0) == 0
    assert lib.vmem_fill(vm, addr, 65536, 0x5A) == 0

    with host.reserve(1 << 20) as rsv:
        pages = host.create(65536)
        rsv.map(0, pages)
        rsv.fill(0, 65536, 0xA5)
        assert host.stats().used_bytes == 65536
        with pytest.raises(pyvmem.NotReserved):
            host.query(addr.value)  # an address that belongs to the other library
        assert lib.vmem_check(vm) == 0
        assert ctypes.string_at(addr.value, 4) == b"\x5a" * 4
        assert rsv.read(0, 4) == b"\xa5" * 4
        pages.release()
    assert lib.vMemRelease(vm, handle) == 0
    assert lib.vmem_close(vm) == 0
    host.check()
    assert host.stats().reserved_bytes == 0


# ---- the command line --------------------------------------------------------------------------


def test_cli_probe(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["probe"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[:2] == ["back", "end"]
    assert [line.split()[0] for line in lines[1:]] == ["uvm", "stock", "cuda", "host"]
    assert sum(" used " in line for line in lines) == 1
    assert cli.main(["probe", "--json"]) == 0
    records = json.loads(capsys.readouterr().out)
    results = pyvmem.probe()
    for record, one in zip(records, results, strict=True):
        assert record["backend"] == one.backend
        assert record["usable"] is one.usable
        assert record["used"] is one.used
        assert record["page_sizes"] == list(one.page_sizes)
        what, _, times = record["reason"].partition(": opened in ")
        assert what == one.reason.partition(": opened in ")[0]
        assert "tested in" in times or not record["usable"]
        assert {cap for cap in pyvmem.Caps if cap in one.caps} == {
            pyvmem.Caps[name] for name in record["caps"]
        }


def test_cli_version_and_usage(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["--version"])
    assert caught.value.code == 0
    assert capsys.readouterr().out.strip() == f"vmem {pyvmem.__version__}"
    with pytest.raises(SystemExit) as caught:
        cli.main(["--help"])
    assert caught.value.code == 0
    text = capsys.readouterr().out
    for command in ("probe", "bench", "serve-demo"):
        assert command in text
    for words in ([], ["nonsense"]):
        with pytest.raises(SystemExit) as caught:
            cli.main(words)
        assert caught.value.code == 2
        capsys.readouterr()


def test_cli_as_a_module() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pyvmem", "probe", "--json"], capture_output=True, check=True
    )
    assert json.loads(done.stdout)
