# SPDX-License-Identifier: MIT
"""The benchmark's arithmetic and its output file: percentiles, rounds, rows, targets, merging."""

from __future__ import annotations

import gc
import json
import mmap
import random
import statistics
from pathlib import Path
from typing import Any

import pytest

from pyvmem.bench import aims, report
from pyvmem.bench.memory import KernelMemory
from pyvmem.bench.merge import MergeError, merge
from pyvmem.bench.record import FORMAT, Book, Record
from pyvmem.bench.setting import KB, MB, label
from pyvmem.bench.timing import (
    Deadline,
    Samples,
    interleave,
    percentile,
    quiet,
    summarize,
    time_block,
    time_each,
)


def record(**machine: Any) -> Record:
    known = {"gpu": "NVIDIA H100 80GB HBM3", "driver": "580.159.04", "commit": "abc"}
    known.update(cpu="c", cores=2, memory_bytes=1 << 34, kernel="k", user="root", python="3")
    known.update(dirty=False, torch=None, cuda_bindings=None, cffi="2")
    return Record(
        machine={**known, **machine},
        options={"quick": False, "backend": "stock", "only": []},
        started="2026-01-01T00:00:00+00:00",
    )


def samples(*rounds: list[float]) -> Samples:
    return Samples([list(r) for r in rounds])


# ---- timing --------------------------------------------------------------------------------------


def test_percentiles_are_samples_by_nearest_rank() -> None:
    data = [float(x) for x in range(1, 101)]
    assert percentile(data, 0.90) == 90
    assert percentile(data, 0.99) == 99
    assert percentile(data, 1.0) == 100
    assert percentile(data, 0.0) == 1
    assert percentile([7.0], 0.99) == 7


def test_summary_agrees_with_the_standard_library() -> None:
    rng = random.Random(3)
    rounds = [[rng.expovariate(1) for _ in range(101)] for _ in range(7)]
    flat = [x for r in rounds for x in r]
    found = summarize(samples(*rounds))
    assert found.n == len(flat)
    assert found.rounds == 7
    assert found.median == pytest.approx(statistics.median(flat))
    assert found.mean == pytest.approx(statistics.fmean(flat))
    assert (found.min, found.max) == (min(flat), max(flat))
    assert found.median <= found.p90 <= found.p99 <= found.max
    medians = [statistics.median(r) for r in rounds]
    expected = (max(medians) - min(medians)) / statistics.median(flat)
    assert found.round_spread == pytest.approx(expected)


def test_summary_of_nothing_is_an_error() -> None:
    with pytest.raises(ValueError, match="no samples"):
        summarize(Samples())


def test_the_warm_up_round_is_dropped_unless_it_is_alone() -> None:
    two = samples([9.0], [1.0])
    two.drop_first_round()
    assert two.flat() == [1.0]
    two.drop_first_round()
    assert two.flat() == [1.0]


def test_order_rotates_and_every_round_has_each_case_once() -> None:
    seen: list[str] = []
    turns = [lambda n=name: seen.append(n) for name in "abc"]
    assert interleave(turns, 4) == 4
    assert ["".join(seen[i : i + 3]) for i in range(0, 12, 3)] == ["abc", "bca", "cab", "abc"]


def test_a_spent_deadline_still_allows_two_rounds() -> None:
    clock = iter(range(0, 10_000, 10))
    deadline = Deadline(5, now=lambda: float(next(clock)))
    assert not deadline.allows(1)
    count = 0

    def turn() -> None:
        nonlocal count
        count += 1

    assert interleave([turn], 50, deadline) == 2
    assert count == 2


def test_timed_calls_return_what_the_function_did() -> None:
    each: list[float] = []
    assert time_each(divmod, [(7, 2), (9, 4)], each) == [(3, 1), (2, 1)]
    assert len(each) == 2
    assert all(x >= 0 for x in each)
    block: list[float] = []
    assert time_block(divmod, [(7, 2), (9, 4)], block) == [(3, 1), (2, 1)]
    assert len(block) == 1


def test_quiet_restores_the_garbage_collector() -> None:
    assert gc.isenabled()
    with quiet():
        assert not gc.isenabled()
    assert gc.isenabled()


def test_labels_of_sizes() -> None:
    assert [label(n) for n in (64 * KB, 2 * MB, 1 << 30, 100, 4096)] == [
        "64K",
        "2M",
        "1G",
        "100",
        "4K",
    ]


# ---- rows ----------------------------------------------------------------------------------------


