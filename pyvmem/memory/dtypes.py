# SPDX-License-Identifier: MIT
"""Element types by name, with their codes in DLPack and the array interfaces."""

from __future__ import annotations

import errno
import sys
from dataclasses import dataclass
from typing import Any, Final

from pyvmem import _native

__all__ = ["DType", "find_dtype"]

# Values of DLDataTypeCode (dlpack.h 1.1).
_INT, _UINT, _FLOAT, _BFLOAT, _COMPLEX, _BOOL = 0, 1, 2, 4, 5, 6


@dataclass(frozen=True)
class DType:
    """An element type.

    Attributes:
        name: the type's name in torch and numpy.
        itemsize: bytes per element.
        code: DLPack's type code.
        typestr: type string of numpy's array interface; None if numpy lacks the type.
    """

    name: str
    itemsize: int
    code: int
    typestr: str | None


def _table() -> dict[str, DType]:
    order = "<" if sys.byteorder == "little" else ">"
    table = {
        "bool": DType("bool", 1, _BOOL, "|b1"),
        "bfloat16": DType("bfloat16", 2, _BFLOAT, None),
    }
    kinds = (
        ("int", _INT, "i", (8, 16, 32, 64)),
        ("uint", _UINT, "u", (8, 16, 32, 64)),
        ("float", _FLOAT, "f", (16, 32, 64)),
        ("complex", _COMPLEX, "c", (64, 128)),
    )
    for kind, code, letter, widths in kinds:
        for bits in widths:
            size = bits // 8
            typestr = f"{'|' if size == 1 else order}{letter}{size}"
            table[f"{kind}{bits}"] = DType(f"{kind}{bits}", size, code, typestr)
    float8 = ("e3m4", "e4m3", "e4m3b11fnuz", "e4m3fn", "e4m3fnuz", "e5m2", "e5m2fnuz", "e8m0fnu")
    for code, form in enumerate(float8, start=7):
        table[f"float8_{form}"] = DType(f"float8_{form}", 1, code, None)
    return table


_DTYPES: Final = _table()
_NAMES: Final = f"{', '.join(_DTYPES)}, in this machine's byte order"


def find_dtype(dtype: Any) -> DType:
    """Looks up an element type by name, torch.dtype, numpy dtype or numpy scalar class.

    Raises:
        InvalidArgument: the type is unknown; the message lists the known types.
    """
    if isinstance(dtype, DType):
        return dtype
    if isinstance(dtype, str):
        name = dtype
    elif isinstance(dtype, type):  # numpy.float32
        name = dtype.__name__
    else:
        name = getattr(dtype, "name", None) or str(dtype)
    found = _DTYPES.get(name.removeprefix("torch."))
    if found is None or getattr(dtype, "isnative", True) is False:
        _native.fail(errno.EINVAL, f"dtype = {dtype!r}: expected one of {_NAMES}")
    return found
