# SPDX-License-Identifier: MIT
"""Attention kernels that read a request's rows contiguously, or in blocks listed in a table."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Protocol, cast

from pyvmem.bench import fa3

if TYPE_CHECKING:
    import torch

__all__ = [
    *("CASES", "SETS", "TINY_CASES", "TINY_SETS"),
    *("Call", "Case", "Fa2", "Fa3", "Gather", "Kernel", "of_slots"),
]

Call = Callable[["torch.Tensor", "torch.Tensor", "torch.Tensor"], "torch.Tensor"]
"""Maps queries ``[tokens, heads, dim]``, keys and values to an output shaped like the queries."""


@dataclass(frozen=True)
class Case:
    """A batch of equally long requests.

    Attributes:
        name: the case's name in row ids.
        what: description of the case.
        batch: number of requests.
        q_len: number of new tokens per request, which are its last rows.
        kv_len: number of rows per request.
        tuned: whether to search for the best number of splits; otherwise the kernel chooses it.
    """

    name: str
    what: str
    batch: int
    q_len: int
    kv_len: int
    tuned: bool = False
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128

    @property
    def decodes(self) -> bool:
        """True if each request has one new token."""
        return self.q_len == 1

    @property
    def elements(self) -> int:
        """The number of elements in the keys; the values have the same number."""
        return self.batch * self.kv_len * self.kv_heads * self.head_dim

    @property
    def nbytes(self) -> int:
        """The size in bytes of the bfloat16 keys and values, all of which decoding reads."""
        return 2 * 2 * self.elements


_K = 1024
CASES = (
    Case("decode_b1_16k", "decode, 1 request of 16K", 1, 1, 16 * _K),
    Case("decode_b1_16k_tuned", "decode, 1 request of 16K, best splits", 1, 1, 16 * _K, True),
    Case("decode_b16_16k", "decode, 16 requests of 16K", 16, 1, 16 * _K),
    Case("decode_b32_16k", "decode, 32 requests of 16K", 32, 1, 16 * _K),
    Case("decode_b128_4k", "decode, 128 requests of 4K", 128, 1, 4 * _K),
    Case("prefill_16k", "prefill of 16K", 1, 16 * _K, 16 * _K),
    Case("prefill_64k", "prefill of 64K", 1, 64 * _K, 64 * _K),
    Case("chunk_2k_64k", "chunk of 2K at the end of 64K", 1, 2 * _K, 64 * _K),
    Case("chunks_512_32k", "8 chunks of 512 at the end of 32K", 8, 512, 32 * _K),
)


def _by_heads() -> tuple[Case, ...]:
    """Returns decoding and prefill cases, from one KV head per query head to a single KV head."""
    cases = []
    for name, what, heads, kv_heads in (
        ("mha", "MHA, 32 KV heads", 32, 32),
        ("llama", "Llama-3-8B's heads, 32 to 8", 32, 8),
        ("yi_6b", "Yi-6B's heads, 32 to 4", 32, 4),
        ("yi_34b", "Yi-34B's heads, 56 to 8", 56, 8),
        ("mqa", "MQA, 1 KV head", 32, 1),
    ):
        shape = (False, heads, kv_heads)
        cases.append(Case(f"decode_{name}", f"decode, 16 of 8K, {what}", 16, 1, 8 * _K, *shape))
        cases.append(
            Case(f"prefill_{name}", f"prefill of 16K, {what}", 1, 16 * _K, 16 * _K, *shape)
        )
    return tuple(cases)


SETS: dict[str, tuple[Case, ...]] = {
    "base": CASES,
    "heads": _by_heads(),
    "long": tuple(
        Case(f"prefill_{n}k", f"prefill of {n}K", 1, n * _K, n * _K) for n in (32, 128, 192)
    ),
    # 16K prompts, part of which is already in the cache; with "none", all tokens are computed.
    "prefix": tuple(
        Case(
            f"prefix_{name}",
            f"2 prompts of 16K, {name} of each prompt shared",
            2,
            new * _K,
            16 * _K,
        )
        for name, new in (("none", 16), ("half", 8), ("most", 2))
    ),
}
TINY_CASES = (
    Case("decode_b1_1k_tuned", "decode, 1 request of 1K, best splits", 1, 1, _K, True, 4, 2),
    Case("decode_b2_1k", "decode, 2 requests of 1K", 2, 1, _K, False, 4, 2),
    Case("prefill_512", "prefill of 512", 1, 512, 512, False, 4, 2),
    Case("chunks_128_512", "2 chunks of 128 at the end of 512", 2, 128, 512, False, 4, 2),
)


TINY_SETS: dict[str, tuple[Case, ...]] = {
    "base": TINY_CASES,
    "heads": tuple(
        Case(
            f"{phase}_{name}", f"{phase}, 2 of 512, {kv_heads} KV heads of 4", 2, *rows, 4, kv_heads
        )
        for phase, rows in (("decode", (1, 512, False)), ("prefill", (512, 512, False)))
        for name, kv_heads in (("mha", 4), ("mqa", 1))
    ),
    "long": (Case("prefill_1k", "prefill of 1K", 1, _K, _K, False, 4, 2),),
    "prefix": (
        Case(
            "prefix_most", "2 prompts of 512, most of each prompt shared", 2, 64, 512, False, 4, 2
        ),
    ),
}


class Kernel(Protocol):
    """An attention kernel, in contiguous and paged forms.

    Attributes:
        name: the kernel's name in row ids.
        blocks: the block sizes to compare, in tokens.
    """

    name: str
    blocks: tuple[int, ...]

    def splits(self, case: Case) -> tuple[int, ...]:
        """Returns the split counts to try for a request's rows; 0 lets the kernel choose."""

    def contiguous(self, case: Case, splits: int) -> Call:
        """Returns a callable that takes keys and values ``[batch, kv_len, kv_heads, dim]``."""

    def paged(self, case: Case, table: torch.Tensor, splits: int) -> Call:
        """Returns a callable that takes keys and values ``[blocks, block, kv_heads, dim]``.

        `table`: each request's blocks, int32 ``[batch, blocks per request]``.
        """

    def slots(self, case: Case) -> Call:
        """Returns a callable that runs `pyvmem.attention` on a cache's slots; see `of_slots`."""


