# SPDX-License-Identifier: MIT
"""``vmem control``: shows and sets the memory of this user's engines over HTTP."""

from __future__ import annotations

import argparse
import os
import re
import stat
import sys
from pathlib import Path
from typing import Any

from pyvmem.commands.top import add_ledger, folder_of
from pyvmem.commands.usage import BadUsage
from pyvmem.ledger.accounts import private
from pyvmem.ledger.control import Control
from pyvmem.plumbing.paths import existing_file

__all__ = ["add_parser", "run"]

_SOCKET = "control.sock"  # name of the socket in the ledgers' folder
_LEAST = 16  # minimum token length, in characters


def add_parser(sub: Any) -> None:
    """Adds the subcommand."""
    parser = sub.add_parser(
        "control",
        help="show and set the memory that engines may have, over HTTP",
        description="Answers HTTP requests about the engines of this user, until interrupted: "
        "what `vmem top` shows, and limits, floors and sleep. By default on a Unix socket in the "
        "ledgers' folder, which only this user can reach.",
    )
    parser.add_argument("--socket", type=Path, metavar="PATH", help="Unix socket to listen on")
    parser.add_argument(
        "--listen", type=_address, metavar="HOST:PORT", help="TCP instead; needs --token-file"
    )
    parser.add_argument(
        "--token-file",
        type=existing_file,
        metavar="FILE",
        help=f"the bearer token, {_LEAST} characters or more (mode 600)",
    )
    add_ledger(parser)
    parser.set_defaults(run=run)


def _address(text: str) -> tuple[str, int]:
    found = re.fullmatch(r"(?:\[([0-9A-Fa-f:.]+)\]|([\w.-]+)):(\d{1,5})", text, re.ASCII)
    if not found or int(found[3]) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r}: expected HOST:PORT, the port up to 65535")
    return found[1] or found[2], int(found[3])


def _token(path: Path) -> str:
    state = path.stat()
    if state.st_uid != os.getuid() or state.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        mode = stat.S_IMODE(state.st_mode)
        raise BadUsage(
            f"{path}: owner is user {state.st_uid}, mode {mode:o}; "
            f"expected user {os.getuid()}, mode 600"
        )
    token = path.read_text(encoding="utf-8", errors="replace").strip()
    if not re.fullmatch(rf"[!-~]{{{_LEAST},}}", token):
        raise BadUsage(f"{path}: expected {_LEAST} printable characters or more, without spaces")
    return token


def run(args: argparse.Namespace) -> int:
    """Serves until interrupted."""
    if args.listen and args.socket:
        raise BadUsage("--socket and --listen exclude each other")
    if bool(args.listen) != bool(args.token_file):
        raise BadUsage("--listen needs --token-file, and a Unix socket has no token")
    folder = folder_of(args)
    where: Any = args.listen or args.socket or private(folder) / _SOCKET
    with Control(folder, where, _token(args.token_file) if args.token_file else "") as server:
        place = f"{where[0]}:{server.port}" if args.listen else where
        print(f"vmem control: {place}", file=sys.stderr, flush=True)
        server.wait()
    return 0
