# SPDX-License-Identifier: MIT
"""Our offloading spec for host memory: vLLM's manager and policies with our copies.

vLLM's OffloadingConnector imports this module in the scheduler's process and the workers', since
`offload.select` sets it as `spec_module_path`.
"""

from __future__ import annotations

import dataclasses
import mmap
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

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

__all__ = ["DROPPED", "HELD", "OffloadingSpecMixin", "Shared", "Transferrer", "VMemOffloadingSpec"]

DROPPED = "vmem:kv_offload_dropped_blocks"
HELD = "vmem:kv_offload_held_blocks"


@dataclass
class Shared:
    """Host memory that several processes map.

    Attributes:
        memory: the whole mapping.
        row: bytes from the start of one chunk to the start of the next.
        first: offset of this rank's part of the first chunk, in bytes.
        close: a function that unmaps the memory.
    """

    memory: mmap.mmap
    row: int
    first: int
    close: Callable[[], None]


class OffloadingSpecMixin:
    """A mixin that adds our metrics and our worker to vLLM's offloading specs.

    The worker copies to and from plain addresses.
    """

    _worker: Any

    @classmethod
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, Any]:
        """Adds our two metrics to the metrics of vLLM's spec.

        Overrides `OffloadingSpec.build_metric_definitions`.
        """
        found: dict[str, Any] = super().build_metric_definitions(extra_config)  # type: ignore[misc]
        found[DROPPED] = OffloadingCounterMetadata(
            documentation="Blocks whose store was dropped because their memory was freed first."
        )
        found[HELD] = OffloadingGaugeMetadata(
            documentation="Blocks kept in memory until they are stored."
        )
        return found

    def __init__(self, config: Any) -> None:
        if BLOCK_BYTES in config.extra_config:
            own = config.extra_config[BLOCK_BYTES]
            config = dataclasses.replace(config, worker_kv_bytes_per_block=own)
        super().__init__(config)  # type: ignore[call-arg]
        spec: Any = self
        # vLLM renamed the attribute in 0.28.
        self.chunks = int(spec.num_chunks if hasattr(self, "num_chunks") else spec.num_blocks)
        if spec.kv_bytes_per_chunk and not self.chunks:
            asked = int(spec.extra_config["cpu_bytes_to_use"])
            raise ValueError(
                f"kv_offloading_size, {asked} bytes, is below one block of all ranks, "
                f"{spec.kv_bytes_per_chunk} bytes"
            )

    def get_manager(self) -> Any:
        """Creates vLLM's manager and sets its `chunk_bytes` to a rank's part of a chunk.

        Runs in the scheduler's process. Overrides `OffloadingSpec.get_manager`.
        """
        manager = super().get_manager()  # type: ignore[misc]
        manager.chunk_bytes = self.cpu_page_size_per_worker  # type: ignore[attr-defined]
        return manager

    def shared(self) -> Shared | None:
        """Returns the host memory that all ranks share, or None if each rank has its own."""
        return None

    def get_worker(self, kv_caches: Any) -> OffloadingWorker:
        """Returns this rank's `Transferrer`, created by the first call.

        Runs in the worker's process. Overrides `OffloadingSpec.get_worker`.
        """
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


class VMemOffloadingSpec(OffloadingSpecMixin, CPUOffloadingSpec):  # type: ignore[misc]
    """vLLM's `CPUOffloadingSpec`, with a worker that copies to and from plain addresses."""

    def _uses_shared_region(self) -> bool:
        """Returns false: a file in /dev/shm would outlive a killed engine.

        Overrides `CPUOffloadingSpec._uses_shared_region`.
        """
        return False


class _Group(NamedTuple):
    """The tensors of a layer group; each attribute is an int64 column with a value per tensor.

    Attributes:
        base: address of the tensor.
        stride: bytes from the start of a block to the start of the next.
        offset: offset of the tensor's blocks in a chunk, in bytes.
        size: bytes that a block occupies in a chunk.
        copied: bytes that are copied per block.
    """

    base: Any
    stride: Any
    offset: Any
    size: Any
    copied: Any


class _Transfer(NamedTuple):
    """The blocks and chunks of a transfer.

    Attributes:
        groups: for each group, three arrays: its blocks, their chunks, and their indices in these
            chunks. None for a group without blocks.
        nbytes: number of bytes to copy.
    """

    groups: Sequence[tuple[Any, Any, Any] | None]
    nbytes: int


