# SPDX-License-Identifier: MIT
"""Description: tensor parallelism on the pool: two ranks in processes, equal tokens, equal maps."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
from test_engine import answer, elastic_of, prompts

from pyvmem.ledger.accounts import Ledger

TWO = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}


@pytest.mark.long
def test_two_ranks(start: Callable[..., Any], ledger: Any) -> None:
    with start("llama", **TWO) as llm:
        wanted = answer(llm, prompts())
    with start("llama", VMEM_VLLM="1", VMEM_NAME="two", VMEM_RESERVE="1M", **TWO) as llm:
        elastic = elastic_of(llm)
        assert len(elastic.ranks.ranks) == 2
        assert answer(llm, prompts()) == wanted
        assert answer(llm, prompts()) == wanted
        assert elastic.hits > 0
        elastic.settle()
        live = elastic.live_bytes()
        assert [one["mapped_bytes"] for one in elastic.ranks.stats()] == [live, live]
        kept = [one.fingerprint() for one in elastic.ranks.ranks]
        assert kept[0] == kept[1]
        assert elastic.backing.mapped_bytes == live
        assert elastic.backing.check() == []
        with Ledger("host", folder=ledger, create=False) as book:
            (one,) = book.engines()
        assert (one.name, one.used) == ("two", 2 * live)
        assert llm.reset_prefix_cache()
        elastic.settle()
        null = 2 * elastic.backing.geometry.page_size
        assert [one["mapped_bytes"] for one in elastic.ranks.stats()] == [null, null]
        bare = [one.fingerprint() for one in elastic.ranks.ranks]
        assert bare[0] == bare[1] != kept[0]
    end = time.monotonic() + 20
    while engines(ledger) and time.monotonic() < end:
        time.sleep(0.05)
    assert engines(ledger) == []


def engines(folder: Any) -> list[str]:
    with Ledger("host", folder=folder, create=False) as book:
        return [one.name for one in book.engines()]
