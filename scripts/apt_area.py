# SPDX-License-Identifier: MIT
"""Fetches packages with apt's tools from a Debian suite that the system does not use.

The archive's address and signing key come from the system's sources; the caller chooses the suite
and the components. Sources, package lists and state are kept in the build directory: the system's
files are never touched, root is not needed, and signatures are always checked.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kernel_common import KERNEL_BUILD, KernelBuildError, run

__all__ = ["AptArea", "Source", "archive_source", "parse_deb822", "parse_one_line"]

SYSTEM = Path("/etc/apt")
# Matches the name of a main suite. The names of its update suites, such as bookworm-updates, and of
# the suites of other archives are longer.
SUITE = re.compile(
    r"(old){0,2}stable|testing|unstable|experimental|sid|bullseye|bookworm|trixie|forky|duke"
)


@dataclass(frozen=True)
class Source:
    """An archive: its address, its suites, and the keyring or key that apt verifies it with."""

    uri: str
    suites: tuple[str, ...]
    signed_by: str = ""


def parse_deb822(text: str) -> list[Source]:
    """Returns the enabled binary archives in the text of a *.sources file."""
    found = []
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    for stanza in re.split(r"\n[ \t]*(?:\n[ \t]*)+", "\n".join(lines)):
        fields: dict[str, str] = {}
        name = ""
        for line in stanza.splitlines():
            if line[:1] in (" ", "\t"):
                # An embedded key spans several lines.
                fields[name] = fields.get(name, "") + "\n" + line
            elif ":" in line:
                name, value = line.split(":", 1)
                name = name.strip().lower()
                fields[name] = value.strip()
        if "deb" not in fields.get("types", "").split():
            continue
        if fields.get("enabled", "yes").lower() in ("no", "false", "0"):
            continue
        suites = tuple(fields.get("suites", "").split())
        for uri in fields.get("uris", "").split():
            found.append(Source(uri, suites, fields.get("signed-by", "")))
    return found


def parse_one_line(text: str) -> list[Source]:
    """Returns the binary archives in the text of a sources.list file."""
    found = []
    for line in text.splitlines():
        words = re.match(r"\s*deb\s+(?:\[([^]]*)\]\s+)?(\S+)\s+(\S+)", line)
        if words:
            options, uri, suite = words.groups()
            signed = re.search(r"(?:^|\s)signed-by=(\S+)", options or "", re.IGNORECASE)
            found.append(Source(uri, (suite,), signed.group(1) if signed else ""))
    return found


def system_sources(folder: Path) -> list[Source]:
    """Returns all archives that are configured on this system."""
    files = [folder / "sources.list", *sorted((folder / "sources.list.d").glob("*"))]
    found = []
    for path in files:
        if path.is_file() and path.suffix in (".list", ".sources"):
            text = path.read_text(encoding="utf-8", errors="replace")
            found += parse_deb822(text) if path.suffix == ".sources" else parse_one_line(text)
    return found


def archive_source(folder: Path | None = None) -> Source:
    """Returns Debian's main archive, as named in the system's sources."""
    folder = folder or SYSTEM
    for source in system_sources(folder):
        main = source.uri.rstrip("/").endswith("/debian") or "/archive/debian/" in source.uri
        if main and any(SUITE.fullmatch(suite) for suite in source.suites):
            return source
    raise KernelBuildError(
        f"{folder} names no archive of Debian: give the driver's source with NV_SRC"
    )


class AptArea:
    """A private directory for apt's lists, for one Debian suite or for the system's sources."""

    def __init__(self, suite: str | None, components: Sequence[str] = ()) -> None:
        self.suite = suite
        self.folder = KERNEL_BUILD / "apt" / (suite or "system")
        if not shutil.which("apt-get"):
            raise KernelBuildError(
                "this system has no apt-get: give the driver's source with NV_SRC"
            )
        for name in ("lists/partial", "cache/archives/partial", "state"):
            (self.folder / name).mkdir(parents=True, exist_ok=True)
        if suite is None:
            return
        source = archive_source()
        lines = [
            "Types: deb",
            f"URIs: {source.uri}",
            f"Suites: {suite}",
            f"Components: {' '.join(components)}",
        ]
        if source.signed_by:
            lines.append(f"Signed-By: {source.signed_by}")
        text = "\n".join(lines) + "\n"
        (self.folder / "debian.sources").write_text(text, encoding="utf-8")

    def options(self) -> list[str]:
        """Returns the options that make apt use only this area."""
        settings: dict[str, str | Path] = {
            "Dir::State": self.folder / "state",
            "Dir::State::lists": self.folder / "lists",
            "Dir::State::status": "/var/lib/dpkg/status",
            "Dir::Cache": self.folder / "cache",
            "APT::Get::AllowUnauthenticated": "false",
            "Acquire::AllowInsecureRepositories": "false",
            "Acquire::Retries": "3",
        }
        if os.geteuid() == 0:
            # The unprivileged user that apt switches to may have no access to this directory.
            settings["APT::Sandbox::User"] = "root"
        if self.suite is not None:
            settings["Dir::Etc::sourcelist"] = self.folder / "debian.sources"
            settings["Dir::Etc::sourceparts"] = "/dev/null"
        return [word for key, value in settings.items() for word in ("-o", f"{key}={value}")]

    def update(self) -> None:
        """Fetches the package lists; an archive without a valid signature is an error."""
        # One of the system's archives may be unreachable; only a given suite's archive is required.
        strict = ["-o", "APT::Update::Error-Mode=any"] if self.suite else []
        try:
            run("apt-get", *self.options(), *strict, "update")
        except KernelBuildError as error:
            hint = ""
            if "NO_PUBKEY" in str(error) or "not signed" in str(error):
                hint = "\nthe package debian-archive-keyring is too old to check this suite's key"
            raise KernelBuildError(f"Debian {self.suite or ''}: {error}{hint}") from error

    def versions(self, package: str) -> list[str]:
        """Returns the versions of a package, newest first."""
        out = run("apt-cache", *self.options(), "madison", package)
        rows = [line.split("|") for line in out.splitlines()]
        return [row[1].strip() for row in rows if len(row) == 3 and row[0].strip() == package]

    def download(self, package: str, version: str, folder: Path) -> Path:
        """Downloads a package into a directory and checks it against the signed lists."""
        folder.mkdir(parents=True, exist_ok=True)
        run("apt-get", *self.options(), "download", f"{package}={version}", cwd=folder)
        (found,) = folder.glob(f"{package}_*.deb")
        return found

    def download_closure(self, packages: Sequence[str], folder: Path) -> list[Path]:
        """Downloads packages and all their dependencies into a directory."""
        (folder / "partial").mkdir(parents=True)
        status = folder / "status"
        status.touch()
        places = {"Dir::State::status": status, "Dir::Cache::archives": folder}
        options = [word for key, path in places.items() for word in ("-o", f"{key}={path}")]
        install = ("install", "--yes", "--download-only", "--no-install-recommends")
        run("apt-get", *self.options(), *options, *install, *packages)
        return sorted(folder.glob("*.deb"))
