# SPDX-License-Identifier: MIT
"""Tests on kernels of newer Debian releases: the short run, and those required as evidence.

Debian's own pair of kernel and driver is in the long run; for others see suite.py --kernel.
"""

from __future__ import annotations

from dataclasses import replace

from manifest import c, pyvmem
from manifest.branches import EACH
from manifest.entry import Test

__all__ = ["TESTS", "kernel_tests"]

# A Debian suite whose kernel is used, and that suite's driver version.
DEBIAN = (("trixie", "550.163.01"),)
# Suites whose kernel has DEVICE_PRIVATE, and so HMM.
WITH_HMM = ("trixie-backports",)
# A version counts as tested on a kernel once all tests in EACH have passed with these architectures
# and builds. The short run already contains most tests of the debug build.
COUNTED = (("hopper", "release"), ("hopper", "debug"))


def kernel_tests(suite: str, version: str) -> list[Test]:
    """Returns a driver's tests on a Debian suite's kernel."""
    short = [test for test in (*c.TESTS, *pyvmem.TESTS) if not test.long]
    each = [
        replace(test, name=f"{test.name}-{arch}-{kind}", arch=arch, type=kind)
        for arch, kind in COUNTED
        for test in EACH
    ]
    ran = {test.name for test in short}
    each = [test for test in each if test.name not in ran]
    hmm = ["HMM=1"] if suite in WITH_HMM else []
    return [
        replace(
            test,
            name=f"{test.name}-{suite}",
            version=version,
            suite=suite,
            args=[*test.args, *(hmm if test.program == "builtin" else [])],
        )
        for test in (*short, *each)
    ]


TESTS = [replace(test, long=True) for pair in DEBIAN for test in kernel_tests(*pair)]
