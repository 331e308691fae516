# SPDX-License-Identifier: MIT
"""Description: the memory of a rank of vLLM on a GPU's back ends, as far as a stand-in shows it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

pytest.importorskip("torch")

from pyvmem.memory.info import Caps
from pyvmem.vllm.memory import KVMemory

MIB = 1 << 20


@pytest.mark.parametrize(
    ("caps", "visible"),
    [
        (Caps.VISIBLE | Caps.PLAIN, False),  # stock: visible ones must fit beside each other
        (Caps.PLAIN, False),
        (Caps.VISIBLE, None),  # cuda: it has no others
    ],
)
@pytest.mark.parametrize("granule", [64 << 10, 2 * MIB, 4 * MIB])
def test_reservations_are_of_a_kind_that_there_is(
    caps: Caps, visible: bool | None, granule: int
) -> None:
    """And as large as whole pages of every tensor."""
    asked: list[tuple[int, bool | None]] = []
    context = SimpleNamespace(
        cuda_device=0,
        info=SimpleNamespace(granule=granule, caps=caps),
        reserve=lambda size, *, visible: asked.append((size, visible)),
    )
    memory = KVMemory(cast(Any, context), 3, [3 * MIB, 3 * MIB])
    span = 4 * MIB  # of 3 MiB
    assert asked == [(2 * span, visible)]
    assert memory.span(0) == span
    assert span % granule == 0


def test_no_gpu_asks_for_what_the_back_end_likes() -> None:
    asked: list[Any] = []
    context = SimpleNamespace(
        cuda_device=None,
        info=SimpleNamespace(granule=4096, caps=Caps.VISIBLE | Caps.PLAIN),
        reserve=lambda size, *, visible: asked.append(visible),
    )
    KVMemory(cast(Any, context), 2, [8192])
    assert asked == [None]
