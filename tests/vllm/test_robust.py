# SPDX-License-Identifier: MIT
"""Description: an engine whose memory others have: engines, and processes in no ledger."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from test_engine import answer, check, elastic_of, greedy, memory_of, prompts
from test_server import wait_for

from pyvmem.ledger.accounts import Account, Ledger

MIB = 1 << 20
PAGE = 64 << 10


def gives_back(account: Account, ended: threading.Event) -> None:
    """An engine's keeper: what others are short of goes."""
    while not ended.wait(0.05):
        if excess := account.excess():
            account.give(excess)


@pytest.mark.parametrize("gives", [True, False])
def test_an_engine_starts_while_another_has_all_the_memory(
    start: Callable[..., Any], ledger: Path, monkeypatch: pytest.MonkeyPatch, gives: bool
) -> None:
    """It asks for what it needs to begin with, and says so where that does not come."""
    from pyvmem.vllm import engine

    monkeypatch.setattr(engine, "_START_PATIENCE", 60.0 if gives else 0.5)
    full = Ledger("host", 4 * MIB, ledger).join(
        "full", floor=0, limit=4 * MIB, least=1, virtual=4 * MIB
    )
    assert full.take(4 * MIB)
    full.mapped(4 * MIB)
    ended = threading.Event()
    keeper = threading.Thread(target=gives_back, args=(full, ended))
    try:
        if gives:
            keeper.start()
            with start("llama", VMEM_VLLM="1", VMEM_RESERVE="0") as llm:
                assert full.used <= 4 * MIB - 2 * PAGE
                answer(llm, prompts())
                check(llm)
        else:
            with (
                pytest.raises(MemoryError, match=r"the null block needs 131072 bytes, 0 can be"),
                start("llama", VMEM_VLLM="1"),
            ):
                pass
    finally:
        ended.set()
        if gives:
            keeper.join()
        full.close()


@pytest.mark.long
def test_a_foreign_process_takes_the_memory(start: Callable[..., Any]) -> None:
    """One that is in no ledger. Requests wait, and go on once there is memory again."""
    with start("llama", VMEM_VLLM="1", VMEM_RESERVE="0", VMEM_IDLE="0.1") as llm:
        wanted = answer(llm, prompts())
        assert llm.reset_prefix_cache()
        elastic, memory, engine = elastic_of(llm), memory_of(llm), llm.llm_engine
        elastic.settle()
        for number, prompt in enumerate(prompts()):
            engine.add_request(str(number), prompt, greedy())
        found: dict[str, list[int]] = {}

        def steps(count: int) -> None:
            for _ in range(count):
                for one in engine.step():
                    found[one.request_id.partition("-")[0]] = list(one.outputs[0].token_ids)

        steps(3)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(memory, "free", lambda: 0)  # what the device says
            wait_for(lambda: elastic.ranks.free() == 0)
            before = memory.context.stats().mapped_bytes
            steps(60)
            assert engine.has_unfinished_requests()
            assert memory.context.stats().mapped_bytes <= before
            check(llm)
        while engine.has_unfinished_requests():
            steps(1)
        assert [found[str(number)] for number in range(len(wanted))] == wanted
        check(llm)
