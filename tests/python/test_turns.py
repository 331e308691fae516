# SPDX-License-Identifier: MIT
"""Description: the lock of a budget: re-entrant, and it goes to who waits before who had it."""

from __future__ import annotations

import threading

import pytest
from kvcache_helpers import at_the_gate, eventually

from pyvmem.kvcache.budget import Turns


def test_who_waits_comes_before_who_had_it() -> None:
    turns = Turns()
    order: list[str] = []

    def other() -> None:
        with turns:
            order.append("other")

    thread = threading.Thread(target=other, daemon=True)
    with turns:
        thread.start()
        eventually(lambda: at_the_gate(turns))
        order.append("first")
    with turns:  # with an RLock, this thread would have it again
        order.append("again")
    thread.join(60)
    assert order == ["first", "other", "again"]


def test_a_block_within_a_block_waits_for_nobody() -> None:
    turns = Turns()
    done: list[str] = []

    def other() -> None:
        with turns, turns:
            done.append("other")

    thread = threading.Thread(target=other, daemon=True)
    with turns:
        thread.start()
        eventually(lambda: at_the_gate(turns))
        with turns, turns:
            done.append("inner")
        assert done == ["inner"], "a block that ended inside has not let the lock go"
    thread.join(60)
    assert done == ["inner", "other"]


def test_an_exception_lets_it_go() -> None:
    turns = Turns()
    with pytest.raises(KeyError), turns, turns:
        raise KeyError
    thread = threading.Thread(target=turns.__enter__, daemon=True)
    thread.start()
    thread.join(60)
    assert not thread.is_alive()


def test_many_threads_count_right() -> None:
    turns = Turns()
    count = 0

    def add() -> None:
        nonlocal count
        for _ in range(500):
            with turns:
                before = count
                with turns:
                    count = before + 1

    threads = [threading.Thread(target=add, daemon=True) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert count == 2000
