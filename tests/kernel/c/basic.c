/* SPDX-License-Identifier: MIT */
/*
 * Each command used correctly; the results are checked from the GPU's side, through its page tables and its TLB.
 */
#include "abi.h"
#include "kcheck.h"
#include "world.h"

#define RES 0x7c0000000000ull
#define PATTERN 0x1111000000000000ull

static const unsigned shifts[] = {16, 17, 18, 21};

static bool has(struct world *w, uint64_t capability) {
  struct uvm_vmem_query q;
  return vm_query(w->uvm, w->uuid[0], &q) == 0 && (q.out_capabilities & capability) == capability;
}

/* All capabilities of the header: the other tests skip what is not supported. */
#define CAPABILITIES                                                                                             \
  (UVM_VMEM_CAP_HOST | UVM_VMEM_CAP_PEER | UVM_VMEM_CAP_MULTI_GPU | UVM_VMEM_CAP_READ_ONLY | UVM_VMEM_CAP_SPARSE | \
   UVM_VMEM_CAP_REPLACE | UVM_VMEM_CAP_BIG | UVM_VMEM_CAP_ASYNC | UVM_VMEM_CAP_LARGE)

static void query(void) {
  struct world w;
  struct uvm_vmem_query q;
  world_open(&w, 1);
  OK(vm_query(w.uvm, NULL, &q));
  EQ(q.out_abi_version, UVM_VMEM_ABI_VERSION);
  EQ(q.out_capabilities, CAPABILITIES);
  CHECK(q.out_page_sizes & UNIT);
  CHECK((q.out_page_sizes & ~UVM_VMEM_PAGE_SIZES) == 0);
  CHECK(q.out_max_bind_ops >= 64 && q.out_max_bind_units >= SLOT_UNITS && q.out_max_create_pages >= 1);
  CHECK(q.out_max_gpus >= 1 && q.out_max_reserve_bytes >= GIB(1) && q.out_max_tickets >= 1);
  CHECK(memchr(q.out_driver_version, 0, sizeof(q.out_driver_version)) && q.out_driver_version[0]);
  printf("driver %s, capabilities 0x%llx, %u operations, %u units, %u pages\n", q.out_driver_version,
         (unsigned long long)q.out_capabilities, q.out_max_bind_ops, q.out_max_bind_units, q.out_max_create_pages);
  OK(vm_query(w.uvm, w.uuid[0], &q));
  EQ(q.out_gpu_refusal, UVM_VMEM_GPU_OK);
  CHECK(strncmp((char *)q.out_driver_version, w.driver_version, strlen(w.driver_version)) == 0);
  world_close(&w);
}

static void map_move_unmap(void) {
  struct world w;
  uint32_t object;
  world_open(&w, 1);
  OK(vm_reserve(w.uvm, w.uuid[0], RES, MIB(64), 16, 0));
  EQ(gpu_check(&w, 0, RES, 8, 0, 0), -EFAULT); /* nothing there */
  OK(vm_create(w.uvm, w.uuid[0], 16, 4, 0, &object));
  OK(vm_map(w.uvm, RES, RES, object, 0, 4, 0));
  OK(gpu_check(&w, 0, RES, 4 * UNIT, 0, 0)); /* zero */
  struct softgpu_xlate x = gpu_xlate(&w, 0, RES + UNIT + 0x123);
  CHECK(x.out_valid && !x.out_read_only && !x.out_sparse);
  EQ(x.out_page_size, UNIT);
  EQ(x.out_aperture, SOFTGPU_APERTURE_VID);
  EQ(gpu_check(&w, 0, RES + 4 * UNIT, 8, 0, 0), -EFAULT); /* the next page is not mapped */
  OK(gpu_fill(&w, 0, RES, 4 * UNIT, PATTERN, 1));
  OK(gpu_check(&w, 0, RES, 4 * UNIT, PATTERN, 1));

  /* Map page 1 at a second address: both show the same memory. */
  OK(vm_map(w.uvm, RES, RES + MIB(10), object, 1, 1, 0));
  OK(gpu_check(&w, 0, RES + MIB(10), UNIT, PATTERN + UNIT / 8, 1));
  OK(gpu_fill(&w, 0, RES + MIB(10), UNIT, 7, 0));
  OK(gpu_check(&w, 0, RES + UNIT, UNIT, 7, 0));

  OK(vm_unmap(w.uvm, RES, RES, 4, 0));
  EQ(gpu_check(&w, 0, RES, 8, 0, 0), -EFAULT);
  EQ(gpu_check(&w, 0, RES + UNIT, 8, 0, 0), -EFAULT);
  OK(gpu_check(&w, 0, RES + MIB(10), UNIT, 7, 0));

  /* In reverse order, in one call with an unmap. */
  struct uvm_vmem_op ops[4] = {op_map(RES + 2 * UNIT, object, 0, 1, 0), op_map(RES + UNIT, object, 2, 1, 0),
                               op_map(RES, object, 3, 1, 0), op_unmap(RES + MIB(10), 1, 0)};
  uint32_t failed = 1;
  OK(vm_bind(w.uvm, RES, ops, 4, &failed, NULL));
  EQ(failed, ~0u);
  OK(gpu_check(&w, 0, RES + 2 * UNIT, UNIT, PATTERN, 1));
  OK(gpu_check(&w, 0, RES + UNIT, UNIT, PATTERN + 2 * UNIT / 8, 1));
  OK(gpu_check(&w, 0, RES, UNIT, PATTERN + 3 * UNIT / 8, 1));
  EQ(gpu_check(&w, 0, RES + MIB(10), 8, 0, 0), -EFAULT);
  OK(vm_release(w.uvm, object));
  EQ(vm_free(w.uvm, RES, 0), -EBUSY);
  OK(gpu_check(&w, 0, RES + 2 * UNIT, UNIT, PATTERN, 1));
  OK(vm_free(w.uvm, RES, UVM_VMEM_FREE_UNMAP));
  EQ(gpu_check(&w, 0, RES, 8, 0, 0), -EFAULT);
  world_close(&w);
}

