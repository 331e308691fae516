# SPDX-License-Identifier: MIT
"""Two caches of prefixes under one trace and one budget: our tree, and blocks known by their hash.

Both serve one request after the other. Of a prompt of n tokens at most n - 1 may come from the
cache, for the last one must be computed. What a prompt does not find is then recorded, up to its
last whole unit; its own prefix is not evicted for that, and what does not fit into the whole budget
is left out. Outputs are not recorded: the trace does not say what they were.

- **Tree** (`PrefixTree`): units of as many tokens as two requests can share by mapping a page
  twice. The leaf that was used least recently goes first, from its end, one unit at least.
- **Blocks** (vLLM's automatic prefix caching): a full block is known by the hash of its tokens and
  of the block before it. A request that ends gives its blocks to the end of a queue, the last
  first; new blocks are taken from the front.
"""

from __future__ import annotations

import json
import random
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np

from pyvmem.kvcache.config import invalid
from pyvmem.kvcache.prefix_tree import MAX_ID, PrefixTree, TokenIds

__all__ = [
    "TRACE_BLOCK",
    "Blocks",
    "Cache",
    "Prompt",
    "Tree",
    "Units",
    "bound",
    "conversations",
    "hit_tokens",
    "read_prompts",
    "token_ids",
]

TRACE_BLOCK = 512
"""Tokens that an id of Mooncake's trace stands for. Equal ids are equal prefixes up to there."""

_MAX_HASH = MAX_ID // TRACE_BLOCK


class Prompt(NamedTuple):
    """A prompt of the trace: its length in tokens, and an id for each block of 512."""

    length: int
    hash_ids: tuple[int, ...]


class Cache(Protocol):
    """A cache of prefixes with a budget.

    Attributes:
        evicted: units or blocks that went so far.
    """

    evicted: int

    def serve(self, prompt: Prompt) -> int:
        """Looks a prompt up, records it, and returns the tokens that were found."""
        ...

    def held_bytes(self) -> int:
        """Bytes of keys and values in the cache now."""
        ...


def read_prompts(path: Path) -> list[Prompt]:
    """Mooncake's trace, a JSON a line, in its order.

    Raises:
        InvalidArgument: the file cannot be read, or a line has no such fields, too few ids, or an
            id that no token ids can be made from.
    """
    try:
        with path.open(encoding="utf-8") as lines:
            found = [_prompt(json.loads(line)) for line in lines]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise invalid(f"{path}: {type(error).__name__}: {error}") from None
    if not found:
        raise invalid(f"{path}: no request")
    return found


def _prompt(row: dict[str, object]) -> Prompt:
    length, ids = row["input_length"], row["hash_ids"]
    if not isinstance(length, int) or not isinstance(ids, list):
        raise ValueError("input_length must be a number and hash_ids a list")
    if length < 1 or len(ids) * TRACE_BLOCK < length:
        raise ValueError(f"{len(ids)} ids do not cover {length} tokens")
    if not all(isinstance(one, int) and 0 <= one <= _MAX_HASH - 1 for one in ids):
        raise ValueError(f"a hash id is not between 0 and {_MAX_HASH - 1}")
    return Prompt(length, tuple(ids))


def conversations(count: int, seed: int) -> list[Prompt]:
    """Made-up prompts: conversations of several turns in turns, all behind one system prompt."""
    if count < 1:
        raise invalid(f"count is {count}; it must be at least 1")
    rng = random.Random(seed)
    fresh = iter(range(1, _MAX_HASH))
    open_ones: list[list[int]] = []
    prompts = []
    for _ in range(count):
        if len(open_ones) < 200 or rng.random() < 0.4:
            open_ones.append([0])
        talk = rng.choice(open_ones)
        talk += [next(fresh) for _ in range(1 + int(rng.expovariate(1 / 12)))]
        if len(talk) > 200 or rng.random() < 0.2:
            open_ones.remove(talk)
        length = len(talk) * TRACE_BLOCK - rng.randrange(TRACE_BLOCK)
        prompts.append(Prompt(length, tuple(talk)))
    return prompts


def token_ids(prompt: Prompt) -> TokenIds:
    """Token ids for a prompt: block h is h * 512, h * 512 + 1, ...; so equal ids, equal tokens."""
    starts = np.array(prompt.hash_ids, dtype=np.uint32) * np.uint32(TRACE_BLOCK)
    ids = starts[:, None] + np.arange(TRACE_BLOCK, dtype=np.uint32)
    return TokenIds(ids.ravel()[: prompt.length])


