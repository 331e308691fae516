# SPDX-License-Identifier: MIT
"""A drop-in replacement for the vAttention artifact's Python module, built on `pyvmem.KVCache`.

    import pyvmem.compat.vattention as vattention     # or, for an unmodified program:
    pyvmem.compat.vattention.install()                # before its own ``import vattention``

Functions, argument order, tensor shapes and return values are those of the pybind11 module of
github.com/microsoft/vattention (``vattention.cu``, ``apis.h``). As in the artifact, the state is
global: a process has one cache at a time, from `init_kvcache` to `cleanup`. A *KV block* is one
page in every tensor.

Deliberate differences:

- Physical memory is identified by opaque, checked handles. A freed id's pages are unmapped once its
  GPU work is done, and zeroed before another request gets them.
- Driver errors raise exceptions; they never kill the process. A step that runs out of memory maps
  nothing and raises `OutOfKVBlocks`, which is a RuntimeError, as in the artifact.
- `alloc_new_batch_idx` uses best fit: of the free ids with enough mapped pages, it picks the one
  with the fewest; if none has enough, it picks the one with the most.
- `step_async` waits for background work before it changes anything, and reclaims idle
  pages in the background when less than a tenth of the memory is free.
- `cleanup` frees the memory immediately, and the addresses once no tensor that uses them is alive.
- Pages may have any size that the back end supports, and the `max_context_length` rows of a request
  need not fill whole pages. If they do, the tensors are contiguous, as in the artifact. If not (the
  artifact rejects such shapes), the distance between two requests, ``stride(0)``, exceeds
  ``max_context_length * stride(1)``.
- The pages of `map_common_pages` are writable through one id; a write through any other id faults.
- Any number of processes may use it, on any number of devices. The back end is "auto" unless
  `configure` or ``$VMEM_VATTENTION_BACKEND`` names another.

The tensors must not be accessed after `cleanup`, since their memory has been freed.
"""

from __future__ import annotations

import errno
import operator
import os
import sys
import threading
from collections.abc import Sequence
from types import ModuleType
from typing import TYPE_CHECKING

from pyvmem.compat._manager import Manager, OutOfKVBlocks, close_retired
from pyvmem.errors import BadHandle, Busy

if TYPE_CHECKING:
    import torch

__all__ = [
    "OutOfKVBlocks",
    "alloc_new_batch_idx",
    "cleanup",
    "configure",
    "free_batch_idx",
    "init_kvcache",
    "install",
    "map_common_pages",
    "num_free_kvblocks",
    "reserve_physical_pages",
    "set_deferred_reclamation",
    "set_verbose",
    "show_allocator_state",
    "show_kvcache_config",
    "step",
    "step_async",
]

_UVM_PAGE = 64 << 10
_CUDA_PAGE = 2 << 20

_lock = threading.RLock()
_manager: Manager | None = None
_backend: str | None = None
_verbose = False
_deferred = True


def _the() -> Manager:
    if _manager is None:
        raise BadHandle("vattention: call init_kvcache first", errno=errno.EBADF, op="vattention")
    return _manager


# ---- not in the artifact -------------------------------------------------------------------------


def install() -> ModuleType:
    """Makes ``import vattention`` find this module.

    Raises:
        Busy: another module of that name is already imported.
    """
    module = sys.modules[__name__]
    present = sys.modules.setdefault("vattention", module)
    if present is not module:
        raise Busy(
            f"vattention is already imported, from {getattr(present, '__file__', 'elsewhere')}",
            errno=errno.EBUSY,
            op="install",
        )
    return module


def configure(backend: str | None) -> None:
    """Sets the back end for the next `init_kvcache`.

    None selects the one in ``$VMEM_VATTENTION_BACKEND``, or "auto" if the variable is not set.
    """
    global _backend
    _backend = backend


# ---- setup and end ------------------------------------------------------------------------------


def init_kvcache(
    num_layers: int,
    num_kv_heads: int,
    head_size: int,
    max_batch_size: int,
    max_context_length: int,
    device: int,
    dtype: torch.dtype,
    page_size: int,
    megacache: bool = False,
) -> list[torch.Tensor]:
    """Creates the tensors at reserved addresses; `reserve_physical_pages` allocates their memory.

    Args:
        device: CUDA ordinal.
        page_size: in bytes. The artifact's demos and earlier versions pass a bool (whether to use
            its UVM driver): True means pages of 64 KiB, False means 2 MiB.
        megacache: one K and one V tensor for all layers; caches of more than 8 GiB should then use
            pages of 2 MiB, as attention takes several times as long with smaller pages.

    Returns:
        The K tensors of all layers, then the V tensors, each ``[max_batch_size,
        max_context_length, num_kv_heads, head_size]``; with `megacache` one K and one V tensor,
        each ``[max_batch_size, max_context_length, num_layers, num_kv_heads, head_size]``.

    Raises:
        Busy: there is already a cache. InvalidArgument, BackendUnavailable: see `KVCache`.
    """
    global _manager
    with _lock:
        if _manager is not None:
            raise Busy(
                "vattention: init_kvcache has already been called; call cleanup first",
                errno=errno.EBUSY,
                op="init_kvcache",
            )
        if isinstance(page_size, bool):
            page_size = _UVM_PAGE if page_size else _CUDA_PAGE
        close_retired()
        manager = Manager(
            backend=_backend or os.environ.get("VMEM_VATTENTION_BACKEND") or "auto",
            device=device,
            num_layers=num_layers,
            num_kv_heads=num_kv_heads,
            head_dim=head_size,
            max_batch=max_batch_size,
            max_seq_len=max_context_length,
            dtype=dtype,
            page_size=page_size,
            megacache=megacache,
        )
        try:
            tensors = manager.tensors()
            if _verbose:
                print(f"vattention: {manager.tokens_per_block} tokens per KV block")
            _manager = manager
        except BaseException:
            # the traceback may hold tensors; `close_retired` closes the cache later
            manager.end()
            raise
        return tensors


