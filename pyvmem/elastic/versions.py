# SPDX-License-Identifier: MIT
"""Decides whether a plug-in supports the installed version of an engine.

A known version is accepted. An unknown version is rejected if its source lacks a symbol that the
plug-in uses, and otherwise accepted with a warning.
"""

from __future__ import annotations

import functools
import importlib.util
import logging
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from pyvmem.elastic.engine_source import Source, Symbol, missing

__all__ = ["UnknownVersion", "Versions"]


class UnknownVersion(RuntimeError):
    """The engine's version is too old or lacks a symbol that the plug-in uses."""


class Versions:
    """The supported versions of one engine.

    Args:
        package: the engine's Python package, such as ``vllm``.
        known: maps each known version, ascending, to the tests that were run with it. All have the
            same number of components; extra components of an installed version are ignored.
        symbols: the symbols that the plug-in uses.
    """

    def __init__(self, package: str, known: Mapping[str, str], symbols: Iterable[Symbol]) -> None:
        self._package, self._known, self._symbols = package, known, symbols
        first, last = next(iter(known)), list(known)[-1]
        self._oldest = tuple(map(int, first.split(".")))
        self._named = f"known: {first}" + (f" to {last}" if last != first else "")
        self._number = re.compile(r"\.".join([r"(\d+)"] * len(self._oldest)) + r"(?!\d)")
        self._log = logging.getLogger(f"{package}.vmem")
        self._tried: set[str] = set()

    @functools.cached_property
    def lacks(self) -> tuple[str, ...]:
        """The symbols that are missing from the installed version."""
        found = importlib.util.find_spec(self._package)
        folders = found.submodule_search_locations if found else None
        if not folders:
            return ("its source",)
        return tuple(missing(Source(Path(folders[0]), self._package), self._symbols))

    def check(self, version: str, *, warn: bool = False) -> None:
        """Raises an exception unless the version is known, or is newer and has all symbols.

        Args:
            version: the package's ``__version__``.
            warn: log a warning, once per process, if the version is unknown.

        Raises:
            UnknownVersion: names the missing symbols and the remedy.
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
                "vmem: %s %s was never tested with this pyvmem (%s); it has all internals that the "
                "pool uses, so the pool is enabled",
                self._package,
                version,
                self._named,
            )
