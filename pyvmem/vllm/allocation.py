# SPDX-License-Identifier: MIT
"""Places vLLM's KV tensors on the pool's memory, without replacing a vLLM function.

vLLM's worker allocates each KV tensor as int8 with one call to `torch.zeros`, in the context that
its method `_maybe_get_memory_pool_context` returns. Our worker's method returns a `KVTensorMode`, a
torch mode in which these calls return the pool's tensors. The number of tensors depends on the
version:

    0.26 to 0.28   a tensor for each layer, or for layers that share it (`KVCacheTensor.shared_by`)
    from 0.29 on   a single tensor, in which layers are `KVCacheTensor.layer_stride` bytes apart
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.overrides import TorchFunctionMode

if TYPE_CHECKING:
    from pyvmem.elastic.memory import KVMemory

__all__ = ["KVTensorMode", "OpenMemory", "place_tensors", "backends_refusing_plain"]

OpenMemory = Callable[[int, Sequence[int]], "KVMemory"]
"""Creates memory for KV tensors, given the number of blocks in each and their sizes in bytes."""


_PLAIN = frozenset({"FLASH_ATTN", "FLASH_ATTN_MLA", "FLASHINFER"})
"""Attention back ends whose kernels were tested with plain addresses on a GPU."""


def backends_refusing_plain(vllm_config: Any, kv_cache_config: Any) -> list[str]:
    """Lists the model's attention back ends whose kernels may reject plain addresses.

    Triton's launcher rejects plain addresses, since it queries CUDA about each pointer. The kernels
    of stateful layers use Triton.
    """
    layers = vllm_config.compilation_config.static_forward_context
    names = (name for group in kv_cache_config.kv_cache_groups for name in group.layer_names)
    found = {layers[name].get_attn_backend().get_name() for name in names if name in layers}
    return sorted(found - _PLAIN)


class KVTensorMode(TorchFunctionMode):
    """A torch mode in which int8 `torch.zeros` calls return the next tensor from `tensors`.

    Calls with any other size or type go to torch.
    """

    def __init__(self, tensors: Sequence[Any]) -> None:
        super().__init__()
        self._left = list(tensors)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.zeros and self._left and kwargs.get("dtype") is torch.int8:
            size = args[0] if args else kwargs.get("size")
            if size in (self._left[0].nbytes, (self._left[0].nbytes,)):
                return self._left.pop(0)
        return func(*args, **kwargs)

    def check(self) -> None:
        """Checks that vLLM has taken every tensor.

        Raises:
            RuntimeError: vLLM allocated some KV tensors in another way, from its own memory.
        """
        if self._left:
            raise RuntimeError(
                f"VMEM_VLLM=1: this vllm did not allocate {len(self._left)} of its KV tensors by "
                "torch.zeros in the context of Worker._maybe_get_memory_pool_context"
            )


def place_tensors(kv_cache_config: Any, open_memory: OpenMemory) -> tuple[Any, KVTensorMode]:
    """Creates the KV tensors of a `KVCacheConfig`; called in each worker.

    Returns:
        The configuration, with new offsets for layers that must be page-aligned, and the mode in
        which vLLM must allocate the tensors.

    Raises:
        NotImplementedError: a layer's blocks are not contiguous in this layout.
    """
    tensors, blocks = kv_cache_config.kv_cache_tensors, kv_cache_config.num_blocks
    if not tensors:
        return kv_cache_config, KVTensorMode([])
    if not hasattr(tensors[0], "layer_stride"):
        packed = [one.size for one in tensors if one.block_stride > 0][:1]
        sizes, left = [], packed
        for one in tensors:  # in vLLM's order; packed layers share one tensor
            if one.block_stride <= 0:
                sizes.append(one.size)
            elif left:
                sizes.append(left.pop())
        memory = open_memory(blocks, sizes)
        return kv_cache_config, KVTensorMode([memory.tensor(size) for size in sizes])
    if any(getattr(one, "host_resident", False) for one in tensors):
        raise NotImplementedError("VMEM_VLLM=1 does not work with KV tensors in host memory")
    if all(one.block_stride * blocks == one.size for one in tensors):  # a block spans all layers
        memory = open_memory(blocks, [tensors[0].size])
    else:
        memory, tensors = _regions(tensors, blocks, open_memory)
    buffer = memory.buffer()
    tensors = [dataclasses.replace(one, size=buffer.nbytes) for one in tensors]
    return dataclasses.replace(kv_cache_config, kv_cache_tensors=tensors), KVTensorMode([buffer])


def _regions(
    tensors: Sequence[Any], blocks: int, open_memory: OpenMemory
) -> tuple[KVMemory, list[Any]]:
    """Returns memory with a page-aligned region per layer, and the tensors moved to it.

    Layers of different groups may share a region, since a block belongs to one group at a time.
    """
    regions: dict[int, int] = {}  # maps an offset in vLLM's layout to the bytes per block
    together = True
    for one in tensors:
        together &= one.block_stride * blocks == one.layer_stride
        for index in range(len(one.layers)):
            begin = one.offset + index * one.layer_stride
            together &= regions.setdefault(begin, one.block_stride) == one.block_stride
    begins = sorted(regions)
    ends = [begin + regions[begin] * blocks for begin in begins]
    together &= all(end <= begin for end, begin in zip(ends, begins[1:], strict=False))
    if not together:
        raise NotImplementedError(
            "VMEM_VLLM=1 does not work with a KV cache whose layers are "
            f"{sorted({one.layer_stride for one in tensors})} bytes and whose blocks are "
            f"{sorted({one.block_stride for one in tensors})} bytes apart, {blocks} of them; "
            "VLLM_KV_CACHE_LAYOUT=BLHNC keeps a block together"
        )
    memory = open_memory(blocks, [regions[begin] * blocks for begin in begins])
    kinds = [kind.block_bytes for kind in memory.geometry.classes]
    count = [0] * len(kinds)
    moved: dict[int, tuple[int, int]] = {}  # maps an old offset to the new offset and stride
    for begin in begins:
        kind = kinds.index(regions[begin])
        moved[begin] = memory.begin(kind, count[kind]), memory.span(kind)
        count[kind] += 1
    return memory, [
        dataclasses.replace(one, offset=moved[one.offset][0], layer_stride=moved[one.offset][1])
        for one in tensors
    ]
