# SPDX-License-Identifier: MIT
"""Fixtures: one context per test, on every back end that this machine can use.

VMEM_TEST_BACKEND (names separated by commas) selects the back ends; if a selected back end is
unusable, its tests fail instead of being skipped. VMEM_TEST_GRANULE sets the smallest page size on
`host`, in bytes (4096 by default); 2097152 is the page size of cuda.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

import pyvmem

# Torch's threads spin at barriers. On a busy machine, they take CPU time from the very threads that
# they wait for: with two other processes on two cores, torch ran eight times slower. Torch is
# imported later, by a test, and reads the variable then.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")


HOST_GRANULE = int(os.environ.get("VMEM_TEST_GRANULE", "4096"))


def usable_backends() -> list[str]:
    """Returns the back ends to test: those requested, or all that work on this machine."""
    asked = os.environ.get("VMEM_TEST_BACKEND", "")
    if asked:
        return [name.strip() for name in asked.split(",")]
    return [one.backend for one in pyvmem.probe() if one.usable]


def open_context(backend: str, **options: object) -> pyvmem.Context:
    """Opens a context with the smallest granule that tests can afford on the back end."""
    options.setdefault("granule", HOST_GRANULE if backend == "host" else 0)
    return pyvmem.Context(backend, **options)  # type: ignore[arg-type]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--points",
        default=os.environ.get("VMEM_INTERRUPT_POINTS", ""),
        help="test_interrupt*.py: number of points at which each scenario is interrupted, or 'all' "
        "(default: $VMEM_INTERRUPT_POINTS)",
    )


EVERY_POINT = 3000  # time limit in seconds for the largest scenario


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "backend" in metafunc.fixturenames:
        metafunc.parametrize("backend", usable_backends(), scope="session")


def has_cuda() -> bool:
    """Returns true if torch can access GPU memory here."""
    import torch

    return bool(torch.cuda.is_available())


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skips tests that need CUDA tensors on a patched driver without CUDA (a software GPU).

    If --points is given, raises the time limit of the tests that use it.
    """
    reason = "needs torch tensors over GPU memory, and there is no CUDA here"
    for item in items:
        if config.getoption("--points") and "points" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.timeout(EVERY_POINT))
        chosen = getattr(item, "callspec", None)
        if item.get_closest_marker("needs_tensors") is None or chosen is None:
            continue
        if chosen.params.get("backend", "host") != "host" and not has_cuda():
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(autouse=True, scope="module")
def short_collections() -> None:
    """Excludes existing objects from the garbage collection that runs after each test.

    With torch, its compiler and transformers loaded, each collection took 0.2 to 0.4 s.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture
def points(request: pytest.FixtureRequest) -> int | None:
    """The value of ``--points``: 0 means all points, None the test's default."""
    asked = request.config.getoption("--points")
    return 0 if asked == "all" else int(asked) if asked else None


@pytest.fixture
def context(backend: str) -> Iterator[pyvmem.Context]:
    """Opens a context and checks its invariants after the test."""
    ctx = open_context(backend)
    yield ctx
    gc.collect()
    if ctx.is_open:
        ctx.check()
        ctx.close()


@pytest.fixture
def host() -> Iterator[pyvmem.Context]:
    """Opens a context on ``host``, for tests of features that only it supports: CPU access, fork
    and exact counts.
    """
    ctx = open_context("host")
    yield ctx
    gc.collect()
    if ctx.is_open:
        ctx.check()
        ctx.close()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A directory for ledgers that only this user can access."""
    path = tmp_path / "ledger"
    path.mkdir(mode=0o700)
    return path


@pytest.fixture
def page(context: pyvmem.Context) -> int:
    """The context's smallest page size in bytes."""
    return context.info.granule
