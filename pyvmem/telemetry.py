# SPDX-License-Identifier: MIT
"""Exports caches' counters to Prometheus, OpenTelemetry and `vmem watch`.

    telemetry = Telemetry()
    telemetry.add(cache, "llama")

    telemetry.text()                        # Prometheus text; needs no package
    telemetry.serve(9464)                   # over HTTP: /metrics as text, /caches as JSON
    prometheus_client.REGISTRY.register(telemetry)      # or alongside an engine's own metrics
    telemetry.instrument(opentelemetry.metrics.get_meter("pyvmem"))

The values come from `CacheStats` and are read on demand, so a cache that is not scraped has no
overhead. Caches are held by weak reference; closed caches are no longer reported.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from pyvmem.errors import BadHandle, ForkedProcess
from pyvmem.kvcache.stats import CacheStats, SlotInfo
from pyvmem.memory.info import ContextInfo, Stats
from pyvmem.plumbing.http import HTTPServer, Reply, Request
from pyvmem.plumbing.reentry import reentrant_lock
from pyvmem.plumbing.validation import bounded, expect, invalid, unexpected

__all__ = ["CONTENT_TYPE", "Family", "Sample", "Server", "Telemetry", "prometheus_text"]

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
"""The content type of `Telemetry.text`."""

_log = logging.getLogger(__name__)
_T = TypeVar("_T")

_SHORTEST, _LONGEST = 10, 34  # buckets cover waits from 1 us to 17 s
_SAME_S = 0.05  # all instruments in one collection share values that are at most this old
_PREFIX = "pyvmem_"


class _Context(Protocol):
    @property
    def info(self) -> ContextInfo: ...

    def stats(self) -> Stats: ...


class _Cache(Protocol):
    """The interface that `Telemetry` needs; all caches in `pyvmem.kvcache` implement it."""

    @property
    def context(self) -> _Context: ...

    def stats(self) -> CacheStats: ...


@dataclass(frozen=True)
class Sample:
    """One sample of a family: name suffix, labels and value."""

    suffix: str
    labels: Mapping[str, str]
    value: float


@dataclass(frozen=True)
class Family:
    """A metric family of type "gauge", "counter" or "histogram"."""

    name: str
    kind: str
    help: str
    samples: tuple[Sample, ...]


@dataclass(frozen=True)
class _Metric:
    """Defines how to compute a family from a cache's statistics."""

    name: str
    kind: str
    help: str
    label: str
    values: Callable[[CacheStats], Mapping[str, float]]


def _of(**names: str) -> Callable[[CacheStats], Mapping[str, float]]:
    """Returns a function that reads, for each label value, the given `CacheStats` field."""
    return lambda stats: {value: getattr(stats, field) for value, field in names.items()}


def _one(field: str, scale: float = 1) -> Callable[[CacheStats], Mapping[str, float]]:
    return lambda stats: {"": getattr(stats, field) * scale}


