# SPDX-License-Identifier: MIT
"""Attention over slots, compared with a plain softmax; kernel selection, poisoned
rows, invalid input.
"""

from __future__ import annotations

import itertools
import logging
import types
from dataclasses import replace
from typing import Any

import pytest
import torch
from attention_helpers import CASES, LAYERS, Case, filled, queries, reference

import pyvmem
from pyvmem import Caps, InvalidArgument
from pyvmem.attention import (
    KERNELS,
    Attention,
    OverRead,
    attention,
    choose,
    flash,
    flex,
    kernels,
    overread_rows,
    probe,
)
from pyvmem.attention.batch import Batch, Part
from pyvmem.attention.reads import BLOCK, EXACT, Blocks, Reads
from pyvmem.kvcache.config import PREFILL_TOKENS
from pyvmem.layouts.cost import Choice, cost
from pyvmem.layouts.shapes import shape_of
from pyvmem.layouts.workload import generate
from vmem_bench.capacity import systems

pytestmark = pytest.mark.needs_tensors

MIXED = CASES[-1]
NAMES = ("fa3", "fa3-paged", "fa2", "flashinfer", "flex", "sdpa")


@pytest.mark.parametrize("kernel", ["sdpa", "flex"])
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile:UserWarning")
def test_it_is_softmax_attention_and_reads_no_poison(host: pyvmem.Context, kernel: str) -> None:
    """Rows past each length are NaN; pages past those rows are not mapped."""
    for case, repeat in itertools.product(CASES, (1, 3)):
        with filled(host, case, group_size=repeat % 2 + 1) as cache:
            q = queries(cache, case, repeat)
            attend = Attention(cache, kernel)
            batch = attend.batch(case.reqids, case.q_lens, case.kv_lens)
            for layer in range(LAYERS):
                out = attend(q, layer, batch)
                assert out.shape == q.shape
                assert out.dtype == q.dtype
                close(out, reference(q, cache, layer, case))
            attend.close()


def close(out: torch.Tensor, want: torch.Tensor) -> None:
    torch.testing.assert_close(out.double().cpu(), want, atol=1e-5, rtol=1e-5)


def test_auto_agrees_with_the_reference_on_every_back_end(context: pyvmem.Context) -> None:
    """Checks on every back end that the kernel chosen by "auto" agrees with the reference."""
    with filled(context, MIXED, heads=1, width=64) as cache:
        q = queries(cache, MIXED, 4)
        out = attention(q, cache, 1, MIXED.reqids, MIXED.q_lens, MIXED.kv_lens)
        close(out, reference(q, cache, 1, MIXED))


def test_the_scale_and_rows_that_do_not_divide_a_page(host: pyvmem.Context) -> None:
    with filled(host, MIXED, heads=3, width=20) as cache:
        q = queries(cache, MIXED, 1)
        lens = (MIXED.reqids, MIXED.q_lens, MIXED.kv_lens)
        out = attention(q, cache, 0, *lens, scale=0.5)
        want = reference(q * (0.5 * 20**0.5), cache, 0, MIXED)
        close(out, want)


def test_write_puts_rows_where_they_belong(context: pyvmem.Context) -> None:
    with filled(context, MIXED) as cache:
        attend = Attention(cache)
        batch = attend.batch(MIXED.reqids, MIXED.q_lens, MIXED.kv_lens)
        before = [cache.k(1)[reqid].data_ptr() for reqid in MIXED.reqids]
        rows = torch.randn(batch.tokens, 2, 32).to(cache.k(0).device)
        olds = [cache.k(1)[r, : n - new].clone() for r, new, n in _requests(MIXED)]
        attend.write(1, rows, -rows, batch)
        start = 0
        for (reqid, new, length), old in zip(_requests(MIXED), olds, strict=True):
            assert torch.equal(cache.k(1)[reqid, : length - new], old)
            assert torch.equal(cache.k(1)[reqid, length - new : length], rows[start : start + new])
            assert torch.equal(cache.v(1)[reqid, length - new : length], -rows[start : start + new])
            start += new
        assert before == [cache.k(1)[reqid].data_ptr() for reqid in MIXED.reqids]
        attend.close()


def _requests(case: Case) -> list[tuple[int, int, int]]:
    return list(zip(case.reqids, case.q_lens, case.kv_lens, strict=True))


