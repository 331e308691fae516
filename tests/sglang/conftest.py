# SPDX-License-Identifier: MIT
"""Fixtures: an environment for SGLang, a model, and stock SGLang's answers."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import served

Start = Callable[..., served.Engine]


@pytest.fixture(scope="session", autouse=True)
def imported() -> None:
    """Imports SGLang with its CPU engine in this process, from which tests fork their engines."""
    os.environ.update(served.environment())
    import sglang.srt.entrypoints.engine
    import sglang.srt.managers.scheduler  # noqa: F401


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return served.make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def stock(model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[list[int]]:
    """Returns stock SGLang's 24-token answers, one for each of `served.prompts`."""
    log = tmp_path_factory.mktemp("stock") / "log"
    with served.served(log, {}, served.options(model)) as engine:
        found = engine.answer(served.prompts())
    assert "vmem" not in log.read_text("utf-8")
    return found


@pytest.fixture
def start(model: Path, tmp_path: Path) -> Iterator[Start]:
    """Yields a function that starts engines with the pool, given `env` and engine options."""
    running: list[served.Engine] = []

    def start(env: dict[str, str] | None = None, **more: Any) -> served.Engine:
        given = {"VMEM_SGLANG": "1", "VMEM_PAGE_SIZE": "4096", "VMEM_RESERVE": "0"}
        given |= {"VMEM_LEDGER": str(tmp_path / "ledger"), **(env or {})}
        log = tmp_path / f"log-{len(running)}"
        running.append(served.Engine(log, given, served.options(model, **more)))
        return running[-1]

    yield start
    for one in running:
        one.close()
