# SPDX-License-Identifier: MIT
"""Loads that fail halfway: the previous module is restored, or a message says that it is not."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

from guest_machine import Machine
from injection import REGISTER, failing_call

__all__ = ["CASES"]

TOOLS = Path("/tmp/tools")


def with_tool(name: str, script: str) -> Callable[[], None]:
    """Returns a function that makes the program under test run a script in place of a kmod tool."""
    TOOLS.mkdir(exist_ok=True)
    for old in TOOLS.iterdir():
        old.unlink()
    path = TOOLS / name
    path.write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
    path.chmod(0o755)

    def before() -> None:
        os.environ["PATH"] = f"{TOOLS}:{os.environ['PATH']}"

    return before


def restored(machine: Machine) -> None:
    """Checks that the stock module is loaded, and that no cleanup is pending."""
    assert machine.is_stock()
    assert not Path("/run/vmem-module.json").exists()
    machine.unload().expect(1, "the loaded nvidia-uvm is the stock module")


def selftest_fails(machine: Machine) -> None:
    machine.load(selftest="sh -c 'exit 7'").expect(
        2, r"the self-test failed \(exit status 7\)", "the stock module is back"
    )
    restored(machine)


def selftest_fails_where_no_stock_module_was(machine: Machine) -> None:
    machine.clear()
    machine.start_driver(uvm=False)
    machine.load(selftest="false").expect(2, "the self-test failed")
    assert not machine.system.loaded("nvidia_uvm")


def selftest_is_missing(machine: Machine) -> None:
    machine.load(selftest="/no/such/program").expect(2, "the self-test cannot be run")
    restored(machine)


def selftest_hangs(machine: Machine) -> None:
    test = "sh -c 'sleep 1000 </dev/nvidia-uvm'"
    outcome = machine.load("--selftest-seconds", "2", selftest=test)
    outcome.expect(2, "the self-test did not finish in 2 s")
    restored(machine)


def selftest_leaves_a_process(machine: Machine) -> None:
    """Processes that still hold the module after the self-test are killed too."""
    test = "sh -c 'sleep 1000 </dev/nvidia-uvm & exit 1'"
    machine.load(selftest=test).expect(2, "the self-test failed")
    restored(machine)


def parameter_is_wrong(machine: Machine) -> None:
    outcome = machine.load("--arguments", "uvm_leak_checker=no-number")
    outcome.expect(2, "insmod .*: .*Invalid parameters", "the stock module is back")
    restored(machine)


def module_does_not_start(machine: Machine) -> None:
    """The module's init function fails, so the kernel removes the module again."""
    with failing_call(REGISTER):
        outcome = machine.load()
    outcome.expect(2, "insmod .*could not insert module", "the stock module is back")
    restored(machine)


def node_cannot_be_made(machine: Machine) -> None:
    """A directory occupies the device node's path."""
    for name in ("nvidia-uvm", "nvidia-uvm-tools"):
        Path("/dev", name).unlink()
    Path("/dev/nvidia-uvm").mkdir()
    try:
        outcome = machine.load()
        outcome.expect(3, "the stock module could not be loaded again")
    finally:
        Path("/dev/nvidia-uvm").rmdir()
    # The module itself is loaded; only its nodes are missing.
    assert machine.system.loaded("nvidia_uvm")
    assert not machine.system.uvm_is_ours()


def another_module_was_loaded_in_between(machine: Machine) -> None:
    """A program that starts CUDA loads the stock module between unload and load."""
    script = "case $1 in /load/*) [ -d /sys/module/nvidia_uvm ] || modprobe nvidia-uvm;; esac\n"
    outcome = machine.swap(
        *("load", "--module", str(machine.ours), "--selftest", "true"),
        before=with_tool("insmod", f'{script}exec /usr/sbin/insmod "$@"'),
    )
    outcome.expect(2, "insmod .*File exists")
    restored(machine)


def ended_by_a_signal(machine: Machine) -> None:
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        marker = Path("/tmp/in-selftest")
        marker.unlink(missing_ok=True)
        test = f"sh -c 'touch {marker}; sleep 1000 </dev/nvidia-uvm'"
        words = ("load", "--module", str(machine.ours), "--selftest", test)
        running = machine.start_swap(*words)
        wait_for(marker)
        running.kill(number)
        running.wait().expect(2, f"stopped by {number.name}", "the stock module is back")
        restored(machine)


def killed_in_the_selftest(machine: Machine) -> None:
    """A killed load cannot undo its changes, but a later unload does."""
    marker = Path("/tmp/in-selftest")
    marker.unlink(missing_ok=True)
    test = f"sh -c 'touch {marker}; exec sleep 3'"
    running = machine.start_swap("load", "--module", str(machine.ours), "--selftest", test)
    wait_for(marker)
    running.kill()
    running.wait()
    assert machine.is_ours()
    machine.unload().expect(0, "the stock module is back")
    restored(machine)


def killed_between_the_modules(machine: Machine) -> None:
    """A load is killed after unloading the stock module; unload or a failing load restores it."""
    script = '[ -d /sys/module/nvidia_uvm ] && exec /usr/sbin/insmod "$@"; kill -9 $PPID; exit 1'
    for undo in (machine.unload, lambda: machine.load(selftest="false")):
        words = ("load", "--module", str(machine.ours), "--selftest", "true")
        killed = machine.swap(*words, before=with_tool("insmod", script))
        assert killed.status == -signal.SIGKILL, killed
        assert not machine.system.loaded("nvidia_uvm")
        assert undo().status in (0, 2)
        restored(machine)


def stock_module_does_not_come_back(machine: Machine) -> None:
    script = '[ "$1" = --showconfig ] && exec /usr/sbin/modprobe "$@"; echo no luck; exit 1'
    outcome = machine.swap(
        *("load", "--module", str(machine.ours), "--selftest", "false"),
        before=with_tool("modprobe", script),
    )
    outcome.expect(
        3, "the stock module could not be loaded again: .*no luck", "modprobe nvidia-uvm"
    )
    assert not machine.system.loaded("nvidia_uvm")
    machine.unload().expect(0, "the stock module is back")
    restored(machine)


def wait_for(path: Path) -> None:
    """Waits until a file exists."""
    deadline = time.monotonic() + 120
    while not path.exists():
        assert time.monotonic() < deadline, f"no {path}"
        time.sleep(0.05)


CASES = (
    selftest_fails,
    selftest_fails_where_no_stock_module_was,
    selftest_is_missing,
    selftest_hangs,
    selftest_leaves_a_process,
    parameter_is_wrong,
    module_does_not_start,
    node_cannot_be_made,
    another_module_was_loaded_in_between,
    ended_by_a_signal,
    killed_in_the_selftest,
    killed_between_the_modules,
    stock_module_does_not_come_back,
)
