# SPDX-License-Identifier: MIT
"""``vmem probe --report``: describes a machine for a bug report.

The report contains versions, hardware, each back end's probe result, and relevant limits. It omits
home directories, user and host names, and GPU serial numbers and UUIDs.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pyvmem import Context, _native
from pyvmem.commands.machine import describe
from pyvmem.plumbing.paths import write_text
from pyvmem.selftest.check import Result
from pyvmem.selftest.run import line, passed, run_checks

if TYPE_CHECKING:
    from pyvmem.commands.probe import ProbeResult

__all__ = ["bug_report", "modules_of", "scrub", "write"]

_PARAMETERS = "/sys/module/nvidia_uvm/parameters"


def scrub(text: str) -> str:
    """Replaces the user's home directory and GPU UUIDs in `text`."""
    home = os.path.expanduser("~")  # still "~" if the user has no home directory
    if len(home) > 1:  # not just "/"
        text = re.sub(rf"{re.escape(home)}(?![\w.-])", "~", text)
    return re.sub(r"\b(?:GPU-)?[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}\b", "UUID", text)


def modules_of(lines: str) -> list[str]:
    """Lists NVIDIA's modules in /proc/modules, with their taint flags."""
    found = []
    for module in lines.splitlines():
        name, *rest = module.split()
        if name.startswith("nvidia"):
            taints = rest[-1] if rest and rest[-1].startswith("(") else ""
            found.append(f"{name} {taints}".strip())
    return found


def _read(path: str) -> str:
    """Returns the contents of a file in /proc or /sys; "" if it cannot be read."""
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def _limits() -> dict[str, str]:
    """Returns the system limits that a cache can run into."""
    limits = {"vm.max_map_count": _read("/proc/sys/vm/max_map_count")}
    for path in sorted(Path(_PARAMETERS).glob("uvm_vmem_*")):
        limits[path.name] = _read(str(path))
    return {name: value for name, value in limits.items() if value}


def _nodes() -> str:
    """Lists the device nodes and their permissions."""
    found = [path for path in sorted(Path("/dev").glob("nvidia*")) if path.is_char_device()]
    return ", ".join(f"{path} {path.stat().st_mode & 0o777:o}" for path in found) or "none"


def bug_report(results: Sequence[ProbeResult]) -> str:
    """Returns the report in Markdown, ready to paste into an issue."""
    machine: dict[str, Any] = describe()
    memory = machine["memory_bytes"] / 2**30
    commit = machine["commit"] or "unknown"
    rows = {
        "vmem": f"{_native.version()}, commit {commit[:12]}{', changed' * bool(machine['dirty'])}",
        "system": machine["system"],
        "processor": f"{machine['cpu']}, {machine['cores']} cores, {memory:.0f} GiB",
        "user": machine["user"],
        "GPU": machine["gpu"] or "none, according to nvidia-smi",
        "driver": machine["driver"] or "none",
        "patched driver": "loaded" if _read("/proc/driver/nvidia-uvm/vmem") else "not loaded",
        "modules": ", ".join(modules_of(_read("/proc/modules"))) or "none of NVIDIA's",
        "device nodes": _nodes(),
        "Python": machine["python"],
        "torch": machine["torch"] or "none",
        "cuda-bindings": machine["cuda_bindings"] or "none",
        **_limits(),
    }
    width = max(map(len, rows))
    lines = ["```text", *(f"{name:<{width}}  {value}" for name, value in rows.items()), ""]
    for one in results:
        state = "used" if one.used else "usable" if one.usable else "not usable"
        caps = ", ".join(str(cap.name) for cap in type(one.caps) if cap in one.caps)
        error = f"{one.error_name}: " if one.error_name else ""
        lines += [f"{one.backend}: {state}", f"  {error}{one.reason}"]
        lines += [f"  {caps}"] if caps else []
    return scrub("\n".join([*lines, "```"]))


def write(path: Path, results: Sequence[ProbeResult], device: int) -> int:
    """Writes the report, with a self-test of the back end in use; returns the exit status."""
    lines, status = [bug_report(results)], 1
    for one in results:
        if one.used:
            checks = _self_test(one.backend, device)
            outcome = "passed" if passed(checks) else "FAILED"
            lines += ["", f"Self-test of `{one.backend}`: {outcome}.", "", "```text"]
            lines += [scrub(line(check)) for check in checks] + ["```"]
            print(f"{one.backend}: {outcome}; report: {path}")
            status = int(not passed(checks))
    write_text(path, "\n".join(lines) + "\n")
    return status


def _self_test(backend: str, device: int) -> list[Result]:
    with Context(backend, device=device, pool_high=1) as context:
        return run_checks(context, lambda result: print(line(result), flush=True))
