# SPDX-License-Identifier: MIT
"""Sets up the guest as a user's machine with Debian's driver, and reports its state."""

from __future__ import annotations

import os
import re
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import module_load
from module_query import query
from module_system import UVM, System

__all__ = ["DEBIAN_RULES", "GIVEN", "Machine", "Outcome", "Running", "process"]

# Contains nvidia.ko, stock.ko (UVM without the patches) and ours.ko.
GIVEN = Path("/load")
SWITCHED = ("nvidia-uvm", "nvidia-uvm-tools")

# Debian's rules, shortened, and options that must also be applied to our module.
DEBIAN_RULES = """\
install nvidia modprobe -i nvidia-current-open $CMDLINE_OPTS
install nvidia-uvm modprobe nvidia ; modprobe -i nvidia-current-open-uvm $CMDLINE_OPTS
remove nvidia modprobe -r -i nvidia-uvm nvidia
"""
OPTIONS = """\
options nvidia-current-open-uvm uvm_leak_checker=1 uvm_perf_prefetch_threshold=66
options nvidia-uvm uvm_leak_checker=1
"""


@dataclass
class Outcome:
    """The exit status and output of a program."""

    status: int
    output: str

    def expect(self, status: int, *patterns: str) -> None:
        """Fails unless the exit status matches, and the output matches all patterns."""
        assert self.status == status, f"exit status {self.status}, not {status}:\n{self.output}"
        for pattern in patterns:
            assert re.search(pattern, self.output), f"no {pattern!r} in:\n{self.output}"


