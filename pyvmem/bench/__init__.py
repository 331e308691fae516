# SPDX-License-Identifier: MIT
"""Implements `vmem bench api`. A part reports if an optional package that it needs is missing."""

__all__: list[str] = []
