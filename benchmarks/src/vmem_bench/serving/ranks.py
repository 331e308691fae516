# SPDX-License-Identifier: MIT
"""A serving loop over several GPUs, with tensor parallelism and a `ParallelKVCache` on each rank.

Rank 0 runs the loop. Before each forward pass it sends the other ranks the calls that it made on
its store since the last pass, and the requests of this pass. The other ranks make the same calls on
their stores, which must return the same results, and run the same pass. This takes one message per
pass, over gloo. Another message is sent when the store starts mapping memory for the next pass, so
that every rank maps while the current pass runs. Sums over the ranks inside a layer use the default
process group.

    python -m torch.distributed.run --nproc-per-node 2 $(which vmem) bench serve --model Yi-34B ...
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Sequence
from contextlib import closing
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from pyvmem.errors import VMemError
from vmem_bench.command import WrongResult
from vmem_bench.serving.forward import Forward, Launched, Work
from vmem_bench.serving.stores import Held, Ints, Store

__all__ = ["Group", "LeadingForward", "Told", "count", "follow"]


def count() -> int:
    """Returns the number of ranks that torchrun started, or 1 if it was not used."""
    return int(os.environ.get("WORLD_SIZE", "1"))


class Run(NamedTuple):
    """The arguments of `_Runner.open`, which rank 0 sends to the other ranks."""

    name: str
    slots: int
    limit: int
    budget: int


class Step(NamedTuple):
    """The calls to rank 0's store with their results (`asked`), and a pass's requests (`works`).

    `works` is None when the run has ended, and empty if the message has only calls and no pass.
    """

    asked: list[tuple[str, tuple[Any, ...], Any]]
    works: list[Work] | None


class Group:
    """The group of all ranks, through which they communicate.

    Args:
        device: this rank's device.

    Attributes:
        rank: this process's rank.
        size: number of ranks.
    """

    def __init__(self, device: torch.device) -> None:
        if device.type == "cuda":
            torch.cuda.set_device(device)
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self._control: Any = dist.new_group(backend="gloo")

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sums a tensor over the ranks, in place."""
        dist.all_reduce(tensor)
        return tensor

    def tell(self, message: Any = None) -> Any:
        """Sends rank 0's message to all ranks; returns that message on every rank."""
        box = [message]
        dist.broadcast_object_list(box, src=0, group=self._control)
        return box[0]

    def make(self, make: Callable[[], Forward]) -> Forward:
        """Calls `make` on every rank and returns the result.

        Raises:
            RuntimeError: the call failed on at least one rank; raised on every rank.
        """
        forward, why = None, ""
        try:
            forward = make()
        except (VMemError, RuntimeError, ValueError, ImportError, AssertionError) as error:
            why = f"{type(error).__name__}: {error}"
        all_why = [""] * self.size
        dist.all_gather_object(all_why, why, group=self._control)
        if forward is None or any(all_why):
            raise RuntimeError("; ".join(f"rank {i}: {w}" for i, w in enumerate(all_why) if w))
        return forward

    def meet(self) -> None:
        """Waits until every rank has called this method."""
        dist.barrier(group=self._control)

    def close(self) -> None:
        """Leaves the group. All ranks must call this method."""
        dist.destroy_process_group()


