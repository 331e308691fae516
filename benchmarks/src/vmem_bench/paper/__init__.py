# SPDX-License-Identifier: MIT
"""`vmem bench paper`: the papers' tables and figures compared with our results."""

__all__: list[str] = []
