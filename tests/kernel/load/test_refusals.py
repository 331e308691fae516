# SPDX-License-Identifier: MIT
"""Tests each reason for refusing a load on a machine with nothing else wrong."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import replace
from pathlib import Path

import module_load
import module_refuse
import pytest
from driver_patches import PATCHES
from kernel_common import ROOT
from machines import Lay
from module_elf import Export, KernelModule
from module_refuse import ALLOWABLE, kernel_series, load_refusals, unload_refusals
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


@pytest.fixture(autouse=True)
def tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fixed table of tested combinations, independent of the real one."""
    table = {"6.1": {"535.261.03": "one.json", "580.142": "two.json"}}
    monkeypatch.setattr(module_refuse, "tried_table", lambda: table)


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
        ({"proc/sys/kernel/modules_disabled": "1\n"}, "accepts no modules until a restart"),
        ({"proc/sys/kernel/osrelease": "6.1.0-2-amd64\n"}, "6.1.0-2-amd64 is running"),
        (NO_DRIVER, "nvidia.ko is not loaded"),
        ({"sys/module/nvidia/version": "550.163.01\n"}, "535.261.03; 550.163.01 is loaded"),
        ({"sys/module/module/parameters/sig_enforce": "Y\n"}, "accepts only signed modules"),
        ({"sys/kernel/security/lockdown": LOCKED}, "locked down (integrity)"),
        ({"sys/module/nvidia_uvm/parameters/uvm_vmem_limit": "0\n"}, "loaded already"),
        (
            {"sys/module/nvidia_uvm/refcnt": "2\n"},
            "counts 2 uses of nvidia-uvm that are not visible",
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
        (OURS, None, "cannot check that the module matches it"),
        (
            OURS,
            replace(NVIDIA, info={**NVIDIA.info, "license": ["NVIDIA"]}),
            "is of NVIDIA's proprietary flavour: .*GPL-only",
        ),
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
    assert re.search(reason, only)


def test_a_kernel_without_symbol_versions(lay: Lay) -> None:
    bare = replace(NVIDIA, exports={name: Export(None, False) for name in NVIDIA.exports})
    module = replace(OURS, imports=dict.fromkeys(OURS.imports))
    (only,) = load_refusals(lay(), module, bare)
    assert "nvidia.ko has no symbol versions" in only
    assert only.endswith("; ALLOW=symbols overrides this")
    assert load_refusals(lay(), module, bare, {"symbols"}) == []


def test_a_symbol_that_is_missing_or_differs_cannot_be_allowed(lay: Lay) -> None:
    for imports in ({"nvUvmInterfaceC": 1}, {"nvUvmInterfaceB": 7}):
        module = replace(OURS, imports={**OURS.imports, **imports})
        assert len(load_refusals(lay(), module, NVIDIA, ALLOWABLE)) == 1


def test_a_missing_version_beside_a_differing_one(lay: Lay) -> None:
    module = replace(OURS, imports={**OURS.imports, "nvUvmInterfaceA": None, "nvUvmInterfaceB": 7})
    (only,) = load_refusals(lay(), module, NVIDIA, ALLOWABLE)
    assert "1 of 2 symbol versions differ" in only


OTHER_KERNEL = "6.8.0-45-generic"


@pytest.mark.parametrize(
    ("release", "version", "word", "reason"),
    [
        (OTHER_KERNEL, "535.261.03", "kernel", f"never run on a kernel like {OTHER_KERNEL}, only"),
        ("6.10.1", "535.261.03", "kernel", "never run on a kernel like 6.10.1, only on Linux 6.1"),
        ("6.1.0-1-amd64", "535.998.01", "driver", "535.998.01 is not listed in patches/series"),
        ("6.1.0-1-amd64", "999.10", "driver", "driver 999.10 is not listed in patches/series.json"),
        ("6.1.0-1-amd64", "", "driver", "driver  is not listed"),
        ("6.1.0-1-amd64", "545.29.06", "driver", "no version of branch 545 was ever run"),
    ],
)
def test_never_tried(lay: Lay, release: str, version: str, word: str, reason: str) -> None:
    magic = VERMAGIC.replace("6.1.0-1-amd64", release)
    changed = {"version": [version], "vermagic": [magic]}
    module, nvidia = (replace(one, info={**one.info, **changed}) for one in (OURS, NVIDIA))
    machine = lay(
        {"proc/sys/kernel/osrelease": f"{release}\n", "sys/module/nvidia/version": f"{version}\n"}
    )
    (only,) = load_refusals(machine, module, nvidia)
    assert reason in only
    assert only.endswith(f"; ALLOW={word} overrides this")
    assert load_refusals(machine, module, nvidia, {word}) == []
    assert load_refusals(machine, module, nvidia, set(ALLOWABLE) - {word}) == [only]


def test_another_version_of_a_branch_that_ran(lay: Lay) -> None:
    """580.95.05 is in series.json, and 580.142, another version of its branch, was tested."""
    version = {"version": ["580.95.05"]}
    module, nvidia = (replace(one, info={**one.info, **version}) for one in (OURS, NVIDIA))
    machine = lay({"sys/module/nvidia/version": "580.95.05\n"})
    assert load_refusals(machine, module, nvidia) == []


def test_both_are_told(lay: Lay) -> None:
    changed = {"version": ["560.35.03"], "vermagic": [VERMAGIC.replace("6.1.0-1", "99.1.1")]}
    module, nvidia = (replace(one, info={**one.info, **changed}) for one in (OURS, NVIDIA))
    machine = lay(
        {
            "proc/sys/kernel/osrelease": "99.1.1-amd64\n",
            "sys/module/nvidia/version": "560.35.03\n",
        }
    )
    driver, kernel = load_refusals(machine, module, nvidia)
    assert "branch 560" in driver
    assert "99.1.1-amd64" in kernel
    assert load_refusals(machine, module, nvidia, {"kernel"}) == [driver]


@pytest.mark.parametrize("words", ["everything", "kernel,signature", "kernel symbols drivers"])
def test_what_cannot_be_allowed(
    words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["module_load.py", "load", "--allow", words])
    with pytest.raises(SystemExit, match="2"):
        module_load.main()
    wrong = next(w for w in words.replace(",", " ").split() if w not in ALLOWABLE)
    assert f"ALLOW must be one of driver, kernel, symbols, not {wrong}" in capsys.readouterr().err


def test_the_table_names_its_evidence() -> None:
    """Each record in the table is for its driver and kernel series, and contains no failures."""
    table = json.loads((PATCHES / "kernels.json").read_text(encoding="utf-8"))
    assert "535.261.03" in table["6.1"]
    for series, drivers in table.items():
        for version, name in drivers.items():
            record = json.loads((ROOT / name).read_text(encoding="utf-8"))
            assert record["sources"]["driver"] == version
            assert kernel_series(record["sources"]["kernel"]) == series
            assert {test["result"] for test in record["tests"]} <= {"ok", "skip"}


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