class _Direction:
    """Runs the transfers in one direction, in order.

    The transfers of a step are collected and started as a single copy, since starting a copy takes
    the host most of a millisecond regardless of its size, and a step of 16 requests may store a
    block for each request.

    Args:
        pieces: computes the pieces to copy for a list of transfers.
    """

    def __init__(self, pieces: Callable[[Sequence[_Transfer]], Pieces]) -> None:
        self.copies: Copies | None = None
        self._pieces = pieces
        self._lock = threading.Lock()  # also taken by threads that unmap memory
        self._held: list[tuple[int, _Transfer]] = []
        self._after: Any = None  # GPU work that the queued transfers must wait for
        self._under_way: deque[tuple[list[tuple[int, int]], Copy]] = deque()

    def hold(self, number: int, transfer: _Transfer) -> None:
        """Queues a transfer to run after the work launched so far."""
        if self.copies is None:
            raise RuntimeError("a KV transfer before the engine's memory is known")
        with self._lock:
            self._held.append((number, transfer))
            self._after = self.copies.now()

    def start(self) -> None:
        """Starts the queued transfers as one copy."""
        with self._lock:
            held, self._held = self._held, []
            if not held or self.copies is None:
                return
            copy = self.copies.start(self._pieces([transfer for _, transfer in held]), self._after)
            sizes = [(number, one.nbytes) for number, one in held]
            self._under_way.append((sizes, copy))

    def ended(self) -> list[TransferResult]:
        found = []
        while self._under_way and self._under_way[0][1].ready():
            sizes, copy = self._under_way.popleft()
            if copy.error is not None:
                raise RuntimeError(f"a KV transfer of {copy.nbytes} bytes failed") from copy.error
            seconds = copy.seconds() / max(1, copy.nbytes)
            for number, nbytes in sizes:
                found.append(
                    TransferResult(
                        job_id=number,
                        success=True,
                        transfer_size=nbytes,
                        transfer_time=seconds * nbytes,
                    )
                )
        return found

    def wait(self, numbers: set[int]) -> None:
        self.start()
        for sizes, copy in self._under_way:
            if not numbers.isdisjoint(number for number, _ in sizes):
                copy.wait()

    def events(self) -> tuple[Any, ...]:
        """Starts queued transfers and returns the events of all copies."""
        self.start()
        return self.copies.events() if self.copies is not None else ()

    def fence(self, stream: Any) -> None:
        """Starts queued transfers and makes a stream wait for all copies."""
        self.start()
        if self.copies is not None:
            self.copies.fence(stream)

    def close(self) -> None:
        """Waits for the copies and discards queued transfers."""
        if self.copies is not None:
            self.copies.close()
        self.copies = None
        self._held.clear()
        self._under_way.clear()


