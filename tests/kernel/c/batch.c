/* SPDX-License-Identifier: MIT */
/*
 * Batches that do not fit into one push of 128 KB: many 2 MB pages, as tables of 64 KB PTEs and as 2 MB PTEs. The whole
 * batch is carried out, in several pushes, with one TLB invalidate at the end of the last.
 */
#include "abi.h"
#include "kcheck.h"
#include "world.h"

#define RES 0x7c0000000000ull
#define PATTERN 0x4444000000000000ull
#define PAGES 32
#define MOST_OPS 512

/* One object of PAGES pages of 2 MB, mapped again and again: page i % PAGES, or back to front, at slot i. */
struct large {
  struct world w;
  uint32_t object;
  unsigned ops; /* operations per batch, each on PAGES slots */
  unsigned shift;
};

static uint64_t word_of(unsigned page, unsigned unit) {
  return PATTERN + page * SLOT_UNITS + unit;
}

/* Fills every unit of the object with a different value, through a mapping at the reservation's end. */
static int furnish(struct large *l, unsigned ops, unsigned shift, unsigned flags) {
  const uint64_t aside = RES + ops * PAGES * SLOT;
  l->ops = ops;
  l->shift = shift;
  world_open(&l->w, 1);
  int result = vm_reserve(l->w.uvm, l->w.uuid[0], RES, (ops + 1) * PAGES * SLOT, shift, flags);
  if (!result) result = vm_create(l->w.uvm, l->w.uuid[0], 21, PAGES, 0, &l->object);
  if (!result) result = vm_map(l->w.uvm, RES, aside, l->object, 0, PAGES, 0);
  for (unsigned unit = 0; unit < PAGES * SLOT_UNITS && !result; unit++) {
    result = gpu_fill(&l->w, 0, aside + unit * UNIT, UNIT, word_of(0, unit), 0);
  }
  return result;
}

/* Binds, and checks the cost by the driver's counters and the GPU's, which agree if the batch allocates no tables. Two
 * invalidates are expected if 2 MB PTEs become tables or the reverse. */
static int bind(struct large *l, const struct uvm_vmem_op *ops, unsigned count, unsigned invalidates, bool makes_tables) {
  struct uvm_vmem_stat before, after;
  struct softgpu_counters base = gpu_counters(&l->w, 0);
  vm_stat(l->w.uvm, NULL, &before);
  int result = vm_bind(l->w.uvm, RES, ops, count, NULL, NULL);
  struct softgpu_counters gpu = gpu_counters_since(&l->w, 0, &base);
  vm_stat(l->w.uvm, NULL, &after);
  const uint64_t pushes = after.out_pushes - before.out_pushes, seen = after.out_invalidates - before.out_invalidates;
  printf("%u operations: %llu pushes, %llu invalidates, %llu PTEs\n", count, (unsigned long long)pushes,
         (unsigned long long)seen, (unsigned long long)(after.out_pte_writes - before.out_pte_writes));
  if (pushes < 2 && invalidates == 1) fail("%llu pushes: one does not hold this batch", (unsigned long long)pushes);
  if (seen != invalidates) fail("%llu invalidates, not %u", (unsigned long long)seen, invalidates);
  if (!makes_tables && (gpu.pushes != pushes || gpu.invalidates != invalidates)) {
    fail("the GPU saw %llu pushes and %llu invalidates", (unsigned long long)gpu.pushes,
         (unsigned long long)gpu.invalidates);
  }
  return result;
}

/* Maps all slots in one batch, PAGES per operation; backwards: one slot per operation, the pages in reverse. */
static int map_all(struct large *l, bool backwards, unsigned flags, unsigned invalidates, bool makes_tables) {
  static struct uvm_vmem_op ops[MOST_OPS * PAGES];
  unsigned count = 0;
  for (unsigned i = 0; i < l->ops * PAGES; i += backwards ? 1 : PAGES) {
    ops[count++] = backwards ? op_map(RES + i * SLOT, l->object, PAGES - 1 - i % PAGES, 1, flags)
                             : op_map(RES + i * SLOT, l->object, 0, PAGES, flags);
  }
  return bind(l, ops, count, invalidates, makes_tables);
}

