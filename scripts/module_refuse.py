# SPDX-License-Identifier: MIT
"""Finds reasons to refuse a swap of nvidia-uvm, before anything is changed."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Collection
from dataclasses import dataclass

from driver_patches import PATCHES, series_table
from kernel_common import branch_of, is_version
from module_elf import KernelModule
from module_kbuild import flavour_refusal
from module_system import UVM, System

__all__ = [
    "ALLOWABLE",
    "PREFIX",
    "Doubt",
    "doubts",
    "in_use",
    "kernel_series",
    "load_refusals",
    "tried_table",
    "unload_refusals",
]

# Prefix of the parameters that the patches add. It identifies the patched module.
PREFIX = "uvm_vmem_"
# Names of the reasons that the user may override.
ALLOWABLE = ("driver", "kernel", "symbols")


@dataclass(frozen=True)
class Doubt:
    """A reason to hesitate: an untested or unverifiable combination, not a known fault."""

    word: str  # one of ALLOWABLE
    text: str

    def __str__(self) -> str:
        return f"{self.text}; ALLOW={self.word} overrides this"


@functools.cache
def tried_table() -> dict[str, dict[str, str]]:
    """Reads patches/kernels.json: for each kernel series, the tested drivers with their records."""
    table: dict[str, dict[str, str]]
    table = json.loads((PATCHES / "kernels.json").read_text(encoding="utf-8"))
    return table


def kernel_series(release: str) -> str:
    """Returns the series that a kernel's release belongs to: 6.1 for 6.1.0-50-cloud-amd64."""
    found = re.match(r"\d+\.\d+", release)
    return found.group() if found else release


def not_allowed(system: System) -> list[str]:
    """Returns reasons why this process cannot change kernel modules at all."""
    if not system.may_load():
        return [
            "only root may load modules (CAP_SYS_MODULE, which root in a container usually lacks)"
        ]
    if system.modules_disabled():
        return ["the kernel accepts no modules until a restart (kernel.modules_disabled = 1)"]
    return []


def in_use(system: System) -> list[str]:
    """Reports the users of a GPU or of UVM."""
    users = system.device_users()
    if users:
        shown = "".join(f"\n    {user}" for user in users)
        return [f"the GPU is in use; end these processes first:{shown}"]
    if not system.loaded(UVM):
        return []
    holders = system.uvm_holders()
    if holders:
        return [f"other modules are built on nvidia-uvm: {', '.join(holders)}"]
    count = system.uvm_references()
    if count:
        return [
            f"the kernel counts {count} uses of nvidia-uvm that are not visible from here "
            "(processes outside this container?); end them first"
        ]
    return []


def wrong_kernel(system: System, module: KernelModule) -> list[str]:
    """Checks that the module was built for the running kernel."""
    if module.release == system.release():
        return []
    return [f"the module is for kernel {module.release}; {system.release()} is running"]


def wrong_driver(system: System, module: KernelModule, nvidia: KernelModule | None) -> list[str]:
    """Checks that the module matches the loaded nvidia.ko."""
    loaded = system.driver_version()
    if not system.loaded("nvidia"):
        return ["nvidia.ko is not loaded: start the stock driver first (modprobe nvidia)"]
    if module.version != loaded:
        return [f"the module is for driver {module.version}; {loaded or 'another'} is loaded"]
    if nvidia is None:
        return [
            f"the file of the loaded nvidia.ko ({loaded}) is not in /lib/modules/"
            f"{system.release()}: cannot check that the module matches it"
        ]
    refusal = flavour_refusal(nvidia)
    return [refusal] if refusal else wrong_symbols(module, nvidia)


def versioned(nvidia: KernelModule) -> bool:
    """True if the kernel that nvidia.ko was built for has symbol versions."""
    return any(export.crc is not None for export in nvidia.exports.values())


def wrong_symbols(module: KernelModule, nvidia: KernelModule) -> list[str]:
    """Checks the symbols that the module requires, and their versions, against nvidia.ko."""
    if module.first("vermagic") != nvidia.first("vermagic"):
        return [
            f'the module was built as "{module.first("vermagic")}", nvidia.ko as '
            f'"{nvidia.first("vermagic")}"'
        ]
    wanted = [name for name in module.imports if name.startswith("nvUvmInterface")]
    missing = [name for name in wanted if name not in nvidia.exports]
    if missing:
        return [f"{nvidia.path} does not have {', '.join(missing[:3])}"]
    demanded = {name: module.imports[name] for name in wanted} if versioned(nvidia) else {}
    differing = [
        name for name, crc in demanded.items() if crc not in (None, nvidia.exports[name].crc)
    ]
    if differing:
        return [
            f"the module was linked against another nvidia.ko: {len(differing)} of {len(wanted)} "
            f"symbol versions differ from {nvidia.path}'s (first {differing[0]}); make module again"
        ]
    return []


