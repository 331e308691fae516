# SPDX-License-Identifier: MIT
"""KV stores for a serving loop: slots of a `KVCache`, paged blocks, static slots.

A store holds tensors of rows and manages their memory. All stores have the same interface, so that
the loop, the model and the kernels do not depend on the store. Calls are timed; their sum is the
host time that a cache, or a block manager, costs its engine.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from pyvmem import KEEP_ALL, Context
from pyvmem.attention.reads import Blocks
from pyvmem.kvcache import KVCache, KVCacheConfig
from pyvmem.kvcache.distributed import ParallelKVCache
from vmem_bench.decoder import Sizes

__all__ = ["Held", "Paged", "SharedPaged", "Slots", "Static", "Store", "Table"]

# With more tensors than this, pages past a prompt's end stay mapped, because unmapping them takes
# separate calls for each tensor.
_FEW_TENSORS = 16
_RESERVE = 100  # keep 1 / _RESERVE of the pages for running requests, like vLLM's watermark of 1%

Ints = NDArray[np.int32]
Layers = list[tuple[torch.Tensor, torch.Tensor]]
_Call = TypeVar("_Call", bound=Callable[..., Any])


class Held(NamedTuple):
    """The number of mapped bytes, and how many of them requests hold."""

    mapped: int
    held: int


class Table(NamedTuple):
    """A paged kernel's view of a store: keys and values by layer, and each request's blocks.

    Attributes:
        layers: the keys and values of each layer, ``[blocks, block, kv_heads, head_dim]``.
        rows: rows per block.
        width: number of blocks in the longest request.
        of: returns the blocks of some slots, int32 ``[slots, width]``, given the slots' numbers on
            the device and the width.
    """

    layers: Layers
    rows: int
    width: int
    of: Callable[[torch.Tensor, int], torch.Tensor]


def _timed(call: _Call) -> _Call:
    @wraps(call)
    def timed(self: Store, *args: Any) -> Any:
        start = time.perf_counter_ns()
        try:
            return call(self, *args)
        finally:
            self.host_ns += time.perf_counter_ns() - start

    return timed  # type: ignore[return-value]


class Store(ABC):
    """Holds tensors of rows and manages their memory.

    Attributes:
        slots: maximum number of concurrent requests.
        longest: maximum number of tokens in a request.
        token_bytes: size of a token's keys and values across all layers.
        layers: keys and values ``[N, places, kv_heads, head_dim]``, to which rows are written.
        contiguous: true if a request's rows are ``layers[...][slot]``.
        table: the paged kernel's view; None if no paged kernel is used.
        host_ns: nanoseconds spent in this store's calls so far.
    """

    slots: int
    longest: int
    token_bytes: int
    layers: Layers
    contiguous: bool
    table: Table | None
    host_ns = 0

    @abstractmethod
    def take(self, ids: Ints) -> tuple[int, int] | None:
        """Allocates a slot for a request with these tokens.

        Returns the slot and how many of the request's rows exist already, or None if all slots are
        taken. Rows exist if the store shares prefixes and an earlier request started with the same
        tokens; the last token's row never exists.
        """

    @abstractmethod
    def release(self, slot: int, ids: Ints | None = None) -> None:
        """Frees a slot, which launched work may still be using.

        `ids`: the tokens of the slot's rows, so that a store that shares prefixes can keep the
        rows; None to keep none.
        """

    @abstractmethod
    def fits(self, partial: Sequence[tuple[int, int]], tokens: int) -> bool:
        """Returns whether a new request of `tokens` fits once the `partial` requests have grown.

        `partial`: slots, and the number of tokens that each will hold. The answer assumes that the
        new request does not share rows.
        """

    @abstractmethod
    def hold(self, slots: list[int], lengths: list[int]) -> bool:
        """Maps memory for these lengths. Returns False and changes nothing if memory is short."""

    def ahead(self, *asked: tuple[list[int], list[int]]) -> None:
        """Starts mapping the memory that the next `hold` of these slots will need.

        Args:
            asked: groups of slots and their lengths; a group never waits for a later group.
        """
        return  # this store does not map memory

    def ready(self, slot: int, tokens: int) -> bool:
        """Returns whether a `hold` of `tokens` would succeed without new memory."""
        return True

    def prompt_ends(self, slot: int, tokens: int) -> None:
        """Called once a slot's whole prompt is launched; may free memory mapped past its end."""
        return  # this store does not map memory

    def readable(self, slot: int) -> int:
        """Returns the number of rows of a contiguous slot that a kernel may read."""
        return self.longest

    def where(self, slots: Ints, positions: Ints) -> tuple[Ints, Ints]:
        """Returns the tokens' indices into the first two dimensions of `layers`."""
        return slots, positions

    def upload(self) -> None:
        """Copies the table entries of newly allocated blocks to the device before they are used."""
        return  # this store has no block table

    @abstractmethod
    def held(self) -> Held:
        """Returns how much memory is currently mapped and held."""

    def driver(self) -> dict[str, float]:
        """Returns the number of driver calls since `settle`, and the nanoseconds spent in them."""
        return {}

    def settle(self) -> None:
        """Frees memory left over from a warm-up, and resets the counters."""
        self.host_ns = 0

    def close(self) -> None:
        """Drops the tensors."""
        self.layers, self.table = [], None


