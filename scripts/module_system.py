# SPDX-License-Identifier: MIT
"""Describes a machine: its kernel, its NVIDIA driver, and the processes that use the driver.

Everything is read relative to a root directory, so that a test can describe any machine as plain
files.
"""

from __future__ import annotations

import os
import re
import stat
from dataclasses import dataclass
from pathlib import Path

__all__ = ["UVM", "DeviceUser", "System"]

UVM = "nvidia_uvm"
SECURE_BOOT = "sys/firmware/efi/efivars/SecureBoot-8be4df61-93ca-11d2-aa0d-00e098032b8c"
CAP_SYS_MODULE = 16

# Services that always have the driver's nodes open: nvidia-persistenced keeps the driver's state
# between programs, nv-fabricmanager manages NVLink switches. They do not block a swap unless they
# have opened UVM.
HARMLESS = ("nvidia-persistenced", "nv-fabricmanager")

# Nodes that GPU programs open; nodes for displays, MIG and switches are ignored.
NODE = re.compile(r"/dev/nvidia(\d+|ctl|-uvm|-uvm-tools)")
DEVICES = ("nvidia", "nvidia-frontend", "nvidiactl", "nvidia-uvm")


@dataclass(frozen=True)
class DeviceUser:
    """A process that has one of the driver's device nodes open."""

    pid: int
    command: str
    nodes: tuple[str, ...]

    @property
    def harmless(self) -> bool:
        """True if the process is a service that a swap of UVM does not affect."""
        return self.command in HARMLESS and not any("uvm" in node for node in self.nodes)

    def __str__(self) -> str:
        return f"{self.pid} ({self.command}: {', '.join(self.nodes)})"


@dataclass(frozen=True)
class System:
    """A machine whose files are under `root`."""

    root: Path = Path("/")

    def text(self, path: str) -> str:
        """Returns a file's stripped content, or "" if it cannot be read."""
        try:
            return (self.root / path).read_text(encoding="utf-8", errors="replace").strip("\0 \n")
        except OSError:
            return ""

    # The kernel

    def release(self) -> str:
        """Returns the running kernel's release, as `uname -r` prints it."""
        return self.text("proc/sys/kernel/osrelease")

    def may_load(self) -> bool:
        """True if this process may load modules (CAP_SYS_MODULE)."""
        found = re.search(r"^CapEff:\s*([0-9a-f]+)", self.text("proc/self/status"), re.MULTILINE)
        return bool(found and int(found.group(1), 16) >> CAP_SYS_MODULE & 1)

    def modules_disabled(self) -> bool:
        """True if module loading is disabled until reboot."""
        return self.text("proc/sys/kernel/modules_disabled") == "1"

    def signatures_enforced(self) -> str:
        """Returns why an unsigned module would be rejected, or "" if it would be accepted."""
        if self.text("sys/module/module/parameters/sig_enforce") == "Y":
            return "the kernel accepts only signed modules (module.sig_enforce)"
        lockdown = re.search(r"\[(\w+)\]", self.text("sys/kernel/security/lockdown"))
        if lockdown:
            if lockdown.group(1) == "none":
                return ""
            return f"the kernel is locked down ({lockdown.group(1)})"
        if self.secure_boot():
            return "Secure Boot is on, and whether the kernel is locked down cannot be read"
        return ""

    def secure_boot(self) -> bool:
        """True if this kernel was booted under Secure Boot."""
        try:
            # The file contains four bytes of attributes, followed by the value.
            return (self.root / SECURE_BOOT).read_bytes()[4:5] == b"\x01"
        except OSError:
            return False

    # Modules

    def loaded(self, module: str) -> bool:
        """True if a module is loaded. (NVIDIA's modules are never built in.)"""
        return (self.root / "sys/module" / module / "refcnt").exists()

    def source_version(self, module: str) -> str:
        """Returns the fingerprint of a loaded module's sources."""
        return self.text(f"sys/module/{module}/srcversion")

    def driver_version(self) -> str:
        """Returns the version of the loaded nvidia.ko, or "" if it is not loaded."""
        version = self.text("sys/module/nvidia/version")
        if not version:
            found = re.search(
                r"^NVRM version:.*?\s(\d+\.\d+(\.\d+)?)\s",
                self.text("proc/driver/nvidia/version"),
                re.MULTILINE,
            )
            version = found.group(1) if found else ""
        return version

    def uvm_is_ours(self) -> bool:
        """True if the loaded UVM is patched, as its parameters' prefix shows."""
        folder = self.root / "sys/module" / UVM / "parameters"
        return any(folder.glob("uvm_vmem_*"))

    def uvm_references(self) -> int:
        """Returns the kernel's reference count for the loaded UVM."""
        return int(self.text(f"sys/module/{UVM}/refcnt") or 0)

    def uvm_holders(self) -> list[str]:
        """Returns the names of the modules that depend on the loaded UVM."""
        folder = self.root / "sys/module" / UVM / "holders"
        return sorted(path.name for path in folder.glob("*"))

    # Device nodes

    def device_majors(self) -> dict[int, str]:
        """Returns the names of the driver's character devices, by major number."""
        majors: dict[int, str] = {}
        for line in self.text("proc/devices").split("Block devices:")[0].splitlines():
            number, _space, name = line.strip().partition(" ")
            if number.isdigit() and name in DEVICES:
                majors[int(number)] = name
        return majors

    def device_users(self) -> list[DeviceUser]:
        """Returns the processes that have one of the driver's nodes open, under any path.

        This process and harmless services are left out.
        """
        majors = self.device_majors()
        users: list[DeviceUser] = []
        folders = (self.root / "proc").glob("[0-9]*")
        for folder in sorted(folders, key=lambda path: int(path.name)):
            nodes = self.open_nodes(folder / "fd", majors)
            if nodes and int(folder.name) != os.getpid():
                users.append(DeviceUser(int(folder.name), self.command(folder), tuple(nodes)))
        return [user for user in users if not user.harmless]

    def open_nodes(self, folder: Path, majors: dict[int, str]) -> list[str]:
        """Returns the driver's nodes among the open files of a process."""
        found: set[str] = set()
        try:
            files = list(folder.iterdir())
        except OSError:  # the process or file is gone
            return []
        for path in files:
            try:
                target = os.readlink(path)
            except OSError:
                continue
            if NODE.fullmatch(target) or device_major(path) in majors:
                found.add(target)
        return sorted(found)

    def command(self, folder: Path) -> str:
        """Returns a process's program name."""
        try:
            words = (folder / "cmdline").read_bytes().split(b"\0")
            name = Path(words[0].decode("utf-8", "replace")).name
            return name or (folder / "comm").read_text(encoding="utf-8").strip()
        except OSError:
            return "?"


def device_major(path: Path) -> int:
    """Returns the major number of a character device, or -1 for anything else."""
    try:
        status = os.stat(path)
    except OSError:
        return -1
    return os.major(status.st_rdev) if stat.S_ISCHR(status.st_mode) else -1