def reserve_physical_pages(free_memory: int) -> int:
    """Allocates physical memory for the cache; a later call with a larger size adds the difference.

    Args:
        free_memory: bytes, rounded down to a multiple of ``2 * num_layers`` pages.

    Returns:
        The cache's total number of physical pages, over all tensors.

    Raises:
        InvalidArgument: `free_memory` is less than one page for every layer's K and V.
            OutOfMemory: the device has too little memory; nothing changed.
    """
    with _lock:
        return _the().reserve(operator.index(free_memory))


def cleanup() -> None:
    """Ends the cache, if any: waits for its GPU work and frees its memory."""
    global _manager
    with _lock:
        if _manager is not None:
            _manager.end()
            _manager = None
        close_retired()


# ---- requests ------------------------------------------------------------------------------------


def alloc_new_batch_idx(seqlen: int) -> int:
    """Assigns an id to a request that will hold `seqlen` tokens, without mapping memory.

    Returns:
        The id, an index into the tensors and into `step`'s list, or -1 if every id is in use.
    """
    with _lock:
        return _the().alloc(seqlen)


def free_batch_idx(reqId: int) -> None:  # the artifact's name
    """Frees an id; its pages stay mapped for the next request. Does nothing if the id is free."""
    with _lock:
        _the().free(reqId)


def num_free_kvblocks() -> int:
    """Returns the number of KV blocks that the requests do not need, whether mapped or not."""
    with _lock:
        return _the().free_blocks()


# ---- steps ---------------------------------------------------------------------------------------


def step(seq_lens: Sequence[int], eager_reclaim: bool) -> None:
    """Maps the pages that the requests need now.

    Args:
        seq_lens: number of tokens of each id. An id need not come from `alloc_new_batch_idx`. An id
            with 0 tokens is freed; an id with fewer tokens than before loses its last rows.
        eager_reclaim: whether to unmap the pages of free ids immediately.

    Raises:
        OutOfKVBlocks: there is not enough memory. InvalidArgument: the list has the wrong length,
            or a number in it is out of range.
    """
    with _lock:
        _the().step(seq_lens)
        if eager_reclaim:
            _the().reclaim(keep_next=False)


def step_async(seq_lens: Sequence[int]) -> None:
    """Runs `step`, then maps memory for one more token per request in the background."""
    with _lock:
        _the().step(seq_lens)
        _the().map_ahead()
        if not _deferred:
            _the().reclaim(keep_next=True)


def map_common_pages(num_tokens: int) -> None:
    """Maps the same pages for the first `num_tokens` tokens of every id (e.g. a system prompt).

    May be called only once, before the first request. The pages hold zeros; id 0, which the next
    `alloc_new_batch_idx` returns, can write them until its request ends. All other ids have them
    mapped read-only, each at its own address; a write there faults. The artifact makes them
    writable through all ids, so requests can overwrite each other's rows.

    All rows of these pages are common; a request's own rows follow, and its length includes the
    common rows. The pages stay mapped until `cleanup`: from now on, `free_batch_idx` frees only the
    request's own pages, and waits for its GPU work.

    Args:
        num_tokens: number of common tokens; 0 does nothing.

    Raises:
        Busy: an id is in use, or this was called before. OutOfKVBlocks, InvalidArgument: memory or
            ``max_context_length`` is too small. NotSupported: the back end does not support it.
            Nothing changed.
    """
    with _lock:
        manager, tokens = _the(), operator.index(num_tokens)
        if tokens:
            manager.map_common(tokens)


# ---- settings and reports ------------------------------------------------------------------------


def set_deferred_reclamation(val: bool) -> None:
    """Sets whether idle pages stay mapped; if not, `step_async` unmaps all but the next id's."""
    global _deferred
    _deferred = bool(val)


def set_verbose(val: bool) -> None:
    """Sets whether the ``show_`` functions print."""
    global _verbose
    _verbose = bool(val)


def show_kvcache_config() -> None:
    """If verbose, prints the cache's shape and sizes."""
    with _lock:
        lines = _the().describe()
    if _verbose:
        print("\n".join(lines))


def show_allocator_state() -> None:
    """If verbose, prints the number of free KV blocks and each id's length and pages."""
    with _lock:
        lines = _the().picture()
    if _verbose:
        print("\n".join(lines))
