# SPDX-License-Identifier: MIT
"""The required tests of each driver branch, on each architecture it supports, in both builds.

The long run covers Debian's versions; for any other version see suite.py --driver.
"""

from __future__ import annotations

from dataclasses import replace

from manifest.c import BUILTIN_NOISE, KILLED, PROGRAMS
from manifest.entry import DELAYS, DRIVER, Test

__all__ = ["EACH", "TESTS", "branch_tests"]

DEBIAN = (DRIVER, "550.163.01", "555.58.02")
ARCHITECTURES = ("ampere", "hopper")
BLACKWELL = ("blackwell", "gb20x")
SINCE_BLACKWELL = 570

FORMAT = ("basic", "gap")  # programs that depend on the page table format

# UVM's CHANNEL_SANITY kills a channel and destroys the others without waiting for them. With
# delayed pushes they are still busy then, and channel_destroy asserts that they are not.
IN_TIME = ("builtin",)

EACH = [
    *(test for test in PROGRAMS if test.name in FORMAT),
    Test(name="builtin", program="builtin", allow=BUILTIN_NOISE, timeout=240),
    Test(name="model", program="model", args=["OPS=800", "PROCS=2", "THREADS=2", "SEED=6"]),
    Test(name="fuzz", program="fuzz", args=["CALLS=8000", "SEED=6"]),
    Test(name="kill", program="kill", args=["KILLS=12", "SEED=6"], **KILLED),
]
# Tests that run once in each build, on one architecture.
ONCE = [test for test in PROGRAMS if test.name not in FORMAT]


def architectures(version: str) -> tuple[str, ...]:
    """Returns the software GPU's architectures that a version's UVM supports."""
    known = int(version.split(".", 1)[0]) >= SINCE_BLACKWELL
    return ARCHITECTURES + (BLACKWELL if known else ())


def branch_tests(version: str) -> list[Test]:
    """Returns the tests for a version, starting with those of the faster release build."""
    newest = architectures(version)[-1]
    found = []
    for kind in ("release", "debug"):
        delays = DELAYS if kind == "debug" else ""
        pairs = [(test, arch) for arch in architectures(version) for test in EACH]
        pairs += [(test, "hopper" if kind == "release" else newest) for test in ONCE]
        found += [
            replace(
                test,
                name=f"{test.name}-{version}-{arch}-{kind}",
                version=version,
                arch=arch,
                type=kind,
                module_args=f"{test.module_args} {'' if test.name in IN_TIME else delays}".strip(),
            )
            for test, arch in pairs
        ]
    return found


TESTS = [replace(test, long=True) for version in DEBIAN for test in branch_tests(version)]
