# SPDX-License-Identifier: MIT
"""`vmem bench deferred`: how much longer a prefill takes when its memory must be mapped first.

Follows figure 10 of the vAttention paper (ASPLOS'25): a prompt's prefill needs all of its pages at
once, so they cannot be mapped while something else runs. Four modes take turns:

- ``mapped``: the slot's pages stay mapped throughout; the cache is not called.
- ``reuse``: the request gets the slot and pages of a freed request (deferred reclamation, the
  cache's default); the pages are zeroed first.
- ``sync``: a request's pages are unmapped when it ends, and `step` maps all pages of the next
  request before its prefill, in runs, since the pool is not fragmented.
- ``pages``: like ``sync``, but free memory is fragmented into single pages, as in a long-running
  server.
"""

from __future__ import annotations

import argparse
import time
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any

from pyvmem.bench.record import Book, Part
from pyvmem.bench.timing import Deadline, Samples, interleave, quiet
from pyvmem.errors import VMemError
from pyvmem.kvcache import KVCache
from pyvmem.kvcache.layout import Layout
from pyvmem.layouts.options import count
from vmem_bench.command import (
    Command,
    WrongResult,
    add_common,
    add_page,
    open_command,
    run_on_device,
)
from vmem_bench.fragments import Fragments

if TYPE_CHECKING:
    import torch

    from vmem_bench.decoder import Decoder

__all__ = ["MODES", "add_parser", "run"]

MODES = {
    "mapped": "all memory mapped before",
    "reuse": "an earlier request's pages",
    "sync": "mapped before it starts, in runs",
    "pages": "mapped before it starts, page by page",
}
_AIM = 1.01
_OVERREAD = 192  # rows read past a request's end: FlashAttention-3 reads whole tiles
_METHOD = {
    "time": "host clock around alloc_reqid, step, forward and synchronize",
    "gpu": "events around the forward pass",
    "turns": "the modes take turns, in rotating order; after a round of warm-up, the first round "
    "is discarded. 'pages' takes its turns after the others: it leaves the GPU without work for "
    "half a second, so that the next mode would run on a cooler GPU, 4% faster",
}


class _Mode:
    """A context manager for one of `MODES` and its one-slot cache."""

    def __init__(
        self, name: str, command: Command, model: Decoder, ids: torch.Tensor, book: Book
    ) -> None:
        import torch

        self.name, self._command, self._model, self._ids = name, command, model, ids
        self.length = len(ids)
        self.out: torch.Tensor | None = None
        what = f"prefill of {self.length:,} tokens, {MODES[name]}"
        self._open_rows = partial(book.samples, system=name)
        self._what = what
        self._cuda: Any = torch.cuda if ids.device.type == "cuda" else None
        self._total = self._step = self._gpu = Samples()

    def __enter__(self) -> _Mode:
        from pyvmem.attention import Attention

        command, page = self._command, self._command.page
        config = self._model.sizes.config(
            max_batch=1,
            max_seq_len=self.length + _OVERREAD,
            page_size=page,
            low_watermark=0.0,
            overread_rows=_OVERREAD,
            overread_decode=command.args.kernel != "auto",
            deferred_reclaim=self.name == "reuse",
            idle_seconds=0,  # no trim between prefills
        )
        backend, ordinal = command.backend, command.args.device
        with ExitStack() as stack:
            context = None
            if self.name == "pages":
                layout = Layout(config, page)
                need = layout.slot_pages * layout.num_tensors * page
                context = stack.enter_context(Fragments(backend, ordinal, page, need)).context
            cache = KVCache(config, context, backend=backend, device=ordinal)
            self.cache = stack.enter_context(cache)
            self.attend = Attention(self.cache, command.args.kernel)
            stack.callback(self.attend.close)
            self._begin()
            # There is one slot, so the batch is the same every time.
            self._batch = self.attend.batch([0], [self.length], [self.length])
            _ = self._batch.slots, self._batch.index, self._batch.used, self._batch.starts
            if self.name != "mapped":
                self._end()
            self._stack = stack.pop_all()
        self._name_rows()
        return self

    def _name_rows(self) -> None:
        """Adds the mode's rows to the result, once its setup has succeeded."""
        name, what = self.name, self._what
        self._total = self._open_rows(f"time/{name}", what, unit="ms")
        if name != "mapped":
            self._step = self._open_rows(f"step/{name}", f"of that, step: {what}")
        if self._cuda is not None:
            self._gpu = self._open_rows(f"gpu/{name}", f"its forward pass: {what}", unit="ms")
            event = self._cuda.Event
            self._events = (event(enable_timing=True), event(enable_timing=True))

    def __exit__(self, *exc: Any) -> None:
        self._stack.__exit__(*exc)

    def _begin(self) -> None:
        if self.cache.alloc_reqid(self.length) is None or self.cache.step([self.length]):
            raise RuntimeError("memory is short")

    def _end(self) -> None:
        """Frees the request; in modes that map pages for every prefill, also unmaps its pages."""
        self.cache.free_reqid(0)
        if self.name in ("sync", "pages"):
            self.cache.memory.reclaim_free(wait=True)
            if self.cache.stats().mapped_bytes:
                raise RuntimeError("pages of a freed request stay mapped")

    def turn(self) -> None:
        """Prefills a new request and records the times."""
        clock, takes = time.perf_counter_ns, self.name != "mapped"
        start = clock()
        if takes:
            self._begin()
        stepped = clock()
        if self._cuda is not None:
            self._events[0].record()
        self.out = self._model(self._ids, self.attend, self._batch)
        if self._cuda is not None:
            self._events[1].record()
            self._cuda.synchronize(self._ids.device)
        end = clock()
        self._total.new_round().append(end - start)
        if self._cuda is not None:
            elapsed = self._events[0].elapsed_time(self._events[1])
            self._gpu.new_round().append(elapsed * 1e6)
        if takes:
            self._step.new_round().append(stepped - start)
            self._end()


