# SPDX-License-Identifier: MIT
"""The papers' tables and figures beside our results; `vmem bench paper`."""

__all__: list[str] = []
