# SPDX-License-Identifier: MIT
"""2 MiB entries are created, split, joined and freed while a kernel is reading.

The kernel keeps reading all pages that the operations leave alone, and must never fault or read a
wrong byte. tests/c/test_entries.c checks that the driver's entries match the records.

Needs a CUDA device, torch and the back end stock; skipped otherwise.
"""

from __future__ import annotations

import random
import threading
from typing import Any

import pytest

import pyvmem
from pyvmem import Caps, Context, OpBatch, Reservation

torch = pytest.importorskip("torch")
STOCK = any(one.usable for one in pyvmem.probe() if one.backend == "stock")
pytestmark = [
    pytest.mark.needs_tensors,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device"),
    pytest.mark.skipif(not STOCK, reason="stock is not usable here"),
]

PAGE, BLOCK = 64 << 10, 2 << 20
PAGES = BLOCK // PAGE
PAIRS = 16  # pairs of blocks: the kernel reads one block, the operations change the other
ROUNDS = 2000
ONES = 0x0101_0101_0101_0101


class Reader:
    """A thread that keeps the GPU reading the even blocks of a reservation."""

    def __init__(self, blocks: Any, want: Any) -> None:
        self._blocks, self._want = blocks, want
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.passes = 0
        self.wrong = torch.zeros((), dtype=torch.int64, device="cuda")

    def _run(self) -> None:
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            while not self._stop.is_set():
                for _ in range(8):
                    self.wrong += (self._blocks != self._want).sum()
                    self.passes += 1
                stream.synchronize()

    def __enter__(self) -> Reader:
        torch.cuda.synchronize()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        torch.cuda.synchronize()


def run(context: Context, name: str, *args: Any, **options: Any) -> None:
    ops = OpBatch(1)
    getattr(ops, name)(*args, **options)
    context.batch(ops)


def quiet(context: Context, space: Reservation) -> Any:
    """Populates the even blocks, splitting every fourth; returns the word that fills each page."""
    values = torch.zeros((PAIRS, PAGES, 1), dtype=torch.int64)
    for pair in range(PAIRS):
        at = space.addr + 2 * pair * BLOCK
        run(context, "populate", at, BLOCK)
        if pair % 4 == 3:
            run(context, "unmap", at + 5 * PAGE, PAGE, split=True)
            run(context, "populate", at + 5 * PAGE, PAGE)
        for page in range(PAGES):
            value = 1 + (37 * pair + page) % 127
            context.fill(at + page * PAGE, PAGE, value)
            values[pair, page] = value * ONES
    return values.cuda()


def grown(context: Context, at: int) -> None:
    for page in range(PAGES):
        run(context, "populate", at + page * PAGE, PAGE, spread=True)


def test_a_kernel_reads_while_entries_change() -> None:
    seed = 20261127
    print(f"seed {seed}")
    pick = random.Random(seed)
    held: dict[int, set[int]] = {pair: set() for pair in range(PAIRS)}  # mapped pages of odd blocks
    with Context("stock", granule=PAGE, large_entries=True) as context:
        assert Caps.LARGE_ENTRIES in context.info.caps
        space = context.reserve(2 * PAIRS * BLOCK, visible=False)
        want = quiet(context, space)
        assert context.stats().large_entries == PAIRS * 3 // 4
        words = space.tensor((2 * PAIRS, PAGES, PAGE // 8), "int64")
        with Reader(words[::2], want) as reader:
            for number in range(ROUNDS):
                pair = pick.randrange(PAIRS)
                at, pages = space.addr + (2 * pair + 1) * BLOCK, held[pair]
                if not pages:
                    if number % 2:
                        run(context, "populate", at, BLOCK)
                    else:
                        grown(context, at)
                        context.join(at, BLOCK)
                    pages.update(range(PAGES))
                    context.fill(at, BLOCK, 1 + pair)
                elif len(pages) == PAGES and pick.random() < 0.7:
                    gone = pick.sample(range(PAGES), pick.choice((1, 1, 2, 5)))
                    ops = OpBatch(len(gone))
                    for page in gone:
                        ops.unmap(at + page * PAGE, PAGE, split=True)
                    context.batch(ops)
                    assert context.query(at).entry_bytes in (0, PAGE)
                    pages.difference_update(gone)
                elif pick.random() < 0.5:
                    for page in set(range(PAGES)) - pages:
                        run(context, "populate", at + page * PAGE, PAGE, spread=True)
                        context.fill(at + page * PAGE, PAGE, 1 + pair)
                    pages.update(range(PAGES))
                    run(context, "join", at, BLOCK)
                else:
                    run(context, "unmap", at, BLOCK, holes=True, split=True)
                    pages.clear()
                    context.trim()
                for page in pages:
                    found = context.read(at + page * PAGE, 8)
                    assert found == bytes([1 + pair]) * 8, (number, pair, page)
        assert reader.passes > 100
        assert int(reader.wrong) == 0
        stats = context.stats()
        print(f"{reader.passes} passes, {stats.splits} splits, {stats.joins} joins")
        assert stats.splits > 20
        assert stats.joins > 20
        context.check()
        del words, reader, want
        space.close(unmap=True)
