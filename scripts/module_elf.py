# SPDX-License-Identifier: MIT
"""Reads kernel modules: modinfo fields, exported and required symbol versions.

This file is also part of the DKMS package, so it must not import other modules of this project.
"""

from __future__ import annotations

import gzip
import lzma
import struct
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

__all__ = ["Export", "KernelModule", "ModuleFileError", "read_module", "symvers_text"]

SIGNATURE_MAGIC = b"~Module signature appended~\n"

ELF_HEADER = struct.Struct("<16sHHIQQQIHHHHHH")
SECTION = struct.Struct("<IIQQQQIIQQ")
SYMBOL = struct.Struct("<IBBHQQ")
# struct modversion_info: 64 bytes that hold the version as an unsigned long, followed by the name.
VERSION = struct.Struct("<Q56s")

SHN_UNDEF = 0
SHN_ABS = 0xFFF1
SHT_NOBITS = 8


class ModuleFileError(Exception):
    """Raised when a file is not a kernel module or cannot be read."""


@dataclass(frozen=True)
class Export:
    """A symbol that a module exports; `crc` is None if the kernel has no symbol versions."""

    crc: int | None
    gpl: bool


@dataclass(frozen=True)
class KernelModule:
    """The metadata of a module's file."""

    path: Path
    info: dict[str, list[str]] = field(default_factory=dict)
    exports: dict[str, Export] = field(default_factory=dict)
    # Symbols resolved at load time, each with the required version, if any.
    imports: dict[str, int | None] = field(default_factory=dict)
    signed: bool = False

    def first(self, key: str) -> str:
        """Returns the first value of a modinfo field, or an empty string."""
        return self.info.get(key, [""])[0]

    @property
    def name(self) -> str:
        """The module's name in the kernel."""
        return self.first("name")

    @property
    def version(self) -> str:
        """MODULE_VERSION; in NVIDIA's modules, the driver's version."""
        return self.first("version")

    @property
    def release(self) -> str:
        """The kernel release that the module was built for."""
        return self.first("vermagic").split(" ")[0]

    @property
    def parameters(self) -> list[str]:
        """The names of the module's parameters."""
        return [text.split(":")[0] for text in self.info.get("parmtype", [])]


def plain_bytes(path: Path) -> bytes:
    """Returns the decompressed content of a module's file."""
    try:
        if path.suffix == ".xz":
            return lzma.decompress(path.read_bytes())
        if path.suffix == ".gz":
            return gzip.decompress(path.read_bytes())
        if path.suffix == ".zst":
            command = ["zstd", "-dcq", str(path)]
            return subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout
        return path.read_bytes()
    except (OSError, EOFError, lzma.LZMAError, subprocess.CalledProcessError) as error:
        raise ModuleFileError(f"{path} cannot be read: {error}") from error


@dataclass(frozen=True)
class Section:
    """A section of an ELF file."""

    name: str
    content: bytes
    entry_size: int
    link: int


def text_at(table: bytes, offset: int) -> str:
    """Returns the string that starts at an offset of a string table."""
    return table[offset : table.index(b"\0", offset)].decode("utf-8", "replace")


def read_sections(image: bytes) -> list[Section]:
    """Returns all sections of a 64-bit little-endian ELF file."""
    header = ELF_HEADER.unpack_from(image)
    if header[0][:6] != b"\x7fELF\x02\x01":
        raise ValueError("not a 64-bit little-endian ELF file")
    offset, size, count, names_index = header[6], header[11], header[12], header[13]
    raw = [SECTION.unpack_from(image, offset + n * size) for n in range(count)]
    contents = [b"" if r[1] == SHT_NOBITS else image[r[4] : r[4] + r[5]] for r in raw]
    names = contents[names_index]
    return [
        Section(text_at(names, r[0]), content, r[9], r[6])
        for r, content in zip(raw, contents)  # noqa: B905 - Python 3.9 has no strict
    ]


