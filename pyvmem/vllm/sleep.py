# SPDX-License-Identifier: MIT
"""A sleep back end for vLLM's weights, in the worker's process.

The weights are loaded into a `VMemPool`, which can free their memory and keep their addresses so
that CUDA graphs stay valid. The KV cache needs no back end: vLLM resets the prefixes before it
sleeps, and a paused `ElasticEngine` frees all memory that no request or prefix holds.
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
_pools: list[VMemPool] = []  # at most one pool: torch has one allocator per device


def use_pool(pool: VMemPool) -> None:
    """Sets the pool for the weights of this process; the caller owns it."""
    _pools[:] = [pool]


def loading_weights(settings: Settings, device: int) -> AbstractContextManager[Any]:
    """Returns a context manager in which torch allocates the weights from the pool.

    Raises:
        RuntimeError: CUDA's copies, which weight loaders use, reject this back end's memory.
    """
    if not _pools:
        context = open_context(settings.backend or "auto", device, settings.page_size, 0)
        if Caps.VISIBLE not in context.info.caps:
            backend = context.info.backend
            context.close()
            raise RuntimeError(
                "enable_sleep_mode: vLLM loads weights with cudaMemcpy, which cannot access memory "
                f"of VMEM_BACKEND={backend}; use another back end or drop the option"
            )
        use_pool(VMemPool(context))
    return _pools[0].use(_TAG)


class VMemSleepBackend(SleepModeBackend):  # type: ignore[misc]
    """The sleep back end ``vmem``: level 1 keeps the weights in host memory, level 2 drops them."""

    def suspend(self, level: int = 1) -> None:
        """Frees the weights' device memory; a second call frees memory allocated since the first.

        Overrides `SleepModeBackend.suspend`.

        Raises:
            VMemError: host memory ran out, or a driver call failed; nothing changed.
        """
        for pool in _pools:
            pool.pause(_TAG, keep=level == 1)
        self._state = "SUSPENDED"

    def resume(self, tags: list[str] | None = None) -> None:
        """Maps the weights again if `tags` contains ``weights`` or is None.

        After level 2, the weights are zeros. Overrides `SleepModeBackend.resume`.

        Raises:
            OutOfMemory: the device does not have enough free memory; the weights stay asleep.
        """
        self._state = "RESUMING"
        if tags is None or _TAG in tags:
            for pool in _pools:
                if _TAG in pool.paused:
                    pool.resume(_TAG)
        self._state = "SUSPENDED" if any(_TAG in pool.paused for pool in _pools) else "RUNNING"

    def discard(self, tags: tuple[str, ...]) -> None:
        """Drops the weights if `tags` contains ``weights``; the KV cache is freed elsewhere.

        Overrides `SleepModeBackend.discard`.
        """
        if _TAG in tags:
            self.suspend(level=2)
        self._state = "SUSPENDED"

    @classmethod
    def preserves_communicators(cls) -> bool:
        """Returns true: the communicators' buffers are not in memory that sleep frees."""
        return True

    @classmethod
    def preserves_compiled_artifacts(cls) -> bool:
        """Returns true: the memory is freed, but its addresses do not change."""
        return True
