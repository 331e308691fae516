# SPDX-License-Identifier: MIT
"""On the host back end, any read of rows without pages raises `NotMapped`.

Each read runs in its own process, because the process crashes if the guard fails.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

FORKED = multiprocessing.get_context("forkserver")
FORKED.set_forkserver_preload(["torch", "pyvmem", __name__])

START = """
import copy, ctypes, faulthandler, gc, io, os, pickle, signal, sys, threading
import torch
import pyvmem
from pyvmem import KVCache, KVCacheConfig, NotMapped

def started(**more):
    config = KVCacheConfig(2, 2, 64, "float32", 4, 4096, **more)
    cache = KVCache(config, backend="host")
    slot = cache.alloc_reqid()
    assert cache.step([100 if each == slot else 0 for each in range(4)]) == 0
    for each in range(2):
        cache.k(each)[slot, :100] = 1
    return cache, slot, cache.k(0)

def refused(read):
    for _ in range(3):  # a hole that was read is one again
        try:
            read()
            abs(0)  # Python raises at calls and at the ends of loops, so not for an operator alone
        except NotMapped as error:
            text = str(error)
            assert "element [" in text and "cache.k(layer)[slot, :length]" in text, text
        else:
            raise SystemExit("no exception")
"""


def run(program: str, *python: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs a program in a new interpreter with these options and environment variables."""
    return subprocess.run(
        [sys.executable, *python, "-c", START + program],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)} | environment,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )


def _execute(program: str, output: str, errors: str) -> None:
    for target, path in ((1, output), (2, errors)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), target)
    exec(compile(START + program, "<string>", "exec"), {"__name__": "__main__"})


class Fork:
    """Runs programs in forks of a process that has imported their modules."""

    def __init__(self, folder: Path) -> None:
        self.output, self.errors = folder / "output", folder / "errors"

    def run(self, program: str) -> subprocess.CompletedProcess[str]:
        """Runs a program like the function `run`, but in a forked process and without options."""
        arguments = (program, str(self.output), str(self.errors))
        child = FORKED.Process(target=_execute, args=arguments)
        child.start()
        child.join(200)
        if child.exitcode is None:
            child.kill()
            pytest.fail("still running after 200 s")
        texts = [path.read_text("utf-8") for path in (self.output, self.errors)]
        return subprocess.CompletedProcess(program, child.exitcode, *texts)

    def passes(self, program: str) -> None:
        """Checks that a program ends without an error."""
        _check(self.run(program + "\nprint('end', flush=True)"))


@pytest.fixture
def fork(tmp_path: Path) -> Fork:
    """Returns a `Fork` whose programs write their output to `tmp_path`."""
    return Fork(tmp_path)


def _check(done: subprocess.CompletedProcess[str]) -> None:
    assert (done.returncode, done.stdout) == (0, "end\n"), done.stderr
    assert not done.stderr


def passes(program: str, *python: str) -> None:
    """Checks that a program ends without an error in a new interpreter with these options."""
    _check(run(program + "\nprint('end')", *python))


READS = {
    "print": "print(k, file=sys.stderr)",
    "repr of an element": "repr(k[slot, 2000, 0, 0])",
    "format": "f'{k}'",
    "str of a view": "str(k[:, 1000:1002])",
    "clone": "k[slot].clone()",
    "contiguous": "k[slot, :, 0].contiguous()",
    "isnan": "k[slot].isnan().any()",
    "comparison": "(k[slot] == 0).all()",
    "equal": "k[slot, 200:].equal(torch.zeros_like(k[slot, 200:]))",
    "deepcopy": "copy.deepcopy(k[slot])",
    "pickle of rows that have pages": "pickle.dumps(k[slot, :100])",
    "torch.save": "torch.save(k[slot, :100], io.BytesIO())",
    "item": "k[slot, 4095, 0, 0].item()",
    "bool": "bool(k[slot, 4095, 0, 0])",
    "tolist": "k[slot, 4095].tolist()",
    "iteration": "[float(x) for x in k[slot, 4095, 0]]",
    "sum": "k[slot].sum()",
    "matmul": "k[slot, :, 0] @ torch.ones(64)",
    "cat": "torch.cat([k[slot], k[slot]])",
    "to": "k[slot].to(torch.float64)",
    "gather": "k[slot][torch.tensor([1, 4000])]",
    "bytes": "bytes(memory[-10:])",
}


def test_reads() -> None:
    """Forks a child for each read, so that modules are loaded only once."""
    done = run(
        f"""
for name, read in {READS!r}.items():
    child = os.fork()
    if not child:
        cache, slot, k = started()
        memory = cache.reservation.buffer()
        refused(lambda: eval(read))
        assert k[slot, :100].sum() == 100 * 2 * 64  # memory is unchanged
        cache.step([904 if each == slot else 0 for each in range(4)])
        k[slot, 100:904] = 2
        assert k[slot, :904].sum() == (100 + 2 * 804) * 2 * 64
        cache.check_integrity()
        os._exit(0)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), name)
"""
    )
    assert done.stdout.splitlines() == [f"0 {name}" for name in READS], done.stderr


def test_numpy(fork: Fork) -> None:
    pytest.importorskip("numpy")
    fork.passes(
        """
cache, slot, k = started()
rows = k.numpy()
refused(lambda: rows[slot].copy())
refused(lambda: repr(rows))
refused(lambda: rows.tobytes())
assert rows[slot, :100].sum() == 12800
"""
    )


