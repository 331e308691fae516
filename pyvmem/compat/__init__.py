# SPDX-License-Identifier: MIT
"""Drop-in replacements for other projects' modules, built on pyvmem's cache and torch pool."""

__all__: list[str] = []
