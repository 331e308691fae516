#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Creates build/sglang: SGLang's Python, on top of build/vllm. With `old`, also build/sglang-old.

The exit status is 77 if the packages are unavailable. SGLang's wheel contains its Python code; its
kernels are a separate package without a build for CPUs. tests/sglang/stand_ins contains stubs for
the parts of that package and of torchvision that SGLang's CPU engine imports. build/sglang-old
contains a version that the plug-in rejects.
"""

from __future__ import annotations

import sys

import vllm_setup
from environment import BUILD, VENV
from extra_environment import make

__all__ = ["main"]


def main() -> int:
    """Creates build/vllm, which shares most packages, and build/sglang."""
    old = sys.argv[1:] == ["old"]
    del sys.argv[1:]  # hide the arguments from vllm_setup, which parses its own
    below = [BUILD / "vllm", VENV]
    status = vllm_setup.main() or make(BUILD / "sglang", ["sglang"], below, size="400 MB")
    if old and not status:
        return make(BUILD / "sglang-old", ["sglang-old"], [BUILD / "sglang", *below], size="40 MB")
    return status


if __name__ == "__main__":
    sys.exit(main())
