# SPDX-License-Identifier: MIT
"""What the library logs, under the logger ``pyvmem``.

Each module logs under its own name below it. At *info*: the back end that was opened, and why the
others were not. At *debug*: what a cache does where memory is short or pages change (shortage,
reclaiming, eviction, promotion, joins, trims). At *warning*: what an operator must know,
once a minute for each cause. A call that finds enough memory logs nothing.
"""

from __future__ import annotations

import logging
import time

from pyvmem.plumbing.reentry import reentrant_lock

__all__ = ["PERIOD_S", "warn"]

PERIOD_S = 60.0
"""Seconds between two warnings of the same cause."""

_lock = reentrant_lock()
_last: dict[str, tuple[float, int]] = {}  # by cause: when it was warned of, and how often not since


def warn(log: logging.Logger, cause: str, text: str, *args: object) -> None:
    """Warns, unless the same cause was warned of within `PERIOD_S`; those left out are counted.

    Args:
        log: where.
        cause: one of a few fixed names, however many objects it happens to.
        text: with its `args`, as for `logging.Logger.warning`.
    """
    if not log.isEnabledFor(logging.WARNING):
        return
    # A record keeps its arguments, and an error the frames of all its callers, with their tensors.
    args = tuple(str(one) if isinstance(one, BaseException) else one for one in args)
    now = time.monotonic()
    with _lock:
        last, left_out = _last.get(cause, (now - PERIOD_S, 0))
        if now - last < PERIOD_S:
            _last[cause] = last, left_out + 1
            return
        _last[cause] = now, 0
    if left_out:
        text, args = f"{text} (and %d times more since the last warning)", (*args, left_out)
    log.warning(text, *args)
