# SPDX-License-Identifier: MIT
"""Whatever happens to its output, a command ends with a message, not a traceback.

Cases: the reader of a pipe exits, the disk is full, the terminal cannot show a character.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from pyvmem.bench.cli import OTHERS
from pyvmem.commands import cli, top
from pyvmem.plumbing import paths

# For each command, arguments that make it print something and exit on its own.
CALLS = {
    "probe": ["probe", "--json"],
    "features": ["features"],
    "selftest": ["selftest", "--backend", "host", "--samples", "0"],
    "bench": ["bench", "api", "--list"],
    "layouts": ["layouts", "--help"],
    "top": ["top", "--once"],
    "watch": ["watch", "--help"],
    "limit": ["limit", "--help"],
    "control": ["control", "--help"],
    "serve-demo": ["serve-demo", "--help"],
    "completion": ["completion", "fish"],
}


def vmem(words: list[str], stdout: int, **env: str) -> tuple[int, str]:
    """Runs `vmem` as a shell would; returns the exit status and standard error."""
    done = subprocess.run(
        [sys.executable, "-m", "pyvmem", *words],
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "", **env},
        check=False,
    )
    return done.returncode, done.stderr


@pytest.fixture
def unread() -> Iterator[int]:
    """Yields the write end of a pipe whose read end is closed."""
    reader, writer = os.pipe()
    os.close(reader)
    yield writer
    os.close(writer)


def test_every_command_is_tried() -> None:
    assert CALLS.keys() == cli._COMMANDS.keys()


@pytest.mark.parametrize("command", CALLS)
def test_a_closed_pipe(command: str, unread: int) -> None:
    assert vmem(CALLS[command], unread) == (141, "")


def test_a_closed_pipe_without_buffering(unread: int) -> None:
    assert vmem(["probe"], unread, PYTHONUNBUFFERED="1") == (141, "")


@pytest.mark.parametrize("option", ["--version", "--help"])
def test_a_closed_pipe_with_version_and_help(option: str, unread: int) -> None:
    assert vmem([option], unread) == (141, "")


@pytest.mark.parametrize("command", CALLS)
def test_the_disk_is_full(command: str) -> None:
    with open("/dev/full", "wb") as full:
        status, said = vmem(CALLS[command], full.fileno())
    assert (status, said) == (1, f"vmem {command}: No space left on device\n")


def parser_of(name: str) -> argparse.ArgumentParser:
    """Returns the parser of a command."""
    sub = next(one for one in cli._parser(name)._actions if isinstance(one.choices, dict))
    parser: argparse.ArgumentParser = sub.choices[name]
    return parser


def outputs() -> list[list[str]]:
    """Returns all commands' options that name an output file."""
    parsers = {(name,): parser_of(name) for name in CALLS}
    benchmarks = next(one for one in parsers.pop(("bench",))._actions if one.choices)
    parsers |= {("bench", name): parser for name, parser in dict(benchmarks.choices or {}).items()}
    names = {"--out", "--json", "--report", "--plot", "--picture", "--trace-out"}
    return [
        [*words, option]
        for words, parser in parsers.items()
        for one in parser._actions
        if one.nargs != 0  # an option without an argument prints instead
        for option in one.option_strings
        if option in names
    ]


def refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """Returns the message for a command line that is rejected before anything runs."""
    with pytest.raises(SystemExit) as caught:
        cli.main(words)
    assert caught.value.code == 2
    said = capsys.readouterr()
    assert said.out == ""
    return said.err.splitlines()[-1]


def test_all_outputs_are_tried() -> None:
    found = {" ".join(one) for one in outputs()}
    assert {"serve-demo --picture", "selftest --report", "bench vllm --out"} <= found
    assert len(found) > 40


