# SPDX-License-Identifier: MIT
"""The tested versions of SGLang and the hardware used for the tests."""

from __future__ import annotations

from pyvmem.elastic.versions import Versions
from pyvmem.sglang.internals import INTERNALS

__all__ = ["KNOWN", "VERSIONS"]

KNOWN = {
    "0.5.22": "on the CPU: the tests of make test-long; not on a GPU",
    "0.5.23": "on an H100; on the CPU: make test-long. Same tokens as stock SGLang",
}
"""The tested versions, in ascending order, and the tests run with each."""

VERSIONS = Versions("sglang", KNOWN, INTERNALS)
