# SPDX-License-Identifier: MIT
"""Shapes of what a model's layers keep, read from configurations."""

__all__: list[str] = []
