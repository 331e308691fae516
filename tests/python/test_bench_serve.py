# SPDX-License-Identifier: MIT
"""Checks `vmem bench serve`: the loop, the stores, and that all arms compute the same results."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from pyvmem.commands.cli import main
from pyvmem.errors import InvalidArgument
from pyvmem.layouts.workload import Arrival, Request, poisson, read_arrivals, read_trace

torch = pytest.importorskip("torch")
np = pytest.importorskip("numpy")

from pyvmem.attention import sdpa  # noqa: E402
from pyvmem.bench.record import Record  # noqa: E402
from pyvmem.commands.machine import describe  # noqa: E402
from pyvmem.kvcache import KVCache  # noqa: E402
from vmem_bench.command import WrongResult  # noqa: E402
from vmem_bench.decoder import TINY, YI_34B, Decoder, Shard  # noqa: E402
from vmem_bench.serving import command as serve_command  # noqa: E402
from vmem_bench.serving import loop, ranks  # noqa: E402
from vmem_bench.serving.forward import Forward, Kernels, Work  # noqa: E402
from vmem_bench.serving.infer import Prompts  # noqa: E402
from vmem_bench.serving.loop import Outcome, serve  # noqa: E402
from vmem_bench.serving.results import AGAIN, VLLM, add_rows  # noqa: E402
from vmem_bench.serving.stores import Paged, SharedPaged, Slots, Static, Store  # noqa: E402

CPU = torch.device("cpu")
LONGEST = 256
KERNELS = Kernels("contiguous", "paged")


@contextmanager
def one_thread() -> Iterator[None]:
    """Limits torch to one thread: a tiny model is slower on several threads, especially while other
    tests run.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    with one_thread():
        yield


@pytest.fixture(scope="module")
def model() -> Decoder:
    return Decoder(TINY, CPU, longest=LONGEST)


def make(kind: str, limit: int, slots: int = 4, prefixes: bool = False) -> Store:
    if kind == "slots":
        config = TINY.config(
            max_batch=slots, max_seq_len=LONGEST, page_size=4096, memory_limit=limit
        )
        return Slots(config, TINY, 32, prefixes, backend="host")
    if kind == "static":
        return Static(TINY, LONGEST, slots, limit, 32, CPU)
    return (SharedPaged if prefixes else Paged)(TINY, LONGEST, slots, limit, int(kind), CPU)


def taken(store: Store, ids: Any = (0,)) -> tuple[int, int]:
    found = store.take(np.array(ids, dtype=np.int32))
    assert found is not None
    return found


def kernels(kind: str) -> Kernels:
    return KERNELS if kind in ("slots", "static") else Kernels("paged", "paged")


def run(
    model: Decoder,
    store: Store,
    how: Kernels,
    requests: Sequence[Request | Arrival],
    **options: Any,
) -> tuple[Outcome, dict[tuple[int, int], Any]]:
    found: dict[tuple[int, int], Any] = {}

    def keep(lives: Any, logits: Any) -> None:
        for live, row in zip(lives, logits, strict=True):
            found[live.number, live.rows] = row.float()

    with closing(Forward(model, store, how, 64, False)) as forward:
        forward.warm_up()
        outcome = serve(
            forward,
            [one if isinstance(one, Arrival) else Arrival(0.0, one) for one in requests],
            partial(serve_command._tokens, TINY),
            budget=64,
            observer=keep,
            **options,
        )
    return outcome, found


def answers(found: dict[tuple[int, int], Any], requests: Sequence[Request]) -> set[Any]:
    """Returns the results computed once a whole prompt has been read.

    The rest depend on where a prompt was split, and therefore on when it got memory.
    """
    return {(number, rows) for number, rows in found if rows >= requests[number].context}


def apart(one: dict[Any, Any], other: dict[Any, Any]) -> float:
    both = one.keys() & other.keys()
    assert both
    return max(float((one[key] - other[key]).abs().max() / one[key].abs().max()) for key in both)


REQUESTS = (Request(100, 5), Request(3, 40), Request(65, 2), Request(17, 9), Request(40, 30))


@pytest.mark.parametrize("kind", ["slots", "16", "128", "static"])
def test_every_store_agrees_with_a_single_prefill(model: Decoder, kind: str) -> None:
    """Feeds known tokens; the logits after the prompt and at the end equal those of one pass."""
    with closing(make(kind, 4 << 20)) as store:
        outcome, found = run(model, store, kernels(kind), REQUESTS)
        assert outcome.finished == len(REQUESTS)
        assert outcome.preemptions == 0
        assert outcome.new_tokens == sum(request.output for request in REQUESTS)
        assert outcome.prompt_tokens == sum(request.context for request in REQUESTS)
        assert len(outcome.first) == len(REQUESTS)
        assert len(outcome.between) == outcome.new_tokens - len(REQUESTS)
        assert outcome.host_ns > 0
    with (
        closing(make("slots", 4 << 20)) as store,
        closing(Forward(model, store, KERNELS, LONGEST, False)) as forward,
    ):
        for number, request in enumerate(REQUESTS):
            for length in {request.context, request.longest}:
                ids = serve_command._tokens(TINY, number, Arrival(0.0, request))
                slot, _ = taken(store)
                assert store.hold([slot], [length])
                whole = forward.launch([Work(slot, 0, ids[:length])]).logits[0].float()
                store.release(slot)
                assert apart({0: whole}, {0: found[number, length]}) < 0.05