static void page_sizes(void) {
  struct world w;
  world_open(&w, 1);
  for (size_t s = 0; s < ARRAY_SIZE(shifts); s++) {
    const uint64_t bytes = 1ull << shifts[s], start = RES + s * GIB(1);
    struct uvm_vmem_stat stat;
    uint32_t object;
    OK(vm_reserve(w.uvm, w.uuid[0], start, MIB(16), shifts[s], 0));
    OK(vm_create(w.uvm, w.uuid[0], shifts[s], 3, 0, &object));
    OK(vm_stat(w.uvm, w.uuid[0], &stat));
    EQ(stat.out_created_bytes, 3 * bytes);
    OK(vm_map(w.uvm, start, start + 2 * bytes, object, 0, 3, 0));
    OK(gpu_check(&w, 0, start + 2 * bytes, 3 * bytes, 0, 0));
    for (unsigned page = 0; page < 3; page++) {
      const uint64_t at = start + (2 + page) * bytes;
      const uint64_t pa = gpu_xlate(&w, 0, at).out_pa;
      EQ(pa % bytes, 0);
      for (uint64_t unit = 0; unit < bytes; unit += UNIT) {
        struct softgpu_xlate x = gpu_xlate(&w, 0, at + unit);
        CHECK(x.out_valid);
        EQ(x.out_pa, pa + unit);
        EQ(x.out_page_size, UNIT); /* without BIG */
      }
      OK(gpu_fill(&w, 0, at, bytes, PATTERN * (page + 1), 1));
    }
    for (unsigned page = 0; page < 3; page++) {
      OK(gpu_check(&w, 0, start + (2 + page) * bytes, bytes, PATTERN * (page + 1), 1));
    }
    /* The last two pages swap places. */
    struct uvm_vmem_op ops[2] = {op_map(start + 4 * bytes, object, 1, 1, UVM_VMEM_OP_REPLACE),
                                 op_map(start + 3 * bytes, object, 2, 1, UVM_VMEM_OP_REPLACE)};
    OK(vm_bind(w.uvm, start, ops, 2, NULL, NULL));
    OK(gpu_check(&w, 0, start + 3 * bytes, bytes, PATTERN * 3, 1));
    OK(gpu_check(&w, 0, start + 4 * bytes, bytes, PATTERN * 2, 1));
    OK(vm_unmap(w.uvm, start, start, MIB(16) / bytes, 0));
    OK(vm_release(w.uvm, object));
    OK(vm_free(w.uvm, start, 0));
  }
  world_close(&w);
}

/* A page is aligned to its size in physical memory too, whatever smaller pages were allocated before it. */
static void alignment(void) {
  enum { EACH = 3 };
  struct world w;
  unsigned mapped = 0;
  world_open(&w, 1);
  OK(vm_reserve(w.uvm, w.uuid[0], RES, MIB(64), 16, 0));
  for (unsigned before = 1; before < 8; before++) {
    uint32_t small, object;
    OK(vm_create(w.uvm, w.uuid[0], 16, before, 0, &small));
    for (unsigned i = 0; i < 2 * EACH; i++, mapped++) {
      const unsigned shift = 17 + i % 2;
      const uint64_t at = RES + mapped * MIB(1);
      OK(vm_create(w.uvm, w.uuid[0], shift, 1, 0, &object));
      OK(vm_map(w.uvm, RES, at, object, 0, 1, 0));
      EQ(gpu_xlate(&w, 0, at).out_pa % (1ull << shift), 0);
      OK(gpu_fill(&w, 0, at, 1ull << shift, mapped, 0));
    }
  }
  for (unsigned i = 0; i < mapped; i++) OK(gpu_check(&w, 0, RES + i * MIB(1), 1ull << (17 + i % 2), i, 0));
  world_close(&w);
}

