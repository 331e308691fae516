# SPDX-License-Identifier: MIT
"""Quick runs of each part of `vmem bench vllm`."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pyvmem.commands.cli import main
from pyvmem.errors import InvalidArgument
from pyvmem.layouts.workload import Arrival, Request
from vmem_bench.vllm import command
from vmem_bench.vllm.arm import _Inside
from vmem_bench.vllm.common import open_fleet
from vmem_bench.vllm.engines import SHAPES, Fleet, Plan, TimeUp
from vmem_bench.vllm.loads import Heard, Load, arrivals, at_rate, climb, idle_footprint, in_turns
from vmem_bench.vllm.picture import draw


@pytest.fixture
def bench(tmp_path: Path) -> Any:
    """Returns a function that runs a part and returns its rows by name, and its whole result."""

    def run(part: str, *more: str) -> tuple[dict[str, Any], dict[str, Any]]:
        out = tmp_path / "vllm.json"
        words = ["bench", "vllm", "--quick", "--backend", "host", "--part", part]
        assert main([*words, "--out", str(out), *more]) == 0
        data = json.loads(out.read_text())
        assert data["format"] == "vmem-bench-vllm/1"
        found = data["parts"][part]
        return {row["id"].partition("/")[2]: row for row in found["rows"]}, found

    return run


def test_elastic_and_stock(bench: Any, tmp_path: Path) -> None:
    rows, part = bench("load", "--rounds", "2", "--requests", "6", "--beside", "128K")
    for arm in ("stock", "elastic", "stock again", "elastic 128K"):
        for rate in ("0", "6"):
            assert rows[f"same/{rate}/{arm}"]["value"] == rows[f"same/{rate}/{arm}"]["of"] == 12
            assert rows[f"first/{rate}/{arm}"]["n"] == 12
            assert len(rows[f"rate/{rate}/{arm}"]["rounds"]) == 2
    assert 0 < rows["rest/mapped"]["value"] < rows["peak"]["value"]
    assert [one["id"] for one in part["missing"]] == ["load/rest/held"]
    pages = json.loads((tmp_path / "vllm.json").read_text())["options"]["pages"]
    assert pages == {"elastic": 64 << 10, "elastic 128K": 128 << 10}


def test_answers_depend_on_keys_and_values(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that lost keys and values must not give the same answers as stock vLLM."""
    answers: list[list[int]] = []

    def measure(command: Any, part: Any) -> None:
        prompts = [[first] * 64 + [7] * 16 for first in (10, 20, 30, 40)]
        load = Load(prompts, [8] * 4, [0.0] * 4)
        with open_fleet(command) as fleet:
            fleet.start({"stock": Plan(False, 16 << 20)})
            answers.extend(fleet.order("stock", **load.order())["answers"])
        part.value("one", "row", "stock", 1, "x")

    monkeypatch.setitem(command.PARTS, "load", ("a part", measure))
    bench("load")
    assert len({tuple(one) for one in answers}) == 4


def test_batch_invariant_kernels_need_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["bench", "vllm", "--quick", "--backend", "host", "--batch-invariant"]
    assert main(words) == 2
    assert "--batch-invariant" in capsys.readouterr().err


def test_engines_use_batch_invariant_kernels() -> None:
    command: Any = SimpleNamespace(quick=True, backend="stock", args=SimpleNamespace())
    found = []
    for chosen in (False, True):
        with Fleet(command, SHAPES["tiny"], batch_invariant=chosen) as fleet:
            found.append(fleet._program(Plan(True, 16 << 20))[1].get("VLLM_BATCH_INVARIANT"))
    assert found == [None, "1"]


@pytest.mark.long
def test_a_full_card_one_engine_at_a_time(bench: Any) -> None:
    rows, part = bench("full")
    assert part["status"] == "done"
    assert rows["same/elastic"]["value"] == rows["same/elastic"]["of"] == 24
    for row in ("rate", "started"):
        assert len(rows[f"over/{row}/elastic"]["rounds"]) == 2
    assert rows["mapped/elastic"]["value"] > 0.5 * rows["memory"]["value"]
    assert "mapped/stock" not in rows