def _trivial(layers: Layers, rows: int) -> Table:
    """Returns a table that presents contiguous slots as blocks, in order."""
    keys = layers[0][0]
    blocks = Blocks.of(keys.shape[1], keys.stride(0), keys.stride(1), rows)
    steps = torch.arange(blocks.per_slot, dtype=torch.int32, device=keys.device) * blocks.step

    def of(index: torch.Tensor, width: int) -> torch.Tensor:
        return index[:, None] * blocks.slot + steps[:width]

    views = [(blocks.view(k), blocks.view(v)) for k, v in layers]
    return Table(views, rows, blocks.per_slot, of)


class Slots(Store):
    """Slots of a `KVCache`.

    Args:
        config: configuration of the cache; its `overread_rows` match the kernel's `reads`.
        sizes: sizes of the model.
        block: rows per block for paged kernels, or 0 if none is used.
        prefixes: whether requests share prefixes.
        ranks: number of ranks; with several, each has a `ParallelKVCache` on torch's process group.
        options: `backend` and `device`.
    """

    contiguous = True

    def __init__(
        self,
        config: KVCacheConfig,
        sizes: Sizes,
        block: int,
        prefixes: bool = False,
        ranks: int = 1,
        **options: Any,
    ) -> None:
        self._ranks = ranks
        self._context: Context | None = None
        self.cache: KVCache | ParallelKVCache
        if ranks > 1:
            self.cache = ParallelKVCache(config, **options)
        else:  # like the other stores, never return memory to the driver
            self._context = Context(**options, granule=config.page_size, pool_high=KEEP_ALL)
            try:
                self.cache = KVCache(config, self._context)
            except BaseException:
                self._context.close()
                raise
        self._prefixes = prefixes
        self.slots, self.longest = config.max_batch, config.max_seq_len
        self.token_bytes = sizes.token_bytes
        numbers = range(sizes.layers)
        self.layers = [(self.cache.k(number), self.cache.v(number)) for number in numbers]
        self.table = _trivial(self.layers, block) if block else None
        self._lengths = [0] * self.slots
        self._taken = 0
        self._limit = config.memory_limit
        self._before = self.cache.stats()

    @_timed
    def take(self, ids: Ints) -> tuple[int, int] | None:
        """See `Store`."""
        found: tuple[int, int] | None
        if self._prefixes:
            found = self.cache.alloc_prefix(ids)
        else:
            slot = self.cache.alloc_reqid(len(ids))
            found = None if slot is None else (slot, 0)
        self._taken += found is not None
        return found

    @_timed
    def release(self, slot: int, ids: Ints | None = None) -> None:
        """See `Store`."""
        self.cache.free_reqid(slot, tokens=ids if self._prefixes else None)
        self._taken -= 1

    @_timed
    def fits(self, partial: Sequence[tuple[int, int]], tokens: int) -> bool:
        """See `Store`; counts pages.

        While requests run, some pages are reserved for them. The next step is planned before a
        request's last step has finished, and only then are the request's pages returned.
        """
        memory, page = self.cache.memory, self.cache.layout.page_size
        missing = memory.for_request(None, tokens)
        missing += sum(memory.for_request(slot, length) for slot, length in partial)
        reserve = self._limit // page // _RESERVE * page if self._taken else 0
        return missing + reserve <= memory.obtainable()[0]

    def _by_slot(self, slots: list[int], lengths: list[int]) -> list[int]:
        out = self._lengths.copy()
        for slot, length in zip(slots, lengths, strict=True):
            out[slot] = length
        return out

    @_timed
    def hold(self, slots: list[int], lengths: list[int]) -> bool:
        """See `Store`."""
        return self.cache.step(self._by_slot(slots, lengths)) == 0

    @_timed
    def ahead(self, *asked: tuple[list[int], list[int]]) -> None:
        """See `Store`; if memory is short, the next `hold` returns false.

        With several ranks, all slots share one call, because a second `step_async` would wait for
        the first, and `step` for both.
        """
        if self._ranks > 1:
            slots, lengths = ([one for part in asked for one in part[i]] for i in range(2))
            asked = ((slots, lengths),)
        for slots, lengths in asked:
            self.cache.step_async(self._by_slot(slots, lengths))

    @_timed
    def ready(self, slot: int, tokens: int) -> bool:
        """See `Store`."""
        return self.cache.slots.is_ready(slot, tokens)

    @_timed
    def prompt_ends(self, slot: int, tokens: int) -> None:
        """See `Store`. With many tensors the pages stay mapped, and the request grows into them."""
        if self.cache.layout.num_tensors <= _FEW_TENSORS:
            self.cache.truncate(slot, tokens)

    @_timed
    def readable(self, slot: int) -> int:
        """See `Store`."""
        return self.cache.slots.readable_rows([slot])[0]

    def held(self) -> Held:
        """See `Store`."""
        stats = self.cache.stats()
        return Held(stats.mapped_bytes, stats.active_pages * self.cache.layout.page_size)

    def driver(self) -> dict[str, float]:
        """See `Store`."""
        stats, before = self.cache.stats(), self._before
        names = ("driver_calls", "critical_driver_ns", "background_driver_ns", "wait_ns")
        return {name: getattr(stats, name) - getattr(before, name) for name in names}

    def settle(self) -> None:
        """See `Store`; allocates all memory from the driver, as other stores do when created.

        First, torch's cache is emptied: it keeps the memory that a warm-up freed, and would release
        it only for torch's own allocations.
        """
        torch.cuda.empty_cache()
        self.cache.trim()
        if (
            self._ranks == 1
        ):  # with several ranks, the cache allocated all memory when the ranks agreed on it
            self.cache.context.warm(self._limit)
        super().settle()
        self._before = self.cache.stats()

    def close(self) -> None:
        """See `Store`."""
        super().close()
        self.cache.close()
        if self._context is not None:
            self._context.close()