class Told(Store):
    """A wrapper around rank 0's store that records calls for the other ranks to repeat.

    Args:
        store: this rank's store.
        group: the group of all ranks.
    """

    def __init__(self, store: Store, group: Group) -> None:
        self.store, self._group = store, group
        self.slots, self.longest = store.slots, store.longest
        self.token_bytes, self.contiguous = store.token_bytes, store.contiguous
        self.layers, self.table = store.layers, store.table
        self.asked: list[tuple[str, tuple[Any, ...], Any]] = []

    def _ask(self, name: str, *args: Any) -> Any:
        answer = getattr(self.store, name)(*args)
        self.host_ns = self.store.host_ns
        self.asked.append((name, copy.deepcopy(args), answer))  # callers change their lists later
        return answer

    def take(self, ids: Ints) -> tuple[int, int] | None:
        """See `Store`."""
        found: tuple[int, int] | None = self._ask("take", ids)
        return found

    def release(self, slot: int, ids: Ints | None = None) -> None:
        """See `Store`."""
        self._ask("release", slot, ids)

    def hold(self, slots: list[int], lengths: list[int]) -> bool:
        """See `Store`."""
        return bool(self._ask("hold", slots, lengths))

    def ahead(self, *asked: tuple[list[int], list[int]]) -> None:
        """See `Store`; the other ranks are told immediately, so that they map while a pass runs."""
        if type(self.store).ahead is not Store.ahead:
            self._ask("ahead", *asked)
            self.tell([])

    def prompt_ends(self, slot: int, tokens: int) -> None:
        """See `Store`."""
        self._ask("prompt_ends", slot, tokens)

    def settle(self) -> None:
        """See `Store`; returns when every rank has settled, because the clock starts next."""
        self._ask("settle")
        self.tell([])
        self._group.meet()

    def fits(self, partial: Sequence[tuple[int, int]], tokens: int) -> bool:
        """See `Store`; only rank 0 decides which requests join."""
        return self.store.fits(partial, tokens)

    def ready(self, slot: int, tokens: int) -> bool:
        """See `Store`; only rank 0 decides which requests wait."""
        return self.store.ready(slot, tokens)

    def readable(self, slot: int) -> int:
        """See `Store`."""
        return self.store.readable(slot)

    def where(self, slots: Ints, positions: Ints) -> tuple[Ints, Ints]:
        """See `Store`."""
        return self.store.where(slots, positions)

    def upload(self) -> None:
        """See `Store`."""
        self.store.upload()

    def held(self) -> Held:
        """See `Store`; reports this rank's memory."""
        return self.store.held()

    def driver(self) -> dict[str, float]:
        """See `Store`; counts this rank's driver calls."""
        return self.store.driver()

    def tell(self, works: list[Work] | None) -> None:
        """Sends the other ranks a `Step` with the calls since the last message and `works`."""
        asked, self.asked = self.asked, []
        self._group.tell(Step(asked, works))

    def close(self) -> None:
        """See `Store`."""
        super().close()
        self.store.close()


class LeadingForward(Forward):
    """Rank 0's forward pass, which tells the other ranks to run the same pass."""

    store: Told

    def launch(self, works: list[Work]) -> Launched:
        """See `Forward`."""
        self.store.tell(works)
        return super().launch(works)

    def close(self) -> None:
        """See `Forward`; ends the run on every rank."""
        self.store.tell(None)
        super().close()


def follow(group: Group, make: Callable[[Run], Forward], sweep: Callable[[], None]) -> None:
    """Runs the loop on ranks other than 0: repeats rank 0's runs until it sends None.

    Args:
        group: the group of all ranks.
        make: creates a forward pass over a new store.
        sweep: closes the store once nothing refers to the forward pass.

    Raises:
        WrongResult: a call's result differs from rank 0's.
    """
    while (run := group.tell()) is not None:
        try:
            forward = group.make(partial(make, run))
        except RuntimeError:  # rank 0 raises the same error, then continues with its next run
            sweep()
            continue
        with closing(forward):
            _follow(group, forward)
        del forward
        sweep()


def _follow(group: Group, forward: Forward) -> None:
    # As on rank 0, a pass is prepared while the previous one runs.
    before: Launched | None = None
    flying: Launched | None = None
    while True:
        asked, works = group.tell()
        for name, args, answer in asked:
            mine = getattr(forward.store, name)(*args)
            if mine != answer:
                raise WrongResult(
                    f"rank {group.rank}: {name}{args!r:.80} returned {mine}, on rank 0 {answer}"
                )
            if name == "settle":
                group.meet()
        if works is None:
            if flying is not None:
                flying.wait()
            return
        if works:
            if before is not None:
                before.wait()
            before, flying = flying, forward.launch(works)
