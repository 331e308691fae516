# SPDX-License-Identifier: MIT
"""A pytest plug-in that runs vLLM's own tests on the elastic pool.

    VLLM_TESTS_POOL=backed pytest -p vllm_tests tests/v1/core/test_prefix_caching.py

The schedulers, KV-cache managers and block pools are vLLM's, with our records and a rank that maps
nothing. Blocks are allocated in vLLM's order, not from the fullest pages first, because the tests
expect specific block ids. With ``backed``, all blocks have memory from the start, so all results
must be the same. With ``bare``, only the null block has memory and other blocks are backed when
they are allocated, so vLLM's queue of free blocks is shorter than the tests expect. Without the
variable, the plug-in does nothing.
`scripts/vllm_tests.py` fetches the tests and compares their results with stock vLLM's.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from itertools import islice
from types import SimpleNamespace
from typing import Any

from pool_model import RankModel

from pyvmem.elastic.geometry import Geometry

PAGE = 64 << 10  # bytes per block in a tensor


def pytest_configure() -> None:
    """Replaces the classes that the tests create, before the tests import them."""
    mode = os.environ.get("VLLM_TESTS_POOL", "")
    if mode:
        os.environ["VMEM_LEDGER"] = "off"
        _Pools(mode == "backed").install()


def _take_in_vllms_order(elastic: Any, count: int) -> None:
    elastic.prepare(count)
    head = (block.block_id for block in islice(elastic._free(), count))
    elastic.idle.remove([one for one in head if one in elastic.idle])


class _Pools:
    """Puts the elastic pool under new schedulers, KV-cache managers and block pools.

    If one of these creates another, only the outermost gets an elastic pool.
    """

    def __init__(self, backed: bool) -> None:
        self._backed = backed
        self._inside = False

    def install(self) -> None:
        from vllm.v1.core import block_pool, kv_cache_manager
        from vllm.v1.core.sched import async_scheduler, scheduler

        from pyvmem.vllm import engine
        from pyvmem.vllm import scheduler as ours

        self._prepare(engine)
        for one in (ours.ElasticScheduler, ours.ElasticAsyncScheduler):
            self._after(one, lambda scheduler: self._begin(scheduler.elastic))
        self._after(kv_cache_manager.KVCacheManager, self._manager)
        self._after(block_pool.BlockPool, self._pool)
        scheduler.Scheduler = ours.ElasticScheduler
        async_scheduler.AsyncScheduler = ours.ElasticAsyncScheduler

    def _prepare(self, engine: Any) -> None:
        """Replaces the parts of an `ElasticEngine` that need processes, a thread or a model."""
        made = engine.ElasticEngine.__init__

        @functools.wraps(made)
        def __init__(self: Any, config: Any, kv: Any, pool: Any, connector: Any = None) -> None:
            blocks = pool.num_gpu_blocks
            rank = RankModel(Geometry.of(blocks, PAGE, [blocks * PAGE]))
            rank.launched = 1 << 62  # no worker runs the steps
            engine.connect = lambda *_: [rank]
            ours = hasattr(connector, "connector_scheduler")  # the pool rejects other connectors
            made(self, config, kv, pool, connector if ours else None)

        engine.ElasticEngine.__init__ = __init__
        engine.ElasticEngine.take = _take_in_vllms_order
        engine.ElasticEngine.start = lambda self: None
        engine.ElasticEngine._least = staticmethod(lambda *_: 0)

    def _after(self, owner: type, then: Callable[[Any], None]) -> None:
        """Calls `then` with each new `owner`, unless another watched object is creating it."""
        made = owner.__init__  # type: ignore[misc]

        @functools.wraps(made)
        def __init__(one: Any, *args: Any, **kwargs: Any) -> None:
            inside, self._inside = self._inside, True
            try:
                made(one, *args, **kwargs)
                if not inside:
                    then(one)
            finally:
                self._inside = inside

        owner.__init__ = __init__  # type: ignore[misc]

    def _begin(self, elastic: Any) -> Any:
        if self._backed:
            elastic.prepare(elastic.pool.num_gpu_blocks - 1)
        return elastic

    def _engine(self, kv_cache_config: Any, pool: Any) -> Any:
        from pyvmem.vllm.engine import ElasticEngine
        from pyvmem.vllm.scheduler import _exclude_unbacked_blocks

        elastic = ElasticEngine(None, kv_cache_config, pool)
        _exclude_unbacked_blocks(pool, elastic)
        return self._begin(elastic)

    def _pool(self, pool: Any) -> None:
        elastic = self._engine(SimpleNamespace(kv_cache_groups=[]), pool)
        get = pool.get_new_blocks

        def get_new_blocks(num_blocks: int) -> Any:
            elastic.take(num_blocks)
            return get(num_blocks)

        pool.get_new_blocks = get_new_blocks

    def _manager(self, manager: Any) -> None:
        """Adds the pool to a manager that has no scheduler and watches each of its steps."""
        from pyvmem.vllm.demand import Demand

        config = manager.kv_cache_config
        elastic = self._engine(config, manager.block_pool)
        scheduler = SimpleNamespace(
            kv_cache_manager=manager,
            vllm_config=SimpleNamespace(speculative_config=None),
            kv_cache_config=config,
            waiting=[],
            running=[],
            max_num_scheduled_tokens=1 << 20,
            max_num_running_reqs=1 << 10,
        )
        Demand(scheduler, elastic)._watch()
