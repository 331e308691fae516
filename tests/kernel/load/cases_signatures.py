# SPDX-License-Identifier: MIT
"""The kernel is told to accept only signed modules, which is irreversible: these tests run last."""

from __future__ import annotations

from pathlib import Path

from guest_machine import GIVEN, Machine
from module_elf import SIGNATURE_MAGIC

__all__ = ["CASES"]

ENFORCE = Path("/sys/module/module/parameters/sig_enforce")
SIGNED = Path("/tmp/signed.ko")


def signatures(machine: Machine) -> None:
    source = machine.system.source_version("nvidia_uvm")
    ENFORCE.write_text("Y", encoding="ascii")
    machine.load().expect(
        1, "refused; nothing was changed", "the module is not signed and would be rejected"
    )
    assert machine.is_stock()

    # Only the kernel can detect an invalid signature, so it is asked while the stock module is
    # still loaded.
    sign_badly(machine.ours)
    outcome = machine.load(module=SIGNED)
    outcome.expect(2, "the kernel rejects the module")
    assert "the stock module is unloaded" not in outcome.output
    assert machine.system.source_version("nvidia_uvm") == source
    assert machine.is_stock()

    # This is why the refusals exist: the kernel now rejects even the stock module.
    machine.run("rmmod", "nvidia_uvm").expect(0)
    for path in (machine.ours, SIGNED, GIVEN / "stock.ko"):
        assert machine.run("insmod", str(path)).status == 1
        assert not machine.system.loaded("nvidia_uvm")


def sign_badly(module: Path) -> None:
    """Appends a fake signature to a module."""
    # struct module_signature specifies PKCS#7 and the length of the signature that precedes it.
    junk = b"no signature at all"
    trailer = bytes([0, 0, 2, 0, 0, 0, 0, 0]) + len(junk).to_bytes(4, "big")
    SIGNED.write_bytes(module.read_bytes() + junk + trailer + SIGNATURE_MAGIC)


CASES = (signatures,)
