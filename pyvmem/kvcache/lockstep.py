# SPDX-License-Identifier: MIT
"""What ranks have in common: the collectives, the errors that name a rank, the choice of slots."""

from __future__ import annotations

import errno
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from pyvmem.errors import VMemError
from pyvmem.kvcache.config import invalid
from pyvmem.kvcache.slots import Slot, SlotTable

__all__ = ["Failure", "LockstepTable", "RankFailed", "Ranks", "RanksDiffer"]

_ERRNOS = 4096  # a status is (rank + 1) * _ERRNOS + errno


class RankFailed(VMemError):
    """A rank failed in a call that the others may have done; no rank's cache may be used.

    `VMemError.errno` is the failed rank's, where it had one; the text has the failure itself on the
    rank that failed.

    Attributes:
        rank: the failed rank of the group; of several the last.
    """

    rank: int = -1


class RanksDiffer(VMemError):
    """The ranks made different calls, or had different answers; no rank's cache may be used."""


@dataclass(frozen=True)
class Failure:
    """Why no call can be made. Not an exception: its traceback would keep tensors alive.

    Attributes:
        rank: the failed rank; -1: the ranks differ.
        code: its errno, 0 where it had none.
        detail: what is known on the failed rank.
    """

    rank: int
    code: int = 0
    detail: str = ""

    @classmethod
    def of(cls, rank: int, error: BaseException, where: str) -> Failure:
        """A rank's own failure."""
        code = errno.ENOMEM if isinstance(error, MemoryError) else getattr(error, "errno", None)
        text = f" in {where}: {type(error).__name__}: {error}"
        return cls(rank, code % _ERRNOS if isinstance(code, int) else 0, text)

    @property
    def status(self) -> int:
        """A number whose maximum over the ranks names one; 0 stands for no failure."""
        return (self.rank + 1) * _ERRNOS + self.code

    @classmethod
    def from_status(cls, maximum: int) -> Failure | None:
        """What a maximum of `status` stands for."""
        return cls(maximum // _ERRNOS - 1, maximum % _ERRNOS) if maximum else None

    def error(self) -> VMemError:
        """A new exception."""
        if self.rank < 0:
            return RanksDiffer(
                "the ranks made different calls or had different answers since the last recovery; "
                "recover() or close() on every rank",
                op="ParallelKVCache",
            )
        name = errno.errorcode.get(self.code, "an error without errno")
        error = RankFailed(
            f"rank {self.rank} failed with {name}{self.detail}; recover() or close() on every rank",
            errno=self.code,
            op="ParallelKVCache",
        )
        error.rank = self.rank
        return error


class Ranks:
    """A process group; `maxima` is a collective.

    Args:
        group: None: the default group, which must be initialised.
        device: CUDA ordinal for NCCL's tensors; None: the current device.
    """

    def __init__(self, group: Any = None, device: int | None = None) -> None:
        if not dist.is_available() or not dist.is_initialized():
            raise invalid("torch.distributed is not initialised: call init_process_group first")
        self.group = group
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)
        if self.rank < 0:
            raise invalid("this process is not in the given group")
        on_gpu = dist.get_backend(group) == "nccl"
        self._device = torch.device("cpu")
        if on_gpu:
            ordinal = torch.cuda.current_device() if device is None else device
            self._device = torch.device("cuda", ordinal)

    def maxima(self, values: Sequence[int]) -> list[int]:
        """The maximum over the ranks of each number: one all_reduce."""
        tensor = torch.tensor(list(values), dtype=torch.int64, device=self._device)
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=self.group)
        return [int(value) for value in tensor.tolist()]


class LockstepTable(SlotTable):
    """Chooses by the order in which slots were freed: a matter of the calls alone.

    `SlotTable` looks at mapped pages, at batches in flight and at GPU work, all of which depend on
    when something ends. The slot freed last is also the one that loses its pages last, and the one
    freed first has most likely lost them.
    """

    lockstep: ClassVar[bool] = True

    def best_fit(self, pages: int) -> Slot | None:
        """The free slot that was freed last; `pages` does not matter."""
        free = self.free
        if not free:
            return None
        # Those that were never taken have 0, and go by their numbers.
        return free.at(-1) if free.entries[-1][0] else free.at(0)

    def emptiest(self, count: int) -> list[Slot]:
        """The free slots that were freed first; whoever takes them waits until they are empty."""
        return list(islice(self.free, count))

    def reset_order(self) -> None:
        """Forgets which slot was freed when; all that can be used are free."""
        for slot in self.slots:
            slot.freed_order = slot.freed_at = 0
        self.rebuild()
