# SPDX-License-Identifier: MIT
"""Tests the check for the vLLM internals that the pool uses, and where KV tensors are placed."""

from __future__ import annotations

import zipfile
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pyvmem.elastic.engine_source import Source, Symbol, missing
from pyvmem.vllm.internals import INTERNALS


def write(root: Path, symbols: list[Symbol]) -> None:
    """Writes a package that defines only these names."""
    modules: dict[str, dict[str, list[Symbol]]] = defaultdict(lambda: defaultdict(list))
    for symbol in symbols:
        owner, _, member = symbol.name.partition(".")
        modules[symbol.module][owner] += [symbol] if member else []
    for module, owners in modules.items():
        lines = []
        for owner, members in owners.items():
            lines.append(f"class {owner}:\n    pass")
            for symbol in members:
                member = symbol.name.partition(".")[2]
                if symbol.use == "read":
                    lines.append(f"    {member}: int = 0")
                else:
                    takes = ", ".join(("self", *symbol.takes))
                    calls = "; ".join(f"{one}()" for one in symbol.calls) or "pass"
                    lines.append(f"    def {member}({takes}, **other):\n        {calls}")
        path = root / f"{module.replace('.', '/')}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("\n".join(lines) + "\n", "utf-8")


def test_nothing_is_missing_from_a_complete_package(tmp_path: Path) -> None:
    write(tmp_path, list(INTERNALS))
    assert missing(Source(tmp_path, "vllm"), INTERNALS) == []


@pytest.mark.parametrize("gone", INTERNALS, ids=lambda one: one.name)
def test_each_missing_name_is_reported(tmp_path: Path, gone: Symbol) -> None:
    write(tmp_path, [one for one in INTERNALS if one is not gone])
    owner = gone.name.partition(".")[0]
    class_alone = gone.name == owner and any(one.name.startswith(owner + ".") for one in INTERNALS)
    assert class_alone or missing(Source(tmp_path, "vllm"), INTERNALS) == [
        f"{gone.name} (vllm.{gone.module})"
    ]


@pytest.mark.parametrize(
    "symbol", [one for one in INTERNALS if one.takes], ids=lambda one: one.name
)
def test_each_missing_parameter_is_reported(tmp_path: Path, symbol: Symbol) -> None:
    for takes in {symbol.takes[1:], symbol.takes[::-1]} - {symbol.takes}:
        other = Symbol(symbol.module, symbol.name, symbol.use, symbol.why, takes, symbol.calls)
        write(tmp_path, [other if one is symbol else one for one in INTERNALS])
        text = f"{symbol.name}({', '.join(symbol.takes)}) (vllm.{symbol.module})"
        assert missing(Source(tmp_path, "vllm"), INTERNALS) == [text]


@pytest.mark.parametrize(
    "symbol", [one for one in INTERNALS if one.calls], ids=lambda one: one.name
)
def test_a_missing_call_is_reported(tmp_path: Path, symbol: Symbol) -> None:
    other = Symbol(symbol.module, symbol.name, symbol.use, symbol.why, symbol.takes)
    write(tmp_path, [other if one is symbol else one for one in INTERNALS])
    assert missing(Source(tmp_path, "vllm"), INTERNALS) == [
        f"the call of {symbol.calls[0]} in {symbol.name}"
    ]


def test_a_name_in_a_base_an_attribute_and_a_wheel(tmp_path: Path) -> None:
    files = {
        "vllm/a.py": "from vllm.b.c import Base as Old\nclass Here(Old):\n    x, y = 1, 2\n",
        "vllm/b/__init__.py": "",
        "vllm/b/c.py": "class Base:\n    def __init__(self):\n        self.found: int = 1\n"
        "    @property\n    def old(self): return self.found\n",
        "vllm/d/__init__.py": "from vllm.b.c import Base\ndef f(a): pass\n",
    }
    with zipfile.ZipFile(tmp_path / "vllm.whl", "w") as wheel:
        for name, text in files.items():
            wheel.writestr(name, text)
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(text, "utf-8")
    for root in (tmp_path / "vllm", zipfile.Path(tmp_path / "vllm.whl", "vllm/")):
        source = Source(root, "vllm")
        for module, name, where in (
            *(("a", "Here.found", "b.c"), ("a", "Here.old", "b.c"), ("a", "Here.y", "a")),
            *(("d", "Base.found", "b.c"), ("d", "f", "d"), ("a", "Here", "a")),
        ):
            found = source.find(module, name)
            assert found is not None
            assert found[0] == where
        for module, name in (("a", "Here.z"), ("a", "Old.z"), ("nowhere", "x"), ("d", "f.x")):
            assert source.find(module, name) is None
        module, node = source.find("d", "f") or ("", None)
        assert node is not None
        assert source.segment(module, node) == "def f(a): pass"