@pytest.mark.long
def test_the_first_token_after_a_rest(bench: Any) -> None:
    rows, _ = bench("first")
    for size in (64, 128):
        assert len(rows[f"over/{size}/elastic"]["rounds"]) == 2
        assert rows[f"{size}/stock"]["n"] == rows[f"{size}/elastic"]["n"] == 2


@pytest.mark.long
@pytest.mark.parametrize("tiering", [[], ["--tiering"]])
def test_prompts_from_host_memory(bench: Any, tiering: list[str]) -> None:
    """Measures only the elastic engine, because vLLM's own offloading needs a GPU."""
    rows, part = bench("offload", *tiering)
    for how in ("computed", "loaded"):
        assert [rows[f"{how}/{size}/elastic"]["n"] for size in (128, 256)] == [2, 2]
    for how in ("stored", "loaded"):
        row = rows[f"rate/{how}/elastic"]
        assert row["value"] > 0
        assert row["bytes"] >= 2 * 0.9 * (128 + 256) * 1024  # 1024 bytes per token, in two rounds
    assert {f"gap/{how}/elastic" for how in ("none", "loaded", "computed")} <= rows.keys()
    assert rows["alike"]["value"] == rows["alike"]["of"] == 5  # answers in float32 are exact
    assert [one["id"] for one in part["missing"]] == ["offload/*/stock"]


@pytest.mark.long
def test_prefixes_that_do_not_fit(bench: Any) -> None:
    """Each engine's prompts need all the memory, so later turns load them from host memory."""
    rows, part = bench("prefixes", "--rounds", "1")
    hits = {arm: rows[f"hits/{arm}"] for arm in ("elastic+host", "elastic", "static")}
    # All tokens except the prompts' tails are prefix hits.
    assert hits["elastic+host"]["value"] > 50 > hits["static"]["value"]
    assert hits["elastic"]["value"] > hits["static"]["value"]
    for arm, row in hits.items():
        same = rows[f"same/{arm}"]
        assert same["value"] == same["of"] == 2 * rows[f"first/{arm}"]["n"] > 0  # exact in float32
        assert row["of"] == rows[f"first/{arm}"]["n"] * (128 + 32)
    for arm in ("elastic+host", "elastic"):
        assert 0 < rows[f"memory/{arm}"]["value"] <= rows["capacity"]["value"]
    assert "engine 1" in draw({"parts": {"prefixes": part}})
    assert [one["id"] for one in part["missing"]] == ["prefixes/*/static+host"]


