# SPDX-License-Identifier: MIT
"""`vmem bench api`; a part reports which packages it needs beyond the core."""

__all__: list[str] = []