/* Larger pages use only aligned holes that are entirely free between live smaller pages. */
static void holes(void) {
  static const unsigned given_back[] = {0, 1, 3, 6, 7, 9, 12, 13, 14, 15, 20, 21, 22};
  uint32_t small[SLOT_UNITS], at_unit[SLOT_UNITS] = {0}, large[2];
  struct world w;
  world_open(&w, 1);
  OK(vm_reserve(w.uvm, w.uuid[0], RES, MIB(16), 16, 0));
  for (unsigned i = 0; i < SLOT_UNITS; i++) {
    OK(vm_create(w.uvm, w.uuid[0], 16, 1, 0, &small[i]));
    OK(vm_map(w.uvm, RES, RES + i * UNIT, small[i], 0, 1, 0));
    at_unit[gpu_xlate(&w, 0, RES + i * UNIT).out_pa % SLOT / UNIT] = i;
    OK(gpu_fill(&w, 0, RES + i * UNIT, UNIT, PATTERN + i, 0));
  }
  bool gone[SLOT_UNITS] = {false};
  for (size_t i = 0; i < ARRAY_SIZE(given_back); i++) {
    const unsigned page = at_unit[given_back[i]];
    CHECK(!gone[page]); /* the 32 pages are in one chunk */
    gone[page] = true;
    OK(vm_unmap(w.uvm, RES, RES + page * UNIT, 1, 0));
    OK(vm_release(w.uvm, small[page]));
  }
  OK(vm_create(w.uvm, w.uuid[0], 17, 5, 0, &large[0])); /* at 0, 6, 12, 14, 20: then no other fits */
  OK(vm_create(w.uvm, w.uuid[0], 18, 2, 0, &large[1]));
  OK(vm_map(w.uvm, RES, RES + MIB(4), large[0], 0, 5, 0));
  OK(vm_map(w.uvm, RES, RES + MIB(8), large[1], 0, 2, 0));
  OK(gpu_fill(&w, 0, RES + MIB(4), 10 * UNIT, 1, 0));
  OK(gpu_fill(&w, 0, RES + MIB(8), 8 * UNIT, 2, 0));
  for (unsigned i = 0; i < SLOT_UNITS; i++) {
    if (!gone[i]) OK(gpu_check(&w, 0, RES + i * UNIT, UNIT, PATTERN + i, 0));
  }
  OK(gpu_check(&w, 0, RES + MIB(4), 10 * UNIT, 1, 0));
  world_close(&w);
}

/* One reservation holds small and large pages, each at any multiple of its size. */
static void mixed_sizes(void) {
  struct world w;
  uint32_t object[4];
  world_open(&w, 1);
  OK(vm_reserve(w.uvm, w.uuid[0], RES, MIB(16), 16, 0));
  uint64_t at[4] = {RES + MIB(2) - UNIT, RES + MIB(2) + 2 * UNIT, RES + MIB(4) - 4 * UNIT, RES + MIB(4)};
  struct uvm_vmem_op ops[4];
  for (int i = 0; i < 4; i++) {
    OK(vm_create(w.uvm, w.uuid[0], shifts[i], 1, 0, &object[i]));
    ops[i] = op_map(at[i], object[i], 0, 1, 0);
  }
  OK(vm_bind(w.uvm, RES, ops, 4, NULL, NULL));
  for (int i = 0; i < 4; i++) OK(gpu_fill(&w, 0, at[i], 1ull << shifts[i], i + 1, 0));
  for (int i = 0; i < 4; i++) OK(gpu_check(&w, 0, at[i], 1ull << shifts[i], i + 1, 0));
  /* Unmapping part of a large page leaves the rest mapped. */
  OK(vm_unmap(w.uvm, RES, RES + MIB(4) + UNIT, 1, 0));
  OK(gpu_check(&w, 0, RES + MIB(4), UNIT, 4, 0));
  EQ(gpu_check(&w, 0, RES + MIB(4) + UNIT, 8, 0, 0), -EFAULT);
  OK(gpu_check(&w, 0, RES + MIB(4) + 2 * UNIT, MIB(2) - 2 * UNIT, 4, 0));
  world_close(&w);
}

static void memory_is_zero_again(void) {
  struct world w;
  uint32_t object, stays;
  world_open(&w, 1);
  OK(vm_reserve(w.uvm, w.uuid[0], RES, MIB(64), 16, 0));
  /* Keeps the chunk allocated, so that its units are reused without UVM. */
  OK(vm_create(w.uvm, w.uuid[0], 16, 1, 0, &stays));
  for (unsigned round = 0; round < 6; round++) {
    unsigned shift = shifts[round % 4], pages = MIB(6) >> shift;
    OK(vm_create(w.uvm, w.uuid[0], shift, pages, 0, &object));
    OK(vm_map(w.uvm, RES, RES + MIB(8), object, 0, pages, 0));
    OK(gpu_check(&w, 0, RES + MIB(8), MIB(6), 0, 0));
    OK(gpu_fill(&w, 0, RES + MIB(8), MIB(6), ~0ull, 0));
    OK(vm_release(w.uvm, object));
    OK(vm_unmap(w.uvm, RES, RES, MIB(64) / UNIT, 0));
  }
  world_close(&w);
}

