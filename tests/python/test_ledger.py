# SPDX-License-Identifier: MIT
"""Tests the ledger that engines share: limits and floors, crashed engines, invalid files."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from pyvmem.commands import cli, top, top_table
from pyvmem.errors import AccessDenied, InvalidArgument, NotSupported
from pyvmem.ledger import accounts as ledger
from pyvmem.ledger.accounts import (
    MAX_HANDLES,
    Account,
    Ledger,
    LedgerError,
    LedgerHeld,
    device_of,
    engine_name,
)
from pyvmem.ledger.orders import order

GIB = 1 << 30
TERMS = {"floor": 0, "limit": 1, "least": 1, "virtual": 1}


def join(folder: Path, name: str, **wanted: int) -> Account:
    values = {"floor": 0, "limit": 100 * GIB, "least": 1, "virtual": 100 * GIB} | wanted
    return Ledger("host", 10 * GIB, folder).join(name, **values)


def names(folder: Path) -> list[str]:
    with Ledger("host", folder=folder, create=False) as ledger:
        return [one.name for one in ledger.engines()]


# ---- each engine's share of memory ------------------------------------------------------------


def test_two_engines_never_exceed_the_capacity(folder: Path) -> None:
    a, b = join(folder, "a"), join(folder, "b")
    assert a.take(7 * GIB)
    assert b.room() == 3 * GIB
    assert not b.take(3 * GIB + 1)
    assert b.take(3 * GIB)
    assert a.room() == 0
    a.give(GIB)
    assert b.room() == GIB
    a.close()
    b.close()


def test_a_floor_is_reserved_for_its_engine(folder: Path) -> None:
    a, b = join(folder, "a"), join(folder, "b", floor=4 * GIB)
    assert a.room() == 6 * GIB
    assert b.take(5 * GIB)
    assert a.room() == 5 * GIB
    a.close()
    b.close()


def test_memory_being_freed_is_not_counted_twice(folder: Path) -> None:
    a, b = join(folder, "a"), join(folder, "b")
    assert a.take(2 * GIB, free=3 * GIB)
    assert b.room(free=3 * GIB) == GIB
    a.end_pending(2 * GIB)
    assert b.room(free=GIB) == GIB
    a.close()
    b.close()


def test_handles_are_rationed_too(folder: Path) -> None:
    a, b = join(folder, "a"), join(folder, "b")
    assert a.take(1, handles=MAX_HANDLES - 10)
    assert not b.take(1, handles=11)
    assert b.take(1, handles=10)
    a.close()
    b.close()


def test_handles_are_counted_over_all_gpus(folder: Path) -> None:
    """The driver has a fixed number of handles for the whole machine; host memory needs none."""

    def of(device: str, name: str) -> Account:
        return Ledger(device, 10 * GIB, folder).join(name, floor=0, limit=GIB, least=1, virtual=GIB)

    a, b, host = of("GPU-a", "a"), of("GPU-b", "b"), of("host", "host")
    assert a.take(1, handles=MAX_HANDLES - 10)
    assert host.take(1, handles=MAX_HANDLES - 10)
    assert not b.take(1, handles=11)
    assert b.take(1, handles=10)
    assert not a.take(1, handles=1)
    a.close()
    assert b.take(1, handles=1), "the memory of an engine that has left must not count"
    assert not b.take(1, handles=MAX_HANDLES - 10)
    b.close()
    host.close()


def test_host_memory_is_counted_over_all_devices(folder: Path) -> None:
    def of(device: str, name: str, host: int, host_limit: int = 8 * GIB) -> Account:
        terms = {"floor": 0, "limit": GIB, "least": 1, "virtual": GIB}
        ledger = Ledger(device, 10 * GIB, folder)
        return ledger.join(name, **terms, host=host, host_limit=host_limit)

    a, b = of("GPU-a", "a", 3 * GIB), of("GPU-b", "b", 4 * GIB)
    for device in ("GPU-a", "GPU-b", "GPU-c"):
        text = f"VMEM_HOST_LIMIT={8 * GIB}: 'c' asks for {2 * GIB} bytes .* on {device}, "
        text += f"and engines have {7 * GIB} already"
        with pytest.raises(InvalidArgument, match=text) as refused:
            of(device, "c", 2 * GIB)
        assert refused.value.limit == GIB
    c = of("GPU-c", "c", GIB)
    with Ledger("GPU-b", folder=folder, create=False) as ledger:
        assert [(one.name, one.host) for one in ledger.engines()] == [("b", 4 * GIB)]
    b.close()
    d = of("GPU-a", "d", 4 * GIB)
    e = of("GPU-b", "e", 100 * GIB, host_limit=0)
    f = of("GPU-b", "f", 0)  # requests no host memory, so no limit applies
    for account in (a, c, d, e, f):
        account.close()


def test_engines_that_start_together_stay_within_host_memory(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engines are on different GPUs and so have different ledgers."""
    count, both = Ledger.total_beside, threading.Barrier(2)

    def slowly(self: Ledger, word: str, but: str = "") -> int:
        found = count(self, word, but)
        with suppress(threading.BrokenBarrierError):
            both.wait(0.2)  # gives the other engine time to count
        return found

    monkeypatch.setattr(Ledger, "total_beside", slowly)
    joined: list[Account] = []
    refused: list[str] = []

    def start(name: str) -> None:
        try:
            account = Ledger(name, GIB, folder).join(name, **TERMS, host=6, host_limit=10)
            joined.append(account)
        except InvalidArgument as error:
            refused.append(str(error))

    engines = [threading.Thread(target=start, args=(name,)) for name in ("GPU-a", "GPU-b")]
    for one in engines:
        one.start()
    for one in engines:
        one.join()
    assert [len(joined), len(refused)] == [1, 1]
    assert "asks for 6 bytes" in refused[0]
    joined[0].close()


