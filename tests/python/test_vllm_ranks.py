# SPDX-License-Identifier: MIT
"""Description: how a vLLM engine's scheduler reaches its ranks: start, loss of a rank, end."""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest

pytest.importorskip("torch")

from pyvmem import Inject
from pyvmem.vllm import channel
from pyvmem.vllm.channel import LocalRank, RankLost, Ranks, Server, SocketRank, rank_address
from pyvmem.vllm.geometry import runs_of
from pyvmem.vllm.memory import KVMemory, open_context
from pyvmem.vllm.settings import Settings

BLOCKS, SIZE = 64, 64 * 4096


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "l"
    path.mkdir(mode=0o700)
    return path


def memory() -> KVMemory:
    return KVMemory(open_context("host", 0, 4096, 1 << 20), BLOCKS, [SIZE])


def test_a_socket_that_does_not_listen_yet_is_no_dead_one(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another rank removes dead sockets as it starts, between any two steps of this one's start."""
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
    address = rank_address("engine", 0, Settings(ledger=str(folder)))
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
    """A rank whose process ends in the midst of a growth."""

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
    """The next call to them would wait for ever otherwise."""
    memories = [memory(), memory()]
    settings = Settings(ledger=str(folder))
    addresses = [rank_address("engine", number, settings) for number in range(2)]
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
    """Where one rank refuses, the others unmap what they have mapped."""
    memories = [memory(), memory(), memory()]
    ranks = [LocalRank(one) for one in memories]
    memories[1].context.inject(Inject.MAP, count=1, error=12)
    assert "OutOfMemory" in (Ranks(list(ranks)).grow(runs_of([{0, 1}])) or "")
    assert [one.context.stats().mapped_bytes for one in memories] == [0, 0, 0]
    for one in memories:
        one.close()


def test_a_server_ends_with_its_memory(folder: Path) -> None:
    """Of an engine that nobody shut down."""
    one = memory()
    server = Server(rank_address("engine", 0, Settings(ledger=str(folder))), one)
    one.close()
    del one
    gc.collect()
    assert list(folder.iterdir()) == []
    end = time.monotonic() + 20
    while any(t.name == "vmem-rank" for t in threading.enumerate()) and time.monotonic() < end:
        time.sleep(0.01)
    assert not any(thread.name == "vmem-rank" for thread in threading.enumerate())
    server.close()
