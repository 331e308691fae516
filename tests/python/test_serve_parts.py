# SPDX-License-Identifier: MIT
"""Tests prompts, printing, the replay of other layouts, the trace and its picture, and the search
for a model.
"""

from __future__ import annotations

import io
import json
import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from serve_helpers import make_requests, one_thread, tiny_model

from pyvmem.errors import InvalidArgument
from pyvmem.kvcache import KVCache, KVCacheConfig
from pyvmem.plumbing.units import format_bytes
from pyvmem.serve import (
    Completion,
    Engine,
    FinishReason,
    Job,
    TokenEvent,
    prompts,
    report,
)
from pyvmem.serve import model as models
from pyvmem.serve.chart import chart
from pyvmem.serve.printer import AnswerPrinter
from pyvmem.serve.screen import Screen
from pyvmem.serve.trace import Recorder, Replay

__all__ = ["one_thread"]  # a fixture

MIB = 1 << 20


def test_the_report_separates_usual_steps_from_those_that_compile_kernels() -> None:
    steps = [0.5, *[0.01] * 18, 0.3]
    assert report._steps(steps) == [
        ("  its median step", "10.00"),
        ("  its 2 slowest steps", "800.00"),
    ]
    assert report._steps([0.5]) == [
        ("  its median step", "500.00"),
        ("  its 1 slowest steps", "500.00"),
    ]
    assert report._steps([]) == []


def test_the_prompts_are_many_and_varied() -> None:
    texts = prompts.load()
    assert len(texts) >= 32
    assert len(set(texts)) == len(texts)
    lengths = sorted(map(len, texts))
    assert lengths[0] < 20
    assert lengths[-1] > 600
    assert not any(text.startswith("#") or "---" in text.splitlines() for text in texts)
    assert any("def " in text for text in texts)
    assert any(not text.isascii() for text in texts)


def test_a_file_of_prompts(tmp_path: Path) -> None:
    path = tmp_path / "mine.txt"
    path.write_text("# note\none\n---\n\ntwo\nlines\n---\n---\n", encoding="utf-8")
    assert prompts.load(path) == ["one", "two\nlines"]
    assert prompts.load(path, 3) == ["one", "two\nlines", "one"]
    with pytest.raises(ValueError, match="number of prompts is -1"):
        prompts.load(path, -1)
    path.write_text("# nothing\n---\n", encoding="utf-8")
    with pytest.raises(ValueError, match="has no prompt"):
        prompts.load(path)
    with pytest.raises(OSError, match="absent"):
        prompts.load(tmp_path / "absent")


class Letters:
    """A tokenizer whose tokens are the text's UTF-8 bytes."""

    def decode(self, tokens: list[int], skip_special_tokens: bool) -> str:
        return bytes(token for token in tokens if token).decode(errors="replace")


def test_answers_are_printed_line_by_line_with_their_number() -> None:
    lines: list[str] = []
    asked = {3: "What?\nMore", 12: "x" * 100}
    printer = AnswerPrinter(Letters(), asked, lines.append, width=20)
    answers = {3: "One\n\ntwo words and then some more é", 12: "a" * 45}
    for name, text in answers.items():
        data = text.encode()
        for i, byte in enumerate(data):
            done = None
            if i == len(data) - 1:
                request = Job(name, (1,), 99)
                reason = FinishReason.EOS if name == 3 else FinishReason.LENGTH
                again = 2 if name == 12 else 0
                done = Completion(request, tuple(data), tuple(data), reason, again, 0, 9)
            printer.feed(TokenEvent(name, byte, done))
    assert lines == [
        "[ 3] ? What? ...",
        "[ 3]   One",
        "[ 3]   two words and then",
        "[ 3]   some more é",
        "[ 3] = 36 tokens, end of the answer",
        "[12] ? xxxxxxxxxxxxxxxx ...",
        "[12]   aaaaaaaaaaaaaaaaaaaa",
        "[12]   aaaaaaaaaaaaaaaaaaaa",
        "[12]   aaaaa",
        "[12] = 45 tokens, cut at --max-new-tokens, recomputed 2 x",
    ]


