# SPDX-License-Identifier: MIT
"""Checks an engine's source for the symbols that a plug-in uses, without importing the engine.

The result decides whether an unknown version is tried or rejected. `scripts/vllm_internals.py`
uses this module to compare two releases. A plug-in uses a symbol in one of four ways:

    replaced     our function runs instead of the engine's, on its class or on one object
    overridden   a method of our subclass overrides it and calls it
    called       we call it
    read         we read the attribute
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from zipfile import Path as ZipPath

__all__ = ["Symbol", "Source", "missing"]


@dataclass(frozen=True)
class Symbol:
    """A function, class, method or attribute of an engine.

    Attributes:
        module: name of the module, relative to the engine's package.
        name: ``function``, ``Class`` or ``Class.member``.
        use: replaced, overridden, called or read.
        why: why we use it, in a few words.
        takes: parameters that we pass or rely on, in order.
        calls: calls that its body must contain, since our code runs inside them.
    """

    module: str
    name: str
    use: str
    why: str
    takes: tuple[str, ...] = ()
    calls: tuple[str, ...] = ()


_Node = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Assign | ast.AnnAssign


class Source:
    """An engine's source, parsed without importing it.

    Args:
        root: the package's folder on disk or in a wheel (`zipfile.Path`).
        package: the package's name.
    """

    def __init__(self, root: Path | ZipPath, package: str) -> None:
        self.package = package
        self._root = root
        self._text = functools.cache(self._read)
        self._tree = functools.cache(self._parse)

    def _read(self, module: str) -> str:
        path = self._root
        for part in module.split("."):
            path = path / part if (path / part).is_dir() else path / f"{part}.py"
        path = path / "__init__.py" if path.is_dir() else path
        return path.read_text(encoding="utf-8") if path.is_file() else ""

    def _parse(self, module: str) -> ast.Module:
        return ast.parse(self._text(module))

    def find(self, module: str, name: str) -> tuple[str, _Node] | None:
        """Returns the module and the node that define `name`, or None if there are none.

        Members are also looked up in base classes.
        """
        owner, _, member = name.partition(".")
        for node in self._tree(module).body:
            if isinstance(node, _Node) and owner in _names(node):
                if not member or not isinstance(node, ast.ClassDef):
                    return (module, node) if not member else None
                return self._member(module, node, member)
            if isinstance(node, ast.ImportFrom) and node.module and not node.level:
                for alias in node.names:
                    known = node.module.startswith(f"{self.package}.")
                    if (alias.asname or alias.name) == owner and known:
                        rest = f"{alias.name}.{member}" if member else alias.name
                        return self.find(node.module.removeprefix(f"{self.package}."), rest)
        return None

    def _member(self, module: str, owner: ast.ClassDef, name: str) -> tuple[str, _Node] | None:
        for node in owner.body:
            if isinstance(node, _Node) and name in _names(node):
                return module, node
        for one in ast.walk(owner):  # self.name = ..., usually in __init__
            if isinstance(one, ast.Assign | ast.AnnAssign) and f"self.{name}" in _names(one):
                return module, one
        for base in owner.bases:
            if isinstance(base, ast.Name):
                found = self.find(module, f"{base.id}.{name}")
                if found is not None:
                    return found
        return None

    def segment(self, module: str, node: ast.AST) -> str:
        """Returns the source text of a node that `find` returned."""
        return ast.get_source_segment(self._text(module), node) or ""


def _names(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        yield node.name
    elif isinstance(node, ast.Assign | ast.AnnAssign):
        for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
            for one in target.elts if isinstance(target, ast.Tuple) else [target]:
                yield ast.unparse(one)


def missing(source: Source, symbols: Iterable[Symbol]) -> list[str]:
    """Lists symbols that are missing from `source`, or whose parameters or calls do not match."""
    lacks = []
    for symbol in symbols:
        found = source.find(symbol.module, symbol.name)
        if found is None:
            lacks.append(f"{symbol.name} ({source.package}.{symbol.module})")
            continue
        node = found[1]
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            arguments = node.args
            given = [one.arg for one in (*arguments.posonlyargs, *arguments.args)]
            given += [one.arg for one in arguments.kwonlyargs]
            order = [given.index(name) for name in symbol.takes if name in given]
            if len(order) < len(symbol.takes) or order != sorted(order):
                lacks.append(
                    f"{symbol.name}({', '.join(symbol.takes)}) ({source.package}.{symbol.module})"
                )
        called = {ast.unparse(n.func) for n in ast.walk(node) if isinstance(n, ast.Call)}
        lacks += [
            f"the call of {one} in {symbol.name}" for one in symbol.calls if one not in called
        ]
    return lacks
