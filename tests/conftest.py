# SPDX-License-Identifier: MIT
"""Assigns one of the machine's GPUs to each pytest-xdist worker.

VMEM_TEST_DEVICES lists the GPUs' CUDA ordinals, such as 0,1,2,3. Tests that need several GPUs are
then skipped.
"""

from __future__ import annotations

import os


def choose_device() -> None:
    """Sets this worker's GPU; must run before anything in this process loads CUDA."""
    devices = os.environ.get("VMEM_TEST_DEVICES", "").split(",")
    worker = os.environ.get("PYTEST_XDIST_WORKER", "").removeprefix("gw")
    if devices[0] and worker:
        os.environ["CUDA_VISIBLE_DEVICES"] = devices[int(worker) % len(devices)]


choose_device()
