# SPDX-License-Identifier: MIT
"""Named requests keep their own rows whatever the order of calls; checked against a plain model.

Rows are derived from a request's tokens, so requests that share a prefix must read identical rows.
Attention is compared with dense attention over a plain copy.
"""

from __future__ import annotations

import gc
import random
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from kvcache_helpers import full_queue

import pyvmem
from pyvmem import InvalidArgument
from pyvmem.hf.named import NamedRequests
from pyvmem.kvcache import KVCache, KVCacheConfig

pytestmark = pytest.mark.needs_tensors

LAYERS, HEADS, DIM = 2, 2, 64  # rows of 512 bytes, which divide a page
SLOTS, LONGEST = 4, 96


def rows_of(tokens: list[int], layer: int, value: bool) -> Any:
    """Returns keys or values that depend only on the layer, the token and its position."""
    at = torch.arange(len(tokens)) * 7 + torch.tensor(tokens) * 3 + 11 * layer + 5 * value
    turn = torch.arange(HEADS * DIM) + 1
    return torch.sin(at[:, None] * turn[None, :] * 0.37).view(-1, HEADS, DIM)


def dense(q: Any, k: Any, v: Any, window: int = 0) -> Any:
    """Computes causal attention for the last tokens; tensors are ``[tokens, heads, head_dim]``."""
    scores = torch.einsum("qhd,khd->hqk", q, k) * DIM**-0.5
    past = k.shape[0] - q.shape[0]
    mask = torch.ones(q.shape[0], k.shape[0], dtype=torch.bool).tril(past)
    if window:
        mask = mask.triu(past - window + 1)
    weights = scores.masked_fill(~mask, -torch.inf).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, v)