def test_time_in_the_pool_excludes_vllms_functions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counts the pool's own code, even when vLLM's functions call back into it."""
    now = 0.0

    class Code:
        """Pool code that calls vLLM code, which calls back into pool code."""

        def step(self) -> None:
            spend(1)
            self.schedule()
            spend(2)

        def schedule(self) -> None:
            spend(10)
            self.check()

        def check(self) -> None:
            spend(4)

    def spend(seconds: float) -> None:
        nonlocal now
        now += seconds

    clock = SimpleNamespace(perf_counter=lambda: now)
    monkeypatch.setattr("vmem_bench.vllm.arm.time", clock)
    inside, code = _Inside(), Code()
    undo = [*inside.add(code, "step", "check"), *inside.leave_out(code, "schedule")]
    code.step()
    assert inside.seconds == 1 + 2 + 4
    code.schedule()
    assert inside.seconds == 7 + 4
    for one in undo:
        one()
    code.step()
    assert inside.seconds == 11


@pytest.mark.long
def test_a_step_costs_the_pools_code_and_not_vllms(bench: Any) -> None:
    rows, _ = bench("cost")
    for count in (4, 8):
        row = rows[f"{count}/elastic"]
        assert row["n"] > 10
        assert row["min"] > 0


def test_vllm_and_the_serving_loop(tmp_path: Path) -> None:
    """`vmem bench serve` sends vLLM the same requests as its other arms."""
    out = tmp_path / "serve.json"
    words = ["bench", "serve", "--quick", "--backend", "host", "--out", str(out)]
    words += ["--arms", "contiguous,vllm", "--no-check", "--workload", "offline"]
    assert main(words) == 0
    data = json.loads(out.read_text())
    part = data["parts"]["offline"]
    assert part["status"] == "done", part
    rows = {row["id"].partition("/")[2]: row for row in part["rows"]}
    assert rows["makespan/vllm"]["finished"] == [data["options"]["served"]] == [6]
    for arm in ("contiguous", "vllm"):
        assert 0 < rows[f"first50/{arm}"]["value"] <= rows[f"first99/{arm}"]["value"]
    done = [
        rows[f"tokens/{arm}"]["value"] * rows[f"makespan/{arm}"]["value"]
        for arm in ("contiguous", "vllm")
    ]
    assert done[0] == pytest.approx(done[1], rel=1e-4)
    assert "host/vllm" not in rows
    aims = {aim["id"] for aim in data["aims"]}
    assert {"tokens_vllm", "between99_vllm"} <= aims
    assert "host_vllm" not in aims


@pytest.mark.long
def test_two_ranks(bench: Any) -> None:
    rows, _ = bench("load", "--rounds", "1", "--requests", "6", "--tensor-parallel", "2")
    for arm in ("elastic", "stock again"):
        assert rows[f"same/0/{arm}"]["value"] == rows[f"same/0/{arm}"]["of"] == 6
    for when in ("kept", "state"):
        one, two = (rows[f"rank/{when}/{rank}"] for rank in range(2))
        assert one["value"] == two["value"] > 0
        assert one["maps"] == two["maps"]
    assert rows["rank/kept/0"]["maps"] != rows["rank/state/0"]["maps"]


@pytest.mark.long
@pytest.mark.parametrize("ranks", ["1", "2"])
def test_a_limit_while_requests_run(bench: Any, ranks: str) -> None:
    rows, _ = bench("limit", "--requests", "12", "--tensor-parallel", ranks)
    assert rows["same"]["value"] == rows["requests"]["value"] > 0
    assert 0 < rows["most/0"]["value"] <= rows["limit"]["value"] < rows["peak"]["value"]
    assert rows["within/0"]["value"] >= 0


def test_an_engine_comes_to_rest(bench: Any) -> None:
    rows, _ = bench("idle", "--requests", "12", "--arms", "elastic")
    assert rows["mapped"]["value"] == rows["live"]["value"] > 0
    assert rows["slabs"]["value"] <= rows["most"]["value"]
    assert rows["others/bytes"]["value"] > 0


@pytest.mark.long
@pytest.mark.parametrize("how", [["--bursts", "trace"], ["--bursts", "climb", "--apart"]])
def test_engines_that_share(bench: Any, how: list[str], tmp_path: Path) -> None:
    rows, part = bench("share", "--rounds", "1", *how)
    assert part["status"] == "done"
    for arm in ("shared", "static", "alone"):
        for engine in "01":
            assert rows[f"done/{arm}/{engine}"]["value"] == rows[f"first/{arm}/{engine}"]["n"] > 0
    assert 0 < rows["memory/shared"]["value"] <= rows["capacity"]["value"]
    seen = rows["memory/shared"]["series"]
    assert 0 < max(one[1] for one in seen) <= rows["memory/shared"]["value"]
    assert all(one[1] == sum(one[2:]) for one in seen)
    assert "engine 1" in draw({"parts": {"share": part}})
    with pytest.raises(ValueError, match="no series of memory"):
        draw({})


@pytest.mark.long
def test_engines_that_sleep(bench: Any) -> None:
    rows, part = bench("sleep", "--rounds", "1")
    assert rows["given/elastic"]["value"] > 0
    assert rows["same/elastic"]["value"] == rows["same/elastic"]["of"] == 8
    assert [one["id"] for one in part["missing"]] == ["sleep/stock"]


@pytest.mark.long
def test_blocks_of_two_sizes(bench: Any) -> None:
    rows, _ = bench("blocks", "--rounds", "1", "--requests", "6")
    for size in ("32", "128"):
        assert rows[f"mapped/{size}"]["value"] >= rows[f"live/{size}"]["value"] > 0
        for load in ("prompts/2x256", "prompts/8x64", "prompts/32x16", "decode/4x64", "trace"):
            assert rows[f"rate/{load}/{size}"]["value"] > 0
        assert rows[f"gap/decode/4x64/{size}"]["n"] == 4 * 7


@pytest.mark.long
@pytest.mark.parametrize("host", [[], ["--offload", "64M"]])
def test_rough(bench: Any, host: list[str]) -> None:
    rows, _ = bench("rough", *host)
    for arm in ("elastic", "stock again"):
        assert rows[f"same/{arm}"]["value"] == rows[f"same/{arm}"]["of"] > 10
    assert rows["finished/elastic"]["aborted"] > 0
    assert rows["finished/elastic"]["resets"] > 0
    assert rows["finished/elastic"]["trims"] > 0
    for how in ("stored", "loaded"):
        assert rows[f"blocks/{how}"]["value"] > 0 if host else f"blocks/{how}" not in rows


def test_a_deadline_leaves_what_was_measured(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def measure(command: Any, part: Any) -> None:
        part.value("one", "row", "elastic", 1, "x")
        raise TimeUp("the deadline of 1 s came")

    monkeypatch.setitem(command.PARTS, "load", ("a part", measure))
    rows, part = bench("load")
    assert rows["one"]["value"] == 1
    assert part["missing"] == [{"id": "load/rest", "why": "the deadline of 1 s came"}]


def some(*at: float) -> list[Arrival]:
    return [Arrival(one, Request(10, 5)) for one in at]


def test_rates_keep_proportions() -> None:
    assert [one.at for one in at_rate(some(4.0, 5.0, 8.0), 2.0)] == [0.0, 0.25, 1.0]
    assert [one.at for one in at_rate(some(4.0, 5.0), 0.0)] == [0.0, 0.0]
    with pytest.raises(InvalidArgument, match="no request of at most 2 tokens"):
        arrivals(None, 4, 2)


def test_bursts_come_in_turns() -> None:
    first, second = in_turns(some(*range(400)), 2, 10.0, 10.0, 10.0)
    assert sum(one.at < 5 for one in first) == 50
    assert sum(one.at >= 5 for one in first) < 20
    assert sum(one.at < 5 for one in second) < 20
    assert sum(one.at >= 5 for one in second) == 50
    one, two = climb(2, 4.0, 7, 9)
    assert [b.at - a.at for a, b in zip(one, two, strict=True)] == pytest.approx([9.0] * len(one))
    assert 14 <= len(one) <= 16  # the area under the ramp is the peak squared
    assert one[0].request == Request(9, 7)


def test_kvcached_workload() -> None:
    load = idle_footprint(400, 1000, 96)
    hot = [one for one in load.prompts if len(one) == 192]
    assert 80 < len(hot) < 160
    assert len({tuple(one[:128]) for one in hot}) <= 17
    assert {len(one) for one in load.prompts} <= set(range(192, 1025))
    assert min(load.tokens) >= 16
    assert max(load.tokens) <= 256


def test_what_answers_say() -> None:
    load = Load([[1], [2]], [2, 1], [0.0, 1.0])
    answer = {"answers": [[5, 6], [7]], "added": [0.0, 1.5], "times": [[0.5, 2.0], [3.0]]}
    heard = Heard.of(load, answer)
    assert heard.first == [0.5, 2.0]
    assert heard.gaps == [1.5]
    assert (heard.rate, heard.seconds) == (1.0, 3.0)
