# SPDX-License-Identifier: MIT
"""Builds the extension module ``pyvmem._vmem`` from libvmem's sources (cffi, API mode).

The declarations are taken from libvmem/include/vmem.h, with comments and preprocessor lines
stripped, so there is no second copy to keep up to date. In API mode, the C compiler checks every
structure, enumeration and prototype against the header. setup.py runs this module; the package
never imports it.
"""

import re
from pathlib import Path

from cffi import FFI

__all__ = ["declarations", "ffibuilder", "library_version"]

HEADER = Path("libvmem/include/vmem.h")
KERNEL_HEADER = "kernel_module/uvm_vmem_ioctl.h"
TORCH_HEADER = Path("pyvmem/_torch_alloc.h")
OUTCOME_HEADER = Path("pyvmem/_outcome.h")
COLUMNS_HEADER = Path("pyvmem/_columns.h")
HOLES_HEADER = Path("pyvmem/_holes.h")

OWN = ("columns", "dlpack", "holes", "outcome", "torch_alloc")

DLPACK = """
void *pyvmem_dlpack_capsule(void *owner, uint64_t addr, int32_t device_type, int32_t device_id,
                            uint8_t code, uint8_t bits, int32_t ndim, const int64_t *shape,
                            const int64_t *strides, int versioned);
"""


def library_version() -> str:
    """Returns the version, which is defined only once, as VMEM_VERSION in vmem.h."""
    match = re.search(r'#define VMEM_VERSION "([^"]+)"', HEADER.read_text(encoding="utf-8"))
    if match is None:
        raise RuntimeError(f"{HEADER} does not define VMEM_VERSION")
    return match.group(1)


def declarations(header: str) -> str:
    """Converts the text of vmem.h to declarations that cffi can parse.

    Integer macros become ``#define NAME ...``: the compiler supplies their values. A macro used as
    an array length is replaced by its value, which the compiler checks along with the structure.
    """
    text = re.sub(r"/\*.*?\*/|//[^\n]*", " ", header, flags=re.DOTALL)
    text = re.sub(r"#ifdef __cplusplus.*?#endif", "", text, flags=re.DOTALL)
    macros = re.findall(
        r"^#define ((?:PY)?VMEM_[A-Z0-9_]+) (?!\")(\S.*)$", text, flags=re.MULTILINE
    )
    text = re.sub(r"^#.*$", "", text, flags=re.MULTILINE)
    text = re.sub(r"\bVMEM_API\b", "", text)
    numbers = {name: value.strip() for name, value in macros if value.strip().isdigit()}
    text = re.sub(r"\[((?:PY)?VMEM_\w+)\]", lambda match: f"[{numbers[match.group(1)]}]", text)
    defines = [f"#define {name} ..." for name, value in macros if not value.startswith("__")]
    return "\n".join(defines) + "\n" + text


def ffibuilder() -> FFI:
    """Describes the module to cffi; paths are relative to the project root, where builds run."""
    ffi = FFI()
    ffi.cdef(declarations(HEADER.read_text(encoding="utf-8")) + DLPACK)
    own_headers = (OUTCOME_HEADER, TORCH_HEADER, COLUMNS_HEADER, HOLES_HEADER)
    for own in own_headers:
        ffi.cdef(declarations(own.read_text(encoding="utf-8")))
    sources = sorted(str(path) for path in Path("libvmem/src").rglob("*.c"))
    headers = sorted(str(path) for path in Path("libvmem").rglob("*.h")) + [KERNEL_HEADER]
    ffi.set_source(
        "pyvmem._vmem",
        "".join(f'#include "{own.name}"\n' for own in (HEADER, *own_headers)) + DLPACK,
        sources=[*sources, *(f"pyvmem/_{name}.c" for name in OWN)],
        depends=[*headers, *map(str, own_headers), "pyvmem/_vmem.map"],
        include_dirs=["libvmem/include", "libvmem/src", "kernel_module", "pyvmem"],
        define_macros=[("_GNU_SOURCE", "1")],
        extra_compile_args=["-std=c11", "-O2", "-fvisibility=hidden", "-pthread"],
        extra_link_args=["-pthread", "-Wl,--version-script=pyvmem/_vmem.map"],
        libraries=["dl"],
    )
    return ffi
