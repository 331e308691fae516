# SPDX-License-Identifier: MIT
"""The tokens and requests of an attention call, checked once per step."""

from __future__ import annotations

import errno
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from pyvmem.attention.reads import EXACT, Blocks, Reads
from pyvmem.compiled import ticket
from pyvmem.errors import InvalidArgument
from pyvmem.plumbing.units import counted
from pyvmem.plumbing.validation import invalid

if TYPE_CHECKING:
    from pyvmem.kvcache import GroupView

__all__ = ["Batch", "OverRead", "Part", "Run"]


class OverRead(InvalidArgument):
    """EINVAL: the kernel could read unmapped rows, and the GPU would fault."""


@dataclass(frozen=True)
class Run:
    """A dense batch: consecutive requests of equal length in consecutive slots.

    Attributes:
        start: index of the first request's first token in the batch.
        slot: the first request's slot.
        count: number of requests.
        q_len, kv_len: number of new tokens, and of all tokens, per request.
    """

    start: int
    slot: int
    count: int
    q_len: int
    kv_len: int

    def first(self, window: int) -> int:
        """Returns the first row inside the window; a window of 0 covers all rows."""
        return EXACT.first(self.kv_len, self.q_len, window)


class Part(NamedTuple):
    """The properties of one form of layers that a batch needs.

    Attributes:
        caches: the caches to read.
        kernel: the kernel to call, from `pyvmem.attention.KERNELS`.
        reads: the rows that the kernel may read.
        window: number of tokens a token attends to; 0: all.
    """

    caches: tuple[GroupView, ...]
    kernel: str = ""
    reads: Reads = EXACT
    window: int = 0


