# SPDX-License-Identifier: MIT
"""Defines how the manifest describes a test."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["DELAYS", "DRIVER", "Test"]

# The driver version on which all tests run. Other versions are built, and run only some tests.
DRIVER = "535.261.03"
# Software GPU parameter for debug builds: delays each push by up to 200 us.
DELAYS = "delay_us=200"


@dataclass(frozen=True)
class Test:
    """One boot of a guest: which modules on which software GPUs, and the command to run.

    `program` is a C program of tests/kernel/c, with `args`; `command` is any other command of the
    guest. With neither, the tree is only built. Exit status 0 means passed; 77 means skipped, and
    the last line of the output gives the reason. Any other status is a failure, and so is a line in
    the kernel's log that tests/kernel/run.py reports.

    `caught`, for a driver with a deliberate bug, inverts this: the test passes if the command or
    the log check fails (but not on a timeout), and the output matches this expression.
    """

    name: str
    program: str = ""
    args: Sequence[str] = ()
    command: Sequence[str] = ()
    image: bool = False  # run on the disk image, which has Python and the project
    version: str = DRIVER
    type: str = "release"
    mutant: str = ""
    patched: bool = True
    load: bool = True  # load both modules first, and unload them at the end
    suite: str = ""  # Debian suite of the kernel, or "" for the guest's usual kernel
    checked: bool = False  # on the kernel with KASAN, lockdep, kmemleak, UBSAN, fault injection
    arch: str = "hopper"
    gpus: int = 1
    vidmem: int | None = None
    memory: int | None = None
    module_args: str = ""
    uvm_args: str = ""
    append: str = ""
    env: Sequence[str] = ()
    build: Sequence[str] = ()  # a host command that builds prerequisites, once per run
    files: Sequence[str] = ()  # HOST[:GUEST], relative to the repository
    allow: Sequence[str] = ()  # regular expressions of allowed lines in the kernel's log
    timeout: float = 120.0
    caught: str = ""
    long: bool = False  # only in `make test-long`

    @property
    def tree(self) -> tuple[str, ...]:
        """The arguments for kernel_tree.py, except the option for the self-checking kernel."""
        words = [self.version, "--type", self.type]
        words += ["--mutant", self.mutant] if self.mutant else []
        words += ["--suite", self.suite] if self.suite else []
        return (*words,) if self.patched else (*words, "--unpatched")