def read_info(sections: list[Section]) -> dict[str, list[str]]:
    """Returns the fields of .modinfo: every key with its values in order."""
    info: dict[str, list[str]] = {}
    for section in sections:
        if section.name != ".modinfo":
            continue
        for text in section.content.split(b"\0"):
            key, equals, value = text.decode("utf-8", "replace").partition("=")
            if equals:
                info.setdefault(key, []).append(value)
    return info


def read_symbols(sections: list[Section]) -> list[tuple[str, int, int]]:
    """Returns the name, section number and value of every symbol."""
    found: list[tuple[str, int, int]] = []
    for section in sections:
        if section.name != ".symtab":
            continue
        names = sections[section.link].content
        whole = len(section.content) // SYMBOL.size * SYMBOL.size
        for name, _info, _other, index, value, _size in SYMBOL.iter_unpack(section.content[:whole]):
            found.append((text_at(names, name), index, value))
    return found


def read_exports(sections: list[Section], symbols: list[tuple[str, int, int]]) -> dict[str, Export]:
    """Returns the exported symbols, found by the labels that the kernel's headers emit for them."""
    crcs: dict[str, int] = {}
    gpl: dict[str, bool] = {}
    for name, index, value in symbols:
        if name.startswith("__crc_"):
            if index == SHN_ABS:  # up to Linux 5.18, the version is the symbol's value
                crcs[name[6:]] = value & 0xFFFFFFFF
            elif 0 < index < len(sections):
                crcs[name[6:]] = struct.unpack_from("<I", sections[index].content, value)[0]
        elif name.startswith("__ksymtab_") and 0 < index < len(sections):
            gpl[name[10:]] = "_gpl" in sections[index].name
    return {name: Export(crcs.get(name), gpl[name]) for name in gpl}


def read_demanded(sections: list[Section]) -> dict[str, int]:
    """Returns the symbol versions that the module requires.

    They are in __versions or, since Linux 6.14, in its successor.
    """
    by_name = {section.name: section.content for section in sections}
    demanded: dict[str, int] = {}
    table = by_name.get("__versions", b"")
    for crc, name in VERSION.iter_unpack(table[: len(table) // VERSION.size * VERSION.size]):
        demanded[name.split(b"\0")[0].decode()] = crc & 0xFFFFFFFF
    long_crcs = by_name.get("__version_ext_crcs", b"")
    long_names = by_name.get("__version_ext_names", b"").split(b"\0")
    for number in range(len(long_crcs) // 4):
        demanded[long_names[number].decode()] = struct.unpack_from("<I", long_crcs, 4 * number)[0]
    return demanded


def read_module(path: Path, name: str = "") -> KernelModule:
    """Reads a module's file, which may be compressed; rejects a module not called `name`."""
    image = plain_bytes(path)
    # Reject other modules before parsing: parsing the large ones would dominate the run time.
    if name and b"\0name=" + name.encode() + b"\0" not in image:
        raise ModuleFileError(f"{path} is not the module {name}")
    try:
        sections = read_sections(image)
        symbols = read_symbols(sections)
        demanded = read_demanded(sections)
        info = read_info(sections)
        exports = read_exports(sections, symbols)
    except (struct.error, ValueError, IndexError, OverflowError) as error:
        raise ModuleFileError(f"{path} is not a kernel module: {error}") from error
    if "vermagic" not in info:
        raise ModuleFileError(f"{path} is not a kernel module: it has no vermagic")
    undefined = [name for name, index, _value in symbols if index == SHN_UNDEF and name]
    return KernelModule(
        path=path,
        info=info,
        exports=exports,
        imports={name: demanded.get(name) for name in undefined},
        signed=image.endswith(SIGNATURE_MAGIC),
    )


def symvers_text(module: KernelModule) -> str:
    """Returns a module's exports in modpost's format (KBUILD_EXTRA_SYMBOLS)."""
    lines = []
    for name, export in sorted(module.exports.items()):
        kind = "EXPORT_SYMBOL_GPL" if export.gpl else "EXPORT_SYMBOL"
        lines.append(f"0x{export.crc or 0:08x}\t{name}\t{module.name}\t{kind}\t\n")
    return "".join(lines)
