#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Sets up what `make run` and `make test` need; cheap when everything is there.

Debian packages that are missing are listed, then installed (as root or with sudo); everything else
goes below build/. Where the python3 that runs this script has a torch, that torch is kept, and any
version of another requirement that is there too, so that a machine with no network can be used.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterable
from pathlib import Path
from typing import NoReturn

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / "build"
VENV = BUILD / "venv"
STAMPS = BUILD / "stamps"
REQUIREMENTS = ROOT / "scripts" / "requirements"
# Without these nothing runs; the others only take a part of the program or of the tests with them.
ESSENTIAL = ("build",)
OPTIONAL = ("serve", "server", "model", "cuda", "test", "lint", "dist")
# Only the model's file is wanted, not the program that the package is a plug-in of; and vllm.txt
# names what is imported of vLLM, a third of what it asks for.
WITHOUT_DEPENDENCIES = ("model", "vllm")
PYTHONS = ((3, 10), (3, 13))
# A line of a file of requirements; some packages have no version for all Pythons.
PIN = re.compile(r'([\w.-]+)==([\w.+]+)(?:; python_version (<|>=) "3\.(\d+)")?')

Pins = dict[str, str]


def say(text: str) -> None:
    """Prints one line at once, also into a pipe."""
    print(f"setup: {text}", flush=True)


def fail(text: str) -> NoReturn:
    """Ends the program with a message."""
    sys.exit(f"setup: {text}")


def run(*command: str | Path) -> int:
    """Runs a command without a standard input and returns its exit status."""
    words = [str(word) for word in command]
    return subprocess.run(words, stdin=subprocess.DEVNULL, check=False).returncode


def quiet(command: list[str], *, show: bool) -> bool:
    """Whether a command succeeds; what it says is shown when it does not, if `show`."""
    done = subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={**os.environ, "DEBIAN_FRONTEND": "noninteractive"},
        text=True,
        check=False,
    )
    if done.returncode and show:
        print(done.stdout, flush=True)
    return done.returncode == 0


def missing_debian_packages() -> list[str]:
    """The Debian packages whose part of the system is not there."""
    missing = [name for name in ("gcc", "make") if not shutil.which(name)]
    if not Path("/usr/include/stdio.h").exists():
        missing.append("libc6-dev")
    own_python = sysconfig.get_config_var("prefix") == "/usr"
    for module in ("venv", "ensurepip"):
        if importlib.util.find_spec(module) is None:
            if not own_python:
                fail(f"{sys.executable} has no module {module}, and Debian has no package for it")
            missing.append("python3-venv")
            break
    if not Path(sysconfig.get_path("include"), "Python.h").exists():
        if not own_python:
            fail(f"{sys.executable} has no Python.h, and Debian has no package for it")
        missing.append("python3-dev")
    return missing


def useful_debian_packages() -> list[str]:
    """Those that nothing needs, where they are missing: the header of the library's USDT probes."""
    folders = (Path("/usr/include"), *Path("/usr/include").glob("*-linux-gnu"))
    found = any((folder / "sys" / "sdt.h").exists() for folder in folders)
    return [] if found else ["systemtap-sdt-dev"]


def install_useful_packages(packages: list[str]) -> None:
    """Installs them where that can be done without a question; says what is left out otherwise."""
    given_up = STAMPS / "without-useful-packages"
    if given_up.exists() and given_up.read_text(encoding="utf-8") == " ".join(packages):
        return
    apt = ["apt-get", "install", "-y", "--no-install-recommends", *packages]
    if os.geteuid() != 0:
        apt = ["sudo", "-n", *apt]
    update = [*apt[: apt.index("apt-get")], "apt-get", "update"]
    if shutil.which(apt[0]) and shutil.which("apt-get"):
        say("installing " + " ".join(packages))
        if quiet(apt, show=False) or (quiet(update, show=False) and quiet(apt, show=False)):
            return
    say(f"built without {' '.join(packages)}: no USDT probes (docs/operations/trace.md)")
    given_up.write_text(" ".join(packages), encoding="utf-8")


def install_debian_packages(packages: list[str]) -> None:
    """Installs them with apt-get, or says which command does."""
    say("missing Debian packages: " + " ".join(packages))
    apt = ["apt-get", "install", "-y", "--no-install-recommends", *packages]
    if not shutil.which("apt-get"):
        fail("this system has no apt-get: install what corresponds to them, then run this again")
    if os.geteuid() != 0:
        # Asking for a password needs a terminal.
        sudo = ["sudo"] if sys.stdin.isatty() else ["sudo", "-n"]
        if not shutil.which("sudo") or (len(sudo) > 1 and run(*sudo, "true")):
            fail("not root. Run this as root, then this script again:\n  " + shlex.join(apt))
        apt = [*sudo, *apt]
    say("installing them")
    if not quiet(apt, show=False):
        say("that failed; once more with fresh package lists")
        update = [*apt[: apt.index("apt-get")], "apt-get", "update"]
        if not quiet(update, show=True) or not quiet(apt, show=True):
            fail("Debian packages could not be installed: " + " ".join(packages))