static void read_only(void) {
  struct world w;
  uint32_t object;
  world_open(&w, 1);
  if (!has(&w, UVM_VMEM_CAP_READ_ONLY)) SKIP("no read-only mappings");
  OK(vm_reserve(w.uvm, w.uuid[0], RES, MIB(16), 16, 0));
  OK(vm_create(w.uvm, w.uuid[0], 16, 2, 0, &object));
  OK(vm_map(w.uvm, RES, RES, object, 0, 2, 0));
  OK(gpu_fill(&w, 0, RES, 2 * UNIT, PATTERN, 1));
  OK(vm_map(w.uvm, RES, RES + MIB(4), object, 0, 2, UVM_VMEM_OP_READ_ONLY));
  OK(gpu_check(&w, 0, RES + MIB(4), 2 * UNIT, PATTERN, 1));
  CHECK(gpu_xlate(&w, 0, RES + MIB(4)).out_read_only);
  EQ(gpu_fill(&w, 0, RES + MIB(4), 8, 0, 0), -EROFS);
  OK(gpu_check(&w, 0, RES, 2 * UNIT, PATTERN, 1));
  /* Change the access right of the same page in place. */
  struct uvm_vmem_op ops[2] = {op_map(RES + MIB(4), object, 0, 1, UVM_VMEM_OP_REPLACE),
                               op_map(RES, object, 0, 1, UVM_VMEM_OP_REPLACE | UVM_VMEM_OP_READ_ONLY)};
  OK(vm_bind(w.uvm, RES, ops, 2, NULL, NULL));
  OK(gpu_fill(&w, 0, RES + MIB(4), UNIT, 5, 0));
  EQ(gpu_fill(&w, 0, RES, 8, 6, 0), -EROFS);
  OK(gpu_check(&w, 0, RES, UNIT, 5, 0));
  world_close(&w);
}

static void sparse(void) {
  struct world w;
  uint32_t object;
  world_open(&w, 1);
  if (!has(&w, UVM_VMEM_CAP_SPARSE)) SKIP("no sparse ranges");
  OK(vm_reserve(w.uvm, w.uuid[0], RES, MIB(16), 16, 0));
  OK(vm_create(w.uvm, w.uuid[0], 16, 2, 0, &object));
  OK(vm_map(w.uvm, RES, RES, object, 0, 2, 0));
  OK(gpu_fill(&w, 0, RES, 2 * UNIT, PATTERN, 1));
  OK(vm_unmap(w.uvm, RES, RES + UNIT, 40, UVM_VMEM_OP_SPARSE));
  OK(gpu_check(&w, 0, RES, UNIT, PATTERN, 1));
  OK(gpu_check(&w, 0, RES + UNIT, 40 * UNIT, 0, 0));
  OK(gpu_fill(&w, 0, RES + UNIT, 40 * UNIT, 9, 0)); /* dropped */
  OK(gpu_check(&w, 0, RES + UNIT, 40 * UNIT, 0, 0));
  CHECK(gpu_xlate(&w, 0, RES + 30 * UNIT).out_sparse);
  EQ(gpu_check(&w, 0, RES + 41 * UNIT, 8, 0, 0), -EFAULT);
  OK(vm_map(w.uvm, RES, RES + 35 * UNIT, object, 1, 1, 0)); /* nothing is mapped there */
  OK(gpu_check(&w, 0, RES + 35 * UNIT, UNIT, PATTERN + UNIT / 8, 1));
  OK(gpu_check(&w, 0, RES + 34 * UNIT, UNIT, 0, 0));
  OK(vm_unmap(w.uvm, RES, RES, 256, 0));
  for (unsigned i = 0; i < 41; i++) EQ(gpu_check(&w, 0, RES + i * UNIT, 8, 0, 0), -EFAULT);
  world_close(&w);
}

static void replace(void) {
  struct world w;
  struct uvm_vmem_stat before, after;
  uint32_t a, b;
  world_open(&w, 1);
  if (!has(&w, UVM_VMEM_CAP_REPLACE)) SKIP("no replacing");
  OK(vm_reserve(w.uvm, w.uuid[0], RES, MIB(16), 16, 0));
  OK(vm_create(w.uvm, w.uuid[0], 16, 4, 0, &a));
  OK(vm_create(w.uvm, w.uuid[0], 16, 4, 0, &b));
  OK(vm_map(w.uvm, RES, RES, a, 0, 4, 0));
  OK(vm_map(w.uvm, RES, RES + MIB(4), b, 0, 4, 0));
  OK(gpu_fill(&w, 0, RES, 4 * UNIT, 0xa, 0));
  OK(gpu_fill(&w, 0, RES + MIB(4), 4 * UNIT, 0xb, 0));
  OK(vm_stat(w.uvm, NULL, &before));
  EQ(vm_map(w.uvm, RES, RES + UNIT, b, 0, 2, 0), -EEXIST);
  OK(vm_map(w.uvm, RES, RES + UNIT, b, 0, 2, UVM_VMEM_OP_REPLACE));
  OK(vm_stat(w.uvm, NULL, &after));
  EQ(after.out_mapped_bytes, before.out_mapped_bytes);
  EQ(after.out_pushes - before.out_pushes, 1);
  OK(gpu_check(&w, 0, RES, UNIT, 0xa, 0));
  OK(gpu_check(&w, 0, RES + UNIT, 2 * UNIT, 0xb, 0));
  OK(gpu_check(&w, 0, RES + 3 * UNIT, UNIT, 0xa, 0));
  OK(vm_map(w.uvm, RES, RES + 3 * UNIT, b, 2, 2, UVM_VMEM_OP_REPLACE)); /* half of it was not mapped */
  OK(gpu_check(&w, 0, RES + 3 * UNIT, 2 * UNIT, 0xb, 0));
  world_close(&w);
}

