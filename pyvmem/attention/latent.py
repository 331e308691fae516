# SPDX-License-Identifier: MIT
"""MLA: attention over one latent per token, given the up-projections of keys and values.

A head's keys are its up-projection of the latent, followed by the row's rotary elements; its values
are another up-projection. Attention can be computed in two ways, equal up to rounding:

- *absorbed*: the keys' projection is applied to the queries and the values' to the result, so that
  attention runs over the latents as the cache stores them. This takes more multiplications per
  (token, row) pair.
- *expanded*: a request's keys and values are computed from its latents, some heads at a time.

`expands_from` returns the number of new tokens at which expanding becomes cheaper.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch.nn.functional import pad

from pyvmem.attention.batch import Batch
from pyvmem.attention.sdpa import causal

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pyvmem.attention.kernels import Run

__all__ = ["UpProjections", "attend", "expands_from"]

_ELEMENTS = 1 << 26  # maximum number of elements expanded at once; heads are processed in blocks


class UpProjections(NamedTuple):
    """The up-projections of a layer.

    Attributes:
        key: ``[num_heads, nope, rank]``.
        value: ``[num_heads, v_head_dim, rank]``.
    """

    key: torch.Tensor
    value: torch.Tensor


def expands_from(up: UpProjections) -> int:
    """Returns the number of new tokens at which expanding a request's rows becomes cheaper.

    If `new` tokens attend to `rows` rows each, a head does these multiplications: absorbed,
    ``2 * rank + rotary`` per pair; expanded, ``nope + rotary + v_head_dim`` per pair, and
    ``rank * (nope + v_head_dim)`` once per row.
    """
    nope, rank = up.key.shape[1:]
    each = nope + up.value.shape[1]
    return rank * each // (2 * rank - each) + 1 if each < 2 * rank else 1 << 62


def attend(
    run: Run,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    batch: Batch,
    scale: float,
    window: int,
    up: UpProjections,
) -> torch.Tensor:
    """Computes attention over latents, absorbed or, for requests where that is cheaper, expanded.

    Returns ``[tokens, num_heads, v_head_dim]``.

    Args:
        run: the kernel that attends over latents.
        q: the new tokens of `batch`, ``[tokens, num_heads, nope + rotary]``.
        k: a layer's rows, ``[slots, rows, 1, rank + rotary]``.
        v: the same rows without the rotary elements.
        batch: the requests.
        scale: scale of the scores.
        window: number of tokens a token attends to; 0: all.
        up: the layer's up-projections, of the same dtype as `q`.
    """
    least = expands_from(up)

    def absorbed(q: torch.Tensor, batch: Batch) -> torch.Tensor:
        nope = up.key.shape[1]
        query = torch.cat([torch.einsum("thn,hnr->thr", q[..., :nope], up.key), q[..., nope:]], -1)
        return torch.einsum("thr,hvr->thv", run(query, k, v, batch, scale, window), up.value)

    if batch.max_q < least:
        return absorbed(q, batch)
    out = q.new_empty((*q.shape[:2], up.value.shape[1]))
    start = 0
    for reqid, new, length in zip(batch.reqids, batch.q_lens, batch.kv_lens, strict=True):
        if new >= least:
            first = max(0, length - new - window + 1) if window else 0
            some = slice(start, start + new)
            _expand(q[some], k[reqid, first:length, 0], up, scale, window, out[some])
        start += new
    few = _fewer(batch, least)
    if few is not None:
        tokens, rest = few
        out[tokens] = absorbed(q[tokens], rest)
    return out


def _fewer(batch: Batch, least: int) -> tuple[torch.Tensor, Batch] | None:
    """Returns the tokens and a batch of the requests with fewer than `least` new tokens.

    Computed once per step.
    """
    key = ("latent", least)
    if key not in batch.made:
        batch.made[key] = _split(batch, [i for i, new in enumerate(batch.q_lens) if new < least])
    found: tuple[torch.Tensor, Batch] | None = batch.made[key]
    return found


def _split(batch: Batch, those: Sequence[int]) -> tuple[torch.Tensor, Batch] | None:
    if not those:
        return None
    starts = [0]
    for new in batch.q_lens:
        starts.append(starts[-1] + new)
    tokens = [at for i in those for at in range(starts[i], starts[i + 1])]
    reqids, q_lens, kv_lens = (
        [one[i] for i in those] for one in (batch.reqids, batch.q_lens, batch.kv_lens)
    )
    rest = Batch(batch.parts, reqids, q_lens, kv_lens, batch.device)
    return torch.tensor(tokens, device=batch.device), rest


def _expand(
    q: torch.Tensor,
    rows: torch.Tensor,
    up: UpProjections,
    scale: float,
    window: int,
    out: torch.Tensor,
) -> None:
    """Computes one request's attention over its expanded rows, a block of heads at a time.

    Keys and values are padded to the same width, which SDPA's fast kernels require.
    """
    count, dim, width = q.shape[1], q.shape[2], max(q.shape[2], out.shape[2])
    nope, rank = up.key.shape[1:]
    latents, rotary = rows[:, :rank], rows[:, None, rank:]
    block = max(1, _ELEMENTS // (len(rows) * width))
    for first in range(0, count, block):
        some = slice(first, first + block)
        keys = q.new_zeros((len(rows), len(up.key[some]), width))
        keys[..., :nope] = _up(latents, up.key[some])
        keys[..., nope:dim] = rotary
        values = pad(_up(latents, up.value[some]), (0, width - out.shape[2]))
        queries = pad(q[:, some], (0, width - dim))
        found = causal(queries[None], keys[None], values[None], scale, window)
        out[:, some] = found[0, ..., : out.shape[2]]


def _up(latents: torch.Tensor, projection: torch.Tensor) -> torch.Tensor:
    """Multiplies ``[rows, rank]`` by ``[heads, dim, rank]``; returns ``[rows, heads, dim]``."""
    heads, dim, rank = projection.shape
    return (latents @ projection.reshape(-1, rank).T).view(-1, heads, dim)
