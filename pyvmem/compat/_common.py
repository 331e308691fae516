# SPDX-License-Identifier: MIT
"""vAttention's `map_common_pages`: apart from the rest, because it needs pages that slots share."""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING

from pyvmem.errors import NotSupported

if TYPE_CHECKING:
    from pyvmem.kvcache import KVCache

__all__ = ["map_common_pages"]


def map_common_pages(cache: KVCache, num_tokens: int) -> None:
    """Maps the same physical pages behind the next `num_tokens` tokens of every slot.

    Raises:
        NotSupported: always: the cache's books know one slot for each page. libvmem could map them
            (`Context.retain`), but the next owner's zero-fill would then reach the other slots.
    """
    raise NotSupported(
        f"map_common_pages({num_tokens}): this KVCache of {cache.config.max_batch} slots cannot "
        "share pages between them",
        errno=errno.EOPNOTSUPP,
        op="map_common_pages",
    )
