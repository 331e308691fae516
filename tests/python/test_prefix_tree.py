# SPDX-License-Identifier: MIT
"""Tests the radix tree of prefixes, and the encoding of token ids as bytes."""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from interrupts_helpers import Interrupted, Interrupts

from pyvmem.errors import InvalidArgument
from pyvmem.kvcache.prefix_tree import Node, PrefixTree, TokenIds

UNIT = 4
PAGES = 3  # pages per unit


@dataclass(eq=False)
class Units:
    """A span that records the prefix ending at each of its units."""

    ends: list[tuple[int, ...]]

    @property
    def pages(self) -> int:
        return PAGES * len(self.ends)

    def split(self, units: int) -> tuple[Units, Units]:
        assert 0 < units < len(self.ends)
        left, right = Units(self.ends[:units]), Units(self.ends[units:])
        self.ends = []  # must not be used again
        return left, right


Tree = PrefixTree[Units]


def maker(tokens: list[int], unit: int = UNIT) -> Callable[[int, int], Units]:
    def make(start: int, stop: int) -> Units:
        assert start < stop
        return Units([tuple(tokens[: (at + 1) * unit]) for at in range(start, stop)])

    return make


def add(tree: Tree, tokens: list[int]) -> Node[Units]:
    return tree.insert(tokens, maker(tokens, tree.unit)).node


def units(*ids: int) -> list[int]:
    """Returns one unit of tokens per argument, filled with that id."""
    return [one for one in ids for _ in range(UNIT)]


def length(tree: Tree, tokens: Any) -> int:
    """Checks the spans of a match and returns its length."""
    match = tree.match(tokens)
    ends = [end for span, used in match.parts for end in span.ends[:used]]
    assert ends == [tuple(list(tokens)[:at]) for at in range(UNIT, match.length + 1, UNIT)]
    assert match.node.end >= match.length
    assert tree.check() == []
    return match.length


def locked_pages(tree: Tree) -> int:
    """Returns the number of pages in pinned nodes and their ancestors."""
    locked = {one for node in tree if node.pins for one in node.path()}
    return sum(node.span.pages for node in locked)


def match_and_pin(tree: Tree, tokens: Any) -> Node[Units]:
    """Splits a match's node after the matched part; pins and returns the first half."""
    found = tree.match(tokens)
    node = tree.cut_at(found.node, found.length)
    assert node.end == found.length
    tree.pin(node)
    return node


# ---- matching and recording ----------------------------------------------------------------------


def test_a_match_has_whole_units() -> None:
    tree: Tree = PrefixTree(UNIT)
    assert length(tree, units(1, 2)) == 0
    add(tree, [*units(1, 2, 3), 9, 9])
    assert length(tree, units(1, 2, 3, 4)) == 3 * UNIT
    assert length(tree, units(1, 2)) == 2 * UNIT
    assert length(tree, [*units(1, 2), 3, 3, 3, 9]) == 2 * UNIT
    assert length(tree, [*units(1), 2, 2]) == UNIT
    assert length(tree, [1, 1, 1]) == 0
    assert length(tree, []) == 0
    assert length(tree, units(2, 1)) == 0


def test_new_units_are_created_once_and_others_shared() -> None:
    tree: Tree = PrefixTree(UNIT)
    made: list[tuple[int, int]] = []

    def insert(tokens: list[int]) -> tuple[int, int]:
        def make(start: int, stop: int) -> Units:
            made.append((start, stop))
            return maker(tokens)(start, stop)

        done = tree.insert(tokens, make)
        assert tree.check() == []
        assert list(done.node.tokens())[: done.length] == tokens[: done.length]
        return done.start, done.length

    assert insert(units(1, 2, 3)) == (0, 12)
    assert insert(units(1, 2, 3)) == (12, 12)
    assert insert(units(1, 2)) == (8, 8)
    assert insert([*units(1), 2, 2, 2]) == (4, 4)
    assert insert(units(1, 2, 3, 4)) == (12, 16)
    assert insert(units(1, 5)) == (4, 8)
    assert insert([1, 1]) == (0, 0)
    assert made == [(0, 3), (3, 4), (1, 2)]
    assert (len(tree), tree.tokens, tree.pages) == (4, 5 * UNIT, 5 * PAGES)
    assert [list(node.tokens()) for node in tree] == [
        units(1),
        units(1, 2, 3),
        units(1, 2, 3, 4),
        units(1, 5),
    ]


