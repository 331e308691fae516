#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Sets up the environment for `make run` and `make test`; quick if already up to date.

Missing system packages are listed, then installed (as root or with sudo); everything else is
installed under build/. If the python3 that runs this script has torch or another requirement, it is
reused, so that setup works without a network.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import json
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterable
from pathlib import Path

from system_packages import PARTS, fail, has_probes, install, missing, quiet, say

ROOT = Path(__file__).resolve().parent.parent
BENCHMARKS = ROOT / "benchmarks"
BUILD = ROOT / "build"
VENV = BUILD / "venv"
STAMPS = BUILD / "stamps"
REQUIREMENTS = ROOT / "scripts" / "requirements"
# Required groups. Without one of the other groups, only some features or tests are unavailable.
ESSENTIAL = ("build",)
OPTIONAL = ("serve", "server", "model", "cuda", "test", "lint", "dist")
# Groups installed without dependencies: `model` is needed only for the model file; vllm.txt and
# sglang.txt list everything that vLLM and SGLang import, which is a third of their requirements.
WITHOUT_DEPENDENCIES = ("model", "sglang", "sglang-old", "vllm")
PYTHONS = tuple((3, minor) for minor in range(10, 15))
# A line of a requirements file; some pins apply only to certain Python versions.
PIN = re.compile(r'([\w.-]+)==([\w.+]+)(?:; python_version (<|>=) "3\.(\d+)")?')

Pins = dict[str, str]


def run(*command: str | Path) -> int:
    """Runs a command without standard input and returns its exit status."""
    words = [str(word) for word in command]
    return subprocess.run(words, stdin=subprocess.DEVNULL, check=False).returncode


def install_probes() -> None:
    """Installs the header for USDT probes if no password is needed; otherwise prints a hint."""
    given_up = STAMPS / "without-probes"
    if given_up.exists() or install(["probes"], useful=True):
        return
    say(f"built without {PARTS['probes']}: no USDT probes (docs/operations/trace.md)")
    given_up.touch()


def read_pins(group: str, minor: int = sys.version_info[1]) -> Pins:
    """Returns the versions that a requirements file pins for Python 3.`minor`, by package name."""
    path = REQUIREMENTS / f"{group}.txt"
    pins: Pins = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        if not line or line.startswith("#"):
            continue
        pin = PIN.fullmatch(line)
        if pin is None:
            fail(f"{path.name}: not a pinned version: {line}")
        name, version, sign, than = pin.groups()
        if sign is None or (minor < int(than)) == (sign == "<"):
            pins[name] = version
    return pins


def installed(names: Iterable[str]) -> Pins:
    """Returns the installed versions of the given distributions, by name."""
    program = (
        "import importlib.metadata as m, json, sys\n"
        "found = {}\n"
        "for name in sys.argv[1:]:\n"
        "    try: found[name] = m.version(name)\n"
        "    except m.PackageNotFoundError: pass\n"
        "print(json.dumps(found))"
    )
    out = subprocess.check_output([VENV / "bin/python", "-c", program, *names])
    versions: Pins = json.loads(out)
    return versions


def pip_install(*arguments: str | Path, show: bool = True) -> bool:
    """Runs pip install; returns True if it succeeds."""
    pip = [str(VENV / "bin/python"), "-m", "pip", "install", "--disable-pip-version-check"]
    pip += ["--no-input", "--progress-bar", "off", "--retries", "2"]
    return quiet([*pip, *map(str, arguments)], show=show)


def packages(environment: Path) -> Path:
    """Returns an environment's site-packages directory."""
    program = "import sysconfig; print(sysconfig.get_path('purelib'))"
    python = environment / "bin" / "python"
    return Path(subprocess.check_output([python, "-c", program], text=True).strip())


def make_venv(keep_torch: bool) -> None:
    """Recreates the environment if it is missing, broken or was created by a different Python."""
    stamp = STAMPS / "venv"
    wanted = f"{sys.executable} {sys.version} keep_torch={keep_torch}"
    if (
        stamp.exists()
        and stamp.read_text(encoding="utf-8") == wanted
        and not run(VENV / "bin/python", "-c", "import pip")
    ):
        return
    say(f"making {VENV.relative_to(ROOT)} with Python {sys.version.split()[0]}")
    shutil.rmtree(VENV, ignore_errors=True)
    shutil.rmtree(STAMPS, ignore_errors=True)
    STAMPS.mkdir(parents=True)
    options = ["--system-site-packages"] if keep_torch else []
    seen = keep_torch and all(map(importlib.util.find_spec, ("pip", "setuptools")))
    bundled = importlib.util.find_spec("ensurepip") is not None
    if seen or not bundled:
        # An older setuptools bundled with venv would hide the installed version.
        options.append("--without-pip")
    if run(sys.executable, "-m", "venv", *options, VENV):
        fail("the environment could not be created")
    site = packages(VENV)
    if keep_torch and sys.prefix != sys.base_prefix:
        # A nested environment sees only the outermost Python's packages.
        (site / "outer.pth").write_text(sysconfig.get_path("purelib") + "\n", encoding="utf-8")
    if not (seen or bundled):
        # Debian and Ubuntu package ensurepip separately; use an existing pip instead.
        pip = [sys.executable, "-m", "pip", "install", "--target", site, "pip"]
        if not quiet([str(word) for word in pip], show=True):
            fail("pip could not be installed in the environment")
    stamp.write_text(wanted, encoding="utf-8")