def test_threads_of_torch(fork: Fork) -> None:
    fork.passes(
        """
torch.set_num_threads(4)
cache, slot, k = started()
for _ in range(20):
    refused(lambda: k.isnan())
    refused(lambda: k[1:] + 1)
"""
    )


def test_an_exception_is_raised_in_the_thread_that_reads(fork: Fork) -> None:
    """The thread that reads the row gets the exception; the main thread never does."""
    fork.passes(
        """
cache, slot, k = started()
caught, over = [], threading.Event()

def reader():
    for _ in range(50):
        try:
            k[slot, 4000].sum()
            while True:  # told at a bytecode soon after the read
                pass
        except NotMapped as error:
            caught.append(error)
    over.set()

threading.Thread(target=reader).start()
while not over.is_set():
    sum(range(1000))
assert len(caught) == 50
pickle.loads(pickle.dumps(caught[0]))
assert "element [0, 4000" in str(caught[0]) and type(caught[0]) is NotMapped, caught[0]
"""
    )


def test_a_read_by_a_finished_thread_is_logged(fork: Fork) -> None:
    done = fork.run(
        """
import logging
logging.basicConfig()
cache, slot, k = started()
thread = threading.Thread(target=k[slot, 4000].sum)
thread.start()
thread.join()
print("end")
"""
    )
    assert (done.returncode, done.stdout) == (0, "end\n"), done.stderr
    assert "a thread that has ended: a read of 0x" in done.stderr


def test_many_caches(fork: Fork) -> None:
    fork.passes(
        """
caches = [started() for _ in range(20)]
cache = slot = k = None
for one in caches:
    refused(lambda: one[2].sum())
for number in range(0, 20, 2):
    cache = caches[number][0]
    one = caches[number] = None
    gc.collect()
    cache.close()
for one in caches[1::2]:
    refused(lambda: one[2].sum())
"""
    )


def test_a_child_has_its_own_guard(fork: Fork) -> None:
    fork.passes(
        """
torch.set_num_threads(1)  # a child has none of them
cache, slot, k = started()
refused(lambda: k.sum())
if not os.fork():
    other, slot, rows = started()
    refused(lambda: rows.sum())
    os._exit(7)
assert os.waitstatus_to_exitcode(os.wait()[1]) == 7
refused(lambda: k.sum())
"""
    )


@pytest.mark.parametrize("when", ["before", "after", "at the start", "both"])
def test_faulthandler(when: str) -> None:
    before = "faulthandler.enable()" if when in ("before", "both") else ""
    after = "faulthandler.enable()" if when in ("after", "both") else ""
    program = f"{before}\ncache, slot, k = started()\n{after}\n"
    program += (
        "cache.step([1000 if each == slot else 0 for each in range(4)])\nk = k[slot, 4000:]\n"
    )
    options = ("-X", "faulthandler") if when == "at the start" else ()
    passes(program + "refused(lambda: k.sum())", *options)
    done = run(program + "refused(lambda: k.sum())\nctypes.string_at(8)", *options)
    assert done.returncode == -signal.SIGSEGV
    assert done.stderr.count("Fatal Python error: Segmentation fault") == 1, done.stderr


CRASHES = {
    "another address": "ctypes.string_at(8)",
    "raise": "signal.raise_signal(signal.SIGSEGV)",
    "kill": "os.kill(os.getpid(), signal.SIGSEGV)",
    "write to a hole": "k[slot, 4000] = 1",
    "fill": "k.zero_()",
    "write to a shared row": "child = cache.fork(slot); k[child, 0] = 1",
    "closed cache": "at = k.data_ptr(); del k; gc.collect(); cache.close(); ctypes.string_at(at)",
}


@pytest.mark.parametrize("crash", CRASHES.values(), ids=CRASHES)
def test_other_faults_crash_the_process(fork: Fork, crash: str) -> None:
    done = fork.run(f"cache, slot, k = started(page_size=4096)\nrefused(lambda: k.sum())\n{crash}")
    assert done.returncode == -signal.SIGSEGV, (done.stdout, done.stderr)
    wanted = {
        "k[slot, 4000] = 1": "a write to a row that has no page",
        "k.zero_()": "a write to a row that has no page",
        CRASHES["write to a shared row"]: "a write to a read-only page",
    }
    assert wanted.get(crash, "") in done.stderr
    assert bool(done.stderr) == (crash in wanted), done.stderr


def test_the_variable_disables_the_guard() -> None:
    done = run("cache, slot, k = started()\nk.sum()", VMEM_HOLES="fault")
    assert (done.returncode, done.stderr) == (-signal.SIGSEGV, "")


def test_the_exception_is_not_lost_in_a_finalizer() -> None:
    """The call that reads also drops the last reference to a tensor, which runs finalizers."""
    passes(
        """
class Noisy:
    def __del__(self):
        abs(0)

def reading():
    cache, slot, k = started()
    noisy = Noisy()
    return k[slot, 4000].sum(), noisy

refused(lambda: reading()[0].item())
refused(lambda: str(reading()))
"""
    )


def test_sparse_rows_are_zeros(fork: Fork) -> None:
    fork.passes("cache, slot, k = started(sparse=True)\nassert k.sum() == 12800")
