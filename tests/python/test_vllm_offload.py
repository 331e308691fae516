# SPDX-License-Identifier: MIT
"""Tests KV offloading without vLLM: held blocks, copies and rejected options."""

from __future__ import annotations

import ctypes
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from pyvmem import Context
from pyvmem.elastic.geometry import Run
from pyvmem.elastic.memory import KVMemory, device_total
from pyvmem.elastic.settings import Settings
from pyvmem.memory.host_copies import HostMemory, Pieces, ThreadCopies, split
from pyvmem.vllm.offload import reasons_against, select
from pyvmem.vllm.offload_holds import Holds

# ---- configurations ------------------------------------------------------------------------------


def config(connector: str | None = "OffloadingConnector", **changes: Any) -> Any:
    extra = {"cpu_bytes_to_use": 1 << 20, **changes.pop("extra", {})}
    return SimpleNamespace(
        kv_transfer_config=SimpleNamespace(
            **{
                "kv_connector": connector,
                "kv_connector_module_path": None,
                "kv_role": "kv_both",
                "kv_connector_extra_config": extra,
                **changes,
            }
        ),
    )


def test_offloading_uses_our_spec() -> None:
    made = config()
    assert list(reasons_against(made)) == []
    for _ in range(2):  # vLLM calls this twice
        select(made)
        assert list(reasons_against(made)) == []
    extra = made.kv_transfer_config.kv_connector_extra_config
    assert extra["spec_name"] == "VMemOffloadingSpec"
    assert extra["spec_module_path"] == "pyvmem.vllm.offload_spec"
    assert extra["offload_prompt_only"] is False
    made = config(extra={"offload_prompt_only": True})
    select(made)
    assert made.kv_transfer_config.kv_connector_extra_config["offload_prompt_only"] is True


def test_nothing_is_done_without_a_connector() -> None:
    for made in (config(None), SimpleNamespace(kv_transfer_config=None)):
        select(made)
        assert list(reasons_against(made)) == []


def test_tiering_uses_our_spec(tmp_path: Path) -> None:
    there = {
        "secondary_tiers": [{"type": "p2p"}, {"type": "fs", "root_dir": str(tmp_path / "a/b")}]
    }
    made = config(extra=TIERS | there)
    for _ in range(2):
        assert list(reasons_against(made)) == []
        select(made)
        extra = made.kv_transfer_config.kv_connector_extra_config
        assert extra["spec_name"] == "VMemTieringSpec"
        assert extra["spec_module_path"] == "pyvmem.vllm.offload_tiers"
    assert list(tmp_path.iterdir()) == []


def test_a_read_only_directory_cannot_be_a_tier() -> None:
    root = os.geteuid() == 0
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o555)
        if root:
            os.seteuid(65534)
        try:
            (reason,) = reasons_against(config(extra=TIERS | disk(f"{name}/kv")))
        finally:
            if root:
                os.seteuid(0)
        assert f"root_dir={name}/kv of a tier fs ({name} cannot be written)" in reason


TIERS = {"spec_name": "TieringOffloadingSpec"}
MOST = device_total(None)


def disk(root: Any) -> dict[str, Any]:
    return {"secondary_tiers": [{"type": "fs", "root_dir": root}]}