_METRICS = (
    _Metric(
        "pages",
        "gauge",
        "Physical pages within the cache's limit, by state.",
        "state",
        _of(free="free_pages", cached="cached_pages", active="active_pages"),
    ),
    _Metric(
        "pages_of_kind",
        "gauge",
        "Pages by kind; a page may be counted in several kinds.",
        "kind",
        _of(
            ahead="ahead_pages",
            shared="shared_pages",
            moving="moving_pages",
            prefix="prefix_pages",
            host="host_pages",
            peer="peer_pages",
        ),
    ),
    _Metric(
        "bytes",
        "gauge",
        "Bytes mapped (mapped), holding requests' rows (used), or granted without rows (wasted).",
        "kind",
        _of(mapped="mapped_bytes", used="used_bytes", wasted="wasted_bytes"),
    ),
    _Metric(
        "peak_bytes",
        "gauge",
        "Maximum of pyvmem_bytes so far.",
        "kind",
        _of(mapped="peak_mapped_bytes", used="peak_used_bytes", wasted="peak_wasted_bytes"),
    ),
    _Metric(
        "slots",
        "gauge",
        "Slots of requests, by state.",
        "state",
        _of(
            active="active_slots",
            cached="cached_slots",
            empty="empty_slots",
            broken="broken_slots",
        ),
    ),
    _Metric("prefix_tokens", "gauge", "Tokens recorded.", "", _one("prefix_tokens")),
    _Metric(
        "prefix_host_bytes",
        "gauge",
        "Bytes of evicted prefixes in host memory.",
        "",
        _one("prefix_host_bytes"),
    ),
    _Metric("segments", "gauge", "Mapped segments of the cache.", "", _one("segments")),
    _Metric("mappings", "gauge", "Driver mappings of the context.", "", _one("mappings")),
    _Metric(
        "large_entries",
        "gauge",
        "2 MiB entries of the GPU's page tables in the context.",
        "",
        _one("large_entries"),
    ),
    _Metric(
        "steps",
        "counter",
        "Calls that returned 0, by call.",
        "call",
        _of(step="steps", step_async="steps_async"),
    ),
    _Metric("short", "counter", "Steps of both kinds that returned -1.", "", _one("short")),
    _Metric(
        "page_events",
        "counter",
        "Pages mapped (grown), filled for a new owner (zeroed), granted when already mapped "
        "(reused), unmapped (reclaimed), replaced (moved, promoted), and freed with a prefix "
        "(evicted); counted when done.",
        "event",
        _of(
            grown="grown_pages",
            zeroed="zeroed_pages",
            reused="reused_pages",
            reclaimed="reclaimed_pages",
            moved="moved_pages",
            promoted="promoted_pages",
            evicted="evicted_pages",
        ),
    ),
    _Metric(
        "prefix_queries",
        "counter",
        "Prompts looked up for requests that were then given a slot.",
        "",
        _one("prefix_queries"),
    ),
    _Metric(
        "prefix_hits",
        "counter",
        "Prompts in pyvmem_prefix_queries that began with a recorded prefix.",
        "",
        _one("prefix_hits"),
    ),
    _Metric(
        "prefix_resumed",
        "counter",
        "Hits whose pages were all still mapped in the slot.",
        "",
        _one("prefix_resumed"),
    ),
    _Metric(
        "prefix_query_tokens",
        "counter",
        "Tokens of the prompts in pyvmem_prefix_queries.",
        "",
        _one("prefix_query_tokens"),
    ),
    _Metric(
        "prefix_hit_tokens",
        "counter",
        "Tokens of the recorded prefixes of these hits.",
        "",
        _one("prefix_hit_tokens"),
    ),
    _Metric(
        "prefix_copied_bytes",
        "counter",
        "Bytes of prefixes copied to host memory (stored) and back (loaded), or lost by eviction "
        "in host or device memory (dropped).",
        "event",
        _of(
            stored="prefix_stored_bytes",
            loaded="prefix_loaded_bytes",
            dropped="prefix_dropped_bytes",
        ),
    ),
    _Metric("driver_calls", "counter", "Driver calls of the context.", "", _one("driver_calls")),
    _Metric(
        "driver_seconds",
        "counter",
        "Time in the driver, while a cache call waited (critical) or in the background.",
        "path",
        lambda stats: {
            "critical": stats.critical_driver_ns / 1e9,
            "background": stats.background_driver_ns / 1e9,
        },
    ),
)
NOT_EXPORTED = frozenset({"total_pages", "last_wait_ns", "driver_ns"})
"""Fields of `CacheStats` that are sums of other fields or are not time series."""


_CONTEXT_BYTES = ("slab", "used", "free", "dirty", "quarantined")


def _waits(stats: CacheStats, labels: Mapping[str, str]) -> Iterator[Sample]:
    """Yields the histogram of waits, with cumulative buckets as in Prometheus."""
    for power in range(_SHORTEST, _LONGEST + 1):
        count = sum(stats.wait_counts[: power + 1])
        yield Sample("_bucket", {**labels, "le": repr((1 << power) / 1e9)}, count)
    yield Sample("_bucket", {**labels, "le": "+Inf"}, stats.waits)
    yield Sample("_sum", labels, stats.wait_ns / 1e9)
    yield Sample("_count", labels, stats.waits)


