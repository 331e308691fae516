# SPDX-License-Identifier: MIT
"""The ``--backend`` and ``--device`` options shared by all commands."""

from __future__ import annotations

import argparse
from typing import Any

from pyvmem import _native

__all__ = ["add_backend", "add_device", "ordinal"]

_MOST = 1 << 16  # exclusive upper bound, far above the number of devices in any machine


def ordinal(text: str) -> int:
    """Parses a CUDA ordinal."""
    if not (text.isascii() and text.isdecimal() and int(text) < _MOST):
        raise argparse.ArgumentTypeError(f"{text!r}: expected a CUDA ordinal, 0 or more")
    return int(text)


def add_device(parser: Any) -> None:
    """Adds ``--device``."""
    text = "CUDA ordinal (default: 0); host has no devices and accepts any"
    parser.add_argument("--device", type=ordinal, default=0, metavar="N", help=text)


def add_backend(parser: Any, what: str, default: str = "auto") -> None:
    """Adds ``--backend``; its help begins with `what`."""
    names = _native.backend_names()
    if default == "auto":
        names = ("auto", *names)
    text = f"{what}: {', '.join(names)} (default: {default})"
    parser.add_argument("--backend", choices=names, default=default, metavar="NAME", help=text)
