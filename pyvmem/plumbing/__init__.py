# SPDX-License-Identifier: MIT
"""Small things that every layer uses."""

__all__: list[str] = []
