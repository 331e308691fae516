# SPDX-License-Identifier: MIT
"""The benchmarks of `vmem bench`; a part that needs more than the core package says so."""

__all__: list[str] = []