def test_answers_that_grow_together_are_printed_in_order() -> None:
    """The first answer is shown while it grows; an answer that finishes earlier waits for its
    turn."""
    lines: list[str] = []
    printer = AnswerPrinter(Letters(), dict.fromkeys(range(3), "?"), lines.append, width=20)

    def feed(name: int, text: str, last: bool = False) -> None:
        for i, byte in enumerate(text.encode()):
            job = Job(name, (1,), 99)
            whole = Completion(job, tuple(text.encode()), (), FinishReason.EOS, 0, 0, 9)
            ended = last and i == len(text) - 1
            printer.feed(TokenEvent(name, byte, whole if ended else None))

    feed(2, "third", last=True)
    feed(0, "first\nand ")
    assert lines == ["[0] ? ?", "[0]   first"]
    feed(1, "second\nand ")
    feed(0, "on", last=True)
    assert lines[2:] == ["[0]   and on", "[0] = 2 tokens, end of the answer"] + [
        "[1] ? ?",
        "[1]   second",
    ]
    feed(1, "more", last=True)
    assert [line[1] for line in lines[6:]] == ["1", "1", "2", "2", "2"]


def test_a_chart_of_the_memory() -> None:
    steps = [(i << 20, i << 19) for i in range(1, 101)]
    lines = chart(steps, width=20, height=4)
    assert [line.split("|")[0].strip() for line in lines] == ["100.0", "", "", "0"]
    assert all(len(line) <= 27 for line in lines)
    assert lines[0].endswith("...")
    assert lines[-1].endswith("#" * 10)
    assert sum(line.count("#") for line in lines) * 2 == pytest.approx(
        sum(line.count("#") + line.count(".") for line in lines), abs=4
    )
    assert chart([]) == chart([(0, 0)]) == []


def letters(screen: Screen, name: int, text: str) -> None:
    for byte in text.encode():
        screen.feed(TokenEvent(name, byte))


def test_answers_are_printed_next_to_their_prompts() -> None:
    rich_console = pytest.importorskip("rich.console")
    out = io.StringIO()
    console = rich_console.Console(file=out, force_terminal=True, width=80, height=20)
    config = KVCacheConfig(2, 4, 64, max_batch=2, max_seq_len=512)
    asked = {0: "What [bold]now[/bold]?", 1: "And then?", 2: "waits"}
    with KVCache(config, backend="host") as cache:
        slot = cache.alloc_reqid()
        assert slot is not None
        assert cache.step([100 if i == slot else 0 for i in range(2)]) == 0
        with Screen(Letters(), asked, cache, console) as screen:
            letters(screen, 0, "This")
            letters(screen, 1, "Then [x] come")
            console.print(screen._picture())
            shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", out.getvalue())
            assert re.search(r"0 +What \[bold\]now\[/bold\]\? +This", shown)
            assert re.search(r"1 +And then\? +Then \[x\] come", shown)
            assert "2 running, 1 waiting, 0 answered" in " ".join(shown.split())
            assert format_bytes(cache.stats().mapped_bytes) + " mapped" in shown
            out.truncate(0)
            done = Completion(Job(0, (1,), 9), (33,), (), FinishReason.EOS, 0, 0, 9)
            screen.feed(TokenEvent(0, 33, done))
            shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", out.getvalue())
            assert "This!" in shown
            assert "1 token, end of the answer" in shown


@pytest.mark.parametrize(
    ("width", "line"),
    [
        (100, r"\[#+\.*\] \S+ mapped, \S+ of rows; 2 running, 0 waiting, 0 answered"),
        (64, r"\S+ mapped, \S+ of rows; 2 running, 0 waiting, 0 answered"),
        (50, r"\S+ mapped; 2 running, 0 waiting, 0 answered"),
        (40, r"\S+ mapped; 2 running, 0 waiting"),
        (24, r"\S+ mapped"),
    ],
)
def test_the_line_of_memory_fits_the_terminal(width: int, line: str) -> None:
    rich_console = pytest.importorskip("rich.console")
    out = io.StringIO()
    console = rich_console.Console(file=out, width=width, height=20)
    asked = dict.fromkeys(range(2), "What is the answer to all of these questions?")
    with KVCache(KVCacheConfig(2, 4, 64, max_batch=2, max_seq_len=512), backend="host") as cache:
        slot = cache.alloc_reqid()
        assert slot is not None
        assert cache.step([100 if i == slot else 0 for i in range(2)]) == 0
        screen = Screen(Letters(), asked, cache, console)
        for name in asked:
            letters(screen, name, "an answer of some length " * 9)
        console.print(screen._picture())
    *rows, memory = out.getvalue().splitlines()
    assert len(rows) == 2, "a line for each request"
    assert all(row.rstrip().endswith("length") for row in rows), "the end of the answer"
    assert re.fullmatch(line, memory.rstrip())


