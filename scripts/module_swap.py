# SPDX-License-Identifier: MIT
"""Swaps the stock and the patched nvidia-uvm.

A failed swap is undone: the previous module is loaded again. Before the stock module is unloaded, a
record is written to /run; if the program is killed, the next load or unload finds it and restores
the stock module.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from module_elf import KernelModule
from module_nodes import Access, make_nodes, remember_nodes
from module_query import query
from module_system import UVM, System

__all__ = ["Interrupted", "NotRestored", "Swap", "SwapError"]

STATE = "run/vmem-module.json"
# How long processes that were just stopped may take to release the module.
PATIENCE_SECONDS = 20


class SwapError(Exception):
    """Raised when the swap failed and the previous module was restored."""


class NotRestored(Exception):
    """Raised when the swap failed and the stock module could not be restored."""


class Interrupted(Exception):
    """Raised when a signal asks the program to stop."""


@dataclass
class Swap:
    """Loads or unloads the patched module on a machine.

    Attributes:
        say: prints a line for the user.
        selftest: the command that decides whether the module stays; empty for none.
        selftest_seconds: the self-test's timeout.
        arguments: parameters for the module, in addition to the stock module's.
    """

    system: System
    say: Callable[[str], None]
    selftest: list[str] = field(default_factory=list)
    selftest_seconds: int = 900
    arguments: list[str] = field(default_factory=list)

    # The tools

    def tool(self, *words: str) -> str:
        """Runs one of kmod's tools and returns its output; raises SwapError if it fails."""
        path = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin:/usr/bin:/bin"
        # With VMEM_UVM=stock, the DKMS package's modprobe rule loads the stock module.
        environment = {**os.environ, "PATH": path, "LC_ALL": "C", "VMEM_UVM": "stock"}
        try:
            done = subprocess.run(
                words,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                start_new_session=True,  # keep terminal signals (Ctrl-C) from the tool
                check=False,
            )
        except OSError as error:
            raise SwapError(f"{words[0]}: {error.strerror}") from error
        if done.returncode:
            raise SwapError(f"{' '.join(words)}: {done.stdout.strip() or done.returncode}")
        return done.stdout

    def stock_arguments(self) -> list[str]:
        """Returns the stock module's options on this machine (modprobe.d, kernel command line)."""
        words: list[str] = []
        for line in self.tool("modprobe", "--showconfig").splitlines():
            parts = line.split(None, 2)
            if len(parts) == 3 and parts[0] == "options":
                name = parts[1].replace("-", "_")
                # Debian names the file nvidia-current-uvm.
                if name == UVM or (name.startswith("nvidia_") and name.endswith("_uvm")):
                    words += shlex.split(parts[2])
        return words

    # Recorded state

    @property
    def state_path(self) -> Path:
        """The file that records that the stock module was unloaded."""
        return self.system.root / STATE

    def stock_expected(self) -> bool:
        """True if an earlier load unloaded a stock module that has not been restored yet."""
        try:
            return bool(json.loads(self.state_path.read_text(encoding="utf-8"))["stock"])
        except (OSError, ValueError, KeyError):
            return False

    def note(self, stock: bool) -> None:
        """Records whether the stock module must be restored."""
        self.state_path.write_text(json.dumps({"stock": stock}) + "\n", encoding="utf-8")

    # Steps

    def remove(self) -> None:
        """Unloads UVM, whether stock or patched; first gives its users time to release it."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while self.system.uvm_references() and time.monotonic() < deadline:
            time.sleep(0.1)
        self.tool("rmmod", UVM)

    def try_kernel(self, module: Path) -> None:
        """Checks that the kernel would accept the module, while the stock module is still loaded.

        The kernel checks the signature and the version magic before it notices that a module of
        that name is already loaded.
        """
        try:
            self.tool("insmod", str(module))
        except SwapError as error:
            if "File exists" in str(error):
                return
            raise SwapError(f"the kernel rejects the module: {error}") from error
        self.tool("rmmod", UVM)
        raise SwapError("the stock module was unloaded by another process")

    def nodes(self, access: dict[str, Access]) -> None:
        """Recreates UVM's device nodes if its major number changed."""
        for path in make_nodes(self.system, access):
            self.say(f"made {path}")

    def bring_stock_back(self, access: dict[str, Access]) -> None:
        """Loads the stock UVM with modprobe; raises NotRestored if this fails."""
        try:
            self.tool("modprobe", "nvidia-uvm")
            if not self.system.loaded(UVM):
                raise SwapError("modprobe nvidia-uvm loaded nothing")
            if self.system.uvm_is_ours():
                raise SwapError("modprobe nvidia-uvm loaded the patched module")
            self.nodes(access)
            self.state_path.unlink(missing_ok=True)
        except (SwapError, OSError) as error:
            raise NotRestored(
                f"the stock module could not be loaded again: {error}; until it is, CUDA does not "
                "work. Try: modprobe nvidia-uvm"
            ) from error

    def check(self, module: KernelModule) -> None:
        """Verifies that this module is loaded and answers UVM_VMEM_QUERY."""
        if self.system.source_version(UVM) != module.first("srcversion"):
            raise SwapError("another process loaded an nvidia-uvm")
        try:
            answer = query(self.system.root / "dev/nvidia-uvm")
        except OSError as error:
            raise SwapError(f"the module does not answer UVM_VMEM_QUERY: {error}") from error
        if answer.driver != module.version:
            raise SwapError(f"the module reports driver {answer.driver}")
        self.say(f"patched driver {answer.driver}, ABI {answer.abi}")

    def run_selftest(self) -> None:
        """Runs the self-test and shows its output to the user; raises SwapError if it fails."""
        if not self.selftest:
            self.say("no self-test was requested")
            return
        self.say(f"self-test: {' '.join(self.selftest)}")
        try:
            with subprocess.Popen(self.selftest, start_new_session=True) as process:
                try:
                    status = process.wait(timeout=self.selftest_seconds)
                finally:
                    # Processes left behind would keep the module in use.
                    with suppress(ProcessLookupError):
                        os.killpg(process.pid, signal.SIGKILL)
        except subprocess.TimeoutExpired as error:
            raise SwapError(f"the self-test did not finish in {self.selftest_seconds} s") from error
        except OSError as error:
            raise SwapError(f"the self-test cannot be run: {error}") from error
        if status:
            raise SwapError(f"the self-test failed (exit status {status})")

    # Swaps

    def load(self, module: KernelModule) -> None:
        """Swaps the patched module in; undoes the swap if anything fails."""
        access = remember_nodes(self.system)
        stock = self.system.loaded(UVM)
        arguments = [*self.stock_arguments(), *self.arguments]
        if stock:
            self.try_kernel(module.path)
        self.note(stock or self.stock_expected())
        try:
            if stock:
                self.remove()
                self.say("the stock module is unloaded")
            self.tool("insmod", str(module.path), *arguments)
            self.nodes(access)
            self.check(module)
            self.run_selftest()
        except BaseException as error:
            with undisturbed():
                self.undo(access)
            raise SwapError(str(error) or type(error).__name__) from error

    def undo(self, access: dict[str, Access]) -> None:
        """Restores the state from before load()."""
        expected = self.stock_expected()
        if self.system.loaded(UVM):
            if not self.system.uvm_is_ours():
                self.state_path.unlink(missing_ok=True)
                self.nodes(access)
                return
            try:
                self.remove()
            except SwapError as error:
                raise NotRestored(
                    f"the patched module cannot be unloaded: {error}; restart the machine"
                ) from error
        if expected:
            self.bring_stock_back(access)
            self.say("the stock module is back")
        else:
            self.state_path.unlink(missing_ok=True)

    def unload(self) -> None:
        """Unloads the patched module; restores the stock module unless none was loaded before."""
        access = remember_nodes(self.system)
        known = self.state_path.exists()
        expected = self.stock_expected()
        with undisturbed():
            if self.system.loaded(UVM):
                self.remove()
                self.say("the patched module is unloaded")
            if known and not expected:
                self.state_path.unlink(missing_ok=True)
                self.say("no stock module was loaded before; none is now")
                return
            self.bring_stock_back(access)
            self.say("the stock module is back")


@contextmanager
def undisturbed() -> Iterator[None]:
    """Ignores termination signals, because a half-done swap is the worst state to leave behind."""
    signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = [signal.signal(number, signal.SIG_IGN) for number in signals]
    try:
        yield
    finally:
        for number, handler in zip(signals, before):  # noqa: B905 - Python 3.9 has no strict
            signal.signal(number, handler)
