#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Swaps the real modules in a guest: every refusal, every halfway failure, and DKMS's rule.

The software GPU's nvidia.ko and the unpatched nvidia-uvm.ko are installed as Debian's package
installs its modules; /load holds them and the module that `make module` built (prepare.py).
"""

from __future__ import annotations

import sys
import time
import traceback
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent.parent.parent / "scripts")]

import cases_dkms  # noqa: E402
import cases_failures  # noqa: E402
import cases_refusals  # noqa: E402
import cases_signatures  # noqa: E402
import cases_swap  # noqa: E402
from guest_machine import Machine  # noqa: E402

# The last group cannot be undone: the kernel requires signatures from then on.
GROUPS = (cases_refusals, cases_swap, cases_failures, cases_dkms, cases_signatures)


def main() -> int:
    """Runs the cases whose names contain one of the given words, or all cases."""
    machine = Machine()
    failed = 0
    count = 0
    for group in GROUPS:
        for case in group.CASES:
            name = case.__name__
            if sys.argv[1:] and not any(word in name for word in sys.argv[1:]):
                continue
            count += 1
            start = time.monotonic()
            try:
                machine.reset()
                case(machine)
                print(f"ok   {name} ({time.monotonic() - start:.1f} s)", flush=True)
            except Exception:
                failed += 1
                print(f"FAIL {name}\n{traceback.format_exc()}", flush=True)
    machine.clear()
    print(f"{count} cases, {failed} failed", flush=True)
    return 1 if failed or not count else 0


if __name__ == "__main__":
    sys.exit(main())
