# SPDX-License-Identifier: MIT
"""Shapes of the data that a model's layers store, read from its configuration."""

__all__: list[str] = []
