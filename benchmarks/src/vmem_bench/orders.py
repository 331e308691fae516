# SPDX-License-Identifier: MIT
"""The receiving end of the commands that a `Fleet` sends to an engine process."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

__all__ = ["Orders", "open_orders"]

Orders = tuple[dict[str, Any], Callable[[dict[str, Any]], None], Iterator[dict[str, Any]]]
"""The engine's options, a function that sends a reply, and the commands until stdin is closed."""


@contextmanager
def open_orders() -> Iterator[Orders]:
    """Opens the commands; argv names the options file and a descriptor for replies."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--options", type=Path, required=True)
    parser.add_argument("--answers", type=int, required=True)
    args = parser.parse_args()
    with os.fdopen(args.answers, "w", encoding="utf-8") as out:

        def say(answer: dict[str, Any]) -> None:
            print(json.dumps(answer), file=out, flush=True)

        yield json.loads(args.options.read_text(encoding="utf-8")), say, map(json.loads, sys.stdin)
