# SPDX-License-Identifier: MIT
"""The ledger: each engine's share of a device, across one user's processes and containers.

The ledger is a file of fixed size in a private directory of the user, mapped by every engine; there
is no daemon. An engine has a slot and holds a lock on the slot's byte, which the kernel releases
when the process exits for any reason. Another process that finds the byte unlocked knows that the
owner is dead, and clears the slot. Process ids cannot be compared across containers, so they are
not used for this.

    header   magic, version, capacity, counters of memory requests and returns
    slot     an engine: limit, floor, used, pending, ...; 8-byte words written by the engine itself,
             except for those that control it: `order`, the limit, `floor` and `asleep`

All sizes are bytes of one device. Under the lock on the file's first byte, an engine may take:

    room = min(limit - used,
               capacity - the sum over others of max(used, floor) - used,
               free memory of the device - the sum over others of max(pending, floor - used))

`pending` is memory granted but not mapped yet, which the device therefore still reports as free. A
process killed between two writes leaves an unowned slot; no other state needs repair.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import mmap
import os
import re
import secrets
import stat
import struct
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pyvmem.errors import (
    AccessDenied,
    BadHandle,
    ForkedProcess,
    InvalidArgument,
    NotSupported,
    VMemError,
)
from pyvmem.plumbing.closing import Closable
from pyvmem.plumbing.folder_lock import locked_folder
from pyvmem.plumbing.logs import warn
from pyvmem.plumbing.paths import folder_in

__all__ = [
    *("Account", "EngineInfo", "Ledger", "LedgerError", "LedgerHeld"),
    *("default_folder", "device_of", "devices", "engine_name", "engines_in", "is_off"),
    *("named_folder", "private"),
]

_log = logging.getLogger(__name__)

MAX_HANDLES = 475_136
"""Maximum number of mappings across all engines and GPUs, on ``stock``.

The driver allows 524,288 per machine, and other programs need some of them.
"""

_FOLDER = "/dev/shm/vmem-{}"
_MAGIC = b"VMEMLDG\0"
_VERSION = 1
_HEADER = 4096
_SLOT = 512
_SLOTS = 64
_SIZE = _HEADER + _SLOTS * _SLOT
_LOCKS = 1 << 40  # offset of the lock bytes, far past the contents
_STALE_NS = 2_000_000_000  # ns after which a shortage expires unless it is posted again
_PATIENCE_S = 2.0  # timeout for the lock, which is normally held for microseconds

_HEAD = struct.Struct("<8sIIQ")  # magic, version, slots, capacity
_CAPACITY_AT = 16
_HOLDER_AT = 24  # last holder of the lock: process id, and slot counted from 1
_HOLDER = struct.Struct("<QQ")
_ASKS_AT, _GIVES_AT = 40, 48  # counters for `Account.signals`
_WORD = struct.Struct("<Q")
_FLOCK = struct.Struct("hhxxxxqqixxxx")

# The words of a slot, in order; the name follows them.
_WORDS = (
    "state",
    "identity",
    "pid",
    "pid_namespace",
    "limit",
    "floor",
    "least",
    "used",
    "pending",
    "handles",
    "order",
    "want",
    "want_ns",
    "in_use",
    "cached",
    "maps",
    "waits",
    "hits",
    "queries",
    "beat_ns",
    "virtual",
    "sleeps",
    "asleep",
    "host",
    "host_cached",
)
_AT = {name: 8 * i for i, name in enumerate(_WORDS)}
_NAME_AT, _NAME_SIZE = 256, 64
_FREE, _TAKEN = 0, 1


class LedgerError(VMemError):
    """The ledger cannot be used: it is damaged, has another version, or is full."""


class LedgerHeld(LedgerError):
    """A process that is suspended (stopped, or in a debugger) holds the ledger's lock."""


def is_off(environment: Mapping[str, str] = os.environ) -> bool:
    """Returns whether ``VMEM_LEDGER`` turns the ledger off for vLLM's engines."""
    return environment.get("VMEM_LEDGER", "").lower() == "off"


def named_folder() -> Path | None:
    """Returns the directory in ``VMEM_LEDGER``, or None.

    Raises InvalidArgument for an unknown ``~user``.
    """
    return None if is_off() else folder_in("VMEM_LEDGER")


