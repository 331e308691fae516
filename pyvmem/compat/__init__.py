# SPDX-License-Identifier: MIT
"""Modules that stand in for those of other KV caches, over this package's own."""

__all__: list[str] = []
