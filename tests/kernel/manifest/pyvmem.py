# SPDX-License-Identifier: MIT
"""libvmem and pyvmem on the patched driver: the tests from both suites that do not need CUDA."""

from __future__ import annotations

import subprocess
from pathlib import Path

from manifest.entry import DELAYS, Test

__all__ = ["TESTS"]

BUILD = ("python3", "tests/kernel/lib/build.py")
BUILT = "build/kernel/lib"
BACKEND = ("VMEM_TEST_BACKEND=uvm",)
C_TESTS = (
    "accounting",
    "async",
    "basic",
    "batch",
    "entries",
    "errors",
    "large",
    "move",
    "parts",
    "pool",
    "threads",
    "zeroing",
)
# Tests of the library's requests to the back end. The other tests exercise the library above the
# back end, and their runs on `host` cover that.
CHANGES = ("batch", "entries", "large", "move", "threads")
# Fewer steps and rounds for the random tests; the long run does all of them.
FEWER = ("ENTRIES_STEPS=100", "THREADS_ROUNDS=30")
# A failed GPU's page tables stay as they are, because they cannot be written.
AFTER_A_FAILURE = (
    r"softgpu: error: gpu \d: frame [0-9a-f]+ freed while \d+ live entries map it",
    r"nvidia-uvm: vmem: process \d+ \(test_uvm\): a batch failed on a GPU",
)


def _uvm(name: str, argument: str = "", **options: object) -> Test:
    """Returns a test of the back end itself."""
    values: dict[str, object] = {
        "name": f"lib-{name}",
        "command": ["/test/test_uvm", *([argument] if argument else [])],
        "files": [f"{BUILT}/test_uvm"],
        "build": BUILD,
        **options,
    }
    return Test(**values)  # type: ignore[arg-type]


def _suite(name: str, tests: tuple[str, ...], **options: object) -> Test:
    """Returns a test that runs several of libvmem's C tests in one boot."""
    script = " ".join(f"echo == {test}; /test/test_{test} || bad=1;" for test in tests)
    values: dict[str, object] = {
        "name": f"lib-{name}",
        "command": ["sh", "-c", f"bad=0; {script} exit $bad"],
        "files": [f"{BUILT}/test_{test}" for test in tests],
        "build": BUILD,
        "env": BACKEND,
        "timeout": 300.0,
        **options,
    }
    return Test(**values)  # type: ignore[arg-type]


def _python(name: str, words: str, **options: object) -> Test:
    """Returns a test that runs a command on the disk image, with pyvmem for the software GPU."""
    values: dict[str, object] = {
        "name": f"pyvmem-{name}",
        "command": ["sh", "-c", f"cp /test/_vmem.abi3.so pyvmem/ && {words}"],
        "image": True,
        "files": [f"{BUILT}/_vmem.abi3.so"],
        "build": BUILD,
        "env": BACKEND,
        "timeout": 300.0,
        **options,
    }
    return Test(**values)  # type: ignore[arg-type]


def _commit() -> str:
    """Returns this tree's commit for the guest's copy, which has no repository; "" if unknown."""
    words = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short=7", "HEAD"]
    return subprocess.run(words, capture_output=True, text=True, check=False).stdout.strip()


def _pytest(*files: str) -> str:
    paths = " ".join(f"tests/python/test_{name}.py" for name in files)
    return f"python -m pytest -q -rs -m 'not long' -p no:cacheprovider {paths}"


# A child process of a test writes to a read-only page.
WRITES_TO_SHARED = (r"python\[\d+\]: segfault at ",)

TESTS = [
    *(
        _uvm(
            f"uvm-{arch}-{kind}",
            arch=arch,
            type=kind,
            module_args=DELAYS if kind == "debug" else "",
            long=(arch, kind) != ("hopper", "debug"),
        )
        for arch in ("hopper", "ampere")
        for kind in ("release", "debug")
    ),
    _uvm("two-gpus", "two-gpus", gpus=2),
    _uvm("gpu-fails", "gpu-fails", allow=AFTER_A_FAILURE),
    _uvm("wide", "wide", memory=4096, timeout=600.0, long=True),
    _uvm("unpatched", "unpatched", patched=False, long=True),
    _suite("changes", CHANGES, env=(*BACKEND, *FEWER), timeout=600.0),
    _suite("c", C_TESTS, long=True),
    _suite("c-debug", C_TESTS, type="debug", module_args=DELAYS, long=True),
    _suite("stress", ("stress",), long=True),
    # The uvm column in docs/compatibility.md is generated from this record.
    _python(
        "features",
        "vmem probe && vmem selftest --backend uvm --samples 0 --out /tmp/report.json &&"
        " vmem features --out /tmp/features.json && cat /tmp/features.json",
        env=(*BACKEND, f"VMEM_COMMIT={_commit()}"),
    ),
    _python("calls", _pytest("errors", "context", "selftest"), timeout=600.0, long=True),
    _python(
        "kvcache",
        _pytest("kvcache", "kvcache_order", "kvcache_failures"),
        timeout=900.0,
        long=True,
    ),
    _python(
        "sharing",
        _pytest("parts", "kvcache_share", "kvcache_prefix", "kvcache_swap", "kvcache_share_model"),
        allow=WRITES_TO_SHARED,
        timeout=1200.0,
        long=True,
    ),
    _python(
        "layers",
        _pytest("kvcache_budget", "kvcache_layers", "kvcache_window", "prefix_tree"),
        timeout=1200.0,
        long=True,
    ),
    _python(
        "places",
        _pytest("kvcache_promote", "kvcache_mixed", "kvcache_tiers"),
        timeout=1800.0,
        long=True,
    ),
    _python(
        "more",
        _pytest("bad_input", "fork", "fork_kill", "model", "native", "kvcache_config"),
        timeout=1800.0,
        long=True,
    ),
]
