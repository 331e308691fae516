# SPDX-License-Identifier: MIT
"""Creates modules with one fault each, by changing a few bytes of a good module's file."""

from __future__ import annotations

import struct
from pathlib import Path

from module_elf import VERSION, read_sections

__all__ = ["other_crc", "other_text", "without_crc"]


def versions_table(image: bytes) -> int:
    """Returns the offset of the required symbol versions in a module's file."""
    table = next(s.content for s in read_sections(image) if s.name == "__versions")
    return image.index(table)


def entry_of(image: bytes, symbol: str) -> int:
    """Returns the offset of a symbol's version entry in a module's file."""
    start = versions_table(image)
    for number in range(len(image) // VERSION.size):
        at = start + number * VERSION.size
        _crc, name = VERSION.unpack_from(image, at)
        if name.split(b"\0")[0].decode() == symbol:
            return at
    raise ValueError(symbol)


def other_crc(module: Path, new: Path, symbol: str) -> Path:
    """Creates a module that requires a different version of one symbol."""
    image = bytearray(module.read_bytes())
    at = entry_of(bytes(image), symbol)
    crc = struct.unpack_from("<Q", image, at)[0]
    struct.pack_into("<Q", image, at, crc ^ 1)
    new.write_bytes(image)
    return new


def without_crc(module: Path, new: Path, symbol: str) -> Path:
    """Creates a module that lacks the version of one symbol, as if built without nvidia.ko."""
    image = bytearray(module.read_bytes())
    at = entry_of(bytes(image), symbol)
    image[at + 8 : at + 9] = b"-"  # a name that is never looked up
    new.write_bytes(image)
    return new


def other_text(module: Path, new: Path, old: str, text: str) -> Path:
    """Creates a module with one modinfo field (`key=value`) replaced by one of the same length."""
    image = module.read_bytes()
    before, after = old.encode(), text.encode()
    assert len(before) == len(after), (old, text)
    assert b"\0" + before in image, old
    new.write_bytes(image.replace(b"\0" + before, b"\0" + after))
    return new
