# SPDX-License-Identifier: MIT
"""Measures unmodified attention kernels and a plain read on vmem pages and cudaMalloc memory.

Memory placement alone changes a kernel's time by several percent, so the baseline is allocated
several times and the spread is reported with the ratio. Every buffer holds the same values, and the
outputs are compared bit for bit. Times are measured on the GPU with events, one call per sample;
the buffers take turns.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pyvmem.bench import fa3
from pyvmem.bench.buffers import Buffers, malloc_names, vmem_names
from pyvmem.bench.kernels import Kernels
from pyvmem.bench.record import Book, Part
from pyvmem.bench.setting import GB, KB, MB, Setting
from pyvmem.bench.timing import Deadline, interleave, quiet
from pyvmem.bench.torch_timer import timer

if TYPE_CHECKING:
    import torch

__all__ = ["CASES", "run", "run_read"]


@dataclass(frozen=True)
class _Case:
    name: str
    what: str
    batch: int
    q_len: int
    kv_len: int
    where: str = "full"  # "full": measured on a GPU; "small": on a GPU with --quick, and on the CPU

    heads = 32
    kv_heads = 8
    head_dim = 128

    @property
    def elements(self) -> int:
        """Number of elements in K; V has the same number."""
        return self.batch * self.kv_len * self.kv_heads * self.head_dim


CASES = (
    _Case("decode_b64_8k", "decode, 64 requests of 8K", 64, 1, 8192),
    _Case("decode_b32_32k", "decode, 32 requests of 32K", 32, 1, 32768),
    _Case("prefill_32k", "causal prefill of 32K", 1, 32768, 32768),
    _Case("decode_b2_1k", "decode, 2 requests of 1K", 2, 1, 1024, "small"),
)
_Call = Callable[["torch.Tensor", "torch.Tensor"], "torch.Tensor"]


def _why_not(setting: Setting) -> str:
    """Returns the reason this machine cannot measure these rows, or "" if it can."""
    try:
        import torch
    except ImportError as error:
        return f"torch cannot be imported: {error}"
    if 64 * KB not in setting.pages:
        return f"{setting.system} has no pages of 64 KB"
    if setting.system != "host" and setting.cuda is None:
        return setting.cuda_why
    if setting.system != "host" and not torch.cuda.is_available():
        return "torch has no CUDA here"
    return ""


def _device(setting: Setting) -> torch.device:
    import torch

    return torch.device("cpu" if setting.system == "host" else f"cuda:{setting.device}")


def run(setting: Setting, part: Part, deadline: Deadline) -> None:
    """Measures the rows attention/KERNEL/CASE/MEMORY, where KERNEL is sdpa or fa3."""
    why = _why_not(setting)
    if why:
        part.not_run("*", why)
        return
    device = _device(setting)
    small = setting.quick or device.type == "cpu"
    cases = [c for c in CASES if c.where == ("small" if small else "full")]
    kernels: dict[str, Callable[[_Case], _Call]] = {"sdpa": lambda case: _sdpa(case, device)}
    try:
        kernels["fa3"] = _fa3(setting.fa3, device)
    except (OSError, RuntimeError, ValueError, AttributeError) as error:
        part.not_run("fa3/*", str(error).split("\n")[0])
    nbytes = max(c.elements for c in cases) * 2 * 2
    with setting.open() as context:
        buffers = Buffers(context, nbytes, 64 * KB, device)
        try:
            share = len(cases) * len(kernels)
            for kernel, make in kernels.items():
                for case in cases:
                    left = Deadline(deadline.left / share)
                    share -= 1
                    try:
                        _measure(setting, part, left, buffers, kernel, case, make(case))
                    except RuntimeError as error:
                        part.not_run(f"{kernel}/{case.name}", str(error).split("\n")[0])
        finally:
            buffers.close()


def _measure(
    setting: Setting,
    part: Part,
    deadline: Deadline,
    buffers: Buffers,
    kernel: str,
    case: _Case,
    call: _Call,
) -> None:
    import torch

    book, turns = Book(part), list[Callable[[], None]]()
    clock, on_gpu = timer(buffers.device), buffers.device.type == "cuda"
    shape = (case.batch, case.kv_len, case.kv_heads, case.head_dim)
    reference: torch.Tensor | None = None
    different: list[str] = []
    for name in (*malloc_names(), *vmem_names()):
        flat = buffers.tensors[name]
        k = flat[: case.elements].view(shape)
        v = flat[case.elements : 2 * case.elements].view(shape)
        out = call(k, v)
        if reference is None:
            reference = out
            if not bool(torch.isfinite(out).all()):
                raise RuntimeError("the output is not finite")
        elif not torch.equal(out, reference):
            different.append(name)
        samples = book.samples(
            f"{kernel}/{case.name}/{name}", f"{case.what}, {kernel}", name, unit="ms"
        )
        work = partial(call, k, v)
        turns.append(partial(_turn, clock, work, samples.rounds))
    with quiet():
        interleave(turns, setting.count(30 if on_gpu else 10, 2), deadline)
    book.close()
    state = (
        f"DIFFERENT bits from {', '.join(different)}" if different else "identical bits from all"
    )
    part.notes.append(f"{kernel} {case.name}: {state}")


def _turn(
    clock: Callable[[Callable[[], object]], float],
    work: Callable[[], object],
    into: list[list[float]],
) -> None:
    into.append([clock(work)])


def _sdpa(case: _Case, device: torch.device) -> _Call:
    """Returns a function that calls torch's scaled_dot_product_attention with the flash kernel."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    shape = (case.batch, case.heads, case.q_len, case.head_dim)
    q = torch.randn(shape, device=device, dtype=torch.bfloat16)

    def call(k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return torch.nn.functional.scaled_dot_product_attention(
                q,
                k.transpose(1, 2),
                v.transpose(1, 2),
                is_causal=case.q_len > 1,
                enable_gqa=True,
            )

    return call


def _fa3(source: Path | None, device: torch.device) -> Callable[[_Case], _Call]:
    """Returns a function that prepares a FlashAttention-3 case. Raises what `fa3.load` raises."""
    import torch

    op = fa3.load(source, device)

    def make(case: _Case) -> _Call:
        int32: dict[str, Any] = {"device": device, "dtype": torch.int32}
        shape = (case.batch * case.q_len, case.heads, case.head_dim)
        q = torch.randn(shape, device=device, dtype=torch.bfloat16)
        starts = torch.arange(case.batch + 1, **int32) * case.q_len
        used = torch.full((case.batch,), case.kv_len, **int32)

        def call(k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            return fa3.call(op, q, k, v, starts, used, case.q_len, case.kv_len)

        return call

    return make


def run_read(setting: Setting, part: Part, deadline: Deadline) -> None:
    """Measures the rows readbw/MEMORY: a kernel (on the CPU, torch.sum) reads every byte once."""
    why = _why_not(setting)
    if why:
        part.not_run("*", why)
        return
    device, book = _device(setting), Book(part)
    cpu = device.type == "cpu"
    size = 8 * MB if cpu else setting.count(4 * GB, 64 * MB)
    kernels = Kernels(setting.cuda) if setting.cuda is not None and not cpu else None
    try:
        with setting.open() as context:
            buffers = Buffers(context, size, 64 * KB, device)
            try:
                _read_all(setting, deadline, kernels, book, buffers)
            finally:
                buffers.close()
    finally:
        if kernels is not None:
            kernels.close()


def _read_all(
    setting: Setting, deadline: Deadline, kernels: Kernels | None, book: Book, buffers: Buffers
) -> None:
    import torch

    size = buffers.nbytes
    if kernels is not None:
        size -= size % kernels.chunk()
    by_clock = timer(torch.device("cpu"))
    turns: list[Callable[[], None]] = []
    for name in (*malloc_names(), *vmem_names()):
        samples = book.samples(name, "read once", name, unit="ms", nbytes=size)
        tensor = buffers.tensors[name]
        if kernels is not None:
            read = partial(kernels.read, tensor.data_ptr(), size)
            turns.append(partial(_gpu_read, read, samples.rounds))
        else:
            work = partial(torch.sum, tensor.view(torch.int32))
            turns.append(partial(_turn, by_clock, work, samples.rounds))
    with quiet():
        interleave(turns, setting.count(40 if kernels else 10, 3), deadline)
    book.close()


def _gpu_read(read: Callable[[], float], into: list[list[float]]) -> None:
    into.append([read() * 1e9])
