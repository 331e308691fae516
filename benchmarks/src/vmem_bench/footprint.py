# SPDX-License-Identifier: MIT
"""`vmem bench kernels --footprint`: attention time by cache size and page-table entry size.

Times one attention step over all layers of a model. Its keys and values fill a *footprint*: the
number of mapped bytes, all of which a decode step reads once. A GPU's TLBs cover a few gigabytes
with 64 KB entries and the whole memory with 2 MB entries, so only large footprints show what small
entries cost.

A GPU has no room for two large footprints, so the kinds of memory take turns for several rounds:
each is allocated, filled with the same values, timed in all layouts, and freed.
"""

from __future__ import annotations

import random
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from pyvmem.bench.record import Book, Part
from pyvmem.bench.timing import Samples, interleave, quiet
from pyvmem.bench.torch_timer import captured, timer
from pyvmem.kvcache import KVCache, KVCacheConfig
from pyvmem.layouts.options import page_name
from pyvmem.memory.context import Context
from pyvmem.memory.info import Caps
from pyvmem.memory.ops import OpBatch
from vmem_bench.command import Command, WrongResult
from vmem_bench.paged_kernels import Call, Case, Kernel

if TYPE_CHECKING:
    import torch

__all__ = ["CACHE", "ENTRIES", "MALLOC", "Footprint", "Model", "memories"]

MALLOC = "malloc"
ENTRIES = "entries"
"""Small pages, mapped by 2 MB entries wherever they form contiguous blocks of 2 MB."""
CACHE = "cache"
"""Pages of a `KVCache` whose requests were prefilled and then grew step by step to full length."""

_BLOCK = 16  # tokens per block of the paged layouts
_FILL = 1 << 30  # elements filled per call
_SPARE = 3 << 30  # bytes left free for the kernels' outputs and torch
_TOLERANCE = 0.03  # relative to a head's largest output: bfloat16 has 8 significant bits


@dataclass(frozen=True)
class Model:
    """The model whose attention is timed; the defaults are Llama-3-8B's shape.

    Attributes:
        layers, heads, kv_heads, head_dim: as in a model's configuration.
        together: the numbers of layers per tensor to try.
        lengths: the numbers of tokens per request to try when decoding.
        prefills: pairs of a request's number of new tokens and its total number of rows.
    """

    layers: int = 32
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    together: tuple[int, ...] = (1, 4, 8, 16, 32)
    lengths: tuple[int, ...] = (1024, 4096)
    prefills: tuple[tuple[int, int], ...] = ((16384, 16384), (2048, 32768))

    @property
    def row(self) -> int:
        """The number of elements in a token's keys (or values) in one layer."""
        return self.kv_heads * self.head_dim

    @property
    def token_bytes(self) -> int:
        """The size in bytes of a token's bfloat16 keys and values across all layers."""
        return 2 * 2 * self.layers * self.row


TINY = Model(2, 4, 2, 32, (1, 2), (64,), ((32, 64),))


@dataclass
class _Work:
    """One attention step over all layers, in one layout, and its samples."""

    row: str
    what: str
    case: Case
    views: Callable[[torch.Tensor], list[tuple[torch.Tensor, torch.Tensor]]]
    call: Call
    q: torch.Tensor
    nbytes: int
    wanted: torch.Tensor | None = None
    samples: dict[str, Samples] = field(default_factory=dict)


def memories(command: Command) -> list[str]:
    """Returns the kinds of memory to compare: cudaMalloc's, then ours by page size and mapping."""
    small = command.page
    kinds = [MALLOC, *(page_name(size) for size in dict.fromkeys((small, 2 << 20)))]
    if command.backend == "cuda":
        return kinds
    return [*kinds, ENTRIES, CACHE]


