# SPDX-License-Identifier: MIT
"""Connects the scheduler to the memory of its ranks when an engine starts.

While no step is in flight, the scheduler calls vLLM's `collective_rpc` to get each rank's socket
path and the identity of its ledger directory. If a rank has the same directory as the scheduler,
the scheduler uses the Unix socket and the ledger there. Any other rank (on another machine, or in a
container with its own directory) listens on a TCP port at the address that vLLM uses between
machines, keeps its device's account in its own process, and returns the port's secret through
another `collective_rpc`.
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

__all__ = ["ALONE", "EXECUTORS", "LOCAL", "RankAddress", "connect", "machine", "ranks_of"]

EXECUTORS: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()
"""vLLM's executors in this process, keyed by the `instance_id` of their `VllmConfig`."""

ALONE = (
    "each has its own scheduler, and all must make the same decisions; with the pool, a decision "
    "depends on the free memory of the scheduler's device"
)
"""For error messages: why an engine whose executors call only their own rank is rejected."""

LOCAL: weakref.WeakValueDictionary[str, KVMemory] = weakref.WeakValueDictionary()
"""The memory of the ranks in this process, keyed by the path of each rank's socket."""


@dataclass(frozen=True)
class RankAddress:
    """The address of a rank.

    Attributes:
        machine: the value that `machine` returns in the rank's process.
        path: path of the rank's Unix socket.
    """

    machine: str
    path: str


def ranks_of(parallel: Any) -> int:
    """Returns how many ranks an engine has, according to vLLM's `ParallelConfig`."""
    sizes = ("tensor", "pipeline")
    return math.prod(getattr(parallel, f"{one}_parallel_size", 1) for one in sizes)


@functools.cache
def _boot() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


def machine(settings: Settings) -> str:
    """Returns an identifier of this machine and its ledger folder.

    Processes that share both get the same identifier.
    """
    folder = private(settings.folder)
    found = folder.stat()
    return f"{_boot()}/{found.st_dev}/{found.st_ino}"


def connect(config: Any, settings: Settings) -> list[Rank]:
    """Connects the scheduler's process to all ranks that have KV tensors.

    Returns:
        The ranks, in vLLM's order.

    Raises:
        RuntimeError: a worker is not an `ElasticWorker`, or the executor cannot call all workers.
        RankLost: a rank did not accept the connection.
    """
    executor = EXECUTORS.get(config.instance_id)
    if executor is None:
        raise RuntimeError("VMEM_VLLM=1: the engine's executor was not created by vLLM's Executor")
    try:
        addresses: Sequence[RankAddress | None] = executor.collective_rpc("vmem_address")
    except Exception as error:
        raise RuntimeError(
            "VMEM_VLLM=1: not every rank has a worker of pyvmem; the variable has to be set, and "
            "pyvmem installed, on every machine of the engine"
        ) from error
    if len(addresses) != (wanted := ranks_of(config.parallel_config)):
        raise RuntimeError(
            f"VMEM_VLLM=1: the engine's executor calls {len(addresses)} ranks of {wanted} ({ALONE})"
        )
    here = machine(settings)
    ports: Sequence[Any] = [None] * len(addresses)
    if any(one is not None and one.machine != here for one in addresses):
        ports = executor.collective_rpc("vmem_listen", args=(here,))
    ranks: list[Rank] = []
    for address, port in zip(addresses, ports, strict=True):
        if address is None:
            continue
        memory = LOCAL.get(address.path)
        if memory is not None:
            ranks.append(LocalRank(memory))
        elif address.machine == here:
            ranks.append(SocketRank(address.path))
        else:
            ranks.append(SocketRank(tuple(port), address.machine))
    return ranks
