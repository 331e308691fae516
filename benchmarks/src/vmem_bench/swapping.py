# SPDX-License-Identifier: MIT
"""`vmem bench swap`: swapping a preempted request to host memory and back, or recomputing it.

Follows figure 19 of the PagedAttention paper (SOSP'23): with small blocks, swapping takes many
small copies, while recomputation costs the same for every block size. For each request length,
these ways take turns:

- ``pages``: `KVCache.swap_out` and `swap_in`.
- ``blocks/N``: a pool with blocks of N tokens, each copied separately between the device and pinned
  host memory, as in PagedAttention.
- ``again``: a prefill of all tokens into rows that are already mapped.
- ``prefix``: a recorded prefix is evicted to host memory (`KVCache.trim`), then loaded by the next
  request that starts with it (`KVCache.alloc_prefix`), which shares its pages.

Restored rows are compared bit by bit with the original rows.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, closing
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from pyvmem.bench.record import Book, Part
from pyvmem.bench.timing import Deadline, Samples, interleave, quiet
from pyvmem.kvcache import KVCache
from pyvmem.layouts.options import count, counts
from vmem_bench.command import (
    Command,
    WrongResult,
    add_common,
    add_page,
    open_command,
    run_on_device,
)

if TYPE_CHECKING:
    import torch

    from vmem_bench.decoder import Decoder, Sizes

__all__ = ["Blocks", "add_parser", "run"]

_HOST = 16 << 30  # maximum host memory for prefixes, in bytes; allocated as needed
_OVERREAD = 192  # rows read past a request's end: FlashAttention-3 reads whole tiles
_METHOD = {
    "time": "host clock around the call and synchronize",
    "turns": "the ways take turns, in rotating order; the first round is discarded",
    "blocks": "one asynchronous copy per block, layer, and keys or values; then one wait",
}


class Blocks:
    """A request's blocks, scattered over a pool twice as large, and host memory for them.

    The host memory is pinned.

    Args:
        sizes: sizes of the model.
        block: rows per block.
        tokens: number of rows in the request.
        device: device of the pool.
    """

    def __init__(self, sizes: Sizes, block: int, tokens: int, device: torch.device) -> None:
        import torch

        self._device = device
        count = -(-tokens // block)
        generator = torch.Generator().manual_seed(block)
        self.blocks = torch.randperm(2 * count, generator=generator)[:count].tolist()
        tail = (block, sizes.kv_heads, sizes.head_dim)
        kind, pinned = torch.bfloat16, device.type == "cuda"
        tensors = range(2 * sizes.layers)
        self.pool = [torch.randn((2 * count, *tail), device=device, dtype=kind) for _ in tensors]
        self._host = [torch.empty((count, *tail), pin_memory=pinned, dtype=kind) for _ in tensors]

    def _wait(self) -> None:
        import torch

        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def out(self) -> None:
        """Copies every block to host memory."""
        for pool, host in zip(self.pool, self._host, strict=True):
            for place, block in enumerate(self.blocks):
                host[place].copy_(pool[block], non_blocking=True)
        self._wait()

    def back(self) -> None:
        """Copies every block back to its place in the pool."""
        for pool, host in zip(self.pool, self._host, strict=True):
            for place, block in enumerate(self.blocks):
                pool[block].copy_(host[place], non_blocking=True)
        self._wait()


class _Length:
    """Measures every way of swapping, for requests of one length."""

    def __init__(self, command: Command, part: Part, model: Decoder, tokens: int) -> None:
        self.command, self.part, self.model, self.tokens = command, part, model, tokens
        self.device = model.embedding.device
        self.book = Book(part)

    def _samples(self, row: str, words: str, system: str) -> Samples:
        what = f"{self.tokens:,} tokens, {words}"
        return self.book.samples(f"{self.tokens}/{row}", what, system, unit="ms")

    def _timed(self, samples: Samples, work: Callable[[], Any]) -> Any:
        start = time.perf_counter_ns()
        found = work()
        samples.new_round().append(time.perf_counter_ns() - start)
        return found

    def run(self, blocks: list[int], rounds: int, left: Deadline) -> None:
        """Measures all ways and adds the rows."""
        config = self.model.sizes.config(
            max_batch=1,
            max_seq_len=self.tokens + _OVERREAD,
            page_size=self.command.page,
            overread_rows=_OVERREAD,
            overread_decode=True,
        )
        options = {"backend": self.command.backend, "device": self.command.args.device}
        keeps = replace(config, host_prefixes=_HOST)
        with closing(KVCache(config, **options)) as cache, closing(KVCache(keeps, **options)) as by:
            turns = [self._pages(cache), self._prefix(by)]
            turns += [self._blocks(block) for block in blocks]
            turns.append(self._again(cache))
            with self.attend, quiet():
                interleave(turns, rounds + 1, left)
            self.book.close()
            cache.check_integrity()
            by.check_integrity()
            turns.clear()  # they hold tensors of the caches, which are closed next

    def _turn(
        self,
        name: str,
        words: str,
        system: str,
        out: Callable[[], Any],
        back: Callable[[Any], None],
        rows: Callable[[], torch.Tensor],
        lose: Callable[[], Any],
    ) -> Callable[[], None]:
        """Returns a turn that times swapping out and in, and checks that the rows are restored.

        Args:
            name: prefix of the result rows' ids, followed by "out" or "in".
            words: a description of where the request's rows are.
            system: name of the system, for the result's rows.
            out: moves the rows out; its result is passed to `back`.
            back: brings the rows back.
            rows: returns some of the rows, which are compared.
            lose: called between `out` and `back`, without being timed; may overwrite the rows.
        """
        there = self._samples(f"{name}/out", f"out of {words}", system)
        again = self._samples(f"{name}/in", f"back of {words}", system)
        wanted = rows().clone()

        def turn() -> None:
            went = self._timed(there, out)
            lose()
            self._timed(again, lambda: back(went))
            if not bool((rows() == wanted).all()):
                raise WrongResult("the restored rows differ")

        return turn

    def _pages(self, cache: KVCache) -> Callable[[], None]:
        self.part.value(
            f"{self.tokens}/pages/pieces",
            f"{self.tokens:,} tokens: pages of all tensors",
            "pages",
            cache.layout.pages_for(self.tokens) * cache.layout.num_tensors,
            "count",
        )
        if cache.alloc_reqid(self.tokens) is None or cache.step([self.tokens]):
            raise RuntimeError("memory is short")
        cache.k(0)[0, : self.tokens].fill_(1.5)

        def back(swapped: Any) -> None:
            if cache.swap_in(swapped) != 0:
                raise RuntimeError("memory is short")

        return self._turn(
            "pages",
            "the cache",
            "pages",
            lambda: cache.swap_out(0),
            back,
            lambda: cache.k(0)[0, : self.tokens],
            lambda: None,
        )

    def _prefix(self, cache: KVCache) -> Callable[[], None]:
        ids = list(range(self.tokens))
        whole = self.tokens // cache.sharing_unit * cache.sharing_unit
        if not whole:
            self.part.not_run(f"{self.tokens}/prefix", f"a unit is {cache.sharing_unit} tokens")
            return lambda: None

        def begin() -> None:
            if cache.alloc_reqid(self.tokens) is None or cache.step([self.tokens]):
                raise RuntimeError("memory is short")
            cache.k(0)[0, :whole].fill_(1.5)

        def back(_: Any) -> None:
            if cache.alloc_prefix(ids, leave=0) != (0, whole):
                raise WrongResult("the prefix was not loaded from host memory")

        def end() -> None:
            cache.free_reqid(0, tokens=ids)

        begin()
        turn = self._turn(
            "prefix",
            "the prefixes of the cache",
            "pages",
            lambda: cache.trim(prefixes="host"),
            back,
            lambda: cache.k(0)[0, :whole],
            lambda: None,
        )
        end()

        def again() -> None:
            turn()
            cache.free_reqid(0)
            cache.trim(prefixes=True)  # also drop the host copy, so that the next turn copies again
            begin()
            end()

        nbytes = cache.layout.row_bytes * cache.layout.num_tensors * whole
        what = f"{self.tokens:,} tokens: the prefix's rows in host memory"
        self.part.value(f"{self.tokens}/prefix/bytes", what, "pages", nbytes, "bytes")
        return again

    def _blocks(self, block: int) -> Callable[[], None]:
        pool = Blocks(self.model.sizes, block, self.tokens, self.device)
        self.part.value(
            f"{self.tokens}/blocks/{block}/pieces",
            f"{self.tokens:,} tokens: copies of blocks of {block}",
            "paged",
            len(pool.blocks) * len(pool.pool),
            "count",
        )
        return self._turn(
            f"blocks/{block}",
            f"blocks of {block}",
            "paged",
            pool.out,
            lambda _: pool.back(),
            lambda: pool.pool[0][pool.blocks],
            lambda: pool.pool[0].zero_(),
        )

    def _again(self, cache: KVCache) -> Callable[[], None]:
        import torch

        from pyvmem.attention import Attention

        samples = self._samples("again", "computed again", "again")
        attend = Attention(cache, "auto")
        self.attend: AbstractContextManager[Any] = closing(attend)
        self.part.notes.append(f"{self.tokens:,} tokens: {attend.choice}")
        generator = torch.Generator().manual_seed(3)
        ids = torch.randint(self.model.sizes.vocabulary, (self.tokens,), generator=generator)
        ids = ids.to(self.device)
        kept = [cache.k(0)[0, : self.tokens].clone()]

        def work() -> None:
            batch = attend.batch([0], [self.tokens], [self.tokens])
            self.model(ids, attend, batch)
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)

        def turn() -> None:
            self._timed(samples, work)
            cache.k(0)[0, : self.tokens].copy_(kept[0])  # the swapped rows are compared with these

        return turn


def _measure(command: Command, part: Part, device: torch.device) -> None:
    from vmem_bench.decoder import LLAMA_3_8B, TINY, Decoder

    args = command.args
    tiny = command.quick or device.type == "cpu"
    sizes = TINY if tiny else LLAMA_3_8B
    lengths = [min(tokens, 200) for tokens in args.tokens[:1]] if tiny else args.tokens
    rounds = min(args.rounds, 2) if tiny else args.rounds
    command.record.options.update(model=sizes.name, tokens=lengths, blocks=args.blocks)
    model = Decoder(sizes, device)
    for number, tokens in enumerate(lengths):
        left = Deadline(command.deadline.left / (len(lengths) - number))
        if left.seconds <= 0:
            part.not_run(str(tokens), "the deadline passed first")
            continue
        command.show(f"{sizes.name}, {tokens:,} tokens")
        _Length(command, part, model, tokens).run(args.blocks, rounds, left)
        command.write()
    _add_aims(command, lengths, args.blocks)


def _add_aims(command: Command, lengths: list[int], blocks: list[int]) -> None:
    """Adds the time to swap relative to recomputation; above 1, recomputation is faster."""

    def over(out: Any, back: Any, again: Any) -> float:
        return float(out["median"] + back["median"]) / float(again["median"])

    for tokens in lengths:
        again = f"swap/{tokens}/again"
        for way in ("pages", *(f"blocks/{block}" for block in blocks)):
            command.aims.add(
                f"{tokens}_{way.replace('/', '_')}",
                f"{tokens:,} tokens, {way.replace('/', ' of ')}: time to swap out and in relative "
                "to recomputation",
                [f"swap/{tokens}/{way}/out", f"swap/{tokens}/{way}/in", again],
                over,
            )


def add_parser(which: Any) -> None:
    """Adds ``swap`` to the benchmarks."""
    parser = which.add_parser(
        "swap",
        help="a preempted request: swapped to host memory and back, or recomputed",
        description="Swaps requests of Llama-3-8B's shape by the cache's pages and by blocks, and "
        "recomputes them. Full size needs a GPU with 30 GB.",
    )
    add_common(parser, 90)
    add_page(parser)
    add = parser.add_argument
    add(
        "--tokens",
        type=counts,
        default=[512, 2048, 8192],
        help="tokens of a request (512,2048,8192)",
    )
    add(
        "--blocks",
        type=counts,
        default=[8, 16, 32, 64, 256],
        help="tokens of a block (8,16,32,64,256)",
    )
    add("--rounds", type=count, default=10, help="rounds of each way (10)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Runs the command.

    Returns the exit status from `ended`, or 2 if the back end cannot be opened.
    """
    command = open_command(args, "swap", _METHOD)
    return run_on_device(command, "swap", "swapped out and in, or recomputed", _measure)
