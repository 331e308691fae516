#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Replaces the stock nvidia-uvm with the patched module (`load`), or restores it (`unload`).

The exit status is 0 on success, 1 if refused with nothing changed, 2 if it failed and the previous
module was restored, and 3 if it failed and the stock module could not be restored.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import shlex
import signal
import sys
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from kernel_common import KERNEL_BUILD, ROOT, KernelBuildError, say
from module_elf import KernelModule, ModuleFileError, read_module
from module_kbuild import find_nvidia
from module_refuse import ALLOWABLE, doubts, load_refusals, unload_refusals
from module_swap import Interrupted, NotRestored, Swap, SwapError
from module_system import System

__all__ = ["default_module", "loaded_nvidia", "main"]

LOCK = "run/vmem-module.lock"
DONE, REFUSED, FAILED, NOT_RESTORED = range(4)


class Refused(Exception):
    """Raised when a load or unload is refused; nothing was changed."""


@contextmanager
def only_one(system: System) -> Iterator[None]:
    """Holds the machine-wide lock for loads and unloads."""
    path = system.root / LOCK
    with open(path, "a+", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            file.seek(0)
            holder = file.read().strip()
            raise Refused(f"another load or unload is running (process {holder})") from error
        file.truncate(0)
        file.write(f"{os.getpid()}\n")
        file.flush()
        yield


def default_module(system: System) -> Path:
    """Returns the path of the module that `make module` builds for the loaded driver and kernel."""
    return KERNEL_BUILD / "module" / f"{system.driver_version()}-{system.release()}/nvidia-uvm.ko"


def loaded_nvidia(system: System) -> KernelModule | None:
    """Returns the file of the loaded nvidia.ko, or None if it is missing or has been replaced."""
    srcversion = system.source_version("nvidia")
    modules = system.root / "lib/modules" / system.release()
    found = find_nvidia(modules, system.driver_version(), srcversion)
    if found is None or (srcversion and found.first("srcversion") != srcversion):
        return None
    return found


def read_given(system: System, given: str) -> KernelModule:
    """Returns the module to load: the given file, or else the one that `make module` builds."""
    path = Path(given) if given else default_module(system)
    if not path.is_file():
        if not given and not system.driver_version():
            raise Refused("nvidia.ko is not loaded: start the stock driver first (modprobe nvidia)")
        raise Refused(f"{path} does not exist: run make module")
    try:
        return read_module(path.resolve())
    except ModuleFileError as error:
        raise Refused(str(error)) from error


def refuse(reasons: list[str]) -> None:
    """Raises Refused if there are reasons to refuse."""
    if reasons:
        raise Refused("\n  ".join(["refused; nothing was changed:", *reasons]))


def load(swap: Swap, given: str, allowed: Collection[str]) -> None:
    """Carries out `make load`."""
    module = read_given(swap.system, given)
    nvidia = loaded_nvidia(swap.system)
    refuse(load_refusals(swap.system, module, nvidia, allowed))
    for doubt in doubts(swap.system, module, nvidia):
        say(f"ALLOW={doubt.word} overrides: {doubt.text}")
    swap.load(module)
    say("loaded; `make unload` or a restart restores the stock module")


def unload(swap: Swap) -> None:
    """Carries out `make unload`."""
    refuse(unload_refusals(swap.system, unfinished=swap.stock_expected()))
    swap.unload()


def stop(number: int, _frame: FrameType | None) -> None:
    """Turns a signal into an exception, so that a swap in progress is undone."""
    raise Interrupted(f"stopped by {signal.Signals(number).name}")


def usual_selftest() -> list[str]:
    """Returns the command that runs this checkout's self-test."""
    program = ROOT / "build" / "venv" / "bin" / "vmem"
    report = ROOT / "build" / "selftest.json"
    return [str(program), "selftest", "--backend", "uvm", "--out", str(report)]


def main() -> int:
    """Parses the command line and loads or unloads the module; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("action", choices=("load", "unload"))
    parser.add_argument("--module", default=os.environ.get("MODULE", ""), help="the file to load")
    parser.add_argument(
        "--selftest",
        default=os.environ.get("SELFTEST", ""),
        help="the command that decides whether the module stays (default: vmem selftest of uvm)",
    )
    parser.add_argument("--selftest-seconds", type=int, default=900)
    parser.add_argument(
        "--arguments", default=os.environ.get("UVM_ARGS", ""), help="more parameters of the module"
    )
    parser.add_argument(
        "--allow",
        default=os.environ.get("ALLOW", ""),
        metavar="WORDS",
        help=f"override a refusal because of untested or uncheckable parts: {', '.join(ALLOWABLE)}",
    )
    parser.add_argument(
        "--sysroot", type=Path, default=Path("/"), help="root directory of the machine"
    )
    options = parser.parse_args()
    allowed = set(options.allow.replace(",", " ").split())
    for word in sorted(allowed.difference(ALLOWABLE)):
        parser.error(f"ALLOW must be one of {', '.join(ALLOWABLE)}, not {word}")
    system = System(options.sysroot)
    swap = Swap(
        system,
        say,
        selftest=shlex.split(options.selftest) or usual_selftest(),
        selftest_seconds=options.selftest_seconds,
        arguments=shlex.split(options.arguments),
    )
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, stop)
    try:
        if not system.may_load():
            refuse(unload_refusals(system))
        with only_one(system):
            if options.action == "load":
                load(swap, options.module, allowed)
            else:
                unload(swap)
    except (Refused, KernelBuildError) as error:
        say(str(error))
        return REFUSED
    except (SwapError, Interrupted) as error:
        say(f"FAILED: {error}")
        say("the previous module is loaded again")
        return FAILED
    except NotRestored as error:
        say(f"FAILED: {error}")
        return NOT_RESTORED
    return DONE


if __name__ == "__main__":
    sys.exit(main())
