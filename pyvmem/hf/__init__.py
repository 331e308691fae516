# SPDX-License-Identifier: MIT
"""Plugs for the library transformers (the extra ``serve``): `VMemCache` for ``generate``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pyvmem.hf.cache import VMemCache

__all__ = ["VMemCache"]


def __getattr__(name: str) -> Any:
    # Not imported here: transformers takes seconds.
    if name in __all__:
        from pyvmem.hf import cache

        return getattr(cache, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
