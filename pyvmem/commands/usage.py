# SPDX-License-Identifier: MIT
"""Usage errors that argparse cannot detect."""

from __future__ import annotations

__all__ = ["BadUsage"]


class BadUsage(ValueError):
    """An argument is invalid; `vmem` reports it like an argparse error and exits with status 2."""
