# SPDX-License-Identifier: MIT
"""Argument validators whose errors name `KVCache` as the operation."""

from __future__ import annotations

from functools import partial

from pyvmem.plumbing import validation

__all__ = ["bounded", "invalid", "real", "switched"]

invalid = partial(validation.invalid, op="KVCache")
bounded = partial(validation.bounded, op="KVCache")
real = partial(validation.real, op="KVCache")
switched = partial(validation.switched, op="KVCache")
