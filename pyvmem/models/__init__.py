# SPDX-License-Identifier: MIT
"""Models: the shapes that their layers keep, read from configurations."""

__all__: list[str] = []
