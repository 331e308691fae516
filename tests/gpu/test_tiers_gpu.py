# SPDX-License-Identifier: MIT
"""A request's pages move to another GPU, to the host and back, and stay readable.

Needs two CUDA devices with peer access, torch, and a back end (cuda, stock) that passes
its probe.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from pyvmem import Caps, Context, KVCache, KVCacheConfig

torch = pytest.importorskip("torch")
sys.path.append(str(Path(__file__).parents[1] / "python"))
from gpu_helpers import BACKENDS, needs_gpu  # noqa: E402
from share_helpers import grow, start, whole  # noqa: E402

pytestmark = needs_gpu(2)


@pytest.fixture(params=BACKENDS)
def cache(request: pytest.FixtureRequest) -> Iterator[KVCache]:
    with Context(request.param, devices=[0, 1]) as context:
        if Caps.PEER not in context.info.caps:
            pytest.skip("the devices do not reach each other")
        config = KVCacheConfig(
            num_layers=2, num_kv_heads=8, head_dim=128, max_batch=4, max_seq_len=1 << 14
        )
        with KVCache(config, context) as made:
            yield made
        context.check()


def checksum(rows: torch.Tensor) -> int:
    """Returns the sum of the rows' elements as 16-bit integers, computed by a torch kernel."""
    return int(rows.view(torch.int16).sum())


@pytest.mark.parametrize("wait", [True, False])
def test_to_a_peer_to_the_host_and_back(cache: KVCache, wait: bool) -> None:
    rows = 6000
    reqid = start(cache, rows)
    tensor = cache.k(1)
    address = tensor.data_ptr()
    wanted = checksum(tensor[reqid, :rows])
    there = torch.cuda.mem_get_info(1)[0]
    for location, device in (("peer", 1), ("host", None), ("device", None), ("peer", 1)):
        stream = torch.cuda.current_stream()
        moved = cache.move(reqid, location, device, stream=stream, wait=wait)
        assert moved.shared == 0
        while cache.snapshot()[reqid].moving_pages:
            lengths = [0] * 4
            lengths[reqid] = rows
            assert cache.step(lengths, stream) == 0
        stats = cache.stats()
        assert bool(stats.peer_pages) == (location == "peer")
        assert bool(stats.host_pages) == (location == "host")
        assert cache.k(1).data_ptr() == address
        assert checksum(tensor[reqid, :rows]) == wanted
        assert whole(cache, reqid, rows)
        if location == "peer":
            assert torch.cuda.mem_get_info(1)[0] < there
        cache.check_integrity()
    grow(cache, reqid, rows, rows + 100)
    child = cache.fork(reqid)
    assert child is not None
    assert whole(cache, child, rows + 100)
    cache.free_reqid(reqid)
    cache.free_reqid(child)
    del tensor
