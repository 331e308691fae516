# SPDX-License-Identifier: MIT
"""The Triton kernels of `vmem_bench.fused`; importing this module requires Triton."""

# Triton evaluates annotations, so this module has no `from __future__ import annotations` and
# annotates only constexpr parameters.
import triton
import triton.language as tl

__all__ = ["rotate", "write_rows"]


@triton.jit  # type: ignore[untyped-decorator]
def rotate(  # type: ignore[no-untyped-def]
    heads,
    positions,
    table,
    token_stride,
    head_stride,
    HALF: tl.constexpr,
):
    """Rotates the pairs (i, i + HALF) of a token's head by the angles for its position."""
    token, head = tl.program_id(0), tl.program_id(1)
    lane = tl.arange(0, HALF)
    angles = table + tl.load(positions + token).to(tl.int64) * (2 * HALF)
    cos, sin = tl.load(angles + lane), tl.load(angles + HALF + lane)
    at = heads + token.to(tl.int64) * token_stride + head * head_stride
    first = tl.load(at + lane).to(tl.float32)
    second = tl.load(at + HALF + lane).to(tl.float32)
    kind = heads.dtype.element_ty
    tl.store(at + lane, (first * cos - second * sin).to(kind))
    tl.store(at + HALF + lane, (second * cos + first * sin).to(kind))


@triton.jit  # type: ignore[untyped-decorator]
def write_rows(  # type: ignore[no-untyped-def]
    key,
    value,
    keys,
    values,
    rows,
    places,
    key_stride,
    value_stride,
    head_stride,
    row_stride,
    place_stride,
    to_head_stride,
    WIDTH: tl.constexpr,
):
    """Writes a token's key and value for one KV head; `keys` and `values` are addresses."""
    kind = tl.pointer_type(key.dtype.element_ty)
    keys, values = keys.to(kind), values.to(kind)
    token, head = tl.program_id(0), tl.program_id(1)
    lane = tl.arange(0, WIDTH)
    row = tl.load(rows + token).to(tl.int64) * row_stride
    to = row + tl.load(places + token).to(tl.int64) * place_stride + head * to_head_stride + lane
    source = token.to(tl.int64)
    tl.store(keys + to, tl.load(key + source * key_stride + head * head_stride + lane))
    tl.store(values + to, tl.load(value + source * value_stride + head * head_stride + lane))
