# SPDX-License-Identifier: MIT
"""Checks `vmem bench vllm --part full`: the order of the engines, the load, the ratios and the
confidence intervals.
"""

from __future__ import annotations

from itertools import islice
from types import SimpleNamespace
from typing import Any

import pytest

from pyvmem import InvalidArgument
from pyvmem.bench.record import Part
from pyvmem.bench.timing import Deadline
from vmem_bench.vllm.engines import Plan
from vmem_bench.vllm.full import compare, filling, interval, there_and_back


def test_arms_run_forward_then_backward() -> None:
    assert list(there_and_back("AB", 4)) == list("ABBAABBA")
    assert list(there_and_back("ABC", 2)) == list("ABCCBA")


def test_the_interval_is_students_t() -> None:
    mean, half = interval([1.0, 2.0, 3.0, 4.0])
    assert mean == 2.5
    assert half == pytest.approx(3.182 * 1.2909944 / 2, rel=1e-4)
    assert interval([0.5]) == (0.5, float("inf"))
    assert interval([1.0] * 30) == (1.0, 0.0)


def test_a_load_fills_the_cache() -> None:
    load = filling(1 << 30, 1 << 10, 64, 100, 20_000, 512, 3)
    total = sum(map(len, load.prompts)) + sum(load.tokens)
    assert 0.95 < total / (1 << 20) <= 0.96
    assert len({len(prompt) for prompt in load.prompts}) > 8
    assert all(3 <= one < 512 for one in islice(load.prompts[0], 50))
    odd = filling(1 << 30, 1 << 10, 7, 100, 200_000, 512, 3)
    assert len(odd.prompts) == 7
    with pytest.raises(InvalidArgument, match="room for 7 tokens per request for 64 requests"):
        filling(512 << 10, 1 << 10, 64, 4, 512, 512, 3)
    close = filling(1 << 30, 1 << 10, 64, 100, 15_800, 512, 3)
    assert max(map(len, close.prompts)) + 100 <= 15_800
    with pytest.raises(InvalidArgument, match="above the limit of 15000: use more requests"):
        filling(1 << 30, 1 << 10, 64, 100, 15_000, 512, 3)


class _Fleet:
    """Stands in for vLLM: a step takes the number of seconds given for its arm, and 1.5 times as
    long in the first engine started.
    """

    block_bytes, block_size, vocabulary, longest = 16 << 10, 16, 512, 4096

    def __init__(self, steps: dict[str, float]) -> None:
        self.steps, self.alive, self.log = steps, "", list[str]()

    def start(self, plans: dict[str, Plan]) -> None:
        assert not self.alive
        (self.alive,) = plans
        self.log.append(self.alive)

    def stop(self, names: list[str]) -> None:
        assert names == [self.alive]
        self.alive = ""

    def used(self, name: str) -> int:
        return 123

    def rest(self, seconds: float) -> None:
        assert seconds >= 1

    def order(self, name: str, **load: Any) -> dict[str, Any]:
        step = self.steps[name] * (1.5 if len(self.log) == 1 else 1.0)
        times = [[step * (n + 1) for n in range(count)] for count in load["tokens"]]
        return {
            "seconds": step * load["tokens"][0],
            "waited": step * load["tokens"][0] / 4,
            "added": [0.0] * len(times),
            "times": times,
            "answers": [[1] * count for count in load["tokens"]],
        }

    def together(self, orders: dict[str, Any], look: Any, every: float) -> dict[str, Any]:
        look()
        return {name: self.order(name, **load) for name, load in orders.items()}


def test_engines_one_at_a_time_and_their_ratio() -> None:
    written: list[str] = []
    command: Any = SimpleNamespace(
        args=SimpleNamespace(requests=32, rounds=4),
        quick=False,
        deadline=Deadline(60),
        show=written.append,
        write=lambda: None,
    )
    fleet: Any = _Fleet({"stock": 0.010, "elastic": 0.0125})
    part = Part("full", "")
    plans = {"stock": Plan(False, 64 << 20), "elastic": Plan(True, 64 << 20)}
    compare(command, part, fleet, plans)
    assert fleet.log == ["stock", "elastic", "elastic", "stock"] * 2
    rows = {row["id"].partition("/")[2]: row for row in part.rows}
    # The first stock engine was 1.5 times slower, which affects one of the four ratios.
    assert rows["over/rate/elastic"]["rounds"] == [1.2, 0.8, 0.8, 0.8]
    assert rows["over/step/elastic"]["value"] == pytest.approx(0.9)
    assert rows["over/step/elastic"]["half_width"] == pytest.approx(0.3182, rel=1e-3)
    assert rows["waited/stock"]["value"] == 0.25
    assert rows["mapped/elastic"]["value"] == 123
    assert "mapped/stock" not in rows
    assert rows["same/elastic"]["value"] == rows["same/elastic"]["of"] == 256
    assert rows["over/started/elastic"]["rounds"] == [1.2, 0.8, 0.8, 0.8]
    assert rows["rest/elastic"]["value"] == 123
    assert len(written) == 8


def test_a_deadline_leaves_whole_engines() -> None:
    now = iter(range(0, 1000, 10))
    deadline = Deadline(100, lambda: float(next(now)))
    command: Any = SimpleNamespace(
        args=SimpleNamespace(requests=32, rounds=4),
        quick=False,
        deadline=deadline,
        show=lambda text: None,
        write=lambda: None,
    )
    fleet: Any = _Fleet({"stock": 0.010, "elastic": 0.010})
    part = Part("full", "")
    compare(command, part, fleet, {arm: Plan(arm == "elastic", 64 << 20) for arm in fleet.steps})
    assert not fleet.alive
    assert 1 <= len(fleet.log) < 8
    assert part.missing[0]["why"].endswith("the deadline passed")
