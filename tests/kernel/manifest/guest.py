# SPDX-License-Identifier: MIT
"""Tests of the guest itself: a boot that does only what every test does at its start and end."""

from __future__ import annotations

from manifest.entry import Test

__all__ = ["TESTS"]

TESTS = [
    Test(name=f"boot-{arch}-{kind}", command=["true"], arch=arch, type=kind, long=True)
    for arch in ("hopper", "ampere")
    for kind in ("release", "debug")
]
