# SPDX-License-Identifier: MIT
"""``vmem completion``: prints a shell's completion script.

The files beside this module are generated from the parsers by ``scripts/completion.py``.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

__all__ = ["FILES", "add_parser", "run"]

FILES = {"bash": "vmem.bash", "zsh": "_vmem", "fish": "vmem.fish"}


def add_parser(sub: Any) -> None:
    """Adds the subcommand."""
    parser: argparse.ArgumentParser = sub.add_parser(
        "completion",
        help="print the completion of a shell",
        description="Prints what makes a shell complete `vmem`, its options and their values: "
        'eval "$(vmem completion bash)" in ~/.bashrc; vmem completion zsh into a file _vmem of '
        "$fpath; vmem completion fish | source in config.fish.",
    )
    parser.add_argument("shell", choices=tuple(FILES), help="whose")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Prints the file."""
    path = Path(__file__).with_name(FILES[args.shell])
    print(path.read_text(encoding="utf-8"), end="")
    return 0
