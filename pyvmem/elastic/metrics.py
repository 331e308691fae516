# SPDX-License-Identifier: MIT
"""Adds the metrics that `vmem top` shows to an inference engine's own ``/metrics``.

The API server and the KV cache run in different processes, so the server reads the metrics from the
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
    """Returns the number that identifies an engine's account in the ledger.

    Args:
        instance: a string that all processes of the engine share and no other engine uses.
        replica: index of the account, if the engine has several.
    """
    digest = hashlib.sha256(f"{instance}/{replica}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1 | 1


class _Collector:
    """A prometheus_client collector that reads the ledger on each scrape."""

    def describe(self) -> list[Any]:
        """Returns no metrics, so that prometheus_client does not call `collect` at registration."""
        return []

    def collect(self) -> Iterator[Any]:
        """Yields the metric families, each with a sample per engine and device."""
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
    """Yields each published engine with its device, or nothing if the ledgers are unreadable."""
    try:
        for device, some in engines_in(default_folder()).items():
            yield from ((device, one) for one in some if one.identity in _identities)
    except VMemError:
        return


def _add_to(multiprocess: Any) -> None:
    """Makes a multiprocess collector class also collect our metrics.

    SGLang exports metrics through this class, and so does vLLM if it has several API servers.
    """
    collect = multiprocess.collect

    def collect_all(self: Any) -> Iterator[Any]:
        yield from collect(self)
        yield from _Collector().collect()

    multiprocess.collect = collect_all


def publish(instance: str, replicas: Iterable[int] = (0,)) -> None:
    """Makes this process, an API server, export the metrics of an engine's accounts.

    Does nothing if prometheus_client is not installed.

    Args:
        instance: as in `identity_of`.
        replicas: indices of the accounts.
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
