# SPDX-License-Identifier: MIT
"""The validators of arguments, for those of the cache."""

from __future__ import annotations

from functools import partial

from pyvmem.plumbing import validation

__all__ = ["bounded", "invalid", "real", "switched"]

invalid = partial(validation.invalid, op="KVCache")
bounded = partial(validation.bounded, op="KVCache")
real = partial(validation.real, op="KVCache")
switched = partial(validation.switched, op="KVCache")
