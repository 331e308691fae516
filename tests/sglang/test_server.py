# SPDX-License-Identifier: MIT
"""SGLang's HTTP server, started from the command line: answers, ``/metrics`` and sleep."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import served

from pyvmem.ledger.accounts import engines_in


class Server:
    """A running server, with its port, process and log."""

    def __init__(self, port: int, process: subprocess.Popen[bytes], log: Path) -> None:
        self.port, self.process, self.log = port, process, log

    def ask(self, path: str, body: Any = None) -> str:
        """Sends a GET request, or a POST request if there is a body; returns the response."""
        data = None if body is None else json.dumps(body).encode()
        kind = {"Content-Type": "application/json"}
        url = f"http://127.0.0.1:{self.port}{path}"
        with urllib.request.urlopen(urllib.request.Request(url, data, kind), timeout=60) as found:
            return str(found.read().decode())

    def answers(self) -> bool:
        assert self.process.poll() is None, self.log.read_text("utf-8")[-4000:]
        try:
            self.ask("/model_info")
        except OSError:
            return False
        return True

    def metrics(self) -> dict[str, float]:
        """Returns the pool's metrics for the only engine, by name."""
        lines = [one for one in self.ask("/metrics").splitlines() if one.startswith("vmem:")]
        assert all('device="host",engine="web"' in one for one in lines), lines
        return {one.partition("{")[0]: float(one.rpartition(" ")[2]) for one in lines}


@pytest.fixture
def start_server(model: Path, tmp_path: Path) -> Iterator[Callable[..., Server]]:
    """Yields a function that starts servers with the pool, given `env` and options."""
    running: list[subprocess.Popen[bytes]] = []

    def start(env: dict[str, str], *more: str) -> Server:
        with socket.socket() as one:
            one.bind(("127.0.0.1", 0))
            port = one.getsockname()[1]
        words = [sys.executable, "-m", "sglang.launch_server", "--model-path", str(model)]
        words += ["--host", "127.0.0.1", "--port", str(port), "--device", "cpu", *more]
        words += ["--attention-backend", "torch_native", "--sampling-backend", "pytorch"]
        words += ["--grammar-backend", "none", "--skip-tokenizer-init", "--dtype", "float32"]
        words += ["--disable-cuda-graph", "--disable-overlap-schedule", "--page-size", "16"]
        words += ["--max-total-tokens", "2048", "--mem-fraction-static", "0.2"]
        words += ["--max-running-requests", "8", "--random-seed", "1", "--skip-server-warmup"]
        given = {"VMEM_SGLANG": "1", "VMEM_PAGE_SIZE": "4096", "VMEM_RESERVE": "0"}
        given |= {"VMEM_LEDGER": str(tmp_path / "ledger"), "VMEM_NAME": "web", **env}
        log = tmp_path / f"server-{port}.log"
        with log.open("w") as out:
            process = subprocess.Popen(
                words, env=os.environ | given, stdout=out, stderr=out, start_new_session=True
            )
        running.append(process)
        server = Server(port, process, log)
        assert served.becomes(server.answers, 240), log.read_text("utf-8")[-4000:]
        return server

    yield start
    for one in running:
        os.killpg(one.pid, signal.SIGKILL)
        one.wait()


def test_served_over_http(
    start_server: Callable[..., Server], stock: list[list[int]], tmp_path: Path
) -> None:
    server = start_server({"VMEM_LIMIT": "1M", "VMEM_FLOOR": "64K"}, "--enable-metrics")
    before = server.metrics()
    assert before["vmem:limit_bytes"] == 1 << 20
    assert before["vmem:floor_bytes"] == 64 << 10
    least = before["vmem:used_bytes"]
    assert least == served.PAGE_BYTES

    def answer() -> list[list[int]]:
        greedy = served.greedy(24)
        asked = [{"input_ids": one, "sampling_params": greedy} for one in served.prompts()]
        return [json.loads(server.ask("/generate", one))["output_ids"] for one in asked]

    assert answer() == stock
    assert answer() == stock
    assert served.becomes(lambda: server.metrics()["vmem:cached_bytes"] > 0)
    found = server.metrics()
    assert found["vmem:used_bytes"] > least
    assert found["vmem:maps_total"] > before["vmem:maps_total"]
    assert found["vmem:hits_total"] > 0
    assert found["vmem:asleep"] == 0
    (one,) = engines_in(tmp_path / "ledger")["host"]
    assert found["vmem:used_bytes"] == one.used
    assert "sglang:" in server.ask("/metrics")  # SGLang's own metrics are still there

    assert served.becomes(lambda: "flushed" in server.ask("/flush_cache", {}).lower())
    server.ask("/release_memory_occupation", {"tags": ["kv_cache"]})
    assert server.metrics()["vmem:used_bytes"] == least
    server.ask("/resume_memory_occupation", {"tags": ["kv_cache"]})
    assert answer() == stock
    assert server.metrics()["vmem:used_bytes"] > least
