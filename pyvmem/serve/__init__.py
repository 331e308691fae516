# SPDX-License-Identifier: MIT
"""Serving an unmodified transformers model from a virtually contiguous KV cache.

The pieces: `request` (what is asked and answered), `scheduler` (who runs in a step, and with how
much memory), `attention` (the function that transformers calls), `engine` (the loop over all of
it), and around these the demonstration of ``vmem serve-demo``: `model`, `report`, `verify`,
`trace`, `picture`. Needs the packages of the extra ``serve``.
"""

from __future__ import annotations

from pyvmem.serve.engine import Engine, EngineStats, StepRecord, TokenEvent
from pyvmem.serve.request import Completion, FinishReason, Request

__all__ = [
    "Completion",
    "Engine",
    "EngineStats",
    "FinishReason",
    "Request",
    "StepRecord",
    "TokenEvent",
]
