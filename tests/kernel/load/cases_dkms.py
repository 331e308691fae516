# SPDX-License-Identifier: MIT
"""Cases that check which module modprobe loads when the DKMS package is installed."""

from __future__ import annotations

import shutil
from pathlib import Path

from edited import other_text
from guest_machine import DEBIAN_RULES, Machine
from injection import REGISTER, failing_call
from module_elf import read_module

__all__ = ["CASES"]

PACKAGE = Path(__file__).resolve().parents[3] / "kernel_module" / "dkms"
PROGRAM = Path("/usr/local/libexec/vmem/load-uvm")
RULE = Path("/etc/modprobe.d/00-nvidia-uvm-vmem.conf")
STOCK = {"VMEM_UVM": "stock"}


def install(machine: Machine, rules: str = DEBIAN_RULES, **files: str) -> None:
    """Unloads UVM, and installs the given modules and the package's files."""
    machine.run("rmmod", "nvidia_uvm").expect(0)
    named = {f"{name.replace('_', '-')}.ko": which for name, which in files.items()}
    machine.lay_out(named, rules)
    PROGRAM.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(PACKAGE / "load-uvm", PROGRAM)
    shutil.copy(PACKAGE / "modprobe.conf", RULE)


def debian(machine: Machine, ours: str) -> None:
    """Installs the package on a machine with Debian's driver package."""
    install(
        machine,
        nvidia_current_open="nvidia.ko",
        nvidia_current_open_uvm="stock.ko",
        nvidia_uvm_vmem=ours,
    )


def patched_module_is_loaded(machine: Machine) -> None:
    debian(machine, "ours.ko")
    machine.run("modprobe", "nvidia-uvm", "uvm_perf_prefetch_min_faults=3").expect(0)
    assert machine.system.uvm_is_ours()
    assert machine.parameter("uvm_perf_prefetch_threshold") == "66"
    assert machine.parameter("uvm_perf_prefetch_min_faults") == "3"


def with_the_driver_itself(machine: Machine) -> None:
    """On a freshly booted machine, `modprobe nvidia-uvm` also loads nvidia."""
    debian(machine, "ours.ko")
    machine.clear()
    machine.run("modprobe", "nvidia-uvm").expect(0)
    assert machine.system.uvm_is_ours()


def generic_names(machine: Machine) -> None:
    """NVIDIA's installer uses the modules' own names and installs no rules."""
    install(machine, rules="", nvidia="nvidia.ko", nvidia_uvm="stock.ko", nvidia_uvm_vmem="ours.ko")
    machine.run("modprobe", "nvidia-uvm").expect(0)
    assert machine.system.uvm_is_ours()
    machine.run("rmmod", "nvidia_uvm").expect(0)
    machine.run("modprobe", "nvidia-uvm", env=STOCK).expect(0)
    assert machine.system.loaded("nvidia_uvm")
    assert not machine.system.uvm_is_ours()


def stock_module_when_asked(machine: Machine) -> None:
    debian(machine, "ours.ko")
    machine.run("modprobe", "nvidia-uvm", env=STOCK).expect(0)
    assert machine.system.loaded("nvidia_uvm")
    assert not machine.system.uvm_is_ours()
    assert machine.parameter("uvm_perf_prefetch_threshold") == "66"


def unload_brings_the_stock_module(machine: Machine) -> None:
    debian(machine, "ours.ko")
    machine.run("modprobe", "nvidia-uvm").expect(0)
    machine.unload().expect(0, "the stock module is back")
    assert machine.is_stock()


def load_that_fails_brings_the_stock_module(machine: Machine) -> None:
    debian(machine, "ours.ko")
    machine.run("modprobe", "nvidia-uvm", env=STOCK).expect(0)
    machine.load(selftest="false").expect(2, "the stock module is back")
    assert machine.is_stock()


def driver_was_upgraded(machine: Machine) -> None:
    """If the patched module is for an older driver, the stock one is loaded; the log says why."""
    version = read_module(machine.ours).version
    wrong = version[:-1] + "9"
    other = other_text(machine.ours, Path("/tmp/old.ko"), f"version={version}", f"version={wrong}")
    debian(machine, str(other))
    machine.run("modprobe", "nvidia-uvm").expect(
        0,
        f"the patched nvidia-uvm is for driver {wrong}, not {version}: loading the stock module",
    )
    assert machine.system.loaded("nvidia_uvm")
    assert not machine.system.uvm_is_ours()
    assert f"vmem: the patched nvidia-uvm is for driver {wrong}" in machine.kernel_log()


def not_built_for_this_kernel(machine: Machine) -> None:
    install(machine, nvidia_current_open="nvidia.ko", nvidia_current_open_uvm="stock.ko")
    machine.run("modprobe", "nvidia-uvm").expect(0, "is installed for kernel .*: loading the stock")
    assert machine.system.loaded("nvidia_uvm")
    assert not machine.system.uvm_is_ours()


def patched_module_does_not_start(machine: Machine) -> None:
    debian(machine, "ours.ko")
    with failing_call(REGISTER):
        outcome = machine.run("modprobe", "nvidia-uvm")
    outcome.expect(0, "could not be loaded: loading the stock module")
    assert machine.system.loaded("nvidia_uvm")
    assert not machine.system.uvm_is_ours()


def uninstalled(machine: Machine) -> None:
    """Without the package's files, `modprobe nvidia-uvm` loads the stock module."""
    debian(machine, "ours.ko")
    RULE.unlink()
    PROGRAM.unlink()
    (machine.modules / "nvidia-uvm-vmem.ko").unlink()
    machine.run("depmod", "-a", machine.release).expect(0)
    machine.run("modprobe", "nvidia-uvm").expect(0)
    assert machine.system.loaded("nvidia_uvm")
    assert not machine.system.uvm_is_ours()


CASES = (
    patched_module_is_loaded,
    with_the_driver_itself,
    generic_names,
    stock_module_when_asked,
    unload_brings_the_stock_module,
    load_that_fails_brings_the_stock_module,
    driver_was_upgraded,
    not_built_for_this_kernel,
    patched_module_does_not_start,
    uninstalled,
)
