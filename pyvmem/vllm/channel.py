# SPDX-License-Identifier: MIT
"""Calls from the scheduler to the `KVMemory` of a rank in another process.

Ranks must confirm that a block is mapped before vLLM may use it, an idle engine runs no steps that
could carry messages, and vLLM's own calls to its workers queue behind the steps in flight. So these
calls use a separate connection: a Unix socket that only the engine's user can open, or TCP to a
rank on another machine (`rank_discovery`). A busy engine's releases are sent with vLLM's
`SchedulerOutput`.

A message is JSON, preceded by its length in four bytes: ``[operation, argument]`` to the rank, and
``[failure, result]`` back.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import os
import secrets
import socket
import struct
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

from pyvmem.elastic.geometry import Geometry, Run, TensorClass
from pyvmem.elastic.memory import KVMemory
from pyvmem.elastic.quota import join_device
from pyvmem.elastic.settings import Settings
from pyvmem.errors import BadHandle, VMemError
from pyvmem.ledger.accounts import device_of, private
from pyvmem.plumbing.sockets import UNHEARD, is_this_user, listen
from pyvmem.vllm.remote import on_account

__all__ = ["LocalRank", "Rank", "RankLost", "Ranks", "Server", "SocketRank", "new_address"]

_LENGTH = struct.Struct("!I")
_SWITCH = 0.0005  # the interpreter's switch interval in a worker, in seconds
_TIMEOUT = 120.0  # seconds without an answer before a rank is considered lost
_GREETING = 10.0  # seconds within which a client must send the secret
_CLOSING = 10.0  # seconds that a rank waits for calls in progress when it shuts down


class RankLost(RuntimeError):
    """A rank did not answer, or reported an unexpected error; usually its process has exited."""


def new_address(settings: Settings) -> str:
    """Returns a new path for a rank's socket, in a folder that only this user can access.

    Raises:
        AccessDenied: the folder belongs to another user, or is writable by others.
        ValueError: the path is too long for a Unix socket.
    """
    folder = private(settings.folder)
    path = str(folder / f"{secrets.token_hex(12)}.sock")
    if len(os.fsencode(path + UNHEARD)) > 107:  # limit of sun_path
        raise ValueError(f"VMEM_LEDGER={folder}: the path of a socket must not exceed 107 bytes")
    return path


def _send(sock: socket.socket, message: Any) -> None:
    data = json.dumps(message).encode()
    sock.sendall(_LENGTH.pack(len(data)) + data)


def _receive(sock: socket.socket, most: int = 1 << 31) -> Any:
    def exactly(count: int) -> bytes:
        if count > most:
            raise EOFError(f"a message of {count} bytes")
        data = b""
        while len(data) < count:
            part = sock.recv(count - len(data))
            if not part:
                raise EOFError
            data += part
        return data

    return json.loads(exactly(_LENGTH.unpack(exactly(4))[0]))


def _remove_dead(folder: Path) -> None:
    """Removes socket files that no process listens on, left behind by killed ranks."""
    for path in folder.glob("*.sock"):
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as one:
            one.settimeout(1)
            try:
                one.connect(str(path))
            except ConnectionRefusedError:
                path.unlink(missing_ok=True)
            except OSError:  # busy, or already removed
                continue
    # a rank that was killed during start-up leaves such a file behind
    for path in folder.glob(f"*.sock{UNHEARD}"):
        with contextlib.suppress(FileNotFoundError):
            if path.stat().st_mtime < time.time() - _TIMEOUT:
                path.unlink()


def _knows(peer: socket.socket, word: str) -> bool:
    """Returns true if a TCP client's first message is the secret `word`."""
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    peer.settimeout(_GREETING)
    try:
        said = _receive(peer, 1024)
        known = isinstance(said, str) and hmac.compare_digest(said.encode(), word.encode())
    except (OSError, EOFError, ValueError, RecursionError):  # the last two: invalid JSON
        return False
    peer.settimeout(None)
    return known


