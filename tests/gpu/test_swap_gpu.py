# SPDX-License-Identifier: MIT
"""Swapped requests and prefixes are copied by a kernel, or by libvmem if the kernel fails.

Needs a CUDA device, torch and Triton; skipped otherwise.
"""

from __future__ import annotations

from typing import Any

import pytest
from gpu_helpers import LAYERS, ROWS, TENSORS, contexts, make, needs_gpu

from pyvmem import Context, KVCache
from pyvmem.memory import host_copies
from pyvmem.memory.host_copies import StreamCopies

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

pytestmark = needs_gpu()
context = contexts()


def rows(cache: KVCache, reqid: int, length: int) -> list[Any]:
    """Copies a request's rows with a kernel, because CUDA's copy functions reject the addresses."""
    every = [one(layer) for layer in range(LAYERS) for one in (cache.k, cache.v)]
    return [one[reqid, :length] + 0 for one in every]


def scattered(cache: KVCache, length: int) -> None:
    """Grows two requests alternately, so that neither has contiguous pages."""
    assert (cache.alloc_reqid(), cache.alloc_reqid()) == (0, 1)
    for have in range(1, length + 1):
        assert cache.step([have, have]) == 0
    for reqid in (0, 1):
        for layer in range(LAYERS):
            cache.k(layer)[reqid, :length].random_(1, 1 << 40)
            cache.v(layer)[reqid, :length].random_(1, 1 << 40)


WAYS = ["kernel", "no memory for the pieces", "library"]


def watch(monkeypatch: pytest.MonkeyPatch, way: str) -> list[int]:
    """Makes copies go the given `way`; returns a list that collects each launch's size in bytes."""
    launched = []
    launch = StreamCopies._launch

    def watched(self: StreamCopies, pieces: Any, align: int) -> Any:
        launched.append(pieces.nbytes)
        if way != "kernel":
            raise RuntimeError("CUDA out of memory")
        return launch(self, pieces, align)

    monkeypatch.setattr(StreamCopies, "_launch", watched)
    if way == "library":
        monkeypatch.setattr(host_copies, "copy_now", lambda *_: False)
    return launched


@pytest.mark.parametrize("length", [1, ROWS, 5 * ROWS + 3])
@pytest.mark.parametrize("way", WAYS)
def test_rows_come_back(
    context: Context, monkeypatch: pytest.MonkeyPatch, length: int, way: str
) -> None:
    launched = watch(monkeypatch, way)
    with make(context) as cache:
        scattered(cache, length)
        wanted = [rows(cache, reqid, length) for reqid in (0, 1)]
        swapped = cache.swap_out(0)
        assert cache.swap_in(swapped) == 0
        torch.cuda.synchronize()
        for reqid in (0, 1):
            found = rows(cache, reqid, length)
            assert all(map(torch.equal, found, wanted[reqid]))
        assert launched == ([] if way == "library" else [swapped.nbytes] * 2)


@pytest.mark.parametrize("way", WAYS)
def test_a_prefix_comes_back(context: Context, monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    launched, units, ids = watch(monkeypatch, way), 5, list(range(5 * ROWS))
    nbytes = units * TENSORS * context.info.granule
    with make(context, host_prefixes=nbytes) as cache:
        scattered(cache, len(ids) + 3)
        wanted = [rows(cache, reqid, len(ids)) for reqid in (0, 1)]
        cache.free_reqid(0, tokens=ids)
        cache.trim(prefixes="host", compact=False)
        assert cache.stats().prefix_pages == 0
        assert cache.stats().prefix_host_bytes == nbytes
        assert cache.alloc_prefix([*ids, 7]) == (0, len(ids))
        torch.cuda.synchronize()
        for reqid in (0, 1):
            found = rows(cache, reqid, len(ids))
            assert all(map(torch.equal, found, wanted[reqid]))
        assert cache.stats().prefix_loaded_bytes == nbytes
        assert launched == ([] if way == "library" else [nbytes] * 2)
        cache.check_integrity()