def read_pins(group: str, minor: int = sys.version_info[1]) -> Pins:
    """Name to version of one file of requirements, for Python 3.`minor`."""
    path = REQUIREMENTS / f"{group}.txt"
    pins: Pins = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        if not line or line.startswith("#"):
            continue
        pin = PIN.fullmatch(line)
        if pin is None:
            fail(f"{path.name}: no pin: {line}")
        name, version, sign, than = pin.groups()
        if sign is None or (minor < int(than)) == (sign == "<"):
            pins[name] = version
    return pins


def installed(names: Iterable[str]) -> Pins:
    """Versions of those of the distributions that the environment has."""
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
    """Whether pip could install it."""
    pip = [str(VENV / "bin/python"), "-m", "pip", "install", "--disable-pip-version-check"]
    pip += ["--no-input", "--progress-bar", "off", "--retries", "2"]
    return quiet([*pip, *map(str, arguments)], show=show)


def make_venv(keep_torch: bool) -> None:
    """Makes the environment anew when it is missing, broken or of another Python."""
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
    if keep_torch and all(map(importlib.util.find_spec, ("pip", "setuptools"))):
        # An older setuptools that comes with the venv module would hide the one that is there.
        options.append("--without-pip")
    if run(sys.executable, "-m", "venv", *options, VENV):
        fail("the environment could not be made")
    if keep_torch and sys.prefix != sys.base_prefix:
        # An environment made inside an environment sees the outermost Python's packages only.
        site = Path(sysconfig.get_path("purelib", vars={"base": str(VENV), "platbase": str(VENV)}))
        (site / "outer.pth").write_text(sysconfig.get_path("purelib") + "\n", encoding="utf-8")
    stamp.write_text(wanted, encoding="utf-8")


def install_requirements(keep_torch: bool) -> None:
    """Installs what the environment lacks, group by group."""
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
            say(f"still without {' '.join(unmet)} (remove {path} to try again)")
            continue
        say(f"installing {' '.join(unmet)}")
        options = ["--no-deps"] if group in WITHOUT_DEPENDENCIES else []
        optional = keep_torch and group not in ESSENTIAL
        if pip_install(*options, *unmet, show=not optional):
            continue
        if not optional:
            fail(f"requirements of the group {group} could not be installed")
        missing = [pin for pin in unmet if not pip_install(*options, pin, show=False)]
        say(f"not installed: {' '.join(missing)}; what needs it will not run here")
        given_up.write_text("\n".join(missing), encoding="utf-8")


def install_project() -> None:
    """Builds the extension and installs the project, when a source has changed."""
    sources = [ROOT / "pyproject.toml", ROOT / "pyvmem" / "_build.py", VENV / "pyvenv.cfg"]
    sources += [ROOT / name for name in ("setup.py", "MANIFEST.in") if (ROOT / name).exists()]
    sources += sorted((ROOT / "libvmem" / "src").rglob("*.[ch]"))
    sources += sorted((ROOT / "libvmem" / "include").glob("*.h"))
    sources += sorted((ROOT / "kernel_module").glob("*.h"))
    sources += sorted(one for kind in ("*.[ch]", "*.map") for one in (ROOT / "pyvmem").glob(kind))
    digest = hashlib.sha256()
    for path in sources:
        digest.update(f"{path.name}\0".encode() + path.read_bytes())
    digest.update(f"without {useful_debian_packages()}".encode())
    stamp = STAMPS / "project"
    built = any((ROOT / "pyvmem").glob("_vmem*.so"))
    if built and stamp.exists() and stamp.read_text(encoding="utf-8") == digest.hexdigest():
        return
    say("building the extension and installing the project")
    # A program that runs has the old file mapped: it must not be written into.
    for old in (ROOT / "pyvmem").glob("_vmem*.so"):
        old.unlink()
    if not pip_install("--no-deps", "--no-build-isolation", "-e", ROOT):
        fail("the project could not be built")
    stamp.write_text(digest.hexdigest(), encoding="utf-8")


def main() -> None:
    """Brings everything up to date; a second run at the same time waits for the first."""
    if sys.prefix == str(VENV):
        # With the environment activated, `python3` is its own: making it anew would remove the
        # interpreter that does it.
        fail("build/venv is activated: run `deactivate` first, or PYTHON=/usr/bin/python3 make ...")
    version = sys.version_info[:2]
    if not PYTHONS[0] <= version <= PYTHONS[1]:
        fail(f"Python 3.10 to 3.13 is needed; {sys.executable} is {sys.version.split()[0]}")
    STAMPS.mkdir(parents=True, exist_ok=True)
    with open(BUILD / "setup.lock", "w", encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        packages = missing_debian_packages()
        if packages:
            install_debian_packages(packages)
        keep_torch = importlib.util.find_spec("torch") is not None
        make_venv(keep_torch)
        if packages := useful_debian_packages():
            install_useful_packages(packages)
        install_requirements(keep_torch)
        install_project()


if __name__ == "__main__":
    main()