def _join(threads: Iterable[threading.Thread]) -> None:
    """Joins all threads except the current one, which may be running a finalizer."""
    for thread in threads:
        if thread is not threading.current_thread():
            thread.join(_CLOSING)


class Server:
    """Serves a rank's memory to the scheduler, in threads of the worker's process.

    Stops when `close` is called or the memory is garbage-collected.
    """

    def __init__(self, address: str, memory: KVMemory) -> None:
        self.address = address
        self._memory = weakref.ref(memory)
        # A call needs the GIL, which the thread that launches steps holds for up to the switch
        # interval: 5 ms by default.
        sys.setswitchinterval(min(sys.getswitchinterval(), _SWITCH))
        _remove_dead(Path(address).parent)
        self._socket = listen(address)
        self._port: socket.socket | None = None
        self._peers: dict[threading.Thread, socket.socket] = {}
        self._accepting: list[threading.Thread] = []
        weakref.finalize(memory, self.close)
        self._start(self._socket, is_this_user)

    def listen(self, host: str) -> tuple[str, int, str]:
        """Starts serving on a TCP port of `host`, for clients that send a secret first.

        Returns:
            The host, the port and the secret.
        """
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._port = socket.create_server((host, 0), family=family)
        word = secrets.token_hex(32)
        self._start(self._port, lambda peer: _knows(peer, word))
        return host, int(self._port.getsockname()[1]), word

    def _start(self, listening: socket.socket, admits: Callable[[socket.socket], bool]) -> None:
        thread = threading.Thread(
            target=self._accept, args=(listening, admits), name="vmem-rank", daemon=True
        )
        self._accepting.append(thread)
        thread.start()

    def _accept(self, listening: socket.socket, admits: Callable[[socket.socket], bool]) -> None:
        def serve(peer: socket.socket) -> None:
            with peer:
                if admits(peer):
                    self._serve(peer)
            self._peers.pop(threading.current_thread(), None)

        while True:
            try:
                peer, _ = listening.accept()
            except OSError:  # closed
                return
            thread = threading.Thread(target=serve, args=(peer,), name="vmem-peer", daemon=True)
            self._peers[thread] = peer
            thread.start()

    def _serve(self, peer: socket.socket) -> None:
        with contextlib.suppress(OSError, EOFError):
            while True:
                name, argument = _receive(peer)
                memory = self._memory()
                if memory is None:
                    return
                try:
                    result, failure = _OPERATIONS[name](LocalRank(memory), argument), None
                except (VMemError, ValueError, KeyError) as error:
                    result, failure = None, f"{type(error).__name__}: {error}"
                del memory
                _send(peer, [failure, result])

    def close(self) -> None:
        """Stops serving; waits for calls in progress to finish."""
        for one in (self._socket, self._port):
            if one is not None:
                with contextlib.suppress(OSError):
                    one.shutdown(socket.SHUT_RDWR)
                one.close()
        _join(self._accepting)
        peers = dict(self._peers)
        for peer in peers.values():
            with contextlib.suppress(OSError):  # the client hung up
                peer.shutdown(socket.SHUT_RDWR)
        _join(peers)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.address)


class Rank(Protocol):
    """A rank's memory, as the scheduler sees it.

    Attributes:
        machine: identifies the machine that keeps the ledger for the rank's device; ``""`` stands
            for the scheduler's own machine.
    """

    machine: str

    def geometry(self) -> Geometry:
        """Returns the geometry of the rank's tensors."""

    def ask(self, name: str, argument: Any = None) -> Callable[[], Any]:
        """Starts an operation of `LocalRank`; returns a function that waits for its result.

        That function must be called on the same thread.

        Raises:
            RankLost: the rank did not answer; the returned function may also raise this.
        """

    def device(self) -> str:
        """Returns the UUID of the rank's device; ``"host"`` for the CPU."""

    def total(self) -> int:
        """Returns `KVMemory.total`."""

    def fingerprint(self) -> str:
        """Returns `KVMemory.fingerprint`."""

    def close(self) -> None:
        """Closes the connection."""


