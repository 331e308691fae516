# SPDX-License-Identifier: MIT
"""SGLang's CPU engine on the pool generates stock SGLang's tokens in less memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import Start
from served import PAGE_BYTES, Engine, becomes, greedy, make_model, options, prompts, served

from pyvmem.ledger.accounts import EngineInfo, Ledger, engines_in
from pyvmem.ledger.control import answer
from pyvmem.ledger.orders import order
from pyvmem.plumbing.http import Request


def info(tmp_path: Path) -> EngineInfo:
    """Returns the ledger entry of the only engine."""
    (found,) = engines_in(tmp_path / "ledger")["host"]
    return found


@pytest.mark.parametrize("page", [16, 32])
def test_tokens_prefixes_flush_and_sleep(
    start: Start, stock: list[list[int]], tmp_path: Path, page: int
) -> None:
    engine = start({"VMEM_NAME": "one"}, page_size=page)
    first, again = engine.generate(prompts()), engine.generate(prompts())
    assert [one["output_ids"] for one in first] == stock
    assert [one["output_ids"] for one in again] == stock
    hits = [one["meta_info"]["cached_tokens"] for one in again]
    assert all(hits[:4])
    assert not any(one % page for one in hits)
    found = sum(one["meta_info"]["cached_tokens"] for one in first + again)
    assert becomes(lambda: info(tmp_path).hits == found)  # hits are reported after the last answer
    assert becomes(lambda: info(tmp_path).cached > 0 == info(tmp_path).in_use)
    assert info(tmp_path).name == "one"
    assert info(tmp_path).queries == 2 * sum(map(len, prompts()))
    assert becomes(lambda: engine.call("flush_cache").success)
    one_page = PAGE_BYTES * page // 16
    assert info(tmp_path).used == one_page
    assert engine.answer(prompts()) == stock
    engine.release()
    assert info(tmp_path).used == one_page
    engine.call("resume_memory_occupation", tags=["kv_cache"])
    assert engine.answer(prompts()) == stock


def metrics(tmp_path: Path) -> dict[str, float]:
    """Returns the only engine's metrics from the control server."""
    reply = answer(tmp_path / "ledger", Request("GET", "/metrics"))
    lines = [line.rpartition(" ") for line in reply.body.decode().splitlines()]
    return {
        name.partition("{")[0]: float(value)
        for name, _, value in lines
        if 'engine="one"' in name and 'device="host"' in name
    }


def highest(
    tmp_path: Path, engine: Engine, ids: list[list[int]], new: list[int], **more: Any
) -> tuple[list[list[int]], int]:
    """Runs requests; returns the answers and the engine's peak memory."""
    most = 0
    engine.begin("generate", input_ids=ids, sampling_params=[greedy(n, **more) for n in new])
    while not engine.ready():
        most = max(most, info(tmp_path).used)
    return [one["output_ids"] for one in engine.end()], most


def test_a_limit_of_few_pages(start: Start, stock: list[list[int]], tmp_path: Path) -> None:
    """Requests wait and prefixes are evicted, but the tokens are the same."""
    limit = 17 * PAGE_BYTES
    engine = start({"VMEM_LIMIT": str(limit)})
    for _ in range(3):
        found, most = highest(tmp_path, engine, prompts(), [24] * 5)
        assert found == stock
        assert 8 * PAGE_BYTES < most <= limit
    assert "Retract" not in engine.log.read_text("utf-8")


@pytest.mark.parametrize("overlap", [False, True])
def test_requests_are_retracted_when_memory_is_short(
    start: Start, tmp_path: Path, overlap: bool
) -> None:
    """SGLang admits two requests that do not both fit, because it expects one to finish early.

    If the second is refused at first, SGLang retries it once the short request has finished.
    """
    limit = 20 * PAGE_BYTES
    engine = start(
        {"VMEM_LIMIT": str(limit)},
        schedule_conservativeness=0.01,
        disable_overlap_schedule=not overlap,
    )
    ids = [[3 + (k * 7 + i * 11) % 500 for i in range(40)] for k in range(2)]
    alone = [engine.answer([one], 180, ignore_eos=False)[0] for one in ids]
    assert [len(one) for one in alone] == [180, 180]
    assert "Retract" not in engine.log.read_text("utf-8")
    assert becomes(lambda: engine.call("flush_cache").success)
    three = [ids[0], [5, 6, 7], ids[1]]
    together, most = highest(tmp_path, engine, three, [180, 2, 180], ignore_eos=False)
    assert [together[0], together[2]] == alone
    assert 16 * PAGE_BYTES < most <= limit
    assert "Retract requests" in engine.log.read_text("utf-8")
    # Each prompt counts once, however often it was refused or restarted.
    assert becomes(lambda: info(tmp_path).queries == sum(map(len, [*ids, *three])))
    assert info(tmp_path).hits == 0