def _measure(command: Command, part: Part, device: torch.device) -> None:
    import torch

    from vmem_bench.decoder import LLAMA_3_8B, TINY, Decoder

    args = command.args
    sizes = TINY if command.quick or device.type == "cpu" else LLAMA_3_8B
    length = min(args.tokens, 64) if command.quick else args.tokens
    rounds = min(args.rounds, 3) if command.quick else args.rounds
    command.record.options.update(model=sizes.name, tokens=length)
    model = Decoder(sizes, device)
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(sizes.vocabulary, (length,), generator=generator).to(device)
    book = Book(part)
    with ExitStack() as stack:
        modes: list[_Mode] = []
        for name in MODES:
            try:
                modes.append(stack.enter_context(_Mode(name, command, model, ids, book)))
            except (RuntimeError, VMemError) as error:
                part.not_run(f"time/{name}", str(error).splitlines()[0])
        if not modes:
            return
        part.notes.append(str(modes[0].attend.choice))
        before = {mode.name: mode.cache.stats() for mode in modes}
        command.show(f"{sizes.name}, prefill of {length:,} tokens")
        with quiet():
            left = Deadline(command.deadline.left)
            others = [mode for mode in modes if mode.name != "pages"]
            turns = {mode.name: rounds + 1 for mode in modes}
            try:
                done = interleave([mode.turn for mode in others], rounds + 1, left)
                turns |= {mode.name: done for mode in others}
                for mode in modes[len(others) :]:
                    turns[mode.name] = interleave([mode.turn], max(2, done // 3), left)
            finally:
                book.close()
        for mode in modes:
            stats = mode.cache.stats()
            for field in ("grown_pages", "reused_pages", "zeroed_pages"):
                value = getattr(stats, field) - getattr(before[mode.name], field)
                value /= turns[mode.name]
                what = f"{field.replace('_', ' ')} per prefill, {MODES[mode.name]}"
                part.value(f"{field}/{mode.name}", what, mode.name, value, "count")
            mode.cache.check_integrity()
        difference = _compare([mode.out for mode in modes if mode.out is not None])
    what = "largest difference between the modes' outputs, relative to the largest output"
    part.value("difference", what, "all", difference, "x")
    _add_aims(command, length, done - 1)
    if not difference <= 0.02:  # also catches NaN
        raise WrongResult(f"the modes' outputs differ by {difference:.2g}")


def _compare(outs: list[torch.Tensor]) -> float:
    """Returns the largest difference from the first output, relative to its largest element."""
    first = outs[0].float()
    return max(float((one.float() - first).abs().max() / first.abs().max()) for one in outs)


def _add_aims(command: Command, length: int, rounds: int) -> None:
    aims = command.aims
    aims.applies = aims.applies and length >= 16384 and rounds >= 15
    for mode in ("reuse", "sync", "pages"):
        wanted = mode == "reuse"
        aims.add(
            f"prefill_{mode}",
            f"prefill of {length:,} tokens, {MODES[mode]}: time relative to {MODES['mapped']}",
            [f"prefill/time/{mode}", "prefill/time/mapped"],
            _over,
            op="<=" if wanted else None,
            aim=_AIM if wanted else None,
        )


def _over(a: Any, b: Any) -> float:
    return float(a["median"]) / float(b["median"])


def add_parser(which: Any) -> None:
    """Adds ``deferred`` to the benchmarks."""
    parser = which.add_parser(
        "deferred",
        help="prefill with memory mapped beforehand, reused, or mapped on the critical path",
        description="Prefills one prompt with random weights of Llama-3-8B's shape with four "
        "caches in turn. Full size needs a GPU with 35 GB.",
    )
    add_common(parser, 120)
    add_page(parser)
    add = parser.add_argument
    add("--tokens", type=count, default=16384, help="tokens of the prompt (16384)")
    add("--rounds", type=count, default=25, help="rounds of each mode (25)")
    add("--kernel", default="auto", help="kernel of pyvmem.attention (auto)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Runs the command.

    Returns the exit status from `ended`, or 2 if the back end cannot be opened.
    """
    command = open_command(args, "deferred", _METHOD)
    return run_on_device(command, "prefill", "prefill of one prompt", _measure)
