# SPDX-License-Identifier: MIT
"""Times torch's work on its device, and captures it in CUDA graphs."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

__all__ = ["captured", "timer"]


def captured(work: Callable[[], object], device: torch.device) -> tuple[Callable[[], object], str]:
    """Captures `work` in a CUDA graph, which must not be replayed once memory it uses is freed.

    Returns:
        A function that replays the graph and ""; or, if `work` cannot be captured, `work` itself
        and the reason.
    """
    import torch

    if device.type != "cuda":
        return work, "not a GPU"
    graph = torch.cuda.CUDAGraph()
    try:
        work()
        torch.cuda.synchronize(device)
        with torch.cuda.graph(graph):
            work()
    except RuntimeError as error:
        torch.cuda.synchronize(device)
        return work, str(error).splitlines()[0]
    return graph.replay, ""


def timer(device: torch.device) -> Callable[[Callable[[], object]], float]:
    """Returns a function that times a call in ns, using events on a GPU and a clock on the CPU."""
    import torch

    if device.type == "cpu":

        def by_clock(work: Callable[[], object]) -> float:
            start = time.perf_counter_ns()
            work()
            return time.perf_counter_ns() - start

        return by_clock
    event: Any = torch.cuda.Event
    start, end = event(enable_timing=True), event(enable_timing=True)

    def by_events(work: Callable[[], object]) -> float:
        start.record()
        work()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) * 1e6

    return by_events