def untried_driver(version: str) -> list[Doubt]:
    """Checks that the patches support a driver version, and that its branch was tested."""
    listed = {one for known in series_table().values() for one in known["built"] + known["applies"]}
    if version not in listed:
        return [Doubt("driver", f"driver {version} is not listed in patches/series.json")]
    ran = {one for drivers in tried_table().values() for one in drivers}
    branches = sorted({branch_of(one) for one in ran if is_version(one)})
    if branch_of(version) in branches:
        return []
    have = ", ".join(map(str, branches))
    return [
        Doubt(
            "driver",
            f"no version of branch {branch_of(version)} was ever run with the patches, only of "
            f"{have} (patches/kernels.json)",
        )
    ]


def untried_kernel(release: str) -> list[Doubt]:
    """Checks that the module was tested on this kernel series."""
    if kernel_series(release) in tried_table():
        return []
    have = ", ".join(tried_table())
    return [
        Doubt(
            "kernel",
            f"the module was never run on a kernel like {release}, only on Linux {have} "
            "(patches/kernels.json)",
        )
    ]


def unknown_symbols(module: KernelModule, nvidia: KernelModule) -> list[Doubt]:
    """Checks whether the match between module and nvidia.ko can be verified at all."""
    if not versioned(nvidia):
        return [
            Doubt(
                "symbols",
                f"{nvidia.path} has no symbol versions (CONFIG_MODVERSIONS), so only the driver's "
                "version shows that the module was built against it",
            )
        ]
    wanted = [name for name in module.imports if name.startswith("nvUvmInterface")]
    if all(module.imports[name] is not None for name in wanted):
        return []
    return [
        Doubt(
            "symbols",
            "the module was built without the symbol versions of nvidia.ko, which this kernel "
            "checks: build it again where the driver is installed (make module)",
        )
    ]


def doubts(system: System, module: KernelModule, nvidia: KernelModule | None) -> list[Doubt]:
    """Returns the doubts about a module on this machine."""
    found = untried_driver(module.version) + untried_kernel(system.release())
    # Known symbol mismatches are reported elsewhere, as refusals.
    if nvidia is not None and not wrong_symbols(module, nvidia):
        found += unknown_symbols(module, nvidia)
    return found


def not_signed(system: System, module: KernelModule) -> list[str]:
    """Checks whether the kernel would reject the module for a missing signature."""
    reason = system.signatures_enforced()
    if not reason or module.signed:
        return []
    boot = " because of Secure Boot" if system.secure_boot() else ""
    return [
        f"the module is not signed and would be rejected{boot}: {reason}. Sign it with a key that "
        "the machine trusts (make module SIGN_KEY=... SIGN_CERT=..., or DKMS with its enrolled key)"
    ]


def load_refusals(
    system: System,
    module: KernelModule,
    nvidia: KernelModule | None,
    allowed: Collection[str] = (),
) -> list[str]:
    """Returns all reasons not to load the patched module now.

    `allowed`: the doubts to ignore, by their names in ALLOWABLE.
    """
    if not any(name.startswith(PREFIX) for name in module.parameters):
        return [f"{module.path} is not the patched module: it has no parameter {PREFIX}*"]
    reasons = not_allowed(system)
    if reasons:  # the GPU's users cannot be determined in this case
        return reasons
    reasons += wrong_kernel(system, module)
    reasons += wrong_driver(system, module, nvidia)
    if not reasons:  # irrelevant if the module is not for this machine
        found = doubts(system, module, nvidia)
        reasons += [str(doubt) for doubt in found if doubt.word not in allowed]
    reasons += not_signed(system, module)
    if system.loaded(UVM) and system.uvm_is_ours():
        reasons.append("the patched module is loaded already (make unload removes it)")
    return reasons + in_use(system)


def unload_refusals(system: System, *, unfinished: bool = False) -> list[str]:
    """Returns all reasons not to unload the patched module now.

    `unfinished`: a load was killed halfway, and the stock module must be restored.
    """
    reasons = not_allowed(system)
    if reasons:
        return reasons
    if not system.loaded(UVM):
        if not unfinished:
            reasons.append("nvidia-uvm is not loaded")
    elif not system.uvm_is_ours():
        reasons.append("the loaded nvidia-uvm is the stock module: nothing to unload")
    return reasons + in_use(system)
