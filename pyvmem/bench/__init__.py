# SPDX-License-Identifier: MIT
"""Implements `vmem bench api`. A part that needs an optional package reports if it is missing."""

__all__: list[str] = []
