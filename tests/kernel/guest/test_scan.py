# SPDX-License-Identifier: MIT
"""Tests which lines of a kernel's log are reported, and which are ignored."""

from __future__ import annotations

import pytest

from guest.scan import LogScan

BAD = """
WARNING: CPU: 1 PID: 90 at mm/slab_common.c:478 kmem_cache_destroy+0x120/0x130
WARNING: possible circular locking dependency detected
BUG: KASAN: use-after-free in uvm_vmem_release+0x10/0x20 [nvidia_uvm]
BUG: kernel NULL pointer dereference, address: 0000000000000008
BUG: sleeping function called from invalid context at kernel/locking/mutex.c:580
BUG kmalloc-64 (Tainted: G           OE     ): Redzone overwritten
BUG uvm_range_t (Tainted: G): Objects remaining in uvm_range_group_t on __kmem_cache_shutdown()
Oops: 0002 [#1] PREEMPT SMP NOPTI
general protection fault, probably for non-canonical address 0xdead000000000100
watchdog: BUG: soft lockup - CPU#0 stuck for 120s! [fuzz:99]
INFO: task basic:99 blocked for more than 100 seconds.
rcu: INFO: rcu_preempt detected stalls on CPUs/tasks:
UBSAN: shift-out-of-bounds in nvidia-uvm/uvm_vmem_bind.c:10:5
unreferenced object 0xffff888004c5a000 (size 1024):
list_del corruption. prev->next should be ffff888003, but was dead000000000100
refcount_t: underflow; use-after-free.
nvidia-uvm: uvm_lock.c:290 __uvm_record_lock[pid:99]Assert failed, condition 0 not true
nvidia-uvm: Memory leak of 128 bytes detected.
nvidia-uvm:     Leaked 128 bytes from uvm_channel.c:2200:uvm_channel_manager_create (0xffff888003)
nvidia-uvm: uvm_channel.c:100 uvm_channel_check_errors[pid:9] ERROR: channel error
softgpu: error: a stale translation was used
softgpu: Error: an unknown method
softgpu: leaked 3 allocations
Kernel panic - not syncing: Fatal exception
basic[99]: segfault at 0 ip 0000000000401000 sp 00007ffd error 4
""".strip().splitlines()

GOOD = """
nvidia: loading out-of-tree module taints kernel.
nvidia: module verification failed: signature and/or required key missing - tainting kernel
nvidia-uvm: Loaded the UVM driver, major device number 245.
nvidia-uvm: Built-in UVM tests are enabled. This is a security risk.
nvidia-uvm: Unloaded the UVM driver.
softgpu: 1 GPU, hopper, 256 MB each
..MP-BIOS bug: 8254 timer not connected to IO-APIC
debug: BUGS are not mentioned
ACPI: PM: Preparing to enter system sleep state S5
""".strip().splitlines()


@pytest.mark.parametrize("line", BAD)
def test_is_found(line: str) -> None:
    scan = LogScan()
    assert scan.line(f"[   12.345678] {line}")
    assert scan.findings == [f"[   12.345678] {line}"]


@pytest.mark.parametrize("line", GOOD)
def test_is_let_pass(line: str) -> None:
    scan = LogScan()
    assert not scan.line(f"[   12.345678] {line}")
    assert scan.findings == []


def test_only_what_is_allowed_is_let_pass() -> None:
    scan = LogScan(allowed=[r"softgpu: error: .*stale"])
    scan.lines(["softgpu: error: a stale translation", "softgpu: error: another"])
    assert scan.findings == ["softgpu: error: another"]


def test_a_flood_is_counted_not_kept() -> None:
    scan = LogScan()
    scan.lines(f"BUG: {number}" for number in range(1000))
    assert len(scan.findings) == LogScan.MOST
    assert scan.left_out == 1000 - LogScan.MOST