@pytest.mark.parametrize(
    ("connector", "changes", "text"),
    [
        ("LMCacheConnectorV1", {}, "=LMCacheConnectorV1 .* loads only the first half of each bl"),
        ("LMCacheMPConnector", {}, "CUDA IPC handle"),
        ("MooncakeConnector", {}, "kv_connector=MooncakeConnector .it registers"),
        ("MultiConnector", {}, "are not checked"),
        ("Mine", {"kv_connector_module_path": "mine"}, "kv_connector=Mine .how it copies"),
        (
            "Mine",
            {"extra": {"vmem_copies_in_step": True}},
            "=Mine .* VMEM_VISIBLE=1 or VMEM_BACKEND=cuda",
        ),
        ("Mine", {"extra": {"vmem_copies_in_step": "yes"}}, "vmem_copies_in_step='yes'"),
        ("NixlConnector", {"extra": {"vmem_copies_in_step": True}}, "=NixlConnector .it registers"),
        ("NixlConnector", {}, "kv_connector=NixlConnector .it registers"),
        ("SimpleCPUOffloadConnector", {}, "without VLLM_USE_SIMPLE_KV_OFFLOAD"),
        ("OffloadingConnector", {"kv_connector_module_path": "mine"}, "kv_connector=Offloading"),
        ("OffloadingConnector", {"kv_role": "kv_producer"}, "kv_role=kv_producer"),
        ("OffloadingConnector", {"extra": {"spec_name": "Mine"}}, "spec_name=Mine .its copies"),
        ("OffloadingConnector", {"extra": {"spec_name": ["Mine"]}}, "spec_name=..Mine.. .its cop"),
        ("OffloadingConnector", {"extra": TIERS | {"secondary_tiers": "fs"}}, "tiers='fs' .expec"),
        ("OffloadingConnector", {"extra": TIERS | {"secondary_tiers": ["fs"]}}, "=.'fs'. .expect"),
        ("OffloadingConnector", {"extra": TIERS | disk(None)}, "root_dir=None of a tier fs .exp"),
        ("OffloadingConnector", {"extra": TIERS | disk("")}, "root_dir='' of a tier fs .expected"),
        (
            "OffloadingConnector",
            {"extra": TIERS | disk("/dev/null/kv")},
            "/dev/null is not a directory",
        ),
        ("OffloadingConnector", {"extra": {"canonical_layout": True}}, "canonical_layout"),
        ("OffloadingConnector", {"extra": {"cpu_bytes_to_use": None}}, "cpu_bytes_to_use=None"),
        ("OffloadingConnector", {"extra": {"cpu_bytes_to_use": "4G"}}, "cpu_bytes_to_use='4G'"),
        ("OffloadingConnector", {"extra": {"cpu_bytes_to_use": float("nan")}}, "use=nan"),
        ("OffloadingConnector", {"extra": {"cpu_bytes_to_use": -1}}, "of -1 bytes"),
        ("OffloadingConnector", {"extra": {"cpu_bytes_to_use": 0.0}}, "of 0 bytes"),
        (
            "OffloadingConnector",
            {"extra": {"cpu_bytes_to_use": MOST + 1}},
            rf"of {MOST + 1} bytes, .* \(the machine has {MOST} bytes of host memory\)",
        ),
    ],
)
def test_unsupported_options_are_named(connector: str, changes: dict[str, Any], text: str) -> None:
    (reason,) = reasons_against(config(connector, **changes))
    assert re.search(text, reason), reason


def test_addresses_of_cuda_suit_every_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """cuMem* maps pages at CUDA's own addresses, so no option is needed."""
    vouched = config("Mine", extra={"vmem_copies_in_step": True}, kv_connector_module_path="mine")
    for backend, wanted in (("stock", 1), ("cuda", 0)):
        monkeypatch.setenv("VMEM_BACKEND", backend)
        assert len(list(reasons_against(vouched))) == wanted
    monkeypatch.setenv("VMEM_VISIBLE", "0")
    assert Settings.read().visible


def test_connectors_that_copy_within_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """These connectors need addresses that CUDA's copies accept."""
    monkeypatch.setenv("VMEM_VISIBLE", "1")
    for name in ("Mine", "LMCacheConnectorV1"):
        vouched = config(name, extra={"vmem_copies_in_step": True}, kv_connector_module_path="mine")
        assert list(reasons_against(vouched)) == []
        select(vouched)
        assert "spec_name" not in vouched.kv_transfer_config.kv_connector_extra_config
        own = config(name, kv_connector_module_path="mine")
        assert "how it copies is unknown" in next(reasons_against(own))
    monkeypatch.setenv("VMEM_VISIBLE", "yes")
    with pytest.raises(ValueError, match="VMEM_VISIBLE='yes': expected 1 or 0"):
        list(reasons_against(vouched))


# ---- copies --------------------------------------------------------------------------------------


def test_long_pieces_are_split() -> None:
    whole = Pieces(np.array([1000, 5000]), np.array([0, 700]), np.array([250, 100]))
    cut = split(whole, 100)
    assert cut.device.tolist() == [1000, 1100, 1200, 5000]
    assert cut.host.tolist() == [0, 100, 200, 700]
    assert cut.sizes.tolist() == [100, 100, 50, 100]
    assert cut.nbytes == whole.nbytes == 350
    assert split(whole, 250) is whole
    none = Pieces(*(np.empty(0, dtype=np.int64),) * 3)
    assert split(none) is none