class Units:
    """A span of the tree: so many units, a page of which is counted as one."""

    __slots__ = ("pages",)

    def __init__(self, pages: int) -> None:
        self.pages = pages

    def split(self, units: int) -> tuple[Units, Units]:
        """See `Span.split`."""
        return Units(units), Units(self.pages - units)


class Tree:
    """`PrefixTree` with eviction at a budget.

    Args:
        unit: tokens.
        token_bytes: keys and values of a token in all layers.
        budget: bytes.
    """

    def __init__(self, unit: int, token_bytes: int, budget: int) -> None:
        self.tree: PrefixTree[Units] = PrefixTree(unit)
        self.unit_bytes = unit * token_bytes
        self.capacity = budget // self.unit_bytes
        self.evicted = 0

    def serve(self, prompt: Prompt) -> int:
        """See `Cache.serve`."""
        tree, ids = self.tree, token_ids(prompt)
        known = tree.match(ids, pin=True)
        missing = prompt.length // tree.unit - known.length // tree.unit
        short = missing - (self.capacity - tree.pages)
        if short > 0:
            freed = sum(span.pages for span in tree.evict(short))
            self.evicted += freed
            missing -= max(0, short - freed)
        fits = known.length + missing * tree.unit
        if fits < prompt.length:
            ids = TokenIds.from_bytes(ids.data[: fits * 4])
        tree.insert(ids, lambda start, stop: Units(stop - start))
        tree.unpin(known.node)
        return min(known.length, (prompt.length - 1) // tree.unit * tree.unit)

    def held_bytes(self) -> int:
        """See `Cache.held_bytes`."""
        return self.tree.pages * self.unit_bytes


class Blocks:
    """Blocks known by their hash, in one queue; see the top of this file.

    A block's hash is that of its whole prefix. The trace gives such a hash for every 512 tokens, so
    the block's place behind it stands for its own.

    Args:
        block: tokens, a divisor of 512.
        token_bytes: keys and values of a token in all layers.
        budget: bytes.
    """

    def __init__(self, block: int, token_bytes: int, budget: int) -> None:
        if not 1 <= block <= TRACE_BLOCK or TRACE_BLOCK % block:
            raise invalid(f"block is {block}; it must divide {TRACE_BLOCK}", limit=TRACE_BLOCK)
        self.block = block
        self.block_bytes = block * token_bytes
        self.capacity = budget // self.block_bytes
        self.evicted = 0
        self._queue: OrderedDict[int, None] = OrderedDict()  # next to be taken first

    def serve(self, prompt: Prompt) -> int:
        """See `Cache.serve`."""
        queue, per = self._queue, TRACE_BLOCK // self.block
        whole = prompt.length // self.block
        hashes = [one * per + at for one in prompt.hash_ids for at in range(per)][:whole]
        found = next((at for at, one in enumerate(hashes) if one not in queue), whole)
        # Behind a block that is gone others may be left; vLLM does not find them either.
        kept = hashes[: self.capacity]
        for one in kept:
            queue.pop(one, None)
        short = len(queue) + len(kept) - self.capacity
        for _ in range(short):
            queue.popitem(last=False)
        self.evicted += max(0, short)
        queue.update(dict.fromkeys(reversed(kept)))
        return min(found, (prompt.length - 1) // self.block) * self.block

    def held_bytes(self) -> int:
        """See `Cache.held_bytes`."""
        return len(self._queue) * self.block_bytes


def hit_tokens(prompts: Iterable[Prompt], cache: Cache) -> tuple[int, int]:
    """Serves all prompts: the tokens found, and the most bytes that the cache held."""
    hits = most = 0
    for prompt in prompts:
        hits += cache.serve(prompt)
        most = max(most, cache.held_bytes())
    return hits, most


def bound(prompts: Sequence[Prompt]) -> int:
    """Tokens that a cache without a budget finds, in the trace's blocks of 512."""
    seen: set[int] = set()
    hits = 0
    for length, ids in prompts:
        known = next((at for at, one in enumerate(ids) if one not in seen), len(ids))
        hits += min(known * TRACE_BLOCK, length - 1)
        seen.update(ids)
    return hits
