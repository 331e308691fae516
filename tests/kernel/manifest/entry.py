# SPDX-License-Identifier: MIT
"""The description of a test."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["DELAYS", "DRIVER", "Test"]

# The version whose tests are all run; the others are built, and some of the tests run on them.
DRIVER = "535.261.03"
# Of the software GPU, for the driver that checks itself: each push begins up to so much later.
DELAYS = "delay_us=200"


@dataclass(frozen=True)
class Test:
    """One boot of a guest: which modules on which software GPUs, and the command to run.

    `program` is a C program of tests/kernel/c, with `args`; `command` is anything else that the
    guest has. With neither, the tree is built and that is all. Exit status 0 is passed, 77 is
    skipped with the last line of the output as the reason, anything else is failed, and so is
    whatever tests/kernel/run.py finds in the kernel's log.

    `caught`, for a driver with a bug seeded on purpose, turns this round: the test has passed when
    command or log have failed (not when time ran out), and the output matches this expression.
    """

    name: str
    program: str = ""
    args: Sequence[str] = ()
    command: Sequence[str] = ()
    image: bool = False  # run it on the disk image, where Python and the project are
    version: str = DRIVER
    type: str = "release"
    mutant: str = ""
    patched: bool = True
    load: bool = True  # load both modules before, unload them after
    suite: str = ""  # of Debian, on whose kernel it runs; none: on the guest's usual one
    checked: bool = False  # on the kernel with KASAN, lockdep, kmemleak, UBSAN, fault injection
    arch: str = "hopper"
    gpus: int = 1
    vidmem: int | None = None
    memory: int | None = None
    module_args: str = ""
    uvm_args: str = ""
    append: str = ""
    env: Sequence[str] = ()
    build: Sequence[str] = ()  # a command that makes what is needed, on this side, once a run
    files: Sequence[str] = ()  # HOST[:GUEST], relative to the repository
    allow: Sequence[str] = ()  # regular expressions of lines that the kernel's log may have
    timeout: float = 120.0
    caught: str = ""
    long: bool = False  # left to `make test-long`

    @property
    def tree(self) -> tuple[str, ...]:
        """The arguments of scripts/kernel_tree.py, except for the self-checking kernel."""
        words = [self.version, "--type", self.type]
        words += ["--mutant", self.mutant] if self.mutant else []
        words += ["--suite", self.suite] if self.suite else []
        return (*words,) if self.patched else (*words, "--unpatched")
