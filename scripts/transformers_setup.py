#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Creates build/transformers: the oldest supported transformers, on top of build/venv.

The exit status is 77 if the packages are unavailable. Dependencies that need a different version
from the one in build/venv, such as huggingface-hub, are installed with it; everything else is
imported from build/venv.
"""

from __future__ import annotations

import re
import sys

from environment import BUILD, ROOT, VENV
from extra_environment import make

__all__ = ["oldest"]


def oldest() -> str:
    """Returns the oldest supported version as a requirement, ``transformers==VERSION``."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    bounds = set(re.findall(r'"transformers>=([0-9.]+)', text))
    if len(bounds) != 1:
        sys.exit(f"pyproject.toml: {len(bounds)} minimum versions of transformers; expected one")
    return f"transformers=={bounds.pop()}"


if __name__ == "__main__":
    sys.exit(make(BUILD / "transformers", [], [VENV], more=[oldest()], size="130 MB"))
