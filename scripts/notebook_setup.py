#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Creates build/notebook: a notebook kernel with its debugger, on top of build/venv.

The exit status is 77 if the packages are unavailable.
"""

from __future__ import annotations

import re
import sys

from environment import BUILD, ROOT, VENV
from extra_environment import make


def requirements() -> list[str]:
    """Returns the requirements of pyproject.toml's extra ``notebook``."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    extra = re.search(r"^notebook = \[(.*?)\]", text, re.M)
    if extra is None:
        sys.exit("pyproject.toml has no extra 'notebook'")
    return re.findall(r'"([^"]+)"', extra[1])


if __name__ == "__main__":
    sys.exit(make(BUILD / "notebook", [], [VENV], more=requirements(), size="60 MB"))
