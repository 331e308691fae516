# SPDX-License-Identifier: MIT
"""Helpers for tests with real kernels: skip conditions, contexts and a small cache."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

import pyvmem
from pyvmem import Context, KVCache, KVCacheConfig

torch = pytest.importorskip("torch")

__all__ = ["BACKENDS", "LAYERS", "ROWS", "TENSORS", "contexts", "make", "needs_gpu"]

BACKENDS = [one.backend for one in pyvmem.probe() if one.usable and one.backend != "host"]
ROWS = 16  # rows per page in a cache from `make`
LAYERS = 2
TENSORS = 2 * LAYERS


def needs_gpu(count: int = 1) -> list[pytest.MarkDecorator]:
    """Returns the pytest marks for tests that create tensors on `count` CUDA devices."""
    found = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return [
        pytest.mark.needs_tensors,
        pytest.mark.skipif(found < count, reason=f"needs {count} CUDA devices, torch sees {found}"),
        pytest.mark.skipif(not BACKENDS, reason="no GPU back end is usable here"),
    ]


def contexts(**options: Any) -> Any:
    """Returns a fixture that yields a context on each back end and checks it after the test."""

    @pytest.fixture(params=BACKENDS)
    def context(request: pytest.FixtureRequest) -> Iterator[Context]:
        with Context(request.param, **options) as ctx:
            yield ctx
            torch.cuda.synchronize()
            ctx.check()

    return context


def make(context: Context, pages: int = 0, **changes: Any) -> KVCache:
    """Creates a cache with memory for `pages` pages per tensor, or with no limit if `pages` is 0.

    Rows are float64 so that long sums are exact.
    """
    page = context.info.granule
    values: dict[str, Any] = {
        "num_layers": LAYERS,
        "num_kv_heads": page // (ROWS * 64 * 8),
        "head_dim": 64,
        "dtype": "float64",
        "max_batch": 2,
        "max_seq_len": 8 * ROWS,
        "memory_limit": pages * TENSORS * page,
        "low_watermark": 0.0,
    }
    return KVCache(KVCacheConfig(**{**values, **changes}), context)
