# SPDX-License-Identifier: MIT
"""Replays a trace on two prefix caches with the same budget: our tree, and hashed blocks.

Both serve one request at a time. At most n - 1 of a prompt's n tokens may come from the cache,
since the last token must be computed. Then the prompt is recorded up to its last whole unit.
Recording never evicts the prefix that was found, and units beyond the budget are not recorded.
Outputs are not recorded, since the trace does not include them.

- **Tree** (`PrefixTree`): a unit is the smallest number of tokens that two requests can share by
  mapping a page twice. The least recently used leaf is evicted first, from its end, by at least one
  unit.
- **Blocks** (vLLM's automatic prefix caching): a full block is identified by a hash of its tokens
  and of the previous block's hash. A finished request appends its blocks to a queue, last block
  first; new blocks are taken from the front of the queue.

A third cache, `Turns`, is a real `KVCache`. It counts the hits whose rows were still mapped in the
slot where the conversation's previous turn ended. `Sliding` is the tree for a model with
sliding-window layers. It follows the rules of prefix_cache.py for windows, counted in units.
"""

from __future__ import annotations

import json
import random
import time
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np

from pyvmem.engine import RequestCache, Shortage
from pyvmem.kvcache import KVCache, KVCacheConfig
from pyvmem.kvcache.prefix_tree import ID_BYTES, MAX_ID, Match, PrefixTree, TokenIds
from pyvmem.memory.context import Context
from pyvmem.plumbing.closing import Closable
from pyvmem.plumbing.validation import invalid
from vmem_bench.command import WrongResult

__all__ = [
    "TRACE_BLOCK",
    "Blocks",
    "Cache",
    "Prompt",
    "Sliding",
    "Tree",
    "Turns",
    "Units",
    "bound",
    "common_tokens",
    "conversations",
    "hit_tokens",
    "read_prompts",
    "token_ids",
]

TRACE_BLOCK = 512
"""Tokens per id in the Mooncake trace. Equal ids mean equal prefixes up to the end of the block."""

_HOST_PAGE = 4096
_MAX_HASH = MAX_ID // TRACE_BLOCK


class Prompt(NamedTuple):
    """A prompt of the trace: its length in tokens, and an id for each block of 512 tokens."""

    length: int
    hash_ids: tuple[int, ...]


class Cache(Protocol):
    """A prefix cache with a budget."""

    @property
    def evicted(self) -> int:
        """The number of units or blocks evicted so far."""

    def serve(self, prompt: Prompt) -> int:
        """Looks up a prompt, records it, and returns the number of tokens found."""
        ...

    def held_bytes(self) -> int:
        """Returns how many bytes of keys and values are currently in the cache."""
        ...


def read_prompts(path: Path) -> list[Prompt]:
    """Reads the Mooncake trace, one JSON object per line, in order.

    Raises:
        InvalidArgument: the file cannot be read, or a line lacks the fields, has too few ids, or
            has an id out of range.
    """
    try:
        with path.open(encoding="utf-8") as lines:
            found = [_prompt(json.loads(line)) for line in lines]
    except OSError as error:
        raise invalid(f"{path}: {error.strerror}", op="vmem bench") from None
    except (ValueError, KeyError, TypeError) as error:
        raise invalid(f"{path}: {type(error).__name__}: {error}", op="vmem bench") from None
    if not found:
        raise invalid(f"{path}: no request", op="vmem bench")
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
    """Returns synthetic prompts: interleaved conversations that share one system prompt."""
    if count < 1:
        raise invalid(f"count is {count}; it must be at least 1", op="vmem bench")
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
    """Returns a prompt's token ids. Block h has the tokens h * 512, h * 512 + 1, and so on."""
    starts = np.array(prompt.hash_ids, dtype=np.uint32) * np.uint32(TRACE_BLOCK)
    ids = starts[:, None] + np.arange(TRACE_BLOCK, dtype=np.uint32)
    return TokenIds(ids.ravel()[: prompt.length])


