#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Builds the published files in dist/: sdist, wheel, the benchmarks' wheel, SBOM, checksums.

The wheel is built from the sdist, which proves that the sdist is complete. The same commit gives
the same bytes wherever it is built: timestamps are the commit's (or SOURCE_DATE_EPOCH), owners are
root, permissions do not depend on the umask, and the extension does not contain the build
directory's name. `--check` builds a second time, in another directory, time zone and umask, and
compares. The wheel is tagged with the oldest platform that auditwheel accepts.
"""

from __future__ import annotations

import argparse
import contextlib
import gzip
import hashlib
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import uuid
import zipfile
from collections.abc import Iterator, Sequence
from email.parser import HeaderParser
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PYTHON = ROOT / "build" / "venv" / "bin" / "python"
# Otherwise the debug information would contain the build directory's name.
FLAGS = "-g0 -ffile-prefix-map={folder}=. -fdebug-prefix-map={folder}=."


class DistError(Exception):
    """An error whose message is shown to the user without a traceback."""


def run(*command: str | Path, cwd: Path = ROOT, **env: str) -> str:
    """Runs a command and returns its output; raises DistError with the output if it fails."""
    done = subprocess.run(
        [str(word) for word in command],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        cwd=cwd,
        env={**os.environ, **env},
        check=False,
    )
    if done.returncode:
        raise DistError(f"{' '.join(map(str, command))}\n{done.stdout}{done.stderr}")
    return done.stdout


def epoch() -> int:
    """Returns the timestamp for all files: SOURCE_DATE_EPOCH, or the last commit's time."""
    given = os.environ.get("SOURCE_DATE_EPOCH")
    return int(given or run("git", "log", "-1", "--format=%ct"))


@contextlib.contextmanager
def usual_umask() -> Iterator[None]:
    """Sets the usual umask, regardless of the caller's."""
    before = os.umask(0o022)
    try:
        yield
    finally:
        os.umask(before)


@contextlib.contextmanager
def elsewhere() -> Iterator[None]:
    """Changes the time zone and the umask, to detect builds that depend on them."""
    umask, zone = os.umask(0o077), os.environ.get("TZ")
    os.environ["TZ"] = "Pacific/Chatham"
    try:
        yield
    finally:
        os.umask(umask)
        os.environ.pop("TZ")
        if zone is not None:
            os.environ["TZ"] = zone


def must_be_same(made: Sequence[Path], again: Sequence[Path]) -> None:
    """Raises DistError unless two builds produced the same files."""
    for first, second in zip(made, again, strict=True):
        if (first.name, digest(first)) != (second.name, digest(second)):
            raise DistError(f"{first.name} is not the same when built again")


def copy_tracked(folder: Path) -> None:
    """Copies the tracked files as they are in the working tree."""
    for name in run("git", "ls-files", "-z").split("\0"):
        source = ROOT / name
        if name and source.is_file():
            target = folder / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, target)
            target.chmod(0o755 if os.access(source, os.X_OK) else 0o644)


def make_sdist(source: Path, folder: Path, when: int) -> Path:
    """Builds a source tree's sdist and rewrites it with fixed order, timestamps and ownership."""
    call = "import sys, setuptools.build_meta as b; print(b.build_sdist(sys.argv[1]))"
    run(PYTHON, "-c", call, folder, cwd=source)
    (made,) = folder.glob("*.tar.gz")
    out = io.BytesIO()
    with tarfile.open(made) as old, tarfile.open(fileobj=out, mode="w") as new:
        for entry in sorted(old.getmembers(), key=lambda one: one.name):
            plain = tarfile.TarInfo(entry.name)
            plain.type, plain.size, plain.mtime = entry.type, entry.size, when
            plain.mode = 0o755 if entry.isdir() or entry.mode & 0o100 else 0o644
            plain.uname = plain.gname = "root"
            new.addfile(plain, old.extractfile(entry) if entry.isfile() else None)
    made.write_bytes(gzip.compress(out.getvalue(), mtime=when))
    return made


