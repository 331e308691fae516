# SPDX-License-Identifier: MIT
"""Which tokens of which requests a call of attention is about, checked once a step."""

from __future__ import annotations

import errno
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch

from pyvmem.attention.reads import EXACT, Blocks, Reads
from pyvmem.errors import InvalidArgument
from pyvmem.kvcache.config import invalid

if TYPE_CHECKING:
    from pyvmem.kvcache import KVCache

__all__ = ["Batch", "OverRead", "Run"]


class OverRead(InvalidArgument):
    """EINVAL: the kernel may read rows that have no memory: the GPU would fault."""


@dataclass(frozen=True)
class Run:
    """Neighbouring requests in neighbouring slots, with the same lengths: one ordinary batch.

    Attributes:
        start: the first one's first token among the batch's.
        slot: the first one's slot. count: requests.
        q_len, kv_len: of each.
    """

    start: int
    slot: int
    count: int
    q_len: int
    kv_len: int


class Batch:
    """New tokens of some requests, one request after the other; the same for all layers.

    The last ``q_lens[i]`` of a request's ``kv_lens[i]`` tokens are the new ones: 1 in decoding, all
    in a prefill, part of them in a chunked one. A token sees its own request up to itself.

    Args:
        cache: where the keys and values lie; the requests must have been stepped to their lengths.
        reqids: the requests' slots, no two the same.
        q_lens: new tokens of each, at least 1.
        kv_lens: tokens of each, the new ones included.
        device: of the tensors below: the cache's.
        kernel: of `pyvmem.attention.KERNELS`, that will be called.
        reads: what it reads.

    Attributes:
        reqids, q_lens, kv_lens, kernel, reads: as given.
        tokens: new tokens, all requests together; max_q, max_kv: the largest lengths.

    Raises:
        InvalidArgument: lengths that do not fit together, or more tokens than a slot has pages for:
            what is not mapped must not be read.
        OverRead: the kernel may read rows behind them that are not mapped.
    """

    def __init__(
        self,
        cache: KVCache,
        reqids: Sequence[int],
        q_lens: Sequence[int],
        kv_lens: Sequence[int],
        device: torch.device,
        kernel: str = "",
        reads: Reads = EXACT,
    ) -> None:
        self.device = device
        self.kernel = kernel
        self.reads = reads
        self.reqids: list[int]
        self.q_lens: list[int]
        self.kv_lens: list[int]
        self.mask: Any  # what a kernel has made of these lengths, for all layers
        self._cache = cache
        self._set(reqids, q_lens, kv_lens)

    def advance(self, reqids: Sequence[int], kv_lens: Sequence[int]) -> None:
        """The same number of new tokens of each request, at other lengths, in the same tensors.

        For a CUDA graph, which is captured once and reads `slots`, `positions`, `ranks`, `index`,
        `used`, `starts` and `block_table` at every replay; of the kernels FlashAttention-3's calls
        can be captured, since they take no length from the host. On the current stream.

        Args:
            reqids: the requests' slots, as many as before.
            kv_lens: tokens of each, the new ones included.

        Raises:
            InvalidArgument: as for a new one, or another number of requests; nothing is changed.
        """
        if len(reqids) != len(self.reqids):
            raise invalid(f"{len(reqids)} reqids; the batch has {len(self.reqids)}")
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
        if "_table" in made:
            blocks, table = made["_table"]
            self._number(blocks, table)

    def _set(self, reqids: Sequence[int], q_lens: Sequence[int], kv_lens: Sequence[int]) -> None:
        cache = self._cache
        self.reqids = [operator.index(reqid) for reqid in reqids]
        self.q_lens = [operator.index(length) for length in q_lens]
        self.kv_lens = [operator.index(length) for length in kv_lens]
        count = len(self.reqids)
        if not count or not count == len(self.q_lens) == len(self.kv_lens):
            raise invalid(
                f"{count} reqids, {len(self.q_lens)} q_lens, {len(self.kv_lens)} kv_lens; there "
                "must be as many of each, and at least one"
            )
        if len(set(self.reqids)) != count:
            raise invalid(f"a reqid stands twice in {self.reqids!r:.80}")
        last, longest = cache.config.max_batch - 1, cache.config.max_seq_len
        for reqid, q_len, kv_len in zip(self.reqids, self.q_lens, self.kv_lens, strict=True):
            if not 0 <= reqid <= last:
                raise invalid(f"reqid {reqid} is not between 0 and {last}", limit=last)
            if not 1 <= q_len <= kv_len:
                raise invalid(f"reqid {reqid}: {q_len} new tokens of {kv_len}", limit=kv_len)
        mapped = cache.readable_rows(self.reqids)
        for reqid, kv_len, rows in zip(self.reqids, self.kv_lens, mapped, strict=True):
            if kv_len > rows:
                raise invalid(
                    f"reqid {reqid}: {kv_len} tokens, but there are pages for {rows}; step the "
                    "cache first",
                    limit=rows,
                )
            end = self.reads.end(kv_len, longest)
            if end > rows and not cache.safe_overread:
                raise OverRead(
                    f"reqid {reqid}: {self.kernel} may read up to row {end} of {kv_len} tokens, "
                    f"and rows are mapped up to {rows}; step the cache first, with overread_rows "
                    f"of {self.reads.past}, in decoding also with overread_decode",
                    errno=errno.EINVAL,
                    op="Attention",
                    limit=rows,
                )
        self.tokens = sum(self.q_lens)
        self.max_q = max(self.q_lens)
        self.max_kv = max(self.kv_lens)
        self.mask = None
        self.__dict__.pop("runs", None)

    def _int32(self, values: Sequence[int]) -> torch.Tensor:
        with torch.inference_mode(False):  # `advance` writes it, inside that mode or not
            return torch.tensor(values, dtype=torch.int32, device=self.device)

    @cached_property
    def slots(self) -> torch.Tensor:
        """Each new token's slot, int64 ``[tokens]``."""
        return self._where[0]

    @cached_property
    def positions(self) -> torch.Tensor:
        """Each new token's row in its slot, int64 ``[tokens]``."""
        return self._where[1]

    @cached_property
    def ranks(self) -> torch.Tensor:
        """Each new token's number among its request's new ones, int64 ``[tokens]``."""
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
        """Where each request's new tokens start, and their end, int32 ``[requests + 1]``."""
        starts = [0]
        for q_len in self.q_lens:
            starts.append(starts[-1] + q_len)
        return self._int32(starts)

    def block_table(self, blocks: Blocks) -> torch.Tensor:
        """The requests' blocks, int32 ``[requests, blocks.per_slot]``; the same for all layers."""
        made = self.__dict__.get("_table")
        if made is None or made[0] != blocks:
            shape = (len(self.reqids), blocks.per_slot)
            with torch.inference_mode(False):  # `advance` writes it, inside that mode or not
                made = (blocks, torch.empty(shape, dtype=torch.int32, device=self.device))
            self._number(*made)
            self.__dict__["_table"] = made
        return made[1]

    def _number(self, blocks: Blocks, table: torch.Tensor) -> None:
        steps = torch.arange(blocks.per_slot, dtype=torch.int32, device=self.device) * blocks.step
        torch.add(self.index[:, None] * blocks.slot, steps, out=table)

    @cached_property
    def runs(self) -> list[Run]:
        """The batch in as few ordinary batches as its order allows."""
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