class LocalRank:
    """A rank in this process.

    It is called by the scheduler, or by a `Server` if the scheduler is in another process.
    """

    machine = ""

    def __init__(self, memory: KVMemory) -> None:
        self.memory = memory

    def geometry(self) -> Geometry:
        """Returns the geometry of the rank's tensors."""
        return self.memory.geometry

    def _try(self, call: Callable[[], Any]) -> str | None:
        try:
            call()
        except VMemError as error:
            return f"{type(error).__name__}: {error}"
        return None

    def ask(self, name: str, argument: Any = None) -> Callable[[], Any]:
        """Runs the operation and returns a function that returns its result."""
        try:
            result = _OPERATIONS[name](self, argument)
        except BadHandle as error:  # vLLM stops its workers before the scheduler
            raise RankLost(f"{name}: {error}") from error
        return lambda: result

    def grow(self, runs: list[Run]) -> tuple[str | None, int | None]:
        """Calls `KVMemory.grow`; returns the error message or None, and the bytes left free."""
        return self._try(lambda: self.memory.grow(runs)), self.memory.free()

    def join(self, name: str, unique: bool, terms: dict[str, int]) -> None:
        """Joins this device's ledger on behalf of a scheduler that runs on another machine."""
        folder = Settings.read().folder
        self.memory.account = join_device(self.device(), folder, name, unique=unique, **terms)

    def drop(self, runs: list[Run]) -> str | None:
        """Calls `KVMemory.drop`; returns the error message or None."""
        return self._try(lambda: self.memory.drop(runs))

    def release(self, number: int, runs: list[Run], after_step: int) -> None:
        """Calls `KVMemory.release`."""
        self.memory.release(number, runs, after_step)

    def poll(self) -> tuple[list[tuple[int, str]], int | None, int, bool]:
        """Returns the rank's state for the scheduler's periodic poll.

        Returns:
            Releases that finished since the last poll (`KVMemory.finished`), free bytes, the number
            of driver mappings, and whether the rank is waiting for `end_drain`.
        """
        memory = self.memory
        finished = list(memory.finished().items())
        return finished, memory.free(), memory.context.stats().mappings, memory.draining

    def end_drain(self) -> None:
        """Calls `KVMemory.end_drain`."""
        self.memory.end_drain()

    def move(self, copies: list[tuple[int, int]], step: int) -> bool:
        """Calls `KVMemory.move`."""
        return self.memory.move(copies, step)

    def compact(self, nbytes: int, step: int) -> int:
        """Calls `KVMemory.compact`; returns 0 if it failed."""
        try:
            return self.memory.compact(nbytes, step)
        except VMemError:
            return 0

    def device(self) -> str:
        """Returns the UUID of the rank's device; ``"host"`` for the CPU."""
        info = self.memory.context.info
        return device_of(info.device_name, info.uuid)

    def total(self) -> int:
        """Returns `KVMemory.total`."""
        return self.memory.total()

    def stats(self) -> dict[str, int]:
        """Returns `Context.stats` as a dictionary."""
        return asdict(self.memory.context.stats())

    def fingerprint(self) -> str:
        """Returns `KVMemory.fingerprint`."""
        return self.memory.fingerprint()

    def close(self) -> None:
        """Does nothing."""


def _runs(items: Any) -> list[Run]:
    return [Run(*item) for item in items]


_OPERATIONS: dict[str, Callable[[LocalRank, Any], Any]] = {
    "geometry": lambda rank, _: asdict(rank.geometry()),
    "grow": lambda rank, runs: rank.grow(_runs(runs)),
    "drop": lambda rank, runs: rank.drop(_runs(runs)),
    "release": lambda rank, a: rank.release(a[0], _runs(a[1]), a[2]),
    "poll": lambda rank, _: rank.poll(),
    "end_drain": lambda rank, _: rank.end_drain(),
    "move": lambda rank, a: rank.move(a[0], a[1]),
    "compact": lambda rank, a: rank.compact(a[0], a[1]),
    "device": lambda rank, _: rank.device(),
    "total": lambda rank, _: rank.total(),
    "stats": lambda rank, _: rank.stats(),
    "fingerprint": lambda rank, _: rank.fingerprint(),
    "join": lambda rank, a: rank.join(*a),
    "account": lambda rank, a: on_account(rank.memory.account, *a),
}


