# SPDX-License-Identifier: MIT
"""Agreement between an engine's ranks, whose schedulers must make the same decisions.

SGLang has a scheduler on each rank of tensor parallelism. All get the same requests in each round,
and then decide independently, so all inputs of a decision must be equal. Most are: free pages,
pages of a request, prefixes. On the others the ranks agree, always at the same point of a round:

    bytes that device and ledger allow      the least of all ranks
    result of a growth                      success only if it succeeded on all ranks
    ended releases                          those that have ended on all ranks
    time, ended copies, signals             rank 0's, sent with the requests as `RoundState`

They use SGLang's process group for the CPU, by which it also broadcasts the requests.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any, Protocol

from pyvmem.elastic import backing

__all__ = ["AgreedQuota", "Quota", "RankGroup", "Ranks", "RoundState", "SingleRank"]


@dataclass(frozen=True)
class RoundState:
    """Rank 0's state, sent to all ranks, itself included, before a `PagePool.tick`.

    Attributes:
        now: rank 0's time in seconds.
        arrived: number of arrivals that had ended, since the start.
        mapped: a growth in the background has ended.
        called: another engine asked for memory, or gave some that rank 0 lacks.
    """

    now: float
    arrived: int
    mapped: bool
    called: bool = False


class Quota(backing.Quota, Protocol):
    """A rank's quota: `LocalQuota`, `LedgerQuota` or `AgreedQuota`; bytes are of one rank."""

    @property
    def limit(self) -> int:
        """Bytes that the rank may have, at most."""

    @property
    def used(self) -> int:
        """Bytes that the rank has."""

    @property
    def asleep(self) -> bool:
        """True if the engine was ordered to sleep."""

    def pressure(self) -> tuple[int, bool]:
        """Returns what `LedgerQuota.pressure` does."""

    def signals(self) -> tuple[int, int]:
        """Returns what `LedgerQuota.signals` does."""

    def report(self, **values: int) -> None:
        """Posts the numbers that `vmem top` shows."""


class Ranks(Protocol):
    """All ranks of an engine. All make the same calls in the same order.

    Attributes:
        alone: the engine has a single rank.
    """

    alone: bool

    def now(self) -> float:
        """Returns the time in seconds by which all ranks decide."""

    def receive(self, state: RoundState) -> None:
        """Takes over rank 0's time."""

    def least(self, *numbers: int) -> tuple[int, ...]:
        """Returns the least value on all ranks of each number."""

    def agree(self, quota: Quota) -> Quota:
        """Returns a quota with the same results on all ranks."""

    def finished(self, found: dict[int, str]) -> dict[int, str]:
        """Returns the releases that have ended on all ranks, with an error message or ``""``.

        Args:
            found: the releases that ended on this rank since the last call.
        """

    def same(self, what: object, name: str) -> None:
        """Checks that `what` is equal on all ranks; `name` is for the message.

        Raises:
            RuntimeError: it differs.
        """


class SingleRank:
    """The rank of an engine without tensor parallelism."""

    alone = True

    def now(self) -> float:
        """Returns the time in seconds."""
        return time.monotonic()

    def receive(self, state: RoundState) -> None:
        """Does nothing."""

    def least(self, *numbers: int) -> tuple[int, ...]:
        """Returns the numbers."""
        return numbers

    def agree(self, quota: Quota) -> Quota:
        """Returns the quota itself."""
        return quota

    def finished(self, found: dict[int, str]) -> dict[int, str]:
        """Returns `found`."""
        return found

    def same(self, what: object, name: str) -> None:
        """Does nothing."""