class Static(Store):
    """As many slots as the limit allows, each with memory for the longest request."""

    contiguous = True

    def __init__(
        self, sizes: Sizes, longest: int, slots: int, limit: int, block: int, device: torch.device
    ) -> None:
        self.longest, self.token_bytes = longest, sizes.token_bytes
        self.slots = min(slots, limit // (longest * sizes.token_bytes))
        if not self.slots:
            raise ValueError(f"{limit:,} bytes are too few for a request of {longest:,} tokens")
        self.layers = _allocate(sizes, self.slots, longest, device)
        self.table = _trivial(self.layers, block) if block else None
        self._free = list(range(self.slots))

    @_timed
    def take(self, ids: Ints) -> tuple[int, int] | None:
        """See `Store`."""
        return (self._free.pop(), 0) if self._free else None

    @_timed
    def release(self, slot: int, ids: Ints | None = None) -> None:
        """See `Store`."""
        self._free.append(slot)

    def fits(self, partial: Sequence[tuple[int, int]], tokens: int) -> bool:
        """See `Store`."""
        return bool(self._free)

    def hold(self, slots: list[int], lengths: list[int]) -> bool:
        """See `Store`."""
        return True

    def held(self) -> Held:
        """See `Store`."""
        each = self.longest * self.token_bytes
        return Held(self.slots * each, (self.slots - len(self._free)) * each)


class Paged(Store):
    """Blocks of a preallocated pool, with a block table and a stack of free blocks.

    The table is on the device; only new entries are copied there, and a forward pass gathers its
    requests' rows. A freed block can be reused immediately, because all work is on one stream.
    """

    contiguous = False

    def __init__(
        self, sizes: Sizes, longest: int, slots: int, limit: int, block: int, device: torch.device
    ) -> None:
        self.slots, self.longest, self.block = slots, longest, block
        self.token_bytes = sizes.token_bytes
        self.blocks = limit // (block * sizes.token_bytes)
        self.layers = _allocate(sizes, self.blocks, block, device)
        width = -(-longest // block)
        self._host = np.zeros((slots, width), dtype=np.int32)
        self._count = np.zeros(slots, dtype=np.int64)
        self._device = torch.zeros((slots, width), dtype=torch.int32, device=device)
        self._free = list(range(self.blocks))
        self._rows = list(range(slots))
        self._new: list[tuple[int, int, int]] = []  # (slot, first entry, end)
        self.table = Table(self.layers, block, width, self._gather)

    def _gather(self, index: torch.Tensor, width: int) -> torch.Tensor:
        return self._device[index, :width]

    @_timed
    def take(self, ids: Ints) -> tuple[int, int] | None:
        """See `Store`."""
        return (self._rows.pop(), 0) if self._rows else None

    @_timed
    def release(self, slot: int, ids: Ints | None = None) -> None:
        """See `Store`."""
        self._give_back(self._host[slot, : self._count[slot]].tolist(), ids)
        self._count[slot] = 0
        self._rows.append(slot)

    def _give_back(self, blocks: list[int], ids: Ints | None) -> None:
        self._free += blocks

    def _obtainable(self) -> int:
        return len(self._free)

    def _grab(self, count: int) -> list[int]:
        """Takes `count` of the available blocks."""
        taken = self._free[-count:]
        del self._free[-count:]
        return taken

    @_timed
    def fits(self, partial: Sequence[tuple[int, int]], tokens: int) -> bool:
        """See `Store`; counts blocks."""
        need = -(-tokens // self.block)
        need += sum(-(-length // self.block) - int(self._count[s]) for s, length in partial)
        return need <= self._obtainable()

    @_timed
    def hold(self, slots: list[int], lengths: list[int]) -> bool:
        """See `Store`."""
        which = np.array(slots, dtype=np.int64)
        need = -(-np.array(lengths, dtype=np.int64) // self.block) - self._count[which]
        growing = np.nonzero(need > 0)[0].tolist()
        if int(need[growing].sum()) > self._obtainable():
            return False
        for i in growing:
            slot, more = slots[i], int(need[i])
            have = int(self._count[slot])
            self._host[slot, have : have + more] = self._grab(more)
            self._count[slot] = have + more
            self._new.append((slot, have, have + more))
        return True

    @_timed
    def where(self, slots: Ints, positions: Ints) -> tuple[Ints, Ints]:
        """See `Store`."""
        return self._host[slots, positions // self.block], positions % self.block

    @_timed
    def upload(self) -> None:
        """See `Store`; takes one copy to the device and one kernel."""
        if not self._new:
            return
        entries = np.concatenate(
            [
                (slot * self._host.shape[1] + np.arange(first, end), self._host[slot, first:end])
                for slot, first, end in self._new
            ],
            axis=1,
        )
        self._new.clear()
        found = torch.from_numpy(entries)
        if self._device.is_cuda:
            found = found.pin_memory().to(self._device.device, non_blocking=True)
        self._device.view(-1)[found[0]] = found[1].int()

    def held(self) -> Held:
        """See `Store`."""
        each = self.block * self.token_bytes
        return Held(self.blocks * each, (self.blocks - self._obtainable()) * each)


class SharedPaged(Paged):
    """Blocks of a pool that requests share; a full block's key covers all tokens up to its end.

    When a block's last request ends, the block keeps its rows and is appended to a queue. If no
    block is free, the block at the front is evicted. A request's last blocks are queued first.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._users = [0] * self.blocks
        self._key: dict[int, int] = {}  # key by block
        self._known: dict[int, int] = {}  # block by key
        self._idle: dict[int, None] = {}  # unused blocks with a key, in order of eviction

    def _keys(self, ids: Ints) -> list[int]:
        """Returns the keys of the full blocks of `ids`."""
        keys, key, data, size = [], 0, ids.tobytes(), self.block * ids.itemsize
        for at in range(0, len(data) - size + 1, size):
            key = hash((key, data[at : at + size]))
            keys.append(key)
        return keys

    @_timed
    def take(self, ids: Ints) -> tuple[int, int] | None:
        """See `Store`."""
        if not self._rows:
            return None
        found = []
        for key in self._keys(ids[:-1]):
            block = self._known.get(key)
            if block is None:
                break
            found.append(block)
            self._idle.pop(block, None)
            self._users[block] += 1
        slot = self._rows.pop()
        if found:
            self._host[slot, : len(found)] = found
            self._count[slot] = len(found)
            self._new.append((slot, 0, len(found)))
        return slot, len(found) * self.block

    def _give_back(self, blocks: list[int], ids: Ints | None) -> None:
        for key, block in zip(self._keys(ids) if ids is not None else (), blocks, strict=False):
            if key not in self._known and block not in self._key:
                self._known[key], self._key[block] = block, key
        for block in reversed(blocks):
            self._users[block] -= 1
            if self._users[block]:
                continue
            if block in self._key:
                self._idle[block] = None
            else:
                self._free.append(block)

    def _obtainable(self) -> int:
        return len(self._free) + len(self._idle)

    def _grab(self, count: int) -> list[int]:
        while len(self._free) < count:
            block = next(iter(self._idle))
            del self._idle[block]
            del self._known[self._key.pop(block)]
            self._free.append(block)
        taken = super()._grab(count)
        for block in taken:
            self._users[block] = 1
        return taken


def _allocate(sizes: Sizes, count: int, places: int, device: torch.device) -> Layers:
    shape = (count, places, sizes.kv_heads, sizes.head_dim)

    def tensor() -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.bfloat16, device=device)

    return [(tensor(), tensor()) for _ in range(sizes.layers)]