class SocketRank:
    """A connection to a rank in another process. Thread-safe.

    Args:
        address: path of the rank's socket, or the result of `Server.listen`.
        machine: as in `Rank`.

    Raises:
        RankLost: the rank cannot be reached.
    """

    def __init__(self, address: str | tuple[str, int, str], machine: str = "") -> None:
        self.machine = machine
        self._lock = threading.RLock()
        try:
            if isinstance(address, str):
                self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
                self._socket.settimeout(_TIMEOUT)
                self._socket.connect(address)
            else:
                self._socket = socket.create_connection(address[:2], _TIMEOUT)
                self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                _send(self._socket, address[2])
        except OSError as error:
            self.close()
            where = address if isinstance(address, str) else f"{address[0]}:{address[1]}"
            raise RankLost(f"{where}: {error}") from error

    def ask(self, name: str, argument: Any = None) -> Callable[[], Any]:
        """Sends the call; other threads wait until this one has called the returned function."""
        self._lock.acquire()
        try:
            _send(self._socket, [name, argument])
        except OSError as error:
            self.close()
            self._lock.release()
            raise RankLost(f"{name}: {error}") from error
        return self._answer

    def _answer(self) -> Any:
        try:
            failure, result = _receive(self._socket)
        except (OSError, EOFError) as error:
            self.close()  # a late reply would be mistaken for the reply to the next call
            raise RankLost(f"no answer from a rank: {error!r}") from error
        finally:
            self._lock.release()
        if failure is not None:
            raise RankLost(failure)
        return result

    def _call(self, name: str, argument: Any = None) -> Any:
        return self.ask(name, argument)()

    def geometry(self) -> Geometry:
        """Returns the geometry of the rank's tensors."""
        found = self._call("geometry")
        classes = tuple(TensorClass(**one) for one in found["classes"])
        return Geometry(found["num_blocks"], found["page_size"], classes)

    def device(self) -> str:
        """Returns the UUID of the rank's device; ``"host"`` for the CPU."""
        return str(self._call("device"))

    def total(self) -> int:
        """Returns `KVMemory.total`."""
        return int(self._call("total"))

    def fingerprint(self) -> str:
        """Returns `KVMemory.fingerprint`."""
        return str(self._call("fingerprint"))

    def close(self) -> None:
        """Closes the connection."""
        if hasattr(self, "_socket"):
            self._socket.close()