def install_requirements(keep_torch: bool) -> None:
    """Installs missing requirements, group by group."""
    groups = [*ESSENTIAL, *OPTIONAL] if keep_torch else ["torch", *ESSENTIAL, *OPTIONAL]
    pins = {group: read_pins(group) for group in groups}
    have = installed(name for group in pins.values() for name in group)
    for group, wanted in pins.items():
        unmet = [
            f"{name}=={version}"
            for name, version in wanted.items()
            if name not in have or (have[name].split("+")[0] != version and not keep_torch)
        ]
        if not unmet:
            continue
        given_up = STAMPS / f"without-{group}"
        if given_up.exists() and given_up.read_text(encoding="utf-8") == "\n".join(unmet):
            path = given_up.relative_to(ROOT)
            say(f"still missing: {' '.join(unmet)} (remove {path} to try again)")
            continue
        say(f"installing {' '.join(unmet)}")
        options = ["--no-deps"] if group in WITHOUT_DEPENDENCIES else []
        optional = keep_torch and group not in ESSENTIAL
        if pip_install(*options, *unmet, show=not optional):
            continue
        if not optional:
            fail(f"requirements of the group {group} could not be installed")
        missing = [pin for pin in unmet if not pip_install(*options, pin, show=False)]
        say(f"not installed: {' '.join(missing)}; tests and features that need it will not run")
        given_up.write_text("\n".join(missing), encoding="utf-8")


def install_project() -> None:
    """Builds the extension and installs the project if a source has changed."""
    sources = [ROOT / "pyproject.toml", ROOT / "pyvmem" / "_build.py", VENV / "pyvenv.cfg"]
    sources.append(BENCHMARKS / "pyproject.toml")
    sources += [ROOT / name for name in ("setup.py", "MANIFEST.in") if (ROOT / name).exists()]
    sources += sorted((ROOT / "libvmem" / "src").rglob("*.[ch]"))
    sources += sorted((ROOT / "libvmem" / "include").glob("*.h"))
    sources += sorted((ROOT / "kernel_module").glob("*.h"))
    sources += sorted(one for kind in ("*.[ch]", "*.map") for one in (ROOT / "pyvmem").glob(kind))
    digest = hashlib.sha256()
    for path in sources:
        digest.update(f"{path.name}\0".encode() + path.read_bytes())
    digest.update(f"probes {has_probes()}".encode())
    stamp = STAMPS / "project"
    built = any((ROOT / "pyvmem").glob("_vmem*.so"))
    if built and stamp.exists() and stamp.read_text(encoding="utf-8") == digest.hexdigest():
        return
    say("building the extension and installing the project")
    # A running program may have the old file mapped, so replace it instead of overwriting it.
    for old in (ROOT / "pyvmem").glob("_vmem*.so"):
        old.unlink()
    if not pip_install("--no-deps", "--no-build-isolation", "-e", ROOT, "-e", BENCHMARKS):
        fail("the project could not be built")
    stamp.write_text(digest.hexdigest(), encoding="utf-8")


def main() -> None:
    """Updates everything; concurrent runs wait for each other."""
    if sys.prefix == str(VENV):
        # In an activated environment, recreating it would delete the running interpreter.
        fail("build/venv is activated: run `deactivate` first, or PYTHON=/usr/bin/python3 make ...")
    if sys.version_info[:2] not in PYTHONS:
        (_, first), (_, last) = PYTHONS[0], PYTHONS[-1]
        here = f"{sys.executable} is {sys.version.split()[0]}"
        other = f"to use another installed Python: PYTHON=python3.{last} make ..."
        fail(f"Python 3.{first} to 3.{last} is needed; {here}; {other}")
    STAMPS.mkdir(parents=True, exist_ok=True)
    with open(BUILD / "setup.lock", "w", encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if parts := missing():
            install(parts)
        keep_torch = importlib.util.find_spec("torch") is not None
        make_venv(keep_torch)
        if not has_probes():
            install_probes()
        install_requirements(keep_torch)
        install_project()


if __name__ == "__main__":
    main()
