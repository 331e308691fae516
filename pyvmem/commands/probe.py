# SPDX-License-Identifier: MIT
"""Shows which back ends work on this machine, which ``"auto"`` uses, and why the others fail."""

from __future__ import annotations

import errno
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pyvmem import _native
from pyvmem.memory.info import Caps, sizes_of_mask
from pyvmem.memory.streams import device_ordinal

if TYPE_CHECKING:
    import argparse

__all__ = ["ProbeResult", "add_parser", "probe", "run"]

_PRINTED = Path("-")  # value of --report when it is given without a file


@dataclass(frozen=True)
class ProbeResult:
    """The result of trying a back end on this machine (struct vmem_probe_info).

    Attributes:
        backend: name of the back end.
        usable: whether a context could be opened and a page mapped, written, read and unmapped.
        used: whether ``"auto"`` uses this back end.
        error: positive errno of the failure; 0 if usable.
        error_name: symbol of `error`.
        caps: capabilities of the back end.
        page_sizes: page sizes in bytes, ascending.
        driver: the driver's version.
        device_name: name of the requested device.
        reason: why the back end is not usable; otherwise the result of the test.
    """

    backend: str
    usable: bool
    used: bool
    error: int
    error_name: str
    caps: Caps
    page_sizes: tuple[int, ...]
    driver: str
    device_name: str
    reason: str


def probe(device: Any = 0) -> list[ProbeResult]:
    """Tries every back end, in the same order as ``"auto"``; leaves none open.

    Args:
        device: CUDA ordinal, torch.device or cuda.core Device.
    """
    ordinal = device_ordinal(device)
    results: list[ProbeResult] = []
    for name in _native.backend_names():
        info = _native.probe(name, ordinal)
        usable = bool(info.usable)
        results.append(
            ProbeResult(
                backend=name,
                usable=usable,
                used=usable and not any(one.used for one in results),
                error=-info.error,
                error_name=errno.errorcode.get(-info.error, ""),
                caps=Caps(info.caps),
                page_sizes=sizes_of_mask(info.page_sizes),
                driver=_native.text_of(info.driver),
                device_name=_native.text_of(info.device_name),
                reason=_native.text_of(info.reason),
            )
        )
    return results


def _size(nbytes: int) -> str:
    for unit, power in (("GB", 30), ("MB", 20), ("KB", 10)):
        if nbytes >= 1 << power and nbytes % (1 << power) == 0:
            return f"{nbytes >> power} {unit}"
    return f"{nbytes} B"


def _table(results: list[ProbeResult]) -> str:
    from pyvmem.commands.tables import table  # not at the top: `import pyvmem` must not load it

    rows = []
    for one in results:
        state = "used" if one.used else "usable" if one.usable else "not usable"
        pages = ""
        if one.page_sizes:
            pages = _size(one.page_sizes[0])
            if len(one.page_sizes) > 1:
                pages += f" to {_size(one.page_sizes[-1])}"
        device = " ".join(part for part in (one.device_name, one.driver) if part)
        error = f"{one.error_name}: " if one.error_name else ""
        rows.append((one.backend, state, pages, device, error + one.reason))
    return table(("back end", "state", "pages", "device", "why"), rows, 5, rule=False)


def add_parser(sub: Any) -> None:
    """Adds ``vmem probe``."""
    parser: argparse.ArgumentParser = sub.add_parser(
        "probe", help="which back ends work here", description=__doc__
    )
    from pyvmem.commands.arguments import add_device  # not at the top: see above

    add_device(parser)
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print JSON")
    form.add_argument(
        "--report",
        nargs="?",
        const=_PRINTED,
        type=_file,
        metavar="FILE",
        help="print data for a bug report, in Markdown; or write it to FILE, with a self-test",
    )
    parser.set_defaults(run=run)


def _file(text: str) -> Path:
    from pyvmem.plumbing.paths import written  # not at the top: see above

    return written(text)


def run(args: argparse.Namespace) -> int:
    """Prints the results; returns 0 if a back end is usable and no self-test check failed."""
    results = probe(args.device)
    if args.report is not None:
        from pyvmem.commands import bug_report  # not at the top: bug_report imports this module

        if args.report is not _PRINTED:
            return bug_report.write(args.report, results, args.device)
        print(bug_report.bug_report(results))
    elif args.json:
        import json

        caps = {one.backend: [cap.name for cap in Caps if cap in one.caps] for one in results}
        records = [{**vars(one), "caps": caps[one.backend]} for one in results]
        print(json.dumps(records, indent=2))
    else:
        print(_table(results))
    return 0 if any(one.usable for one in results) else 1
