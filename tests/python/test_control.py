# SPDX-License-Identifier: MIT
"""`vmem control` serves engines over HTTP, with the same names as `vmem top` and `vmem
limit`.
"""

from __future__ import annotations

import http.client
import json
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from pyvmem.commands import cli
from pyvmem.errors import InvalidArgument
from pyvmem.ledger.accounts import Account, Ledger
from pyvmem.ledger.control import Control
from pyvmem.plumbing.http import MOST_BODY, HTTPServer, Reply

MIB = 1 << 20
TOKEN = "0123456789abcdef"


class Unix(http.client.HTTPConnection):
    def __init__(self, path: Path) -> None:
        super().__init__("engines")
        self._path = str(path)

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.connect(self._path)


def ask(
    connection: http.client.HTTPConnection, method: str, path: str, body: Any = None, **headers: str
) -> tuple[int, Any]:
    """Sends a request; returns the status and the decoded JSON."""
    text = body if isinstance(body, bytes | None) else json.dumps(body)
    connection.request(method, path, text, headers)
    found = connection.getresponse()
    return found.status, json.loads(found.read() or "null")


@pytest.fixture
def engine(folder: Path) -> Iterator[Account]:
    with Ledger("host", 64 * MIB, folder) as ledger:
        account = ledger.join(
            "org/model", floor=MIB, limit=32 * MIB, least=2 * MIB, virtual=60 * MIB
        )
        account.report(sleeps=1, in_use=MIB)
        yield account
        account.close()


@pytest.fixture
def server(folder: Path, engine: Account) -> Iterator[Unix]:
    with Control(folder, folder / "control.sock"):
        connection = Unix(folder / "control.sock")
        yield connection
        connection.close()


def test_the_terms_are_those_of_top_and_limit(
    server: Unix, engine: Account, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["top", "--json", "--ledger", str(folder)]) == 0
    said = json.loads(capsys.readouterr().out)
    status, found = ask(server, "GET", "/v1/engines")
    listed = {device: some["engines"] for device, some in said.items()}
    for one in (listed["host"][0], found["host"][0]):
        del one["age"]
    assert (status, found) == (200, listed)
    change = {"limit": "16M", "floor": 2 * MIB, "asleep": True}
    status, found = ask(server, "PATCH", "/v1/engines/org/model", change)
    assert status == 200
    wanted = {"engine": "org/model", "limit": 16 * MIB, "floor": 2 * MIB, "asleep": 1}
    assert wanted.items() <= found["host"].items()
    assert (engine.limit, engine.asleep) == (16 * MIB, True)
    assert ask(server, "PATCH", "/v1/engines/org%2Fmodel", {"asleep": False})[0] == 200
    assert (engine.limit, engine.asleep) == (16 * MIB, False)
    assert ask(server, "GET", "/v1/engines/org/model?all")[1]["host"]["asleep"] == 0
    words = ["limit", "org/model", "8M", "--floor", "4M", "--ledger", str(folder)]
    assert cli.main(words) == 0
    found = ask(server, "GET", "/v1/engines/org/model")[1]["host"]
    assert (found["limit"], found["floor"]) == (8 * MIB, 4 * MIB)


def test_metrics_of_all_engines(server: Unix, folder: Path) -> None:
    server.request("GET", "/metrics")
    answer = server.getresponse()
    text = answer.read().decode()
    assert 'vmem:limit_bytes{engine="org/model",device="host"} 33554432\n' in text
    assert 'vmem:asleep{engine="org/model",device="host"} 0\n' in text
    assert "# TYPE vmem:maps_total counter\n" in text
    server.request("HEAD", "/metrics")
    answer = server.getresponse()
    assert (answer.status, answer.read()) == (200, b"")


