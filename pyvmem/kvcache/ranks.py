# SPDX-License-Identifier: MIT
"""What each rank of a group gets: its KV heads, and as many pages as every other rank."""

from __future__ import annotations

import zlib
from dataclasses import asdict, replace
from typing import Any

from pyvmem.context import Context
from pyvmem.errors import OutOfMemory
from pyvmem.kvcache.config import KVCacheConfig, invalid
from pyvmem.kvcache.layout import Layout
from pyvmem.kvcache.lockstep import Failure, Ranks
from pyvmem.kvcache.setup import available_bytes

__all__ = ["agree_on_pages", "rank_config", "shard_kv_heads", "take_pages"]

_WARM_STEPS = 16  # memory is taken in so many parts; what came before a refusal is kept


def shard_kv_heads(num_kv_heads: int, world_size: int) -> int:
    """Key/value heads of one rank.

    As engines do: divided where they divide; with more ranks than heads, each rank has one head and
    every head is on ``world_size / num_kv_heads`` ranks.

    Raises:
        InvalidArgument: neither number divides the other.
    """
    if num_kv_heads < 1 or world_size < 1:
        raise invalid(f"{num_kv_heads} KV heads over {world_size} ranks: both must be at least 1")
    if num_kv_heads % world_size == 0:
        return num_kv_heads // world_size
    if world_size % num_kv_heads == 0:
        return 1
    raise invalid(
        f"{num_kv_heads} KV heads can neither be divided among {world_size} ranks nor replicated "
        f"evenly on them",
        limit=num_kv_heads,
    )


def rank_config(model: Any, world_size: int, **overrides: Any) -> KVCacheConfig:
    """`KVCacheConfig.from_hf` for one of `world_size` tensor-parallel ranks.

    Args:
        model: a transformers configuration.
        world_size: ranks that the KV heads are divided among; see `shard_kv_heads`.
        **overrides: as for `from_hf`; `num_kv_heads` means those of the whole model, `memory_limit`
            is of one rank.

    Raises:
        InvalidArgument: as `from_hf`; heads that can neither be divided nor replicated.
    """
    whole = KVCacheConfig.from_hf(model, **overrides)
    return replace(whole, num_kv_heads=shard_kv_heads(whole.num_kv_heads, world_size))


def take_pages(context: Context, config: KVCacheConfig, page: int) -> int:
    """Takes the memory that the cache may have from the device; returns its pages.

    Raises:
        InvalidArgument, OutOfMemory: not a page for every tensor.
    """
    layout = Layout(config, page)
    everything = layout.slot_pages * layout.num_tensors * config.max_batch * page
    wanted = config.memory_limit or min(
        everything, available_bytes(context.cuda_device, everything)
    )
    wanted -= wanted % page
    least = page * layout.num_tensors
    for part in range(1, _WARM_STEPS + 1):
        try:
            context.warm(wanted * part // _WARM_STEPS)
        except OutOfMemory:
            break
    taken = min(wanted, context.stats().free_bytes)
    if taken < least:
        raise invalid(
            f"{taken} bytes are less than one page of {page} bytes in each of "
            f"{layout.num_tensors} tensors ({least} bytes)",
            size=taken,
            limit=least,
        )
    return taken // page


def agree_on_pages(
    ranks: Ranks, config: KVCacheConfig, page: int, pages: int, failure: Failure | None
) -> int:
    """The least number of pages over the ranks. A collective.

    Raises:
        RankFailed: a rank had a failure.
        InvalidArgument: configurations or page sizes differ.
    """
    shape = zlib.crc32(repr(asdict(replace(config, memory_limit=0))).encode())
    own = failure.status if failure else 0
    status, *found = ranks.maxima([own, shape, -shape, page, -page, -pages])
    if failed := Failure.from_status(status):
        raise (failure or failed).error()
    if found[0] != -found[1]:
        raise invalid("the ranks' configurations differ in more than memory_limit")
    if found[2] != -found[3]:
        raise invalid(f"the ranks' page sizes differ: {-found[3]} to {found[2]} bytes")
    return -found[4]