def default_folder() -> Path:
    """Returns `named_folder` or, failing that, this user's directory in shared memory."""
    return named_folder() or Path(_FOLDER.format(os.getuid()))


def private(folder: Path) -> Path:
    """Creates a directory if needed, and checks that it is private to this user.

    Raises:
        AccessDenied: another user owns it or may write to it.
        LedgerError: it cannot be created.
    """
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        state = folder.stat()
    except OSError as error:
        raise LedgerError(f"{folder}: {error.strerror}", errno=error.errno or errno.EIO) from error
    if state.st_uid != os.getuid() or state.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise AccessDenied(
            f"{folder}: owner {state.st_uid}, mode {stat.S_IMODE(state.st_mode):o}; expected "
            f"owner {os.getuid()} and no write permission for others",
            errno=errno.EACCES,
        )
    return folder


def device_of(name: str, uuid: str) -> str:
    """Returns the ledger's name for a device: its UUID, or ``"host"`` if it has none.

    Raises:
        NotSupported: the device is an instance of a GPU in MIG mode. Instances have the GPU's UUID
            but separate memory, so a ledger would treat them as one device.
    """
    if " MIG " in f" {name} ":
        raise NotSupported(
            f"{name}: the GPU is in MIG mode; its instances share a UUID but not memory, so the "
            "ledger cannot tell them apart; nvidia-smi -mig 0 disables MIG mode",
            errno=errno.EOPNOTSUPP,
        )
    return uuid or "host"


def devices(folder: Path) -> list[str]:
    """Lists the devices that have a ledger in a directory, which need not exist.

    Raises:
        VMemError: as for `private`.
    """
    try:
        folder.stat()
    except FileNotFoundError:
        return []
    except OSError as error:
        raise LedgerError(f"{folder}: {error.strerror}", errno=error.errno or errno.EIO) from error
    private(folder)
    return sorted(path.stem for path in folder.glob("*.ledger"))


def engines_in(folder: Path) -> dict[str, list[EngineInfo]]:
    """Lists the engines of every device that has a ledger in a directory.

    Raises:
        VMemError: as for `Ledger`.
    """
    found: dict[str, list[EngineInfo]] = {}
    for device in devices(folder):
        with Ledger(device, folder=folder, create=False) as ledger:
            found[device] = ledger.engines()
    return found


def engine_name(text: str, end: str = "") -> str:
    """Makes a valid engine name: as many printable characters of `text` as fit, then `end`."""
    shown = "".join(char for char in text if char.isprintable()).encode()
    return shown[: _NAME_SIZE - 1 - len(end)].decode(errors="ignore") + end


@dataclass(frozen=True)
class EngineInfo:
    """A snapshot of an engine in the ledger. All sizes are bytes of one device.

    Attributes:
        name: set by the user; unique among living engines.
        identity: a number below 2**63, unique among engines.
        pid: process id in the engine's own PID namespace.
        here: True if `pid` is in this process's namespace.
        limit, floor: the maximum that it may use, and the amount that others must leave for it.
        least: the memory that it needs to run (for vLLM, one request of maximum length; for a
            pyvmem cache, one page per tensor). A lower limit is rejected.
        used: bytes granted; for an announced cache, bytes mapped.
        pending: the part of `used` not mapped yet.
        in_use: the part of `used` held by requests.
        cached: the part of `used` in prefixes that no request holds.
        virtual: maximum bytes that it could ever map.
        handles: driver mappings.
        want: bytes that its requests need but lack.
        maps: map calls since the start; `waits`: steps that waited for a map call.
        hits, queries: tokens found, and tokens looked up, in the prefix cache.
        sleeps: 1 if it accepts an order to sleep; `asleep`: 1 if it was ordered to sleep.
        host: its host memory for KV offloading or for prefixes; `host_cached`: the part in use.
        age: seconds since its last report.
    """

    name: str
    identity: int
    pid: int
    here: bool
    limit: int
    floor: int
    least: int
    used: int
    pending: int
    in_use: int
    cached: int
    virtual: int
    handles: int
    want: int
    maps: int
    waits: int
    hits: int
    queries: int
    sleeps: int
    asleep: int
    host: int
    host_cached: int
    age: float

    def record(self) -> dict[str, Any]:
        """Returns JSON-compatible values, keyed by the column names of `vmem top`.

        `hits` is the hit rate, or None if there were no queries; `hit_tokens` is the number of
        tokens found in the prefix cache.
        """
        renamed = {"name": "engine", "used": "mapped", "want": "short", "hits": "hit_tokens"}
        found = {renamed.get(key, key): value for key, value in asdict(self).items()}
        return {**found, "hits": self.hits / self.queries if self.queries else None}


