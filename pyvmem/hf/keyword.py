# SPDX-License-Identifier: MIT
"""`CACHE`: the name of the cache argument of ``model.generate`` and ``model.forward``."""

from __future__ import annotations

import transformers

__all__ = ["CACHE"]

_version = tuple(map(int, transformers.__version__.split(".")[:2]))

CACHE = "cache" if _version >= (5, 24) else "past_key_values"
"""transformers 5.24 renamed the argument, and warns about the old name."""
