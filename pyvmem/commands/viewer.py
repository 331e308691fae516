# SPDX-License-Identifier: MIT
"""``vmem watch`` and `watch`: draw the pages of a cache's requests in the terminal, live.

    with pyvmem.watch(cache):                 # in the program's own terminal
        serve()

    pyvmem.telemetry.Telemetry() ... .serve(9464)       # in the program
    vmem watch 9464                                     # in another terminal

Both draw `KVCache.stats` and `KVCache.snapshot`; the second reads them as JSON from a server, which
accepts only local connections by default. Each row is a slot; each character stands for a number of
the slot's pages in every tensor.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import http.client
import json
import math
import shutil
import sys
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping
from typing import Any

from pyvmem.commands.terminal import Live
from pyvmem.commands.top import seconds
from pyvmem.errors import InvalidArgument
from pyvmem.plumbing.units import format_bytes
from pyvmem.telemetry import Telemetry

__all__ = ["add_parser", "draw", "fetch", "run", "watch"]

WIDTH = 80
MOST_BYTES = 16 << 20  # maximum size of a response; 100,000 slots need less
_MARKS = {"#": "granted", "+": "mapped ahead", "=": "shared", ".": "kept after a request"}

Numbers = Mapping[str, Any]


def _bar(slot: Numbers, scale: int) -> str:
    """Draws a slot's pages: shared ones, then the request's own, then those mapped ahead."""
    mapped: int = slot["mapped_pages"]
    if slot["state"] != "active":
        return "." * math.ceil(mapped / scale)
    owned: int = min(slot["granted_pages"], mapped)
    granted = math.ceil(owned / scale)
    shared = min(granted, math.ceil(int(slot["shared_pages"]) / scale))
    beyond = math.ceil(mapped / scale) - granted
    return "=" * shared + "#" * (granted - shared) + "+" * beyond


def _cache(name: str, cache: Numbers, width: int, rows: int) -> list[str]:
    stats = cache["stats"]
    total, pages = stats["total_pages"], stats["active_pages"] + stats["cached_pages"]
    filled = round(24 * pages / total) if total else 0
    lines = [
        f"{name}  {cache['backend']} {cache['device']}".rstrip(),
        f"[{'#' * filled}{' ' * (24 - filled)}] {format_bytes(stats['mapped_bytes'])} mapped, "
        f"{format_bytes(stats['used_bytes'])} of rows, "
        f"{format_bytes(stats['wasted_bytes'])} holding no token",
        f"{pages} of {total} pages, {stats['short']} times short",
    ]
    slots = [slot for slot in cache["slots"] if slot["mapped_pages"] or slot["state"] == "broken"]
    if not slots:
        return [*lines, "no slot has pages"]
    room = max(8, width - 26)
    scale = max(1, math.ceil(max(slot["mapped_pages"] for slot in slots) / room))
    marks = ", ".join(f"{mark} {text}" for mark, text in _MARKS.items())
    lines += [f"one character: {scale} page{'s' * (scale > 1)} of each tensor", marks]
    for slot in slots[:rows]:
        flight = "~" if slot["in_flight"] else " "
        state = "" if slot["state"] in ("active", "cached") else f"  {slot['state']}"
        tokens = f"{slot['seq_len']} tok" if slot["state"] == "active" else "-"
        lines.append(f"{slot['reqid']:>6} {tokens:>14} {flight} {_bar(slot, scale)}{state}")
    if len(slots) > rows:
        lines.append(f"and {len(slots) - rows} more slots with pages")
    return lines


def draw(caches: Mapping[str, Numbers], width: int = WIDTH, rows: int = 40) -> str:
    """Returns a frame as text.

    Args:
        caches: the result of `Telemetry.caches`.
        width: width of the frame in columns; the longer the requests, the more pages each character
            stands for.
        rows: maximum number of slots drawn per cache.
    """
    if not caches:
        return "no cache is open"
    return "\n\n".join(
        "\n".join(_cache(name, one, width, rows)) for name, one in sorted(caches.items())
    )


@contextlib.contextmanager
def watch(
    cache: Any, *, interval: float = 0.25, name: str = "cache", file: Any = None
) -> Iterator[None]:
    """Draws a cache's pages from a thread while the ``with`` block runs.

    On a terminal the picture is redrawn; elsewhere (a file, a notebook) it is printed once, at the
    end. Each picture costs one `stats` and one `snapshot` call, under the cache's lock.

    Args:
        cache: a `KVCache`, or a cache with the same `stats` and `snapshot`.
        interval: seconds between pictures.
        name: title of the cache.
        file: the output; None for standard output.

    Raises:
        InvalidArgument: the interval is not positive.
    """
    _positive(interval)
    telemetry = Telemetry()
    telemetry.add(cache, name)
    ended = threading.Event()
    with Live(file) as live:

        def renew() -> None:
            while not ended.wait(interval):
                live.show(_fitting(telemetry.caches()))

        thread = threading.Thread(target=renew, name="pyvmem-watch", daemon=True)
        if live.is_terminal:
            thread.start()
        try:
            yield
        finally:
            ended.set()
            if live.is_terminal:
                thread.join()
            live.show(_fitting(telemetry.caches()))


def _fitting(caches: Mapping[str, Numbers]) -> str:
    """Returns the frame, sized to the terminal."""
    size = shutil.get_terminal_size()
    return draw(caches, size.columns, max(4, size.lines - 8))


def _positive(interval: float) -> None:
    if not interval > 0:
        raise InvalidArgument(f"interval {interval}: expected seconds above 0", errno=errno.EINVAL)


def _url(where: str) -> str:
    """Converts a port, ``host:port`` or URL to the URL of a program that serves `Telemetry`.

    Raises:
        InvalidArgument: `where` is not a port, a host and port, or a URL.
    """
    scheme, found, _ = where.partition("://")
    if found and scheme.lower() not in ("http", "https"):
        raise InvalidArgument(
            f"{where!r}: expected a URL with http or https, not {scheme}", errno=errno.EINVAL
        )
    full = f"127.0.0.1:{where}" if where.isdigit() else where
    url = full if found else f"http://{full}"
    try:
        port = urllib.parse.urlsplit(url).port  # raises if the port is invalid
        urllib.request.Request(url)
    except ValueError as error:
        raise InvalidArgument(
            f"{where!r} is not a port, host:port or URL: {error}", errno=errno.EINVAL
        ) from None
    if port == 0:
        raise InvalidArgument(f"{where!r}: port 0 cannot be connected to", errno=errno.EINVAL)
    return url.rstrip("/")


def _where(text: str) -> str:
    try:
        _url(text)
    except InvalidArgument as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


def fetch(where: str) -> dict[str, Any]:
    """Fetches a program's cache report over HTTP.

    Args:
        where: a port on this machine, ``host:port`` or a URL.

    Raises:
        OSError: no server answers.
        InvalidArgument: `where` is malformed, or the server was not started by `Telemetry.serve`.
    """
    url = _url(where)
    wrong = InvalidArgument(
        f"{url}/caches is not a response of Telemetry.serve", errno=errno.EINVAL
    )
    try:
        with urllib.request.urlopen(f"{url}/caches", timeout=10) as answer:
            body = answer.read(MOST_BYTES + 1)
    except http.client.RemoteDisconnected:
        raise  # RemoteDisconnected is also an OSError
    except http.client.HTTPException as error:
        raise wrong from error
    if len(body) > MOST_BYTES:
        raise InvalidArgument(
            f"{url}: more than {MOST_BYTES} bytes", errno=errno.EINVAL, limit=MOST_BYTES
        )
    try:
        found = json.loads(body)
        if not isinstance(found, dict):
            raise TypeError
        draw(found)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise wrong from error
    caches: dict[str, Any] = found
    return caches


def add_parser(sub: Any) -> None:
    """Adds the subcommand."""
    parser = sub.add_parser(
        "watch",
        help="draw the pages of a running program's requests, live",
        description="Draws the pages of each request of a program that calls Telemetry.serve.",
    )
    parser.add_argument("where", type=_where, help="port of this machine, host:port or URL")
    parser.add_argument(
        "--interval", type=seconds, default=0.5, metavar="S", help="between pictures (0.5)"
    )
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--once", action="store_true", help="print one picture and exit")
    form.add_argument("--json", action="store_true", help="print one reading as JSON and exit")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Draws once, or until it is interrupted or the program exits; returns the exit status."""
    try:
        found = fetch(args.where)
    except OSError as error:
        why = getattr(error, "reason", error)  # urllib wraps the original error
        text = getattr(why, "strerror", None) or why
        print(f"vmem watch: no response from {args.where}: {text}", file=sys.stderr)
        return 1
    if args.json:
        print(json.dumps(found, indent=2))
        return 0
    if args.once:
        print(draw(found))
        return 0
    with Live() as live:
        while True:
            live.show(_fitting(found))
            time.sleep(args.interval)
            try:
                found = fetch(args.where)
            except OSError:
                live.show(f"{_fitting(found)}\nthe program has ended")
                return 0
