# SPDX-License-Identifier: MIT
"""Calls libvmem's functions. Only this module turns libvmem's errors into exceptions."""

from __future__ import annotations

import errno as _errno
import os
from typing import Any, NoReturn

from pyvmem._vmem import ffi, lib
from pyvmem.errors import VMemError, error_class

__all__ = [
    "call",
    "constant",
    "fail",
    "last_error",
    "sized",
    "text_of",
]


def fail(
    errno: int, text: str, *, op: str = "", addr: int = 0, bytes: int = 0, limit: int = 0
) -> NoReturn:
    """Raises the error class of `errno` for a condition detected before calling C."""
    raise error_class(errno, op)(text, errno=errno, op=op, addr=addr, bytes=bytes, limit=limit)


def last_error(code: int, op: str) -> VMemError:
    """Returns the thread's last error as an exception, given the call's return value `code`."""
    record = sized("struct vmem_error *")
    if lib.vmem_get_error(record) != 0 or record.code != code:
        return error_class(-code, op)(f"{op}: {os.strerror(-code)}", errno=-code, op=op)
    name = text_of(record.op) or op
    return error_class(-code, name)(
        text_of(record.text) or os.strerror(-code),
        errno=-code,
        status=record.status,
        status_name=text_of(record.status_name),
        op=name,
        addr=record.addr,
        bytes=record.bytes,
        limit=record.limit,
    )


def call(function: Any, *args: Any) -> None:
    """Calls a function of vmem.h and raises its error, if any."""
    try:
        code = function(*args)
    except OverflowError as error:
        fail(
            _errno.EINVAL,
            f"{function.__name__}: a number is negative or too large ({error}): "
            f"{[arg for arg in args if isinstance(arg, int)]}",
            op=function.__name__,
        )
    if code != 0:
        raise last_error(code, function.__name__)


def sized(declaration: str, op: str = "", **fields: Any) -> Any:
    """Returns a zeroed structure with its size field set, as vmem.h requires."""
    struct = ffi.new(declaration)
    struct.size = ffi.sizeof(struct[0])
    for name, value in fields.items():
        try:
            setattr(struct, name, value)
        except OverflowError:
            fail(_errno.EINVAL, f"{name} = {value}: negative or too large", op=op)
    return struct


def text_of(chars: Any) -> str:
    """Converts a C string to a str. Names from a driver may be invalid UTF-8."""
    text: str = ffi.string(chars).decode("utf-8", "replace")
    return text


def constant(name: str) -> int:
    """Returns the compiled value of a VMEM_ constant."""
    value: int = getattr(lib, name)
    return value
