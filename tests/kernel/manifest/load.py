# SPDX-License-Identifier: MIT
"""Does what a user does: `make module` for the software GPU's nvidia.ko, then each kind of load."""

from __future__ import annotations

from manifest.entry import Test

__all__ = ["TESTS"]

HERE = "tests/kernel/load"

TESTS = [
    Test(
        name="load",
        build=("sh", "-c", f"python3 {HERE}/prepare.py && python3 tests/kernel/lib/build.py"),
        image=True,
        load=False,
        files=("build/kernel/load:/load", "build/kernel/lib/_vmem.abi3.so"),
        env=("VMEM_TEST_BACKEND=uvm",),
        command=("python3", f"{HERE}/guest_load.py"),
        timeout=900,
        long=True,  # needs two more driver builds: the stock module and the one from `make module`
    ),
]
