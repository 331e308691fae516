# SPDX-License-Identifier: MIT
"""Serves a machine's engines over HTTP: the figures of `vmem top` and the limits of `vmem limit`.

    GET   /v1/engines             the engines of each device, as in `vmem top --json`
    GET   /v1/engines/NAME        the same for one engine, on every device that it uses
    PATCH /v1/engines/NAME        {"limit": "20G", "floor": 0, "asleep": true}, or a subset
    GET   /metrics                the same figures for Prometheus

Everything goes through the ledger: the server does not talk to engines, is stateless, and may be
stopped at any time. A router or controller that runs as the engines' user can call `order` instead.

A rejected request gets a JSON object ``error`` with a ``message`` and, if a number was the cause,
its ``field``, ``value`` and ``limit``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from pyvmem.errors import InvalidArgument, NotSupported, VMemError
from pyvmem.ledger.accounts import EngineInfo, Ledger, LedgerHeld, devices, engines_in
from pyvmem.ledger.orders import order_on_all
from pyvmem.plumbing.http import HTTPServer, Reply, Request
from pyvmem.plumbing.units import parse_bytes
from pyvmem.telemetry import CONTENT_TYPE, Family, Sample, prometheus_text

__all__ = ["COUNTERS", "GAUGES", "REVISION", "Control", "answer", "unit_of"]

REVISION = "v1"
"""First component of every path. Within a revision, fields are never removed, but may be added."""

GAUGES = {
    "used": "Memory that backs the KV cache, in bytes of one device.",
    "in_use": "The part that requests hold.",
    "cached": "The part that holds prefixes without a request.",
    "host": "Host memory for KV offloading, or for prefixes.",
    "host_cached": "The part that holds prefixes.",
    "limit": "Maximum memory of the engine.",
    "floor": "Memory that other engines must leave for it.",
    "want": "Memory that its requests are short of.",
    "handles": "Driver mappings.",
    "asleep": "1 if the engine was ordered to sleep.",
}
COUNTERS = {
    "maps": "Map calls.",
    "waits": "Steps that waited for a map call.",
    "hits": "Tokens found in the prefix cache.",
    "queries": "Tokens looked up in the prefix cache.",
}
_NO_BYTES = ("handles", "asleep")


def unit_of(name: str) -> str:
    """Returns the unit suffix of a metric's name."""
    return "_bytes" if name in GAUGES and name not in _NO_BYTES else ""


def answer(folder: Path, request: Request) -> Reply:
    """Answers a request about the engines whose ledgers are in a directory."""
    try:
        return _route(folder, request)
    except _Refused as error:
        return error.reply
    except LedgerHeld as error:
        return Reply.error(503, str(error))
    except VMemError as error:
        return Reply.error(500, str(error))


class _Refused(Exception):
    def __init__(self, status: int, message: str, **more: Any) -> None:
        self.reply = Reply.error(status, message, **more)


def _route(folder: Path, request: Request) -> Reply:
    parts = [unquote(part) for part in request.path.split("/")[1:]]
    routes: dict[str, Callable[[], Reply]]
    if parts == ["metrics"]:
        routes = {"GET": lambda: Reply(200, CONTENT_TYPE, _metrics(engines_in(folder)).encode())}
    elif parts[0] != REVISION and parts[0][:1] == "v" and parts[0][1:].isdigit():
        raise _Refused(404, f"revision {parts[0]}: this server has {REVISION}")
    elif parts[:2] == [REVISION, "engines"] and len(parts) == 2:
        routes = {"GET": lambda: Reply.of(as_json(engines_in(folder)))}
    elif parts[:2] == [REVISION, "engines"] and parts[2]:
        name = "/".join(parts[2:])  # a model's name may contain a slash
        routes = {
            "GET": lambda: Reply.of(_one(folder, name)),
            "PATCH": lambda: _change(folder, name, request.body),
        }
    else:
        here = f"/{REVISION}/engines, /{REVISION}/engines/NAME and /metrics"
        raise _Refused(404, f"{request.path:.200}: this server has {here}")
    method = "GET" if request.method == "HEAD" else request.method
    if method not in routes:
        reply = Reply.error(405, f"{method} {request.path:.200}: expected {' or '.join(routes)}")
        return Reply(reply.status, reply.kind, reply.body, {"Allow": ", ".join(routes)})
    return routes[method]()


