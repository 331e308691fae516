# SPDX-License-Identifier: MIT
"""Namespaces and leases: the engine's view of recorded prefixes."""

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
        number: unique among the namespaces of the cache.
    """

    name: Hashable
    number: int


@dataclass(eq=False)
class Namespace:
    """Identifies what rows depend on besides their tokens: an adapter, an image or a tenant.

    Made by `RequestCache.namespace`. Requests of one namespace never begin with rows of another.
    Once it is closed its rows are not matched again: a later namespace of the same name is a new
    one, so that a reloaded adapter does not get rows that its predecessor computed.

    Attributes:
        name: the caller's.
        generation: unique among the namespaces of the cache.
        is_open: not closed.
    """

    name: Hashable
    generation: int
    is_open: bool = True

    @property
    def key(self) -> Hashable:
        """The cache's key for the prefixes of this namespace.

        Raises BadHandle if it is closed.
        """
        if not self.is_open:
            raise BadHandle(f"{self!r} is closed", errno=errno.EBADF, op="Namespace")
        return Generation(self.name, self.generation)

    def close(self) -> None:
        """Closes the namespace: its prefixes are not found again and are evicted when memory is
        short.

        Its requests go on, and record nothing more. Idempotent.
        """
        self.is_open = False


def key_of(namespace: Namespace | None) -> Hashable:
    """The cache's key for a namespace; None is the default namespace."""
    if namespace is None:
        return None
    if not isinstance(namespace, Namespace):
        raise TypeError(f"namespace: expected one of RequestCache.namespace, not {namespace!r:.80}")
    return namespace.key


class Matcher(Protocol):
    """The prefix lookup of a cache."""

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
        """Tokens that are recorded, a multiple of the cache's sharing unit; 0: none.

        With those in host memory (`KVCacheConfig.host_prefixes`), which may be lost before they
        are used.
        """
        return self._match.length + self._match.in_host

    @property
    def match(self) -> PrefixMatch:
        """The lease, as `KVCache`'s own calls take it."""
        return self._match

    def renew(self) -> None:
        """Looks the prompt up again: the recorded prefix may be longer by now, or after `release`
        shorter."""
        before, self._match = self._match, self._cache.match(self.tokens)
        before.release()

    def release(self) -> None:
        """Ends the lease; a later `admit` looks the prompt up again. Idempotent."""
        self._match.release()

    _leave = release
