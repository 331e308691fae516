# SPDX-License-Identifier: MIT
"""Checks that the extension has the USDT probes that the documentation lists."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import system_packages

from pyvmem import _vmem

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "operations" / "trace.md"
NOTE = re.compile(r"Provider: vmem\n\s+Name: (\w+)\n\s+Location: .*\n\s+Arguments:(.*)")


def documented() -> dict[str, int]:
    """Returns the probes in the page's table, and each probe's number of arguments."""
    rows = re.findall(r"^\| `(\w+)` \| .* \| (.+) \|$", PAGE.read_text(encoding="utf-8"), re.M)
    return {name: len(arguments.split(",")) for name, arguments in rows}


@pytest.mark.skipif(not system_packages.has_probes(), reason="<sys/sdt.h> is not on this machine")
@pytest.mark.skipif(not shutil.which("readelf"), reason="no readelf")
def test_the_extension_has_the_documented_probes() -> None:
    command = ["readelf", "-n", str(_vmem.__file__)]
    notes = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = {name: len(arguments.split()) for name, arguments in NOTE.findall(notes)}
    assert found == documented()


def test_the_page_lists_the_probes_of_the_sources() -> None:
    """Runs even if the header is missing and no probe was compiled in."""
    probe = re.compile(r"^\s+VM_PROBE(\d)\((\w+),", re.M)
    found: dict[str, int] = {}
    for path in sorted((ROOT / "libvmem" / "src").rglob("*.c")):
        for arguments, name in probe.findall(path.read_text(encoding="utf-8")):
            assert found.setdefault(name, int(arguments)) == int(arguments), f"{name}: {path}"
    assert found == documented()
