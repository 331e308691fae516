# SPDX-License-Identifier: MIT
"""On a machine with several GPUs, the workers of pytest-xdist can take one each, by turns.

VMEM_TEST_DEVICES: their CUDA ordinals, as 0,1,2,3. Tests that need several are skipped then.
"""

from __future__ import annotations

import os


def choose_device() -> None:
    """Before anything in this process loads CUDA."""
    devices = os.environ.get("VMEM_TEST_DEVICES", "").split(",")
    worker = os.environ.get("PYTEST_XDIST_WORKER", "").removeprefix("gw")
    if devices[0] and worker:
        os.environ["CUDA_VISIBLE_DEVICES"] = devices[int(worker) % len(devices)]


choose_device()
