# SPDX-License-Identifier: MIT
"""Attention with unequal layers (windows, latents, head sizes), 8-bit rows and scales.

Results are compared with a plain softmax. Rows that a token must not read, past the length or
before the window, are NaN.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from attention_helpers import CASES, Case, fill, wanted
from torch.nn.functional import scaled_dot_product_attention

import pyvmem
from pyvmem import InvalidArgument, KVCache, KVCacheConfig
from pyvmem.attention import Attention, OverRead, UpProjections, kernels, latent, sdpa
from pyvmem.attention.kernels import KERNELS
from pyvmem.attention.layers import Form, forms_of
from pyvmem.attention.reads import EXACT, Reads
from pyvmem.attention.scales import FP8, quantised, scales_of
from pyvmem.kvcache import EmptyShape, LayeredCache, LayerShape, StateShape

pytestmark = [
    pytest.mark.needs_tensors,
    pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile:UserWarning"),
]

WINDOW, LATENT = 24, 40
LAYERS = (
    LayerShape(2, 32),
    LayerShape(1, 16, window=WINDOW),
    LayerShape(1, LATENT + 8, 0),
    LayerShape(3, 24, 16),
    LayerShape(2, 32),
    LayerShape(2, 32, window=WINDOW),
)


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Limits torch to one thread: tiny matrices gain nothing from more threads, and on a busy
    machine the threads wait for each other.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def cache(host: pyvmem.Context) -> Iterator[LayeredCache]:
    made = LayeredCache(LAYERS, host, dtype="float32", max_batch=6, max_seq_len=512)
    with made:
        yield made
        made.check_integrity()


BOTH = [("sdpa", case) for case in CASES] + [("flex", Case("chunk", (3, 1), (5, 3), (60, 30)))]


@pytest.mark.parametrize(("kernel", "case"), BOTH, ids=lambda one: getattr(one, "name", one))
def test_every_kind_of_layer(cache: LayeredCache, kernel: str, case: Case) -> None:
    fill(cache, case)
    attend = Attention(cache, kernel, v_head_dim=LATENT)
    assert len(attend.choices) == 5  # two layers have the same shape
    batch = attend.batch(case.reqids, case.q_lens, case.kv_lens)
    for layer, shape in enumerate(LAYERS):
        k = cache.k(layer)
        v = cache.v(layer) if shape.v_head_dim else k[..., :LATENT]
        q = torch.randn(batch.tokens, 2 * shape.num_kv_heads, shape.head_dim)
        out = attend(q, layer, batch)
        assert out.shape == (*q.shape[:2], v.shape[3])
        want = wanted(q, k, v, case, shape.window)
        torch.testing.assert_close(out.double(), want, atol=1e-5, rtol=1e-5)
    del k, v
    attend.close()


def test_state_layers_and_layers_without_storage_are_skipped(host: pyvmem.Context) -> None:
    layers = (StateShape((8, 4), (2, 4, 4)), LAYERS[0], EmptyShape(), LAYERS[1], StateShape((8, 4)))
    policy = {"dtype": "float32", "max_batch": 6, "max_seq_len": 512}
    with LayeredCache(layers, host, **policy) as cache:
        case = CASES[0]
        fill(cache, case)
        for windows in (None, [0, 0, 0, WINDOW, 0]):
            attend = Attention(cache, windows=windows)
            batch = attend.batch(case.reqids, case.q_lens, case.kv_lens)
            for layer, shape in ((1, LAYERS[0]), (3, LAYERS[1])):
                q = torch.randn(batch.tokens, 2 * shape.num_kv_heads, shape.head_dim)
                want = wanted(q, cache.k(layer), cache.v(layer), case, shape.window)
                out = attend(q, layer, batch)
                torch.testing.assert_close(out.double(), want, atol=1e-5, rtol=1e-5)
            row = torch.zeros(batch.tokens, 2, 32)
            for layer in (0, 2, 4):
                with pytest.raises(InvalidArgument, match=f"layer {layer} has no keys and values"):
                    attend.write(layer, row, row, batch)
                with pytest.raises(InvalidArgument, match=f"layer {layer} has no keys and values"):
                    attend(row, layer, batch)
            attend.close()
        for call in (cache.k, cache.v, cache.states):
            with pytest.raises(InvalidArgument, match="layer 2 stores nothing"):
                call(2)
    nothing = "needs at least one layer that stores data"
    with pytest.raises(InvalidArgument, match=nothing):
        LayeredCache([EmptyShape()], host, **policy)
    with (
        LayeredCache([layers[0]], host, **policy) as cache,
        pytest.raises(InvalidArgument, match="no layer of the cache has keys and values"),
    ):
        Attention(cache)


def test_the_block_mask_of_a_window_covers_the_visible_blocks(host: pyvmem.Context) -> None:
    """Derives from the blocks and the mask which columns each row sees, as compiled calls do."""
    from pyvmem.attention import flex

    config = KVCacheConfig(1, 1, 16, "float32", max_batch=6, max_seq_len=1024)
    with KVCache(config, host) as cache:
        case = Case("", (5, 0, 4), (200, 1, 130), (700, 400, 130))
        lens = [400, 0, 0, 0, 130, 700]
        for _ in range(6):
            cache.alloc_reqid()
        assert cache.step(lens) == 0
        attend = Attention(cache)
        batch = attend.batch(case.reqids, case.q_lens, case.kv_lens)
        for window in (0, 1, 100, 300):
            mask = flex._mask(batch, 0, 6, 768, window)
            for reqid, new, length in zip(case.reqids, case.q_lens, case.kv_lens, strict=True):
                for row in {0, 127, 128, new - 1} & set(range(new)):
                    block = row // flex.BLOCK
                    count = int(mask.kv_num_blocks[reqid, 0, block])
                    blocks = mask.kv_indices[reqid, 0, block, :count].tolist()
                    assert blocks == sorted(set(blocks))
                    columns = [b * flex.BLOCK + i for b in blocks for i in range(flex.BLOCK)]
                    seen = mask.mask_mod(
                        torch.tensor(reqid), 0, torch.tensor(row), torch.tensor(columns)
                    )
                    own = length - new + row
                    first = max(0, own - window + 1) if window else 0
                    got = [c for c, yes in zip(columns, seen.tolist(), strict=True) if yes]
                    assert got == list(range(first, own + 1))
        attend.close()


def test_a_model_window_over_a_cache_without_windows(host: pyvmem.Context) -> None:
    """The model's window masks rows that the cache keeps because forks, prefixes and swapping need
    them.
    """
    config = KVCacheConfig(2, 2, 16, "float32", max_batch=2, max_seq_len=128)
    with KVCache(config, host) as cache:
        reqid = cache.alloc_reqid()
        assert cache.step([90, 0]) == 0
        for layer in range(2):
            for tensor in (cache.k(layer), cache.v(layer)):
                tensor[reqid, :90].normal_()
        attend = Attention(cache, windows=[0, 7])
        q = torch.randn(40, 4, 16)
        case = Case("", (0,), (40,), (90,))
        batch = attend.batch(case.reqids, case.q_lens, case.kv_lens)
        for layer, window in enumerate((0, 7)):
            want = wanted(q, cache.k(layer), cache.v(layer), case, window)
            out = attend(q, layer, batch)
            torch.testing.assert_close(out.double(), want, atol=1e-5, rtol=1e-5)
        del tensor
        attend.close()


def test_rows_that_left_the_window_are_not_read(host: pyvmem.Context) -> None:
    """A batch with more tokens than the step added would begin in unmapped rows."""
    page = host.info.granule
    rows = page // 256
    config = KVCacheConfig(
        1, 1, 64, "float32", max_batch=2, max_seq_len=40 * rows, window=rows, window_tile=8
    )
    with KVCache(config, host) as cache:
        cache.alloc_reqid()
        for length in (10 * rows, 10 * rows + 5, 10 * rows + 10):
            assert cache.step([length, 0]) == 0
        attend = Attention(cache)
        for _ in range(1000):
            if cache.slots.first_rows([0])[0]:
                break
            cache.step([length, 0])
        there = cache.slots.first_rows([0])[0]
        assert there == -(-(9 * rows + 5 - 8) * 256 // page) * rows or there % rows == 0
        assert 0 < there <= 9 * rows + 5 - 8
        attend.batch([0], [5], [length])
        assert EXACT.first(length, 5, rows) >= there
        with pytest.raises(InvalidArgument, match=f"window of {rows}; rows before {there} have"):
            attend.batch([0], [2 * rows], [length])
        with pytest.raises(InvalidArgument, match="reqid 2 is not between 0 and 1"):
            cache.slots.first_rows([2])
        attend.close()


def test_a_tile_before_the_window_needs_its_rows(
    host: pyvmem.Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checks only the rule that rejects the kernel; this needs no GPU."""
    one = KERNELS["fa2"]
    free = kernels._Kernel(lambda form, device: "", KERNELS["sdpa"].run, one.reads)
    monkeypatch.setitem(KERNELS, "fa2", free)
    shape = {"num_layers": 1, "num_kv_heads": 1, "head_dim": 64, "dtype": "float32"}
    shape |= {"max_batch": 1, "max_seq_len": 4096, "window": 64}
    with KVCache(KVCacheConfig(**shape), host) as cache:
        text = "it reads whole tiles before a window and needs window_tile of 255; .* has 192"
        with pytest.raises(InvalidArgument, match=text):
            Attention(cache, "fa2")
    with KVCache(KVCacheConfig(**shape, window_tile=256), host) as cache:
        cache.alloc_reqid()
        attend = Attention(cache, "fa2")
        for length in (2048, 2049):
            assert cache.step([length]) == 0
        for _ in range(1000):
            if cache.slots.first_rows([0])[0]:
                break
            cache.step([length])
        there = cache.slots.first_rows([0])[0]
        assert there
        attend.batch([0], [1], [2049])
        new = 2049 - 64 + 1 - there  # the window is mapped, but not the tile before it
        with pytest.raises(OverRead, match=f"fa2 may read from row .* rows before {there} have"):
            attend.batch([0], [new], [2049])
        attend.close()
    assert Reads(before=191).first(1000, 1, 64) == 1000 - 64 - 191
    assert Reads(before=191).first(100, 1, 64) == 0


