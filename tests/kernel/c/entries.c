/* SPDX-License-Identifier: MIT */
/*
 * Entries of 2 MB that a batch asks for (UVM_VMEM_OP_LARGE): which operations and which memory produce them,
 * what is refused, how they are split and joined, and what that costs. gap.c tests what concurrent GPU work sees, and
 * failnth.c the state after each failure.
 */
#include "abi.h"
#include "kcheck.h"
#include "world.h"

#define RES 0x7c0000000000ull
#define LARGE UVM_VMEM_OP_LARGE
#define REPLACE UVM_VMEM_OP_REPLACE

static struct world W;

static bool start(unsigned flags) {
  struct uvm_vmem_query q;
  world_open(&W, 1);
  int result = vm_query(W.uvm, NULL, &q);
  if (!result) result = vm_reserve(W.uvm, W.uuid[0], RES, MIB(256), 16, flags);
  if (result) hopeless("a reservation", result);
  return q.out_capabilities & UVM_VMEM_CAP_LARGE;
}

#define START()                                                     \
  do {                                                              \
    if (!start(UVM_VMEM_RESERVE_BIG)) SKIP("no entries on request"); \
  } while (0)

static int object(unsigned count, unsigned flags, uint32_t *handle) {
  return vm_create(W.uvm, W.uuid[0], 16, count, flags, handle);
}

static uint64_t entry(uint64_t va) { return gpu_xlate(&W, 0, va).out_page_size; }

/* The cost of a batch, from the driver's counters. */
struct cost {
  uint64_t pushes, writes, invalidates;
};

static struct cost cost_of(const struct uvm_vmem_op *ops, unsigned n, int *result) {
  struct uvm_vmem_stat a, b;
  vm_stat(W.uvm, NULL, &a);
  *result = vm_bind(W.uvm, RES, ops, n, NULL, NULL);
  vm_stat(W.uvm, NULL, &b);
  return (struct cost){b.out_pushes - a.out_pushes, b.out_pte_writes - a.out_pte_writes,
                       b.out_invalidates - a.out_invalidates};
}

/* Each 2 MB of an object created CONTIGUOUS is a chunk, whatever the object's size; the remainder is one run. */
static void contiguous_objects(void) {
  enum { CHUNKS = 20, REST = 5 };
  struct uvm_vmem_stat s;
  uint32_t first, whole;
  START();
  OK(object(7, 0, &first)); /* so that the next object starts inside a chunk */
  OK(object(CHUNKS * SLOT_UNITS + REST, UVM_VMEM_CREATE_CONTIGUOUS, &whole));
  OK(vm_map(W.uvm, RES, RES, whole, 0, CHUNKS * SLOT_UNITS + REST, 0)); /* without LARGE, objects of more than 2 MB get small entries */
  EQ(gpu_scan(&W, 0, RES, MIB(256)).out_2m, 0);
  OK(vm_map(W.uvm, RES, RES, whole, 0, CHUNKS * SLOT_UNITS, LARGE | REPLACE));
  for (unsigned i = 0; i <= CHUNKS; i++) {
    const uint64_t at = RES + i * SLOT, pa = gpu_xlate(&W, 0, at).out_pa;
    EQ(entry(at), i < CHUNKS ? SLOT : UNIT);
    if (i < CHUNKS) EQ(pa % SLOT, 0);
    for (unsigned unit = 1; i == CHUNKS && unit < REST; unit++) EQ(gpu_xlate(&W, 0, at + unit * UNIT).out_pa, pa + unit * UNIT);
  }
  OK(gpu_check(&W, 0, RES, CHUNKS * SLOT + REST * UNIT, 0, 0));
  OK(vm_release(W.uvm, whole));
  OK(vm_unmap(W.uvm, RES, RES, CHUNKS * SLOT_UNITS + REST, 0));
  OK(vm_release(W.uvm, first));
  OK(vm_stat(W.uvm, NULL, &s));
  EQ(s.out_chunk_bytes, 0);
  world_close(&W);
}

