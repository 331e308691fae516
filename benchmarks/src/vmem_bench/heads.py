# SPDX-License-Identifier: MIT
"""The ``kernels`` part of `vmem bench models`: times each kernel of `pyvmem.attention`.

Each kernel runs on one layer of a cache, for every phase, head size and data type; a decode step
has 8 requests with one new token each. The outputs of all kernels are compared. The results also
state how many rows a kernel reads past a request's end and before its window.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from pyvmem.bench.record import Part
from pyvmem.bench.timing import Deadline, Samples, quiet
from pyvmem.bench.torch_timer import timer
from vmem_bench.command import Command, WrongResult

if TYPE_CHECKING:
    import torch

    from pyvmem.kvcache import KVCache

__all__ = ["NAME", "TITLE", "measure"]

NAME = "kernels"
TITLE = "Kernels by phase, head size and type"
FP8 = "float8_e4m3fn"
_WARM, _TIMES = 3, 20
# The largest allowed difference between two kernels' outputs, relative to the largest element. It
# is 0.05 for types not listed.
_TOLERANCE = {FP8: 0.25}


class _Case(NamedTuple):
    """The shape and data type of a cache layer and of its queries."""

    dtype: str
    head_dim: int
    heads: int = 32
    kv_heads: int = 8
    v_head_dim: int = 0
    """The number of elements of an MLA latent that form its value; 0 if values are separate."""

    @property
    def name(self) -> str:
        """The case's name in row ids."""
        return f"{self.dtype}/{self.head_dim}"


CASES = (
    *(_Case("bfloat16", width) for width in (64, 128, 256)),
    *(_Case(FP8, width) for width in (64, 128, 256)),
    _Case("bfloat16", 576, 16, 1, 512),
)
_SMALL = (_Case("float32", 32, 4, 2), _Case(FP8, 32, 4, 2), _Case("float32", 48, 4, 1, 32))


def measure(command: Command, part: Part, device: torch.device, left: Deadline) -> None:
    """Adds the rows for all cases."""
    from pyvmem.kvcache import KVCache, KVCacheConfig

    tokens = 96 if command.quick else command.args.tokens
    for case in _SMALL if command.quick else CASES:
        command.show(f"{NAME}: {case.name}")
        config = KVCacheConfig(
            1,
            case.kv_heads,
            case.head_dim,
            case.dtype,
            max_batch=8,
            max_seq_len=tokens + 256,
            page_size=command.page,
            tensors_per_layer=1 if case.v_head_dim else 2,
            overread_rows=191,
            overread_decode=True,
            low_watermark=0.0,
        )
        with KVCache(config, backend=command.backend, device=command.args.device) as cache:
            for _ in range(8):
                cache.alloc_reqid()
            if cache.step([tokens] * 8):
                part.not_run(f"*/{case.name}", "memory is short")
                continue
            _fill(cache, case)
            _measure(part, case, cache, device, tokens, left)
        command.write()


def _fill(cache: KVCache, case: _Case) -> None:
    """Fills every row that a kernel may read with random values."""
    import torch

    (rows, *_) = cache.slots.readable_rows([0])
    tensors = [cache.k(0)] if case.v_head_dim else [cache.k(0), cache.v(0)]
    with torch.inference_mode():
        for number, tensor in enumerate(tensors):
            dice = torch.Generator(tensor.device).manual_seed(number)
            for slot in range(tensor.shape[0]):
                made = torch.empty(
                    (rows, *tensor.shape[2:]), dtype=torch.float32, device=tensor.device
                ).normal_(generator=dice)
                eight = tensor.dtype.itemsize == 1
                new = made.to(tensor.dtype)
                where = tensor[slot, :rows]
                # Writing through an index runs a kernel; a plain copy might call CUDA's memcpy.
                index = torch.arange(rows, device=tensor.device)
                if eight:
                    where.view(torch.uint8)[index] = new.view(torch.uint8)
                else:
                    where[index] = new


def _measure(
    part: Part,
    case: _Case,
    cache: KVCache,
    device: torch.device,
    tokens: int,
    left: Deadline,
) -> None:
    import torch

    from pyvmem.attention import KERNELS, Attention
    from pyvmem.attention.kernels import probe
    from pyvmem.attention.layers import forms_of
    from pyvmem.errors import VMemError

    form = forms_of(cache, None, case.v_head_dim)[0]
    assert form is not None
    whys = probe(form, device)
    time = timer(device)
    dtype: Any = torch.bfloat16 if case.dtype == FP8 else getattr(torch, case.dtype)
    phases = {"prefill": ([0], [tokens]), "decode": (list(range(8)), [1] * 8)}
    first: dict[str, torch.Tensor] = {}
    # FlashInfer takes a minute to compile, so it runs last.
    for kernel in sorted(KERNELS, key=lambda name: name == "flashinfer"):
        why = whys[kernel] or ("" if left.allows() else "the deadline passed first")
        reads = KERNELS[kernel].reads(device)
        if why:
            part.not_run(f"{kernel}/{case.name}", why)
            continue
        try:
            attend = Attention(cache, kernel, v_head_dim=case.v_head_dim)
        except VMemError as error:
            part.not_run(f"{kernel}/{case.name}", str(error).splitlines()[0])
            continue
        for phase, (reqids, news) in phases.items():
            dice = torch.Generator(device).manual_seed(7)
            shape = (sum(news), case.heads, case.head_dim)
            q = torch.empty(shape, dtype=dtype, device=device).normal_(generator=dice)
            batch = attend.batch(reqids, news, [tokens] * len(reqids))
            samples = Samples()
            try:
                with quiet(), torch.inference_mode():
                    for _ in range(_WARM):
                        out = attend(q, 0, batch)
                    for _ in range(_TIMES):
                        samples.new_round().append(time(partial(attend, q, 0, batch)))
            except (RuntimeError, torch.OutOfMemoryError) as error:
                part.not_run(f"{kernel}/{phase}/{case.name}", str(error).splitlines()[0])
                continue
            requests = f"{len(reqids)} of {tokens:,}"
            what = f"{phase}, {requests}, heads of {case.head_dim}, {case.dtype}: {kernel}"
            entry = part.time(f"{kernel}/{phase}/{case.name}", what, kernel, samples)
            entry.update(
                past=reads.past, before=reads.before, phase=phase, kernel=kernel, tokens=tokens,
                head_dim=case.head_dim, dtype=case.dtype, latent=bool(case.v_head_dim),
            )  # fmt: skip
            _check(
                part, case, f"{kernel}/{phase}", out.float(), first.setdefault(phase, out.float())
            )
        attend.close()


def _check(part: Part, case: _Case, name: str, out: torch.Tensor, first: torch.Tensor) -> None:
    """Raises WrongResult if two kernels differ by more than rounding error."""
    difference = float((out - first).abs().max() / first.abs().max())
    if not difference <= _TOLERANCE.get(case.dtype, 0.05):  # also catches NaN
        raise WrongResult(
            f"{name}/{case.name} differs from the first kernel's output by {difference:.2g}"
        )
