#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Checks the Debian packages: lintian, and a new Debian system that installs, uses and purges them.

mmdebstrap makes that system in a temporary folder, from the archive that this machine uses. The
driver's source comes from Debian's contrib there; the nvidia.ko that the module has to fit is the
one that the driver's tests build. Exit status 77: this machine cannot make a Debian system.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from apt_area import archive_source
from deb import PACKAGES, install_tools, make_deb
from dist import DistError, run
from driver_debian import PACKAGE
from kernel_common import KernelBuildError
from kernel_headers import default_headers
from kernel_tree import Tree, build_tree
from module_source import DEFAULT_VERSION
from vmem_header import ROOT

__all__ = ["lint", "root_command"]

TOOLS = {"/usr/bin/lintian": "lintian", "/usr/bin/mmdebstrap": "mmdebstrap"}
SUITE = "bookworm"  # the one that has the driver DEFAULT_VERSION
SKIP = 77
CHECK = ROOT / "packaging" / "check_deb.sh"


def lint(changes: Path) -> None:
    """Raises DistError unless lintian finds neither errors nor warnings."""
    done = subprocess.run(
        ["lintian", "--allow-root", "--fail-on", "error,warning", str(changes)],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode or "E: " in done.stdout or "W: " in done.stdout:
        raise DistError(f"lintian {changes.name}\n{done.stdout}{done.stderr}")


def root_command(debs: Path, kernel: str, mode: str) -> list[str]:
    """The command that makes the system, runs the check in it, and leaves nothing."""
    source = archive_source()
    signed = f"[signed-by={source.signed_by}] " if source.signed_by.startswith("/") else ""
    line = f"deb {signed}{source.uri} {SUITE} main contrib"
    include = ["dkms", "gcc", "libc6-dev", "pkgconf", f"linux-headers-{kernel}", PACKAGE]
    return [
        *("mmdebstrap", f"--mode={mode}", "--variant=minbase", "--format=null", "--quiet"),
        f"--include={','.join(include)}",
        f'--customize-hook=copy-in "{debs}" "{CHECK}" /',
        f'--customize-hook=chroot "$1" sh /{CHECK.name} {kernel} </dev/null',
        *(SUITE, "/dev/null", line),
    ]


def may_unshare() -> bool:
    """Whether an ordinary user can be root of a name space of their own here."""
    done = subprocess.run(["unshare", "-Ur", "true"], capture_output=True, check=False)
    return done.returncode == 0


def check(folder: Path) -> int:
    """Builds, lints, installs; the exit status."""
    debs = folder / "debs"
    made = make_deb(debs)
    (changes,) = [path for path in made if path.suffix == ".changes"]
    lint(changes)
    print(f"lintian has nothing to say about {', '.join(PACKAGES)}", flush=True)
    headers = default_headers()
    tree = build_tree(Tree(version=DEFAULT_VERSION, headers=headers))
    shutil.copyfile(tree / "nvidia.ko", debs / "nvidia.ko")
    root = run("id", "-u").strip() == "0"
    if not root and not may_unshare():
        print("neither root nor a user name space: no Debian system can be made", flush=True)
        return SKIP
    command = root_command(debs, headers.release, "root" if root else "unshare")
    status = subprocess.run(command, stdin=subprocess.DEVNULL, check=False).returncode
    if status:
        raise DistError(f"exit status {status}: {' '.join(command[:3])} ...")
    return 0


def main() -> int:
    """Reads the command line."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    try:
        install_tools(TOOLS)
        with tempfile.TemporaryDirectory(prefix="vmem-deb-check-") as name:
            return check(Path(name))
    except (DistError, KernelBuildError) as error:
        print(f"check_deb: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