/* One operation or many, one object or several that share a chunk: the batch only has to name the whole slot. */
static void by_any_operations(void) {
  const uint64_t slot = RES + SLOT;
  struct uvm_vmem_op ops[SLOT_UNITS];
  uint32_t half[2], plain, whole;
  struct cost c;
  int result;
  START();
  for (unsigned i = 0; i < 2; i++) OK(object(SLOT_UNITS / 2, UVM_VMEM_CREATE_CONTIGUOUS, &half[i]));
  OK(object(SLOT_UNITS, 0, &plain));
  OK(object(SLOT_UNITS, UVM_VMEM_CREATE_CONTIGUOUS, &whole));
  for (unsigned i = 0; i < 2; i++) ops[i] = op_map(slot + i * SLOT / 2, half[i], 0, SLOT_UNITS / 2, i ? LARGE : 0);
  c = cost_of(ops, 2, &result);
  OK(result);
  EQ(entry(slot), SLOT);
  EQ(c.pushes, 1);
  EQ(c.writes, 1);
  EQ(c.invalidates, 1);
  OK(gpu_fill(&W, 0, slot, SLOT, 1, 1));
  OK(gpu_check(&W, 0, slot, SLOT, 1, 1));
  OK(vm_unmap(W.uvm, RES, slot, SLOT_UNITS, 0));
  for (unsigned i = 0; i < 2; i++) ops[i].flags = 0; /* without LARGE the entries are small */
  OK(vm_bind(W.uvm, RES, ops, 2, NULL, NULL));
  EQ(entry(slot), UNIT);
  OK(gpu_check(&W, 0, slot, SLOT, 1, 1));
  OK(vm_map(W.uvm, RES, RES + 4 * SLOT, plain, 0, SLOT_UNITS, LARGE)); /* happens to be a whole chunk */
  EQ(entry(RES + 4 * SLOT), SLOT);
  for (unsigned i = 0; i < SLOT_UNITS; i++) ops[i] = op_map(RES + 6 * SLOT + i * UNIT, whole, i, 1, LARGE);
  OK(vm_bind(W.uvm, RES, ops, SLOT_UNITS, NULL, NULL));
  EQ(entry(RES + 6 * SLOT), SLOT);
  OK(vm_map(W.uvm, RES, RES + 8 * SLOT, whole, 0, SLOT_UNITS, LARGE | UVM_VMEM_OP_READ_ONLY)); /* a second mapping */
  EQ(entry(RES + 8 * SLOT), SLOT);
  EQ(gpu_fill(&W, 0, RES + 8 * SLOT, 8, 0, 0), -EROFS);
  world_close(&W);
}

/* One bad operation among good ones: nothing has changed, and out_failed_op names it. */
static void refuse(const char *what, const struct uvm_vmem_op *ops, unsigned n, int want, unsigned named) {
  struct uvm_vmem_stat before, after;
  struct softgpu_counters base = gpu_counters(&W, 0);
  uint32_t failed;
  vm_stat(W.uvm, NULL, &before);
  int result = vm_bind(W.uvm, RES, ops, n, &failed, NULL);
  vm_stat(W.uvm, NULL, &after);
  if (result != want || failed != named) fail("%s: %d, operation %u", what, result, failed);
  if (!stat_same(&before, &after)) fail("%s: STAT changed", what);
  if (gpu_counters_since(&W, 0, &base).pte_changes) fail("%s: the page tables changed", what);
}

