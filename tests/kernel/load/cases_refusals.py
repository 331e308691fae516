# SPDX-License-Identifier: MIT
"""Cases with one fault each: the load is refused, and the stock module stays loaded."""

from __future__ import annotations

import fcntl
import os
import socket
from functools import partial
from pathlib import Path

import module_refuse
from edited import other_crc, other_text, without_crc
from guest_machine import GIVEN, Machine, process
from module_elf import read_module

__all__ = ["CASES"]

EDITED = Path("/tmp/edited.ko")
SYMBOL = "nvUvmInterfaceRegisterGpu"


def refused(machine: Machine, path: Path, *patterns: str) -> None:
    """Checks that a load is refused for the expected reason alone, and that nothing has changed."""
    before = machine.system.source_version("nvidia_uvm")
    outcome = machine.load(module=path)
    outcome.expect(1, "refused; nothing was changed", *patterns)
    assert outcome.output.count("\n") == 2, f"more than one reason:\n{outcome.output}"
    assert machine.is_stock()
    assert machine.system.source_version("nvidia_uvm") == before
    assert not Path("/run/vmem-module.json").exists()


def driver_not_loaded(machine: Machine) -> None:
    machine.clear()
    machine.load().expect(1, "nvidia.ko is not loaded: start the stock driver first")


def driver_not_loaded_and_no_module_named(machine: Machine) -> None:
    machine.clear()
    machine.swap("load").expect(1, "nvidia.ko is not loaded")


def not_root(machine: Machine) -> None:
    for action in ("load", "unload"):
        outcome = machine.swap(
            action, "--module", str(machine.ours), before=lambda: os.setuid(65534)
        )
        outcome.expect(1, "only root may load modules")
    assert machine.is_stock()


def modules_missing(machine: Machine) -> None:
    machine.load(module=Path("/nowhere.ko")).expect(
        1, "/nowhere.ko does not exist: run make module"
    )
    machine.swap("load").expect(
        1, r".*/535.*-6\.1\..*/nvidia-uvm\.ko does not exist: run make module"
    )


def no_module(machine: Machine) -> None:
    EDITED.write_bytes(b"\x7fELF\x02\x01 and no more")
    machine.load(module=EDITED).expect(1, "is not a kernel module")


def stock_module_given(machine: Machine) -> None:
    refused(machine, GIVEN / "stock.ko", "is not the patched module")


def other_driver_version(machine: Machine) -> None:
    version = read_module(machine.ours).version
    wrong = version[:-1] + "9"
    other_text(machine.ours, EDITED, f"version={version}", f"version={wrong}")
    refused(machine, EDITED, f"the module is for driver {wrong}; {version} is loaded")


def other_kernel(machine: Machine) -> None:
    wrong = machine.release.replace("6.1.0", "6.1.9")
    other_text(machine.ours, EDITED, f"vermagic={machine.release}", f"vermagic={wrong}")
    outcome = machine.load(module=EDITED)
    outcome.expect(1, f"the module is for kernel {wrong}; {machine.release} is running")
    assert machine.is_stock()


def other_build_of_kernel(machine: Machine) -> None:
    words = read_module(machine.ours).first("vermagic")
    other_text(machine.ours, EDITED, f"vermagic={words}", f"vermagic={words.replace('SMP', 'UMP')}")
    refused(machine, EDITED, 'the module was built as ".* UMP ')


def other_symbol_versions(machine: Machine) -> None:
    other_crc(machine.ours, EDITED, SYMBOL)
    refused(machine, EDITED, f"linked against another nvidia.ko: 1 of .* {SYMBOL}")


def kernel_refuses_other_symbol_versions(machine: Machine) -> None:
    """Shows why the refusal above exists: the kernel itself refuses only once UVM is unloaded."""
    other_crc(machine.ours, EDITED, SYMBOL)
    machine.run("rmmod", "nvidia_uvm").expect(0)
    machine.run("insmod", str(EDITED)).expect(1, "could not insert module")
    assert f"disagrees about version of symbol {SYMBOL}" in machine.kernel_log()
    machine.run("insmod", str(machine.ours)).expect(0)


def no_symbol_versions(machine: Machine) -> None:
    without_crc(machine.ours, EDITED, SYMBOL)
    refused(machine, EDITED, "built without the symbol versions of nvidia.ko.*ALLOW=symbols")


