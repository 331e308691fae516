# SPDX-License-Identifier: MIT
"""``vmem selftest``: checks on the GPU itself that fine-grained memory works on this machine.

Kernels on the GPU write and read contents (Context.write and read) at addresses whose translation
has just changed. This tests the real TLB, caches and memory barriers, which no simulation has. The
self-test is meant for the first load of the patched driver, but runs on every back end.
"""

from __future__ import annotations

__all__: list[str] = []