def make_wheel(sdist: Path, folder: Path, when: int) -> Path:
    """Builds an sdist's wheel, tagged for the oldest compatible platform."""
    with tempfile.TemporaryDirectory(prefix="vmem-dist-") as name:
        top = Path(name)
        with tarfile.open(sdist) as archive:
            archive.extractall(top, filter="data")
        (source,) = top.iterdir()
        flags = FLAGS.format(folder=source)
        call = "import sys, setuptools.build_meta as b; print(b.build_wheel(sys.argv[1]))"
        env = {"SOURCE_DATE_EPOCH": str(when), "CFLAGS": flags, "LDFLAGS": "-Wl,-s"}
        run(PYTHON, "-c", call, top, cwd=source, **env)
        (plain,) = top.glob("*.whl")
        tags = ["wheel", "tags", "--remove", "--platform-tag", platform_tag(plain)]
        run(PYTHON, "-m", *tags, plain, SOURCE_DATE_EPOCH=str(when))
        (made,) = top.glob("*.whl")
        return Path(shutil.copy(made, folder))


def make_bench_wheel(source: Path, folder: Path, when: int) -> Path:
    """Builds the wheel of pyvmem-bench from a source tree's benchmarks/."""
    call = "import sys, setuptools.build_meta as b; print(b.build_wheel(sys.argv[1]))"
    run(PYTHON, "-c", call, folder, cwd=source / "benchmarks", SOURCE_DATE_EPOCH=str(when))
    (made,) = folder.glob("pyvmem_bench-*.whl")
    return made


def platform_tag(wheel: Path) -> str:
    """Returns the oldest manylinux tag that auditwheel accepts for a wheel."""
    said = run(PYTHON, "-m", "auditwheel", "show", wheel)
    found = re.search(r'platform\s+tag:\s+"(manylinux_\w+)"', said)
    if found is None:
        raise DistError(f"{wheel.name} fits no manylinux tag:\n{said}")
    return found.group(1)


def check_wheel(wheel: Path) -> None:
    """Raises DistError unless the wheel is abi3 and bundles no library other than the extension.

    The extension may need only libc, and must not contain the name of its build directory.
    """
    if "-cp310-abi3-manylinux_" not in wheel.name:
        raise DistError(
            f"{wheel.name} is not tagged for the stable ABI of Python 3.10 and manylinux"
        )
    with zipfile.ZipFile(wheel) as archive, tempfile.TemporaryDirectory() as folder:
        names = archive.namelist()
        libraries = [name for name in names if ".so" in name]
        if libraries != ["pyvmem/_vmem.abi3.so"]:
            raise DistError(f"{wheel.name} contains {libraries}")
        if strange := [name for name in names if name.endswith((".c", ".h", ".o"))]:
            raise DistError(f"{wheel.name} contains {strange}")
        path = archive.extract(libraries[0], folder)
        needed = re.findall(r"NEEDED.*\[(.*)\]", run("readelf", "-d", path))
        if extra := [name for name in needed if not name.startswith(("libc.", "ld-linux"))]:
            raise DistError(f"{libraries[0]} needs {', '.join(extra)}")
        if str(ROOT).encode() in Path(path).read_bytes():
            raise DistError(f"{libraries[0]} contains the name of its build directory")


# ---- bill of materials ---------------------------------------------------------------------------


