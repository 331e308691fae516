# SPDX-License-Identifier: MIT
"""Checks that an error about a wrong argument names the caller's operation."""

from __future__ import annotations

import ast
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from pyvmem.engine import Policy
from pyvmem.errors import InvalidArgument
from pyvmem.kvcache import KVCacheConfig, LayerShape, StateShape, layer_shapes
from pyvmem.layouts import shape_of
from pyvmem.plumbing.validation import bounded

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("call", "op"),
    [
        (lambda: KVCacheConfig(0, 1, 1), "KVCache"),
        (lambda: LayerShape(0, 1), "LayerShape"),
        (lambda: StateShape(), "StateShape"),
        (lambda: layer_shapes(SimpleNamespace()), "layer_shapes"),
        (lambda: shape_of("no such model"), "shape_of"),
        (lambda: Policy(max_batch=0), "Policy"),
    ],
)
def test_the_operation_is_that_of_the_caller(call: Callable[[], object], op: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        call()
    assert caught.value.op == op


def test_the_value_and_the_limit_are_named() -> None:
    with pytest.raises(InvalidArgument, match="rows is 9; it must be between 1 and 8") as caught:
        bounded("rows", 9, 1, 8, op="test")
    assert caught.value.limit == 8


def test_only_the_cache_names_itself() -> None:
    found = []
    for path in sorted((ROOT / "pyvmem").rglob("*.py")):
        if path.is_relative_to(ROOT / "pyvmem" / "kvcache"):
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = node.module if isinstance(node, ast.ImportFrom) else None
            if names == "pyvmem.kvcache.checks" or (
                isinstance(node, ast.keyword)
                and node.arg == "op"
                and isinstance(node.value, ast.Constant)
                and node.value.value == "KVCache"
            ):
                found.append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert not found, "\n".join(found)
