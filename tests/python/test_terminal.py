# SPDX-License-Identifier: MIT
"""Tests the commands' terminal output: width, colors and redrawing."""

from __future__ import annotations

import fcntl
import io
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from pathlib import Path
from xml.etree import ElementTree

import pytest
import record_top

from pyvmem.commands import cli, completion, nvml
from pyvmem.commands.tables import table
from pyvmem.commands.terminal import Live, painted

OPERATIONS = Path(__file__).parents[2] / "docs" / "operations" / "index.md"
BASH_COMPLETION = Path("/usr/share/bash-completion/bash_completion")

HEADER = ["layout", "note", "tensors", "waste"]
ROWS = [["a tensor per layer", "taken for the reason that it is the smallest", "64", "1.94"]]

FAKE_NVML = r"""
#include <string.h>
int nvmlInit_v2(void) { return 0; }
int nvmlShutdown(void) { return 0; }
int nvmlDeviceGetHandleByUUID(const char *uuid, void **device) {
    *device = (void *)8;
    return strcmp(uuid, "GPU-1") != 0;
}
int nvmlDeviceGetName(void *device, char *name, unsigned size) {
    strncpy(name, "NVIDIA Test", size);
    return device != (void *)8;
}
int nvmlDeviceGetMemoryInfo(void *device, unsigned long long *memory) {
    memory[0] = 80ull << 30, memory[1] = 30ull << 30, memory[2] = 50ull << 30;
    return device != (void *)8;
}
"""


def on_terminal(words: list[str], width: int, **env: str) -> str:
    """Runs `vmem` on a terminal of this width; returns its output."""
    parent, child = pty.openpty()
    fcntl.ioctl(child, termios.TIOCSWINSZ, struct.pack("HHHH", 40, width, 0, 0))
    inherited = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "LINES", "NO_COLOR")}
    with subprocess.Popen(
        [sys.executable, "-m", "pyvmem", *words],
        stdin=subprocess.DEVNULL,
        stdout=child,
        env={**inherited, "TERM": "xterm", **env},
    ) as program:
        os.close(child)
        said = b""
        while True:
            try:
                part = os.read(parent, 1 << 16)
            except OSError:  # raised once the other end is closed
                break
            said += part
        assert program.wait() == 0
    os.close(parent)
    return said.decode().replace("\r\n", "\n")