def sbom(files: Sequence[Path], when: int) -> dict[str, Any]:
    """Returns the CycloneDX 1.6 bill of materials, generated from the wheel's metadata."""
    (wheel,) = [path for path in files if path.suffix == ".whl"]
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [one for one in archive.namelist() if one.endswith(".dist-info/METADATA")]
        meta = HeaderParser().parsestr(archive.read(name).decode())
    product, version = meta["Name"], meta["Version"]
    ref = f"pkg:pypi/{product}@{version}"
    library = f"pkg:generic/libvmem@{version}"
    parts: list[dict[str, Any]] = [
        {
            "type": "library",
            "bom-ref": library,
            "name": "libvmem",
            "version": version,
            "description": "compiled into pyvmem/_vmem.abi3.so",
            "licenses": [{"license": {"id": "MIT"}}],
            "scope": "required",
            "purl": library,
        }
    ]
    for line in meta.get_all("Requires-Dist", []):
        requirement, _, marker = (part.strip() for part in line.partition(";"))
        match = re.match(r"[A-Za-z0-9._-]+", requirement)
        assert match is not None
        needed = re.sub(r"[-_.]+", "-", match.group()).lower()
        if needed == product:
            continue  # an extra that includes another extra
        extra = re.search(r"extra\s*==\s*['\"]([\w-]+)", marker)
        place = f"pkg:pypi/{needed}"
        part = {
            "type": "library",
            "bom-ref": f"{place}?extra={extra.group(1)}" if extra else place,
            "name": needed,
            "scope": "optional" if extra else "required",
            "purl": place,
            "properties": [{"name": "python:requires-dist", "value": line}],
        }
        parts.append(part)
    stamp = subprocess.check_output(["date", "-u", "-d", f"@{when}", "+%FT%TZ"], text=True).strip()
    parts.sort(key=lambda one: str(one["bom-ref"]))
    required = [one["bom-ref"] for one in parts if one["scope"] == "required"]
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": f"urn:uuid:{uuid.uuid5(uuid.NAMESPACE_URL, f'{ref}#{when}')}",
        "version": 1,
        "metadata": {
            "timestamp": stamp,
            "component": {
                "type": "library",
                "bom-ref": ref,
                "name": product,
                "version": version,
                "description": meta["Summary"],
                "licenses": [{"license": {"id": meta["License-Expression"]}}],
                "purl": ref,
                "components": [
                    {
                        "type": "file",
                        "bom-ref": path.name,
                        "name": path.name,
                        "hashes": [{"alg": "SHA-256", "content": digest(path)}],
                    }
                    for path in sorted(files)
                ],
            },
        },
        "components": parts,
        "dependencies": [{"ref": ref, "dependsOn": required}],
    }


def digest(path: Path) -> str:
    """Returns the SHA-256 of a file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def build(folder: Path, when: int) -> list[Path]:
    """Builds all files into an empty directory and returns their paths."""
    with usual_umask(), tempfile.TemporaryDirectory(prefix="vmem-source-") as name:
        copy_tracked(Path(name))
        sdist = make_sdist(Path(name), folder, when)
        wheel = make_wheel(sdist, folder, when)
        bench = make_bench_wheel(Path(name), folder, when)
    check_wheel(wheel)
    bom = folder / f"{wheel.name.split('-cp')[0]}.cdx.json"
    bom.write_text(json.dumps(sbom([sdist, wheel], when), indent=2) + "\n", encoding="utf-8")
    made = [sdist, wheel, bench, bom]
    sums = folder / "SHA256SUMS"
    sums.write_text("".join(f"{digest(path)}  {path.name}\n" for path in made), encoding="utf-8")
    return [*made, sums]


def main() -> int:
    """Parses the command line and builds the files."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="default: dist/")
    parser.add_argument("--check", action="store_true", help="build twice and compare")
    options = parser.parse_args()
    try:
        when = epoch()
        with tempfile.TemporaryDirectory(prefix="vmem-made-") as name:
            made = build(Path(name), when)
            if options.check:
                with elsewhere(), tempfile.TemporaryDirectory(prefix="vmem-again-") as other:
                    must_be_same(made, build(Path(other), when))
            shutil.rmtree(options.out, ignore_errors=True)
            options.out.mkdir(parents=True)
            for path in made:
                shutil.copy(path, options.out)
                print(f"{path.stat().st_size:9} {path.name}", flush=True)
    except DistError as error:
        print(f"dist: {error}", file=sys.stderr)
        return 1
    if options.check:
        print("two builds gave identical bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