static void refused(void) {
  const uint64_t slot = RES + SLOT, other = RES + 40 * SLOT;
  uint32_t whole, half[2], host, two;
  START();
  OK(object(2 * SLOT_UNITS, UVM_VMEM_CREATE_CONTIGUOUS, &whole));
  for (unsigned i = 0; i < 2; i++) OK(object(SLOT_UNITS / 2, UVM_VMEM_CREATE_CONTIGUOUS, &half[i]));
  OK(object(SLOT_UNITS, UVM_VMEM_CREATE_HOST | UVM_VMEM_CREATE_CONTIGUOUS, &host));
  OK(vm_create(W.uvm, W.uuid[0], 21, 2, 0, &two));
  OK(vm_map(W.uvm, RES, RES + 30 * SLOT, whole, 0, SLOT_UNITS - 1, 0)); /* its last page is missing */
  OK(vm_unmap(W.uvm, RES, RES + 32 * SLOT + UNIT, 1, UVM_VMEM_OP_SPARSE));
  OK(vm_unmap(W.uvm, RES, RES + 34 * SLOT, SLOT_UNITS, UVM_VMEM_OP_SPARSE));
  OK(vm_map(W.uvm, RES, RES + 36 * SLOT, whole, 0, SLOT_UNITS, LARGE));
  const struct {
    const char *what;
    struct uvm_vmem_op ops[2];
    int error;
  } wrong[] = {
      {"a page less", {op_map(slot, whole, 0, SLOT_UNITS - 1, LARGE)}, -EADDRNOTAVAIL},
      {"a page of the next slot, too", {op_map(slot, whole, 0, SLOT_UNITS + 1, LARGE)}, -EADDRNOTAVAIL},
      {"an offset that does not match", {op_map(slot, whole, 1, SLOT_UNITS, LARGE)}, -EADDRNOTAVAIL},
      {"an address that does not match", {op_map(slot + UNIT, whole, 0, SLOT_UNITS, LARGE)}, -EADDRNOTAVAIL},
      {"halves in the wrong order",
       {op_map(slot, half[1], 0, 16, LARGE), op_map(slot + SLOT / 2, half[0], 0, 16, LARGE)}, -EADDRNOTAVAIL},
      {"halves of two chunks",
       {op_map(slot, whole, 0, 16, LARGE), op_map(slot + SLOT / 2, half[1], 0, 16, 0)}, -EADDRNOTAVAIL},
      {"two rights",
       {op_map(slot, whole, 0, 16, LARGE), op_map(slot + SLOT / 2, whole, 16, 16, UVM_VMEM_OP_READ_ONLY)}, -EADDRNOTAVAIL},
      {"a hole", {op_map(slot, whole, 0, 31, LARGE), op_unmap(slot + 31 * UNIT, 1, 0)}, -EADDRNOTAVAIL},
      {"host memory", {op_map(slot, host, 0, SLOT_UNITS, LARGE)}, -EADDRNOTAVAIL},
      {"what is there, not named", {op_map(RES + 31 * SLOT - UNIT, whole, 31, 1, LARGE)}, -EADDRNOTAVAIL},
      {"a sparse unit", {op_map(RES + 32 * SLOT, whole, 0, SLOT_UNITS, LARGE)}, -EADDRNOTAVAIL},
      {"a sparse slot", {op_map(RES + 34 * SLOT, two, 0, 1, LARGE)}, -EADDRNOTAVAIL},
      {"a part of an entry", {op_map(RES + 36 * SLOT, whole, 0, 1, LARGE | REPLACE)}, -EADDRNOTAVAIL},
      {"over what is mapped", {op_map(RES + 36 * SLOT, two, 0, 1, LARGE)}, -EEXIST},
      {"an UNMAP", {op_unmap(slot, SLOT_UNITS, LARGE)}, -EOPNOTSUPP},
      {"a part of an entry, without CUT", {op_unmap(RES + 36 * SLOT, 1, 0)}, -EADDRINUSE},
      {"the rest of it with CUT",
       {op_unmap(RES + 36 * SLOT, 1, 0), op_unmap(RES + 36 * SLOT + UNIT, 30, UVM_VMEM_OP_CUT)}, -EADDRINUSE},
  };
  for (unsigned i = 0; i < ARRAY_SIZE(wrong); i++) {
    struct uvm_vmem_op ops[4] = {op_map(other, two, 0, 2, LARGE)};
    unsigned n = 1;
    for (unsigned k = 0; k < 2 && wrong[i].ops[k].op; k++) ops[n++] = wrong[i].ops[k];
    /* The failed operation is the last one with LARGE. */
    refuse(wrong[i].what, ops, n, wrong[i].error, n > 2 && ops[2].flags & LARGE ? 2 : 1);
    EQ(gpu_check(&W, 0, other, 8, 0, 0), -EFAULT);
  }
  EQ(entry(RES + 36 * SLOT), SLOT);
  EQ(entry(RES + 30 * SLOT), UNIT);
  world_close(&W);
  start(0); /* not BIG */
  OK(object(SLOT_UNITS, UVM_VMEM_CREATE_CONTIGUOUS, &whole));
  refuse("in a reservation that is not BIG", (struct uvm_vmem_op[]){op_map(slot, whole, 0, SLOT_UNITS, LARGE)}, 1, -EINVAL, 0);
  world_close(&W);
}

