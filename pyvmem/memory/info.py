# SPDX-License-Identifier: MIT
"""Enumerations and frozen records that describe contexts, ranges and handles.

The compiler provides the values of the constants in vmem.h. Sizes are in bytes; addresses are
device virtual addresses (pointers on ``host``).
"""

from __future__ import annotations

import enum
import uuid
from dataclasses import dataclass
from typing import Any

from pyvmem import _native

__all__ = [
    "KEEP_ALL",
    "Caps",
    "ContextInfo",
    "Inject",
    "Location",
    "MemoryInfo",
    "PagesInfo",
    "RangeFlags",
    "RangeInfo",
    "Stats",
]

_c = _native.constant

KEEP_ALL: int = _c("VMEM_KEEP_ALL")
"""For ``pool_high``: only `Context.trim` returns free pages to the driver."""


class Caps(enum.Flag):
    """Capabilities of a back end."""

    ALIAS = _c("VMEM_CAP_ALIAS")
    READONLY = _c("VMEM_CAP_READONLY")
    SPARSE = _c("VMEM_CAP_SPARSE")
    HOST_PAGES = _c("VMEM_CAP_HOST_PAGES")
    PEER = _c("VMEM_CAP_PEER")
    CPU_ACCESS = _c("VMEM_CAP_CPU_ACCESS")
    VISIBLE = _c("VMEM_CAP_VISIBLE")
    PLAIN = _c("VMEM_CAP_PLAIN")
    JOIN = _c("VMEM_CAP_JOIN")
    ONE_CALL = _c("VMEM_CAP_ONE_CALL")
    SPARSE_ATOMIC = _c("VMEM_CAP_SPARSE_ATOMIC")
    LARGE_ENTRIES = _c("VMEM_CAP_LARGE_ENTRIES")


class Location(enum.IntEnum):
    """Locations of physical pages."""

    DEVICE = _c("VMEM_DEVICE")
    HOST = _c("VMEM_HOST")
    PEER = _c("VMEM_PEER")


class RangeFlags(enum.Flag):
    """Flags that describe the state of an address."""

    MAPPED = _c("VMEM_RANGE_MAPPED")
    READONLY = _c("VMEM_RANGE_READONLY")
    VISIBLE = _c("VMEM_RANGE_VISIBLE")
    SPARSE = _c("VMEM_RANGE_SPARSE")
    BUSY = _c("VMEM_RANGE_BUSY")
    QUARANTINED = _c("VMEM_RANGE_QUARANTINED")
    LARGE = _c("VMEM_RANGE_LARGE")


class Inject(enum.IntFlag):
    """Driver calls that `Context.inject` can make fail."""

    MAP = _c("VMEM_INJECT_MAP")
    UNMAP = _c("VMEM_INJECT_UNMAP")
    SLAB = _c("VMEM_INJECT_SLAB")
    FILL = _c("VMEM_INJECT_FILL")
    RESERVE = _c("VMEM_INJECT_RESERVE")
    HEAP = _c("VMEM_INJECT_HEAP")
    CLEAN = _c("VMEM_INJECT_CLEAN")
    EVENT = _c("VMEM_INJECT_EVENT")


def sizes_of_mask(mask: int) -> tuple[int, ...]:
    """Returns the page sizes in a mask whose bit k stands for 2**k bytes."""
    return tuple(1 << k for k in range(64) if mask >> k & 1)


@dataclass(frozen=True)
class ContextInfo:
    """Describes a context (struct vmem_info).

    Attributes:
        backend: ``"host"``, ``"cuda"``, ``"stock"`` or ``"uvm"``.
        caps: the back end's capabilities.
        granule: the smallest page, in bytes.
        page_sizes: supported page sizes, ascending.
        slab_size: bytes per allocation from the driver.
        max_segments: limit on Stats.segments (host: vm.max_map_count), 0 = no limit.
        max_mappings: limit on Stats.mappings (see `Context`), 0 = no limit.
        driver: the driver's version; ``""`` on ``host``.
        device_name: the name of the first device.
        devices: CUDA ordinals; the first device holds the pages.
        uuid: UUID of the first device, in nvidia-smi's format; ``""`` on ``host``.
        uuids: UUIDs of all devices.
        why: for ``"auto"``, why the back ends tried before this one cannot be used.
        warning: a message for the operator, such as an unknown driver branch; ``""`` if there is
            none.
    """

    backend: str
    caps: Caps
    granule: int
    page_sizes: tuple[int, ...]
    slab_size: int
    max_segments: int
    max_mappings: int
    driver: str
    device_name: str
    devices: tuple[int, ...]
    uuid: str
    uuids: tuple[str, ...]
    why: str
    warning: str

    @classmethod
    def _from_c(cls, info: Any, devices: tuple[int, ...]) -> ContextInfo:
        raw = [bytes(_native.ffi.buffer(info.uuid[k])) for k in range(info.num_devices)]
        uuids = tuple(f"GPU-{uuid.UUID(bytes=one)}" if any(one) else "" for one in raw)
        return cls(
            backend=_native.text_of(info.backend),
            caps=Caps(info.caps),
            granule=info.granule,
            page_sizes=sizes_of_mask(info.page_sizes),
            slab_size=info.slab_size,
            max_segments=info.max_segments,
            max_mappings=info.max_mappings,
            driver=_native.text_of(info.driver),
            device_name=_native.text_of(info.device_name),
            devices=devices,
            uuid=uuids[0] if uuids else "",
            uuids=uuids,
            why=_native.text_of(info.why),
            warning=_native.text_of(info.warning),
        )


