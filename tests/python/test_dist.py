# SPDX-License-Identifier: MIT
"""Trees that `make dist` rejects, its bill of materials, and the contents of an
sdist.
"""

from __future__ import annotations

import gzip
import io
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Sequence
from email.parser import HeaderParser
from pathlib import Path

import dist
import pytest

METADATA = """Metadata-Version: 2.4
Name: pyvmem
Version: 0.1.0
Summary: what it is
License-Expression: MIT
Requires-Dist: cffi>=1.17
Requires-Dist: torch>=2.6; extra == "torch"
Requires-Dist: Torch>=2.6; extra == "serve"
Requires-Dist: pyvmem[serve]; extra == "server"
"""
GOOD = "pyvmem-0.1.0-cp310-abi3-manylinux_2_34_x86_64.whl"


def make_wheel(folder: Path, name: str = GOOD, files: Sequence[str] = ()) -> Path:
    path = folder / name
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("pyvmem-0.1.0.dist-info/METADATA", METADATA)
        for file in files:
            archive.writestr(file, b"")
    return path


@pytest.mark.parametrize(
    ("name", "files", "text"),
    [
        ("pyvmem-0.1.0-cp311-cp311-manylinux_2_34_x86_64.whl", [], "stable ABI"),
        ("pyvmem-0.1.0-cp310-abi3-linux_x86_64.whl", [], "manylinux"),
        (GOOD, [], r"contains \[\]"),
        (GOOD, ["pyvmem/_vmem.abi3.so", "pyvmem.libs/other.so.1"], "other.so"),
        (GOOD, ["pyvmem/_vmem.abi3.so", "pyvmem/x.c"], "x.c"),
    ],
)
def test_bad_wheels_are_rejected(tmp_path: Path, name: str, files: list[str], text: str) -> None:
    with pytest.raises(dist.DistError, match=text):
        dist.check_wheel(make_wheel(tmp_path, name, files))


def test_the_bill_of_materials(tmp_path: Path) -> None:
    wheel = make_wheel(tmp_path)
    bom = dist.sbom([wheel], 86400)
    assert bom == dist.sbom([wheel], 86400)
    assert bom["metadata"]["timestamp"] == "1970-01-02T00:00:00Z"
    assert bom["metadata"]["component"]["purl"] == "pkg:pypi/pyvmem@0.1.0"
    (file,) = bom["metadata"]["component"]["components"]
    assert file["hashes"] == [{"alg": "SHA-256", "content": dist.digest(wheel)}]
    refs = [part["bom-ref"] for part in bom["components"]]
    assert (
        sorted(set(refs))
        == refs
        == [
            "pkg:generic/libvmem@0.1.0",
            "pkg:pypi/cffi",
            "pkg:pypi/torch?extra=serve",
            "pkg:pypi/torch?extra=torch",
        ]
    )
    assert bom["dependencies"] == [
        {
            "ref": "pkg:pypi/pyvmem@0.1.0",
            "dependsOn": ["pkg:generic/libvmem@0.1.0", "pkg:pypi/cffi"],
        }
    ]


def test_an_sdist_has_a_fixed_order_time_and_owner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = tmp_path / "pyvmem-0.1.0.tar.gz"

    def write(*names: str) -> None:
        out = io.BytesIO()
        with tarfile.open(fileobj=out, mode="w") as archive:
            for mtime, name in enumerate(names):
                entry = tarfile.TarInfo(name)
                entry.size, entry.mtime, entry.uid, entry.uname = 1, mtime, 7, "me"
                archive.addfile(entry, io.BytesIO(b"x"))
        made.write_bytes(gzip.compress(out.getvalue()))

    found = []
    for names in (("b", "a"), ("a", "b")):
        monkeypatch.setattr(dist, "run", lambda *_, names=names, **__: write(*names))
        found.append(dist.make_sdist(tmp_path, tmp_path, 5).read_bytes())
    assert found[0] == found[1]
    with tarfile.open(made) as archive:
        entries = archive.getmembers()
    assert [(one.name, one.mtime, one.uid, one.uname) for one in entries] == [
        ("a", 5, 0, "root"),
        ("b", 5, 0, "root"),
    ]


