# SPDX-License-Identifier: MIT
"""Argument checks whose errors name `KVCache` as the operation."""

from __future__ import annotations

import operator
from functools import partial

from pyvmem.plumbing import validation

__all__ = ["bounded", "invalid", "layer_index", "real", "switched"]

invalid = partial(validation.invalid, op="KVCache")
bounded = partial(validation.bounded, op="KVCache")
real = partial(validation.real, op="KVCache")
switched = partial(validation.switched, op="KVCache")


def layer_index(layer: int, count: int) -> int:
    """Returns `layer` as an index; raises InvalidArgument unless 0 <= `layer` < `count`."""
    index, last = operator.index(layer), count - 1
    if not 0 <= index <= last:
        raise invalid(f"layer {index} is not between 0 and {last}", limit=last)
    return index
