# SPDX-License-Identifier: MIT
"""Deliberate bugs in the driver (tests/kernel/mutants), and the test that must catch each.

The expression must match the output of the test, the software GPU or the driver's own checks: a
test that fails for another reason has not caught the bug.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from manifest.entry import Test

__all__ = ["TESTS"]


def mutant(
    name: str,
    program: str,
    tests: Sequence[str],
    caught: str,
    kind: str = "release",
    **options: Any,
) -> Test:
    """Returns a test that boots with the bug `name`; `program` runs `tests` and must fail."""
    return replace(
        Test(
            name=f"mutant-{name}",
            mutant=name,
            program=program,
            args=tests,
            caught=caught,
            type=kind,
            long=name not in IN_TEST,
        ),
        **options,
    )


# The mutants of the short run: a bug that the GPU detects, a missing wait and a missing check. The
# long run covers all mutants.
IN_TEST = {"no_invalidate", "returns_early", "no_owner_check"}

TWO_GPUS = {"gpus": 2, "module_args": "p2p=pcie"}
FAILING_GPU = {"allow": (r"nvidia-uvm: (.*(ERROR|Fatal)|vmem: process)",)}
# Matches the kernel's log if memory was leaked.
LEFT = r"leak|left over|Leak|LEFT"

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
    mutant("dead_shown", "kill", ["proc_shows_the_living"], r"is dead and still listed"),
    mutant("inline_not_counted", "batch", ["big_ptes"], r"pushes: one does not hold"),
    mutant("range_not_checked", "abi_matrix", ["bind_map_fields"], r"should be Numerical result"),
    mutant("waits_locked", "bounds", ["no_lock_while_the_gpu_works"], r"BIND kept others waiting"),
    mutant("freed_locked", "bounds", ["no_lock_while_the_gpu_works"], r"FREE kept others waiting"),
    mutant(
        "chunk_freed_locked",
        "bounds",
        ["no_lock_while_the_gpu_works"],
        r"(RELEASE of GPU memory|BIND that empties a chunk) kept others waiting",
        vidmem=2048,
    ),
    mutant("forgotten_in_one_hold", "basic", ["map_move_unmap"], r"Assert failed", kind="debug"),
    mutant("all_not_limited", "bounds", ["limit_of_all"], r"above is 0|EDQUOT", vidmem=2048),
    mutant(
        "gpu_not_limited", "bounds", ["limit_of_all"], r"vm_create.* is 0 .*not -122", vidmem=2048
    ),
    mutant("refused_stays_charged", "bounds", ["limit_of_a_cgroup"], r"vm_reserve.* is -122"),
    mutant(
        "claim_not_awaited", "bounds", ["uvm_free_waits_for_a_bind"], r"early is|BUG|Oops|error:"
    ),
    mutant("sparse_cleared", "bounds", ["sparse_slots_share"], r"gap at|softgpu: error"),
    mutant("lock_kept", "bounds", ["locks_are_let_go"], r"out_most_units <= 4096"),
    mutant("polls", "bounds", ["waiting_sleeps"], r"switches <= 200"),
    mutant("not_killable", "bounds", ["killed_calls"], r"BIND did not end"),
    mutant("tables_not_limited", "bounds", ["limit_of_a_user"], r"not -122"),
    mutant("one_account", "bounds", ["limit_of_a_user"], r"result is 1"),
    mutant("not_accounted", "bounds", ["charged_to_the_cgroup"], r"more >= own"),
    mutant("claim_not_killable", "bounds", ["killed_calls"], r"BIND behind another did not end"),
    mutant("create_not_killable", "bounds", ["killed_calls"], r"CREATE did not end", vidmem=2048),
    mutant(
        "default_host_is_less",
        "bounds",
        ["limits_are_on"],
        r"pinned <= memory / 2 && .* is false",
        vidmem=2048,
    ),
    mutant("directories_not_counted", "bounds", ["what_counts"], r"gib > 2 \* KIB\(4\) is false"),
    mutant("user_of_the_moment", "bounds", ["whose_limit"], r"effective is 0"),
    mutant("root_cgroup_counts", "bounds", ["whose_limit"], r"error is 0 .*EDQUOT"),
    mutant("overlap_not_checked", "abi_matrix", ["bind_overlaps"], r"should be Invalid argument"),
    # Bugs that work running on the GPU at the same time would notice.
    mutant("big_by_neighbour", "gap", ["parts_in_big"], r"gap at .* becomes nothing"),
    mutant("neighbour_cleared", "gap", ["parts"], r"gap at .* becomes nothing"),
    mutant("cut_unasked", "gap", ["refused_without_cut"], r"not -98|gap at"),
    mutant(
        "big_over_sparse", "gap", ["sparse_to_mapped_in_big"], r"neither old|TLBs may hold both"
    ),
    mutant("large_of_a_part", "entries", ["refused"], r"what is there, not named: 0|gap at"),
    mutant("large_in_any_order", "entries", ["refused"], r"halves in the wrong order: 0"),
    mutant("large_with_any_right", "entries", ["refused"], r"two rights: 0"),
    mutant("large_forgotten", "entries", ["by_any_operations"], r"entry\(slot\) is 65536"),
    mutant("large_without_big", "entries", ["refused"], r"reservation that is not BIG: -99"),
    mutant("large_over_sparse", "entries", ["refused"], r"a sparse unit: 0"),
    mutant("chunks_not_compared", "entries", ["refused"], r"halves of two chunks: 0"),
    mutant("first_large_named", "entries", ["refused"], r"wrong order: -99, operation 1"),
    mutant("object_of_first", "entries", ["by_any_operations"], r"result is -99"),
    mutant("contiguous_at_first", "entries", ["contiguous_objects"], r"vm_map.* is -99"),
    mutant("join_not_written", "entries", ["split_and_joined"], r"entry\(RES\) is 65536"),
    mutant("cut_of_nothing", "entries", ["split_and_joined"], r"entry\(RES\) is 2097152"),
    mutant("split_not_written", "entries", ["split_and_joined"], r"entry\(RES\) is 2097152"),
    mutant("last_cut_counts", "entries", ["split_and_joined"], r"entry\(RES\) is 2097152"),
    mutant("evicted_stays_large", "peers", ["large_entries"], r"vm_map.* is -98", **TWO_GPUS),
    mutant("large_not_said", "basic", ["query"], r"out_capabilities is 255"),
    mutant("invalid_between", "gap", ["replace_same"], r"neither old nor new at"),
    mutant("resized_at_once", "gap", ["joined_by_name"], r"TLBs may hold both"),
    mutant("resized_too_early", "gap", ["cut"], r"TLBs may hold both"),
    # uvm_vmem.c
    mutant("query_owner_not_checked", "descriptor", ["forked_child"], r"QUERY about a GPU"),
    mutant("tail_not_checked", "abi_matrix", ["sizes"], r"should be Argument list too long"),
    mutant("size_limit_off", "abi_matrix", ["sizes"], r"should be Argument list too long"),
    mutant(
        "create_not_undone",
        "async",
        ["create_without_a_place_for_its_handle"],
        r"s\.out_objects \+ .* is \d+",
    ),
    mutant("writable_too_late", "abi_matrix", ["read_only_structs"], r"FAILED read_only_structs"),
    mutant(
        "release_stops_after_error", "lost", ["push_dies"], r"vm_release.* is -5", **FAILING_GPU
    ),
    mutant("create_after_error", "lost", ["push_dies"], r"out_chunk_bytes is", **FAILING_GPU),
    mutant("second_state", "descriptor", ["first_use_by_many"], r"out_objects is"),
    mutant("owner_not_held", "descriptor", ["address_spaces_come_back"], r"LEFT is false"),
    mutant(
        "refused_gpu_taken",
        "descriptor",
        ["refused_kind", "KIND=virtual"],
        r"is 0 .*not -95",
        module_args="kind=virtual",
    ),
    mutant(
        "mig_taken",
        "descriptor",
        ["refused_kind", "KIND=mig"],
        r"out_gpu_refusal is 0",
        module_args="kind=mig",
    ),
    mutant(
        "coherent_taken",
        "descriptor",
        ["refused_kind", "KIND=coherent"],
        r"out_gpu_refusal is 0",
        module_args="kind=coherent",
        uvm_args="uvm_page_table_location=sys",
    ),
    mutant(
        "outputs_of_failures", "abi_matrix", ["outputs_of_a_failure"], r"the struct has changed"
    ),
    mutant("wait_after_error", "lost", ["push_dies"], r"vm_wait.* is 0 .*not -5", **FAILING_GPU),
    # uvm_vmem_memory.c
    mutant("limits_swapped", "descriptor", ["limits"], r"FAILED limits"),
    mutant("growing_not_counted", "descriptor", ["limit_under_threads"], r"made is [34]"),
    mutant("block_not_aligned", "basic", ["alignment"], r"out_pa % \(1ull << shift\) is"),
    mutant("run_not_contiguous", "basic", ["contiguous"], r"FAILED contiguous"),
    mutant("empty_chunk_kept", "descriptor", ["limits"], r"FAILED limits"),
    mutant("host_freed_at_once", "async", ["host_memory_waits"], r"!early is false"),
    mutant(
        "chunk_freed_at_once",
        "async",
        ["not_reused_before_the_invalidate"],
        r"freed while|out_allocated is false|check_phys",
    ),
    mutant("zeroed_once", "basic", ["memory_is_zero_again"], r"not 0x0"),
    mutant("zeroing_not_waited_for", "async", ["published_last"], r"!early is false"),
    mutant("given_back_after_error", "lost", ["push_dies"], r"out_chunk_bytes is 0", **FAILING_GPU),
    mutant("failed_chunk_leaked", "lifecycle", ["memory_runs_out"], LEFT, vidmem=256),
    mutant("peer_address_is_own", "peers", ["peer_memory"], r"out_aperture is", **TWO_GPUS),
    mutant("taken_from_full", "basic", ["holes"], r"FAILED holes"),
    mutant(
        "host_chunk_kept",
        "failnth",
        ["kernel_memory", "ACTION=7"],
        r"CREATE, host memory, allocation \d+: kernel memory was",
        checked=True,
        timeout=600,
    ),
    # uvm_vmem_object.c
    mutant("generation_ignored", "lifecycle", ["forged_generations"], r"forged.*not -2 "),
    mutant("released_is_unknown", "abi_matrix", ["release_fields"], r"should be Stale"),
    mutant("page_inside_wrong", "basic", ["page_sizes"], r"FAILED page_sizes"),
    mutant(
        "gone_gpu_keeps_pages", "lifecycle", ["the_gpu_goes"], r"Assert failed", "debug", vidmem=256
    ),
    mutant(
        "generation_kept",
        "lifecycle",
        ["handles_come_round", "INDEX_BITS=6"],
        r"handle != first|not -116",
    ),
    mutant("wrap_not_counted", "lifecycle", ["indices_come_round"], r"handle 0x\w+ after|not -116"),
    mutant(
        "unpublished_leaked",
        "lifecycle",
        ["no_index_is_left", "INDEX_BITS=6"],
        r"stat_same\(&before, &after\) is false",
    ),
    # uvm_vmem_range.c
    mutant("unmapped_object_kept", "basic", ["statistics"], r"out_(created_bytes|objects) is"),
    mutant(
        "all_forgotten_with_one", "peers", ["one_of_two_leaves"], r"out_mapped_bytes is", **TWO_GPUS
    ),
    mutant(
        "evicted_from_first_only", "peers", ["peer_memory"], r"freed while|gpu_check", **TWO_GPUS
    ),
    mutant("peer_one_way", "peers", ["peer_memory"], r"gpu_check|out_mapped_bytes is", **TWO_GPUS),
    mutant("address_not_checked", "abi_matrix", ["reserve_fields"], r"should be Numerical result"),
    mutant("gpu_named_twice", "abi_matrix", ["reserve_fields"], r"should be Invalid argument"),
    mutant("eager_not_limited", "abi_matrix", ["reserve_fields"], r"should be Message too long"),
    mutant(
        "tickets_not_drained", "async", ["gpu_goes_with_a_bind_in_flight"], r"FAILED|Assert|BUG"
    ),
    mutant(
        "freed_though_mapped", "abi_matrix", ["free_fields"], r"should be Device or resource busy"
    ),
    mutant(
        "foreign_range_taken", "abi_matrix", ["reserve_where_uvm_has_a_range"], r"should be|BUG"
    ),
    mutant("middle_names_range", "abi_matrix", ["bind_fields"], r"should be No such file"),
    mutant(
        "host_access_kept", "peers", ["one_of_two_leaves"], r"FAILED|Assert|BUG|error", **TWO_GPUS
    ),
    # uvm_vmem_stat.c
    mutant("stat_of_all_gpus", "peers", ["apart"], r"out_(created|mapped)_bytes is", **TWO_GPUS),
    mutant("proc_for_everybody", "kill", ["proc_is_for_root"], r"status is"),
    mutant("command_not_escaped", "diagnose", ["name_in_the_log"], r"no \".*x5c012"),
    mutant(
        "list_unlocked",
        "kill",
        ["proc_of_the_hasty", "ROUNDS=2000"],
        r"BUG|Oops|list_(add|del) corruption|general protection",
    ),
    mutant("host_in_each_gpu", "peers", ["apart"], r"out_host_bytes is", **TWO_GPUS),
    mutant("host_bytes_counted_as_chunks", "basic", ["host_memory"], r"out_host_bytes is"),
    # uvm_vmem_ticket.c
    mutant("ticket_of_nothing", "async", ["no_ticket"], r"ticket is \d+"),
    mutant("ticket_too_many", "async", ["too_many_tickets"], r"257 tickets of 256"),
    mutant("failed_ticket_is_done", "lost", ["lost_in_flight"], r"result == -EIO", **FAILING_GPU),
    mutant("future_ticket_is_done", "abi_matrix", ["wait_fields"], r"should be No such file"),
    mutant("ticket_place_leaked", "async", ["a_ticket"], r"tickets_open\(\) is"),
    mutant("ticket_done_at_once", "async", ["a_ticket"], r"not -110"),
    mutant(
        "wait_without_end",
        "async",
        ["a_wait_ends_with_its_time"],
        r"call_join\(&c\) is 0.*not -110",
    ),
    mutant("wait_not_killable", "async", ["end_with_binds_in_flight"], r"left is false"),
    # uvm_vmem_debug.c
    mutant("close_not_claimed", "diagnose", ["fault_at_the_end"], r"looked at what is being freed"),
    mutant("dump_of_another", "diagnose", ["selections"], r"999999"),
    mutant("batch_not_noted", "diagnose", ["list_of_reservations"], r"1 of thread"),
    # uvm_vmem_bind.c, uvm_vmem_table.c, headers
    mutant(
        "first_gpu_waited_for", "peers", ["every_gpu_is_waited_for"], r"before GPU 1", **TWO_GPUS
    ),
    mutant(
        "second_gpu_not_written", "peers", ["one_reservation_on_both"], r"is 0 .*not", **TWO_GPUS
    ),
    mutant(
        "gpu_leaves_a_bind", "async", ["gpu_goes_while_a_bind_waits"], r"the GPU left before a BIND"
    ),
    mutant("cached_everywhere", "basic", ["host_memory"], r"memory of aperture \d is cached"),
    mutant("big_without_membar", "basic", ["reused_after_a_membar"], r"no membar followed"),
    mutant("pin_missing", "async", ["released_during_a_bind"], r"out_objects is|BUG|error"),
    mutant(
        "object_end_not_checked",
        "abi_matrix",
        ["bind_map_fields"],
        r"should be Numerical result|BUG: ",
    ),
    mutant(
        "host_as_one_entry", "basic", ["host_memory_in_big"], r"FAILED host_memory_in_big|error"
    ),
    mutant("read_only_is_writable", "basic", ["read_only"], r"out_read_only is false|not -30"),
    mutant("no_membar", "counts", ["one_request"], r"membars is", vidmem=8192),
    mutant(
        "host_of_gpu_membar",
        "peers",
        ["membars_by_memory"],
        r"unmapped\[m\]\.membar_sys is",
        **TWO_GPUS,
    ),
    mutant(
        "peer_of_gpu_membar",
        "peers",
        ["membars_by_memory"],
        r"unmapped\[m\]\.membar_sys is",
        **TWO_GPUS,
    ),
    mutant(
        "last_membar_missing",
        "peers",
        ["membars_by_memory"],
        r"freed\[m\].* is false",
        **TWO_GPUS,
    ),
    mutant("trace_without_result", "diagnose", ["tracepoints"], r"not traced: uvm_vmem_bind"),
    mutant("sparse_refused", "basic", ["sparse"], r"is -95"),
]
