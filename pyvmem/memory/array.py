# SPDX-License-Identifier: MIT
"""Arrays over virtual addresses: DLPack, the array interfaces, memoryview, torch.

An array never accesses the memory that it describes; map the elements before using them.
"""

from __future__ import annotations

import errno
import math
import operator
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final, NoReturn

from pyvmem import _native
from pyvmem.memory.dtypes import DType, find_dtype
from pyvmem.memory.info import Caps

if TYPE_CHECKING:
    from pyvmem.memory.reservation import Reservation

__all__ = ["VirtualArray", "torch_tensor"]

# Values of DLDeviceType (dlpack.h).
_CPU, _CUDA = 1, 2
# Maximum number of dimensions in torch; DLPack itself has no limit.
_MAX_NDIM: Final = 64
_MAX_DIM: Final = 2**63 - 1

# Every version of torch imports these dtypes through DLPack; other dtypes are imported as bytes.
_TORCH_DLPACK: Final = frozenset(
    [
        *("bool", "uint8", "bfloat16", "complex64", "complex128"),
        *("int8", "int16", "int32", "int64", "float16", "float32", "float64"),
    ]
)
_SAME_SIZE: Final = {1: "uint8", 2: "int16", 4: "int32", 8: "int64"}


class VirtualArray:
    """Part of a reservation with a shape, strides and an element type; see `Reservation.array`.

    The reservation cannot be closed while the array, or an object created from it, is alive.
    """

    __slots__ = ("__weakref__", "dtype", "offset", "reservation", "shape", "strides")

    reservation: Reservation
    """The reservation that contains the array."""
    shape: tuple[int, ...]
    """Number of elements along each dimension."""
    strides: tuple[int, ...]
    """Strides in elements."""
    dtype: DType
    """Element type."""
    offset: int
    """Offset of the first element from the reservation's start, in bytes."""

    def __init__(
        self,
        reservation: Reservation,
        shape: Sequence[int],
        dtype: Any,
        strides: Sequence[int] | None,
        offset: int,
    ) -> None:
        self.reservation = reservation
        self.dtype = find_dtype(dtype)
        self.shape = _integers("shape", shape)
        self.offset = _integers("offset", (offset,))[0]
        if strides is None:
            self.strides = _contiguous(self.shape)
        else:
            self.strides = _integers("strides", strides)
        if len(self.shape) > _MAX_NDIM:
            self._bad(f"{len(self.shape)} dimensions", limit=_MAX_NDIM)
        if len(self.strides) != len(self.shape):
            self._bad(
                f"len(strides) is {len(self.strides)}; it must be len(shape), {len(self.shape)}"
            )
        if self.offset % self.dtype.itemsize:
            self._bad(f"the offset is not a multiple of {self.dtype.itemsize}")
        if self.offset + self.nbytes_spanned > reservation.nbytes:
            self._bad(
                f"it needs {self.offset + self.nbytes_spanned} bytes, but the reservation has "
                f"{reservation.nbytes}",
                limit=reservation.nbytes,
            )
        if max((*self.shape, *self.strides), default=0) > _MAX_DIM:
            self._bad("a number is above 2**63 - 1", limit=_MAX_DIM)
        # torch checks the element count regardless of strides, and deletes a capsule that it
        # rejects; the capsule's owner would then delete it a second time.
        if math.prod(max(n, 1) for n in self.shape) * self.dtype.itemsize > _MAX_DIM:
            self._bad("its elements need more than 2**63 - 1 bytes", limit=_MAX_DIM)

    def _bad(self, why: str, limit: int = 0) -> NoReturn:
        _native.fail(
            errno.EINVAL,
            f"tensor {self.dtype.name}{list(self.shape)}, strides {list(self.strides)}, at offset "
            f"{self.offset}: {why}",
            op="tensor",
            addr=self.reservation.addr,
            bytes=self.offset + self.nbytes_spanned,
            limit=limit,
        )

    @property
    def nbytes_spanned(self) -> int:
        """Bytes from the start of the first element to the end of the last, including gaps."""
        if 0 in self.shape:
            return 0
        last = sum((n - 1) * step for n, step in zip(self.shape, self.strides, strict=False))
        return (last + 1) * self.dtype.itemsize

    @property
    def addr(self) -> int:
        """Address of the first element."""
        return self.reservation.addr + self.offset

    def index_of(self, offset: int) -> tuple[int, ...] | None:
        """Returns the index of the element that contains byte `offset` of the reservation, or None.

        If several elements overlap there, returns one of them.
        """
        rest, index = (offset - self.offset) // self.dtype.itemsize, [0] * len(self.shape)
        for axis in sorted(range(len(self.shape)), key=lambda axis: -self.strides[axis]):
            if self.strides[axis] and rest >= 0:
                index[axis] = min(rest // self.strides[axis], self.shape[axis] - 1)
                rest -= index[axis] * self.strides[axis]
        return None if rest or 0 in self.shape else tuple(index)

    @property
    def _cpu(self) -> bool:
        return self.reservation.context.cuda_device is None

    # ---- DLPack --------------------------------------------------------------------------------

    def __dlpack_device__(self) -> tuple[int, int]:
        """Returns DLPack's device type and index: (1, 0) on ``host``, (2, ordinal) on CUDA."""
        device = self.reservation.context.cuda_device
        return (_CPU, 0) if device is None else (_CUDA, device)

    def __dlpack__(
        self,
        *,
        stream: Any = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> Any:
        """Returns a DLPack capsule, versioned (1.x) if the consumer supports it.

        `stream` is ignored: the array itself has no pending work.

        Raises:
            BufferError: the consumer requests a copy or another device.
        """
        if copy:
            raise BufferError("a virtual array cannot be copied: unmapped parts have no contents")
        if dl_device is not None and tuple(dl_device) != self.__dlpack_device__():
            raise BufferError(f"device {dl_device}: the array is on {self.__dlpack_device__()}")
        return self._capsule(self.dtype, max_version is not None and max_version[0] >= 1)

    def _capsule(self, dtype: DType, versioned: bool) -> Any:
        kind, index = self.__dlpack_device__()
        return _native.dlpack_capsule(
            self, self.addr, kind, index, dtype.code, 8 * dtype.itemsize, self.shape, self.strides,
            versioned,
        )  # fmt: skip

    # ---- other protocols -----------------------------------------------------------------------

    def _interface(self) -> dict[str, Any]:
        if self.dtype.typestr is None:
            raise AttributeError(f"{self.dtype.name} has no array-interface type; use DLPack")
        size = self.dtype.itemsize
        return {
            "shape": self.shape,
            "typestr": self.dtype.typestr,
            "data": (self.addr, False),
            "strides": tuple(step * size for step in self.strides),
            "version": 3,
        }

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """The CUDA array interface, version 3.

        Raises AttributeError on ``host`` and for types that numpy lacks.
        """
        if self._cpu:
            raise AttributeError("the array is in host memory: it has __array_interface__")
        return {**self._interface(), "stream": None}

    @property
    def __array_interface__(self) -> dict[str, Any]:
        """numpy's array interface, version 3.

        Raises AttributeError on GPUs and for types that numpy lacks.
        """
        if not self._cpu:
            raise AttributeError("the array is in GPU memory: it has __cuda_array_interface__")
        return self._interface()

    def buffer(self) -> memoryview:
        """Returns a writable memoryview of the array's bytes. The view keeps the array alive.

        Raises:
            NotSupported: the CPU cannot access this back end's memory.
        """
        info = self.reservation.context.info
        if Caps.CPU_ACCESS not in info.caps:
            _native.fail(
                errno.EOPNOTSUPP,
                f"a buffer over {info.backend} memory: the CPU cannot reach it; use Context.read",
                op="buffer",
                addr=self.addr,
                bytes=self.nbytes_spanned,
            )
        return _native.buffer_at(self.addr, self.nbytes_spanned, self)

    def __repr__(self) -> str:
        return f"<VirtualArray {self.dtype.name}{list(self.shape)} at {self.addr:#x}>"


def _integers(name: str, values: Sequence[int]) -> tuple[int, ...]:
    """Converts `values` (non-negative ints or objects with ``__index__``) to a tuple of ints."""
    try:
        numbers = tuple(map(operator.index, values))
    except TypeError:
        raise TypeError(f"{name}: expected whole numbers, not {values!r:.80}") from None
    if min(numbers, default=0) < 0:
        _native.fail(errno.EINVAL, f"{name} = {numbers}: a number is negative", op="tensor")
    return numbers


def _contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(math.prod(max(n, 1) for n in shape[k + 1 :]) for k in range(len(shape)))


def torch_tensor(array: VirtualArray) -> Any:
    """Wraps the array as a torch.Tensor through DLPack, without copying or accessing the memory.

    Nothing needs to be mapped: torch.from_dlpack does not query the driver about the address (torch
    2.11: aten/src/ATen/DLConvertor.cpp takes the device from the capsule).
    """
    import torch
    from torch.utils.dlpack import from_dlpack

    if not array._cpu:
        torch.cuda.init()  # type: ignore[no-untyped-call]
    name = array.dtype.name
    if name in _TORCH_DLPACK:
        return from_dlpack(array._capsule(array.dtype, False))
    target = getattr(torch, name, None)
    if target is None:
        _native.fail(
            errno.EOPNOTSUPP, f"dtype {name}: torch {torch.__version__} lacks it", op="tensor"
        )
    stand_in = find_dtype(_SAME_SIZE[array.dtype.itemsize])
    return from_dlpack(array._capsule(stand_in, False)).view(target)