HERE = "/v1/engines/org/model"


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "error"),
    [
        ("GET", "/v2/engines", None, 404, {"message": "revision v2: this server has v1"}),
        ("GET", "/", None, 404, {}),
        ("GET", "/v1/engines/", None, 404, {}),
        ("GET", "/v1/engines/nobody", None, 404, {"value": "nobody", "engines": ["org/model"]}),
        ("PATCH", "/v1/engines/nobody", {"limit": "4M"}, 404, {"value": "nobody"}),
        ("PATCH", "/v1/engines", {"limit": "4M"}, 405, {}),
        ("DELETE", HERE, None, 405, {}),
        ("PATCH", HERE, b"", 400, {}),
        ("PATCH", HERE, b"[" * 5000, 400, {}),
        ("PATCH", HERE, b'{"limit"', 400, {}),
        ("PATCH", HERE, b"\xff", 400, {}),
        ("PATCH", HERE, [1], 400, {}),
        ("PATCH", HERE, {}, 400, {}),
        ("PATCH", HERE, {"pid": 1}, 400, {"field": "pid", "value": 1}),
        ("PATCH", HERE, {"limit": "much"}, 400, {"field": "limit", "value": "much"}),
        ("PATCH", HERE, {"limit": True}, 400, {"field": "limit", "value": True}),
        ("PATCH", HERE, {"limit": 1.5}, 400, {"field": "limit", "value": 1.5}),
        ("PATCH", HERE, {"floor": -1}, 400, {"field": "floor", "value": -1}),
        ("PATCH", HERE, {"floor": 1 << 62}, 400, {"field": "floor", "value": 1 << 62}),
        ("PATCH", HERE, {"asleep": 1}, 400, {"field": "asleep", "value": 1}),
        # well-formed values that exceed what the device or the engine can provide
        ("PATCH", HERE, {"limit": "1K"}, 400, {"field": "limit", "value": 1024, "limit": MIB}),
        (
            *("PATCH", HERE, {"limit": "1K", "floor": 0}, 400),
            {"field": "limit", "value": 1024, "limit": 2 * MIB},
        ),
        (
            *("PATCH", HERE, {"limit": "61M", "asleep": True}, 400),
            {"field": "limit", "value": 61 * MIB, "limit": 60 * MIB},
        ),
        (
            *("PATCH", HERE, {"floor": "33M"}, 400),
            {"field": "floor", "value": 33 * MIB, "limit": 32 * MIB},
        ),
    ],
)
def test_a_rejected_request_changes_nothing(
    server: Unix, engine: Account, method: str, path: str, body: Any, status: int, error: Any
) -> None:
    before = asdict(engine.ledger.engines()[0]) | {"age": 0}
    found, said = ask(server, method, path, body)
    assert found == status
    assert error.items() <= said["error"].items()
    assert said["error"]["message"]
    assert asdict(engine.ledger.engines()[0]) | {"age": 0} == before


def test_floors_leave_each_engine_what_it_needs(
    server: Unix, engine: Account, folder: Path
) -> None:
    with Ledger("host", folder=folder) as ledger:
        other = ledger.join("b", floor=10 * MIB, limit=64 * MIB, least=40 * MIB, virtual=64 * MIB)
        said = ask(server, "PATCH", HERE, {"floor": "25M"})[1]["error"]
        assert (said["field"], said["value"], said["limit"]) == ("floor", 25 * MIB, 24 * MIB)
        assert ask(server, "PATCH", HERE, {"floor": "24M"})[0] == 200
        said = ask(server, "PATCH", "/v1/engines/b", {"asleep": True})
        assert said[0] == 400
        assert said[1]["error"]["field"] == "asleep"
        other.close()


def test_an_engine_on_two_devices_changes_on_both_or_neither(
    server: Unix, engine: Account, folder: Path
) -> None:
    with Ledger("GPU-1", 16 * MIB, folder) as ledger:
        second = ledger.join("org/model", floor=0, limit=8 * MIB, least=1, virtual=16 * MIB)
        status, said = ask(server, "PATCH", HERE, {"limit": "20M"})
        assert (status, said["error"]["limit"]) == (400, 16 * MIB)
        assert (engine.limit, second.limit) == (32 * MIB, 8 * MIB)
        status, said = ask(server, "PATCH", HERE, {"limit": "12M"})
        assert (status, sorted(said)) == (200, ["GPU-1", "host"])
        assert (engine.limit, second.limit) == (12 * MIB, 12 * MIB)
        second.close()


def test_a_ledger_that_cannot_be_read(server: Unix, folder: Path) -> None:
    (folder / "GPU-0.ledger").write_bytes(b"nothing")
    (folder / "GPU-0.ledger").chmod(0o600)
    status, said = ask(server, "GET", "/v1/engines")
    assert (status, "damaged" in said["error"]["message"]) == (500, True)


