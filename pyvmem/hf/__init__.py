# SPDX-License-Identifier: MIT
"""Plug-ins for transformers (install the ``serve`` extra).

`VMemCache` serves ``generate``; `vmem_continuous_batching` serves ``generate_batch`` and, through
``python -m pyvmem.hf.serve``, ``transformers serve``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pyvmem.hf.cache import VMemCache, drafting
    from pyvmem.hf.continuous import vmem_continuous_batching

__all__ = ["VMemCache", "drafting", "vmem_continuous_batching"]


def __getattr__(name: str) -> Any:
    # Not imported at the top: importing transformers takes seconds.
    if name in ("VMemCache", "drafting"):
        from pyvmem.hf import cache

        return getattr(cache, name)
    if name == "vmem_continuous_batching":
        from pyvmem.hf import continuous

        return continuous.vmem_continuous_batching
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
