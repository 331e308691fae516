# SPDX-License-Identifier: MIT
"""Engines with several ranks generate stock vLLM's tokens, and their ranks agree.

Tests tensor and pipeline parallelism with the mp and Ray executors, on one machine and on two. The
two "machines" are loopback addresses, each with its own ledger folder. Also tests data parallelism,
where each rank is an engine.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from conftest import SIZES
from test_engine import answer, elastic_of, expected, greedy, prompts, stock
from test_server import free_port, wait_for

from pyvmem.elastic.settings import Settings
from pyvmem.ledger.accounts import EngineInfo, Ledger
from pyvmem.ledger.orders import order
from pyvmem.vllm import plugin
from pyvmem.vllm.rank_discovery import machine

__all__ = ["expected", "stock"]

pytestmark = pytest.mark.long

ROOT = Path(__file__).resolve().parents[2]
TENSOR = {"tensor_parallel_size": 2}
# On a CPU, vLLM allocates a later stage's inputs during warm-up, which it skips if nothing is
# compiled.
TRACED = {"enforce_eager": False, "compilation_config": {"mode": 2, "backend": "eager"}}
PIPELINE = {"pipeline_parallel_size": 2, **TRACED}
CONTEXT = {
    **TENSOR,
    "decode_context_parallel_size": 2,
    "worker_extension_cls": "cpu_context.Nothing",
}
HERE, THERE = "127.0.0.2", "127.0.0.3"
MODEL = "uneven"  # three layers: two in one stage, and one in the other


def engines(folder: Path) -> list[EngineInfo]:
    try:
        with Ledger("host", folder=folder, create=False) as book:
            return sorted(book.engines(), key=lambda one: one.name)
    except FileNotFoundError:
        return []


def check_ranks(llm: Any, ledgers: list[Path], wanted: Any) -> None:
    """Checks the tokens, and that scheduler, ranks and ledgers agree on the mapped memory."""
    elastic = elastic_of(llm)
    assert len(elastic.ranks.ranks) == 2
    assert answer(llm, prompts()) == wanted
    assert answer(llm, prompts()) == wanted
    assert elastic.hits > 0

    def at_rest() -> str:
        elastic.settle()
        live = elastic.live_bytes()
        assert elastic.backing.mapped_bytes == live
        assert elastic.backing.check() == []
        tensors = [one.geometry().classes[0].tensors for one in elastic.ranks.ranks]
        assert [one["mapped_bytes"] for one in elastic.ranks.stats()] == [
            live * own // max(tensors) for own in tensors
        ]
        first, second = (one.fingerprint() for one in elastic.ranks.ranks)
        assert (first == second) == (tensors[0] == tensors[1])
        ranks = 2 // len(ledgers)
        for folder in ledgers:
            assert [(one.name, one.used) for one in engines(folder)] == [("two", ranks * live)]
        return first

    kept = at_rest()
    assert llm.reset_prefix_cache()
    assert at_rest() != kept
    assert elastic.backing.mapped_bytes < elastic.backing.geometry.most_bytes(2)


def check_end(ledgers: list[Path]) -> None:
    for folder in ledgers:
        assert wait_for(lambda folder=folder: engines(folder) == [], 30)


POOL = {"VMEM_VLLM": "1", "VMEM_NAME": "two", "VMEM_RESERVE": "0"}


@pytest.mark.parametrize(
    ("executor", "ways"),
    [("mp", TENSOR), ("mp", PIPELINE), ("mp", CONTEXT), ("ray", TENSOR), ("ray", PIPELINE)],
    ids=["mp-tensor", "mp-pipeline", "mp-context", "ray-tensor", "ray-pipeline"],
)
def test_two_ranks(
    start: Callable[..., Any],
    expected: Callable[..., Any],
    ledger: Path,
    monkeypatch: pytest.MonkeyPatch,
    executor: str,
    ways: dict[str, Any],
) -> None:
    wanted = expected(MODEL)
    with ExitStack() as stack:
        if executor == "ray":
            stack.enter_context(ray_cluster(monkeypatch))
        ways = {"distributed_executor_backend": executor, **ways}
        check_ranks(stack.enter_context(start(MODEL, **ways, **POOL)), [ledger], wanted)
    check_end([ledger])


@contextmanager
def ray_cluster(patch: pytest.MonkeyPatch, machines: int = 1) -> Iterator[Any]:
    """Starts Ray with this machine as the first of `machines`, which have two fake GPUs in total.

    The GPUs are needed because vLLM's CPU platform names no Ray resource for placing workers.
    """
    ray = pytest.importorskip("ray", reason="Ray is not installed")

    def name_one() -> None:
        from vllm.platforms.cpu import CpuPlatform

        CpuPlatform.ray_device_key = "GPU"

    from vllm.platforms.cpu import CpuPlatform

    patch.setattr(CpuPlatform, "ray_device_key", "GPU")
    patch.setenv("PYTHONPATH", str(ROOT))
    patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    with tempfile.TemporaryDirectory() as folder:  # a short path, because it will contain sockets
        patch.setenv("RAY_TMPDIR", folder)  # a node writes its cluster's address there
        ray.init(
            "local",
            num_cpus=2,
            num_gpus=2 // machines,
            _node_ip_address=HERE,
            include_dashboard=False,
            object_store_memory=100 << 20,
            runtime_env={"worker_process_setup_hook": name_one},
        )
        try:
            yield ray
        finally:
            ray.shutdown()


# ---- two machines --------------------------------------------------------------------------------


@contextmanager
def second_machine(folder: Path, log: Path, options: dict[str, Any]) -> Iterator[Any]:
    """Runs an engine's second node in a process during a ``with`` block."""
    words = [str(Path(__file__).with_name("node.py")), json.dumps(options)]
    own = {"VMEM_LEDGER": str(folder), "VLLM_HOST_IP": THERE, "PYTHONPATH": str(ROOT)}
    with log.open("w") as out:
        process = subprocess.Popen(
            [sys.executable, *words],
            env=os.environ | own | POOL,
            stdout=out,
            stderr=out,
            start_new_session=True,
        )
        try:
            yield process
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


