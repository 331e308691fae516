# SPDX-License-Identifier: MIT
"""The primary context of a CUDA device, through libcuda.

Does not use the CUDA runtime, because the next kernel launch would report its failed calls too.
"""

from __future__ import annotations

import ctypes
import errno
import os
from typing import Any

from pyvmem import _native
from pyvmem.errors import VMemError
from pyvmem.plumbing.closing import Closable

__all__ = ["PrimaryContext"]


class PrimaryContext(Closable):
    """Retains a device's primary context, which the CUDA runtime and torch use, until closed.

    Args:
        device: CUDA ordinal.

    Raises:
        VMemError: the device does not exist or has too little memory for a context.
    """

    def __init__(self, device: int) -> None:
        self._context = ctypes.c_void_p()  # set by CUDA once the context is retained
        self._pid = os.getpid()
        self._cuda = ctypes.CDLL("libcuda.so.1")
        self._number = ctypes.c_int()
        try:
            self._check("cuDeviceGet", ctypes.byref(self._number), device)
            self._check("cuDevicePrimaryCtxRetain", ctypes.byref(self._context), self._number)
        except VMemError:
            self._context.value = None
            raise
        except BaseException:
            self.close()
            raise

    @property
    def handle(self) -> int:
        """The CUcontext; 0 once closed."""
        return self._context.value or 0

    def address(self, function: str) -> int:
        """Returns the address of a libcuda function."""
        return ctypes.cast(getattr(self._cuda, function), ctypes.c_void_p).value or 0

    def call(self, function: str, *arguments: Any) -> None:
        """Calls a libcuda function with this context current in the thread.

        Raises:
            VMemError: the call failed, or the context cannot be made current.
        """
        before = ctypes.c_void_p()
        self._check("cuCtxGetCurrent", ctypes.byref(before))
        # Set rather than pushed, so that restoring is harmless even if an exception comes first.
        try:
            self._check("cuCtxSetCurrent", self._context)
            self._check(function, *arguments)
        finally:
            self._cuda.cuCtxSetCurrent(before)

    def close(self) -> None:
        """Releases the context. Idempotent."""
        if self._context.value:
            # cleared first, because a second release would drop torch's reference
            self._context.value = None
            self._cuda.cuDevicePrimaryCtxRelease_v2(self._number)

    def __del__(self) -> None:
        # A forked child has a copy of this object, but cannot use CUDA.
        if getattr(self, "_pid", 0) == os.getpid():
            self.close()

    def _check(self, function: str, *arguments: Any) -> None:
        code: int = getattr(self._cuda, function)(*arguments)
        if code:
            _native.fail(errno.EIO, f"{function} returned {code}", op="CUDA")
