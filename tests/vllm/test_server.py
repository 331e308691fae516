# SPDX-License-Identifier: MIT
"""`vllm serve` on the elastic pool, with engine, worker and client in separate processes.

Another account in the ledger competes for the memory and outlives the server's engine.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from test_engine import answer, prompts

from pyvmem.ledger.accounts import EngineInfo, Ledger

MIB = 1 << 20
ROOT = Path(__file__).resolve().parents[2]


def wait_for(what: Callable[[], Any], seconds: float = 240.0) -> Any:
    """Calls `what` until its result is true or `seconds` have passed; returns the last result."""
    end = time.monotonic() + seconds
    while True:
        found = what()
        if found or time.monotonic() > end:
            return found
        time.sleep(0.1)


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


@contextmanager
def serving(
    models: Callable[[str], str], ledger: Path, log: Path, *more: str
) -> Iterator[tuple[int, subprocess.Popen[bytes]]]:
    """Starts a server for the model llama; yields its port and process."""
    port = free_port()
    settings = {
        "VMEM_VLLM": "1",
        "VMEM_NAME": "served",
        "VMEM_LEDGER": str(ledger),
        "VMEM_CAPACITY": "16M",
        "VMEM_RESERVE": "1M",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
        "PYTHONPATH": str(ROOT),
    }
    words = [sys.executable, str(Path(__file__).with_name("served.py")), "--model", models("llama")]
    words += ["--served-model-name", "m", "--host", "127.0.0.1", "--port", str(port)]
    words += ["--distributed-executor-backend", "mp"]  # a worker in a separate process
    words += ["--dtype", "float32", "--block-size", "32", "--enforce-eager"]
    words += ["--kv-cache-memory-bytes", str(256 * MIB), "--max-model-len", "512"]
    words += ["--max-num-batched-tokens", "64", "--max-num-seqs", "8", "--seed", "0", *more]
    with log.open("w") as out:
        process = subprocess.Popen(
            words, env=os.environ | settings, stdout=out, stderr=out, start_new_session=True
        )
        try:
            yield port, process
        finally:
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


@pytest.fixture
def server(models: Callable[[str], str], ledger: Path, tmp_path: Path) -> Iterator[Any]:
    log = tmp_path / "server.log"
    with serving(models, ledger, log) as (port, process):
        yield port, process, log


def test_served_over_http(server: Any, start: Callable[..., Any], ledger: Path) -> None:
    import openai

    port, process, log = server

    def engines() -> list[EngineInfo]:
        with Ledger("host", folder=ledger, create=False) as book:
            return book.engines()

    asked = prompts()
    with start("llama") as llm:  # while the server starts
        wanted = answer(llm, asked)

    client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none")

    def ready() -> bool:
        assert process.poll() is None, log.read_text()[-4000:]
        try:
            return bool(client.models.list().data)
        except openai.APIConnectionError:
            return False

    assert wait_for(ready), log.read_text()[-4000:]

    def ask(prompt: list[int]) -> list[int]:
        found = client.completions.create(
            model="m", prompt=prompt, max_tokens=20, temperature=0, extra_body={"ignore_eos": True}
        )
        return [int(word.lstrip("t")) for word in found.choices[0].text.split()]

    assert [ask(one["prompt_token_ids"]) for one in asked] == wanted

    (one,) = engines()
    assert one.name == "served"
    assert wait_for(lambda: engines()[0].cached > 0)
    assert engines()[0].used >= engines()[0].cached

    import requests

    said = requests.get(f"http://127.0.0.1:{port}/metrics", timeout=30).text
    (line,) = [one for one in said.splitlines() if one.startswith("vmem:cached_bytes{")]
    assert 'engine="served"' in line
    assert float(line.split()[-1]) > 0
    assert 'vmem:maps_total{device="host",engine="served"}' in said

    # An idle engine evicts prefixes for an engine that is short of memory, without running a step.
    account = Ledger("host", folder=ledger).join(
        "here", floor=0, limit=16 * MIB, least=1, virtual=16 * MIB
    )
    assert account.ledger.capacity == 16 * MIB
    need = 16 * MIB - 128 * 1024  # all memory except the null block's pages in two layers
    assert not account.take(need), engines()

    def get() -> bool:
        account.want(need)
        return account.take(need)

    assert wait_for(get, 60)
    account.end_pending(need)
    account.give(need - MIB)
    account.want(0)
    assert ask(asked[4]["prompt_token_ids"]) == wanted[4]

    # The memory of a killed engine is free immediately.
    assert account.room() < 15 * MIB
    (served,) = [one for one in engines() if one.name == "served"]
    os.kill(served.pid, signal.SIGKILL)
    assert wait_for(lambda: [one.name for one in engines()] == ["here"], 60)
    assert account.room() == 15 * MIB
    account.close()
