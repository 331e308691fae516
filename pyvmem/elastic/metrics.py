# SPDX-License-Identifier: MIT
"""The numbers of `vmem top`, on an inference engine's own ``/metrics``.

The process that has the KV cache and the API server are different ones; the server reads the
ledger.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterable, Iterator
from typing import Any

from pyvmem.errors import VMemError
from pyvmem.ledger.accounts import EngineInfo, default_folder, engines_in
from pyvmem.ledger.control import COUNTERS, GAUGES, unit_of

__all__ = ["identity_of", "publish"]

_identities: set[int] = set()
_lock = threading.Lock()


def identity_of(instance: str, replica: int = 0) -> int:
    """The identity of an engine in the ledger.

    Args:
        instance: what all its processes know, and no other engine has.
        replica: its number among several accounts of the engine.
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
        for names, family in ((GAUGES, GaugeMetricFamily), (COUNTERS, CounterMetricFamily)):
            for name, text in names.items():
                metric = family(f"vmem:{name}{unit_of(name)}", text, labels=labels)
                for device, one in found:
                    metric.add_metric([one.name, device], getattr(one, name))
                yield metric


def _engines() -> Iterator[tuple[str, EngineInfo]]:
    """The engines of this process; none if the ledger cannot be read."""
    try:
        for device, some in engines_in(default_folder()).items():
            yield from ((device, one) for one in some if one.identity in _identities)
    except VMemError:
        return


def _add_to(of_files: Any) -> None:
    """Adds the metrics to the multiprocess registry.

    SGLang's server shows it, and vLLM's, where there are several.
    """
    collect = of_files.collect

    def collect_all(self: Any) -> Iterator[Any]:
        yield from collect(self)
        yield from _Collector().collect()

    of_files.collect = collect_all


def publish(instance: str, replicas: Iterable[int] = (0,)) -> None:
    """Adds an engine, or several accounts of it, to this process's metrics.

    Args:
        instance: as in `identity_of`.
        replicas: the accounts' numbers.
    """
    try:
        from prometheus_client import REGISTRY
        from prometheus_client.multiprocess import MultiProcessCollector
    except ImportError:
        return
    with _lock:
        first = not _identities
        _identities.update(identity_of(instance, one) for one in replicas)
    if first:
        REGISTRY.register(_Collector())
        _add_to(MultiProcessCollector)
