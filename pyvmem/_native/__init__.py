# SPDX-License-Identifier: MIT
"""The boundary to C: the only package that calls libvmem, and the only one that raises its errors.

One function for each function of vmem.h, under its name in snake case, with plain integers for
handles and an exception instead of a negative errno. cffi releases the GIL in every call.
Structures are returned as they are (``Any``); the modules above turn them into typed objects.
"""

from pyvmem._native.arrays import (
    buffer_at,
    dlpack_capsule,
)
from pyvmem._native.boundary import constant, fail, text_of
from pyvmem._native.columns import Columns, Grown, Waiting, Waits
from pyvmem._native.memory import (
    AFTER_NONE,
    batch,
    check,
    compact,
    copy,
    fill,
    inject,
    join,
    map,
    new_after,
    new_ops,
    order,
    read,
    submit,
    ticket_drop,
    trim,
    unmap,
    wait,
    warm,
    write,
)
from pyvmem._native.objects import (
    backend_names,
    close,
    create,
    discard,
    drop,
    drop_range,
    free,
    gather,
    get_stats,
    handle_query,
    open,
    probe,
    query,
    range_query,
    release,
    reserve,
    version,
)
from pyvmem._native.outcome import Outcome
from pyvmem._vmem import ffi

__all__ = [
    "AFTER_NONE",
    "Columns",
    "Grown",
    "Outcome",
    "Waiting",
    "Waits",
    "backend_names",
    "batch",
    "buffer_at",
    "check",
    "close",
    "compact",
    "constant",
    "copy",
    "create",
    "discard",
    "dlpack_capsule",
    "drop",
    "drop_range",
    "fail",
    "ffi",
    "fill",
    "free",
    "gather",
    "get_stats",
    "handle_query",
    "inject",
    "join",
    "map",
    "new_after",
    "new_ops",
    "open",
    "order",
    "probe",
    "query",
    "range_query",
    "read",
    "release",
    "reserve",
    "submit",
    "ticket_drop",
    "text_of",
    "trim",
    "unmap",
    "version",
    "wait",
    "warm",
    "write",
]
