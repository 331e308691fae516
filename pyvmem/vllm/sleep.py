# SPDX-License-Identifier: MIT
"""Sleep mode: weights on pages that can sleep, through vLLM's interface for sleep back ends.

The KV cache does not need this: when the scheduler is paused, `ElasticEngine.rest` frees all that
no request and no prefix holds, and vLLM resets the prefixes before it sleeps. The weights are
loaded into a `VMemPool`. Their addresses do not change, so CUDA graphs can be replayed.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from vllm.device_allocator.sleep_mode_backend import SleepModeBackend

from pyvmem.elastic.memory import open_context
from pyvmem.elastic.settings import Settings
from pyvmem.memory.info import Caps
from pyvmem.torch_pool.pool import VMemPool

__all__ = ["VMemSleepBackend", "loading_weights", "use_pool"]

_TAG = "weights"
_pools: list[VMemPool] = []  # of this process: torch has one allocator a device


def use_pool(pool: VMemPool) -> None:
    """Sets the pool of this process's weights; its owner closes it."""
    _pools[:] = [pool]


def loading_weights(settings: Settings, device: int) -> AbstractContextManager[Any]:
    """A context manager in which torch allocates tensors on pages that can sleep.

    Raises:
        RuntimeError: the back end has no memory that CUDA's copies accept, which loaders use.
    """
    if not _pools:
        context = open_context(settings.backend or "auto", device, settings.page_size, 0)
        if Caps.VISIBLE not in context.info.caps:
            backend = context.info.backend
            context.close()
            raise RuntimeError(
                f"enable_sleep_mode: VMEM_BACKEND={backend} has no memory that cudaMemcpy accepts, "
                "which vLLM loads weights by; use another back end or leave the option out"
            )
        use_pool(VMemPool(context))
    return _pools[0].use(_TAG)


class VMemSleepBackend(SleepModeBackend):  # type: ignore[misc]
    """The back end ``vmem``: level 1 keeps the weights in host memory, level 2 drops them."""

    def suspend(self, level: int = 1) -> None:
        """Frees the weights' device memory; a further call frees memory added since.

        Raises:
            VMemError: out of host memory, or the driver refused; nothing changed.
        """
        for pool in _pools:
            pool.pause(_TAG, keep=level == 1)
        self._state = "SUSPENDED"

    def resume(self, tags: list[str] | None = None) -> None:
        """Maps the weights again, if `tags` has ``weights`` or is None; of level 2 as zeros.

        Raises:
            OutOfMemory: the device has not enough memory now; the weights still sleep.
        """
        self._state = "RESUMING"
        if tags is None or _TAG in tags:
            for pool in _pools:
                if _TAG in pool.paused:
                    pool.resume(_TAG)
        self._state = "SUSPENDED" if any(_TAG in pool.paused for pool in _pools) else "RUNNING"

    def discard(self, tags: tuple[str, ...]) -> None:
        """Drops memory with these tags; the KV cache's was freed when prefixes were reset."""
        if _TAG in tags:
            self.suspend(level=2)
        self._state = "SUSPENDED"

    @classmethod
    def preserves_communicators(cls) -> bool:
        """Their buffers are elsewhere."""
        return True

    @classmethod
    def preserves_compiled_artifacts(cls) -> bool:
        """Only memory is given back."""
        return True
