# SPDX-License-Identifier: MIT
"""Shapes of the data that a model's layers store, read from configurations."""

__all__: list[str] = []