def test_time_zone_and_umask_are_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "UTC")
    before = os.umask(0o027)
    try:
        with dist.elsewhere():
            assert os.environ["TZ"] != "UTC"
            with dist.usual_umask():
                assert os.umask(0o022) == 0o022
            assert os.umask(0o077) == 0o077
        assert os.environ["TZ"] == "UTC"
        assert os.umask(0o027) == 0o027
    finally:
        os.umask(before)


def test_a_second_build_must_be_identical(tmp_path: Path) -> None:
    made = [tmp_path / "a", tmp_path / "again" / "a"]
    made[1].parent.mkdir()
    for path in made:
        path.write_bytes(b"the same")
    dist.must_be_same(made[:1], made[1:])
    made[1].write_bytes(b"another")
    with pytest.raises(dist.DistError, match="a is not the same"):
        dist.must_be_same(made[:1], made[1:])


def metadata(folder: Path, url: str) -> str:
    """Builds the package's metadata from this tree's own files."""
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(dist.ROOT / name, folder)
    for name in ("pyvmem", "libvmem", "kernel_module"):
        (folder / name).symlink_to(dist.ROOT / name)
    program = (
        "import setuptools.build_meta as b, sys; "
        "print(b.prepare_metadata_for_build_wheel(sys.argv[1]))"
    )
    out = folder / "made"
    out.mkdir()
    done = subprocess.run(
        [sys.executable, "-c", program, str(out)],
        cwd=folder,
        env={**os.environ, "VMEM_URL": url},
        capture_output=True,
        text=True,
        check=True,
    )
    return (out / done.stdout.split()[-1] / "METADATA").read_text(encoding="utf-8")


def test_the_metadata_of_a_published_build(tmp_path: Path) -> None:
    """A package index shows only the README, so its links must point to the tag's files."""
    text = metadata(tmp_path, "https://forge.example/vmem/")
    fields = HeaderParser().parsestr(text)
    urls = dict(line.split(", ") for line in fields.get_all("Project-URL", []))
    assert urls["Source"] == "https://forge.example/vmem"
    assert urls.keys() == {"Source", "Documentation", "Changelog", "Issues"}
    assert fields["Author"] == "the vmem developers"
    assert fields["Description-Content-Type"] == "text/markdown"
    links = re.findall(r"\]\(([^)#]+)", text)
    assert len(links) > 40
    assert all(link.startswith("https://") for link in links)
    pictures = re.findall(r"!\[[^]]*\]\(([^)]+)\)", text)
    assert all("/vmem/raw/v" in one for one in pictures)
    for link in links:
        found = re.match(r"https://forge\.example/vmem/(?:raw|blob)/v[\d.]+/(.*)", link)
        assert found is None or (dist.ROOT / found[1]).exists()


def test_the_metadata_of_a_private_build(tmp_path: Path) -> None:
    fields = HeaderParser().parsestr(metadata(tmp_path, ""))
    assert fields.get_all("Project-URL") is None


@pytest.mark.parametrize("name", ["release", "pages"])
def test_workflows_run_existing_commands(name: str) -> None:
    yaml = pytest.importorskip("yaml")
    path = dist.ROOT / ".github" / "workflows" / f"{name}.yml"
    jobs = yaml.safe_load(path.read_text(encoding="utf-8"))["jobs"]
    commands = [step["run"] for job in jobs.values() for step in job["steps"] if "run" in step]
    makefile = (dist.ROOT / "Makefile").read_text(encoding="utf-8")
    for command in commands:
        if command.startswith("make "):
            assert f"\n{command.split()[1]}:" in makefile
        for script in re.findall(r"scripts/\S+", command):
            assert (dist.ROOT / script).exists()
    assert any(command.startswith("make ") for command in commands)
    assert all(
        "@" in step["uses"] for job in jobs.values() for step in job["steps"] if "uses" in step
    )
