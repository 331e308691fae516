# SPDX-License-Identifier: MIT
"""Memory: contexts, reservations, pages, batches and GPU work, over libvmem."""

__all__: list[str] = []
