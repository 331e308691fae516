# SPDX-License-Identifier: MIT
"""`vmem bench paper`: the papers' tables and figures beside our results."""

__all__: list[str] = []