def never_tried(machine: Machine) -> None:
    """A kernel or branch that is not in the table is refused unless ALLOW overrides this."""
    command = ("load", "--module", str(machine.ours), "--selftest", "true")
    for table, word, reason in (
        ({"5.4": {"535.261.03": ""}}, "kernel", f"never run on a kernel like {machine.release}"),
        ({"6.1": {"580.142": ""}}, "driver", "no version of branch 535 was ever run"),
    ):
        forget = partial(setattr, module_refuse, "tried_table", lambda table=table: table)
        others = " ".join(one for one in module_refuse.ALLOWABLE if one != word)
        for words in ("", others):
            outcome = machine.swap(*command, "--allow", words, before=forget)
            outcome.expect(
                1, "refused; nothing was changed", reason, f"ALLOW={word} overrides this"
            )
            assert machine.is_stock()
        machine.changed = True
        outcome = machine.swap(*command, "--allow", word, before=forget)
        outcome.expect(0, f"ALLOW={word} overrides: .*{reason}")
        assert machine.is_ours()
        machine.unload().expect(0)
        assert machine.is_stock()


def file_of_driver_gone(machine: Machine) -> None:
    machine.changed = True
    (machine.modules / "nvidia-current-open.ko").unlink()
    refused(machine, machine.ours, "the file of the loaded nvidia.ko .* is not in /lib/modules")


def file_of_driver_replaced(machine: Machine) -> None:
    """The driver was reinstalled: its file differs from the loaded module."""
    machine.changed = True
    source = read_module(GIVEN / "nvidia.ko").first("srcversion")
    path = machine.modules / "nvidia-current-open.ko"
    other_text(GIVEN / "nvidia.ko", path, f"srcversion={source}", f"srcversion={source[::-1]}")
    refused(machine, machine.ours, "the file of the loaded nvidia.ko .* is not in /lib/modules")


def gpu_in_use(machine: Machine) -> None:
    for node in ("/dev/nvidia0", "/dev/nvidiactl", "/dev/nvidia-uvm"):
        with process("sleep", "1000", stdin=node) as pid:
            outcome = machine.load()
            outcome.expect(1, "the GPU is in use", rf"\b{pid} \(sleep: {node}\)")
            assert machine.is_stock()


def gpu_in_use_under_another_name(machine: Machine) -> None:
    """A container has its own nodes, which are recognized by their device number."""
    major = os.major(os.stat("/dev/nvidia0").st_rdev)
    node = Path("/tmp/gpu")
    machine.node(node, major, 0)
    with process("sleep", "1000", stdin=str(node)) as pid:
        machine.load().expect(1, "the GPU is in use", rf"\b{pid} \(sleep: /tmp/gpu\)")


def used_out_of_sight(machine: Machine) -> None:
    """No process has UVM open, but a socket holds a descriptor: only the use count shows it."""
    one, other = socket.socketpair()
    with one, other:
        file = os.open("/dev/nvidia-uvm", os.O_RDWR)
        socket.send_fds(one, [b"x"], [file])
        os.close(file)
        machine.load().expect(1, "the kernel counts [12] uses of nvidia-uvm that are not visible")
        assert machine.is_stock()


def another_is_running(machine: Machine) -> None:
    with open("/run/vmem-module.lock", "w", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.write("4711\n")
        file.flush()
        machine.load().expect(1, r"another load or unload is running \(process 4711\)")
        machine.unload().expect(1, "another load or unload is running")
    assert machine.is_stock()


def nothing_to_unload(machine: Machine) -> None:
    machine.unload().expect(1, "the loaded nvidia-uvm is the stock module")
    machine.run("rmmod", "nvidia_uvm").expect(0)
    machine.unload().expect(1, "nvidia-uvm is not loaded")


CASES = (
    driver_not_loaded,
    driver_not_loaded_and_no_module_named,
    not_root,
    modules_missing,
    no_module,
    stock_module_given,
    other_driver_version,
    other_kernel,
    other_build_of_kernel,
    other_symbol_versions,
    kernel_refuses_other_symbol_versions,
    no_symbol_versions,
    never_tried,
    file_of_driver_gone,
    file_of_driver_replaced,
    gpu_in_use,
    gpu_in_use_under_another_name,
    used_out_of_sight,
    another_is_running,
    nothing_to_unload,
)