class Telemetry:
    """Exports the metrics of several caches; see the module's docstring. Thread-safe."""

    def __init__(self) -> None:
        self._lock = reentrant_lock()
        self._caches: dict[str, weakref.ref[_Cache]] = {}
        self._seen: tuple[float, tuple[Family, ...]] = (float("-inf"), ())

    def __repr__(self) -> str:
        return f"<Telemetry of {', '.join(map(repr, list(self._caches))) or 'no cache'}>"

    def add(self, cache: _Cache, name: str = "0") -> None:
        """Starts reporting a cache, under the label ``cache="name"``.

        Raises:
            InvalidArgument: another open cache has this name, or the name contains a lone
                surrogate, which cannot be encoded.
            TypeError: `cache` is not a cache, or `name` is not a string.
        """
        expect("name", name, str)
        try:
            name.encode()
        except UnicodeEncodeError as error:
            raise invalid(f"name = {name!r:.80}: {error.reason}", op="Telemetry") from None
        if not (hasattr(cache, "context") and callable(getattr(cache, "stats", None))):
            raise unexpected("cache", cache, "a KVCache or another object with context and stats()")
        with self._lock:
            self._living(lambda cache: None)
            if name in self._caches:
                raise invalid(f"a cache named {name!r} has already been added", op="Telemetry")
            self._caches[name] = weakref.ref(cache)

    def _living(self, read: Callable[[_Cache], _T]) -> list[tuple[str, _Cache, CacheStats, _T]]:
        """Returns each open cache with its stats and the result of `read`; drops closed ones."""
        found = []
        for name, ref in list(self._caches.items()):
            cache = ref()
            try:
                if cache is not None:
                    found.append((name, cache, cache.stats(), read(cache)))
                    continue
            except (BadHandle, ForkedProcess):
                pass
            self._caches.pop(name, None)  # a handler that interrupted this call may have removed it
        return found

    def families(self) -> tuple[Family, ...]:
        """Returns all metric families, with current values."""
        with self._lock:
            each = self._living(lambda cache: cache.context.stats())
        made = []
        labels = [
            {
                "cache": name,
                "backend": cache.context.info.backend,
                "device": cache.context.info.device_name,
                "driver": cache.context.info.driver,
            }
            for name, cache, *_ in each
        ]
        samples = tuple(Sample("", one, 1) for one in labels)
        text = "Always 1; the labels name the cache's back end, device and driver."
        made.append(Family(f"{_PREFIX}cache_info", "gauge", text, samples))
        for metric in _METRICS:
            suffix = "_total" if metric.kind == "counter" else ""
            samples = tuple(
                Sample(suffix, {"cache": name, **({metric.label: key} if key else {})}, value)
                for name, _, stats, _ in each
                for key, value in metric.values(stats).items()
            )
            made.append(Family(_PREFIX + metric.name, metric.kind, metric.help, samples))
        samples = tuple(
            Sample("", {"cache": name, "kind": kind}, getattr(stats, f"{kind}_bytes"))
            for name, _, _, stats in each
            for kind in _CONTEXT_BYTES
        )
        text = "Bytes that the cache's context has allocated from the driver (slab), by use."
        made.append(Family(f"{_PREFIX}context_bytes", "gauge", text, samples))
        samples = tuple(s for name, _, stats, _ in each for s in _waits(stats, {"cache": name}))
        text = "Time that cache calls waited for mapping, filling or reclaiming."
        made.append(Family(f"{_PREFIX}wait_seconds", "histogram", text, samples))
        return tuple(made)

    # ---- Prometheus ------------------------------------------------------------------------------

    def text(self) -> str:
        """Returns all metrics in the Prometheus text format."""
        return prometheus_text(self.families())

    def collect(self) -> Iterator[Any]:
        """Yields `families` for a prometheus_client registry, which calls this method."""
        from prometheus_client.core import Metric

        for family in self.families():
            metric = Metric(family.name, family.help, family.kind)
            for one in family.samples:
                metric.add_sample(family.name + one.suffix, dict(one.labels), one.value)
            yield metric

    # ---- OpenTelemetry ---------------------------------------------------------------------------

    def instrument(self, meter: Any) -> None:
        """Registers every metric as an observable instrument of an OpenTelemetry meter.

        Names have dots instead of underscores. OpenTelemetry has no observable histogram, so the
        histogram of waits is exported as counters: `pyvmem.wait.seconds.bucket` with the label
        ``le``, as in Prometheus, ``.sum`` and ``.count``.
        """
        from opentelemetry.metrics import Observation

        def observe(name: str, suffix: str) -> Callable[[Any], list[Any]]:
            def callback(_options: Any) -> list[Any]:
                return [
                    Observation(one.value, dict(one.labels))
                    for family in self._recent()
                    if family.name == name
                    for one in family.samples
                    if one.suffix == suffix
                ]

            return callback

        for family in self.families():
            parts = {"gauge": [""], "counter": ["_total"]}
            for suffix in parts.get(family.kind, ["_bucket", "_sum", "_count"]):
                gauge = family.kind == "gauge"
                make = meter.create_observable_gauge if gauge else meter.create_observable_counter
                name = (family.name + suffix.replace("_total", "")).replace("_", ".")
                make(name, callbacks=[observe(family.name, suffix)], description=family.help)

    def _recent(self) -> tuple[Family, ...]:
        """Returns `families`, cached so that all instruments in a collection see the same data."""
        when, families = self._seen
        now = time.monotonic()
        if now - when > _SAME_S:
            families = self.families()
            self._seen = now, families
        return families

    # ---- for vmem watch --------------------------------------------------------------------------

    def caches(self) -> dict[str, Any]:
        """Returns each cache's statistics, and its slots if it has `snapshot`, ready for JSON."""

        def slots(cache: _Cache) -> list[SlotInfo]:
            snapshot: Callable[[], list[SlotInfo]] | None = getattr(cache, "snapshot", None)
            return snapshot() if snapshot else []

        with self._lock:
            each = self._living(slots)
        return {
            name: {
                "backend": cache.context.info.backend,
                "device": cache.context.info.device_name,
                "stats": dataclasses.asdict(stats),
                "slots": [dataclasses.asdict(slot) for slot in snapshot],
            }
            for name, cache, stats, snapshot in each
        }

    def serve(self, port: int = 0, address: str = "127.0.0.1") -> Server:
        """Serves ``/metrics`` (Prometheus) and ``/caches`` (JSON, for `vmem watch`) over HTTP.

        Args:
            port: the TCP port; 0 for any free port (see `Server.port`).
            address: the address to listen on; the default accepts only local connections. There is
                no authentication.

        Raises:
            InvalidArgument: `port` is not a port number.
            OSError: the port is unavailable.
        """
        port = bounded("port", port, 0, 65535, op="Telemetry")
        return Server(self, address, port)


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")


