# SPDX-License-Identifier: MIT
"""Token ids as bytes, four for each: what prefixes are compared as."""

from __future__ import annotations

from array import array
from collections.abc import Hashable, Iterator, Sequence
from typing import Any

from pyvmem.kvcache.config import invalid

__all__ = ["ID_BYTES", "MAX_ID", "TokenIds"]

ID_BYTES = 4
MAX_ID = (1 << 32) - 1


class TokenIds:
    """A sequence of token ids in the form that `PrefixTree` compares. Immutable.

    Made once for a prompt and used in several calls, it saves their conversion, which takes longer
    than the comparison: `vmem bench prefixes` measures both.

    Args:
        tokens: ids from 0 to 2**32 - 1: a list or another sequence of whole numbers, an
            ``array.array``, a one-dimensional numpy array or torch tensor of integers (one on a GPU
            is copied, which waits for its stream), or a `TokenIds`.
        namespace: what the keys and values depend on beside the ids: an adapter, an image, a
            tenant. Equal ids of different namespaces are different prefixes. None, the default, is
            a namespace too; of a `TokenIds` that is given without one, its own is taken.

    Raises:
        InvalidArgument: an id out of range, no whole number, more than one dimension, or text; a
            namespace that cannot be hashed, or another one than that of the `TokenIds` given.
    """

    __slots__ = ("data", "namespace")

    data: bytes  #: the ids as native 32-bit words
    namespace: Hashable

    def __init__(self, tokens: Any, namespace: Hashable = None) -> None:
        self.data = _encode(tokens)
        self.namespace = _namespace(tokens, namespace)

    @classmethod
    def of(cls, tokens: Any, namespace: Hashable = None) -> TokenIds:
        """`tokens` itself where it is one already, of that namespace."""
        if isinstance(tokens, cls) and (namespace is None or namespace == tokens.namespace):
            return tokens
        return cls(tokens, namespace)

    @classmethod
    def from_bytes(cls, data: bytes, namespace: Hashable = None) -> TokenIds:
        """Ids that are there as native 32-bit words. InvalidArgument: not a multiple of 4 bytes."""
        if len(data) % ID_BYTES:
            raise invalid(f"{len(data)} bytes are no whole number of ids of {ID_BYTES} bytes")
        out = object.__new__(cls)
        out.data = bytes(data)
        out.namespace = _namespace(data, namespace)
        return out

    def __len__(self) -> int:
        return len(self.data) // ID_BYTES

    def __iter__(self) -> Iterator[int]:
        return iter(memoryview(self.data).cast("I"))

    def __add__(self, more: Any) -> TokenIds:
        """These ids and then `more`, at the cost of a copy."""
        return TokenIds.from_bytes(self.data + TokenIds.of(more).data, self.namespace)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, TokenIds):
            return NotImplemented
        return self.data == other.data and self.namespace == other.namespace

    def __hash__(self) -> int:
        return hash((self.data, self.namespace))

    def __repr__(self) -> str:
        of = "" if self.namespace is None else f" of {self.namespace!r:.40}"
        return f"<TokenIds: {len(self)} ids{of}>"


def _namespace(tokens: Any, namespace: Hashable) -> Hashable:
    """The namespace of ids that are given with one, or bring their own."""
    try:
        hash(namespace)
    except TypeError:
        raise invalid(f"namespace {_brief(namespace)} cannot be hashed") from None
    own = tokens.namespace if isinstance(tokens, TokenIds) else None
    if own is None or namespace is None or namespace == own:
        return own if namespace is None else namespace
    raise invalid(f"namespace {namespace!r:.40}: the ids are of {own!r:.40}")


def _encode(tokens: Any) -> bytes:
    if isinstance(tokens, TokenIds):
        return tokens.data
    if hasattr(tokens, "is_floating_point"):  # torch's; numpy has no bfloat16 to refuse it by
        if tokens.is_floating_point():
            raise invalid(f"token ids must be whole numbers, not a tensor of {tokens.dtype}")
        tokens = tokens.detach().cpu().numpy()
    if hasattr(tokens, "__array_interface__"):
        return _encode_numpy(tokens)
    # A memory of bytes could be ids or text: whoever has one says which, as an array.
    if isinstance(tokens, (str, bytes, bytearray)) or not isinstance(tokens, (Sequence, array)):
        raise invalid(f"token ids must be a sequence of whole numbers, not {_brief(tokens)}")
    try:
        return array("I", tokens).tobytes()
    except (TypeError, OverflowError):
        raise _wrong(tokens) from None


def _encode_numpy(tokens: Any) -> bytes:
    if tokens.dtype.kind not in "iu":
        raise invalid(f"token ids must be whole numbers, not an array of {tokens.dtype}")
    if tokens.ndim != 1:
        raise invalid(f"token ids must have one dimension, not the shape {tuple(tokens.shape)}")
    if tokens.dtype.str[1:] != "u4" and len(tokens):
        for bound in (int(tokens.min()), int(tokens.max())):
            if not 0 <= bound <= MAX_ID:
                raise _out_of_range(bound)
    out: bytes = tokens.astype("=u4", copy=False).tobytes()
    return out


def _wrong(tokens: Sequence[Any]) -> Exception:
    """What to raise for a sequence that is refused: names the first element at fault."""
    for place, value in enumerate(tokens):
        try:
            array("I", [value])
        except OverflowError:
            return _out_of_range(int(value), f"token id {place}")
        except TypeError:
            return invalid(f"token id {place} is {_brief(value)}; it must be a whole number")
    return invalid("the token ids changed while they were read")


def _out_of_range(value: int, what: str = "a token id") -> Exception:
    return invalid(f"{what} is {value}; it must lie between 0 and {MAX_ID}", limit=MAX_ID)


def _brief(value: Any) -> str:
    return f"{value!r:.40} of type {type(value).__name__}"
