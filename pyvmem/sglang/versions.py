# SPDX-License-Identifier: MIT
"""The known versions of SGLang, with the evidence that they work; another one is looked at first.

What the pool uses of SGLang is listed in `hooks`. A newer version that nobody has run has to have
all of it; it is refused with what it lacks, and otherwise tried.
"""

from __future__ import annotations

import functools
import importlib.util
import logging
import re
from pathlib import Path

from pyvmem.elastic.hooks import Source, missing
from pyvmem.sglang.hooks import HOOKS

__all__ = ["KNOWN", "UnknownVersion", "check"]

KNOWN = {"0.5.23": "its CPU engine, by make test-long: tokens equal to stock's; no GPU"}
"""Versions, ascending, and where each was run."""

_NUMBER = re.compile(r"(\d+)\.(\d+)\.(\d+)")
_log = logging.getLogger("sglang.vmem")
_tried: set[str] = set()


@functools.cache
def _lacks() -> tuple[str, ...]:
    found = importlib.util.find_spec("sglang")
    folders = found.submodule_search_locations if found else None
    if not folders:
        return ("its source",)
    return tuple(missing(Source(Path(folders[0]), "sglang"), HOOKS))


class UnknownVersion(RuntimeError):
    """A version of SGLang that lacks something, or is too old."""


def check(version: str, *, warn: bool = False) -> None:
    """Refuses a version that cannot work.

    Args:
        version: as `sglang.__version__` says it.
        warn: say so, once in a process, where the version is tried that nobody has run.

    Raises:
        UnknownVersion: the text says what it lacks, and what to do.
    """
    number = _NUMBER.match(version)
    if number and number[0] in KNOWN:
        return
    first, *_ = KNOWN
    known = f"known: {', '.join(KNOWN)}"
    advice = "install one of these or a newer pyvmem, or unset VMEM_SGLANG"
    if number and tuple(map(int, number.groups())) < tuple(map(int, first.split("."))):
        raise UnknownVersion(f"VMEM_SGLANG=1: sglang {version} is too old ({known}); {advice}")
    if lacks := _lacks():
        raise UnknownVersion(
            f"VMEM_SGLANG=1: sglang {version} is not known to this pyvmem ({known}), and lacks "
            f"{', '.join(lacks)}; {advice}"
        )
    if warn and version not in _tried:
        _tried.add(version)
        _log.warning(
            "vmem: nobody has run sglang %s with this pyvmem (%s); it has all that the pool uses "
            "of it, and is tried",
            version,
            known,
        )
