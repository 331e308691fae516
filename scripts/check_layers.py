#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Checks libvmem's structure: calls between object files, and includes between directories.

nm reads the symbols from build/lib/obj (`make lib`). Imported by check_library.py.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SRC = ROOT / "libvmem" / "src"
OBJECTS = ROOT / "build" / "lib" / "obj"

# Each directory may use only the directories listed before it. A back end implements
# backend/backend.h.
LAYERS = (
    "base",
    "interface",
    "backend/host",
    "backend/cuda",
    "backend/nvidia",
    "backend/stock",
    "backend/uvm",
    "backend",
    "phys",
    "virt",
    "plan",
    "work",
    "api",
)
# Fields that hold the state of units. Only slab.c may change them.
STATES = "refs|free_map|soil_map|dirty_map|claim_map|zero_map|fill_map"

Graph = Mapping[str, Mapping[str, set[str]]]


def layer_of(name: str) -> str:
    """Returns the layer of a file, given its path in libvmem/src."""
    return "interface" if name == "backend/backend.h" else str(Path(name).parent)


def symbols(objects: Path = OBJECTS) -> dict[str, dict[str, set[str]]]:
    """Returns the call graph: for each object, the objects and symbols that it needs."""
    defined: dict[str, str] = {}
    needed: dict[str, set[str]] = {}
    for path in sorted(objects.rglob("*.o")):
        name = str(path.relative_to(objects).with_suffix(".c"))
        needed[name] = set()
        out = subprocess.check_output(["nm", path], text=True)
        for kind, symbol in re.findall(r" ([A-Za-z]) (\S+)$", out, re.M):
            if kind in "Uw":
                needed[name].add(symbol)
            elif kind.isupper():
                defined[symbol] = name
    graph: dict[str, dict[str, set[str]]] = {}
    for name, wanted in needed.items():
        edges: dict[str, set[str]] = {}
        for symbol in wanted:
            if defined.get(symbol, name) != name:
                edges.setdefault(defined[symbol], set()).add(symbol)
        graph[name] = edges
    return graph


def includes(sources: Path = SRC) -> dict[str, dict[str, set[str]]]:
    """Returns the graph of #include lines, leaving out headers from outside libvmem/src."""
    graph: dict[str, dict[str, set[str]]] = {}
    for path in sorted(sources.rglob("*.[ch]")):
        found = re.findall(r'^#include "([^"]+)"', path.read_text(encoding="utf-8"), re.M)
        graph[str(path.relative_to(sources))] = {name: {"#include"} for name in found}
    return graph


def cycle(graph: Graph) -> list[str]:
    """Returns the names along a cycle, with the first repeated at the end; [] if there is none."""
    done: set[str] = set()
    path: list[str] = []

    def visit(name: str) -> list[str]:
        if name in path:
            return [*path[path.index(name) :], name]
        if name in done:
            return []
        path.append(name)
        for other in sorted(graph.get(name, ())):
            if found := visit(other):
                return found
        path.pop()
        done.add(name)
        return []

    for start in sorted(graph):
        if found := visit(start):
            return found
    return []


def upward(graph: Graph, layers: Iterable[str] = LAYERS) -> list[str]:
    """Reports each edge to a higher layer, and each file that does not belong to a layer."""
    rank = {layer: i for i, layer in enumerate(layers)}
    problems = []
    for name, edges in graph.items():
        if layer_of(name) not in rank:
            problems.append(f"{name} is in no layer of {Path(__file__).name}")
            continue
        for other, why in edges.items():
            if rank.get(layer_of(other), len(rank)) > rank[layer_of(name)]:
                problems.append(f"{name} uses {other}, a layer above: {', '.join(sorted(why))}")
    return problems


def check_calls() -> list[str]:
    """Checks for cycles between object files, and for calls into a higher layer."""
    graph = symbols()
    problems = upward(graph)
    if len(graph) != len(list(SRC.rglob("*.c"))):
        problems.append(f"{len(graph)} objects of {len(list(SRC.rglob('*.c')))} sources: make lib")
    if found := cycle(graph):
        problems.append("a cycle of calls: " + " -> ".join(found))
    return problems


def check_includes() -> list[str]:
    """Checks for cycles between headers, and for includes from a higher layer."""
    graph = includes()
    problems = upward(graph)
    if found := cycle(graph):
        problems.append("a cycle of headers: " + " -> ".join(found))
    return problems


def check_owners() -> list[str]:
    """Checks that only api/ has public functions, and that no file changes another file's state."""
    problems = []
    changes = re.compile(
        rf"vm_bits_set\([^;]*->({STATES})\b|->({STATES})\[[^;=!<>]*\](\+\+|--| [|&+-]?= )"
        rf"|(\+\+|--)[\w.>-]*->({STATES})\["
    )
    ptes = re.compile(r"->flags [|&]?= [^;]*PTE_|\(struct vm_pte\)\{")
    for path in sorted(SRC.rglob("*.c")):
        name = str(path.relative_to(SRC))
        text = path.read_text(encoding="utf-8")
        if "VMEM_API" in text and layer_of(name) != "api":
            problems.append(f"{name} defines a public function")
        if name != "phys/slab.c" and (found := changes.search(text)):
            problems.append(f"{name} changes state that slab.c owns: {found[0]}")
        if name != "virt/pte.c" and (found := ptes.search(text)):
            problems.append(f"{name} changes state that pte.c owns: {found[0]}")
    return problems


CHECKS = [check_calls, check_includes, check_owners]
