# SPDX-License-Identifier: MIT
"""Logs under the logger ``pyvmem``.

Each module has its own child logger. The level *info* reports the opened back end and why others
could not be used; *debug* shows how a cache handles memory shortages and page changes (reclaiming,
eviction, promotion, joins, trims); *warning* is for problems that an operator should know about, at
most once a minute per cause. A call that finds enough memory logs nothing.
"""

from __future__ import annotations

import logging
import time

from pyvmem.plumbing.reentry import reentrant_lock

__all__ = ["PERIOD_S", "warn"]

PERIOD_S = 60.0
"""Minimum seconds between two warnings with the same cause."""

_lock = reentrant_lock()
# for each cause, the time of the last warning and the number suppressed since
_last: dict[str, tuple[float, int]] = {}


def warn(log: logging.Logger, cause: str, text: str, *args: object) -> None:
    """Logs a warning at most once per `PERIOD_S` and cause; counts suppressed warnings.

    Args:
        log: the logger.
        cause: one of a few fixed names, not one per object.
        text: the message as a ``%`` format string, as for `logging.Logger.warning`.
        args: the message's arguments.
    """
    if not log.isEnabledFor(logging.WARNING):
        return
    # A log record keeps its arguments alive, and an exception keeps its callers' frames and tensors
    # alive.
    args = tuple(str(one) if isinstance(one, BaseException) else one for one in args)
    now = time.monotonic()
    with _lock:
        last, left_out = _last.get(cause, (now - PERIOD_S, 0))
        if now - last < PERIOD_S:
            _last[cause] = last, left_out + 1
            return
        _last[cause] = now, 0
    if left_out:
        text, args = f"{text} (and %d more times since the last warning)", (*args, left_out)
    log.warning(text, *args)
