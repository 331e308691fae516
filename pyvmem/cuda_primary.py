# SPDX-License-Identifier: MIT
"""The primary context of a CUDA device, by libcuda itself.

A failure of a call of the runtime would be reported by the next launch of a kernel.
"""

from __future__ import annotations

import ctypes
import errno
from typing import Any

from pyvmem import _native
from pyvmem.closing import Closable

__all__ = ["PrimaryContext"]


class PrimaryContext(Closable):
    """Keeps a device's primary context, which the runtime and torch use, until it is closed.

    Args:
        device: CUDA ordinal.

    Attributes:
        handle: the CUcontext.

    Raises:
        VMemError: there is no such device, or it has no memory for a context.
    """

    def __init__(self, device: int) -> None:
        self._cuda = ctypes.CDLL("libcuda.so.1")
        self._number = ctypes.c_int()
        self._check("cuDeviceGet", ctypes.byref(self._number), device)
        context = ctypes.c_void_p()
        self._check("cuDevicePrimaryCtxRetain", ctypes.byref(context), self._number)
        self.handle: int = context.value or 0
        self._closed = False

    def address(self, function: str) -> int:
        """The address of a function of libcuda."""
        return ctypes.cast(getattr(self._cuda, function), ctypes.c_void_p).value or 0

    def call(self, function: str, *arguments: Any) -> None:
        """Calls a function with the context current, whichever is in this thread.

        Raises:
            VMemError: it failed, or the context cannot be made current.
        """
        self._check("cuCtxPushCurrent_v2", ctypes.c_void_p(self.handle))
        try:
            self._check(function, *arguments)
        finally:
            self._cuda.cuCtxPopCurrent_v2(ctypes.byref(ctypes.c_void_p()))

    def close(self) -> None:
        """Gives the context back; does nothing when called again."""
        if not self._closed:
            self._cuda.cuDevicePrimaryCtxRelease_v2(self._number)
            self._closed = True

    def _check(self, function: str, *arguments: Any) -> None:
        code: int = getattr(self._cuda, function)(*arguments)
        if code:
            _native.fail(errno.EIO, f"{function} returned {code}", op="CUDA")
