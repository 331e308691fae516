# SPDX-License-Identifier: MIT
"""Checks the cuMem* baseline without a GPU: it says why it cannot run, and its calls match the
signatures in cuda.bindings.

cuda.bindings converts the arguments of a call before it looks for libcuda. So without a driver, a
call with valid arguments fails with "no libcuda", and a call with invalid arguments raises a
TypeError. The tests use this to check the argument types of every call that the baseline makes.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import re
from typing import Any

import pytest

from pyvmem.bench import kernels
from pyvmem.commands.cumem import Cuda, CudaCallError, CudaUnavailable, CuMem

PAGE = 2 << 20

driver = pytest.importorskip("cuda.bindings.driver", reason="cuda.bindings is not installed")


def has_libcuda() -> bool:
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


without_gpu = pytest.mark.skipif(has_libcuda(), reason="this machine has libcuda")


class Unopened(Cuda):
    """A `Cuda` that has not opened a device."""

    def __init__(self) -> None:
        self.driver: Any = driver
        self.ordinal = 0
        self.device = driver.CUdevice(0)
        self._open = False


@pytest.fixture
def m() -> CuMem:
    return CuMem(Unopened())


@without_gpu
def test_without_a_driver_the_reason_is_given() -> None:
    with pytest.raises(CudaUnavailable, match="cuda"):
        Cuda()


def call_of(name: str, m: CuMem) -> tuple[Any, ...]:
    handle = driver.CUmemGenericAllocationHandle(5)
    return {
        "cuMemAddressReserve": m.reserve_args(PAGE),
        "cuMemAddressFree": (PAGE, PAGE),
        "cuMemCreate": m.create_args(PAGE),
        "cuMemMap": m.map_args(PAGE, PAGE, handle),
        "cuMemSetAccess": m.access_args(PAGE, PAGE),
        "cuMemUnmap": (PAGE, PAGE),
        "cuMemRelease": (handle,),
        "cuMemGetInfo": (),
        "cuDriverGetVersion": (),
        "cuModuleLoadData": (kernels.PTX.encode() + b"\0",),
        "cuModuleGetFunction": (driver.CUmodule(1), b"read"),
        "cuStreamCreate": (1,),
        "cuStreamQuery": (driver.CUstream(1),),
        "cuEventCreate": (0,),
        "cuEventRecord": (driver.CUevent(1), driver.CUstream(1)),
        "cuEventElapsedTime": (driver.CUevent(1), driver.CUevent(2)),
        "cuMemAlloc": (256,),
        "cuMemFree": (4096,),
        "cuLaunchKernel": (
            driver.CUfunction(1),
            *(8, 1, 1, 512, 1, 1, 0),
            driver.CUstream(1),
            ((1, 2), (ctypes.c_uint64, ctypes.c_uint64)),
            0,
        ),
    }[name]


@without_gpu
@pytest.mark.parametrize(
    "name",
    [
        "cuMemAddressReserve",
        "cuMemAddressFree",
        "cuMemCreate",
        "cuMemMap",
        "cuMemSetAccess",
        "cuMemUnmap",
        "cuMemRelease",
        "cuMemGetInfo",
        "cuDriverGetVersion",
        "cuModuleLoadData",
        "cuModuleGetFunction",
        "cuStreamCreate",
        "cuStreamQuery",
        "cuEventCreate",
        "cuEventRecord",
        "cuEventElapsedTime",
        "cuMemAlloc",
        "cuMemFree",
        "cuLaunchKernel",
    ],
)
def test_the_arguments_fit_cuda_bindings(name: str, m: CuMem) -> None:
    function = getattr(driver, name)
    args = call_of(name, m)
    with pytest.raises(Exception, match=r"libcuda|driver library|symbol") as good:
        function(*args)
    assert not isinstance(good.value, (TypeError, ValueError, AttributeError))
    with pytest.raises(TypeError):
        function(*args, object())


def test_properties_of_the_allocation(m: CuMem) -> None:
    assert m.prop.type == driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    assert m.prop.location.type == driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    (access,) = m.access
    assert access.flags == driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
    assert access.location.id == m.prop.location.id == 0


def test_a_failed_call_names_function_and_status(m: CuMem) -> None:
    status = driver.CUresult.CUDA_ERROR_OUT_OF_MEMORY
    with pytest.raises(
        CudaCallError, match=r"cuMemCreate: CUDA_ERROR_OUT_OF_MEMORY \(2\)"
    ) as found:
        m.check_all("cuMemCreate", [(driver.CUresult.CUDA_SUCCESS, 1), (status, None)])
    assert (found.value.status, found.value.name) == (2, "CUDA_ERROR_OUT_OF_MEMORY")
    ok = driver.CUresult.CUDA_SUCCESS
    assert m.check_all("cuMemCreate", [(ok, 7), (ok,)]) == [7, None]


def test_the_kernels_declare_what_the_launches_pass() -> None:
    entries = dict(re.findall(r"\.visible \.entry (\w+)\(([^)]*)\)", kernels.PTX))
    assert {name: text.count(".param .u64") for name, text in entries.items()} == {
        "spin": 1,
        "read": 3,
    }
    assert kernels.PTX.isascii()