def test_a_batch_advances_in_its_own_tensors(context: pyvmem.Context) -> None:
    """Checks that an advanced batch equals a new one, and that invalid arguments change nothing."""
    with filled(context, MIXED) as cache:
        attend = Attention(cache)
        batch = attend.batch((5, 0), (1, 2), (9, 9))
        names = ("slots", "positions", "ranks", "index", "used", "starts")
        before = {name: getattr(batch, name).data_ptr() for name in names}
        assert len(batch.runs) == 2
        batch.advance((0, 1), (12, 2))
        wanted = attend.batch((0, 1), (1, 2), (12, 2))
        for name in names:
            assert getattr(batch, name).data_ptr() == before[name]
            assert torch.equal(getattr(batch, name), getattr(wanted, name))
        assert batch.runs == wanted.runs
        assert (batch.max_kv, batch.max_q, batch.tokens) == (12, 2, 3)
        for reqids, lens in (((0,), (12,)), ((0, 0), (12, 12)), ((0, 1), (12, 1 << 20))):
            with pytest.raises(InvalidArgument):
                batch.advance(reqids, lens)
            assert (batch.reqids, batch.kv_lens, batch.max_kv) == ([0, 1], [12, 2], 12)
            assert torch.equal(batch.used, wanted.used)
        attend.close()


def test_an_advanced_batch_gets_a_new_mask(host: pyvmem.Context) -> None:
    with filled(host, MIXED, max_seq_len=1024) as cache:
        attend = Attention(cache)
        batch = attend.batch((5, 0), (1, 2), (9, 60))
        first = flex._mask(batch, 0, 6, 384)
        assert flex._mask(batch, 0, 6, 384) is first, "the mask is the same for all layers"
        batch.advance((5, 0), (260, 64))
        wanted = flex._mask(attend.batch((5, 0), (1, 2), (260, 64)), 0, 6, 384)
        assert torch.equal(flex._mask(batch, 0, 6, 384).kv_num_blocks, wanted.kv_num_blocks)
        assert not torch.equal(first.kv_num_blocks, wanted.kv_num_blocks)
        attend.close()


@pytest.mark.parametrize(
    ("rows", "sharing", "forced"), [(1, 8, False), (32, 4, False), (33, 4, True)]
)
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile:UserWarning")
def test_a_chunk_too_large_for_torchs_decoding_kernel(
    host: pyvmem.Context, monkeypatch: pytest.MonkeyPatch, rows: int, sharing: int, forced: bool
) -> None:
    """Runs the GPU code path uncompiled; checks when torch is told to avoid its decoding kernel."""
    from torch.nn.attention.flex_attention import flex_attention

    given = []

    def call(*tensors: torch.Tensor, kernel_options: dict[str, Any], **more: Any) -> Any:
        given.append(kernel_options)
        return flex_attention(*tensors, **more)

    monkeypatch.setattr(flex, "_kernel", lambda: call)
    case = Case("chunk", (2,), (rows,), (130,))
    with filled(host, case, poison=False, overread_rows=191, overread_decode=True) as cache:
        q = queries(cache, case, sharing)
        attend = Attention(cache, "flex")
        batch = attend.batch(case.reqids, case.q_lens, case.kv_lens)
        out = flex._compiled(q, cache.k(1), cache.v(1), batch, q.shape[2] ** -0.5, 0)
        close(out, reference(q, cache, 1, case))
        attend.close()
    assert given == [{"FORCE_USE_FLEX_ATTENTION": True} if forced else {}]


def test_adjacent_requests_of_equal_length_share_one_call(host: pyvmem.Context) -> None:
    case = Case("runs", (0, 1, 2, 4, 5, 3), (1, 1, 1, 1, 2, 2), (9, 9, 9, 9, 9, 9))
    with filled(host, case) as cache:
        attend = Attention(cache)
        batch = attend.batch(case.reqids, case.q_lens, case.kv_lens)
        assert [(run.start, run.slot, run.count) for run in batch.runs] == [
            (0, 0, 3),
            (3, 4, 1),
            (4, 5, 1),
            (6, 3, 1),
        ]
        attend.close()


