# SPDX-License-Identifier: MIT
"""Implements `vmem bench api`. A part whose optional package is missing says so in its report."""

__all__: list[str] = []
