# SPDX-License-Identifier: MIT
"""Description: what goes wrong around an engine, and options that change its blocks."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from test_engine import answer, check, prompts

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
