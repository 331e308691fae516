# SPDX-License-Identifier: MIT
"""Checks that the test of libvmem's structure finds violations."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

import check_layers  # noqa: E402


def graph(*edges: str) -> dict[str, dict[str, set[str]]]:
    found: dict[str, dict[str, set[str]]] = {}
    for edge in edges:
        name, other = edge.split(" ")
        found.setdefault(name, {})[other] = {"f"}
        found.setdefault(other, {})
    return found


def test_a_cycle_is_found_within_a_folder() -> None:
    assert check_layers.cycle(graph("a/x.c a/y.c", "a/x.c a/z.c", "a/y.c a/z.c")) == []
    found = check_layers.cycle(graph("a/x.c a/y.c", "a/y.c a/z.c", "a/z.c a/y.c"))
    assert found == ["a/y.c", "a/z.c", "a/y.c"]


def test_a_layer_may_use_only_lower_ones() -> None:
    assert check_layers.upward(graph("plan/run.c phys/pool.c", "plan/run.c plan/make.c")) == []
    assert check_layers.upward(graph("phys/pool.c plan/run.c")) == [
        "phys/pool.c uses plan/run.c, a layer above: f"
    ]
    assert check_layers.upward(graph("backend/uvm/uvm.c backend/backend.h")) == []
    assert check_layers.upward(graph("backend/uvm/uvm.c backend/call.c")) != []
    assert check_layers.upward(graph("elsewhere/x.c base/error.c")) != []


def test_symbols_of_objects(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    texts = {"a/x": "int g(void); int f(void) { return g(); }", "a/y": "int g(void) { return 1; }"}
    for name, text in texts.items():
        source = tmp_path / f"{name}.c"
        source.write_text(text)
        target = str(source.with_suffix(".o"))
        subprocess.run(["cc", "-c", "-o", target, str(source)], check=True)
    assert check_layers.symbols(tmp_path) == {"a/x.c": {"a/y.c": {"g"}}, "a/y.c": {}}


@pytest.mark.parametrize(
    ("name", "text", "found"),
    [
        ("phys/slab.c", "void f(struct vm_slab *s) { s->refs[1]++; }", False),
        ("plan/run.c", "bool f(struct vm_slab *s) { return s->refs[1] == 1; }", False),
        ("plan/run.c", "void f(struct vm_slab *s) { s->refs[1]++; }", True),
        ("plan/run.c", "void f(struct vm_slab *s) { vm_bits_set(s->free_map, 0, 1, true); }", True),
        ("virt/pte.c", "void f(struct vm_pte *p) { p->flags |= PTE_BUSY; }", False),
        ("plan/run.c", "void f(struct vm_pte *p) { p->flags |= PTE_BUSY; }", True),
        ("plan/run.c", "VMEM_API int vmem_f(void) { return 0; }", True),
        ("api/map.c", "VMEM_API int vmem_f(void) { return 0; }", False),
    ],
)
def test_owners(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, text: str, found: bool
) -> None:
    (tmp_path / name).parent.mkdir()
    (tmp_path / name).write_text(text)
    monkeypatch.setattr(check_layers, "SRC", tmp_path)
    assert bool(check_layers.check_owners()) == found
