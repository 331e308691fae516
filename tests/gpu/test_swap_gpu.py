# SPDX-License-Identifier: MIT
"""Description: swapped requests are copied by the kernel of host copies, and by libvmem without it.

Needs a CUDA device, torch and Triton; skipped otherwise.
"""

from __future__ import annotations

from typing import Any

import pytest
from gpu_helpers import LAYERS, ROWS, contexts, make, needs_gpu

from pyvmem import Context, KVCache
from pyvmem.memory import host_copies
from pyvmem.memory.host_copies import StreamCopies

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

pytestmark = needs_gpu()
context = contexts()


def rows(cache: KVCache, reqid: int, length: int) -> list[Any]:
    """Copies of all tensors by a kernel: CUDA's own copies refuse these addresses."""
    every = [one(layer) for layer in range(LAYERS) for one in (cache.k, cache.v)]
    return [one[reqid, :length] + 0 for one in every]


def scattered(cache: KVCache, length: int) -> None:
    """Two requests that grew in turns: the pages of neither are contiguous."""
    assert (cache.alloc_reqid(), cache.alloc_reqid()) == (0, 1)
    for have in range(1, length + 1):
        assert cache.step([have, have]) == 0
    for reqid in (0, 1):
        for layer in range(LAYERS):
            cache.k(layer)[reqid, :length].random_(1, 1 << 40)
            cache.v(layer)[reqid, :length].random_(1, 1 << 40)


@pytest.mark.parametrize("length", [1, ROWS, 5 * ROWS + 3])
@pytest.mark.parametrize("way", ["kernel", "no memory for the pieces", "library"])
def test_rows_come_back(
    context: Context, monkeypatch: pytest.MonkeyPatch, length: int, way: str
) -> None:
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
