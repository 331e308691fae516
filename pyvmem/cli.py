# SPDX-License-Identifier: MIT
"""The ``vmem`` command. Each subcommand lives in its own module, imported when it is asked for."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

from pyvmem import _native
from pyvmem.errors import VMemError

__all__ = ["main"]

# module with add_parser(sub) and run(args) -> int, and the line for `vmem --help`
_COMMANDS = {
    "probe": ("pyvmem.probe", "which back ends work on this machine"),
    "features": ("pyvmem.features.cli", "what of the cache works on them, and what is missing"),
    "selftest": ("pyvmem.selftest.cli", "check on the GPU itself that it works on this machine"),
    "bench": ("pyvmem.bench.cli", "measure the calls, against CUDA's own where there is a GPU"),
    "layouts": ("pyvmem.layouts.cli", "what layouts of the KV cache cost, and which to take"),
    "top": ("pyvmem.top", "the engines of this machine and their memory, live"),
    "watch": ("pyvmem.viewer", "the pages of a running program's requests, live"),
    "limit": ("pyvmem.limit", "set the memory limit of a running engine"),
    "serve-demo": ("pyvmem.serve.cli", "serve prompts with a small model through the KV cache"),
}


def _parser(command: str | None) -> argparse.ArgumentParser:
    """The parser; only `command`'s module is imported, the others show their help line alone."""
    parser = argparse.ArgumentParser(
        prog="vmem", description="Fine-grained GPU virtual memory for KV caches."
    )
    parser.add_argument("--version", action="version", version=f"vmem {_native.version()}")
    sub = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, (module, text) in _COMMANDS.items():
        if name == command:
            importlib.import_module(module).add_parser(sub)
        else:
            sub.add_parser(name, help=text, add_help=False)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line and returns the exit status: 1 for an error, 2 for bad usage."""
    words = list(sys.argv[1:] if argv is None else argv)
    command = next((word for word in words if not word.startswith("-")), None)
    try:
        args = _parser(command).parse_args(words)
        status: int = args.run(args)
    except ImportError as error:
        print(f"vmem: {command} needs a package that is not installed: {error}", file=sys.stderr)
        return 1
    except VMemError as error:
        name = error.errno_name or type(error).__name__
        print(f"vmem: {error.op or command}: {name}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return status
