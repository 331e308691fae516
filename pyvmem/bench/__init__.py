# SPDX-License-Identifier: MIT
"""Implements `vmem bench api`. Parts report if an optional package is missing."""

__all__: list[str] = []
