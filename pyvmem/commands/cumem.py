# SPDX-License-Identifier: MIT
"""The benchmarks' baseline: CUDA's own virtual memory (cuMem*), through cuda.bindings.

It shares no code with the `cuda` back end. Every function of cuda.bindings returns a tuple whose
first item is the CUresult; `call` checks it and unwraps the rest. Importing this module does not
require CUDA; `Cuda()` does, and raises `CudaUnavailable` with the reason if CUDA is not usable.

Source: CUDA driver API, "Virtual Memory Management".
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any

__all__ = ["CuMem", "Cuda", "CudaCallError", "CudaUnavailable"]
from pyvmem.plumbing.closing import Closable


class CudaUnavailable(Exception):
    """CUDA cannot be used on this machine."""


class CudaCallError(Exception):
    """A CUDA call failed.

    Attributes:
        status: the CUresult as a number.
        name: the name of the CUresult.
    """

    def __init__(self, function: str, status: int, name: str) -> None:
        super().__init__(f"{function}: {name} ({status})")
        self.status = status
        self.name = name


class Cuda(Closable):
    """The primary context of one device, through cuda.bindings; retained until `close`."""

    def __init__(self, device: int = 0) -> None:
        try:
            from cuda.bindings import driver
        except ImportError as error:
            raise CudaUnavailable(f"cuda.bindings cannot be imported: {error}") from error
        self.driver: Any = driver
        try:
            self.call(driver.cuInit, 0)
            self.device = self.call(driver.cuDeviceGet, device)
            self.context = self.call(driver.cuDevicePrimaryCtxRetain, self.device)
        except CudaCallError as error:
            raise CudaUnavailable(str(error)) from error
        # cuda.pathfinder raises its own exception if there is no libcuda
        except Exception as error:
            raise CudaUnavailable(f"{type(error).__name__}: {error}") from error
        self.ordinal = device
        self.call(driver.cuCtxSetCurrent, self.context)
        self._open = True

    def call(self, fn: Callable[..., Any], *args: Any) -> Any:
        """Calls `fn` and checks its status; returns its result, or a tuple if there are several."""
        error, *results = fn(*args)
        self.check(fn.__name__, error)
        if not results:
            return None
        return results[0] if len(results) == 1 else tuple(results)

    def check(self, name: str, error: Any) -> None:
        """Raises CudaCallError unless `error` is CUDA_SUCCESS."""
        if int(error) != 0:
            raise CudaCallError(name, int(error), getattr(error, "name", str(error)))

    def attribute(self, name: str) -> int:
        """Returns a device attribute; `name` is the part after CU_DEVICE_ATTRIBUTE_."""
        which = getattr(self.driver.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
        return int(self.call(self.driver.cuDeviceGetAttribute, which, self.device))

    def name(self) -> str:
        """Returns the device's name."""
        text = self.call(self.driver.cuDeviceGetName, 256, self.device)
        return bytes(text).split(b"\0")[0].decode()

    def version(self) -> int:
        """Returns the driver's CUDA version, such as 13000."""
        return int(self.call(self.driver.cuDriverGetVersion))

    def memory(self) -> tuple[int, int]:
        """Returns the device's free and total memory in bytes."""
        free, total = self.call(self.driver.cuMemGetInfo)
        return int(free), int(total)

    def close(self) -> None:
        """Releases the primary context."""
        if self._open:
            self._open = False
            self.call(self.driver.cuDevicePrimaryCtxRelease, self.device)


class CuMem:
    """Prepares arguments for timed cuMem* calls on one device, and makes untimed calls.

    The timed loops call `driver.cuMem...` directly with the argument tuples built here, so that a
    sample covers one cuda.bindings call and none of our code.
    """

    def __init__(self, cuda: Cuda) -> None:
        self.cuda = cuda
        d = cuda.driver
        self.driver = d
        prop = d.CUmemAllocationProp()
        prop.type = d.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        prop.location.type = d.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        prop.location.id = cuda.ordinal
        self.prop = prop
        access = d.CUmemAccessDesc()
        access.location.type = d.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        access.location.id = cuda.ordinal
        access.flags = d.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        self.access = [access]

    @cached_property
    def page(self) -> int:
        """The smallest allocation in bytes, as reported by the driver; 2 MB on every GPU so far."""
        d = self.driver
        minimum = d.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        return int(self.cuda.call(d.cuMemGetAllocationGranularity, self.prop, minimum))

    # Argument tuples of the timed calls.

    def reserve_args(self, nbytes: int) -> tuple[Any, ...]:
        """Returns the arguments of cuMemAddressReserve."""
        return (nbytes, 0, 0, 0)

    def create_args(self, nbytes: int) -> tuple[Any, ...]:
        """Returns the arguments of cuMemCreate."""
        return (nbytes, self.prop, 0)

    def map_args(self, addr: int, nbytes: int, handle: Any) -> tuple[Any, ...]:
        """Returns the arguments of cuMemMap."""
        return (addr, nbytes, 0, handle, 0)

    def access_args(self, addr: int, nbytes: int) -> tuple[Any, ...]:
        """Returns the arguments of cuMemSetAccess."""
        return (addr, nbytes, self.access, 1)

    # Untimed calls.

    def reserve(self, nbytes: int) -> int:
        """Reserves an address range; returns its start address."""
        return int(self.cuda.call(self.driver.cuMemAddressReserve, *self.reserve_args(nbytes)))

    def free(self, addr: int, nbytes: int) -> None:
        """Frees reserved addresses."""
        self.cuda.call(self.driver.cuMemAddressFree, addr, nbytes)

    def create(self, nbytes: int) -> Any:
        """Creates an allocation; returns its handle."""
        return self.cuda.call(self.driver.cuMemCreate, *self.create_args(nbytes))

    def map(self, addr: int, nbytes: int, handle: Any) -> None:
        """Maps a whole allocation, without access rights."""
        self.cuda.call(self.driver.cuMemMap, *self.map_args(addr, nbytes, handle))

    def set_access(self, addr: int, nbytes: int) -> None:
        """Gives this device read and write access to a range."""
        self.cuda.call(self.driver.cuMemSetAccess, *self.access_args(addr, nbytes))

    def unmap(self, addr: int, nbytes: int) -> None:
        """Unmaps a range."""
        self.cuda.call(self.driver.cuMemUnmap, addr, nbytes)

    def release(self, handle: Any) -> None:
        """Drops the handle."""
        self.cuda.call(self.driver.cuMemRelease, handle)

    def check_all(self, name: str, results: list[tuple[Any, ...]]) -> list[Any]:
        """Checks the results of a timed loop; returns each call's value, or None if it has none."""
        for result in results:
            self.cuda.check(name, result[0])
        return [result[1] if len(result) > 1 else None for result in results]
