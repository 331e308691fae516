# SPDX-License-Identifier: MIT
"""Windows, latents, 8-bit rows and FlashInfer, compared with an explicit softmax.

Rows past a length or before a window hold NaN, and memory past the last page is unmapped, so
reading even one row too many gives a wrong number or a fault. Needs a CUDA device, torch, and a
back end (cuda, stock) that passes its probe; unavailable kernels are skipped, with the reason.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from pyvmem import Context, KVCache, KVCacheConfig
from pyvmem.kvcache import LayeredCache, LayerShape

torch = pytest.importorskip("torch")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "python"))
from attention_helpers import CASES, Case, fill, filled, queries, reference, wanted  # noqa: E402
from gpu_helpers import contexts, needs_gpu  # noqa: E402

from pyvmem.attention import KERNELS, Attention, UpProjections, probe  # noqa: E402
from pyvmem.attention.layers import forms_of  # noqa: E402
from pyvmem.attention.scales import FP8  # noqa: E402

pytestmark = [
    *needs_gpu(),
    # torch's own compiler triggers this warning.
    pytest.mark.filterwarnings("ignore:.*torch.jit.script_method.*:DeprecationWarning"),
]
context = contexts()

CUDA = torch.device("cuda")
FP8_TOLERANCE = 0.08  # derived in tests/python/test_attention_layers.py


@pytest.mark.parametrize("window", [24, 200])
@pytest.mark.parametrize("kernel", ["fa3", "fa3-paged", "fa2", "flashinfer", "flex", "sdpa"])
def test_windows(context: Context, kernel: str, window: int) -> None:
    """Rows before a window hold NaN, or finite numbers if the kernel loads whole tiles."""
    shapes = (LayerShape(2, 64, window=window), LayerShape(2, 64))
    reads = KERNELS[kernel].reads(CUDA)
    policy = {"dtype": "bfloat16", "max_batch": 6, "max_seq_len": 1024, "window_tile": 256}
    policy |= {"overread_rows": reads.past, "overread_decode": True}
    for case in CASES:
        with LayeredCache(shapes, context, **policy) as cache:
            whys = [KERNELS[kernel].why_not(form, CUDA) for form in forms_of(cache)]
            if why := next(filter(None, whys), ""):
                pytest.skip(why)
            fill(cache, case, poison=not reads.past and not reads.before)
            attend = Attention(cache, kernel)
            batch = attend.batch(case.reqids, case.q_lens, case.kv_lens)
            for layer, shape in enumerate(shapes):
                k, v = cache.k(layer), cache.v(layer)
                q = torch.randn(batch.tokens, 8, 64, dtype=torch.bfloat16, device=CUDA)
                out = attend(q, layer, batch)
                want = wanted(q, k, v, case, shape.window)
                torch.testing.assert_close(out.double().cpu(), want, atol=2e-2, rtol=2e-2)
            del k, v
            attend.close()


def test_a_latent(context: Context) -> None:
    """DeepSeek's latent: 16 query heads, one head of 576 elements with values in the first 512."""
    config = KVCacheConfig(1, 1, 576, "bfloat16", max_batch=6, max_seq_len=512, tensors_per_layer=1)
    for case in CASES:
        with KVCache(config, context) as cache:
            lens = [0] * 6
            for _ in range(6):
                cache.alloc_reqid()
            for reqid, length in zip(case.reqids, case.kv_lens, strict=True):
                lens[reqid] = length
            assert cache.step(lens) == 0
            k = cache.k(0)
            for reqid, length in enumerate(lens):
                k[reqid, : cache.slots.readable_rows([reqid])[0]] = float("nan")
                k[reqid, :length].normal_()
            attend = Attention(cache, v_head_dim=512)
            batch = attend.batch(case.reqids, case.q_lens, case.kv_lens)
            q = torch.randn(batch.tokens, 16, 576, dtype=torch.bfloat16, device=CUDA)
            want = wanted(q, k, k[..., :512], case, 0)
            out = attend(q, 0, batch)
            torch.testing.assert_close(out.double().cpu(), want, atol=2e-2, rtol=2e-2)
            del k
            attend.close()


