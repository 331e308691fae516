# SPDX-License-Identifier: MIT
"""Terminal output: width, colors, and text that is redrawn in place."""

from __future__ import annotations

import io
import math
import os
import re
import shutil
import sys
import threading
from typing import TextIO

from pyvmem.plumbing.closing import Scoped

__all__ = ["BOLD", "DIM", "GREEN", "RED", "YELLOW", "Live", "columns", "has_colour", "painted"]

BOLD, DIM, RED, GREEN, YELLOW = "1", "2", "31", "32", "33"

_PAINT = re.compile(r"\x1b\[\d*m")


def columns(file: TextIO | None = None) -> float:
    """Returns a terminal's width; infinity for files and pipes, whose lines are not truncated."""
    return shutil.get_terminal_size().columns if (file or sys.stdout).isatty() else math.inf


def has_colour(file: TextIO | None = None) -> bool:
    """Returns true for a terminal that supports colors, unless NO_COLOR is set."""
    return (
        (file or sys.stdout).isatty()
        and not os.environ.get("NO_COLOR")
        and os.environ.get("TERM") not in ("dumb", "unknown")
    )


def painted(text: str, colour: str) -> str:
    """Returns `text` in a color, bold or dim; unchanged if `colour` is ""."""
    return f"\x1b[{colour}m{text}\x1b[0m" if text and colour else text


class Live(Scoped):
    """Text that is redrawn in place; its last version stays on the screen. Thread-safe.

    Lines are truncated at the terminal's width. Lines that do not fit on the screen are left out:
    they would make the terminal scroll, and text that has scrolled away cannot be redrawn. Lines
    that the program prints in the meantime appear above the text. If the output is not a terminal,
    only the last text is printed.
    """

    def __init__(self, file: TextIO | None = None) -> None:
        self._file = file or sys.stdout
        self.is_terminal = self._file.isatty()
        self._lock = threading.RLock()
        self._drawn = 0  # lines above the cursor that belong to this text
        self._text = ""
        self._above = _Above(self)

    def __enter__(self) -> Live:
        if self.is_terminal:
            self._write("\x1b[?25l")
            if self._file is sys.stdout:
                sys.stdout = self._above
        return self

    def _leave(self) -> None:
        if not self.is_terminal:
            if self._text:
                self._write(f"{self._text}\n")
            return
        if sys.stdout is self._above:
            sys.stdout = self._file
        self._write(f"\x1b[?25h{self._above.rest}")

    def show(self, text: str, above: str = "") -> None:
        """Replaces the text; prints `above`, whole lines that stay on the screen, above it."""
        with self._lock:
            self._text = text
            if not self.is_terminal:
                return
            size = shutil.get_terminal_size()
            lines = [_cut(line, size.columns) for line in text.splitlines()[: size.lines - 1]]
            up = f"\x1b[{self._drawn}A" if self._drawn else ""
            start = f"{up}\r\x1b[J{above}" if above else f"{up}\r"
            self._write(start + "".join(f"{line}\x1b[K\n" for line in lines) + "\x1b[J")
            self._drawn = len(lines)

    def print_above(self, lines: str) -> None:
        """Prints whole lines above the text."""
        with self._lock:
            self.show(self._text, lines)

    def _write(self, text: str) -> None:
        self._file.write(text)
        self._file.flush()


class _Above(io.TextIOBase):
    """Standard output while a `Live` is drawn: complete lines are printed above the live text."""

    def __init__(self, live: Live) -> None:
        self._live = live
        self.rest = ""  # an incomplete line

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        whole, newline, self.rest = (self.rest + text).rpartition("\n")
        if newline:
            self._live.print_above(whole + newline)
        return len(text)


def _cut(line: str, width: int) -> str:
    """Truncates a line to `width` characters, not counting color codes."""
    room, kept, at = width, [], 0
    for paint in _PAINT.finditer(line):
        kept += [line[at : min(paint.start(), at + room)], paint.group()]
        room -= min(paint.start() - at, room)
        at = paint.end()
    return "".join(kept) + line[at : at + room]