# ---- placement of KV tensors ---------------------------------------------------------------------


@dataclass
class Tensor:
    """Mimics `KVCacheTensor` of 0.29 and later."""

    size: int
    layer_stride: int
    block_stride: int
    offset: int = 0
    host_resident: bool = False
    layers: tuple[str, ...] = ("a",)


@dataclass
class Before:
    """Mimics `KVCacheTensor` of 0.28 and earlier."""

    size: int
    block_stride: int = 0


@dataclass
class Config:
    """Mimics `KVCacheConfig`."""

    num_blocks: int
    kv_cache_tensors: list[Any]


@pytest.fixture
def opened() -> Any:
    """Yields a function that creates memory on the host, and the list of what it has created."""
    pytest.importorskip("torch")
    from pyvmem.elastic.memory import KVMemory, open_context

    made: list[Any] = []

    def open_memory(blocks: int, sizes: list[int]) -> Any:
        made.append(KVMemory(open_context("host", 0, 4096, 1 << 20), blocks, sizes))
        return made[-1]

    yield SimpleNamespace(open=open_memory, made=made)
    for one in made:
        one.close()


BLOCKS = 4


@pytest.mark.parametrize(
    ("tensors", "text"),
    [
        ([Tensor(64, 16, 4), Tensor(64, 16, 4, host_resident=True)], "KV tensors in host memory"),
        ([Tensor(64, 32, 2)], r"layers are \[32\] bytes and whose blocks are \[2\] bytes apart, 4"),
        ([Tensor(64, 16, 4), Tensor(64, 32, 8)], r"layers are \[16, 32\] bytes .*BLHNC"),
    ],
)
def test_arrangements_that_are_rejected(opened: Any, tensors: list[Any], text: str) -> None:
    from pyvmem.vllm.allocation import place_tensors

    with pytest.raises(NotImplementedError, match=text):
        place_tensors(Config(BLOCKS, tensors), opened.open)
    assert opened.made == []


def test_zeros_of_kv_sizes_return_our_tensors(opened: Any) -> None:
    """Layers have their own tensors or share one; torch allocates all other tensors."""
    torch = pytest.importorskip("torch")
    from pyvmem.vllm.allocation import place_tensors

    packed, own = Before(BLOCKS * 8192, 8192), Before(BLOCKS * 4096)
    config = Config(BLOCKS, [own, packed, packed, Before(BLOCKS * 4096)])
    same, answers = place_tensors(config, opened.open)
    assert same is config
    (memory,) = opened.made
    assert [one.tensors for one in memory.geometry.classes] == [2, 1]
    with answers:
        other = torch.zeros(own.size, dtype=torch.int32)
        small = torch.zeros(8, dtype=torch.int8)
        first = torch.zeros(own.size, dtype=torch.int8, device="cpu")
        second = torch.zeros(size=(packed.size,), dtype=torch.int8)
    with pytest.raises(RuntimeError, match="did not allocate 1 of its KV tensors"):
        answers.check()
    with answers:
        third = torch.zeros(own.size, dtype=torch.int8)
        after = torch.zeros(own.size, dtype=torch.int8)
    answers.check()
    where = [memory.begin(0, 0), memory.begin(1, 0), memory.begin(0, 1)]
    found = [one.data_ptr() - memory._reservation.addr for one in (first, second, third)]
    assert found == where == [0, 2 * memory.span(0), memory.span(0)]
    ours = {one.data_ptr() for one in (first, second, third)}
    assert not ours & {one.data_ptr() for one in (other, small, after)}
    del first, second, third


