# SPDX-License-Identifier: MIT
"""A serving loop that compares ways to keep keys and values; `vmem bench serve`."""

__all__: list[str] = []