def test_a_split_keeps_the_node_below() -> None:
    tree: Tree = PrefixTree(UNIT)
    node = add(tree, units(1, 2, 3))
    tree.pin(node)
    other = add(tree, units(1, 2, 7))
    assert node.end == 3 * UNIT
    assert node.units == 1
    assert node.parent is other.parent
    assert [one.units for one in node.path()] == [2, 1]
    assert locked_pages(tree) == 3 * PAGES
    assert tree.evict(100)[0].ends == [tuple(units(1, 2, 7))]
    assert length(tree, units(1, 2, 3)) == 3 * UNIT
    tree.unpin(node)
    assert sum(span.pages for span in tree.evict(100)) == 3 * PAGES
    assert len(tree) == tree.tokens == tree.pages == 0


def test_a_failed_insert_changes_nothing() -> None:
    tree: Tree = PrefixTree(UNIT)
    add(tree, units(0, 0))
    add(tree, units(0, 1, 2, 3))

    def fail(start: int, stop: int) -> Units:
        raise MemoryError(f"{start} {stop}")

    before = (tree.tokens, tree.pages)
    with pytest.raises(MemoryError, match="2 3"):
        tree.insert(units(0, 1, 9), fail)
    assert (tree.tokens, tree.pages) == before
    assert tree.check() == []
    assert length(tree, units(0, 1, 9)) == 2 * UNIT
    assert length(tree, units(0, 1, 2, 3)) == 4 * UNIT


def test_limit_leaves_a_token_to_compute() -> None:
    tree: Tree = PrefixTree(UNIT)
    add(tree, units(1, 2))
    assert tree.match(units(1, 2), 2 * UNIT - 1).length == UNIT
    assert tree.match(units(1, 2), UNIT).length == UNIT
    assert tree.match(units(1, 2), UNIT - 1).length == 0
    assert tree.match(units(1, 2), 1000).length == 2 * UNIT
    assert tree.match(units(1, 2), 0).parts == []
    with pytest.raises(InvalidArgument, match="limit is -1"):
        tree.match(units(1, 2), -1)


def test_long_runs_agree_up_to_the_unit_that_differs() -> None:
    tree: Tree = PrefixTree(1)
    tokens = list(range(3000))
    add(tree, tokens)
    for differs in (0, 1, 2, 63, 64, 1499, 1500, 2998, 2999):
        other = [*tokens[:differs], 1 << 31, *tokens[differs + 1 :]]
        assert tree.match(other).length == differs
        assert tree.match(tokens[:differs]).length == differs
    assert tree.match([*tokens, 5]).length == 3000


# ---- pins ----------------------------------------------------------------------------------------


def test_a_pin_keeps_the_node_and_its_ancestors() -> None:
    tree: Tree = PrefixTree(UNIT)
    low = add(tree, units(1, 2))
    add(tree, units(1, 2, 3))
    add(tree, units(1, 4))
    tree.pin(low)
    tree.pin(low)
    assert locked_pages(tree) == 2 * PAGES
    assert sum(span.pages for span in tree.evict(100)) == 2 * PAGES
    tree.unpin(low)
    assert tree.evict(100) == []
    assert locked_pages(tree) == tree.pages
    tree.unpin(low)
    assert tree.pages == 2 * PAGES
    assert locked_pages(tree) == 0
    with pytest.raises(InvalidArgument, match="not pinned"):
        tree.unpin(low)
    assert sum(span.pages for span in tree.evict(100)) == 2 * PAGES
    assert tree.check() == []


def test_a_match_is_pinned() -> None:
    tree: Tree = PrefixTree(UNIT)
    add(tree, units(1, 2))
    node = match_and_pin(tree, units(1, 2, 3))
    assert node.pins == 1
    assert tree.evict(1) == []
    assert tree.cut_at(node, UNIT - 1) is tree.root
    with pytest.raises(InvalidArgument, match="0 tokens is not in this tree, or was evicted"):
        tree.pin(tree.root)
    tree.unpin(node)
    assert tree.check() == []


def test_a_pinned_match_keeps_only_the_matched_units() -> None:
    tree: Tree = PrefixTree(UNIT)
    node = add(tree, units(1, 2, 3, 4))
    upper = match_and_pin(tree, units(1, 2, 9))
    assert (upper.end, upper.units) == (2 * UNIT, 2)
    assert node.parent is upper
    assert locked_pages(tree) == 2 * PAGES
    assert sum(span.pages for span in tree.evict(100)) == 2 * PAGES
    assert length(tree, units(1, 2, 3, 4)) == 2 * UNIT
    tree.unpin(upper)
    assert tree.check() == []