class RankGroup:
    """The ranks of an engine with tensor parallelism.

    Args:
        group: their torch process group for the CPU.
    """

    alone = False

    def __init__(self, group: Any) -> None:
        self._group = group
        self._now = 0.0
        self._ended: dict[int, str] = {}

    def now(self) -> float:
        """Returns rank 0's time in the last `RoundState`."""
        return self._now

    def receive(self, state: RoundState) -> None:
        """Takes over rank 0's time."""
        self._now = state.now

    def least(self, *numbers: int) -> tuple[int, ...]:
        """Returns the least value on all ranks of each number."""
        import torch

        found = torch.tensor(numbers, dtype=torch.int64)
        torch.distributed.all_reduce(found, torch.distributed.ReduceOp.MIN, self._group)
        return tuple(map(int, found))

    def agree(self, quota: Quota) -> Quota:
        """Returns a quota with the same results on all ranks."""
        return AgreedQuota(quota, self)

    def _all(self, mine: Any) -> list[Any]:
        import torch

        found: list[Any] = [None] * torch.distributed.get_world_size(self._group)
        torch.distributed.all_gather_object(found, mine, self._group)
        return found

    def finished(self, found: dict[int, str]) -> dict[int, str]:
        """Returns the releases that have ended on all ranks, with an error message or ``""``.

        Args:
            found: the releases that ended on this rank since the last call.
        """
        self._ended.update(found)
        all_ended = self._all(self._ended)
        common = {number for number in self._ended if all(number in one for one in all_ended)}
        for number in common:
            del self._ended[number]
        return {
            number: next(filter(None, (one[number] for one in all_ended)), "")
            for number in sorted(common)
        }

    def same(self, what: object, name: str) -> None:
        """Checks that `what` is equal on all ranks; `name` is for the message.

        Raises:
            RuntimeError: it differs.
        """
        found = self._all(repr(what))
        if len(set(found)) > 1:
            raise RuntimeError(f"the ranks differ in {name}: {'; '.join(found)}")


class AgreedQuota:
    """A quota with the same results on all ranks: the least that each rank may have.

    `room`, `limit` and `asleep` are updated by `take` and `pressure`.

    Args:
        quota: quota of this rank.
        ranks: all ranks.
    """

    def __init__(self, quota: Quota, ranks: Ranks) -> None:
        self._quota, self._ranks = quota, ranks
        self.asleep = False
        self.limit = self._room = 0
        self.pressure()

    @property
    def used(self) -> int:
        """Bytes that this rank has."""
        return self._quota.used

    def room(self) -> int:
        """Returns the bytes that every rank could take, as of the last `take` or `pressure`."""
        return self._room

    def take(self, nbytes: int, handles: int = 0) -> bool:
        """Reserves `nbytes` more bytes on all ranks or on none; false if denied."""
        mine = self._quota.take(nbytes, handles)
        (every,) = self._ranks.least(mine)
        if mine and not every:
            self._quota.end_pending(nbytes)
            self._quota.give(nbytes)
        self.pressure()
        return bool(every)

    def end_pending(self, nbytes: int) -> None:
        """See `Account.end_pending`."""
        self._quota.end_pending(nbytes)

    def give(self, nbytes: int) -> None:
        """Returns the bytes of unmapped pages."""
        self._quota.give(nbytes)
        self._room += nbytes

    def pressure(self) -> tuple[int, bool]:
        """Returns the most bytes that a rank should give back, and whether to stop admitting.

        Updates `room`, `limit` and `asleep`. See `LedgerQuota.pressure`.
        """
        excess, has_more = self._quota.pressure()
        mine = (self._quota.limit, self._quota.room(), -excess, not has_more)
        *numbers, fair, awake = self._ranks.least(*mine, not self._quota.asleep)
        self.limit, self._room, excess = numbers
        self.asleep = not awake
        return -excess, not fair

    def want(self, nbytes: int) -> None:
        """Posts a shortage of `nbytes` bytes to the ledger; 0 withdraws it."""
        self._quota.want(nbytes)

    def signals(self) -> tuple[int, int]:
        """Returns the signals that this rank sees, which others may not."""
        return self._quota.signals()

    def report(self, **values: int) -> None:
        """Posts the numbers that `vmem top` shows, of this rank."""
        self._quota.report(**values)

    def close(self) -> None:
        """Leaves the ledger."""
        self._quota.close()