def test_a_long_request_among_short_ones(start: Start) -> None:
    """The long request needs almost all memory, and is served before later short requests."""
    engine = start({"VMEM_LIMIT": str(18 * PAGE_BYTES)})
    short = [[5 + k, 6, 7, 8] for k in range(24)]
    long = [3 + (i * 7) % 500 for i in range(200)]
    ids = [*short[:8], long, *short[8:]]
    new = [60] * 8 + [30] + [60] * 16
    engine.begin("generate", input_ids=ids, sampling_params=[greedy(n) for n in new])
    took = [one["meta_info"]["e2e_latency"] for one in engine.end()]
    assert took[8] < min(took[9:])


def test_latent_attention(start: Start, tmp_path: Path) -> None:
    """Each layer has one tensor, whose 5 KB KV pages are not aligned to physical pages."""
    model = make_model(tmp_path, "minicpm3")
    with served(tmp_path / "log", {}, options(model)) as engine:
        stock = engine.answer(prompts())
    page_bytes = 16 * (64 + 16) * 4 * 4  # 4 layers in float32
    limit = 20 * page_bytes
    engine = start({"VMEM_LIMIT": str(limit)}, model_path=str(model))
    for _ in range(2):
        found, most = highest(tmp_path, engine, prompts(), [24] * 5)
        assert found == stock
        assert 8 * page_bytes < most <= limit
    assert becomes(lambda: info(tmp_path).cached > 0 == info(tmp_path).in_use)
    engine.release()
    assert info(tmp_path).used <= 2 * 4096 * 4  # the memory of page 0
    engine.call("resume_memory_occupation", tags=["kv_cache"])
    assert engine.answer(prompts()) == stock


@pytest.mark.parametrize(
    ("kind", "given"), [("gemma3_text", {}), ("mellum", {"disable_hybrid_swa_memory": True})]
)
def test_sliding_windows_in_one_pool(
    start: Start, tmp_path: Path, kind: str, given: dict[str, Any]
) -> None:
    """SGLang keeps the tokens before the window; the limit makes it evict prefixes."""
    model = make_model(tmp_path, kind)
    with served(tmp_path / "log", {}, options(model, **given)) as engine:
        stock = engine.answer(prompts())
    assert len({token for one in stock for token in one}) > 12
    limit = 17 * PAGE_BYTES
    engine = start({"VMEM_LIMIT": str(limit)}, model_path=str(model), **given)
    for _ in range(2):
        found, most = highest(tmp_path, engine, prompts(), [24] * 5)
        assert found == stock
        assert 8 * PAGE_BYTES < most <= limit
    engine.release()
    assert info(tmp_path).used == PAGE_BYTES
    engine.call("resume_memory_occupation", tags=["kv_cache"])
    assert engine.answer(prompts()) == stock


