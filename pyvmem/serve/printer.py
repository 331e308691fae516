# SPDX-License-Identifier: MIT
"""Prints answers in request order, each line prefixed with its request's number.

The first unfinished answer is printed as it grows; the others wait.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from pyvmem.plumbing.units import counted
from pyvmem.serve.engine import TokenEvent
from pyvmem.serve.job import Completion, FinishReason

__all__ = ["AnswerPrinter", "ended"]

_REASONS = {
    FinishReason.EOS: "end of the answer",
    FinishReason.LENGTH: "cut at --max-new-tokens",
    FinishReason.SLOT_FULL: "cut at the longest sequence that a slot holds",
    FinishReason.NO_MEMORY: "not served: does not fit in the KV memory, even alone",
}


def ended(completion: Completion) -> str:
    """Describes how an answer ended."""
    again = f", recomputed {completion.preemptions} x" if completion.preemptions else ""
    return f"{counted(len(completion.tokens), 'token')}, {_REASONS[completion.reason]}{again}"


class AnswerPrinter:
    """Turns token events into lines, each written as soon as it is complete.

    Args:
        tokenizer: the model's tokenizer.
        prompts: prompts by request id; each is printed once the first token of its answer arrives.
        write: called with each line, without its newline.
        width: number of characters after which a line is broken at a space.
    """

    def __init__(
        self, tokenizer: Any, prompts: dict[int, str], write: Callable[[str], None], width: int = 88
    ) -> None:
        self._tokenizer = tokenizer
        self._prompts = prompts
        self._write = write
        self._width = width
        self._digits = len(str(max(prompts, default=0)))
        self._tokens: dict[int, list[int]] = {}
        self._printed: dict[int, int] = {}
        self._left = deque(sorted(prompts))  # request ids; the first one's answer is being printed
        self._held: dict[int, list[str]] = {name: [] for name in prompts}
        self._ended: set[int] = set()

    def feed(self, event: TokenEvent) -> None:
        """Processes an event of the engine."""
        name = event.request_id
        if name not in self._tokens:
            self._tokens[name] = []
            self._printed[name] = 0
            first, *more = self._prompts[name].splitlines()
            if more or len(first) > self._width:
                first = f"{first[: self._width - 4]} ..."
            self._line(name, "?", first)
        if event.token is not None:
            self._tokens[name].append(event.token)
        done = event.completion is not None
        self._flush(name, done)
        if event.completion is not None:
            self._line(name, "=", ended(event.completion))
            del self._tokens[name], self._printed[name]
            self._ended.add(name)
        while self._left and self._left[0] in self._ended:
            self._left.popleft()
            for line in self._held.pop(self._left[0]) if self._left else ():
                self._write(line)

    def _flush(self, name: int, done: bool) -> None:
        text = self._tokenizer.decode(self._tokens[name], skip_special_tokens=True)
        if not done:
            text = text.rstrip("\ufffd")  # drop an incomplete UTF-8 character
        while True:
            rest = text[self._printed[name] :]
            end = rest.find("\n")
            if 0 <= end <= self._width:
                line, taken = rest[:end], end + 1
            elif len(rest) > self._width:
                end = rest.rfind(" ", 1, self._width)
                line, taken = (
                    (rest[:end], end + 1) if end > 0 else (rest[: self._width], self._width)
                )
            else:
                break
            self._printed[name] += taken
            self._line(name, " ", line)
        if done and rest:
            self._line(name, " ", rest)

    def _line(self, name: int, mark: str, text: str) -> None:
        if not text.strip():
            return
        line = f"[{name:{self._digits}}] {mark} {text}"
        if name == self._left[0]:
            self._write(line)
        else:
            self._held[name].append(line)
