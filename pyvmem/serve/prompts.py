# SPDX-License-Identifier: MIT
"""The demonstration's prompts, from `prompts.txt` or a file of the user's."""

from __future__ import annotations

from importlib import resources
from pathlib import Path

__all__ = ["load", "parse", "repeated"]


def parse(text: str) -> list[str]:
    """Prompts of a text: separated by lines of three dashes, lines that begin with "#" left out."""
    prompts: list[list[str]] = [[]]
    for line in text.splitlines():
        if line.strip() == "---":
            prompts.append([])
        elif not line.startswith("#"):
            prompts[-1].append(line)
    return [prompt for lines in prompts if (prompt := "\n".join(lines).strip())]


def load(path: str | Path | None = None, count: int = 0) -> list[str]:
    """The first `count` prompts of a file, again from its start after its end; 0: all of them.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is not text in UTF-8, or has no prompt, or `count` is negative.
    """
    if path is None:
        text = resources.files("pyvmem.serve").joinpath("prompts.txt").read_text(encoding="utf-8")
    else:
        try:
            text = Path(path).read_text(encoding="utf-8")
        except UnicodeDecodeError:
            raise ValueError(f"{path} is not text in UTF-8") from None
    prompts = parse(text)
    if not prompts:
        raise ValueError(f"{path or 'prompts.txt'} has no prompt")
    return repeated(prompts, count)


def repeated(prompts: list[str], count: int) -> list[str]:
    """The first `count` prompts, again from the start after the last; 0: all of them.

    Raises:
        ValueError: `count` is negative.
    """
    if count < 0:
        raise ValueError(f"the number of prompts is {count}; it must not be negative")
    return [prompts[i % len(prompts)] for i in range(count or len(prompts))]