def test_a_request_without_an_answer_is_printed() -> None:
    lines: list[str] = []
    request = Job(0, (1,), 9)
    done = Completion(request, (), (), FinishReason.NO_MEMORY, 0, -1, -1)
    AnswerPrinter(Letters(), {0: "hi"}, lines.append).feed(TokenEvent(0, None, done))
    assert lines[0] == "[0] ? hi"
    assert lines[1].startswith("[0] = 0 tokens, not served")


def smollm(**changes: Any) -> KVCacheConfig:
    values: dict[str, Any] = {
        "num_layers": 30,
        "num_kv_heads": 3,
        "head_dim": 64,
        "dtype": "float16",
        "max_batch": 4,
        "max_seq_len": 1000,
    }
    return KVCacheConfig(**(values | changes))


def test_replayed_layouts_follow_the_formula() -> None:
    lengths = [171, 100, 1]  # 64 KiB hold 170 2/3 rows of 384 bytes
    cases = [
        (smollm(), 64 << 10, 60 * (2 + 1 + 1) * (64 << 10)),
        (smollm(), 2 * MIB, 60 * 3 * 2 * MIB),
        (smollm(group_size=30), 64 << 10, 2 * (31 + 18 + 1) * (64 << 10)),
        (smollm(), 0, 3 * 1000 * 384 * 60),
    ]
    for config, page, mapped in cases:
        replay = Replay("x", [config], page)
        replay.add(lengths)
        replay.add([1])
        found = replay.footprint()
        assert found.mapped_bytes == mapped
        assert found.used_bytes == 272 * 384 * 60
        assert found.wasted_bytes == mapped - 272 * 384 * 60
        assert found.page_size == page
        assert found.num_tensors == 60 // config.group_size


def test_of_steps_that_map_the_same_the_fullest_counts() -> None:
    replay = Replay("x", [smollm()], 2 * MIB)
    for lengths in ([5, 5], [900, 7], [20, 20]):
        replay.add(lengths)
    assert replay.footprint().used_bytes == 907 * 384 * 60


def make_trace(tmp_path: Path) -> dict[str, Any]:
    loaded = tiny_model()
    config = KVCacheConfig.from_hf(
        loaded.model.config, dtype="float32", max_batch=3, max_seq_len=128, page_size=4096
    )
    with KVCache(config, backend="host") as cache:
        recorder = Recorder(cache, 4096, keep_steps=True)
        with Engine(loaded.model, cache, observer=recorder) as engine:
            list(engine.run(make_requests(5)))
        own = recorder.own.footprint()
        stats = cache.stats()
        # The cache grants pages by the same arithmetic, but keeps more of them mapped for reuse.
        assert stats.peak_wasted_bytes >= own.wasted_bytes
        assert stats.peak_mapped_bytes >= own.mapped_bytes
        assert stats.peak_used_bytes >= own.used_bytes
        with pytest.raises(ValueError, match="without keep_steps"):
            Recorder(cache, 4096).trace()
    path = tmp_path / "trace.json"
    path.write_text(json.dumps(recorder.trace()), encoding="utf-8")
    trace: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    owned = [sum(row[3] for row in step["requests"]) for step in trace["steps"]]
    assert max(owned) * 6 * 4096 == own.mapped_bytes
    return trace


