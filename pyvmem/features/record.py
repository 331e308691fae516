# SPDX-License-Identifier: MIT
"""Records of opened back ends, as `vmem features` and `vmem selftest` save them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pyvmem.memory.info import Caps, ContextInfo

__all__ = ["Probed", "about"]


def about(info: ContextInfo) -> dict[str, Any]:
    """Returns a context's properties as a record stores them, ready for JSON."""
    return {
        "backend": info.backend,
        "driver": info.driver,
        "device": info.device_name,
        "devices": list(info.devices),
        "uuid": info.uuid,
        "granule": info.granule,
        "page_sizes": list(info.page_sizes),
        "caps": [cap.name for cap in Caps if cap in info.caps],
    }


_RENAMED = {"CONSOLIDATE": "JOIN"}
"""Maps the names of capabilities in old records to their current names."""


@dataclass(frozen=True)
class Probed:
    """A saved `about` record, as a `pyvmem.features.BackEnd`."""

    backend: str
    caps: Caps
    page_sizes: tuple[int, ...]
    devices: tuple[int, ...]

    @classmethod
    def of(cls, record: dict[str, Any]) -> Probed:
        """Loads a record. Early records without `devices` come from a single device."""
        caps = Caps(0)
        for name in record["caps"]:
            caps |= Caps[_RENAMED.get(name, name)]
        return cls(
            record["backend"],
            caps,
            tuple(record["page_sizes"]),
            tuple(record.get("devices", (0,))),
        )
