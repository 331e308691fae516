# SPDX-License-Identifier: MIT
"""Prints the files of the Python environment that runs this script, as JSON.

`executables` lists the interpreter's path and then the targets of its links, `library` is the
standard library's directory, and `files` lists the files of the requested distributions and their
dependencies.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import sys
import sysconfig
from pathlib import Path

__all__ = ["main"]

LEFT_OUT = {"bin", "include", "share", "test", "tests"}
# Exceptions to LEFT_OUT: programs, a file that torch needs when it is imported, and testing
# packages that are part of an API.
KEPT = (
    "../../../bin/",
    "torch/bin/torch_shm_manager",
    "numpy/testing/",
    "torch/testing/",
    "torch/_numpy/testing/",
    "numpy/_core/tests/",
)
# Distributions that torch requires only for machines with a GPU.
VENDOR = ("nvidia-", "triton", "cuda-")


def distributions(names: list[str]) -> list[importlib.metadata.Distribution]:
    """Returns those of the named distributions and their dependencies that are installed."""
    found: dict[str, importlib.metadata.Distribution] = {}
    todo, seen = list(names), set()
    while todo:
        name = re.sub(r"[-_.]+", "-", todo.pop()).lower()
        if name in seen or name.startswith(VENDOR):
            continue
        seen.add(name)
        try:
            found[name] = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        for requirement in found[name].requires or ():
            needed = re.match(r"[\w.-]+", requirement)
            if needed and "extra ==" not in requirement:
                todo.append(needed.group())
    return [found[name] for name in sorted(found)]


def wanted(name: str) -> bool:
    """True if a file of a distribution is needed at run time."""
    if name.startswith(KEPT):
        return True
    folders = set(name.split("/")[:-1])
    return not folders & LEFT_OUT and not name.endswith(".a")


def links(path: Path) -> list[str]:
    """Returns a path and, if it is a link, the targets in its chain of links."""
    found = [str(path)]
    while path.is_symlink():
        path = path.parent / os.readlink(path)
        found.append(str(path))
    return found


def main() -> None:
    """Prints the JSON; the arguments are distribution names."""
    chosen = distributions(sys.argv[1:])
    files: list[str] = []
    for one in chosen:
        files += [
            os.path.normpath(str(one.locate_file(file)))
            for file in one.files or ()
            if wanted(str(file))
        ]
    site = Path(sysconfig.get_path("purelib"))
    # Files through which an environment finds an editable install.
    files += [str(path) for pattern in ("*.pth", "__editable__*") for path in site.glob(pattern)]
    files += [str(path) for path in Path(sys.prefix).glob("pyvenv.cfg")]
    library = sysconfig.get_config_var("LIBDIR")
    shared = sysconfig.get_config_var("LDLIBRARY")
    if library and shared and Path(library, shared).exists() and ".so" in shared:
        files += links(Path(library, shared))
    answer = {
        "version": sys.version,
        "executables": links(Path(sys.executable)),
        "library": str(Path(os.__file__).parent),
        "files": sorted(set(files)),
        "distributions": [f"{one.metadata['Name']} {one.version}" for one in chosen],
    }
    json.dump(answer, sys.stdout)


if __name__ == "__main__":
    main()