class Batch:
    """The new tokens of a step's requests, one request after another; shared by all layers.

    Of a request's ``kv_lens[i]`` tokens, the last ``q_lens[i]`` are new: one in decoding, all in a
    prefill, some in a chunked prefill. A token attends to the tokens of its own request, up to and
    including itself.

    Args:
        parts: one per form of layer, at least one; all their caches must have been stepped to these
            lengths.
        reqids: the requests' slots, without duplicates.
        q_lens: number of new tokens per request, at least 1.
        kv_lens: number of tokens of each request, including the new ones.
        device: the caches' device, on which the batch creates its tensors.

    Attributes:
        parts, reqids, q_lens, kv_lens: as given.
        kernel, reads: those of the first part.
        tokens: total number of new tokens.
        max_q, max_kv: the largest of `q_lens` and of `kv_lens`.
        ticket: the tensor that represents the batch in compiled code.

    Raises:
        InvalidArgument: the lengths are inconsistent, a request has more tokens than its slot has
            pages for, or a window begins in unmapped rows.
        OverRead: a kernel could read unmapped rows past the lengths or before the window.
    """

    def __repr__(self) -> str:
        requests = counted(len(self.reqids), "request")
        return f"<Batch of {counted(self.tokens, 'token')}, {requests}, by {self.kernel}>"

    def __init__(
        self,
        parts: Sequence[Part],
        reqids: Sequence[int],
        q_lens: Sequence[int],
        kv_lens: Sequence[int],
        device: torch.device,
    ) -> None:
        self.device = device
        self.parts = tuple(parts)
        self.kernel, self.reads = self.parts[0].kernel, self.parts[0].reads
        self.reqids: list[int]
        self.q_lens: list[int]
        self.kv_lens: list[int]
        self.made: dict[Any, Any]  # the kernels' metadata for these lengths, shared by all layers
        self._tables: dict[Blocks, torch.Tensor] = {}
        self._set(reqids, q_lens, kv_lens)
        self.ticket = ticket(self)

    def advance(self, reqids: Sequence[int], kv_lens: Sequence[int]) -> None:
        """Updates the lengths in place; each request keeps its number of new tokens.

        For CUDA graphs: a graph is captured once and reads `slots`, `positions`, `ranks`,
        `index`, `used`, `starts` and `block_table` at every replay. Only FlashAttention-3's calls
        can be captured, since they do not take lengths from the host. Runs on the current stream.

        Args:
            reqids: the requests' slots; their number must not change.
            kv_lens: number of tokens of each request, including the new ones.

        Raises:
            InvalidArgument: as for a new batch, or the number of requests differs. The batch is
                unchanged.
        """
        if len(reqids) != len(self.reqids):
            raise invalid(f"{len(reqids)} reqids; the batch has {len(self.reqids)}", op="Attention")
        kept = (self.reqids, self.kv_lens)
        try:
            self._set(reqids, self.q_lens, kv_lens)
        except BaseException:
            self.reqids, self.kv_lens = kept
            raise
        made = self.__dict__
        if "_where" in made:
            made["_where"].copy_(torch.tensor(self._rows()))
        if "index" in made:
            made["index"].copy_(torch.tensor(self.reqids, dtype=torch.int32))
        if "used" in made:
            made["used"].copy_(torch.tensor(self.kv_lens, dtype=torch.int32))
        for blocks, table in self._tables.items():
            self._number(blocks, table)

    def _set(self, reqids: Sequence[int], q_lens: Sequence[int], kv_lens: Sequence[int]) -> None:
        config = self.parts[0].caches[0].config
        self.reqids = [operator.index(reqid) for reqid in reqids]
        self.q_lens = [operator.index(length) for length in q_lens]
        self.kv_lens = [operator.index(length) for length in kv_lens]
        count = len(self.reqids)
        if not count or not count == len(self.q_lens) == len(self.kv_lens):
            raise invalid(
                f"{count} reqids, {len(self.q_lens)} q_lens, {len(self.kv_lens)} kv_lens; there "
                "must be the same number of each, and at least one",
                op="Attention",
            )
        if len(set(self.reqids)) != count:
            raise invalid(f"duplicate reqid in {self.reqids!r:.80}", op="Attention")
        last = config.max_batch - 1
        for reqid, q_len, kv_len in zip(self.reqids, self.q_lens, self.kv_lens, strict=True):
            if not 0 <= reqid <= last:
                raise invalid(
                    f"reqid {reqid} is not between 0 and {last}", limit=last, op="Attention"
                )
            if not 1 <= q_len <= kv_len:
                raise invalid(
                    f"reqid {reqid}: {q_len} new tokens of {kv_len}", limit=kv_len, op="Attention"
                )
        for part in self.parts:
            for cache in part.caches:
                self._check_ends(part, cache)
                if part.window and cache.config.window:
                    self._check_firsts(part, cache)
        self.tokens = sum(self.q_lens)
        self.max_q = max(self.q_lens)
        self.max_kv = max(self.kv_lens)
        self.made = {}
        self.__dict__.pop("runs", None)

    def _check_ends(self, part: Part, cache: GroupView) -> None:
        """Raises if a kernel would read past the mapped rows."""
        longest = cache.config.max_seq_len
        mapped = cache.readable_rows(self.reqids)
        for reqid, kv_len, rows in zip(self.reqids, self.kv_lens, mapped, strict=True):
            if kv_len > rows:
                raise invalid(
                    f"reqid {reqid}: {kv_len} tokens, but there are pages for {rows}; step the "
                    "cache first",
                    limit=rows,
                    op="Attention",
                )
            end = part.reads.end(kv_len, longest)
            if end > rows and not cache.safe_overread:
                raise OverRead(
                    f"reqid {reqid}: {part.kernel} may read up to row {end} for {kv_len} tokens, "
                    f"but rows are mapped only up to {rows}; step the cache first, with "
                    f"overread_rows={part.reads.past}, and for decoding also overread_decode",
                    errno=errno.EINVAL,
                    op="Attention",
                    limit=rows,
                )

    def _check_firsts(self, part: Part, cache: GroupView) -> None:
        """Raises if rows that a kernel reads, in or before the window, have been freed."""
        firsts = cache.first_rows(self.reqids)
        for reqid, q_len, kv_len, there in zip(
            self.reqids, self.q_lens, self.kv_lens, firsts, strict=True
        ):
            first = part.reads.first(kv_len, q_len, part.window)
            if first >= there:
                continue
            text = f"reqid {reqid}: {q_len} new of {kv_len} tokens with a window of {part.window}"
            if EXACT.first(kv_len, q_len, part.window) < there:
                raise invalid(
                    f"{text}; rows before {there} have been freed", limit=there, op="Attention"
                )
            raise OverRead(
                f"{text}: {part.kernel} may read from row {first} on, but rows before {there} have "
                f"been freed; it needs a window_tile of {part.reads.before}",
                errno=errno.EINVAL,
                op="Attention",
                limit=there,
            )

    def _int32(self, values: Sequence[int]) -> torch.Tensor:
        with torch.inference_mode(False):  # so `advance` can write it outside inference mode
            return torch.tensor(values, dtype=torch.int32, device=self.device)

    @cached_property
    def slots(self) -> torch.Tensor:
        """The slot of each new token, int64 ``[tokens]``."""
        return self._where[0]

    @cached_property
    def positions(self) -> torch.Tensor:
        """The row of each new token in its slot, int64 ``[tokens]``."""
        return self._where[1]

    @cached_property
    def ranks(self) -> torch.Tensor:
        """The index of each new token among its request's new tokens, int64 ``[tokens]``."""
        return self._where[2]

    @cached_property
    def _where(self) -> torch.Tensor:
        with torch.inference_mode(False):
            return torch.tensor(self._rows(), device=self.device)

    def _rows(self) -> tuple[list[int], list[int], list[int]]:
        rows: tuple[list[int], list[int], list[int]] = ([], [], [])
        for reqid, q_len, kv_len in zip(self.reqids, self.q_lens, self.kv_lens, strict=True):
            rows[0].extend([reqid] * q_len)
            rows[1].extend(range(kv_len - q_len, kv_len))
            rows[2].extend(range(q_len))
        return rows

    @cached_property
    def index(self) -> torch.Tensor:
        """The requests' slots, int32 ``[requests]``."""
        return self._int32(self.reqids)

    @cached_property
    def used(self) -> torch.Tensor:
        """The requests' lengths, int32 ``[requests]``."""
        return self._int32(self.kv_lens)

    @cached_property
    def starts(self) -> torch.Tensor:
        """Offset of each request's first new token, then the total; int32 ``[requests + 1]``."""
        starts = [0]
        for q_len in self.q_lens:
            starts.append(starts[-1] + q_len)
        return self._int32(starts)

    def block_table(self, blocks: Blocks) -> torch.Tensor:
        """The requests' block numbers, int32 ``[requests, blocks.per_slot]``, for all layers."""
        table = self._tables.get(blocks)
        if table is None:
            shape = (len(self.reqids), blocks.per_slot)
            with torch.inference_mode(False):  # so `advance` can write it outside inference mode
                table = torch.empty(shape, dtype=torch.int32, device=self.device)
            self._number(blocks, table)
            self._tables[blocks] = table
        return table

    def _number(self, blocks: Blocks, table: torch.Tensor) -> None:
        steps = torch.arange(blocks.per_slot, dtype=torch.int32, device=self.device) * blocks.step
        torch.add(self.index[:, None] * blocks.slot, steps, out=table)

    @cached_property
    def runs(self) -> list[Run]:
        """The batch, split into as few dense batches as possible without reordering it."""
        runs: list[Run] = []
        start = 0
        for reqid, q_len, kv_len in zip(self.reqids, self.q_lens, self.kv_lens, strict=True):
            if runs and (runs[-1].slot + runs[-1].count, runs[-1].q_len, runs[-1].kv_len) == (
                reqid,
                q_len,
                kv_len,
            ):
                last = runs[-1]
                runs[-1] = Run(last.start, last.slot, last.count + 1, q_len, kv_len)
            else:
                runs.append(Run(start, reqid, 1, q_len, kv_len))
            start += q_len
        return runs