@pytest.mark.parametrize("words", outputs(), ids=" ".join)
def test_a_file_that_cannot_be_written_is_rejected_before_anything_runs(
    words: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    argument = f"error: argument {words[-1]}: "
    gone = tmp_path / "missing"
    said = refused([*words, str(gone / "out.svg")], capsys)
    assert said.endswith(f"{argument}{gone}: No such file or directory")
    assert not gone.exists()
    gone.write_text("")
    said = refused([*words, str(gone / "out.svg")], capsys)
    assert said.endswith(f"{argument}{gone} is not a directory")
    said = refused([*words, str(tmp_path)], capsys)
    assert said.endswith(f"{argument}{tmp_path} is a folder")
    monkeypatch.setattr(os, "access", lambda *_: False)  # root can write anywhere
    assert not list(tmp_path.glob("tmp*"))
    said = refused([*words, str(tmp_path / "out.svg")], capsys)
    assert said.endswith(f"{argument}{tmp_path / 'out.svg'}: {tmp_path} cannot be written to")


@pytest.mark.parametrize("words", [["selftest", "--report"], ["selftest", "--out"]])
def test_a_directory_that_only_seems_writable(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Root has write permission in /proc, but cannot create a file there."""
    said = refused([*words, "/proc/x.html"], capsys)
    assert said.endswith(f"argument {words[-1]}: /proc/x.html: /proc cannot be written to")


@pytest.mark.parametrize("words", [["selftest", "--out"], ["serve-demo", "--trace-out"]])
def test_a_full_disk_is_noticed_before_anything_runs(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    said = refused([*words, "/dev/full"], capsys)
    assert said.endswith(f"argument {words[-1]}: /dev/full: No space left on device")
    for name in ("/dev/stdout", "/dev/null"):
        assert paths.written(name) == Path(name)


@pytest.mark.parametrize(
    "words", [["selftest", "--report"], ["bench", "api", "--out"], ["bench", "sharing", "--out"]]
)
def test_special_files_are_not_replaced(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A pipe is rejected, even behind a link; a link to a file stays, and the file is replaced."""
    pipe, link, file = tmp_path / "pipe", tmp_path / "link", tmp_path / "file"
    os.mkfifo(pipe)
    said = refused([*words, str(pipe)], capsys)
    assert said.endswith(f"argument {words[-1]}: {pipe} is not a regular file")
    assert pipe.is_fifo()
    link.symlink_to(pipe)
    refused([*words, str(link)], capsys)
    link.unlink()
    link.symlink_to(file)
    paths.replace_text(paths.replaced(str(link)), "x")
    assert link.is_symlink()
    assert file.read_text() == "x"


@pytest.mark.parametrize("words", [["probe"], ["limit"]])
def test_without_standard_output(words: list[str]) -> None:
    """Closes standard output, as `>&-` does in a shell."""
    line = f'exec "$0" -m pyvmem {words[0]} >&-'
    found = subprocess.run(["sh", "-c", line, sys.executable], capture_output=True, text=True)
    assert "Traceback" not in found.stderr
    assert found.returncode == (2 if words == ["limit"] else 0)


def test_without_standard_error() -> None:
    line = 'exec "$0" -m pyvmem limit nobody 1G 2>&-'
    found = subprocess.run(["sh", "-c", line, sys.executable], capture_output=True, text=True)
    assert (found.stdout, found.returncode) == ("", 1)


def test_a_late_write_error_names_the_file_as_the_user_did(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No space left on device: '/dev/full'"):
        paths.write_text(Path("/dev/full"), "x")
    file = tmp_path / "gone" / "report.html"
    with pytest.raises(FileNotFoundError) as caught:
        paths.replace_text(file, "x")
    assert caught.value.filename == str(file)


@pytest.mark.parametrize("words", [["selftest", "--out"], ["serve-demo", "--trace-out"]])
def test_an_existing_file_without_write_permission(
    words: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    file = tmp_path / "report.json"
    file.write_text("kept")
    monkeypatch.setattr(os, "access", lambda path, _: Path(path) != file)
    said = refused([*words, str(file)], capsys)
    assert said.endswith(f"error: argument {words[-1]}: {file} cannot be written to")
    assert file.read_text() == "kept"


@pytest.mark.parametrize(
    "words", [["serve-demo", "--picture"], ["bench", "api", "--plot"]], ids=" ".join
)
def test_a_picture_in_an_unknown_format(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = str(tmp_path / "run.jpeg")
    said = refused([*words, file], capsys)
    assert said.endswith(f"argument {words[-1]}: {file!r}: expected a name in .svg, .png or .pdf")


def test_a_report_with_the_name_of_the_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "run.json"
    words = ["bench", "api", "--backend", "host", "--quick", "--report", str(file)]
    assert cli.main(words) == 2
    expected = f"vmem bench: {file}: the JSON is written there; name another file\n"
    assert capsys.readouterr() == ("", expected)
    assert not file.exists()


@pytest.mark.parametrize(
    "words",
    [
        ["layouts", "--trace"],
        ["bench", "api", "--fa3"],
        ["bench", "api", "--merge"],
        ["bench", "capacity", "--trace"],
        ["bench", "prefixes", "--trace"],
        ["bench", "kernels", "--fa3"],
        ["bench", "serve", "--trace"],
        ["bench", "serve", "--merge"],
        ["bench", "vllm", "--trace"],
        ["serve-demo", "--prompts"],
    ],
    ids=" ".join,
)
def test_a_missing_file_is_rejected_before_anything_runs(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "gone"
    with pytest.raises(SystemExit) as caught:
        cli.main([*words, str(file)])
    assert caught.value.code == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.endswith(f"error: argument {words[-1]}: {file}: No such file or directory")


@pytest.mark.parametrize(
    "words", [["layouts", "--model"], ["bench", "prefixes", "--model"]], ids=" ".join
)
def test_an_invalid_model(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "gone"
    begins = (
        f"vmem {words[0]}: error: argument --model: '{file}' is neither one of Yi-6B, Llama-3-8B, "
        "Yi-34B, SmolLM2-135M nor a readable config.json: "
    )
    assert cli.main([*words, str(file)]) == 2
    assert capsys.readouterr().err == f"{begins}{file}: No such file or directory\n"
    file.write_text("root:x:0:0")
    assert cli.main([*words, str(file)]) == 2
    assert capsys.readouterr().err == f"{begins}{file} is not JSON\n"


@pytest.mark.parametrize(
    "words",
    [["layouts", "--trace"], ["bench", "prefixes", "--trace"], ["serve-demo", "--prompts"]],
    ids=" ".join,
)
def test_a_directory_instead_of_a_file(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = refused([*words, str(tmp_path)], capsys)
    assert said.endswith(f"error: argument {words[-1]}: {tmp_path} is a folder")


def test_an_invalid_result(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "README.md"
    file.write_text("# A page")
    assert cli.main(["bench", "api", "--merge", str(file)]) == 2
    assert capsys.readouterr() == ("", f"vmem bench: {file} is not JSON\n")


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["selftest", "--samples", "-5"], "-5 is neither 0 nor between 2 and 16777216"),
        (["selftest", "--samples", "1"], "1 is neither 0 nor between 2 and 16777216"),
        (["layouts", "--overread", "-1"], "-1 is not between 0 and 16777216"),
        (["layouts", "--seed", "x"], "'x' is not a whole number"),
        (["layouts", "--pages", "3K"], "'3K': a page size is a power of two from 4K to 1G"),
        (["layouts", "--pages", "64K,65536"], "'64K,65536' names a page size twice"),
        (
            ["serve-demo", "--page-size", "2G"],
            "'2G': a page size is a power of two from 4K to 1G",
        ),
        (["layouts", "--requests", "0"], "0 is not between 1 and 16777216"),
        (["layouts", "--requests", "1000000000000"], "1000000000000 is not between 1 and 16777216"),
        (["layouts", "--iteration-ms", "nan"], "'nan': expected a number above 0"),
        (["bench", "fill", "--rounds", "0"], "0 is not between 1 and 16777216"),
        (["bench", "overlap", "--batch", "two"], "'two' is not a whole number"),
        (["bench", "fill", "--deadline", "-3"], "'-3': expected a number above 0"),
        (["bench", "api", "--budget", "inf"], "'inf': expected a number above 0"),
    ],
)
def test_a_number_out_of_range_is_rejected_before_anything_runs(
    words: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert refused(words, capsys).endswith(f"error: argument {words[-2]}: {text}")


@pytest.mark.parametrize(
    "where", ["http://[", "localhost:x", "99999", "0", "ftp://localhost:1", "file:///etc/passwd"]
)
def test_watching_an_invalid_target(where: str, capsys: pytest.CaptureFixture[str]) -> None:
    said = refused(["watch", where], capsys)
    assert said.startswith(f"vmem watch: error: argument where: {where!r}")
    if "://" in where and not where.startswith("http"):
        assert said.endswith(f"expected a URL with http or https, not {where.partition(':')[0]}")


@pytest.mark.parametrize(
    "words",
    [
        ["vllm", "--quick"],
        ["vllm", "--part", "idle"],
        ["vllm", "--part", "sleep"],
        ["vllm", "--part", "rough"],
        ["vllm", "--part", "share", "--bursts", "climb"],
        ["serve", "--workload", "chat"],
    ],
    ids=" ".join,
)
def test_an_unused_trace_is_rejected(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("")
    assert cli.main(["bench", *words, "--trace", str(trace)]) == 2
    what = " ".join(words[1:][-2:])
    expected = f"vmem bench: {what} generates its own requests: omit --trace {trace}\n"
    assert capsys.readouterr() == ("", expected)


@pytest.mark.parametrize(
    ("words", "package", "extra"),
    [
        (["bench", "capacity", "--requests", "9"], "numpy", "bench"),
        (["bench", "api", "--quick", "--plot", "run.svg"], "matplotlib", "plot"),
    ],
)
def test_a_missing_package_is_named_with_its_extra(
    words: list[str], package: str, extra: str, tmp_path: Path
) -> None:
    program = (
        f"import sys; sys.modules[{package!r}] = None; from pyvmem.commands import cli; "
        f"sys.exit(cli.main({words!r}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=tmp_path, check=False
    )
    assert (done.returncode, done.stdout) == (1, "")
    last = done.stderr.splitlines()[-1]
    assert last.startswith(f"vmem {words[0]}: a package is not installed: ")
    assert package in last
    assert last.endswith(f"; the extra pyvmem[{extra}] installs it")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("options", [[], ["--help"], ["--trace", "FILE", "-x"]], ids=str)
def test_a_benchmark_that_is_not_installed(
    options: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "vmem_bench.cli", None)
    assert cli.main(["bench", "serve", *options]) == 2
    assert capsys.readouterr() == (
        "",
        "vmem bench: error: serve is a benchmark of pyvmem-bench, which is not installed: pip "
        "install 'pyvmem[bench]', or in a clone of the repository pip install ./benchmarks\n",
    )


def test_optional_benchmarks_match_the_installed_ones() -> None:
    choices = next(one.choices for one in parser_of("bench")._actions if one.choices)
    assert dict(choices or {}).keys() == {"api", *OTHERS}


def test_the_extras_are_those_of_the_package() -> None:
    """The extra `bench` is a separate distribution, which in turn depends on the package."""
    root = Path(__file__).parents[2]
    ours = (root / "pyproject.toml").read_text(encoding="utf-8")
    theirs = (root / "benchmarks" / "pyproject.toml").read_text(encoding="utf-8")
    for package, extra in cli._EXTRAS.items():
        text, name = (theirs, "dependencies") if extra == "bench" else (ours, extra)
        (line,) = [one for one in text.splitlines() if one.startswith(f"{name} = [")]
        assert f'"{package}>=' in line


WITH_DEVICE = [["probe"], ["selftest"], ["serve-demo"], ["bench", "api"], ["bench", "fill"]]


@pytest.mark.parametrize("words", WITH_DEVICE, ids=" ".join)
@pytest.mark.parametrize("device", ["-1", "x", "cuda:0", "65536", "²"])
def test_an_invalid_device(
    words: list[str], device: str, capsys: pytest.CaptureFixture[str]
) -> None:
    said = refused([*words, f"--device={device}"], capsys)
    wanted = f"argument --device: {device!r}: expected a CUDA ordinal, 0 or more"
    assert said == f"vmem {' '.join(words)}: error: {wanted}"


def test_invalid_devices(capsys: pytest.CaptureFixture[str]) -> None:
    said = refused(["features", "--devices", "0,x"], capsys)
    assert said.endswith("argument --devices: 'x': expected a CUDA ordinal, 0 or more")


@pytest.mark.parametrize("words", WITH_DEVICE[1:], ids=" ".join)
def test_an_unknown_back_end(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    said = refused([*words, "--backend", "nope"], capsys)
    assert said.startswith(f"vmem {' '.join(words)}: error: argument --backend: invalid choice: ")
    assert all(name in said for name in ("nope", "uvm", "stock", "cuda", "host"))


@pytest.mark.parametrize("option", ["--kv-memory", "--memory"])
def test_memory_for_less_than_a_page_per_tensor(
    option: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = {"num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 8}
    config |= {"hidden_size": 512, "torch_dtype": "bfloat16", "model_type": "llama"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    words = ["layouts", "--model", str(tmp_path), "--requests", "9", option, "100K"]
    assert cli.main(words) == 2
    had = 100 << 10 if option == "--kv-memory" else int((100 << 10) * 0.9)
    assert capsys.readouterr() == (
        "",
        f"vmem layouts: error: argument {option}: {had} bytes for keys and values, but the "
        f"smallest layout needs {128 << 10}, a page in every tensor\n",
    )


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_a_terminal_that_cannot_show_a_character(
    encoding: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The encoding is not UTF-8, and the locale does not switch Python to UTF-8."""

    def run(args: argparse.Namespace) -> int:
        print("≤ † 中")
        return 0

    shown = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(shown, encoding=encoding))
    monkeypatch.setattr(top, "run", run)
    assert cli.main(["top"]) == 0
    assert shown.getvalue() == b"? ? ?\n"


def test_an_interrupted_command_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The message is the same for all commands, except those that run until interrupted."""

    def run(args: argparse.Namespace) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr("pyvmem.layouts.cli.run", run)
    assert cli.main(["layouts"]) == 130
    assert capsys.readouterr() == ("", "vmem layouts: interrupted\n")
    monkeypatch.setattr(top, "run", run)
    assert cli.main(["top"]) == 130
    assert capsys.readouterr() == ("", "")
