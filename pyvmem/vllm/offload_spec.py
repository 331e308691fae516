# SPDX-License-Identifier: MIT
"""An offloading spec for vLLM's OffloadingConnector: vLLM's manager and policies, our copies.

vLLM imports this module by the configuration (`spec_module_path`), in the process of the scheduler
and in those of the workers. `offload.select` puts it there.
"""

from __future__ import annotations

import dataclasses
import mmap
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from vllm.v1.kv_offload.base import (
    OffloadingCounterMetadata,
    OffloadingGaugeMetadata,
    OffloadingWorker,
    TransferResult,
)
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec

from pyvmem.memory.host_copies import Copies, Copy, HostMemory, Pieces
from pyvmem.vllm.offload import BLOCK_BYTES

__all__ = ["DROPPED", "HELD", "OurCopies", "Shared", "Transferrer", "VMemOffloadingSpec"]

DROPPED = "vmem:kv_offload_dropped_blocks"
HELD = "vmem:kv_offload_held_blocks"


@dataclass
class Shared:
    """Host memory that other processes have, too.

    Attributes:
        memory: all of it.
        row: bytes from a chunk to the next.
        first: where this rank's first chunk begins.
        close: gives it back.
    """

    memory: mmap.mmap
    row: int
    first: int
    close: Callable[[], None]


class OurCopies:
    """A spec of vLLM's, whose worker copies from and to plain addresses."""

    _worker: Any

    @classmethod
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, Any]:
        """VLLM's, and what was given up for memory's sake."""
        found: dict[str, Any] = super().build_metric_definitions(extra_config)  # type: ignore[misc]
        found[DROPPED] = OffloadingCounterMetadata(
            documentation="Blocks whose store was given up, since their memory went first."
        )
        found[HELD] = OffloadingGaugeMetadata(
            documentation="Blocks whose memory stays until they are stored."
        )
        return found

    def __init__(self, config: Any) -> None:
        if BLOCK_BYTES in config.extra_config:
            own = config.extra_config[BLOCK_BYTES]
            config = dataclasses.replace(config, worker_kv_bytes_per_block=own)
        super().__init__(config)  # type: ignore[call-arg]
        spec: Any = self
        # vLLM renamed it in 0.28.
        self.chunks = int(spec.num_chunks if hasattr(self, "num_chunks") else spec.num_blocks)
        if spec.kv_bytes_per_chunk and not self.chunks:
            asked = int(spec.extra_config["cpu_bytes_to_use"])
            raise ValueError(
                f"kv_offloading_size, {asked} bytes, is below one block of all ranks, "
                f"{spec.kv_bytes_per_chunk} bytes"
            )

    def get_manager(self) -> Any:
        """VLLM's, which also knows the bytes of a chunk on each rank."""
        manager = super().get_manager()  # type: ignore[misc]
        manager.chunk_bytes = self.cpu_page_size_per_worker  # type: ignore[attr-defined]
        return manager

    def shared(self) -> Shared | None:
        """Host memory that is the engine's, None where each rank has its own."""
        return None

    def get_worker(self, kv_caches: Any) -> OffloadingWorker:
        """The worker of this rank, made once."""
        if self._worker is None:
            spec: Any = self
            self._worker = Transferrer(
                kv_caches,
                spec.blocks_per_chunk,
                self.chunks,
                spec.cpu_page_size_per_worker,
                self.shared(),
            )
        return self._worker


class VMemOffloadingSpec(OurCopies, CPUOffloadingSpec):  # type: ignore[misc]
    """VLLM's spec for host memory, whose worker copies from and to plain addresses."""

    def _uses_shared_region(self) -> bool:
        """False: a file in /dev/shm would outlive a killed engine."""
        return False


class _Direction:
    """The transfers of one direction, the oldest first."""

    def __init__(self) -> None:
        self.copies: Copies | None = None
        self.under_way: deque[tuple[int, Copy]] = deque()

    def start(self, number: int, pieces: Pieces) -> None:
        if self.copies is None:
            raise RuntimeError("a KV transfer before the engine's memory is known")
        self.under_way.append((number, self.copies.start(pieces)))

    def ended(self) -> list[TransferResult]:
        found = []
        while self.under_way and self.under_way[0][1].ready():
            number, copy = self.under_way.popleft()
            if copy.error is not None:
                raise RuntimeError(f"a KV transfer of {copy.nbytes} bytes failed") from copy.error
            found.append(
                TransferResult(
                    job_id=number,
                    success=True,
                    transfer_size=copy.nbytes,
                    transfer_time=copy.seconds(),
                )
            )
        return found

    def wait(self, numbers: set[int]) -> None:
        for number, copy in self.under_way:
            if number in numbers:
                copy.wait()

    def close(self) -> None:
        if self.copies is not None:
            self.copies.close()
        self.copies = None
        self.under_way.clear()


