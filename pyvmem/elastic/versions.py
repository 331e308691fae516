# SPDX-License-Identifier: MIT
"""An engine's versions that a plug-in works with.

A version that nobody has run has to have all that the plug-in uses of the engine. It is refused
with what it lacks, and otherwise tried.
"""

from __future__ import annotations

import functools
import importlib.util
import logging
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from pyvmem.elastic.hooks import Hook, Source, missing

__all__ = ["UnknownVersion", "Versions"]


class UnknownVersion(RuntimeError):
    """A version of an engine that lacks something, or is too old."""


class Versions:
    """The versions of one engine.

    Args:
        package: the engine's, such as ``vllm``.
        known: by version, ascending, where it was run; all with as many numbers, which are those
            that count.
        hooks: names that the plug-in uses.
    """

    def __init__(self, package: str, known: Mapping[str, str], hooks: Iterable[Hook]) -> None:
        self._package, self._known, self._hooks = package, known, hooks
        first, last = next(iter(known)), list(known)[-1]
        self._oldest = tuple(map(int, first.split(".")))
        self._named = f"known: {first}" + (f" to {last}" if last != first else "")
        self._number = re.compile(r"\.".join([r"(\d+)"] * len(self._oldest)) + r"(?!\d)")
        self._log = logging.getLogger(f"{package}.vmem")
        self._tried: set[str] = set()

    @functools.cached_property
    def lacks(self) -> tuple[str, ...]:
        """Names what the installed version lacks."""
        found = importlib.util.find_spec(self._package)
        folders = found.submodule_search_locations if found else None
        if not folders:
            return ("its source",)
        return tuple(missing(Source(Path(folders[0]), self._package), self._hooks))

    def check(self, version: str, *, warn: bool = False) -> None:
        """Refuses a version that cannot work.

        Args:
            version: as the package's ``__version__`` says it.
            warn: say so, once in a process, where the version is tried that nobody has run.

        Raises:
            UnknownVersion: the text says what it lacks, and what to do.
        """
        number = self._number.match(version)
        if number and ".".join(number.groups()) in self._known:
            return
        switch = f"VMEM_{self._package.upper()}"
        named = f"{switch}=1: {self._package} {version}"
        advice = f"install one of these or a newer pyvmem, or unset {switch}"
        if number and tuple(map(int, number.groups())) < self._oldest:
            raise UnknownVersion(f"{named} is too old ({self._named}); {advice}")
        if self.lacks:
            raise UnknownVersion(
                f"{named} is not known to this pyvmem ({self._named}), and lacks "
                f"{', '.join(self.lacks)}; {advice}"
            )
        if warn and version not in self._tried:
            self._tried.add(version)
            self._log.warning(
                "vmem: nobody has run %s %s with this pyvmem (%s); it has all that the pool uses "
                "of it, and is tried",
                self._package,
                version,
                self._named,
            )
