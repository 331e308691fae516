# SPDX-License-Identifier: MIT
"""``vmem completion``: generates a shell completion script from the parsers."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

import shtab

__all__ = ["SHELLS", "add_parser", "run"]

FILES = {  # where each shell looks for a command's script
    "bash": "~/.local/share/bash-completion/completions/vmem",
    "fish": "~/.config/fish/completions/vmem.fish",
    "zsh": "~/.zfunc/_vmem",
}
SHELLS = tuple(FILES)


def add_parser(sub: Any) -> None:
    """Adds the subcommand."""
    parser: argparse.ArgumentParser = sub.add_parser(
        "completion",
        help="print the completion script for a shell",
        description="Prints a script that completes `vmem`, its options and their values. Write it "
        "once, and again after an upgrade, into the file that the shell loads: "
        + "; ".join(f"{shell}: {file}" for shell, file in FILES.items())
        + " (a folder of $fpath).",
    )
    parser.add_argument("shell", choices=SHELLS, help="the shell")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Prints the script."""
    from pyvmem.commands.cli import whole_parser  # not at the top: cli imports this module

    parser = whole_parser()
    for action in _actions(parser):
        if action.metavar == "FILE":
            action.complete = shtab.FILE  # type: ignore[attr-defined]
        elif action.dest == "ledger":
            action.complete = shtab.DIRECTORY  # type: ignore[attr-defined]
    print(shtab.complete(parser, args.shell))
    return 0


def _actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    """Yields the actions of a parser and its subcommands."""
    for action in parser._actions:
        yield action
        if isinstance(action, argparse._SubParsersAction):
            for sub in action.choices.values():
                yield from _actions(sub)
