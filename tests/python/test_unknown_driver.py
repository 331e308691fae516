# SPDX-License-Identifier: MIT
"""Tests `stock` on any driver, and what `auto` chooses, with simulated kernel modules.

tests/softcuda/softrm.c imitates the driver named by each case, with the differences that the case
lists. All cases run in one child process, because a library can only be preloaded when a program
starts.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
ABI = ROOT / "libvmem" / "src" / "backend" / "nvidia" / "abi.h"
UNKNOWN = "625.10"
WARNING = "of a branch that this library does not know (530 to 620)"
TABLE = "whose layouts are known only from gVisor's table"

# Tries each case with probe and with "auto", uses the context that "auto" opens, and prints the
# outcomes as JSON.
CHILD = """
import json, logging, os, sys
import pyvmem

said = []
class Lines(logging.Handler):
    def emit(self, record):
        said.append([record.levelname, record.getMessage()])
logging.getLogger("pyvmem").addHandler(Lines())
logging.getLogger("pyvmem").setLevel(logging.INFO)

found = []
for case in json.loads(sys.argv[1]):
    os.environ.update(SOFTRM_VERSION=case[0], SOFTRM_LIE=case[1], VMEM_UNKNOWN_DRIVER=case[2])
    said.clear()
    pyvmem.plumbing.logs._last.clear()
    probed = {one.backend: one for one in pyvmem.probe()}["stock"]
    with pyvmem.Context() as context, context.reserve(1 << 24) as range_:
        page = context.info.granule
        with context.create(2 * page) as pages:
            range_.map(0, pages)
            range_.write(page - 8, b"sixteen bytes ok")
            right = range_.read(page - 8, 16) == b"sixteen bytes ok"
            range_.unmap(0, 2 * page)
        info = context.info
    found.append(dict(usable=probed.usable, error=probed.error_name, reason=probed.reason,
        backend=info.backend, why=info.why, warning=info.warning, right=right, said=list(said)))
print(json.dumps(found))
"""

VERSIONS = [
    *("530.41.03", "535.43.02", "535.288.01", "545.23.06", "550.40.07", "550.40.53", "550.163.01"),
    *("555.42.02", "560.28.03", "565.77", "570.211.01", "575.64.05", "580.65.06", "580.159.04"),
    *("590.44.01", "595.45.04", "595.71.05", "610.43.02", "610.57.04", "615.15", "615.62"),
    *("615.71.01", "620.6"),
]
NEWER = ["600.1", UNKNOWN, "999.99.99"]
# Differences from a known driver, each with the error that it causes.
# tests/c/test_unknown_driver.c checks every call.
LIES = {
    "longer:UVM_MAP_EXTERNAL_ALLOCATION": "UVM_MAP_EXTERNAL_ALLOCATION: the driver did not write",
    "moved:UVM_FREE": "UVM_FREE: the driver did not write the status field",
    "number:UVM_UNMAP_EXTERNAL": "UVM_UNMAP_EXTERNAL: the driver does not know this call",
    "gone:UVM_CREATE_EXTERNAL_RANGE": "UVM_CREATE_EXTERNAL_RANGE: the driver does not know this",
    "other:UVM_FREE": "UVM_FREE: the driver wrote past the end of the structure",
    "untouched:NV_ESC_RM_ALLOC": "the RM's client allocation: the driver did not write the status",
    "longer:NV_MEMORY_ALLOCATION_PARAMS": "RM allocation of video memory failed",
    "die:UVM_INITIALIZE": "it was killed by signal 9",
    "shifted": "pages mapped one by one: the byte at",
    "stuck": "memory that was unmapped and freed does not come back",
    "idle:NV_ESC_RM_FREE": "memory that was unmapped and freed does not come back",
    "idle:UVM_UNMAP_EXTERNAL": "UVM_UNMAP_EXTERNAL where there is no range was not refused",
}
Case = tuple[str, str, str]


@pytest.fixture(scope="module")
def software(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Builds softcuda and softrm for this test; returns an environment that uses them."""
    if not shutil.which("make") or not shutil.which("cc"):
        pytest.skip("no make and cc to build tests/softcuda with")
    folder = tmp_path_factory.mktemp("softcuda")
    command = ["make", "-s", "-C", str(ROOT / "tests" / "softcuda"), f"OUT={folder}", "CC=cc"]
    subprocess.run(command, check=True)
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("SOFT", "VMEM_"))}
    return {**environment, "LD_LIBRARY_PATH": str(folder), "LD_PRELOAD": f"{folder}/softrm.so"}


