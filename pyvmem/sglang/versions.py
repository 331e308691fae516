# SPDX-License-Identifier: MIT
"""The versions of SGLang that were tested, and on what."""

from __future__ import annotations

from pyvmem.elastic.versions import Versions
from pyvmem.sglang.internals import INTERNALS

__all__ = ["KNOWN", "VERSIONS"]

KNOWN = {
    "0.5.22": "its CPU engine, by the tests that make test-long runs with 0.5.23; no GPU",
    "0.5.23": "an H100; its CPU engine, by make test-long: tokens equal to stock's",
}
"""Versions, ascending, and what was run with each."""

VERSIONS = Versions("sglang", KNOWN, INTERNALS)
