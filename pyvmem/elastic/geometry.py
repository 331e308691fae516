# SPDX-License-Identifier: MIT
"""Maps the blocks of an engine's KV cache to physical pages.

vLLM allocates one tensor per layer, one for every few layers or one for all layers, and divides
each into `num_blocks` equal blocks (the outermost dimension): block i of a tensor occupies bytes
``i * n`` to ``(i + 1) * n``. Tensors with the same n form a class: their blocks lie on pages with
the same indices.

    class 0, n = 24 KiB, pages of 64 KiB     | page 0          | page 1          | page 2 ...
                                             | 0  | 1  | 2  : 2 | 3  | 4  | 5 : 5| ...

Block 2 touches pages 0 and 1; page 0 holds blocks 0, 1 and part of 2. A page is identified by its
class and index, and stands for the page with that index in every tensor of the class.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

__all__ = ["Geometry", "Run", "TensorClass", "blocks_are_outermost", "runs_of"]


class Run(NamedTuple):
    """Consecutive pages of one class.

    Attributes:
        kind: index of the class.
        first: index of the first page.
        length: number of pages.
    """

    kind: int
    first: int
    length: int


@dataclass(frozen=True)
class TensorClass:
    """A class of tensors that have the same number of bytes per block.

    Attributes:
        block_bytes: size of a block in one tensor, in bytes.
        tensors: number of tensors.
    """

    block_bytes: int
    tensors: int


@dataclass(frozen=True)
class Geometry:
    """Describes the blocks, tensors and pages of an engine; the same on all tensor-parallel ranks.

    Attributes:
        num_blocks: number of blocks in each tensor, including the null block.
        page_size: bytes per page.
        classes: the tensor classes, by ascending `block_bytes`.
    """

    num_blocks: int
    page_size: int
    classes: tuple[TensorClass, ...]

    @classmethod
    def of(cls, num_blocks: int, page_size: int, sizes: Iterable[int]) -> Geometry:
        """Builds the geometry for tensors of the given sizes in bytes.

        Raises:
            ValueError: `num_blocks` does not divide the size of a tensor.
        """
        found: dict[int, int] = {}
        for size in sizes:
            if size <= 0 or size % num_blocks:
                raise ValueError(
                    f"a KV tensor of {size} bytes cannot be divided into {num_blocks} equal blocks"
                )
            found[size // num_blocks] = found.get(size // num_blocks, 0) + 1
        classes = tuple(TensorClass(n, found[n]) for n in sorted(found))
        return cls(num_blocks, page_size, classes)

    def pages(self, kind: int, block: int) -> range:
        """Returns the indices of the pages that a block touches in each tensor of a class."""
        n = self.classes[kind].block_bytes
        return range(block * n // self.page_size, ((block + 1) * n - 1) // self.page_size + 1)

    def num_pages(self, kind: int) -> int:
        """Returns the number of pages in each tensor of a class."""
        return -(-self.num_blocks * self.classes[kind].block_bytes // self.page_size)

    def page_bytes(self, kind: int) -> int:
        """Returns the total size in bytes of one page of a class across its tensors."""
        return self.page_size * self.classes[kind].tensors

    def run_bytes(self, runs: Iterable[Run]) -> int:
        """Returns the total size in bytes of the pages in these runs across all tensors."""
        return sum(self.page_bytes(run.kind) * run.length for run in runs)

    @property
    def block_bytes(self) -> int:
        """Total size of a block in bytes across all tensors."""
        return sum(one.block_bytes * one.tensors for one in self.classes)

    @cached_property
    def _sharing(self) -> int:
        """Index of the largest class whose blocks share pages; -1 if there is none."""
        shared = [
            (one.tensors * one.block_bytes, kind)
            for kind, one in enumerate(self.classes)
            if one.block_bytes < self.page_size
        ]
        return max(shared, default=(0, -1))[1]

    @property
    def group_unit(self) -> tuple[int, int]:
        """The pair that maps blocks to groups: block b is in group ``b * unit[0] // unit[1]``.

        A group consists of the blocks that start on the same page. If blocks do not share pages,
        each block is a group of its own.
        """
        if self._sharing < 0:
            return 1, 1
        return self.classes[self._sharing].block_bytes, self.page_size

    def touching(self, group: int) -> range:
        """Returns the blocks that touch a group's page.

        If all of them are idle, the page can be unmapped.
        """
        size, page = self.group_unit
        return range(group * page // size, min(-(-(group + 1) * page // size), self.num_blocks))

    @cached_property
    def group_bytes(self) -> int:
        """The minimum number of bytes freed when a group becomes empty.

        The first and last groups may free less.
        """
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
        """Returns how many bytes `blocks` consecutive blocks need with worst-case alignment."""
        total = 0
        for kind, one in enumerate(self.classes):
            spill = 0 if one.block_bytes % self.page_size == 0 else 1
            pages = -(-blocks * one.block_bytes // self.page_size) + spill
            total += min(pages, self.num_pages(kind)) * self.page_bytes(kind)
        return total

    def scattered_bytes(self, blocks: int) -> int:
        """Returns how many bytes `blocks` blocks need if no two of their pages are adjacent."""
        size, page = self.group_unit
        pages = -(-blocks // (page // size))
        return self.most_bytes(-(-pages * page // size))

    def first_bytes(self, blocks: int) -> int:
        """Returns how many bytes the first `blocks` blocks need.

        Any other set of `blocks` blocks needs at least as many.
        """
        return sum(
            min(-(-blocks * one.block_bytes // self.page_size), self.num_pages(kind))
            * self.page_bytes(kind)
            for kind, one in enumerate(self.classes)
        )


def blocks_are_outermost(
    shape: Sequence[int], strides: Sequence[int], itemsize: int, geometry: Geometry
) -> bool:
    """Returns true if each block is contiguous in a layer's view of its tensor.

    `Geometry` requires this, but some attention back ends put all keys before all values.

    Args:
        shape, strides: the view's shape and strides, in elements.
        itemsize: bytes per element.
        geometry: the engine's geometry.
    """
    step, count = max(
        ((step, count) for step, count in zip(strides, shape, strict=True) if count > 1),
        default=(0, 1),
    )
    parts, rest = divmod(count, geometry.num_blocks)  # kernel blocks per vLLM block
    sizes = {one.block_bytes for one in geometry.classes}
    return geometry.num_blocks == 1 or (not rest and step * itemsize * parts in sizes)


def runs_of(pages: Sequence[Iterable[int]]) -> list[Run]:
    """Returns the fewest runs that cover the given page indices of each class."""
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
