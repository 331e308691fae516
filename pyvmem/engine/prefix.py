# SPDX-License-Identifier: MIT
"""Recorded prefixes as an engine sees them: namespaces and leases."""

from __future__ import annotations

import errno
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, Protocol

from pyvmem.errors import BadHandle
from pyvmem.plumbing.closing import Scoped

if TYPE_CHECKING:
    from pyvmem.kvcache import PrefixMatch, TokenIds

__all__ = ["Generation", "Matcher", "Namespace", "Prefix", "key_of"]


class Generation(NamedTuple):
    """The cache's key for a namespace; other processes know it by the name.

    Attributes:
        name: the caller's.
        number: no other namespace of the cache has it.
    """

    name: Hashable
    number: int


@dataclass(eq=False)
class Namespace:
    """What rows depend on besides their tokens: an adapter, an image or a tenant.

    Made by `RequestCache.namespace`. Requests of one never begin with rows of another. Once it is
    closed its rows are not found again: a later namespace of the same name is a new one, so that a
    reloaded adapter does not find what its predecessor computed.

    Attributes:
        name: the caller's.
        generation: no other namespace of the cache has it.
        is_open: not closed.
    """

    name: Hashable
    generation: int
    is_open: bool = True

    @property
    def key(self) -> Hashable:
        """What the cache files its prefixes under.

        Raises BadHandle where it is closed.
        """
        if not self.is_open:
            raise BadHandle(f"{self!r} is closed", errno=errno.EBADF, op="Namespace")
        return Generation(self.name, self.generation)

    def close(self) -> None:
        """Ends it: what it recorded is not found again, and is evicted when memory is short.

        Its requests go on, and record nothing more. Idempotent.
        """
        self.is_open = False


def key_of(namespace: Namespace | None) -> Hashable:
    """The cache's key for a namespace; None is a namespace, too."""
    if namespace is None:
        return None
    if not isinstance(namespace, Namespace):
        raise TypeError(f"namespace: expected one of RequestCache.namespace, not {namespace!r:.80}")
    return namespace.key


class Matcher(Protocol):
    """The part of a cache that finds prefixes."""

    def match(self, tokens: TokenIds, leave: int = 1) -> PrefixMatch:
        """See `KVCache.match`."""


@dataclass(eq=False)
class Prefix(Scoped):
    """A prompt, and a lease on its recorded prefix, which is not evicted until the lease ends.

    From `RequestCache.match`, for `RequestCache.admit`, which ends the lease when it succeeds and
    keeps it otherwise. A waiting request's lease holds memory: release it if the request
    will wait long. A context manager, which releases it.

    Attributes:
        tokens: the whole prompt.
        namespace: the prefix's.
    """

    tokens: TokenIds
    namespace: Namespace | None
    _cache: Matcher = field(repr=False)
    _match: PrefixMatch = field(repr=False)

    @property
    def length(self) -> int:
        """Tokens that are recorded, a multiple of the cache's sharing unit; 0: none."""
        return self._match.length

    @property
    def match(self) -> PrefixMatch:
        """The lease, as `KVCache`'s own calls take it."""
        return self._match

    def renew(self) -> None:
        """Looks the prompt up again: more may be recorded by now, or, after `release`, less."""
        before, self._match = self._match, self._cache.match(self.tokens)
        before.release()

    def release(self) -> None:
        """Ends the lease; `admit` then looks the prompt up anew. Idempotent."""
        self._match.release()

    _leave = release
