# SPDX-License-Identifier: MIT
"""Estimates kernel memory as the memory that the system lost but no process gained.

Two estimates are kept, since each has a blind spot:

- *listed*: growth of Slab + VmallocUsed + PageTables + Percpu + KernelStack in /proc/meminfo;
  misses pages that a driver takes directly from the page allocator.
- *missing*: growth of MemTotal - MemAvailable, less the growth of this process's own memory and of
  Shmem; includes everything, even memory that other processes allocate or free in between.

The larger of the two is reported. Both drift by a few MB on a quiet machine, so per-page figures
are meaningless below about 10,000 pages.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from pyvmem.commands.machine import meminfo

__all__ = ["Delta", "KernelMemory"]

_LISTED = ("Slab", "VmallocUsed", "PageTables", "Percpu", "KernelStack")


def _own() -> int:
    """Returns this process's anonymous memory in bytes."""
    with open("/proc/self/status", encoding="ascii") as lines:
        for line in lines:
            if line.startswith("RssAnon:"):
                return int(line.split()[1]) * 1024
    return 0


@dataclass(frozen=True)
class Delta:
    """Growth in bytes between two readings."""

    listed: int
    missing: int
    own: int
    total: int  # growth of MemTotal: hotplugged memory itself takes up kernel memory

    @property
    def value(self) -> int:
        """The larger of the two estimates."""
        return max(self.listed, self.missing)


@dataclass(frozen=True)
class KernelMemory:
    """A reading of the machine's and this process's memory."""

    listed: int
    missing: int
    own: int
    total: int

    @classmethod
    def now(cls) -> KernelMemory:
        """Takes a reading after a pause, since the kernel delays freeing some memory (RCU)."""
        time.sleep(0.05)
        info, own = meminfo(), _own()
        listed = sum(info.get(name, 0) for name in _LISTED)
        gone = info["MemTotal"] - info.get("MemAvailable", info["MemFree"])
        return cls(listed, gone - own - info.get("Shmem", 0), own, info["MemTotal"])

    def since(self, earlier: KernelMemory) -> Delta:
        """Returns the growth since `earlier`."""
        return Delta(
            self.listed - earlier.listed,
            self.missing - earlier.missing,
            self.own - earlier.own,
            self.total - earlier.total,
        )
