# SPDX-License-Identifier: MIT
"""Why nvidia-uvm is not swapped: everything that can be known before anything is touched."""

from __future__ import annotations

from module_elf import KernelModule
from module_system import UVM, System

__all__ = ["PREFIX", "in_use", "load_refusals", "unload_refusals"]

# Of the parameters that the patches add; what tells the patched module from the stock one.
PREFIX = "uvm_vmem_"


def not_allowed(system: System) -> list[str]:
    """What keeps this process from changing the kernel's modules at all."""
    if not system.may_load():
        return ["only root may load modules (CAP_SYS_MODULE; a container's root mostly has it not)"]
    if system.modules_disabled():
        return ["the kernel takes no modules until it is restarted (kernel.modules_disabled = 1)"]
    return []


def in_use(system: System) -> list[str]:
    """Who uses a GPU, or UVM."""
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
            f"the kernel counts {count} uses of nvidia-uvm by what cannot be seen from here "
            "(processes outside this container?); end them first"
        ]
    return []


def wrong_kernel(system: System, module: KernelModule) -> list[str]:
    """Whether the module was built for another kernel than the running one."""
    if module.release == system.release():
        return []
    return [f"the module is for kernel {module.release}; {system.release()} is running"]


def wrong_driver(system: System, module: KernelModule, nvidia: KernelModule | None) -> list[str]:
    """Whether the module and the loaded nvidia.ko belong together."""
    loaded = system.driver_version()
    if not system.loaded("nvidia"):
        return ["nvidia.ko is not loaded: start the stock driver first (modprobe nvidia)"]
    if module.version != loaded:
        return [f"the module is for driver {module.version}; {loaded or 'another'} is loaded"]
    if nvidia is None:
        return [
            f"the file of the loaded nvidia.ko ({loaded}) is not in /lib/modules/"
            f"{system.release()}: whether the module fits it cannot be known"
        ]
    return wrong_symbols(module, nvidia)


def wrong_symbols(module: KernelModule, nvidia: KernelModule) -> list[str]:
    """Whether the module asks for the symbols that nvidia.ko has, in their versions."""
    versioned = any(export.crc is not None for export in nvidia.exports.values())
    if module.first("vermagic") != nvidia.first("vermagic"):
        return [
            f'the module was built as "{module.first("vermagic")}", nvidia.ko as '
            f'"{nvidia.first("vermagic")}"'
        ]
    wanted = [name for name in module.imports if name.startswith("nvUvmInterface")]
    missing = [name for name in wanted if name not in nvidia.exports]
    if missing:
        return [f"{nvidia.path} does not have {', '.join(missing[:3])}"]
    if not versioned:
        return []
    blank = [name for name in wanted if module.imports[name] is None]
    if blank:
        return [
            "the module was built without the symbol versions of nvidia.ko, which this kernel "
            "checks: build it again where the driver is installed (make module)"
        ]
    differing = [name for name in wanted if module.imports[name] != nvidia.exports[name].crc]
    if differing:
        return [
            f"the module was linked against another nvidia.ko: {len(differing)} of {len(wanted)} "
            f"symbol versions differ from {nvidia.path}'s (first {differing[0]}); make module again"
        ]
    return []


def not_signed(system: System, module: KernelModule) -> list[str]:
    """Whether the kernel would reject the module for want of a signature."""
    reason = system.signatures_enforced()
    if not reason or module.signed:
        return []
    boot = " because of Secure Boot" if system.secure_boot() else ""
    return [
        f"the module is not signed and would be rejected{boot}: {reason}. Sign it with a key that "
        "the machine knows (make module SIGN_KEY=... SIGN_CERT=..., or DKMS with its enrolled key)"
    ]


def load_refusals(system: System, module: KernelModule, nvidia: KernelModule | None) -> list[str]:
    """All reasons against loading the patched module now; empty if there is none."""
    if not any(name.startswith(PREFIX) for name in module.parameters):
        return [f"{module.path} is not the patched module: it has no parameter {PREFIX}*"]
    reasons = not_allowed(system)
    if reasons:  # who uses the GPU cannot be seen either
        return reasons
    reasons += wrong_kernel(system, module)
    reasons += wrong_driver(system, module, nvidia)
    reasons += not_signed(system, module)
    if system.loaded(UVM) and system.uvm_is_ours():
        reasons.append("the patched module is loaded already (make unload takes it away)")
    return reasons + in_use(system)


def unload_refusals(system: System, *, unfinished: bool = False) -> list[str]:
    """All reasons against taking the patched module away now.

    `unfinished`: a load was killed half-way, and the stock module is to be brought back.
    """
    reasons = not_allowed(system)
    if reasons:
        return reasons
    if not system.loaded(UVM):
        if not unfinished:
            reasons.append("nvidia-uvm is not loaded")
    elif not system.uvm_is_ours():
        reasons.append("the loaded nvidia-uvm is the stock module: there is nothing to take away")
    return reasons + in_use(system)