/* Split and join in place, over the same memory, repeatedly: several slots and an operation on another slot in one
 * call. */
static void split_and_joined(void) {
  enum { SLOTS = 6 };
  struct uvm_vmem_op ops[SLOTS + 1];
  struct uvm_vmem_stat first, last;
  uint32_t whole, page;
  struct cost c;
  int result;
  START();
  OK(object(SLOTS * SLOT_UNITS, UVM_VMEM_CREATE_CONTIGUOUS, &whole));
  OK(object(1, 0, &page));
  OK(vm_map(W.uvm, RES, RES, whole, 0, SLOTS * SLOT_UNITS, LARGE));
  OK(vm_map(W.uvm, RES, RES + 20 * SLOT + 9 * UNIT, page, 0, 1, 0)); /* so that this slot has a table */
  OK(gpu_fill(&W, 0, RES, SLOTS * SLOT, 5, 3));
  for (unsigned round = 0; round < 4; round++) {
    const uint64_t beside = RES + 20 * SLOT + round * UNIT;
    EQ(gpu_scan(&W, 0, RES, SLOTS * SLOT).out_2m, SLOTS);
    for (unsigned i = 0; i < SLOTS; i++) {
      ops[i] = op_unmap(RES + i * SLOT + (i + round) * UNIT, 1, UVM_VMEM_OP_CUT);
    }
    ops[SLOTS] = op_map(beside, page, 0, 1, 0);
    c = cost_of(ops, SLOTS + 1, &result);
    OK(result);
    EQ(gpu_scan(&W, 0, RES, SLOTS * SLOT).out_64k, SLOTS * (SLOT_UNITS - 1));
    /* For each slot a table, and the entry above it, first invalid and then pointing to the table; the other slot: one
     * PTE. */
    EQ(c.writes, SLOTS * (SLOT_UNITS + 2) + 1);
    EQ(c.invalidates, 2);
    EQ(c.pushes, 1);
    for (unsigned i = 0; i < SLOTS; i++) {
      const unsigned gone = i + round;
      const uint64_t at = RES + i * SLOT, word = 5 + 3 * i * SLOT / 8;
      OK(gpu_check(&W, 0, at, gone * UNIT, word, 3));
      EQ(gpu_check(&W, 0, at + gone * UNIT, 8, 0, 0), -EFAULT);
      OK(gpu_check(&W, 0, at + (gone + 1) * UNIT, SLOT - (gone + 1) * UNIT, word + 3 * (gone + 1) * UNIT / 8, 3));
    }
    OK(vm_stat(W.uvm, NULL, round ? &last : &first));
    if (round) EQ(last.out_kernel_bytes, first.out_kernel_bytes);
    ops[0] = op_map(RES, whole, 0, SLOTS * SLOT_UNITS, LARGE | REPLACE);
    c = cost_of(ops, 1, &result);
    OK(result);
    EQ(c.writes, SLOTS * 2); /* invalid, then the entry of 2 MB */
    EQ(c.invalidates, 2);
    EQ(c.pushes, 1);
    OK(gpu_check(&W, 0, RES, SLOTS * SLOT, 5, 3));
    c = cost_of(ops, 1, &result); /* again: nothing to do */
    OK(result);
    EQ(c.pushes + c.writes + c.invalidates, 0);
  }
  /* Replace mapped pages by themselves, with and without CUT. */
  OK(vm_map(W.uvm, RES, RES + 3 * UNIT, whole, 3, 2, REPLACE));
  EQ(entry(RES), SLOT);
  OK(vm_map(W.uvm, RES, RES + 3 * UNIT, whole, 3, 2, REPLACE | UVM_VMEM_OP_CUT));
  EQ(entry(RES), UNIT);
  EQ(gpu_scan(&W, 0, RES, SLOTS * SLOT).out_2m, SLOTS - 1);
  /* Join pages that are all mapped already; and one operation with CUT is enough even if another lacks it. */
  OK(vm_map(W.uvm, RES, RES, whole, 0, SLOT_UNITS, LARGE | REPLACE));
  EQ(entry(RES), SLOT);
  ops[0] = op_map(RES + UNIT, whole, 1, 1, REPLACE | UVM_VMEM_OP_CUT);
  ops[1] = op_map(RES + 8 * UNIT, whole, 8, 1, REPLACE);
  OK(vm_bind(W.uvm, RES, ops, 2, NULL, NULL));
  EQ(entry(RES), UNIT);
  OK(gpu_check(&W, 0, RES, SLOTS * SLOT, 5, 3));
  world_close(&W);
}

