# SPDX-License-Identifier: MIT
"""One feature: where it comes from, how it is called, what a back end must have for it."""

from __future__ import annotations

import errno
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Protocol

from pyvmem.errors import InvalidArgument, NotSupported
from pyvmem.features.record import Probed
from pyvmem.memory.info import Caps

__all__ = ["BackEnd", "Feature", "require_page_size"]

_NONE = Caps(0)
_MEANING = {
    "VMEM_CAP_ALIAS": "one page at several addresses",
    "VMEM_CAP_READONLY": "read-only mappings",
    "VMEM_CAP_SPARSE": "reservations whose unmapped parts read as zeros",
    "VMEM_CAP_SPARSE_ATOMIC": "pages that replace these zeros with no invalid moment between",
    "VMEM_CAP_HOST_PAGES": "pages in host memory",
    "VMEM_CAP_PEER": "pages in a peer device",
}


class BackEnd(Protocol):
    """What is known of an opened back end: a `pyvmem.ContextInfo`, or a kept record of one."""

    @property
    def backend(self) -> str:
        """Its name."""

    @property
    def caps(self) -> Caps:
        """What it can do."""

    @property
    def page_sizes(self) -> tuple[int, ...]:
        """Bytes that a page can have."""

    @property
    def devices(self) -> tuple[int, ...]:
        """The devices it was opened on."""


@dataclass(frozen=True)
class Feature:
    """A row of the table.

    Attributes:
        key: what it is called in files; unique.
        name: in the terms of the field.
        source: the system that it is known from; "vmem": none of them has it.
        calls: what to call or to set.
        caps: what the back end must be able to do.
        page_sizes: bytes; pages of each of these sizes must be there.
        devices: how many the context must be opened on, where it matters.
        packages: Python packages that it needs besides this one.
    """

    key: str
    name: str
    source: str
    calls: str
    caps: Caps = _NONE
    page_sizes: tuple[int, ...] = ()
    devices: int = 0
    packages: tuple[str, ...] = ()

    def lacks(self, info: BackEnd) -> list[str]:
        """What the feature needs and the back end lacks; empty: it works there."""
        caps = (cap for cap in Caps if cap in self.caps and cap not in info.caps)
        sizes = (size for size in self.page_sizes if size not in info.page_sizes)
        few = len(info.devices) < self.devices
        return [
            *(f"VMEM_CAP_{cap.name}" for cap in caps),
            *(f"pages of {_text(size)}" for size in sizes),
            *([f"{self.devices} devices"] if few else []),
        ]

    def lacks_packages(self) -> list[str]:
        """The packages that it needs and that are not installed here."""
        return [f"package {name}" for name in self.packages if find_spec(name) is None]

    def needs(self) -> list[str]:
        """All that `lacks` and `lacks_packages` look for."""
        nothing = Probed("", _NONE, (), ())
        return self.lacks(nothing) + [f"package {name}" for name in self.packages]

    def require(self, info: BackEnd, what: str) -> None:
        """Refuses a call that the back end cannot serve.

        Args:
            info: of the context.
            what: the call or option, as the caller knows it.

        Raises:
            NotSupported: the text names the back end and what it lacks.
        """
        if lacks := self.lacks(info):
            named = (f"{one} ({_MEANING[one]})" if one in _MEANING else one for one in lacks)
            raise NotSupported(
                f"{what}: back end {info.backend} has no {', no '.join(named)}",
                errno=errno.EOPNOTSUPP,
                op=what,
            )


def require_page_size(
    info: BackEnd, size: int, name: str = "page_size", *, op: str = "KVCache"
) -> None:
    """Raises InvalidArgument, which names the sizes, where no page can have `size` bytes."""
    if size not in info.page_sizes:
        sizes = ", ".join(str(one) for one in info.page_sizes)
        raise InvalidArgument(
            f"{name} {size} is none of this context's ({info.backend}): {sizes}",
            errno=errno.EINVAL,
            op=op,
            bytes=size,
        )


def _text(size: int) -> str:
    return f"{size >> 20} MB" if size >= 1 << 20 else f"{size >> 10} KB"
