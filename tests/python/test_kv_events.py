# SPDX-License-Identifier: MIT
"""Checks that a router that applies the KV events knows which prefixes are cached."""

from __future__ import annotations

import enum
import random
from collections.abc import Hashable

import pytest
from conftest import open_context
from kvcache_helpers import LAYERS, ROWS, lens, small_cache

from pyvmem import Caps, Context, KVCache
from pyvmem.engine import Namespace, Request, RequestCache
from pyvmem.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KVEvents, block_hashes


@pytest.fixture
def sharing(context: Context) -> Context:
    if Caps.ALIAS | Caps.READONLY not in context.info.caps:
        pytest.skip("the back end has no prefixes")
    return context


def serve(cache: KVCache, tokens: list[int], namespace: Hashable = None) -> None:
    """Runs a request with these tokens; its rows are recorded when it ends."""
    taken = cache.alloc_prefix(tokens, namespace=namespace)
    assert taken is not None
    reqid = taken[0]
    assert cache.step(lens(cache, **{f"r{reqid}": len(tokens)})) == 0
    cache.free_reqid(reqid, tokens=tokens, namespace=namespace)


def record(engine: RequestCache, tokens: list[int], namespace: Namespace) -> None:
    """Runs and records a request through an engine."""
    request = engine.admit(tokens, namespace)
    assert isinstance(request, Request)
    assert engine.extend({request: len(tokens)}) is None
    engine.release(request, tokens=tokens)


class Router:
    """A router that knows a cache only through its events; maps block hashes to parent hashes."""

    def __init__(self) -> None:
        self.blocks: dict[int, int | None] = {}

    def follow(self, events: list) -> None:
        for event in events:
            if isinstance(event, AllBlocksCleared):
                self.blocks.clear()
            elif isinstance(event, BlockRemoved):
                for one in event.block_hashes:
                    del self.blocks[one]
            else:
                parent = event.parent_block_hash
                assert len(event.token_ids) == event.block_size * len(event.block_hashes)
                for one in event.block_hashes:
                    assert one not in self.blocks
                    assert parent is None or parent in self.blocks
                    self.blocks[one] = parent
                    parent = one

    def matched(self, tokens: list[int], unit: int, namespace: str | None = None) -> int:
        count = 0
        for one in block_hashes(tokens, unit, namespace):
            if one not in self.blocks:
                break
            count += 1
        return count * unit


def test_stored_and_removed(sharing: Context) -> None:
    with small_cache(sharing) as cache:
        serve(cache, [1] * ROWS)
        events = KVEvents(cache)
        (cleared, begun) = events.poll()
        assert cleared == AllBlocksCleared()
        assert begun == BlockStored(block_hashes([1] * ROWS, ROWS), None, [1] * ROWS, ROWS)
        assert events.poll() == []
        tokens = [1] * ROWS + [2] * (2 * ROWS)
        serve(cache, tokens)
        first, *rest = block_hashes(tokens, ROWS)
        assert events.poll() == [BlockStored(rest, first, [2] * (2 * ROWS), ROWS)]
        serve(cache, tokens)
        assert events.poll() == [], "recorded already"
        serve(cache, [1] * ROWS, "adapter")
        (stored,) = events.poll()
        assert isinstance(stored, BlockStored)
        assert stored.lora_name == "adapter"
        assert stored.block_hashes == block_hashes([1] * ROWS, ROWS, "adapter") != [first]
        cache.trim(prefixes=True)
        gone = [one for event in events.poll() for one in event.block_hashes]
        assert sorted(gone) == sorted([first, *rest, *stored.block_hashes])


def test_hashes_depend_on_all_before_and_on_the_namespace() -> None:
    one, two = block_hashes([1, 2, 3, 4, 5], 2), block_hashes([9, 2, 3, 4], 2)
    assert len(one) == len(two) == 2
    assert not set(one) & set(two)
    assert block_hashes([1, 2, 3, 4], 2) == one
    assert not set(block_hashes([1, 2, 3, 4], 2, "x")) & set(one)
    assert block_hashes([1], 2) == []


