# SPDX-License-Identifier: MIT
"""The modes of `vmem bench overlap`, each with its cache, requests and times."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from pyvmem.bench.record import SCALES, Part
from pyvmem.bench.timing import Samples
from pyvmem.kvcache import KVCache
from pyvmem.plumbing.closing import Closable
from vmem_bench.command import Command

if TYPE_CHECKING:
    import torch

    from pyvmem.attention import Batch
    from vmem_bench.decoder import Decoder

__all__ = ["MODES", "OVERREAD", "SPIKE", "Lengths", "Mode", "must", "spikes"]

MODES = {
    "mapped": "all memory mapped before",
    "async": "mapped in the background",
    "sync": "mapped on the critical path",
}
_DRAWN = 500  # number of iterations whose times are stored individually, for the picture
SPIKE = 1.2
OVERREAD = 192  # rows read past a request's end: FlashAttention-3 reads whole tiles


class Lengths:
    """Each request's number of tokens at every iteration.

    Args:
        batch: number of requests; their initial lengths are spread evenly from `low` to `high`.
        low: tokens of a fresh request, before its first iteration.
        high: tokens at which a request ends.
    """

    def __init__(self, batch: int, low: int, high: int) -> None:
        self.low, self.high = low, high
        distance = (high - low - 1) // max(1, batch - 1)
        self._starts = [i * distance for i in range(batch)]

    def at(self, iteration: int) -> list[int]:
        """Returns each request's number of tokens at an iteration, including the new token."""
        span = self.high - self.low
        return [self.low + 1 + (start + iteration) % span for start in self._starts]

    def ended(self, iteration: int) -> list[int]:
        """Returns the requests for which `iteration` is the last."""
        return [i for i, length in enumerate(self.at(iteration)) if length == self.high]

    def replaced(self, iteration: int) -> list[bool]:
        """Returns, for each position in the batch, whether its first request has been replaced."""
        span = self.high - self.low
        return [start + iteration >= span for start in self._starts]


