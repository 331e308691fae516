# SPDX-License-Identifier: MIT
"""KV events of vLLM for the prefixes that a cache records and evicts, for prefix-aware routers.

    events = KVEvents(cache)
    ...
    for event in events.poll():             # BlockStored, BlockRemoved, AllBlocksCleared
        ...
    publisher.publish(events.batch())       # with vLLM installed: for its publishers

A block is a sharing unit of the cache (`KVCache.sharing_unit`). Its hash covers its tokens, all
tokens before them and the namespace, so equal prefixes have equal hashes in every process. For a
namespace that is not a string, `repr` is hashed, which must be equal for equal namespaces, in every
process. Namespaces of `pyvmem.engine` are identified by their names: a block that a closed
namespace and its successor both have is reported as removed when neither has it. The fields are
those of ``vllm.distributed.kv_events``; `KVEvents.batch` makes these classes themselves.

A router's longest run of consecutive blocks is the most that a prompt can begin with. The cache
finds the same, except in two cases. With sliding-window layers, a request can begin only where the
last window is still recorded, which may not be so where a prompt diverges in the middle of a
recorded one. And blocks of a closed namespace are not found by its successor.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Hashable
from dataclasses import dataclass, fields
from typing import Any, NamedTuple, Protocol, TypeAlias

from pyvmem.engine.prefix import Generation
from pyvmem.kvcache.prefix_tree import Change, TokenIds

__all__ = ["AllBlocksCleared", "BlockRemoved", "BlockStored", "KVEvent", "KVEvents", "block_hashes"]

MEDIUM = "GPU"


@dataclass(frozen=True)
class BlockStored:
    """Blocks that prompts may now begin with.

    Attributes:
        block_hashes: hashes of each block.
        parent_block_hash: hash of the block before the first one; None: no such block.
        token_ids: token ids of all the blocks.
        block_size: tokens of a block.
        lora_id: not used.
        medium: memory that holds the rows.
        lora_name: the namespace's name, or its `repr` if it is not a string; None: no namespace.
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
    """Blocks that were removed."""

    block_hashes: list[int]
    medium: str | None = MEDIUM


@dataclass(frozen=True)
class AllBlocksCleared:
    """Nothing is recorded any more, whatever earlier events said."""


KVEvent: TypeAlias = BlockStored | BlockRemoved | AllBlocksCleared


class _Internals(Protocol):
    def prefix_changes(self, after: int | None = None) -> list[Change]: ...


class _Cache(Protocol):
    @property
    def sharing_unit(self) -> int: ...

    @property
    def internals(self) -> _Internals: ...


def block_hashes(tokens: Any, unit: int, namespace: Hashable = None) -> list[int]:
    """The hash of every whole block of `unit` tokens, from the first on; 64 bits each.

    `namespace`: hashed as what `repr` makes of it; one of `pyvmem.engine` as its name.
    """
    ids = TokenIds.of(tokens, namespace)
    width = unit * 4
    last = hashlib.sha256(f"pyvmem {unit} {_named(ids.namespace)!r}".encode()).digest()
    found = []
    for at in range(0, len(ids.data) // width * width, width):
        last = hashlib.sha256(last + ids.data[at : at + width]).digest()
        found.append(int.from_bytes(last[:8], "big"))
    return found


def _named(namespace: Hashable) -> Hashable:
    """Returns the name by which other processes know a namespace; None: default namespace."""
    if isinstance(namespace, Generation):
        namespace = (None,) if namespace.name is None else namespace.name
    # A member of an Enum that is a string equals the plain one, and the cache takes it for that.
    return str.__str__(namespace) if isinstance(namespace, str) else namespace


class _Told(NamedTuple):
    """State of a reader: the blocks it has been told of.

    Attributes:
        number: number of the last change that was reported.
        copies: number of namespaces of one name that have each block.
    """

    number: int
    copies: dict[int, int]


class KVEvents:
    """The events of one cache, beginning when this object is made.

    The first `poll` begins with `AllBlocksCleared` and reports everything recorded before. One
    reader per cache: an event is reported once.

    Args:
        cache: a `KVCache` or one of its relatives.
        data_parallel_rank: for `batch`.
    """

    def __init__(self, cache: _Cache, data_parallel_rank: int | None = None) -> None:
        self._cache = cache
        self._rank = data_parallel_rank
        self._told: _Told | None = None
        cache.internals.prefix_changes(-1)  # are collected from here on

    def __repr__(self) -> str:
        return f"<KVEvents of {self._cache!r}>"

    def poll(self) -> list[KVEvent]:
        """Returns the events since the last call, in order. BadHandle: the cache is closed.

        A call that an exception ended has reported nothing: the next one does.
        """
        events, told = self._untold()
        self._told = told  # last, as in `batch`
        return events

    def _untold(self) -> tuple[list[KVEvent], _Told]:
        """Returns the events to report, and the reader's state after them."""
        told = _Told(-1, {}) if self._told is None else self._told
        changes = self._cache.internals.prefix_changes(told.number)
        unit = self._cache.sharing_unit
        events: list[KVEvent] = [AllBlocksCleared()] if self._told is None else []
        if not changes:
            return events, told
        copies = dict(told.copies)
        for one in changes:
            events += _events(one, unit, copies)
        return events, _Told(changes[-1].number, copies)

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


def _events(change: Change, unit: int, copies: dict[int, int]) -> list[KVEvent]:
    """None where other namespaces of the name have the blocks; notes the change in `copies`."""
    hashes, name = block_hashes(change.ids, unit), _named(change.ids.namespace)
    blocks = hashes[change.first :]
    if name is not None:
        blocks = _first_or_last(blocks, change.stored, copies)
    if not blocks:
        return []
    if not change.stored:
        return [BlockRemoved(blocks)]
    first = len(hashes) - len(blocks)  # others have what a prefix begins with, if anything
    return [
        BlockStored(
            blocks,
            hashes[first - 1] if first else None,
            list(change.ids)[first * unit :],
            unit,
            lora_name=name if name is None or isinstance(name, str) else repr(name),
        )
    ]


def _first_or_last(blocks: list[int], stored: bool, copies: dict[int, int]) -> list[int]:
    """The blocks that none had before, or that none has now; notes both in `copies`."""
    found = []
    for one in blocks:
        before = copies.pop(one, 0)
        now = before + (1 if stored else -1)
        if now:
            copies[one] = now
        if not (before and now):
            found.append(one)
    return found


def _vllm_event(module: Any, event: KVEvent) -> Any:
    """vLLM's own object with the same fields."""
    kind = getattr(module, type(event).__name__)
    return kind(**{one.name: getattr(event, one.name) for one in fields(event)})
