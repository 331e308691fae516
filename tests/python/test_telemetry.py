# SPDX-License-Identifier: MIT
"""Tests a cache's metrics as received by Prometheus, OpenTelemetry and a watcher."""

from __future__ import annotations

import dataclasses
import gc
import json
import socket
import struct
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest
from kvcache_helpers import LAYERS, ROWS, eventually, lens, small_cache, small_config

from pyvmem import Caps, Context, InvalidArgument, KVCache, telemetry
from pyvmem._native import Waits
from pyvmem.kvcache.stats import CacheStats, Counters, together
from pyvmem.telemetry import Telemetry

TENSORS = 2 * LAYERS
Numbers = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def optional(module: str) -> Any:
    """Imports a module of a package that is optional for `pyvmem.telemetry`, or skips the test."""
    package = module.partition(".")[0]
    return pytest.importorskip(module, reason=f"the extra 'metrics': {package} is not installed")


def families(text: str) -> list[Any]:
    """Parses Prometheus text with Prometheus's own parser."""
    return list(optional("prometheus_client.parser").text_string_to_metric_families(text))


@pytest.fixture
def cache(context: Context) -> Iterator[KVCache]:
    """Yields a cache with some activity."""
    with small_cache(context) as cache:
        cache.alloc_reqid()
        assert cache.step(lens(cache, r0=2 * ROWS + 1)) == 0
        yield cache


def parsed(text: str) -> Numbers:
    """Parses the text and returns its samples, without the cache's label."""
    return {
        (one.name, tuple(sorted((k, v) for k, v in one.labels.items() if k != "cache"))): one.value
        for family in families(text)
        for one in family.samples
    }


def test_the_text_agrees_with_the_stats(cache: KVCache) -> None:
    numbers = Telemetry()
    numbers.add(cache, "a")
    found, stats = parsed(numbers.text()), cache.stats()
    assert found["pyvmem_pages", (("state", "active"),)] == stats.active_pages == 3 * TENSORS
    assert found["pyvmem_pages", (("state", "free"),)] == stats.free_pages
    assert found["pyvmem_page_events_total", (("event", "grown"),)] == stats.grown_pages
    assert found["pyvmem_steps_total", (("call", "step"),)] == 1
    assert found["pyvmem_slots", (("state", "active"),)] == 1
    assert found["pyvmem_driver_calls_total", ()] == stats.driver_calls
    slabs = cache.context.stats().slab_bytes
    assert found["pyvmem_context_bytes", (("kind", "slab"),)] == slabs >= stats.mapped_bytes
    assert found["pyvmem_wait_seconds_count", ()] == stats.waits == sum(stats.wait_counts)
    assert found["pyvmem_wait_seconds_sum", ()] == pytest.approx(stats.wait_ns / 1e9)


def test_buckets_grow_to_the_number_of_waits(cache: KVCache) -> None:
    waits = cache._groups[0].counters.waits = Waits()
    for took, power in ((1, 0), (2, 1), (1024, 10), (1025, 11), (1 << 34, 34), (1 << 50, -1)):
        assert (took - 1).bit_length() == power or power == -1
        waits.add(took, 0)
    numbers = Telemetry()
    numbers.add(cache)
    found = parsed(numbers.text())
    name = "pyvmem_wait_seconds_bucket"
    assert found[name, (("le", "1.024e-06"),)] == 3
    assert found[name, (("le", "2.048e-06"),)] == 4
    assert found[name, (("le", "17.179869184"),)] == 5
    assert found[name, (("le", "+Inf"),)] == 6


