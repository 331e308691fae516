# SPDX-License-Identifier: MIT
"""Tests how a vLLM engine's scheduler connects to its ranks, loses one, and shuts down."""

from __future__ import annotations

import contextlib
import gc
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

pytest.importorskip("torch")

from pyvmem import Inject
from pyvmem.elastic.geometry import Geometry, runs_of
from pyvmem.elastic.memory import KVMemory, open_context
from pyvmem.elastic.settings import Settings
from pyvmem.ledger.accounts import Ledger
from pyvmem.ledger.orders import order
from pyvmem.vllm import channel, rank_discovery
from pyvmem.vllm.channel import LocalRank, RankLost, Ranks, Server, SocketRank, new_address
from pyvmem.vllm.remote import join_ledgers
from pyvmem.vllm.worker import ElasticWorker

BLOCKS, SIZE = 64, 64 * 4096


@pytest.fixture
def folder() -> Iterator[Path]:
    """Yields a directory with a short name: a socket's path may be at most 107 bytes long."""
    with tempfile.TemporaryDirectory(prefix="vmem-") as name:
        yield Path(name)


def memory() -> KVMemory:
    return KVMemory(open_context("host", 0, 4096, 1 << 20), BLOCKS, [SIZE])


def test_a_socket_that_does_not_listen_yet_is_kept(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A starting rank removes dead sockets, possibly at any moment while another rank starts."""
    between = channel.socket.socket
    calls: list[str] = []

    class Slow(between):
        def bind(self, address: Any) -> None:
            super().bind(address)
            calls.append("bind")
            channel._remove_dead(folder)

        def listen(self, *args: int) -> None:
            channel._remove_dead(folder)
            super().listen(*args)
            calls.append("listen")
            channel._remove_dead(folder)

    one = memory()
    address = new_address(Settings(ledger=str(folder)))
    monkeypatch.setattr(channel.socket, "socket", Slow)
    server = Server(address, one)
    monkeypatch.setattr(channel.socket, "socket", between)
    assert calls == ["bind", "listen"]
    rank = SocketRank(address)
    assert rank.geometry() == one.geometry
    rank.close()
    server.close()
    assert list(folder.iterdir()) == []
    one.close()


def test_dead_sockets_are_removed(folder: Path) -> None:
    for name in ("a.sock", "b.sock.new", "c.sock.new"):
        with channel.socket.socket(channel.socket.AF_UNIX) as dead:
            dead.bind(str(folder / name))
    os.utime(folder / "b.sock.new", (0, 0))
    channel._remove_dead(folder)
    assert [one.name for one in folder.iterdir()] == ["c.sock.new"], "perhaps about to listen"


class Lost:
    """A rank whose process exits during a grow call."""

    def __init__(self, when: str) -> None:
        self.when = when

    def ask(self, name: str, argument: Any = None) -> Callable[[], Any]:
        if self.when == "begin":
            raise RankLost("gone")
        return self.answer

    def answer(self) -> Any:
        raise RankLost("gone")


@pytest.mark.parametrize("when", ["begin", "end"])
@pytest.mark.parametrize("at", [0, 1, 2])
def test_a_rank_lost_in_a_growth_leaves_the_others_free(folder: Path, when: str, at: int) -> None:
    """Otherwise the next call to the other ranks would wait forever."""
    memories = [memory(), memory()]
    settings = Settings(ledger=str(folder))
    addresses = [new_address(settings) for _ in range(2)]
    servers = [Server(*one) for one in zip(addresses, memories, strict=True)]
    living = [SocketRank(one) for one in addresses]
    ranks: list[Any] = [*living]
    ranks.insert(at, Lost(when))
    with pytest.raises(RankLost, match="gone"):
        Ranks(ranks).grow(runs_of([{0}]))
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.extend(one.ask("stats")() for one in living))
    thread.start()
    thread.join(20)
    assert len(found) == 2
    for one in [*living, *servers, *memories]:
        cast(Any, one).close()


def test_results_belong_to_their_ranks() -> None:
    """If a rank fails, the others unmap what they have mapped."""
    memories = [memory(), memory(), memory()]
    ranks = [LocalRank(one) for one in memories]
    memories[1].context.inject(Inject.MAP, count=1, error=12)
    assert "OutOfMemory" in (Ranks(list(ranks)).grow(runs_of([{0, 1}])) or "")
    assert [one.context.stats().mapped_bytes for one in memories] == [0, 0, 0]
    for one in memories:
        one.close()


def test_a_server_ends_with_its_memory(folder: Path) -> None:
    """Covers a rank of an engine that was never shut down."""
    one = memory()
    server = Server(new_address(Settings(ledger=str(folder))), one)
    one.close()
    del one
    gc.collect()
    assert list(folder.iterdir()) == []
    end = time.monotonic() + 20
    while any(t.name == "vmem-rank" for t in threading.enumerate()) and time.monotonic() < end:
        time.sleep(0.01)
    assert not any(thread.name == "vmem-rank" for thread in threading.enumerate())
    server.close()


def test_a_closed_server_answers_no_client(folder: Path) -> None:
    """Its threads must not survive, or an exiting process would kill them mid-call."""
    one = memory()
    server = Server(new_address(Settings(ledger=str(folder))), one)
    rank = SocketRank(server.address)
    assert rank.total() == one.total()
    server.close()
    assert not [t.name for t in threading.enumerate() if t.name in ("vmem-rank", "vmem-peer")]
    with pytest.raises(RankLost):
        rank.total()
    rank.close()
    one.close()


def test_a_rank_that_answered_too_late_is_lost(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A late reply is not mistaken for the reply to the next call."""
    monkeypatch.setattr(channel, "_TIMEOUT", 0.2)
    one, late = memory(), threading.Event()
    server = Server(new_address(Settings(ledger=str(folder))), one)
    rank = SocketRank(server.address)
    monkeypatch.setattr(KVMemory, "total", lambda _: late.wait(20))
    with pytest.raises(RankLost, match="no answer"):
        rank.total()
    late.set()
    with pytest.raises(RankLost):
        rank.fingerprint()
    server.close()
    one.close()


def test_a_rank_here_whose_memory_is_closed_is_lost() -> None:
    """vLLM stops its workers before the scheduler, whose thread keeps calling."""
    one = memory()
    rank = LocalRank(one)
    one.close()
    for name in ("poll", "stats", "fingerprint"):
        with pytest.raises(RankLost, match=name):
            rank.ask(name)


def test_states_that_vllm_warms_up_with_have_memory(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Since 0.31, runner V2 uses blocks in a warm-up run outside the scheduler's steps."""
    monkeypatch.setenv("VMEM_LEDGER", str(folder))
    one = memory()

    class Runner:
        def prepare_dummy_attn(self, input_batch: Any, valid_state_slots: bool = False) -> int:
            return one.context.stats().mapped_bytes

    class Worker:
        device = SimpleNamespace(type="cpu")
        model_runner = Runner()

        def compile_or_warm_up_model(self) -> list[int]:
            prepare, batch = self.model_runner.prepare_dummy_attn, SimpleNamespace(num_reqs=3)
            return [prepare(batch), prepare(batch, True), prepare(batch, valid_state_slots=True)]

        def shutdown(self) -> None:
            """Stands in for vLLM's method."""

    class Elastic(ElasticWorker, Worker):
        pass

    worker = Elastic()
    worker._settings, worker._memory = Settings.read(), one
    blocks = one.geometry.most_bytes(3)
    assert worker.compile_or_warm_up_model() == [0, blocks, blocks]
    assert one.context.stats().mapped_bytes == 0
    assert vars(worker.model_runner) == {}
    worker.shutdown()


# ---- ranks on another machine --------------------------------------------------------------------


@pytest.fixture
def far(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Server, KVMemory]]:
    """Yields a rank whose ledger is in a separate directory, as on another machine."""
    monkeypatch.setenv("VMEM_LEDGER", str(folder))
    one = memory()
    server = Server(new_address(Settings.read()), one)
    yield server, one
    server.close()
    one.close()


def test_a_tcp_client_needs_the_secret(far: tuple[Server, KVMemory]) -> None:
    server, one = far
    host, port, word = server.listen("127.0.0.1")
    rank = SocketRank((host, port, word), "far")
    assert rank.machine == "far"
    assert rank.geometry() == one.geometry
    assert rank.ask("grow", runs_of([{0, 1}]))() == [None, None]
    assert one.context.stats().mapped_bytes == 2 * 4096
    for wrong in ("", word[:-1], word + "0", word.upper() + " "):
        stranger = SocketRank((host, port, wrong))
        with pytest.raises(RankLost):
            stranger.geometry()
        stranger.close()
    for sent in (
        b"\xff\xff\xff\xff" + b"x" * 100,  # claims 4 GB
        b"\x00\x00\x00\x08" + b'"\\ud800"',  # a string that is not valid UTF-8
        b"\x00\x00\x04\x00" + b"[" * 1024,  # nested too deeply for the parser
    ):
        with channel.socket.create_connection((host, port)) as peer:
            peer.sendall(sent)
            peer.settimeout(20)
            with contextlib.suppress(ConnectionResetError):
                assert peer.recv(1) == b""
    end = time.monotonic() + 20
    while len(server._peers) > 1:
        assert time.monotonic() < end, "a rejected client must leave nothing behind"
        time.sleep(0.001)
    assert rank.geometry() == one.geometry
    rank.close()
    server.close()
    with pytest.raises(RankLost, match=f"{host}:{port}"):
        SocketRank((host, port, word))


def test_the_account_of_another_machine(far: tuple[Server, KVMemory], tmp_path: Path) -> None:
    """The rank's own ledger also counts the scheduler's memory, so both ledgers must grant it."""
    server, one = far
    ranks = [LocalRank(one), SocketRank(server.listen("127.0.0.1"), "far")]
    tmp_path.chmod(0o700)
    terms = {"floor": 0, "limit": 8 << 20, "least": 4096, "virtual": 8 << 20}
    terms |= {"host": 1 << 20, "host_limit": 1 << 20}  # per machine
    there = Path(server.address).parent
    with Ledger("host", 4 << 20, there):  # on a smaller device
        quota = join_ledgers(
            cast(Any, ranks), tmp_path, "e", unique=True, capacity=0, identity=7,
            free=lambda: None, **terms,
        )  # fmt: skip

    def used() -> list[tuple[str, int, int]]:
        found = []
        for folder in (tmp_path, there):
            with Ledger("host", folder=folder, create=False) as book:
                found += [(e.name, e.used, e.identity) for e in book.engines()]
                assert {e.host for e in book.engines()} <= {1 << 20}
        return found

    assert used() == [("e", 0, 7), ("e", 0, 7)]
    assert quota.room() == 4 << 20
    assert quota.take(1 << 20, 1)
    quota.end_pending(1 << 20)
    assert used() == [("e", 1 << 20, 7)] * 2
    assert not quota.take(4 << 20, 1)
    assert used() == [("e", 1 << 20, 7)] * 2, "on every machine or on none"
    quota.want(1 << 20)
    quota.report(cached=4096)
    assert quota.pressure() == (0, False)
    with Ledger("host", folder=there, create=False) as book:
        order(book, "e", limit=512 << 10)
        assert quota.limit == 512 << 10
        assert quota.pressure() == (512 << 10, False)
        (info,) = book.engines()
        assert (info.want, info.cached) == (1 << 20, 4096)
    with pytest.raises(RankLost, match="'e' is the name of process"):
        join_ledgers(
            cast(Any, [ranks[1]]), tmp_path, "e", unique=True, capacity=0, identity=8,
            free=lambda: None, **terms,
        )  # fmt: skip
    quota.give(1 << 20)
    quota.close()
    assert used() == []
    ranks[1].close()


def test_an_account_ends_with_its_rank(far: tuple[Server, KVMemory]) -> None:
    server, one = far
    rank = SocketRank(server.listen("127.0.0.1"), "far")
    terms = {"floor": 0, "limit": 4096, "least": 1, "virtual": 4096, "host_limit": 0}
    quota = join_ledgers(
        [rank], None, "e", unique=True, capacity=0, identity=1, free=lambda: None, **terms
    )
    with pytest.raises(RankLost, match="account: _locked"):
        rank.ask("account", ["_locked", [], {}])()
    with Ledger("host", folder=Path(server.address).parent, create=False) as book:
        assert [e.name for e in book.engines()] == ["e"]
        one.close()
        assert book.engines() == []
    quota.close()
    rank.close()


def test_stages_of_a_pipeline_have_different_numbers_of_layers() -> None:
    found = [Geometry.of(BLOCKS, 4096, [SIZE] * count) for count in (2, 3, 1)]
    ranks: list[Any] = [SimpleNamespace(geometry=lambda one=one: one) for one in found]
    assert Ranks(ranks).geometry() == found[1]
    other = Geometry.of(BLOCKS, 8192, [SIZE])
    ranks.append(SimpleNamespace(geometry=lambda: other))
    with pytest.raises(RuntimeError, match="the ranks' KV tensors differ"):
        Ranks(ranks).geometry()


# ---- discovery of the ranks
# ---------------------------------------------------------------------------


def test_ranks_are_asked_at_their_addresses(
    far: tuple[Server, KVMemory], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, one = far
    tmp_path.chmod(0o700)
    settings = Settings(ledger=str(tmp_path))
    there = rank_discovery.machine(Settings.read())
    assert there != rank_discovery.machine(settings)
    asked: list[str] = []

    class Executor:
        def collective_rpc(self, name: str, args: tuple[Any, ...] = ()) -> list[Any]:
            asked.append(name)
            if name == "vmem_address":
                return [None, rank_discovery.RankAddress(there, server.address)]
            assert args == (rank_discovery.machine(settings),)
            return [None, server.listen("127.0.0.1")]

    executor = Executor()
    parallel = SimpleNamespace(pipeline_parallel_size=2)
    config: Any = SimpleNamespace(instance_id="i", parallel_config=parallel)
    with pytest.raises(RuntimeError, match="the engine's executor"):
        rank_discovery.connect(config, settings)
    monkeypatch.setitem(rank_discovery.EXECUTORS, "i", executor)
    (rank,) = rank_discovery.connect(config, settings)
    assert (rank.machine, asked) == (there, ["vmem_address", "vmem_listen"])
    assert rank.geometry() == one.geometry
    rank.close()
    asked.clear()
    (rank,) = rank_discovery.connect(config, Settings.read())
    assert (rank.machine, asked) == ("", ["vmem_address"])
    assert rank.geometry() == one.geometry
    rank.close()
    parallel.tensor_parallel_size = 2
    with pytest.raises(RuntimeError, match=r"calls 2 ranks of 4 \(each has its own scheduler"):
        rank_discovery.connect(config, settings)
    monkeypatch.setattr(Executor, "collective_rpc", lambda *_: 1 // 0)
    with pytest.raises(RuntimeError, match="on every machine of the engine"):
        rank_discovery.connect(config, settings)
