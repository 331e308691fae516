# SPDX-License-Identifier: MIT
"""`vmem bench sharing`: memory that forks save in parallel sampling and in beam search.

Figures 14 and 15 of the PagedAttention paper (SOSP'23) show what fraction of blocks sharing saves.
Requests have the mean lengths of the paper's two data sets, for its OPT-13B and for Llama-3-8B.
Samples share only the prompt. Which beam descends from which depends on the model, so a beam search
by transformers, with the demo's model and prompts, is recorded step by step.

At these sizes the memory is computed, not measured: a fork shares the pages (or blocks) that its
length fills and copies the last, partial page. A test forks a `KVCache` with real pages and gets
the same numbers.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from pyvmem.bench.record import Part, Record
from pyvmem.bench.running import conducted, now, said
from pyvmem.commands.machine import describe
from pyvmem.kvcache.layout import Layout
from pyvmem.layouts.options import count, counts, page_sizes
from pyvmem.layouts.shapes import SHAPES, ModelShape
from pyvmem.plumbing.paths import replaced
from vmem_bench.capacity import System, systems

__all__ = ["LOADS", "MODELS", "Family", "Load", "Parents", "add_parser", "run", "saved"]

Parents = Sequence[Sequence[int]]
"""For each step and each request of a family, the index of the request whose rows it continues."""


class Load(NamedTuple):
    """The lengths of a request's prompt and of each of its answers, in tokens."""

    words: str
    prompt: int
    output: int


LOADS = {
    "alpaca": Load("the means of Alpaca", 19, 58),
    "sharegpt": Load("the means of ShareGPT", 161, 338),
}
MODELS = {
    "OPT-13B": ModelShape("OPT-13B", 40, 40, 128, "float16"),
    "Llama-3-8B": SHAPES["Llama-3-8B"],
}


class Family:
    """Requests forked from a prompt, and the pages that they hold in one tensor.

    Args:
        layout: layout of the cache, or of blocks treated as pages.
        prompt: number of tokens in the prompt, which is already computed.
        count: number of requests, at least 1.
    """

    def __init__(self, layout: Layout, prompt: int, count: int) -> None:
        self._layout, self.length = layout, prompt
        self._new = 0
        first = self._take(layout.pages_for(prompt))
        self._pages = [first, *(self._forked(first) for _ in range(count - 1))]

    def _take(self, count: int) -> list[int]:
        self._new += count
        return list(range(self._new - count, self._new))

    def _forked(self, pages: list[int]) -> list[int]:
        full = self.length * self._layout.row_bytes // self._layout.page_size
        return pages[:full] + self._take(len(pages) - full)

    def step(self, parents: Sequence[int]) -> None:
        """Gives each request its parent's rows and one more token.

        A parent's first child takes over the parent's pages, without a fork.
        """
        seen: set[int] = set()
        after = []
        for parent in parents:
            pages = self._pages[parent]
            after.append(self._forked(pages) if parent in seen else pages)
            seen.add(parent)
        self.length += 1
        needed = self._layout.pages_for(self.length)
        self._pages = [pages + self._take(needed - len(pages)) for pages in after]

    @property
    def held(self) -> int:
        """The number of pages that the requests hold; a shared page counts once."""
        return len({page for pages in self._pages for page in pages})

    @property
    def alone(self) -> int:
        """The number of pages that the requests would hold if none were shared."""
        return len(self._pages) * self._layout.pages_for(self.length)


def saved(layout: Layout, prompt: int, parents: Parents) -> float:
    """Returns the fraction of pages that sharing saves, over all steps of an answer."""
    family = Family(layout, prompt, len(parents[0]))
    held, alone = family.held, family.alone
    for step in parents:
        family.step(step)
        held, alone = held + family.held, alone + family.alone
    return 1 - held / alone


def _sampling(count: int, steps: int) -> Parents:
    """Returns the parents in parallel sampling: every sample continues its own rows."""
    return [range(count)] * steps