@pytest.mark.parametrize("ways", [PIPELINE, TENSOR], ids=["pipeline", "tensor"])
def test_two_machines(
    start: Callable[..., Any],
    models: Callable[[str], str],
    expected: Callable[..., Any],
    ledger: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    ways: dict[str, Any],
) -> None:
    """Ranks are called over TCP, and each machine has its own ledger. Finally, a node is killed."""
    other, log = tmp_path / "o", tmp_path / "node.log"
    other.mkdir(mode=0o700)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    monkeypatch.setenv("VLLM_HOST_IP", HERE)
    monkeypatch.setenv("VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS", "10")
    ways = {"nnodes": 2, "master_addr": HERE, "master_port": free_port(), **ways}
    ways["distributed_executor_backend"] = "mp"
    theirs = {"model": models(MODEL), **SIZES, **ways, "node_rank": 1}
    with ExitStack() as stack:
        node = stack.enter_context(second_machine(other, log, theirs))
        wanted = expected(MODEL)  # computed while the second machine starts
        llm = stack.enter_context(start(MODEL, **ways, **POOL))
        elastic = elastic_of(llm)
        there = machine(Settings(ledger=str(other)))
        assert [one.machine for one in elastic.ranks.ranks] == ["", there]
        check_ranks(llm, [ledger, other], wanted)
        with Ledger("host", folder=other) as book:
            order(book, "two", limit=8 << 20)
        assert wait_for(lambda: elastic.quota.limit == 8 << 20, 10)
        assert answer(llm, prompts()) == wanted
        os.killpg(node.pid, signal.SIGKILL)
        with pytest.raises((RuntimeError, TimeoutError)):
            answer(llm, prompts(seed=1))
        check_end([other])
    check_end([ledger])


@contextmanager
def second_machine_of_ray(ray: Any, folder: Path, log: Path) -> Iterator[None]:
    """Joins the cluster as a second machine, whose ranks use the ledgers in `folder`."""
    words = ["-m", "ray.scripts.scripts", "start", "--block", "--num-cpus", "2", "--num-gpus", "1"]
    words += ["--address", ray.get_runtime_context().gcs_address, "--node-ip-address", THERE]
    words += ["--object-store-memory", str(100 << 20)]
    own = {"VMEM_LEDGER": str(folder), "VLLM_HOST_IP": THERE}
    with log.open("w") as out:
        process = subprocess.Popen(
            [sys.executable, *words], env=os.environ | own, stdout=out, stderr=out
        )
        try:
            assert wait_for(lambda: ray.cluster_resources().get("GPU") == 2), log.read_text()
            yield
        finally:
            process.terminate()
            process.wait(60)