def test_layers_of_one_buffer_are_moved_apart(opened: Any) -> None:
    torch = pytest.importorskip("torch")
    from pyvmem.vllm.allocation import place_tensors

    layer = BLOCKS * 4096
    first = Tensor(3 * layer, layer, 4096, layers=("a", "b", "c"))
    config = Config(BLOCKS, [first, Tensor(3 * layer, layer, 4096, layer)])
    moved, answers = place_tensors(config, opened.open)
    (memory,) = opened.made
    span = memory.span(0)
    assert span > layer
    assert [(one.size, one.layer_stride, one.offset) for one in moved.kv_cache_tensors] == [
        (3 * span, span, 0),
        (3 * span, span, span),
    ]
    assert config.kv_cache_tensors[0].layer_stride == layer, "the caller's object is unchanged"
    with answers:
        buffer = torch.zeros(3 * span, dtype=torch.int8, device=torch.device("cpu"))
    answers.check()
    assert buffer.data_ptr() == memory._reservation.addr
    del buffer


def test_layers_of_two_sizes_form_two_groups(opened: Any) -> None:
    """For example, a draft model's layers differ from the main model's; each group starts at a page
    boundary.
    """
    pytest.importorskip("torch")
    from pyvmem.vllm.allocation import place_tensors

    large, small = BLOCKS * 8192, BLOCKS * 4096
    size = 2 * large + small
    tensors = [
        Tensor(size, large, 8192, layers=("a",)),
        Tensor(size, small, 4096, large, layers=("b",)),
        Tensor(size, large, 8192, large + small, layers=("c",)),
    ]
    moved, answers = place_tensors(Config(BLOCKS, tensors), opened.open)
    (memory,) = opened.made
    assert [(one.block_bytes, one.tensors) for one in memory.geometry.classes] == [
        (4096, 1),
        (8192, 2),
    ]
    span = memory.span(0)
    assert memory.span(1) == span == 2 << 20
    assert [one.offset for one in moved.kv_cache_tensors] == [span, 0, 2 * span]
    assert {one.size for one in moved.kv_cache_tensors} == {3 * span}
    del answers


def test_layers_of_two_groups_share_a_region(opened: Any) -> None:
    """A state group and an attention group of equal size use three regions and share two."""
    pytest.importorskip("torch")
    from pyvmem.vllm.allocation import place_tensors

    layer = BLOCKS * 4096
    states = Tensor(3 * layer, layer, 4096, layers=("a", "b", "c"))
    attention = Tensor(3 * layer, layer, 4096, layers=("d", "e"))
    moved, answers = place_tensors(Config(BLOCKS, [states, attention]), opened.open)
    (memory,) = opened.made
    assert [(one.block_bytes, one.tensors) for one in memory.geometry.classes] == [(4096, 3)]
    assert {(one.offset, one.layer_stride) for one in moved.kv_cache_tensors} == {
        (0, memory.span(0))
    }
    del answers


def test_a_copy_covers_the_whole_block(opened: Any) -> None:
    """The copy covers the tensors of every group, and no other block."""
    torch = pytest.importorskip("torch")
    from pyvmem.elastic.geometry import runs_of

    memory = opened.open(BLOCKS, [BLOCKS * 8192, BLOCKS * 4096])
    kinds = range(len(memory.geometry.classes))
    memory.grow(runs_of([range(memory.geometry.num_pages(kind)) for kind in kinds]))
    views = []
    for kind, size in ((1, 8192), (0, 4096)):
        at = memory.begin(kind, 0)
        view = memory.buffer()[at : at + BLOCKS * size].view(BLOCKS, size)
        view.copy_(torch.arange(BLOCKS, dtype=torch.int8).unsqueeze(1).expand(BLOCKS, size))
        views.append(view)
    memory.copy([(1, 3), (2, 0)])
    for view in views:
        assert [set(block.tolist()) for block in view] == [{2}, {1}, {2}, {1}]
    del view, views


def test_one_buffer_of_whole_blocks_stays(opened: Any) -> None:
    pytest.importorskip("torch")
    from pyvmem.vllm.allocation import place_tensors

    config = Config(BLOCKS, [Tensor(2 * BLOCKS * 4096, 4096, 8192)])
    placed, answers = place_tensors(config, opened.open)
    (kind,) = opened.made[0].geometry.classes
    assert (kind.tensors, kind.block_bytes) == (1, 8192)
    assert placed.kv_cache_tensors[0].layer_stride == 4096
    del answers


def test_a_model_without_kv_tensors(opened: Any) -> None:
    from pyvmem.vllm.allocation import place_tensors

    config = Config(1, [])
    placed, answers = place_tensors(config, opened.open)
    answers.check()
    assert placed is config
    assert opened.made == []