/* A batch that cuts, joins and maps, and whose nth operation is wrong, changes no entry. */
static void nth_operation_wrong(void) {
  enum { OPS = 8 };
  uint32_t whole, failed;
  START();
  OK(object(4 * SLOT_UNITS, UVM_VMEM_CREATE_CONTIGUOUS, &whole));
  OK(vm_map(W.uvm, RES, RES, whole, 0, 2 * SLOT_UNITS, LARGE));
  OK(vm_map(W.uvm, RES, RES + 2 * SLOT, whole, 2 * SLOT_UNITS, 20, 0));
  OK(vm_map(W.uvm, RES, RES + 2 * SLOT + 20 * UNIT, whole, 2 * SLOT_UNITS + 20, 12, 0));
  OK(gpu_fill(&W, 0, RES, 3 * SLOT, 9, 1));
  const struct uvm_vmem_op good[OPS] = {
      op_unmap(RES + 3 * UNIT, 1, UVM_VMEM_OP_CUT),
      op_unmap(RES + 9 * UNIT, 2, UVM_VMEM_OP_CUT),
      op_map(RES + SLOT + 4 * UNIT, whole, 7, 3, REPLACE | UVM_VMEM_OP_CUT),
      op_unmap(RES + SLOT + 30 * UNIT, 2, UVM_VMEM_OP_CUT),
      op_map(RES + 2 * SLOT, whole, 2 * SLOT_UNITS, SLOT_UNITS, REPLACE | LARGE),
      op_map(RES + 3 * SLOT, whole, 3 * SLOT_UNITS, SLOT_UNITS, LARGE),
      op_map(RES + 5 * SLOT, whole, 0, 9, 0),
      op_unmap(RES + 50 * SLOT, 1, UVM_VMEM_OP_SPARSE),
  };
  for (unsigned bad = 0; bad < OPS; bad++) {
    struct uvm_vmem_op ops[OPS];
    memcpy(ops, good, sizeof(ops));
    if (ops[bad].op == UVM_VMEM_OP_MAP)
      ops[bad].handle ^= 1u << 19; /* no such object */
    else
      ops[bad].addr = RES + MIB(256);
    refuse("an operation", ops, OPS, ops[bad].op == UVM_VMEM_OP_MAP ? -ENOENT : -ERANGE, bad);
    EQ(gpu_scan(&W, 0, RES, MIB(256)).out_2m, 2);
    EQ(gpu_scan(&W, 0, RES, MIB(256)).out_64k, SLOT_UNITS);
    OK(gpu_check(&W, 0, RES, 3 * SLOT, 9, 1));
  }
  OK(vm_bind(W.uvm, RES, good, OPS, &failed, NULL));
  EQ(gpu_scan(&W, 0, RES, MIB(256)).out_2m, 2);
  EQ(gpu_scan(&W, 0, RES, MIB(256)).out_64k, 2 * SLOT_UNITS - 5 + 9);
  OK(gpu_check(&W, 0, RES + 2 * SLOT, SLOT, 9 + 2 * SLOT / 8, 1));
  world_close(&W);
}

MAIN(TEST(contiguous_objects), TEST(by_any_operations), TEST(refused), TEST(split_and_joined), TEST(nth_operation_wrong))
