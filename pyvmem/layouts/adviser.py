# SPDX-License-Identifier: MIT
"""Picks a layout for a model, a workload and an amount of memory, and explains why.

The rules, in order:

1. Mapping must be hidden: at the layout's own batch size, an iteration's map calls, which run in
   the background, take at most half of the iteration.
2. Of these, the layouts within 1% of the best score are kept. The score is the batch size divided
   by the attention time once the memory is full (`pyvmem.layouts.entries`): on a full card, the
   part of a request that does not fill a 2 MB block is slow to read if layers share a tensor and
   pages are smaller than 2 MB.
3. Of these, the layout with the fewest map calls is picked, then the smallest group, then the
   smallest page.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pyvmem.layouts.cost import Choice, Cost, cost
from pyvmem.layouts.entries import MEASURED_GROUPS
from pyvmem.layouts.shapes import ModelShape
from pyvmem.layouts.workload import Request
from pyvmem.plumbing.validation import invalid

__all__ = [
    "CALL_US",
    "PAGE_SIZES",
    "Advice",
    "Limits",
    "advise",
    "call_us",
    "choices",
    "mapping_ms",
    "name",
]

PAGE_SIZES = (64 << 10, 128 << 10, 256 << 10, 2 << 20)

CALL_US = {"stock": 13.0, "cuda": 24.6, "uvm": 0.0}
"""Microseconds that it takes to map one run, by back end.

The times are from an H200: for `stock`, one ioctl; for `cuda`, creating and mapping 2 MB and
setting its access. `uvm` makes one call for a whole step, which has not been timed yet: 0 disables
rule 1. The driver serializes the calls of several processes: if all n ranks of a machine map at
once, a call takes n times as long (`vmem bench devices`).
"""

_CLOSE = 0.01  # how close to the best score a layout must come, as a fraction
_HIDDEN = 0.5  # maximum time spent in map calls, as a fraction of an iteration


def call_us(backend: str, ranks: int = 1) -> float:
    """Returns the longest time a map call takes, in us, while `ranks` ranks map at once.

    A back end that was not measured is assumed to be as fast as `stock`.
    """
    return ranks * CALL_US.get(backend, CALL_US["stock"])


@dataclass(frozen=True)
class Limits:
    """Bounds that a layout must stay within.

    Attributes:
        call_us: microseconds per map call, as returned by the function `call_us`.
        iteration_ms: duration of a decode iteration of the whole batch, in milliseconds.
        max_group: maximum number of layers in one tensor; values above the default have not been
            measured.
    """

    call_us: float = CALL_US["stock"]
    iteration_ms: float = 25.0
    max_group: int = MEASURED_GROUPS


@dataclass(frozen=True)
class Advice:
    """The result of `advise`.

    Attributes:
        best: the recommended layout.
        costs: costs of every layout considered, in the order given.
        why: the reason, in one sentence.
    """

    best: Cost
    costs: list[Cost]
    why: str


def choices(
    shape: ModelShape,
    page_sizes: Iterable[int] = PAGE_SIZES,
    runs: Iterable[int] = (1,),
    max_group: int = 0,
) -> list[Choice]:
    """Lists all layouts: each combination of group size, page size and run.

    Group sizes are the common divisors of the layer counts of all kinds, up to `max_group` (0 means
    no limit).
    """
    layers, sizes, lengths = shape.largest_group, list(page_sizes), list(runs)
    groups = [
        n for n in range(1, layers + 1) if layers % n == 0 and (not max_group or n <= max_group)
    ]
    return [Choice(group, size, run) for group in groups for size in sizes for run in lengths]


def mapping_ms(one: Cost, limits: Limits) -> float:
    """Returns the time in ms that an iteration's map calls take at the layout's own batch size."""
    return one.batch * one.calls_per_token * limits.call_us / 1e3


def advise(
    shape: ModelShape,
    requests: Sequence[Request],
    memory_bytes: int,
    considered: Sequence[Choice] | None = None,
    limits: Limits | None = None,
    overread_rows: int = 0,
) -> Advice:
    """Picks a layout according to the rules at the top of this module.

    Args:
        shape: the model, on one rank.
        requests: the workload.
        memory_bytes: bytes for keys and values, on this rank.
        considered: layouts to choose from; None for `choices` with `limits.max_group`.
        limits: bounds that the layout must stay within; None for those of `stock`.
        overread_rows: as in `KVCacheConfig`.

    Raises:
        InvalidArgument: as for `cost`, or no layout is within `limits.max_group`.
    """
    limits = limits or Limits()
    if considered is None:
        considered = choices(shape, max_group=limits.max_group)
    costs = [cost(shape, choice, requests, memory_bytes, overread_rows) for choice in considered]
    allowed = [one for one in costs if one.choice.group_size <= limits.max_group]
    if not allowed:
        raise invalid(f"no layout has groups of {limits.max_group} layers or fewer", op="advise")
    budget = _HIDDEN * limits.iteration_ms
    hidden = [one for one in allowed if mapping_ms(one, limits) <= budget]
    if hidden:
        most = max(map(_worth, hidden))
        close = [one for one in hidden if _worth(one) >= (1 - _CLOSE) * most]
        best = min(close, key=_trouble)
    else:
        best = min(allowed, key=lambda one: (mapping_ms(one, limits), -one.batch))
    return Advice(best, costs, _why(best, costs, allowed, hidden, limits))


def _worth(one: Cost) -> float:
    return one.batch / one.attention


def _trouble(one: Cost) -> tuple[float, int, int]:
    calls = float(f"{one.calls_per_token:.2g}")  # two digits: smaller differences do not matter
    return calls, one.choice.group_size, one.choice.page_size


def name(choice: Choice) -> str:
    """Returns a layout's name, such as "a tensor per layer, 64 KB pages"."""
    size = choice.page_size
    page = f"{size >> 20} MB" if size >= 1 << 20 else f"{size >> 10} KB"
    group = (
        "a tensor per layer" if choice.group_size == 1 else f"{choice.group_size} layers per tensor"
    )
    return f"{group}, {page} pages" + (f" in runs of {choice.run}" if choice.run > 1 else "")


def _why(
    best: Cost, costs: list[Cost], allowed: list[Cost], hidden: list[Cost], limits: Limits
) -> str:
    largest = max(costs, key=lambda one: one.batch)
    text = f"{name(best.choice)}: {int(best.batch)} requests at a time"
    if largest is not best:
        text += f" of the {int(largest.batch)} that any layout holds ({name(largest.choice)})"
    spent = mapping_ms(best, limits)
    if not hidden:
        return (
            f"{text}; map calls take more than half of an iteration of "
            f"{limits.iteration_ms:g} ms in every layout, and least in this one, {spent:.1f} ms."
        )
    text += f", at {best.calls_per_token:.3g} map calls per token"
    if limits.call_us:
        text += f", {spent:.1f} ms in the background of an iteration of {limits.iteration_ms:g} ms"
    if best.attention >= 1 + _CLOSE:
        text += f"; attention takes {best.attention:.2f} times as long once the memory is full"
    dropped = [one for one in allowed if one not in hidden and _worth(one) > _worth(best)]
    if dropped:
        other = max(dropped, key=_worth)
        text += f"; {name(other.choice)} holds {int(other.batch)} but its map calls take "
        text += f"{mapping_ms(other, limits):.1f} ms"
    return text + "."