def test_impossible_options_are_rejected(cache: LayeredCache, host: pyvmem.Context) -> None:
    with pytest.raises(
        InvalidArgument, match="layer 2 has one tensor of 48 elements per row; v_head_dim"
    ):
        Attention(cache)
    with pytest.raises(InvalidArgument, match="cannot be 49"):
        Attention(cache, v_head_dim=49)
    with pytest.raises(InvalidArgument, match="one entry per layer: 1, but the cache has 6"):
        Attention(cache, windows=[0], v_head_dim=LATENT)
    with pytest.raises(InvalidArgument, match="layer 1: a window of 25, but the cache keeps 24"):
        Attention(cache, windows=[0, 25, 0, 0, 0, 24], v_head_dim=LATENT)
    with pytest.raises(InvalidArgument, match="layer 1: a window of 0, but the cache keeps 24"):
        Attention(cache, windows=[0] * 6, v_head_dim=LATENT)
    with pytest.raises(InvalidArgument, match="scales are for keys and values of float8_e4m3fn"):
        Attention(cache, v_head_dim=LATENT, scales=[(1, 1)] * 6)
    fill(cache, CASES[0])
    attend = Attention(cache, v_head_dim=LATENT)
    batch = attend.batch([0, 1], [1, 1], [1, 2])
    row = torch.zeros(2, 1, LATENT + 8)
    with pytest.raises(InvalidArgument, match="layer 2 has one tensor"):
        attend.write(2, row, row, batch)
    with pytest.raises(InvalidArgument, match="layer 0 has values; pass value="):
        attend.write(0, torch.zeros(2, 2, 32), None, batch)
    attend.write(2, row + 1, None, batch)
    assert bool((cache.k(2)[0, 0] == 1).all())
    attend.close()


