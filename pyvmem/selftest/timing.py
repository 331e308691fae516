# SPDX-License-Identifier: MIT
"""Times a growth step and CUDA's own calls. No result, however slow, fails the self-test.

A sample maps a page in each of 64 tensors, then unmaps them. CUDA's own calls map
pages of 2 MB, 32 times as much memory, because CUDA has no smaller pages.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

from pyvmem import Context, OpBatch
from pyvmem.commands.cumem import Cuda, CudaCallError, CudaUnavailable, CuMem
from pyvmem.selftest.check import reserve

__all__ = ["measure"]

_TENSORS = 64


def _summary(samples: list[float]) -> dict[str, float]:
    """Returns the median, quartiles and range, in microseconds."""
    values = sorted(1e6 * sample for sample in samples)
    low, middle, high = statistics.quantiles(values, n=4)
    return {
        "median_us": round(middle, 3),
        "quartile_1_us": round(low, 3),
        "quartile_3_us": round(high, 3),
        "min_us": round(values[0], 3),
        "max_us": round(values[-1], 3),
        "samples": len(values),
    }


def _ours(context: Context, samples: int) -> dict[str, Any]:
    page, stride = context.info.granule, max(2 << 20, context.info.granule)
    grow, shrink = OpBatch(1), OpBatch(1)
    times: tuple[list[float], list[float]] = ([], [])
    with reserve(context, stride * _TENSORS) as range_:
        context.warm(_TENSORS * page)
        grow.populate(range_.addr, page, _TENSORS, stride, dirty=True)
        shrink.unmap(range_.addr, page, _TENSORS, stride)
        for turn in range(samples + 3):
            start = time.perf_counter()
            context.batch(grow)
            middle = time.perf_counter()
            context.batch(shrink)
            end = time.perf_counter()
            if turn >= 3:  # the first three allocate page tables
                times[0].append(middle - start)
                times[1].append(end - middle)
    return {"page_bytes": page, "map": _summary(times[0]), "unmap": _summary(times[1])}


def _cumem(device: int, samples: int) -> dict[str, Any]:
    """Times the same growth step with cuMemMap and cuMemSetAccess, on existing allocations."""
    times: tuple[list[float], list[float]] = ([], [])
    with Cuda(device) as cuda:
        cumem = CuMem(cuda)
        page = cumem.page
        base = cumem.reserve(page * _TENSORS)
        handles = [cumem.create(page) for _ in range(_TENSORS)]
        for turn in range(samples + 3):
            start = time.perf_counter()
            for i, handle in enumerate(handles):
                cumem.map(base + i * page, page, handle)
                cumem.set_access(base + i * page, page)
            middle = time.perf_counter()
            for i in range(_TENSORS):
                cumem.unmap(base + i * page, page)
            end = time.perf_counter()
            if turn >= 3:
                times[0].append(middle - start)
                times[1].append(end - middle)
        for handle in handles:
            cumem.release(handle)
        cumem.free(base, page * _TENSORS)
    return {"page_bytes": page, "map": _summary(times[0]), "unmap": _summary(times[1])}


def measure(context: Context, samples: int) -> dict[str, Any]:
    """Returns both times for the report; for one that cannot be measured, the reason."""
    result: dict[str, Any] = {"tensors": _TENSORS, context.info.backend: _ours(context, samples)}
    if context.cuda_device is None:
        return result
    try:
        result["cuMem"] = _cumem(context.cuda_device, samples)
    except (CudaUnavailable, CudaCallError) as error:
        result["cuMem"] = {"not measured": str(error)}
    return result
