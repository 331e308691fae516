# SPDX-License-Identifier: MIT
"""Defines the patterns in which live pages are mapped, and the pages' addresses."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

from pyvmem.bench.setting import MB

__all__ = ["LEVELS", "PATTERNS", "TENSORS", "Pattern", "Shape"]

LEVELS = (1 << 10, 10 << 10, 100 << 10, 400 << 10, 1 << 20)
TENSORS = 4
_RUN = 64  # pages that a prefill maps in one tensor
_REQUESTS = 256
_TOGETHER = 8  # requests that need a page in the same step
_SEED = 20


@dataclass(frozen=True)
class Pattern:
    """A mapping pattern; `most` is the highest level at which it is measured."""

    name: str
    what: str
    decode: bool
    spread: bool = False
    join: bool = False
    most: int = LEVELS[-1]


PATTERNS = (
    Pattern("runs", "prefill, runs of 64", decode=False),
    Pattern("decode", "decode, page by page", decode=True),
    Pattern("decode_consolidated", "decode, consolidated", True, join=True, most=LEVELS[2]),
    Pattern("decode_spread", "decode, spread", True, spread=True, most=LEVELS[2]),
    Pattern(
        "decode_spread_consolidated",
        "decode, spread, consolidated",
        True,
        spread=True,
        join=True,
    ),
)


class Shape:
    """The address layout of a pattern's pages: consecutive tensors, each divided into slots."""

    def __init__(self, pattern: Pattern, pages: int, page: int) -> None:
        self.page = page
        streams = TENSORS * _REQUESTS
        if pattern.decode:
            self.slots = _REQUESTS
            self.depth = max(pages // streams, 1)
            self.piece = 1
            self.batch = _TOGETHER * TENSORS
            self.ops = _TOGETHER
        else:
            self.slots = max(pages // (TENSORS * _RUN), 1)
            self.depth = 1
            self.piece = _RUN
            self.batch = TENSORS * _RUN
            self.ops = 1
        used = self.depth * self.piece * page
        self.slot_bytes = -(-used // (2 * MB)) * 2 * MB
        self.tensor_bytes = self.slots * self.slot_bytes
        self.nbytes = TENSORS * self.tensor_bytes

    def order(self) -> Iterator[list[int]]:
        """Yields, for each batch, the offsets in the first tensor at which pages are mapped."""
        rng = random.Random(_SEED)
        slots = list(range(self.slots))
        for k in range(self.depth):
            if self.ops > 1:
                rng.shuffle(slots)
            for first in range(0, self.slots, self.ops):
                some = slots[first : first + self.ops]
                yield [s * self.slot_bytes + k * self.page for s in some]
