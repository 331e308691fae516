# SPDX-License-Identifier: MIT
"""Tests the command line of ``vmem serve-demo``, with a tiny model in a directory."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from serve_helpers import VOCABULARY, one_thread, tiny_model

from pyvmem.commands import cli
from pyvmem.serve import cli as demo

__all__ = ["one_thread"]  # a fixture

pytestmark = pytest.mark.filterwarnings("default")  # transformers issues its own warnings


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Creates a model directory in transformers' format; the tokenizer has one word per number."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    path = tmp_path_factory.mktemp("model") / "tiny"
    tiny_model().model.save_pretrained(path)
    words = {f"w{i}": i for i in range(1, VOCABULARY)} | {"?": 0}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="?").save_pretrained(path)
    lines = [" ".join(f"w{(7 * i + j) % 190 + 1}" for j in range(5 + 9 * i)) for i in range(6)]
    (path / "prompts.txt").write_text("\n---\n".join(lines), encoding="utf-8")
    return path


def run(folder: Path, *more: str) -> int:
    fixed = ["--backend", "host", "--model", str(folder), "--prompts", str(folder / "prompts.txt")]
    return cli.main(["serve-demo", *fixed, *more])


def run_json(
    folder: Path, capsys: pytest.CaptureFixture[str], *more: str, status: int = 0
) -> dict[str, Any]:
    assert run(folder, "--json", *more) == status
    result: dict[str, Any] = json.loads(capsys.readouterr().out)
    return result


def test_back_ends_that_were_passed_over_are_named() -> None:
    why = "uvm: /dev/nvidia-uvm is missing: no module; stock: no driver; cuda: libcuda.so.1 (a: b)"
    assert demo._passed_over(why) == (
        " (uvm, stock, cuda cannot be used here: `vmem probe` says why)"
    )
    assert demo._passed_over("") == ""


def test_answers_and_tables_are_printed(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--max-batch", "3", "--max-new-tokens", "20", "--verify", "--details")
    assert run(folder, *options) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[0] == "back end host; loading the model"
    assert out[1].startswith("pages of ")
    assert out[2].startswith("layout: ")
    assert out[3].startswith("attention by sdpa (fa3: ")
    for name in range(6):
        assert sum(line.startswith(f"[{name}] ?") for line in out) == 1
        assert any(line.startswith(f"[{name}]   w") for line in out)
        assert f"[{name}] = 20 tokens, cut at --max-new-tokens" in out
    numbers = [line[1] for line in out if line.startswith("[")]
    assert numbers == sorted(numbers), "in the order of the requests"
    text = "\n".join(out)
    assert "tiny in float32, back end host" in text
    for part in ("measured", "2 MiB pages, same tensors", "static", "critical path", "background"):
        assert part in text
    assert "6 of 6 answers identical; passed" in text


def test_a_run_prints_one_small_table_and_a_picture(
    folder: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    drawn = tmp_path / "run.svg"
    assert run(folder, "--max-new-tokens", "9", "--picture", str(drawn)) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[-1] == f"picture: {drawn}"
    assert drawn.read_text(encoding="utf-8").count("<svg ") == 1
    end = out[out.index("") + 1 :]
    assert len(end) < 22
    assert sum("|" in line for line in end) == 8, "the memory over the steps"
    text = "\n".join(end)
    for part in ("KV memory at the peak", "holding no token", "2 MiB pages", "static", "waited"):
        assert part in text
    assert "measured: peak of each" not in text


def test_the_layout_is_the_one_advised_unless_given(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    usual = run_json(folder, capsys, "--max-new-tokens", "5")["setting"]
    assert (usual["group_size"], usual["page_size"]) == (3, 64 << 10)
    for option, group in (("--group-size", "1"), 1), (("--page-size", "128K"), 1):
        given = run_json(folder, capsys, "--max-new-tokens", "5", *option)["setting"]
        assert given["group_size"] == group


def test_json_is_one_object_with_what_the_table_shows(
    folder: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    trace = tmp_path / "trace.json"
    options = ["--max-batch", "2", "--max-new-tokens", "9", "--page-size", "64K", "--verify"]
    result = run_json(folder, capsys, *options, "--trace-out", str(trace))
    setting = result["setting"]
    assert setting["backend"] == "host"
    assert setting["dtype"] == "float32"
    assert setting["page_size"] == 64 << 10
    assert setting["max_seq_len"] == 512
    assert [r["id"] for r in result["requests"]] == list(range(6))
    assert [r["prompt_tokens"] for r in result["requests"]] == [5 + 9 * i for i in range(6)]
    assert all(len(r["tokens"]) == 9 for r in result["requests"])
    assert all(r["answer"].startswith("w") for r in result["requests"])
    assert result["engine"]["new_tokens"] == 54
    assert result["engine"]["peak_running"] == 2
    assert result["tokens_per_s"] > 0
    own, big, *_, static = result["memory"]["replay"]
    assert own["mapped_bytes"] == 2 * 6 * (64 << 10)
    assert big["mapped_bytes"] == 2 * 6 * (2 << 20)
    assert static["mapped_bytes"] == 2 * 512 * 192 * 6
    assert result["memory"]["measured"]["mapped_bytes"] >= own["mapped_bytes"]
    assert result["mapping"]["driver_calls"] > 0
    assert result["verify"]["passed"]
    assert result["verify"]["identical"] == 6
    steps = json.loads(trace.read_text(encoding="utf-8"))["steps"]
    assert len(steps) == result["engine"]["steps"]


def test_options_reach_the_cache_and_the_engine(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = run_json(folder, capsys, "--num-prompts", "7", "--max-new-tokens", "30")
    assert len(plain["requests"]) == 7
    answers = [r["tokens"] for r in plain["requests"]]
    assert answers[0] == answers[6]  # after the last prompt, the first one is used again
    limited = run_json(
        folder,
        capsys,
        *("--num-prompts", "7", "--max-new-tokens", "30", "--group-size", "all"),
        *("--prefill-chunk", "16", "--no-background", "--max-seq-len", "128", "--max-batch", "4"),
        *("--memory-limit", "512K"),
    )
    assert [r["tokens"] for r in limited["requests"]] == answers
    setting = limited["setting"]
    assert (setting["group_size"], setting["max_batch"], setting["max_seq_len"]) == (3, 4, 128)
    assert (setting["prefill_chunk"], setting["background"]) == (16, False)
    assert limited["cache"]["steps_async"] == 0
    assert limited["memory"]["measured"]["mapped_bytes"] <= 512 << 10


def test_too_little_memory_is_reported_with_the_answer(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # 24 KiB is one page in each of 6 tensors, enough for 21 tokens.
    options = ["--max-new-tokens", "15", "--memory-limit", "24K", "--page-size", "4K"]
    result = run_json(folder, capsys, *options, status=1)
    reasons = [r["reason"] for r in result["requests"]]
    assert reasons == ["length"] + ["no_memory"] * 5
    assert [len(r["tokens"]) for r in result["requests"]] == [15, 8, 0, 0, 0, 0]


def test_bfloat16(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--dtype", "bfloat16", "--max-new-tokens", "4"]
    assert run(folder, *options, "--verify") == 0
    assert "not judged, since only float32 must match" in capsys.readouterr().out
    result = run_json(folder, capsys, *options)
    assert result["setting"]["dtype"] == "bfloat16"
    static = result["memory"]["replay"][-1]
    assert static["mapped_bytes"] == 6 * 512 * 96 * 6


@pytest.mark.parametrize(
    ("option", "message"),
    [
        (["--model", "/nowhere"], "/nowhere: no model folder and no .gguf file; expected a folder"),
        (["--page-size", "4M"], "must be one of this context's (host), 65536, 131072"),
        (["--group-size", "2"], "2 does not divide the model's 3 layers"),
        (["--memory-limit", "900T"], "900.0T exceeds the "),
    ],
)
def test_bad_values_are_reported_and_nothing_is_printed(
    folder: Path, capsys: pytest.CaptureFixture[str], option: list[str], message: str
) -> None:
    assert run(folder, *option) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith(f"vmem serve-demo: error: argument {option[0]}: {message}")
    assert captured.err.count("\n") == 1
    assert captured.out == ""


def test_a_slot_that_is_too_short_for_a_prompt(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(folder, "--json", "--max-seq-len", "10") == 1
    captured = capsys.readouterr()
    assert "a slot holds 10" in captured.err
    assert captured.out == ""


def test_prompts_that_are_not_text(
    folder: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "program"
    for data, why in ((b"\x7fELF\xff", "is not text in UTF-8"), (b"# none\n", "has no prompt")):
        file.write_bytes(data)
        assert run(folder, "--prompts", str(file)) == 2
        assert capsys.readouterr() == (
            "",
            f"vmem serve-demo: error: argument --prompts: {file} {why}\n",
        )


def test_repeated_prompts_are_reported(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(folder, "--num-prompts", "7", "--max-new-tokens", "1") == 0
    assert (
        "; 7 prompts (the file has 6; they are repeated), 16 at a time\n" in capsys.readouterr().out
    )
    assert run(folder, "--num-prompts", "1", "--max-new-tokens", "1") == 0
    said = capsys.readouterr().out
    assert "; 1 prompt, 16 at a time\n" in said
    assert "\n1 request, at most 1 at a time: " in said


@pytest.mark.parametrize(
    "option",
    [
        ["--page-size", "x"],
        ["--page-size", "0"],
        ["--page-size", "3K"],
        ["--backend", "abacus"],
        ["--device", "-1"],
        ["--device", "cuda:0"],
        ["--prompts", "/tmp"],
        ["--trace-out", "/dev/full"],
        ["--trace-out", "/proc/trace.json"],
        ["--memory-limit", "0"],
        ["--prompts", "/nowhere"],
        ["--memory-limit", "-1"],
        ["--max-batch", "0"],
        ["--max-new-tokens", "two"],
        ["--group-size", "none"],
        ["--dtype", "int8"],
    ],
)
def test_bad_usage_is_rejected_by_the_parser(folder: Path, option: list[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        run(folder, *option)
    assert stop.value.code == 2


def test_torch_is_loaded_by_run_and_not_before() -> None:
    """The environment variables for torch's threads must be set before torch is loaded."""
    code = "import sys, pyvmem.serve.cli; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
