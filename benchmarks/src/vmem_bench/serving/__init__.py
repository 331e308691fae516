# SPDX-License-Identifier: MIT
"""`vmem bench serve`: a serving loop that compares ways to store keys and values."""

__all__: list[str] = []
