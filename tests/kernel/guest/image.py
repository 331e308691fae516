# SPDX-License-Identifier: MIT
"""Builds the disk image that gives a guest Python and the usual programs.

Everything has the same path as on this machine: the interpreter, the packages of build/venv that
the tests import, shared libraries and Debian's programs. The image is read-only and does not
contain the project, which changes from run to run: the runner overlays it (see `layer`).
mke2fs fills the image from a directory of links, so neither root nor a mount is needed.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

from guest.initramfs import Initramfs
from guest.machine import GuestError

__all__ = ["layer", "python_image"]

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent.parent
PYTHON = ROOT / "build" / "venv" / "bin" / "python"
# Packages that the tests import. Their dependencies are included automatically.
DISTRIBUTIONS = ("pyvmem", "torch", "numpy", "pytest", "pytest-timeout", "hypothesis")
LEFT_OUT_OF_LIBRARY = {
    *("site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "tkinter"),
    *("turtledemo", "ensurepip", "pydoc_data"),
}
# Programs that the scripts' tests use; programs missing on this machine are skipped.
PROGRAMS = (
    "awk basename bash cat chmod chown cmp comm cp cut date dd depmod df diff dirname du env "
    "expr false find flock gawk getopt grep gzip head hostname id insmod install ionice kill "
    "kmod ldconfig ln ls lsmod lsof md5sum mkdir mkfifo mknod mktemp modinfo modprobe mount "
    "mountpoint mv nice nproc od openssl paste patch pgrep ps pwd readelf readlink realpath rm "
    "rmdir rmmod sed seq setsid sh sha256sum sleep sort stat strip stty sync tail tar tee test "
    "timeout touch tr true tty umount uname uniq unlink unshare wc which whoami xargs xz zstd "
    "make strings objdump nm ldd "
)
PROGRAM_FOLDERS = ("/usr/sbin", "/usr/bin", "/sbin", "/bin")
MERGED = ("bin", "sbin", "lib", "lib64")
ETC = {
    "passwd": "root:x:0:0:root:/root:/bin/sh\nnobody:x:65534:65534:nobody:/:/bin/false\n",
    "group": "root:x:0:\nnogroup:x:65534:\n",
    "nsswitch.conf": "passwd: files\ngroup: files\nhosts: files\n",
    "hosts": "127.0.0.1 localhost\n",
    "hostname": "guest\n",
}


class _Staging:
    """The directory that mke2fs copies. It contains hard links or, if those fail, copies."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.size = self.count = 0

    def place(self, path: Path) -> Path:
        """Maps a path on this machine into the directory; on merged systems, /lib is /usr/lib."""
        parts = path.parts[1:]
        if parts and parts[0] in MERGED and Path("/", parts[0]).is_symlink():
            parts = (*Path("/", parts[0]).resolve().parts[1:], *parts[1:])
        return self.folder.joinpath(*parts)

    def add(self, path: Path) -> None:
        """Adds a file, or a link along with its target."""
        new = self.place(path)
        if os.path.lexists(new):
            return
        new.parent.mkdir(parents=True, exist_ok=True)
        self.count += 1
        if path.is_symlink():
            new.symlink_to(os.readlink(path))
            self.add(Path(os.path.normpath(path.parent / os.readlink(path))))
        elif path.is_file():
            self.size += path.stat().st_size + 4096
            try:
                os.link(path, new)
            except OSError:
                shutil.copy2(path, new)

    def tree(self, path: Path, left_out: Iterable[str]) -> None:
        """Adds all files below a directory, except static libraries and folders in `left_out`."""
        for parent, folders, files in os.walk(path):
            folders[:] = [one for one in folders if one not in left_out]
            for one in files:
                if not one.endswith(".a"):
                    self.add(Path(parent, one))


