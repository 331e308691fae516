# SPDX-License-Identifier: MIT
"""The vAttention module: shapes, return values, and use over an engine's lifetime."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from conftest import open_context

import pyvmem
import pyvmem.compat.vattention as vattention
from pyvmem import BadHandle, Busy, InvalidArgument, OutOfMemory
from pyvmem.compat import _manager
from pyvmem.compat.vattention import OutOfKVBlocks

pytestmark = pytest.mark.needs_tensors

LAYERS, HEADS, DIM, BATCH = 3, 2, 64, 4
DTYPE = torch.float16
ROW = HEADS * DIM * 2
PAGES = 6  # pages per tensor for a full-length request


@pytest.fixture
def page(backend: str) -> Iterator[int]:
    """Yields a page size of the back end; resets the module before and after."""
    with pyvmem.Context(backend, granule=4096 if backend == "host" else 0) as context:
        size = context.info.granule
    vattention.configure(backend)
    yield size
    vattention.cleanup()
    vattention.set_deferred_reclamation(True)
    vattention.set_verbose(False)
    vattention.configure(None)


def init(page: int, megacache: bool = False, rows: int = 0, **changes: Any) -> list[torch.Tensor]:
    values: dict[str, Any] = {"layers": LAYERS, "batch": BATCH, **changes}
    return vattention.init_kvcache(
        values["layers"],
        HEADS,
        DIM,
        values["batch"],
        rows or PAGES * page // (ROW * (LAYERS if megacache else 1)),
        0,
        DTYPE,
        page,
        megacache,
    )


def held() -> int:
    assert vattention._manager is not None
    stats = vattention._manager.cache.stats()
    return stats.total_pages - stats.free_pages


# ---- behavior that the artifact documents --------------------------------------------------------


def test_k_of_all_layers_come_before_v_of_all_layers(page: int) -> None:
    tensors = init(page)
    rows = PAGES * page // ROW
    assert len(tensors) == 2 * LAYERS
    for tensor in tensors:
        assert tensor.shape == (BATCH, rows, HEADS, DIM)
        assert tensor.stride() == (rows * HEADS * DIM, HEADS * DIM, DIM, 1)
        assert tensor.is_contiguous()
        assert tensor.dtype == DTYPE
    assert len({tensor.data_ptr() for tensor in tensors}) == 2 * LAYERS
    assert vattention.reserve_physical_pages(2 * LAYERS * page) == 2 * LAYERS
    assert vattention.alloc_new_batch_idx(1) == 0
    assert vattention._manager is not None
    cache = vattention._manager.cache
    assert [tensor.data_ptr() for tensor in tensors] == [
        view(layer).data_ptr() for view in (cache.k, cache.v) for layer in range(LAYERS)
    ]


@pytest.mark.parametrize("megacache", [False, True])
def test_tensors_are_contiguous_for_any_request_size(page: int, megacache: bool) -> None:
    """A slot is three pages short of 48 MiB; if slots were not packed, they would start at
    multiples of 48 MiB.
    """
    row = ROW * (LAYERS if megacache else 1)
    rows = ((16 << 20) // page * 3 - 3) * page // row  # three pages hold whole rows in both modes
    assert rows * row % page == 0
    for tensor in init(page, megacache, rows):
        assert tensor.is_contiguous()


def test_rows_that_end_within_a_page_need_a_gap(page: int) -> None:
    k, *_ = init(page, rows=page // ROW + 1)
    assert k.stride() == (2 * page // 2, HEADS * DIM, DIM, 1)


@pytest.mark.parametrize("layers", [1, LAYERS])
def test_a_megacache_is_two_tensors_of_five_dimensions(page: int, layers: int) -> None:
    rows = 4 * page // ROW
    k, v = init(page, megacache=True, rows=rows, layers=layers)
    assert k.shape == v.shape == (BATCH, rows, layers, HEADS, DIM)
    assert k.stride()[1:] == (layers * HEADS * DIM, HEADS * DIM, DIM, 1)
    assert k[:, :, 0].shape == (BATCH, rows, HEADS, DIM)
    assert vattention.reserve_physical_pages(2 * layers * 5 * page) == 2 * layers * 5
    assert vattention.num_free_kvblocks() == layers * 5  # a block is one page of K and one of V


def test_physical_pages_are_whole_blocks_and_grow_alone(page: int) -> None:
    init(page)
    unit = 2 * LAYERS * page
    assert vattention.num_free_kvblocks() == 0
    with pytest.raises(InvalidArgument, match=rf"reserve_physical_pages\({unit - 1}\)"):
        vattention.reserve_physical_pages(unit - 1)
    assert vattention.reserve_physical_pages(3 * unit + unit - 1) == 3 * 2 * LAYERS
    assert vattention.num_free_kvblocks() == 3
    assert vattention.reserve_physical_pages(unit) == 3 * 2 * LAYERS
    assert vattention.reserve_physical_pages(5 * unit) == 5 * 2 * LAYERS
    assert vattention.num_free_kvblocks() == 5
    assert vattention._manager is not None
    assert vattention._manager.cache.context.stats().slab_bytes >= 5 * unit


def test_return_values_and_free_blocks(page: int) -> None:
    init(page)
    vattention.reserve_physical_pages(10 * 2 * LAYERS * page)
    rows = page // ROW
    assert vattention.alloc_new_batch_idx(rows + 1) == 0
    # two blocks are reserved for the request's length, but not mapped yet
    assert vattention.num_free_kvblocks() == 8
    assert held() == 0
    assert vattention.step([rows + 1, 0, 0, 0], False) is None  # type: ignore[func-returns-value]
    assert held() == 2 * 2 * LAYERS
    assert vattention.step_async([2 * rows, 0, 0, 0]) is None  # type: ignore[func-returns-value]
    assert held() == 3 * 2 * LAYERS  # includes the next token's page
    assert vattention.num_free_kvblocks() == 8  # that page counts as free until it is needed
    assert [vattention.alloc_new_batch_idx(1) for _ in range(4)] == [1, 2, 3, -1]
    assert vattention.free_batch_idx(0) is None  # type: ignore[func-returns-value]
    assert vattention.num_free_kvblocks() == 7
    assert held() == 3 * 2 * LAYERS


def test_the_best_fitting_id_is_allocated(page: int) -> None:
    """The artifact instead sticks with the first free id if that id has too few pages."""
    init(page)
    vattention.reserve_physical_pages(20 * 2 * LAYERS * page)
    rows = page // ROW
    vattention.step([rows, 5 * rows, 3 * rows, 2 * rows], False)
    vattention.step([0, 0, 0, 0], False)
    assert vattention.alloc_new_batch_idx(3 * rows) == 2
    assert vattention.alloc_new_batch_idx(3 * rows) == 1
    assert vattention.alloc_new_batch_idx(rows) == 0


def test_ids_need_not_be_allocated_and_zero_frees_them(page: int) -> None:
    k, *_ = init(page)
    vattention.reserve_physical_pages(4 * 2 * LAYERS * page)
    rows = page // ROW
    vattention.step([0, 0, rows, 0], True)
    k[2, :rows] = 1
    assert vattention.alloc_new_batch_idx(1) == 0
    vattention.step([0, 0, rows, 0], True)  # id 0 is free again
    assert sorted(vattention.alloc_new_batch_idx(1) for _ in range(3)) == [0, 1, 3]
    vattention.step([1, 0, 0, 0], True)
    assert vattention._manager is not None
    vattention._manager.cache._groups[0].reclaimer.finish_all()
    assert held() == 2 * LAYERS
    vattention.free_batch_idx(0)
    vattention.free_batch_idx(0)
    vattention._manager.cache.check_integrity()


@pytest.mark.parametrize("deferred", [True, False])
def test_deferred_reclamation_keeps_idle_pages(page: int, deferred: bool) -> None:
    init(page)
    vattention.set_deferred_reclamation(deferred)
    vattention.reserve_physical_pages(24 * 2 * LAYERS * page)
    rows = page // ROW
    vattention.step_async([1, 3 * rows, 2 * rows, rows])
    assert vattention._manager is not None
    group = vattention._manager.cache._groups[0]
    group.pager.settle()
    vattention.step_async([1, 0, 0, 0])
    group.reclaimer.finish_all()
    idle = [slot.mapped_pages for slot in vattention._manager.cache.snapshot()[1:]]
    # freed pages stay mapped for the next request if reclamation is deferred
    assert idle == ([4, 3, 2] if deferred else [4, 0, 0])


# ---- lifetime of a serving engine ----------------------------------------------------------------


class CacheEngine:
    """The state that a serving engine keeps: its sequences' ids and lengths."""

    def __init__(self, page: int, blocks: int, background: bool, megacache: bool) -> None:
        self.background = background
        tensors = init(page, megacache)
        if megacache:
            k, v = tensors
            self.layers = [(k[:, :, layer], v[:, :, layer]) for layer in range(LAYERS)]
        else:
            self.layers = list(zip(tensors[:LAYERS], tensors[LAYERS:], strict=True))
        self.blocks = blocks
        pages = vattention.reserve_physical_pages(blocks * 2 * page * (1 if megacache else LAYERS))
        assert pages == blocks * 2 * (1 if megacache else LAYERS)
        self.lengths = [0] * BATCH
        self.ids: dict[int, int] = {}

    def id_of(self, sequence: int, length: int) -> int:
        if sequence not in self.ids:
            index = vattention.alloc_new_batch_idx(length)
            assert index != -1
            self.ids[sequence] = index
        return self.ids[sequence]

    def step(self, sequences: dict[int, int]) -> None:
        for sequence, length in sequences.items():
            self.lengths[self.id_of(sequence, length)] = length
        if self.background:
            vattention.step_async(self.lengths)
        else:
            vattention.step(self.lengths, True)

    def free(self, sequence: int) -> None:
        index = self.ids.pop(sequence)
        vattention.free_batch_idx(index)
        self.lengths[index] = 0


