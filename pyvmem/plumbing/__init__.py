# SPDX-License-Identifier: MIT
"""Helpers shared by all layers of the package."""

__all__: list[str] = []
