# SPDX-License-Identifier: MIT
"""Stand-ins for torch, cuda.core and libcuda that record the order imposed on GPU work."""

from __future__ import annotations

import ctypes
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from pyvmem.memory import streams

CURRENT, DEFAULT, TORCH, CORE, OTHER, LEGACY = 0x10, 0, 0x20, 0x30, 0x40, 1


class Gpu:
    """Records calls in order: (stream, "waits for", event) or ("cpu", ..., event)."""

    def __init__(self) -> None:
        self.log: list[tuple[Any, str, int]] = []
        self.captured: set[int] = set()
        self.mode = 0  # the capture mode; CUDA starts in global mode
        self.modes: list[int] = []
        self.over = False

    def event_of(self, stream: int) -> int:
        """Returns the event recorded on a stream."""
        return 0xE000 + stream


def stand_ins(gpu: Gpu) -> types.SimpleNamespace:
    """Returns classes that mimic those of torch and cuda.core."""

    class TorchEvent:
        def __init__(self, handle: int) -> None:
            self.cuda_event, self.over = handle, False

        def wait(self, stream: Any) -> None:
            assert isinstance(stream, TorchStream)
            gpu.log.append((stream.cuda_stream, "waits for", self.cuda_event))

        def synchronize(self) -> None:
            self.over = True
            gpu.modes.append(gpu.mode)
            gpu.log.append(("cpu", "waits for", self.cuda_event))

        def query(self) -> bool:
            gpu.modes.append(gpu.mode)
            return gpu.over or self.over

    class TorchStream:
        def __init__(self, handle: int) -> None:
            self.cuda_stream = handle

        def __cuda_stream__(self) -> tuple[int, int]:
            return (0, self.cuda_stream)

        def record_event(self) -> TorchEvent:
            return TorchEvent(gpu.event_of(self.cuda_stream))

    class Event:
        def __init__(self, handle: int) -> None:
            self.handle, self.over = handle, False

        def sync(self) -> None:
            self.over = True
            gpu.modes.append(gpu.mode)
            gpu.log.append(("cpu", "waits for", self.handle))

        @property
        def is_done(self) -> bool:
            gpu.modes.append(gpu.mode)
            return gpu.over or self.over

    class Stream:
        def __init__(self, handle: int) -> None:
            self.handle = handle

        @classmethod
        def from_handle(cls, handle: int) -> Stream:
            return cls(handle)

        def __cuda_stream__(self) -> tuple[int, int]:
            return (0, self.handle)

        def record(self) -> Event:
            return Event(gpu.event_of(self.handle))

        def wait(self, event: Any) -> None:
            assert isinstance(event, Event)
            gpu.log.append((self.handle, "waits for", event.handle))

    Event.__module__, Stream.__module__ = "cuda.core._event", "cuda.core._stream"

    class Protocol:
        def __init__(self, handle: int = OTHER) -> None:
            self.handle = handle

        def __cuda_stream__(self) -> tuple[int, int]:
            return (0, self.handle)

    @contextmanager
    def on(device: int) -> Iterator[None]:
        assert device == 0
        yield

    cuda = types.SimpleNamespace(
        is_available=lambda: True,
        current_stream=lambda device: TorchStream(CURRENT),
        default_stream=lambda device: TorchStream(DEFAULT),
        ExternalStream=lambda handle, device: TorchStream(handle),
        device=on,
        is_current_stream_capturing=lambda: False,
    )
    return types.SimpleNamespace(
        torch=types.SimpleNamespace(cuda=cuda),
        core=types.SimpleNamespace(Stream=Stream),
        TorchStream=TorchStream,
        TorchEvent=TorchEvent,
        CoreStream=Stream,
        CoreEvent=Event,
        Protocol=Protocol,
    )


class Driver:
    """Fakes the libcuda calls that the package makes."""

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu

    def cuThreadExchangeStreamCaptureMode(self, mode: Any) -> int:
        cell = mode._obj
        self._gpu.mode, cell.value = cell.value, self._gpu.mode
        return 0

    def cuStreamIsCapturing(self, stream: Any, status: Any) -> int:
        assert isinstance(stream, ctypes.c_void_p)
        status._obj.value = int((stream.value or 0) in self._gpu.captured)
        return 0


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    one = Gpu()
    made = stand_ins(one)
    monkeypatch.setitem(sys.modules, "torch", made.torch)
    monkeypatch.setitem(sys.modules, "cuda.core", made.core)
    monkeypatch.setattr(streams, "_driver", lambda: Driver(one))
    one.made = made  # type: ignore[attr-defined]
    return one
