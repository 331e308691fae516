# SPDX-License-Identifier: MIT
"""Reads a GPU's name, memory and free memory from NVIDIA's management library.

Unlike CUDA, the library needs no context, which would take up GPU memory.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator
from dataclasses import dataclass

__all__ = ["Card", "Cards"]

_LIBRARY = "libnvidia-ml.so.1"
_NAME_SIZE = 96


class _Memory(ctypes.Structure):
    """The C structure nvmlMemory_t."""

    _fields_ = [(name, ctypes.c_ulonglong) for name in ("total", "free", "used")]


@dataclass(frozen=True)
class Card:
    """A GPU.

    Attributes:
        name: product name.
        memory, free: total memory, and memory that no process holds, in bytes.
    """

    name: str
    memory: int
    free: int


class Cards:
    """Looks up this machine's GPUs by UUID; finds none if the library is missing or fails."""

    def __init__(self, library: ctypes.CDLL | None) -> None:
        self._library = library

    @classmethod
    @contextlib.contextmanager
    def opened(cls) -> Iterator[Cards]:
        """Opens the library for the ``with`` block."""
        try:
            library = ctypes.CDLL(_LIBRARY)
        except OSError:
            yield cls(None)
            return
        if library.nvmlInit_v2():
            yield cls(None)
            return
        try:
            yield cls(library)
        finally:
            library.nvmlShutdown()

    def card(self, uuid: str) -> Card | None:
        """Returns the GPU with this UUID, as printed by ``nvidia-smi -L``, or None if unknown."""
        library, handle, memory = self._library, ctypes.c_void_p(), _Memory()
        name = ctypes.create_string_buffer(_NAME_SIZE)
        if library is None or library.nvmlDeviceGetHandleByUUID(
            uuid.encode(), ctypes.byref(handle)
        ):
            return None
        if library.nvmlDeviceGetName(handle, name, _NAME_SIZE):
            return None
        if library.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory)):
            return None
        return Card(name.value.decode(errors="replace"), memory.total, memory.free)
