# SPDX-License-Identifier: MIT
"""Shows prompts and growing answers side by side on a terminal, above a memory line.

Finished answers scroll up; unfinished ones and the memory line are redrawn in place below. Needs
rich; `printer` is used instead if standard output is not a terminal.
"""

from __future__ import annotations

import threading
from types import TracebackType
from typing import TYPE_CHECKING, Any

from pyvmem.plumbing.units import format_bytes
from pyvmem.serve.printer import ended

if TYPE_CHECKING:
    from pyvmem.kvcache import KVCache
    from pyvmem.serve.engine import TokenEvent

__all__ = ["Screen"]

_BAR = 12


class Screen:
    """The live display, a context manager; pass the engine's events to `feed`.

    Args:
        tokenizer: the model's tokenizer.
        prompts: the prompts by request id.
        cache: the cache whose memory is shown.
        console: a `rich.console.Console`; None for standard output.

    Raises:
        ModuleNotFoundError: rich is not installed.
    """

    def __init__(
        self, tokenizer: Any, prompts: dict[int, str], cache: KVCache, console: Any = None
    ) -> None:
        from rich.console import Console
        from rich.live import Live

        self._tokenizer = tokenizer
        self._prompts = prompts
        self._cache = cache
        self._console = console or Console()
        self._lock = threading.Lock()
        self._tokens: dict[int, list[int]] = {}
        self._answered = 0
        self._live = Live(
            get_renderable=self._picture,
            console=self._console,
            refresh_per_second=8,
            transient=True,
        )

    def __enter__(self) -> Screen:
        self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._live.stop()

    def write(self, text: str) -> None:
        """Writes a line above the live area."""
        self._console.print(text, markup=False, highlight=False)

    def feed(self, event: TokenEvent) -> None:
        """Processes an event of the engine."""
        name = event.request_id
        with self._lock:
            tokens = self._tokens.setdefault(name, [])
            if event.token is not None:
                tokens.append(event.token)
            if event.completion is None:
                return
            del self._tokens[name]
            self._answered += 1
        table = self._table()
        self._add(table, str(name), self._prompts[name].strip(), self._answer(tokens).strip())
        self._add(table, "", "", ended(event.completion), style="dim")
        self._console.print(table)

    def _answer(self, tokens: list[int]) -> str:
        text: str = self._tokenizer.decode(tokens, skip_special_tokens=True)
        return text

    def _table(self) -> Any:
        from rich.table import Table

        table = Table.grid(padding=(0, 2), expand=True)
        table.add_column(width=len(str(max(self._prompts, default=0))), justify="right")
        table.add_column(ratio=2)
        table.add_column(ratio=3)
        return table

    @staticmethod
    def _add(table: Any, *cells: str, style: str = "") -> None:
        """Adds cells as plain text rather than rich markup, since prompts may contain brackets."""
        from rich.text import Text

        table.add_row(*(Text(cell, overflow="fold") for cell in cells), style=style)

    def _memory(self, running: int) -> str:
        """Returns the memory line, with as much detail on memory and requests as fits."""
        stats = self._cache.stats()
        filled = round(_BAR * stats.used_bytes / stats.mapped_bytes) if stats.mapped_bytes else 0
        bar = f"[{'#' * filled}{'.' * (_BAR - filled)}] "
        mapped = f"{format_bytes(stats.mapped_bytes)} mapped"
        rows = f", {format_bytes(stats.used_bytes)} of rows"
        some = f"; {running} running, {len(self._prompts) - self._answered - running} waiting"
        every = f"{some}, {self._answered} answered"
        lines = (bar + mapped + rows + every, mapped + rows + every, mapped + every, mapped + some)
        return next((one for one in lines if len(one) <= self._console.width), mapped)

    def _picture(self) -> Any:
        from rich.console import Group
        from rich.text import Text

        with self._lock:
            running = {name: list(tokens) for name, tokens in self._tokens.items()}
        table = self._table()
        room = max(2, self._console.width - 8)  # columns available for a prompt and its answer
        rows = max(1, self._console.height - 4)
        for name in sorted(running)[:rows]:
            answer = " ".join(self._answer(running[name]).rstrip("\ufffd").split())
            prompt = " ".join(self._prompts[name].split())
            cells = (str(name), prompt, answer[-(room // 2) :])
            table.add_row(*(Text(cell, no_wrap=True, overflow="ellipsis") for cell in cells))
        return Group(table, Text(self._memory(len(running)), style="bold", no_wrap=True))
