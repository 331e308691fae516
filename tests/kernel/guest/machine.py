# SPDX-License-Identifier: MIT
"""Runs a command in a virtual machine, and returns the outcome."""

from __future__ import annotations

import os
import resource
import secrets
import selectors
import shlex
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from guest.initramfs import Initramfs
from guest.scan import LogScan

__all__ = ["Machine", "Outcome", "GuestError"]

HERE = Path(__file__).resolve().parent
QEMU = "qemu-system-x86_64"
# Everything QEMU supports except 57-bit user addresses, because drivers usually see 47 bits.
PROCESSOR = "max,la57=off"
# no_timer_check: on a busy host, the timer can be too late for the kernel's check.
COMMAND_LINE = (
    "console=ttyS0 quiet panic=-1 oops=panic printk.devkmsg=on no_timer_check watchdog_thresh=60"
    " rcupdate.rcu_cpu_stall_timeout=120"
)
# A kernel that has not started its first program after this many seconds is considered hung. On a
# busy host, booting that far usually takes 10 seconds.
UP_TIME = 90.0
# How many seconds before the time limit a hung run shows where it hangs.
LAST_WORDS = 10.0


class GuestError(Exception):
    """Raised when a run cannot be started."""


@dataclass
class Machine:
    """A machine to boot, and the command to run in it."""

    kernel: Path
    command: Sequence[str]
    modules: Path | None = None
    module_args: Sequence[str] = ()
    uvm_args: Sequence[str] = ()
    strip: bool = True
    gpus: int = 1
    memory: int = 1536
    processors: int = 2
    timeout: float = 300.0
    append: str = ""
    files: Sequence[tuple[Path, str]] = ()
    environment: Sequence[str] = ()
    allowed: Sequence[str] = ()
    image: Path | None = None
    kernel_modules: Sequence[Path] = ()
    prepare: Callable[[Initramfs], None] | None = None
    folder: str = "/"


@dataclass
class Outcome:
    """The result of a run: the command's exit status, and all other failures."""

    status: int | None
    failures: list[str]
    up: bool  # the guest reached its first program
    loaded: bool  # the guest reached the command
    late: bool
    seconds: float
    processor_seconds: float  # CPU time on the host, excluding other programs
    log: Path

    @property
    def code(self) -> int:
        """The runner's exit status."""
        return 1 if self.failures or self.status is None else self.status


class _Lines:
    """Splits a stream of bytes into lines of text."""

    def __init__(self, take: Callable[[str], None]) -> None:
        self._take = take
        self._rest = b""

    def feed(self, data: bytes) -> None:
        *whole, self._rest = (self._rest + data).split(b"\n")
        for line in whole:
            self._take(line.decode(errors="replace").rstrip("\r"))

    def end(self) -> None:
        if self._rest:
            self.feed(b"\n")


class _Run:
    """The state of a running machine."""

    def __init__(self, machine: Machine, log: BinaryIO, show: Callable[[bytes], None]) -> None:
        self.nonce = secrets.token_hex(8)
        self.scan = LogScan(machine.allowed)
        self.status: int | None = None
        self.words: list[str] = []
        self._log = log
        self._show = show
        self._console = _Lines(self._kernel_line)
        self._output = _Lines(lambda line: self._write(f"| {line}"))

    def console(self, data: bytes) -> None:
        """Handles console output, which contains the kernel's log."""
        self._console.feed(data)

    def output(self, data: bytes) -> None:
        """Handles the command's output."""
        self._show(data)
        self._output.feed(data)

    def end(self) -> None:
        self._console.end()
        self._output.end()

    def limit(self, timeout: float) -> float:
        """Returns the time limit for the stage the guest has reached, in seconds from the start."""
        return timeout if self.words else min(UP_TIME, timeout)

    def failures(self) -> list[str]:
        """Returns the failures other than the command's own."""
        found = []
        for word in self.words:
            if word.startswith("cannot-"):
                what, _, module = word.partition(" ")
                found.append(f"{what.replace('-', ' ')} the module {module}")
        if self.scan.findings:
            lines = list(self.scan.findings)
            if self.scan.left_out:
                lines.append(f"and {self.scan.left_out} more")
            found.append("\n    ".join(["the kernel's log contains", *lines]))
        return found

    def _kernel_line(self, line: str) -> None:
        self._write(line)
        _, mark, word = line.partition(f"guest {self.nonce}: ")
        if mark:
            self.words.append(word)
            if word.startswith("exit "):
                self.status = int(word.split()[1])
        elif self.scan.line(line):
            self._show(f"kernel: {line}\n".encode())

    def _write(self, line: str) -> None:
        self._log.write(line.encode() + b"\n")
        self._log.flush()


