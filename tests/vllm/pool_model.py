# SPDX-License-Identifier: MIT
"""vLLM's scheduler and block pool on the elastic pool, with a simulated model and clock.

The rank maps nothing. It records which pages are mapped and, for each block, a digest of the tokens
whose keys and values the block would contain. A step fails if it reads a block without memory, or a
block whose contents are not its request's tokens. Time advances by steps, so all counts are
reproducible.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from pyvmem.elastic.geometry import Geometry, Run

__all__ = ["BLOCK", "Open", "Pool", "RankModel", "open_pool", "opened"]

BLOCK = 16  # tokens per block
STEP = 0.01  # seconds per step
_ENV = {"VMEM_LEDGER": "off", "VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1"}
TICK = 5  # steps per keeper round


class Clock:
    """Replaces the `time` module with a clock that the tests advance."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class RankModel:
    """A model of a rank's memory, which implements `pyvmem.vllm.channel.Rank`."""

    machine = ""

    def __init__(self, geometry: Geometry) -> None:
        self._geometry = geometry
        self.mapped: set[tuple[int, int]] = set()
        self.contents: dict[int, int] = {}
        self.parked: list[tuple[int, list[Run], int]] = []
        self.finished: list[tuple[int, str]] = []
        self.launched = 0
        self.asked: list[tuple[str, bool]] = []  # each operation, and whether steps wait for it
        self.steps_wait: Callable[[], bool] = lambda: False
        self.maps = self.unmaps = self.copies = self.calls = 0
        self.grow([Run(k, geometry.pages(k, 0)[0], len(geometry.pages(k, 0)))
                   for k in range(len(geometry.classes))])  # fmt: skip

    def geometry(self) -> Geometry:
        return self._geometry

    def device(self) -> str:
        return "host"

    def total(self) -> int:
        return 1 << 40

    def fingerprint(self) -> str:
        return str(sorted(self.mapped))

    def close(self) -> None:
        pass

    def ask(self, name: str, argument: Any = None) -> Callable[[], Any]:
        self.asked.append((name, self.steps_wait()))
        result = getattr(self, name)(*(() if argument is None else (argument,)))
        return lambda: result

    @staticmethod
    def _pages(runs: list[Run]) -> set[tuple[int, int]]:
        return {(kind, first + i) for kind, first, length in runs for i in range(length)}

    def grow(self, runs: list[Run]) -> tuple[None, None]:
        new = self._pages(runs)
        assert not new & self.mapped, "mapped twice"
        self.mapped |= new
        self.maps += len(runs)
        return None, None

    def poll(self) -> tuple[list[tuple[int, str]], None, int, bool]:
        found, self.finished = self.finished, []
        return found, None, len(self.mapped), False

    def release(self, what: tuple[int, list[Run], int]) -> None:
        self.parked.append(tuple(what))
        self.unpark()

    def unpark(self) -> None:
        for one in [one for one in self.parked if one[2] <= self.launched]:
            number, runs, _ = one
            self.parked.remove(one)
            gone = self._pages(runs)
            assert gone <= self.mapped, "unmapped, but was not mapped"
            self.mapped -= gone
            self.unmaps += len(runs)
            self.finished.append((number, ""))
            for block in [b for b in self.contents if not self.has(b)]:
                del self.contents[block]

    def compact(self, _: Any) -> int:
        return 0

    def has(self, block: int) -> bool:
        kinds = range(len(self._geometry.classes))
        return all((k, p) in self.mapped for k in kinds for p in self._geometry.pages(k, block))

    def copy(self, copies: list[tuple[int, int]]) -> None:
        held = [self.contents.get(source) for source, _ in copies]
        for (source, place), what in zip(copies, held, strict=True):
            assert self.has(source), f"block {source} is read but has no memory"
            assert self.has(place), f"block {place} is written but has no memory"
            self.contents[place] = what  # type: ignore[assignment]
        self.copies += len(copies)

    def move(self, what: tuple[list[tuple[int, int]], int]) -> bool:
        copies, step = what
        if self.launched < step:
            return False
        self.calls += 1
        self.copy(copies)
        return True


