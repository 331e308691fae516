# SPDX-License-Identifier: MIT
"""Cases of loads and unloads that succeed."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

from guest_machine import Machine, process

__all__ = ["CASES"]

ROOT = Path(__file__).resolve().parents[3]


def there_and_back(machine: Machine) -> None:
    outcome = machine.load()
    outcome.expect(
        0, "the stock module is unloaded", r"patched driver 535\.[0-9.]+, ABI \d+", "loaded;"
    )
    assert machine.is_ours()
    machine.load().expect(1, "the patched module is loaded already")
    machine.unload().expect(0, "the patched module is unloaded", "the stock module is back")
    assert machine.is_stock()
    assert not Path("/run/vmem-module.json").exists()


def parameters_are_carried_over(machine: Machine) -> None:
    assert machine.parameter("uvm_perf_prefetch_threshold") == "66"
    machine.load("--arguments", "uvm_perf_prefetch_min_faults=3").expect(0)
    assert machine.parameter("uvm_perf_prefetch_threshold") == "66"
    assert machine.parameter("uvm_leak_checker") == "1"
    assert machine.parameter("uvm_perf_prefetch_min_faults") == "3"


def permissions_are_kept(machine: Machine) -> None:
    """Nodes with an outdated device number are recreated with the same owner and mode."""
    for name in ("nvidia-uvm", "nvidia-uvm-tools"):
        path = Path("/dev", name)
        machine.node(path, 240, 7, mode=0o640)
        os.chown(path, 0, 44)
    machine.load().expect(0, "made /dev/nvidia-uvm\n", "made /dev/nvidia-uvm-tools")
    assert machine.is_ours()
    for name in ("nvidia-uvm", "nvidia-uvm-tools"):
        status = os.stat(f"/dev/{name}")
        assert (status.st_mode & 0o777, status.st_gid) == (0o640, 44)


def nodes_as_those_of_the_driver(machine: Machine) -> None:
    """If UVM had no nodes, the new ones get the permissions of the driver's nodes."""
    machine.clear()
    machine.start_driver(uvm=False)
    for name in ("nvidia-uvm", "nvidia-uvm-tools"):
        Path("/dev", name).unlink(missing_ok=True)
    os.chmod("/dev/nvidiactl", 0o660)
    machine.load().expect(0)
    assert os.stat("/dev/nvidia-uvm").st_mode & 0o777 == 0o660


def there_was_no_stock_module(machine: Machine) -> None:
    """A module that was not loaded before is not loaded afterwards."""
    machine.clear()
    machine.start_driver(uvm=False)
    machine.load().expect(0)
    assert machine.is_ours()
    machine.unload().expect(0, "no stock module was loaded before; none is now")
    assert not machine.system.loaded("nvidia_uvm")


def persistence_daemon_does_not_count(machine: Machine) -> None:
    with process("sleep", "1000", stdin="/dev/nvidia0", name="nvidia-persistenced"):
        machine.load().expect(0)
        machine.unload().expect(0)


def selftest_decides_on_the_patched_module(machine: Machine) -> None:
    """The self-test runs once the module is loaded and its nodes exist."""
    test = 'sh -c "ls /sys/module/nvidia_uvm/parameters/uvm_vmem_* && test -c /dev/nvidia-uvm"'
    machine.load(selftest=test).expect(0, "/parameters/uvm_vmem_")


def selftest_of_the_project(machine: Machine) -> None:
    """`make load` runs its default self-test, which writes a report."""
    shutil.copy("/test/_vmem.abi3.so", ROOT / "pyvmem")
    report = ROOT / "build" / "selftest.json"
    report.unlink(missing_ok=True)
    outcome = machine.swap("load", "--module", str(machine.ours))
    outcome.expect(0, "self-test: .*/vmem selftest", "\npassed\n", "loaded;")
    assert machine.is_ours()
    found = json.loads(report.read_text(encoding="utf-8"))
    assert found["passed"]
    assert found["tested"]["backend"] == "uvm"


def unload_refused_in_use(machine: Machine) -> None:
    machine.load().expect(0)
    with process("sleep", "1000", stdin="/dev/nvidia-uvm") as pid:
        machine.unload().expect(1, "the GPU is in use", rf"{pid} \(sleep: /dev/nvidia-uvm\)")
        assert machine.is_ours()
    machine.unload().expect(0)


CASES = (
    there_and_back,
    parameters_are_carried_over,
    permissions_are_kept,
    nodes_as_those_of_the_driver,
    there_was_no_stock_module,
    persistence_daemon_does_not_count,
    selftest_decides_on_the_patched_module,
    selftest_of_the_project,
    unload_refused_in_use,
)
