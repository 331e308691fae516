# SPDX-License-Identifier: MIT
"""Tests of the driver itself, without libvmem: the C programs of tests/kernel/c."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from manifest.entry import DELAYS, Test

__all__ = ["BUILTIN_NOISE", "KILLED", "PROGRAMS", "TESTS"]

# Log lines about a GPU that the test deliberately makes fail.
FAILING_GPU = (
    r"nvidia-uvm: (.*(ERROR|Fatal)|vmem: process)",
    r"softgpu: error: .* freed while .* live entries",
)

# Otherwise UVM would use host memory for page tables when the GPU's memory runs out, and BIND would
# never fail for lack of memory.
TABLES_IN_GPU = "uvm_page_table_location=vid"

# Log lines that UVM's own tests provoke.
BUILTIN_NOISE = (
    r"update_completed_value_locked.* Assert failed, condition new_value - old_value",
    r"uvm_channel_update_progress_with_max.* Assert failed, condition completed_value",
    r"softgpu: error: .*memset to or near ffffffff",
    # The debug build's line for the same event.
    r"uvm_channel_check_errors.* likely caused by push 'Fatal push 0xBAD' started at uvm_channel_",
    r"uvm_global_set_fatal_error.* Encountered a global fatal error: Generic RC error",
    # At this point, driver 595 waits for the old channels, and takes fault handling locks while it
    # holds the address space's lock.
    r"uvm_gpu_isr\.c:\d+ uvm_parent_gpu_(non_)?replayable_faults_isr_(un)?lock.* Assert failed",
    # The fake GPUs of UVM's page tree test have no memory, but late versions of 550 assert that
    # their memory has a largest page size. Registered GPUs pass the assert in every other test.
    r"uvm_page_tree_init.* Assert failed, condition gpu->mem_info\.max_vidmem_page_size & tree",
)

# For PCIe peers, driver 550.163.01 asserts a reference count before it increments it.
PEERS_NOISE = (r"set_optimal_p2p_write_ces.* Assert failed, condition peer_caps->ref_count",)

# A process is killed while UVM adds a GPU: alloc_parent_gpu cannot start a kernel thread, and
# add_gpu leaks what alloc_parent_gpu has allocated (535 to 555; 580 frees it). No other leak may
# occur.
KILLED: dict[str, Any] = {
    "uvm_args": "uvm_leak_checker=2",
    "allow": (
        r"nvidia-uvm: Memory leak of \d+ bytes detected",
        r"Leaked \d+ bytes from uvm_gpu\.c:\d+:alloc_parent_gpu ",
    ),
}

PROGRAMS = [
    Test(name="abi", program="abi_matrix"),
    Test(name="descriptor", program="descriptor"),
    Test(name="basic", program="basic"),
    Test(name="async", program="async"),
    Test(name="batch", program="batch"),
    Test(name="bounds", program="bounds", vidmem=2048, timeout=240),
    Test(name="gap", program="gap", args=["-free_small", "-free_big", "FLIPS=1"]),
    Test(name="lifecycle", program="lifecycle", vidmem=256),
    Test(name="entries", program="entries"),
    Test(name="peers", program="peers", gpus=2, module_args="p2p=pcie", allow=PEERS_NOISE),
    Test(name="nvlink", program="peers", gpus=2, module_args="p2p=nvlink"),
    Test(
        name="diagnose",
        program="diagnose",
        allow=(r"nvidia-uvm: vmem: process \d+ \((diagnose|a\\012b\\040\\033c)\)",),
    ),
    Test(name="failnth", program="failnth", uvm_args=TABLES_IN_GPU, timeout=300),
]

# The debug build detects everything that the release build does, and also checks UVM's asserts and
# lock order, so `make test` runs each program once, in the debug build. Programs that depend on the
# page table format or on the driver's speed also run in the release build and on the other
# architecture. The long run covers all programs in both builds.
BOTH = ("async", "basic")
# Each step makes the driver process thousands of slots, which the release build does faster.
RELEASE = ("failnth",)
# Runs `peers` a second time, over another kind of link.
TWICE = ("nvlink",)


def short(test: Test, arch: str, kind: str) -> bool:
    """True if a program belongs to `make test` in this build on this architecture."""
    if test.name in TWICE:
        return False
    if test.name in RELEASE:
        return (arch, kind) == ("ampere", "release")
    return (arch, kind) == ("hopper", "debug") or test.name in BOTH


SHORT = [
    replace(
        test,
        name=f"{test.name}-{arch}-{kind}",
        arch=arch,
        type=kind,
        module_args=f"{test.module_args} {DELAYS}" if kind == "debug" else test.module_args,
        long=not short(test, arch, kind),
    )
    for test in PROGRAMS
    for arch, kind in (("hopper", "debug"), ("ampere", "release"))
]

HEAVY = [
    Test(
        name="model-hopper-debug",
        program="model",
        type="debug",
        args=["OPS=700", "PROCS=2", "THREADS=2", "SEED=1"],
    ),
    Test(
        name="model-ampere",
        program="model",
        arch="ampere",
        args=["OPS=3000", "PROCS=2", "THREADS=2", "SEED=2"],
        long=True,
    ),
    Test(
        name="fuzz-hopper-debug",
        program="fuzz",
        type="debug",
        module_args=DELAYS,
        args=["CALLS=8000", "SEED=1"],
    ),
    Test(
        name="fuzz-ampere",
        program="fuzz",
        arch="ampere",
        args=["CALLS=25000", "SEED=2"],
        long=True,
    ),
    Test(
        name="kill-hopper-debug",
        program="kill",
        type="debug",
        module_args=DELAYS,
        args=["KILLS=20"],
        **KILLED,
    ),
    Test(
        name="few-handles",
        program="lifecycle",
        args=["forged_generations", "handles_come_round", "no_index_is_left", "INDEX_BITS=6"],
        mutant="few_handles",
        long=True,
    ),
    *(
        Test(
            name=f"refused-{kind}",
            program="descriptor",
            args=["refused_kind", f"KIND={kind}"],
            module_args=f"kind={kind}",
            uvm_args=args,
            long=kind not in ("virtual", "coherent"),
        )
        for kind, args in (
            ("virtual", ""),
            ("mig", ""),
            ("coherent", "uvm_page_table_location=sys"),
            ("integrated", "uvm_page_table_location=sys"),
        )
    ),
    Test(name="counts-hopper", program="counts", vidmem=8192),
    Test(name="counts-ampere", program="counts", arch="ampere", vidmem=8192, long=True),
    *(
        Test(name=f"lost-{what}", program="lost", args=[what], allow=FAILING_GPU)
        for what in ("gpu_lost", "push_dies", "lost_in_flight")
    ),
    Test(
        name="lost-broken",
        program="lost",
        args=["broken"],
        gpus=2,
        long=True,
        module_args="p2p=pcie",
        allow=FAILING_GPU,
    ),
]

# Leaves out UVM's tests of code without our hooks (engine, physical memory), which take most of the
# time.
HOOKED = ("-channels_made_anew", "-engine", "-physical_memory")

BUILTIN = [
    Test(
        name=f"builtin-{arch}-{'patched' if patched else 'stock'}",
        program="builtin",
        arch=arch,
        patched=patched,
        allow=BUILTIN_NOISE,
        timeout=240,
        long=True,
    )
    for arch in ("hopper", "ampere")
    for patched in (True, False)
]

# failnth does not run in the debug build: UVM's lock checker allocates memory itself, and asserts
# if that fails. `suspended` is left out: uvm_resume takes the global lock while holding the locks
# that uvm_suspend took; UVM hides that from its own lock checker, but not from lockdep.
# `address_spaces_come_back` is left out: KASAN keeps freed memory for a while, and the slab
# statistics count it as in use.
LEFT_OUT = {
    "lifecycle": ["-suspended", "-suspended_under_fire"],
    "descriptor": ["-address_spaces_come_back"],
}
CHECKED = [
    replace(
        test,
        name=f"{test.name}-checked",
        checked=True,
        long=True,
        timeout=3600 if test.name == "failnth" else 1800,
        type="release" if test.name == "failnth" else "debug",
        args=[*test.args, *LEFT_OUT.get(test.name, [])],
    )
    for test in PROGRAMS
]

LONG = [
    *BUILTIN,
    *CHECKED,
    Test(
        name="fuzz-checked",
        program="fuzz",
        checked=True,
        long=True,
        args=["CALLS=1000000", "SEED=3"],
        timeout=21600,
    ),
    Test(
        name="handles-come-round",
        program="lifecycle",
        long=True,
        args=["handles_come_round", "INDEX_BITS=20"],
        timeout=10800,
    ),
    Test(name="gap-long", program="gap", long=True, args=["FLIPS=8"], timeout=900),
    Test(
        name="bounds-many",
        program="bounds",
        long=True,
        args=["many_slots", "SLOTS=65536"],
        memory=3072,
        timeout=1800,
    ),
    # benchmarks/results/softgpu-workloads.jsonl is the output of these tests.
    *(
        Test(
            name=f"workloads-{layers}",
            program="workloads",
            args=[f"LAYERS={layers}", f"REQUESTS={requests}"],
            vidmem=8192,
            long=True,
            timeout=3600,
        )
        for layers, requests in ((1, 256), (28, 3))
    ),
    Test(name="kill-long", program="kill", long=True, args=["KILLS=1000"], timeout=3600, **KILLED),
    Test(name="kill-checked", program="kill", long=True, checked=True, timeout=3600, **KILLED),
    Test(
        name="model-checked",
        program="model",
        checked=True,
        long=True,
        args=["OPS=20000", "PROCS=3", "THREADS=3", "SEED=4"],
        timeout=7200,
    ),
    Test(
        name="model-long",
        program="model",
        type="debug",
        long=True,
        args=["OPS=50000", "PROCS=3", "THREADS=4", "SEED=5"],
        timeout=3600,
    ),
    *(replace(test, name=f"{test.name}-full", args=["FULL=1"], timeout=1800) for test in BUILTIN),
]

TESTS = [
    *SHORT,
    *HEAVY,
    replace(BUILTIN[0], name="builtin-hooked", args=HOOKED, long=False),
    *LONG,
]