def as_json(reading: Mapping[str, list[EngineInfo]]) -> dict[str, list[dict[str, Any]]]:
    """Converts a result of `engines_in` to JSON-compatible values."""
    return {device: [one.record() for one in some] for device, some in reading.items()}


def _one(folder: Path, name: str) -> dict[str, dict[str, Any]]:
    reading = engines_in(folder)
    found = {
        device: one.record() for device, some in reading.items() for one in some if one.name == name
    }
    if not found:
        names = sorted({one.name for some in reading.values() for one in some})
        raise _Refused(404, f"no engine {name!r:.80}", value=name[:80], engines=names)
    return found


def _change(folder: Path, name: str, body: bytes) -> Reply:
    """Checks the changes on every device of the engine, then applies them to each."""
    words = _words(body)
    _one(folder, name)
    with ExitStack() as stack:
        there = {}
        for device in devices(folder):
            ledger = stack.enter_context(Ledger(device, folder=folder, create=False))
            if any(one.name == name for one in ledger.engines()):
                there[device] = ledger
        try:
            order_on_all(there, name, **words)
        except InvalidArgument as error:
            if not error.op:  # the engine has exited since the check
                raise _Refused(404, str(error)) from error
            numbers = {"value": error.bytes, "limit": error.limit}
            raise _Refused(400, str(error), field=error.op, **numbers) from error
        except NotSupported as error:
            raise _Refused(400, str(error), field=error.op, value=words["asleep"]) from error
    return Reply.of(_one(folder, name))


def _words(body: bytes) -> dict[str, Any]:
    """Parses the arguments of `order` from a request body."""
    try:
        found = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise _Refused(400, f"request body: invalid JSON: {error}") from error
    if not isinstance(found, dict) or not found:
        raise _Refused(400, f"request body: expected an object with some of {', '.join(_FIELDS)}")
    words = {}
    for key, value in found.items():
        if key not in _FIELDS:
            text = f"{key!r:.80}: expected some of {', '.join(_FIELDS)}"
            raise _Refused(400, text, field=key[:80], value=value)
        try:
            words[key] = _FIELDS[key](value)
        except ValueError as error:
            raise _Refused(400, str(error), field=key, value=value) from error
    return words


def _bytes(name: str, value: Any) -> int:
    if isinstance(value, str):
        return parse_bytes(value, name)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 1 << 62:
        raise ValueError(f"{name}={value!r:.80}: expected bytes, or a size such as '20G'")
    return value


def _flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"{name}={value!r:.80}: expected true or false")
    return value


_FIELDS: dict[str, Callable[[Any], Any]] = {
    "limit": partial(_bytes, "limit"),
    "floor": partial(_bytes, "floor"),
    "asleep": partial(_flag, "asleep"),
}


def _metrics(reading: Mapping[str, list[EngineInfo]]) -> str:
    """Returns the metrics of all engines, named as on vLLM's own ``/metrics``."""

    def families() -> Iterator[Family]:
        for kind, names in (("gauge", GAUGES), ("counter", COUNTERS)):
            suffix = "_total" if kind == "counter" else ""
            for name, text in names.items():
                samples = tuple(
                    Sample(suffix, {"engine": one.name, "device": device}, getattr(one, name))
                    for device, some in reading.items()
                    for one in some
                )
                yield Family(f"vmem:{name}{unit_of(name)}", kind, text, samples)

    return prometheus_text(families())


class Control(HTTPServer):
    """Serves `answer` until closed. Usable as a context manager.

    Args:
        folder: directory of the ledgers.
        where, token: as for `HTTPServer`.

    Raises:
        InvalidArgument: `where` is a TCP address, but `token` is empty.
        OSError: as for `HTTPServer`.
    """

    def __init__(self, folder: Path, where: tuple[str, int] | Path, token: str = "") -> None:
        if not isinstance(where, Path) and not token:
            raise InvalidArgument("TCP without a token: any user of the machine could give orders")
        super().__init__(partial(answer, folder), where, token=token, name="vmem-control")
