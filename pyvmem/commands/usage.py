# SPDX-License-Identifier: MIT
"""Words on a command line that only the command itself can find wrong."""

from __future__ import annotations

__all__ = ["BadUsage"]


class BadUsage(ValueError):
    """A wrong argument: `vmem` says so as for one that argparse refuses, and ends with 2."""