@pytest.mark.parametrize("overlap", [False, True])
def test_tensor_parallelism(
    start: Start, stock: list[list[int]], tmp_path: Path, overlap: bool
) -> None:
    """Two ranks each store half of every page. One gets a lower limit and is later put to sleep."""

    def ranks() -> list[EngineInfo]:
        return engines_in(tmp_path / "ledger")["host"]

    half, capacity = PAGE_BYTES // 2, 40 * PAGE_BYTES // 2
    engine = start(
        {
            "VMEM_CAPACITY": str(capacity),
            "VMEM_NAME": "pair",
            "SGLANG_CPU_OMP_THREADS_BIND": "0|1",
        },
        tp_size=2,
        disable_overlap_schedule=not overlap,
    )
    assert [one.name for one in ranks()] == ["pair", "pair-2"]
    assert engine.answer(prompts()) == stock
    with Ledger("host", folder=tmp_path / "ledger", create=False) as ledger:
        order(ledger, "pair-2", limit=17 * half)
    for _ in range(2):
        assert engine.answer(prompts()) == stock
        assert becomes(lambda: all(8 * half < one.used <= 17 * half for one in ranks()))
    rest = [PAGE_BYTES] * 2  # page 0, and the other half of its physical page, which is unused
    assert becomes(lambda: not any(one.in_use for one in ranks()))
    engine.release()
    assert [one.used for one in ranks()] == rest
    engine.call("resume_memory_occupation", tags=["kv_cache"])
    other = start({"VMEM_CAPACITY": str(capacity)})
    other.begin("generate", input_ids=prompts(), sampling_params=greedy(24))
    assert engine.answer(prompts()) == stock
    assert [one["output_ids"] for one in other.end()] == stock
    first, second = (one for one in ranks() if one.name != "llama")
    assert first.used == second.used
    with Ledger("host", folder=tmp_path / "ledger", create=False) as ledger:
        order(ledger, "pair-2", asleep=True)
    assert becomes(lambda: [one.used for one in ranks() if one.name != "llama"] == rest)


def test_a_prompt_that_the_limit_never_allows(start: Start, stock: list[list[int]]) -> None:
    engine = start({"VMEM_LIMIT": str(10 * PAGE_BYTES)})
    with pytest.raises(ValueError, match="exceeds the KV memory budget"):
        engine.generate([[7] * 300])
    assert engine.answer(prompts()[-1:]) == stock[-1:]


def test_an_engine_takes_memory_from_one_that_keeps_prefixes(
    start: Start, stock: list[list[int]], tmp_path: Path
) -> None:
    """Two engines share a ledger, with less memory than they would use together."""

    def used() -> dict[str, int]:
        return {one.name: one.used for one in engines_in(tmp_path / "ledger")["host"]}

    capacity = 24 * PAGE_BYTES
    env = {"VMEM_CAPACITY": str(capacity), "VMEM_IDLE": "600"}
    first = start({"VMEM_NAME": "first", **env})
    second = start({"VMEM_NAME": "second", **env})
    assert first.answer(prompts()) == stock
    assert used()["first"] >= 16 * PAGE_BYTES
    second.begin("generate", input_ids=prompts(), sampling_params=greedy(24))
    while not second.ready():
        assert sum(used().values()) <= capacity
    assert [one["output_ids"] for one in second.end()] == stock
    assert used()["second"] >= 12 * PAGE_BYTES
    assert used()["first"] < 16 * PAGE_BYTES
    assert first.answer(prompts()) == stock


def test_two_engines_at_once(start: Start, stock: list[list[int]], tmp_path: Path) -> None:
    """Both engines serve requests at the same time, with less memory than they would use."""
    env = {"VMEM_CAPACITY": str(26 * PAGE_BYTES)}
    engines = [start(env), start(env)]
    for _ in range(3):
        for one in engines:
            one.begin("generate", input_ids=prompts(), sampling_params=greedy(24))
        for one in engines:
            assert [found["output_ids"] for found in one.end()] == stock
    names = [one.name for one in engines_in(tmp_path / "ledger")["host"]]
    assert names == ["llama", "llama-2"]


def test_a_killed_engine_leaves_nothing(
    start: Start, stock: list[list[int]], tmp_path: Path
) -> None:
    """The killed engine's memory is free again, and a new engine gets it."""
    env = {"VMEM_NAME": "one", "VMEM_CAPACITY": str(20 * PAGE_BYTES)}
    engine = start(env)
    engine.begin("generate", input_ids=prompts(), sampling_params=greedy(500))
    assert becomes(lambda: info(tmp_path).used > 8 * PAGE_BYTES)
    engine.kill()
    assert becomes(lambda: not engines_in(tmp_path / "ledger")["host"])
    again = start(env)
    assert again.answer(prompts()) == stock


