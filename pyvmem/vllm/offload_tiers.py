# SPDX-License-Identifier: MIT
"""vLLM's tiering over the pool: host memory by our copies, below it vLLM's own tiers (disk, peers).

The tiers read and write host memory, never the KV cache. It is shared by the scheduler's process,
where they run, and the workers, and has a name only while an engine starts.
"""

from __future__ import annotations

import inspect
import os
from typing import Any

from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

from pyvmem.vllm.offload_spec import OurCopies, Shared

__all__ = ["VMemTieringSpec"]


class VMemTieringSpec(OurCopies, TieringOffloadingSpec):  # type: ignore[misc]
    """VLLM's spec for several tiers, whose worker copies from and to plain addresses."""

    _scheduler_mmap: Any

    def __init__(self, config: Any) -> None:
        if "num_chunks" not in inspect.signature(SharedOffloadRegion).parameters:
            raise NotImplementedError(
                "spec_name=TieringOffloadingSpec: this vLLM shares host memory in another way than "
                "0.32 and 0.33, which VMEM_VLLM=1 knows; CPUOffloadingSpec works"
            )
        super().__init__(config)

    def get_manager(self) -> Any:
        """VLLM's; the workers have opened host memory before, so that it needs no name."""
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
        """This rank's part of host memory."""
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
