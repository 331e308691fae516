# SPDX-License-Identifier: MIT
"""Orders to running engines: limits, floors, and sleep.

An order is written to the engine's slot in the ledger, and the engine reads it within a second.
So any process of the same user can give orders to any kind of engine.
"""

from __future__ import annotations

import errno
from collections.abc import Mapping
from typing import Any

from pyvmem.errors import InvalidArgument, NotSupported
from pyvmem.ledger.accounts import EngineInfo, Ledger
from pyvmem.plumbing.units import format_bytes

__all__ = ["order", "order_on_all"]


def order(
    ledger: Ledger,
    who: str,
    *,
    limit: int | None = None,
    floor: int | None = None,
    asleep: bool | None = None,
    only_check: bool = False,
) -> EngineInfo:
    """Changes an engine's limits, or puts it to sleep or wakes it; returns its previous state.

    Args:
        ledger: the device's ledger.
        who: the engine's name, or its process id.
        limit, floor: bytes; None: unchanged.
        asleep: a sleeping engine admits no requests, and frees its memory once none is running;
            None: unchanged.
        only_check: check the arguments without changing anything.

    Raises:
        InvalidArgument: there is no such engine; the limit is below the floor or `least`, or above
            the device's memory; or the floors exceed the device's memory. The error's `op` names
            the bad argument.
        NotSupported: the engine cannot sleep.
    """
    one = ledger.find(who)
    if one is None:
        names = ", ".join(f"{e.name} ({e.pid})" for e in ledger.engines()) or "none"
        raise InvalidArgument(f"no engine {who!r}; there are: {names}", errno=errno.ENOENT)
    if limit is not None:
        _check_limit(ledger, one, limit, one.floor if floor is None else floor)
    if floor is not None:
        _check_floor(ledger, one, floor, one.limit if limit is None else limit)
    if asleep is not None and not one.sleeps:
        text = f"{one.name} cannot be put to sleep: only vLLM and SGLang engines can"
        raise NotSupported(text, errno=errno.EOPNOTSUPP, op="asleep")
    if not only_check:
        words = {"order": limit, "floor": floor, "asleep": asleep}
        ledger.put_order(one, {key: int(n) for key, n in words.items() if n is not None})
    return one


def order_on_all(ledgers: Mapping[str, Ledger], who: str, **words: Any) -> dict[str, EngineInfo]:
    """Calls `order` on all of an engine's devices or on none; returns the previous states.

    Raises:
        InvalidArgument, NotSupported: as for `order`; nothing has changed.
    """
    for ledger in ledgers.values():
        order(ledger, who, **words, only_check=True)
    return {device: order(ledger, who, **words) for device, ledger in ledgers.items()}


def _check_limit(ledger: Ledger, one: EngineInfo, limit: int, floor: int) -> None:
    most = min(ledger.capacity or one.virtual, one.virtual)
    for what, bound, wrong in (
        ("its floor is", floor, limit < floor),
        ("the least that it can run with is", one.least, limit < one.least),
        ("the most it can have is", most, limit > most),
    ):
        if wrong:
            raise _refused("limit", one, limit, what, bound)


def _check_floor(ledger: Ledger, one: EngineInfo, floor: int, limit: int) -> None:
    """Checks that each engine's `least` fits alongside the floors of the others."""
    if floor > limit:
        raise _refused("floor", one, floor, "its limit is", limit)
    if ledger.capacity:
        others = [e for e in ledger.engines() if e.identity != one.identity]
        beside = ledger.capacity - sum(e.floor for e in others)
        left = min([beside, *(beside + e.floor - max(e.floor, e.least) for e in others)])
        if floor > left:
            what = "after the needs of other engines, the device has"
            raise _refused("floor", one, floor, what, max(0, left))


def _refused(field: str, one: EngineInfo, value: int, what: str, bound: int) -> InvalidArgument:
    return InvalidArgument(
        f"a {field} of {format_bytes(value)} for {one.name}: {what} {format_bytes(bound)} "
        f"({bound} bytes)",
        errno=errno.EINVAL,
        op=field,
        bytes=value,
        limit=bound,
    )