def test_a_row_says_time_overhead_and_rate_in_its_unit() -> None:
    part = record().part("calls", "each call")
    row = part.time(
        "x/stock/64K",
        "x",
        "stock",
        samples([2000.0, 2000.0]),
        page=64 * KB,
        nbytes=2000,
        overhead_ns=100,
        calls=5,
    )
    assert row["id"] == "calls/x/stock/64K"
    assert (row["median"], row["unit"]) == (2.0, "us")
    assert row["overhead"] == 0.5
    assert row["net"] == 1.5
    assert row["gb_per_s"] == 1.0  # 2000 bytes in 2000 ns
    assert part.find("x/stock/64K") is row


def test_duplicate_row_names_are_rejected() -> None:
    part = record().part("calls", "each call")
    part.value("x", "x", "stock", 1.0, "bytes")
    with pytest.raises(ValueError, match="two rows"):
        part.value("x", "x", "stock", 2.0, "bytes")


def test_a_book_drops_the_first_round() -> None:
    part = record().part("calls", "each call")
    book = Book(part)
    first = book.samples("a", "a", "stock")
    first.new_round().append(9e9)
    first.new_round().append(1000.0)
    book.close()
    found = part.find("a")
    assert found is not None
    assert (found["median"], found["n"]) == (1.0, 1)


def test_the_file_has_no_samples_and_the_raw_file_has_them(tmp_path: Path) -> None:
    whole = record()
    whole.part("calls", "each call").time("x", "x", "stock", samples([1234.0], [5678.0]))
    raw = whole.write(tmp_path / "r.json")
    small = json.loads((tmp_path / "r.json").read_text())
    large = json.loads(raw.read_text())
    assert small["format"] == large["format"] == FORMAT
    assert "samples" not in small["parts"]["calls"]["rows"][0]
    assert large["parts"]["calls"]["rows"][0]["samples"] == [[1.234], [5.678]]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["r.json", "raw"]


def test_a_long_row_keeps_part_of_its_samples_and_says_so() -> None:
    part = record().part("live", "live")
    row = part.time("x", "x", "stock", samples([float(i) for i in range(10_000)]))
    assert row["n"] == 10_000
    assert row["samples_every"] == 3
    assert len(row["samples"][0]) == 3334