def make(context: pyvmem.Context, pages: int = 0, window: int = 0, **more: Any) -> NamedRequests:
    page = context.info.granule
    shape = KVCacheConfig(
        num_layers=LAYERS,
        num_kv_heads=HEADS,
        head_dim=DIM,
        dtype="float32",
        max_batch=SLOTS,
        max_seq_len=max(LONGEST, 3 * page // 512),
        memory_limit=pages * 2 * LAYERS * page,
        window=window,
        window_tile=4,
    )
    return NamedRequests(KVCache(shape, context), **more)


@pytest.fixture
def requests(context: pyvmem.Context) -> Iterator[NamedRequests]:
    made = make(context)
    yield made
    made.kvcache.check_integrity()
    made.close()
    made.close()
    assert context.stats().used_bytes == 0


def compute(
    requests: NamedRequests, batch: list[tuple[str, list[int], int]], padding: int = 0
) -> None:
    """Runs one pass over a batch of (name, tokens, number of tokens cached); checks the
    outputs.
    """
    device = requests.kvcache.k(0).device
    window = requests.kvcache.config.window
    new = [tokens[past:] for _, tokens, past in batch]
    for name, tokens, past in batch:
        requests.queue(name, past, len(tokens) - past)
    for layer in range(LAYERS):
        parts = []
        for value in (False, True):
            rows = [rows_of(tokens, layer, value)[past:] for _, tokens, past in batch]
            parts.append(torch.cat([*rows, torch.full((padding, HEADS, DIM), torch.nan)]))
        q = torch.randn(sum(map(len, new)) + padding, HEADS, DIM)
        k, v = (part.to(device) for part in parts)
        got = requests.attend(layer, q.to(device), k, v, None).cpu()
        assert torch.equal(got[len(q) - padding :], torch.zeros(padding, HEADS, DIM))
        start = 0
        for (_, tokens, _), fresh in zip(batch, new, strict=True):
            end = start + len(fresh)
            k, v = (rows_of(tokens, layer, value) for value in (False, True))
            want = dense(q[start:end], k, v, window)
            torch.testing.assert_close(got[start:end], want, rtol=1e-4, atol=1e-4)
            start = end
    for name, tokens, past in batch:
        requests.computed(name, len(tokens) - past, lambda tokens=tokens: tokens, len(tokens))


@pytest.mark.parametrize(("seed", "window"), [(0, 0), (1, 0), (2, 0), (3, 0), (4, 6), (6, 6)])
def test_random_calls_against_a_plain_model(
    context: pyvmem.Context, seed: int, window: int
) -> None:
    dice, ids = random.Random(seed), random.Random(seed)  # the same choices for every page size
    torch.manual_seed(seed)
    requests = make(context, 4, window)
    longest = 2 * (context.info.granule // 512) + 5
    bases = [[ids.randrange(50) for _ in range(longest)] for _ in range(2)]
    living: dict[str, list[int]] = {}
    refused = shared = 0
    for step in range(50):
        name = f"r{step}"
        kind = dice.choice(["new", "new", "new", "fork", "drop", "go", "go"])
        if kind == "new":
            length = 1 + int(dice.random() * longest)
            tokens = [*bases[dice.randrange(2)][:length], dice.randrange(50)]
            past = requests.match(name, tokens)
            assert past < len(tokens)
            shared += past > 0
            if requests.hold(name, len(tokens)):
                compute(requests, [(name, tokens, past)])
                living[name] = tokens
            else:
                refused += 1
                requests.drop(name, record=False)
        elif kind == "fork" and living:
            parent = dice.choice(list(living))
            if requests.fork(parent, name, len(living[parent])):
                living[name] = list(living[parent])
        elif kind == "drop" and living:
            gone = dice.choice(list(living))
            del living[gone]
            requests.drop(gone, record=dice.random() < 0.7)
        else:
            batch = []
            for one, tokens in living.items():
                more = tokens + [dice.randrange(50) for _ in range(dice.randint(1, 3))]
                if len(more) < requests.kvcache.config.max_seq_len and requests.hold(
                    one, len(more)
                ):
                    batch.append((one, more, len(tokens)))
            if batch:
                compute(requests, batch, padding=dice.randint(0, 2))
                living |= {one: tokens for one, tokens, _ in batch}
        assert len(requests) == len(living)
        requests.kvcache.check_integrity()
    assert refused
    # With large pages, few requests fill a page, so a window rarely contains a page to share.
    rare = window and context.info.granule > 1 << 16
    assert shared or rare or not requests.sharing
    requests.close()
    assert context.stats().used_bytes == 0


def test_room_and_missing_predict_hold(requests: NamedRequests) -> None:
    longest = requests.kvcache.config.max_seq_len
    assert requests.room("a", longest)
    assert not requests.room("a", longest + 1)
    assert requests.missing("a", 1) == 2 * LAYERS
    assert requests.hold("a", 1)
    assert "a" in requests
    assert (requests.granted("a"), requests.granted("b")) == (1, 0)
    assert requests.missing("a", 1) == 0
    free, total = requests.pages()
    assert free == total - 2 * LAYERS
    for name in "bcd":
        assert requests.hold(name, 1)
    assert not requests.room("e", 1)  # no slot is free
    assert not requests.hold("e", 1)
    assert "e" not in requests
    requests.drop_all(forget=True)
    assert len(requests) == 0
    assert requests.pages()[0] == total


def test_longest_is_limited_by_a_slot_or_by_memory(context: pyvmem.Context) -> None:
    rows = context.info.granule // 512
    for pages in (1, 2, 9):
        requests = make(context, pages)
        longest = min(pages * rows, requests.kvcache.config.max_seq_len)
        assert requests.longest() == longest
        assert requests.hold("a", longest)
        if pages * rows == longest:
            assert not requests.room("a", longest + 1)
        requests.close()


def test_bad_calls_change_nothing(requests: NamedRequests) -> None:
    longest = requests.kvcache.config.max_seq_len
    with pytest.raises(InvalidArgument, match=f"max_seq_len is {longest}"):
        requests.hold("a", longest + 1)
    assert len(requests) == 0
    rows = torch.zeros(1, HEADS, DIM)
    with pytest.raises(InvalidArgument, match="without a batch"):
        requests.attend(0, rows, rows, rows, None)
    assert requests.hold("a", 2)
    requests.queue("a", 0, 2)
    with pytest.raises(InvalidArgument, match="1 tokens; the batch has 2"):
        requests.attend(0, rows, rows, rows, None)
    requests.drop("nobody")
    for call in (lambda: requests.queue("nobody", 0, 1), lambda: requests.fork("nobody", "b", 0)):
        with pytest.raises(InvalidArgument, match="request nobody has no slot"):
            call()
    compute(requests, [("a", [5, 6], 0)])  # the failed call queued nothing


def test_a_fork_rejects_a_name_in_use(requests: NamedRequests) -> None:
    both = [("a", [5, 6], 0), ("b", [7, 8, 9], 0)]
    for name, tokens, _ in both:
        assert requests.hold(name, len(tokens))
    compute(requests, both)
    free = requests.kvcache.slots.num_free
    for child in ("a", "b"):
        with pytest.raises(InvalidArgument, match=f"request {child} already has a slot"):
            requests.fork("a", child, 2)
    assert (requests.kvcache.slots.num_free, len(requests)) == (free, 2)
    requests.drop_all(forget=True)
    assert requests.kvcache.slots.num_free == SLOTS


def test_a_dropped_request_is_not_in_the_batch(requests: NamedRequests) -> None:
    assert requests.hold("a", 3)
    assert requests.hold("b", 2)
    requests.queue("a", 0, 3)
    requests.drop("a")
    assert requests.hold("c", 0)
    requests.queue("c", 0, 0)  # no tokens, so not part of the batch
    compute(requests, [("b", [5, 6], 0)])


def test_a_full_queue_delays_pages_mapped_ahead(requests: NamedRequests) -> None:
    rows = requests.kvcache.context.info.granule // 512
    tokens = [n % 7 for n in range(rows + 1)]
    assert requests.hold("a", rows)
    with full_queue(requests.kvcache.context):
        compute(requests, [("a", tokens[:rows], 0)])  # the next token needs another page
        assert requests.granted("a") == 1
        assert requests.hold("a", rows + 1)
        compute(requests, [("a", tokens, rows)])


def test_without_sharing_nothing_is_recorded(context: pyvmem.Context) -> None:
    requests = make(context, sharing=False)
    tokens = [1] * (context.info.granule // 512 + 1)
    assert requests.hold("a", len(tokens))
    compute(requests, [("a", tokens, 0)])
    requests.drop("a")
    assert requests.match("b", tokens) == 0
    assert requests.kvcache.stats().prefix_pages == 0
    requests.close()


def test_memory_is_freed_when_the_object_is_collected(context: pyvmem.Context) -> None:
    requests = make(context)
    assert requests.hold("a", 5)
    assert context.stats().used_bytes
    del requests
    gc.collect()
    assert context.stats().used_bytes == 0
