# SPDX-License-Identifier: MIT
"""What the parts of the public class `KVCache` have in common."""

from __future__ import annotations

import errno
import threading

from pyvmem.errors import BadHandle
from pyvmem.kvcache.core import Core

__all__ = ["CacheBase"]


class CacheBase:
    """A core behind a lock."""

    _core: Core
    _closed: bool
    _lock: threading.RLock

    def _open_core(self) -> Core:
        """The core, for a call that holds the lock.

        Raises:
            BadHandle: the cache or its context is closed. ForkedProcess: it is the parent's.
        """
        core = self._core
        if self._closed:
            raise BadHandle("the KVCache is closed", errno=errno.EBADF, op="KVCache")
        if not core.context.is_open:
            core.context.stats()  # raises what is wrong: closed, or of the parent of a fork
        return core