def test_an_engine_suspended_during_its_start(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ledger, "_PATIENCE_S", 0.05)
    fd = os.open(folder, os.O_RDONLY)
    fcntl.flock(fd, fcntl.LOCK_EX)
    join(folder, "a").close()
    with pytest.raises(LedgerHeld, match=f"{folder}: an engine is suspended during its start"):
        join(folder, "b", host=1)
    os.close(fd)
    join(folder, "b", host=1).close()


HOLDER = """
import os, signal, sys
from pathlib import Path
from pyvmem.ledger import Ledger
ledger = Ledger("host", folder=Path(sys.argv[1]))
account = ledger.join("holder", floor=0, limit=1 << 30, least=1, virtual=1 << 30)
with ledger.locked():
    print("locked", flush=True)
    os.kill(os.getpid(), signal.SIGSTOP)
account.close()
print("gone", flush=True)
"""


@contextmanager
def held(folder: Path) -> Iterator[subprocess.Popen[str]]:
    """Yields a suspended process that holds the lock and has an account."""
    command = [sys.executable, "-c", HOLDER, str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        try:
            assert holder.stdout.readline() == "locked\n"
            os.waitid(os.P_PID, holder.pid, os.WSTOPPED)
            yield holder
        finally:
            holder.kill()


def test_a_suspended_lock_holder_stops_no_other_engine(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing is granted while the process is suspended; freed memory counts once it resumes."""
    mine = join(folder, "mine")
    assert mine.take(4 * GIB)
    with held(folder) as holder:
        assert not mine.take(1)
        assert f"engine 'holder' (process {holder.pid}) holds the lock" in caplog.text
        assert mine.room() == 0
        assert not mine.has_more()
        assert (mine.limit, mine.excess()) == (100 * GIB, 0)
        mine.end_pending(4 * GIB)
        mine.give(GIB)
        mine.want(1)
        mine.report(in_use=1)
        with pytest.raises(LedgerHeld, match=r"engine 'holder' .* it seems suspended"):
            names(folder)
        holder.send_signal(signal.SIGCONT)
        assert holder.stdout is not None
        assert holder.stdout.readline() == "gone\n"
        assert holder.wait() == 0
    assert mine.room() == 7 * GIB
    (one,) = mine.ledger.engines()
    assert (one.used, one.pending) == (3 * GIB, 0)
    assert mine.take(7 * GIB)
    mine.close()


def test_an_engine_leaves_a_ledger_whose_lock_is_held(folder: Path) -> None:
    mine = join(folder, "mine")
    with held(folder):
        mine.close()
    assert names(folder) == []


def test_a_short_engine_asks_engines_above_their_floors(folder: Path) -> None:
    a, b = join(folder, "a", floor=GIB), join(folder, "b")
    assert a.take(9 * GIB)
    assert a.excess() == 0
    b.want(3 * GIB)  # 1 of these 3 GiB is free
    assert a.excess() == 2 * GIB
    b.want(100 * GIB)
    assert a.excess() == 8 * GIB
    b.want(0)
    assert a.excess() == 0
    a.close()
    b.close()


def test_asks_and_gives_are_signalled(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request signals all other engines, unless it is a repeated or smaller one."""
    a, b = join(folder, "a"), join(folder, "b")
    first = a.signals()

    def seen() -> tuple[int, int]:
        asks, gives = a.signals()
        assert b.signals() == (0, 0), "a does nothing"
        return asks - first[0], gives - first[1]

    b.want(2 * GIB)
    b.want(2 * GIB)
    b.want(GIB)
    assert seen() == (1, 0)
    b.want(3 * GIB)
    assert seen() == (2, 0)
    assert b.take(2 * GIB)
    b.want(GIB)
    assert seen() == (2, 0), "3 in all, as before"
    b.want(2 * GIB)
    assert seen() == (3, 0)
    b.want(0)
    assert seen() == (3, 0)
    b.want(GIB)
    assert seen() == (4, 0)
    b.end_pending(2 * GIB)
    b.give(GIB)
    assert seen() == (4, 1)
    monkeypatch.setattr(ledger, "_STALE_NS", 0)
    b.want(GIB)
    assert seen() == (5, 1), "the last request had expired"
    a.close()
    b.close()


def test_a_fair_share_for_engines_that_are_short(folder: Path) -> None:
    a, b, c = join(folder, "a"), join(folder, "b", floor=2 * GIB), join(folder, "c")
    assert a.take(6 * GIB)
    assert b.take(2 * GIB)
    assert not a.has_more(), "no engine is short"
    b.want(1 * GIB)
    assert not a.has_more(), "free memory suffices"
    b.want(4 * GIB)  # a has 6, b has 2, and 2 are free
    assert a.has_more()
    assert not b.has_more(), "no other engine is short"
    a.want(4 * GIB)
    assert a.has_more()
    assert not b.has_more(), "b has less than half"
    a.give(GIB)
    assert not a.has_more(), "a has only half"
    c.want(4 * GIB)  # three engines share 10
    assert a.has_more()
    assert not c.has_more()
    assert b.take(2 * GIB)
    assert b.has_more(), "4 of 10"
    b.give(2 * GIB)
    assert not b.has_more(), "b is at its floor"
    a.want(0)
    c.want(0)
    assert a.take(GIB)
    assert a.has_more(), "6 of 10"
    b.report(cached=4 * GIB)
    assert not a.has_more(), "b can use the memory of its own idle prefixes"
    b.report(cached=0)
    order(Ledger("host", folder=folder), "b", limit=3 * GIB)
    assert not a.has_more(), "7 remain for it"
    for one in (a, b, c):
        one.close()


def test_the_largest_engine_is_asked_first(folder: Path) -> None:
    """Engines hold 5, 3 and 2 of 10 GiB, and the smaller two are short; a fair third is 3.3 GiB."""
    a, b, c = (join(folder, name) for name in "abc")
    assert a.take(5 * GIB)
    assert b.take(3 * GIB)
    assert c.take(2 * GIB)
    b.want(GIB)
    c.want(GIB)
    assert a.has_more()
    assert not b.has_more(), "a has more than b, so a is asked to free some"
    for one in (a, b, c):
        one.close()


def test_an_engine_at_its_floor_is_not_asked(folder: Path) -> None:
    """The ledger has 10 GiB: 6 are a's floor, b and c hold the rest, and c is short."""
    a = join(folder, "a", floor=6 * GIB)
    b, c = join(folder, "b"), join(folder, "c")
    assert a.take(6 * GIB)
    assert b.take(3 * GIB)
    assert c.take(GIB)
    c.want(GIB)
    assert not a.has_more()
    assert b.has_more(), "half of 4 would be fair"
    for one in (a, b, c):
        one.close()


def test_threads_of_a_process_take_turns(folder: Path) -> None:
    accounts = [join(folder, f"engine{i}") for i in range(4)]
    granted = [0] * 4

    def work(index: int) -> None:
        for _ in range(200):
            if accounts[index].take(GIB // 16):
                granted[index] += 1

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert sum(granted) == 160
    for account in accounts:
        account.close()


def test_the_first_engine_does_not_choose_the_capacity(folder: Path) -> None:
    Ledger("host", folder=folder).join("a", floor=0, limit=GIB, least=1, virtual=GIB).close()
    b = join(folder, "b")
    assert b.ledger.capacity == 10 * GIB
    b.close()
    with Ledger("host", 5 * GIB, folder) as other:
        assert other.capacity == 5 * GIB


def test_running_engines_keep_their_capacity(folder: Path) -> None:
    a = join(folder, "a")
    with pytest.raises(InvalidArgument, match=f"VMEM_CAPACITY={GIB}: .* {10 * GIB} .a.") as caught:
        Ledger("host", GIB, folder)
    assert (caught.value.bytes, caught.value.limit) == (GIB, 10 * GIB)
    assert a.ledger.capacity == 10 * GIB
    with Ledger("host", folder=folder) as other:  # does not specify a capacity
        assert other.capacity == 10 * GIB
    a.close()


def test_running_engines_without_a_capacity_get_none(folder: Path) -> None:
    a = Ledger("host", folder=folder).join("a", floor=0, limit=GIB, least=1, virtual=GIB)
    with pytest.raises(InvalidArgument, match="running engines use all of the device"):
        Ledger("host", GIB, folder)
    assert a.ledger.capacity == 0
    a.close()


# ---- starts and crashes --------------------------------------------------------------------------

CHILD = """
import sys, time
from pathlib import Path
from pyvmem.ledger import Ledger
account = Ledger("host", 10 << 30, Path(sys.argv[1])).join(
    sys.argv[2], floor=0, limit=1 << 40, least=1, virtual=1 << 40, host=6 << 30)
print(account.take(8 << 30), flush=True)
for line in sys.stdin:
    with account.ledger.locked():
        print("locked", flush=True)
        time.sleep(60)
"""


def child(folder: Path, name: str) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", CHILD, str(folder), name],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "True\n"
    return process


def kill(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGKILL)
    process.communicate()


def host_memory_of(folder: Path, device: str, nbytes: int) -> Account:
    """Joins as an engine that requests `nbytes` of the 6 GiB of host memory that all share."""
    book = Ledger(device, folder=folder)
    return book.join("c", **TERMS, host=nbytes, host_limit=6 * GIB)


@pytest.mark.parametrize("inside", [False, True])
def test_a_killed_engine_leaves_nothing(folder: Path, inside: bool) -> None:
    a = join(folder, "a")
    process = child(folder, "b")
    assert sorted(names(folder)) == ["a", "b"]
    assert a.room() == 2 * GIB
    for device in ("host", "GPU-c"):
        with pytest.raises(InvalidArgument, match=f"engines have {6 * GIB} already"):
            host_memory_of(folder, device, 2 * GIB)
    if inside:  # while it holds the ledger's lock
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write("\n")
        process.stdin.flush()
        assert process.stdout.readline() == "locked\n"
    kill(process)
    assert a.room() == 10 * GIB
    assert names(folder) == ["a"]
    for device in ("host", "GPU-c"):
        host_memory_of(folder, device, 6 * GIB).close()
    a.close()


FORKING = """
import os, signal, sys
from pathlib import Path
from pyvmem.errors import ForkedProcess
from pyvmem.ledger import Ledger
account = Ledger("host", 10 << 30, Path(sys.argv[1])).join(
    sys.argv[2], floor=0, limit=1 << 40, least=1, virtual=1 << 40)
child = os.fork()
if not child:
    account.close()  # as a finalizer at the child's end would: nothing
    for call in (lambda: account.take(1), lambda: account.limit, account.ledger.engines):
        try:
            call()
        except ForkedProcess:
            continue
        os._exit(1)
    print(os.getpid(), flush=True)
    signal.pause()
sys.stdin.readline()
print(os.waitpid(child, os.WNOHANG) == (0, 0) and account.take(1), flush=True)
signal.pause()
"""


def test_a_forked_child_does_not_keep_its_parents_slot(folder: Path) -> None:
    """The lock belongs to the open file description, which the child shares until it closes the
    file."""
    parent = subprocess.Popen(
        [sys.executable, "-c", FORKING, str(folder), "b"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert parent.stdin is not None
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    try:
        assert names(folder) == ["b"]
        parent.stdin.write("\n")
        parent.stdin.flush()
        # the child is alive, and its parent still has the slot
        assert parent.stdout.readline() == "True\n"
        parent.send_signal(signal.SIGKILL)
        parent.wait()
        os.kill(child, 0)
        assert names(folder) == []
    finally:
        os.kill(child, signal.SIGKILL)
        parent.communicate()


def test_a_limit_is_read_under_the_lock(folder: Path) -> None:
    """A writer updates several words; a reader must never see half of an update."""
    a, b = join(folder, "a"), join(folder, "b")
    done = threading.Event()
    with b.ledger.locked():
        thread = threading.Thread(target=lambda: (a.limit, done.set()))
        thread.start()
        assert not done.wait(0.2)
    thread.join()
    assert done.is_set()
    a.close()
    b.close()


def test_a_name_is_free_again_after_its_engine_died(folder: Path) -> None:
    process = child(folder, "b")
    with pytest.raises(InvalidArgument, match=f"'b' is the name of process {process.pid}"):
        join(folder, "b")
    kill(process)
    join(folder, "b").close()


def test_slots_run_out(folder: Path) -> None:
    accounts = [join(folder, f"engine{i}") for i in range(64)]
    with pytest.raises(LedgerError, match="64 engines"):
        join(folder, "one more")
    for account in accounts:
        account.close()
    join(folder, "one more").close()


# ---- invalid files and other users
# ---------------------------------------------------------------------


def test_floors_beyond_the_capacity(folder: Path) -> None:
    a = join(folder, "a", floor=7 * GIB)
    with pytest.raises(InvalidArgument, match=f"other engines' floors reserve {7 * GIB}"):
        join(folder, "b", floor=4 * GIB)
    a.close()


def test_a_longest_request_beyond_the_capacity(folder: Path) -> None:
    """A request that needs more memory than the other engines' floors leave would wait forever."""
    a = join(folder, "a", floor=7 * GIB, least=10 * GIB)
    with pytest.raises(
        InvalidArgument, match=f"needs {4 * GIB} bytes to run: .* reserve {7 * GIB}"
    ):
        join(folder, "b", least=4 * GIB)
    join(folder, "b", least=3 * GIB).close()
    a.close()


@pytest.mark.parametrize("name", ["", "m" * 64, "\u00e9" * 32, "a\0b", "a\nb", "\x1b[31m"])
def test_a_name_that_cannot_be_shown_or_does_not_fit(folder: Path, name: str) -> None:
    with pytest.raises(InvalidArgument, match="expected 1 to 63 bytes"):
        join(folder, name)


@pytest.mark.parametrize("text", ["m" * 80, "\u00e9" * 80, "a\nb"])
def test_a_name_made_of_any_text_fits(folder: Path, text: str) -> None:
    one, two = engine_name(text), engine_name(text, "-2")
    a, b = join(folder, one), join(folder, two)
    assert names(folder) == [one, two]
    with pytest.raises(InvalidArgument, match="is the name of process"):
        join(folder, two)
    a.close()
    b.close()


@pytest.mark.parametrize(
    "wanted",
    [
        {"floor": 2, "limit": 1},
        {"floor": -1},
        {"limit": 1 << 63},
        {"least": 1 << 63},
        {"virtual": 1 << 70},
    ],
)
def test_numbers_that_make_no_sense(folder: Path, wanted: dict[str, int]) -> None:
    with pytest.raises(InvalidArgument, match=r"0 <= floor <= limit < 2\*\*63"):
        join(folder, "a", **wanted)
    assert names(folder) == []
    join(folder, "a").close()


def test_a_directory_where_nothing_can_be_created() -> None:
    """Uses a directory in which even root cannot create files."""
    with pytest.raises(LedgerError, match="cannot be created"):
        join(Path("/proc/self/task"), "a")


def test_another_version_is_rejected(folder: Path) -> None:
    join(folder, "a").close()
    path = folder / "host.ledger"
    data = bytearray(path.read_bytes())
    data[8] = 9
    path.write_bytes(bytes(data))
    with pytest.raises(LedgerError, match="has version 9, but this pyvmem supports 1") as caught:
        join(folder, "a")
    assert caught.value.errno_name == "EPROTO"


@pytest.mark.parametrize("contents", [b"", b"short", b"x" * 36864], ids=len)
def test_a_damaged_ledger_is_rejected(folder: Path, contents: bytes) -> None:
    path = folder / "host.ledger"
    path.write_bytes(contents)
    path.chmod(0o600)
    with pytest.raises(LedgerError, match="not a ledger, or is damaged"):
        join(folder, "a")
    assert path.read_bytes() == contents


def test_slots_torn_by_a_crash_are_free(folder: Path) -> None:
    join(folder, "a").close()
    path = folder / "host.ledger"
    data = bytearray(path.read_bytes())
    data[4096:] = random.Random(0).randbytes(len(data) - 4096)
    path.write_bytes(data)
    assert names(folder) == []
    a = join(folder, "a")
    assert names(folder) == ["a"]
    assert (a.room(), a.used, a.excess()) == (10 * GIB, 0, 0)
    a.close()


@pytest.mark.parametrize("what", ["folder", "file"])
def test_another_users_ledger_is_rejected(
    folder: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    join(folder, "a").close()
    before = (folder / "host.ledger").read_bytes()
    me = os.getuid()
    uids = iter([me + 1] * 2 if what == "folder" else [me, me + 1, me + 1])
    monkeypatch.setattr(os, "getuid", lambda: next(uids))
    with pytest.raises(AccessDenied, match=f"owner {me}, mode .* expected owner {me + 1}"):
        join(folder, "a")
    assert (folder / "host.ledger").read_bytes() == before


def test_a_gpu_in_mig_mode_is_rejected() -> None:
    name = "NVIDIA A100-SXM4-40GB MIG 1g.5gb"
    assert device_of("NVIDIA H100 80GB HBM3", "GPU-1") == "GPU-1"
    assert device_of("host memory", "") == "host"
    with pytest.raises(NotSupported, match=f"^{name}: the GPU is in MIG mode") as caught:
        device_of(name, "GPU-1")
    assert caught.value.errno == errno.EOPNOTSUPP


def test_a_ledger_writable_by_others_is_rejected(folder: Path) -> None:
    join(folder, "a").close()
    (folder / "host.ledger").chmod(0o666)
    with pytest.raises(AccessDenied, match="mode 666"):
        join(folder, "a")


def test_a_directory_writable_by_others_is_rejected(folder: Path) -> None:
    folder.chmod(0o777)
    with pytest.raises(AccessDenied, match="mode 777"):
        join(folder, "a")


def test_a_link_in_place_of_the_ledger_is_rejected(folder: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.write_bytes(b"x" * 36864)
    (folder / "host.ledger").symlink_to(other)
    with pytest.raises(LedgerError, match="symbolic links"):
        join(folder, "a")
    assert other.read_bytes() == b"x" * 36864


def test_a_full_file_system(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(LedgerError, match="cannot allocate 36864 bytes: No space left"):
        join(folder, "a")
    assert list(folder.iterdir()) == []


# ---- the command line ----------------------------------------------------------------------------


def vmem(folder: Path, *words: str) -> int:
    return cli.main([*words, "--ledger", str(folder)])


def test_limit_by_name_and_by_process(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a = join(folder, "a", least=GIB)
    assert a.take(6 * GIB)
    assert vmem(folder, "limit", "a", "4G") == 0
    assert capsys.readouterr().out == (
        "host: a: 100.0G -> 4.0G; 2.0G above it will be freed as requests finish\n"
    )
    assert (a.limit, a.room(), a.excess()) == (4 * GIB, 0, 2 * GIB)
    assert vmem(folder, "limit", str(os.getpid()), "8G") == 0
    assert (a.limit, a.room(), a.excess()) == (8 * GIB, 2 * GIB, 0)
    a.close()


@pytest.mark.parametrize(
    ("size", "text"),
    [
        ("1G", f"a limit of 1.0G for a: its floor is 2.0G ({2 * GIB} bytes)"),
        ("2.5G", f"the least that it can run with is 3.0G ({3 * GIB} bytes)"),
        ("11G", f"the most it can have is 10.0G ({10 * GIB} bytes)"),
    ],
)
def test_limits_that_make_no_sense(
    folder: Path, capsys: pytest.CaptureFixture[str], size: str, text: str
) -> None:
    a = join(folder, "a", floor=2 * GIB, least=3 * GIB)
    assert vmem(folder, "limit", "a", size) == 1
    assert text in capsys.readouterr().err
    assert a.limit == 100 * GIB
    a.close()


def test_a_limit_that_one_device_refuses_changes_none(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small = join(folder, "a")
    large = Ledger("other", 10 * GIB, folder).join(
        "a", floor=2 * GIB, limit=100 * GIB, least=1, virtual=100 * GIB
    )
    assert vmem(folder, "limit", "a", "1G") == 1
    told = capsys.readouterr()
    assert "its floor is 2.0G" in told.err
    assert told.out == ""
    assert (small.limit, large.limit) == (100 * GIB, 100 * GIB)
    assert vmem(folder, "limit", "a", "3G") == 0
    assert (small.limit, large.limit) == (3 * GIB, 3 * GIB)
    small.close()
    large.close()


def test_an_invalid_limit(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        vmem(folder, "limit", "a", "much")
    assert "expected a size such as 20G" in capsys.readouterr().err


def test_limit_of_an_unknown_engine(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert vmem(folder, "limit", "nobody", "1G") == 1
    text = f"vmem limit: no engine 'nobody' in {folder}; `vmem top --once` lists them\n"
    assert capsys.readouterr() == ("", text)


@pytest.mark.parametrize("words", [("limit", "a", "1G"), ("top", "--once")])
def test_an_unusable_directory_is_not_an_empty_one(
    folder: Path, capsys: pytest.CaptureFixture[str], words: tuple[str, ...]
) -> None:
    folder.chmod(0o777)
    assert vmem(folder, *words) == 1
    assert "no write permission for others" in capsys.readouterr().err
    folder.rmdir()
    with pytest.raises(SystemExit, match="2"):
        vmem(folder, *words)
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.endswith(f"argument --ledger: {folder}: No such file or directory")
    assert not folder.exists(), "reading must not create anything"
    folder.write_text("")
    with pytest.raises(SystemExit, match="2"):
        vmem(folder, *words)
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.endswith(f"argument --ledger: {folder} is not a directory")


@pytest.mark.parametrize("words", [["limit", "a", "1G"], ["top", "--once"], ["top", "--json"]])
def test_a_missing_directory_named_by_the_environment(
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    words: list[str],
) -> None:
    gone = folder / "gone"
    monkeypatch.setenv("VMEM_LEDGER", str(gone))
    assert cli.main(words) == 1
    expected = f"vmem {words[0]}: ENOENT: VMEM_LEDGER={gone}: no such folder\n"
    assert capsys.readouterr() == ("", expected)
    assert not gone.exists()


def test_no_engine_has_run_yet(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The default directory does not exist until the first engine creates it."""
    monkeypatch.delenv("VMEM_LEDGER", raising=False)
    monkeypatch.setattr(ledger, "_FOLDER", str(folder / "of-{}"))
    assert cli.main(["top", "--json"]) == 0
    assert capsys.readouterr().out == "{}\n"
    said = f"no engine in {folder / f'of-{os.getuid()}'}"
    assert cli.main(["top", "--once"]) == 0
    assert capsys.readouterr().out == f"{said}\n"
    for off in ("off", "OFF", "Off"):
        monkeypatch.setenv("VMEM_LEDGER", off)
        assert cli.main(["top", "--once"]) == 0
        why = "VMEM_LEDGER=off: an engine with that setting joins no ledger"
        assert capsys.readouterr().out == f"{said}; {why}\n"
        assert ledger.default_folder() == folder / f"of-{os.getuid()}"


def test_a_home_in_the_environment(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Either "~" is expanded as in a shell, or the value is rejected; no directory named "~" is
    created."""
    monkeypatch.setenv("HOME", str(folder))
    monkeypatch.setenv("VMEM_LEDGER", "~/of-engines")
    assert ledger.default_folder() == folder / "of-engines"
    nobodys = "~nobody-of-that-name/x"
    monkeypatch.setenv("VMEM_LEDGER", nobodys)
    refused = f"VMEM_LEDGER={nobodys}: ~nobody-of-that-name is not a user's home directory"
    with pytest.raises(InvalidArgument, match=refused):
        ledger.default_folder()
    assert cli.main(["top", "--once"]) == 1
    assert refused in capsys.readouterr().err


def test_top(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a = join(folder, "llama", floor=GIB)
    a.take(6 * GIB)
    a.report(in_use=2 * GIB, cached=3 * GIB, maps=7, hits=30, queries=40)
    assert vmem(folder, "top", "--json") == 0
    device = json.loads(capsys.readouterr().out)["host"]
    (one,) = device["engines"]
    assert (one["engine"], one["mapped"], one["cached"]) == ("llama", 6 * GIB, 3 * GIB)
    assert (one["hits"], one["maps"], one["short"]) == (0.75, 7, 0)
    assert (device["card"], device["memory"]) == ("", 10 * GIB)
    assert 0 < device["free"] <= 4 * GIB, "the engines agreed on a capacity of 10"
    assert vmem(folder, "top", "--once") == 0
    title, heads, line = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"host  10\.0G, \S+ free", title)
    assert line.split() == [
        "llama", str(os.getpid()), "6.0G", "2.0G", "3.0G", "100.0G", "1.0G", "0", "75%",
    ]  # fmt: skip
    shown = {heading.replace(" ", "_") for heading in re.split(r"  +", heads)}
    assert shown <= one.keys(), "headings must be named like the fields"
    a.close()


def test_top_sums_and_sorts(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    accounts = [join(folder, name) for name in ("llama", "gemma", "qwen")]
    for account, size in zip(accounts, (3, 1, 2), strict=True):
        account.take(size * GIB)
        account.report(in_use=GIB)

    def shown(*words: str) -> list[str]:
        assert vmem(folder, "top", "--once", *words) == 0
        return [line.split()[0] for line in capsys.readouterr().out.splitlines()[2:]]

    assert shown() == ["gemma", "llama", "qwen", "total"]
    assert shown("--sort", "mapped") == ["llama", "qwen", "gemma", "total"]
    assert vmem(folder, "top", "--once") == 0
    total = capsys.readouterr().out.splitlines()[-1]
    assert total.split() == ["total", "6.0G", "3.0G", "0", "0"]
    assert vmem(folder, "top", "--json") == 0
    sums = json.loads(capsys.readouterr().out)["host"]["total"]
    wanted = {"mapped": 6 * GIB, "in_use": 3 * GIB, "cached": 0}
    assert sums == {**wanted, "host": 0, "host_cached": 0, "short": 0}
    accounts.append(join(folder, "phi", host=5 * GIB))
    accounts[-1].report(host_cached=2 * GIB)
    assert vmem(folder, "top", "--once") == 0
    table = capsys.readouterr().out.splitlines()[1:]
    assert table[0].split()[5:9] == ["cached", "host", "host", "cached"], "once an engine has some"
    assert table[-1].split()[4:6] == ["5.0G", "2.0G"]
    for account in accounts:
        account.close()


def test_top_live(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The table is redrawn until interrupted; rates cover the time since it was last drawn."""
    a = join(folder, "llama")
    readings = 0

    def sleep(_: float) -> None:
        nonlocal readings
        readings += 1
        if readings == 3:
            raise KeyboardInterrupt
        a.report(maps=1000 * readings, waits=0)

    monkeypatch.setattr(top.time, "sleep", sleep)
    assert vmem(folder, "top", "--interval", "0.01") == 130
    monkeypatch.undo()
    shown = capsys.readouterr().out
    assert "maps/s" in shown
    row = next(line for line in shown.splitlines()[::-1] if "llama" in line)
    assert float(row.split()[-2]) > 0
    a.close()


def reading(**more: float) -> top_table.Reading:
    """Returns a reading with one engine on a GPU."""
    sizes = {"mapped": 66 * GIB, "in_use": 52 * GIB, "cached": 13 * GIB, "short": 0}
    sizes |= {"host": 0, "host_cached": 0}
    one = {"engine": "llama-3", "pid": 12345, "limit": 100 * GIB, "floor": 10 * GIB, "hits": 0.75}
    engines = [{**one, **sizes, "maps_s": 12.5, "waits_s": 0.0, **more}]
    uuid = "GPU-5c1f7f34-6a2b-4e8e-9d3c-1a2b3c4d5e6f"
    return {uuid: top_table.Device("NVIDIA H200", 141 * GIB, 70 * GIB, engines)}


@pytest.mark.parametrize("width", [24, 40, 60, 80, 100, 160])
def test_top_on_a_narrow_terminal(width: int) -> None:
    """On a narrow terminal, whole columns are dropped; those that remain still show each engine's
    memory."""
    text = top_table.drawn(reading(), width)
    title, heading, line = text.splitlines()
    assert max(map(len, (heading, line))) <= width
    assert title.startswith("GPU-5c1f7f34")
    assert {"llama-3", "66.0G"} <= set(line.split())
    assert ("waits/s" in heading) == (width >= 80)


def test_top_draws_the_memory() -> None:
    """The bar shows the GPU memory that is in use, cached, and otherwise mapped."""
    line = top_table.drawn(reading(mapped=70 * GIB), 160).splitlines()[2]
    bar = line.split()[-1]
    assert re.fullmatch("#+=+-+", bar)
    assert (bar.count("#"), bar.count("="), len(bar)) == (15, 3, 20)


@pytest.mark.parametrize(("more", "paint"), [({"short": GIB}, "\x1b[31m"), ({}, "\x1b[32m")])
def test_top_is_red_when_memory_is_short(more: dict[str, int], paint: str) -> None:
    line = top_table.drawn(reading(**more), 160, colour=True).splitlines()[2]
    assert paint in line
    assert ("\x1b[31m" in line) == bool(more)


@pytest.mark.parametrize("command", [["top"], ["watch", "9464"]])
@pytest.mark.parametrize("interval", ["0", "-1", "nan", "inf", "soon"])
def test_an_invalid_interval(
    command: list[str], interval: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main([*command, "--interval", interval])
    assert ended.value.code == 2
    assert f"'{interval}': expected seconds above 0" in capsys.readouterr().err