def prometheus_text(families: Iterable[Family]) -> str:
    """Returns families in the Prometheus text format."""
    lines = []
    for family in families:
        name = family.name + ("_total" if family.kind == "counter" else "")
        lines += [f"# HELP {name} {family.help}", f"# TYPE {name} {family.kind}"]
        for one in family.samples:
            labels = ",".join(f'{key}="{_escaped(text)}"' for key, text in one.labels.items())
            lines.append(f"{family.name}{one.suffix}{{{labels}}} {one.value!r}")
    return "\n".join(lines) + "\n"


class Server(HTTPServer):
    """The server that `Telemetry.serve` starts in a thread; as a context manager, it stops on exit.

    Attributes:
        port: the port on which the server listens.
    """

    def __init__(self, telemetry: Telemetry, address: str, port: int) -> None:
        answers: dict[str, tuple[str, Callable[[], str]]] = {
            "/metrics": (CONTENT_TYPE, telemetry.text),
            "/caches": ("application/json", lambda: json.dumps(telemetry.caches())),
        }

        def answer(request: Request) -> Reply:
            kind, make = answers.get(request.path, ("", None))
            if make is None or request.method not in ("GET", "HEAD"):
                return Reply.error(404, f"only GET {' and '.join(answers)}")
            return Reply(200, kind, make().encode())

        super().__init__(answer, (address, port), name="pyvmem-telemetry")
