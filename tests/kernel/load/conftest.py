# SPDX-License-Identifier: MIT
"""Where the tests find the programs that they test, and a machine of plain files."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[2] / "scripts")]

from module_system import System  # noqa: E402

# A machine where the patched module can be loaded.
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


@pytest.fixture
def lay(tmp_path: Path) -> Lay:
    """Makes a machine: the usual one with some files changed, or taken away (None)."""

    def make(changes: dict[str, str | bytes | None] | None = None) -> System:
        root = tmp_path / "machine"
        files: dict[str, str | bytes | None] = {**USUAL, **(changes or {})}
        for name, content in files.items():
            path = root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            if content is None:
                path.unlink(missing_ok=True)
            else:
                path.write_bytes(content.encode() if isinstance(content, str) else content)
        return System(root)

    return make
