# SPDX-License-Identifier: MIT
"""The `vmem` command, its subcommands and the code that they share."""

__all__: list[str] = []