def test_a_latent_with_its_up_projections(context: Context) -> None:
    """DeepSeek's latent, with whole prompts, chunks, and queries short enough for absorption."""
    config = KVCacheConfig(
        1, 1, 576, "bfloat16", max_batch=3, max_seq_len=2048, tensors_per_layer=1
    )
    up = UpProjections(*(torch.randn(2, 16, 128, 512, device=CUDA) / 24).bfloat16())
    lens = (900, 1700, 40)
    with KVCache(config, context) as cache:
        for _ in lens:
            cache.alloc_reqid()
        assert cache.step(lens) == 0
        rows = cache.k(0)
        k = torch.full((3, max(lens), 16, 192), float("nan"), device=CUDA)
        v = torch.full((3, max(lens), 16, 128), float("nan"), device=CUDA)
        for reqid, length in enumerate(lens):
            rows[reqid, : cache.slots.readable_rows([reqid])[0]] = float("nan")
            some = rows[reqid, :length, 0].normal_()
            k[reqid, :length, :, :128] = torch.einsum("rl,hnl->rhn", some[:, :512], up.key)
            k[reqid, :length, :, 128:] = some[:, None, 512:]
            v[reqid, :length] = torch.einsum("rl,hvl->rhv", some[:, :512], up.value)
        attend = Attention(cache, v_head_dim=512)
        for q_lens in ((900, 512, 40), (1, 1700, 40), (1, 1, 1)):
            case = Case("", (0, 1, 2), q_lens, lens)
            batch = attend.batch(case.reqids, case.q_lens, case.kv_lens)
            q = torch.randn(batch.tokens, 16, 192, dtype=torch.bfloat16, device=CUDA)
            want = wanted(q, k.bfloat16(), v.bfloat16(), case, 0)
            out = attend(q, 0, batch, up=up)
            torch.testing.assert_close(out.double().cpu(), want, atol=3e-2, rtol=3e-2)
        del rows, some
        attend.close()


@pytest.mark.parametrize("width", [64, 128])
def test_flashinfer_over_slots_of_different_length(context: Context, width: int) -> None:
    """Prefills requests one at a time and decodes through blocks, never reading past a length."""
    for case in CASES:
        with filled(context, case, "bfloat16", 2, width) as cache:
            q = queries(cache, case, 4)
            if why := probe(cache, q.device)["flashinfer"]:
                pytest.skip(why)
            attend = Attention(cache, "flashinfer")
            batch = attend.batch(case.reqids, case.q_lens, case.kv_lens)
            for layer in range(2):
                out = attend(q, layer, batch)
                want = reference(q, cache, layer, case)
                torch.testing.assert_close(out.double().cpu(), want, atol=2e-2, rtol=2e-2)
            batch.advance(case.reqids, list(case.kv_lens))
            again = attend(q, 1, batch)
            torch.testing.assert_close(again, out)
            attend.close()


@pytest.mark.parametrize("kernel", ["fa3", "fa3-paged"])
def test_8_bit_keys_and_values(context: Context, kernel: str) -> None:
    """Rows are written with scales, and the root-mean-square error is within FP8_TOLERANCE."""
    reads = KERNELS[kernel].reads(CUDA)
    config = KVCacheConfig(
        1,
        2,
        128,
        FP8,
        max_batch=2,
        max_seq_len=1024,
        overread_rows=reads.past,
        overread_decode=True,
    )
    with KVCache(config, context) as cache:
        if why := KERNELS[kernel].why_not(forms_of(cache)[0], CUDA):
            pytest.skip(why)
        for _ in range(2):
            cache.alloc_reqid()
        assert cache.step([700, 300]) == 0
        scales: list[tuple[Any, Any]] = [([0.01, 0.02], 0.015)]
        attend = Attention(cache, kernel, scales=scales)
        key, value = torch.randn(2, 1000, 2, 128, dtype=torch.bfloat16, device=CUDA).unbind()
        whole = attend.batch([0, 1], [700, 300], [700, 300])
        attend.write(0, key, value, whole)
        for q_lens in ((1, 1), (700, 300), (100, 7)):
            batch = attend.batch([0, 1], q_lens, [700, 300])
            q = torch.randn(sum(q_lens), 8, 128, dtype=torch.bfloat16, device=CUDA)
            out = attend(q, 0, batch)
            assert out.dtype == torch.bfloat16
            k = torch.zeros(2, 700, 2, 128, dtype=torch.float32, device=CUDA)
            v = torch.zeros_like(k)
            for rows, made in ((key, k), (value, v)):
                made[0], made[1, :300] = rows[:700].float(), rows[700:].float()
            want = wanted(q, k, v, Case("", (0, 1), q_lens, (700, 300)), 0)
            error = (out.double().cpu() - want).square().mean().sqrt()
            assert float(error / want.square().mean().sqrt()) < FP8_TOLERANCE
        attend.close()
