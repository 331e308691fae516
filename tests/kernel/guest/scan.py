# SPDX-License-Identifier: MIT
"""Searches a kernel's log for failures."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

__all__ = ["LogScan"]

# One alternative per line; the comments say what prints such lines.
SUSPECT = re.compile(
    "|".join(
        (
            r"\bWARNING: ",  # WARN_ON and lockdep
            r"\bBUG: ",  # bad accesses, KASAN, atomicity, soft lockups, caches destroyed in use
            r"\bBUG [\w./-]+ \(",  # SLUB's consistency checks
            r"\bkernel BUG at ",
            r"\bOops: ",
            r"general protection fault",
            r"Unable to handle kernel",
            r"Kernel panic",
            r"\bUBSAN: ",
            r"\bKFENCE: ",
            r"\bINFO: task .* blocked for more than",
            r"\bINFO: (rcu|possible|trying to register)",
            r"rcu: INFO: ",
            r"possible .*(deadlock|locking dependency)",
            r"inconsistent lock state",
            r"suspicious RCU usage",
            r"held lock.* freed|lock held when returning to user space",
            r"bad unlock balance",
            r"kmemleak: (\d+ new suspected|Memory pool empty|Kernel memory leak detector disabled)",
            r"unreferenced object 0x",
            r"list_(add|del) corruption",
            r"refcount_t: ",
            r"Assert failed, condition",  # UVM_ASSERT
            r"nvidia-uvm.*[Pp]anic",
            r"Memory leak of -?\d+ bytes",  # UVM's leak checker, and vmem's
            r"Leaked \d+ bytes from ",  # each leak, with uvm_leak_checker=2
            r"nvidia-uvm: .*(ERROR|Fatal)",
            r"nvidia-uvm: vmem: ",  # a fatal fault, a batch that failed
            r"(?i:softgpu.*\b(error|leak|leaked|assert)\b)",
            r"Objects remaining in .* on __kmem_cache_shutdown",
            r"Bad page (state|map)",
            r"Out of memory: Killed",
            r"scheduling while atomic|sleeping function called from invalid context",
            r"segfault at|traps: .* trap ",
        )
    )
)


class LogScan:
    """Scans a kernel's log line by line and collects the lines that report a failure."""

    MOST = 20

    def __init__(self, allowed: Sequence[str] = ()) -> None:
        self._allowed = [re.compile(pattern) for pattern in allowed]
        self.findings: list[str] = []
        self.left_out = 0

    def line(self, text: str) -> bool:
        """Collects a line if it reports a failure; returns whether it does."""
        if not SUSPECT.search(text) or any(one.search(text) for one in self._allowed):
            return False
        if len(self.findings) < self.MOST:
            self.findings.append(text)
        else:
            self.left_out += 1
        return True

    def lines(self, texts: Iterable[str]) -> None:
        """Scans several lines."""
        for text in texts:
            self.line(text)