/* A slot in a BIG reservation changes to a 2 MB entry, to small entries, and back; the contents are kept. */
static void big_pages(void) {
  struct world w;
  uint32_t object, other;
  world_open(&w, 1);
  if (!has(&w, UVM_VMEM_CAP_BIG)) SKIP("no 2 MB entries");
  OK(vm_reserve(w.uvm, w.uuid[0], RES, MIB(16), 16, UVM_VMEM_RESERVE_BIG));
  OK(vm_create(w.uvm, w.uuid[0], 21, 2, 0, &object));
  OK(vm_create(w.uvm, w.uuid[0], 16, 4, 0, &other));
  OK(vm_map(w.uvm, RES, RES + MIB(2), object, 0, 2, 0));
  EQ(gpu_xlate(&w, 0, RES + MIB(2) + 5 * UNIT).out_page_size, MIB(2));
  EQ(gpu_xlate(&w, 0, RES + MIB(4)).out_page_size, MIB(2));
  OK(gpu_check(&w, 0, RES + MIB(2), MIB(4), 0, 0));
  OK(gpu_fill(&w, 0, RES + MIB(2), MIB(4), PATTERN, 1));
  for (unsigned round = 0; round < 3; round++) {
    OK(vm_unmap(w.uvm, RES, RES + MIB(2) + 7 * UNIT, 1, UVM_VMEM_OP_CUT));
    EQ(gpu_check(&w, 0, RES + MIB(2) + 7 * UNIT, 8, 0, 0), -EFAULT);
    EQ(gpu_xlate(&w, 0, RES + MIB(2)).out_page_size, UNIT);
    OK(gpu_check(&w, 0, RES + MIB(2), 7 * UNIT, PATTERN, 1));
    OK(gpu_check(&w, 0, RES + MIB(2) + 8 * UNIT, 24 * UNIT, PATTERN + 8 * UNIT / 8, 1));
    EQ(gpu_xlate(&w, 0, RES + MIB(4)).out_page_size, MIB(2));
    OK(vm_map(w.uvm, RES, RES + MIB(2) + 7 * UNIT, other, round, 1, 0));
    OK(gpu_check(&w, 0, RES + MIB(2) + 7 * UNIT, UNIT, 0, 0));
    OK(gpu_fill(&w, 0, RES + MIB(2) + 7 * UNIT, UNIT, round + 1, 0));
    OK(gpu_check(&w, 0, RES + MIB(2) + 8 * UNIT, 24 * UNIT, PATTERN + 8 * UNIT / 8, 1));
    /* Mapping the whole page over it gives one entry again. */
    OK(vm_map(w.uvm, RES, RES + MIB(2), object, 0, 1, UVM_VMEM_OP_REPLACE));
    EQ(gpu_xlate(&w, 0, RES + MIB(2) + 7 * UNIT).out_page_size, MIB(2));
    OK(gpu_check(&w, 0, RES + MIB(2), MIB(4), PATTERN, 1));
  }
  /* The whole page read-only is still one entry. */
  OK(vm_map(w.uvm, RES, RES + MIB(4), object, 1, 1, UVM_VMEM_OP_REPLACE | UVM_VMEM_OP_READ_ONLY));
  EQ(gpu_xlate(&w, 0, RES + MIB(4)).out_page_size, MIB(2));
  EQ(gpu_fill(&w, 0, RES + MIB(4), 8, 0, 0), -EROFS);
  if (has(&w, UVM_VMEM_CAP_SPARSE)) {
    OK(vm_unmap(w.uvm, RES, RES + MIB(4), 32, UVM_VMEM_OP_SPARSE));
    OK(gpu_check(&w, 0, RES + MIB(4), MIB(2), 0, 0));
    OK(vm_map(w.uvm, RES, RES + MIB(4), object, 1, 1, 0));
    EQ(gpu_xlate(&w, 0, RES + MIB(4)).out_page_size, UNIT);
    OK(gpu_check(&w, 0, RES + MIB(4), MIB(2), PATTERN + MIB(2) / 8, 1));
  }
  OK(vm_unmap(w.uvm, RES, RES, MIB(16) / UNIT, 0));
  EQ(gpu_check(&w, 0, RES + MIB(2), 8, 0, 0), -EFAULT);
  EQ(gpu_check(&w, 0, RES + MIB(4), 8, 0, 0), -EFAULT);
  /* Map small pages where a 2 MB entry was. */
  OK(vm_map(w.uvm, RES, RES + MIB(4), other, 0, 4, 0));
  OK(gpu_check(&w, 0, RES + MIB(4), UNIT, 1, 0));
  EQ(gpu_check(&w, 0, RES + MIB(4) + 4 * UNIT, 8, 0, 0), -EFAULT);
  world_close(&w);
}