def test_two_machines_of_ray(
    start: Callable[..., Any],
    expected: Callable[..., Any],
    ledger: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Checks the ranks and ledgers as `test_two_machines` does. Finally, a rank is killed."""
    other = tmp_path / "o"
    other.mkdir(mode=0o700)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    monkeypatch.setenv("VLLM_HOST_IP", HERE)
    wanted = expected(MODEL)
    ways = {"distributed_executor_backend": "ray", **TENSOR}
    with ExitStack() as stack:
        ray = stack.enter_context(ray_cluster(monkeypatch, machines=2))
        stack.enter_context(second_machine_of_ray(ray, other, tmp_path / "node.log"))
        llm = stack.enter_context(start(MODEL, **ways, **POOL))
        elastic = elastic_of(llm)
        there = machine(Settings(ledger=str(other)))
        assert [one.machine for one in elastic.ranks.ranks] == ["", there]
        check_ranks(llm, [ledger, other], wanted)
        (rank,) = engines(other)
        os.kill(rank.pid, signal.SIGKILL)
        with pytest.raises((RuntimeError, TimeoutError)):
            answer(llm, prompts(seed=1))
        check_end([other])
    check_end([ledger])


# ---- data parallelism: each rank is an engine ----------------------------------------------------

EXPERTS = {
    "data_parallel_size": 2,
    "enable_expert_parallel": True,
    "worker_extension_cls": "cpu_experts.Nothing",
    "kv_cache_memory_bytes": 64 << 20,
}
NULL = 2 * (64 << 10)  # the null block's pages in two layers


@pytest.mark.parametrize(
    ("model", "options"),
    [("mixtral", EXPERTS), ("llama", {"data_parallel_size": 2})],
    ids=["experts", "dense"],
)
def test_each_rank_of_data_parallelism_is_an_engine(
    start: Callable[..., Any],
    models: Callable[[str], str],
    expected: Callable[..., Any],
    ledger: Path,
    monkeypatch: pytest.MonkeyPatch,
    model: str,
    options: dict[str, Any],
) -> None:
    """A rank without requests computes its experts for the other ranks, and uses no memory."""
    from prometheus_client import generate_latest
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    wanted = expected(model)
    for key, value in {**POOL, "VMEM_LEDGER": str(ledger)}.items():
        monkeypatch.setenv(key, value)
    plugin.register()

    async def check_both() -> None:
        args = AsyncEngineArgs(model=models(model), **{**SIZES, **options})
        llm = AsyncLLM.from_engine_args(args)

        async def one(number: int, asked: Any, rank: int) -> list[int]:
            name = f"{number} of {rank}"
            async for output in llm.generate(asked, greedy(), name, data_parallel_rank=rank):
                found = list(output.outputs[0].token_ids)
            return found

        async def ask(*ranks: int) -> None:
            pairs = enumerate(prompts())
            tasks = [one(i, asked, ranks[i % len(ranks)]) for i, asked in pairs]
            assert await asyncio.gather(*tasks) == wanted

        def used() -> list[int]:
            found = engines(ledger)
            assert [one.name for one in found] == ["two", "two-dp1"]
            return [one.used for one in found]

        try:
            await ask(0)
            first, second = used()
            assert first > NULL == second
            await ask(1)
            assert used()[1] > NULL
            await ask(0, 1)
            said = generate_latest().decode()
            assert 'vmem:hits_total{device="host",engine="two-dp1"}' in said
            assert await llm.reset_prefix_cache()
            assert wait_for(lambda: used() == [NULL, NULL], 30)
        finally:
            llm.shutdown()

    asyncio.run(check_both())
    check_end([ledger])


def test_processes_that_torchrun_starts(
    models: Callable[[str], str], expected: Callable[..., Any], ledger: Path, tmp_path: Path
) -> None:
    wanted = expected("mixtral")
    words = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port"]
    words += [str(free_port()), str(Path(__file__).with_name("launched.py")), str(tmp_path)]
    words.append(json.dumps({"model": models("mixtral"), **SIZES, **EXPERTS}))
    own = {"VMEM_LEDGER": str(ledger), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, *words],
        env=os.environ | POOL | own,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    for rank, count in enumerate((len(wanted), 2)):
        said = json.loads((tmp_path / f"{rank}.json").read_text())
        assert said["tokens"] == [wanted[:count]] * 2
        assert said["hits"] > 0
        assert said["mapped"] == NULL
    assert engines(ledger) == []
