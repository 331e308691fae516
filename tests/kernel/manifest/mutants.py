# SPDX-License-Identifier: MIT
"""Bugs put into the driver on purpose (tests/kernel/mutants), and the test that must catch each.

The expression is what the test, the software GPU or the driver's own checks must say of it: a test
that fails for another reason has caught nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

from manifest.entry import Test

__all__ = ["TESTS"]


def mutant(
    name: str,
    program: str,
    tests: Sequence[str],
    caught: str,
    *,
    kind: str = "release",
    module_args: str = "",
    uvm_args: str = "",
) -> Test:
    """A boot with the bug `name`, in which `program` runs `tests` and must fail."""
    return Test(
        name=f"mutant-{name}",
        mutant=name,
        program=program,
        args=tests,
        caught=caught,
        type=kind,
        module_args=module_args,
        uvm_args=uvm_args,
        timeout=120,
        long=name not in IN_TEST,
    )


# The others of them are left to the long run.
IN_TEST = {
    "no_invalidate",
    "no_zeroing",
    "freed_while_mapped",
    "returns_early",
    "pte_written_twice",
    "wrong_rollback",
    "leaked_reference",
    "released_not_checked",
    "no_owner_check",
    "reused_before_unmapped",
    "published_early",
    "tables_not_waited_for",
}

STALE = r"stale translations? used|stale translation"

TESTS = [
    mutant("no_invalidate", "basic", ["map_move_unmap"], rf"gpu_check.*not -14|{STALE}"),
    mutant("invalidate_short", "basic", ["map_move_unmap", "page_sizes"], rf"gpu_check|{STALE}"),
    mutant("no_zeroing", "basic", ["map_move_unmap", "memory_is_zero_again"], r"not 0x0"),
    mutant("zeroing_short", "basic", ["page_sizes", "memory_is_zero_again"], r"not 0x0"),
    mutant(
        "freed_while_mapped",
        "basic",
        ["released_while_mapped"],
        r"freed while mapped|gpu_check|out_objects|error",
    ),
    mutant("returns_early", "async", ["calls_wait_for_the_gpu"], r"returned before the GPU had"),
    mutant("pte_written_twice", "basic", ["map_move_unmap"], r"written twice|overlap"),
    mutant("wrong_rollback", "failnth", ["resource_manager"], r"CREATE.*STAT changed"),
    mutant(
        "slots_kept",
        "failnth",
        ["resource_manager"],
        r"BIND.*STAT changed",
        uvm_args="uvm_page_table_location=vid",
    ),
    mutant("staged_in_place", "basic", ["all_or_nothing"], r"all_or_nothing"),
    mutant("leaked_reference", "basic", ["statistics"], r"out_(created_bytes|objects) is"),
    mutant("released_not_checked", "basic", ["released_while_mapped"], r"not -116"),
    mutant("no_owner_check", "descriptor", ["forked_child"], r"should be -1\b"),
    mutant(
        "reused_before_unmapped",
        "async",
        ["not_reused_before_the_invalidate"],
        r"out_allocated is false|freed while mapped|check_phys",
    ),
    mutant("published_early", "async", ["published_last"], r"guessed is 0|out_objects is 2"),
    mutant(
        "tables_not_waited_for",
        "basic",
        ["map_move_unmap", "page_sizes", "mixed_sizes"],
        r"gpu_check|out_valid",
        module_args="delay_us=3000",
    ),
    mutant("commit_unlocked", "basic", ["map_move_unmap"], r"Assert failed", kind="debug"),
    mutant("limit_exceeded", "descriptor", ["limits"], r"not -122"),
    mutant("dead_shown", "kill", ["proc_shows_the_living"], r"is dead and still there"),
    mutant("inline_not_counted", "batch", ["big_ptes"], r"pushes: one does not hold"),
    mutant("range_not_checked", "abi_matrix", ["bind_map_fields"], r"should be Numerical result"),
    mutant("waits_locked", "bounds", ["no_lock_while_the_gpu_works"], r"BIND kept others waiting"),
    mutant("freed_locked", "bounds", ["no_lock_while_the_gpu_works"], r"FREE kept others waiting"),
    mutant(
        "claim_not_awaited", "bounds", ["uvm_free_waits_for_a_bind"], r"early is|BUG|Oops|error:"
    ),
    mutant("sparse_cleared", "bounds", ["sparse_slots_share"], r"gap at|softgpu: error"),
    mutant("lock_kept", "bounds", ["locks_are_let_go"], r"out_most_units <= 4096"),
    mutant("polls", "bounds", ["waiting_sleeps"], r"switches <= 200"),
    mutant("not_killable", "bounds", ["killed_in_a_bind"], r"ended == child is false"),
    mutant("tables_not_limited", "bounds", ["limit_of_a_user"], r"not -122"),
    mutant("one_account", "bounds", ["limit_of_a_user"], r"result is 1"),
    mutant("not_accounted", "bounds", ["charged_to_the_cgroup"], r"more >= own"),
    mutant("overlap_not_checked", "abi_matrix", ["bind_overlaps"], r"should be Invalid argument"),
    # What GPU work that runs meanwhile would see.
    mutant("big_by_neighbour", "gap", ["parts_in_big"], r"gap at .* becomes nothing"),
    mutant("neighbour_cleared", "gap", ["parts"], r"gap at .* becomes nothing"),
    mutant("cut_unasked", "gap", ["refused_without_cut"], r"not -98|gap at"),
    mutant(
        "big_over_sparse", "gap", ["sparse_to_mapped_in_big"], r"neither old|TLBs may hold both"
    ),
    mutant("invalid_between", "gap", ["replace_same"], r"neither old nor new at"),
    mutant("resized_at_once", "gap", ["joined_by_name"], r"TLBs may hold both"),
    mutant("resized_too_early", "gap", ["cut"], r"TLBs may hold both"),
]
