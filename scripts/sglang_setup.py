#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Creates build/sglang: SGLang's Python, on top of build/vllm.

Exit status 77: unavailable here. SGLang's wheel contains its Python; its kernels are a separate
package without a build for CPUs. Stubs for what its CPU engine imports of that package and of
torchvision are in tests/sglang/stand_ins.
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
