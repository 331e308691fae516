# SPDX-License-Identifier: MIT
"""Writes rows from code compiled with `torch.compile`.

torch's compilers turn a write into a new tensor and copy all of it back. For a cache's tensor, the
copy accesses unmapped addresses and kills the process, so compiled graphs must not write to such a
tensor. A `Writer` holds the tensor, and its `write` compiles to an operator that takes the writer's
ticket and finds the tensor at run time:

    keys = Writer(cache.k(layer))           # once, outside compiled code

    @torch.compile
    def forward(...):
        keys.write(new, slots, positions)   # new: [tokens, num_kv_heads, head_dim]

`pyvmem.attention.Attention` does the same for writing and attending. Outside compiled code, this
adds no overhead. Requires torch.
"""

from __future__ import annotations

import errno
import inspect
import itertools
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

import torch
from torch.compiler import is_compiling

from pyvmem.errors import BadHandle, NotSupported
from pyvmem.plumbing.validation import expect

__all__ = ["ORDER", "Writer", "apart", "as_operator", "attend", "refuse", "ticket", "write"]

with torch.inference_mode(False):
    ORDER = torch.zeros((), dtype=torch.int64)
    """Every operator that writes or reads rows takes this tensor and declares that it mutates it.

    Compilers therefore keep these operators in program order. Your own operators that read or write
    rows must take it, too: ``@torch.library.custom_op(..., mutates_args=("order",))``. Nothing is
    stored in it.
    """

_F = TypeVar("_F", bound=Callable[..., Any])


class _Owner(Protocol):
    """An object that a ticket refers to; it interprets the operator's numbers and tensors."""

    def run_write(self, part: int, given: Sequence[torch.Tensor]) -> None: ...


_owners: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
_numbers = itertools.count(1)


def ticket(owner: Any) -> torch.Tensor:
    """Returns a tensor that identifies an object in compiled code: its number, as a graph input.

    The object is held weakly. If the number were a constant in the compiled code, every new object,
    such as the next step's batch, would force a recompilation.
    """
    number = next(_numbers)
    _owners[number] = owner
    with torch.inference_mode(False):
        return torch.tensor(number)


def holder(ticket: torch.Tensor) -> Any:
    """Returns the object that a ticket refers to.

    Raises:
        BadHandle: the object no longer exists.
    """
    owner = _owners.get(int(ticket))
    if owner is None:
        text = "the Writer, Attention or Batch passed to this code no longer exists"
        raise BadHandle(text, errno=errno.EBADF, op="pyvmem::write")
    return owner


# ---- operators -----------------------------------------------------------------------------------
# The operators look up their objects in host memory, so a CUDA graph must not capture them.

_TAGS = tuple(
    getattr(torch.Tag, name) for name in ("cudagraph_unsafe",) if hasattr(torch.Tag, name)
)
_torch_library: Any = torch.library  # torch.library is largely untyped
_library = _torch_library.Library("pyvmem", "DEF")
_library.define("write(Tensor(a!) order, Tensor owner, int part, Tensor[] given) -> ()", tags=_TAGS)
_library.define(
    "attend(Tensor(a!) order, Tensor owner, int part, Tensor[] given, float? scale, SymInt width)"
    " -> Tensor",
    tags=_TAGS,
)


@torch.no_grad()
def _write(order: torch.Tensor, owner: torch.Tensor, part: int, given: list[torch.Tensor]) -> None:
    found: _Owner = holder(owner)
    found.run_write(part, given)


@torch.no_grad()
def _attend(
    order: torch.Tensor,
    owner: torch.Tensor,
    part: int,
    given: list[torch.Tensor],
    scale: float | None,
    width: int,
) -> torch.Tensor:
    out: torch.Tensor = holder(owner).run_attend(part, given, scale)
    return out.contiguous()


def _write_shape(*given: Any) -> None:
    """Returns nothing: the operator has no output."""


def _attend_shape(
    order: Any, owner: Any, part: Any, given: list[torch.Tensor], scale: Any, width: Any
) -> torch.Tensor:
    q = given[1]
    return q.new_empty((*q.shape[:2], width))