class Transferrer(OffloadingWorker):  # type: ignore[misc]
    """Stores and loads the blocks of a rank.

    A chunk of host memory is `blocks_per_chunk` blocks of every tensor, tensor by tensor.

    Args:
        kv_caches: vLLM's description of the KV tensors.
        blocks_per_chunk: as the spec has it.
        chunks: how many.
        chunk_bytes: of this rank, as the spec counted them.
        shared: host memory to use; None: this process's own.

    Raises:
        MemoryError: host memory cannot be had.
        ValueError: vLLM's description needs more than was counted.
    """

    def __init__(
        self,
        kv_caches: Any,
        blocks_per_chunk: int,
        chunks: int,
        chunk_bytes: int,
        shared: Shared | None = None,
    ) -> None:
        tensors = [one.tensor for one in kv_caches.tensors]
        self._blocks_per_chunk, self._chunks = blocks_per_chunk, chunks
        self._base = [one.data_ptr() for one in tensors]
        self._stride = [one.stride(0) * one.element_size() for one in tensors]
        self._bytes = [one.page_size_bytes for one in kv_caches.tensors]
        ends = np.cumsum(self._bytes) * blocks_per_chunk
        self._offset = [0, *ends.tolist()][:-1]
        used = int(ends[-1])
        if used > chunk_bytes:
            raise ValueError(
                f"a chunk for KV offloading has {used} bytes, vLLM counted {chunk_bytes}"
            )
        self._refs = [
            [(one.tensor_idx, one.page_size_bytes) for one in group]
            for group in kv_caches.group_data_refs
        ]
        self._shared, locked = shared, tensors[0].device.type == "cuda"
        if shared is None:
            self._host, self._row = HostMemory(used * chunks, locked), used
            self._first = self._host.addr
        else:
            self._host = HostMemory(len(shared.memory), locked, shared.memory)
            self._row, self._first = shared.row, self._host.addr + shared.first
        self._out, self._in = _Direction(), _Direction()
        self._skipped: list[TransferResult] = []
        self.dropped: set[int] = set()

    def begin(self, out: Copies, into: Copies) -> None:
        """The engine's memory is known; transfers may start."""
        self._out.copies, self._in.copies = out, into

    def _pieces(self, device: Any, host: Any) -> Pieces:
        """What a transfer between blocks and chunks copies."""
        per, at, at_chunk = self._blocks_per_chunk, 0, 0
        device_addrs, host_addrs, sizes = [], [], []
        for refs, count, index in zip(
            self._refs, device.group_sizes, device.block_indices, strict=True
        ):
            if not count:
                continue
            # The first chunk of a group may be used from its middle on.
            places = index % per + np.arange(count)
            chunks = host.block_ids[at_chunk + places // per].astype(np.int64)
            blocks = device.block_ids[at : at + count].astype(np.int64)
            for tensor, size in refs:
                device_addrs.append(self._base[tensor] + blocks * self._stride[tensor])
                within = self._offset[tensor] + places % per * self._bytes[tensor]
                host_addrs.append(self._first + chunks * self._row + within)
                sizes.append(np.full(count, size))
            at += count
            at_chunk += int(places[-1]) // per + 1
        if at != len(device.block_ids) or at_chunk != len(host.block_ids):
            raise ValueError(
                f"a KV transfer of {len(device.block_ids)} blocks and {len(host.block_ids)} "
                f"chunks, of which {at} and {at_chunk} match"
            )
        if at_chunk and int(host.block_ids.max()) >= self._chunks:
            raise ValueError(
                f"a KV transfer of chunk {host.block_ids.max()}; host memory has {self._chunks}"
            )
        none = [np.empty(0, dtype=np.int64)]
        return Pieces(*(np.concatenate(one or none) for one in (device_addrs, host_addrs, sizes)))

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        """Starts a copy to host memory, unless its source has been given up."""
        if job_id in self.dropped:
            self.dropped.discard(job_id)
            self._skipped.append(TransferResult(job_id=job_id, success=True))
        else:
            self._out.start(job_id, self._pieces(src_spec, dst_spec))
        return True

    def submit_load(
        self, job_id: int, src_spec: Any, dst_spec: Any, expedited: bool = False
    ) -> bool:
        """Starts a copy from host memory."""
        self._in.start(job_id, self._pieces(dst_spec, src_spec))
        return True

    def get_finished(self) -> list[TransferResult]:
        """Transfers that have ended since the last call."""
        skipped, self._skipped = self._skipped, []
        return skipped + self._out.ended() + self._in.ended()

    def wait(self, job_ids: set[int]) -> None:
        """Returns when transfers have ended."""
        self._out.wait(job_ids)
        self._in.wait(job_ids)

    def shutdown(self) -> None:
        """Ends all transfers, and gives host memory back."""
        self._out.close()
        self._in.close()
        self._host.close()
        if self._shared is not None:
            self._shared.close()
            self._shared = None
