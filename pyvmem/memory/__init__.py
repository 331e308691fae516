# SPDX-License-Identifier: MIT
"""Contexts, reservations, pages, batches and GPU work, on top of libvmem."""

__all__: list[str] = []