class Units:
    """A span of the tree that stores only its number of units."""

    __slots__ = ("pages",)

    def __init__(self, pages: int) -> None:
        self.pages = pages

    def split(self, units: int) -> tuple[Units, Units]:
        """See `Span.split`."""
        return Units(units), Units(self.pages - units)


class Tree:
    """A `PrefixTree` that evicts to stay within a budget.

    Args:
        unit: tokens per unit.
        token_bytes: size of a token's keys and values across all layers.
        budget: memory for keys and values, in bytes.
    """

    def __init__(self, unit: int, token_bytes: int, budget: int) -> None:
        self.tree: PrefixTree[Units] = PrefixTree(unit)
        self.unit_bytes = unit * token_bytes
        self.capacity = budget // self.unit_bytes
        self.evicted = 0

    def serve(self, prompt: Prompt) -> int:
        """See `Cache.serve`."""
        tree, ids = self.tree, token_ids(prompt)
        known = tree.match(ids)
        kept = tree.cut_at(known.node, known.length)
        if known.length:
            tree.pin(kept)
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
        if known.length:
            tree.unpin(kept)
        return min(known.length, (prompt.length - 1) // tree.unit * tree.unit)

    def held_bytes(self) -> int:
        """See `Cache.held_bytes`."""
        return self.tree.pages * self.unit_bytes


class Tail(Units):
    """A span whose last `held` units are held by the sliding layers."""

    __slots__ = ("held",)

    def __init__(self, pages: int, held: int = 0) -> None:
        super().__init__(pages)
        self.held = held

    def split(self, units: int) -> tuple[Tail, Tail]:
        """See `Span.split`."""
        lower = self.pages - units
        held = min(self.held, lower)
        return Tail(units, self.held - held), Tail(lower, held)


class Sliding:
    """The tree of a model with sliding layers, which evicts to stay within a budget.

    A match ends where the sliding layers have all rows that the next token's kernels need. Prompts
    are computed in steps, and the window slides after each step. They are recorded up to the last
    whole block of the trace, because the id of a partial block does not identify its first tokens.

    Args:
        unit: tokens per unit; the same for all layers.
        token_bytes: size of a token's keys and values across all layers.
        budget: memory for keys and values, in bytes.
        layers: the numbers of sliding layers and of all layers.
        kept: number of tokens that sliding layers need before the next token.
        chunk: maximum number of tokens that a step computes.

    Attributes:
        evicted: number of units evicted so far.
    """

    def __init__(
        self,
        unit: int,
        token_bytes: int,
        budget: int,
        layers: tuple[int, int],
        kept: int,
        chunk: int,
    ) -> None:
        self.tree: PrefixTree[Tail] = PrefixTree(unit)
        self.evicted = 0
        self._slides, self._layers = layers
        self._layer_bytes = unit * token_bytes // self._layers  # bytes per unit in one layer
        self._capacity = budget // self._layer_bytes
        self._kept, self._chunk = kept, chunk
        self._held = 0  # number of units that sliding layers hold

    def serve(self, prompt: Prompt) -> int:
        """See `Cache.serve`."""
        tree, ids = self.tree, token_ids(prompt)
        found = self._end(tree.match(ids, prompt.length - 1))
        whole = prompt.length // TRACE_BLOCK * TRACE_BLOCK
        ids = TokenIds.from_bytes(ids.data[: whole * ID_BYTES])
        tree.insert(ids, lambda first, last: Tail(last - first))
        node = tree.cut_at(tree.match(ids).node, whole)  # the node that ends with `ids`
        if node.end:
            tree.pin(node)
        last = found + (prompt.length - found - 1) // self._chunk * self._chunk
        for one in node.path():
            end = one.end // tree.unit
            begin = max(end - one.units, self._need(one.end), self._need(last))
            more = max(0, end - begin - one.span.held)
            one.span.held += more
            self._held += more
        self._evict()
        if node.end:
            tree.unpin(node)
        self._evict()  # with the pin gone, evicts the prompt's own units if they exceed the budget
        return found

    def held_bytes(self) -> int:
        """See `Cache.held_bytes`."""
        whole = self.tree.pages * (self._layers - self._slides)
        return (whole + self._held * self._slides) * self._layer_bytes

    def _evict(self) -> None:
        """Evicts leaves until the budget is met or all remaining leaves are pinned."""
        while self.held_bytes() > self._capacity * self._layer_bytes:
            spans = self.tree.evict(1, whole=True)
            if not spans:
                return
            self._held -= sum(span.held for span in spans)
            self.evicted += sum(span.pages for span in spans)

    def _need(self, tokens: int) -> int:
        """Returns the first unit that sliding layers need after `tokens` tokens."""
        whole = tokens // self.tree.unit * self.tree.unit
        return max(0, whole - self._kept) // self.tree.unit

    def _end(self, match: Match[Tail]) -> int:
        """Returns how many tokens of a match can be used, given the rows of the sliding layers."""
        unit, units = self.tree.unit, match.length // self.tree.unit
        runs: list[
            tuple[int, int]
        ] = []  # ranges [start, end) of consecutive units that sliding layers hold
        end = 0
        for span, _ in match.parts:
            low, end = end + span.pages - span.held, end + span.pages
            if runs and runs[-1][1] == low:
                low = runs.pop()[0]
            if low < end:
                runs.append((low, end))
        for low, high in reversed(runs):
            last = min(units, high)
            if low <= self._need(last * unit) < last:
                return last * unit
        return 0


class Blocks:
    """A cache of blocks identified by hashes, in one queue; see the module docstring.

    A block's hash covers its whole prefix. The trace has one such hash for every 512 tokens, so a
    block is identified by that hash and its index within the 512 tokens.

    Args:
        block: tokens per block, a divisor of 512.
        token_bytes: size of a token's keys and values across all layers.
        budget: memory for keys and values, in bytes.
    """

    def __init__(self, block: int, token_bytes: int, budget: int) -> None:
        if not 1 <= block <= TRACE_BLOCK or TRACE_BLOCK % block:
            raise invalid(
                f"block is {block}; it must divide {TRACE_BLOCK}",
                limit=TRACE_BLOCK,
                op="vmem bench",
            )
        self.block = block
        self.block_bytes = block * token_bytes
        self.capacity = budget // self.block_bytes
        self.evicted = 0
        self._queue: OrderedDict[int, None] = (
            OrderedDict()
        )  # blocks in the order in which they will be reused

    def serve(self, prompt: Prompt) -> int:
        """See `Cache.serve`."""
        queue, per = self._queue, TRACE_BLOCK // self.block
        whole = prompt.length // self.block
        hashes = [one * per + at for one in prompt.hash_ids for at in range(per)][:whole]
        found = next((at for at, one in enumerate(hashes) if one not in queue), whole)
        # Blocks after an evicted block may remain, but are not found, as in vLLM.
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


class Turns(Closable):
    """A `KVCache` on ``host``, with few bytes per token, so that any budget fits.

    Prompts are served one at a time: all of their tokens are admitted, and the trace's whole blocks
    are recorded. (The id of a prompt's last, partial block does not say how the block begins, so it
    is not known which later prompts continue it.) Evicted pages are unmapped in the background,
    before the next prompt starts. The object is a context manager.

    Args:
        unit: tokens in a page of ``host``, a power of two up to 2,048.
        budget: capacity in tokens.
        slots: number of slots, as in `KVCacheConfig.max_batch`.
        longest: number of tokens in the longest prompt.
        common: number of tokens that all prompts share; a longer hit counts as a next turn.

    Attributes:
        served: number of prompts that fit the budget.
        hits: number of prompts that started from a recorded prefix.
        next_turns: number of hits of more than `common` tokens.
        resumed, next_resumed: how many of `hits` and of `next_turns` had all tokens still mapped,
            so that they made no driver call.
        hit_tokens: number of tokens found in all hits.
        mapped_tokens: how many of the `hit_tokens` were still mapped.
    """

    def __init__(self, unit: int, budget: int, slots: int, longest: int, common: int) -> None:
        if unit & (unit - 1) or not 1 <= unit <= _HOST_PAGE // 2:
            raise invalid(
                f"unit is {unit}; it must be a power of two up to {_HOST_PAGE // 2}",
                op="vmem bench",
            )
        self._unit, self._common = unit, common
        self._stack = ExitStack()
        self._held: dict[int, tuple[int, ...]] = {}  # the blocks recorded from each slot
        self.served = self.hits = self.next_turns = self.hit_tokens = 0
        self.resumed = self.next_resumed = self.mapped_tokens = 0
        config = KVCacheConfig(
            num_layers=1,
            num_kv_heads=1,
            head_dim=_HOST_PAGE // unit // 2,
            tensors_per_layer=1,
            max_batch=slots,
            max_seq_len=longest,
            page_size=_HOST_PAGE,
            memory_limit=budget // unit * _HOST_PAGE,
            low_watermark=0.0,
            zero_fill=False,
        )
        with ExitStack() as stack:
            context = stack.enter_context(Context("host", granule=_HOST_PAGE))
            self.cache = stack.enter_context(KVCache(config, context))
            self._requests = stack.enter_context(RequestCache(self.cache))
            self._stack = stack.pop_all()

    def close(self) -> None:
        """Frees all memory."""
        self._stack.close()

    def serve(self, prompt: Prompt) -> int:
        """Admits, computes and frees a prompt; returns the number of tokens found.

        Raises:
            WrongResult: the cache's counts contradict what the slot had mapped.
        """
        requests, ids = self._requests, token_ids(prompt)
        with requests.match(ids) as prefix:
            before = self.cache.snapshot() if prefix.length else []
            resumed = self.cache.stats().prefix_resumed
            request = requests.admit(prefix, room=0)
        if isinstance(request, Shortage):
            return 0
        found, slot = request.length, request.slot
        if found:
            held = self._held.get(slot, ())
            there = before[slot].shared_pages * self._unit
            mapped = there if held and held == prompt.hash_ids[: len(held)] else 0
            whole = self.cache.stats().prefix_resumed - resumed
            if whole != (mapped == found):
                raise WrongResult(f"{mapped} of {found} tokens were mapped; resumed: {whole}")
            self.hits += 1
            self.hit_tokens += found
            self.resumed += whole
            self.next_turns += found > self._common
            self.next_resumed += whole if found > self._common else 0
            self.mapped_tokens += mapped
        if requests.extend({request: prompt.length}) is not None:
            raise WrongResult(f"{prompt.length} tokens were admitted, but memory is short")
        blocks = prompt.length // TRACE_BLOCK
        recorded = TokenIds.from_bytes(ids.data[: blocks * TRACE_BLOCK * ID_BYTES])
        requests.release(request, tokens=recorded)
        while self.cache.snapshot()[slot].in_flight:
            time.sleep(1e-4)
        self._held[slot] = prompt.hash_ids[:blocks]
        self.served += 1
        return found


def hit_tokens(prompts: Iterable[Prompt], cache: Cache) -> tuple[int, int]:
    """Serves all prompts; returns the number of tokens found and the cache's peak size in bytes."""
    hits = most = 0
    for prompt in prompts:
        hits += cache.serve(prompt)
        most = max(most, cache.held_bytes())
    return hits, most


def common_tokens(prompts: Sequence[Prompt]) -> int:
    """Returns the length of the prefix (a system prompt) that all prompts share.

    It is a multiple of the trace's block size.
    """
    first = prompts[0].hash_ids
    for at, one in enumerate(first):
        if any(
            p.hash_ids[at : at + 1] != (one,) or p.length < (at + 1) * TRACE_BLOCK for p in prompts
        ):
            return at * TRACE_BLOCK
    return len(first) * TRACE_BLOCK


def bound(prompts: Sequence[Prompt]) -> int:
    """Returns how many tokens an unlimited cache would find, in the trace's blocks of 512."""
    seen: set[int] = set()
    hits = 0
    for length, ids in prompts:
        known = next((at for at, one in enumerate(ids) if one not in seen), len(ids))
        hits += min(known * TRACE_BLOCK, length - 1)
        seen.update(ids)
    return hits
