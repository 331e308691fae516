# SPDX-License-Identifier: MIT
"""Command-line options shared by the commands about layouts and traces."""

from __future__ import annotations

import argparse
import math
from typing import Any

from pyvmem.commands.usage import BadUsage
from pyvmem.errors import InvalidArgument
from pyvmem.layouts.shapes import ModelShape, shape_of
from pyvmem.models.shapes import DTYPE_BYTES
from pyvmem.plumbing.paths import existing_file, replaced
from pyvmem.plumbing.units import parse_bytes

__all__ = [
    "MOST",
    "add_dtype",
    "add_output",
    "add_overread",
    "add_workload",
    "count",
    "counts",
    "model_shape",
    "natural",
    "page_name",
    "page_size",
    "page_sizes",
    "positive",
    "size",
    "sizes",
    "whole",
]

MOST = 1 << 24
"""The largest count that the command line accepts."""

_SMALLEST_PAGE, _LARGEST_PAGE = 4 << 10, 1 << 30


def size(text: str) -> int:
    """Parses a size in bytes, such as "80G", "64K" or "65536"; units are powers of 1,024."""
    try:
        value = parse_bytes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is out of range")
    return value


def sizes(text: str) -> list[int]:
    """Parses a list of sizes in bytes, such as "64K,2M"."""
    return [size(one) for one in text.split(",")]


def page_size(text: str) -> int:
    """Parses a page size in bytes, such as "64K"."""
    value = size(text)
    if not _SMALLEST_PAGE <= value <= _LARGEST_PAGE or value & (value - 1):
        raise argparse.ArgumentTypeError(f"{text!r}: a page size is a power of two from 4K to 1G")
    return value


def page_sizes(text: str) -> list[int]:
    """Parses a list of page sizes, such as "64K,2M"; rejects duplicates."""
    found = [page_size(one) for one in text.split(",")]
    if len(set(found)) < len(found):
        raise argparse.ArgumentTypeError(f"{text!r} names a page size twice")
    return found


def count(text: str) -> int:
    """Parses a whole number from 1 to `MOST`."""
    return _at_least(1, text)


def natural(text: str) -> int:
    """Parses a whole number from 0 to `MOST`."""
    return _at_least(0, text)


def _at_least(least: int, text: str) -> int:
    value = whole(text)
    if not least <= value <= MOST:
        raise argparse.ArgumentTypeError(f"{text} is not between {least} and {MOST}")
    return value


def whole(text: str) -> int:
    """Parses a whole number."""
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None


def positive(text: str) -> float:
    """Parses a finite number above 0."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a number above 0")
    return value


def counts(text: str, all_is: int | None = None) -> list[int]:
    """Parses a list of positive whole numbers, such as "1,8"; "all" means `all_is`, if given."""
    found = []
    for one in text.split(","):
        if one == "all" and all_is is not None:
            found.append(all_is)
        elif one.strip().isdecimal() and int(one) > 0:
            found.append(int(one))
        else:
            example = "1,8" if all_is is None else "1,8,all"
            raise argparse.ArgumentTypeError(
                f"{text!r}: {one!r} is not a count; expected {example}"
            )
    return found


def model_shape(model: str, dtype: str = "") -> ModelShape:
    """Returns the shape of the model that ``--model`` names.

    Raises:
        BadUsage: the model is unknown, or it has an unsupported kind of layer.
    """
    try:
        return shape_of(model, dtype)
    except InvalidArgument as error:
        raise BadUsage(f"argument --model: {error}") from None


def page_name(page_size: int) -> str:
    """Returns the short name of a page size, such as "64K" or "2M"."""
    return f"{page_size >> 20}M" if page_size >= 1 << 20 else f"{page_size >> 10}K"


def add_workload(parser: Any, trace: str, what: str, requests: int, **how: Any) -> None:
    """Adds ``--trace``, and options that generate synthetic `what` from a seed instead.

    Args:
        parser: the parser to extend.
        trace: help text of ``--trace``: the supported formats.
        what: "requests" or "prompts", for help texts.
        requests: default number of synthetic requests.
        **how: further arguments of `add_argument` for ``--trace``.
    """
    add = parser.add_argument
    add("--trace", type=existing_file, help=trace, **how)
    add("--requests", type=count, default=requests, help=f"synthetic {what} instead ({requests})")
    add("--seed", type=whole, default=1, help=f"of the synthetic {what} (1)")


def add_overread(parser: Any) -> None:
    """Adds ``--overread``."""
    text = "mapped past each prompt for a kernel that reads tiles: 191 for fa3 (0)"
    parser.add_argument("--overread", type=natural, default=0, metavar="ROWS", help=text)


def add_dtype(parser: Any) -> None:
    """Adds ``--kv-dtype``."""
    text = "of keys and values, such as float8_e4m3fn (the model's)"
    parser.add_argument("--kv-dtype", choices=sorted(DTYPE_BYTES), default="", help=text)


def add_output(parser: Any, out: str) -> None:
    """Adds ``--out``, with the help text `out`, and ``--json``."""
    add = parser.add_argument
    add("--out", type=replaced, metavar="FILE", help=out)
    add("--json", action="store_true", help="print the JSON instead of the tables")
