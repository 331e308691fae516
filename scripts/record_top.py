#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Records `vmem top` while three engines take turns, and draws an animation.

    scripts/record_top.py docs/operations/top.svg

The engines are pyvmem caches in separate processes, on the back end `host`, which share a ledger in
a temporary directory. The animation shows what the command wrote to a terminal. Run this script
with the Python of an environment that has pyvmem.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import html
import math
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import tempfile
import termios
import time
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

WIDTH, HEIGHT = 96, 9
CAPACITY = 192 << 20
ENGINES = ("llama", "gemma", "qwen")
SECONDS, TURN_S, INTERVAL_S = 15, 5.0, 0.25
MOST_REQUESTS, MOST_TOKENS, TOKENS_A_STEP, STEP_S = 10, 2000, 80, 0.08

CELL_W, CELL_H, MARGIN = 8.4, 18, 14
COLOURS = {"31": "#ff7b72", "32": "#7ee787", "33": "#e3b341", "2": "#8b949e", "1": "#ffffff"}
ESCAPE = re.compile(r"\x1b\[\??(\d*)([A-Za-z])")

Cell = tuple[str, str]  # character, color
Frame = tuple[tuple[Cell, ...], ...]


class Screen:
    """Interprets the escape sequences that `pyvmem.commands.terminal` writes."""

    def __init__(self) -> None:
        self.lines: list[list[Cell]] = [[] for _ in range(HEIGHT)]
        self.row = self.column = 0
        self.colour = ""

    def feed(self, text: str) -> None:
        """Processes a program's output."""
        at = 0
        for found in ESCAPE.finditer(text):
            self._put(text[at : found.start()])
            self._do(found[2], found[1])
            at = found.end()
        self._put(text[at:])

    def _put(self, text: str) -> None:
        for char in text:
            if char == "\r":
                self.column = 0
            elif char == "\n":
                self.row = min(self.row + 1, HEIGHT - 1)
            else:
                line = self.lines[self.row]
                line += [(" ", "")] * (self.column + 1 - len(line))
                line[self.column] = (char, self.colour)
                self.column += 1

    def _do(self, what: str, number: str) -> None:
        if what == "A":
            self.row = max(0, self.row - int(number))
        elif what in "KJ":
            del self.lines[self.row][self.column :]
            if what == "J":
                self.lines[self.row + 1 :] = [[] for _ in self.lines[self.row + 1 :]]
        elif what == "m":
            self.colour = "" if number == "0" else number

    def frame(self) -> Frame:
        """Returns the characters on the screen, with their colors."""
        return tuple(map(tuple, self.lines))


def engine(name: str, folder: Path) -> None:
    """Runs an engine whose requests grow until they finish, with more requests in its turn."""
    from pyvmem import Context, KVCache, KVCacheConfig
    from pyvmem.kvcache import Budget
    from pyvmem.ledger import Ledger

    config = KVCacheConfig(8, 4, 64, max_batch=MOST_REQUESTS, max_seq_len=4096)
    lengths, born = [0] * MOST_REQUESTS, time.monotonic()
    phase = ENGINES.index(name) / len(ENGINES)
    ledger = Ledger("host", CAPACITY, folder)
    with (
        Context("host") as context,
        Budget(context, CAPACITY, ledger=ledger, name=name) as budget,
        KVCache(config, budget=budget) as cache,
    ):
        running: list[int] = []
        while time.monotonic() - born < SECONDS + 3:
            turn = (time.monotonic() - born) / (TURN_S * len(ENGINES)) - phase
            wanted = round(MOST_REQUESTS * max(0.0, math.sin(2 * math.pi * (turn + 0.1))))
            while len(running) < wanted and (slot := cache.alloc_reqid()) is not None:
                running.append(slot)
            for slot in running:
                lengths[slot] += TOKENS_A_STEP
            while cache.step(lengths) != 0:  # out of memory: drop the youngest request
                lengths[running[-1]] = 0
                cache.free_reqid(running.pop())
            for slot in [slot for slot in running if lengths[slot] >= MOST_TOKENS]:
                cache.free_reqid(slot)
                running.remove(slot)
                lengths[slot] = 0
            time.sleep(STEP_S)


@contextlib.contextmanager
def engines(folder: Path) -> Iterator[None]:
    """Runs the engines during the `with` block."""
    words = [sys.executable, __file__, "--folder", str(folder), "--engine"]
    running = [subprocess.Popen([*words, name]) for name in ENGINES]
    try:
        yield
    finally:
        for one in running:
            one.terminate()
            one.wait()