_library.impl("write", _write, "CompositeExplicitAutograd")
_library.impl("attend", _attend, "CompositeExplicitAutograd")
torch.library.register_fake("pyvmem::write", _write_shape, lib=_library)
torch.library.register_fake("pyvmem::attend", _attend_shape, lib=_library)

write = torch.ops.pyvmem.write.default
attend = torch.ops.pyvmem.attend.default


def as_operator() -> bool:
    """True if torch is tracing the call: `torch.compile`, `torch.export`, `torch.jit.trace`."""
    return is_compiling() or torch._C._get_tracing_state() is not None


def refuse(what: str, *, recorded: bool = False) -> None:
    """Raises if an in-place write would be wrong, or if torch's own error would be less clear.

    Args:
        what: name of the call.
        recorded: whether the call also maps memory and therefore must not be traced or rerun.

    Raises:
        NotSupported: the call is inside a `torch.func` transform, such as vmap or grad; or
            `recorded` is true and the call is being traced by `torch.jit.trace` or `torch.export`,
            or is part of a backward pass.
    """
    why = ""
    if _transforms() is not None:
        why = "under a transform of torch.func (vmap, grad, jvp, functionalize): call it outside"
    elif recorded and as_operator():
        why = "recorded by torch.export or torch.jit.trace, which would leave its mapping out: use "
        why += "torch.compile, or record a model of Attention.write"
    elif recorded and torch._C._current_graph_task_id() != -1:
        why = "in a backward pass, where torch.utils.checkpoint runs the forward again and would "
        why += "append the tokens again: use no cache with checkpoints"
    if why:
        raise NotSupported(f"{what} {why}", errno=errno.EOPNOTSUPP, op=what)


_transforms: Callable[[], Any] = torch._C._functorch.peek_interpreter_stack


# ---- public API ---------------------------------------------------------------------------


class Writer:
    """Writes rows into a cache's tensor, inside and outside compiled code.

    The writer keeps the tensor alive, so `close` it before closing the cache. In compiled code, no
    gradient is recorded.

    Args:
        tensor: the result of `KVCache.k` or `v`, ``[max_batch, max_seq_len, ...]``, or a state of
            `LayeredCache.states`, ``[max_batch, ...]``.

    Attributes:
        tensor: the tensor itself, for reading outside compiled code.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        expect("tensor", tensor, torch.Tensor)
        self.tensor = tensor
        # Indexing does not support 8-bit floats.
        self._bytes = tensor.is_floating_point() and tensor.element_size() == 1
        self._target = tensor.view(torch.uint8) if self._bytes else tensor
        self._ticket = ticket(self)

    def __repr__(self) -> str:
        kind = str(self.tensor.dtype).removeprefix("torch.")
        return f"<Writer of {kind}{list(self.tensor.shape)}>"

    def write(self, rows: torch.Tensor, *where: torch.Tensor) -> None:
        """Writes ``rows[i]`` at the given indices, which must be mapped.

        Args:
            rows: the rows, in the tensor's dtype and on its device.
            where: int64 tensors: each row's slot and, for keys and values, its position in the
                slot.
        """
        if as_operator():
            write(ORDER, self._ticket, 0, [rows, *where])
        else:
            self.put(rows, where)

    def put(self, rows: torch.Tensor, where: Sequence[torch.Tensor]) -> None:
        """Implements `write` for uncompiled code."""
        refuse("Writer.write")
        if self._bytes:
            rows = rows.to(self.tensor.dtype).view(torch.uint8)
        self._target[tuple(where)] = rows

    def close(self) -> None:
        """Drops the reference to the tensor, so that the cache can be closed."""
        self.tensor = self._target = torch.empty(0)

    def run_write(self, part: int, given: Sequence[torch.Tensor]) -> None:
        """Implements the operator."""
        self.put(given[0], given[1:])


def apart(why: str) -> Callable[[_F], _F]:
    """Returns a decorator that makes compiled code break the graph to call the function eagerly.

    Args:
        why: the message that torch reports if ``fullgraph=True`` forbids the graph break.
    """
    off: Any = torch.compiler.disable
    # torch 2.6 has no `reason` argument.
    said = {"reason": why} if "reason" in inspect.signature(off).parameters else {}
    decorate: Callable[[_F], _F] = off(**said)
    return decorate
