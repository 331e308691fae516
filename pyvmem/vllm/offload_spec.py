# SPDX-License-Identifier: MIT
"""An offloading spec for vLLM's OffloadingConnector: vLLM's manager and policies, our copies.

vLLM imports this module by the configuration (`spec_module_path`), in the process of the scheduler
and in those of the workers. `offload.select` puts it there.
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


class _Group(NamedTuple):
    """The tensors of a group of layers, as columns of int64.

    Attributes:
        base: address.
        stride: bytes from a block to the next.
        offset: of its part in a chunk.
        size: bytes of a block in a chunk.
        copied: bytes of a block that are copied.
    """

    base: Any
    stride: Any
    offset: Any
    size: Any
    copied: Any


class _Places(NamedTuple):
    """A transfer.

    Attributes:
        groups: of each group blocks, their chunks, and their places in them; None: it has none.
        nbytes: of all pieces.
    """

    groups: Sequence[tuple[Any, Any, Any] | None]
    nbytes: int


class _Direction:
    """The transfers of one direction, the oldest first.

    Those of a step are held and start as one copy: a copy takes the host a good part of a
    millisecond, however small it is, and a step of 16 requests may store a block of each.

    Args:
        pieces: what several transfers copy.
    """

    def __init__(self, pieces: Callable[[Sequence[_Places]], Pieces]) -> None:
        self.copies: Copies | None = None
        self._pieces = pieces
        self._lock = threading.Lock()  # memory is given back in other threads
        self._held: list[tuple[int, _Places]] = []
        self._after: Any = None  # what they have to wait for
        self._under_way: deque[tuple[list[tuple[int, int]], Copy]] = deque()

    def hold(self, number: int, places: _Places) -> None:
        """A transfer is to start, after the work launched so far."""
        if self.copies is None:
            raise RuntimeError("a KV transfer before the engine's memory is known")
        with self._lock:
            self._held.append((number, places))
            self._after = self.copies.now()

    def start(self) -> None:
        """Starts the transfers that are held."""
        with self._lock:
            held, self._held = self._held, []
            if not held or self.copies is None:
                return
            copy = self.copies.start(self._pieces([places for _, places in held]), self._after)
            sizes = [(number, places.nbytes) for number, places in held]
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
        """Starts what is held, and returns the events of all copies."""
        self.start()
        return self.copies.events() if self.copies is not None else ()

    def fence(self, stream: Any) -> None:
        """Starts what is held, and makes a stream wait for all copies."""
        self.start()
        if self.copies is not None:
            self.copies.fence(stream)

    def close(self) -> None:
        """Ends the copies; held transfers are given up."""
        if self.copies is not None:
            self.copies.close()
        self.copies = None
        self._held.clear()
        self._under_way.clear()


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
        """The engine's memory is known; transfers may start. Returns what it has to wait for."""
        self._out.copies, self._in.copies = out, into
        return self._out, self._in

    def _places(self, device: Any, host: Any) -> _Places:
        """The blocks and chunks of a transfer, checked."""
        per, at, at_chunk, nbytes = self._blocks_per_chunk, 0, 0, 0
        found: list[tuple[Any, Any, Any] | None] = []
        for group, count, index in zip(
            self._groups, device.group_sizes, device.block_indices, strict=True
        ):
            if not count:
                found.append(None)
                continue
            # The first chunk of a group may be used from its middle on.
            places = index % per + np.arange(count)
            chunks = host.block_ids[at_chunk + places // per].astype(np.int64)
            found.append((device.block_ids[at : at + count].astype(np.int64), chunks, places % per))
            nbytes += count * int(group.copied.sum())
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
        return _Places(found, nbytes)

    def _pieces(self, transfers: Sequence[_Places]) -> Pieces:
        """The pieces of transfers between blocks and chunks."""
        found = [(np.empty(0, dtype=np.int64),) * 3]
        for number, group in enumerate(self._groups):
            parts = [part for one in transfers if (part := one.groups[number]) is not None]
            if parts:
                blocks, chunks, places = map(np.concatenate, zip(*parts, strict=True))
                device = group.base + blocks * group.stride
                within = group.offset + places * group.size
                host = self._first + chunks * self._row + within
                copied = np.broadcast_to(group.copied, device.shape)
                found.append((device.ravel(), host.ravel(), copied.ravel()))
        return Pieces(*map(np.concatenate, zip(*found, strict=True)))

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        """A copy to host memory starts with the step's others, unless its source is given up."""
        if job_id in self.dropped:
            self.dropped.discard(job_id)
            self._skipped.append(TransferResult(job_id=job_id, success=True))
        else:
            self._out.hold(job_id, self._places(src_spec, dst_spec))
        return True

    def submit_load(
        self, job_id: int, src_spec: Any, dst_spec: Any, expedited: bool = False
    ) -> bool:
        """Starts a copy from host memory."""
        self._in.hold(job_id, self._places(dst_spec, src_spec))
        self._in.start()
        return True

    def get_finished(self) -> list[TransferResult]:
        """Transfers that have ended since the last call."""
        self._out.start()
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
