#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Runs a command in a virtual machine with both modules loaded, and shows its output.

The exit status is the command's; it is 1, and the reason is printed, if the kernel's log contains a
warning, a module cannot be loaded or unloaded, or time runs out. The kernel's log is kept.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import re
import shlex
import signal
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

from guest.image import layer, python_image  # noqa: E402
from guest.kernels import kernel_for, own_modules  # noqa: E402
from guest.machine import GuestError, Machine, boot  # noqa: E402

ROOT = HERE.parent.parent
BUILD = Path(os.environ.get("VMEM_KERNEL_BUILD", ROOT / "build" / "kernel")).resolve()
# Needed to read the disk image, and to make it writable for the guest.
IMAGE_MODULES = ("virtio_pci", "virtio_blk", "overlay")
IMAGE_ENVIRONMENT = (f"PATH={ROOT}/build/venv/bin:/usr/sbin:/usr/bin:/sbin:/bin",)
ARCHITECTURES = ("ampere", "hopper", "blackwell", "gb20x")
UVM_ARGS = ("uvm_enable_builtin_tests=1", "uvm_leak_checker=1")


def parse(arguments: list[str]) -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--tree", type=Path, help="the folder of both modules; default: no modules are loaded")
    add("--arch", choices=ARCHITECTURES, default="hopper", help="architecture of the software GPUs")
    add("--gpus", type=int, default=1, metavar="N", help="software GPUs (default 1)")
    add("--vidmem", type=int, metavar="MB", help="memory of each")
    add("--module-args", default="", metavar="ARGS", help="parameters of nvidia.ko")
    add("--uvm-args", default="", metavar="ARGS", help="parameters of nvidia-uvm.ko")
    add("--kernel", type=Path, metavar="VMLINUZ", help="default: that of the tree's kernel release")
    add(
        "--image",
        metavar="python|FILE",
        help="run the command on a disk image: `python` (Python and the project), or a file",
    )
    add("--memory", type=int, metavar="MB", help="guest memory (default 1536, with an image 3072)")
    add("--smp", type=int, default=2, metavar="N", help="its processors (default 2)")
    add("--append", default="", metavar="ARGS", help="additions to the kernel's command line")
    add("--file", action="append", default=[], metavar="HOST[:GUEST]", help="add a file")
    add("--env", action="append", default=[], metavar="NAME=VALUE", help="for the command")
    add(
        "--timeout",
        type=float,
        default=300,
        metavar="S",
        help="limit for the whole run (default 300)",
    )
    add("--allow", action="append", default=[], metavar="REGEX", help="allowed in the kernel's log")
    add("--name", help="name of the log file (default: the command's)")
    add("--keep-symbols", action="store_true", help="do not strip the modules")
    add("--report", type=Path, metavar="FILE", help="write the outcome as JSON")
    add("--verbose", "-v", action="store_true", help="show the kernel's log too, at the end")
    add("command", nargs="+", help="a program of this machine (static), or one of the guest's")
    return parser.parse_args(arguments)


def describe(options: argparse.Namespace) -> Machine:
    """Returns the machine that the options describe."""
    program, *arguments = options.command
    files = []
    if Path(program).is_file():
        files.append((Path(program), f"/test/{Path(program).name}"))
        program = f"/test/{Path(program).name}"
    for one in options.file:
        source, _, name = one.partition(":")
        files.append((Path(source), name or f"/test/{Path(source).name}"))
    module_args = [f"arch={options.arch}"]
    if options.vidmem is not None:
        module_args.append(f"vidmem_mb={options.vidmem}")
    kernel = options.kernel or kernel_for(options.tree, BUILD)
    machine = Machine(
        kernel=kernel,
        command=[program, *arguments],
        modules=options.tree,
        module_args=[*module_args, *shlex.split(options.module_args)],
        uvm_args=[*UVM_ARGS, *shlex.split(options.uvm_args)],
        strip=not options.keep_symbols,
        gpus=options.gpus,
        memory=options.memory or (3072 if options.image else 1536),
        processors=options.smp,
        timeout=options.timeout,
        append=options.append,
        files=files,
        environment=options.env,
        allowed=options.allow,
    )
    if options.image:
        machine.kernel_modules = own_modules(kernel, IMAGE_MODULES, BUILD / "cache")
    if options.image == "python":
        machine.image = python_image(BUILD / "cache")
        machine.prepare = lambda root: layer(root, "/layer")
        machine.folder = str(ROOT)
        machine.environment = [*IMAGE_ENVIRONMENT, *options.env]
    elif options.image:
        machine.image = Path(options.image)
        if not machine.image.is_file():
            raise GuestError(f"--image {options.image}: neither `python` nor a file")
    return machine


def show(data: bytes) -> None:
    """Writes data to standard output, without buffering it."""
    sys.stdout.buffer.write(data)
    sys.stdout.buffer.flush()


def main() -> int:
    """Boots the machine, runs the command and reports the outcome."""
    options = parse(sys.argv[1:])
    # Terminating this process must stop the guest too.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    program = re.sub(r"[^\w.-]+", "_", Path(options.command[0]).name)
    name = options.name or f"{program}-{os.getpid()}"
    log = BUILD / "logs" / f"{name}.log"
    try:
        outcome = boot(describe(options), log, BUILD / "cache", show)
    except GuestError as error:
        print(f"FAILED: {error}")
        return 1
    if options.report:
        options.report.write_text(json.dumps(dataclasses.asdict(outcome), default=str))
    if options.verbose:
        show(log.read_bytes())
    for failure in outcome.failures:
        print(f"FAILED: {failure}")
    shown = os.path.relpath(log) if log.is_relative_to(Path.cwd()) else str(log)
    print(f"exit status {outcome.status}, {outcome.seconds:.1f} s, log: {shown}", flush=True)
    return outcome.code


if __name__ == "__main__":
    sys.exit(main())