def test_equal_layers_share_a_kernel_choice(cache: LayeredCache) -> None:
    forms = forms_of(cache, v_head_dim=LATENT)
    assert forms[0] == forms[4]
    assert len(set(forms)) == 5
    assert [form.window for form in forms] == [0, WINDOW, 0, 0, 0, WINDOW]
    assert [form.latent for form in forms] == [False, False, True, False, False, False]
    assert [len(form.caches) for form in forms] == [1, 1, 1, 2, 1, 1]


# ---- 8 bits --------------------------------------------------------------------------------------


def test_no_cpu_kernel_reads_8_bits(host: pyvmem.Context) -> None:
    for dtype in (FP8, "float8_e5m2"):
        config = KVCacheConfig(1, 2, 64, dtype, max_batch=1, max_seq_len=64)
        with KVCache(config, host) as cache:
            with pytest.raises(InvalidArgument, match=f"no kernel reads .*sdpa: it has no {dtype}"):
                Attention(cache)
            with pytest.raises(InvalidArgument, match=f"sdpa cannot be used: it has no {dtype}"):
                Attention(cache, "sdpa")


def test_8_bit_rows_are_written_by_their_scales(
    host: pyvmem.Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checks the kernel's inputs: rows quantized with the layer's scales, queries quantized with
    their own, and the descales.
    """
    got: dict[str, Any] = {}

    def run(q: Any, k: Any, v: Any, batch: Any, scale: float, window: int = 0, scales: Any = None):  # type: ignore[no-untyped-def]
        got.update(q=q, scales=scales)
        return torch.zeros_like(q)

    free = kernels._Kernel(lambda form, device: "", run, lambda device: EXACT)
    monkeypatch.setitem(KERNELS, "fa3-paged", free)
    config = KVCacheConfig(2, 2, 16, FP8, max_batch=1, max_seq_len=64)
    with KVCache(config, host) as cache:
        cache.alloc_reqid()
        assert cache.step([3]) == 0
        attend = Attention(cache, "fa3-paged", scales=[(1, 1), ([0.5, 2.0], 0.25)])
        batch = attend.batch([0], [3], [3])
        key, value = torch.randn(2, 3, 2, 16, dtype=torch.bfloat16)
        key[0, 0, 0] = 1000.0  # out of range: clamped to the largest value
        attend.write(1, key, value, batch)
        k, v = cache.k(1)[0, :3].float(), cache.v(1)[0, :3].float()
        scale = torch.tensor([0.5, 2.0])[:, None]
        want = (key.float() / scale).clamp(-448, 448)
        torch.testing.assert_close(k, want, rtol=2**-4, atol=2**-9)
        torch.testing.assert_close(v, value.float() / 0.25, rtol=2**-4, atol=2**-9)
        assert k[0, 0, 0] == 448
        attend(key, 1, batch)
        assert got["scales"].key.tolist() == [0.5, 2.0]
        assert got["scales"].value.tolist() == [0.25, 0.25]
        scale = got["scales"].of_queries(key)
        torch.testing.assert_close(scale, torch.tensor([1000 / 448]))
        back = quantised(key, scale).float() * scale
        torch.testing.assert_close(back, key.float(), rtol=2**-4, atol=2**-9 * float(scale))
        attend.close()


def test_scales_are_checked() -> None:
    cpu = torch.device("cpu")
    for given, text in (
        ([(1, 1)], "scales of 1 layers, but the cache has 2"),
        (
            [(1, 1), ([1, 2, 3], 1)],
            "layer 1: 3 scales; expected one, or one for each of 2 KV heads",
        ),
        ([(1, 0), (1, 1)], "layer 0: a scale of 0.0 is not positive"),
        ([(1, float("inf")), (1, 1)], "layer 0: a scale of inf is not positive"),
    ):
        with pytest.raises(InvalidArgument, match=text):
            scales_of(given, [2, 2], cpu)
    assert [one.key.tolist() for one in scales_of(None, [2, 1], cpu)] == [[1, 1], [1]]


def test_the_error_of_8_bits_is_within_the_documented_bound() -> None:
    """Mimics FlashAttention-3's 8-bit arithmetic, which rounds q, k, v and the weights."""
    torch.manual_seed(5)
    for length in (64, 1024):
        q, k, v = torch.randn(3, 4, length, 128).unbind()
        scale = 128**-0.5
        want = (q @ k.transpose(1, 2) * scale).softmax(-1) @ v

        def rounded(x: torch.Tensor) -> torch.Tensor:
            unit = x.abs().amax() / 448
            return (x / unit).to(torch.float8_e4m3fn).float() * unit

        scores = rounded(q) @ rounded(k).transpose(1, 2) * scale
        weights = (scores - scores.amax(-1, keepdim=True)).exp()
        out = rounded(weights) @ rounded(v) / weights.sum(-1, keepdim=True)
        error = (out - want).square().mean().sqrt() / want.square().mean().sqrt()
        assert float(error) < FP8_TOLERANCE


FP8_TOLERANCE = 0.08  # RMS of the error divided by RMS of the result, as in docs/guides/kernels.md


def test_flash_rejects_values_of_another_head_size(host: pyvmem.Context) -> None:
    from pyvmem.attention import flash, infer

    with KVCache(KVCacheConfig(1, 1, 64, "float16", max_batch=1, max_seq_len=64), host) as cache:
        cpu = torch.device("cpu")
        form = Form(cache, cache, 64, 32)
        for why in (flash.why_not_fa3, flash.why_not_fa2, infer.why_not):
            assert why(form, cpu) == "it needs a GPU"
        assert flash.why_not_blocks(form) == ""


def test_shapes_that_flex_attention_supports_on_a_gpu(
    host: pyvmem.Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pyvmem.attention import flex

    monkeypatch.setattr("torch.utils._triton.has_triton", lambda: True)
    with KVCache(KVCacheConfig(1, 1, 64, "float16", max_batch=1, max_seq_len=64), host) as cache:
        gpu = torch.device("cuda")
        assert flex.why_not(Form(cache, cache, 256, 16), gpu) == ""
        assert "head_dim 257 is above 256" in flex.why_not(Form(cache, cache, 257, 256), gpu)
        small = "keys of 16 elements and values of 8: Triton multiplies no fewer than 16"
        assert flex.why_not(Form(cache, cache, 16, 8), gpu) == small


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize(
    ("new", "rows", "window"), [(33, 50, 0), (50, 50, 0), (33, 50, 9), (2, 50, 1)]
)
def test_narrow_values_block_by_block(
    monkeypatch: pytest.MonkeyPatch, groups: int, new: int, rows: int, window: int
) -> None:
    """Compares attention over a latent with one masked SDPA call, for whole and chunked prompts."""
    q, k = torch.randn(2, new, 4, 24), torch.randn(2, rows, groups, 24)
    v = k[..., :16]
    mask = torch.ones(new, rows, dtype=torch.bool).tril(rows - new)
    if window:
        mask = mask.triu(rows - new - window + 1)
    every = [one.transpose(1, 2) for one in (q, k, v)]
    want = scaled_dot_product_attention(*every, attn_mask=mask, scale=0.3, enable_gqa=True)
    for scores in (1, 1000, 1 << 26):  # one token, five tokens, or all tokens per block
        monkeypatch.setattr(sdpa, "_SCORES", scores)
        found = sdpa.causal(q, k, v, 0.3, window)
        torch.testing.assert_close(found, want.transpose(1, 2))
        low = sdpa.causal(q.bfloat16(), k.bfloat16(), v.bfloat16(), 0.3, window)
        torch.testing.assert_close(low.float(), want.transpose(1, 2), atol=0.05, rtol=0.05)


@pytest.mark.parametrize(("nope", "values"), [(8, 12), (4, 16), (100, 48)])
@pytest.mark.parametrize("elements", [1, 1 << 26])
def test_a_latent_with_its_up_projections(
    monkeypatch: pytest.MonkeyPatch, cache: LayeredCache, nope: int, values: int, elements: int
) -> None:
    """Checks that the result equals attention over every head's own keys and values, for any number
    of new tokens.

    A head of 4 + 8 elements is narrower than its values; with 100 elements, expanding never saves
    multiplications.
    """
    monkeypatch.setattr(latent, "_ELEMENTS", elements)
    heads, layer = 4, 2
    rotary = LAYERS[layer].head_dim - LATENT
    up = UpProjections(torch.randn(heads, nope, LATENT), torch.randn(heads, values, LATENT))
    least = latent.expands_from(up)
    ways = set()
    for case in CASES:
        fill(cache, case)
        attend = Attention(cache, v_head_dim=LATENT)
        batch = attend.batch(case.reqids, case.q_lens, case.kv_lens)
        rows, longest = cache.k(layer)[:, :, 0], max(case.kv_lens)
        k = torch.full((6, longest, heads, nope + rotary), float("nan"))
        v = torch.full((6, longest, heads, values), float("nan"))
        for reqid, length in zip(case.reqids, case.kv_lens, strict=True):
            some = rows[reqid, :length]
            k[reqid, :length, :, :nope] = torch.einsum("rl,hnl->rhn", some[:, :LATENT], up.key)
            k[reqid, :length, :, nope:] = some[:, None, LATENT:]
            v[reqid, :length] = torch.einsum("rl,hvl->rhv", some[:, :LATENT], up.value)
        del rows, some
        q = torch.randn(batch.tokens, heads, nope + rotary) / 10
        want = wanted(q, k, v, case, 0)
        for _ in range(2):  # the second pass reuses what the first one derived from the lengths
            out = attend(q, layer, batch, up=up)
            assert out.shape == (batch.tokens, heads, values)
            torch.testing.assert_close(out.double(), want, atol=1e-4, rtol=1e-4)
        ways |= {new >= least for new in case.q_lens}
        attend.close()
    assert ways == ({False} if nope == 100 else {False, True})


def test_wrong_up_projections_are_rejected(cache: LayeredCache) -> None:
    fill(cache, CASES[0])
    attend = Attention(cache, v_head_dim=LATENT)
    batch = attend.batch(CASES[0].reqids, CASES[0].q_lens, CASES[0].kv_lens)
    up = UpProjections(torch.randn(4, 8, LATENT), torch.randn(4, 12, LATENT))
    q = torch.randn(batch.tokens, 4, 8 + LAYERS[2].head_dim - LATENT)
    with pytest.raises(InvalidArgument, match="layer 0 does not store an MLA latent"):
        attend(q, 0, batch, up=up)
    for name, bad in (
        ("up.key is (4, 8, 5)", up._replace(key=up.key[..., :5])),
        ("up.key is (3, 8, ", up._replace(key=up.key[:3])),
        ("up.value is (12, ", up._replace(value=up.value[0])),
        ("float64 on cpu; expected (4, 12, ", up._replace(value=up.value.double())),
    ):
        with pytest.raises(InvalidArgument, match=re.escape(name)):
            attend(q, 2, batch, up=bad)
    with pytest.raises(InvalidArgument, match="q is "):
        attend(q[..., 1:], 2, batch, up=up)
    attend.close()


def test_layers_and_batches_of_other_caches_are_rejected(context: pyvmem.Context) -> None:
    """A batch checks lengths against its own cache; in another cache the same rows may be
    unmapped.
    """
    shapes = [LayerShape(1, 16), LayerShape(1, 16, window=WINDOW)]
    how: dict[str, Any] = {"dtype": "float32", "max_batch": 1, "max_seq_len": 64}
    with (
        LayeredCache(shapes, context=context, **how) as cache,
        LayeredCache(shapes, context=context, **how) as other,
    ):
        attends = [Attention(one, "sdpa") for one in (cache, other)]
        reqid = cache.alloc_reqid()
        assert reqid is not None
        assert cache.step([9]) == 0
        batch, new = attends[0].batch([reqid], [9], [9]), cache.k(0).new_ones(9, 1, 16)
        for layer in (-1, 2):
            text = f"layer {layer} is not between 0 and 1"
            with pytest.raises(InvalidArgument, match=text):
                attends[0](new, layer, batch)
            with pytest.raises(InvalidArgument, match=text):
                attends[0].write(layer, new, new, batch)
            with pytest.raises(InvalidArgument, match=text):
                attends[0].window(layer)
        with pytest.raises(InvalidArgument, match="the batch belongs to another cache"):
            attends[1](new, 0, batch)
        with pytest.raises(InvalidArgument, match="the batch belongs to another cache"):
            attends[1].write(0, new, new, batch)
        for one in attends:
            one.close()


def test_an_invalid_fork_length_is_rejected(context: pyvmem.Context) -> None:
    with LayeredCache(
        [LayerShape(1, 16), LayerShape(1, 16, window=WINDOW)], context=context, max_batch=2
    ) as cache:
        reqid = cache.alloc_reqid()
        assert reqid is not None
        assert cache.step([9 if slot == reqid else 0 for slot in range(2)]) == 0
        for length in (-1, 10):
            with pytest.raises(InvalidArgument, match=f"length {length}: reqid 0 holds 9 tokens"):
                cache.fork(reqid, length)
