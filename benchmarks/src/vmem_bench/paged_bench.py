# SPDX-License-Identifier: MIT
"""Times and checks one attention kernel, contiguous and paged, over two kinds of memory.

It also times the calls that `pyvmem.attention` makes for a cache: over slots with one tensor per
layer, and over slots whose tensor holds the rows of several layers, so that a layer's rows are
strided.

Decoding calls are measured in a CUDA graph of several calls, each over a different part of the
memory, like the layers of a model, because the GPU would finish single calls faster than the CPU
can launch them.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from pyvmem.bench.buffers import Buffers
from pyvmem.bench.record import Book, Part
from pyvmem.bench.timing import Deadline, interleave, quiet
from pyvmem.bench.torch_timer import captured, timer
from vmem_bench.command import WrongResult
from vmem_bench.paged_kernels import Call, Case, Kernel

if TYPE_CHECKING:
    import torch

__all__ = ["GROUP", "OURS", "SLOTS", "THEIRS", "PagedBench"]

OURS = ("random0", "random1")  # names of tensors in `Buffers`
THEIRS = ("malloc0", "malloc1")
SLOTS = {"slots": "slots", "layered": "slots of layers in one tensor"}
GROUP = 8  # maximum number of layers in one tensor
_LAYERS = 16  # maximum number of decoding calls in one sample
_TOLERANCE = 0.03  # relative to a head's largest output: bfloat16 has 8 significant bits


@dataclass
class _Form:
    """One form of a kernel on a buffer, for one case, with the function to time."""

    row: str
    what: str
    system: str
    work: Callable[[], torch.Tensor]
    calls: int
    splits: int


class PagedBench:
    """Measures one kernel on all buffers, which hold the same values.

    Args:
        part: receives the rows ``CASE/contiguous/MEMORY``, ``CASE/pagedBLOCK/MEMORY``, and for
            our pages ``CASE/slots/MEMORY`` and ``CASE/layered/MEMORY``.
        kernel: the kernel, in both forms.
        buffers: buffers that each have room for the largest case's keys and values.
        quick: whether to take only a few samples.
    """

    def __init__(self, part: Part, kernel: Kernel, buffers: Buffers, quick: bool) -> None:
        self.part, self.kernel, self.buffers, self.quick = part, kernel, buffers, quick
        self.device = buffers.device
        self._clock = timer(self.device)
        self._graphs: list[Any] = []  # with the captured functions, which hold the tensors
        self._graph_why = ""
        self._checked: list[float] = []

    def measure(self, case: Case, deadline: Deadline) -> None:
        """Adds the rows for a case.

        Raises:
            WrongResult: a form computes a wrong result.
        """
        import torch

        generator = torch.Generator(device=self.device).manual_seed(4)
        q = torch.empty(
            (case.batch * case.q_len, case.heads, case.head_dim),
            dtype=torch.bfloat16,
            device=self.device,
        ).normal_(generator=generator)
        self._checked.clear()
        try:
            forms = [*self._contiguous(case, q), *self._paged(case, q, generator)]
            if not case.tuned:  # over slots, the kernel always chooses the number of splits
                forms += self._slots(case, q)
            self.part.notes.append(
                f"{case.name}: {len(self._checked)} outputs checked, the largest difference is "
                f"{max(self._checked):.2g} times the largest output of its head"
            )
            if case.tuned:
                chosen = {form.row.split("/")[1]: str(form.splits) for form in forms}
                splits = ", ".join(f"{how} {number}" for how, number in chosen.items())
                self.part.notes.append(f"{case.name}, splits (0: the kernel's own): {splits}")
            book = Book(self.part)
            turns = []
            for form in forms:
                notes = [f"{form.splits} splits"] if case.tuned else []
                notes += [f"a sample is the mean of {form.calls} calls"] if case.decodes else []
                samples = book.samples(
                    form.row,
                    form.what,
                    form.system,
                    unit="ms",
                    note=", ".join(notes),
                    nbytes=case.nbytes if case.decodes else 0,
                )
                turns.append(partial(self._turn, form, samples.rounds))
            with quiet():
                interleave(turns, 3 if self.quick else 25, deadline)
            book.close()
        finally:
            self._graphs.clear()

    def _turn(self, form: _Form, into: list[list[float]]) -> None:
        into.append([self._clock(form.work) / form.calls])

    # ---- forms -----------------------------------------------------------------------------------

    def _contiguous(self, case: Case, q: torch.Tensor) -> list[_Form]:
        shape = (case.batch, case.kv_len, case.kv_heads, case.head_dim)
        parts = {name: self._layers(case, name, shape) for name in (*OURS, *THEIRS)}
        reference = self._reference(case, q)
        splits = self._best(case, q, parts[THEIRS[0]], partial(self.kernel.contiguous, case))
        call = self.kernel.contiguous(case, splits)
        for name, layers in parts.items():
            self._check(f"{case.name}, contiguous, {name}", call(q, *layers[0]), reference)
        return [
            self._form(case, "contiguous", name, call, q, layers, splits)
            for name, layers in parts.items()
        ]

    def _paged(self, case: Case, q: torch.Tensor, generator: torch.Generator) -> list[_Form]:
        import torch

        forms = []
        plain = self.kernel.contiguous(case, 0)
        shape = (case.batch, case.kv_len, case.kv_heads, case.head_dim)
        for block in self.kernel.blocks:
            each = case.kv_len // block
            order = torch.randperm(case.batch * each, device=self.device, generator=generator)
            table = order.to(torch.int32).view(case.batch, each)
            cut = (case.batch * each, block, case.kv_heads, case.head_dim)
            parts = {name: self._layers(case, name, cut) for name in THEIRS}
            make = partial(self.kernel.paged, case, table)
            splits = self._best(case, q, parts[THEIRS[0]], make)
            call = make(splits)
            k, v = (one[order].view(shape) for one in parts[THEIRS[0]][0])
            wanted = plain(q, k, v).clone()
            del k, v
            for name, layers in parts.items():
                what = f"{case.name}, blocks of {block}, {name}"
                self._check(what, call(q, *layers[0]), wanted)
                forms.append(self._form(case, f"paged{block}", name, call, q, layers, splits))
        return forms

    def _slots(self, case: Case, q: torch.Tensor) -> list[_Form]:
        forms = []
        plain = self.kernel.contiguous(case, 0)
        call = self.kernel.slots(case)
        for how in SLOTS:
            wanted: torch.Tensor | None = None
            for name in OURS:
                layers = self._slotted(case, name, how == "layered")
                if not layers:
                    continue
                if wanted is None:
                    k, v = (one.contiguous() for one in layers[0])
                    wanted = plain(q, k, v).clone()
                    del k, v
                self._check(f"{case.name}, {how}, {name}", call(q, *layers[0]), wanted)
                forms.append(self._form(case, how, name, call, q, layers, 0))
        return forms

    def _slotted(
        self, case: Case, memory: str, layered: bool
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Returns the keys and values of a cache's layers.

        layered: whether all layers share one tensor instead of having one each; if only one layer
        fits, the list is empty.
        """
        shape = (case.batch, case.kv_len, case.kv_heads, case.head_dim)
        if not layered:
            return self._layers(case, memory, shape)
        flat, n = self.buffers.tensors[memory], case.elements
        half = flat.numel() // 2
        group = min(GROUP, half // n)
        if group < 2:
            return []
        wide = (*shape[:2], group, *shape[2:])
        k, v = (flat[at : at + group * n].view(wide) for at in (0, half))
        return [(k[:, :, i], v[:, :, i]) for i in range(group if case.decodes else 1)]

    def _layers(
        self, case: Case, memory: str, shape: tuple[int, ...]
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Returns pairs of keys and values: several parts of a buffer for decoding, else one."""
        flat, n = self.buffers.tensors[memory], case.elements
        half = flat.numel() // 2
        count = min(_LAYERS, half // n) if case.decodes else 1
        return [
            (
                flat[i * n : (i + 1) * n].view(shape),
                flat[half + i * n : half + (i + 1) * n].view(shape),
            )
            for i in range(count)
        ]

    def _form(
        self,
        case: Case,
        how: str,
        memory: str,
        call: Call,
        q: torch.Tensor,
        layers: Sequence[tuple[torch.Tensor, torch.Tensor]],
        splits: int,
    ) -> _Form:
        words = SLOTS.get(how, "contiguous" if how == "contiguous" else f"blocks of {how[5:]}")
        work = self._work(call, q, layers, graph=case.decodes)
        row = f"{case.name}/{how}/{memory}"
        return _Form(row, f"{case.what}: {words}", memory, work, len(layers), splits)

    def _work(
        self,
        call: Call,
        q: torch.Tensor,
        layers: Sequence[tuple[torch.Tensor, torch.Tensor]],
        *,
        graph: bool,
    ) -> Callable[[], Any]:
        """Returns a function that makes all calls in a sample, as a CUDA graph if possible."""

        def plain() -> torch.Tensor:
            for k, v in layers:
                out = call(q, k, v)
            return out

        if not graph or self.device.type != "cuda" or self._graph_why:
            return plain
        work, self._graph_why = captured(plain, self.device)
        if self._graph_why:
            self.part.notes.append(f"no CUDA graph: {self._graph_why}")
        else:
            self._graphs.append((work, plain))
        return work

    def _best(
        self,
        case: Case,
        q: torch.Tensor,
        layers: Sequence[tuple[torch.Tensor, torch.Tensor]],
        make: Callable[[int], Call],
    ) -> int:
        """Returns the number of splits with the shortest median time."""
        candidates = self.kernel.splits(case)
        if len(candidates) == 1:
            return candidates[0]
        medians = {}
        for splits in candidates:
            work = self._work(make(splits), q, layers, graph=case.decodes)
            times = [self._clock(work) for _ in range(3 if self.quick else 9)]
            medians[splits] = statistics.median(times)
        return min(medians, key=lambda splits: medians[splits])

    # ---- results ---------------------------------------------------------------------------------

    def _reference(self, case: Case, q: torch.Tensor) -> torch.Tensor:
        """Returns the contiguous form's output after checking the last tokens of two requests."""
        shape = (case.batch, case.kv_len, case.kv_heads, case.head_dim)
        k, v = self._layers(case, THEIRS[0], shape)[0]
        out = self.kernel.contiguous(case, 0)(q, k, v).clone()
        group = case.heads // case.kv_heads
        for request in (0, case.batch - 1):
            token = (request + 1) * case.q_len - 1
            heads = q[token].float().view(case.kv_heads, group, case.head_dim)
            keys = k[request].float().transpose(0, 1)
            scores = heads @ keys.transpose(1, 2) * case.head_dim**-0.5
            wanted = scores.softmax(-1) @ v[request].float().transpose(0, 1)
            what = f"{case.name}, request {request} against float32"
            self._check(what, out[token], wanted.view(case.heads, case.head_dim))
        return out

    def _check(self, what: str, out: torch.Tensor, wanted: torch.Tensor) -> None:
        """Raises WrongResult if an output differs too much from the expected output.

        Each head of each token is compared separately, because later tokens' outputs are smaller.
        """
        wanted = wanted.float()
        difference = (out.float() - wanted).abs().amax(-1)
        worst = float((difference / wanted.abs().amax(-1).clamp_min(1e-9)).max())
        self._checked.append(worst)
        if not worst <= _TOLERANCE:  # also catches NaN
            raise WrongResult(f"{what}: differs by {worst:.2g} times the head's largest output")
