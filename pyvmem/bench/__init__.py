# SPDX-License-Identifier: MIT
"""The benchmarks behind `vmem bench`; a part that needs more than the core does says so."""

__all__: list[str] = []