def test_evicted_prefixes_cannot_be_pinned() -> None:
    tree: Tree = PrefixTree(UNIT)
    node = add(tree, units(1, 2, 3))
    match = tree.match(units(1, 2, 3))
    assert sum(span.pages for span in tree.evict(1)) == PAGES  # only the last unit
    tree.pin(node)
    tree.unpin(node)
    assert node in tree
    assert node.end == 2 * UNIT < match.length
    tree.evict(100)
    assert node not in tree
    for call in (tree.pin, tree.unpin):
        with pytest.raises(InvalidArgument, match="was evicted"):
            call(node)  # type: ignore[operator]
    with pytest.raises(InvalidArgument, match="is not in this tree"):
        PrefixTree[Units](UNIT).pin(tree.root)


# ---- eviction ------------------------------------------------------------------------------------


def test_the_least_recently_used_leaf_is_evicted_first() -> None:
    tree: Tree = PrefixTree(UNIT)
    for last in (1, 2, 3):
        add(tree, units(0, last))
    tree.match(units(0, 1))
    gone = [tree.evict(1)[0].ends[0][-1] for _ in range(4)]
    assert gone == [2, 3, 1, 0]


def test_a_leaf_is_cut_if_that_is_enough() -> None:
    tree: Tree = PrefixTree(UNIT)
    add(tree, units(1, 2, 3, 4, 5))
    spans = tree.evict(PAGES + 1)
    assert [span.ends for span in spans] == [
        [tuple(units(1, 2, 3, 4)), tuple(units(1, 2, 3, 4, 5))]
    ]
    assert length(tree, units(1, 2, 3, 4, 5)) == 3 * UNIT
    assert (tree.tokens, tree.pages) == (3 * UNIT, 3 * PAGES)
    add(tree, units(1, 2, 3, 6))
    assert length(tree, units(1, 2, 3, 6)) == 4 * UNIT


def test_evict_frees_the_requested_pages_or_all() -> None:
    tree: Tree = PrefixTree(UNIT)
    assert tree.evict(5) == []
    add(tree, units(1, 2))
    assert tree.evict(0) == []
    with pytest.raises(InvalidArgument, match="pages is -1"):
        tree.evict(-1)
    assert sum(span.pages for span in tree.evict(1000)) == 2 * PAGES


def test_uneven_pages() -> None:
    """Checks that another cut follows if one cut frees too little."""

    class Heavy(Units):  # the first unit holds all pages
        @property
        def pages(self) -> int:
            return 50 if self.ends and len(self.ends[0]) == UNIT else 0

        def split(self, units: int) -> tuple[Units, Units]:
            return Heavy(self.ends[:units]), Heavy(self.ends[units:])

    tree: Tree = PrefixTree(UNIT)
    tokens = units(*range(6))
    tree.insert(tokens, lambda start, stop: Heavy(maker(tokens)(start, stop).ends))
    assert sum(span.pages for span in tree.evict(1)) == 50
    assert len(tree) == tree.pages == 0
    assert tree.check() == []


# ---- against a plain model -----------------------------------------------------------------------


