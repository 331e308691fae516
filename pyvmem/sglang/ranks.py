# SPDX-License-Identifier: MIT
"""The ranks of an engine, whose schedulers decide alike.

SGLang has a scheduler on each rank of tensor parallelism. They get the same requests in each round,
and from then on each decides for itself; so all that a decision follows from has to be equal. Most
is: which pages are free, how much a request takes, what prefixes there are. What is not, the ranks
agree on, always in the same place of a round:

    what the device and the ledger allow    the least of all ranks: at a look, and when memory lacks
    a growth                                on all ranks, or on none
    pages that were unmapped                those that have left on all ranks
    time, and which copies have ended       rank 0's: they travel with the requests, as `News`

The ranks agree by SGLang's group for the CPU, which broadcasts the requests.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any, Protocol

from pyvmem.elastic import backing

__all__ = ["AgreedQuota", "Alone", "News", "Quota", "Ranks", "Together"]


@dataclass(frozen=True)
class News:
    """Rank 0's word to all ranks, itself included, before a look.

    Attributes:
        now: its time.
        arrived: how many copies of freed pages' numbers had ended, since the start.
        mapped: the growth in the background, if there is one, has ended.
    """

    now: float
    arrived: int
    mapped: bool


class Quota(backing.Quota, Protocol):
    """A rank's part of its device: `LocalQuota` or `LedgerQuota`."""

    @property
    def limit(self) -> int:
        """Bytes."""

    @property
    def used(self) -> int:
        """Bytes."""

    @property
    def asleep(self) -> bool:
        """True if the engine was ordered to sleep."""

    def pressure(self) -> tuple[int, bool]:
        """Bytes to give back, and whether another engine is short while this one has more."""

    def report(self, **values: int) -> None:
        """Tells `vmem top`."""


class Ranks(Protocol):
    """All ranks; every call is made by all of them, in the same order."""

    alone: bool

    def now(self) -> float:
        """The time that all decide by."""

    def hear(self, news: News) -> None:
        """Takes rank 0's time."""

    def least(self, *numbers: int) -> tuple[int, ...]:
        """Returns of each number the least of all ranks."""

    def agree(self, quota: Quota) -> Quota:
        """A quota that all ranks see alike."""

    def finished(self, found: dict[int, str]) -> dict[int, str]:
        """Releases that have ended on all ranks, with what failed on one of them."""

    def same(self, what: object, name: str) -> None:
        """Compares something that has to be equal.

        Raises:
            RuntimeError: it is not.
        """


class Alone:
    """One rank."""

    alone = True

    def now(self) -> float:
        """The time."""
        return time.monotonic()

    def hear(self, news: News) -> None:
        """Does nothing."""

    def least(self, *numbers: int) -> tuple[int, ...]:
        """The numbers."""
        return numbers

    def agree(self, quota: Quota) -> Quota:
        """The quota."""
        return quota

    def finished(self, found: dict[int, str]) -> dict[int, str]:
        """Returns the releases."""
        return found

    def same(self, what: object, name: str) -> None:
        """Does nothing."""


class Together:
    """Several ranks.

    Args:
        group: torch's process group of them, for the CPU.
    """

    alone = False

    def __init__(self, group: Any) -> None:
        self._group = group
        self._now = 0.0
        self._ended: dict[int, str] = {}

    def now(self) -> float:
        """Rank 0's time when it sent the last news."""
        return self._now

    def hear(self, news: News) -> None:
        """Takes rank 0's time."""
        self._now = news.now

    def least(self, *numbers: int) -> tuple[int, ...]:
        """Returns of each number the least of all ranks."""
        import torch

        found = torch.tensor(numbers, dtype=torch.int64)
        torch.distributed.all_reduce(found, torch.distributed.ReduceOp.MIN, self._group)
        return tuple(map(int, found))

    def agree(self, quota: Quota) -> Quota:
        """A quota that all ranks see alike."""
        return AgreedQuota(quota, self)

    def _all(self, mine: Any) -> list[Any]:
        import torch

        found: list[Any] = [None] * torch.distributed.get_world_size(self._group)
        torch.distributed.all_gather_object(found, mine, self._group)
        return found

    def finished(self, found: dict[int, str]) -> dict[int, str]:
        """Releases that have ended on all ranks, with what failed on one of them."""
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
        """Compares something that has to be equal.

        Raises:
            RuntimeError: it is not.
        """
        found = self._all(repr(what))
        if len(set(found)) > 1:
            raise RuntimeError(f"the ranks differ in {name}: {'; '.join(found)}")


class AgreedQuota:
    """A quota that all ranks see alike: of what each may have, the least.

    `room` and `limit` are those of the last look, or of the last growth.

    Args:
        quota: of this rank.
        ranks: all of them.
    """

    def __init__(self, quota: Quota, ranks: Ranks) -> None:
        self._quota, self._ranks = quota, ranks
        self.asleep = False
        self.limit = self._room = 0
        self.pressure()

    @property
    def used(self) -> int:
        """Bytes of a rank."""
        return self._quota.used

    def room(self) -> int:
        """Bytes that `take` would grant, when last asked."""
        return self._room

    def take(self, nbytes: int, handles: int = 0) -> bool:
        """Asks for so many more bytes, on all ranks or on none."""
        mine = self._quota.take(nbytes, handles)
        (every,) = self._ranks.least(mine)
        if mine and not every:
            self._quota.mapped(nbytes)
            self._quota.give(nbytes)
        self.pressure()
        return bool(every)

    def mapped(self, nbytes: int) -> None:
        """Marks bytes granted by `take` as mapped, or as about to be returned by `give`."""
        self._quota.mapped(nbytes)

    def give(self, nbytes: int) -> None:
        """Takes back bytes whose pages have left."""
        self._quota.give(nbytes)
        self._room += nbytes

    def pressure(self) -> tuple[int, bool]:
        """The most that a rank should give back, and whether one has more than a fair part."""
        excess, has_more = self._quota.pressure()
        mine = (self._quota.limit, self._quota.room(), -excess, not has_more)
        *numbers, fair, awake = self._ranks.least(*mine, not self._quota.asleep)
        self.limit, self._room, excess = numbers
        self.asleep = not awake
        return -excess, not fair

    def want(self, nbytes: int) -> None:
        """A request could not be served for lack of so many bytes; 0: none is short."""
        self._quota.want(nbytes)

    def report(self, **values: int) -> None:
        """Tells `vmem top` of this rank."""
        self._quota.report(**values)

    def close(self) -> None:
        """The engine is gone."""
        self._quota.close()