def of_slots(prefill: str, decode: str, case: Case, device: torch.device) -> Call:
    """Returns a callable that runs one of `pyvmem.attention`'s kernels.

    The kernel is `prefill` or `decode`, depending on the case. The callable accepts keys and values
    ``[batch, rows, kv_heads, dim]`` as a cache stores them, which are strided if a tensor holds the
    rows of several layers.
    """
    from pyvmem.attention.batch import Batch, Part
    from pyvmem.attention.kernels import KERNELS

    config = SimpleNamespace(max_batch=case.batch, max_seq_len=case.kv_len, window=0)
    # This stands in for a cache whose rows are all mapped. A batch uses no other attributes of it.
    cache: Any = SimpleNamespace(
        config=config, safe_overread=True, readable_rows=lambda ids: [case.kv_len] * len(ids)
    )
    each = ([case.q_len] * case.batch, [case.kv_len] * case.batch)
    batch = Batch([Part((cache,))], range(case.batch), *each, device)
    run = KERNELS[decode if case.decodes else prefill].run

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return cast("torch.Tensor", run(q, k, v, batch, case.head_dim**-0.5))

    return call


class Fa3:
    """FlashAttention-3, called through vLLM's op. Raises the same errors as `fa3.load`."""

    name = "fa3"
    blocks: tuple[int, ...] = (16, 64, 128, 256)

    def __init__(self, source: Path | None, device: torch.device) -> None:
        self._op = fa3.load(source, device)
        self._device = device

    def splits(self, case: Case) -> tuple[int, ...]:
        """Returns the values of the op's `num_splits` to try."""
        return (0, 1, 2, 4, 8, 16, 32) if case.tuned else (0,)

    def contiguous(self, case: Case, splits: int) -> Call:
        """Returns a callable that runs the op on a batch of slots."""
        return self._call(case, None, splits)

    def paged(self, case: Case, table: torch.Tensor, splits: int) -> Call:
        """Returns a callable that runs the op with a page table."""
        return self._call(case, table, splits)

    def slots(self, case: Case) -> Call:
        """Returns a function that calls the op on a batch of slots; decoding uses a page table."""
        return of_slots("fa3", "fa3-paged", case, self._device)

    def _call(self, case: Case, table: torch.Tensor | None, splits: int) -> Call:
        import torch

        starts = torch.arange(case.batch + 1, dtype=torch.int32, device=self._device) * case.q_len
        used = torch.full((case.batch,), case.kv_len, dtype=torch.int32, device=self._device)

        def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            return fa3.call(self._op, q, k, v, starts, used, case.q_len, case.kv_len, table, splits)

        return call


