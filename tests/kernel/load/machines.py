# SPDX-License-Identifier: MIT
"""Describes machines for the tests, using plain files."""

from __future__ import annotations

from collections.abc import Callable

from module_elf import KernelModule
from module_kbuild import find_nvidia
from module_system import System

__all__ = ["USUAL", "VERSION", "Lay", "found"]

VERSION = "535.261.03"

# A machine on which the patched module can be loaded.
USUAL = {
    "proc/sys/kernel/osrelease": "6.1.0-1-amd64\n",
    "proc/sys/kernel/modules_disabled": "0\n",
    "proc/self/status": "Name:\tpython3\nCapEff:\t000001ffffffffff\n",
    "proc/devices": "Character devices:\n  1 mem\n195 nvidia\n195 nvidiactl\n511 nvidia-uvm\n"
    "\nBlock devices:\n  8 sd\n",
    "sys/module/nvidia/version": "535.261.03\n",
    "sys/module/nvidia/refcnt": "1\n",
    "sys/module/nvidia/srcversion": "0123456789ABCDEF\n",
    "sys/module/nvidia_uvm/refcnt": "0\n",
    "sys/module/nvidia_uvm/parameters/uvm_leak_checker": "0\n",
    "sys/module/module/parameters/sig_enforce": "N\n",
    "sys/kernel/security/lockdown": "[none] integrity confidentiality\n",
}

Lay = Callable[..., System]


def found(machine: System, release: str) -> KernelModule:
    """Returns a machine's installed nvidia.ko."""
    module = find_nvidia(machine.root / "lib/modules" / release, VERSION)
    assert module is not None
    return module
