# SPDX-License-Identifier: MIT
"""An asynchronous exception never leaves a `Flag` half set."""

from __future__ import annotations

import threading
import time

import pytest
from interrupts_helpers import Interrupted, Interrupts

from pyvmem.plumbing.flag import Flag


def test_wait_returns_when_set_or_timed_out() -> None:
    flag = Flag()
    assert not flag.is_set()
    assert not flag.wait(0.001)
    threading.Timer(0.01, flag.set).start()
    begun = time.monotonic()
    assert flag.wait(60)
    assert time.monotonic() - begun < 60
    assert flag.is_set()
    assert flag.wait(60)
    flag.set()


def test_each_point_of_set() -> None:
    """Also interrupts inside the standard library; `threading.Event` would fail this test."""
    counter = Interrupts(package="")
    counter.run(Flag().set)
    assert counter.count
    for at in range(1, counter.count + 1):
        flag = Flag()
        with pytest.raises(Interrupted):
            Interrupts(at, package="").run(flag.set)
        thread = threading.Thread(target=flag.set, daemon=True)
        thread.start()
        thread.join(8)
        assert not thread.is_alive(), f"point {at}"
        assert flag.wait(8)
