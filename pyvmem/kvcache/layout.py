# SPDX-License-Identifier: MIT
"""Address arithmetic: offsets of tensors, slots, pages and rows in the reservation.

One reservation holds all tensors, one after another; each tensor holds all slots in order:

    base                               base + tensor_bytes
    | K of the first group_size layers | V of them  | K of the next      | ...
    | slot 0 | slot 1 | ...            |              slot_bytes each
    | row 0 | row 1 | ...                             row_bytes each

So a slot's pages in all tensors are `num_tensors` pieces spaced `tensor_bytes` apart, and a single
operation of a batch covers all of them. The page size need not be a multiple of the row size
(64 KiB is not a multiple of 384 bytes). Rows may therefore cross page boundaries, and a slot of n
pages holds ``n * page_size // row_bytes`` full rows.

With a state (`KVCacheConfig.state`), a slot is a single row, mapped from the first token on. The
request's tokens are still counted, but more tokens never need more pages.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

from pyvmem.kvcache.checks import invalid
from pyvmem.kvcache.config import PREFILL_TOKENS, KVCacheConfig
from pyvmem.plumbing.units import counted, format_bytes

__all__ = ["BLOCK_BYTES", "Layout"]

BLOCK_BYTES = 2 << 20
"""Bytes mapped by a large entry in the GPU's page tables."""

_MAX_ADDRESSES = 1 << 47  # size of an x86-64 process's user address space