/* Checks the contents of each stride-th slot, in units_checked of its units, and the page size of its PTEs. */
static void all_there(struct large *l, bool backwards, uint64_t page_size, unsigned stride, unsigned units_checked) {
  EQ(gpu_scan(&l->w, 0, RES, l->ops * PAGES * SLOT).out_bytes, l->ops * PAGES * SLOT);
  for (unsigned i = 0; i < l->ops * PAGES; i += stride) {
    const unsigned page = backwards ? PAGES - 1 - i % PAGES : i % PAGES;
    const uint64_t at = RES + i * SLOT;
    struct softgpu_xlate x = gpu_xlate(&l->w, 0, at);
    if (x.out_page_size != page_size || x.out_aperture != SOFTGPU_APERTURE_VID || x.out_read_only) {
      fail("slot %u: PTE 0x%llx of size 0x%llx", i, (unsigned long long)x.out_pte, (unsigned long long)x.out_page_size);
    }
    for (unsigned unit = i % 3; unit < SLOT_UNITS; unit += SLOT_UNITS / units_checked) {
      if (gpu_check(&l->w, 0, at + unit * UNIT, 64, word_of(page, unit), 0)) fail("slot %u unit %u differs", i, unit);
    }
    if (failures_here > 20) return;
  }
}

static void none_there(struct large *l) {
  struct softgpu_scan s = gpu_scan(&l->w, 0, RES, l->ops * PAGES * SLOT);
  EQ(s.out_bytes, 0);
  for (unsigned i = 0; i < l->ops * PAGES; i += 7) EQ(gpu_check(&l->w, 0, RES + i * SLOT, 8, 0, 0), -EFAULT);
}

/* Map, remap, unmap, map again: all but the first with existing tables. */
static void round_trip(struct large *l, uint64_t page_size, unsigned units_checked) {
  const uint64_t bytes = l->ops * PAGES * SLOT;
  struct uvm_vmem_op all = op_unmap(RES, bytes >> l->shift, 0);
  OK(map_all(l, false, 0, 1, true));
  all_there(l, false, page_size, 1, units_checked);
  OK(map_all(l, true, UVM_VMEM_OP_REPLACE, 1, false));
  all_there(l, true, page_size, 5, units_checked);
  OK(bind(l, &all, 1, 1, false));
  none_there(l);
  OK(map_all(l, true, 0, 1, false));
  all_there(l, true, page_size, 11, 1);
}

/* Each slot takes 32 PTEs: 260 bytes of a push, plus the methods that copy them. */
static void tables_of_small_ptes(void) {
  struct large l;
  OK(furnish(&l, 32, 21, 0));
  round_trip(&l, UNIT, 8);
  world_close(&l.w);
}

/* 16 bytes per slot; if tables are adjacent, one copy continues from one into the next. */
static void big_ptes(void) {
  struct large l;
  OK(furnish(&l, 384, 21, UVM_VMEM_RESERVE_BIG));
  round_trip(&l, MIB(2), 1);
  world_close(&l.w);
}

/* 2 MB PTEs are cut, each at a different unit, and joined again; the second invalidate is the one between the two
 * states. */
static void big_ptes_cut_and_made_whole(void) {
  enum { SLOTS = 16 * PAGES };
  static struct uvm_vmem_op ops[SLOTS];
  struct large l;
  OK(furnish(&l, SLOTS / PAGES, 16, UVM_VMEM_RESERVE_BIG));
  for (unsigned i = 0; i < SLOTS; i++) ops[i] = op_map(RES + i * SLOT, l.object, i % PAGES, 1, 0);
  OK(vm_bind(l.w.uvm, RES, ops, SLOTS, NULL, NULL));
  all_there(&l, false, MIB(2), 3, 1);
  for (unsigned round = 0; round < 2; round++) {
    for (unsigned i = 0; i < SLOTS; i++) ops[i] = op_unmap(RES + i * SLOT + (i + round) % SLOT_UNITS * UNIT, 1, UVM_VMEM_OP_CUT);
    OK(bind(&l, ops, SLOTS, 2, round == 0));
    EQ(gpu_scan(&l.w, 0, RES, SLOTS * SLOT).out_64k, SLOTS * (SLOT_UNITS - 1));
    for (unsigned i = 0; i < SLOTS; i++) {
      const unsigned hole = (i + round) % SLOT_UNITS;
      for (unsigned step = 0; step < SLOT_UNITS; step += 1 + step * 5) { /* the hole, the unit after it, and some more */
        const unsigned unit = (hole + step) % SLOT_UNITS;
        const uint64_t at = RES + i * SLOT + unit * UNIT;
        EQ(gpu_check(&l.w, 0, at, 64, word_of(i % PAGES, unit), 0), unit == hole ? -EFAULT : 0);
      }
    }
    OK(map_all(&l, false, UVM_VMEM_OP_REPLACE, 2, false));
    all_there(&l, false, MIB(2), 3, 1);
  }
  world_close(&l.w);
}

MAIN(TEST(tables_of_small_ptes), TEST(big_ptes), TEST(big_ptes_cut_and_made_whole))