@pytest.mark.parametrize("kind", ["slots", "16"])
def test_recomputed_requests_get_the_same_logits(model: Decoder, kind: str) -> None:
    """Memory is too small for all requests; preempted ones resume and end with the same logits."""
    requests = [Request(60, 60), Request(50, 60), Request(40, 70)]
    with closing(make(kind, 4 << 20)) as store:
        ample, wanted = run(model, store, kernels(kind), requests)
    with closing(make(kind, 260 << 10)) as store:  # the requests need 360 KiB in total
        tight, found = run(model, store, kernels(kind), requests)
        held = store.held()
    assert ample.preemptions == 0
    assert tight.preemptions > 0
    assert tight.recomputed > 0
    assert tight.finished == 3
    assert found.keys() >= {(i, one.longest) for i, one in enumerate(requests)}
    assert apart(wanted, found) < 0.05
    assert held.held == 0  # everything was released


@pytest.mark.parametrize("kind", ["slots", "16"])
def test_shared_prefixes_are_not_computed_again(model: Decoder, kind: str) -> None:
    """Requests run one at a time; each starts from the prefix that an earlier request wrote."""
    sizes = [(100, 1), (200, 1), (200, 2), (150, 1)]
    arrivals = [Arrival(0.0, Request(size, 5), (content,)) for size, content in sizes]
    with closing(make(kind, 4 << 20, slots=1)) as store:
        plain, wanted = run(model, store, kernels(kind), arrivals)
    with closing(make(kind, 4 << 20, slots=1, prefixes=True)) as store:
        shared, found = run(model, store, kernels(kind), arrivals)
        assert store.held().held == 0
    assert plain.shared == 0
    # 100 tokens of the second request are cached, and all but the last token of the last request;
    # both are rounded down to units of 16 tokens.
    assert shared.shared == 96 + 144
    assert shared.prompt_tokens == plain.prompt_tokens - shared.shared
    assert apart(wanted, found) < 0.05


def test_prefix_blocks_are_evicted_when_memory_is_short() -> None:
    with closing(make("16", 16 * TINY.token_bytes * 4, prefixes=True)) as store:
        first, other = list(range(40)), list(range(100, 140))
        slot, rows = taken(store, first)
        assert rows == 0
        assert store.hold([slot], [40])
        store.release(slot, np.array(first, dtype=np.int32))
        slot, rows = taken(store, first)
        assert rows == 32  # the prompt's two full blocks
        assert store.held().held == 2 * 16 * TINY.token_bytes
        second, rows = taken(store, [*first[:16], *other])
        assert rows == 16  # the first of the two blocks is shared
        # it needs 3 more blocks: 2 are free, and none is idle
        assert not store.hold([second], [64])
        store.release(slot)
        assert store.hold([second], [64])
        store.release(second)
        assert taken(store, first)[1] == 16  # another request got the second block
        assert isinstance(store, SharedPaged)
        assert len(store._known) == len(store._key) == 1


class NeverCaptured(dict[int, Any]):
    """A table of graphs that never contains a size: each decoding step is the first of its size."""

    def __contains__(self, size: object) -> bool:
        return False


class FakeGraph:
    def pool(self) -> int:
        return 0


@contextmanager
def fake_capture(graph: FakeGraph, **options: Any) -> Iterator[None]:
    yield


