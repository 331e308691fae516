# SPDX-License-Identifier: MIT
"""The layout adviser (`vmem layouts`), which computes each layout's cost and picks the best one."""

from pyvmem.layouts.adviser import CALL_US, PAGE_SIZES, Advice, Limits, advise, call_us, choices
from pyvmem.layouts.cost import Choice, Cost, Held, cost
from pyvmem.layouts.shapes import SHAPES, ModelShape, shape_of
from pyvmem.layouts.workload import Request, generate, read_trace

__all__ = [
    "CALL_US",
    "PAGE_SIZES",
    "SHAPES",
    "Advice",
    "Choice",
    "Cost",
    "Held",
    "Limits",
    "ModelShape",
    "Request",
    "advise",
    "call_us",
    "choices",
    "cost",
    "generate",
    "read_trace",
    "shape_of",
]