def stripped(module: Path, cache: Path) -> Path:
    """Returns a copy of a module without debug information, which would fill the guest's memory."""
    made = cache / f"{module.parent.resolve().as_posix().replace('/', '%')}%{module.name}"
    if not made.exists() or made.stat().st_mtime_ns != module.stat().st_mtime_ns:
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as folder:
            new = Path(folder, module.name)
            subprocess.run(["strip", "--strip-debug", "-o", new, module], check=True)
            shutil.copystat(module, new)
            new.rename(made)
    return made


def first_file_system(machine: Machine, nonce: str, cache: Path) -> Initramfs:
    """Returns the guest's initial file system."""
    busybox = shutil.which("busybox")
    if busybox is None:
        raise GuestError("busybox not found (Debian: busybox-static)")
    root = Initramfs()
    for name in ("dev", "proc", "sys", "tmp", "root", "guest"):
        root.folder(f"/{name}")
    root.device("/dev/console", 5, 1)
    root.file("/bin/busybox", Path(busybox))
    root.file("/init", HERE / "init")
    root.file("/guest/image", HERE / "image")
    if machine.modules is not None:
        for name in ("nvidia.ko", "nvidia-uvm.ko"):
            module = machine.modules / name
            if not module.exists():
                raise GuestError(f"{machine.modules} has no {name}")
            root.file(f"/modules/{name}", stripped(module, cache) if machine.strip else module)
    for module in machine.kernel_modules:
        root.file(f"/modules/{module.name}", module)
    # Commands that run on the disk image see /layer overlaid on their root.
    prefix = "/layer" if machine.image else ""
    for source, name in machine.files:
        (root.tree if source.is_dir() else root.file)(prefix + name, source)
    if machine.prepare is not None:
        machine.prepare(root)
    settings = {
        "NONCE": nonce,
        "GPUS": str(machine.gpus),
        "LOAD": "1" if machine.modules is not None else "",
        "MODULE_ARGS": " ".join(machine.module_args),
        "UVM_ARGS": " ".join(machine.uvm_args),
        "KERNEL_MODULES": " ".join(module.stem for module in machine.kernel_modules),
        "STUCK": str(int(max(machine.timeout - LAST_WORDS, 1))),
        "IMAGE": "1" if machine.image else "",
    }
    root.text("/guest/settings", "".join(f"{k}={shlex.quote(v)}\n" for k, v in settings.items()))
    exports = "".join(f"export {shlex.quote(one)}\n" for one in machine.environment)
    enter = f"cd {shlex.quote(machine.folder)} || exit 1\n"
    root.text(f"{prefix}/guest/command", f"{exports}{enter}exec {shlex.join(machine.command)}\n")
    return root