class Ranks:
    """All ranks of an engine, called in parallel; lives in the scheduler's process.

    A call is sent to every rank before waiting for any answer, since a rank busy in Python may take
    milliseconds to answer.

    Attributes:
        mappings: the largest number of driver mappings on any rank, as of the last poll.
        draining: whether a sleeping rank was waiting for `end_drain` as of the last poll.
    """

    def __init__(self, ranks: list[Rank]) -> None:
        self.ranks = ranks
        self.mappings, self.draining = 0, False
        self._lock = threading.Lock()  # protects the results of `poll`
        self._free: int | None = None
        self._heard, self._growths = False, 0
        self._answers: dict[int, list[str]] = {}

    def _all(self, name: str, argument: Any = None) -> list[Any]:
        """Runs an operation on every rank; returns the results in rank order.

        Raises:
            RankLost: a rank did not answer. The other ranks' answers have been read.
        """
        asked: list[Callable[[], Any]] = []
        found: list[Any] = []
        lost: list[RankLost] = []
        try:
            for rank in self.ranks:
                asked.append(rank.ask(name, argument))
        except RankLost as error:
            lost.append(error)
        for answer in asked:
            try:
                found.append(answer())
            except RankLost as error:
                lost.append(error)
        if lost:
            raise lost[0]
        return found

    def geometry(self) -> Geometry:
        """Returns the ranks' geometry; each class has as many tensors as on the rank with the most.

        Pipeline stages may have different numbers of layers.

        Raises:
            RuntimeError: the ranks differ in any other way.
        """
        found = [rank.geometry() for rank in self.ranks]
        alike = {
            (one.num_blocks, one.page_size, tuple(kind.block_bytes for kind in one.classes))
            for one in found
        }
        if len(alike) > 1:
            different = next(one for one in found if one != found[0])
            raise RuntimeError(f"the ranks' KV tensors differ: {found[0]} and {different}")
        most = [
            max(kinds, key=lambda kind: kind.tensors)
            for kinds in zip(*(one.classes for one in found), strict=True)
        ]
        return Geometry(found[0].num_blocks, found[0].page_size, tuple(most))

    def grow(self, runs: list[Run]) -> str | None:
        """Maps pages on every rank or on none, and waits; returns an error message, or None.

        Raises:
            RankLost: a rank did not answer. The other ranks' answers have been read.
        """
        answers = self._all("grow", runs)
        with self._lock:
            self._growths += 1
            self._free = _least(free for _, free in answers)
        failures = [failure for failure, _ in answers if failure is not None]
        if not failures:
            return None
        for rank, (failure, _) in zip(self.ranks, answers, strict=True):
            if failure is None:
                rank.ask("drop", runs)()
        return str(failures[0])

    def release(self, number: int, runs: list[Run], after_step: int) -> None:
        """Calls `KVMemory.release` on every rank right away, instead of with the next step."""
        self._all("release", [number, runs, after_step])

    def move(self, copies: list[tuple[int, int]], step: int) -> bool:
        """Calls `KVMemory.move` on every rank; returns false if any has not launched the step."""
        return all(self._all("move", [copies, step]))

    def poll(self) -> None:
        """Polls all ranks; updates `finished`, `free`, `mappings` and `draining`."""
        growths = self._growths
        answers = self._all("poll")
        with self._lock:
            for finished, *_ in answers:
                for number, failure in finished:
                    self._answers.setdefault(number, []).append(failure)
            if growths == self._growths:  # otherwise `grow` has stored a newer value
                self._free = _least(free for _, free, *_ in answers)
            self.mappings = max(mappings for *_, mappings, _ in answers)
            self.draining = any(draining for *_, draining in answers)
            self._heard = True

    def end_drain(self) -> None:
        """Tells sleeping ranks that all memory not held by requests has been unmapped."""
        self._all("end_drain")
        self.draining = False

    def finished(self) -> dict[int, str | None]:
        """Returns the releases finished on all ranks, as a map from number to error or None.

        Each release is returned only once.
        """
        done: dict[int, str | None] = {}
        with self._lock:
            for number, answers in list(self._answers.items()):
                if len(answers) == len(self.ranks):
                    del self._answers[number]
                    done[number] = next(filter(None, answers), None)
        return done

    def compact(self, nbytes: int, step: int) -> int:
        """Calls `KVMemory.compact` on every rank; returns the most bytes freed on any rank."""
        return max(map(int, self._all("compact", [nbytes, step])))

    def free(self) -> int | None:
        """Returns how many bytes every rank could map as of the last `grow` or `poll`.

        Returns None on the CPU, where the number is unknown.
        """
        if not self._heard:
            self.poll()
        return self._free

    def total(self) -> int:
        """Returns the minimum memory per rank in bytes; ranks on one device split its total."""
        devices = [rank.device() for rank in self.ranks]
        return min(
            rank.total() // devices.count(device)
            for rank, device in zip(self.ranks, devices, strict=True)
        )

    def stats(self) -> list[dict[str, int]]:
        """Returns `Context.stats` for each rank."""
        found: list[dict[str, int]] = self._all("stats")
        return found

    def close(self) -> None:
        """Closes the connections to all ranks."""
        for rank in self.ranks:
            rank.close()


def _least(found: Iterable[int | None]) -> int | None:
    return min((one for one in found if one is not None), default=None)
