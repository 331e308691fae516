# SPDX-License-Identifier: MIT
"""Tests pictures of a cache's pages, drawn in its own process or by `vmem watch` via a server."""

from __future__ import annotations

import contextlib
import io
import json
import re
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from kvcache_helpers import LAYERS, ROWS, lens, small_cache

import pyvmem
from pyvmem import Context, InvalidArgument, KVCache
from pyvmem.commands import cli, viewer
from pyvmem.telemetry import Server, Telemetry


@pytest.fixture
def cache(context: Context) -> Iterator[KVCache]:
    """Yields a cache with a request that has three pages per tensor."""
    with small_cache(context) as cache:
        cache.alloc_reqid()
        assert cache.step(lens(cache, r0=2 * ROWS + 1)) == 0
        yield cache


@pytest.fixture
def server(cache: KVCache) -> Iterator[Server]:
    telemetry = Telemetry()
    telemetry.add(cache, "mine")
    with telemetry.serve() as server:
        yield server


def test_a_character_is_a_page(cache: KVCache) -> None:
    telemetry = Telemetry()
    telemetry.add(cache, "mine")
    text = viewer.draw(telemetry.caches())
    (row,) = re.findall(r"^ +0 +(\d+) tok +([#+]+)$", text, re.M)
    assert row[0] == str(2 * ROWS + 1)
    assert row[1].count("#") == 3
    assert f"{3 * 2 * LAYERS} of {cache.stats().total_pages} pages" in text


def test_the_picture_follows_the_request(cache: KVCache) -> None:
    telemetry = Telemetry()
    telemetry.add(cache, "mine")
    assert cache.step(lens(cache, r0=4 * ROWS)) == 0
    assert "####" in viewer.draw(telemetry.caches())
    cache.free_reqid(0)
    text = viewer.draw(telemetry.caches())
    assert re.search(r"^ +0 +- +\.{4,}$", text, re.M)
    cache.trim()
    assert "no slot has pages" in viewer.draw(telemetry.caches())


def test_a_narrow_terminal_gives_a_character_more_pages(cache: KVCache) -> None:
    numbers = Telemetry()
    numbers.add(cache, "mine")
    found = numbers.caches()
    found["mine"]["slots"][0] |= {"mapped_pages": 100, "granted_pages": 90, "shared_pages": 20}
    text = viewer.draw(found, width=46)
    assert "one character: 5 pages of each tensor" in text
    assert re.search(r"tok +={4}#{14}\+{2}$", text, re.M)
    assert max(map(len, text.splitlines()[5:])) <= 46


def test_more_slots_than_lines(cache: KVCache) -> None:
    numbers = Telemetry()
    numbers.add(cache, "mine")
    found = numbers.caches()
    found["mine"]["slots"] = [found["mine"]["slots"][0]] * 9
    assert "and 4 more slots with pages" in viewer.draw(found, rows=5)


def test_watching_in_the_same_program(cache: KVCache) -> None:
    out = io.StringIO()
    with pyvmem.watch(cache, name="mine", file=out):
        assert cache.step(lens(cache, r0=5 * ROWS)) == 0
    picture = out.getvalue()
    assert picture.endswith("#####\n")
    assert "of each tensor\n# granted," in picture, "no line is broken at 80 columns"
    assert not any(one.name == "pyvmem-watch" for one in threading.enumerate())


def test_watching_a_terminal_draws_before_the_end(cache: KVCache) -> None:
    class Terminal(io.StringIO):
        drawn = threading.Event()

        def isatty(self) -> bool:
            return True

        def write(self, text: str) -> int:
            if "#####" in text:
                self.drawn.set()
            return super().write(text)

    out = Terminal()
    with pyvmem.watch(cache, interval=0.01, file=out):
        assert cache.step(lens(cache, r0=5 * ROWS)) == 0
        assert out.drawn.wait(60)


def test_watching_a_server(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["watch", str(server.port), "--once"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("mine  ")
    assert "###" in text
    assert cli.main(["watch", str(server.port), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["mine"]["stats"]["total_pages"] > 0


def test_no_answer(capsys: pytest.CaptureFixture[str]) -> None:
    with HTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as gone:
        port = gone.server_address[1]
    assert cli.main(["watch", str(port), "--once"]) == 1
    expected = f"vmem watch: no response from {port}: Connection refused\n"
    assert capsys.readouterr().err == expected


@pytest.mark.parametrize(
    "body",
    [b"<html>", b"[1]", b"[]", b"null", b"[" * 200_000, b'{"a": {}}', b" " * ((16 << 20) + 1)],
    ids=len,
)
def test_an_unexpected_answer(body: bytes) -> None:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            with contextlib.suppress(OSError):
                self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as other:
        thread = threading.Thread(target=other.handle_request)
        thread.start()
        with pytest.raises(InvalidArgument, match=r"not a response|more than"):
            viewer.fetch(f"http://127.0.0.1:{other.server_address[1]}")
        thread.join()


@pytest.mark.parametrize(
    "answer",
    [
        b"SSH-2.0-OpenSSH_9\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n{",
        b"HTTP/1.1 200 OK\r\nX: " + b"x" * 70_000 + b"\r\n\r\n{}",
    ],
    ids=["ssh", "cut", "long"],
)
def test_what_does_not_speak_http(answer: bytes, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:

        def serve() -> None:
            peer, _ = other.accept()
            with peer:
                peer.recv(4096)
                peer.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        assert cli.main(["watch", str(other.getsockname()[1]), "--once"]) == 1
        assert "is not a response of Telemetry.serve" in capsys.readouterr().err
        thread.join()


def test_an_interval_of_zero(cache: KVCache) -> None:
    with pytest.raises(InvalidArgument, match="interval 0"), pyvmem.watch(cache, interval=0):
        pass
