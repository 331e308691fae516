# SPDX-License-Identifier: MIT
"""What a cache records and evicts, as the KV events of vLLM, for routers that know prefixes.

    events = KVEvents(cache)
    ...
    for event in events.poll():             # BlockStored, BlockRemoved, AllBlocksCleared
        ...
    publisher.publish(events.batch())       # with vLLM installed: for its publishers

A block is a sharing unit of the cache (`KVCache.sharing_unit`). Its hash covers its tokens, all
before them and the namespace, so equal prefixes have equal hashes in every process. The fields are
those of ``vllm.distributed.kv_events``; `KVEvents.batch` makes these classes themselves.

The consecutive blocks that a router finds are the most that a prompt can begin with. The cache
finds the same, except with sliding-window layers: there a request can begin only where the last
window is still recorded, which may not be so where a prompt diverges in the middle of a recorded
one.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Hashable
from dataclasses import dataclass, fields
from typing import Any, Protocol, TypeAlias

from pyvmem.kvcache.prefix_tree import Change, TokenIds

__all__ = ["AllBlocksCleared", "BlockRemoved", "BlockStored", "KVEvent", "KVEvents", "block_hashes"]

MEDIUM = "GPU"


@dataclass(frozen=True)
class BlockStored:
    """Blocks that prompts may now begin with.

    Attributes:
        block_hashes: of each block.
        parent_block_hash: of the block before the first one; None: there is none.
        token_ids: of all the blocks.
        block_size: tokens of a block.
        lora_id: not used.
        medium: where the rows lie.
        lora_name: the namespace, or what `repr` makes of one that is no text; None: there is none.
    """

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None = None
    medium: str | None = MEDIUM
    lora_name: str | None = None


@dataclass(frozen=True)
class BlockRemoved:
    """Blocks that are no longer there."""

    block_hashes: list[int]
    medium: str | None = MEDIUM


@dataclass(frozen=True)
class AllBlocksCleared:
    """Nothing is recorded any more, whatever earlier events said."""


KVEvent: TypeAlias = BlockStored | BlockRemoved | AllBlocksCleared


class _Cache(Protocol):
    @property
    def sharing_unit(self) -> int: ...

    def prefix_changes(self, after: int | None = None) -> list[Change]: ...


def block_hashes(tokens: Any, unit: int, namespace: Hashable = None) -> list[int]:
    """The hash of every whole block of `unit` tokens, from the first on; 64 bits each."""
    ids = TokenIds.of(tokens, namespace)
    width = unit * 4
    last = hashlib.sha256(f"pyvmem {unit} {ids.namespace!r}".encode()).digest()
    found = []
    for at in range(0, len(ids.data) // width * width, width):
        last = hashlib.sha256(last + ids.data[at : at + width]).digest()
        found.append(int.from_bytes(last[:8], "big"))
    return found


class KVEvents:
    """The events of one cache, from when this is made on.

    The first `poll` begins with `AllBlocksCleared` and reports what was recorded before. One reader
    for each cache: an event is reported once.

    Args:
        cache: a `KVCache` or one of its relatives.
        data_parallel_rank: for `batch`.
    """

    def __init__(self, cache: _Cache, data_parallel_rank: int | None = None) -> None:
        self._cache = cache
        self._rank = data_parallel_rank
        self._told: int | None = None  # the number of the last change that was reported
        cache.prefix_changes(-1)  # are collected from here on

    def poll(self) -> list[KVEvent]:
        """What happened since the last call, in order. BadHandle: the cache is closed.

        A call that an exception ended has reported nothing: the next one does.
        """
        events, told = self._untold()
        self._told = told  # last, as in `batch`
        return events

    def _untold(self) -> tuple[list[KVEvent], int]:
        """What is to be reported, and the number of the last change in it."""
        begun, told = self._told is not None, -1 if self._told is None else self._told
        changes = self._cache.prefix_changes(told)
        unit = self._cache.sharing_unit
        events: list[KVEvent] = [] if begun else [AllBlocksCleared()]
        events += [_event(one, unit) for one in changes]
        return events, changes[-1].number if changes else told

    def batch(self, now: float | None = None) -> Any:
        """`poll` as a ``KVEventBatch`` of the vLLM that is installed, for its `EventPublisher`.

        Raises:
            ImportError: no vLLM is installed.
        """
        from vllm.distributed import kv_events

        events, told = self._untold()
        made = kv_events.KVEventBatch(
            ts=time.time() if now is None else now,
            events=[_vllm_event(kv_events, one) for one in events],
            data_parallel_rank=self._rank,
        )
        self._told = told
        return made


def _event(change: Change, unit: int) -> KVEvent:
    hashes = block_hashes(change.ids, unit)
    if not change.stored:
        return BlockRemoved(hashes[change.first :])
    namespace = change.ids.namespace
    return BlockStored(
        hashes[change.first :],
        hashes[change.first - 1] if change.first else None,
        list(change.ids)[change.first * unit :],
        unit,
        lora_name=namespace if namespace is None or isinstance(namespace, str) else repr(namespace),
    )


def _vllm_event(module: Any, event: KVEvent) -> Any:
    """vLLM's own object with the same fields."""
    kind = getattr(module, type(event).__name__)
    return kind(**{one.name: getattr(event, one.name) for one in fields(event)})