def test_a_wait_is_counted_by_its_length() -> None:
    waits = Waits()
    expected = list(waits.struct.lengths)
    for took, place in ((0, 0), (1, 0), (2, 1), (3, 2), (4096, 12), (1 << 60, -1)):
        waits.add(took, took // 2)
        expected[place] += 1
        assert list(waits.struct.lengths) == expected
    assert waits.struct.count == 6
    assert waits.struct.ns == waits.struct.last_ns == 4102 + (1 << 60)
    assert waits.struct.driver_ns == 2050 + (1 << 59)
    waits.add(10, 1000)
    assert waits.struct.driver_ns == 2060 + (1 << 59), "other work does not count as a wait"


def test_a_wait_takes_the_time_inside(context: Context) -> None:
    counters = Counters(context)
    with counters.waiting():
        time.sleep(0.002)
    assert counters.waits.struct.count == 1
    assert counters.waits.struct.ns >= 2_000_000
    assert counters.waits.struct.driver_ns == 0


def test_every_number_of_the_stats_is_exported(cache: KVCache) -> None:
    told = set()

    class Asked:
        def __getattr__(self, name: str) -> object:
            told.add(name)
            return getattr(cache.stats(), name)

    for metric in telemetry._METRICS:
        metric.values(Asked())  # type: ignore[arg-type]
    told |= {"waits", "wait_ns", "wait_counts"}  # these form the histogram
    assert told | telemetry.NOT_EXPORTED == {one.name for one in dataclasses.fields(CacheStats)}
    assert not told & telemetry.NOT_EXPORTED


def test_hits_and_evictions_are_counted(context: Context) -> None:
    if Caps.ALIAS | Caps.READONLY not in context.info.caps:
        pytest.skip("the back end has no prefixes")
    with small_cache(context) as cache:
        reqid = cache.alloc_reqid()
        assert cache.step(lens(cache, **{f"r{reqid}": 3 * ROWS})) == 0
        cache.free_reqid(reqid, tokens=range(3 * ROWS))
        with cache.match(range(3 * ROWS)) as found, cache.match([7] * ROWS) as new:
            assert cache.stats().prefix_queries == 0, "no request has begun"
            for match, length in ((found, 2 * ROWS), (new, 0)):
                reqid, held = cache.alloc_prefix(match) or (0, -1)
                assert held == length
                cache.free_reqid(reqid)
        stats = cache.stats()
        assert (stats.prefix_queries, stats.prefix_query_tokens) == (2, 4 * ROWS)
        assert (stats.prefix_hits, stats.prefix_hit_tokens) == (1, 2 * ROWS)
        assert stats.evicted_pages == 0
        cache.trim(prefixes=True)
        assert cache.stats().evicted_pages == 3 * TENSORS
        cache.alloc_prefix([7] * ROWS)
        assert cache.stats().prefix_queries == 3
        cache.internals.withdraw_prompt()
        cache.internals.withdraw_prompt()  # has no effect the second time
        assert cache.stats().prefix_queries == 2
        both = together([stats, stats], 5)
        assert both.prefix_queries == 2, "the same prompts"
        assert both.wait_counts == tuple(2 * count for count in stats.wait_counts)


def test_prometheus_client_exports_the_same(cache: KVCache) -> None:
    client = optional("prometheus_client")
    numbers = Telemetry()
    numbers.add(cache, "a")
    registry = client.CollectorRegistry()
    registry.register(numbers)
    assert parsed(client.generate_latest(registry).decode()) == parsed(numbers.text())


def test_opentelemetry_exports_the_same(cache: KVCache) -> None:
    metrics = optional("opentelemetry.sdk.metrics")
    numbers = Telemetry()
    numbers.add(cache, "a")
    reader = optional("opentelemetry.sdk.metrics.export").InMemoryMetricReader()
    provider = metrics.MeterProvider([reader])
    try:
        numbers.instrument(provider.get_meter("pyvmem"))
        data = reader.get_metrics_data()
        found = {
            (metric.name, tuple(sorted(point.attributes.items()))): point.value
            for resource in data.resource_metrics
            for scope in resource.scope_metrics
            for metric in scope.metrics
            for point in metric.data.data_points
        }
    finally:
        provider.shutdown()
    wanted = {
        (
            one.name.removesuffix("_total").replace("_", "."),
            tuple(sorted(one.labels.items())),
        ): one.value
        for family in families(numbers.text())
        for one in family.samples
    }
    assert found == wanted


def test_closed_caches_are_removed_and_names_are_checked(context: Context) -> None:
    numbers = Telemetry()
    with small_cache(context) as first:
        numbers.add(first, 'odd "name"\n\\')
        with pytest.raises(InvalidArgument, match="already been added"):
            numbers.add(first, 'odd "name"\n\\')
        labels = {s.labels["cache"] for one in families(numbers.text()) for s in one.samples}
        assert labels == {'odd "name"\n\\'}
    assert "cache=" not in numbers.text()
    with small_cache(context) as second:
        numbers.add(second, 'odd "name"\n\\')
        assert 'cache="odd' in numbers.text()
    del first, second
    gc.collect()
    assert numbers.caches() == {}


@pytest.mark.parametrize("wrong", [0, None, b"a"])
def test_a_name_that_is_not_a_string(cache: KVCache, wrong: Any) -> None:
    told = Telemetry()
    with pytest.raises(TypeError, match="name: expected str"):
        told.add(cache, wrong)
    with pytest.raises(TypeError, match="cache: expected a KVCache"):
        told.add({1, 2}, "a")  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match="surrogates not allowed"):
        told.add(cache, "\udcff")
    told.add(cache, "a")
    assert b"pyvmem_cache_info" in told.text().encode()