static void host_memory(void) {
  struct world w;
  struct uvm_vmem_stat stat;
  uint32_t object;
  world_open(&w, 1);
  if (!has(&w, UVM_VMEM_CAP_HOST)) SKIP("no host memory");
  OK(vm_reserve(w.uvm, w.uuid[0], RES, MIB(16), 16, 0));
  for (size_t s = 0; s < ARRAY_SIZE(shifts); s++) {
    const uint64_t bytes = 1ull << shifts[s];
    OK(vm_create(w.uvm, w.uuid[0], shifts[s], 2, UVM_VMEM_CREATE_HOST, &object));
    OK(vm_stat(w.uvm, NULL, &stat));
    EQ(stat.out_host_bytes, 2 * bytes);
    EQ(stat.out_chunk_bytes, 0); /* counts GPU memory only */
    OK(vm_map(w.uvm, RES, RES + MIB(2), object, 0, 2, 0));
    EQ(gpu_xlate(&w, 0, RES + MIB(2)).out_aperture, SOFTGPU_APERTURE_SYS);
    OK(gpu_check(&w, 0, RES + MIB(2), 2 * bytes, 0, 0));
    OK(gpu_fill(&w, 0, RES + MIB(2), 2 * bytes, PATTERN, 1));
    OK(gpu_check(&w, 0, RES + MIB(2), 2 * bytes, PATTERN, 1));
    OK(vm_release(w.uvm, object));
    OK(vm_unmap(w.uvm, RES, RES + MIB(2), 2 * bytes / UNIT, 0));
    OK(vm_stat(w.uvm, NULL, &stat));
    EQ(stat.out_host_bytes, 0);
  }
  world_close(&w);
}

/* A 2 MB entry needs contiguous memory; host memory is contiguous only within 64 KB. */
static void host_memory_in_big(void) {
  struct world w;
  uint32_t object[2];
  world_open(&w, 1);
  if (!has(&w, UVM_VMEM_CAP_HOST | UVM_VMEM_CAP_BIG)) SKIP("no host memory, or no 2 MB entries");
  OK(vm_reserve(w.uvm, w.uuid[0], RES, MIB(16), 16, UVM_VMEM_RESERVE_BIG));
  OK(vm_create(w.uvm, w.uuid[0], 21, 1, UVM_VMEM_CREATE_HOST, &object[0]));
  OK(vm_create(w.uvm, w.uuid[0], 16, SLOT_UNITS, UVM_VMEM_CREATE_HOST | UVM_VMEM_CREATE_CONTIGUOUS, &object[1]));
  for (unsigned i = 0; i < 2; i++) {
    const uint64_t at = RES + MIB(2) + i * SLOT;
    OK(vm_map(w.uvm, RES, at, object[i], 0, i ? SLOT_UNITS : 1, 0));
    EQ(gpu_xlate(&w, 0, at).out_page_size, UNIT);
    EQ(gpu_xlate(&w, 0, at).out_aperture, SOFTGPU_APERTURE_SYS);
    OK(gpu_check(&w, 0, at, SLOT, 0, 0));
    OK(gpu_fill(&w, 0, at, SLOT, PATTERN + i, 1));
  }
  for (unsigned i = 0; i < 2; i++) OK(gpu_check(&w, 0, RES + MIB(2) + i * SLOT, SLOT, PATTERN + i, 1));
  world_close(&w);
}

/* Page tables are allocated by a slot's first BIND, not earlier, and are kept; sparse ranges do not make FREE fail. */
static void tables_come_late(void) {
  const uint64_t zeros = RES + MIB(8);
  struct world w;
  uint32_t object;
  world_open(&w, 1);
  if (!has(&w, UVM_VMEM_CAP_SPARSE)) SKIP("no sparse ranges");
  OK(vm_reserve(w.uvm, w.uuid[0], RES, MIB(16), 16, 0));
  OK(vm_create(w.uvm, w.uuid[0], 16, 1, 0, &object));
  CHECK(!gpu_xlate(&w, 0, RES).out_has_table);
  OK(vm_unmap(w.uvm, RES, RES, SLOT_UNITS, 0)); /* changes nothing */
  CHECK(!gpu_xlate(&w, 0, RES).out_has_table);
  OK(vm_map(w.uvm, RES, RES, object, 0, 1, 0));
  OK(vm_unmap(w.uvm, RES, RES, 1, 0));
  CHECK(gpu_xlate(&w, 0, RES).out_has_table);
  CHECK(!gpu_xlate(&w, 0, RES + SLOT).out_has_table);
  OK(vm_unmap(w.uvm, RES, zeros, 2 * SLOT_UNITS, UVM_VMEM_OP_SPARSE));
  OK(gpu_check(&w, 0, zeros, 2 * SLOT, 0, 0));
  OK(vm_free(w.uvm, RES, 0));
  EQ(gpu_check(&w, 0, zeros, 8, 0, 0), -EFAULT);
  world_close(&w);
}

