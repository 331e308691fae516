# SPDX-License-Identifier: MIT
"""Describes a feature: its origin, its calls, and what it requires of a back end."""

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
    "VMEM_CAP_SPARSE_ATOMIC": "pages that replace these zeros atomically",
    "VMEM_CAP_HOST_PAGES": "pages in host memory",
    "VMEM_CAP_PEER": "pages in a peer device",
}


class BackEnd(Protocol):
    """A back end's properties, as provided by `pyvmem.ContextInfo` and by a `Probed` record."""

    @property
    def backend(self) -> str:
        """The back end's name."""

    @property
    def caps(self) -> Caps:
        """The back end's capabilities."""

    @property
    def page_sizes(self) -> tuple[int, ...]:
        """The back end's page sizes in bytes."""

    @property
    def devices(self) -> tuple[int, ...]:
        """The CUDA ordinals of the devices on which it was opened."""


@dataclass(frozen=True)
class Feature:
    """A feature of the cache: a row of `pyvmem.features.table`.

    Attributes:
        key: unique name used in files.
        name: description shown in the table.
        source: the system that introduced it; "vmem" for this project.
        calls: calls or options that use it.
        caps: required capabilities.
        page_sizes: required page sizes, in bytes.
        devices: minimum number of devices in the context.
        packages: required Python packages.
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
        """Lists the requirements that a back end does not meet; [] if it supports the feature."""
        caps = (cap for cap in Caps if cap in self.caps and cap not in info.caps)
        sizes = (size for size in self.page_sizes if size not in info.page_sizes)
        few = len(info.devices) < self.devices
        return [
            *(f"VMEM_CAP_{cap.name}" for cap in caps),
            *(f"pages of {_text(size)}" for size in sizes),
            *([f"{self.devices} devices"] if few else []),
        ]

    def lacks_packages(self) -> list[str]:
        """Lists the required packages that are not installed."""
        return [f"package {name}" for name in self.packages if find_spec(name) is None]

    def needs(self) -> list[str]:
        """Lists all requirements that `lacks` and `lacks_packages` check."""
        nothing = Probed("", _NONE, (), ())
        return self.lacks(nothing) + [f"package {name}" for name in self.packages]

    def require(self, info: BackEnd, what: str) -> None:
        """Raises if the back end does not support the feature.

        Args:
            info: properties of the context.
            what: the call or option, as the user wrote it.

        Raises:
            NotSupported: names the back end and the requirements that it does not meet.
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
    """Raises InvalidArgument, listing the page sizes, unless the back end supports `size`."""
    if size not in info.page_sizes:
        sizes = ", ".join(str(one) for one in info.page_sizes)
        raise InvalidArgument(
            f"{name} must be one of this context's ({info.backend}), {sizes}, not {size}",
            errno=errno.EINVAL,
            op=op,
            bytes=size,
        )


def _text(size: int) -> str:
    return f"{size >> 20} MB" if size >= 1 << 20 else f"{size >> 10} KB"
