# SPDX-License-Identifier: MIT
"""KV tensors over reservations: K and V of a layer apart, a page's bytes together in each.

    K of layer 0 | page 0 | page 1 | ...      the same for V of layer 0, for K of layer 1, ...

SGLang makes K and V of a layer as two halves of one tensor, so that a kernel can reach V from K's
address by whole pages. The distance of two tensors here is a multiple of a page's bytes, too.
Latent attention (MLA) has one tensor a layer.
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

__all__ = ["memory_of", "place"]

log = logging.getLogger("sglang.vmem")

_places: weakref.WeakKeyDictionary[Any, tuple[KVMemory, Settings, str, bool]]
_places = weakref.WeakKeyDictionary()


def memory_of(pool: Any) -> tuple[KVMemory, Settings, str, bool]:
    """The memory of a KV pool of SGLang's, its settings, its engine's name, and who chose that."""
    return _places[pool]


def _tensors(pool: Any) -> tuple[dict[str, tuple[int, ...]], int]:
    """The tensors of a layer: their shape, by the pool's name for them; and rows of a page."""
    if type(pool).__name__ == "MLATokenToKVPool":
        shape = (pool.size + pool.page_size, 1, pool.kv_cache_dim)
        return {"kv_buffer": shape}, pool.page_size
    names = ("k_buffer", "v_buffer")
    rows_of = 1 if pool.use_hnd else pool.page_size
    return dict(zip(names, pool._kv_buffer_shapes(), strict=True)), rows_of


def place(pool: Any, arguments: Any, backends: Iterable[str]) -> None:
    """Makes the KV tensors of a pool of SGLang's; page 0, for padding, is mapped.

    Args:
        pool: an `MHATokenToKVPool` or `MLATokenToKVPool`; its lists of tensors are set.
        arguments: SGLang's.
        backends: attention back ends, by SGLang's names.
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
    """True if all kernels on KV tensors of these names have read plain addresses on a GPU.

    Triton's launcher refuses them: it asks CUDA about each pointer. A kernel of Triton's writes the
    rows of latent attention.
    """
    return "kv_buffer" not in tensors and set(backends) == {"fa3"}


def _open(
    settings: Settings, device: str, blocks: int, sizes: list[int], multiple: int, visible: bool
) -> KVMemory:
    """The memory of this many KV pages; the distance of two tensors is a `multiple`."""
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
        page if page != SMALL or settings.page_size else 0,  # the least that the back end has
        256 << 20 if settings.reserve is None else settings.reserve,
    )
    return KVMemory(context, blocks, sizes, multiple, visible)