def test_host_memory_is_freed_with_a_killed_process() -> None:
    """The memory has no name that could outlive the process."""
    code = (
        "import ctypes, sys, time\n"
        "from pyvmem.memory.host_copies import HostMemory\n"
        "m = HostMemory(64 << 20, locked=False)\n"
        "ctypes.memset(m.addr, 1, m.nbytes)\n"
        "print(hex(m.addr), flush=True)\n"
        "time.sleep(600)\n"
    )
    before = set(os.listdir("/dev/shm"))
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as one:
        try:
            assert one.stdout is not None
            addr = int(one.stdout.readline(), 16)
            maps = Path(f"/proc/{one.pid}/maps").read_text(encoding="ascii").splitlines()
            ranges = [(line.split("-", 1), line) for line in maps]
            (line,) = (
                line
                for (low, rest), line in ranges
                if int(low, 16) <= addr < int(rest.split()[0], 16)
            )
            assert line.split()[4] == "0", f"a file is behind it: {line}"
            assert line.split()[1].endswith("p"), f"it is shared: {line}"
        finally:
            one.send_signal(signal.SIGKILL)
    assert set(os.listdir("/dev/shm")) <= before


def test_host_memory_is_freed_once() -> None:
    memory = HostMemory(1 << 20, locked=False)
    memory.close()
    memory.close()


@pytest.mark.needs_tensors
def test_pages_stay_until_their_copy_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    memory = KVMemory(Context("host"), 4, [4 << 16])
    host = HostMemory(4 << 16, locked=False)
    gate, move = threading.Event(), ThreadCopies._move

    def later(self: ThreadCopies, pieces: Pieces) -> None:
        assert gate.wait(60)
        move(self, pieces)

    monkeypatch.setattr(ThreadCopies, "_move", later)
    every = [Run(0, 0, memory.geometry.num_pages(0))]
    memory.grow(every)
    kv = memory.tensor(4 << 16)
    kv.fill_(7)
    memory.copies = [out] = [ThreadCopies(memory.context, to_host=True)]
    copy = out.start(
        Pieces(*(np.array([one], dtype=np.int64) for one in (kv.data_ptr(), host.addr, 4 << 16)))
    )
    release = threading.Thread(target=memory.release, args=(1, every, 0))
    release.start()
    release.join(0.1)
    assert release.is_alive()
    assert memory.context.stats().mapped_bytes >= 4 << 16
    gate.set()
    release.join()
    assert copy.ready()
    while not memory.finished():
        time.sleep(0.001)
    assert memory.context.stats().mapped_bytes == 0
    found = torch.frombuffer((ctypes.c_char * (4 << 16)).from_address(host.addr), dtype=torch.int8)
    assert bool((found == 7).all())
    del kv, found
    memory.close()
    memory.close()
    host.close()


# ---- held blocks ---------------------------------------------------------------------------------


class Manager:
    """Mimics the part of vLLM's manager that `Holds` reads."""

    chunk_bytes = 100

    def __init__(self) -> None:
        self.completed: list[tuple[set[str], bool]] = []
        self.evicted: list[str] = []  # evicted by the next store

    def prepare_store(self, keys: list[str], context: Any) -> Any:
        if not keys:
            return None
        evicted, self.evicted = self.evicted, []
        return SimpleNamespace(
            keys_to_store=keys, store_spec=SimpleNamespace(), evicted_keys=evicted
        )

    def complete_store(self, keys: set[str], context: Any, success: bool = True) -> None:
        self.completed.append((keys, success))

    def get_stats(self) -> Any:
        return None


def holds(ranks: int = 1) -> tuple[Holds, Manager]:
    manager = Manager()
    connector = SimpleNamespace(connector_scheduler=SimpleNamespace(manager=manager))
    return Holds(connector, ranks), manager


def ordered(manager: Manager, stores: dict[int, list[int]], loads: dict[int, int] | None = None):  # type: ignore[no-untyped-def]
    def ids(blocks: list[int]) -> Any:
        return SimpleNamespace(block_ids=np.array(blocks, dtype=np.int32))

    jobs = {}
    for number, blocks in stores.items():
        output = manager.prepare_store([f"key {one}" for one in blocks], None)
        jobs[number] = SimpleNamespace(src_spec=ids(blocks), dst_spec=output.store_spec)
    loading = {
        number: SimpleNamespace(dst_spec=ids(list(range(count))))
        for number, count in (loads or {}).items()
    }
    return SimpleNamespace(store_jobs=jobs, load_jobs=loading)


