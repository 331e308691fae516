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
    """The cache's key for a namespace, which other processes know only by its name.

    Attributes:
        name: as passed by the caller.
        number: unique among the namespaces of the cache.
    """

    name: Hashable
    number: int


@dataclass(eq=False)
class Namespace:
    """Identifies what rows depend on besides their tokens: an adapter, an image or a tenant.

    Created by `RequestCache.namespace`. A request never begins with another namespace's rows. Once
    a namespace is closed, its rows are never matched again: a later namespace with the same name is
    a different one, so a reloaded adapter does not get rows computed by its predecessor.

    Attributes:
        name: as passed by the caller.
        generation: unique among the namespaces of the cache.
        is_open: False once closed.
    """

    name: Hashable
    generation: int
    is_open: bool = True

    @property
    def key(self) -> Hashable:
        """The cache's key for this namespace's prefixes.

        Raises BadHandle if the namespace is closed.
        """
        if not self.is_open:
            raise BadHandle(f"{self!r} is closed", errno=errno.EBADF, op="Namespace")
        return Generation(self.name, self.generation)

    def close(self) -> None:
        """Closes the namespace: its prefixes are never matched again. Idempotent.

        The prefixes are evicted when memory runs low. The namespace's requests continue, but their
        rows are no longer recorded.
        """
        self.is_open = False


def key_of(namespace: Namespace | None) -> Hashable:
    """Returns the cache's key for a namespace; None is the default namespace."""
    if namespace is None:
        return None
    if not isinstance(namespace, Namespace):
        raise TypeError(f"expected a Namespace from RequestCache.namespace, not {namespace!r:.80}")
    return namespace.key


class Matcher(Protocol):
    """Looks up prefixes in a cache."""

    def match(self, tokens: TokenIds, leave: int = 1) -> PrefixMatch:
        """See `KVCache.match`."""


@dataclass(eq=False)
class Prefix(Scoped):
    """A prompt and a lease on its recorded prefix, which protects the prefix from eviction.

    Returned by `RequestCache.match` and passed to `RequestCache.admit`, which ends the lease if it
    succeeds and keeps it otherwise. The lease of a waiting request holds memory: release it if the
    request may wait a long time. Leaving a ``with`` block releases it.

    Attributes:
        tokens: the whole prompt.
        namespace: the namespace of the prefix.
    """

    tokens: TokenIds
    namespace: Namespace | None
    _cache: Matcher = field(repr=False)
    _match: PrefixMatch = field(repr=False)

    @property
    def length(self) -> int:
        """Number of recorded tokens, a multiple of the cache's sharing unit; may be 0.

        Includes tokens whose rows are in host memory (`KVCacheConfig.host_prefixes`); those may be
        lost before they are used.
        """
        return self._match.length + self._match.in_host

    @property
    def match(self) -> PrefixMatch:
        """The lease, in the form that `KVCache`'s own calls accept."""
        return self._match

    def renew(self) -> None:
        """Looks the prompt up again.

        The recorded prefix may have become longer or, after `release`, shorter.
        """
        before, self._match = self._match, self._cache.match(self.tokens)
        before.release()

    def release(self) -> None:
        """Ends the lease; a later `admit` looks the prompt up again. Idempotent."""
        self._match.release()

    _leave = release
