# SPDX-License-Identifier: MIT
"""`vmem bench api`. A part that needs an optional package says so if it is missing."""

__all__: list[str] = []
