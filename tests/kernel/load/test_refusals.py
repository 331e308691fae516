# SPDX-License-Identifier: MIT
"""Each thing that speaks against a load, alone wrong on a machine that is right otherwise."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from machines import Lay
from module_elf import Export, KernelModule
from module_refuse import load_refusals, unload_refusals
from module_system import SECURE_BOOT

VERMAGIC = "6.1.0-1-amd64 SMP preempt mod_unload modversions "
NVIDIA = KernelModule(
    path=Path("/lib/modules/6.1.0-1-amd64/updates/dkms/nvidia.ko"),
    info={"name": ["nvidia"], "version": ["535.261.03"], "vermagic": [VERMAGIC]},
    exports={"nvUvmInterfaceA": Export(1, False), "nvUvmInterfaceB": Export(2, False)},
)
OURS = KernelModule(
    path=Path("/ours.ko"),
    info={
        "name": ["nvidia_uvm"],
        "version": ["535.261.03"],
        "vermagic": [VERMAGIC],
        "parmtype": ["uvm_vmem_limit:uint"],
    },
    imports={"nvUvmInterfaceA": 1, "nvUvmInterfaceB": 2, "printk": 3},
)
NO_UVM = {
    "sys/module/nvidia_uvm/refcnt": None,
    "sys/module/nvidia_uvm/parameters/uvm_leak_checker": None,
}
NO_DRIVER = {**NO_UVM, "sys/module/nvidia/refcnt": None, "sys/module/nvidia/version": None}
LOCKED = "none [integrity] confidentiality\n"
BOOT_ON = b"\x06\0\0\0\x01"


def with_info(**fields: str) -> KernelModule:
    return replace(OURS, info={**OURS.info, **{key: [value] for key, value in fields.items()}})


def test_nothing_speaks_against_it(lay: Lay) -> None:
    assert load_refusals(lay(), OURS, NVIDIA) == []
    assert load_refusals(lay(NO_UVM), OURS, NVIDIA) == []


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"proc/self/status": "CapEff:\t00000000a80425fb\n"}, "only root may load modules"),
        ({"proc/self/status": "CapEff:\t0000000000000000\n"}, "only root may load modules"),
        ({"proc/sys/kernel/modules_disabled": "1\n"}, "takes no modules until it is restarted"),
        ({"proc/sys/kernel/osrelease": "6.1.0-2-amd64\n"}, "6.1.0-2-amd64 is running"),
        (NO_DRIVER, "nvidia.ko is not loaded"),
        ({"sys/module/nvidia/version": "550.163.01\n"}, "535.261.03; 550.163.01 is loaded"),
        ({"sys/module/module/parameters/sig_enforce": "Y\n"}, "signed modules only"),
        ({"sys/kernel/security/lockdown": LOCKED}, "locked down (integrity)"),
        ({"sys/module/nvidia_uvm/parameters/uvm_vmem_limit": "0\n"}, "loaded already"),
        (
            {"sys/module/nvidia_uvm/refcnt": "2\n"},
            "counts 2 uses of nvidia-uvm by what cannot be seen",
        ),
        ({"sys/module/nvidia_uvm/holders/other/x": ""}, "are built on nvidia-uvm: other"),
    ],
)
def test_machine(lay: Lay, changes: dict[str, str | bytes | None], reason: str) -> None:
    (only,) = load_refusals(lay(changes), OURS, NVIDIA)
    assert reason in only


def test_secure_boot_is_named(lay: Lay) -> None:
    machine = lay({SECURE_BOOT: BOOT_ON, "sys/kernel/security/lockdown": LOCKED})
    (only,) = load_refusals(machine, OURS, NVIDIA)
    assert "because of Secure Boot: the kernel is locked down" in only


def test_secure_boot_without_lockdown_is_no_reason(lay: Lay) -> None:
    assert load_refusals(lay({SECURE_BOOT: BOOT_ON}), OURS, NVIDIA) == []


def test_secure_boot_where_lockdown_cannot_be_read(lay: Lay) -> None:
    machine = lay({SECURE_BOOT: BOOT_ON, "sys/kernel/security/lockdown": None})
    (only,) = load_refusals(machine, OURS, NVIDIA)
    assert "whether the kernel is locked down cannot be read" in only


def test_a_signed_module_is_left_to_the_kernel(lay: Lay) -> None:
    machine = lay({SECURE_BOOT: BOOT_ON, "sys/kernel/security/lockdown": LOCKED})
    assert load_refusals(machine, replace(OURS, signed=True), NVIDIA) == []


@pytest.mark.parametrize(
    ("module", "nvidia", "reason"),
    [
        (with_info(parmtype="uvm_leak_checker:int"), NVIDIA, "is not the patched module"),
        (with_info(version="535.261.04"), NVIDIA, "535.261.04; 535.261.03 is loaded"),
        (with_info(vermagic="6.1.0-1-amd64 SMP mod_unload "), NVIDIA, "the module was built as"),
        (OURS, None, "whether the module fits it cannot be known"),
        (
            replace(OURS, imports={**OURS.imports, "nvUvmInterfaceC": 1}),
            NVIDIA,
            "nvidia.ko does not have nvUvmInterfaceC",
        ),
        (
            replace(OURS, imports={**OURS.imports, "nvUvmInterfaceB": None}),
            NVIDIA,
            "built without the symbol versions",
        ),
        (
            replace(OURS, imports={**OURS.imports, "nvUvmInterfaceB": 7}),
            NVIDIA,
            "1 of 2 symbol versions differ",
        ),
    ],
)
def test_module(lay: Lay, module: KernelModule, nvidia: KernelModule | None, reason: str) -> None:
    (only,) = load_refusals(lay(), module, nvidia)
    assert reason in only


def test_a_kernel_without_symbol_versions(lay: Lay) -> None:
    bare = {name: Export(None, False) for name in NVIDIA.exports}
    module = replace(OURS, imports=dict.fromkeys(OURS.imports))
    assert load_refusals(lay(), module, replace(NVIDIA, exports=bare)) == []


def user(root: Path, pid: int, command: str, target: str) -> None:
    folder = root / "proc" / str(pid)
    (folder / "fd").mkdir(parents=True)
    (folder / "cmdline").write_bytes(command.encode() + b"\0--option\0")
    (folder / "fd" / "3").symlink_to(target)


@pytest.mark.parametrize(
    "target", ["/dev/nvidia0", "/dev/nvidia15", "/dev/nvidiactl", "/dev/nvidia-uvm"]
)
def test_in_use(lay: Lay, target: str) -> None:
    machine = lay()
    user(machine.root, 4242, "/usr/bin/python3", target)
    (only,) = load_refusals(machine, OURS, NVIDIA)
    assert f"4242 (python3: {target})" in only


@pytest.mark.parametrize(
    ("command", "target"),
    [
        ("/usr/bin/nvidia-persistenced", "/dev/nvidia0"),
        ("/usr/bin/nv-fabricmanager", "/dev/nvidiactl"),
        ("/usr/bin/python3", "/dev/nvidia-modeset"),
        ("/usr/bin/python3", "/dev/null"),
        ("/usr/bin/python3", "/home/dev/nvidia0"),
    ],
)
def test_not_in_use(lay: Lay, command: str, target: str) -> None:
    machine = lay()
    user(machine.root, 4242, command, target)
    assert load_refusals(machine, OURS, NVIDIA) == []


def test_a_service_that_has_opened_uvm(lay: Lay) -> None:
    machine = lay()
    user(machine.root, 4242, "/usr/bin/nvidia-persistenced", "/dev/nvidia-uvm")
    (only,) = load_refusals(machine, OURS, NVIDIA)
    assert "4242 (nvidia-persistenced: /dev/nvidia-uvm)" in only


def test_all_reasons_are_told_at_once(lay: Lay) -> None:
    machine = lay(
        {
            "sys/module/nvidia/version": "550.163.01\n",
            "sys/module/module/parameters/sig_enforce": "Y",
        }
    )
    user(machine.root, 4242, "python3", "/dev/nvidia0")
    assert len(load_refusals(machine, OURS, NVIDIA)) == 3


def test_unload(lay: Lay) -> None:
    ours = {"sys/module/nvidia_uvm/parameters/uvm_vmem_limit": "0\n"}
    assert unload_refusals(lay(ours)) == []
    (only,) = unload_refusals(lay({**ours, "sys/module/nvidia_uvm/refcnt": "1\n"}))
    assert "counts 1 uses of nvidia-uvm" in only


def test_unload_of_the_stock_module(lay: Lay) -> None:
    (only,) = unload_refusals(lay())
    assert "is the stock module" in only


def test_unload_of_nothing(lay: Lay) -> None:
    (only,) = unload_refusals(lay(NO_UVM))
    assert only == "nvidia-uvm is not loaded"
    assert unload_refusals(lay(NO_UVM), unfinished=True) == []


def test_version_in_proc_alone(lay: Lay) -> None:
    text = (
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  535.261.03  Release Build  (x)\n"
        "GCC version:  gcc version 12.2.0 (Debian 12.2.0-14)\n"
    )
    machine = lay({"sys/module/nvidia/version": None, "proc/driver/nvidia/version": text})
    assert machine.driver_version() == "535.261.03"