class Model:
    """Keeps every recorded prefix, in whole units, and the time of its last use."""

    def __init__(self, unit: int) -> None:
        self.tree: Tree = PrefixTree(unit)
        self.unit = unit
        self.used: dict[tuple[int, ...], int] = {}
        self.pins: list[tuple[Node[Units], tuple[int, ...]]] = []
        self.time = 0

    def prefixes(self, tokens: list[int]) -> list[tuple[int, ...]]:
        return [tuple(tokens[:at]) for at in range(self.unit, len(tokens) + 1, self.unit)]

    def touch(self, node: Node[Units]) -> None:
        self.time += 1
        for prefix in self.prefixes(list(node.tokens())):
            self.used[prefix] = self.time

    def known(self, tokens: list[int]) -> list[tuple[int, ...]]:
        return [prefix for prefix in self.prefixes(tokens) if prefix in self.used]

    def insert(self, tokens: list[int]) -> None:
        before = self.known(tokens)
        done = self.tree.insert(tokens, maker(tokens, self.unit))
        assert done.start == len(before) * self.unit
        assert done.length == len(tokens) // self.unit * self.unit
        self.used |= dict.fromkeys(self.prefixes(tokens), 0)
        self.touch(done.node)

    def match(self, tokens: list[int], pin: bool) -> None:
        expected = self.known(tokens)
        found = self.tree.match(tokens)
        assert found.length == len(expected) * self.unit
        assert [end for span, used in found.parts for end in span.ends[:used]] == expected
        self.touch(found.node)
        node = self.tree.cut_at(found.node, found.length) if pin else self.tree.root
        if node.end:
            self.tree.pin(node)
            self.pins.append((node, tuple(node.tokens())))

    def unpin(self, which: int) -> None:
        if self.pins:
            node, _ = self.pins.pop(which % len(self.pins))
            self.tree.unpin(node)
            self.touch(node)

    def locked(self) -> set[tuple[int, ...]]:
        return {prefix for _, tokens in self.pins for prefix in self.prefixes(list(tokens))}

    def evict(self, pages: int) -> None:
        spans = self.tree.evict(pages)
        gone = [end for span in spans for end in span.ends]
        assert len(set(gone)) == len(gone)
        assert not self.locked() & set(gone)
        latest = max((self.used.pop(prefix) for prefix in gone), default=0)
        freed = sum(span.pages for span in spans)
        if freed < pages:
            assert set(self.used) == self.locked()
        else:
            assert freed < pages + PAGES  # at most one unit more than needed
        stay = [one for one in self.used if one not in self.locked()]
        parents = {one[: -self.unit] for one in self.used}
        assert all(self.used[leaf] >= latest for leaf in stay if leaf not in parents)

    def check(self) -> None:
        tree = self.tree
        assert tree.check() == []
        assert tree.tokens == len(self.used) * self.unit
        assert tree.pages == len(self.used) * PAGES
        assert locked_pages(tree) == len(self.locked()) * PAGES
        held = sorted(end for node in tree for end in node.span.ends)
        assert held == sorted(self.used)


TOKENS = st.lists(st.sampled_from((0, 1, 1 << 31)), max_size=14)
OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("insert"), TOKENS),
        st.tuples(st.just("match"), TOKENS, st.booleans()),
        st.tuples(st.just("unpin"), st.integers(0, 5)),
        st.tuples(st.just("evict"), st.integers(0, 20)),
    ),
    max_size=40,
)


@settings(max_examples=150, deadline=None)
@given(unit=st.integers(1, 3), operations=OPERATIONS)
def test_against_a_plain_model(unit: int, operations: list[tuple[Any, ...]]) -> None:
    model = Model(unit)
    for name, *arguments in operations:
        getattr(model, name)(*arguments)
        model.check()


@pytest.mark.parametrize("seed", range(3))
def test_long_against_a_plain_model(seed: int) -> None:
    rng = random.Random(seed)
    model = Model(2)
    chats: list[list[int]] = [[]]
    for at in range(600):
        tokens = [*rng.choice(chats)[: rng.randint(0, 60)], *rng.choices(range(3), k=9)]
        pick = rng.random()
        if pick < 0.5:
            model.insert(tokens)
            chats.append(tokens)
        elif pick < 0.75:
            model.match(tokens, pin=rng.random() < 0.3)
        elif pick < 0.85:
            model.unpin(rng.randrange(100))
        else:
            model.evict(rng.randint(0, 120))
        if at % 20 == 0:
            model.check()
    model.check()


def test_check_finds_inconsistencies() -> None:
    def broken(change: Callable[[Tree, Node[Units]], None]) -> str:
        tree: Tree = PrefixTree(UNIT)
        node = add(tree, units(1, 2))
        add(tree, units(1, 3))
        assert tree.check() == []
        change(tree, node)
        return "; ".join(tree.check())

    def set_tree(name: str, value: Any) -> Callable[[Tree, Node[Units]], None]:
        return lambda tree, node: setattr(tree, name, value)

    def set_node(name: str, value: Any) -> Callable[[Tree, Node[Units]], None]:
        return lambda tree, node: setattr(node, name, value)

    assert "pages is 1; the nodes have 9" in broken(set_tree("pages", 1))
    assert "tokens is 0" in broken(set_tree("tokens", 0))
    assert "its parent ends at token 4" in broken(set_node("end", 9))
    assert "under another unit" in broken(set_node("_run", bytes(16)))
    assert "are not 2 units" in broken(set_node("units", 2))
    assert "order of use has 2 nodes" in broken(lambda tree, node: tree._order.pop(node))


# ---- token ids -----------------------------------------------------------------------------------

IDS = [0, 1, 65535, 70000, (1 << 32) - 1]


