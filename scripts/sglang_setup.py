#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Makes build/sglang: SGLang's Python, on top of build/vllm. Exit status 77: it cannot be had here.

SGLang's wheel holds its Python; its kernels are a package of their own, of which there is no build
for CPUs. What its CPU engine imports of that and of torchvision stands in tests/sglang/stand_ins.
"""

from __future__ import annotations

import sys

import vllm_setup
from environment import BUILD, VENV
from extra_environment import make

__all__ = ["main"]


def main() -> int:
    """Makes build/vllm, which shares most packages, and build/sglang."""
    status = vllm_setup.main()
    return status or make(BUILD / "sglang", ["sglang"], [BUILD / "vllm", VENV], size="400 MB")


if __name__ == "__main__":
    sys.exit(main())