class Ledger(Closable):
    """The ledger of one device. Thread-safe. In a forked child it is closed and has no account.

    Args:
        device: the device's name, as in `ContextInfo.uuid`, or ``"host"``.
        capacity: bytes for all engines together; 0: the ledger's value, or, if this call creates
            the ledger, all of the device's memory. Fixed while engines run.
        folder: directory of the ledgers; None: `default_folder`.
        create: if False, a missing ledger is an error.

    Raises:
        AccessDenied: the directory or the file belongs to another user.
        InvalidArgument: the capacity differs from that of the running engines.
        LedgerError: the ledger is damaged or has another version, or the file system is full.
    """

    def __init__(
        self, device: str, capacity: int = 0, folder: Path | None = None, *, create: bool = True
    ) -> None:
        if not re.fullmatch(r"[\w-]{1,64}", device):
            raise InvalidArgument(f"device {device!r}: not a valid device name", errno=errno.EINVAL)
        self.path = private(folder or default_folder()) / f"{device}.ledger"
        self._thread_lock = threading.RLock()
        self._stuck = False  # whether the last attempt to take the lock timed out
        self._beside: dict[str, Ledger] = {}  # ledgers of other devices, by file name
        if create and not self.path.exists():
            self._make(capacity)
        try:
            self._fd = os.open(self.path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError as error:
            raise LedgerError(
                f"{self.path}: {error.strerror}", errno=error.errno or errno.EIO
            ) from error
        try:
            self._map = self._open()
        except BaseException:
            os.close(self._fd)
            raise
        _ledgers.add(self)
        try:
            if capacity:
                self._agree(capacity)
        except BaseException:
            self.close()
            raise

    def _make(self, capacity: int) -> None:
        """Writes a temporary file, then links it to the ledger's name.

        Readers therefore never see a partial file.
        """
        part = self.path.with_suffix(f".{secrets.token_hex(6)}")
        try:
            fd = os.open(part, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise LedgerError(
                f"{self.path} cannot be created: {error.strerror}", errno=error.errno or errno.EIO
            ) from error
        try:
            # Allocate now: if the file system is full, a store to a hole in the file raises SIGBUS.
            os.posix_fallocate(fd, 0, _SIZE)
            os.pwrite(fd, _HEAD.pack(_MAGIC, _VERSION, _SLOTS, capacity), 0)
            with contextlib.suppress(FileExistsError):
                os.link(part, self.path)
        except OSError as error:
            raise LedgerError(
                f"{self.path}: cannot allocate {_SIZE} bytes: {error.strerror}",
                errno=error.errno or errno.EIO,
                bytes=_SIZE,
            ) from error
        finally:
            os.close(fd)
            os.unlink(part)

    def _open(self) -> mmap.mmap:
        state = os.fstat(self._fd)
        if state.st_uid != os.getuid() or state.st_mode & 0o077:
            raise AccessDenied(
                f"{self.path}: owner {state.st_uid}, mode {stat.S_IMODE(state.st_mode):o}; "
                f"expected owner {os.getuid()}, mode 600",
                errno=errno.EACCES,
            )
        head = os.pread(self._fd, _HEAD.size, 0)
        advice = "stop the engines that use it, then remove the file"
        if state.st_size != _SIZE or len(head) < _HEAD.size or head[:8] != _MAGIC:
            raise LedgerError(
                f"{self.path} is not a ledger, or is damaged: {advice}", errno=errno.EIO
            )
        _, version, slots, _ = _HEAD.unpack(head)
        if (version, slots) != (_VERSION, _SLOTS):
            raise LedgerError(
                f"{self.path} has version {version}, but this pyvmem supports {_VERSION}: {advice}",
                errno=errno.EPROTO,
                limit=_VERSION,
            )
        return mmap.mmap(self._fd, _SIZE)

    def _agree(self, capacity: int) -> None:
        with self.locked():
            before = self.capacity
            if before == capacity:
                return
            running = ", ".join(self._name(slot) for slot in self.live())
            if running:
                raise InvalidArgument(
                    f"VMEM_CAPACITY={capacity}: running engines use "
                    f"{before or 'all of the device'} ({running})",
                    errno=errno.EINVAL,
                    bytes=capacity,
                    limit=before,
                )
            _WORD.pack_into(self._map, _CAPACITY_AT, capacity)

    def close(self) -> None:
        """Unmaps the file; the account must be closed first. Idempotent."""
        with self._thread_lock:
            self._let_go()

    def __del__(self) -> None:
        """Closes a ledger that lost its owner, for example if its budget's constructor raised."""
        if hasattr(self, "_map"):
            self._let_go()

    def _let_go(self) -> None:
        if not self._map.closed:
            self._map.close()
            os.close(self._fd)
        for one in self._beside.values():
            one._let_go()

    @property
    def closed(self) -> bool:
        """True after `close`, and in a forked child of the process that opened the ledger."""
        return self._map.closed

    def _forked(self) -> None:
        """Closes the file in a forked child, so that the parent's locks do not outlive the parent.

        Also closes the mapping, which would otherwise keep the file open, and replaces the thread
        lock, since another thread may have held it at the fork.
        """
        self._thread_lock = threading.RLock()
        if not self._map.closed:
            self._let_go()
            self._parents = True

    # ---- the file --------------------------------------------------------------------------------

    def _lock_byte(self, byte: int, kind: int, command: int) -> int:
        """Locks, unlocks or queries a byte.

        For F_OFD_GETLK, returns the type of the conflicting lock.
        """
        request = _FLOCK.pack(kind, os.SEEK_SET, _LOCKS + byte, 1, 0)
        return int(_FLOCK.unpack(fcntl.fcntl(self._fd, command, request))[0])

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Holds the file's lock, to exclude other threads and processes.

        Raises:
            ForkedProcess: the ledger belongs to the parent process. BadHandle: it is closed.
            LedgerHeld: another process, named in the message, does not release the lock.
        """
        with self._thread_lock:
            if self._map.closed:
                if self._parents:
                    text = f"{self.path}: opened by the parent of this forked process"
                    raise ForkedProcess(text, errno=errno.ECHILD)
                raise BadHandle(f"{self.path} is closed", errno=errno.EBADF)
            self._wait_for_lock()
            try:
                _HOLDER.pack_into(self._map, _HOLDER_AT, os.getpid(), self._mine + 1)
                yield
            finally:
                self._lock_byte(0, fcntl.F_UNLCK, fcntl.F_OFD_SETLK)

    def _wait_for_lock(self) -> None:
        """Takes the file's lock.

        After a timeout, later calls fail without waiting, until one finds the lock free.
        """
        end = time.monotonic() + (0 if self._stuck else _PATIENCE_S)
        pause = 20e-6
        while True:
            try:
                self._lock_byte(0, fcntl.F_WRLCK, fcntl.F_OFD_SETLK)
            except OSError as error:
                if error.errno not in (errno.EAGAIN, errno.EACCES):
                    raise
            else:
                self._stuck = False
                return
            if time.monotonic() >= end:
                self._stuck = True
                raise LedgerHeld(
                    f"{self.path}: {self._holder()} holds the lock and does not release it: it "
                    "seems suspended (stopped, frozen, in a debugger); resume or kill it",
                    errno=errno.ETIMEDOUT,
                )
            time.sleep(pause)
            pause = min(2 * pause, 1e-3)

    def _holder(self) -> str:
        pid, slot = _HOLDER.unpack_from(self._map, _HOLDER_AT)
        name = self._name(slot - 1) if 0 < slot <= _SLOTS else ""
        return f"engine {name!r} (process {pid})" if name else f"process {pid}"

    def total(self, word: str) -> int:
        """Sums a word over all living engines.

        The caller holds the lock, unless a suspended process is holding on to it.
        """
        taken = [slot for slot in range(_SLOTS) if self.word(slot, "state") == _TAKEN]
        return sum(
            self.word(slot, word) for slot in taken if slot == self._mine or self._owned(slot)
        )

    def total_beside(self, word: str, but: str = "") -> int:
        """Sums a word over the engines of other devices whose ledgers are in the same directory.

        Skips the device `but`. Not atomic: engines of two devices may both read the sum before
        either adds to it.
        """
        total = 0
        for path in self.path.parent.glob("*.ledger"):
            if path.stem in (but, self.path.stem):
                continue
            try:
                if path.name not in self._beside:
                    self._beside[path.name] = Ledger(path.stem, folder=path.parent, create=False)
                other = self._beside[path.name]
                with contextlib.ExitStack() as stack:
                    with contextlib.suppress(LedgerHeld):
                        stack.enter_context(other.locked())
                    total += other.total(word)
            except VMemError as error:
                warn(_log, "ledger", "another device's ledger is ignored: %s", error)
        return total

    @property
    def capacity(self) -> int:
        """Total bytes for all engines; 0: all of the device's memory."""
        return self.counted(_CAPACITY_AT)

    def counted(self, at: int) -> int:
        """Returns a word from the header."""
        return int(_WORD.unpack_from(self._map, at)[0])

    def count(self, at: int) -> None:
        """Adds 1 to a word in the header. The caller holds the lock."""
        _WORD.pack_into(self._map, at, self.counted(at) + 1)

    def word(self, slot: int, name: str) -> int:
        """Returns a word from a slot."""
        return int(_WORD.unpack_from(self._map, _HEADER + slot * _SLOT + _AT[name])[0])

    def put(self, slot: int, name: str, value: int) -> None:
        """Writes a word in a slot."""
        _WORD.pack_into(self._map, _HEADER + slot * _SLOT + _AT[name], max(0, value))

    def _name(self, slot: int) -> str:
        at = _HEADER + slot * _SLOT + _NAME_AT
        return bytes(self._map[at : at + _NAME_SIZE]).split(b"\0")[0].decode(errors="replace")

    def _owned(self, slot: int) -> bool:
        """Returns true if another living process holds the slot.

        Cannot detect this object's own lock on its slot, so callers check `_mine`.
        """
        return self._lock_byte(1 + slot, fcntl.F_WRLCK, fcntl.F_OFD_GETLK) != fcntl.F_UNLCK

    def live(self, mine: int = -1) -> list[int]:
        """Returns the slots of living engines and clears those of dead engines.

        The caller holds the lock.
        """
        found = []
        for slot in range(_SLOTS):
            if self.word(slot, "state") == _FREE:
                continue
            if slot == mine or self._owned(slot):
                found.append(slot)
            else:
                self.put(slot, "state", _FREE)
        return found

    def engines(self) -> list[EngineInfo]:
        """Returns all living engines."""
        namespace = _pid_namespace()
        now = time.monotonic_ns()
        found = []
        with self.locked():
            for slot in self.live(self._mine):
                word = {name: self.word(slot, name) for name in _WORDS}
                fresh = now - word["want_ns"] < _STALE_NS
                found.append(
                    EngineInfo(
                        name=self._name(slot),
                        pid=word["pid"],
                        here=word["pid_namespace"] == namespace,
                        want=word["want"] if fresh else 0,
                        age=(now - word["beat_ns"]) / 1e9,
                        limit=word["order"] or word["limit"],
                        **{
                            name: word[name]
                            for name in EngineInfo.__dataclass_fields__
                            if name in word and name not in ("pid", "want", "limit")
                        },
                    )
                )
        return found

    _mine = -1
    _parents = False

    def join(
        self,
        name: str,
        *,
        floor: int,
        limit: int,
        least: int,
        virtual: int,
        identity: int = 0,
        host: int = 0,
        host_limit: int = 0,
    ) -> Account:
        """Allocates a slot for an engine of this process; at most one per `Ledger` object.

        Args:
            name: shown to users; unique among living engines. Printable, up to 63 bytes.
            floor, limit, least, virtual, host, identity: as in `EngineInfo`; identity 0: random.
            host_limit: maximum total of `host` across the engines of all devices; 0: unlimited.

        Raises:
            InvalidArgument: the name is in use or not printable; the limit is below the floor; all
                floors together, or `least` plus the other engines' floors, exceed the capacity; or
                the engines' host memory exceeds its limit.
            LedgerError: all slots are in use.
        """
        if not name.isprintable() or not 0 < len(name.encode()) < _NAME_SIZE:
            raise InvalidArgument(
                f"name {name!r:.80}: expected 1 to {_NAME_SIZE - 1} bytes of printable characters",
                errno=errno.EINVAL,
            )
        if not 0 <= floor <= limit < 1 << 63 or not max(least, virtual) < 1 << 63:
            raise InvalidArgument(
                f"limit {limit}, floor {floor}: expected 0 <= floor <= limit < 2**63",
                errno=errno.EINVAL,
                limit=floor,
            )
        with self._joining(host) as beside, self.locked():
            if self._mine >= 0:
                raise InvalidArgument("this Ledger has already joined", errno=errno.EINVAL)
            live = self.live()
            taken = [slot for slot in live if self._name(slot) == name]
            if taken:
                raise InvalidArgument(
                    f"{name!r} is the name of process {self.word(taken[0], 'pid')} in the ledger: "
                    "choose another (VMEM_NAME)",
                    errno=errno.EEXIST,
                )
            kept = sum(self.word(slot, "floor") for slot in live)
            if self.capacity and kept + floor > self.capacity:
                raise InvalidArgument(
                    f"VMEM_FLOOR={floor}: the device has {self.capacity} bytes for all engines, of "
                    f"which other engines' floors reserve {kept}",
                    errno=errno.EINVAL,
                    bytes=floor,
                    limit=self.capacity - kept,
                )
            if self.capacity and kept + least > self.capacity:
                raise InvalidArgument(
                    f"{name!r} needs {least} bytes to run: the device has {self.capacity} for all "
                    f"engines, of which other engines' floors reserve {kept}",
                    errno=errno.EINVAL,
                    bytes=least,
                    limit=self.capacity - kept,
                )
            held = self.total("host") + beside
            if host and host_limit and held + host > host_limit:
                raise InvalidArgument(
                    f"VMEM_HOST_LIMIT={host_limit}: {name!r} asks for {host} bytes of host memory "
                    f"for KV offloading on {self.path.stem}, and engines have {held} already",
                    errno=errno.EINVAL,
                    bytes=host,
                    limit=max(0, host_limit - held),
                )
            free = [slot for slot in range(_SLOTS) if slot not in live]
            if not free:
                raise LedgerError(f"{self.path}: {_SLOTS} engines", errno=errno.ENOSPC)
            slot = free[0]
            at = _HEADER + slot * _SLOT
            self._map[at : at + _SLOT] = bytes(_SLOT)
            self._lock_byte(1 + slot, fcntl.F_WRLCK, fcntl.F_OFD_SETLK)
            data = name.encode()
            self._map[at + _NAME_AT : at + _NAME_AT + len(data)] = data
            values = {
                "identity": identity or secrets.randbits(63) | 1,
                "pid": os.getpid(),
                "pid_namespace": _pid_namespace(),
                "limit": limit,
                "floor": floor,
                "least": least,
                "virtual": virtual,
                "host": host,
                "beat_ns": time.monotonic_ns(),
            }
            for key, value in values.items():
                self.put(slot, key, value)
            self.put(slot, "state", _TAKEN)
            self._mine = slot
            return Account(self, slot)

    @contextlib.contextmanager
    def _joining(self, host: int) -> Iterator[int]:
        """Yields the host memory held by engines of other devices.

        The amount cannot grow until the ``with`` block ends.
        """
        if not host:
            yield 0
            return
        with locked_folder(self.path.parent, _PATIENCE_S) as held:
            if not held:
                text = f"{self.path.parent}: an engine is suspended during its start"
                raise LedgerHeld(text, errno=errno.ETIMEDOUT)
            yield self.total_beside("host")

    def leave(self, slot: int) -> None:
        """Frees a slot that this process owns."""
        with self.locked():
            self.put(slot, "state", _FREE)
            self._lock_byte(1 + slot, fcntl.F_UNLCK, fcntl.F_OFD_SETLK)
            self._mine = -1

    def find(self, who: str) -> EngineInfo | None:
        """Returns the engine with this name or process id; None unless exactly one matches."""
        engines = self.engines()
        found = [e for e in engines if e.name == who]
        found = found or [e for e in engines if who.isdigit() and e.pid == int(who) and e.here]
        return found[0] if len(found) == 1 else None

    def put_order(self, one: EngineInfo, words: Mapping[str, int]) -> None:
        """Writes words into an engine's slot, unless the engine is gone."""
        with self.locked():
            for slot in self.live(self._mine):
                if self.word(slot, "identity") == one.identity:
                    for name, value in words.items():
                        self.put(slot, name, value)


_ledgers: weakref.WeakSet[Ledger] = weakref.WeakSet()


def _close_parents() -> None:
    for ledger in list(_ledgers):
        ledger._forked()


os.register_at_fork(after_in_child=_close_parents)


class Account:
    """An engine's slot in the ledger. Thread-safe."""

    def __init__(self, ledger: Ledger, slot: int) -> None:
        self.ledger = ledger
        self.slot = slot
        self._owed: list[Callable[[], None]] = []  # changes to make once the lock is free
        self._goal = 0  # largest `used` requested during the current shortage
        self._own = {_ASKS_AT: 0, _GIVES_AT: 0}  # number of signals that this account sent

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        with self.ledger.locked():
            while self._owed:
                self._owed.pop(0)()
            yield

    def _change(self, change: Callable[[], None]) -> None:
        """Changes the slot, now or together with the next change that gets the lock.

        This way, an engine never blocks on a stopped engine that holds the lock.
        """
        try:
            with self._locked():
                change()
        except LedgerHeld as error:
            self._owed.append(change)
            warn(_log, "ledger", "nothing can be mapped: %s", error)

    def _add(self, name: str, value: int) -> None:
        self.ledger.put(self.slot, name, self._get(name) + value)

    def _get(self, name: str) -> int:
        return self.ledger.word(self.slot, name)

    @property
    def limit(self) -> int:
        """The limit in bytes, as set by the last order, if any."""
        try:
            with self._locked():
                return self._limit()
        except LedgerHeld:
            return self._limit()

    def _limit(self) -> int:
        return self._get("order") or self._get("limit")

    @property
    def asleep(self) -> bool:
        """True if the engine was ordered to sleep."""
        return bool(self._get("asleep"))

    def decline(self) -> None:
        """Drops the last order and restores the limit passed to `join`."""
        self._change(lambda: self.ledger.put(self.slot, "order", 0))

    @property
    def used(self) -> int:
        """Bytes granted to the engine."""
        return self._get("used")

    def room(self, free: int | None = None) -> int:
        """Returns how many bytes `take` would grant now.

        `free` is the device's unused memory in bytes; None: not taken into account.
        """
        try:
            with self._locked():
                return self._room(free)
        except LedgerHeld as error:
            warn(_log, "ledger", "nothing can be mapped: %s", error)
            return 0

    def _room(self, free: int | None) -> int:
        if free is not None:
            free -= self._get("pending")
        room = self._room_of(self.slot, self.ledger.live(self.slot), free)
        return max(0, min(room, self._limit() - self._get("used")))

    def take(self, nbytes: int, handles: int = 0, free: int | None = None) -> bool:
        """Requests more bytes; returns True if granted.

        Granted bytes are pending until `end_pending`. Requests are denied while a stopped process
        holds the ledger's lock.
        """
        ledger = self.ledger
        on_gpu = ledger.path.stem != "host"
        beside = ledger.total_beside("handles", "host") if handles and on_gpu else 0
        try:
            with self._locked():
                if nbytes > self._room(free):
                    return False
                if handles and ledger.total("handles") + beside + handles > MAX_HANDLES:
                    return False
                self._add("handles", handles)
                self._add("pending", nbytes)
                self._add("used", nbytes)
                return True
        except LedgerHeld as error:
            warn(_log, "ledger", "nothing can be mapped: %s", error)
            return False

    def end_pending(self, nbytes: int) -> None:
        """Marks bytes granted by `take` as no longer pending.

        Called once they are mapped, or before `give` if they could not be mapped.
        """
        self._change(lambda: self._add("pending", -nbytes))

    def settle(self, mapped: int) -> None:
        """Sets how much of the granted memory is mapped; the remainder is pending."""
        self._change(lambda: self.ledger.put(self.slot, "pending", self._get("used") - mapped))

    def give(self, nbytes: int, handles: int = 0) -> None:
        """Gives back the bytes and driver mappings of unmapped pages."""

        def change() -> None:
            self._add("used", -nbytes)
            self._add("handles", -handles)
            self._signal(_GIVES_AT)

        self._change(change)

    def want(self, nbytes: int) -> None:
        """Posts how many bytes the engine's requests lack; 0 ends the shortage.

        Signals other engines if this engine was not short before, or now needs a larger total.
        """
        now = time.monotonic_ns()
        if not nbytes or now - self._get("want_ns") >= _STALE_NS:
            self._goal = 0
        goal = self._get("used") + nbytes if nbytes else 0
        with contextlib.suppress(LedgerHeld), self._locked():
            self._post(want=nbytes, want_ns=now)
            if goal > self._goal:
                self._goal = goal
                self._signal(_ASKS_AT)

    def _signal(self, at: int) -> None:
        self._own[at] += 1
        self.ledger.count(at)

    def signals(self) -> tuple[int, int]:
        """Returns how often other engines asked for memory, and how often they returned it.

        Reads two words without the lock, so that an engine can poll often and run slower checks
        only when a counter has changed.
        """
        asks, gives = (self.ledger.counted(at) - own for at, own in self._own.items())
        return asks, gives

    def excess(self, free: int | None = None) -> int:
        """Returns the bytes to give back: those above the limit, or those that other engines need.

        The needs of other engines never reduce this engine below its floor. An engine that has room
        for what it wants does not count as short.
        """
        used, asked = self._get("used"), 0
        with contextlib.suppress(LedgerHeld), self._locked():
            used, live = self._get("used"), self.ledger.live(self.slot)
            short = sum(self._short_of(slot, live, free) for slot in live)
            asked = min(short, max(0, used - self._get("floor")))
        return max(0, used - self._limit(), asked)

    def has_more(self, free: int | None = None) -> bool:
        """Returns whether another engine is short while this engine exceeds its fair share.

        An engine is short if it wants more than what is free for it plus what its own idle prefixes
        hold. To find the fair share, the memory that is free for this engine is added to the memory
        held by it, by the short engines and by those that hold more than it. The total is divided
        equally among these engines, within each one's floor and limit.
        """
        with contextlib.suppress(LedgerHeld), self._locked():
            return self._has_more(free)
        return False

    def _has_more(self, free: int | None) -> bool:
        word = self.ledger.word
        used, live = self._get("used"), self.ledger.live(self.slot)
        short = [slot for slot in live if self._short_of(slot, live, free) > word(slot, "cached")]
        if not short:
            return False
        others = {*short, *(s for s in live if s != self.slot and word(s, "used") > used)}
        part = used + sum(word(slot, "used") for slot in others)
        part += self._room_of(self.slot, live, free)
        parts = 1 + len(others)
        kept = []
        for slot in sorted(others, key=lambda slot: -word(slot, "floor")):
            if word(slot, "floor") * parts > part:
                part, parts = part - word(slot, "floor"), parts - 1
            else:
                kept.append(slot)
        for limit in sorted(word(slot, "order") or word(slot, "limit") for slot in kept):
            if limit * parts < part:
                part, parts = part - limit, parts - 1
        return used > max(part // parts, self._get("floor"))

    def _short_of(self, slot: int, live: list[int], free: int | None) -> int:
        """Returns the number of bytes that another engine recently wanted but had no room for."""
        word = self.ledger.word
        if slot == self.slot or time.monotonic_ns() - word(slot, "want_ns") >= _STALE_NS:
            return 0
        return max(0, word(slot, "want") - self._room_of(slot, live, free))

    def _room_of(self, slot: int, live: list[int], free: int | None) -> int:
        """Returns the number of bytes that capacity and free device memory leave for an engine."""
        ledger, word = self.ledger, self.ledger.word
        others = [other for other in live if other != slot]
        room = 1 << 63
        if ledger.capacity:
            kept = sum(max(word(s, "used"), word(s, "floor")) for s in others)
            room = ledger.capacity - kept - word(slot, "used")
        if free is not None:
            coming = sum(
                max(word(s, "pending"), word(s, "floor") - word(s, "used")) for s in others
            )
            room = min(room, free - coming)
        return max(0, room)

    def report(self, **values: int) -> None:
        """Writes statistics for `vmem top`, named as in `EngineInfo`.

        Does nothing if a stopped process holds the lock.
        """
        with contextlib.suppress(LedgerHeld), self._locked():
            self._post(**values)

    def _post(self, **values: int) -> None:
        for name, value in values.items():
            self.ledger.put(self.slot, name, value)
        self.ledger.put(self.slot, "beat_ns", time.monotonic_ns())

    def close(self) -> None:
        """Leaves the ledger. Idempotent; does nothing in a forked child."""
        if not self.ledger.closed:
            # If a stopped process holds the lock, closing the file still releases the slot's lock.
            with contextlib.suppress(LedgerHeld):
                self.ledger.leave(self.slot)
            self.ledger.close()


def _pid_namespace() -> int:
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return 0
