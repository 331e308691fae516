# SPDX-License-Identifier: MIT
"""Sets import paths for the programs under test; its fixtures describe machines as plain files."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[2] / "scripts")]

from kernel_common import KernelBuildError  # noqa: E402
from kernel_headers import KernelHeaders, default_headers  # noqa: E402
from machines import USUAL, Lay  # noqa: E402
from mini_driver import make_driver, write_driver  # noqa: E402
from module_kbuild import conftests_only  # noqa: E402
from module_system import System  # noqa: E402


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skips tests that take minutes, unless -m is given."""
    if not config.getoption("markexpr"):
        for item in items:
            if item.get_closest_marker("long"):
                item.add_marker(pytest.mark.skip(reason="takes minutes: -m long"))


@pytest.fixture
def lay(tmp_path: Path) -> Lay:
    """Returns a function that creates the usual machine, with some files changed or removed.

    A file whose content is None is removed.
    """

    def make(changes: dict[str, str | bytes | None] | None = None) -> System:
        root = tmp_path / "machine"
        files: dict[str, str | bytes | None] = {**USUAL, **(changes or {})}
        for name, content in files.items():
            path = root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            if content is None:
                path.unlink(missing_ok=True)
            else:
                path.write_bytes(content.encode() if isinstance(content, str) else content)
        return System(root)

    return make


@pytest.fixture(scope="session")
def headers() -> KernelHeaders:
    try:
        return default_headers()
    except KernelBuildError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def installed(tmp_path_factory: pytest.TempPathFactory, headers: KernelHeaders) -> Path:
    """A built tree with the installed driver's modules."""
    tree = write_driver(tmp_path_factory.mktemp("installed"), patched=False)
    make_driver(tree, headers.source, headers.build)
    return tree


@pytest.fixture
def machine(tmp_path: Path, installed: Path, headers: KernelHeaders) -> System:
    """A machine with the driver installed the way Debian's package does it, but not loaded."""
    modules = tmp_path / "root/lib/modules" / headers.release / "updates/dkms"
    modules.mkdir(parents=True)
    shutil.copyfile(installed / "nvidia.ko", modules / "nvidia-current.ko")
    shutil.copyfile(installed / "nvidia-uvm.ko", modules / "nvidia-current-uvm.ko")
    for folder in ("usr/src", "var/lib/dkms"):
        (tmp_path / "root" / folder).mkdir(parents=True)
    return System(tmp_path / "root")


@pytest.fixture
def staged(tmp_path: Path) -> Path:
    """A patched tree as `make module` lays it out."""
    tree = write_driver(tmp_path / "tree")
    conftests_only(tree)
    return tree