class Terminal(io.StringIO):
    """A text stream that claims to be a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("width", [60, 80, 132])
@pytest.mark.parametrize("words", [["probe"], ["features"], ["layouts", "--requests", "50"]])
def test_tables_fit_the_terminal(words: list[str], width: int) -> None:
    lines = on_terminal(words, width).splitlines()
    tables = [line for line in lines if "  " in line.strip()]
    assert tables
    assert max(map(len, tables)) <= width


def test_a_pipe_gets_whole_lines() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pyvmem", "probe"], capture_output=True, text=True, check=True
    )
    assert len(done.stdout.splitlines()) == 5


def test_text_is_wrapped_in_its_column() -> None:
    lines = table(HEADER, ROWS, 2, width=60).splitlines()
    assert max(map(len, lines)) <= 60
    start = lines[0].index("note")
    text = " ".join(line[start : lines[0].index("tensors")].strip() for line in lines[2:])
    assert text == ROWS[0][1]
    assert lines[2].endswith("64   1.94")


def test_columns_of_numbers_go_below_each_other() -> None:
    heads = ["layout", *(f"column {i}" for i in range(8))]
    first, second, *_ = table(heads, [["small", *"12345678"]], 1, width=50).split("\n\n")
    assert first.splitlines()[0].split("  ")[0] == second.splitlines()[0].split("  ")[0] == "layout"
    assert second.splitlines()[2].split() == ["small", "5", "6", "7", "8"]
    assert table(heads, [["small", *"12345678"]], 1, width=200).count("\n") == 2


@pytest.mark.parametrize(
    ("env", "painted"), [({}, True), ({"NO_COLOR": "1"}, False), ({"TERM": "dumb"}, False)]
)
def test_colour(tmp_path: Path, env: dict[str, str], painted: bool) -> None:
    program = (
        "import sys; from pathlib import Path; from pyvmem.ledger.accounts import Ledger\n"
        "from pyvmem.commands import cli\n"
        "ledger = Ledger('host', 1 << 30, Path(sys.argv[1]))\n"
        "account = ledger.join('llama', floor=0, limit=1 << 30, least=1, virtual=1 << 30)\n"
        "sys.argv = ['vmem', 'top', '--once', '--ledger', sys.argv[1]]\n"
        "assert cli.main() == 0; account.close()"
    )
    parent, child = pty.openpty()
    inherited = {k: v for k, v in os.environ.items() if k != "NO_COLOR"}
    subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)],
        stdout=child,
        env={**inherited, "TERM": "xterm", **env},
        check=True,
    )
    os.close(child)
    said = os.read(parent, 1 << 16).decode()
    os.close(parent)
    assert "llama" in said
    assert ("\x1b[" in said) == painted


def test_a_text_is_redrawn_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    monkeypatch.setenv("LINES", "4")
    out = Terminal()
    with Live(out) as live:
        live.show(f"first\n{painted('a line of more than 20 columns', '1')}")
        before = len(out.getvalue())
        live.show("1\n2\n3\n4\n5")
    first, second = out.getvalue()[:before], out.getvalue()[before:]
    assert f"{painted('a line of more than ', '1')}\x1b[K\n" in first
    assert second.startswith("\x1b[2A\r1\x1b[K\n2")
    assert "4" not in second, "output below the last line would scroll"
    assert second.endswith("\x1b[?25h"), "the cursor is shown again"


def test_output_of_a_program_appears_above(monkeypatch: pytest.MonkeyPatch) -> None:
    out = Terminal()
    monkeypatch.setattr(sys, "stdout", out)
    with Live() as live:
        live.show("picture")
        before = len(out.getvalue())
        print("said")
        print("not whole", end="")
    assert sys.stdout is out
    after = out.getvalue()[before:]
    assert after.startswith("\x1b[1A\r\x1b[Jsaid\npicture")
    assert after.endswith("not whole")


def test_a_file_gets_only_the_last_text() -> None:
    out = io.StringIO()
    with Live(out) as live:
        live.show("first")
        live.show("last")
    assert out.getvalue() == "last\n"


def test_the_recording_of_a_terminal() -> None:
    """`scripts/record_top.py` reads the output of `Live` and draws each distinct screen once."""
    screen = record_top.Screen()
    screen.feed("\x1b[?25l\r\x1b[1mhost\x1b[0m  192.0M\x1b[K\r\na <b>  ##\x1b[K\r\n\x1b[J")
    first = screen.frame()
    screen.feed("\x1b[2A\rhost\x1b[K\r\nb\x1b[K\r\n\x1b[J")
    text = ["".join(char for char, _ in line).rstrip() for line in screen.frame()]
    assert text[:3] == ["host", "b", ""]
    drawn = record_top.drawing([(0.0, first), (1.0, first), (2.0, screen.frame())])
    root = ElementTree.fromstring(drawn)
    svg = "{http://www.w3.org/2000/svg}"
    assert "".join(root.find(f"{svg}defs/{svg}text").itertext()) == "host192.0M"  # type: ignore[union-attr]
    assert len(root.findall(f"{svg}defs/{svg}text")) == 4, "a line that stays is kept once"
    assert len(root.findall(f"{svg}g/{svg}g")) == 3


def test_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, library = tmp_path / "nvml.c", tmp_path / "nvml.so"
    source.write_text(FAKE_NVML)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source], check=True)
    monkeypatch.setattr(nvml, "_LIBRARY", str(library))
    with nvml.Cards.opened() as cards:
        assert cards.card("GPU-1") == nvml.Card("NVIDIA Test", 80 << 30, 30 << 30)
        assert cards.card("GPU-2") is None


def test_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvml, "_LIBRARY", "libmissing.so.1")
    with nvml.Cards.opened() as cards:
        assert cards.card("GPU-1") is None


def test_completion_of_bash(capsys: pytest.CaptureFixture[str]) -> None:
    """Runs the completion as bash does."""
    assert cli.main(["completion", "bash"]) == 0
    ask = (
        'COMP_WORDS=({words} "{last}"); COMP_CWORD={number}; COMPREPLY=(); _shtab_vmem; '
        'echo "${{COMPREPLY[@]}}"'
    )
    asked = [("vmem", "se"), ("vmem top", "--so"), ("vmem top --sort", "ma")]
    program = capsys.readouterr().out + "\n".join(
        ask.format(words=words, last=last, number=len(words.split())) for words, last in asked
    )
    done = subprocess.run(["bash", "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["selftest serve-demo", "--sort", "mapped"]


@pytest.mark.parametrize("shell", completion.SHELLS)
def test_completion_names_every_command(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["completion", shell]) == 0
    text = capsys.readouterr().out
    assert all(re.search(rf"\b{name}\b", text) for name in cli._COMMANDS)


@pytest.mark.parametrize(("shell", "file"), completion.FILES.items())
def test_completion_is_a_file_that_the_shell_loads(
    shell: str, file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        cli.main(["completion", "--help"])
    assert f"{shell}: {file}" in " ".join(capsys.readouterr().out.split())
    assert f"vmem completion {shell} > {file}\n" in OPERATIONS.read_text()


@pytest.mark.skipif(not BASH_COMPLETION.exists(), reason=f"{BASH_COMPLETION} is missing")
def test_bash_loads_its_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["completion", "bash"]) == 0
    file = tmp_path / completion.FILES["bash"].removeprefix("~/")
    file.parent.mkdir(parents=True)
    file.write_text(capsys.readouterr().out)
    program = f". {BASH_COMPLETION}; _completion_loader vmem; complete -p vmem"
    environment = {"HOME": str(tmp_path), "PATH": os.environ["PATH"]}
    done = subprocess.run(
        ["bash", "--norc", "-c", program],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
    )
    assert "_shtab_vmem" in done.stdout, done.stderr
