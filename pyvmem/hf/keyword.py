# SPDX-License-Identifier: MIT
"""`CACHE`: the argument of ``model.generate`` and ``model.forward`` that takes a cache."""

from __future__ import annotations

import transformers

__all__ = ["CACHE"]

_version = tuple(map(int, transformers.__version__.split(".")[:2]))

CACHE = "cache" if _version >= (5, 24) else "past_key_values"
"""transformers 5.24 renamed it; the old name gives a warning there."""
