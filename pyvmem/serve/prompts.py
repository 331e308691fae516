# SPDX-License-Identifier: MIT
"""The demonstration's prompts, from `prompts.txt` or a user's file."""

from __future__ import annotations

from importlib import resources
from pathlib import Path

__all__ = ["load", "parse", "repeated"]


def parse(text: str) -> list[str]:
    """Splits a text into prompts at lines of three dashes; drops lines that begin with "#"."""
    prompts: list[list[str]] = [[]]
    for line in text.splitlines():
        if line.strip() == "---":
            prompts.append([])
        elif not line.startswith("#"):
            prompts[-1].append(line)
    return [prompt for lines in prompts if (prompt := "\n".join(lines).strip())]


def load(path: str | Path | None = None, count: int = 0) -> list[str]:
    """Loads `count` prompts from a file, repeating them if it has fewer; 0 loads all.

    Raises:
        OSError: the file cannot be read.
        ValueError: the file is not UTF-8 text or has no prompt, or `count` is negative.
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
    """Returns `count` prompts, repeating them if there are fewer; 0 returns all.

    Raises:
        ValueError: `count` is negative.
    """
    if count < 0:
        raise ValueError(f"the number of prompts is {count}; it must not be negative")
    return [prompts[i % len(prompts)] for i in range(count or len(prompts))]
