# SPDX-License-Identifier: MIT
"""An engine keeps working while other engines or processes use its memory."""

from __future__ import annotations

import json
import os
import signal
import threading
import urllib.request
from collections.abc import Callable
from contextlib import ExitStack
from http.client import HTTPException
from pathlib import Path
from typing import Any

import pytest
from test_engine import answer, check, elastic_of, greedy, memory_of, prompts
from test_server import serving, wait_for

from pyvmem.ledger.accounts import Account, EngineInfo, Ledger

MIB = 1 << 20
PAGE = 64 << 10


def gives_back(account: Account, ended: threading.Event) -> None:
    """Acts as an engine's keeper, which frees memory when other engines are short of it."""
    while not ended.wait(0.05):
        if excess := account.excess():
            account.give(excess)


@pytest.mark.parametrize("gives", [True, False])
def test_an_engine_starts_while_another_has_all_the_memory(
    start: Callable[..., Any], ledger: Path, monkeypatch: pytest.MonkeyPatch, gives: bool
) -> None:
    """The engine asks for the null block's memory, and raises an error if it gets none."""
    from pyvmem.vllm import engine

    monkeypatch.setattr(engine, "_START_PATIENCE", 60.0 if gives else 0.5)
    full = Ledger("host", 4 * MIB, ledger).join(
        "full", floor=0, limit=4 * MIB, least=1, virtual=4 * MIB
    )
    assert full.take(4 * MIB)
    full.end_pending(4 * MIB)
    ended = threading.Event()
    keeper = threading.Thread(target=gives_back, args=(full, ended))
    try:
        if gives:
            keeper.start()
            with start("llama", VMEM_VLLM="1", VMEM_RESERVE="0") as llm:
                assert full.used <= 4 * MIB - 2 * PAGE
                answer(llm, prompts())
                check(llm)
        else:
            with (
                pytest.raises(
                    MemoryError, match=r"the null block needs 131072 bytes, but 0 are available"
                ),
                start("llama", VMEM_VLLM="1"),
            ):
                pass
    finally:
        ended.set()
        if gives:
            keeper.join()
        full.close()


@pytest.mark.long
def test_a_foreign_process_takes_the_memory(start: Callable[..., Any]) -> None:
    """The process is in no ledger. Requests wait and continue once memory is free."""
    with start("llama", VMEM_VLLM="1", VMEM_RESERVE="0", VMEM_IDLE="0.1") as llm:
        wanted = answer(llm, prompts())
        assert llm.reset_prefix_cache()
        elastic, memory, engine = elastic_of(llm), memory_of(llm), llm.llm_engine
        elastic.settle()
        for number, prompt in enumerate(prompts()):
            engine.add_request(str(number), prompt, greedy())
        found: dict[str, list[int]] = {}

        def steps(count: int) -> None:
            for _ in range(count):
                for one in engine.step():
                    found[one.request_id.partition("-")[0]] = list(one.outputs[0].token_ids)

        steps(3)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(memory, "free", lambda: 0)  # the device has no free memory
            wait_for(lambda: elastic.ranks.free() == 0)
            before = memory.context.stats().mapped_bytes
            steps(60)
            assert engine.has_unfinished_requests()
            assert memory.context.stats().mapped_bytes <= before
            check(llm)
        while engine.has_unfinished_requests():
            steps(1)
        assert [found[str(number)] for number in range(len(wanted))] == wanted
        check(llm)


@pytest.mark.long
@pytest.mark.parametrize(
    ("model", "options"),
    [
        ("gemma", {"disable_hybrid_kv_cache_manager": True, "num_gpu_blocks_override": 48}),
        ("llama", {"kv_cache_memory_bytes": 1 << 20, "max_model_len": 256}),
    ],
)
def test_options_that_change_the_blocks(
    start: Callable[..., Any], model: str, options: dict[str, Any]
) -> None:
    """There are fewer blocks than the load could use, so requests wait."""
    asked = prompts(count=24)
    asked = [one for one in asked if len(one["prompt_token_ids"]) < 200]
    with start(model, **options) as llm:
        wanted = answer(llm, asked, 40)
        pool = llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_manager.block_pool
        blocks = pool.num_gpu_blocks
    with start(model, VMEM_VLLM="1", **options) as llm:
        assert elastic_of(llm).pool.num_gpu_blocks == blocks
        assert answer(llm, asked, 40) == wanted
        assert answer(llm, asked, 40) == wanted
        assert llm.reset_prefix_cache()
        elastic_of(llm).settle()
        check(llm)
        backing = elastic_of(llm).backing
        assert backing.mapped_bytes == backing.geometry.first_bytes(1)


# ---- servers whose processes are killed ----------------------------------------------------------


class Client:
    """A client of an HTTP server."""

    def __init__(self, port: int) -> None:
        self._base = f"http://127.0.0.1:{port}"

    def get(self, path: str) -> str:
        """Sends a GET request; returns "" if the server does not respond yet."""
        try:
            with urllib.request.urlopen(self._base + path, timeout=60) as said:
                return str(said.read().decode())
        except OSError:
            return ""

    def ask(self, prompt: dict[str, Any], count: int = 20) -> list[int]:
        """Sends a prompt; returns the tokens.

        Raises:
            OSError: the server refuses or closes the connection.
            HTTPException: the server closes the connection mid-response.
        """
        words = {"model": "m", "prompt": prompt["prompt_token_ids"], "max_tokens": count}
        words |= {"temperature": 0, "ignore_eos": True}
        request = urllib.request.Request(
            f"{self._base}/v1/completions",
            json.dumps(words).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=120) as said:
            text = json.loads(said.read())["choices"][0]["text"]
        return [int(word.lstrip("t")) for word in text.split()]


