# SPDX-License-Identifier: MIT
"""Computes which physical pages a block of an engine's KV cache lies on.

vLLM allocates one tensor per layer (or one for a few layers, or one for all of them) and cuts each
into `num_blocks` equal parts, blocks outermost: block i of a tensor is the bytes from ``i * n`` to
``(i + 1) * n``. Tensors with the same n form a class, whose members look alike page by page:

    class 0, n = 24 KiB, pages of 64 KiB     | page 0          | page 1          | page 2 ...
                                             | 0  | 1  | 2  : 2 | 3  | 4  | 5 : 5| ...

Block 2 lies on pages 0 and 1, page 0 holds blocks 0, 1 and a part of 2. A page is named by its
class and its index, and stands for that page in every tensor of the class.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

__all__ = ["Geometry", "Run", "TensorClass", "blocks_are_outermost", "runs_of"]


class Run(NamedTuple):
    """Neighbouring pages of one class.

    Attributes:
        kind: index of the class.
        first: index of the first page.
        length: pages.
    """

    kind: int
    first: int
    length: int


@dataclass(frozen=True)
class TensorClass:
    """Tensors with equal bytes per block.

    Attributes:
        block_bytes: of one block in one tensor.
        tensors: how many there are.
    """

    block_bytes: int
    tensors: int


@dataclass(frozen=True)
class Geometry:
    """Blocks, tensors and pages of an engine; equal on all ranks of tensor parallelism.

    Attributes:
        num_blocks: of each tensor, the null block included.
        page_size: bytes.
        classes: ascending in `block_bytes`.
    """

    num_blocks: int
    page_size: int
    classes: tuple[TensorClass, ...]

    @classmethod
    def of(cls, num_blocks: int, page_size: int, sizes: Iterable[int]) -> Geometry:
        """From the sizes of all tensors, in bytes.

        Raises:
            ValueError: a tensor that `num_blocks` does not divide.
        """
        found: dict[int, int] = {}
        for size in sizes:
            if size <= 0 or size % num_blocks:
                raise ValueError(f"a KV tensor of {size} bytes is not {num_blocks} equal blocks")
            found[size // num_blocks] = found.get(size // num_blocks, 0) + 1
        classes = tuple(TensorClass(n, found[n]) for n in sorted(found))
        return cls(num_blocks, page_size, classes)

    def pages(self, kind: int, block: int) -> range:
        """The pages of a class that a block touches."""
        n = self.classes[kind].block_bytes
        return range(block * n // self.page_size, ((block + 1) * n - 1) // self.page_size + 1)

    def num_pages(self, kind: int) -> int:
        """Pages of one tensor of a class."""
        return -(-self.num_blocks * self.classes[kind].block_bytes // self.page_size)

    def page_bytes(self, kind: int) -> int:
        """Memory behind one page of a class, in all its tensors."""
        return self.page_size * self.classes[kind].tensors

    def run_bytes(self, runs: Iterable[Run]) -> int:
        """Memory behind runs of pages."""
        return sum(self.page_bytes(run.kind) * run.length for run in runs)

    @property
    def block_bytes(self) -> int:
        """Contents of one block in all tensors."""
        return sum(one.block_bytes * one.tensors for one in self.classes)

    @cached_property
    def _sharing(self) -> int:
        """The class with most memory of those in which blocks share pages; -1: there is none."""
        shared = [
            (one.tensors * one.block_bytes, kind)
            for kind, one in enumerate(self.classes)
            if one.block_bytes < self.page_size
        ]
        return max(shared, default=(0, -1))[1]

    @property
    def group_unit(self) -> tuple[int, int]:
        """Block b belongs to group ``b * unit[0] // unit[1]``: the page in which it begins.

        Where each block has pages of its own, it is a group of its own.
        """
        if self._sharing < 0:
            return 1, 1
        return self.classes[self._sharing].block_bytes, self.page_size

    def touching(self, group: int) -> range:
        """The blocks that have to be empty before a group's page can go."""
        size, page = self.group_unit
        return range(group * page // size, min(-(-(group + 1) * page // size), self.num_blocks))

    @cached_property
    def group_bytes(self) -> int:
        """Memory that a group gives back at least when it runs empty, if not at an end."""
        found = []
        for group in range(1, 17):
            blocks, total = self.touching(group), 0
            for kind, one in enumerate(self.classes):
                first = -(-blocks.start * one.block_bytes // self.page_size)
                end = blocks.stop * one.block_bytes // self.page_size
                total += max(0, end - first) * self.page_bytes(kind)
            if blocks.start < blocks.stop < self.num_blocks:
                found.append(total)
        return max(1, min(found, default=1))

    def most_bytes(self, blocks: int) -> int:
        """Pages that so many neighbouring blocks need at the worst alignment."""
        total = 0
        for kind, one in enumerate(self.classes):
            spill = 0 if one.block_bytes % self.page_size == 0 else 1
            pages = -(-blocks * one.block_bytes // self.page_size) + spill
            total += min(pages, self.num_pages(kind)) * self.page_bytes(kind)
        return total

    def scattered_bytes(self, blocks: int) -> int:
        """Pages that so many blocks need where no two pages that blocks share are neighbours."""
        size, page = self.group_unit
        pages = -(-blocks // (page // size))
        return self.most_bytes(-(-pages * page // size))

    def first_bytes(self, blocks: int) -> int:
        """Pages of the first so many blocks, which is the least that so many blocks need."""
        return sum(
            min(-(-blocks * one.block_bytes // self.page_size), self.num_pages(kind))
            * self.page_bytes(kind)
            for kind, one in enumerate(self.classes)
        )


def blocks_are_outermost(
    shape: Sequence[int], strides: Sequence[int], itemsize: int, geometry: Geometry
) -> bool:
    """Tells if a layer's view of its tensor keeps a block's bytes together, as `Geometry` takes it.

    Some attention back ends put all keys before all values.

    Args:
        shape, strides: of the view, in elements.
        itemsize: bytes of an element.
        geometry: of the engine.
    """
    step, count = max(
        ((step, count) for step, count in zip(strides, shape, strict=True) if count > 1),
        default=(0, 1),
    )
    parts, rest = divmod(count, geometry.num_blocks)  # blocks of the kernel in one of vLLM's
    sizes = {one.block_bytes for one in geometry.classes}
    return geometry.num_blocks == 1 or (not rest and step * itemsize * parts in sizes)


def runs_of(pages: Sequence[Iterable[int]]) -> list[Run]:
    """Page indices, by class, as the fewest runs."""
    runs: list[Run] = []
    for kind, indices in enumerate(pages):
        first = end = -1
        for index in sorted(indices):
            if index != end:
                if first >= 0:
                    runs.append(Run(kind, first, end - first))
                first = index
            end = index + 1
        if first >= 0:
            runs.append(Run(kind, first, end - first))
    return runs
