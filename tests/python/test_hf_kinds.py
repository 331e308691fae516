# SPDX-License-Identifier: MIT
"""Models with windows, MLA and unequal layers generate the same tokens as with
transformers' cache.
"""

from __future__ import annotations

import copy
from itertools import product
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers", reason="the extra 'serve' is not installed")

import torch
from kinds_helpers import KINDS, PARTIAL, WINDOW, model_of
from serve_helpers import VOCABULARY, one_thread
from transformers import DynamicCache, Gemma3TextConfig

import pyvmem
from pyvmem import InvalidArgument
from pyvmem.hf import VMemCache, drafting
from pyvmem.hf.keyword import CACHE
from pyvmem.kvcache import Budget, EmptyShape, KVCache

__all__ = ["one_thread"]
pytestmark = [pytest.mark.needs_tensors, pytest.mark.filterwarnings("default")]

TILE = 16


def prompts(rows: int, length: int) -> dict[str, torch.Tensor]:
    """Returns left-padded prompts, as in a batch of different lengths."""
    dice = torch.Generator().manual_seed(5)
    ids = torch.randint(1, VOCABULARY, (rows, length), generator=dice)
    mask = torch.ones_like(ids)
    for row in range(rows):
        mask[row, : 3 * row] = 0
    return {"input_ids": ids * mask, "attention_mask": mask}


WAYS: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False, "max_new_tokens": 90},
    "sampling": {"do_sample": True, "num_return_sequences": 2, "max_new_tokens": 12},
    "beams": {"do_sample": False, "num_beams": 3, "max_new_tokens": 20},
}


@pytest.mark.parametrize("kind", KINDS)
def test_generate_matches_dynamic_cache_for_every_kind(host: pyvmem.Context, kind: str) -> None:
    model, inputs = model_of(kind), prompts(2, 31)
    for way in WAYS.values():
        answers = []
        with VMemCache(model.config, 6, 256, context=host, window_tile=TILE) as cache:
            for past in (DynamicCache(config=model.config), cache):
                torch.manual_seed(11)
                run = {**inputs, **way, "pad_token_id": 0}
                answers.append(model.generate(**run, **{CACHE: past}))
            assert cache.kvcache is not None
            cache.kvcache.check_integrity()
        assert torch.equal(*answers), way
    assert host.stats().used_bytes == 0


def holds(layer: Any) -> bool:
    """Returns true if a layer of transformers' own cache still holds anything after a pass."""
    return any(
        one is not None
        for one in (getattr(layer, "keys", None), *getattr(layer, "conv_states", {}).values())
    )


@pytest.mark.parametrize("kind", PARTIAL)
def test_layers_that_share_keys_slide_or_store_nothing(host: pyvmem.Context, kind: str) -> None:
    """Also covers capped scores, sinks and chunks, where transformers' own attention reads the
    cache's rows.
    """
    model, inputs = model_of(kind), prompts(2, 31)
    run = {**inputs, "do_sample": False, "max_new_tokens": 60, "pad_token_id": 0}
    with (
        torch.no_grad(),
        VMemCache(model.config, 2, 128, context=host, window_tile=TILE) as cache,
    ):
        past = DynamicCache(config=model.config)
        want, got = (model.generate(**run, **{CACHE: one}) for one in (past, cache))
        assert torch.equal(got, want)
        assert cache.kvcache is not None
        held = [shape for shape in cache.kvcache.layers if not isinstance(shape, EmptyShape)]
        assert len(held) == sum(map(holds, past.layers))
        with copy.deepcopy(cache) as other:
            new = got[:, -1:]
            answers = [model(new, **{CACHE: one}).logits for one in (cache, other)]
            assert torch.equal(*answers)
            del answers
        cache.kvcache.check_integrity()


# whether each group has a window; groups are ordered by their first layer
WINDOWED = {"gemma3": [True, False], "mistral": [True]}