def record(folder: Path) -> list[tuple[float, Frame]]:
    """Runs `vmem top` and returns its screens, each with the seconds since the first."""
    parent, child = pty.openpty()
    fcntl.ioctl(child, termios.TIOCSWINSZ, struct.pack("HHHH", HEIGHT + 1, WIDTH, 0, 0))
    words = ["-m", "pyvmem", "top", "--ledger", str(folder), "--interval", str(INTERVAL_S)]
    environment = {**os.environ, "TERM": "xterm", "NO_COLOR": ""}
    screen, frames, start = Screen(), list[tuple[float, Frame]](), 0.0
    with subprocess.Popen([sys.executable, *words], stdout=child, env=environment) as top:
        os.close(child)
        while not start or time.monotonic() - start < SECONDS:
            ready, _, _ = select.select([parent], [], [], 1)
            if not ready:
                continue
            screen.feed(os.read(parent, 1 << 16).decode())
            start = start or time.monotonic()
            frames.append((time.monotonic() - start, screen.frame()))
        top.send_signal(signal.SIGINT)
    os.close(parent)
    return frames


def line_of(cells: tuple[Cell, ...], y: float) -> str:
    """Returns a line as SVG text; gaps come from the positions of the words."""
    parts, column = [], 0
    for colour, group in groupby(cells, key=lambda cell: cell[1]):
        text = "".join(char for char, _ in group)
        for piece in re.finditer(r"\S+(?: \S+)*", text):
            x = MARGIN + CELL_W * (column + piece.start())
            fill = f' fill="{COLOURS[colour]}"' if colour else ""
            wide = f' textLength="{CELL_W * len(piece[0]):.1f}"'
            parts.append(f'<tspan x="{x:.1f}"{wide}{fill}>{html.escape(piece[0])}</tspan>')
        column += len(text)
    return f'<text y="{y:.0f}">{"".join(parts)}</text>' if parts else ""


def drawing(frames: list[tuple[float, Frame]]) -> str:
    """Returns the animation: stacked frames behind a window that jumps from frame to frame."""
    lines: dict[tuple[Cell, ...], str] = {}
    shown, steps = [], []
    height = MARGIN * 2 + HEIGHT * CELL_H
    for number, (when, frame) in enumerate(frames):
        uses = []
        for row, cells in enumerate(frame):
            if any(char != " " for char, _ in cells):
                name = lines.setdefault(cells, f"l{len(lines)}")
                uses.append(f'<use href="#{name}" y="{MARGIN + CELL_H * row}"/>')
        shown.append(f'<g transform="translate(0 {height * number})">{"".join(uses)}</g>')
        steps.append(
            f"{100 * when / SECONDS:.2f}% {{ transform: translateY(-{height * number}px) }}"
        )
    width = MARGIN * 2 + CELL_W * WIDTH
    texts = "\n".join(
        line_of(cells, CELL_H * 0.75).replace("<text", f'<text id="{name}"', 1)
        for cells, name in lines.items()
    )
    font = "ui-monospace, SFMono-Regular, Menlo, Consolas, 'DejaVu Sans Mono', monospace"
    still = height * (len(frames) // 2)
    size = f'viewBox="0 0 {width:.0f} {height}" width="{width:.0f}" height="{height}"'
    return f"""<svg xmlns="http://www.w3.org/2000/svg" {size}>
<!-- SPDX-License-Identifier: MIT; made by scripts/record_top.py from what vmem top wrote -->
<title>vmem top: three engines take turns with the memory of a device</title>
<style>
text {{ font: 14px {font}; fill: #e6edf3; white-space: pre }}
#film {{ animation: play {SECONDS}s step-end infinite }}
@keyframes play {{
{chr(10).join(steps)}
}}
@media (prefers-reduced-motion: reduce) {{
#film {{ animation: none; transform: translateY(-{still}px) }}
}}
</style>
<defs>
{texts}
</defs>
<rect width="100%" height="100%" rx="8" fill="#0d1117"/>
<g id="film">
{chr(10).join(shown)}
</g>
</svg>
"""


def main() -> int:
    """Records the animation and writes it to a file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", nargs="?", type=Path)
    parser.add_argument("--engine", choices=ENGINES, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.engine:
        engine(args.engine, args.folder)
        return 0
    if args.out is None:
        parser.error("the file to write")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with engines(folder):
            limit = time.monotonic() + 30
            while time.monotonic() < limit and not list(folder.glob("*.ledger")):
                time.sleep(0.1)
            time.sleep(1)
            frames = record(folder)
    args.out.write_text(drawing(frames), encoding="utf-8")
    print(f"{len(frames)} pictures: {args.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
