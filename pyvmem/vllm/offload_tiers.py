# SPDX-License-Identifier: MIT
"""An offloading spec with our copies to host memory and vLLM's tiers (disk, peers) below it.

The tiers run in the scheduler's process and access only host memory, never the KV cache. Host
memory is a file in /dev/shm that this process and the workers map. The file is unlinked once all
processes have mapped it, so that it does not outlive a killed engine.
"""

from __future__ import annotations

import inspect
import os
from typing import Any

from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

from pyvmem.vllm.offload_spec import OffloadingSpecMixin, Shared

__all__ = ["VMemTieringSpec"]


class VMemTieringSpec(OffloadingSpecMixin, TieringOffloadingSpec):  # type: ignore[misc]
    """vLLM's `TieringOffloadingSpec`, with a worker that copies to and from plain addresses."""

    _scheduler_mmap: Any

    def __init__(self, config: Any) -> None:
        if "num_chunks" not in inspect.signature(SharedOffloadRegion).parameters:
            raise NotImplementedError(
                "spec_name=TieringOffloadingSpec: VMEM_VLLM=1 supports only the way in which vLLM "
                "0.32 and 0.33 share host memory; CPUOffloadingSpec works"
            )
        super().__init__(config)

    def get_manager(self) -> Any:
        """Creates the manager and unlinks the file that holds the host memory.

        Runs in the scheduler's process. Overrides `TieringOffloadingSpec.get_manager`.

        Raises:
            RuntimeError: the workers have not opened the file yet.
        """
        made = self._manager is not None
        manager = super().get_manager()
        region = self._scheduler_mmap
        if not made:
            if region._creator:
                region.cleanup()
                raise RuntimeError("vLLM opens tiered host memory in its scheduler first")
            os.unlink(region.mmap_path)
        return manager

    def shared(self) -> Shared:
        """Maps the host memory into this worker's process and returns this rank's part of it."""
        rank = 0 if self.replicated_layout else self.config.parallel.rank
        region = SharedOffloadRegion(
            engine_id=self._engine_id,
            num_chunks=self.chunks,
            rank=rank,
            kv_bytes_per_chunk=self.kv_bytes_per_chunk,
            cpu_page_size=self.cpu_page_size_per_worker,
        )

        def close() -> None:
            region._creator = region._creator and os.path.exists(region.mmap_path)
            region.cleanup()

        row = int(self.kv_bytes_per_chunk)
        return Shared(region.mmap_obj, row, rank * self.cpu_page_size_per_worker, close)