def test_the_trace_has_pages_of_each_request_in_each_step(tmp_path: Path) -> None:
    trace = make_trace(tmp_path)
    assert {row[0] for step in trace["steps"] for row in step["requests"]} == set(range(5))
    for number, step in enumerate(trace["steps"]):
        assert step["step"] == number
        assert len(step["slots"]) == 3
        used = 0
        for _, slot, tokens, pages in step["requests"]:
            assert pages >= -(-tokens * 192 // 4096)
            assert step["slots"][slot] >= pages
            used += tokens * 192 * 6
        assert step["used_bytes"] == used
        assert step["mapped_bytes"] >= sum(step["slots"]) * 6 * 4096 - 3 * 6 * 4096
        assert len(step["other_bytes"]) == len(trace["others"])


@pytest.mark.filterwarnings("default")  # matplotlib issues its own warnings
def test_the_picture_is_drawn_and_the_same_each_time(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from pyvmem.serve import picture

    trace = make_trace(tmp_path)
    for name in ("a.svg", "b.svg", "c.png"):
        assert picture.main([str(tmp_path / "trace.json"), str(tmp_path / name)]) == 0
    text = (tmp_path / "a.svg").read_text(encoding="utf-8")
    assert text == (tmp_path / "b.svg").read_text(encoding="utf-8")
    assert "5 requests in 3 slots" in text
    assert (tmp_path / "c.png").read_bytes().startswith(b"\x89PNG")
    owned, kept = picture._blocks(trace, 10.0)
    for name, boxes in owned.items():
        area = sum(width for _, _, width, _ in boxes)
        rows = [row for step in trace["steps"] for row in step["requests"] if row[0] == name]
        assert area == sum(row[3] for row in rows)
    assert kept


def test_the_picture_rejects_files_without_a_trace(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from pyvmem.serve import picture

    for text, message in (
        ('{"format": 99}', "format 99"),
        ('{"format": 1, "steps": []}', "no step"),
        ("no json", "Expecting value"),
    ):
        (tmp_path / "t.json").write_text(text, encoding="utf-8")
        assert picture.main([str(tmp_path / "t.json"), str(tmp_path / "t.svg")]) == 1
        assert message in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        picture.main([str(tmp_path / "absent"), str(tmp_path / "t.svg")])
    assert "absent: No such file" in capsys.readouterr().err
    assert not (tmp_path / "t.svg").exists()


def test_a_model_is_found_by_its_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(models.ModelNotFound, match=r"no model folder and no \.gguf file"):
        models.find(tmp_path / "absent")
    with pytest.raises(models.ModelNotFound, match=r"0 \.gguf files"):
        models.find(tmp_path)
    one = tmp_path / "one.gguf"
    one.touch()
    assert models.find(tmp_path) == models.find(one) == one
    (tmp_path / "two.gguf").touch()
    with pytest.raises(models.ModelNotFound, match=r"2 \.gguf files"):
        models.find(tmp_path)
    (tmp_path / "config.json").touch()
    assert models.find(str(tmp_path)) == tmp_path
    assert models.model_folder(tmp_path) == tmp_path
    monkeypatch.setattr(models, "_MODULE", "pyvmem_no_such_module")
    with pytest.raises(models.ModelNotFound, match="is not installed"):
        models.find()


def test_the_cache_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("VMEM_CACHE_DIR", str(tmp_path))
    assert models.cache_dir() == tmp_path
    monkeypatch.setenv("VMEM_CACHE_DIR", "~/models")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert models.cache_dir() == tmp_path / "models"
    monkeypatch.setenv("VMEM_CACHE_DIR", "~nobody-of-that-name/models")
    with pytest.raises(InvalidArgument, match=r"VMEM_CACHE_DIR=~nobody-of-that-name/models: ~nob"):
        models.cache_dir()
    monkeypatch.delenv("VMEM_CACHE_DIR")
    assert models.cache_dir() == tmp_path / ".cache" / "vmem"
    assert not any(tmp_path.iterdir()), "the query must not create a directory"


def test_a_failed_conversion_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("VMEM_CACHE_DIR", str(tmp_path / "cache"))
    (tmp_path / "broken.gguf").write_bytes(b"GGUF and then nonsense")
    told: list[str] = []
    with pytest.raises(Exception, match=r"."):  # whatever error transformers raises
        models.model_folder(tmp_path / "broken.gguf", told.append)
    assert told[0].startswith("converting broken.gguf")
    assert list((tmp_path / "cache" / "models").iterdir()) == []
