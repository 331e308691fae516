# SPDX-License-Identifier: MIT
"""Names of an engine's that a plug-in uses, looked for in the engine's source without importing it.

So an unknown version can be tried or refused, and a release compared with the one before.

    replaced     a function of the engine's, or of an object of it, gives way to one of ours
    overridden   by a method of ours, which calls the engine's
    called       by us
    read         an attribute
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from zipfile import Path as ZipPath

__all__ = ["Hook", "Source", "missing"]


@dataclass(frozen=True)
class Hook:
    """A name of an engine's.

    Attributes:
        module: below the engine's package.
        name: of a function, a class, or a member of a class.
        use: replaced, overridden, called or read.
        why: what for.
        takes: parameters that we name, or count on in this order.
        calls: what its code must call for us to be asked.
    """

    module: str
    name: str
    use: str
    why: str
    takes: tuple[str, ...] = ()
    calls: tuple[str, ...] = ()


_Node = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Assign | ast.AnnAssign


class Source:
    """An engine's source, read and not imported.

    Args:
        root: the package's folder, or that in a wheel (`zipfile.Path`).
        package: its name.
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
        """The module and the node that define a name; a class's member also in its bases."""
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
        for one in ast.walk(owner):  # self.name = ..., mostly in __init__
            if isinstance(one, ast.Assign | ast.AnnAssign) and f"self.{name}" in _names(one):
                return module, one
        for base in owner.bases:
            if isinstance(base, ast.Name):
                found = self.find(module, f"{base.id}.{name}")
                if found is not None:
                    return found
        return None

    def segment(self, module: str, node: ast.AST) -> str:
        """The text of what `find` found."""
        return ast.get_source_segment(self._text(module), node) or ""


def _names(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        yield node.name
    elif isinstance(node, ast.Assign | ast.AnnAssign):
        for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
            for one in target.elts if isinstance(target, ast.Tuple) else [target]:
                yield ast.unparse(one)


def missing(source: Source, hooks: Iterable[Hook]) -> list[str]:
    """Names what an engine's source lacks of some hooks."""
    lacks = []
    for hook in hooks:
        found = source.find(hook.module, hook.name)
        if found is None:
            lacks.append(f"{hook.name} ({source.package}.{hook.module})")
            continue
        node = found[1]
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            arguments = node.args
            given = [one.arg for one in (*arguments.posonlyargs, *arguments.args)]
            given += [one.arg for one in arguments.kwonlyargs]
            order = [given.index(name) for name in hook.takes if name in given]
            if len(order) < len(hook.takes) or order != sorted(order):
                lacks.append(
                    f"{hook.name}({', '.join(hook.takes)}) ({source.package}.{hook.module})"
                )
        called = {ast.unparse(n.func) for n in ast.walk(node) if isinstance(n, ast.Call)}
        lacks += [f"the call of {one} in {hook.name}" for one in hook.calls if one not in called]
    return lacks
