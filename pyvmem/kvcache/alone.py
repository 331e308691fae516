# SPDX-License-Identifier: MIT
"""What a cache that is one of several ranks cannot do yet.

Which slot these calls take, and what is evicted for them, depends on what the background has
finished, so ranks could answer differently.
"""

from __future__ import annotations

import errno
from typing import Any, NoReturn

from pyvmem.errors import NotSupported
from pyvmem.kvcache.cache import KVCache

__all__ = ["WithoutSharing", "refuse"]


def refuse(call: str) -> NoReturn:
    """Raises NotSupported."""
    raise NotSupported(
        f"{call}: its answer depends on timing, and could differ between ranks",
        errno=errno.EOPNOTSUPP,
        op="ParallelKVCache",
    )


class WithoutSharing(KVCache):
    """A `KVCache` that refuses what requests share, and swapping, with NotSupported."""

    def fork(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refused."""
        refuse("fork")

    def fork_many(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refused."""
        refuse("fork_many")

    def record(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refused."""
        refuse("record")

    def match(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refused."""
        refuse("match")

    def alloc_prefix(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refused."""
        refuse("alloc_prefix")

    def swap_out(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refused."""
        refuse("swap_out")

    def swap_in(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refused."""
        refuse("swap_in")
