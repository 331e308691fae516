# SPDX-License-Identifier: MIT
"""Fine-grained virtual memory for GPUs and the host, under ordinary tensors.

    import pyvmem

    with pyvmem.Context() as ctx, ctx.reserve(1 << 30) as reservation:
        kv = reservation.tensor((1024, 8, 128), "bfloat16")   # addresses without memory
        pages = ctx.create(64 << 10)                          # one 64 KiB page
        reservation.map(0, pages)                             # the first rows now exist
        kv[:32] = 1
        del kv
        pages.release()

`Context` opens a back end, `OpBatch` and `Ticket` change many mappings at once, and `KVCache` is
the cache for serving engines built on top of them.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from pyvmem import _native
from pyvmem.commands.probe import ProbeResult, probe
from pyvmem.errors import (
    AccessDenied,
    AddressOverflow,
    AlreadyMapped,
    BackendUnavailable,
    BadHandle,
    Busy,
    DriverError,
    ForkedProcess,
    InvalidArgument,
    NotGpuWork,
    NotMapped,
    NotRecoverable,
    NotReserved,
    NotSupported,
    OutOfMemory,
    OutOfRange,
    ReadOnly,
    Reentered,
    Suspended,
    Timeout,
    TooManyBatches,
    TooManyMappings,
    TooManyTickets,
    VMemError,
)
from pyvmem.memory.array import VirtualArray
from pyvmem.memory.context import Context, PlainReservationWarning
from pyvmem.memory.dtypes import DType
from pyvmem.memory.info import (
    KEEP_ALL,
    Caps,
    ContextInfo,
    Inject,
    Location,
    MemoryInfo,
    PagesInfo,
    RangeFlags,
    RangeInfo,
    Stats,
)
from pyvmem.memory.ops import OpBatch
from pyvmem.memory.pages import Pages, Ticket
from pyvmem.memory.reservation import Reservation
from pyvmem.memory.streams import CurrentStream, FdEvent

if TYPE_CHECKING:
    from pyvmem.commands.viewer import watch
    from pyvmem.kvcache import KVCache, KVCacheConfig
    from pyvmem.ledger.presence import announce

__all__ = [
    "KEEP_ALL",
    "AccessDenied",
    "AddressOverflow",
    "AlreadyMapped",
    "BackendUnavailable",
    "BadHandle",
    "Busy",
    "Caps",
    "Context",
    "ContextInfo",
    "CurrentStream",
    "DType",
    "DriverError",
    "FdEvent",
    "ForkedProcess",
    "Inject",
    "InvalidArgument",
    "KVCache",
    "KVCacheConfig",
    "Location",
    "MemoryInfo",
    "NotGpuWork",
    "NotMapped",
    "NotRecoverable",
    "NotReserved",
    "NotSupported",
    "OpBatch",
    "OutOfMemory",
    "OutOfRange",
    "Pages",
    "PagesInfo",
    "PlainReservationWarning",
    "ProbeResult",
    "RangeFlags",
    "RangeInfo",
    "ReadOnly",
    "Reentered",
    "Reservation",
    "Stats",
    "Ticket",
    "Timeout",
    "Suspended",
    "TooManyBatches",
    "TooManyMappings",
    "TooManyTickets",
    "VMemError",
    "VirtualArray",
    "__version__",
    "announce",
    "probe",
    "watch",
]

_OF_CACHES = {
    "KVCache": "pyvmem.kvcache",
    "KVCacheConfig": "pyvmem.kvcache",
    "announce": "pyvmem.ledger.presence",
    "watch": "pyvmem.commands.viewer",
}

__version__: str = _native.version()


def __getattr__(name: str) -> Any:
    # Imported on demand, since caches need torch and the core does not.
    if name in _OF_CACHES:
        return getattr(importlib.import_module(_OF_CACHES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """Lists the public names for completion, including those imported lazily."""
    return [*__all__, *(name for name in globals() if name.startswith("__"))]