@pytest.mark.parametrize("kind", WINDOWED)
def test_rows_outside_the_window_are_unmapped(host: pyvmem.Context, kind: str) -> None:
    model, inputs = model_of(kind), prompts(2, 31)
    with VMemCache(model.config, 2, 512, context=host, window_tile=TILE) as cache:
        model.generate(**inputs, **{CACHE: cache}, max_new_tokens=200, pad_token_id=0)
        found = cache.kvcache
        assert found is not None
        assert [bool(part.config.window) for part in found.caches] == WINDOWED[kind]
        for part in found.caches:
            first, rows = part.first_rows([0])[0], 4096 // part.layout.row_bytes
            if part.config.window:
                assert 230 - WINDOW - TILE - rows <= first <= 230 - WINDOW - TILE
            else:
                assert first == 0
        with pytest.raises(InvalidArgument, match=f"the window of {WINDOW} of layer 0 begins in"):
            cache.crop(-130)
        lengths = {layer.get_seq_length() for layer in cache.layers}
        assert lengths == {230}, "the first layer must raise before another has changed"


def test_a_failed_crop_changes_no_layer(host: pyvmem.Context) -> None:
    """transformers crops layer by layer, so the first layer, whatever its kind, must check all
    layers.
    """
    kinds = ["full_attention", "sliding_attention", "full_attention"]
    config = Gemma3TextConfig(
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=2,
        hidden_size=64,
        head_dim=32,
        sliding_window=40,
        layer_types=kinds,
    )
    with VMemCache(config, 2, 2000, context=host, page_size=4096, window_tile=TILE) as cache:
        for _ in range(3):
            for layer in range(3):
                rows = torch.zeros(2, 2, 300, 32)
                cache.update(rows, rows, layer)
        with pytest.raises(
            InvalidArgument, match="the window of 40 of layer 1 begins in unmapped rows"
        ):
            cache.crop(-500)
        assert [layer.get_seq_length() for layer in cache.layers] == [900] * 3
        cache.crop(-TILE)
        assert [layer.get_seq_length() for layer in cache.layers] == [900 - TILE] * 3


def test_the_latent_is_one_tensor_per_layer(host: pyvmem.Context) -> None:
    model = model_of("deepseek")
    with VMemCache(model.config, 1, 64, context=host) as cache:
        model(torch.tensor([[1, 2, 3]]), **{CACHE: cache})
        found = cache.kvcache
        assert isinstance(found, KVCache)
        config = found.config
        assert (config.tensors_per_layer, config.num_kv_heads, config.head_dim) == (1, 1, 32)
        keys, values = cache.layers[0].keys, cache.layers[0].values
        assert (keys.shape, values.shape) == ((1, 1, 3, 24), (1, 1, 3, 8))
        row = found.k(0)[0, :3, 0]
        assert torch.equal(torch.cat([keys[0, 0], values[0, 0]], 1), row)
        del keys, values, row