@pytest.mark.parametrize(
    "given",
    [
        IDS,
        tuple(IDS),
        array("I", IDS),
        array("q", IDS),
        numpy.array(IDS),
        numpy.array(IDS, dtype=numpy.uint32),
        numpy.array(IDS, dtype=">u4"),
        numpy.array([IDS, IDS]).T[:, 0],
        [numpy.int64(one) for one in IDS],
        torch.tensor(IDS),
        list(torch.tensor(IDS)),
        memoryview(array("q", IDS)),
        TokenIds(IDS),
        TokenIds(IDS[:2]) + IDS[2:],
        TokenIds.from_bytes(array("I", IDS).tobytes()),
    ],
    ids=lambda given: type(given).__name__,
)
def test_every_form_of_ids_is_equivalent(given: Any) -> None:
    ids = TokenIds(given)
    assert list(ids) == IDS
    assert len(ids) == len(IDS)
    assert ids == TokenIds(IDS)
    assert hash(ids) == hash(TokenIds(IDS))
    tree: Tree = PrefixTree(1)
    add(tree, IDS)
    assert tree.match(given).length == len(IDS)


def test_ranges_and_nothing_are_ids_too() -> None:
    assert list(TokenIds(range(5))) == [0, 1, 2, 3, 4]
    for nothing in ([], (), numpy.array([], dtype=int), torch.tensor([], dtype=torch.int64)):
        assert len(TokenIds(nothing)) == 0
    assert TokenIds([1]) != [1]
    assert TokenIds.of(ids := TokenIds([1])) is ids


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([5, -1], "token id 1 is -1; it must be between 0 and 4294967295"),
        ([1 << 32], "token id 0 is 4294967296"),
        ([1 << 70], "token id 0 is 1180591620717411303424"),
        ([1, 2.0], "token id 1 is 2.0 of type float"),
        ([1, None], "token id 1 is None"),
        ([[1, 2]], r"token id 0 is \[1, 2\]"),
        (["1"], "token id 0 is '1'"),
        ("123", "must be a sequence of whole numbers, not '123' of type str"),
        (b"1234", "not b'1234' of type bytes"),
        (bytearray(4), "of type bytearray"),
        (7, "not 7 of type int"),
        (None, "not None"),
        ({1, 2}, "of type set"),
        (array("f", [1.0]), "of type float"),
        (numpy.array([3, -2]), "a token id is -2"),
        (numpy.array([1 << 32]), "a token id is 4294967296"),
        (numpy.array([1.0]), "not an array of float64"),
        (numpy.array([True]), "not an array of bool"),
        (numpy.array([[1]]), r"one dimension, not the shape \(1, 1\)"),
        (numpy.int64(3), r"one dimension, not the shape \(\)"),
        (torch.tensor([-7]), "a token id is -7"),
        (torch.tensor([1.0], dtype=torch.bfloat16), "not a tensor of torch.bfloat16"),
        (torch.tensor([[1, 2]]), r"the shape \(1, 2\)"),
    ],
)
def test_invalid_ids(given: Any, message: str) -> None:
    tree: Tree = PrefixTree(1)
    with pytest.raises(InvalidArgument, match=message):
        TokenIds(given)
    with pytest.raises(InvalidArgument, match=message):
        tree.match(given)
    with pytest.raises(InvalidArgument, match=message):
        tree.insert(given, maker([]))
    assert len(tree) == 0


def test_bytes_that_are_not_ids() -> None:
    with pytest.raises(InvalidArgument, match="5 bytes are not a whole number of ids"):
        TokenIds.from_bytes(bytes(5))


@pytest.mark.parametrize("unit", [0, -1, 1 << 40, 1.5, None, "4"])
def test_invalid_units(unit: Any) -> None:
    with pytest.raises(InvalidArgument, match="unit"):
        PrefixTree(unit)


def test_the_root_has_no_span() -> None:
    tree: Tree = PrefixTree(UNIT)
    assert tree.root.is_leaf
    assert list(tree.root.tokens()) == []
    with pytest.raises(InvalidArgument, match="has no span"):
        _ = tree.root.span


def test_an_interrupted_use_leaves_a_valid_eviction_order() -> None:
    """The interrupted call has marked only some nodes of the path as used; children must still be
    evicted first.
    """
    for point in range(1, 1000):
        tree = Tree(UNIT)
        for tokens in (units(1, 2, 3), units(1, 2, 4), units(1, 5), units(6)):
            add(tree, tokens)
        try:
            Interrupts(point).run(lambda tree=tree: tree.match(units(1, 2, 3)))
        except Interrupted:
            pass
        else:
            assert point > 10, "every point of the call was interrupted"
            return
        assert tree.check() == []
        assert sum(span.pages for span in tree.evict(100)) == 6 * PAGES
    raise AssertionError("the call has too many points")