class Machine:
    """The guest, as the machine on which the cases swap modules."""

    def __init__(self) -> None:
        self.system = System()
        self.release = self.system.release()
        self.modules = Path("/lib/modules") / self.release / "updates/dkms"
        self.modprobe = Path("/etc/modprobe.d")
        self.ours = GIVEN / "ours.ko"
        self.changed = True  # since the last reset

    # Setting up

    def run(self, *words: str, env: dict[str, str] | None = None) -> Outcome:
        """Runs a program and waits for it to finish."""
        done = subprocess.run(
            words,
            env={**os.environ, **(env or {})},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        return Outcome(done.returncode, done.stdout)

    def clear(self) -> None:
        """Unloads both modules."""
        self.changed = True
        for module in (UVM, "nvidia"):
            deadline = time.monotonic() + 20
            while self.system.loaded(module):
                done = self.run("rmmod", module)
                assert time.monotonic() < deadline, f"{module} stays: {done.output}"

    def lay_out(self, files: dict[str, str], rules: str = DEBIAN_RULES) -> None:
        """Installs modules from /load under new file names, and modprobe's rules."""
        self.changed = True
        for folder in (self.modules, self.modprobe):
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
        for name, which in files.items():
            shutil.copyfile(which if "/" in which else GIVEN / which, self.modules / name)
        (self.modprobe / "nvidia.conf").write_text(rules + OPTIONS, encoding="utf-8")
        # depmod needs the lists of the kernel's own modules.
        for name in ("modules.order", "modules.builtin", "modules.builtin.modinfo"):
            (self.modules.parent.parent / name).touch()
        self.run("depmod", "-a", self.release).expect(0)

    def debian(self, **more: str) -> None:
        """Installs the usual modules, plus `more`: new names, without .ko, for files in /load."""
        files = {
            "nvidia-current-open.ko": "nvidia.ko",
            "nvidia-current-open-uvm.ko": "stock.ko",
            **{f"{name.replace('_', '-')}.ko": which for name, which in more.items()},
        }
        self.lay_out(files)

    def start_driver(self, uvm: bool = True) -> None:
        """Loads the driver as a boot would, and creates its nodes."""
        self.run("modprobe", "nvidia-uvm" if uvm else "nvidia").expect(0)
        majors = {name: number for number, name in self.system.device_majors().items()}
        major = majors.get("nvidia", majors.get("nvidia-frontend", 195))
        for name, minor in (("nvidia0", 0), ("nvidiactl", 255)):
            self.node(Path("/dev") / name, major, minor)
        if uvm:
            for minor, name in enumerate(SWITCHED):
                self.node(Path("/dev") / name, majors["nvidia-uvm"], minor)

    def node(self, path: Path, major: int, minor: int, mode: int = 0o666) -> None:
        """Creates a device node, replacing any existing one."""
        self.changed = True
        path.unlink(missing_ok=True)
        os.mknod(path, stat.S_IFCHR | 0o600, os.makedev(major, minor))
        path.chmod(mode)

    def reset(self) -> None:
        """Restores the state in which every case starts: the stock driver, loaded and idle."""
        for left in ("run/vmem-module.json", "run/vmem-module.lock"):
            Path("/", left).unlink(missing_ok=True)
        if not self.changed and self.is_stock():
            return
        self.clear()
        for name in SWITCHED:
            Path("/dev", name).unlink(missing_ok=True)
        self.debian()
        self.start_driver()
        self.changed = False

    # The program under test

    def swap(self, *arguments: str, before: Callable[[], None] | None = None) -> Outcome:
        """Runs module_load.py in a forked child process, because Python starts slowly here."""
        process = self.start_swap(*arguments, before=before)
        return process.wait()

    def start_swap(self, *arguments: str, before: Callable[[], None] | None = None) -> Running:
        """Starts module_load.py in a child process without waiting for it."""
        reading, writing = os.pipe()
        pid = os.fork()
        if pid == 0:
            status = 99
            try:
                os.setsid()
                os.dup2(writing, 1)
                os.dup2(writing, 2)
                os.close(reading)
                if before:
                    before()
                sys.argv = ["module_load.py", *arguments]
                status = module_load.main()
            finally:
                os._exit(status)
        os.close(writing)
        return Running(pid, reading)

    def load(self, *arguments: str, selftest: str = "true", module: Path | None = None) -> Outcome:
        """Does what `make load` does, with the given self-test command."""
        path = str(module or self.ours)
        return self.swap("load", "--module", path, "--selftest", selftest, *arguments)

    def unload(self) -> Outcome:
        """Does what `make unload` does."""
        return self.swap("unload")

    # State

    def kernel_log(self) -> str:
        """Returns the kernel's log since boot."""
        lines: list[bytes] = []
        file = os.open("/dev/kmsg", os.O_RDONLY | os.O_NONBLOCK)
        try:
            while True:
                lines.append(os.read(file, 8192))
        except BlockingIOError:
            return b"".join(lines).decode("utf-8", "replace")
        finally:
            os.close(file)

    def is_stock(self) -> bool:
        """True if the stock module is loaded and its nodes are correct."""
        return self.system.loaded(UVM) and not self.system.uvm_is_ours() and self.nodes_fit()

    def is_ours(self) -> bool:
        """True if the patched module is loaded and responds, and its nodes are correct."""
        if not (self.system.loaded(UVM) and self.system.uvm_is_ours() and self.nodes_fit()):
            return False
        return query(Path("/dev/nvidia-uvm")).abi > 0

    def nodes_fit(self) -> bool:
        """True if both nodes exist and have UVM's device number."""
        majors = {name: number for number, name in self.system.device_majors().items()}
        wanted = [os.makedev(majors["nvidia-uvm"], minor) for minor in (0, 1)]
        nodes = [Path("/dev", name) for name in SWITCHED]
        return [node.stat().st_rdev for node in nodes if node.exists()] == wanted

    def parameter(self, name: str) -> str:
        """Returns the value of one of the loaded UVM's parameters."""
        return self.system.text(f"sys/module/{UVM}/parameters/{name}")


@contextmanager
def process(*words: str, stdin: str = "/dev/null", name: str = "") -> Iterator[int]:
    """Runs a process in the background with a file as its standard input, and kills it on exit.

    If given, `name` is the process's name.
    """
    command = ["bash", "-c", f'exec -a {name} "$0" "$@"', *words] if name else list(words)
    file = os.open(stdin, os.O_RDONLY)
    with subprocess.Popen(command, stdin=file) as running:
        os.close(file)
        try:
            shown = Path(f"/proc/{running.pid}/cmdline")
            while not shown.read_bytes().startswith((name or words[0]).encode()):
                time.sleep(0.05)
            yield running.pid
        finally:
            running.kill()


@dataclass
class Running:
    """A forked child process, and the pipe with its output."""

    pid: int
    output: int

    def wait(self) -> Outcome:
        """Waits for the process; returns its exit status, negative for a signal, and its output."""
        text = b""
        while data := os.read(self.output, 65536):
            text += data
        os.close(self.output)
        _pid, status = os.waitpid(self.pid, 0)
        return Outcome(os.waitstatus_to_exitcode(status), text.decode(errors="replace"))

    def kill(self, number: int = signal.SIGKILL) -> None:
        """Sends the process a signal."""
        os.kill(self.pid, number)
