# SPDX-License-Identifier: MIT
"""The ``vmem`` command. Each subcommand lives in its own module, which is imported on demand."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import os
import select
import signal
import sys
from collections.abc import Sequence

from pyvmem import _native
from pyvmem.commands.usage import BadUsage
from pyvmem.errors import VMemError

__all__ = ["main", "whole_parser"]

# Each command's module, which defines add_parser(sub) and run(args) -> int, and its help line.
_COMMANDS = {
    "probe": ("pyvmem.commands.probe", "show which back ends work on this machine"),
    "features": ("pyvmem.features.cli", "show which cache features work, and what others need"),
    "selftest": ("pyvmem.selftest.cli", "check on the GPU itself that vmem works on this machine"),
    "bench": ("pyvmem.bench.cli", "measure the calls, and CUDA's own if there is a GPU"),
    "layouts": ("pyvmem.layouts.cli", "compare KV cache layouts, and pick the best"),
    "top": ("pyvmem.commands.top", "show the engines of this machine and their memory, live"),
    "watch": ("pyvmem.commands.viewer", "draw the pages of a running program's requests, live"),
    "limit": ("pyvmem.commands.limit", "set the memory limit of a running engine"),
    "control": (
        "pyvmem.commands.control",
        "show and set the memory that engines may have, over HTTP",
    ),
    "serve-demo": ("pyvmem.serve.cli", "serve prompts with a small model through the KV cache"),
    "completion": (
        "pyvmem.commands.completion",
        "print the completion script for bash, zsh or fish",
    ),
}

_LIVE = ("top", "watch", "control")  # commands that run until interrupted

# Packages that commands import lazily, and the extra in pyproject.toml that installs each.
_EXTRAS = {"torch": "torch", "numpy": "bench", "matplotlib": "plot", "rich": "serve"}


def whole_parser() -> argparse.ArgumentParser:
    """Returns the parser with every command's options."""
    return _parser(*_COMMANDS)


def _parser(*commands: str | None) -> argparse.ArgumentParser:
    """Returns a parser with all options of `commands`, and just a help line for the others."""
    parser = argparse.ArgumentParser(
        prog="vmem", description="Fine-grained GPU virtual memory for KV caches."
    )
    parser.add_argument("--version", action="version", version=f"vmem {_native.version()}")
    sub = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, (module, text) in _COMMANDS.items():
        if name in commands:
            importlib.import_module(module).add_parser(sub)
            added = sub.choices[name]
            added.description = (added.description or "").replace("``", "`") or None
        else:
            sub.add_parser(name, help=text, add_help=False)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line and returns the exit status.

    Returns:
        The command's status; 1 for an error, 2 for bad usage, 130 after Ctrl-C, 141 after its
        output pipe was closed (as a shell reports a program killed by SIGINT or SIGPIPE).
    """
    words = list(sys.argv[1:] if argv is None else argv)
    command = next((word for word in words if not word.startswith("-")), None)
    if sys.stdout is None:  # the caller closed standard output and wants no output
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    if sys.stderr is None:  # otherwise print() would write to standard output
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper):
        # Print "?" for characters that the output's encoding cannot represent.
        sys.stdout.reconfigure(errors="replace")
    try:
        try:
            args = _parser(command).parse_args(words)
            status: int = args.run(args)
        finally:
            sys.stdout.flush()  # a full disk may not be reported until now
    except ImportError as error:
        extra = _EXTRAS.get((error.name or "").partition(".")[0])
        which = f"; the extra pyvmem[{extra}] installs it" if extra else ""
        return _failed(command, f"a package is not installed: {error}{which}")
    except VMemError as error:
        # Name the operation only if it is a libvmem call, since those have man pages.
        call = f"{error.op}: " if error.op.startswith(("vMem", "vmem_")) else ""
        name = error.errno_name or type(error).__name__
        return _failed(command, f"{call}{name}: {error}")
    except BadUsage as error:
        return _failed(command, f"error: {error}", 2)
    except OSError as error:
        unread = _unread()
        _drop_output()
        if unread:
            return 128 + signal.SIGPIPE
        where = f"{error.filename}: " if error.filename is not None else ""
        return _failed(command, f"{where}{error.strerror or error}")
    except KeyboardInterrupt:
        if command not in _LIVE:
            _failed(command, "interrupted")
        return 128 + signal.SIGINT
    return status


def _failed(command: str | None, text: str, status: int = 1) -> int:
    print(f"{f'vmem {command}' if command else 'vmem'}: {text}", file=sys.stderr)
    return status


def _unread() -> bool:
    """Returns true if standard output is a pipe whose reader has closed it."""
    with contextlib.suppress(OSError, ValueError):  # no file descriptor, or closed
        output = select.poll()
        output.register(sys.stdout.fileno(), 0)
        return any(event & select.POLLERR for _, event in output.poll(0))
    return False


def _drop_output() -> None:
    """Discards buffered output, so that the interpreter does not retry writing it at exit."""
    try:
        sys.stdout.flush()
    except OSError:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
