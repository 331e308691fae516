# SPDX-License-Identifier: MIT
"""Tests a vLLM rank's memory on each back end, including VMEM_BACKEND=cuda."""

from __future__ import annotations

import time

import pytest

from pyvmem.elastic.geometry import Run, runs_of
from pyvmem.elastic.memory import KVMemory, open_context
from pyvmem.errors import BadHandle

BLOCKS, TENSORS = 64, 3


@pytest.mark.parametrize("blocks_in_a_page", [1, 8])
def test_pages_are_mapped_and_unmapped(backend: str, blocks_in_a_page: int) -> None:
    context = open_context(backend, 0, 0, 0)
    page = context.info.granule
    memory = KVMemory(context, BLOCKS, [BLOCKS * page // blocks_in_a_page] * TENSORS)
    geometry = memory.geometry
    null = runs_of([geometry.pages(0, 0)])
    memory.grow(null)
    bare = memory.fingerprint()
    rest = [Run(0, 1, geometry.num_pages(0) - 1)]
    memory.grow(rest)
    assert context.stats().mapped_bytes == TENSORS * geometry.num_pages(0) * page
    assert memory.fingerprint() != bare
    memory.release(7, rest, 1)
    assert memory.finished() == {}, "a step may use them"
    memory.step_ends(1)
    end = time.monotonic() + 60
    found: dict[int, str] = {}
    while not found and time.monotonic() < end:
        found = memory.finished()
    assert found == {7: ""}
    assert context.stats().mapped_bytes == TENSORS * page
    assert memory.fingerprint() == bare
    memory.close()
    assert context._closed


def test_memory_that_is_closed_during_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM stops its workers before the scheduler, whose thread may still be moving prefixes."""
    context = open_context("host", 0, 0, 0)
    memory = KVMemory(context, BLOCKS, [BLOCKS * context.info.granule] * TENSORS)
    every = [Run(0, 0, memory.geometry.num_pages(0))]
    memory.grow(every)
    copied: list[int] = []

    def closes() -> None:
        memory.close()
        copied.append(context.stats().mapped_bytes)

    monkeypatch.setattr(memory, "fence", closes)
    assert memory.move([(2, 1)], 0)
    assert copied == [TENSORS * BLOCKS * context.info.granule], "the copy uses it"
    assert context._closed
    assert not memory.move([(2, 1)], 0)
    with pytest.raises(BadHandle, match="closed"):
        memory.grow(every)
    assert memory.compact(1, 0) == 0
