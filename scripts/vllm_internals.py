#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Lists the changes between two vLLM versions to the internals that pyvmem uses.

    python scripts/vllm_internals.py 0.32.0 0.33.0          # downloads both wheels
    python scripts/vllm_internals.py 0.32.0 vllm.whl --diff

A version is a number, a wheel, or the directory of the package. The exit status is 1 if the second
version lacks a symbol that pyvmem uses, so that pyvmem would reject it.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

import vllm_setup
from environment import ROOT

sys.path.insert(0, str(ROOT))

from pyvmem.elastic.engine_source import Source, Symbol, missing
from pyvmem.vllm.internals import INTERNALS

__all__ = ["changes", "main", "open_source"]


def open_source(version: str, folder: Path) -> Source:
    """Opens the source of a version; wheels are downloaded to `folder`."""
    path = Path(version)
    if path.is_dir():
        return Source(path, "vllm")
    if path.suffix != ".whl":
        target = folder / version
        target.mkdir(exist_ok=True)
        wheel = vllm_setup.download(f"vllm=={version}", target)
        if wheel is None:
            raise SystemExit(f"vllm {version} is not available")
        path = wheel
    return Source(zipfile.Path(path, "vllm/"), "vllm")


def parameters(node: ast.AST) -> str:
    """Returns a function's parameter list as source text, or "" for anything else."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return f"({ast.unparse(node.args)})"
    return ""


def changes(symbol: Symbol, before: Source, after: Source, *, diff: bool = False) -> Iterator[str]:
    """Yields the changes to a symbol's definition between two versions, one per line."""
    old, new = (source.find(symbol.module, symbol.name) for source in (before, after))
    if old is None or new is None:
        if (old is None) != (new is None):
            yield "gone" if new is None else "new"
        return
    if old[0] != new[0]:
        yield f"moved from vllm.{old[0]} to vllm.{new[0]}"
    if isinstance(old[1], ast.ClassDef) and isinstance(new[1], ast.ClassDef):
        return  # its members are separate symbols
    if parameters(old[1]) != parameters(new[1]):
        yield f"{parameters(old[1])} -> {parameters(new[1])}"
    was, is_now = before.segment(*old).splitlines(), after.segment(*new).splitlines()
    lines = list(difflib.unified_diff(was, is_now, "before", "after", lineterm="", n=2))
    count = sum(line[0] in "+-" for line in lines[2:])
    if count:
        yield f"{count} lines differ"
        if diff:
            yield from lines[2:]


def main() -> int:
    """Prints the changes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("before")
    parser.add_argument("after")
    parser.add_argument("--diff", action="store_true", help="show the changed lines")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        before, after = (open_source(one, Path(folder)) for one in (chosen.before, chosen.after))
        same = 0
        for symbol in INTERNALS:
            found = list(changes(symbol, before, after, diff=chosen.diff))
            same += not found
            if found:
                print(f"{symbol.name} ({symbol.use}: {symbol.why})")
                print("".join(f"    {line}\n" for line in found), end="")
        print(f"{same} of {len(INTERNALS)} are the same")
        lacks = missing(after, INTERNALS)
    for one in lacks:
        print(f"missing in {chosen.after}: {one}")
    return 1 if lacks else 0


if __name__ == "__main__":
    sys.exit(main())
