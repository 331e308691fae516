# SPDX-License-Identifier: MIT
"""Engines with prefixes in host memory share a ledger, and one is killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from conftest import SIZES
from test_engine import Open, Tokens, answer, check, elastic_of, expected, greedy, prompts, stock
from test_robust import host_files
from test_server import ROOT, wait_for

from pyvmem.errors import InvalidArgument
from pyvmem.ledger.accounts import EngineInfo, Ledger
from vmem_bench.vllm.engines import Engine

__all__ = ["expected", "stock"]

MIB = 1 << 20
HOST = 64 * MIB  # host memory per engine
NULL = 2 * (64 << 10)  # the null block's pages in two layers
POOL = {
    "VMEM_VLLM": "1",
    "VMEM_IDLE": "0.1",
    "VMEM_RESERVE": "0",
    "VMEM_CAPACITY": "1M",  # less than one engine's prefixes need
    "VMEM_HOST_LIMIT": str(2 * HOST),
}


@contextmanager
def engine_process(model: str, ledger: Path, folder: Path) -> Iterator[Engine]:
    """Runs an engine in another process during a ``with`` block."""
    options, log = folder / "options.json", folder / "engine.log"
    own = {"model": model, "load_format": "auto", "kv_offloading_size": HOST / 2**30}
    options.write_text(json.dumps({**SIZES, **own}))
    read, write = os.pipe()
    words = [sys.executable, "-m", "vmem_bench.vllm.arm", "--options", str(options)]
    env = {"VMEM_NAME": "there", "VMEM_LEDGER": str(ledger)}
    env["PYTHONPATH"] = f"{ROOT}:{ROOT / 'benchmarks' / 'src'}"
    with log.open("w") as said:
        process = subprocess.Popen(
            [*words, "--answers", str(write)],
            env=os.environ | POOL | env,
            stdin=subprocess.PIPE,
            stdout=said,
            stderr=said,
            pass_fds=(write,),
            text=True,
        )
    os.close(write)
    try:
        yield Engine("there", process, os.fdopen(read, encoding="utf-8"), log)
    finally:
        process.kill()
        process.wait()
        assert process.stdin is not None
        process.stdin.close()


def told(engine: Engine, **order: Any) -> dict[str, Any]:
    engine.send(**order)
    found = engine.receive(240)
    assert found is not None, engine.log.read_text()[-4000:]
    return found


def told_ready(engine: Engine) -> bool:
    found = engine.receive(240)
    return found is not None and "Elastic" in found["scheduler"]


@pytest.mark.long
def test_two_engines_take_turns_until_one_is_killed(
    start: Open,
    models: Callable[[str], str],
    expected: Callable[..., Tokens],
    ledger: Path,
    tmp_path: Path,
) -> None:
    """Each engine needs the other's memory, and loads its prefixes from host memory."""
    before = host_files()
    theirs = prompts(seed=1)
    load = {
        "load": [one["prompt_token_ids"] for one in theirs],
        "tokens": [20] * len(theirs),
        "most": 8,
    }
    with engine_process(models("llama"), ledger, tmp_path) as there:
        wanted = expected("llama")  # computed while the engine starts
        with start("llama") as llm:
            wanted_there = answer(llm, theirs)
        assert told_ready(there)
        own = {**POOL, "VMEM_NAME": "here"}
        text = f"VMEM_HOST_LIMIT={2 * HOST}: 'here' asks for {HOST + MIB} .* have {HOST} already"
        with (
            pytest.raises(InvalidArgument, match=text),
            start("llama", **own, kv_offloading_size=(HOST + MIB) / 2**30),
        ):
            pass
        with (
            start("llama", **own, kv_offloading_size=HOST / 2**30) as llm,
            Ledger("host", folder=ledger, create=False) as book,
        ):

            def of(name: str) -> EngineInfo:
                (found,) = [one for one in book.engines() if one.name == name]
                return found

            def rests(name: str) -> None:
                assert wait_for(lambda: of(name).used == NULL, 60), of(name)

            holds = elastic_of(llm).holds
            for turn in range(3):
                loaded = holds.counters.loaded
                assert answer(llm, prompts()) == wanted
                if turn == 1:
                    rests("here")  # in other turns, the other engine takes the memory
                said = told(there, **load)
                assert said["answers"] == wanted_there
                if turn:
                    assert holds.counters.loaded > loaded
                    assert said["cached"] > 1000, "only host memory had these prefixes"
                rests("there")
            check(llm)
            assert of("here").host == of("there").host == HOST
            assert of("here").host_cached > 0
            assert of("there").host_cached > 0

            def third() -> None:
                with Ledger("host", folder=ledger, create=False) as own:
                    asks = {"host": HOST, "host_limit": 2 * HOST}
                    own.join("third", floor=0, limit=1, least=1, virtual=1, **asks).close()

            with pytest.raises(InvalidArgument, match=f"have {2 * HOST} already"):
                third()
            rests("here")
            there.send(**load | {"tokens": [120] * len(theirs)})
            assert wait_for(lambda: of("there").used > NULL, 60)
            os.kill(there.process.pid, signal.SIGKILL)
            there.process.wait()
            assert [one.name for one in book.engines()] == ["here"]
            assert host_files() <= before
            third()
            loaded = holds.counters.loaded
            outputs = llm.generate(prompts(), greedy(), use_tqdm=False)
            assert [list(one.outputs[0].token_ids) for one in outputs] == wanted
            assert holds.counters.loaded > loaded
            rests("here")
            check(llm)
    assert host_files() <= before