class Footprint:
    """Times one kernel on footprints of several sizes.

    Args:
        command: provides the back end and the device's ordinal.
        part: receives the rows ``FOOTPRINT/LAYOUT/CASE/MEMORY``.
        kernel: a kernel that can read both slots and blocks.
        device: device of the tensors.
    """

    def __init__(self, command: Command, part: Part, kernel: Kernel, device: torch.device) -> None:
        self.command, self.part, self.kernel, self.device = command, part, kernel, device
        tiny = command.quick or command.backend == "host"
        self.model = TINY if tiny else Model()
        self.rounds, self.calls = (2, 1) if tiny else (5, 3)
        self._clock = timer(device)
        self._checked = 0
        self._no_graph: set[str] = set()

    def measure(self, nbytes: int) -> None:
        """Adds the rows for a footprint of `nbytes` bytes.

        Raises:
            WrongResult: outputs differ between two kinds of memory.
        """
        import torch

        if self.device.type == "cuda":
            torch.cuda.empty_cache()
            free = torch.cuda.mem_get_info(self.device)[0]
            if nbytes + _SPARE > free:
                why = f"{nbytes} bytes do not fit: {free} are free, {_SPARE} of them for the kernel"
                self.part.not_run(_name(nbytes), why)
                return
        kinds = memories(self.command)
        works = self._works(nbytes)
        book = Book(self.part)
        for work in works:
            for kind in kinds:
                what = f"{work.what}: {kind} memory" if kind == MALLOC else f"{work.what}: {kind}"
                work.samples[kind] = book.samples(
                    f"{work.row}/{kind}",
                    what,
                    kind,
                    unit="ms",
                    nbytes=work.nbytes,
                )
        turns = [partial(self._turn, works, nbytes, kind) for kind in kinds]
        with quiet():
            interleave(turns, self.rounds, self.command.deadline)
        book.close()
        self._aims(works, kinds)

    def _turn(self, works: Sequence[_Work], nbytes: int, kind: str) -> None:
        self._in_memory(nbytes, kind, partial(self._time, works, kind))

    def _time(self, works: Sequence[_Work], kind: str, flat: torch.Tensor) -> None:
        self._fill(flat)
        for work in works:
            layers = work.views(flat)
            self._compare(work, layers, kind)
            step: Callable[[], object] = partial(_step, work.call, work.q, layers)
            if work.case.decodes and self.device.type == "cuda":
                step, why = captured(step, self.device)
                if why and why not in self._no_graph:
                    self._no_graph.add(why)
                    self.part.notes.append(f"no CUDA graph: {why}")
            into = work.samples[kind].new_round()
            into += [self._clock(step) for _ in range(self.calls)]

    # ---- memory ----------------------------------------------------------------------------------

    def _in_memory(self, nbytes: int, kind: str, use: Callable[[torch.Tensor], None]) -> None:
        """Calls `use` with a flat bfloat16 tensor of `nbytes` bytes, and then frees the memory."""
        import torch

        if kind == MALLOC:
            use(torch.empty(nbytes // 2, dtype=torch.bfloat16, device=self.device))
            self._settle()
            return
        if kind == CACHE:
            self._in_cache(nbytes, use)
            return
        granule, large = self.command.page, 2 << 20
        page = large if kind == page_name(large) else granule
        whole = -(-nbytes // large) * large
        with Context(
            self.command.backend,
            device=self.command.args.device,
            granule=granule,
            large_entries=kind == ENTRIES,
        ) as context:
            visible = False if Caps.PLAIN in context.info.caps else None
            reservation = context.reserve(whole, visible=visible, large=page == large)
            ops = OpBatch(1)
            ops.populate(reservation.addr, whole, page_size=page)
            context.batch(ops)
            try:
                use(reservation.tensor((nbytes // 2,), torch.bfloat16))
            except Exception as error:
                traceback.clear_frames(error.__traceback__)  # its frames keep the tensor alive
                raise
            finally:
                self._settle()
                ops.clear()
                ops.unmap(reservation.addr, whole)
                context.batch(ops)
                reservation.close()

    def _in_cache(self, nbytes: int, use: Callable[[torch.Tensor], None]) -> None:
        """Calls `use` with a cache's memory: adjacent slots, each grown to its full length."""
        import torch

        row, rows = 2048, (4 << 20 if nbytes < 1 << 30 else 64 << 20) // 2048
        slots = -(-nbytes // (rows * row))
        config = KVCacheConfig(
            num_layers=1,
            num_kv_heads=1,
            head_dim=row // 2,
            dtype="bfloat16",
            tensors_per_layer=1,
            max_batch=slots,
            max_seq_len=rows,
            page_size=self.command.page,
            packed_slots=True,
            memory_limit=slots * rows * row + (256 << 20),
            low_watermark=0.0,
            idle_seconds=0,
        )
        with KVCache(
            config, backend=self.command.backend, device=self.command.args.device
        ) as cache:
            choose = random.Random(1)
            lengths = [choose.randrange(rows // 4, rows * 3 // 4) for _ in range(slots)]
            for _ in lengths:
                cache.alloc_reqid()
            step = max(1, self.command.page // row)
            while cache.step(lengths) == 0:
                if min(lengths) == rows:
                    break
                lengths = [min(rows, length + step) for length in lengths]
            else:
                raise WrongResult(f"a cache of {nbytes} bytes could not map memory for its rows")
            stats = cache.context.stats()
            share = 100 * (stats.large_entries << 21) / max(1, stats.mapped_bytes)
            note = f"{_name(nbytes)}: entries of 2 MB map {share:.1f}% of the cache's memory"
            if note not in self.part.notes:
                self.part.notes.append(note)
            try:
                use(cache.reservation.tensor((nbytes // 2,), torch.bfloat16))
            except Exception as error:
                traceback.clear_frames(error.__traceback__)  # its frames keep the tensor alive
                raise
            finally:
                self._settle()

    def _settle(self) -> None:
        import torch

        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            torch.cuda.empty_cache()

    def _fill(self, flat: torch.Tensor) -> None:
        import torch

        generator = torch.Generator(device=self.device).manual_seed(1)
        for at in range(0, flat.numel(), _FILL):
            flat[at : at + _FILL].normal_(generator=generator)
        self._settle()

    # ---- layouts ---------------------------------------------------------------------------------

    def _works(self, nbytes: int) -> list[_Work]:
        model, works = self.model, []
        size = _name(nbytes)
        for rows in model.lengths:
            batch = nbytes // (model.token_bytes * rows)
            if not batch:
                self.part.not_run(f"{size}/*/decode_{rows}", "not even one request fits")
                continue
            case = self._case(f"decode_{rows}", f"{batch} requests of {rows:,}", batch, 1, rows)
            works += [self._slots(size, case, together) for together in model.together]
            works += [self._blocks(size, case, together) for together in (1, model.layers)]
        for new, rows in model.prefills:
            if nbytes < 2 * model.token_bytes * rows:
                continue
            name = f"prefill_{new}_{rows}"
            case = self._case(name, f"{new:,} new tokens of {rows:,}", 1, new, rows)
            ends = {model.together[0], 8, model.layers} & set(model.together)
            works += [self._slots(size, case, together) for together in sorted(ends)]
        return works

    def _case(self, name: str, what: str, batch: int, new: int, rows: int) -> Case:
        model = self.model
        return Case(
            name, what, batch, new, rows, False, model.heads, model.kv_heads, model.head_dim
        )

    def _queries(self, case: Case) -> torch.Tensor:
        import torch

        generator = torch.Generator(device=self.device).manual_seed(4)
        shape = (case.batch * case.q_len, case.heads, case.head_dim)
        q = torch.empty(shape, dtype=torch.bfloat16, device=self.device)
        return q.normal_(generator=generator)

    def _slots(self, size: str, case: Case, together: int) -> _Work:
        """Returns an attention step over slots whose tensors each interleave `together` layers."""
        layers, model = self.model.layers, self.model

        def views(flat: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
            tensors = flat.view(layers // together, 2, -1)
            per_request = case.kv_len * together * model.row
            slots = tensors.shape[2] // per_request
            shape = (slots, case.kv_len, together, model.kv_heads, model.head_dim)
            # A prefill kernel reads whole tiles, past the request's rows. Using a slot in the
            # middle keeps this overread within the tensor.
            first = 0 if case.decodes else (slots - 1) // 2
            found = []
            for tensor in tensors:
                k, v = (half[: slots * per_request].view(shape) for half in tensor)
                part = slice(first, first + case.batch)
                found += [(k[part, :, i], v[part, :, i]) for i in range(together)]
            return found

        name = "a tensor per layer" if together == 1 else f"{together} layers in a tensor"
        return _Work(
            f"{size}/slots{together}/{case.name}",
            f"{size}, {case.what}, {name}",
            case,
            views,
            self.kernel.slots(case),
            self._queries(case),
            case.nbytes * layers if case.decodes else 0,
        )

    def _blocks(self, size: str, case: Case, together: int) -> _Work:
        """Returns an attention step over 16-token blocks in random order.

        Within a block, the rows of `together` layers are adjacent.
        """
        import torch

        layers, model = self.model.layers, self.model
        each = case.kv_len // _BLOCK
        generator = torch.Generator(device=self.device).manual_seed(5)
        order = torch.randperm(case.batch * each, device=self.device, generator=generator)
        table = order.to(torch.int32).view(case.batch, each)

        def views(flat: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
            tensors = flat.view(layers // together, 2, -1)
            per_block = together * _BLOCK * model.row
            blocks = tensors.shape[2] // per_block
            shape = (blocks, together, _BLOCK, model.kv_heads, model.head_dim)
            found = []
            for tensor in tensors:
                k, v = (half[: blocks * per_block].view(shape) for half in tensor)
                found += [(k[:, i], v[:, i]) for i in range(together)]
            return found

        name = "a tensor per layer" if together == 1 else "all layers of a block together"
        return _Work(
            f"{size}/blocks{together}/{case.name}",
            f"{size}, {case.what}, blocks of {_BLOCK}, {name}",
            case,
            views,
            self.kernel.paged(case, table, 0),
            self._queries(case),
            case.nbytes * layers,
        )

    # ---- results ---------------------------------------------------------------------------------

    def _compare(
        self, work: _Work, layers: Sequence[tuple[torch.Tensor, torch.Tensor]], kind: str
    ) -> None:
        """Compares the sum of all layers' outputs with the sum from the first kind of memory."""
        import torch

        out = torch.zeros(work.q.shape, dtype=torch.float32, device=self.device)
        for k, v in layers:
            out += work.call(work.q, k, v)
        if work.wanted is None:
            work.wanted = out
        largest = work.wanted.abs().amax(-1).clamp_min(1e-9)
        worst = float(((out - work.wanted).abs().amax(-1) / largest).max())
        self._checked += 1
        if not worst <= _TOLERANCE:  # also catches NaN
            raise WrongResult(
                f"{work.row}, {kind}: differs by {worst:.2g} times the head's largest output"
            )

    def _aims(self, works: Sequence[_Work], kinds: Sequence[str]) -> None:
        """Adds the time for each kind of memory relative to cudaMalloc memory, in every layout."""
        prefix = self.part.name
        for work in works:
            for kind in kinds[1:]:
                self.command.aims.add(
                    f"{prefix}_{work.row}_{kind}",
                    f"{work.what}: time with {kind} pages relative to cudaMalloc",
                    [f"{prefix}/{work.row}/{kind}", f"{prefix}/{work.row}/{MALLOC}"],
                    _ratio,
                )
        self.part.notes.append(
            f"{self._checked} outputs compared with those from the first kind of memory"
        )


def _name(nbytes: int) -> str:
    return page_name(nbytes) if nbytes % (1 << 30) else f"{nbytes >> 30}G"


def _step(
    call: Call, q: torch.Tensor, layers: Sequence[tuple[torch.Tensor, torch.Tensor]]
) -> torch.Tensor:
    for k, v in layers:
        out = call(q, k, v)
    return out


def _ratio(ours: Any, base: Any) -> float:
    return float(ours["median"]) / float(base["median"])