def test_kernel_memory_counts_page_tables() -> None:
    before = KernelMemory.now()
    # user memory of this process, touched page by page: only its page tables are kernel memory
    with mmap.mmap(-1, 64 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as kept:
        for at in range(0, len(kept), 4096):
            kept[at] = 1
        delta = KernelMemory.now().since(before)
    assert delta.value == max(delta.listed, delta.missing)
    assert delta.own > 32 << 20


# ---- aims ----------------------------------------------------------------------------------------


def timed(whole: Record, name: str, us: float, **fields: Any) -> None:
    part, _, row = name.partition("/")
    target = whole.parts.get(part) or whole.part(part, part)
    target.time(row, row, "x", samples([us * 1e3]), **fields)


def aim(whole: Record, name: str, system: str = "stock") -> dict[str, Any]:
    return next(a for a in aims.compute(whole, system) if a["id"] == name)


def test_the_ratio_of_map_times_is_net_and_judged() -> None:
    whole = record()
    timed(whole, "calls/map_access/stock/64K", 13.0, overhead_ns=1000)
    timed(whole, "calls/map_access/cumem/2M", 20.0, overhead_ns=4000)
    found = aim(whole, "map_64K")
    assert found["value"] == pytest.approx(12 / 16)
    assert (found["pass"], found["applies"]) == (True, True)
    assert aim(whole, "map_64K_raw")["value"] == pytest.approx(13 / 20)
    assert aim(whole, "map_64K_raw")["pass"] is None


def test_a_missed_aim_says_so() -> None:
    whole = record()
    timed(whole, "step/none/stock", 20.1)
    timed(whole, "step/async/stock", 29.9)
    assert aim(whole, "step_none")["pass"] is False
    assert aim(whole, "step_async")["pass"] is True


def test_bandwidth_must_be_at_least_the_aim() -> None:
    whole = record()
    timed(whole, "pool/run/stock", 100.0, nbytes=19_900_000)
    assert aim(whole, "run_1024")["value"] == pytest.approx(199)
    assert aim(whole, "run_1024")["pass"] is False


@pytest.mark.parametrize(
    ("gpu", "system", "quick"),
    [("NVIDIA A100", "stock", False), (None, "host", False), ("NVIDIA H200", "stock", True)],
)
def test_aims_do_not_apply_elsewhere(gpu: str | None, system: str, quick: bool) -> None:
    whole = record(gpu=gpu)
    whole.options["quick"] = quick
    timed(whole, f"step/none/{system}", 1.0)
    found = aim(whole, "step_none", system)
    assert found["pass"] is True
    assert found["applies"] is False


def test_a_missing_row_is_named() -> None:
    found = aim(record(), "map_64K")
    assert found["value"] is None
    assert found["pass"] is None
    assert "calls/map_access/stock/64K" in found["why"]


def test_attention_is_judged_against_the_median_of_all_baselines() -> None:
    whole = record()
    for i, ms in enumerate((1.00, 1.02, 0.98, 1.00)):
        timed(whole, f"readbw/malloc{i}", ms * 1e3)
    timed(whole, "readbw/random0", 1010)
    timed(whole, "readbw/random1", 1020)
    found = aim(whole, "readbw_random")
    assert found["value"] == pytest.approx(1.015)
    assert found["baselines"] == 4
    assert found["baseline_spread"] == pytest.approx(0.04)


def test_recovered_memory_is_a_share() -> None:
    whole = record()
    part = whole.part("live", "live")
    part.value("decode/stock/400k/kernel_bytes", "", "stock", 2000.0, "bytes")
    part.value(
        "decode_spread_consolidated/stock/400k/kernel_bytes_after", "", "stock", 500.0, "bytes"
    )
    assert aim(whole, "recovered_bytes")["value"] == pytest.approx(75)


# ---- tables --------------------------------------------------------------------------------------


def test_tables_show_rows_reasons_and_verdicts() -> None:
    whole = record()
    timed(whole, "step/none/stock", 25.0)
    whole.parts["step"].not_run("async/stock", "no time left")
    whole.aims = aims.compute(whole, "stock")
    text = report.part_table(whole.parts["step"])
    assert "25.0" in text
    assert "step/async/stock: no time left" in text
    line = next(
        x for x in report.aims_table(whole).splitlines() if "none of which needs a page" in x
    )
    assert "<= 20" in line
    assert "MISS" in line
    assert "NVIDIA H100" in report.head(whole)
    whole.aims = aims.compute(whole, "host")
    assert report.aims_table(whole) == "", "targets of other machines must not be shown"


def test_columns_line_up() -> None:
    lines = report.table(["a", "number"], [["long name", "1"], ["x", "22,222"]], 1).splitlines()
    assert lines == [
        "a          number",
        "---------  ------",
        "long name       1",
        "x          22,222",
    ]


# ---- merging -------------------------------------------------------------------------------------


def write(whole: Record, path: Path) -> Path:
    whole.write(path)
    return path


def test_merging_takes_the_better_finished_part(tmp_path: Path) -> None:
    one, two = record(), record()
    two.started = "2026-01-01T01:00:00+00:00"
    timed(one, "calls/map_access/stock/64K", 13.0)
    timed(one, "calls/map_access/cumem/2M", 20.0)
    one.parts["calls"].status = "done"
    two.part("calls", "each call").status = "failed"
    timed(two, "step/none/stock", 10.0)
    two.parts["step"].status = "done"
    paths = [write(one, tmp_path / "one.json"), write(two, tmp_path / "two.json")]
    whole = merge(paths)
    assert whole.parts["calls"].status == "done"
    assert aim(whole, "map_64K")["pass"] is True
    assert next(a for a in whole.aims if a["id"] == "step_none")["pass"] is True
    assert whole.row("step/none/stock") is not None
    again = json.loads(whole.write(tmp_path / "all.json").read_text())
    assert again["parts"]["step"]["rows"][0]["samples"] == [[10.0]]


@pytest.mark.parametrize("key", ["gpu", "driver", "commit"])
def test_runs_of_different_machines_are_not_merged(tmp_path: Path, key: str) -> None:
    paths = [
        write(record(), tmp_path / "one.json"),
        write(record(**{key: "another"}), tmp_path / "two.json"),
    ]
    with pytest.raises(MergeError, match="another"):
        merge(paths)


def test_files_without_results_are_rejected(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    for text in ("{", "[]", '{"format": "something else"}'):
        path.write_text(text)
        with pytest.raises(MergeError, match=r"x\.json"):
            merge([path])
    with pytest.raises(MergeError):
        merge([tmp_path / "absent.json"])
