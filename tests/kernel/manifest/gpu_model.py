# SPDX-License-Identifier: MIT
"""Tests that the software GPU, without our ioctls, detects what it claims to detect."""

from __future__ import annotations

from manifest.entry import Test

__all__ = ["TESTS"]

TESTS = [
    Test(
        name=f"gpu-model-{arch}",
        program="gpu_model",
        arch=arch,
        gpus=2,
        module_args=f"p2p={p2p} delay_us=300",
        long=arch != "hopper",
    )
    for arch, p2p in (("hopper", "nvlink"), ("ampere", "pcie"))
]