def test_an_order_to_sleep(start: Start, stock: list[list[int]], tmp_path: Path) -> None:
    """All memory except page 0 is freed; requests wait until the engine wakes up."""
    engine = start({"VMEM_NAME": "one", "VMEM_IDLE": "600"})
    for _ in range(2):
        assert engine.answer(prompts()) == stock
    with Ledger("host", folder=tmp_path / "ledger", create=False) as ledger:
        order(ledger, "one", asleep=True)
    assert becomes(lambda: info(tmp_path).used == PAGE_BYTES)
    shown = metrics(tmp_path)
    assert (shown["vmem:asleep"], shown["vmem:used_bytes"]) == (1, PAGE_BYTES)
    assert shown["vmem:queries_total"] == 2 * sum(map(len, prompts()))
    assert 0 < shown["vmem:hits_total"] == info(tmp_path).hits
    engine.begin("generate", input_ids=prompts(), sampling_params=greedy(24))
    assert not engine.ready(1.0)
    with Ledger("host", folder=tmp_path / "ledger", create=False) as ledger:
        order(ledger, "one", asleep=False)
    assert [one["output_ids"] for one in engine.end()] == stock


def test_memory_is_kept_under_load_and_given_back_at_rest(
    start: Start, stock: list[list[int]], tmp_path: Path
) -> None:
    """No prefix is kept, so every round of load allocates and frees all its pages."""
    engine = start({"VMEM_IDLE": "5", "VMEM_PREFIX": "0"})
    for _ in range(3):
        assert engine.answer(prompts()) == stock
    assert becomes(lambda: info(tmp_path).age < 0.2 and not info(tmp_path).in_use)
    before = info(tmp_path).maps
    for _ in range(4):
        assert engine.answer(prompts()) == stock
    assert becomes(lambda: info(tmp_path).age < 0.2 and not info(tmp_path).in_use)
    assert info(tmp_path).maps == before > 0
    assert becomes(lambda: info(tmp_path).used == PAGE_BYTES)


def test_a_prompt_in_chunks(start: Start, tmp_path: Path) -> None:
    """Two long prompts are computed in chunks, with too little memory for both at once."""
    engine = start({"VMEM_LIMIT": str(30 * PAGE_BYTES)}, chunked_prefill_size=64)
    ids = [[3 + (k * 5 + i * 13) % 500 for i in range(300)] for k in range(2)]
    alone = [engine.answer([one])[0] for one in ids]
    assert becomes(lambda: engine.call("flush_cache").success)
    together, most = highest(tmp_path, engine, ids, [24, 24])
    assert together == alone
    assert 20 * PAGE_BYTES < most <= 30 * PAGE_BYTES


def test_more_memory_is_needed_than_is_free(
    start: Start, stock: list[list[int]], tmp_path: Path
) -> None:
    """A single decoding request needs more memory than another engine leaves free."""
    env = {"VMEM_CAPACITY": str(24 * PAGE_BYTES), "VMEM_IDLE": "600"}
    first, second = start(env), start(env)
    first.begin("generate", input_ids=[[9] * 40], sampling_params=greedy(250))
    assert second.answer(prompts()[-1:] * 3, 40)
    assert len(first.end()[0]["output_ids"]) == 250
    assert second.answer(prompts()) == stock


def test_processes_that_sglang_spawns(model: Path, tmp_path: Path, stock: list[list[int]]) -> None:
    """A separate program starts the engine, so every process imports SGLang and the plug-in."""
    program = f"""
import json
from sglang.srt.entrypoints.engine import Engine
if __name__ == "__main__":
    engine = Engine(**{options(model)!r})
    found = engine.generate(input_ids={prompts()!r}, sampling_params={greedy(24)!r})
    print("found", json.dumps([one["output_ids"] for one in found]), flush=True)
    from pyvmem.ledger.accounts import default_folder, engines_in
    (one,) = engines_in(default_folder())["host"]
    print("used", one.used, flush=True)
    engine.shutdown()
"""
    path = tmp_path / "program.py"
    path.write_text(program, "utf-8")
    env = {"VMEM_SGLANG": "1", "VMEM_PAGE_SIZE": "4096", "VMEM_LEDGER": str(tmp_path / "ledger")}
    done = subprocess.run(
        [sys.executable, path],
        capture_output=True,
        text=True,
        env={**os.environ, **env},
        timeout=200,
        check=False,
    )
    lines = dict(line.split(" ", 1) for line in done.stdout.splitlines() if " " in line)
    assert json.loads(lines["found"]) == stock, done.stderr[-3000:]
    assert int(lines["used"]) > 8 * PAGE_BYTES
