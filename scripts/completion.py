#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Writes the shells' completion of `vmem` from its parsers, by shtab; --check compares only.

Run by the interpreter of an environment with pyvmem, its benchmarks and shtab.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

import shtab

from pyvmem.commands import cli, completion

FOLDER = Path(__file__).resolve().parents[1] / "pyvmem" / "commands" / "completion"


def actions(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    """Those of a parser and its subcommands."""
    found = list(parser._actions)
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for sub in action.choices.values():
                found += actions(sub)
    return found


def text(shell: str) -> str:
    """The completion for a shell."""
    parser = cli.whole_parser()
    for action in actions(parser):
        if action.metavar == "FILE":
            action.complete = shtab.FILE  # type: ignore[attr-defined]
        elif action.dest == "ledger":
            action.complete = shtab.DIRECTORY  # type: ignore[attr-defined]
    made = shtab.complete(parser, shell)
    licence = "# SPDX-License-Identifier: MIT\n"
    first, _, rest = made.partition("\n")
    zsh = first.startswith("#compdef")  # which must stay first
    made = f"{first}\n{licence}{rest}" if zsh else licence + made
    return re.sub(r"[ \t]+$", "", made, flags=re.MULTILINE).rstrip() + "\n"


def main() -> int:
    """1 with --check if a file is not what the parsers give."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    stale = []
    for shell, name in completion.FILES.items():
        path, wanted = FOLDER / name, text(shell)
        if path.exists() and path.read_text(encoding="utf-8") == wanted:
            continue
        stale.append(name)
        if not check:
            path.write_text(wanted, encoding="utf-8")
    if check and stale:
        print(f"completion: not as the parsers are: {', '.join(stale)}; run scripts/completion.py")
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