def spikes(times: list[float]) -> int:
    """Returns how many of the times exceed 1.2 times their median."""
    median = sorted(times)[len(times) // 2]
    return sum(one > SPIKE * median for one in times)


@dataclass
class _Times:
    total: Samples
    gpu: Samples
    step: Samples
    begin: Samples

    @classmethod
    def empty(cls) -> _Times:
        return cls(Samples(), Samples(), Samples(), Samples())

    def new_round(self) -> None:
        for samples in (self.total, self.gpu, self.step, self.begin):
            samples.new_round()


class Mode(Closable):
    """A context manager for one of `MODES` and its cache.

    Args:
        name: one of `MODES`.
        command: provides the back end, page size and kernel.
        model: the model that decodes.
        lengths: lengths of the requests.
        batch: number of requests.

    Attributes:
        times: times of the rounds so far.
        out: the last iteration's logits.
    """

    def __init__(
        self, name: str, command: Command, model: Decoder, lengths: Lengths, batch: int
    ) -> None:
        import torch

        from pyvmem.attention import Attention

        self.name, self.model, self.lengths = name, model, lengths
        self.times = _Times.empty()
        self.out: torch.Tensor | None = None
        pages = -(-lengths.high * model.sizes.kv_heads * model.sizes.head_dim * 2 // command.page)
        config = model.sizes.config(
            max_batch=batch,
            max_seq_len=lengths.high,
            page_size=command.page,
            memory_limit=batch * pages * command.page * 2 * model.sizes.layers,
            low_watermark=0.0,
            overread_rows=OVERREAD,
            overread_decode=True,  # so that all iterations need the same overread rows
        )
        self.cache = KVCache(config, backend=command.backend, device=command.args.device)
        self.attend = Attention(self.cache, command.args.kernel)
        self.device = self.cache.k(0).device
        self._cuda: Any = torch.cuda if self.device.type == "cuda" else None
        if self._cuda is not None:
            event = self._cuda.Event
            self._events = (event(enable_timing=True), event(enable_timing=True))
        self.reqids: list[int] = []
        self._ahead_tokens = command.args.ahead
        self._batch: Batch | None = None  # advanced in place, so that a CUDA graph can read it
        self._graph: Any = None
        self._ids: torch.Tensor | None = None
        self._ahead_ns = 0
        self.before = self.cache.stats()

    def prepare(self) -> None:
        """Starts the requests and writes their rows, once the caches of all modes exist."""
        first = self.lengths.at(0)
        self.reqids = [self._take(length) for length in first]
        everything = [self.lengths.high] * len(first)
        must(self.cache.step(everything if self.name == "mapped" else self._by_slot(first)))
        self._write_rows(first)
        self.before = self.cache.stats()

    def _take(self, length: int) -> int:
        reqid = self.cache.alloc_reqid(length)
        if reqid is None:
            raise RuntimeError("no free slot")
        return reqid

    def _by_slot(self, lengths: list[int]) -> list[int]:
        out = [0] * len(lengths)
        for reqid, length in zip(self.reqids, lengths, strict=True):
            out[reqid] = length
        return out

    def _write_rows(self, lengths: list[int]) -> None:
        """Writes the rows that precede the first iteration, with the same values in every mode."""
        import torch

        generator = torch.Generator(device=self.device).manual_seed(2)
        for layer in range(self.model.sizes.layers):
            for tensor in (self.cache.k(layer), self.cache.v(layer)):
                for reqid, length in zip(self.reqids, lengths, strict=True):
                    tensor[reqid, : length - 1].normal_(generator=generator)
        self._synchronize()

    def _synchronize(self) -> None:
        if self._cuda is not None:
            self._cuda.synchronize(self.device)

    def iterate(self, iteration: int, ids: torch.Tensor, *, keep: bool) -> None:
        """Runs one iteration; if `keep`, adds its times to the last round."""
        clock, maps = time.perf_counter_ns, self.name != "mapped"
        lengths = self.lengths.at(iteration)
        wanted = self._by_slot(lengths)
        start = clock()
        if maps:
            must(self.cache.step(wanted))
        stepped = clock()
        if self._batch is None:
            self._batch = self.attend.batch(self.reqids, [1] * len(lengths), lengths)
            _ = self._batch.slots, self._batch.index, self._batch.used, self._batch.starts
        else:
            self._batch.advance(self.reqids, lengths)
        if self._cuda is not None:
            self._events[0].record()
        during = partial(self._ahead, iteration) if self.name == "async" else None
        self._ahead_ns = 0
        self._forward(ids, during)
        if self._cuda is not None:
            self._events[1].record()
        launched = clock()
        if maps and self.lengths.ended(iteration):
            self._replace(iteration)
        begun = clock()
        self._synchronize()
        end = clock()
        if not keep:
            return
        times = self.times
        times.total.rounds[-1].append(end - start)
        times.step.rounds[-1].append(stepped - start)
        times.begin.rounds[-1].append(self._ahead_ns + begun - launched)
        if self._cuda is not None:
            elapsed = self._events[0].elapsed_time(self._events[1])
            times.gpu.rounds[-1].append(elapsed * 1e6)

    def _forward(self, ids: torch.Tensor, during: Callable[[], None] | None) -> None:
        """Launches a forward pass and calls `during` once the GPU is busy with it."""
        if self._graph is None:
            self.out = self.model(ids, self.attend, self._current(), during)
            return
        assert self._ids is not None
        self._ids.copy_(ids)
        self._graph.replay()
        if during is not None:
            during()

    def _current(self) -> Batch:
        assert self._batch is not None
        return self._batch

    def capture(self) -> str:
        """Captures the forward pass as a CUDA graph; at least one iteration must have run.

        Returns "", or the reason why it cannot be captured.
        """
        import torch

        if self._cuda is None:
            return "no GPU"
        if self.attend.choice.decode not in ("fa3", "fa3-paged"):
            return f"{self.attend.choice.decode} reads lengths on the host"
        self._ids = torch.zeros(len(self.reqids), dtype=torch.int64, device=self.device)
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                self.out = self.model(self._ids, self.attend, self._current())
        except RuntimeError as error:
            return str(error).splitlines()[0]
        self._graph = graph
        return ""

    def _ahead(self, iteration: int) -> None:
        """Starts mapping for the next iterations, up to `high` tokens per request."""
        start = time.perf_counter_ns()
        now = self.lengths.at(iteration)
        then = [min(length + self._ahead_tokens, self.lengths.high) for length in now]
        must(self.cache.step_async(self._by_slot(then)))
        self._ahead_ns = time.perf_counter_ns() - start

    def _replace(self, iteration: int) -> None:
        """Replaces the requests that end with this iteration, after its work has been launched."""
        for request in self.lengths.ended(iteration):
            self.cache.free_reqid(self.reqids[request])
            self.reqids[request] = self._take(self.lengths.low + 1)
        if self.name == "async":
            must(self.cache.step_async(self._by_slot(self.lengths.at(iteration + 1))))

    def add_rows(self, part: Part) -> None:
        """Adds rows for the times recorded so far."""
        what, name = MODES[self.name], self.name
        times = self.times
        row = part.time(f"time/{name}", f"an iteration, {what}", name, times.total, unit="ms")
        first = [one / SCALES["ms"] for each in times.total.rounds for one in each][:_DRAWN]
        row["columns"] = ["iteration", "ms"]
        row["series"] = [[place, round(one, 3)] for place, one in enumerate(first)]
        if len(times.gpu):
            part.time(f"gpu/{name}", f"its forward pass, {what}", name, times.gpu, unit="ms")
        part.value(
            f"spikes/{name}",
            f"iterations above {SPIKE} times the median, {what}",
            name,
            spikes(times.total.flat()),
            "count",
        )
        if name == "mapped":
            return
        part.time(f"step/{name}", f"of that, step, {what}", name, times.step)
        if name == "async":
            part.time(f"begin/{name}", "of that, step_async and new requests", name, times.begin)
        stats, before = self.cache.stats(), self.before
        for field, unit in (
            ("grown_pages", "count"),
            ("reused_pages", "count"),
            ("zeroed_pages", "count"),
            ("critical_driver_ns", "ns"),
            ("background_driver_ns", "ns"),
        ):
            value = getattr(stats, field) - getattr(before, field)
            words = field.replace("_", " ").removesuffix(" ns")
            part.value(f"{field}/{name}", f"{words}, {what}", name, value, unit)

    def close(self) -> None:
        """Frees all memory."""
        self._graph = self._batch = self.out = None
        self.attend.close()
        self.cache.close()


def must(result: int) -> None:
    """Raises RuntimeError if a step's result is nonzero, which means that memory is short."""
    if result:
        raise RuntimeError("step: memory is short")