@pytest.mark.parametrize("seed", range(3))
def test_a_router_agrees_with_the_cache(backend: str, seed: int) -> None:
    dice = random.Random(seed)
    with open_context(backend) as context:
        if Caps.ALIAS | Caps.READONLY not in context.info.caps:
            pytest.skip("the back end has no prefixes")
        limit = 14 * 2 * LAYERS * context.info.granule
        with small_cache(context, memory_limit=limit) as cache:
            events, router = KVEvents(cache), Router()
            prompts = [[dice.randrange(2) for _ in range(dice.randrange(1, 6))] for _ in range(40)]
            evicted = 0
            for prompt in prompts:
                tokens = [word for word in prompt for _ in range(ROWS)]
                namespace = dice.choice([None, "a"])
                serve(cache, tokens, namespace)
                told = events.poll()
                evicted += sum(isinstance(one, BlockRemoved) for one in told)
                router.follow(told)
                for other in prompts[:8]:
                    asked = [word for word in other for _ in range(ROWS)]
                    for name in (None, "a"):
                        with cache.match(asked, leave=0, namespace=name) as match:
                            assert router.matched(asked, ROWS, name) == match.length
            assert evicted, "the memory was too large for this test"
            assert len(router.blocks) * ROWS == cache.stats().prefix_tokens


@pytest.mark.parametrize("namespace", [("adapter", 0), 7, "adapter"])
def test_a_namespace_is_never_mistaken_for_none(sharing: Context, namespace: Hashable) -> None:
    """The events also carry tokens and names, for routers that do not use our hashes."""
    with small_cache(sharing) as cache:
        events = KVEvents(cache)
        serve(cache, [1] * ROWS, namespace)
        _, stored = events.poll()
        assert isinstance(stored, BlockStored)
        assert stored.lora_name == (namespace if isinstance(namespace, str) else repr(namespace))
        assert stored.block_hashes == block_hashes([1] * ROWS, ROWS, namespace)


class Adapter(str, enum.Enum):
    """An enumeration of namespace names, as a server might define one."""

    ONE = "one"


def test_strings_are_identified_by_their_characters(sharing: Context) -> None:
    """A cache treats equal namespaces as one, even if their `repr` differs."""
    with small_cache(sharing) as cache:
        events, router = KVEvents(cache), Router()
        serve(cache, [1] * ROWS, "one")
        serve(cache, [1] * ROWS + [2] * ROWS, Adapter.ONE)
        router.follow(events.poll())
        assert router.matched([1] * ROWS + [2] * ROWS, ROWS, "one") == 2 * ROWS
        cache.trim(prefixes=True)
        router.follow(events.poll())
        assert not router.blocks


def test_engine_namespaces_are_identified_by_name(sharing: Context) -> None:
    """A namespace has the same identity in every process, however many were created before it."""
    for names in (["adapter"], ["other", "adapter"], [7], [None], ["None"]):
        with small_cache(sharing) as cache:
            events, engine = KVEvents(cache), RequestCache(cache)
            spaces = [engine.namespace(name) for name in names]
            record(engine, [1] * ROWS, spaces[-1])
            _, stored = events.poll()
            assert isinstance(stored, BlockStored)
            # a namespace whose name is None is not the same as no namespace
            hashed = (None,) if names[-1] is None else names[-1]
            assert stored.lora_name == (hashed if isinstance(hashed, str) else repr(hashed))
            assert stored.block_hashes == block_hashes([1] * ROWS, ROWS, hashed)
            assert stored.block_hashes == block_hashes([1] * ROWS, ROWS, spaces[-1].key)
            engine.close()


