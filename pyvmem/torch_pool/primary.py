# SPDX-License-Identifier: MIT
"""The primary context of a CUDA device, through libcuda directly.

A failed runtime call would also be reported by the next kernel launch.
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
    """Retains a device's primary context, which the runtime and torch use, until closed.

    Args:
        device: CUDA ordinal.

    Raises:
        VMemError: the device does not exist, or has no memory for a context.
    """

    def __init__(self, device: int) -> None:
        self._context = ctypes.c_void_p()  # set by CUDA: it is kept
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
        """The CUcontext; 0 once it is closed."""
        return self._context.value or 0

    def address(self, function: str) -> int:
        """The address of a function of libcuda."""
        return ctypes.cast(getattr(self._cuda, function), ctypes.c_void_p).value or 0

    def call(self, function: str, *arguments: Any) -> None:
        """Calls a function with this context current in the thread.

        Raises:
            VMemError: it failed, or the context cannot be made current.
        """
        before = ctypes.c_void_p()
        self._check("cuCtxGetCurrent", ctypes.byref(before))
        # Set, not pushed: restoring a context that was never changed is harmless.
        try:
            self._check("cuCtxSetCurrent", self._context)
            self._check(function, *arguments)
        finally:
            self._cuda.cuCtxSetCurrent(before)

    def close(self) -> None:
        """Releases the context. Idempotent."""
        if self._context.value:
            self._context.value = None  # first: a second release would take torch's reference
            self._cuda.cuDevicePrimaryCtxRelease_v2(self._number)

    def __del__(self) -> None:
        # A child of a fork has a copy of this object, and no CUDA.
        if getattr(self, "_pid", 0) == os.getpid():
            self.close()

    def _check(self, function: str, *arguments: Any) -> None:
        code: int = getattr(self._cuda, function)(*arguments)
        if code:
            _native.fail(errno.EIO, f"{function} returned {code}", op="CUDA")
