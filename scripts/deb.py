#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Builds the Debian packages, source and binary, in dist/deb.

The packaging is in packaging/debian. The version is vmem.h's, and timestamps are the commit's (or
SOURCE_DATE_EPOCH), so that the same commit gives the same packages with the same tools. The
maintainer is taken from DEBFULLNAME and DEBEMAIL, as Debian's tools do, or is the commit's author.
"""

from __future__ import annotations

import argparse
import io
import lzma
import os
import shutil
import sys
import tarfile
import tempfile
from email.utils import formatdate
from pathlib import Path

from dist import DistError, copy_tracked, elsewhere, epoch, must_be_same, run, usual_umask
from system_packages import has_probes, install, install_debian_packages
from vmem_header import ROOT, version

__all__ = ["FILES", "PACKAGES", "changelog", "make_deb", "make_orig", "make_twice", "prepare"]

FILES = ROOT / "packaging" / "debian"
PACKAGES = ("libvmem0", "libvmem-dev", "vmem-dkms")
REVISION = "0vmem1"  # sorts before Debian's first revision
# Maps a program or file to the package that contains it. If the path exists, the package counts as
# installed.
TOOLS = {
    "/usr/bin/dh": "debhelper",
    "/usr/bin/dpkg-buildpackage": "dpkg-dev",
    "/usr/bin/pkg-config": "pkgconf",
}


def install_tools(tools: dict[str, str]) -> None:
    """Installs the packages whose programs or files are missing, as the setup does."""
    missing = sorted({name for path, name in tools.items() if not Path(path).exists()})
    if missing:
        install_debian_packages(missing)


def maintainer() -> str:
    """Returns the maintainer from the environment, or the last commit's author."""
    name, mail = os.environ.get("DEBFULLNAME"), os.environ.get("DEBEMAIL")
    if name and mail:
        return f"{name} <{mail}>"
    return run("git", "log", "-1", "--format=%an <%ae>").strip()


def changelog(upstream: str, who: str, when: int) -> str:
    """Returns Debian's changelog: an entry for this version that refers to CHANGELOG.md."""
    return (
        f"vmem ({upstream}-{REVISION}) unstable; urgency=medium\n\n"
        f"  * Release {upstream}. What changed is in CHANGELOG.md.\n\n"
        f" -- {who}  {formatdate(when)}\n"
    )


def make_orig(source: Path, folder: Path, upstream: str, when: int) -> Path:
    """Creates a source tree's upstream archive, with fixed file order, timestamps and ownership."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        for path in sorted(source.rglob("*")):
            entry = archive.gettarinfo(path, f"vmem-{upstream}/{path.relative_to(source)}")
            entry.mtime, entry.uid, entry.gid = when, 0, 0
            entry.uname = entry.gname = "root"
            if entry.isfile():
                with open(path, "rb") as file:
                    archive.addfile(entry, file)
            else:
                archive.addfile(entry)
    made = folder / f"vmem_{upstream}.orig.tar.xz"
    made.write_bytes(lzma.compress(out.getvalue()))
    return made


def prepare(folder: Path, when: int) -> Path:
    """Creates the upstream archive and, next to it, the tree to build; returns the tree."""
    upstream = version()
    tree = folder / f"vmem-{upstream}"
    copy_tracked(tree)
    shutil.rmtree(tree / "packaging" / "debian")
    # Measurements and logs, which the packages do not need.
    shutil.rmtree(tree / "benchmarks" / "results", ignore_errors=True)
    make_orig(tree, folder, upstream, when)
    shutil.copytree(FILES, tree / "debian")
    who = maintainer()
    control = tree / "debian" / "control"
    control.write_text(control.read_text("utf-8").replace("@MAINTAINER@", who), encoding="utf-8")
    (tree / "debian" / "changelog").write_text(changelog(upstream, who, when), encoding="utf-8")
    # Debian's tools keep the timestamps of files that are older than the changelog's entry.
    for path in tree.rglob("*"):
        os.utime(path, (when, when))
    return tree


def make_deb(out: Path, *, check: bool = True) -> list[Path]:
    """Builds all packages into a directory and returns the files; `check` runs the library's tests.

    Raises:
        DistError: a tool failed; the message contains its output.
    """
    install_tools(TOOLS)
    if not has_probes():  # optional in the setup, but required for a package
        install(["probes"])
    when = epoch()
    with usual_umask(), tempfile.TemporaryDirectory(prefix="vmem-deb-") as name:
        folder = Path(name)
        tree = prepare(folder, when)
        jobs = len(os.sched_getaffinity(0))
        options = f"parallel={jobs}" + ("" if check else " nocheck")
        env = {"SOURCE_DATE_EPOCH": str(when), "DEB_BUILD_OPTIONS": options}
        # Do not inherit settings from a calling make.
        env |= {"MAKEFLAGS": "", "MAKELEVEL": "", "MFLAGS": ""}
        run("dpkg-buildpackage", "-us", "-uc", cwd=tree, **env)
        made = sorted(path for path in folder.iterdir() if path.is_file())
        built = {path.name.split("_")[0] for path in made if path.suffix == ".deb"}
        if missing := set(PACKAGES) - built:
            raise DistError(f"not built: {', '.join(sorted(missing))}")
        shutil.rmtree(out, ignore_errors=True)
        out.mkdir(parents=True)
        return [Path(shutil.copy(path, out)) for path in made]


def make_twice(out: Path) -> list[Path]:
    """Builds everything twice, the second time without tests, in another time zone and umask.

    Raises:
        DistError: a package or the source archive differs between the two builds.
    """
    made = make_deb(out)
    with elsewhere(), tempfile.TemporaryDirectory(prefix="vmem-again-") as name:
        again = make_deb(Path(name) / "deb", check=False)
        # The other files describe the build itself.
        kept = (".deb", ".dsc", ".xz")
        pairs = [[one for one in files if one.suffix in kept] for files in (made, again)]
        must_be_same(*pairs)
    return made


def main() -> int:
    """Parses the command line and builds the packages."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "dist" / "deb", help="default: dist/deb")
    parser.add_argument("--no-check", action="store_true", help="skip the library's tests")
    options = parser.parse_args()
    try:
        for path in make_deb(options.out, check=not options.no_check):
            print(f"{path.stat().st_size:9} {path.name}", flush=True)
    except DistError as error:
        print(f"deb: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
