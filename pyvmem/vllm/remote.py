# SPDX-License-Identifier: MIT
"""Opens ledger accounts for an engine's devices; ranks on other machines keep their own."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pyvmem.elastic.quota import DeviceAccount, LedgerQuota, join_device
from pyvmem.errors import InvalidArgument
from pyvmem.ledger.accounts import Account

if TYPE_CHECKING:
    from pyvmem.vllm.channel import Rank

__all__ = ["RemoteAccount", "join_ledgers", "on_account"]

_CALLS = frozenset(
    ("room", "take", "end_pending", "give", "want", "excess", "has_more", "report", "close")
)
_NUMBERS = frozenset(("limit", "used", "asleep"))


def on_account(account: Account | None, name: str, args: list[Any], named: dict[str, int]) -> Any:
    """Reads an attribute or calls a method of a rank's account; runs in the rank's process.

    Raises:
        InvalidArgument: the rank has no account, or `name` is not allowed.
    """
    if account is None or name not in _CALLS | _NUMBERS:
        raise InvalidArgument(f"account: {name}")
    found = getattr(account, name)
    return found(*args, **named) if name in _CALLS else found


class RemoteAccount:
    """A proxy for the `Account` in a rank's process; each access is a call to the rank.

    Members raise `RankLost` if the rank does not answer.
    """

    def __init__(self, rank: Rank) -> None:
        self._rank = rank

    def _ask(self, name: str, *args: int | None, **named: int) -> Any:
        return self._rank.ask("account", [name, args, named])()

    @property
    def limit(self) -> int:
        """Reads `Account.limit` in the rank's process."""
        return int(self._ask("limit"))

    @property
    def used(self) -> int:
        """Reads `Account.used` in the rank's process."""
        return int(self._ask("used"))

    @property
    def asleep(self) -> bool:
        """Reads `Account.asleep` in the rank's process."""
        return bool(self._ask("asleep"))

    def room(self, free: int | None = None) -> int:
        """Calls `Account.room` in the rank's process."""
        return int(self._ask("room", free))

    def take(self, nbytes: int, handles: int = 0, free: int | None = None) -> bool:
        """Calls `Account.take` in the rank's process."""
        return bool(self._ask("take", nbytes, handles, free))

    def end_pending(self, nbytes: int) -> None:
        """Calls `Account.end_pending` in the rank's process."""
        self._ask("end_pending", nbytes)

    def give(self, nbytes: int, handles: int = 0) -> None:
        """Calls `Account.give` in the rank's process."""
        self._ask("give", nbytes, handles)

    def want(self, nbytes: int) -> None:
        """Calls `Account.want` in the rank's process."""
        self._ask("want", nbytes)

    def signals(self) -> tuple[int, int]:
        """Returns zeros: each poll would be a call to the rank, and the regular checks suffice."""
        return 0, 0

    def excess(self, free: int | None = None) -> int:
        """Calls `Account.excess` in the rank's process."""
        return int(self._ask("excess", free))

    def has_more(self, free: int | None = None) -> bool:
        """Calls `Account.has_more` in the rank's process."""
        return bool(self._ask("has_more", free))

    def report(self, **values: int) -> None:
        """Calls `Account.report` in the rank's process."""
        self._ask("report", **values)

    def close(self) -> None:
        """Calls `Account.close`; does nothing if the rank has exited, which closes the account."""
        with contextlib.suppress(RuntimeError):
            self._ask("close")


def join_ledgers(
    ranks: Sequence[Rank],
    folder: Path | None,
    name: str,
    *,
    unique: bool,
    capacity: int,
    identity: int,
    host_limit: int,
    free: Callable[[], int | None],
    **terms: int,
) -> LedgerQuota:
    """Opens accounts for all of an engine's devices, each in the ledger on the device's machine.

    Args:
        ranks: all ranks of the engine.
        folder, name, unique, capacity, identity, host_limit: as in `join_device`.
        free: as in `LedgerQuota`.
        terms: floor, limit, least, virtual and host, in bytes per rank.

    Raises:
        VMemError: `join_device` failed on this machine.
        RankLost: `join_device` failed on another machine, or the rank there has exited.
    """
    on_device: dict[tuple[str, str], list[Rank]] = {}
    for rank in ranks:
        on_device.setdefault((rank.machine, rank.device()), []).append(rank)
    accounts: list[tuple[DeviceAccount, int]] = []
    try:
        for (machine, device), some in on_device.items():
            sums = {key: value * len(some) for key, value in terms.items()}
            sums |= {"capacity": capacity, "identity": identity, "host_limit": host_limit}
            if machine:
                some[0].ask("join", [name, unique, sums])()
                accounts.append((RemoteAccount(some[0]), len(some)))
            else:
                account = join_device(device, folder, name, unique=unique, **sums)
                accounts.append((account, len(some)))
    except BaseException:
        for one, _ in accounts:
            one.close()
        raise
    return LedgerQuota(accounts, free)
