# SPDX-License-Identifier: MIT
"""Prefixes move while requests hit them; the tokens are stock vLLM's."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
from test_engine import Open, Tokens, answer, at_rest, check, elastic_of, expected, prompts, stock

__all__ = ["expected", "moving", "stock"]


def moving(elastic: Any) -> Callable[[], Any]:
    """Returns a replacement for `begin_step` that evicts random blocks and moves prefixes."""
    draw, begin_step = random.Random(1), elastic.begin_step

    def begin() -> Any:
        free = [one for one in elastic._free() if one.block_hash is not None]
        gone = draw.sample(free, len(free) // 6)
        elastic.pool.evict_blocks({one.block_id for one in gone})
        elastic.mover.choose(1000)
        return begin_step()

    return begin


@pytest.mark.parametrize("model", ["llama", "gemma"])
def test_moves_in_every_step(
    start: Open, expected: Callable[..., Tokens], monkeypatch: pytest.MonkeyPatch, model: str
) -> None:
    """Evicts random prefixes in every step, which makes room for moves."""
    wanted = expected(model)
    with start(model, VMEM_VLLM="1", VMEM_RESERVE="256K", VMEM_IDLE="3600") as llm:
        elastic = elastic_of(llm)
        monkeypatch.setattr(elastic, "begin_step", moving(elastic))
        for _ in range(4):
            assert answer(llm, prompts()) == wanted
            check(llm)
        assert elastic.mover.moved > 20
        assert elastic.hits > 0
        monkeypatch.undo()
        # An idle engine moves prefixes by calling the ranks. Requests also hit these prefixes.
        at_rest(llm)
        assert answer(llm, prompts()) == wanted
        at_rest(llm)
