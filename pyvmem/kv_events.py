# SPDX-License-Identifier: MIT
"""Reports a cache's recorded and evicted prefixes as vLLM's KV events, for routers.

    events = KVEvents(cache)
    ...
    for event in events.poll():             # BlockStored, BlockRemoved, AllBlocksCleared
        ...
    publisher.publish(events.batch())       # for vLLM's publishers, if it is installed

A block is a sharing unit of the cache (`KVCache.sharing_unit`). Its hash covers its tokens, all
earlier tokens and the namespace, so equal prefixes have equal hashes in every process. A namespace
that is not a string is hashed by its `repr`, which must be the same in every process for equal
namespaces. Namespaces of `pyvmem.engine` are identified by name: a block in a closed namespace and
in its successor is reported as removed once it is in neither. The fields are those of
``vllm.distributed.kv_events``; `KVEvents.batch` returns objects of vLLM's own classes.

The longest run of consecutive blocks that a router finds is an upper bound on the cache's match.
The two are equal, with two exceptions. With sliding-window layers, a match can end only where the
last window is still recorded, which may not be the case where a prompt diverges in the middle of a
recorded prompt. Also, the successor of a closed namespace does not match its predecessor's blocks.
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
    """Reports recorded blocks: prompts may now begin with them.

    Attributes:
        block_hashes: hash of each block.
        parent_block_hash: hash of the preceding block; None if the blocks begin a prompt.
        token_ids: token ids of all the blocks.
        block_size: tokens per block.
        lora_id: unused.
        medium: the kind of memory that holds the rows.
        lora_name: the namespace's name, or its `repr` if it is not a string; None if there is no
            namespace.
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
    """Reports removed blocks."""

    block_hashes: list[int]
    medium: str | None = MEDIUM


@dataclass(frozen=True)
class AllBlocksCleared:
    """Reports that all blocks were removed; earlier events no longer apply."""


KVEvent: TypeAlias = BlockStored | BlockRemoved | AllBlocksCleared


class _Internals(Protocol):
    def prefix_changes(self, after: int | None = None) -> list[Change]: ...


class _Cache(Protocol):
    @property
    def sharing_unit(self) -> int: ...

    @property
    def internals(self) -> _Internals: ...


def block_hashes(tokens: Any, unit: int, namespace: Hashable = None) -> list[int]:
    """Returns the 64-bit hash of every full block of `unit` tokens, in order.

    A namespace is hashed by its `repr`, a namespace of `pyvmem.engine` by its name.
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
    """Returns the name that identifies a namespace in all processes; None for the default."""
    if isinstance(namespace, Generation):
        namespace = (None,) if namespace.name is None else namespace.name
    # A member of a string Enum equals the plain string, and the cache treats the two as equal.
    return str.__str__(namespace) if isinstance(namespace, str) else namespace


class _Told(NamedTuple):
    """A reader's state: what it has reported so far.

    Attributes:
        number: number of the last reported change.
        copies: for each block, the number of namespaces of the same name that contain it.
    """

    number: int
    copies: dict[int, int]


class KVEvents:
    """Reads the events of a cache.

    The first `poll` begins with `AllBlocksCleared` and reports everything recorded so far. Use one
    reader per cache: each event is reported once.

    Args:
        cache: a `KVCache` or another cache of `pyvmem.kvcache`.
        data_parallel_rank: rank that `batch` reports.
    """

    def __init__(self, cache: _Cache, data_parallel_rank: int | None = None) -> None:
        self._cache = cache
        self._rank = data_parallel_rank
        self._told: _Told | None = None
        cache.internals.prefix_changes(-1)  # starts collecting changes

    def __repr__(self) -> str:
        return f"<KVEvents of {self._cache!r}>"

    def poll(self) -> list[KVEvent]:
        """Returns the events since the last call, in order.

        If an exception interrupts a call, the next call reports its events. Raises BadHandle if the
        cache is closed.
        """
        events, told = self._untold()
        self._told = told  # set last, so that an exception before this line loses nothing
        return events

    def _untold(self) -> tuple[list[KVEvent], _Told]:
        """Returns the events to report, and the reader's state once they are reported."""
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
        """Calls `poll` and returns the events as a ``KVEventBatch`` for vLLM's `EventPublisher`.

        Raises:
            ImportError: vLLM is not installed.
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
    """Returns the events for a change and updates `copies`.

    Blocks that another namespace of the same name also contains cause no events.
    """
    hashes, name = block_hashes(change.ids, unit), _named(change.ids.namespace)
    blocks = hashes[change.first :]
    if name is not None:
        blocks = _first_or_last(blocks, change.stored, copies)
    if not blocks:
        return []
    if not change.stored:
        return [BlockRemoved(blocks)]
    first = len(hashes) - len(blocks)  # blocks that other namespaces also contain always come first
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
    """Returns the blocks that the first namespace gained or the last one lost; updates `copies`."""
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
    """Converts an event to vLLM's own object."""
    kind = getattr(module, type(event).__name__)
    return kind(**{one.name: getattr(event, one.name) for one in fields(event)})
