# SPDX-License-Identifier: MIT
"""Setup shared by all parts of the benchmark: our context, the baseline, the sizes to measure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from pyvmem.bench.native import Native
from pyvmem.bench.record import Part
from pyvmem.bench.timing import Deadline, Samples, quiet, time_block, time_each
from pyvmem.commands.cumem import Cuda, CuMem
from pyvmem.memory.context import Context
from pyvmem.memory.info import Caps

__all__ = ["KB", "MB", "GB", "OUR_PAGES", "Overheads", "PartFunction", "Setting", "label"]

KB, MB, GB = 1 << 10, 1 << 20, 1 << 30
OUR_PAGES = (64 * KB, 128 * KB, 256 * KB, 2 * MB)


def label(nbytes: int) -> str:
    """Formats a page size for use in row names: 64 KiB -> "64K"."""
    for unit, size in (("G", GB), ("M", MB), ("K", KB)):
        if nbytes >= size and nbytes % size == 0:
            return f"{nbytes // size}{unit}"
    return str(nbytes)


@dataclass
class Overheads:
    """The cost in ns of an empty call, timed like the rows: individually or in a block."""

    each: float = 0.0
    block: float = 0.0
    refused: float = (
        0.0  # cumem: cuMemSetAccess of 0 bytes, which fails after its arguments are converted
    )


@dataclass
class Setting:
    """The systems to measure: `native` is ours; `cumem` and `cuda` are None if there is no GPU."""

    native: Native
    quick: bool = False
    cuda: Cuda | None = None
    cumem: CuMem | None = None
    cuda_why: str = ""
    fa3: Path | None = None
    live_levels: tuple[int, ...] = ()
    device: int = 0
    overheads: dict[str, Overheads] = field(default_factory=dict)

    @property
    def system(self) -> str:
        """Returns the name of our back end."""
        return self.native.system

    @property
    def pages(self) -> tuple[int, ...]:
        """The paper's page sizes that our back end supports."""
        return tuple(p for p in OUR_PAGES if p in self.native.context.info.page_sizes)

    @property
    def single(self) -> int:
        """Page size for rows of single pages: 64 KB or, if unsupported, the smallest one."""
        return 64 * KB if 64 * KB in self.pages else min(self.native.context.info.page_sizes)

    @property
    def joins(self) -> bool:
        """True if vmem_join can save anything on our back end."""
        return bool(self.native.context.info.caps & Caps.JOIN)

    def count(self, full: int, quick: int) -> int:
        """Returns `quick` in a quick run, otherwise `full`."""
        return quick if self.quick else full

    def overhead(self, system: str) -> Overheads:
        """Returns the cost of this system's empty call; zero until it is measured."""
        return self.overheads.get(system, Overheads())

    def open(self, *, pool_high: int = 0) -> Context:
        """Opens another context of our back end, for a part that needs its own."""
        return Context(self.system, device=self.device, pool_high=pool_high)

    def missing_pages(self, part: Part, row: str) -> None:
        """Marks the paper's page sizes that our back end does not support as not run."""
        for page in OUR_PAGES:
            if page not in self.pages:
                part.not_run(
                    f"{row}/{self.system}/{label(page)}", f"{self.system} has no pages of this size"
                )

    def measure_overheads(self, part: Part) -> None:
        """Times empty calls of both bindings; rows added afterwards report them as `overhead`."""
        n, rounds = self.count(2000, 50), self.count(12, 2)
        ours, theirs, refused = Samples(), Samples(), Samples()
        ours_block, theirs_block = Samples(), Samples()
        lib = self.native.lib
        with quiet():
            for _ in range(rounds):
                # The call does almost nothing: back end 99 does not exist.
                time_each(lib.vmem_backend_name, [(99,)] * n, ours.new_round())
                time_block(lib.vmem_backend_name, [(99,)] * n, ours_block.new_round())
                if self.cumem is not None:
                    driver = self.cumem.driver
                    zero = self.cumem.access_args(2 * MB, 0)
                    time_each(driver.cuDriverGetVersion, [()] * n, theirs.new_round())
                    time_block(driver.cuDriverGetVersion, [()] * n, theirs_block.new_round())
                    results = time_each(driver.cuMemSetAccess, [zero] * n, refused.new_round())
                    if any(int(r[0]) == 0 for r in results):
                        raise RuntimeError("cuMemSetAccess of 0 bytes succeeded")
        rows = [("noop", "empty call", self.system, ours)]
        if self.cumem is not None:
            rows.append(("noop", "empty call", "cumem", theirs))
            rows.append(("refused", "cuMemSetAccess of 0 bytes, refused", "cumem", refused))
        for name, what, system, samples in rows:
            samples.drop_first_round()
            part.time(f"{name}/{system}", what, system, samples)
        self.overheads[self.system] = Overheads(_median_ns(ours), _median_ns(ours_block))
        if self.cumem is not None:
            self.overheads["cumem"] = Overheads(
                _median_ns(theirs), _median_ns(theirs_block), _median_ns(refused)
            )


def _median_ns(samples: Samples) -> float:
    data = sorted(samples.flat())
    return data[len(data) // 2]


PartFunction = Callable[[Setting, Part, Deadline], None]