@pytest.mark.parametrize("megacache", [False, True])
@pytest.mark.parametrize("background", [False, True])
def test_an_engine_with_preemption_keeps_requests_separate(
    page: int, background: bool, megacache: bool
) -> None:
    """Runs random requests with too little memory, and compares every row on every step."""
    dice = random.Random(3)
    engine = CacheEngine(page, 12, background, megacache)
    longest = engine.layers[0][0].shape[1]
    running: dict[int, int] = {}
    written: dict[int, int] = {}
    names, preempted = iter(range(1, 10**6)), 0
    for _ in range(60):
        if len(running) < BATCH and dice.random() < 0.5:
            running[next(names)] = dice.randint(1, longest // 2)
        while True:
            try:
                engine.step(running)
                break
            except OutOfKVBlocks:
                victim = max(running, key=lambda one: running[one])
                engine.free(victim)
                del running[victim]
                written.pop(victim, None)
                preempted += 1
        for sequence, length in running.items():
            index, done = engine.ids[sequence], written.get(sequence, 0)
            for layer, (k, v) in enumerate(engine.layers):
                assert not k[index, done:length].any()
                k[index, done:length] = sequence + layer
                v[index, done:length] = -sequence - layer
            written[sequence] = length
        for sequence, length in running.items():
            index = engine.ids[sequence]
            for layer, (k, v) in enumerate(engine.layers):
                assert bool((k[index, :length] == sequence + layer).all())
                assert bool((v[index, :length] == -sequence - layer).all())
        for sequence in list(running):
            running[sequence] += dice.randint(1, longest // 16)
            if running[sequence] > longest or dice.random() < 0.05:
                engine.free(sequence)
                del running[sequence], written[sequence]
        assert 0 <= vattention.num_free_kvblocks() <= engine.blocks
    assert preempted > 0
    assert vattention._manager is not None
    vattention._manager.cache.check_integrity()


# ---- cleanup, errors, state pictures
# -------------------------------------------------------------------


def test_cleanup_frees_memory_under_live_tensors_and_init_works_again(page: int) -> None:
    for _ in range(3):
        tensors = init(page)
        vattention.reserve_physical_pages(4 * 2 * LAYERS * page)
        vattention.step([1, page // ROW + 1, 0, 0], False)
        assert vattention._manager is not None
        context = vattention._manager.cache.context
        vattention.cleanup()
        assert context.stats().used_bytes == 0
        assert context.stats().slab_bytes == 0
        assert _manager._retired
        with pytest.raises(BadHandle, match="call init_kvcache first"):
            vattention.num_free_kvblocks()
        del tensors
        vattention.cleanup()
        assert not _manager._retired
        assert not context.is_open


def test_errors_name_the_value_and_change_nothing(page: int) -> None:
    with pytest.raises(BadHandle, match="call init_kvcache first"):
        vattention.step([0] * BATCH, True)
    for wrong in (0, 3):
        with pytest.raises(InvalidArgument, match=r"page_size|granule"):
            init(wrong, rows=8)
    init(page)
    rows = PAGES * page // ROW
    with pytest.raises(Busy, match="call cleanup first"):
        init(page)
    with pytest.raises(OutOfKVBlocks, match="call reserve_physical_pages"):
        vattention.step([1, 0, 0, 0], False)
    vattention.reserve_physical_pages(2 * 2 * LAYERS * page)
    with pytest.raises(InvalidArgument, match="seq_lens has 2 entries for 4 ids"):
        vattention.step([1, 1], False)
    with pytest.raises(InvalidArgument, match=rf"seq_lens\[3\] is {rows + 1}"):
        vattention.step_async([1, 0, 0, rows + 1])
    with pytest.raises(InvalidArgument, match="seq_len"):
        vattention.alloc_new_batch_idx(rows + 1)
    with pytest.raises(InvalidArgument, match="ids are 0 to 3"):
        vattention.free_batch_idx(BATCH)
    assert held() == 0
    vattention.step([page // ROW, 0, 0, 0], False)
    for kind in (OutOfMemory, RuntimeError):
        with pytest.raises(kind, match="3 KV blocks are needed, but the cache has 2; preempt"):
            vattention.step([page // ROW, page // ROW + 1, 0, 0], False)
    assert held() == 2 * LAYERS
    assert vattention.num_free_kvblocks() == 1
    assert sorted(vattention.alloc_new_batch_idx(1) for _ in range(3)) == [1, 2, 3]
    with pytest.raises(Busy, match=r"map_common_pages\(16\): id 0 is taken"):
        vattention.map_common_pages(16)
    assert vattention._manager is not None
    vattention._manager.cache.check_integrity()


def test_pictures_are_printed_when_verbose(page: int, capsys: pytest.CaptureFixture[str]) -> None:
    init(page)
    vattention.reserve_physical_pages(4 * 2 * LAYERS * page)
    vattention.step([5, 0, 0, 0], False)
    vattention.show_kvcache_config()
    vattention.show_allocator_state()
    assert capsys.readouterr().out == ""
    vattention.set_verbose(True)
    vattention.show_kvcache_config()
    assert f"layers: {LAYERS}, KV heads: {HEADS}, head size: {DIM}" in capsys.readouterr().out
    vattention.show_allocator_state()
    out = capsys.readouterr().out.splitlines()
    assert out[0] == "free: 3 KV blocks"
    assert out[2:] == ["0: 5, 1, 1", "1: 0, 0, 0", "2: 0, 0, 0", "3: 0, 0, 0"]


def test_install_replaces_the_imported_module(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "vattention", raising=False)
    assert vattention.install() is vattention
    assert vattention.install() is vattention
    import vattention as imported  # type: ignore[import-not-found]

    assert imported is vattention
    monkeypatch.setitem(sys.modules, "vattention", sys)
    with pytest.raises(Busy, match="vattention is already imported"):
        vattention.install()


def test_a_program_without_cleanup_exits_cleanly(backend: str) -> None:
    with open_context(backend) as context:
        if 65536 not in context.info.page_sizes:
            pytest.skip("no pages of 64 KiB")
    program = (
        "import sys, torch, pyvmem.compat.vattention as v\n"
        f"v.configure({backend!r})\n"
        "t = v.init_kvcache(2, 2, 64, 2, 4096, 0, torch.float16, 65536, False)\n"
        "v.reserve_physical_pages(1 << 20); v.step([300, 0], True); t[0][0, :300] = 1\n"
        "print(v.num_free_kvblocks())\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "2", "")


# ---- shrinking lengths, and the demos' call ---------------------------------------------------


def test_a_smaller_length_frees_rows_and_blocks(page: int) -> None:
    rows = page // ROW
    k = init(page)[0]
    vattention.reserve_physical_pages(2 * LAYERS * 4 * page)
    vattention.step([4 * rows, 0, 0, 0], False)
    k[0, : 4 * rows] = 3
    assert vattention.num_free_kvblocks() == 0
    vattention.step([rows + 1, 0, 0, 0], False)
    assert vattention.num_free_kvblocks() == 2
    vattention.step([rows + 1, 2 * rows, 0, 0], False)
    assert bool((k[0, : rows + 1] == 3).all())
    assert bool((k[1, : 2 * rows] == 0).all())
    with pytest.raises(OutOfKVBlocks):
        vattention.step([3 * rows, 2 * rows, 0, 0], False)
    vattention.step([0, 2 * rows, 0, 0], False)
    assert vattention.num_free_kvblocks() == 2


@pytest.mark.parametrize(("last", "size"), [(False, 2 << 20), (True, 64 << 10), (1 << 16, 1 << 16)])
def test_the_demos_call_with_eight_arguments(backend: str, last: int, size: int) -> None:
    """The last argument is either a flag for the artifact's UVM driver or a page size."""
    with pyvmem.Context(backend) as context:
        if size not in context.info.page_sizes:
            pytest.skip(f"{backend} has no pages of {size} bytes")
    vattention.configure(backend)
    try:
        tensors = vattention.init_kvcache(2, HEADS, DIM, 2, 2 * size // ROW, 0, DTYPE, last)
        assert len(tensors) == 4
        assert vattention.reserve_physical_pages(8 * size) == 8
        vattention.step([1, 0], False)
        tensors[0][0, :1].fill_(1.0)
        assert vattention._manager is not None
        assert vattention._manager.cache.layout.page_size == size
    finally:
        del tensors
        vattention.cleanup()
        vattention.configure(None)


@pytest.mark.parametrize("common", [False, True])
def test_pages_mapped_ahead_count_as_free(page: int, common: bool) -> None:
    """`num_free_kvblocks` counts these pages as free, and `step` may use them."""
    init(page)
    per_block = page // ROW
    vattention.reserve_physical_pages(5 * 2 * LAYERS * page)
    if common:
        vattention.map_common_pages(per_block)
    assert vattention.alloc_new_batch_idx(per_block) == 0
    assert vattention.alloc_new_batch_idx(per_block) == 1
    vattention.step([per_block, per_block, 0, 0], False)
    vattention.step_async([per_block, per_block, 0, 0])
    free = vattention.num_free_kvblocks()
    assert free == 5 - (1 if common else 2)
    vattention.step([per_block, (free + 1) * per_block, 0, 0], False)
    assert vattention.num_free_kvblocks() == 0
    with pytest.raises(OutOfKVBlocks):
        vattention.step([per_block + 1, (free + 1) * per_block, 0, 0], False)
