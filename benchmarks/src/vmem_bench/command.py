# SPDX-License-Identifier: MIT
"""Code shared by the commands that measure the KV cache and attention.

A command is a list of parts, which run under one deadline. The result file is rewritten after each
part, and whenever a part requests it.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from pyvmem.bench import fa3
from pyvmem.bench.aims import Aims
from pyvmem.bench.record import Part, Record
from pyvmem.bench.running import backends, conducted, now, said
from pyvmem.bench.timing import Deadline
from pyvmem.commands.arguments import add_backend, add_device
from pyvmem.commands.machine import describe
from pyvmem.errors import VMemError
from pyvmem.layouts.options import page_size, positive
from pyvmem.memory.context import Context
from pyvmem.plumbing.paths import existing_file, replaced

if TYPE_CHECKING:
    import torch

__all__ = [
    "Command",
    "WrongResult",
    "add_common",
    "add_page",
    "imports",
    "open_command",
    "run_on_device",
]


class WrongResult(RuntimeError):
    """The code being measured computed a wrong result."""


def add_common(parser: argparse.ArgumentParser, seconds: int) -> None:
    """Adds the options that these commands share; `seconds` is the default deadline."""
    add = parser.add_argument
    add_backend(parser, "of the cache")
    add_device(parser)
    add("--fa3", type=existing_file, metavar="FILE", help="_vllm_fa3_C.abi3.so or a zip")
    add(
        "--deadline",
        type=positive,
        default=seconds,
        metavar="S",
        help=f"stop after S seconds ({seconds})",
    )
    add("--quick", action="store_true", help="a tiny model and a few samples: a smoke test")
    add("--out", type=replaced, metavar="FILE", help="write JSON here, raw samples in raw/")
    add("--json", action="store_true", help="print the JSON instead of the tables")


def add_page(parser: argparse.ArgumentParser) -> None:
    """Adds ``--page``, for commands that measure one page size at a time."""
    parser.add_argument(
        "--page", type=page_size, default=0, help="page size of the cache, such as 2M (64K)"
    )


class Command:
    """One run of a command, with the record that it fills in and the file that it writes.

    Args:
        args: the parsed arguments, which include the options of `add_common`.
        name: name of the benchmark; the record's format is ``vmem-bench-NAME/1``.
        method: describes how each quantity is measured.
        **options: recorded in addition to the common options.

    Attributes:
        backend: name of the back end.
        page_sizes, max_segments: from the `ContextInfo` of the back end.
        deadline: deadline of the whole command.

    Raises:
        VMemError: the back end cannot be opened.
    """

    def __init__(
        self, args: argparse.Namespace, name: str, method: dict[str, str], **options: Any
    ) -> None:
        self.args = args
        self.quick: bool = args.quick
        self.deadline = Deadline(args.deadline)
        with Context(args.backend, device=args.device) as context:
            self.backend = context.info.backend
            self.page_sizes = context.info.page_sizes
            self.max_segments = context.info.max_segments
        self.record = Record(
            machine=describe(),
            options={
                "quick": args.quick,
                "backend": self.backend,
                "asked": args.backend,
                "device": args.device,
                "deadline": args.deadline,
                "fa3": args.fa3 is not None,
                "page": self.page,
                **options,
            },
            backends=backends(args.device),
            method=method,
            started=now(),
            format=f"vmem-bench-{name}/1",
        )
        self.aims = Aims(self.record, self.backend)

    @property
    def page(self) -> int:
        """The value of ``--page``; defaults to the smallest available page of at least 64 KiB.

        A quick run on ``host`` uses 4 KiB, so that a tiny model's requests need several pages.
        """
        asked: int = getattr(self.args, "page", 0)
        if asked:
            return asked
        if self.quick and self.backend == "host":
            return 4 << 10
        return min(size for size in self.page_sizes if size >= 64 << 10)

    def device(self) -> torch.device:
        """Returns the torch device to use.

        Raises:
            RuntimeError: torch cannot use the device; the message says why.
        """
        try:
            import torch
        except ImportError as error:
            raise RuntimeError(f"torch cannot be imported: {error}") from None
        if self.backend == "host":
            return torch.device("cpu")
        if not torch.cuda.is_available():
            raise RuntimeError("this torch cannot use CUDA")
        return torch.device(f"cuda:{self.args.device}")

    def load_fa3(self, part: Part, device: torch.device) -> None:
        """Registers FlashAttention-3 with `pyvmem.attention`, or notes why it cannot."""
        if self.args.fa3 is None and device.type != "cuda":
            return
        try:
            fa3.load(self.args.fa3, device)
        except (OSError, RuntimeError, ValueError, AttributeError) as error:
            part.notes.append(f"fa3: {str(error).splitlines()[0]}")

    def write(self) -> None:
        """Writes the results so far, if a file was requested."""
        self.record.seconds = self.deadline.used
        self.record.aims = self.aims.found
        if self.args.out is not None:
            self.record.write(self.args.out)

    def show(self, text: str) -> None:
        """Prints a progress line."""
        print(f"{self.deadline.used:5.0f} s  {text}", file=sys.stderr, flush=True)

    def finish(self) -> int:
        """Writes and prints the results. Returns the exit status from `ended`."""
        self.write()
        return said(self.record, self.args)


def open_command(*args: Any, **options: Any) -> Command | None:
    """Returns a `Command`; if the back end cannot be opened, prints why and returns None."""
    try:
        return Command(*args, **options)
    except VMemError as error:
        print(f"vmem bench: {error}", file=sys.stderr)
        return None


def imports(command: Command, part: Part, package: str) -> bool:
    """Returns whether `package` can be imported; records its version, or why it cannot."""
    try:
        found = importlib.import_module(package)
    except ImportError as error:
        part.not_run("*", f"{package} cannot be imported: {error}")
        return False
    command.record.options[package] = found.__version__
    return True


def run_on_device(
    command: Command | None,
    name: str,
    title: str,
    measure: Callable[[Command, Part, torch.device], None],
    *,
    follows: bool = False,
) -> int:
    """Runs one part on the back end's device.

    Returns the exit status from `ended`, or 2 if the back end cannot be opened.

    follows: true if another rank has the results; this process then reports only its own failure.
    """
    if command is None:
        return 2
    part = command.record.part(name, title)
    with conducted(part):
        try:
            device = command.device()
        except RuntimeError as error:
            part.not_run("*", str(error))
        else:
            command.load_fa3(part, device)
            measure(command, part, device)
    if not follows:
        return command.finish()
    if part.status == "failed":
        command.show(part.why)
    return int(part.status == "failed")