def qemu_command(machine: Machine, initramfs: Path, console: int, output: int) -> list[str]:
    """Returns the QEMU command line, which connects the serial ports to this process's pipes."""
    words = [QEMU, "-accel", "tcg,thread=multi", "-cpu", PROCESSOR, "-smp", str(machine.processors)]
    words += ["-m", str(machine.memory), "-nodefaults", "-no-user-config", "-display", "none"]
    words += ["-no-reboot", "-kernel", str(machine.kernel), "-initrd", str(initramfs)]
    words += ["-append", f"{COMMAND_LINE} {machine.append}".rstrip()]
    for pipe in (console, output):
        words += ["-serial", f"file:/dev/fd/{pipe}"]
    words += ["-device", "edu"] * machine.gpus
    if machine.image is not None:
        words += ["-drive", f"file={machine.image},format=raw,if=virtio,readonly=on,cache=unsafe"]
    return words


def boot(machine: Machine, log: Path, cache: Path, show: Callable[[bytes], None]) -> Outcome:
    """Boots a machine, waits until it stops, and returns the outcome.

    A kernel that dies or hangs before its first program is booted once more. None of our code has
    run by then. The cause is a busy host: QEMU's emulation can execute code while the kernel is
    patching it, which causes an oops, or a processor can stall.
    """
    if shutil.which(QEMU) is None:
        raise GuestError(f"{QEMU} not found (Debian: qemu-system-x86)")
    outcome = _boot(machine, log, cache, show)
    if outcome.up:
        return outcome
    fate = "hung" if outcome.late else "died"
    show(f"the guest's kernel {fate} before its first program: booting again\n".encode())
    return _boot(machine, log, cache, show)


def _boot(machine: Machine, log: Path, cache: Path, show: Callable[[bytes], None]) -> Outcome:
    """Boots a machine once."""
    log.parent.mkdir(parents=True, exist_ok=True)
    start = time.monotonic()
    with open(log, "wb") as kept, tempfile.TemporaryDirectory(prefix="vmem-guest-") as folder:
        run = _Run(machine, kept, show)
        initramfs = Path(folder, "initramfs")
        first_file_system(machine, run.nonce, cache).write(initramfs)
        pipes = {os.pipe(): take for take in (run.console, run.output)}
        (_, console), (_, output) = pipes
        qemu = subprocess.Popen(
            qemu_command(machine, initramfs, console, output),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            pass_fds=[console, output],
            # Ctrl-C should reach only this process, which then stops the machine.
            start_new_session=True,
        )
        os.close(console)
        os.close(output)
        try:
            streams = {pair[0]: take for pair, take in pipes.items()}
            late = _relay(streams, lambda: start + run.limit(machine.timeout))
            if late:
                qemu.kill()
            said = (qemu.communicate()[1] or b"").decode(errors="replace").strip()
        except BaseException:
            qemu.send_signal(signal.SIGKILL)
            qemu.wait()
            raise
        run.end()
    failures = run.failures()
    if late:
        reached = "done" if run.words else "at its first program"
        failures.append(f"not {reached} after {run.limit(machine.timeout):.0f} s")
    elif "end" not in run.words:
        reached = run.words[-1] if run.words else "nothing: it did not boot"
        failures.append(f"the machine stopped early; the last stage that it reached: {reached}")
    if said:
        failures.append(f"qemu: {said}")
    up, loaded = bool(run.words), "loaded" in run.words
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    busy = used.ru_utime + used.ru_stime
    return Outcome(run.status, failures, up, loaded, late, time.monotonic() - start, busy, log)


def _relay(streams: dict[int, Callable[[bytes], None]], deadline: Callable[[], float]) -> bool:
    """Relays the output of pipes until all are closed; returns true if time ran out first."""
    with selectors.DefaultSelector() as selector:
        for stream, take in streams.items():
            selector.register(stream, selectors.EVENT_READ, take)
        try:
            while selector.get_map():
                left = deadline() - time.monotonic()
                if left <= 0:
                    return True
                for key, _ in selector.select(left):
                    data = os.read(key.fd, 65536)
                    if data:
                        key.data(data)
                    else:
                        selector.unregister(key.fd)
        finally:
            for stream in streams:
                os.close(stream)
    return False