def test_a_block_is_removed_with_the_last_namespace_of_its_name(sharing: Context) -> None:
    with small_cache(sharing) as cache:
        events, engine, router = KVEvents(cache), RequestCache(cache), Router()
        first = engine.namespace("adapter")
        record(engine, [1] * ROWS, first)
        router.follow(events.poll())
        first.close()
        second = engine.namespace("adapter")
        assert engine.match([1] * (ROWS + 1), second).length == 0
        record(engine, [1] * ROWS + [2] * ROWS, second)
        both = block_hashes([1] * ROWS + [2] * ROWS, ROWS, "adapter")
        (stored,) = events.poll()
        assert stored == BlockStored(both[1:], both[0], [2] * ROWS, ROWS, lora_name="adapter")
        router.follow([stored])
        running = engine.admit([1] * ROWS + [2] * ROWS + [3], second)
        assert isinstance(running, Request)
        assert running.length == 2 * ROWS
        held = cache.stats().prefix_tokens
        cache.trim(prefixes=True)  # evicts prefixes that no request uses
        assert cache.stats().prefix_tokens == held - ROWS, "the first namespace's block"
        assert events.poll() == []
        assert router.matched([1] * ROWS + [2] * ROWS, ROWS, "adapter") == 2 * ROWS
        engine.release(running)
        cache.trim(prefixes=True)
        router.follow(events.poll())
        assert not router.blocks
        engine.close()


def test_with_a_window_a_router_knows_an_upper_bound(backend: str) -> None:
    with open_context(backend) as context:
        if Caps.ALIAS | Caps.READONLY not in context.info.caps:
            pytest.skip("the back end has no prefixes")
        window = {"window": ROWS, "window_tile": ROWS // 2, "max_seq_len": 12 * ROWS}
        dice = random.Random(1)
        limit = 24 * 2 * LAYERS * context.info.granule
        with small_cache(context, memory_limit=limit, **window) as cache:
            events, router = KVEvents(cache), Router()
            prompts = [[dice.randrange(2) for _ in range(dice.randrange(1, 9))] for _ in range(40)]
            equal = less = 0
            for prompt in prompts:
                serve(cache, [word for word in prompt for _ in range(ROWS)])
                router.follow(events.poll())
                for other in prompts[:8]:
                    asked = [word for word in other for _ in range(ROWS)]
                    with cache.match(asked, leave=0) as match:
                        assert match.length <= router.matched(asked, ROWS)
                        equal += match.length == router.matched(asked, ROWS)
                        less += match.length < router.matched(asked, ROWS)
            assert equal > less > 0


def test_an_interrupted_call_emits_no_event(
    sharing: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    with small_cache(sharing) as cache:
        serve(cache, [1] * ROWS)
        events = KVEvents(cache)
        events.poll()
        tree = cache._groups[0].prefixes.tree
        reqid = cache.alloc_reqid()
        assert cache.step(lens(cache, **{f"r{reqid}": 2 * ROWS})) == 0

        def interrupted(*_: object) -> None:
            assert tree.changes, "the change must be recorded by now"
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(tree, "touch", interrupted)
            with pytest.raises(KeyboardInterrupt):
                tokens = [3] * (2 * ROWS)
                # The lookup before the change also updates the LRU order, so it is replaced.
                patch.setattr(tree, "match", lambda *_, **__: _nothing(tree))
                cache.free_reqid(reqid, tokens=tokens)
        assert events.poll() == []
        cache.check_integrity()


def test_changes_are_returned_until_acknowledged(sharing: Context) -> None:
    with small_cache(sharing) as cache:
        assert cache.internals.prefix_changes(-1) == []
        serve(cache, [1] * ROWS)
        serve(cache, [2] * ROWS)
        one, two = cache.internals.prefix_changes(-1)
        assert [one, two] == cache.internals.prefix_changes(-1)
        assert (
            [two]
            == cache.internals.prefix_changes(one.number)
            == cache.internals.prefix_changes(one.number)
        )
        assert cache.internals.prefix_changes() == []
        serve(cache, [3] * ROWS)
        (three,) = cache.internals.prefix_changes(two.number)
        assert three.number == two.number + 1
        assert (
            cache.internals.prefix_changes(three.number) == cache.internals.prefix_changes(-1) == []
        )
        with pytest.raises(TypeError):
            cache.internals.prefix_changes("1")  # type: ignore[arg-type]


def _nothing(tree: object) -> object:
    from pyvmem.kvcache.prefix_tree import Match

    return Match(0, [], tree.root)  # type: ignore[attr-defined]