class Transferrer(OffloadingWorker):  # type: ignore[misc]
    """Stores and loads the blocks of a rank, in its worker's process.

    A chunk of host memory contains `blocks_per_chunk` blocks of every tensor, tensor by tensor.

    Args:
        kv_caches: vLLM's `CanonicalKVCaches`.
        blocks_per_chunk: number of blocks of each tensor in a chunk.
        chunks: number of chunks in host memory.
        chunk_bytes: size of this rank's part of a chunk in bytes, as computed by the spec.
        shared: host memory to use; None to allocate it.

    Raises:
        MemoryError: host memory cannot be allocated.
        ValueError: a chunk needs more than `chunk_bytes`.
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
        sizes = [one.page_size_bytes for one in kv_caches.tensors]
        ends = np.cumsum(sizes) * blocks_per_chunk
        used = int(ends[-1])
        if used > chunk_bytes:
            raise ValueError(
                f"a chunk for KV offloading has {used} bytes, vLLM counted {chunk_bytes}"
            )
        rows = np.array(
            [
                [one.data_ptr() for one in tensors],
                [one.stride(0) * one.element_size() for one in tensors],
                [0, *ends.tolist()][:-1],
                sizes,
            ],
            dtype=np.int64,
        )
        self._groups = []
        for group in kv_caches.group_data_refs:
            copied = np.array([[one.page_size_bytes for one in group]], dtype=np.int64)
            of_group = rows[:, [one.tensor_idx for one in group]]
            self._groups.append(_Group(*np.concatenate([of_group, copied])[:, :, None]))
        self._shared, locked = shared, tensors[0].device.type == "cuda"
        if shared is None:
            self._host, self._row = HostMemory(used * chunks, locked), used
            self._first = self._host.addr
        else:
            self._host = HostMemory(len(shared.memory), locked, shared.memory)
            self._row, self._first = shared.row, self._host.addr + shared.first
        self._out, self._in = _Direction(self._pieces), _Direction(self._pieces)
        self._skipped: list[TransferResult] = []
        self.dropped: set[int] = set()

    def begin(self, out: Copies, into: Copies) -> tuple[_Direction, _Direction]:
        """Enables transfers, given the copies to and from host memory.

        Returns:
            The two directions; a page may be unmapped only after the events of both.
        """
        self._out.copies, self._in.copies = out, into
        return self._out, self._in

    def _match(self, device: Any, host: Any) -> _Transfer:
        """Matches the blocks of a transfer with their chunks.

        Raises:
            ValueError: vLLM's two specs do not match, or name a chunk that does not exist.
        """
        per, at, at_chunk, nbytes = self._blocks_per_chunk, 0, 0, 0
        found: list[tuple[Any, Any, Any] | None] = []
        for group, count, index in zip(
            self._groups, device.group_sizes, device.block_indices, strict=True
        ):
            if not count:
                found.append(None)
                continue
            # A group may start in the middle of its first chunk.
            nth = index % per + np.arange(count)
            chunks = host.block_ids[at_chunk + nth // per].astype(np.int64)
            found.append((device.block_ids[at : at + count].astype(np.int64), chunks, nth % per))
            nbytes += count * int(group.copied.sum())
            at += count
            at_chunk += int(nth[-1]) // per + 1
        if at != len(device.block_ids) or at_chunk != len(host.block_ids):
            raise ValueError(
                f"a KV transfer of {len(device.block_ids)} blocks and {len(host.block_ids)} "
                f"chunks, of which {at} and {at_chunk} match"
            )
        if at_chunk and int(host.block_ids.max()) >= self._chunks:
            raise ValueError(
                f"a KV transfer of chunk {host.block_ids.max()}; host memory has {self._chunks}"
            )
        return _Transfer(found, nbytes)

    def _pieces(self, transfers: Sequence[_Transfer]) -> Pieces:
        """Returns the pieces of memory that these transfers copy: addresses and sizes in bytes."""
        found: list[tuple[Any, Any, Any]] = []
        for number, group in enumerate(self._groups):
            parts = [part for one in transfers if (part := one.groups[number]) is not None]
            if parts:
                blocks, chunks, nth = map(np.concatenate, zip(*parts, strict=True))
                device = group.base + blocks * group.stride
                within = group.offset + nth * group.size
                host = self._first + chunks * self._row + within
                copied = np.broadcast_to(group.copied, device.shape)
                found.append((device.ravel(), host.ravel(), copied.ravel()))
        if len(found) == 1:  # copying the addresses would take longer than computing them
            return Pieces(*found[0])
        nothing = (np.empty(0, dtype=np.int64),) * 3
        return Pieces(*map(np.concatenate, zip(nothing, *found, strict=True)))

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        """Queues a copy to host memory, which starts with the other stores of its step.

        Skips the copy if its store was dropped. Overrides `OffloadingWorker.submit_store`.
        """
        if job_id in self.dropped:
            self.dropped.discard(job_id)
            self._skipped.append(TransferResult(job_id=job_id, success=True))
        else:
            self._out.hold(job_id, self._match(src_spec, dst_spec))
        return True

    def submit_load(
        self, job_id: int, src_spec: Any, dst_spec: Any, expedited: bool = False
    ) -> bool:
        """Starts a copy from host memory. Overrides `OffloadingWorker.submit_load`."""
        self._in.hold(job_id, self._match(dst_spec, src_spec))
        self._in.start()
        return True

    def get_finished(self) -> list[TransferResult]:
        """Starts queued stores and returns the transfers that finished since the last call.

        Overrides `OffloadingWorker.get_finished`.
        """
        self._out.start()
        skipped, self._skipped = self._skipped, []
        return skipped + self._out.ended() + self._in.ended()

    def wait(self, job_ids: set[int]) -> None:
        """Waits until these transfers are done. Overrides `OffloadingWorker.wait`."""
        self._out.wait(job_ids)
        self._in.wait(job_ids)

    def shutdown(self) -> None:
        """Waits for all transfers and frees host memory. Overrides `OffloadingWorker.shutdown`."""
        self._out.close()
        self._in.close()
        self._host.close()
        if self._shared is not None:
            self._shared.close()
            self._shared = None
