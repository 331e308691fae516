# SPDX-License-Identifier: MIT
"""Limits the bytes that an engine maps on each device, based on its limit and the ledger."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from pyvmem.errors import InvalidArgument
from pyvmem.ledger.accounts import Account, Ledger, engine_name

__all__ = ["DeviceAccount", "LedgerQuota", "LocalQuota", "Signals", "join_device"]


class DeviceAccount(Protocol):
    """The part of `Account` that `LedgerQuota` uses; the account may be in another process."""

    @property
    def limit(self) -> int:
        """See `Account.limit`."""

    @property
    def used(self) -> int:
        """See `Account.used`."""

    @property
    def asleep(self) -> bool:
        """See `Account.asleep`."""

    def room(self, free: int | None = None) -> int:
        """See `Account.room`."""

    def take(self, nbytes: int, handles: int = 0, free: int | None = None) -> bool:
        """See `Account.take`."""

    def end_pending(self, nbytes: int) -> None:
        """See `Account.end_pending`."""

    def give(self, nbytes: int, handles: int = 0) -> None:
        """See `Account.give`."""

    def want(self, nbytes: int) -> None:
        """See `Account.want`."""

    def signals(self) -> tuple[int, int]:
        """See `Account.signals`."""

    def excess(self, free: int | None = None) -> int:
        """See `Account.excess`."""

    def has_more(self, free: int | None = None) -> bool:
        """See `Account.has_more`."""

    def report(self, **values: int) -> None:
        """See `Account.report`."""

    def close(self) -> None:
        """See `Account.close`."""


class LocalQuota:
    """A quota without a ledger, bounded only by a fixed limit and the device's free memory.

    Args:
        limit: maximum bytes per rank.
        free: returns the free bytes of the device, or None if unknown.
    """

    def __init__(self, limit: int, free: Callable[[], int | None] = lambda: None) -> None:
        self.limit = limit
        self.used = self._pending = 0
        self._free = free

    def room(self) -> int:
        """Returns the number of bytes that `take` would grant now."""
        free = self._free()
        room = self.limit - self.used
        return max(0, room if free is None else min(room, free - self._pending))

    def take(self, nbytes: int, handles: int = 0) -> bool:
        """Reserves `nbytes` more bytes for the engine. Returns false, with no effect, if denied."""
        if nbytes > self.room():
            return False
        self.used += nbytes
        self._pending += nbytes
        return True

    def end_pending(self, nbytes: int) -> None:
        """See `Account.end_pending`."""
        self._pending -= nbytes

    def give(self, nbytes: int) -> None:
        """Gives the bytes of unmapped pages back to the quota."""
        self.used -= nbytes

    def pressure(self) -> tuple[int, bool]:
        """Returns the bytes above the limit, and false because there are no other engines."""
        return max(0, self.used - self.limit), False

    @property
    def asleep(self) -> bool:
        """Always false: sleep commands arrive through a ledger."""
        return False

    def want(self, nbytes: int) -> None:
        """Does nothing: there are no other engines to free memory."""

    def signals(self) -> tuple[int, int]:
        """Returns zeros: there are no other engines."""
        return 0, 0

    def report(self, **values: int) -> None:
        """Does nothing: `vmem top` shows only engines with a ledger."""

    def close(self) -> None:
        """Does nothing."""


class Signals:
    """Detects new signals from other engines.

    Args:
        count: returns how often other engines have asked for memory and how often they have freed
            some; `LedgerQuota.signals`, for example.
    """

    def __init__(self, count: Callable[[], tuple[int, int]]) -> None:
        self._count = count
        self._heard = count()

    def arrived(self, lacks: bool) -> bool:
        """Returns true if a new signal concerns this engine.

        Requests for memory always do; freed memory does only if this engine `lacks` memory.
        """
        return self._differ(self._count(), lacks)

    def take(self, lacks: bool) -> bool:
        """Returns the result of `arrived` and marks all signals so far as seen."""
        now = self._count()
        arrived = self._differ(now, lacks)
        self._heard = now
        return arrived

    def _differ(self, now: tuple[int, int], lacks: bool) -> bool:
        return now[0] != self._heard[0] or (lacks and now[1] != self._heard[1])


class LedgerQuota:
    """A quota based on the ledgers of all the engine's devices. All byte counts are per rank.

    Args:
        accounts: for each device, its account and the number of ranks on it.
        free: returns the minimum of the devices' free bytes, or None if unknown.
    """

    def __init__(
        self,
        accounts: Sequence[tuple[DeviceAccount, int]],
        free: Callable[[], int | None],
    ) -> None:
        self._accounts = accounts
        self._free = free

    @property
    def limit(self) -> int:
        """Maximum bytes that one rank may use."""
        return min(account.limit // ranks for account, ranks in self._accounts)

    @property
    def used(self) -> int:
        """Bytes that one rank uses."""
        account, ranks = self._accounts[0]
        return account.used // ranks

    def room(self) -> int:
        """Returns the number of bytes that `take` would grant now."""
        free = self._free()
        return min(account.room(free) // ranks for account, ranks in self._accounts)

    def take(self, nbytes: int, handles: int = 0) -> bool:
        """Reserves `nbytes` more bytes per rank on all devices.

        If any device's account denies them, returns false without reserving any.
        """
        free = self._free()
        taken: list[tuple[DeviceAccount, int]] = []
        for account, ranks in self._accounts:
            if not account.take(nbytes * ranks, handles * ranks, free):
                for other, count in taken:
                    other.end_pending(nbytes * count)
                    other.give(nbytes * count, handles * count)
                return False
            taken.append((account, ranks))
        return True

    def end_pending(self, nbytes: int) -> None:
        """See `Account.end_pending`."""
        for account, ranks in self._accounts:
            account.end_pending(nbytes * ranks)

    def give(self, nbytes: int) -> None:
        """Gives the bytes of unmapped pages, `nbytes` per rank, back to the ledgers."""
        for account, ranks in self._accounts:
            account.give(nbytes * ranks)

    def pressure(self) -> tuple[int, bool]:
        """Returns how many bytes each rank should free, and whether to stop admitting requests.

        These bytes are above the limit or needed by another engine. The flag is true if another
        engine is short of memory while this engine has more than its fair share.
        """
        free = self._free()
        excess = max(-(-account.excess(free) // ranks) for account, ranks in self._accounts)
        return excess, any(account.has_more(free) for account, _ in self._accounts)

    @property
    def asleep(self) -> bool:
        """True if the engine was ordered to sleep on any device."""
        return any(account.asleep for account, _ in self._accounts)

    def want(self, nbytes: int) -> None:
        """Reports that a request lacks `nbytes` bytes per rank; 0 withdraws the report."""
        for account, ranks in self._accounts:
            account.want(nbytes * ranks)

    def signals(self) -> tuple[int, int]:
        """Returns `Account.signals`, summed over all devices."""
        asks, gives = zip(*(account.signals() for account, _ in self._accounts), strict=True)
        return sum(asks), sum(gives)

    def report(self, **values: int) -> None:
        """Posts the metrics that `vmem top` shows; bytes and handles are per rank."""
        for account, ranks in self._accounts:
            scale = {"in_use", "cached", "handles", "host_cached"}
            account.report(**{k: v * ranks if k in scale else v for k, v in values.items()})

    def close(self) -> None:
        """Leaves the ledgers."""
        for account, _ in self._accounts:
            account.close()


def join_device(
    device: str, folder: Path | None, name: str, *, unique: bool, capacity: int, **terms: int
) -> Account:
    """Opens an engine's account in the ledger of a local device.

    Args:
        device: UUID of the device, or ``"host"``.
        folder: the ledgers' folder; None for the default.
        name: name of the engine.
        unique: whether to fail if the name is taken, instead of appending a number to it.
        capacity: total bytes for all engines; 0 for no requirement (see `Ledger`).
        terms: further arguments for `Ledger.join`.

    Raises:
        VMemError: `Ledger` or `Ledger.join` failed.
    """
    ledger = Ledger(device, capacity, folder)
    number = 1
    while True:
        tried = engine_name(name, f"-{number}" if number > 1 else "")
        try:
            return ledger.join(name if unique else tried, **terms)
        except InvalidArgument as error:
            if unique or error.errno_name != "EEXIST" or number == 64:
                ledger.close()
                raise
        except BaseException:
            ledger.close()
            raise
        number += 1