static void eager(void) {
  struct world w;
  struct uvm_vmem_stat before, after;
  uint32_t object;
  world_open(&w, 1);
  OK(vm_reserve(w.uvm, w.uuid[0], RES, MIB(64), 16, UVM_VMEM_RESERVE_EAGER));
  for (uint64_t at = 0; at < MIB(64); at += SLOT) CHECK(gpu_xlate(&w, 0, RES + at).out_has_table);
  OK(vm_stat(w.uvm, NULL, &before));
  EQ(before.out_slots, 32);
  OK(vm_create(w.uvm, w.uuid[0], 16, 32, 0, &object));
  struct uvm_vmem_op ops[32];
  for (unsigned i = 0; i < 32; i++) ops[i] = op_map(RES + i * SLOT, object, i, 1, 0);
  OK(vm_bind(w.uvm, RES, ops, 32, NULL, NULL));
  OK(vm_stat(w.uvm, NULL, &after));
  EQ(after.out_table_waits, before.out_table_waits);
  EQ(after.out_slots, 32);
  EQ(after.out_pushes - before.out_pushes, 1);
  OK(gpu_check(&w, 0, RES + 31 * SLOT, UNIT, 0, 0));
  world_close(&w);
}

static void contiguous(void) {
  struct world w;
  uint32_t a, b;
  world_open(&w, 1);
  OK(vm_reserve(w.uvm, w.uuid[0], RES, MIB(16), 16, 0));
  OK(vm_create(w.uvm, w.uuid[0], 16, 3, 0, &a)); /* makes the next object start inside a chunk */
  OK(vm_create(w.uvm, w.uuid[0], 16, 31, UVM_VMEM_CREATE_CONTIGUOUS, &b));
  OK(vm_map(w.uvm, RES, RES, b, 0, 31, 0));
  uint64_t pa = gpu_xlate(&w, 0, RES).out_pa;
  for (unsigned i = 0; i < 31; i++) EQ(gpu_xlate(&w, 0, RES + i * UNIT).out_pa, pa + i * UNIT);
  EQ((pa + 30 * UNIT) / SLOT, pa / SLOT);
  OK(gpu_check(&w, 0, RES, 31 * UNIT, 0, 0));
  world_close(&w);
}

static void statistics(void) {
  struct world w;
  struct uvm_vmem_stat s;
  uint32_t a, b;
  world_open(&w, 1);
  OK(vm_stat(w.uvm, NULL, &s));
  EQ(s.out_reserved_bytes + s.out_created_bytes + s.out_mapped_bytes + s.out_chunk_bytes + s.out_host_bytes, 0);
  EQ(s.out_reservations + s.out_objects + s.out_slots + s.out_tickets, 0);
  OK(vm_reserve(w.uvm, w.uuid[0], RES, MIB(64), 16, 0));
  OK(vm_reserve(w.uvm, w.uuid[0], RES + GIB(1), MIB(2), 21, 0));
  OK(vm_create(w.uvm, w.uuid[0], 16, 10, 0, &a));
  OK(vm_create(w.uvm, w.uuid[0], 21, 2, 0, &b));
  OK(vm_stat(w.uvm, NULL, &s));
  EQ(s.out_reserved_bytes, MIB(66));
  EQ(s.out_reservations, 2);
  EQ(s.out_objects, 2);
  EQ(s.out_created_bytes, 10 * UNIT + MIB(4));
  CHECK(s.out_chunk_bytes >= s.out_created_bytes && s.out_chunk_bytes <= MIB(6));
  EQ(s.out_mapped_bytes, 0);
  EQ(s.out_zeroed_bytes, 10 * UNIT + MIB(4));
  OK(vm_map(w.uvm, RES, RES, a, 0, 10, 0));
  OK(vm_map(w.uvm, RES, RES + MIB(4), a, 2, 5, 0));
  OK(vm_map(w.uvm, RES + GIB(1), RES + GIB(1), b, 1, 1, 0));
  OK(vm_stat(w.uvm, w.uuid[0], &s));
  EQ(s.out_mapped_bytes, 15 * UNIT + MIB(2));
  EQ(s.out_slots, 3);
  EQ(s.out_binds, 3);
  EQ(s.out_pte_writes, 10 + 5 + 32);
  OK(vm_release(w.uvm, a));
  OK(vm_release(w.uvm, b));
  OK(vm_stat(w.uvm, NULL, &s));
  EQ(s.out_created_bytes, 10 * UNIT + MIB(4)); /* both objects stay whole while any of their pages is mapped */
  OK(vm_unmap(w.uvm, RES, RES, 10, 0));
  OK(vm_stat(w.uvm, NULL, &s));
  EQ(s.out_mapped_bytes, 5 * UNIT + MIB(2));
  OK(vm_unmap(w.uvm, RES, RES + MIB(4), 5, 0));
  OK(vm_free(w.uvm, RES + GIB(1), UVM_VMEM_FREE_UNMAP));
  OK(vm_stat(w.uvm, NULL, &s));
  EQ(s.out_mapped_bytes, 0);
  EQ(s.out_created_bytes, 0);
  EQ(s.out_objects, 0);
  EQ(s.out_reservations, 1);
  EQ(s.out_slots, 2); /* tables stay until FREE */
  OK(vm_free(w.uvm, RES, 0));
  OK(vm_stat(w.uvm, NULL, &s));
  EQ(s.out_reserved_bytes, 0);
  EQ(s.out_slots, 0);
  world_close(&w);
}

