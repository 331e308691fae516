# SPDX-License-Identifier: MIT
"""The `vmem` command and its subcommands, and what they share."""

__all__: list[str] = []
