# SPDX-License-Identifier: MIT
"""Description: the lock of a budget: re-entrant, and it goes to who waits before who had it."""

from __future__ import annotations

import threading

import pytest
from kvcache_helpers import at_the_gate, eventually

from pyvmem.kvcache.budget import FairLock


def test_who_waits_comes_before_who_had_it() -> None:
    lock = FairLock()
    order: list[str] = []

    def other() -> None:
        with lock:
            order.append("other")

    thread = threading.Thread(target=other, daemon=True)
    with lock:
        thread.start()
        eventually(lambda: at_the_gate(lock))
        order.append("first")
    with lock:  # with an RLock, this thread would have it again
        order.append("again")
    thread.join(60)
    assert order == ["first", "other", "again"]


def test_a_block_within_a_block_waits_for_nobody() -> None:
    lock = FairLock()
    done: list[str] = []

    def other() -> None:
        with lock, lock:
            done.append("other")

    thread = threading.Thread(target=other, daemon=True)
    with lock:
        thread.start()
        eventually(lambda: at_the_gate(lock))
        with lock, lock:
            done.append("inner")
        assert done == ["inner"], "a block that ended inside has not let the lock go"
    thread.join(60)
    assert done == ["inner", "other"]


def test_an_exception_lets_it_go() -> None:
    lock = FairLock()
    with pytest.raises(KeyError), lock, lock:
        raise KeyError
    thread = threading.Thread(target=lock.__enter__, daemon=True)
    thread.start()
    thread.join(60)
    assert not thread.is_alive()


def test_many_threads_count_right() -> None:
    lock = FairLock()
    count = 0

    def add() -> None:
        nonlocal count
        for _ in range(500):
            with lock:
                before = count
                with lock:
                    count = before + 1

    threads = [threading.Thread(target=add, daemon=True) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert count == 2000
