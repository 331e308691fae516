# SPDX-License-Identifier: MIT
"""Checks that everything named in packaging/containers exists, without building an image."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "packaging" / "containers"
PAGE = ROOT / "docs" / "operations" / "containers.md"
LISTED = ("docs/reference/environment.md", "docs/reference/vllm.md")
VARIABLES = {
    name for page in LISTED for name in re.findall(r"`(VMEM_[A-Z_]+)", (ROOT / page).read_text())
}


def stages() -> dict[str, str]:
    """Returns the text of each Dockerfile stage, by name."""
    text = (FOLDER / "Dockerfile").read_text()
    parts = re.split(r"^FROM \S+ AS (\w+)$", text, flags=re.M)[1:]
    return dict(zip(parts[::2], parts[1::2], strict=True))


def test_the_page_builds_existing_targets() -> None:
    targets = re.findall(r"--target (\w+)", PAGE.read_text())
    assert set(targets) == set(stages()) - {"build"}


def test_a_stage_copies_from_stages_before_it() -> None:
    seen: set[str] = set()
    for name, text in stages().items():
        assert set(re.findall(r"COPY --from=(\w+)", text)) <= seen, name
        seen.add(name)


@pytest.mark.parametrize("path", [FOLDER / "Dockerfile", FOLDER / "kubernetes.yaml", PAGE], ids=str)
def test_every_variable_is_known(path: Path) -> None:
    named = set(re.findall(r"\bVMEM_[A-Z_]+", path.read_text()))
    assert named
    assert named <= VARIABLES


def test_vllms_image_gets_what_the_package_needs() -> None:
    project = (ROOT / "pyproject.toml").read_text()
    (needed,) = re.findall(r"^dependencies = \[(.*)\]$", project, flags=re.M)
    (given,) = re.findall(r"pip install --no-cache-dir --no-deps (.*) /dist/", stages()["vllm"])
    assert set(re.findall(r'"([\w-]+)', needed)) <= {*given.split(), "tqdm"}  # vLLM needs tqdm


def test_the_example_of_kubernetes_shares_one_folder_as_one_user() -> None:
    yaml = pytest.importorskip("yaml")
    spec = yaml.safe_load((FOLDER / "kubernetes.yaml").read_text())["spec"]
    pod = spec["template"]["spec"]
    (server,) = pod["containers"]
    environment = {entry["name"]: entry.get("value") for entry in server["env"]}
    mounts = {mount["mountPath"]: mount["name"] for mount in server["volumeMounts"]}
    volumes = {volume["name"]: volume["hostPath"]["path"] for volume in pod["volumes"]}
    assert environment["VMEM_VLLM"] == "1"
    assert environment["HOME"] == "/tmp", "user 1000 has no home in vLLM's image"
    assert volumes[mounts[environment["VMEM_LEDGER"]]] == environment["VMEM_LEDGER"]
    assert pod["securityContext"]["runAsUser"] == 1000
    assert spec["replicas"] > 1