@dataclass(frozen=True)
class Stats:
    """A context's counters and current state (struct vmem_stats).

    Call counts and nanoseconds are totals since the context was opened.

    ``slab_bytes`` is ``used_bytes + free_bytes + quarantined_bytes``; an aliased page counts once
    in ``used_bytes`` and once per mapping in ``mapped_bytes``. ``dirty_bytes`` is the part of
    ``free_bytes`` that is not zeroed yet. ``mappings`` includes slabs' own mappings.
    ``large_entries`` counts the live page-table entries of 2 MiB; ``splits`` and ``joins`` count
    entries that were split into small ones or joined from them.
    """

    reserved_bytes: int
    mapped_bytes: int
    used_bytes: int
    free_bytes: int
    slab_bytes: int
    quarantined_bytes: int
    peak_mapped_bytes: int
    peak_used_bytes: int
    reservations: int
    handles: int
    slabs: int
    segments: int
    pending: int
    batches: int
    map_calls: int
    unmap_calls: int
    slab_calls: int
    fill_calls: int
    driver_ns: int
    worker_driver_ns: int
    mappings: int
    tickets: int
    dirty_bytes: int
    large_entries: int
    splits: int
    joins: int

    @classmethod
    def _from_c(cls, stats: Any) -> Stats:
        return cls(*[getattr(stats, name) for name in _STATS_FIELDS])


_STATS_FIELDS = tuple(Stats.__dataclass_fields__)


@dataclass(frozen=True)
class MemoryInfo:
    """Describes the physical memory at a location at one point in time (struct vmem_memory_info).

    Attributes:
        free_bytes: bytes that the context can still allocate from the driver within its
            `mem_limit`, not counting its pool's free pages; other processes may allocate them
            first.
        total_bytes: the location's total memory; 0 if the driver does not report it.
    """

    free_bytes: int
    total_bytes: int


@dataclass(frozen=True)
class RangeInfo:
    """The reservation that contains an address, and the address's state (struct vmem_range_info).

    Attributes:
        base: the reservation's first address.
        nbytes: length of the reservation.
        mapped_bytes: bytes mapped in the reservation.
        segments: number of contiguous pieces in the reservation, as the back end sees them.
        run_bytes: length, from the start of the address's granule, of the physically contiguous
            range in the same state.
        flags: state of the address.
        entry_bytes: size of the page-table entry that maps the address (4 KiB, 64 KiB or 2 MiB); 0:
            not mapped.
    """

    base: int
    nbytes: int
    mapped_bytes: int
    segments: int
    run_bytes: int
    flags: RangeFlags
    entry_bytes: int

    @property
    def mapped(self) -> bool:
        """True if the address is mapped."""
        return RangeFlags.MAPPED in self.flags

    @property
    def readonly(self) -> bool:
        """True if the address is mapped read-only."""
        return RangeFlags.READONLY in self.flags

    @classmethod
    def _from_c(cls, info: Any) -> RangeInfo:
        return cls(
            info.base,
            info.bytes,
            info.mapped_bytes,
            info.segments,
            info.run_bytes,
            RangeFlags(info.flags),
            info.entry_bytes,
        )


@dataclass(frozen=True)
class PagesInfo:
    """Describes the pages behind a handle (struct vmem_handle_info).

    Attributes:
        nbytes: total size of the pages in bytes.
        page_size: size of each page.
        runs: number of physically contiguous runs.
        mappings: number of live mappings made with this handle.
        location: the memory that holds the pages.
        device: CUDA ordinal for `Location.PEER`.
    """

    nbytes: int
    page_size: int
    runs: int
    mappings: int
    location: Location
    device: int

    @classmethod
    def _from_c(cls, info: Any) -> PagesInfo:
        return cls(
            info.bytes,
            info.page_size,
            info.runs,
            info.mappings,
            Location(info.location),
            info.device,
        )
