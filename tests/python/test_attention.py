# SPDX-License-Identifier: MIT
"""Description: attention over slots, against a softmax written out; choice, poison, bad input."""

from __future__ import annotations

import itertools
import logging

import pytest
import torch
from attention_helpers import CASES, LAYERS, Case, filled, queries, reference

import pyvmem
from pyvmem import InvalidArgument
from pyvmem.attention import KERNELS, Attention, attention, choose, flex, kernels, probe

pytestmark = pytest.mark.needs_tensors

MIXED = CASES[-1]


@pytest.mark.parametrize("kernel", ["sdpa", "flex"])
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile:UserWarning")
def test_it_is_softmax_attention_and_reads_no_poison(host: pyvmem.Context, kernel: str) -> None:
    """Rows behind the lengths are NaN; pages behind those are not mapped at all."""
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


def test_the_choice_on_a_gpu_is_right_too(context: pyvmem.Context) -> None:
    """On every back end: what "auto" takes is what the sum says."""
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
    """As a new one would be; what was wrong changes nothing."""
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


def test_an_advanced_batch_has_a_mask_of_its_own(host: pyvmem.Context) -> None:
    with filled(host, MIXED, max_seq_len=1024) as cache:
        attend = Attention(cache)
        batch = attend.batch((5, 0), (1, 2), (9, 60))
        first = flex._mask(batch, 0, 6, 384)
        assert flex._mask(batch, 0, 6, 384) is first, "kept for all layers"
        batch.advance((5, 0), (260, 64))
        wanted = flex._mask(attend.batch((5, 0), (1, 2), (260, 64)), 0, 6, 384)
        assert torch.equal(flex._mask(batch, 0, 6, 384).kv_num_blocks, wanted.kv_num_blocks)
        assert not torch.equal(first.kv_num_blocks, wanted.kv_num_blocks)
        attend.close()


def test_neighbours_of_equal_length_are_one_call(host: pyvmem.Context) -> None:
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


def test_the_choice_is_logged_once_and_can_be_asked(
    host: pyvmem.Context, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "_said", set())
    with filled(host, MIXED) as cache, caplog.at_level(logging.INFO, "pyvmem.attention"):
        cpu = torch.device("cpu")
        assert choose(cache, cpu).name == choose(cache, cpu).name == "sdpa"
        assert [record.message for record in caplog.records] == [
            "attention by sdpa (fa3: it needs a GPU; fa2: it needs a GPU)"
        ]
        assert choose(cache, cpu, "flex").name == "flex"
        assert len(caplog.records) == 2
        assert set(probe(cache, cpu)) == set(KERNELS) == {"fa3", "fa2", "flex", "sdpa"}


def test_a_kernel_that_reads_tiles_needs_rows_behind_the_length(
    host: pyvmem.Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rule itself; no GPU is asked."""
    one = KERNELS["fa3"]
    monkeypatch.setitem(KERNELS, "fa3", kernels._Kernel(lambda c, d: "", one.run, one.overread))
    cpu = torch.device("cpu")
    text = r"fa3 cannot be used.*overread_rows of 191.* 0$"
    with filled(host, MIXED) as cache, pytest.raises(InvalidArgument, match=text):
        choose(cache, cpu, "fa3")
    with filled(host, MIXED, overread_rows=191) as cache:
        assert choose(cache, cpu, "fa3").name == "fa3"


def test_bad_input_is_named(host: pyvmem.Context) -> None:
    with filled(host, MIXED) as cache:
        q = queries(cache, MIXED, 2)
        with pytest.raises(InvalidArgument, match="kernel 'fa9' is none of auto, fa3"):
            Attention(cache, "fa9")
        with pytest.raises(InvalidArgument, match="kernel fa2 cannot be used: it needs a GPU"):
            Attention(cache, "fa2")
        attend = Attention(cache)
        for lens, text in (
            (([0], [1], []), "1 reqids, 1 q_lens, 0 kv_lens"),
            (([], [], []), "at least one"),
            (([0, 0], [1, 1], [2, 2]), "a reqid stands twice"),
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
            with pytest.raises(InvalidArgument, match=r"q is .* wanted"):
                attend(wrong, 0, batch)
        with pytest.raises(InvalidArgument, match="3 heads are not a multiple of 2 KV heads"):
            attend(q[:, :3], 0, batch)
        with pytest.raises(InvalidArgument, match="value is"):
            attend.write(0, q[:, :2], q[:, :1], batch)
        attend.close()
