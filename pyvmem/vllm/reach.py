# SPDX-License-Identifier: MIT
"""Finds the scheduler's ranks, by vLLM's own call to all workers.

No step is in flight at that time. A rank returns the path of its socket and its folder of ledgers.
A rank with the scheduler's folder counts as local: it is reached by a Unix socket, and its device's
ledger is here. Any other rank (another machine, or a container with its own folder) listens on a
port of the address that vLLM uses between machines, and keeps its device's account in its own
process. vLLM's call also returns the secret that admits the scheduler.
"""

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pyvmem.elastic.memory import KVMemory
from pyvmem.elastic.settings import Settings
from pyvmem.ledger.accounts import private
from pyvmem.vllm.channel import LocalRank, Rank, SocketRank

__all__ = ["ALONE", "EXECUTORS", "LOCAL", "Place", "connect", "machine", "ranks_of"]

EXECUTORS: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()
"""vLLM's executors in this process, by their configurations' `instance_id`."""

ALONE = (
    "each has a scheduler of its own, and all must decide alike; with the pool, what a scheduler "
    "decides follows from what its device has free"
)
"""The case against an engine of several ranks whose executor calls but one."""

LOCAL: weakref.WeakValueDictionary[str, KVMemory] = weakref.WeakValueDictionary()
"""The memory of the ranks in this process, by the path of its socket."""


@dataclass(frozen=True)
class Place:
    """The location of a rank.

    Attributes:
        machine: `machine` of its process.
        path: of its socket.
    """

    machine: str
    path: str


def ranks_of(parallel: Any) -> int:
    """The number of an engine's ranks, from vLLM's `ParallelConfig`."""
    sizes = ("tensor", "pipeline")
    return math.prod(getattr(parallel, f"{one}_parallel_size", 1) for one in sizes)


@functools.cache
def _boot() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


def machine(settings: Settings) -> str:
    """An identity of this machine: equal in processes that share a folder of ledgers."""
    folder = private(settings.folder)
    found = folder.stat()
    return f"{_boot()}/{found.st_dev}/{found.st_ino}"


def connect(config: Any, settings: Settings) -> list[Rank]:
    """The ranks of an engine that have KV tensors, in vLLM's order.

    Raises:
        RuntimeError: a worker is not an `ElasticWorker`, or the executor cannot call it.
    """
    executor = EXECUTORS.get(config.instance_id)
    if executor is None:
        raise RuntimeError("VMEM_VLLM=1: the engine's executor is not made by vLLM's Executor")
    try:
        places: Sequence[Place | None] = executor.collective_rpc("vmem_place")
    except Exception as error:
        raise RuntimeError(
            "VMEM_VLLM=1: not every rank has a worker of pyvmem; the variable has to be set, and "
            "pyvmem installed, on every machine of the engine"
        ) from error
    if len(places) != (wanted := ranks_of(config.parallel_config)):
        raise RuntimeError(
            f"VMEM_VLLM=1: the engine's executor calls {len(places)} ranks of {wanted} ({ALONE})"
        )
    here = machine(settings)
    ports: Sequence[Any] = [None] * len(places)
    if any(one is not None and one.machine != here for one in places):
        ports = executor.collective_rpc("vmem_listen", args=(here,))
    ranks: list[Rank] = []
    for place, port in zip(places, ports, strict=True):
        if place is None:
            continue
        memory = LOCAL.get(place.path)
        if memory is not None:
            ranks.append(LocalRank(memory))
        elif place.machine == here:
            ranks.append(SocketRank(place.path))
        else:
            ranks.append(SocketRank(tuple(port), place.machine))
    return ranks