class Pool:
    """A vLLM scheduler on the elastic pool, with a model that runs its steps."""

    def __init__(self, scheduler: Any, rank: RankModel, clock: Clock) -> None:
        self.scheduler, self.rank, self.clock = scheduler, rank, clock
        self.elastic = scheduler.elastic
        self.steps = 0
        rank.steps_wait = self.elastic.lock._is_owned
        self._digests: dict[str, list[int]] = {}
        self._made = 0

    def add(self, prompt: list[int], tokens: int) -> str:
        from vllm import SamplingParams
        from vllm.utils.hashing import sha256
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher
        from vllm.v1.request import Request

        self._made += 1
        name = str(self._made)
        sampling = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
        hasher = get_request_block_hasher(BLOCK, sha256)
        self.scheduler.add_request(Request(name, prompt, sampling, None, block_hasher=hasher))
        return name

    def _step_of(self, name: str, count: int) -> None:
        """Stands in for the model: reads a request's computed tokens and writes its new ones."""
        request = self.scheduler.requests[name]
        (ids,) = self.scheduler.kv_cache_manager.get_block_ids(name)
        end = request.num_computed_tokens
        begin = end - count
        tokens, rank = request.all_token_ids, self.rank
        digests = self._digests.setdefault(name, [])
        last = -(-end // BLOCK)
        if begin == 0 or not digests:
            digests.clear()
        first = begin // BLOCK if digests else 0
        del digests[first:]
        for index in range(first, last):
            held = tuple(tokens[index * BLOCK : min(end, (index + 1) * BLOCK)])
            digests.append(hash((digests[-1] if digests else 0, held)))
        known = begin // BLOCK  # the number of blocks that were full before this step
        look = range(known) if (self.steps + int(name)) % 8 == 0 or known != first else ()
        for index in look:
            found = rank.contents.get(ids[index])
            assert found == digests[index], f"block {ids[index]} does not hold {name}'s tokens"
        for index in range(known, last):
            assert rank.has(ids[index]), f"block {ids[index]} is written but has no memory"
            rank.contents[ids[index]] = digests[index]

    def step(self) -> None:
        """Runs an engine step, and a keeper round if one is due."""
        from vllm.v1.outputs import ModelRunnerOutput

        output = self.scheduler.schedule()
        rank, orders = self.rank, output.vmem
        for number, runs in orders.releases:
            rank.release((number, runs, orders.step - 1))
        rank.copy(orders.moves)
        names = list(output.num_scheduled_tokens)
        for name in names:
            self._step_of(name, output.num_scheduled_tokens[name])
        rank.launched = orders.step
        rank.unpark()
        sampled = []
        for name in names:
            request = self.scheduler.requests[name]
            done = request.num_computed_tokens >= request.num_tokens
            sampled.append([3 + hash((name, request.num_tokens)) % 500] if done else [])
        made = ModelRunnerOutput(names, {n: i for i, n in enumerate(names)}, sampled)
        self.scheduler.update_from_output(output, made)
        self.steps += 1
        self.clock.now += STEP
        if self.steps % TICK == 0:
            self.elastic.tick()
            assert self.elastic.backing.check() == []

    def run(self, load: Any) -> None:
        """Runs all requests of a load, up to `load.most` at a time."""
        todo = deque(zip(load.prompts, load.tokens, strict=True))
        while todo or self.scheduler.get_num_unfinished_requests():
            while todo and self.scheduler.get_num_unfinished_requests() < load.most:
                self.add(*todo.popleft())
            self.step()

    def rest(self, seconds: float = 3.0) -> None:
        """Advances the clock while no request runs."""
        for _ in range(round(seconds / STEP / TICK)):
            self.clock.now += STEP * TICK
            self.elastic.tick()
        assert self.elastic.backing.check() == []

    def live(self) -> int:
        """Returns the total size in bytes of the blocks with contents, including the null block."""
        return int(self.elastic._live_blocks() * self.elastic.backing.geometry.block_bytes)

    def mapped(self) -> int:
        """Returns how many bytes the rank has mapped, after checking that the records agree."""
        backing = self.elastic.backing
        assert len(self.rank.mapped) * backing.geometry.page_bytes(0) == backing.mapped_bytes
        return int(backing.mapped_bytes)


@contextmanager
def opened(
    monkeypatch: pytest.MonkeyPatch,
    folder: str,
    *,
    blocks: int,
    page: int,
    layers: int = 36,
    heads: int = 8,
    seqs: int = 96,
    batched: int = 2048,
    prefixes: bool = True,
    **env: str,
) -> Iterator[Pool]:
    """Opens a pool of `blocks` blocks of 16 tokens, with `heads` heads of 128 16-bit values."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import init_none_hash
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
    from vllm.v1.structured_output import StructuredOutputManager

    from pyvmem.vllm import engine as module
    from pyvmem.vllm.scheduler import ElasticScheduler

    init_none_hash(sha256)
    spec = FullAttentionSpec(
        block_size=BLOCK, num_kv_heads=heads, head_size=128, dtype=torch.bfloat16
    )
    size = spec.page_size_bytes
    rank = RankModel(Geometry.of(blocks, page, [blocks * size] * layers))
    clock = Clock()
    with monkeypatch.context() as patch:
        for name, value in {**_ENV, **env}.items():
            patch.setenv(name, value)
        patch.setattr(module, "connect", lambda *_: [rank])
        patch.setattr(module, "time", clock)
        patch.setattr(module.ElasticEngine, "start", lambda self: None)
        config = EngineArgs(
            model=folder,
            skip_tokenizer_init=True,
            dtype="float32",
            max_model_len=1024 + 512,
            max_num_seqs=seqs,
            max_num_batched_tokens=batched,
            enable_prefix_caching=prefixes,
            async_scheduling=False,
            kv_cache_memory_bytes=1 << 28,
        ).create_engine_config()
        config.cache_config.num_gpu_blocks = blocks
        names = [f"layer.{i}" for i in range(layers)]
        found = KVCacheConfig(blocks, [], [KVCacheGroupSpec(names, spec)])
        scheduler = ElasticScheduler(
            config, found, StructuredOutputManager(config), block_size=BLOCK
        )
        pool = Pool(scheduler, rank, clock)
        try:
            yield pool
        finally:
            scheduler.shutdown()


Open = Callable[..., Any]


@pytest.fixture
def open_pool(models: Callable[[str], str], monkeypatch: pytest.MonkeyPatch) -> Open:
    """Returns a context manager: ``with open_pool(blocks=2000, page=65536) as pool``."""

    def of(**options: Any) -> Any:
        return opened(monkeypatch, models("llama"), **options)

    return of