@pytest.mark.parametrize("more", [1, 1 << 20], ids=["a byte", "more than the socket holds"])
def test_a_body_that_is_too_long(server: Unix, more: int) -> None:
    status, said = ask(server, "PATCH", HERE, b" " * (MOST_BODY + more))
    assert (status, said["error"]["limit"]) == (413, MOST_BODY)


def test_tcp_needs_a_token(folder: Path, engine: Account) -> None:
    with pytest.raises(InvalidArgument, match="TCP without a token"):
        Control(folder, ("127.0.0.1", 0))
    with Control(folder, ("127.0.0.1", 0), TOKEN) as server:
        for headers in ({}, {"Authorization": "Bearer x"}, {"Authorization": TOKEN}):
            connection = http.client.HTTPConnection("127.0.0.1", server.port)
            status, said = ask(connection, "PATCH", HERE, {"limit": "4M"}, **headers)
            assert (status, "Bearer TOKEN" in said["error"]["message"]) == (401, True)
            connection.close()
        assert engine.limit == 32 * MIB
        connection = http.client.HTTPConnection("127.0.0.1", server.port)
        headers = {"Authorization": f"Bearer {TOKEN}"}
        assert ask(connection, "PATCH", HERE, {"limit": "4M"}, **headers)[0] == 200
        connection.close()
    assert engine.limit == 4 * MIB


def test_a_socket_has_one_server(folder: Path) -> None:
    """A running server has its socket to itself; a socket left by a killed server is taken over."""
    path = folder / "control.sock"

    def answer(_: Any) -> Reply:
        return Reply.of("here")

    with HTTPServer(answer, path):
        assert path.stat().st_mode & 0o777 == 0o600
        with pytest.raises(FileExistsError, match="another server is listening there"):
            HTTPServer(answer, path)
    assert not path.exists()
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    with HTTPServer(answer, path):
        connection = Unix(path)
        assert ask(connection, "GET", "/") == (200, "here")
        connection.close()


def test_another_users_process_is_not_answered(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pyvmem.plumbing import http as module

    monkeypatch.setattr(module, "is_this_user", lambda peer: False)
    with HTTPServer(lambda _: Reply.of("here"), folder / "s"):
        connection = Unix(folder / "s")
        with pytest.raises((http.client.RemoteDisconnected, ConnectionError)):
            ask(connection, "GET", "/")
        connection.close()


def test_the_command(folder: Path, engine: Account) -> None:
    # the test may run as a shell's background job, which ignores SIGINT
    code = "import signal as s; s.signal(s.SIGINT, s.default_int_handler); "
    code += "from pyvmem.commands.cli import main; raise SystemExit(main())"
    words = [sys.executable, "-c", code, "control", "--ledger", str(folder)]
    with subprocess.Popen(words, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        assert process.stderr.readline() == f"vmem control: {folder}/control.sock\n"
        connection = Unix(folder / "control.sock")
        assert ask(connection, "PATCH", HERE, {"limit": "4M"})[0] == 200
        connection.close()
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 130
    assert engine.limit == 4 * MIB
    assert not (folder / "control.sock").exists()


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--listen", "127.0.0.1:0"], "--listen needs --token-file"),
        (["--token-file", "{token}"], "a Unix socket has no token"),
        (["--listen", "127.0.0.1:0", "--socket", "x"], "exclude each other"),
        (["--listen", "here", "--token-file", "{token}"], "'here': expected HOST:PORT"),
        (["--listen", "::1:70000", "--token-file", "{token}"], "expected HOST:PORT"),
        (["--listen", "127.0.0.1:0", "--token-file", "{open}"], "mode 644; expected"),
        (["--listen", "127.0.0.1:0", "--token-file", "{short}"], "expected 16 printable"),
        (["--listen", "127.0.0.1:0", "--token-file", "{none}"], "No such file"),
    ],
)
def test_bad_usage(
    folder: Path, capsys: pytest.CaptureFixture[str], words: list[str], text: str
) -> None:
    files = {"token": (TOKEN, 0o600), "open": (TOKEN, 0o644), "short": ("abc", 0o600)}
    for name, (contents, mode) in files.items():
        (folder / name).write_text(contents)
        (folder / name).chmod(mode)
    paths = {name: folder / name for name in (*files, "none")}
    words = [word.format(**paths) for word in words]
    try:
        status = cli.main(["control", "--ledger", str(folder), *words])
    except SystemExit as error:
        status = int(error.code or 0)
    assert status == 2
    assert text in capsys.readouterr().err