def _round_up(value: int, unit: int) -> int:
    return -(-value // unit) * unit


def _spaced(used: int, page_size: int, entries: bool) -> int:
    """Returns the distance between slots that use `used` bytes each.

    If slots are aligned to 2 MiB, a run of small pages can become one large mapping. They are
    aligned if that costs at most an eighth more address space, or if 2 MiB entries are available
    and slots are large enough for them.
    """
    if entries and used >= BLOCK_BYTES:
        return _round_up(used, BLOCK_BYTES)
    aligned = _round_up(used, max(BLOCK_BYTES, page_size))
    return aligned if aligned - used <= used // 8 else used


class Layout:
    """Sizes and offsets of a cache, in bytes, rows (tokens) and pages.

    Attributes:
        page_size: page size in bytes.
        block: number of pages that a 2 MiB entry maps; 0: 2 MiB entries cannot be used.
        num_tensors: two (K, then V) for every `group_size` layers, or one (`tensors_per_layer`).
        page_bytes: total size in bytes of one page from each tensor.
        row_bytes: size in bytes of a token's row, or of the state, in one tensor.
        state: a slot is a single row, however many tokens the request holds.
        max_rows: maximum number of tokens in a slot.
        slot_pages: number of pages per tensor in a full slot.
        slot_bytes: distance between slots in a tensor.
        tensor_bytes: distance between tensors.
        total_bytes: size of the reservation in bytes.
        overread: number of rows past the length that are always mapped.
        guard: number of additional rows mapped past the length of a prefill.
        capacity: function that returns the longest sequence that fits in a given number of pages
            per tensor.

    Args:
        config: configuration of the layers.
        page_size: page size in bytes.
        entries: True if the context has 2 MiB entries for small pages (`Caps.LARGE_ENTRIES`).

    Raises:
        InvalidArgument: the cache needs more address space than a process has; or the size of
            packed slots is not a multiple of the page size or, with `entries`, of 2 MiB.
    """

    def __init__(self, config: KVCacheConfig, page_size: int, entries: bool = False) -> None:
        self.config = config
        self.page_size = page_size
        self.num_tensors = config.tensors_per_layer * (config.num_layers // config.group_size)
        self.head_row_bytes = config.num_kv_heads * config.head_dim * config.itemsize
        self.page_bytes = page_size * self.num_tensors
        self.row_bytes = config.row_bytes
        self.max_rows = config.max_seq_len
        self.state = config.state
        overread = 0 if config.state else config.overread_rows
        self.overread = overread if config.overread_decode else 0
        self.guard = overread - self.overread
        full = self.bytes_for(self.max_rows)
        used = _round_up(full, page_size)
        packed = config.packed_slots and not config.state
        if packed and full % page_size:
            raise invalid(
                f"packed_slots: {self.max_rows} rows of {self.row_bytes} bytes are {full} bytes, "
                f"which is not a multiple of page_size {page_size}",
                size=full,
                limit=page_size,
            )
        self.capacity: Callable[[int], int] = lru_cache(self._capacity)
        self.slot_pages = used // page_size
        entries = entries and page_size < BLOCK_BYTES
        self.slot_bytes = used if packed else _spaced(used, page_size, entries)
        self.block = BLOCK_BYTES // page_size if entries and used >= BLOCK_BYTES else 0
        if self.block and self.slot_bytes % BLOCK_BYTES:
            raise invalid(
                f"packed_slots: slots of {used} bytes are not a multiple of {BLOCK_BYTES} bytes, "
                "as a context with large entries requires",
                size=used,
                limit=BLOCK_BYTES,
            )
        self.tensor_bytes = self.slot_bytes * config.max_batch
        self.total_bytes = self.tensor_bytes * self.num_tensors
        if self.total_bytes > _MAX_ADDRESSES:
            raise invalid(
                f"{config.max_batch} slots of {self.max_rows} rows of {self.row_bytes} bytes in "
                f"{self.num_tensors} tensors need {self.total_bytes} bytes of address space; a "
                f"process has {_MAX_ADDRESSES}",
                size=self.total_bytes,
                limit=_MAX_ADDRESSES,
            )

    def __repr__(self) -> str:
        return (
            f"<Layout of {counted(self.num_tensors, 'tensor')}: {self.row_bytes} bytes per row, "
            f"pages of {format_bytes(self.page_size)}, {format_bytes(self.slot_bytes)} per slot>"
        )

    def bytes_for(self, seq_len: int) -> int:
        """Returns how many bytes a slot's first `seq_len` tokens take in each tensor."""
        return self.row_bytes * (min(1, seq_len) if self.state else seq_len)

    def pages_for(self, seq_len: int) -> int:
        """Returns how many pages per tensor `seq_len` tokens need.

        This includes the rows past them that decoding may read.
        """
        if seq_len <= 0:
            return 0
        rows = 1 if self.state else min(seq_len + self.overread, self.max_rows)
        return -(-rows * self.row_bytes // self.page_size)

    def guarded(self, seq_len: int) -> int:
        """Returns the length to pass to `pages_for` for a prefill up to `seq_len` tokens."""
        return max(seq_len, min(seq_len + self.guard, self.max_rows)) if seq_len > 0 else 0

    def pages_for_step(self, held: int, seq_len: int) -> int:
        """Returns how many pages per tensor a step from `held` to `seq_len` tokens needs."""
        prefill = seq_len - held > PREFILL_TOKENS
        return self.pages_for(self.guarded(seq_len) if prefill else seq_len)

    def _capacity(self, pages: int) -> int:
        if self.state:
            return self.max_rows if pages >= self.slot_pages else 0
        rows = pages * self.page_size // self.row_bytes
        return self.max_rows if rows >= self.max_rows else max(0, rows - self.overread)

    def window_page(self, seq_len: int) -> int:
        """Returns the first page in the window of a sequence of `seq_len` tokens.

        Returns 0 if there is no window.
        """
        config = self.config
        if not config.window:
            return 0
        first = max(0, seq_len - config.window - config.window_tile)
        return first * self.row_bytes // self.page_size

    def offset(self, slot: int, page: int = 0, tensor: int = 0) -> int:
        """Returns the offset of a slot's page from the start of the reservation."""
        return tensor * self.tensor_bytes + slot * self.slot_bytes + page * self.page_size

    def describe(self, place: Any, base: int) -> None:
        """Writes the layout into a struct pyvmem_place for `Columns`.

        `base` is slot 0's address.
        """
        place.base = base
        place.tensors = self.num_tensors
        place.prefill = PREFILL_TOKENS
        for name in ("slot_bytes", "tensor_bytes", "page_size", "row_bytes", "max_rows"):
            setattr(place, name, getattr(self, name))
        place.overread, place.guard = self.overread, self.guard
        place.fixed, place.block = self.slot_pages if self.state else 0, self.block
