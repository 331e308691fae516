# SPDX-License-Identifier: MIT
"""The forward pass of a serving loop over any store, eager or as a CUDA graph.

A step copies its inputs to the device once, then runs the model. Requests with few new tokens come
first and share a call to the decoding kernel; prompts share a call to the prefill kernel. A step
that only decodes is replayed as a CUDA graph of the next larger size. The step is padded with its
last request, whose row is then written several times with the same values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from pyvmem.attention import flash, sdpa
from pyvmem.attention.reads import EXACT, Reads
from pyvmem.kvcache.config import PREFILL_TOKENS
from vmem_bench import fused
from vmem_bench.decoder import Decoder
from vmem_bench.serving.infer import Prompts
from vmem_bench.serving.stores import Ints, Store

__all__ = ["Forward", "Kernels", "Launched", "Work"]

_SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320, 384, 448, 512)


class Kernels(NamedTuple):
    """How attention kernels are called in each phase.

    Attributes:
        prefill, decode: the form of the call, "contiguous" or "paged".
        reads: which rows the contiguous call reads.
        library: "fa3", "fa2", or "flashinfer" (FlashInfer for prompts, FlashAttention-3 to decode).
    """

    prefill: str
    decode: str
    reads: Reads = EXACT
    library: str = "fa3"


class Work(NamedTuple):
    """A request's part in a step: its slot, its number of rows so far, and its new tokens."""

    slot: int
    first: int
    ids: Ints

    @property
    def end(self) -> int:
        """The request's number of rows after the step."""
        return self.first + len(self.ids)


class Launched(NamedTuple):
    """A launched step: its logits, and a function that waits for it."""

    logits: torch.Tensor
    wait: Callable[[], None]


@dataclass
class _Part:
    """The requests of a step that share a kernel call."""

    tokens: slice
    starts: torch.Tensor
    used: torch.Tensor
    index: torch.Tensor
    max_q: int
    max_kv: int
    table: torch.Tensor | None
    works: Sequence[Work]
    prompts: bool


@dataclass
class _Batch:
    """A step's inputs on the device, split into parts that each need one kernel call."""

    positions: torch.Tensor
    starts: torch.Tensor
    rows: torch.Tensor
    places: torch.Tensor
    parts: list[_Part]


class _Numbers:
    """A step's inputs, in one device buffer and in two pinned host buffers used alternately.

    Two host buffers are needed because a step is prepared while the previous one runs.
    """

    _TOKENS = ("ids", "positions", "rows", "places")
    _REQUESTS = ("index", "used", "starts", "later")

    def __init__(self, tokens: int, requests: int, device: torch.device) -> None:
        self._size = dict.fromkeys(self._TOKENS, tokens)
        self._size |= dict.fromkeys(self._REQUESTS, requests + 1)
        total = sum(self._size.values())
        pinned = device.type == "cuda"
        self._host = [torch.zeros(total, dtype=torch.int32, pin_memory=pinned) for _ in range(2)]
        self._device = torch.zeros(total, dtype=torch.int32, device=device)
        self._turn = 0

    def _cut(self, whole: Any) -> dict[str, Any]:
        out, at = {}, 0
        for name, size in self._size.items():
            out[name] = whole[at : at + size]
            at += size
        return out

    def send(self, **values: Any) -> None:
        """Copies the inputs to the device, in stream order."""
        self._turn ^= 1
        host = self._host[self._turn]
        fields = self._cut(host.numpy())
        for name, numbers in values.items():
            fields[name][: len(numbers)] = numbers
        self._device.copy_(host, non_blocking=True)

    def there(self) -> dict[str, torch.Tensor]:
        """Returns the fields of the device buffer by name."""
        return self._cut(self._device)