def outcomes(software: dict[str, str], cases: list[Case]) -> list[dict[str, Any]]:
    """Returns the outcome of each case."""
    command = [sys.executable, "-c", CHILD, json.dumps(cases)]
    done = subprocess.run(command, env=software, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found: list[dict[str, Any]] = json.loads(done.stdout)
    return found


def test_each_known_branch_is_used(software: dict[str, str]) -> None:
    """Uses each version's structures, which the stand-in defines itself; no warning is printed."""
    table = re.findall(r'\{(\d+), (NV_\w+), "', ABI.read_text(encoding="utf-8"))
    assert {version.partition(".")[0] for version in VERSIONS} == {major for major, _ in table}
    of_table = {major for major, evidence in table if evidence == "NV_TABLE"}
    assert of_table == {"610", "615", "620"}
    found = outcomes(software, [(version, "", "") for version in VERSIONS])
    for version, one in zip(VERSIONS, found, strict=True):
        assert (one["backend"], one["right"], one["warning"]) == ("stock", True, ""), (version, one)
        assert one["usable"], (version, one)
        assert (TABLE in one["reason"]) == (version.partition(".")[0] in of_table), (version, one)
        assert not [text for level, text in one["said"] if level == "WARNING"], (version, one)


def test_an_unknown_driver_is_used_with_a_warning(software: dict[str, str]) -> None:
    found = outcomes(software, [(version, "", wish) for version in NEWER for wish in ("", "try")])
    for one in found:
        assert (one["backend"], one["right"]) == ("stock", True), one
        assert WARNING in one["reason"], one
        assert "the driver behaved like a known driver in every check" in one["reason"], one
        assert WARNING in one["warning"], one
        assert [text for level, text in one["said"] if level == "WARNING"] == [one["warning"]], one


def test_rejected_drivers(software: dict[str, str]) -> None:
    """Drivers that are too old are always rejected, and unknown drivers only on request; an invalid
    setting is an error.
    """
    texts = {
        ("525.147.05", "", ""): ("ENODEV", "driver 525.147.05 is too old: 530 or later is needed"),
        ("525.147.05", "", "try"): ("ENODEV", "driver 525.147.05 is too old: 530 or later"),
        (UNKNOWN, "", "refuse"): ("ENODEV", f"{WARNING}, and VMEM_UNKNOWN_DRIVER=refuse"),
        ("580.159.04", "", "maybe"): ("EINVAL", 'is "maybe": expected "try" or "refuse"'),
    }
    for one, (error, text) in zip(outcomes(software, list(texts)), texts.values(), strict=True):
        assert (one["usable"], one["error"], one["backend"]) == (False, error, "cuda"), one
        assert text in one["reason"], one


def test_differences_are_named_and_the_driver_is_passed_over(software: dict[str, str]) -> None:
    found = outcomes(software, [(UNKNOWN, lie, "") for lie in LIES])
    for (lie, text), one in zip(LIES.items(), found, strict=True):
        assert (one["usable"], one["backend"], one["right"]) == (False, "cuda", True), (lie, one)
        assert text in one["reason"], (lie, one)
        assert "stock: " in one["why"], (lie, one)
        assert one["why"].partition("stock: ")[2][:60] in "stock: " + one["reason"], (lie, one)


# A driver, its difference, and what the self-test reports.
SEEN = [
    (UNKNOWN, "", "passed", r"passed +device faults +unmapped, readonly"),
    (UNKNOWN, "writable", "FAILED", r"failed +device faults +readonly: a kernel was not stopped"),
    ("580.159.04", "stuck", "FAILED", r"failed +device faults +unmapped: a kernel was not stopped"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("version", "lie", "outcome", "text"), SEEN)
def test_the_report_covers_what_opening_cannot_check(
    version: str, lie: str, outcome: str, text: str, software: dict[str, str], tmp_path: Path
) -> None:
    """Checks that need a faulting kernel run in the self-test, in a child process with CUDA."""
    pytest.importorskip("cuda.bindings")
    file = tmp_path / "report.md"
    command = [sys.executable, "-m", "pyvmem", "probe", "--report", str(file)]
    environment = {**software, "SOFTRM_VERSION": version, "SOFTRM_LIE": lie}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == (outcome == "FAILED"), done.stderr
    report = file.read_text(encoding="utf-8")
    assert f"Self-test of `stock`: {outcome}." in report
    assert re.search(f"^{text}", report, re.M), report
    assert (WARNING in report) == (version == UNKNOWN)
