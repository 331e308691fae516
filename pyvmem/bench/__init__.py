# SPDX-License-Identifier: MIT
"""The benchmark behind `vmem bench api`; a part that needs more than the core does says so."""

__all__: list[str] = []
