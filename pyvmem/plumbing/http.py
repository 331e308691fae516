# SPDX-License-Identifier: MIT
"""A small HTTP server that runs in a thread, on TCP or a Unix socket."""

from __future__ import annotations

import contextlib
import errno
import hmac
import json
import logging
import socket
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from socketserver import BaseServer, TCPServer, ThreadingMixIn
from typing import Any

from pyvmem.plumbing.closing import Closable
from pyvmem.plumbing.logs import warn
from pyvmem.plumbing.sockets import is_this_user, listen

__all__ = ["HTTPServer", "Reply", "Request"]

_log = logging.getLogger(__name__)

MOST_BODY = 64 << 10
_MOST_DISCARDED = 16 << 20  # maximum bytes read from a rejected request
_SILENCE = 10  # seconds before an idle client is dropped


@dataclass(frozen=True)
class Request:
    """A client's request: method, path without the query, and body."""

    method: str
    path: str
    body: bytes = b""


@dataclass(frozen=True)
class Reply:
    """A response: status, content type (`kind`), body and additional headers."""

    status: int
    kind: str
    body: bytes
    headers: dict[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, value: Any, status: int = 200, **headers: str) -> Reply:
        """Creates a reply whose body is a value encoded as JSON."""
        text = json.dumps(value, indent=2) + "\n"
        return cls(status, "application/json", text.encode(), headers)

    @classmethod
    def error(cls, status: int, message: str, /, **more: Any) -> Reply:
        """Creates an error reply with a message and additional fields for programs."""
        return cls.of({"error": {"message": message, **more}}, status)


class HTTPServer(Closable):
    """An HTTP server that serves until closed. Usable as a context manager.

    Args:
        answer: returns the reply to a request; called concurrently by several threads.
        where: an address and a port (0: any free port), or the path of a Unix socket, which only
            this user's processes may use.
        token: the bearer token that clients must send; ``""``: none.
        name: name of the thread.

    Attributes:
        port: the TCP port; 0 for a Unix socket.

    Raises:
        OSError: the address is unavailable, or another server listens on it.
    """

    def __init__(
        self,
        answer: Callable[[Request], Reply],
        where: tuple[str, int] | Path,
        *,
        token: str = "",
        name: str = "pyvmem-http",
    ) -> None:
        handler = _handler(answer, token)
        self._path = where if isinstance(where, Path) else None
        self._server = _Server(_unix(where) if isinstance(where, Path) else _tcp(where), handler)
        self.port: int = 0 if self._path else self._server.socket.getsockname()[1]
        self._thread = threading.Thread(target=self._server.serve_forever, name=name, daemon=True)
        self._thread.start()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} on {self._path or f'port {self.port}'}>"

    def close(self) -> None:
        """Stops the server."""
        if self._path is not None:
            self._path.unlink(missing_ok=True)
        self._server.shutdown()
        self._server.server_close()

    def wait(self) -> None:
        """Blocks until another thread closes the server."""
        self._thread.join()


def _tcp(where: tuple[str, int]) -> socket.socket:
    family = socket.AF_INET6 if ":" in where[0] else socket.AF_INET
    return socket.create_server(where, family=family, backlog=16)


def _unix(path: Path) -> socket.socket:
    if path.exists():
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as one:
            one.settimeout(1)
            with contextlib.suppress(ConnectionRefusedError):  # left by a killed server
                one.connect(str(path))
                raise FileExistsError(errno.EEXIST, "another server is listening there", str(path))
    return listen(str(path))


class _Server(ThreadingMixIn, TCPServer):
    daemon_threads = True

    def __init__(self, listening: socket.socket, handler: type[BaseHTTPRequestHandler]) -> None:
        BaseServer.__init__(self, listening.getsockname(), handler)
        self.socket = listening

    def verify_request(self, request: Any, client_address: Any) -> bool:
        """Rejects connections from other users' processes."""
        return request.family != socket.AF_UNIX or is_this_user(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Logs the error, unless the client disconnected."""
        error = sys.exc_info()[1]
        if not isinstance(error, (ConnectionError, TimeoutError)):
            warn(_log, "http", "answering a request failed: %s", repr(error))


def _handler(answer: Callable[[Request], Reply], token: str) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        timeout = _SILENCE

        def _reply(self) -> None:
            refused = self._refusal()
            reply = refused or self._answered()
            self.send_response(reply.status)
            self.send_header("Content-Type", reply.kind)
            self.send_header("Content-Length", str(len(reply.body)))
            for key, value in reply.headers.items():
                self.send_header(key, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(reply.body)
            if refused:
                self._discard()

        do_GET = do_HEAD = do_PATCH = do_POST = do_PUT = do_DELETE = _reply

        def _refusal(self) -> Reply | None:
            said = self.headers.get("Authorization", "").encode()
            if token and not hmac.compare_digest(said, b"Bearer " + token.encode()):
                return Reply.of(
                    {"error": {"message": "expected Authorization: Bearer TOKEN"}},
                    401,
                    **{"WWW-Authenticate": "Bearer"},
                )
            length = self.headers.get("Content-Length", "0")
            if not length.isascii() or not length.isdigit():
                return Reply.error(400, f"Content-Length: {length!r:.80}: expected a number")
            if int(length) > MOST_BODY:
                text = f"a body of {length} bytes: expected at most {MOST_BODY}"
                return Reply.error(413, text, value=int(length), limit=MOST_BODY)
            return None

        def _answered(self) -> Reply:
            body = self.rfile.read(int(self.headers.get("Content-Length", "0")))
            return answer(Request(self.command, self.path.partition("?")[0], body))

        def _discard(self) -> None:
            """Reads the remaining body of a rejected request.

            Otherwise the client's send would fail before the client reads the reply.
            """
            left = _MOST_DISCARDED
            with contextlib.suppress(OSError):
                self.connection.shutdown(socket.SHUT_WR)
                while left > 0 and (some := self.rfile.read1(min(left, MOST_BODY))):
                    left -= len(some)

        def address_string(self) -> str:
            """Returns "" as the client's address: clients of a Unix socket have none."""
            return ""

        def log_message(self, format: str, *args: Any) -> None:
            """Does nothing: a library should not print."""

    return Handler
