# SPDX-License-Identifier: MIT
"""Records each step of a run and replays its lengths under other layouts.

The comparison is a replay, not a second run. For a layout with pages of P bytes, T tensors and rows
of R bytes, a step whose requests hold n_1, n_2, ... tokens has mapped

    sum over requests i of  ceil(n_i * R / P) * P * T

and used ``sum of n_i * R * T``, which is the same for all layouts. A static reservation gives each
of these requests ``max_seq_len * R * T``, regardless of its length. A layout's peak is its largest
step. The replay counts running requests only; pages that the cache keeps mapped for the next
request appear only in the measured numbers, so the replay of the run's own layout is printed next
to them. Layer groups are summed; rows that have left a window count as if they were kept, in every
layout.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from pyvmem.kvcache import KVCache, KVCacheConfig
from pyvmem.kvcache.layout import Layout
from pyvmem.serve.engine import StepRecord

__all__ = ["TRACE_FORMAT", "Footprint", "Recorder", "Replay"]

TRACE_FORMAT = 1
_BIG_PAGE = 2 << 20


@dataclass(frozen=True)
class Footprint:
    """A layout's memory at its peak, in bytes.

    Attributes:
        name: description of the layout.
        page_size: page size in bytes; 0 for a static reservation.
        num_tensors: number of virtual tensors.
        mapped_bytes: bytes mapped in the layout's largest step.
        used_bytes: bytes of the rows that held tokens in that step.
    """

    name: str
    page_size: int
    num_tensors: int
    mapped_bytes: int
    used_bytes: int

    @property
    def wasted_bytes(self) -> int:
        """Bytes mapped but not used."""
        return self.mapped_bytes - self.used_bytes

    def as_dict(self) -> dict[str, Any]:
        """Returns the fields for JSON."""
        return {**asdict(self), "wasted_bytes": self.wasted_bytes}


class Replay:
    """Finds a run's largest step under a layout; `page_size` 0 means a static reservation."""

    def __init__(self, name: str, configs: Sequence[KVCacheConfig], page_size: int) -> None:
        self.name = name
        self.page_size = page_size
        self._layouts = [Layout(config, page_size or _BIG_PAGE) for config in configs]
        self._peak = (0, 0)  # mapped and used bytes of the largest step

    def bytes_for(self, tokens: int) -> int:
        """Returns the number of physical bytes that back a request of this many tokens."""
        layouts = self._layouts
        if not self.page_size:
            return self._used(layouts[0].config.max_seq_len)
        return sum(one.pages_for(tokens) * one.page_size * one.num_tensors for one in layouts)

    def add(self, lengths: list[int]) -> tuple[int, int]:
        """Accounts for a step; returns its mapped and used bytes."""
        step = (sum(map(self.bytes_for, lengths)), sum(map(self._used, lengths)))
        # Of equally large steps, keep the one with the most used bytes, which favors every layout
        # alike.
        self._peak = max(self._peak, step)
        return step

    def _used(self, tokens: int) -> int:
        """Returns the bytes taken by the rows of this many tokens; a state counts as one row."""
        return sum(
            (min(tokens, 1) if one.state else tokens) * one.row_bytes * one.num_tensors
            for one in self._layouts
        )

    def footprint(self) -> Footprint:
        """Returns the layout's peak so far."""
        tensors = sum(one.num_tensors for one in self._layouts)
        return Footprint(self.name, self.page_size, tensors, *self._peak)


class Recorder:
    """The engine's observer: replays other layouts and, if asked, keeps each step for a picture.

    Args:
        cache: the run's cache.
        page_size: the cache's page size in bytes.
        keep_steps: whether to keep the data that `trace` needs.
    """

    def __init__(self, cache: KVCache, page_size: int, *, keep_steps: bool = False) -> None:
        configs = [part.config for part in cache.caches]
        whole = [replace(config, group_size=config.num_layers) for config in configs]
        self._cache = cache
        self._page_size = page_size
        self.own = Replay("this run's layout", configs, page_size)
        self.others = [Replay("2 MiB pages, same tensors", configs, _BIG_PAGE)]
        if configs != whole:
            together = "all layers in one K and one V"
            if len(configs) > 1:
                together = "all layers of a kind together"
            self.others.append(Replay(f"2 MiB pages, {together}", whole, _BIG_PAGE))
            self.others.append(Replay(f"this run's pages, {together}", whole, page_size))
        self.others.append(Replay("static, the longest sequence for each", configs, 0))
        self.curve: list[tuple[int, int]] = []  # mapped, used bytes per step, in the run's layout
        self._steps: list[dict[str, Any]] | None = [] if keep_steps else None
        self._start = time.perf_counter()

    def __call__(self, record: StepRecord) -> None:
        """Records a step; the engine calls this on every step."""
        lengths = [tokens for _, _, tokens in record.requests]
        self.curve.append(self.own.add(lengths))
        for layout in self.others:
            layout.add(lengths)
        if self._steps is None:
            return
        stats = self._cache.stats()
        slots = {info.reqid: info for info in self._cache.snapshot()}
        self._steps.append(
            {
                "step": record.step,
                "time_s": round(time.perf_counter() - self._start, 6),
                "waiting": record.waiting,
                "mapped_bytes": stats.mapped_bytes,
                "used_bytes": stats.used_bytes,
                "other_bytes": [sum(map(layout.bytes_for, lengths)) for layout in self.others],
                # per slot: mapped pages per tensor
                "slots": [info.mapped_pages for info in slots.values()],
                # id, slot, tokens, pages per tensor owned by the request
                "requests": [
                    [request, slot, tokens, slots[slot].granted_pages]
                    for request, slot, tokens in record.requests
                ],
            }
        )

    def trace(self) -> dict[str, Any]:
        """Returns the data that `picture` draws.

        Raises:
            ValueError: the recorder was created without `keep_steps`.
        """
        if self._steps is None:
            raise ValueError("the recorder was created without keep_steps")
        footprint = self.own.footprint()
        return {
            "format": TRACE_FORMAT,
            "page_size": self._page_size,
            "num_tensors": footprint.num_tensors,
            "max_batch": self._cache.config.max_batch,
            "max_seq_len": self._cache.config.max_seq_len,
            "others": [layout.name for layout in self.others],
            "steps": self._steps,
        }
