# SPDX-License-Identifier: MIT
"""Makes an engine's ranks agree, because their schedulers must make the same decisions.

SGLang has a scheduler on each tensor-parallel rank. All receive the same requests in each round and
then decide independently, so a decision must have the same inputs on every rank. Most inputs are
the same anyway: free pages, a request's pages, prefixes. The ranks agree on the rest, always at
the same point in a round:

    bytes that device and ledger allow      the minimum over all ranks
    result of a grow operation              success if all ranks succeeded
    finished releases                       those that have finished on all ranks
    time, finished copies, signals          those of rank 0, sent with the requests as `RoundState`

The ranks use SGLang's CPU process group, which also broadcasts the requests.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any, Protocol

from pyvmem.elastic import backing

__all__ = ["AgreedQuota", "Quota", "RankGroup", "Ranks", "RoundState", "SingleRank"]


@dataclass(frozen=True)
class RoundState:
    """Rank 0's state, sent to all ranks, including itself, before a `PagePool.tick`.

    Attributes:
        now: rank 0's time in seconds.
        arrived: number of `Arrival` copies that have completed since the start.
        mapped: true if a background growth has finished.
        called: true if another engine asked for memory, or freed some that rank 0 needed.
    """

    now: float
    arrived: int
    mapped: bool
    called: bool = False


class Quota(backing.Quota, Protocol):
    """A rank's quota: `LocalQuota`, `LedgerQuota` or `AgreedQuota`. Byte counts are per rank."""

    @property
    def limit(self) -> int:
        """Maximum bytes that the rank may use."""

    @property
    def used(self) -> int:
        """Bytes that the rank uses."""

    @property
    def asleep(self) -> bool:
        """True if the engine was ordered to sleep."""

    def pressure(self) -> tuple[int, bool]:
        """See `LedgerQuota.pressure`."""

    def signals(self) -> tuple[int, int]:
        """See `LedgerQuota.signals`."""

    def report(self, **values: int) -> None:
        """Posts the metrics that `vmem top` shows."""


class Ranks(Protocol):
    """The ranks of an engine. All make the same calls in the same order.

    Attributes:
        alone: true if the engine has a single rank.
    """

    alone: bool

    def now(self) -> float:
        """Returns the time in seconds that all ranks use for decisions."""

    def receive(self, state: RoundState) -> None:
        """Sets the time to rank 0's time."""

    def least(self, *numbers: int) -> tuple[int, ...]:
        """Returns the minimum of each number across all ranks."""

    def agree(self, quota: Quota) -> Quota:
        """Returns a quota that gives the same results on all ranks."""

    def finished(self, found: dict[int, str]) -> dict[int, str]:
        """Returns the releases that have finished on all ranks, with an error message or ``""``.

        Args:
            found: the error messages of this rank's releases that finished since the last call.
        """

    def same(self, what: object, name: str) -> None:
        """Checks that `what` is the same on all ranks; the error message calls it `name`.

        Raises:
            RuntimeError: `what` differs between ranks.
        """


class SingleRank:
    """The only rank of an engine without tensor parallelism."""

    alone = True

    def now(self) -> float:
        """Returns the time in seconds."""
        return time.monotonic()

    def receive(self, state: RoundState) -> None:
        """Does nothing."""

    def least(self, *numbers: int) -> tuple[int, ...]:
        """Returns the numbers unchanged."""
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
        group: the ranks' torch process group for the CPU.
    """

    alone = False

    def __init__(self, group: Any) -> None:
        self._group = group
        self._now = 0.0
        self._ended: dict[int, str] = {}

    def now(self) -> float:
        """Returns rank 0's time, taken from the last `RoundState`."""
        return self._now

    def receive(self, state: RoundState) -> None:
        """Sets the time to rank 0's time."""
        self._now = state.now

    def least(self, *numbers: int) -> tuple[int, ...]:
        """Returns the minimum of each number across all ranks."""
        import torch

        found = torch.tensor(numbers, dtype=torch.int64)
        torch.distributed.all_reduce(found, torch.distributed.ReduceOp.MIN, self._group)
        return tuple(map(int, found))

    def agree(self, quota: Quota) -> Quota:
        """Returns a quota that gives the same results on all ranks."""
        return AgreedQuota(quota, self)

    def _all(self, mine: Any) -> list[Any]:
        import torch

        found: list[Any] = [None] * torch.distributed.get_world_size(self._group)
        torch.distributed.all_gather_object(found, mine, self._group)
        return found

    def finished(self, found: dict[int, str]) -> dict[int, str]:
        """Returns the releases that have finished on all ranks, with an error message or ``""``.

        Args:
            found: the error messages of this rank's releases that finished since the last call.
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
        """Checks that `what` is the same on all ranks; the error message calls it `name`.

        Raises:
            RuntimeError: `what` differs between ranks.
        """
        found = self._all(repr(what))
        if len(set(found)) > 1:
            raise RuntimeError(f"the ranks differ in {name}: {'; '.join(found)}")


class AgreedQuota:
    """A quota that gives the same results on all ranks: the minimum of the ranks' quotas.

    `take` and `pressure` update `room`, `limit` and `asleep`.

    Args:
        quota: this rank's quota.
        ranks: the engine's ranks.
    """

    def __init__(self, quota: Quota, ranks: Ranks) -> None:
        self._quota, self._ranks = quota, ranks
        self.asleep = False
        self.limit = self._room = 0
        self.pressure()

    @property
    def used(self) -> int:
        """Bytes that this rank uses."""
        return self._quota.used

    def room(self) -> int:
        """Returns how many bytes each rank could take as of the last `take` or `pressure`."""
        return self._room

    def take(self, nbytes: int, handles: int = 0) -> bool:
        """Reserves `nbytes` more bytes on all ranks, or returns false and reserves none."""
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
        """Gives the bytes of unmapped pages back to the quota."""
        self._quota.give(nbytes)
        self._room += nbytes

    def pressure(self) -> tuple[int, bool]:
        """Returns how many bytes each rank should free, and whether to stop admitting requests.

        Both are the maximum across all ranks. Updates `room`, `limit` and `asleep`. See
        `LedgerQuota.pressure`.
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
        """Returns the signals that this rank has seen; other ranks may have seen fewer."""
        return self._quota.signals()

    def report(self, **values: int) -> None:
        """Posts this rank's metrics for `vmem top`."""
        self._quota.report(**values)

    def close(self) -> None:
        """Leaves the ledger."""
        self._quota.close()
