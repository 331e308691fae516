# SPDX-License-Identifier: MIT
"""Tests log messages: their levels, how often they repeat, and events that are not logged."""

from __future__ import annotations

import logging

import pytest
from conftest import open_context
from kvcache_helpers import LAYERS, ROWS, eventually, lens, small_cache

from pyvmem import Caps, Context, DriverError, Inject
from pyvmem.plumbing import logs

TENSORS = 2 * LAYERS


@pytest.fixture(autouse=True)
def unseen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forgets which warnings have already been logged."""
    monkeypatch.setattr(logs, "_last", {})


def said(caplog: pytest.LogCaptureFixture, level: int, start: str) -> list[str]:
    return [
        one.getMessage()
        for one in caplog.records
        if one.levelno == level and one.getMessage().startswith(start)
    ]


def test_opening_logs_the_chosen_back_end_and_why(
    backend: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "pyvmem")
    with open_context(backend) as context:
        why = context.info.why
    (line,) = said(caplog, logging.INFO, "back end ")
    assert line.startswith(f"back end {backend} ({backend} requested)")
    assert ("passed over" in line) == bool(why)
    caplog.clear()
    with Context("auto", granule=0) as context:
        (line,) = said(caplog, logging.INFO, "back end ")
        assert line.startswith(f"back end {context.info.backend} (auto requested)")
        assert context.info.why in line
    caplog.clear()
    caplog.set_level(logging.WARNING, "pyvmem")
    with open_context(backend):
        assert not caplog.records


def test_a_run_without_shortage_logs_nothing(
    context: Context, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "pyvmem")
    with small_cache(context) as cache:
        caplog.clear()
        cache.alloc_reqid()
        for length in range(1, 3 * ROWS):
            assert cache.step_async(lens(cache, r0=length)) == 0
            assert cache.step(lens(cache, r0=length)) == 0
        cache.free_reqid(0)
        assert not caplog.records


def test_shortage_reclaiming_eviction_and_trims_are_logged_at_debug(
    context: Context, caplog: pytest.LogCaptureFixture
) -> None:
    if Caps.ALIAS | Caps.READONLY not in context.info.caps:
        pytest.skip("the back end has no prefixes to evict")
    caplog.set_level(logging.DEBUG, "pyvmem")
    limit = 4 * TENSORS * context.info.granule
    with small_cache(context, memory_limit=limit) as cache:
        first = cache.alloc_reqid()
        assert first is not None
        assert cache.step(lens(cache, r0=3 * ROWS)) == 0
        cache.free_reqid(first, tokens=range(3 * ROWS))
        long, short = (f"r{cache.alloc_reqid()}" for _ in range(2))
        assert cache.step(lens(cache, **{long: 4 * ROWS})) == 0
        assert said(caplog, logging.DEBUG, "evicted prefixes: ")
        assert said(caplog, logging.DEBUG, "reclaimed ")
        assert not said(caplog, logging.DEBUG, "short: ")
        assert cache.step(lens(cache, **{long: 4 * ROWS, short: 1})) == -1
        assert said(
            caplog, logging.DEBUG, "short: -1 with 0 of 16 pages free, 0 more obtainable, 2 "
        )
        cache.free_reqid(int(long[1:]))
        cache.trim()
        assert said(caplog, logging.DEBUG, "trim: ")
        assert not said(caplog, logging.WARNING, "")


def test_a_cause_is_logged_once_a_minute(
    context: Context, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with small_cache(context, deferred_reclaim=False) as cache:

        def fail() -> None:
            cache.alloc_reqid()
            assert cache.step(lens(cache, r0=2 * ROWS)) == 0
            context.inject(Inject.UNMAP, skip=0 if Caps.ONE_CALL in context.info.caps else 1)
            cache.free_reqid(0)
            eventually(lambda: not cache.snapshot()[0].in_flight)
            with pytest.raises(DriverError):
                cache.step(lens(cache))

        for _ in range(3):
            fail()
        start = "pages of reqid 0 could not be unmapped"
        assert len(said(caplog, logging.WARNING, start)) == 1
        monkeypatch.setattr(logs, "PERIOD_S", 0.0)
        fail()
        assert said(caplog, logging.WARNING, start)[1].endswith(
            "(and 2 more times since the last warning)"
        )


def test_disabled_warnings_are_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    log = logging.getLogger("pyvmem.test_logs")
    log.setLevel(logging.ERROR)
    try:
        logs.warn(log, "quiet", "nothing")
        assert "quiet" not in logs._last
    finally:
        log.setLevel(logging.NOTSET)


def test_debug_logs_of_other_packages_are_not_kept(caplog: pytest.LogCaptureFixture) -> None:
    """Imitates torch's compiler, which logs 34 MB per run at DEBUG, regardless of the root logger's
    level.
    """
    other = logging.getLogger("of-another-library")
    other.setLevel(logging.DEBUG)
    try:
        other.debug("a trace")
        other.warning("a warning")
    finally:
        other.setLevel(logging.NOTSET)
    assert [one.getMessage() for one in caplog.records] == ["a warning"]
