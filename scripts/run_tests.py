#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Runs every test this machine can run, stage by stage, and says at the end what was not run.

The lines of the runners (pytest's last one, "N passed, N failed" of the C programs) appear as they
come. Exit status 0: no stage failed.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / "build"
VENV = BUILD / "venv" / "bin"
PYTHON = VENV / "python"
OTHER_PYTHONS = ("3.10", "3.11", "3.12", "3.13")
LINTED = ("pyvmem", "scripts", "tests", "setup.py")


class Failed(Exception):
    """A stage found something wrong."""


@dataclass
class Session:
    """What the stages share: the options, and notes on what could not be run."""

    long: bool = False
    backends: list[str] = field(default_factory=list)
    not_run: list[str] = field(default_factory=list)

    def skip(self, text: str) -> None:
        """Notes a test that this machine cannot run."""
        print(f"not run: {text}", flush=True)
        self.not_run.append(text)


def call(*command: str | Path, cwd: Path = ROOT, **env: str) -> None:
    """Runs a command with no standard input; Failed unless it succeeds."""
    done = subprocess.run(
        [str(c) for c in command],
        stdin=subprocess.DEVNULL,
        cwd=cwd,
        env={**os.environ, **env},
        check=False,
    )
    if done.returncode:
        raise Failed(f"exit status {done.returncode}: {' '.join(map(str, command))}")


def quiet(*command: str | Path, cwd: Path = ROOT, **env: str) -> str:
    """Runs a command, returns its output; shows it and raises Failed unless it succeeds."""
    done = subprocess.run(
        [str(c) for c in command],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=cwd,
        env={**os.environ, **env},
        check=False,
    )
    if done.returncode:
        print(done.stdout, flush=True)
        raise Failed(f"exit status {done.returncode}: {' '.join(map(str, command))}")
    return done.stdout


def make(*arguments: str) -> list[str]:
    """The command that builds in libvmem/ on two cores."""
    return ["make", "-s", "--no-print-directory", "-C", "libvmem", "-j2", *arguments]


def c_tests(sanitizer: str) -> Callable[[Session], None]:
    """The C programs of tests/c, built with a sanitizer or none."""

    def stage(session: Session) -> None:
        if not list((ROOT / "tests" / "c").glob("test_*.c")):
            raise Failed("tests/c holds no test")
        option = f"SANITIZE={sanitizer}"
        quiet(*make("tests", option))
        call(*make("check", option), ASAN_OPTIONS="detect_leaks=1")

    return stage


def examples(session: Session) -> None:
    """The examples, linked with the shared library, plain and with AddressSanitizer."""
    for sanitizer in ("SANITIZE=", "SANITIZE=address"):
        quiet(*make("examples", sanitizer))
        call(*make("run-examples", sanitizer))


def library(session: Session) -> None:
    """Public names, man pages, and an installation used as a stranger would."""
    quiet(*make("all"))
    call(PYTHON, ROOT / "scripts" / "check_library.py")


def readme(session: Session) -> None:
    """The README's Python, and the files it points at."""
    call(PYTHON, ROOT / "scripts" / "check_readme.py")


def c_sources() -> list[Path]:
    """The C in libvmem's dialect; vmem.h is laid out by hand."""
    folders = ("libvmem/src", "libvmem/examples", "tests/c", "tests/gpu")
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.[ch]"))


def lint(session: Session) -> None:
    """ruff, mypy --strict, shellcheck, clang-format and what is generated into the README."""
    scripts: list[Path] = [*ROOT.glob("scripts/*.sh"), ROOT / ".ci" / "run"]
    scripts += [ROOT / "tests" / "kernel" / "guest" / name for name in ("init", "image")]
    commands: list[list[str | Path]] = [
        [PYTHON, "-m", "ruff", "check", *LINTED],
        [PYTHON, "-m", "ruff", "format", "--check", *LINTED],
        [PYTHON, "-m", "mypy", "pyvmem", "scripts"],
        [PYTHON, "-m", "mypy", *sorted(ROOT.glob("tests/kernel/*.py"))],
        [VENV / "shellcheck", *scripts],
        [VENV / "clang-format", "--dry-run", "-Werror", *c_sources()],
        [PYTHON, ROOT / "scripts" / "readme_tables.py", "--check"],
        [PYTHON, ROOT / "scripts" / "check_text.py"],
    ]
    failed = []
    for command in commands:
        try:
            # Where the programs of tests/kernel find the scripts that they build with.
            call(*command, MYPYPATH=str(ROOT / "scripts"))
        except Failed as error:
            failed.append(str(error))
    if failed:
        raise Failed("; ".join(failed))


def python_tests(session: Session) -> None:
    """pytest on the back end host."""
    marks = "long or not long" if session.long else "not long"
    call(PYTHON, "-m", "pytest", "-q", "-m", marks, "tests/python", VMEM_TEST_BACKEND="host")


def kernel_scripts(session: Session) -> None:
    """What builds, loads and tests the driver, as far as no driver is needed for it."""
    call(PYTHON, ROOT / "scripts" / "kernel_setup.py")
    call(PYTHON, "-m", "pytest", "-q", "tests/kernel")


def kernel(session: Session) -> None:
    """The patched driver on software GPUs, in virtual machines."""
    long = ["--long"] if session.long else []
    call(PYTHON, ROOT / "scripts" / "kernel_setup.py", *long)
    call(PYTHON, ROOT / "tests" / "kernel" / "suite.py", *long)


def kernel_checks(session: Session) -> None:
    """The patches on every version; sparse and all warnings; with --long, builds that repeat."""
    call(PYTHON, ROOT / "scripts" / "kernel_setup.py")
    call(PYTHON, ROOT / "scripts" / "check_patches.py", *(["--build"] if session.long else []))
    call("make", "-s", "--no-print-directory", "-C", "kernel_module", "check")
    for kind in ("release", "debug") if session.long else ():
        call(PYTHON, ROOT / "scripts" / "check_reproducible.py", "--type", kind)


def gpu_checks(session: Session) -> None:
    """The layouts of the driver's interface; the GPU back ends alone, where there is a GPU."""
    build = BUILD / "gpu"
    quiet("make", "-s", "--no-print-directory", "-C", "tests/gpu", f"OUT={build}", "all")
    programs = [build / "abi_check", build / "backend_check"]
    call("sh", "scripts/run_c_tests.sh", "300", "", *programs, COUNT="1")


def usable_gpu_backends() -> list[str]:
    """Those of stock and cuda that their probe proves."""
    found = json.loads(quiet(VENV / "vmem", "probe", "--json"))
    return [one["backend"] for one in found if one["usable"] and one["backend"] != "host"]


def gpu_tests(session: Session) -> None:
    """pytest on the back ends of the GPU, and the tests that need one."""
    call(VENV / "vmem", "probe")
    backends = session.backends or usable_gpu_backends()
    if not backends:
        raise Failed("no back end of a GPU can be used on this machine")
    folders = ["tests/python", "tests/gpu"]
    call(PYTHON, "-m", "pytest", "-q", *folders, VMEM_TEST_BACKEND=",".join(backends))


def interpreters() -> tuple[dict[str, str], list[str]]:
    """Executables of the Pythons that are here, by version, and the versions that are not."""
    found: dict[str, str] = {}
    for version in OTHER_PYTHONS:
        for path in (shutil.which(f"python{version}"), *map(str, pyenv_pythons(version))):
            probe = "import sys, venv; print('%d.%d' % sys.version_info[:2])"
            if path and (answer(path, "-c", probe) == version):
                found[version] = path
                break
    return found, [v for v in OTHER_PYTHONS if v not in found]


def pyenv_pythons(version: str) -> list[Path]:
    """Interpreters that pyenv keeps, selected or not."""
    root = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    return sorted(root.glob(f"versions/{version}.*/bin/python{version}"))


def answer(*command: str) -> str | None:
    """What a command prints, None when it fails."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else None


def wheel(session: Session) -> None:
    """A wheel built from a copy of the tracked sources, imported in new environments."""
    found, absent = interpreters()
    for version in absent:
        session.skip(f"the wheel on Python {version}: no such interpreter here")
    with tempfile.TemporaryDirectory(prefix="vmem-wheel-") as name:
        folder = Path(name)
        source = folder / "source"
        for path in quiet("git", "ls-files", "-z").split("\0"):
            if path and (ROOT / path).is_file():
                (source / path).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / path, source / path)
        pip = ["-m", "pip", "--disable-pip-version-check", "--no-input"]
        build = [*pip, "wheel", "-q", "--no-deps", "--no-build-isolation"]
        quiet(PYTHON, *build, "-w", folder, source)
        (built,) = folder.glob("*.whl")
        print(f"built {built.name}", flush=True)
        check = (ROOT / "scripts" / "check_wheel.py").resolve()
        for version, python in found.items():
            environment = folder / f"venv-{version}"
            quiet(python, "-m", "venv", environment)
            if answer(str(environment / "bin/python"), *pip, "install", "-q", str(built)) is None:
                session.skip(f"the wheel on Python {version}: its requirements cannot be had")
                continue
            said = quiet(environment / "bin/python", check, cwd=folder)
            print(f"Python {version}: {said}", end="", flush=True)


STAGES: dict[str, Callable[[Session], None]] = {
    "c": c_tests(""),
    "c-address": c_tests("address"),
    "c-thread": c_tests("thread"),
    "examples": examples,
    "library": library,
    "lint": lint,
    "readme": readme,
    "python": python_tests,
    "gpu-checks": gpu_checks,
    "kernel-scripts": kernel_scripts,
    "kernel": kernel,
    "kernel-checks": kernel_checks,
    "wheel": wheel,
    "gpu": gpu_tests,
}


def main() -> int:
    """Runs the stages asked for (default: all but gpu) and reports."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("stages", nargs="*", metavar="stage", help=", ".join(STAGES))
    parser.add_argument("--long", action="store_true", help="also the tests marked long")
    parser.add_argument("--gpu", nargs="*", metavar="BACKEND", help="the stage gpu alone")
    options = parser.parse_args()
    unknown = [name for name in options.stages if name not in STAGES]
    if unknown:
        parser.error(f"no such stage: {', '.join(unknown)}")
    names = options.stages or [name for name in STAGES if name != "gpu"]
    session = Session(long=options.long)
    if options.gpu is not None:
        names = ["gpu-checks", "gpu"]
        session.backends = options.gpu
    results: list[str] = []
    failed = 0
    for name in names:
        print(f"\n#### {name}: {(STAGES[name].__doc__ or '').strip()}", flush=True)
        start = time.monotonic()
        try:
            STAGES[name](session)
            result = "passed"
        except Failed as error:
            print(f"FAILED: {error}", flush=True)
            result, failed = "FAILED", failed + 1
        results.append(f"{name:<14} {result:<8} {time.monotonic() - start:6.0f} s")
    if not options.stages and options.gpu is None:
        session.skip("what needs a GPU (make test-gpu, on a machine with one)")
    results += [f"not run: {text}" for text in session.not_run]
    print("\n#### summary", *results, sep="\n", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
