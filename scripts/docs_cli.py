#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Prints the command-line reference in Markdown, generated from the parsers.

Run it with the Python of an environment that has pyvmem.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator

from pyvmem.commands import cli

WIDTH = "88"  # width of usage lines, independent of the terminal
# Serving benchmarks, which have a separate page.
SERVING = ("serve", "sharing", "swap", "vllm", "sglang", "models", "paper")


def subparsers(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    """Returns the parsers of a command's subcommands."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            return dict(action.choices)
    return {}


def cell(text: str) -> str:
    """Escapes text for a table cell."""
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")


def section(
    name: str,
    parser: argparse.ArgumentParser,
    summary: str,
    level: int,
    leave_out: tuple[str, ...] = (),
) -> Iterator[str]:
    """Yields the parts of a command's section: description, usage, options and subcommands."""
    yield f"{'#' * level} {name} {{#{name.replace(' ', '-')}}}\n"
    about = (parser.description or summary or "").strip().replace("``", "`")
    if about:
        about = about.removeprefix(f"`{name}`: ")
        yield f"{about[0].upper()}{about[1:]}\n"
    usage = parser.format_usage().removeprefix("usage: ").rstrip()
    yield f"```text\n{usage}\n```\n"
    rows = []
    for action in parser._actions:
        if isinstance(action, (argparse._SubParsersAction, argparse._HelpAction)):
            continue
        names = ", ".join(f"`{one}`" for one in action.option_strings) or f"`{action.dest}`"
        if action.nargs != 0 and action.option_strings:
            metavar = action.metavar or action.dest.upper()
            names += f" *{metavar if isinstance(metavar, str) else ' '.join(metavar)}*"
        help_text = action.help or ""
        if "%" in help_text:
            help_text %= {**vars(action), "prog": parser.prog}
        if action.choices and "{" not in help_text:
            choices = ", ".join(f"`{one}`" for one in action.choices)
            help_text = f"{help_text} (one of {choices})"
        rows.append(f"| {names} | {cell(help_text)} |")
    if rows:
        yield "\n".join(["| option | what it does |", "| --- | --- |", *rows]) + "\n"
    helps = {
        choice.dest: choice.help or ""
        for action in parser._actions
        if isinstance(action, argparse._SubParsersAction)
        for choice in action._choices_actions
    }
    for sub, one in subparsers(parser).items():
        if sub not in leave_out:
            yield from section(f"{name} {sub}", one, helps.get(sub, ""), level + 1)


def main() -> int:
    """Prints the page for commands or, given ``bench`` or ``bench-serving``, one for benchmarks."""
    os.environ["COLUMNS"] = WIDTH
    if sys.argv[1:] == ["bench"]:
        print("# Command line: benchmarks\n")
        print("The serving benchmarks are on another page: [serving](bench-serving.md).\n")
        show("bench", leave_out=SERVING)
        return 0
    if sys.argv[1:] == ["bench-serving"]:
        print("# Command line: serving benchmarks\n")
        print("[The other benchmarks](bench.md), and the options of `vmem bench`.\n")
        bench = subparsers(cli._parser("bench"))["bench"]
        others = tuple(name for name in subparsers(bench) if name not in SERVING)
        text = "\n".join(section("vmem bench", bench, "", 1, leave_out=others))
        print(text[text.index("## vmem bench ") :])
        return 0
    print("# Command line\n")
    print("Generated from the programs' own parsers. `vmem COMMAND --help` prints the same.\n")
    print(
        "Exit status: 1 for an error, 2 for bad usage, 130 after Ctrl-C, 141 if the reader of the "
        "output has closed it. A command's section lists any others.\n"
    )
    print("`vmem bench` has separate pages: [benchmarks](bench.md), [serving](bench-serving.md).\n")
    for command in cli._COMMANDS:
        if command != "bench":
            show(command)
    return 0


def show(command: str, leave_out: tuple[str, ...] = ()) -> None:
    """Prints a command's section."""
    parser = subparsers(cli._parser(command))[command]
    text = cli._COMMANDS[command][1]
    print("\n".join(section(f"vmem {command}", parser, text, 2, leave_out)))


if __name__ == "__main__":
    sys.exit(main())