def like_fa3(q: Any, k: Any, v: Any, batch: Any, scale: float, table: Any = None) -> torch.Tensor:
    """Accesses its tensors as FlashAttention-3 does."""
    out = torch.zeros(q.shape, dtype=q.dtype)
    assert len(batch.starts) == len(batch.used) + 1
    assert batch.starts[-1] == len(q)
    assert int(batch.starts.diff().max()) == batch.max_q
    for number, used in enumerate(batch.used.tolist()):
        first, last = batch.starts[number : number + 2].tolist()
        if table is None:
            slot = int(batch.index[number])
            keys, values = k[slot, :used], v[slot, :used]
        else:
            rows = torch.arange(used)
            where = (table[number].long()[rows // k.shape[1]], rows % k.shape[1])
            keys, values = k[where], v[where]
        seen = sdpa.causal(q[None, first:last], keys[None], values[None], scale)
        out[first:last] = seen[0]
    return out


@pytest.mark.parametrize("kind", ["slots", "16"])
def test_kernels_get_sufficient_tensors(
    model: Decoder, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Makes the calls used on a GPU, with decoding padded to graph sizes; the logits must be the
    same.
    """
    requests = [Request(70, 4), Request(30, 6), Request(18, 9), Request(2, 3), Request(9, 9)]
    with closing(make(kind, 4 << 20, slots=6)) as store:
        _, wanted = run(model, store, kernels(kind), requests)
    made: list[Forward] = []
    original = Forward.__init__

    def on_a_gpu(self: Forward, *args: Any) -> None:
        original(self, *args)
        self._call, self._graphs = like_fa3, NeverCaptured()
        made.append(self)

    monkeypatch.setattr(Forward, "__init__", on_a_gpu)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", FakeGraph)
    monkeypatch.setattr(torch.cuda, "graph", fake_capture)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    with closing(make(kind, 4 << 20, slots=6)) as store:
        _, found = run(model, store, kernels(kind), requests)
    assert made
    assert answers(found, requests) == answers(wanted, requests) != set()
    assert apart(wanted, found) < 0.05


class LikeFlashInfer:
    """Mimics FlashInfer's paged wrapper and its single-request call, which see only their
    arguments.
    """

    def __init__(self, workspace: torch.Tensor, layout: str, backend: str) -> None:
        assert (layout, backend) == ("NHD", "fa3")

    def plan(
        self, starts: Any, ends: Any, blocks: Any, last: Any, *shape: int, **more: Any
    ) -> None:
        assert shape == (TINY.heads, TINY.kv_heads, TINY.head_dim, 16)
        assert more["causal"]
        self.starts, self.ends, self.blocks, self.last = starts, ends, blocks, last

    def run(self, q: Any, pool: Any, out: torch.Tensor) -> torch.Tensor:
        for number, last in enumerate(self.last.tolist()):
            new = slice(*self.starts[number : number + 2].tolist())
            mine = self.blocks[slice(*self.ends[number : number + 2].tolist())].long()
            rows = 16 * (len(mine) - 1) + last
            keys, values = (one[mine].flatten(0, 1)[:rows] for one in pool)
            out[new] = self.single(q[new], keys, values, True, "NHD", TINY.head_dim**-0.5)
        return out

    @staticmethod
    def single(
        q: Any, k: Any, v: Any, causal: bool, kv_layout: str, sm_scale: float
    ) -> torch.Tensor:
        assert causal
        assert kv_layout == "NHD"
        return sdpa.causal(q[None], k[None], v[None], sm_scale)[0]


@pytest.mark.parametrize("kind", ["slots", "16"])
def test_prompts_by_flashinfer(model: Decoder, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    requests = [Request(70, 4), Request(30, 6), Request(90, 9), Request(21, 3)]
    with closing(make(kind, 4 << 20)) as store:
        _, wanted = run(model, store, kernels(kind), requests)
    module = SimpleNamespace(
        BatchPrefillWithPagedKVCacheWrapper=LikeFlashInfer,
        single_prefill_with_kv_cache=LikeFlashInfer.single,
    )
    monkeypatch.setitem(sys.modules, "flashinfer", SimpleNamespace(prefill=module))
    monkeypatch.setitem(sys.modules, "flashinfer.prefill", module)
    original, calls = Forward.__init__, [0]

    def on_a_gpu(self: Forward, *args: Any) -> None:
        original(self, *args)
        self._call = like_fa3
        self._prompts = Prompts(TINY, 0 if kind == "slots" else 16, CPU)
        plan = self._prompts.plan

        def counted(*args: Any) -> None:
            calls[0] += 1
            plan(*args)

        monkeypatch.setattr(self._prompts, "plan", counted)

    monkeypatch.setattr(Forward, "__init__", on_a_gpu)
    with closing(make(kind, 4 << 20)) as store:
        outcome, found = run(model, store, kernels(kind), requests)
    assert 4 <= calls[0] <= outcome.steps + 2  # one call per step, and more for the warm-up
    assert answers(found, requests) == answers(wanted, requests) != set()
    assert apart(wanted, found) < 0.05


def test_look_ahead_passed_to_a_store(model: Decoder) -> None:
    """Decoding requests ask the store for lengths that are multiples of half the look-ahead and
    more than half a look-ahead beyond their rows.
    """
    told: list[tuple[int, int]] = []
    ended: list[tuple[int, int]] = []

    class Told(Paged):
        def ahead(self, *asked: tuple[list[int], list[int]]) -> None:
            for slots, lengths in asked:
                told.extend((int(self._count[s]), n) for s, n in zip(slots, lengths, strict=True))

        def prompt_ends(self, slot: int, tokens: int) -> None:
            ended.append((slot, tokens))

    with closing(Told(TINY, LONGEST, 1, 4 << 20, 1, CPU)) as store:
        outcome, _ = run(model, store, kernels("1"), [Request(70, 30), Request(9, 1)], ahead=8)
    assert outcome.finished == 2
    assert [tokens for _, tokens in ended] == [70, 9]  # only the last chunk of each prompt
    assert outcome.short_s > 0, "one request waited for the only slot"
    assert outcome.short_batch_s == pytest.approx(outcome.short_s)
    answer = [(rows, length) for rows, length in told if 70 <= rows < 99]
    assert {length % 4 for _, length in answer} == {0}
    assert all(4 < length - rows <= 8 for rows, length in answer)


def test_a_wrong_block_table_is_seen(model: Decoder) -> None:
    """Checks that the comparison of logits can fail: the second block of every table is wrong."""

    class Wrong(Paged):
        def upload(self) -> None:
            super().upload()
            self._device[:, 1] = self._device[:, 0]

    with closing(make("16", 4 << 20)) as store:
        _, wanted = run(model, store, kernels("16"), REQUESTS)
    with closing(Wrong(TINY, LONGEST, 4, 4 << 20, 16, CPU)) as store:
        _, found = run(model, store, kernels("16"), REQUESTS)
    assert apart(wanted, found) > serve_command._BOUND


class Later(Paged):
    """A store whose memory is ready one step after it is requested; records the requests."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.told: dict[int, int] = {}  # number of requested tokens, by slot
        self.there: dict[int, int] = {}
        self.begun: set[int] = set()
        # (slot, tokens) of slots that were held before their memory was ready
        self.held_early: list[tuple[int, int]] = []
        self.largest = 0  # largest number of slots whose prompts were first requested in one call

    def settle(self) -> None:
        super().settle()
        self.told, self.there, self.held_early, self.largest = {}, {}, [], 0

    def release(self, slot: int, ids: Any = None) -> None:
        super().release(slot, ids)
        self.told.pop(slot, None)
        self.there.pop(slot, None)
        self.begun.discard(slot)

    def ahead(self, *asked: tuple[list[int], list[int]]) -> None:
        for slots, lengths in asked:
            self.largest = max(self.largest, len(set(slots) - self.told.keys()))
            self.told |= dict(zip(slots, lengths, strict=True))

    def ready(self, slot: int, tokens: int) -> bool:
        return self.there.get(slot, 0) >= tokens

    def hold(self, slots: list[int], lengths: list[int]) -> bool:
        for slot, tokens in zip(slots, lengths, strict=True):
            if len(slots) > 1 and slot not in self.begun and self.there.get(slot, 0) < tokens:
                self.held_early.append((slot, tokens))
        self.begun |= set(slots)
        self.there |= self.told
        return super().hold(slots, lengths)


def test_a_prompt_starts_once_the_store_has_its_memory_ready(model: Decoder) -> None:
    with closing(make("16", 4 << 20)) as store:
        prompt, wanted = run(model, store, kernels("16"), REQUESTS)
        assert prompt.late == 0
    with closing(Later(TINY, LONGEST, 4, 4 << 20, 16, CPU)) as store:
        outcome, found = run(model, store, kernels("16"), REQUESTS)
        assert outcome.finished == len(REQUESTS)
        assert store.held_early == []
        assert store.largest == 3  # prompts for two steps: 100, 3 and 65 tokens
        assert 0 < outcome.late < len(REQUESTS)
    assert apart(wanted, found) < 0.05


def test_steps_read_prompts_while_the_next_ones_get_their_memory(model: Decoder) -> None:
    many = [Request(64, 30)] * 4
    steps = []
    for kind in (Paged, Later):
        with closing(kind(TINY, LONGEST, 4, 4 << 20, 16, CPU)) as store:
            steps.append(run(model, store, kernels("16"), many)[0].steps)
    assert steps[1] <= steps[0] + 1  # while the first prompt waits, no other step can run


def test_a_request_that_is_never_ready_runs_alone(model: Decoder) -> None:
    class Never(Paged):
        def ready(self, slot: int, tokens: int) -> bool:
            return False

    with closing(Never(TINY, LONGEST, 4, 4 << 20, 16, CPU)) as store:
        outcome, _ = run(model, store, kernels("16"), REQUESTS)
    assert outcome.finished == len(REQUESTS)
    assert outcome.largest == 1


def test_memory_too_small_for_one_request_is_an_error(model: Decoder) -> None:
    with closing(make("16", 64 << 10)) as store, pytest.raises(RuntimeError, match="request 0"):
        run(model, store, kernels("16"), [Request(100, 5)])


def test_a_request_larger_than_a_slot_is_rejected(model: Decoder) -> None:
    with closing(make("16", 4 << 20)) as store, pytest.raises(ValueError, match="a slot holds 256"):
        run(model, store, kernels("16"), [Request(200, 100)])


def test_a_run_stops_at_its_time_limit(model: Decoder) -> None:
    with closing(make("16", 4 << 20)) as store:
        outcome, _ = run(model, store, kernels("16"), REQUESTS, limit_s=0.0)
        assert outcome.cut
        assert store.held().held == 0


def test_slots_leave_some_pages_to_running_requests() -> None:
    with closing(make("slots", 200 * 4096)) as store:
        assert isinstance(store, Slots)
        layout = store.cache.layout
        # one request's pages
        assert LONGEST * layout.row_bytes * layout.num_tensors == 64 * 4096
        page_rows = 4096 // layout.row_bytes
        slots = [taken(store)[0] for _ in range(3)]
        whole = [(slot, LONGEST) for slot in slots[:2]]
        assert store.fits([*whole, (slots[2], page_rows)], LONGEST)  # 196 of 200 pages
        assert not store.fits([*whole, (slots[2], 2 * page_rows)], LONGEST)  # all 200 pages


def test_blocks_are_allocated_and_freed() -> None:
    with closing(make("16", 16 * TINY.token_bytes * 10)) as store:
        assert isinstance(store, Paged)
        (one, _), (other, _) = taken(store), taken(store)
        assert store.hold([one, other], [17, 100])  # 2 and 7 blocks
        assert store.held().held == 9 * 16 * TINY.token_bytes
        # they need 1 and 2 more blocks, and only 1 is free
        assert not store.hold([one, other], [33, 129])
        assert store.held().held == 9 * 16 * TINY.token_bytes
        assert not store.fits([(other, 112)], 17)
        assert store.fits([(other, 112)], 16)
        store.upload()
        assert store.table is not None
        table = store.table.of(torch.tensor([one, other], dtype=torch.int32), 7)
        assert len({*table[0, :2].tolist(), *table[1].tolist()}) == 9
        rows, places = store.where(np.array([one, other]), np.array([16, 99]))
        assert [table[0, 1].item(), table[1, 6].item()] == rows.tolist()
        assert places.tolist() == [0, 3]
        store.release(other)
        assert store.hold([one], [160])
        store.release(one)
        assert store.held().held == 0


def test_the_number_of_static_slots_follows_from_the_memory() -> None:
    with closing(make("static", 3 * LONGEST * TINY.token_bytes + 1, slots=8)) as store:
        assert store.slots == 3
        assert [store.take(np.zeros(1, np.int32)) for _ in range(4)].count(None) == 1
    with pytest.raises(ValueError, match="too few"):
        make("static", LONGEST * TINY.token_bytes - 1)


# ---- arrivals ------------------------------------------------------------------------------------


def test_arrivals_match_the_trace(tmp_path: Path) -> None:
    trace = tmp_path / "azure.csv"
    trace.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:15:46.6805900,374,44\n"
        "2023-11-16 18:15:46.9805900,0,44\n"
        "2023-11-16 18:15:50.9305900,396,109\n"
    )
    found = read_arrivals(trace)
    assert [one.request for one in found] == [Request(374, 44), Request(396, 109)]
    assert found[0].at == 0.0
    assert found[1].at == pytest.approx(4.25)
    other = tmp_path / "mooncake.jsonl"
    lines = [{"timestamp": at, "input_length": at + 1, "output_length": 1} for at in (500, 0, 0)]
    other.write_text("\n".join(map(json.dumps, lines)))
    times = [(one.at, one.request.context) for one in read_arrivals(other)]
    assert times == [(0.0, 1), (0.0, 1), (0.5, 501)]
    timeless = tmp_path / "timeless.csv"
    timeless.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\nsoon,374,44\n")
    # a trace without timestamps can be read if none are requested
    assert read_trace(timeless) == [Request(374, 44)]
    with pytest.raises(InvalidArgument, match="soon"):
        read_arrivals(timeless)


def test_poisson_arrivals_come_at_their_rate() -> None:
    found = poisson([Request(1, 1)] * 4000, 5.0, 1)
    assert found == poisson([Request(1, 1)] * 4000, 5.0, 1)
    assert found[-1].at == pytest.approx(800, rel=0.1)
    gaps = np.diff([one.at for one in found])
    assert np.std(gaps) == pytest.approx(np.mean(gaps), rel=0.1)  # exponential
    with pytest.raises(Exception, match="rate is 0"):
        poisson([], 0.0, 1)


# ---- the command ---------------------------------------------------------------------------------


def test_workloads_choose_and_shift_the_requests_of_a_trace(tmp_path: Path) -> None:
    trace = tmp_path / "mooncake.jsonl"
    lines = [
        {"timestamp": 1000 * i, "input_length": 100 * i, "output_length": 8} for i in range(1, 8)
    ]
    trace.write_text("\n".join(map(json.dumps, lines)))

    def arrivals(*words: str, longest: int = 600) -> list[Arrival]:
        parser = argparse.ArgumentParser()
        serve_command.add_parser(parser.add_subparsers())
        args = parser.parse_args(["serve", "--trace", str(trace), *words])
        return serve_command._workload(args, longest, 1)

    assert [one.at for one in arrivals()] == [0, 1, 2, 3, 4]  # two requests are longer than a slot
    assert arrivals("--skip", "1", "--requests", "2", "--speed-up", "4") == [
        Arrival(0.0, Request(200, 8)),
        Arrival(0.25, Request(300, 8)),
    ]
    assert {one.at for one in arrivals("--workload", "offline")} == {0.0}
    prefixes = arrivals("--workload", "prefixes")
    assert [one.content for one in prefixes] == [()] * 5
    online = arrivals("--workload", "online", "--rate", "2")
    assert [one.request for one in online] == [one.request for one in arrivals()]
    assert online[0].at == 0 < online[1].at != 1
    chat = arrivals("--workload", "chat", "--requests", "50", longest=1 << 20)
    for place, mean in enumerate((1800, 744)):
        assert np.mean([one.request[place] for one in chat]) == pytest.approx(mean, rel=0.01)
    chat = arrivals("--workload", "chat", "--requests", "50", longest=4096)
    assert 0 < len(chat) <= 50
    assert all(one.request.longest <= 4096 for one in chat)


def test_all_arms_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "_SAMPLE_S", 0.0)  # sample on every step
    ready: list[int] = []
    take = Slots.take

    def counted(self: Slots, ids: Any) -> tuple[int, int] | None:
        found = take(self, ids)
        assert isinstance(self.cache, KVCache)
        ready.append(self.cache.layout.capacity(self.cache.config.eager_pages))
        return found

    monkeypatch.setattr(Slots, "take", counted)
    out = tmp_path / "serve.json"
    words = ["bench", "serve", "--quick", "--backend", "host", "--out", str(out)]
    arms = [*serve_command.ARMS, AGAIN]
    arms.remove(VLLM)  # needs vLLM
    assert main([*words, "--speed-up", "1000", "--arms", ",".join(arms)]) == 0
    data = json.loads(out.read_text())
    assert data["format"] == "vmem-bench-serve/1"
    assert min(ready) >= 128, "no free slot is kept for the first chunk of a prompt"
    part = data["parts"]["azure"]
    assert part["status"] == "done", part
    rows = {row["id"].partition("/")[2]: row for row in part["rows"]}
    for arm in arms:
        assert rows[f"makespan/{arm}"]["finished"] == [data["options"]["served"]]
        assert rows[f"largest/{arm}"]["value"] >= rows[f"batch/{arm}"]["value"] > 0
        assert rows[f"first50/{arm}"]["value"] <= rows[f"first99/{arm}"]["value"]
        assert rows[f"wasted/{arm}"]["value"] >= 0
        assert len(rows[f"memory/{arm}"]["columns"]) == 5
    for arm in set(arms) - {"contiguous", AGAIN}:
        assert rows[f"difference/{arm}"]["value"] <= serve_command._BOUND
    tokens = {rows[f"tokens/{arm}"]["value"] * rows[f"makespan/{arm}"]["value"] for arm in arms}
    assert max(tokens) == pytest.approx(min(tokens), rel=1e-4)  # all arms did the same work
    # Larger pages and blocks waste more, and static slots waste the most.
    wasted = {arm: rows[f"wasted/{arm}"]["value"] for arm in arms}
    assert wasted["static"] > wasted["2M"] > wasted["contiguous"]
    assert wasted["paged128"] > wasted["paged16"]


def test_a_quick_run_shrinks_long_prompts_until_they_fit(tmp_path: Path) -> None:
    trace = tmp_path / "long.csv"
    trace.write_text("num_prefill_tokens,num_decode_tokens\n90000,100\n")
    out = tmp_path / "serve.json"
    words = ["bench", "serve", "--quick", "--backend", "host", "--out", str(out)]
    words += ["--trace", str(trace), "--longest", "131072", "--arms", "contiguous"]
    assert main(words) == 0
    data = json.loads(out.read_text())
    assert data["options"]["served"] == 1
    (makespan,) = [row for row in data["parts"]["azure"]["rows"] if "makespan" in row["id"]]
    assert makespan["finished"] == [1]


def test_merging_runs_of_which_one_measured_nothing(tmp_path: Path) -> None:
    trace = tmp_path / "too_long.csv"
    trace.write_text("num_prefill_tokens,num_decode_tokens\n90000,100\n")
    words = ["bench", "serve", "--quick", "--backend", "host", "--trace", str(trace)]
    one, out = tmp_path / "one.json", tmp_path / "all.json"
    assert main([*words, "--longest", "1024", "--arms", "contiguous", "--out", str(one)]) == 3
    assert main(["bench", "serve", "--out", str(out), "--merge", str(one), str(one)]) == 0
    part = json.loads(out.read_text())["parts"]["azure"]
    assert part["status"] == "not run"
    assert "no request" in part["missing"][0]["why"]


def test_conversations_reuse_earlier_turns(tmp_path: Path) -> None:
    out = tmp_path / "serve.json"
    words = ["bench", "serve", "--quick", "--backend", "host", "--out", str(out)]
    words += ["--workload", "prefixes", "--slots", "1", "--no-check", "--rate", "1000"]
    assert main([*words, "--arms", "contiguous,paged16,paged128"]) == 0
    part = json.loads(out.read_text())["parts"]["prefixes"]
    shared = {
        row["system"]: row["value"]
        for row in part["rows"]
        if row["id"].startswith("prefixes/shared")
    }
    # Two of four conversations of 127 tokens continue. For each of the two, 7 units of 16 tokens
    # are cached, but no block of 128.
    assert shared == {"contiguous": 224, "paged16": 224, "paged128": 0}


def test_an_arm_that_cannot_run_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The results of the other arms are kept."""

    def broken(*args: Any) -> None:
        raise RuntimeError("no blocks today")

    monkeypatch.setattr(Paged, "__init__", broken)
    out = tmp_path / "serve.json"
    words = ["bench", "serve", "--quick", "--backend", "host", "--out", str(out)]
    assert main([*words, "--arms", "contiguous,paged16,2M", "--requests", "2"]) == 0
    part = json.loads(out.read_text())["parts"]["azure"]
    assert part["status"] == "partial"
    assert [item["id"] for item in part["missing"]] == ["azure/makespan/paged16"]
    assert "no blocks today" in part["missing"][0]["why"]
    found = {row["id"] for row in part["rows"]}
    assert {"azure/makespan/contiguous", "azure/makespan/2M"} <= found


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ([], "ImportError: vLLM is not installed"),
        (["--workload", "prefixes"], "ValueError: the prefixes that vLLM finds are not measured"),
    ],
    ids=["not installed", "prefixes"],
)
def test_vllm_that_cannot_run_says_why(
    options: list[str], why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "vllm" else find(name)
    )
    out = tmp_path / "serve.json"
    words = ["bench", "serve", "--quick", "--backend", "host", "--out", str(out), *options]
    assert main([*words, "--arms", "contiguous,vllm", "--requests", "2"]) == 0
    (part,) = json.loads(out.read_text())["parts"].values()
    assert part["status"] == "partial"
    (missing,) = part["missing"]
    assert (missing["id"].partition("/")[2], missing["why"]) == ("makespan/vllm", why)


def test_other_page_sizes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[int] = []
    real = Forward.launch

    def launch(self: Forward, works: list[Work]) -> Any:
        if isinstance(self.store, Slots):
            opened.append(self.store.cache.layout.page_size)
        return real(self, works)

    monkeypatch.setattr(Forward, "launch", launch)
    out = tmp_path / "serve.json"
    words = ["bench", "serve", "--quick", "--backend", "host", "--out", str(out), "--page", "16K"]
    assert main([*words, "--arms", "contiguous", "--requests", "2"]) == 0
    assert set(opened) == {16 << 10}
    assert json.loads(out.read_text())["options"]["page"] == 16 << 10


def test_an_arm_that_fails_midway_leaves_no_memory_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The arm's store is closed even though the error's traceback held its tensors."""
    opened: list[Store] = []
    launch = Forward.launch

    def failing(self: Forward, works: list[Work]) -> Any:
        if isinstance(self.store, Slots):
            opened.append(self.store)
            held = self.store.layers[0]  # kept alive by the traceback's frame
            raise RuntimeError(f"illegal access near {held[0].shape}")
        return launch(self, works)

    monkeypatch.setattr(Forward, "launch", failing)
    out = tmp_path / "serve.json"
    words = ["bench", "serve", "--quick", "--backend", "host", "--out", str(out)]
    assert main([*words, "--arms", "contiguous,paged16,2M", "--requests", "2"]) == 0
    part = json.loads(out.read_text())["parts"]["azure"]
    assert {item["id"] for item in part["missing"]} == {
        "azure/makespan/contiguous",
        "azure/makespan/2M",
    }
    assert all("illegal access" in item["why"] for item in part["missing"])
    assert {row["id"] for row in part["rows"]} >= {"azure/makespan/paged16"}
    assert opened
    for store in opened:
        assert isinstance(store, Slots)
        with pytest.raises(Exception, match="closed"):
            store.cache.stats()


def test_an_arm_with_wrong_results_is_not_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The results of the other arms are kept, and the run fails."""
    upload = Paged.upload

    def wrong(self: Paged) -> None:
        upload(self)
        if self.block == 16:
            self._device[:, 1] = self._device[:, 0]

    monkeypatch.setattr(Paged, "upload", wrong)
    out = tmp_path / "serve.json"
    words = ["bench", "serve", "--quick", "--backend", "host", "--out", str(out)]
    assert main([*words, "--arms", "contiguous,paged16,paged128", "--requests", "2"]) == 1
    part = json.loads(out.read_text())["parts"]["azure"]
    assert part["status"] == "failed"
    assert "paged16" in part["why"]
    assert [item["id"] for item in part["missing"]] == ["azure/makespan/paged16"]
    found = {row["id"] for row in part["rows"]}
    assert {"azure/makespan/contiguous", "azure/makespan/paged128"} <= found
    assert "azure/makespan/paged16" not in found


def result(path: Path, arms: dict[str, list[float]], waited: float = 1.0, **changed: Any) -> Path:
    """Writes a run with each arm's tokens/s by round; a negative number marks a round that ran out
    of time.

    In each round, requests waited for memory for `waited` seconds, with 3 requests in each step.
    """
    options = {"backend": "stock", "quick": False, "workload": "azure", "limit": 20 << 30}
    options |= {"arms": list(arms), "deadline": float(len(arms)), **changed}
    record = Record(describe(), options, started=path.name, format="vmem-bench-serve/1")
    part = record.part(str(options["workload"]), "all of it")
    for arm, speeds in arms.items():
        rounds = [
            Outcome(
                seconds=1.0,
                new_tokens=int(abs(one)),
                cut=one < 0,
                between=[1.0],
                steps=1,
                host_ns=1000,
                short_s=waited,
                short_batch_s=3.0 * waited,
            )
            for one in speeds
        ]
        add_rows(part, arm, f"what {arm} is", rounds)
        part.value(f"difference/{arm}", "logits", arm, 0.01 * len(speeds), "x", compared=3)
    record.write(path)
    return path


def test_runs_are_merged_by_their_reference(tmp_path: Path, capsys: Any) -> None:
    fast = result(tmp_path / "a.json", {"contiguous": [100.0, 300.0], "2M": [100.0, 100.0]})
    slow = result(tmp_path / "b.json", {"contiguous": [50.0], "paged16": [40.0]})
    last = result(tmp_path / "c.json", {"contiguous": [60.0], AGAIN: [66.0], "paged16": [60.0]})
    out = tmp_path / "all.json"
    words = ["bench", "serve", "--out", str(out), "--merge"]
    assert main([*words, str(last), str(fast), str(slow)]) == 0
    data = json.loads(out.read_text())
    assert data["options"]["arms"] == ["contiguous", "2M", "paged16", AGAIN]
    rows = {row["id"]: row for row in data["parts"]["azure"]["rows"]}
    assert rows["azure/tokens/contiguous"]["rounds"] == [100, 300, 50, 60]
    assert rows["azure/tokens/contiguous"]["value"] == 80
    assert rows["azure/tokens/contiguous"]["by_run"] == [[0, 200], [1, 50], [2, 60]]
    assert rows["azure/difference/contiguous"]["value"] == 0.02  # the worst of the runs
    aims = {aim["id"]: aim for aim in data["aims"]}
    # Each value is relative to the reference from the same run, because the GPU was slower in the
    # second run.
    assert aims["tokens_2M"]["value"] == 2.0
    assert aims["tokens_2M"]["pass"]
    assert aims["tokens_paged16"]["value"] == pytest.approx((50 / 40 + 1) / 2)
    # identical arms differ by 10%, so the target is lowered by 5%
    assert aims["tokens_paged16"]["aim"] == 0.95
    assert "what contiguous is" in aims["tokens_paged16"]["what"]
    assert aims["batch_2M"]["why"] == "2M has 0"
    assert "what paged16 is" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arms", "changed", "why"),
    [
        ({"contiguous": [1.0]}, {"limit": 7}, "differ in limit"),
        ({"contiguous": [1.0]}, {"workload": "chat"}, "differ in workload"),
        ({"fa3": [1.0], "contiguous": [1.0]}, {}, "no reference in common: contiguous, fa3"),
    ],
)
def test_runs_with_different_options_are_not_merged(
    tmp_path: Path, capsys: Any, arms: dict[str, list[float]], changed: dict[str, Any], why: str
) -> None:
    one = result(tmp_path / "a.json", {"contiguous": [1.0]})
    other = result(tmp_path / "b.json", arms, **changed)
    out = tmp_path / "all.json"
    assert main(["bench", "serve", "--out", str(out), "--merge", str(one), str(other)]) == 2
    assert why in capsys.readouterr().err
    assert not out.exists()


def test_a_partial_workload_is_not_compared(tmp_path: Path) -> None:
    one = result(tmp_path / "a.json", {"contiguous": [5.0], "paged16": [-5.0], "fa3": [5.0]})
    out = tmp_path / "all.json"
    assert main(["bench", "serve", "--out", str(out), "--merge", str(one)]) == 0
    aims = {aim["id"]: aim for aim in json.loads(out.read_text())["aims"]}
    assert aims["tokens_paged16"]["value"] is None
    assert aims["tokens_paged16"]["why"] == "time ran out: paged16"
    assert aims["tokens_fa3"]["value"] == 1.0


def test_an_aim_of_memory_applies_only_if_requests_wait(tmp_path: Path) -> None:
    out = tmp_path / "all.json"
    for waited, aim in ((1.0, 1.2), (0.0, None)):
        one = result(tmp_path / "a.json", {"contiguous": [5.0], "2M": [5.0]}, waited)
        assert main(["bench", "serve", "--out", str(out), "--merge", str(one)]) == 0
        aims = {aim["id"]: aim for aim in json.loads(out.read_text())["aims"]}
        assert aims["tokens_2M"]["aim"] == aim
        assert aims["full_2M"]["value"] == (1.0 if waited else None)


def test_a_complete_run_replaces_one_that_was_cut(tmp_path: Path) -> None:
    short = result(tmp_path / "a.json", {"contiguous": [5.0], "static": [-9.0]})
    whole = result(tmp_path / "b.json", {"contiguous": [5.0], "static": [4.0]})
    out = tmp_path / "all.json"
    assert main(["bench", "serve", "--out", str(out), "--merge", str(short), str(whole)]) == 0
    data = json.loads(out.read_text())
    # the merged file has the format of its parts, so it can be shown and merged in turn
    assert data["format"] == "vmem-bench-serve/1"
    rows = {row["id"]: row for row in data["parts"]["azure"]["rows"]}
    assert rows["azure/tokens/static"]["rounds"] == [4.0]
    assert not rows["azure/makespan/static"]["cut"]
    assert rows["azure/tokens/contiguous"]["rounds"] == [5.0, 5.0]
    aims = {aim["id"]: aim for aim in data["aims"]}
    assert aims["tokens_static"]["value"] == 1.25


# ---- ranks ---------------------------------------------------------------------------------------


def test_two_ranks_agree_with_one(model: Decoder) -> None:
    """Each rank holds half of the heads and of the inner layer; the sums equal the full result."""
    with closing(make("16", 4 << 20)) as store:
        _, wanted = run(model, store, kernels("16"), REQUESTS)
    parts: list[Any] = [None, None]
    found: list[Any] = [None, None]
    barrier = threading.Barrier(2, timeout=60)

    def part_of(rank: int) -> None:
        def add(tensor: torch.Tensor) -> torch.Tensor:
            parts[rank] = tensor.float()
            barrier.wait()
            whole = (parts[0] + parts[1]).to(tensor.dtype)
            barrier.wait()
            return whole

        mine = Decoder(TINY, CPU, longest=LONGEST, shard=Shard(rank, 2, add))
        assert mine.sizes == TINY.on_ranks(2)
        with closing(Paged(mine.sizes, LONGEST, 4, 2 << 20, 16, CPU)) as store:
            _, found[rank] = run(mine, store, kernels("16"), REQUESTS)

    threads = [threading.Thread(target=part_of, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for one in found:
        assert one is not None
        assert apart(wanted, one) < 0.05
    assert apart(found[0], found[1]) == 0


def test_indivisible_heads_are_rejected() -> None:
    with pytest.raises(ValueError, match="2 KV heads cannot be split over 3 ranks"):
        TINY.on_ranks(3)
    assert YI_34B.on_ranks(2).token_bytes == 120 << 10


def test_a_rank_with_another_answer_is_detected() -> None:
    store = make("16", 4 << 20)
    steps = [ranks.Step([("take", (np.zeros(1, np.int32),), (7, 0))], None)]
    group: Any = SimpleNamespace(rank=1, tell=lambda: steps.pop(0))
    with (
        closing(store),
        pytest.raises(WrongResult, match=r"rank 1: take.* returned \(3, 0\), on rank 0"),
    ):
        ranks._follow(group, cast(Forward, SimpleNamespace(store=store)))


def test_look_ahead_is_sent_to_other_ranks_immediately() -> None:
    """A store that does not map ahead sends no look-ahead."""
    told: list[ranks.Step] = []
    group: Any = SimpleNamespace(tell=told.append)
    for store, steps in (
        (make("16", 4 << 20), [["take"]]),
        (Later(TINY, LONGEST, 4, 4 << 20, 16, CPU), [["take", "ahead"], []]),
    ):
        told.clear()
        with closing(ranks.Told(store, group)) as mine:
            slot, _ = mine.take(np.zeros(9, np.int32)) or (0, 0)
            mine.ahead(([slot], [9]))
            mine.tell(None)
        assert [[name for name, _, _ in step.asked] for step in told] == steps
        assert told[-1].works is None
        assert all(step.works == [] for step in told[:-1])


def test_no_rank_settles_within_the_measured_time() -> None:
    calls: list[str] = []

    class Store(Paged):
        def settle(self) -> None:
            calls.append("settle")

    def store() -> Paged:
        return Store(TINY, LONGEST, 4, 4 << 20, 16, CPU)

    told: list[ranks.Step] = []
    group: Any = SimpleNamespace(
        rank=1,
        tell=lambda *step: told.extend(step) if step else told.pop(0),
        meet=lambda: calls.append("meet"),
    )
    with closing(ranks.Told(store(), group)) as mine:
        mine.settle()
        mine.tell(None)
    assert calls == ["settle", "meet"]
    with closing(store()) as other:
        ranks._follow(group, cast(Forward, SimpleNamespace(store=other)))
    assert calls == ["settle", "meet"] * 2


def test_slots_keep_memory_that_no_request_needs() -> None:
    with closing(make("slots", 4 << 20)) as store:
        assert isinstance(store, Slots)
        context = store.cache.context
        store.settle()
        slot, _ = taken(store)
        assert store.hold([slot], [LONGEST])
        store.release(slot)
        store.cache.memory.reclaim_free(wait=True)
        stats = context.stats()
        assert stats.used_bytes == 0
        assert stats.slab_bytes >= 4 << 20
    assert not context.is_open


def test_two_processes_serve_as_one(tmp_path: Path) -> None:
    """Starts ranks on the CPU as torchrun does; every arm runs, the answers are equal, and only one
    result is written.
    """
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1]
    out = tmp_path / "serve.json"
    words = [sys.executable, "-m", "pyvmem", "bench", "serve", "--quick", "--backend", "host"]
    arms = "contiguous,paged16,static"
    words += ["--workload", "offline", "--arms", arms, "--out", str(out)]
    common = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    common |= {"WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    both = [
        subprocess.Popen(words, env={**common, "RANK": rank, "LOCAL_RANK": rank}, **pipes)
        for rank in ("0", "1")
    ]
    try:
        texts = [process.communicate(timeout=240)[0] for process in both]
    finally:
        for process in both:
            process.kill()
    assert [process.returncode for process in both] == [0, 0], texts
    assert "makespan/static" in texts[0]
    assert "makespan" not in texts[1]  # only rank 0 prints the report
    assert "nothing was measured" not in texts[1]
    data = json.loads(out.read_text())
    assert data["options"]["ranks"] == 2
    part = data["parts"]["offline"]
    assert part["status"] == "done", part
    found = {row["id"].partition("/")[2]: row for row in part["rows"]}
    for arm in ("contiguous", "paged16", "static"):
        assert found[f"makespan/{arm}"]["finished"] == [data["options"]["served"]]
    assert found["difference/paged16"]["value"] <= serve_command._BOUND


def test_an_arm_that_one_rank_cannot_create_runs_on_no_rank(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    group = object.__new__(ranks.Group)
    group.rank, group.size, group._control = 0, 2, None

    def gathered(box: list[str], why: str, group: Any) -> None:
        box[:] = [why, "VMemError: no memory"]

    monkeypatch.setattr(ranks.dist, "all_gather_object", gathered)
    with pytest.raises(RuntimeError, match=r"^rank 1: VMemError: no memory$"):
        group.make(lambda: cast(Forward, object()))
    told: list[Any] = [ranks.Run("static", 1, 2, 3), None]
    monkeypatch.setattr(group, "tell", lambda: told.pop(0))
    swept: list[int] = []
    ranks.follow(group, lambda run: cast(Forward, object()), lambda: swept.append(1))
    assert (told, swept) == ([], [1])