def _searched(path: Path | None, width: int, prompts: int, steps: int) -> list[Parents]:
    """Runs transformers' beam search and returns the parents of each prompt's beams.

    Raises:
        ModelNotFound: the model is not found.
        ImportError: torch or transformers is not installed.
    """
    import torch
    from transformers import DynamicCache

    from pyvmem.hf.keyword import CACHE
    from pyvmem.serve import model
    from pyvmem.serve import prompts as texts

    loaded = model.load(path)
    ids = [model.encode(loaded.tokenizer, text) for text in texts.load(None, prompts)]
    longest = max(map(len, ids))
    rows = [[0] * (longest - len(one)) + list(one) for one in ids]
    mask = [[0] * (longest - len(one)) + [1] * len(one) for one in ids]
    taken: list[list[int]] = []

    class Watched(DynamicCache):
        def reorder_cache(self, beam_idx: Any) -> None:
            taken.append(beam_idx.tolist())
            super().reorder_cache(beam_idx)

    loaded.model.generate(
        torch.tensor(rows),
        attention_mask=torch.tensor(mask),
        **{CACHE: Watched(config=loaded.model.config)},
        num_beams=width,
        do_sample=False,
        min_new_tokens=steps,
        max_new_tokens=steps,
        pad_token_id=0,
    )
    return [
        [[row - at * width for row in step[at * width : (at + 1) * width]] for step in taken]
        for at in range(len(ids))
    ]


def _count(
    part: Part,
    way: str,
    width: int,
    searched: Sequence[Parents] | None,
    compared: Sequence[tuple[str, ModelShape, System]],
) -> None:
    """Adds a row for each load, model and layout.

    searched: the parents of each prompt's beams; None for parallel sampling.
    """
    for key, load in LOADS.items():
        families = [_sampling(width, load.output)] if searched is None else searched
        families = [parents[: load.output] for parents in families]
        for name, shape, system in compared:
            layout = system.layout(shape, load.prompt + load.output)
            found = [saved(layout, load.prompt, parents) for parents in families]
            words = f"blocks of {system.block}" if system.block else system.name
            part.value(
                f"{key}/{name}/{width}/{system.name}",
                f"{way} of {width}, {load.words}, {name}, {words}: memory saved",
                "paged" if system.block else "pages",
                100 * statistics.fmean(found),
                "%",
                page=system.page_size,
                least=100 * min(found),
                most=100 * max(found),
                steps=min(map(len, families)),
            )


def add_parser(which: Any) -> None:
    """Adds ``sharing`` to the benchmarks."""
    parser = which.add_parser(
        "sharing",
        help="memory that forks save in parallel sampling and beam search",
        description="Counts the pages that samples and beams share, by layout and for "
        "PagedAttention's blocks. Needs no GPU; beam search needs the demonstration's model.",
    )
    add = parser.add_argument
    add("--widths", type=counts, default=[2, 4, 6], help="samples or beams (2,4,6)")
    add("--pages", type=page_sizes, default=page_sizes("64K,2M"), help="page sizes (64K,2M)")
    add("--groups", type=counts, default=[1, 8], help="layers per tensor (1,8)")
    add("--blocks", type=counts, default=[16], help="tokens per block of PagedAttention (16)")
    add("--model", type=Path, metavar="FILE", help="model for beam search (vmem serve-demo's)")
    add(
        "--prompts",
        type=count,
        default=8,
        help="number of the demonstration's prompts, searched in one batch (8)",
    )
    add("--no-beams", action="store_true", help="only parallel sampling")
    add("--out", type=replaced, metavar="FILE", help="write JSON here, the beams' parents in raw/")
    add("--json", action="store_true", help="print the JSON instead of the tables")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Runs the command."""
    start = time.monotonic()
    compared = [
        (name, shape, system)
        for name, shape in MODELS.items()
        for system in systems(shape, args.pages, args.groups, args.blocks)
    ]
    steps = max(load.output for load in LOADS.values())
    record = Record(
        machine=describe(),
        options={"quick": False, "backend": "none", "prompts": args.prompts, "widths": args.widths},
        method={
            "saved": "pages that sharing saves, divided by the pages without sharing, both summed "
            "over the steps",
            "lengths": {key: [load.prompt, load.output] for key, load in LOADS.items()},
            "beams": "by transformers' beam search with a real model, one batch of prompts",
        },
        started=now(),
        format="vmem-bench-sharing/1",
    )
    part = record.part("sampling", "parallel sampling")
    with conducted(part):
        for width in args.widths:
            _count(part, "parallel sampling", width, None, compared)
    part = record.part("beams", "beam search")
    with conducted(part):
        for width in args.widths:
            if args.no_beams:
                part.not_run("*", "not asked for")
                break
            print(f"beam search of {width}, {steps} tokens", file=sys.stderr, flush=True)
            try:
                searched = _searched(args.model, width, args.prompts, steps)
            except (ImportError, OSError, ValueError) as error:
                part.not_run("*", str(error).splitlines()[0])
                break
            _count(part, "beam search", width, searched, compared)
            row = part.value(f"parents/{width}", "beams recorded", "all", len(searched), "prompts")
            row["samples"] = searched  # written only to raw/
            if args.out is not None:
                record.write(args.out)
    record.seconds = time.monotonic() - start
    if args.out is not None:
        record.write(args.out)
    return said(record, args)
