# SPDX-License-Identifier: MIT
"""What must hold in a prefix tree at all times."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyvmem.kvcache.token_ids import ID_BYTES

if TYPE_CHECKING:
    from pyvmem.kvcache.prefix_node import Node, S
    from pyvmem.kvcache.prefix_tree import PrefixTree

__all__ = ["check"]


def check(tree: PrefixTree[S]) -> list[str]:
    """See `PrefixTree.check`."""
    found: list[str] = []
    nodes = list(tree)
    order = {node: place for place, node in enumerate(tree.eviction_order())}
    for node in nodes:
        found += [f"{node!r}: {text}" for text in _node(tree, node, order)]
    for name, value in (
        ("nodes", len(nodes)),
        ("tokens", sum(node.units for node in nodes) * tree.unit),
        ("pages", sum(node.span.pages for node in nodes)),
        ("locked_pages", sum(node.span.pages for node in nodes if node._locks)),
    ):
        if getattr(tree, name) != value:
            found.append(f"{name} is {getattr(tree, name)}; the nodes have {value}")
    if len(order) != sum(not node._locks for node in nodes):
        found.append(f"{len(order)} nodes stand in the order of use, which are not all unlocked")
    for namespace, root in tree.roots.items():
        of = "" if namespace is None else f" of {namespace!r:.40}"
        locks = root.pins + sum(child._locks for child in root.children)
        if root._locks != locks:
            found.append(f"the root{of} has {root._locks} locks; it and its children have {locks}")
        if root.namespace != namespace or root.parent is not None:
            found.append(f"the root{of} is another namespace's, or no root")
        if root is not tree.root and not locks and root.is_leaf:
            found.append(f"the root{of} has no prefix")
    return found


def _node(tree: PrefixTree[S], node: Node[S], order: dict[Node[S], int]) -> list[str]:
    found = []
    parent, width = node.parent, tree.unit * ID_BYTES
    assert parent is not None  # it was reached through it
    if node.units < 1 or len(node._run) != node.units * width:
        found.append(f"{len(node._run)} bytes of tokens are not {node.units} units, or none")
    if parent._children.get(node._run[:width]) is not node:
        found.append("its parent has it under another unit")
    if node.end != parent.end + node.units * tree.unit:
        found.append(f"its parent ends at token {parent.end}")
    if node._locks != node.pins + sum(child._locks for child in node.children):
        found.append(f"it has {node._locks} locks, other than its pins and its children's")
    if bool(node._locks) == (node in order):
        found.append("it must stand in the order of use just when it is not locked")
    if parent in order and order.get(node, len(order)) > order[parent]:
        found.append("it would be evicted after its parent")
    if node.namespace != parent.namespace:
        found.append(f"its namespace is {node.namespace!r:.40}, its parent's another")
    if parent.parent is not None and node.used > parent.used:
        found.append(f"it was used at {node.used}, its parent at {parent.used}")
    return found
