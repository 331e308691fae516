# SPDX-License-Identifier: MIT
"""Creates SGLang's KV tensors on a reservation. Each page is contiguous in each tensor.

    K of layer 0 | page 0 | page 1 | ...      the same for V of layer 0, K of layer 1, ...

Stock SGLang allocates a layer's K and V as two halves of a tensor, so kernels may assume that they
are a whole number of pages apart. Here, too, the distance between two tensors is a multiple of the
page size. Latent attention (MLA) has a single tensor per layer.
"""

from __future__ import annotations

import logging
import math
import weakref
from collections.abc import Iterable
from typing import Any

from pyvmem.elastic.choice import SMALL, choose_page
from pyvmem.elastic.geometry import runs_of
from pyvmem.elastic.memory import KVMemory, device_total, open_context
from pyvmem.elastic.settings import Settings
from pyvmem.plumbing.units import format_bytes

__all__ = ["memory_of", "place_tensors"]

log = logging.getLogger("sglang.vmem")

_places: weakref.WeakKeyDictionary[Any, tuple[KVMemory, Settings, str, bool]]
_places = weakref.WeakKeyDictionary()


def memory_of(pool: Any) -> tuple[KVMemory, Settings, str, bool]:
    """Returns a KV pool's memory, settings and ledger name, and whether the name must be unique."""
    return _places[pool]


def _tensors(pool: Any) -> tuple[dict[str, tuple[int, ...]], int]:
    """Returns the shape of each tensor of a layer, by attribute name, and the rows per page."""
    if type(pool).__name__ == "MLATokenToKVPool":
        shape = (pool.size + pool.page_size, 1, pool.kv_cache_dim)
        return {"kv_buffer": shape}, pool.page_size
    names = ("k_buffer", "v_buffer")
    rows_of = 1 if pool.use_hnd else pool.page_size
    return dict(zip(names, pool._kv_buffer_shapes(), strict=True)), rows_of


def place_tensors(pool: Any, arguments: Any, backends: Iterable[str]) -> None:
    """Creates the KV tensors of a pool and maps page 0, the padding page.

    Args:
        pool: an `MHATokenToKVPool` or `MLATokenToKVPool`; this call sets its lists of tensors.
        arguments: SGLang's `ServerArgs`.
        backends: SGLang's names for the attention back ends.

    Raises:
        ValueError: a setting is not valid for the device.
        VMemError: the memory cannot be reserved or mapped.
    """
    settings = Settings.read()
    tensors, rows_of = _tensors(pool)
    shapes = tensors.values()
    blocks = -(-(pool.size + pool.page_size) // pool.page_size)
    size = pool.store_dtype.itemsize
    page_bytes = [rows_of * math.prod(shape[1:]) * size for shape in shapes]
    sizes = [blocks * one for _ in range(pool.layer_num) for one in page_bytes]
    visible = settings.visible or not _plain(tensors, backends)
    memory = _open(settings, str(pool.device), blocks, sizes, math.lcm(*page_bytes), visible)
    memory.grow(runs_of([memory.geometry.pages(k, 0) for k in range(len(memory.geometry.classes))]))
    made: dict[str, list[Any]] = {name: [] for name in tensors}
    for _ in range(pool.layer_num):
        for (name, shape), one in zip(tensors.items(), page_bytes, strict=True):
            flat = memory.tensor(blocks * one)[: math.prod(shape) * size]
            made[name].append(flat.view(pool.store_dtype).view(shape))
    for name, found in made.items():
        setattr(pool, name, found)
    weakref.finalize(pool, memory.close).atexit = False
    model = str(arguments.served_model_name or arguments.model_path)
    name = settings.name or model.rstrip("/").rsplit("/", 1)[-1]
    unique = bool(settings.name) and arguments.dp_size == 1
    _places[pool] = (memory, settings, name, unique)


def _plain(tensors: Iterable[str], backends: Iterable[str]) -> bool:
    """Returns true if all kernels that access these tensors accept plain addresses on a GPU.

    Triton's launcher rejects plain addresses because it queries CUDA about each pointer, and latent
    KV is written by a Triton kernel.
    """
    return "kv_buffer" not in tensors and set(backends) == {"fa3"}


def _open(
    settings: Settings, device: str, blocks: int, sizes: list[int], multiple: int, visible: bool
) -> KVMemory:
    """Creates the memory for `blocks` pages in tensors of `sizes` bytes; see `KVMemory`."""
    gpu: int | None = None
    if device.startswith("cuda"):
        import torch

        gpu = torch.cuda.current_device()
    most = min(sum(sizes), settings.limit or sum(sizes), device_total(gpu))
    page, why = choose_page(blocks, sizes, most, settings.page_size, settings.limit)
    log.info("vmem: %d KV tensors on pages of %s: %s", len(sizes), format_bytes(page), why)
    context = open_context(
        settings.backend or ("host" if gpu is None else "auto"),
        gpu or 0,
        page if page != SMALL or settings.page_size else 0,  # 0: the back end's smallest page
        256 << 20 if settings.reserve is None else settings.reserve,
    )
    return KVMemory(context, blocks, sizes, multiple, visible)
