# SPDX-License-Identifier: MIT
"""Checks that each errno in vmem.h has its exception class."""

from __future__ import annotations

import errno
import pickle
import re
from pathlib import Path

import pytest

import pyvmem
from pyvmem import errors

HEADER = Path(__file__).parents[2] / "libvmem" / "include" / "vmem.h"


def test_every_errno_of_the_header_has_a_class() -> None:
    if not HEADER.exists():
        pytest.skip("the header is not next to the tests")
    listed = re.findall(r"^ \*   -(E[A-Z]+)  ", HEADER.read_text(), flags=re.MULTILINE)
    assert len(listed) == 19
    classes = [errors.error_class(getattr(errno, name)) for name in listed]
    assert len(set(classes)) == len(classes)
    assert errors.VMemError not in classes
    for name, cls in zip(listed, classes, strict=True):
        assert issubclass(cls, errors.VMemError)
        assert cls.__name__ in pyvmem.__all__
        assert cls.__doc__ is not None
        assert cls.__doc__.startswith(name) or name == "EACCES"


@pytest.mark.parametrize(
    ("cls", "base"),
    [
        (pyvmem.InvalidArgument, ValueError),
        (pyvmem.NotGpuWork, TypeError),
        (pyvmem.AddressOverflow, OverflowError),
        (pyvmem.OutOfMemory, MemoryError),
        (pyvmem.Timeout, TimeoutError),
        (pyvmem.AccessDenied, PermissionError),
        (pyvmem.ReadOnly, pyvmem.AccessDenied),
        (pyvmem.TooManyTickets, pyvmem.TooManyBatches),
    ],
)
def test_python_bases(cls: type[pyvmem.VMemError], base: type[Exception]) -> None:
    assert issubclass(cls, base)
    assert issubclass(cls, pyvmem.VMemError)


def test_two_meanings_of_one_errno() -> None:
    assert errors.error_class(errno.EACCES, "vmem_open") is pyvmem.AccessDenied
    assert errors.error_class(errno.EACCES, "vmem_probe") is pyvmem.AccessDenied
    assert errors.error_class(errno.EACCES, "vmem_write") is pyvmem.ReadOnly
    assert errors.error_class(errno.EAGAIN, "vmem_submit") is pyvmem.TooManyBatches
    assert errors.error_class(errno.EAGAIN) is pyvmem.TooManyBatches
    assert errors.error_class(errno.EAGAIN, "vmem_batch") is pyvmem.Suspended
    assert errors.error_class(errno.EAGAIN, "vMemReserve") is pyvmem.Suspended
    assert errors.error_class(errno.EXDEV) is pyvmem.VMemError


def test_a_reentrant_call() -> None:
    made = pyvmem.Reentered("stats", "step")
    assert not isinstance(made, pyvmem.VMemError)
    for error in (made, pickle.loads(pickle.dumps(made))):
        assert (error.op, error.interrupted) == ("stats", "step")
        assert str(error) == str(made)
        assert str(error).startswith("stats: ")
        assert "step" in str(error)


@pytest.mark.parametrize(
    "cls", [getattr(errors, name) for name in errors.__all__[:-1] if name != "Reentered"]
)
def test_attributes_text_and_pickle(cls: type[pyvmem.VMemError]) -> None:
    made = cls(
        "what happened",
        errno=errno.EIO,
        status=7,
        status_name="NV_ERR",
        op="vMemMap",
        addr=1,
        bytes=2,
        limit=3,
    )
    for error in (made, pickle.loads(pickle.dumps(made))):
        assert type(error) is cls
        assert str(error) == "what happened"
        assert (error.errno, error.errno_name) == (errno.EIO, "EIO")
        assert (error.status, error.status_name, error.op) == (7, "NV_ERR", "vMemMap")
        assert (error.addr, error.bytes, error.limit) == (1, 2, 3)


def test_real_error(context: pyvmem.Context, page: int) -> None:
    with pytest.raises(pyvmem.NotMapped) as caught, context.reserve(page) as reservation:
        context.unmap(reservation.addr, page)
    error = caught.value
    assert (error.errno, error.errno_name) == (errno.EFAULT, "EFAULT")
    assert error.op == "vMemUnmap"
    assert (error.addr, error.bytes) == (reservation.addr, page)
    assert hex(error.addr) in str(error)


def test_status_of_an_injected_failure(context: pyvmem.Context, page: int) -> None:
    with context.create(page) as pages, context.reserve(page) as reservation:
        context.inject(pyvmem.Inject.MAP, 0, 1, errno.EIO)
        with pytest.raises(pyvmem.DriverError) as caught:
            reservation.map(0, pages)
        assert caught.value.op == "vMemMap"
        reservation.map(0, pages)
