# SPDX-License-Identifier: MIT
"""Checks the imports between modules: no cycles, and a layered KV cache."""

from __future__ import annotations

import ast
import re
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2] / "pyvmem"
BENCHMARKS = ROOT.parent / "benchmarks" / "src" / "vmem_bench"


@cache
def parsed(path: Path) -> ast.Module:
    """Returns a file's syntax tree."""
    return ast.parse(path.read_text(encoding="utf-8"))


def module_of(path: Path) -> str:
    top = BENCHMARKS if path.is_relative_to(BENCHMARKS) else ROOT
    parts = path.relative_to(top.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(path: Path, known: set[str], *, types: bool) -> set[str]:
    """Returns the project's modules that a file imports at load time; if `types` is true, also
    modules that only annotations need.

    Imports inside functions are left out: their order does not matter.
    """
    tree = parsed(path)
    left_out: tuple[type[ast.AST], ...] = (ast.FunctionDef, ast.AsyncFunctionDef)
    inside = {
        id(node)
        for block in ast.walk(tree)
        if isinstance(block, left_out)
        or (not types and isinstance(block, ast.If) and "TYPE_CHECKING" in ast.dump(block.test))
        for node in ast.walk(block)
    }
    found: set[str] = set()
    for node in ast.walk(tree):
        if id(node) in inside:
            continue
        if isinstance(node, ast.Import):
            found |= {one.name for one in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names = {f"{node.module}.{one.name}" for one in node.names}
            found |= names & known or {node.module}
    return found & known


def graph(*, types: bool) -> dict[str, set[str]]:
    """Returns, for each module of the package and of the benchmarks, the modules that it
    imports.
    """
    every = [*ROOT.rglob("*.py"), *BENCHMARKS.rglob("*.py")]
    files = {module_of(path): path for path in sorted(every)}
    known = set(files)
    return {name: imports(path, known, types=types) - {name} for name, path in files.items()}


def test_no_import_cycles() -> None:
    """Imports that only annotations need are exempt: a context and the objects that it returns name
    each other in annotations.
    """
    plain = graph(types=False)
    try:
        order = list(TopologicalSorter(plain).static_order())
    except CycleError as error:
        pytest.fail(" <- ".join(error.args[1]))
    assert len(order) == len(plain) > 100


def imported(path: Path) -> set[str]:
    """Returns the modules that a file imports anywhere."""
    found: set[str] = set()
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Import):
            found |= {one.name for one in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {f"{node.module}.{one.name}" for one in node.names}
    return found


def test_the_product_imports_no_benchmarks() -> None:
    """`pyvmem.bench` implements `vmem bench api`, and finds the other benchmarks' package by
    name."""
    found = []
    for path in sorted(ROOT.rglob("*.py")):
        own = () if path.is_relative_to(ROOT / "bench") else ("pyvmem.bench",)
        names = {name for name in imported(path) if name.startswith((*own, "vmem_bench"))}
        found += [f"{path.relative_to(ROOT)}: {name}" for name in sorted(names)]
    assert not found, "\n".join(found)
    assert any(name.startswith("pyvmem.bench") for name in imported(BENCHMARKS / "command.py"))


def test_the_benchmarks_have_the_same_version() -> None:
    header = (ROOT.parent / "libvmem" / "include" / "vmem.h").read_text(encoding="utf-8")
    (version,) = re.findall(r'#define VMEM_VERSION "(.*)"', header)
    theirs = (BENCHMARKS.parents[1] / "pyproject.toml").read_text(encoding="utf-8")
    assert f'\nversion = "{version}"' in theirs
    assert f'"pyvmem=={version}"' in theirs
    ours = (ROOT.parent / "pyproject.toml").read_text(encoding="utf-8")
    assert f'\nbench = ["pyvmem-bench=={version}"]' in ours


def test_the_modules_of_the_cache_are_layered() -> None:
    """Lists the modules in reading order: each needs only modules before it, even for types.

    A new module must be added here.
    """
    found = graph(types=True)
    order = (
        *("checks", "config", "events", "journal", "layout", "mapper", "pages", "slots", "stats"),
        *("reclaim", "migration", "window", "runs", "growth", "sharing", "prefix_tree"),
        *("host_prefixes", "prefix_cache", "budget", "group", "integrity", "manager", "requests"),
        *("mappings", "steps", "admission", "truncation", "forks", "tiers", "prefix_alloc", "swap"),
        *("trim", "idle", "common_pages", "waits", "facets", "cache", "layered_cache"),
        "distributed",
    )
    modules = {name.split(".")[-1] for name in found if name.startswith("pyvmem.kvcache.")}
    assert set(order) == modules
    for place, name in enumerate(order):
        above = {f"pyvmem.kvcache.{one}" for one in order[place:]}
        assert not found[f"pyvmem.kvcache.{name}"] & above, name


def private_names(tree: ast.Module) -> set[str]:
    """Returns the attributes with one leading underscore that a module's own classes and objects
    define."""
    found = {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id in ("self", "cls")
    }
    found |= {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            made = [one.target for one in node.body if isinstance(one, ast.AnnAssign)]
            found |= {one.id for one in made if isinstance(one, ast.Name)}
    return {name for name in found if name.startswith("_") and not name.startswith("__")}


@pytest.mark.parametrize("folder", ["kvcache", "engine", "compat", "attention", "hf", "serve"])
def test_no_cross_module_private_access(folder: str) -> None:
    """Private names of torch and transformers are exempt: they are used where no public name
    exists.
    """
    trees = {path: parsed(path) for path in ROOT.rglob("*.py")}
    names = {path: private_names(tree) for path, tree in trees.items()}
    kept = {"_asdict", "_replace", "_fields"}  # methods of named tuples
    found = []
    for path in sorted(ROOT.joinpath(folder).rglob("*.py")):
        others = set().union(*(own for one, own in names.items() if one != path))
        for node in ast.walk(trees[path]):
            if (
                isinstance(node, ast.Attribute)
                and not (isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"))
                and node.attr in others - names[path] - kept
            ):
                found.append(f"{path.relative_to(ROOT)}:{node.lineno}: {ast.unparse(node)}")
    assert not found, "\n".join(found)


# Packages above or beside the cache.
ABOVE = ("attention", "compat", "elastic", "engine", "hf", "serve", "sglang", "vllm")


def test_packages_above_the_cache_use_only_its_public_names() -> None:
    """No package uses a cache's private attributes, even if its own objects use the same names."""
    private: set[str] = set()
    for path in (ROOT / "kvcache").glob("*.py"):
        private |= private_names(parsed(path))
    found = []
    for path in sorted(one for folder in ABOVE for one in (ROOT / folder).rglob("*.py")):
        tree = parsed(path)
        own = private_names(tree)
        for node in ast.walk(tree):
            if not isinstance(node, ast.Attribute) or node.attr not in private:
                continue
            of = ast.unparse(node.value)
            if of.endswith("cache") or (of not in ("self", "cls") and node.attr not in own):
                found.append(f"{path.relative_to(ROOT)}:{node.lineno}: {ast.unparse(node)}")
    assert not found, "\n".join(found)


def test_packages_above_the_cache_import_only_its_public_names() -> None:
    """These packages may import public names, and modules that hold no cache state."""
    plain = ("budget", "cache", "config", "distributed", "events", "layered_cache", "layout")
    public = {
        module_of(path): ast.literal_eval(ast.unparse(node.value))
        for path in (ROOT / "kvcache").glob("*.py")
        for node in parsed(path).body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
    }
    found, seen = [], 0
    for path in sorted(one for folder in ABOVE for one in (ROOT / folder).rglob("*.py")):
        for node in ast.walk(parsed(path)):
            module = node.module if isinstance(node, ast.ImportFrom) else None
            if module is None or not module.startswith("pyvmem.kvcache"):
                continue
            seen += 1
            allowed = public[module]
            if module != "pyvmem.kvcache" and module.split(".")[-1] not in plain:
                allowed = []
            found += [
                f"{path.relative_to(ROOT)}:{node.lineno}: {module}.{one.name}"
                for one in node.names
                if one.name not in allowed
            ]
    assert seen > 30
    assert not found, "\n".join(found)


def test_places_named_in_the_documentation_exist() -> None:
    """Checks paths relative to the root, and names that a table row assigns to a module."""
    text = (ROOT.parent / "docs" / "develop" / "architecture.md").read_text(encoding="utf-8")
    paths = re.findall(r"`((?:pyvmem|libvmem|kernel_module|scripts|patches)/[\w./-]*)`", text)
    assert len(paths) > 20
    for path in set(paths):
        assert (ROOT.parent / path).exists(), path
    named = re.findall(r"`([\w.]+)` (?:in|of) `(pyvmem/[\w/]+\.py)`", text)
    assert len(named) > 5
    for name, path in named:
        found = (ROOT.parent / path).read_text(encoding="utf-8")
        assert all(re.search(rf"\b{part}\b", found) for part in name.split(".")), f"{name}: {path}"


def test_the_root_of_the_package_has_only_public_modules() -> None:
    """All other modules must be in a subpackage."""
    names = {path.stem for path in ROOT.glob("*.py")} - {"__init__", "__main__", "_build"}
    assert names == {"compiled", "errors", "kv_events", "memory_resource", "telemetry"}
