# SPDX-License-Identifier: MIT
"""One thread for the calls that may take long: prefixes, forks, swapping.

Calls run one at a time, in the order in which they were submitted. Each returns a
`concurrent.futures.Future`, which a thread can wait for (``result()``), and so can an event loop
(``asyncio.wrap_future``).
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

__all__ = ["Background", "work_until_now"]

_T = TypeVar("_T")


class Background:
    """A thread, started by the first call."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pool: ThreadPoolExecutor | None = None

    def begin(self, call: Callable[[], _T]) -> Future[_T]:
        """Queues `call`; the future gets its result or exception."""
        with self._lock:
            if self._pool is None:
                self._pool = ThreadPoolExecutor(1, thread_name_prefix="vmem-engine")
            return self._pool.submit(call)

    def close(self) -> None:
        """Waits for the queued calls."""
        with self._lock:
            if self._pool is not None:
                self._pool.shutdown()
            self._pool = None  # by now: an interrupted close is called again


def work_until_now(stream: Any, device: int | None) -> Any:
    """Resolves a stream for use in another thread: torch's current stream is per thread.

    Args:
        stream: as every call takes it; None: the calling thread's current stream.
        device: CUDA ordinal of the cache; None on host, which has no streams.
    """
    if stream is not None or device is None:
        return stream
    import torch

    return torch.cuda.current_stream(device) if torch.cuda.is_available() else None