@pytest.mark.parametrize("kind", ["gemma3", "mistral", "deepseek"])
def test_assisted_generation_over_one_budget(
    host: pyvmem.Context, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Draft and target share a budget; rejected tokens are removed from both caches."""
    model, ids = model_of(kind), prompts(1, 40)["input_ids"]
    draft = model_of("qwen3")
    run = {"max_new_tokens": 24, "do_sample": False, "pad_token_id": 0}
    want = model.generate(ids, **run)
    for name, value in (("assistant_confidence_threshold", 0.0), ("num_assistant_tokens", 4)):
        # makes the draft model propose tokens even at low confidence
        monkeypatch.setattr(draft.generation_config, name, value)
    budget = Budget(host, 4 << 20)
    shared: dict[str, Any] = {"context": host, "budget": budget}
    cropped: list[int] = []
    with (
        VMemCache(model.config, 1, 256, **shared) as cache,
        VMemCache(draft.config, 1, 256, **shared) as drafts,
        drafting(draft, drafts),
    ):
        for one in (cache, drafts):
            monkeypatch.setattr(one.layers[0], "crop", _noting(one.layers[0].crop, cropped))
        got = model.generate(ids, **run, assistant_model=draft, **{CACHE: cache})
        assert torch.equal(got, want)
        assert min(cropped) < 0, "nothing was rejected"
        assert drafts.get_seq_length() > 40
        assert len(budget.stats().caches) >= 2
        monkeypatch.undo()
    assert "_prepare_cache_for_generation" not in vars(draft)
    assert host.stats().used_bytes == 0


def _noting(call: Any, seen: list[int]) -> Any:
    def noting(tokens: int) -> None:
        seen.append(tokens)
        call(tokens)

    return noting


@pytest.mark.parametrize("kind", KINDS)
def test_a_deep_copy_continues_like_the_original(host: pyvmem.Context, kind: str) -> None:
    model, ids = model_of(kind), prompts(2, 90)["input_ids"]
    with (
        # with gradients, the answers would keep alive the tensors that they were computed from
        torch.no_grad(),
        VMemCache(model.config, 2, 256, context=host, window_tile=TILE) as cache,
    ):
        for new in ids[:, :88].split(22, 1):
            model(new, **{CACHE: cache})
        with copy.deepcopy(cache) as other:
            answers = [model(ids[:, 88:], **{CACHE: one}).logits for one in (cache, other)]
            assert torch.equal(*answers)


def test_a_crop_beyond_the_tile_is_rejected_even_while_mapped(
    host: pyvmem.Context,
) -> None:
    """A page is unmapped once its last row has left the window; until then, its dropped rows must
    not be used.
    """
    model, ids = model_of("mistral"), prompts(1, 256)["input_ids"]
    how: dict[str, Any] = {"context": host, "window_tile": TILE, "page_size": 64 << 10}
    length = WINDOW + TILE + 5
    for back in (TILE, TILE + 1, length):
        with torch.no_grad(), VMemCache(model.config, 1, 512, **how) as cache:
            model(ids[:, :length], **{CACHE: cache})
            if back > TILE:
                with pytest.raises(InvalidArgument, match="begins in unmapped rows"):
                    cache.crop(-back)
                continue
            cache.crop(-back)
            past, left = DynamicCache(config=model.config), length - back
            model(ids[:, :left], **{CACHE: past})
            for at in range(left, left + 2 * WINDOW, 2):
                new = ids[:, at : at + 2]
                got, want = (model(new, **{CACHE: one}).logits for one in (cache, past))
                torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("page", [4096, 65536])
@pytest.mark.parametrize("kind", ["gemma3", "mistral"])
def test_rows_before_the_window_are_copied_and_reordered(
    host: pyvmem.Context, kind: str, page: int
) -> None:
    """Rows kept for a crop survive a copy and a reorder; dropped rows do not come back."""
    model, ids = model_of(kind), prompts(2, 256)["input_ids"]
    how: dict[str, Any] = {"context": host, "window_tile": TILE, "page_size": page}
    for length, back in product((231, 232), (1, TILE, TILE + 9)):  # a page ends at 232
        with torch.no_grad(), VMemCache(model.config, 4, 512, **how) as cache:
            for new in ids[:, :length].split(WINDOW, 1):
                model(new, **{CACHE: cache})
            for other, rows in ((copy.deepcopy(cache), ids), (cache, ids.flip(0))):
                with other:
                    if other is cache:
                        cache.batch_repeat_interleave(2)
                        cache.batch_select_indices(torch.tensor([2, 0]))
                    try:
                        other.crop(-back)
                    except InvalidArgument:
                        assert back > TILE
                        continue
                    other.reorder_cache(torch.tensor([1, 0]))
                    past, left = DynamicCache(config=model.config), length - back
                    model(rows.flip(0)[:, :left], **{CACHE: past})
                    new = rows.flip(0)[:, left : left + 3]
                    got, want = (model(new, **{CACHE: one}).logits for one in (other, past))
                    torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)
