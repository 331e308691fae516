# SPDX-License-Identifier: MIT
"""What `vmem top` shows, on vLLM's own ``/metrics``.

The engine's core and the server that answers there are different processes; both read the ledger.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from pyvmem.errors import VMemError
from pyvmem.ledger.accounts import EngineInfo, Ledger, default_folder, devices

__all__ = ["identity_of", "publish"]

_GAUGES = {
    "used": "Memory behind the KV cache, in bytes of one device.",
    "in_use": "The part that requests hold.",
    "cached": "The part that holds prefixes of no request.",
    "limit": "The most that the engine may have.",
    "floor": "What other engines leave to it.",
    "want": "What its requests are short of.",
    "handles": "Mappings of the driver.",
}
_COUNTERS = {
    "maps": "Calls that mapped.",
    "waits": "Steps that waited for one.",
    "hits": "Tokens found among prefixes.",
    "queries": "Tokens looked for among prefixes.",
}
_identities: set[int] = set()
_lock = threading.Lock()


def identity_of(instance: str, replica: int = 0) -> int:
    """The identity of a vLLM engine in the ledger.

    Args:
        instance: `instance_id` of its configuration.
        replica: its rank in data parallelism, where each has this configuration.
    """
    digest = hashlib.sha256(f"{instance}/{replica}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1 | 1


class _Collector:
    """Reads the ledger on every scrape."""

    def describe(self) -> list[Any]:
        """Nothing: prometheus_client need not collect at registration."""
        return []

    def collect(self) -> Iterator[Any]:
        """One family for each number."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        found = list(_engines())
        labels = ["engine", "device"]
        for names, family in ((_GAUGES, GaugeMetricFamily), (_COUNTERS, CounterMetricFamily)):
            for name, text in names.items():
                unit = "_bytes" if names is _GAUGES and name != "handles" else ""
                metric = family(f"vmem:{name}{unit}", text, labels=labels)
                for device, one in found:
                    metric.add_metric([one.name, device], getattr(one, name))
                yield metric


def _engines() -> Iterator[tuple[str, EngineInfo]]:
    """The engines of this process, or none where the ledger cannot be read."""
    folder: Path = default_folder()
    try:
        for device in devices(folder):
            with Ledger(device, folder=folder, create=False) as ledger:
                for one in ledger.engines():
                    if one.identity in _identities:
                        yield device, one
    except VMemError:
        return


def publish(instance: str, replicas: Iterable[int] = (0,)) -> None:
    """Adds an engine, or its ranks in data parallelism, to this process's metrics."""
    try:
        from prometheus_client import REGISTRY
    except ImportError:
        return
    with _lock:
        first = not _identities
        _identities.update(identity_of(instance, one) for one in replicas)
    if first:
        REGISTRY.register(_Collector())
