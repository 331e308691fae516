# SPDX-License-Identifier: MIT
"""A budget's lock is reentrant and fair: waiting threads go ahead of the last holder."""

from __future__ import annotations

import threading

import pytest
from kvcache_helpers import at_the_gate, eventually

from pyvmem.kvcache.budget import FairLock


def test_a_waiting_thread_precedes_the_last_holder() -> None:
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
    with lock:  # an RLock would let this thread take it again first
        order.append("again")
    thread.join(60)
    assert order == ["first", "other", "again"]


def test_the_lock_is_reentrant() -> None:
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
        assert done == ["inner"], "the inner block must not release the lock"
    thread.join(60)
    assert done == ["inner", "other"]


def test_an_exception_releases_the_lock() -> None:
    lock = FairLock()
    with pytest.raises(KeyError), lock, lock:
        raise KeyError
    thread = threading.Thread(target=lock.__enter__, daemon=True)
    thread.start()
    thread.join(60)
    assert not thread.is_alive()


def test_mutual_exclusion_of_many_threads() -> None:
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