class Forward:
    """Runs the model over a store.

    Args:
        model: the decoder.
        store: the store that holds the rows.
        kernels: the attention calls for each phase; the CPU uses SDPA on the same rows.
        budget: maximum new tokens per step; at least the store's number of slots.
        graphs: whether to decode with CUDA graphs.
    """

    def __init__(
        self, model: Decoder, store: Store, kernels: Kernels, budget: int, graphs: bool
    ) -> None:
        self.model, self.store, self.kernels = model, store, kernels
        self._device = store.layers[0][0].device
        self._gpu = self._device.type == "cuda"
        self._call = _call(kernels.library) if self._gpu else None
        self._prompts: Prompts | None = None
        if self._gpu and kernels.library == "flashinfer":
            rows = store.table.rows if store.table is not None else 0
            paged = kernels.prefill == "paged"
            self._prompts = Prompts(model.sizes, rows if paged else 0, self._device)
        self._scale = model.sizes.head_dim**-0.5
        self._graphs: dict[int, tuple[Any, torch.Tensor]] | None = {} if graphs else None
        self._pool: Any = None
        self._decode = _Numbers(store.slots, store.slots, self._device)
        most = max(budget, store.slots, 2 * PREFILL_TOKENS)
        self._mixed = _Numbers(most, store.slots, self._device)
        self._tokens = torch.zeros(store.slots, dtype=torch.int64, pin_memory=self._gpu)

    # ---- attention -------------------------------------------------------------------------------

    def write(self, layer: int, key: torch.Tensor, value: torch.Tensor, batch: _Batch) -> None:
        """Stores the rows of the new tokens."""
        fused.write_rows(key, value, *self.store.layers[layer], batch.rows, batch.places)

    def __call__(self, q: torch.Tensor, layer: int, batch: _Batch) -> torch.Tensor:
        """Computes attention for the new tokens, with one call for each part."""
        found = [self._attend(q[part.tokens], layer, part) for part in batch.parts]
        return found[0] if len(found) == 1 else torch.cat(found)

    def _attend(self, q: torch.Tensor, layer: int, part: _Part) -> torch.Tensor:
        table = self.store.table
        layers = self.store.layers if part.table is None or table is None else table.layers
        if self._call is None:
            return self._on_cpu(q, *layers[layer], part)
        if part.prompts and self._prompts is not None:
            return self._prompts(q, *layers[layer])
        out: torch.Tensor = self._call(q, *layers[layer], part, self._scale, part.table)
        return out

    def _on_cpu(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, part: _Part
    ) -> torch.Tensor:
        out, at = [], 0
        for number, work in enumerate(part.works):
            if part.table is None:
                keys, values = k[work.slot, : work.end], v[work.slot, : work.end]
            else:
                rows = torch.arange(work.end)
                where = (part.table[number].long()[rows // k.shape[1]], rows % k.shape[1])
                keys, values = k[where], v[where]
            new = q[None, at : at + len(work.ids)]
            at += len(work.ids)
            out.append(sdpa.causal(new, keys[None], values[None], self._scale)[0])
        return torch.cat(out)

    # ---- steps -----------------------------------------------------------------------------------

    @torch.inference_mode()
    def launch(self, works: list[Work]) -> Launched:
        """Launches a step; its rows must already have memory.

        Requests with few new tokens must come first in `works`.
        """
        self.store.upload()
        if self._graphs is not None and all(len(work.ids) == 1 for work in works):
            logits = self._replay(works, self._graphs)
        else:
            logits = self._eager(works)
        logits = logits[: len(works)]  # drop the graph's padding
        self._tokens[: len(works)].copy_(logits.argmax(dim=1), non_blocking=True)
        if not self._gpu:
            return Launched(logits, lambda: None)
        cuda: Any = torch.cuda
        event = cuda.Event()
        event.record()
        return Launched(logits, event.synchronize)

    def _send(self, numbers: _Numbers, works: Sequence[Work], few: int) -> None:
        """Computes and sends a step's inputs; the first `few` requests form the first part."""
        counts = np.array([len(work.ids) for work in works], dtype=np.int32)
        slots = np.array([work.slot for work in works], dtype=np.int32)
        used = np.array([work.end for work in works], dtype=np.int32)
        starts = np.zeros(len(works) + 1, dtype=np.int32)
        np.cumsum(counts, out=starts[1:])
        total = int(starts[-1])
        shift = np.repeat(used - starts[1:], counts)
        positions = np.arange(total, dtype=np.int32) + shift
        rows, places = self.store.where(np.repeat(slots, counts), positions)
        ids = works[0].ids if len(works) == 1 else np.concatenate([work.ids for work in works])
        numbers.send(
            ids=ids,
            positions=positions,
            rows=rows,
            places=places,
            index=slots,
            used=used,
            starts=starts,
            later=starts[few:] - starts[few],
        )

    def _part(
        self,
        there: dict[str, torch.Tensor],
        works: Sequence[Work],
        first: int,
        tokens: slice,
        paged: bool,
        width: int,
        *,
        prompts: bool = False,
        max_kv: int = 0,
    ) -> _Part:
        """Creates the part of a step that handles the requests in `works`.

        first: index within the step of the first of these requests.
        max_kv: upper bound on the rows of a request; 0 for the longest request's rows.
        """
        end = first + len(works)
        index = there["index"][first:end]
        table = None
        if paged:
            assert self.store.table is not None, "the store has no block table"
            table = self.store.table.of(index, width)
        if prompts and self._prompts is not None:
            self._prompts.plan(works, table)
        return _Part(
            tokens,
            there["starts" if first == 0 else "later"][: len(works) + 1],
            there["used"][first:end],
            index,
            max(len(work.ids) for work in works),
            max_kv or max(work.end for work in works),
            table,
            works,
            prompts,
        )

    def _width(self, works: Sequence[Work]) -> int:
        """Returns the width of the block table that these requests need.

        It is a power of two, so that few widths occur, but at most the table's width.
        """
        table = self.store.table
        if table is None:
            return 0
        needed = -(-max(work.end for work in works) // table.rows)
        return min(1 << (needed - 1).bit_length(), table.width)

    def _prefills(self, work: Work) -> bool:
        """Returns whether a request can use the prefill kernel, which may read past its end."""
        if len(work.ids) <= PREFILL_TOKENS:
            return False
        if self.kernels.prefill == "paged" or self.store.table is None:
            return True
        end = self.kernels.reads.end(work.end, self.store.longest)
        return end <= self.store.readable(work.slot)

    def _eager(self, works: list[Work]) -> torch.Tensor:
        late = [self._prefills(work) for work in works]
        few = late.index(True) if True in late else len(works)
        if not all(late[few:]):
            few = len(works)  # the two kinds are mixed, so all requests use the decoding kernel
        self._send(self._mixed, works, few)
        there = self._mixed.there()
        total = sum(len(work.ids) for work in works)
        middle = sum(len(work.ids) for work in works[:few])
        parts = []
        for first, some, tokens, how, prompts in (
            (0, works[:few], slice(0, middle), self.kernels.decode, False),
            (few, works[few:], slice(middle, total), self.kernels.prefill, True),
        ):
            if some:
                width, paged = self._width(some), how == "paged"
                parts.append(self._part(there, some, first, tokens, paged, width, prompts=prompts))
        return self._model(there, total, len(works), parts)

    def _model(
        self, there: dict[str, torch.Tensor], tokens: int, requests: int, parts: list[_Part]
    ) -> torch.Tensor:
        batch = _Batch(
            there["positions"][:tokens],
            there["starts"][: requests + 1],
            there["rows"][:tokens],
            there["places"][:tokens],
            parts,
        )
        return self.model(there["ids"][:tokens].long(), self, batch)

    def _replay(
        self, works: list[Work], graphs: dict[int, tuple[Any, torch.Tensor]]
    ) -> torch.Tensor:
        count = len(works)
        fitting = [size for size in _SIZES if count <= size <= self.store.slots]
        size = fitting[0] if fitting else self.store.slots
        padded = works + [works[-1]] * (size - count)
        self._send(self._decode, padded, size)
        there = self._decode.there()

        def forward() -> torch.Tensor:
            width = self.store.table.width if self.store.table is not None else 0
            paged = self.kernels.decode == "paged"
            longest = self.store.longest  # a graph must be valid for every length
            part = self._part(there, padded, 0, slice(0, size), paged, width, max_kv=longest)
            return self._model(there, size, size, [part])

        if size not in graphs:
            logits = forward()  # this run is the step itself and loads the kernels for the capture
            graph: Any = torch.cuda.CUDAGraph()
            torch.cuda.synchronize(self._device)
            # Other threads may call the driver during the capture: a cache's worker maps pages.
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                kept = forward()
            self._pool = graph.pool()
            graphs[size] = (graph, kept)
            return logits
        graph, logits = graphs[size]
        graph.replay()
        return logits

    def warm_up(self) -> None:
        """Runs prefill and decoding once, and captures a graph of each size that fits in memory."""
        slots: list[int] = []
        token = np.zeros(1, dtype=np.int32)
        prompt = np.zeros(PREFILL_TOKENS + 1, dtype=np.int32)
        length = len(prompt)
        while (taken := self.store.take(prompt)) is not None:
            slots.append(taken[0])
            if not self.store.hold(slots, [length] * len(slots)):
                self.store.release(slots.pop())
                break
        if slots:
            self.launch([Work(slots[0], 0, prompt)]).wait()
        if len(slots) > 1:
            self.launch([Work(slots[0], length - 1, token), Work(slots[-1], 0, prompt)]).wait()
        for size in (*_SIZES, len(slots)):
            if self._graphs is not None and 0 < size <= len(slots):
                for _ in range(2):
                    self.launch([Work(slot, length - 1, token) for slot in slots[:size]]).wait()
        for slot in slots:
            self.store.release(slot)
        self.store.settle()

    def close(self) -> None:
        """Drops the CUDA graphs, which keep the store's tensors alive."""
        self._graphs = None


def _call(library: str) -> Any:
    """Returns a function that runs a kernel of `library` on a part of a step."""
    if library != "fa2":
        return flash.fa3_call()

    def fa2(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, part: Any, scale: float, table: None
    ) -> torch.Tensor:
        return flash.fa2(q, k, v, part, scale)

    return fa2