def children(pid: int) -> list[int]:
    """Returns the descendants of a process."""
    own = Path(f"/proc/{pid}/task/{pid}/children")
    found = [int(one) for one in own.read_text().split()] if own.exists() else []
    return [*found, *(other for one in found for other in children(one))]


def host_files() -> set[str]:
    """Returns the names of vLLM's KV offloading files, which could outlive its processes."""
    return {one.name for one in Path("/dev/shm").glob("vllm_offload_*")}


def alive(pids: list[int]) -> list[int]:
    """Returns the processes that are still running; zombies do not count."""
    stats = {pid: Path(f"/proc/{pid}/stat") for pid in pids}
    return [
        pid
        for pid, path in stats.items()
        if path.exists() and path.read_text().rpartition(")")[2].split()[0] != "Z"
    ]


def check_api_servers(client: Client, log: Path, book: Ledger) -> None:
    """Checks that both API servers run and that the metrics report the ledger's usage only once."""

    def both() -> bool:
        said = client.get("/metrics")
        lines = [one for one in said.splitlines() if one.startswith("vmem:used_bytes{")]
        (used,) = [one.used for one in book.engines() if one.name == "served"]
        (line,) = lines
        assert line.startswith('vmem:used_bytes{device="host",engine="served"} ')
        assert float(line.split()[-1]) == used
        assert "vllm:" in said
        told = log.read_text()
        return all(f"(ApiServer_{one} " in told for one in (0, 1))

    assert wait_for(both, 60), log.read_text()[-4000:]


@pytest.mark.long
@pytest.mark.parametrize("ends", ["worker", "core", "server"])
def test_a_process_of_a_server_is_killed(
    start: Callable[..., Any],
    models: Callable[[str], str],
    ledger: Path,
    tmp_path: Path,
    ends: str,
) -> None:
    """The other processes of a busy server exit, as in stock vLLM, and their memory is freed.

    Another engine that shares the memory keeps running, and a new server can be started.
    """
    log, asked = tmp_path / "server.log", prompts()
    two = ends == "worker"  # two API servers
    with ExitStack() as stack:
        more = ["--api-server-count", "2"] if two else []
        more += ["--kv-offloading-size", "0.0625"] if ends != "server" else []
        files = host_files()
        port, process = stack.enter_context(serving(models, ledger, log, *more))
        own = {"VMEM_VLLM": "1", "VMEM_NAME": "here", "VMEM_CAPACITY": "16M"}
        llm = stack.enter_context(start("llama", **own, VMEM_RESERVE="0"))
        wanted = answer(llm, asked)
        client = Client(port)
        assert wait_for(lambda: "m" in client.get("/v1/models"), 400), log.read_text()[-4000:]
        book = stack.enter_context(Ledger("host", folder=ledger, create=False))

        def engines() -> list[str]:
            return sorted(one.name for one in book.engines())

        assert [client.ask(one) for one in asked] == wanted
        assert engines() == ["here", "served"]
        if two:
            check_api_servers(client, log, book)
        ended = load(client, asked)
        assert wait_for(lambda: served(book).in_use > 0, 60)
        every = [process.pid, *children(process.pid)]
        core = served(book).pid
        (worker,) = children(core)
        pids = {"worker": worker, "core": core, "server": process.pid}
        os.kill(pids[ends], signal.SIGKILL)
        assert answer(llm, asked) == wanted
        ended()
        process.wait(120)  # any status: vLLM exits with 0 if its engine core was killed
        assert wait_for(lambda: not alive(every), 120), log.read_text()[-4000:]
        assert engines() == ["here"]
        assert host_files() <= files
        with_all = book.join("all", floor=0, limit=16 * MIB, least=1, virtual=16 * MIB)
        assert with_all.room() == 16 * MIB - elastic_of(llm).backing.mapped_bytes
        with_all.close()
        if ends == "server":
            port, _ = stack.enter_context(serving(models, ledger, log))
            client = Client(port)
            assert wait_for(lambda: "m" in client.get("/v1/models"), 400), log.read_text()[-4000:]
            assert [client.ask(one) for one in asked] == wanted
            assert engines() == ["here", "served"]
            # The sockets of the killed ranks have been removed.
            assert len(list(ledger.glob("*.sock"))) == 2
        assert answer(llm, asked) == wanted
        check(llm)


def served(book: Ledger) -> EngineInfo:
    (found,) = [one for one in book.engines() if one.name == "served"]
    return found


def load(client: Client, asked: list[dict[str, Any]]) -> Callable[[], None]:
    """Sends requests in threads until the server exits; returns a function that waits for that."""
    refused: list[Exception] = []

    def go_on() -> None:
        while True:
            try:
                for one in asked:
                    client.ask(one, 200)
            except (OSError, HTTPException) as error:
                refused.append(error)
                return

    threads = [threading.Thread(target=go_on, daemon=True) for _ in range(4)]
    for one in threads:
        one.start()

    def ended() -> None:
        for one in threads:
            one.join(120)
        assert len(refused) == len(threads)

    return ended
