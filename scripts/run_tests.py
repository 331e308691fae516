#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Runs all tests possible on this machine, stage by stage, and reports the tests that did not run.

Summaries of the runners (pytest's last line, "N passed, N failed" of the C programs) are printed
immediately. Each stage's duration is stored in build/, so that the next run can estimate the
remaining time; a run that failed or was interrupted names the stage to resume from. The exit status
is 0 if no stage failed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import extra_environment
import vllm_setup
from environment import PYTHONS as SERVED
from extra_environment import CANNOT  # also the exit status of scripts that lack a prerequisite

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / "build"
VENV = BUILD / "venv" / "bin"
PYTHON = VENV / "python"
PYTHONS = tuple(f"{major}.{minor}" for major, minor in SERVED)
VERSION = "import sys, venv; print('%d.%d' % sys.version_info[:2])"
# Requirement groups installed in build/venv: all but linting and packaging.
TESTED_WITH = ("torch", "build", "serve", "server", "model", "cuda", "test")
SLOWEST = ("--durations=12", "--durations-min=8")  # report slow tests in a stage's log
NO_TOOLS = 3  # docs_site.py's exit status without MkDocs
# Tests that take a minute in total and catch most mistakes. They cover each layer and the usual
# cache calls.
EVERYDAY = (
    *("bad_input", "columns", "context", "errors", "order", "parts", "structure", "tensor"),
    *("tickets", "turns", "bench", "docs", "layouts", "logs", "run_tests", "bug_report"),
    *("kvcache", "kvcache_budget", "kvcache_config", "kvcache_prefix", "kvcache_rows"),
    *("kvcache_share", "kvcache_swap", "prefix_tree", "serve_scheduler", "slot_index"),
)
# Tests to run on the cuda back end with a software CUDA driver. Other tests would be slow with its
# page size.
ON_CUDA = (
    *("bad_input", "calls", "context", "entries", "errors", "features", "kvcache"),
    *("kvcache_order", "kvcache_share", "kvcache_swap", "kvcache_waits", "tensor", "torch_pool"),
    "vllm_memory",
)
# Tests whose code depends little on the back end. Every run includes them on the host back end.
ON_CUDA_LONG = (
    *("engine_requests", "kvcache_ahead", "kvcache_budget", "kvcache_host_prefixes"),
    *("kvcache_prefix", "kvcache_rows", "kvcache_window", "parallel"),
)
# Tests to run on the stock back end with software replacements for CUDA and the kernel modules.
ON_STOCK = (
    *("calls", "context", "errors", "features", "kvcache", "kvcache_budget", "kvcache_share"),
    *("kvcache_swap", "selftest"),
)
C_ON_STOCK = (
    *("accounting", "basic", "bind", "entries", "errors", "events", "fork", "join", "large"),
    *("parts", "tickets", "unknown_state", "zeroing"),
)
# C tests that each take half a minute on the stock back end.
C_ON_STOCK_LONG = (
    *("async", "batch", "compact", "limits", "move", "pool", "stress", "threads", "transfer"),
)
# Drivers, each with the Debian suite of its kernel, as in tests/kernel/manifest/kernels.py.
NEWER_KERNELS = (("550.163.01", "--suite", "trixie"),)
# The slowest files in each directory. They start first, so that no processor sits idle at the end.
LONGEST = {
    "tests/python": ("compiled", "serve_identity", "example_engine", "parallel", "interrupts"),
    "tests/vllm": ("engine", "pool", "bench", "server", "example"),
}
ENGINES = 2  # number of parallel vLLM tests, each with one or two processes of 1 GB
LINTED = ("pyvmem", "pyvmem_sglang", "pyvmem_vllm", "benchmarks", "scripts", "tests", "setup.py")
TYPED = ("pyvmem", "pyvmem_sglang", "pyvmem_vllm", "benchmarks/src", "scripts")
WORDS = 12  # how many words of a command are shown
TIMES = BUILD / "test-times.json"
DOCKERFILE = ROOT / "packaging" / "containers" / "Dockerfile"


class Failed(Exception):
    """Raised when a stage failed."""


@dataclass
class Session:
    """The state that all stages share: options, and the list of tests that did not run."""

    long: bool = False
    backends: list[str] = field(default_factory=list)
    not_run: list[str] = field(default_factory=list)

    def skip(self, text: str) -> None:
        """Records a test that this machine cannot run."""
        print(f"not run: {text}", flush=True)
        self.not_run.append(text)


def shown(command: Sequence[str | Path]) -> str:
    """Returns a command shortened to one line: the tool, its options and the first files."""
    words = [str(word) for word in command]
    if len(words) > 2 and words[1] == "-m":
        words = words[2:]
    elif Path(words[0]) == PYTHON:
        words = words[1:]
    words = [word.removeprefix(f"{VENV}/").removeprefix(f"{ROOT}/") for word in words]
    more = f" and {len(words) - WORDS} more" if len(words) > WORDS + 1 else ""
    return shlex.join(words[:WORDS] if more else words) + more


def call(*command: str | Path, cwd: Path = ROOT, **env: str) -> None:
    """Runs a command without standard input; raises Failed unless it succeeds."""
    done = subprocess.run(
        [str(c) for c in command],
        stdin=subprocess.DEVNULL,
        cwd=cwd,
        env={**os.environ, **env},
        check=False,
    )
    if done.returncode:
        raise Failed(f"{shown(command)}: exit status {done.returncode}")


def quiet(*command: str | Path, cwd: Path = ROOT, **env: str) -> str:
    """Runs a command and returns its output; if it fails, shows the output and raises Failed."""
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
        raise Failed(f"{shown(command)}: exit status {done.returncode}")
    return done.stdout


def make(*arguments: str) -> list[str]:
    """Returns the make command that builds in libvmem/ on two cores."""
    return ["make", "-s", "--no-print-directory", "-C", "libvmem", "-j2", *arguments]


def c_tests(sanitizer: str) -> Callable[[Session], None]:
    """Returns a stage that runs the C programs of tests/c; "" stands for no sanitizer."""

    def stage(session: Session) -> None:
        if not list((ROOT / "tests" / "c").glob("test_*.c")):
            raise Failed("tests/c contains no tests")
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
    """Public symbols, man pages, and use of an installed copy."""
    quiet(*make("all"))
    call(PYTHON, ROOT / "scripts" / "check_library.py")


def docs(session: Session) -> None:
    """Runs the documentation's code; builds the site without warnings or dead links."""
    quiet(*make("all"))
    call(PYTHON, ROOT / "scripts" / "check_docs.py")
    command = [str(PYTHON), str(ROOT / "scripts" / "docs_site.py")]
    status = subprocess.run(command, stdin=subprocess.DEVNULL, cwd=ROOT, check=False).returncode
    if status == NO_TOOLS:
        session.skip("the documentation's site: its tools are not available here")
    elif status:
        raise Failed(f"scripts/docs_site.py: exit status {status}")


def c_sources() -> list[Path]:
    """Returns the C files to format in libvmem's style; vmem.h is formatted by hand."""
    folders = ("libvmem/src", "libvmem/examples", "tests/c", "tests/gpu", "tests/softcuda")
    found = [path for folder in folders for path in (ROOT / folder).rglob("*.[ch]")]
    return sorted([*found, *(ROOT / "pyvmem").glob("_[!v]*.[ch]")])  # _vmem.c is generated


def lint(session: Session) -> None:
    """ruff, mypy --strict, shellcheck, hadolint, clang-format, and generated tables."""
    scripts: list[Path] = [*ROOT.glob("scripts/*.sh"), ROOT / ".ci" / "run"]
    scripts += [ROOT / "tests" / "kernel" / "guest" / name for name in ("init", "image")]
    scripts += [ROOT / "kernel_module" / "dkms" / name for name in ("load-uvm", "vmem-dkms")]
    scripts += sorted(ROOT.glob("packaging/check_*.sh"))
    scripts += sorted(ROOT.glob("packaging/debian/vmem-dkms.p*"))
    commands: list[list[str | Path]] = [
        [PYTHON, "-m", "mypy", *TYPED],  # the longest
        # a separate cache, because the two mypy commands run at the same time
        [
            PYTHON,
            "-m",
            "mypy",
            "--cache-dir=.mypy_cache/kernel",
            *sorted(ROOT.glob("tests/kernel/*.py")),
        ],
        [PYTHON, "-m", "ruff", "check", *LINTED],
        [PYTHON, "-m", "ruff", "format", "--check", *LINTED],
        [VENV / "shellcheck", *scripts],
        # Ignored: unpinned Debian packages and wheel requirements.
        [VENV / "hadolint", "--ignore=DL3008", "--ignore=DL3013", DOCKERFILE],
        [VENV / "clang-format", "--dry-run", "-Werror", *c_sources()],
        [PYTHON, ROOT / "scripts" / "readme_tables.py", "--check"],
        [PYTHON, ROOT / "scripts" / "check_text.py"],
    ]
    # MYPYPATH for the programs of tests/kernel, which import scripts/.
    path = f"{ROOT / 'scripts'}:{ROOT / 'benchmarks' / 'src'}"

    def failure(command: list[str | Path]) -> str:
        try:
            call(*command, MYPYPATH=path)
        except Failed as error:
            return str(error)
        return ""

    with ThreadPoolExecutor(processors()) as pool:
        failed = [text for text in pool.map(failure, commands) if text]
    if failed:
        raise Failed("; ".join(failed))


def processors() -> int:
    """Returns the number of processors that this process may use."""
    return len(os.sched_getaffinity(0))


def side_by_side(workers: int) -> tuple[str, ...]:
    """Returns pytest's options for parallel processes, each of which runs whole files."""
    return ("-n", str(workers), "--dist", "loadfile")


def longest_first(folder: str) -> list[str]:
    """Returns pytest's arguments for a directory's test files, starting with those in `LONGEST`."""
    files = {one.stem.removeprefix("test_"): one for one in (ROOT / folder).glob("test_*.py")}
    names = dict.fromkeys((*LONGEST[folder], *sorted(files)))
    paths = [str(files[name].relative_to(ROOT)) for name in names]
    return ["--no-loadscope-reorder", *paths]


def pytest_on(
    backend: str,
    python: Path,
    marks: str,
    *what: str | Path,
    libraries: str = "",
    preload: str = "",
    told: str = "-q",
) -> None:
    """Runs pytest on a back end, with a process per processor, each of which runs whole files.

    Args:
        backend: the back end.
        python: the interpreter.
        marks: pytest's expression that selects tests by their marks.
        what: pytest's other arguments.
        libraries: a directory to search first for shared libraries.
        preload: the value of LD_PRELOAD.
        told: pytest's verbosity option.
    """
    workers = processors()
    if backend != "host":
        workers = min(workers, 8)  # each process has a CUDA context
    words = [told, "-m", marks, *side_by_side(workers), *SLOWEST]
    path = libraries or os.environ.get("LD_LIBRARY_PATH", "")
    what = ("-m", "pytest", *words, *what)
    first = preload or os.environ.get("LD_PRELOAD", "")
    call(python, *what, VMEM_TEST_BACKEND=backend, LD_LIBRARY_PATH=path, LD_PRELOAD=first)


def python_tests(session: Session) -> None:
    """pytest on the back end host; with --long, also interrupts at every point."""
    marks, points = ("long or not long", ["--points=all"]) if session.long else ("not long", [])
    pytest_on("host", PYTHON, marks, *points, *longest_first("tests/python"))


def other_pythons(session: Session) -> None:
    """pytest on the back end host with every other installed Python, without long tests."""
    own = answer(str(PYTHON), "-c", VERSION)
    found, absent = interpreters()
    for version in absent:
        if version != own:
            session.skip(f"the Python tests on {version}: no such interpreter here")
    failed = []
    for version, python in found.items():
        if version == own:
            continue
        venv = BUILD / f"python-{version}"
        size = "2 GB, with PyPI's torch 5 GB"
        status = extra_environment.make(venv, TESTED_WITH, python=python, size=size)
        if status == CANNOT:
            session.skip(f"the Python tests on {version}: requirements unavailable (see above)")
            continue
        if status:
            raise Failed(f"the environment of Python {version} could not be created")
        print(f"Python {version}:", flush=True)
        try:
            pytest_on("host", venv / "bin" / "python", "not long", "tests/python")
        except Failed:
            failed.append(version)
    if failed:
        raise Failed(f"the Python tests on {', '.join(failed)}")


def can(script: str, *words: str) -> bool:
    """Runs a setup or check script; returns False if this machine cannot run it."""
    command = [str(PYTHON), str(ROOT / "scripts" / script), *words]
    status = subprocess.run(command, stdin=subprocess.DEVNULL, cwd=ROOT, check=False).returncode
    if status not in (0, CANNOT):
        raise Failed(f"scripts/{script}: exit status {status}")
    return status == 0


def transformers(session: Session) -> None:
    """The tests that use transformers, with the oldest version that pyproject.toml allows."""
    if not can("transformers_setup.py"):
        session.skip("the oldest transformers: its environment is not available here (see above)")
        return
    python = BUILD / "transformers" / "bin" / "python"
    version = quiet(python, "-c", "import transformers; print(transformers.__version__)").strip()
    print(f"transformers {version}", flush=True)
    tests = sorted(ROOT.glob("tests/python/test_*.py"))
    uses = [one for one in tests if "transformers" in one.read_text(encoding="utf-8")]
    pytest_on("host", python, "not long", *(one.relative_to(ROOT) for one in uses))


def notebook(session: Session) -> None:
    """A cache in a notebook kernel and under its debugger."""
    if not can("notebook_setup.py"):
        session.skip("a notebook's kernel: not available here (see above)")
        return
    python = BUILD / "notebook" / "bin" / "python"
    pytest_on("host", python, "long", "tests/python/test_notebook.py")


def sglang(session: Session) -> None:
    """SGLang's CPU engine on the elastic pool, compared with stock SGLang."""
    if not can("sglang_setup.py"):
        session.skip("sglang: its environment is not available here (see above)")
        return
    if not can("sglang_setup.py", "old"):
        session.skip("an older SGLang: not available here (see above)")
    # Warnings come from SGLang.
    options = ["-q", "-o", "filterwarnings=default", "--disable-warnings", *SLOWEST]
    python = BUILD / "sglang" / "bin" / "python"
    call(python, "-m", "pytest", *options, "tests/sglang", PYTHONPATH=str(ROOT))


def vllm(session: Session) -> None:
    """vLLM's CPU engine on the elastic pool and stock; with --long, also Ray and other versions."""
    marks = "long or not long" if session.long else "not long"
    # Hundreds of warnings come from vLLM.
    options = ["-q", "-o", "filterwarnings=default", "--disable-warnings", *SLOWEST, "-m", marks]
    python = Path("bin") / "python"
    if not can("vllm_setup.py"):
        session.skip("vllm: its environment is not available here (see above)")
        return
    path = f"{ROOT}:{ROOT / 'benchmarks' / 'src'}"
    words = [*side_by_side(min(ENGINES, processors())), *longest_first("tests/vllm")]
    call(BUILD / "vllm" / python, "-m", "pytest", *options, *words, PYTHONPATH=path)
    if session.long and not can("vllm_setup.py", "ray"):
        session.skip("vllm with Ray: its environment is not available here (see above)")
    elif session.long:
        tests = ["tests/vllm/test_parallel.py", "-k", "ray"]
        call(vllm_setup.RAY / python, "-m", "pytest", *options, *tests, PYTHONPATH=path)
    if session.long and not can("vllm_tests.py"):
        session.skip("vLLM's own tests over the pool: not available here (see above)")
    for requirement in vllm_setup.versions() if session.long else []:
        if not can("vllm_setup.py", requirement):
            session.skip(f"{requirement}: its environment is not available here (see above)")
            continue
        newest = requirement.startswith("vllm==")
        # Benchmarks and the example do not depend on vLLM's internals, so only the newest version
        # runs them.
        tests = [f"tests/vllm/test_{one}.py" for one in ("engine", "sleep", "one_buffer")]
        tests += ["-k", "" if newest else "tokens_and_memory or sleep or one_buffer or another"]
        environment = vllm_setup.environment_of(requirement)
        call(environment / python, "-m", "pytest", *options, *tests, PYTHONPATH=path)


def python_fast(session: Session) -> None:
    """pytest on the back end host, only the files of EVERYDAY."""
    files = [f"tests/python/test_{name}.py" for name in EVERYDAY]
    marks = "not slow and not long"
    call(PYTHON, "-m", "pytest", "-q", "-m", marks, *files, VMEM_TEST_BACKEND="host")


def kernel_scripts(session: Session) -> None:
    """The driver's build, load and test scripts, as far as they need no driver."""
    call(PYTHON, ROOT / "scripts" / "kernel_setup.py")
    call(PYTHON, "-m", "pytest", "-q", *side_by_side(processors()), "tests/kernel")


def kernel(session: Session) -> None:
    """The patched driver on software GPUs, in virtual machines."""
    long = ["--long"] if session.long else []
    call(PYTHON, ROOT / "scripts" / "kernel_setup.py", *long)
    call(PYTHON, ROOT / "tests" / "kernel" / "suite.py", *long)


def kernel_checks(session: Session) -> None:
    """The patches on every version; sparse and all warnings; with --long, reproducible builds."""
    long = ["--long"] if session.long else []
    call(PYTHON, ROOT / "scripts" / "kernel_setup.py", *long)
    call(PYTHON, ROOT / "scripts" / "check_patches.py", *(["--build"] if session.long else []))
    call("make", "-s", "--no-print-directory", "-C", "kernel_module", "check")
    for pair in NEWER_KERNELS if session.long else ():
        call(PYTHON, ROOT / "scripts" / "kernel_check.py", *pair)
    for kind in ("release", "debug") if session.long else ():
        call(PYTHON, ROOT / "scripts" / "check_reproducible.py", "--type", kind)


def gpu_checks(session: Session) -> None:
    """The layouts of the driver's interface; with a GPU, also its back ends on their own."""
    build = BUILD / "gpu"
    quiet("make", "-s", "--no-print-directory", "-C", "tests/gpu", f"OUT={build}", "all")
    programs = [build / "abi_check", build / "backend_check"]
    call("sh", "scripts/run_c_tests.sh", "300", "", *programs, COUNT="1")


def softcuda() -> Path:
    """Builds the software replacements for CUDA and the kernel modules; returns the directory."""
    build = BUILD / "softcuda"
    quiet("make", "-s", "--no-print-directory", "-C", "tests/softcuda", f"OUT={build}")
    return build


def on_software(session: Session, backend: str, names: Sequence[str], preload: str = "") -> None:
    """Runs files of tests/python on a GPU back end, over tests/softcuda."""
    build = softcuda()
    files = [f"tests/python/test_{name}.py" for name in names]
    marks = "not long" if session.long else "not slow and not long"
    first = str(build / preload) if preload else ""
    pytest_on(backend, PYTHON, marks, *files, libraries=str(build), preload=first)


def cuda(session: Session) -> None:
    """The back end cuda on a software CUDA driver, without a GPU."""
    names = (*ON_CUDA, *ON_CUDA_LONG) if session.long else ON_CUDA
    on_software(session, "cuda", names)


def stock(session: Session) -> None:
    """The back end stock on software replacements of CUDA and NVIDIA's modules, without a GPU."""
    quiet(*make("tests"))
    build = softcuda()
    programs = (*C_ON_STOCK, *C_ON_STOCK_LONG) if session.long else C_ON_STOCK
    call(
        *("sh", "scripts/run_c_tests.sh", "300", f"env LD_PRELOAD={build}/softrm.so"),
        *(BUILD / "lib" / "tests" / f"test_{name}" for name in programs),
        VMEM_TEST_BACKEND="stock",
        LD_LIBRARY_PATH=str(build),
    )
    names = dict.fromkeys((*ON_STOCK, *ON_CUDA, *ON_CUDA_LONG)) if session.long else ON_STOCK
    on_software(session, "stock", tuple(names), "softrm.so")


def usable_gpu_backends() -> list[str]:
    """Returns the GPU back ends whose probe succeeds."""
    found = json.loads(quiet(VENV / "vmem", "probe", "--json"))
    return [one["backend"] for one in found if one["usable"] and one["backend"] != "host"]


def gpu_tests(session: Session) -> None:
    """pytest on the GPU's back ends, and the tests that need a GPU."""
    call(VENV / "vmem", "probe")
    backends = session.backends or usable_gpu_backends()
    if not backends:
        raise Failed("no GPU back end can be used on this machine")
    # -v prints each test as it finishes, so that an aborted run shows its failures. -q would
    # cancel it.
    told, failed = "-v", []
    for backend in backends:
        try:
            pytest_on(backend, PYTHON, "not long", "tests/python", told=told)
        except Failed:
            failed.append(f"tests/python on {backend}")
    try:  # serially, because they observe the device's memory from outside
        call(PYTHON, "-m", "pytest", told, "tests/gpu", VMEM_TEST_BACKEND=",".join(backends))
    except Failed:
        failed.append("tests/gpu")
    if failed:
        raise Failed(", ".join(failed))


def interpreters() -> tuple[dict[str, str], list[str]]:
    """Returns the installed Pythons' executables by version, and the missing versions."""
    found: dict[str, str] = {}
    for version in PYTHONS:
        for path in (shutil.which(f"python{version}"), *map(str, pyenv_pythons(version))):
            if path and answer(path, "-c", VERSION) == version:
                found[version] = path
                break
    return found, [v for v in PYTHONS if v not in found]


def pyenv_pythons(version: str) -> list[Path]:
    """Returns the interpreters of a version that pyenv has installed, whether selected or not."""
    root = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    return sorted(root.glob(f"versions/{version}.*/bin/python{version}"))


def answer(*command: str) -> str | None:
    """Runs a command and returns its stripped output, or None if it fails."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else None


def wheel(session: Session) -> None:
    """The files of `make dist`, installed in new environments; with --long, built twice."""
    found, absent = interpreters()
    for version in absent:
        session.skip(f"the wheel on Python {version}: no such interpreter here")
    with tempfile.TemporaryDirectory(prefix="vmem-wheel-") as name:
        folder = Path(name)
        pip = ["-m", "pip", "--disable-pip-version-check", "--no-input"]
        twice = ["--check"] if session.long else []
        quiet(PYTHON, ROOT / "scripts" / "dist.py", "--out", folder / "dist", *twice)
        built, bench = sorted(folder.glob("dist/*.whl"))  # pyvmem-..., pyvmem_bench-...
        print(f"built {built.name}, {bench.name}", flush=True)
        check = (ROOT / "scripts" / "check_wheel.py").resolve()
        for version, python in found.items():
            environment = folder / f"venv-{version}"
            quiet(python, "-m", "venv", environment)
            if answer(str(environment / "bin/python"), *pip, "install", "-q", str(built)) is None:
                session.skip(f"the wheel on Python {version}: its requirements are unavailable")
                continue
            said = quiet(environment / "bin/python", check, cwd=folder)
            print(f"Python {version}: {said}", end="", flush=True)
            # Install only the benchmarks: they import their requirements when they run.
            quiet(environment / "bin/python", *pip, "install", "-q", "--no-deps", bench)
            quiet(environment / "bin/vmem", "bench", "capacity", "--help", cwd=folder)


def in_new_systems(session: Session, script: str, what: str) -> None:
    """Runs a check in freshly installed Debian systems; skips it where these cannot be created."""
    if not can(script):
        session.skip(f"{what} in a new Debian system: it cannot be made here (see above)")


def wheel_debian(session: Session) -> None:
    """The wheel in new Debian 12 and 13 systems, without a compiler and without CUDA."""
    in_new_systems(session, "check_wheel_debian.py", "the wheel")


def containers(session: Session) -> None:
    """The container images, built with buildah in a new Debian system, and run."""
    in_new_systems(session, "check_containers.py", "the container images")


def deb(session: Session) -> None:
    """The Debian packages: lintian; installed, used and purged in a new system and a guest."""
    call(PYTHON, ROOT / "scripts" / "kernel_setup.py")
    in_new_systems(session, "check_deb.py", "the Debian packages")


STAGES: dict[str, Callable[[Session], None]] = {
    "c": c_tests(""),
    "c-address": c_tests("address"),
    "c-thread": c_tests("thread"),
    "examples": examples,
    "library": library,
    "lint": lint,
    "docs": docs,
    "python": python_tests,
    "pythons": other_pythons,
    "vllm": vllm,
    "sglang": sglang,
    "transformers": transformers,
    "notebook": notebook,
    "gpu-checks": gpu_checks,
    "cuda": cuda,
    "stock": stock,
    "kernel-scripts": kernel_scripts,
    "kernel": kernel,
    "kernel-checks": kernel_checks,
    "wheel": wheel,
    "wheel-debian": wheel_debian,
    "deb": deb,
    "containers": containers,
    "python-fast": python_fast,
    "gpu": gpu_tests,
}
ASKED_FOR = ("python-fast", "gpu")  # stages that run only if named
# Stages that run only if named or with --long.
LONG = ("pythons", "sglang", "transformers", "notebook", "wheel-debian", "deb", "containers")


def minutes(seconds: float) -> str:
    """Formats a duration for humans."""
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"


class Times:
    """Stores the seconds that each stage took when it last passed, separately for long runs."""

    def __init__(self, path: Path, *, long: bool) -> None:
        self._path = path
        self._mode = "long" if long else "short"
        self._all: dict[str, dict[str, float]] = {}
        with contextlib.suppress(OSError, ValueError):
            self._all = json.loads(path.read_text(encoding="utf-8"))

    def left(self, names: Sequence[str]) -> str:
        """Returns text with the expected duration of stages, based on earlier runs."""
        known = self._all.get(self._mode, {})
        seconds = [known[name] for name in names if name in known]
        if not seconds:
            return "time left unknown"
        unknown = len(names) - len(seconds)
        more = f", not counting {unknown} without a time" if unknown else ""
        return f"about {minutes(sum(seconds))} left{more}"

    def note(self, name: str, seconds: float) -> None:
        """Stores a stage's duration."""
        self._all.setdefault(self._mode, {})[name] = round(seconds, 1)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        new = self._path.with_suffix(".new")
        new.write_text(json.dumps(self._all, indent=1), encoding="utf-8")
        new.replace(self._path)


def run_stages(
    names: Sequence[str], session: Session, times: Times, *, chosen: bool = False
) -> int:
    """Runs stages and prints a summary; returns the exit status.

    Args:
        chosen: true if `make check` or the user named the stages.
    """
    results: dict[str, str] = {}
    start = time.monotonic()
    try:
        for place, name in enumerate(names):
            where = f"stage {place + 1} of {len(names)}, {times.left(names[place:])}"
            print(f"\n#### {name} ({where}): {(STAGES[name].__doc__ or '').strip()}", flush=True)
            begun = time.monotonic()
            results[name] = "interrupted"
            try:
                STAGES[name](session)
                took = time.monotonic() - begun
                times.note(name, took)
                results[name] = f"passed   {took:6.0f} s"
            except Failed as error:
                print(f"FAILED: {error}", flush=True)
                results[name] = f"FAILED   {time.monotonic() - begun:6.0f} s  {error!s:.50}"
    except KeyboardInterrupt:
        pass
    print("\n#### summary", *(f"{name:<14} {said}" for name, said in results.items()), sep="\n")
    for text in session.not_run:
        print(f"not run: {text}")
    bad = [name for name in names if not results.get(name, "").startswith("passed")]
    print(f"{len(names) - len(bad)} of {len(names)} stages passed in", end=" ")
    print(minutes(time.monotonic() - start), flush=True)
    if bad and chosen:
        words = ["--long", *bad] if session.long else bad
        print(f"to run again: build/venv/bin/python scripts/run_tests.py {' '.join(words)}")
    elif bad and "gpu" not in names:
        target = "test-long" if session.long else "test"
        print(f"to continue: make {target} FROM={bad[0]}")
    return 1 if bad else 0


def main() -> int:
    """Runs the requested stages (default: all but gpu) and reports."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("stages", nargs="*", metavar="stage", help=", ".join(STAGES))
    parser.add_argument("--long", action="store_true", help="also run tests marked long")
    parser.add_argument(
        "--from", dest="first", metavar="STAGE", help="run this stage and all later ones"
    )
    parser.add_argument("--gpu", nargs="*", metavar="BACKEND", help="run only stage gpu")
    options = parser.parse_args()
    known = [*options.stages, *([options.first] if options.first else [])]
    unknown = [name for name in known if name not in STAGES]
    if unknown:
        parser.error(f"no such stage: {', '.join(unknown)}; stages: {', '.join(STAGES)}")
    left_out = ASKED_FOR if options.long else (*ASKED_FOR, *LONG)
    names = options.stages or [name for name in STAGES if name not in left_out]
    session = Session(long=options.long)
    if options.gpu is not None:
        names = ["gpu-checks", "gpu"]
        session.backends = options.gpu
    if options.first:
        if options.first not in names:
            parser.error(f"--from {options.first}: not among {', '.join(names)}")
        names = names[names.index(options.first) :]
    if not options.stages and options.gpu is None:
        session.skip("tests that need a GPU (make test-gpu, on a machine with one)")
    times = Times(TIMES, long=options.long)
    return run_stages(names, session, times, chosen=bool(options.stages))


if __name__ == "__main__":
    sys.exit(main())
