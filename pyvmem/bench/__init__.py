# SPDX-License-Identifier: MIT
"""`vmem bench api`; a part that needs more than the core package says so."""

__all__: list[str] = []
