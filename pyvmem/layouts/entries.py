# SPDX-License-Identifier: MIT
"""Estimates attention time from page-table entry size, cache size and layers per tensor.

A decode step sweeps all pages of a layer's tensors once per layer. A tensor shared by g layers is
swept g times, and each sweep reads 1/g of every page. An H100's TLBs cover about 8 GiB with 64 KB
entries: a larger sweep misses on every page, and the more layers share a page, the less data is
read per miss. Entries of 2 MB cover the whole card. The cache maps whole 2 MB blocks of a request
by such entries, whatever the page size.

The measurements are from benchmarks/results/footprint-h100.json, for decoding requests of 1,024
tokens. A test compares this module with them, and its results for mixed entries with
results/logs/h100-cache-entries.log.
"""

from __future__ import annotations

from bisect import bisect_left
from math import log2

__all__ = ["LARGE_ENTRY", "MEASURED_GROUPS", "attention_time"]

LARGE_ENTRY = 2 << 20
"""The number of bytes that one large entry of the GPU's page table maps."""

_Curve = tuple[tuple[float, float], ...]

# For each number of layers in a tensor: the GiB that a layer's attention sweeps, and its time
# relative to cudaMalloc memory with a tensor per layer.
_SMALL: dict[int, _Curve] = {
    1: ((0.25, 1.00), (0.5, 1.01), (0.75, 1.01), (1.5, 1.02), (2.0, 1.02)),
    4: ((1.0, 1.01), (2.0, 1.09), (3.0, 1.09), (6.0, 1.10), (8.0, 1.11)),
    8: ((2.0, 1.01), (4.0, 1.13), (6.0, 1.13), (12.0, 1.88), (16.0, 1.89)),
    16: ((4.0, 1.02), (8.0, 1.21), (12.0, 3.59), (24.0, 3.67), (32.0, 3.67)),
    32: ((8.0, 1.05), (16.0, 6.40), (24.0, 6.52), (48.0, 6.74), (64.0, 6.78)),
}
_LARGE = {1: 1.0, 4: 1.02, 8: 1.02, 16: 1.02, 32: 1.02}

MEASURED_GROUPS = max(_SMALL)
"""The largest number of layers per tensor that was measured."""


def attention_time(
    page_size: int, group_size: int, num_layers: int, footprint: int, large: float = 0.0
) -> float:
    """Returns decode attention time relative to cudaMalloc memory with a tensor per layer.

    Args:
        page_size: page size in bytes; large entries map pages of 2 MB or more, entries of 64 KB
            map smaller pages.
        group_size: layers that share a tensor.
        num_layers: number of layers with keys, values or states.
        footprint: bytes of keys and values that a step reads; on a full card, the whole budget.
        large: fraction of these bytes that large entries map although the pages are smaller; small
            entries map the rest.

    Returns:
        The ratio, interpolated between the measurements and constant beyond them; 1.0 means no
        cost.
    """
    if page_size >= LARGE_ENTRY:
        large = 1.0
    sweep = (1 - large) * footprint * group_size / num_layers / 2**30
    small = [(log2(group), _between(curve, sweep)) for group, curve in _SMALL.items()]
    whole = [(log2(group), time) for group, time in _LARGE.items()]
    at = log2(group_size)
    return large * _between(whole, at) + (1 - large) * _between(small, at)


def _between(points: _Curve | list[tuple[float, float]], at: float) -> float:
    """Interpolates (x, y) points, sorted by x, at `at`; constant beyond both ends."""
    after = bisect_left(points, (at,))
    if after == 0:
        return points[0][1]
    if after == len(points):
        return points[-1][1]
    (x0, y0), (x1, y1) = points[after - 1], points[after]
    return y0 + (y1 - y0) * (at - x0) / (x1 - x0)
