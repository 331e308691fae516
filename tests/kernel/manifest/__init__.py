# SPDX-License-Identifier: MIT
"""The tests that run in a guest: every module of this package has a list TESTS."""

from __future__ import annotations

import importlib
import pkgutil
from collections import Counter

from manifest.branches import branch_tests
from manifest.entry import DRIVER, Test
from manifest.kernels import kernel_tests

__all__ = ["DRIVER", "Test", "all_tests", "branch_tests", "kernel_tests"]


def all_tests() -> list[Test]:
    """Returns the tests of all modules, in the order of the modules' names."""
    tests: list[Test] = []
    for found in sorted(pkgutil.iter_modules(__path__), key=lambda one: one.name):
        if found.name != "entry":
            tests += importlib.import_module(f"{__name__}.{found.name}").TESTS
    twice = [name for name, count in Counter(test.name for test in tests).items() if count > 1]
    if twice:
        raise ValueError(f"duplicate test names: {', '.join(twice)}")
    return tests
