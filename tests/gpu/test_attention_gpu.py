# SPDX-License-Identifier: MIT
"""Attention kernels over slots on this GPU, compared with an explicit softmax.

Needs a CUDA device, torch, and a back end (cuda, stock) that passes its probe; skipped otherwise.
FlashAttention-3 is tested if vLLM, flash_attn_interface or $VMEM_FA3 provides it.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from pyvmem import Context

torch = pytest.importorskip("torch")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "python"))
from attention_helpers import CASES, LAYERS, Case, filled, queries, reference  # noqa: E402
from gpu_helpers import contexts, needs_gpu  # noqa: E402

from pyvmem.attention import Attention, overread_rows, probe  # noqa: E402

TILES: dict[str, Any] = {"overread_rows": 191, "overread_decode": True}
pytestmark = [
    *needs_gpu(),
    # torch's own compiler triggers this warning.
    pytest.mark.filterwarnings("ignore:.*torch.jit.script_method.*:DeprecationWarning"),
]
context = contexts()


@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize("kernel", ["fa3", "fa3-paged", "fa2", "flashinfer", "flex", "sdpa"])
def test_a_kernel_is_softmax_attention(context: Context, kernel: str, width: int) -> None:
    """Rows past each length hold NaN, or zeros if the kernel reads whole tiles."""
    overread = overread_rows(kernel, torch.device("cuda"))
    for case in CASES:
        more = {"overread_rows": overread, "overread_decode": True, "poison": not overread}
        with filled(context, case, "bfloat16", 2, width, **more) as cache:
            q = queries(cache, case, 4)
            why = probe(cache, q.device)[kernel]
            if why:
                pytest.skip(why)
            attend = Attention(cache, kernel)
            batch = attend.batch(case.reqids, case.q_lens, case.kv_lens)
            for layer in range(LAYERS):
                out = attend(q, layer, batch)
                want = reference(q, cache, layer, case)
                torch.testing.assert_close(out.double().cpu(), want, atol=2e-2, rtol=2e-2)
            attend.close()


def test_a_tile_reader_is_not_chosen_without_rows_to_read(context: Context) -> None:
    with filled(context, CASES[0], "bfloat16", 2, 64) as cache:
        attend = Attention(cache)
        assert attend.choice.name == attend.choice.decode
        assert attend.choice.name in ("fa3-paged", "fa2", "sdpa")
        for name in ("fa3", "flex"):
            assert attend.choice.why_not[name]
        attend.close()


SHAPES = {
    "rows whose size does not divide a page": (3, 64, {}),
    "two layers in a tensor": (2, 64, {"group_size": 2}),
    "heads of 256": (2, 256, {}),
    "slots that end inside a block": (2, 128, {"max_seq_len": 333}),
}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_the_paged_call_over_any_contiguous_slot(context: Context, shape: Any) -> None:
    """The view's blocks may overlap. Rows past a length hold NaN; those farther on are unmapped."""
    heads, width, changes = shape
    for case in CASES:
        with filled(context, case, "bfloat16", heads, width, **changes) as cache:
            q = queries(cache, case, 4)
            if why := probe(cache, q.device)["fa3-paged"]:
                pytest.skip(why)
            attend = Attention(cache, "fa3-paged")
            batch = attend.batch(case.reqids, case.q_lens, case.kv_lens)
            for layer in range(LAYERS):
                out = attend(q, layer, batch)
                want = reference(q, cache, layer, case)
                torch.testing.assert_close(out.double().cpu(), want, atol=2e-2, rtol=2e-2)
            attend.close()


@pytest.mark.parametrize("kernel", ["fa3", "fa3-paged"])
def test_a_captured_graph_follows_the_batch(context: Context, kernel: str) -> None:
    """Replays a CUDA graph of FlashAttention-3 with only the slots and lengths changed."""
    first = Case("captured", (0, 1, 2), (1, 1, 1), (5, 60, 200))
    last = Case("replayed", (3, 0, 2), (1, 1, 1), (300, 40, 220))
    case = Case("both", (0, 1, 2, 3), (1, 1, 1, 1), (300, 300, 300, 300))
    with filled(context, case, "bfloat16", 2, 64, False, **TILES) as cache:
        q = queries(cache, first, 4)
        why = probe(cache, q.device)[kernel]
        if why:
            pytest.skip(why)
        attend = Attention(cache, kernel)
        batch = attend.batch(first.reqids, first.q_lens, first.kv_lens)
        out = attend(q, 1, batch)
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            out = attend(q, 1, batch)
        for one in (first, last):
            batch.advance(one.reqids, one.kv_lens)
            graph.replay()
            want = reference(q, cache, 1, one)
            torch.testing.assert_close(out.double().cpu(), want, atol=2e-2, rtol=2e-2)
        del graph
        attend.close()


def test_many_steps_of_different_lengths(context: Context) -> None:
    """Mixes decodes and prefill chunks of different lengths, as an engine does."""
    for kernel in ("auto", "flex"):
        for step in range(6):
            lens = tuple(40 * step + 17 * i + 2 for i in range(4))
            news = tuple(1 if i % 2 else min(lens[i], 1 + 30 * step) for i in range(4))
            case = Case("step", (4, 0, 2, 1), news, lens)
            with filled(context, case, "bfloat16", 2, 64, False, **TILES) as cache:
                q = queries(cache, case, 4)
                if kernel != "auto" and probe(cache, q.device)[kernel]:
                    continue
                attend = Attention(cache, kernel)
                out = attend(q, 1, attend.batch(case.reqids, case.q_lens, case.kv_lens))
                want = reference(q, cache, 1, case)
                torch.testing.assert_close(out.double().cpu(), want, atol=2e-2, rtol=2e-2)
                attend.close()
