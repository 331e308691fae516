# SPDX-License-Identifier: MIT
"""The branches of the driver that are built and not run, or not in full."""

from __future__ import annotations

from manifest.entry import Test

__all__ = ["TESTS"]

OTHER_VERSIONS = ("550.163.01", "555.58.02")

TESTS = [Test(name=f"build-{version}", version=version) for version in OTHER_VERSIONS]
