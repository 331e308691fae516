# SPDX-License-Identifier: MIT
"""``vmem selftest`` checks from the GPU that fine-grained memory works on this machine.

What a test bed cannot show (a real TLB, real caches, real membars) shows here: contents are written
and read by kernels on the GPU (Context.write and read), at addresses whose translation has just
changed. Made for the first load of the patched driver; runs on every back end.
"""

from __future__ import annotations

__all__: list[str] = []