def test_the_chosen_kernel_is_logged_once_and_readable(
    host: pyvmem.Context, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "_said", set())
    with filled(host, MIXED) as cache, caplog.at_level(logging.INFO, "pyvmem.attention"):
        cpu = torch.device("cpu")
        assert choose(cache, cpu).name == choose(cache, cpu).name == "sdpa"
        assert [record.message for record in caplog.records] == [
            "attention by sdpa (fa3: it needs a GPU; fa3-paged: it needs a GPU; "
            "fa2: it needs a GPU; flashinfer: it needs a GPU)"
        ]
        assert choose(cache, cpu, "flex").name == "flex"
        assert len(caplog.records) == 2
        assert set(probe(cache, cpu)) == set(KERNELS) == set(NAMES)


def test_a_kernel_that_reads_tiles_needs_rows_past_the_length(
    host: pyvmem.Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checks only the rule that rejects the kernel; this needs no GPU."""
    one = KERNELS["fa3"]
    monkeypatch.setitem(KERNELS, "fa3", kernels._Kernel(lambda c, d: "", one.run, one.reads))
    cpu = torch.device("cpu")
    text = r"fa3 cannot be used.*overread_rows of 191.* 0$"
    with filled(host, MIXED) as cache, pytest.raises(InvalidArgument, match=text):
        choose(cache, cpu, "fa3")
    text = "fa3 cannot be used: it also reads whole tiles in decoding and needs overread_decode"
    with filled(host, MIXED, overread_rows=191) as cache:
        with pytest.raises(InvalidArgument, match=text):
            choose(cache, cpu, "fa3")
        assert not probe(cache, cpu)["fa3"], "it must be usable for prefills"
    with filled(host, MIXED, overread_rows=191, overread_decode=True) as cache:
        assert choose(cache, cpu, "fa3").name == "fa3"


def test_errors_name_the_bad_value(host: pyvmem.Context) -> None:
    with filled(host, MIXED) as cache:
        q = queries(cache, MIXED, 2)
        with pytest.raises(InvalidArgument, match=r"kernel must be one of auto, fa3.*, not 'fa9'"):
            Attention(cache, "fa9")
        with pytest.raises(InvalidArgument, match="kernel fa2 cannot be used: it needs a GPU"):
            Attention(cache, "fa2")
        attend = Attention(cache)
        for lens, text in (
            (([0], [1], []), "1 reqids, 1 q_lens, 0 kv_lens"),
            (([], [], []), "at least one"),
            (([0, 0], [1, 1], [2, 2]), "duplicate reqid"),
            (([6], [1], [1]), "reqid 6 is not between 0 and 5"),
            (([0], [0], [1]), "reqid 0: 0 new tokens of 1"),
            (([0], [3], [2]), "reqid 0: 3 new tokens of 2"),
            (([2], [1], [1]), "reqid 2: 1 tokens, but there are pages for 0; step"),
            (([5], [1], [500]), "reqid 5: 500 tokens, but there are pages for"),
        ):
            with pytest.raises(InvalidArgument, match=text):
                attend.batch(*lens)
        batch = attend.batch(MIXED.reqids, MIXED.q_lens, MIXED.kv_lens)
        for wrong in (q[1:], q[..., :16], q.double(), q[0]):
            with pytest.raises(InvalidArgument, match=r"q is .* expected"):
                attend(wrong, 0, batch)
        for heads in (0, 3):
            text = f"q has {heads} heads; expected a multiple of the 2 KV heads"
            with pytest.raises(InvalidArgument, match=text):
                attend(q[:, :heads], 0, batch)
        for text, call in (
            ("q: expected Tensor, not None", lambda: attend(None, 0, batch)),
            ("batch: expected Batch, not 3", lambda: attend(q, 0, 3)),
            ("key: expected Tensor, not 'x'", lambda: attend.write(0, "x", q, batch)),
            ("cache: expected a KVCache, not 3", lambda: Attention(3)),
        ):
            with pytest.raises(TypeError, match=text):
                call()
        with pytest.raises(InvalidArgument, match=r"kernel must be one of fa3.*, not 'fa9'"):
            overread_rows("fa9", torch.device("cpu"))
        with pytest.raises(InvalidArgument, match="value is"):
            attend.write(0, q[:, :2], q[:, :1], batch)
        attend.close()


# ---- reads past a length ------------------------------------------------------------------------


def test_ranges_that_a_kernel_reads() -> None:
    assert [EXACT.end(length, 512) for length in (1, 31, 512)] == [1, 31, 512]
    assert [Reads(block=128).end(length, 500) for length in (1, 128, 129, 400)] == [
        128,
        128,
        256,
        500,
    ]
    assert [Reads(tile=191).end(length, 500) for length in (1, 300, 400)] == [192, 491, 500]
    assert (EXACT.past, Reads(block=128).past, Reads(tile=191).past) == (0, 127, 191)
    gpu, cpu = torch.device("cuda"), torch.device("cpu")
    assert [overread_rows(name, gpu) for name in NAMES] == [191, 0, 0, 0, 127, 0]
    assert [overread_rows(name, cpu) for name in NAMES] == [191, 0, 0, 0, 0, 0]


SHAPES = {
    "rows that divide a page": {"heads": 2, "width": 32},
    "rows that do not": {"heads": 3, "width": 8},
    "two layers in a tensor": {"heads": 2, "width": 16, "group_size": 2},
    "slots that end in a block": {"heads": 2, "width": 32, "max_seq_len": 333},
    "packed slots": {"heads": 2, "width": 32, "packed_slots": True},
}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_the_block_table_of_a_contiguous_slot(host: pyvmem.Context, shape: Any) -> None:
    """Checks every row's address as computed from its block number and its offset in the block."""
    with filled(host, MIXED, **shape) as cache:
        attend = Attention(cache)
        batch = attend.batch(MIXED.reqids, MIXED.q_lens, MIXED.kv_lens)
        for layer in range(LAYERS):
            k = cache.k(layer)
            blocks = Blocks.of(k.shape[1], k.stride(0), k.stride(1))
            view, table = blocks.view(k), batch.block_table(blocks)
            assert view.shape[1:] == (BLOCK, *k.shape[2:])
            assert view.data_ptr() == k.data_ptr()
            assert table.dtype == torch.int32
            assert tuple(table.shape) == (len(MIXED.reqids), -(-k.shape[1] // BLOCK))
            assert int(table.max()) <= blocks.last(cache.config.max_batch)
            for at, (reqid, _, length) in enumerate(_requests(MIXED)):
                for row in range(length):
                    number = int(table[at, row // BLOCK])
                    one = view.data_ptr() + number * view.stride(0) * view.element_size()
                    one += row % BLOCK * view.stride(1) * view.element_size()
                    assert one == k[reqid, row].data_ptr()
            del k, view
        attend.close()


def test_a_block_table_is_made_once_and_advances(host: pyvmem.Context) -> None:
    with filled(host, MIXED) as cache:
        attend = Attention(cache)
        batch = attend.batch((5, 0), (1, 2), (9, 9))
        blocks = Blocks.of(*_strides(cache))
        table = batch.block_table(blocks)
        assert batch.block_table(blocks) is table
        batch.advance((0, 1), (12, 2))
        assert batch.block_table(blocks) is table
        wanted = attend.batch((0, 1), (1, 2), (12, 2)).block_table(blocks)
        assert torch.equal(table, wanted)
        attend.close()


def _strides(cache: pyvmem.KVCache) -> tuple[int, int, int]:
    k = cache.k(0)
    return k.shape[1], k.stride(0), k.stride(1)


def test_width_of_a_block_table() -> None:
    blocks = Blocks.of(1000, 1024 * 64, 64)
    assert blocks.per_slot == 32
    lengths = (1, 32, 33, 65, 129, 512, 513, 1000)
    assert [blocks.wanted(length) for length in lengths] == [1, 1, 2, 4, 8, 16, 32, 32]
    assert Blocks.of(1000, 1024 * 64, 64).last(4) == 3 * 32 + 31


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_the_paged_call_gets_what_it_needs(
    host: pyvmem.Context, shape: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Replaces the op with a row-by-row implementation and checks calls against the op's schema."""
    monkeypatch.setattr(flash, "_fa3", lambda: flash._vllm_call(FakeOp()))
    for case in CASES:
        with filled(host, case, **shape) as cache:
            q = queries(cache, case, 2)
            batch = Batch([Part(cache.caches)], case.reqids, case.q_lens, case.kv_lens, q.device)
            for layer in range(LAYERS):
                out = flash.fa3_paged(q, cache.k(layer), cache.v(layer), batch, q.shape[2] ** -0.5)
                close(out, reference(q, cache, layer, case))


class FakeOp:
    """Mimics the parts of vLLM's op that are used here, for a paged cache only."""

    names = (
        *("q", "k", "v", "cu_seqlens_q", "seqused_k", "max_seqlen_q", "max_seqlen_k"),
        *("page_table", "kv_batch_idx", "softmax_scale", "is_causal", "something_new"),
    )

    def __init__(self) -> None:
        arguments = [types.SimpleNamespace(name=name) for name in self.names]
        schema = types.SimpleNamespace(arguments=arguments)
        self.default = types.SimpleNamespace(_schema=schema)

    def __call__(self, *values: Any) -> list[torch.Tensor]:
        one = dict(zip(self.names, values, strict=True))
        assert one["kv_batch_idx"] is None
        assert one["something_new"] is None
        assert one["max_seqlen_k"] == one["page_table"].shape[1] * BLOCK
        out = []
        starts, used = one["cu_seqlens_q"].tolist(), one["seqused_k"].tolist()
        assert max(used) <= one["max_seqlen_k"]
        for at, length in enumerate(used):
            table = one["page_table"][at].tolist()
            k, v = (
                torch.stack([rows[table[i // BLOCK], i % BLOCK] for i in range(length)])
                for rows in (one["k"], one["v"])
            )
            q = one["q"][starts[at] : starts[at + 1]]
            repeat = q.shape[1] // k.shape[1]
            k, v = k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1)
            scores = torch.einsum("qhd,nhd->hqn", q, k) * one["softmax_scale"]
            seen = torch.ones(q.shape[0], length, dtype=torch.bool).tril(length - q.shape[0])
            scores = scores.masked_fill(~seen, float("-inf"))
            out.append(torch.einsum("hqn,nhd->qhd", scores.softmax(-1), v))
        return [torch.cat(out)]


@pytest.fixture
def pretend(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replaces FlashAttention-3's two calls with SDPA on the CPU, but chooses between them as on a
    GPU.
    """
    for name in ("fa3", "fa3-paged"):
        reads = KERNELS[name].reads
        monkeypatch.setitem(
            KERNELS, name, kernels._Kernel(lambda c, d: "", KERNELS["sdpa"].run, reads)
        )
    for name in ("_PREFILL", "_DECODE"):
        order = getattr(kernels, name)
        monkeypatch.setattr(kernels, name, {"cpu": order["cuda"]})


def test_prefill_and_decoding_choose_their_own_kernels(host: pyvmem.Context, pretend: None) -> None:
    cpu = torch.device("cpu")
    with filled(host, MIXED) as cache:
        choice = choose(cache, cpu)
        assert (choice.name, choice.decode) == ("fa3-paged", "fa3-paged")
        assert str(choice).startswith("attention by fa3-paged (fa3: it reads whole tiles")
    with filled(host, MIXED, overread_rows=191) as cache:
        choice = choose(cache, cpu)
        assert (choice.name, choice.decode) == ("fa3", "fa3-paged")
        assert str(choice).startswith("attention by fa3, decoding by fa3-paged (")
        attend = Attention(cache)
        for q_lens, kernel in (
            ((1, 1), "fa3-paged"),
            ((16, 1), "fa3-paged"),
            ((17, 1), "fa3"),
        ):
            assert attend.batch((5, 0), q_lens, (260, 64)).kernel == kernel
        attend.close()
    with filled(host, MIXED, overread_rows=191, overread_decode=True) as cache:
        for name in ("fa3", "fa3-paged", "sdpa"):
            choice = choose(cache, cpu, name)
            assert (choice.name, choice.decode) == (name, name)


def test_decoding_never_chooses_a_kernel_whose_tile_only_prefills_map(
    host: pyvmem.Context, pretend: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "_DECODE", {"cpu": ("fa3", "sdpa")})
    for more, decode in (({}, "sdpa"), ({"overread_decode": True}, "fa3")):
        with filled(host, MIXED, overread_rows=191, **more) as cache:
            choice = choose(cache, torch.device("cpu"))
            assert (choice.name, choice.decode) == ("fa3", decode)


def test_rows_without_memory_are_not_read(host: pyvmem.Context, pretend: None) -> None:
    """Tokens may use rows that are mapped for the tile, but then fa3 cannot read a whole tile."""
    with filled(host, MIXED, overread_rows=191, overread_decode=True) as cache:
        (mapped,) = cache.slots.readable_rows([4])
        assert 90 + 191 <= mapped < 400
        attend = Attention(cache)
        assert attend.batch([4], [20], [mapped - 191]).kernel == "fa3"
        assert attend.batch([4], [20], [mapped - 190]).kernel == "fa3-paged"
        assert attend.batch([4], [20], [mapped]).kernel == "fa3-paged"
        with pytest.raises(InvalidArgument, match=f"{mapped + 1} tokens, but there are pages"):
            attend.batch([4], [20], [mapped + 1])
        attend.close()
        attend = Attention(cache, "fa3")
        batch = attend.batch([4], [1], [mapped - 191])
        text = f"4: fa3 may read up to row {mapped + 1} for {mapped - 190} tokens, .* {mapped}"
        with pytest.raises(OverRead, match=text):
            attend.batch([4], [1], [mapped - 190])
        with pytest.raises(OverRead, match=text):
            batch.advance([4], [mapped - 190])
        assert batch.kv_lens == [mapped - 191]
        q = torch.randn(1, 2, 32)
        attend(q, 0, batch)
        bare = Batch([Part(cache.caches)], [4], [1], [9], torch.device("cpu"))
        with pytest.raises(InvalidArgument, match=r"make one with Attention\.batch"):
            attend(q, 0, bare)
        attend.close()


def test_reads_stop_at_the_end_of_a_slot(host: pyvmem.Context, pretend: None) -> None:
    """Kernels never read past the tensor's last row, so the longest request needs no extra rows for
    a tile.
    """
    case = Case("full", (0,), (1,), (512,))
    with filled(host, case, overread_rows=191, overread_decode=True) as cache:
        assert cache.slots.readable_rows([0, 1]) == [512, 0]
        attend = Attention(cache, "fa3")
        assert attend.batch([0], [1], [512]).reads.end(512, 512) == 512
        attend.close()
        for wrong in (-1, 6):
            with pytest.raises(InvalidArgument, match=f"reqid {wrong} is not between 0 and 5"):
                cache.slots.readable_rows([wrong])


def test_a_sparse_cache_protects_where_pages_appear_in_one_step(
    host: pyvmem.Context, pretend: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    cpu = torch.device("cpu")
    with filled(host, MIXED, sparse=True) as cache:
        assert cache.safe_overread
        attend = Attention(cache, "fa3")
        attend.batch([4], [20], [90])
        attend.close()
        info = host.info
        monkeypatch.setattr(host, "info", replace(info, caps=info.caps & ~Caps.SPARSE_ATOMIC))
        assert not cache.safe_overread
        with pytest.raises(InvalidArgument, match="fa3 cannot be used: it reads whole tiles"):
            choose(cache, cpu, "fa3")
        monkeypatch.undo()
    with filled(host, MIXED) as cache:
        assert not cache.safe_overread


def test_rows_mapped_for_tiles_count_as_waste(host: pyvmem.Context) -> None:
    """Checks the cache's own statistics, the cost of layouts, and the number of requests that
    fit.
    """
    wasted = []
    for rows in (0, 191):
        with filled(host, MIXED, overread_rows=rows) as cache:
            now = cache.stats()
            wasted.append(now.wasted_bytes)
            assert now.used_bytes == sum(MIXED.kv_lens) * 4 * cache.layout.row_bytes
    pages = 4096  # bytes per page; a row is 256 bytes
    prefilled = sum(length > PREFILL_TOKENS for length in MIXED.kv_lens)
    assert 0 < prefilled < len(MIXED.kv_lens)
    more = (wasted[1] - wasted[0]) / (prefilled * 2 * LAYERS)
    assert abs(more - 191 * 256) < pages
    shape = shape_of("Llama-3-8B")
    requests, memory = generate(200, 1), 40 << 30
    plain, guarded = (cost(shape, Choice(1, 64 << 10), requests, memory, rows) for rows in (0, 191))
    tensors, row = 64, 2048
    assert guarded.held.used == plain.held.used
    left = sum(max(0, 191 - grown) for one in requests for grown in range(one.output))
    left /= sum(one.output for one in requests)
    assert 20 < left < 191, "the sample must include requests that use some of the rows"
    assert abs(guarded.waste - plain.waste - left * row * tensors) < (64 << 10) * tensors
    assert guarded.waste_bound - plain.waste_bound == 191 * row * tensors
    assert guarded.batch < plain.batch
    layouts = [
        next(systems(shape, [64 << 10], [1], [], rows)).layout(shape, 1000) for rows in (0, 191)
    ]
    assert [one.pages_for_step(0, 1000) for one in layouts] == [32, 38]
    assert [one.pages_for_step(999, 1000) for one in layouts] == [32, 32]