static void released_while_mapped(void) {
  struct world w;
  struct uvm_vmem_stat s;
  uint32_t a, b;
  world_open(&w, 1);
  OK(vm_reserve(w.uvm, w.uuid[0], RES, MIB(16), 16, 0));
  OK(vm_create(w.uvm, w.uuid[0], 16, 4, 0, &a));
  OK(vm_map(w.uvm, RES, RES, a, 0, 4, 0));
  OK(gpu_fill(&w, 0, RES, 4 * UNIT, PATTERN, 1));
  uint64_t pa = gpu_xlate(&w, 0, RES).out_pa;
  OK(vm_release(w.uvm, a));
  EQ(vm_release(w.uvm, a), -ESTALE);
  EQ(vm_map(w.uvm, RES, RES + MIB(4), a, 0, 1, 0), -ESTALE);
  for (unsigned i = 0; i < 8; i++) { /* the new memory is at different addresses */
    OK(vm_create(w.uvm, w.uuid[0], 16, 32, 0, &b));
    OK(vm_map(w.uvm, RES, RES + MIB(8), b, 0, 32, 0));
    OK(gpu_fill(&w, 0, RES + MIB(8), 32 * UNIT, ~0ull, 0));
    OK(gpu_check(&w, 0, RES, 4 * UNIT, PATTERN, 1));
    OK(vm_unmap(w.uvm, RES, RES + MIB(8), 32, 0));
    if (i % 2) OK(vm_release(w.uvm, b));
  }
  EQ(gpu_xlate(&w, 0, RES).out_pa, pa);
  OK(vm_unmap(w.uvm, RES, RES, 3, 0));
  OK(gpu_check(&w, 0, RES + 3 * UNIT, UNIT, PATTERN + 3 * UNIT / 8, 1));
  OK(vm_unmap(w.uvm, RES, RES + 3 * UNIT, 1, 0));
  OK(vm_stat(w.uvm, NULL, &s));
  EQ(s.out_objects, 4);
  EQ(s.out_created_bytes, 4 * 32 * UNIT);
  world_close(&w);
}

/* A batch with one wrong operation changes nothing, not even page tables. */
static void all_or_nothing(void) {
  struct world w;
  struct softgpu_counters before, after;
  uint32_t a, failed;
  world_open(&w, 1);
  OK(vm_reserve(w.uvm, w.uuid[0], RES, MIB(64), 16, 0));
  OK(vm_create(w.uvm, w.uuid[0], 16, 32, 0, &a));
  OK(vm_map(w.uvm, RES, RES, a, 0, 8, 0));
  OK(gpu_fill(&w, 0, RES, 8 * UNIT, PATTERN, 1));
  before = gpu_counters(&w, 0);
  struct uvm_vmem_op ops[4] = {op_unmap(RES, 4, 0), op_map(RES + MIB(20), a, 8, 8, 0),
                               op_map(RES + 4 * UNIT, a, 20, 1, UVM_VMEM_OP_REPLACE),
                               op_map(RES + 5 * UNIT, a, 21, 1, 0)};
  EQ(vm_bind(w.uvm, RES, ops, 4, &failed, NULL), -EEXIST);
  EQ(failed, 3);
  OK(gpu_check(&w, 0, RES, 8 * UNIT, PATTERN, 1));
  EQ(gpu_check(&w, 0, RES + MIB(20), 8, 0, 0), -EFAULT);
  after = gpu_counters(&w, 0);
  EQ(after.pte_changes, before.pte_changes);
  OK(vm_bind(w.uvm, RES, ops, 3, &failed, NULL));
  EQ(gpu_check(&w, 0, RES, 8, 0, 0), -EFAULT);
  OK(gpu_check(&w, 0, RES + MIB(20), 8 * UNIT, 0, 0));
  OK(gpu_check(&w, 0, RES + 4 * UNIT, UNIT, 0, 0));
  world_close(&w);
}

/* FREE keeps the tables above a reservation, which its neighbour uses; the freed memory is still reused only after a
 * membar. */
static void reused_after_a_membar(void) {
  struct world w;
  uint32_t large[2];
  world_open(&w, 1);
  for (unsigned i = 0; i < 2; i++) {
    OK(vm_reserve(w.uvm, w.uuid[0], RES + i * MIB(16), MIB(8), 16, UVM_VMEM_RESERVE_BIG));
    OK(vm_create(w.uvm, w.uuid[0], 21, 1, 0, &large[i]));
    OK(vm_map(w.uvm, RES + i * MIB(16), RES + i * MIB(16), large[i], 0, 1, 0));
  }
  OK(vm_release(w.uvm, large[0]));
  OK(vm_free(w.uvm, RES, UVM_VMEM_FREE_UNMAP));
  OK(gpu_check(&w, 0, RES + MIB(16), MIB(2), 0, 0));
  world_close(&w);
}

MAIN(TEST(query), TEST(map_move_unmap), TEST(page_sizes), TEST(alignment), TEST(holes), TEST(mixed_sizes), TEST(memory_is_zero_again),
     TEST(read_only), TEST(sparse), TEST(replace), TEST(big_pages), TEST(host_memory),
     TEST(host_memory_in_big), TEST(tables_come_late), TEST(eager), TEST(contiguous),
     TEST(statistics), TEST(released_while_mapped), TEST(all_or_nothing), TEST(reused_after_a_membar))
