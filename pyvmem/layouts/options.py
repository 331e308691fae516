# SPDX-License-Identifier: MIT
"""Command-line options that the commands about layouts and traces share."""

from __future__ import annotations

import argparse
import math
from typing import Any

from pyvmem.kvcache.config import DTYPE_BYTES
from pyvmem.paths import existing, replaced
from pyvmem.units import parse_bytes

__all__ = [
    "add_dtype",
    "add_output",
    "add_overread",
    "add_workload",
    "count",
    "counts",
    "page_name",
    "positive",
    "size",
    "sizes",
]

_MOST = 1 << 24


def size(text: str) -> int:
    """Bytes of "80G", "64K", "65536"; units are powers of 1,024."""
    try:
        value = parse_bytes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is out of range")
    return value


def sizes(text: str) -> list[int]:
    """Bytes of "64K,2M"."""
    return [size(one) for one in text.split(",")]


def count(text: str) -> int:
    """A whole number from 1 to 2**24, which no run comes near."""
    try:
        value = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None
    if not 1 <= value <= _MOST:
        raise argparse.ArgumentTypeError(f"{text} is not between 1 and {_MOST}")
    return value


def positive(text: str) -> float:
    """A finite number above 0."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a number above 0")
    return value


def counts(text: str, all_is: int | None = None) -> list[int]:
    """Whole numbers of "1,8", each at least 1; "all" is `all_is`, where that is given."""
    found = []
    for one in text.split(","):
        if one == "all" and all_is is not None:
            found.append(all_is)
        elif one.strip().isdecimal() and int(one) > 0:
            found.append(int(one))
        else:
            example = "1,8" if all_is is None else "1,8,all"
            raise argparse.ArgumentTypeError(f"{text!r}: {one!r} is no count; expected {example}")
    return found


def page_name(page_size: int) -> str:
    """ "64K" or "2M"."""
    return f"{page_size >> 20}M" if page_size >= 1 << 20 else f"{page_size >> 10}K"


def add_workload(parser: Any, trace: str, what: str, requests: int, **how: Any) -> None:
    """Adds ``--trace``, or else so many made-up `what` of a seed.

    Args:
        parser: gets the arguments.
        trace: which traces are read.
        what: "requests" or "prompts".
        requests: the default.
        **how: more for ``--trace``.
    """
    add = parser.add_argument
    add("--trace", type=existing, help=trace, **how)
    add("--requests", type=count, default=requests, help=f"made-up {what} instead ({requests})")
    add("--seed", type=int, default=1, help=f"of the made-up {what} (1)")


def add_overread(parser: Any) -> None:
    """Adds ``--overread``."""
    text = "mapped past each prompt for a kernel that reads tiles: 191 for fa3 (0)"
    parser.add_argument("--overread", type=int, default=0, metavar="ROWS", help=text)


def add_dtype(parser: Any) -> None:
    """Adds ``--kv-dtype``."""
    text = "of keys and values, as float8_e4m3fn (the model's)"
    parser.add_argument("--kv-dtype", choices=sorted(DTYPE_BYTES), default="", help=text)


def add_output(parser: Any, out: str) -> None:
    """Adds ``--out`` and ``--json``; `out`: what is written."""
    add = parser.add_argument
    add("--out", type=replaced, metavar="FILE", help=out)
    add("--json", action="store_true", help="print the JSON instead of the tables")
