# SPDX-License-Identifier: MIT
"""An opened back end as kept in a file: `vmem features` and `vmem selftest` write this."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pyvmem.memory.info import Caps, ContextInfo

__all__ = ["Probed", "about"]


def about(info: ContextInfo) -> dict[str, Any]:
    """What is kept of a context, for JSON."""
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
"""Names of capabilities in kept records, where they have others now."""


@dataclass(frozen=True)
class Probed:
    """What `about` kept, read back: a `pyvmem.features.BackEnd`."""

    backend: str
    caps: Caps
    page_sizes: tuple[int, ...]
    devices: tuple[int, ...]

    @classmethod
    def of(cls, record: dict[str, Any]) -> Probed:
        """From the record. Those of version 0.1.0 without `devices` were made on one."""
        caps = Caps(0)
        for name in record["caps"]:
            caps |= Caps[_RENAMED.get(name, name)]
        return cls(
            record["backend"],
            caps,
            tuple(record["page_sizes"]),
            tuple(record.get("devices", (0,))),
        )
