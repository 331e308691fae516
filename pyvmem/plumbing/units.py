# SPDX-License-Identifier: MIT
"""Parses and formats human-readable sizes."""

from __future__ import annotations

import re
from decimal import Decimal

__all__ = ["counted", "format_bytes", "parse_bytes"]

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


def parse_bytes(text: str, name: str = "size") -> int:
    """Parses "80G", "64K", "1.5 GiB" or "65536" into bytes; units are powers of 1,024.

    Raises:
        ValueError: `text` is not a size; the message contains `name`.
    """
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?\s*", text, re.I | re.ASCII)
    if not found:
        raise ValueError(f"{name}={text!r}: expected a size such as 20G or 512M")
    value = Decimal(found[1]) * _UNITS[found[2].upper()]
    if value >= 1 << 62:
        raise ValueError(f"{name}={text!r}: expected less than 2**62 bytes")
    return int(value)


def counted(number: int, what: str) -> str:
    """Formats a count with its noun, as in "1 request" or "2,000 requests"."""
    return f"{number:,} {what}{'s' * (number != 1)}"


def format_bytes(nbytes: int) -> str:
    """Formats a number of bytes for humans."""
    value, units = float(nbytes), iter("KMGT")
    unit = ""
    while value >= 1024 and (following := next(units, "")):
        value, unit = value / 1024, following
    return f"{value:.1f}{unit}" if unit else str(nbytes)
