# SPDX-License-Identifier: MIT
"""Serves an unmodified transformers model from a virtually contiguous KV cache.

The pieces are `job` (a prompt and its answer), `scheduler` (the requests that run in a step, and
their memory), `attention` (the function that transformers calls), `engine` (the loop that drives
them), and the modules of the demonstration ``vmem serve-demo``: `model`, `report`, `verify`,
`trace`, `picture`. Requires the packages in the extra ``serve``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pyvmem.serve.engine import Engine, EngineStats, StepRecord, TokenEvent
    from pyvmem.serve.job import Completion, FinishReason, Job

__all__ = [
    "Completion",
    "Engine",
    "EngineStats",
    "FinishReason",
    "Job",
    "StepRecord",
    "TokenEvent",
]


def __getattr__(name: str) -> Any:
    # Imported on first use: the engine imports torch, and `vmem serve-demo` parses its options
    # before that.
    if name in __all__:
        from pyvmem.serve import engine, job

        return getattr(engine if hasattr(engine, name) else job, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