def python_image(cache: Path) -> Path:
    """Returns this environment's image, building it if necessary, and deletes older images."""
    if not PYTHON.exists():
        raise GuestError(f"no {PYTHON.relative_to(ROOT)}: run `make setup`")
    asked = [PYTHON, HERE / "python_files.py", *DISTRIBUTIONS]
    found = json.loads(subprocess.check_output([str(word) for word in asked]))
    key = hashlib.sha256(Path(__file__).read_bytes())
    key.update((HERE / "python_files.py").read_bytes())
    key.update(json.dumps(found, sort_keys=True).encode())
    image = cache / f"python-{key.hexdigest()[:16]}.ext4"
    with _locked(cache / "python.lock"):
        if not image.exists():
            with tempfile.TemporaryDirectory(dir=cache, prefix="staging-") as folder:
                _make(found, Path(folder), image)
            for old in cache.glob("python-*.ext4"):
                if old != image:
                    old.unlink()
    return image


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _make(found: dict[str, list[str]], folder: Path, image: Path) -> None:
    staging = _Staging(folder / "root")
    staging.folder.mkdir()
    for name in MERGED:
        if Path("/", name).is_symlink():
            target = Path("/", name).resolve()
            (staging.folder / target.relative_to("/")).mkdir(parents=True, exist_ok=True)
            (staging.folder / name).symlink_to(target.relative_to("/"))
    for name in ("dev", "proc", "sys", "tmp", "root", "run", "etc", "mnt", "var/tmp"):
        (staging.folder / name).mkdir(parents=True, exist_ok=True)
    for name, text in ETC.items():
        (staging.folder / "etc" / name).write_text(text, encoding="utf-8")
    if Path("/etc/ld.so.cache").exists():
        staging.add(Path("/etc/ld.so.cache"))
    for name in PROGRAMS.split():
        for path in (Path(one, name) for one in PROGRAM_FOLDERS):
            if path.exists():
                staging.add(path)
                break
    staging.tree(Path(str(found["library"])), LEFT_OUT_OF_LIBRARY)
    for name in (*found["executables"], *found["files"]):
        staging.add(Path(name))
    for path in _shared_libraries(staging.folder):
        staging.add(path)
    # Leave room for inodes, and a tenth more for the file system's own tables.
    megabytes = (staging.size * 11 // 10 >> 20) + 32
    new = folder / "image"
    command = ["mke2fs", "-q", "-F", "-t", "ext4", "-O", "^has_journal,^resize_inode", "-m", "0"]
    command += ["-N", str(staging.count * 2 + 1000), "-E", "root_owner=0:0", "-d"]
    program = shutil.which("mke2fs", path=os.environ.get("PATH", "") + ":/usr/sbin:/sbin")
    if program is None:
        raise GuestError("mke2fs not found (Debian: e2fsprogs)")
    command[0] = program
    command += [str(staging.folder), str(new), f"{megabytes}M"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise GuestError(f"mke2fs: {done.stderr.strip()}")
    new.rename(image)


def _shared_libraries(folder: Path) -> list[Path]:
    """Returns the libraries that programs and libraries below a directory are linked against."""
    elf = []
    for parent, _, files in os.walk(folder):
        for path in (Path(parent, one) for one in files):
            if not path.is_symlink() and (os.access(path, os.X_OK) or ".so" in path.name):
                with open(path, "rb") as file:
                    if file.read(4) == b"\x7fELF":
                        # $ORIGIN-relative paths must resolve as they do on this machine.
                        elf.append(str(Path("/", path.relative_to(folder))))
    said = subprocess.run(["ldd", *sorted(elf)], capture_output=True, text=True, check=False)
    found = re.findall(r"(?:=> |^\t)(/\S+) \(0x", said.stdout, re.MULTILINE)
    return [Path(one) for one in sorted(set(found))]


def layer(root: Initramfs, prefix: str) -> None:
    """Adds the project's current files below a prefix, keeping their absolute paths."""
    listed = subprocess.check_output(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"], cwd=ROOT
    )
    names = {name for name in listed.decode().split("\0") if name}
    names |= {str(path.relative_to(ROOT)) for path in ROOT.glob("pyvmem/_vmem*.so")}
    for name in sorted(names):
        if (ROOT / name).is_file():
            root.file(f"{prefix}{ROOT}/{name}", ROOT / name)