def test_a_block_is_held_from_its_release_to_the_report() -> None:
    one, manager = holds(ranks=2)
    one.hand_out([1, 2, 3, 4])
    one.scheduling = True
    one.free([4])  # preempted: none of its blocks will be stored
    one.scheduling = False
    assert not one
    one.free([1, 2, 3])
    assert one
    assert [block for block in (1, 2, 3, 4) if block in one] == [1, 2, 3]
    assert one.order(1, ordered(manager, {10: [1, 2], 11: [2]}, {12: 5})) == [3]
    assert [block for block in (1, 2, 3, 4) if block in one] == [1, 2]
    assert one.report({10: 1, 12: 1}) == []
    assert one.report({10: 1, 12: 1, 99: 1}) == [1]
    assert 2 in one
    assert one.report({11: 2}) == [2]
    assert not one
    assert one.take_dropped() == []
    assert (one.counters.stored, one.counters.loaded, one.counters.dropped) == (3, 5, 0)


def test_replaced_blocks_are_not_stored() -> None:
    one, manager = holds()
    one.hand_out([1, 2])
    one.overwrite([2])
    one.order(1, ordered(manager, {10: [1], 11: [1, 2], 12: [7]}))
    assert one.take_dropped() == [11, 12]
    assert one.take_dropped() == []
    manager.complete_store({"key 1"}, None)
    manager.complete_store({"key 1", "key 2"}, None)
    manager.complete_store({"key 7"}, None)
    manager.complete_store({"key 7"}, None)  # a later store of the same block
    assert [ok for _, ok in manager.completed] == [True, False, False, True]
    assert one.counters.dropped == 3


def test_prefixes_in_host_memory_are_counted() -> None:
    one, manager = holds()
    one.hand_out(range(1, 9))
    one.order(1, ordered(manager, {10: [1, 2], 11: [3]}))
    assert one.host_cached == 0, "no block has been stored"
    manager.complete_store({"key 1", "key 2"}, None)
    manager.complete_store({"key 3"}, None)
    assert one.host_cached == 300
    manager.evicted = ["key 1", "key 2"]
    one.overwrite([4])
    one.order(2, ordered(manager, {12: [4]}))
    assert one.host_cached == 100
    manager.complete_store({"key 4"}, None)  # the block was dropped
    assert one.host_cached == 100
    one.forget()
    assert one.host_cached == 0
    assert Holds(None, 1).host_cached == 0


def test_prefixes_from_lower_tiers_are_counted() -> None:
    """Lower tiers write to host memory through the primary tier's methods, not the manager's."""
    manager = Manager()
    host = SimpleNamespace(
        prepare_write=lambda keys, context: manager.prepare_store(keys, context),
        complete_write=manager.complete_store,
    )
    whole = SimpleNamespace(**{name: getattr(manager, name) for name in MANAGED}, primary_tier=host)
    one = Holds(SimpleNamespace(connector_scheduler=SimpleNamespace(manager=whole)), 1)
    assert host.prepare_write([], None) is None
    host.prepare_write(["key 1", "key 2"], None)
    assert one.host_cached == 0
    host.complete_write(["key 1"], None, True)
    host.complete_write(["key 2"], None, False)
    assert one.host_cached == 100
    manager.evicted = ["key 1"]
    host.prepare_write(["key 3"], None)
    assert one.host_cached == 0
    assert manager.completed == [(["key 1"], True), (["key 2"], False)]


MANAGED = ("chunk_bytes", "prepare_store", "complete_store", "get_stats")


def test_without_further_steps() -> None:
    """Started transfers finish; pending transfers are dropped."""
    one, manager = holds()
    one.hand_out(range(1, 9))
    one.order(1, ordered(manager, {10: [1]}))
    one.order(2, ordered(manager, {11: [2, 3]}))
    one.free([4])
    assert sorted(one.expire(ended=2)) == [1, 2, 3, 4]
    assert not one
    assert one.take_dropped() == [11]
    assert one.report({10: 1, 11: 1}) == []
    assert (one.counters.stored, one.counters.dropped) == (1, 2)
    one.forget()
    manager.complete_store({"key 2", "key 3"}, None)
    assert manager.completed[-1][1], "a store made after vLLM forgot all others must complete"


@pytest.mark.parametrize("connector", [None, SimpleNamespace(other="connector")])
def test_blocks_are_held_only_for_the_offloading_connector(connector: Any) -> None:
    one = Holds(connector, 1)
    one.free([1])
    assert not one
    assert not one.on
    assert one.host_cached == 0