class Fa2:
    """FlashAttention-2, called through torch's op, which has no paged form.

    Raises:
        ValueError: the device is not a GPU.
    """

    name = "fa2"
    blocks: tuple[int, ...] = ()

    def __init__(self, device: torch.device) -> None:
        if device.type != "cuda":
            raise ValueError("needs a GPU")
        self._device = device

    def splits(self, case: Case) -> tuple[int, ...]:
        """Returns only 0, because the kernel always chooses the number of splits."""
        return (0,)

    def contiguous(self, case: Case, splits: int) -> Call:
        """Returns a callable for the op's variable-length form; requests may start anywhere."""
        return self.slots(case)

    def paged(self, case: Case, table: torch.Tensor, splits: int) -> Call:
        """Raises NotImplementedError: the op has no paged form."""
        raise NotImplementedError("torch's FlashAttention-2 does not accept a block table")

    def slots(self, case: Case) -> Call:
        """Returns a callable for the op's variable-length form; a layer's rows may be strided."""
        return of_slots("fa2", "fa2", case, self._device)


class Gather:
    """torch's SDPA, which runs everywhere. It has no paged form, so blocks are gathered first."""

    name = "sdpa"
    blocks: tuple[int, ...] = (16, 64)

    def splits(self, case: Case) -> tuple[int, ...]:
        """Returns 0 and 1, which have the same effect: SDPA never splits."""
        return (0, 1) if case.tuned else (0,)

    def contiguous(self, case: Case, splits: int) -> Call:
        """Returns a callable that runs SDPA once for the whole batch."""
        import torch
        from torch.nn.functional import scaled_dot_product_attention

        rows, columns = torch.arange(case.q_len), torch.arange(case.kv_len)
        seen = columns <= rows[:, None] + (case.kv_len - case.q_len)

        def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            shape = (case.batch, case.q_len, case.heads, case.head_dim)
            found = scaled_dot_product_attention(
                q.view(shape).transpose(1, 2),
                k.transpose(1, 2),
                v.transpose(1, 2),
                attn_mask=None if case.decodes else seen.to(q.device),
                enable_gqa=True,
            )
            return found.transpose(1, 2).reshape(q.shape)

        return call

    def paged(self, case: Case, table: torch.Tensor, splits: int) -> Call:
        """Returns a callable that gathers the blocks, then runs the contiguous form."""
        whole = self.contiguous(case, splits)
        shape = (case.batch, case.kv_len, case.kv_heads, case.head_dim)
        order = table.flatten().long()

        def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            return whole(q, k[order].view(shape), v[order].view(shape))

        return call

    def slots(self, case: Case) -> Call:
        """Returns a callable for all slots of the batch, which are adjacent and equally long."""
        import torch

        return of_slots("sdpa", "sdpa", case, torch.device("cpu"))
