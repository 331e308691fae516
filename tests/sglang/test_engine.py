# SPDX-License-Identifier: MIT
"""Description: SGLang's CPU engine with the pool answers as stock SGLang does, on less memory."""

from __future__ import annotations

from pathlib import Path

import pytest
from conftest import Start
from served import PAGE_BYTES, becomes, prompts

from pyvmem.ledger.accounts import EngineInfo, engines_in


def info(tmp_path: Path) -> EngineInfo:
    """What the ledger says of the one engine."""
    (found,) = engines_in(tmp_path / "ledger")["host"]
    return found


@pytest.mark.parametrize("page", [16, 32])
def test_tokens_prefixes_flush_and_sleep(
    start: Start, stock: list[list[int]], tmp_path: Path, page: int
) -> None:
    engine = start({"VMEM_NAME": "one"}, page_size=page)
    assert engine.answer(prompts()) == stock
    again = engine.generate(prompts())
    assert [one["output_ids"] for one in again] == stock
    hits = [one["meta_info"]["cached_tokens"] for one in again]
    assert all(hits[:4])
    assert not any(one % page for one in hits)
    assert becomes(lambda: info(tmp_path).cached > 0 == info(tmp_path).in_use)
    assert info(tmp_path).name == "one"
    assert engine.call("flush_cache").success
    one_page = PAGE_BYTES * page // 16
    assert info(tmp_path).used == one_page
    assert engine.answer(prompts()) == stock
    engine.call("release_memory_occupation", tags=["kv_cache"])
    assert info(tmp_path).used == one_page
    engine.call("resume_memory_occupation", tags=["kv_cache"])
    assert engine.answer(prompts()) == stock
