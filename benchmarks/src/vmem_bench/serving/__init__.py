# SPDX-License-Identifier: MIT
"""`vmem bench serve`: a serving loop that compares ways to keep keys and values."""

__all__: list[str] = []
