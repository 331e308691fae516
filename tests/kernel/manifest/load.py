# SPDX-License-Identifier: MIT
"""The user's way: `make module` for the software GPU's nvidia.ko, then loads that end well or not."""

from __future__ import annotations

from manifest.entry import Test

__all__ = ["TESTS"]

HERE = "tests/kernel/load"

TESTS = [
    Test(
        name="load",
        build=("python3", f"{HERE}/prepare.py"),
        image=True,
        load=False,
        files=("build/kernel/load:/load",),
        command=("python3", f"{HERE}/guest_load.py"),
        timeout=500,
    ),
]