@pytest.mark.parametrize("tell", [Telemetry.text, Telemetry.caches])
def test_a_cache_that_is_closed_while_its_numbers_are_read(backend: str, tell: Any) -> None:
    config = small_config(64 << 10 if backend != "cuda" else 2 << 20)
    told = Telemetry()
    with KVCache(config, backend=backend) as kept, KVCache(config, backend=backend) as cache:
        told.add(kept, "kept")
        told.add(cache, "gone")
        real = cache.stats

        def stats() -> CacheStats:
            now = real()
            cache.close()
            return now

        cache.stats = stats  # type: ignore[method-assign]
        found = tell(told)
        assert "kept" in found
        assert "gone" not in found


@pytest.mark.parametrize("port", [-1, 65536])
def test_an_invalid_port(port: int) -> None:
    with pytest.raises(InvalidArgument, match=f"port is {port}"):
        Telemetry().serve(port)


def test_a_failed_request_is_logged(
    capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    def fails() -> str:
        raise RuntimeError("no numbers")

    numbers = Telemetry()
    numbers.text = fails  # type: ignore[method-assign]
    with numbers.serve() as server, pytest.raises(OSError, match="closed connection"):
        urllib.request.urlopen(f"http://127.0.0.1:{server.port}/metrics", timeout=20)
    eventually(lambda: "answering a request failed: RuntimeError('no numbers')" in caplog.text)
    assert capfd.readouterr().err == ""


def test_a_client_that_hangs_up(capfd: pytest.CaptureFixture[str]) -> None:
    with Telemetry().serve() as server:
        client = socket.create_connection(("127.0.0.1", server.port))
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        client.sendall(b"GET /metrics HTTP/1.0\r\n")
        client.close()  # resets the connection
        at = f"http://127.0.0.1:{server.port}/metrics"
        urllib.request.urlopen(at, timeout=20).close()
    assert capfd.readouterr().err == ""


def test_over_http(cache: KVCache) -> None:
    numbers = Telemetry()
    numbers.add(cache, "a")
    with numbers.serve() as server:
        at = f"http://127.0.0.1:{server.port}"
        with urllib.request.urlopen(f"{at}/metrics", timeout=20) as answer:
            assert answer.headers["Content-Type"] == telemetry.CONTENT_TYPE
            assert parsed(answer.read().decode()) == parsed(numbers.text())
        head = urllib.request.Request(f"{at}/metrics", method="HEAD")
        with urllib.request.urlopen(head, timeout=20) as answer:
            assert (answer.status, answer.read()) == (200, b"")
            assert answer.headers["Content-Type"] == telemetry.CONTENT_TYPE
            assert int(answer.headers["Content-Length"]) > 0
        with urllib.request.urlopen(f"{at}/caches", timeout=20) as answer:
            told = json.load(answer)["a"]
        assert told["stats"]["active_pages"] == 3 * TENSORS
        assert [slot["mapped_pages"] for slot in told["slots"]] == [3, 0, 0, 0]
        with pytest.raises(urllib.error.HTTPError) as caught:
            urllib.request.urlopen(f"{at}/other", timeout=20)
        assert caught.value.code == 404
        caught.value.close()
