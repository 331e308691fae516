# SPDX-License-Identifier: MIT
"""An engine's part of the memory of each GPU: its limit, and what the ledger leaves it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from pyvmem.errors import InvalidArgument
from pyvmem.ledger.accounts import Account, Ledger, engine_name

__all__ = ["DeviceAccount", "LedgerQuota", "LocalQuota", "join_device"]


class DeviceAccount(Protocol):
    """The part of `Account` that is used; it may be in another process."""

    @property
    def limit(self) -> int:
        """`Account.limit`."""

    @property
    def used(self) -> int:
        """`Account.used`."""

    @property
    def asleep(self) -> bool:
        """`Account.asleep`."""

    def room(self, free: int | None = None) -> int:
        """`Account.room`."""

    def take(self, nbytes: int, handles: int = 0, free: int | None = None) -> bool:
        """`Account.take`."""

    def mapped(self, nbytes: int) -> None:
        """`Account.mapped`."""

    def give(self, nbytes: int, handles: int = 0) -> None:
        """`Account.give`."""

    def want(self, nbytes: int) -> None:
        """`Account.want`."""

    def excess(self, free: int | None = None) -> int:
        """`Account.excess`."""

    def has_more(self, free: int | None = None) -> bool:
        """`Account.has_more`."""

    def report(self, **values: int) -> None:
        """`Account.report`."""

    def close(self) -> None:
        """`Account.close`."""


class LocalQuota:
    """A limit of this engine alone, without a ledger.

    Args:
        limit: bytes.
        free: unused memory of the device, if that is known.
    """

    def __init__(self, limit: int, free: Callable[[], int | None] = lambda: None) -> None:
        self.limit = limit
        self.used = self._pending = 0
        self._free = free

    def room(self) -> int:
        """Bytes that `take` would grant now."""
        free = self._free()
        room = self.limit - self.used
        return max(0, room if free is None else min(room, free - self._pending))

    def take(self, nbytes: int, handles: int = 0) -> bool:
        """Asks for so many more bytes; if granted they are the engine's from here on."""
        if nbytes > self.room():
            return False
        self.used += nbytes
        self._pending += nbytes
        return True

    def mapped(self, nbytes: int) -> None:
        """Notes that what `take` granted is mapped now, or is about to be given back."""
        self._pending -= nbytes

    def give(self, nbytes: int) -> None:
        """Takes back bytes whose pages have left."""
        self.used -= nbytes

    def pressure(self) -> tuple[int, bool]:
        """Bytes above the limit; no other engine is ever short."""
        return max(0, self.used - self.limit), False

    @property
    def asleep(self) -> bool:
        """False: nobody can order the engine to sleep."""
        return False

    def want(self, nbytes: int) -> None:
        """A request could not be served for lack of so many bytes; 0: none is short."""

    def report(self, **values: int) -> None:
        """Tells `vmem top`."""

    def close(self) -> None:
        """The engine is gone."""


class LedgerQuota:
    """An engine's accounts, one for each device that it runs on.

    Args:
        accounts: with the number of ranks on that device.
        free: unused memory of the device, of the rank that has least.
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
        """Bytes of one rank."""
        return min(account.limit // ranks for account, ranks in self._accounts)

    @property
    def used(self) -> int:
        """Bytes of one rank."""
        account, ranks = self._accounts[0]
        return account.used // ranks

    def room(self) -> int:
        """Bytes that `take` would grant now."""
        free = self._free()
        return min(account.room(free) // ranks for account, ranks in self._accounts)

    def take(self, nbytes: int, handles: int = 0) -> bool:
        """Asks for so many more bytes, on every device or on none."""
        free = self._free()
        taken: list[tuple[DeviceAccount, int]] = []
        for account, ranks in self._accounts:
            if not account.take(nbytes * ranks, handles * ranks, free):
                for other, count in taken:
                    other.mapped(nbytes * count)
                    other.give(nbytes * count, handles * count)
                return False
            taken.append((account, ranks))
        return True

    def mapped(self, nbytes: int) -> None:
        """Notes that what `take` granted is mapped now, or is about to be given back."""
        for account, ranks in self._accounts:
            account.mapped(nbytes * ranks)

    def give(self, nbytes: int) -> None:
        """Takes back bytes whose pages have left."""
        for account, ranks in self._accounts:
            account.give(nbytes * ranks)

    def pressure(self) -> tuple[int, bool]:
        """Bytes that the engine should give back: above its limit, or that another one needs.

        And whether another engine is short while this one has more than a fair part.
        """
        free = self._free()
        excess = max(-(-account.excess(free) // ranks) for account, ranks in self._accounts)
        return excess, any(account.has_more(free) for account, _ in self._accounts)

    @property
    def asleep(self) -> bool:
        """True if the engine was ordered to sleep on any device."""
        return any(account.asleep for account, _ in self._accounts)

    def want(self, nbytes: int) -> None:
        """A request could not be served for lack of so many bytes; 0: none is short."""
        for account, ranks in self._accounts:
            account.want(nbytes * ranks)

    def report(self, **values: int) -> None:
        """Tells `vmem top`; bytes are of one rank."""
        for account, ranks in self._accounts:
            scale = {"in_use", "cached", "handles", "host_cached"}
            account.report(**{k: v * ranks if k in scale else v for k, v in values.items()})

    def close(self) -> None:
        """The engine is gone."""
        for account, _ in self._accounts:
            account.close()


def join_device(
    device: str, folder: Path | None, name: str, *, unique: bool, capacity: int, **terms: int
) -> Account:
    """An account in the ledger of a device of this machine.

    Args:
        device: its name.
        folder: of the ledgers; None: the default.
        name: of the engine.
        unique: a name that is taken is an error; else a number is added to it.
        capacity: of the device, where its ledger does not exist.
        terms: the rest of what `Ledger.join` takes.

    Raises:
        VMemError: as `Ledger` and `Ledger.join`.
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
