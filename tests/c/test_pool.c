/* SPDX-License-Identifier: MIT */
/* Description: runs, neighbour placement, watermarks, limits, trim, and a random walk with all checks on. */
#include "check.h"

static vmem_t open_with(uint64_t limit, uint64_t high, uint64_t slab) {
  struct vmem_open_opts o = {.size = sizeof(o), .mem_limit = limit, .pool_high = high, .slab_size = slab};
  vmem_t vm = 0;
  if (open_opts(&o, &vm)) printf("%s\n", vmem_last_error());
  return vm;
}

static uint64_t runs_of(vmem_t vm, vmem_handle h) {
  struct vmem_handle_info i = {.size = sizeof(i)};
  vmem_handle_query(vm, h, &i);
  return i.runs;
}

static void one_run_is_one_call(void) {
  vmem_t vm = open_with(0, 0, 0);
  uint64_t va;
  vmem_handle h;
  OK(vMemReserve(vm, GIB(1), NULL, &va));
  OK(vMemCreate(vm, MIB(64), NULL, &h)); /* 1,024 pages of 64 KiB */
  EQ(runs_of(vm, h), 1);
  OK(vMemMap(vm, va, MIB(64), h, 0, 0));
  EQ(stats_of(vm).map_calls, 1);
  OK(vMemRelease(vm, h));
  if (on_host()) OK(vMemCreate(vm, MIB(256), NULL, &h)); /* larger than a slab: a slab of its own */
  if (on_host()) EQ(runs_of(vm, h), 1);
  OK(vmem_close(vm));
}

static void fragments_are_used(void) {
  vmem_t vm = open_with(MIB(2), VMEM_KEEP_ALL, MIB(2));
  vmem_handle h[32], big;
  for (int i = 0; i < 32; i++) OK(vMemCreate(vm, PAGE, NULL, &h[i]));
  for (int i = 0; i < 32; i += 2) OK(vMemRelease(vm, h[i]));
  OK(vMemCreate(vm, 16 * PAGE, NULL, &big));
  EQ(runs_of(vm, big), 16);
  EQ(vMemCreate(vm, PAGE, NULL, &h[0]), -ENOMEM);
  OK(vmem_check(vm));
  OK(vMemRelease(vm, big));
  OK(vMemCreate(vm, PAGE, NULL, &h[0]));
  OK(vmem_close(vm));
}

/* Pages of 128 KiB lie on 128 KiB boundaries of their slab, whatever was taken before. */
static void alignment_and_shortage(void) {
  struct vmem_create_opts two = {.size = sizeof(two), .page_size = 2 * PAGE};
  vmem_t vm = open_with(MIB(2), VMEM_KEEP_ALL, MIB(2));
  vmem_handle h[32], big;
  for (int i = 0; i < 32; i++) OK(vMemCreate(vm, PAGE, NULL, &h[i]));
  for (int i = 0; i < 32; i += 2) OK(vMemRelease(vm, h[i]));
  EQ(vMemCreate(vm, 2 * PAGE, &two, &big), -ENOMEM); /* 16 pages free, no two neighbours */
  OK(vmem_check(vm));
  OK(vMemRelease(vm, h[1]));
  OK(vMemCreate(vm, 2 * PAGE, &two, &big));
  OK(vmem_close(vm));
}

static uint64_t segments_after_growth(uint32_t flags, int requests, int steps) {
  vmem_t vm = open_with(0, VMEM_KEEP_ALL, 0);
  uint64_t va, segments;
  if (vMemReserve(vm, GIB(4), NULL, &va) || vmem_warm(vm, (uint64_t)requests * MIB(2))) return 0;
  for (int s = 0; s < steps; s++)
    for (int r = 0; r < requests; r++) {
      struct vmem_op op = {.op = VMEM_OP_POPULATE, .flags = flags, .addr = va + r * MIB(8) + s * PAGE, .bytes = PAGE};
      if (vmem_batch(vm, &op, 1, NULL, 0, 0)) return 0;
    }
  segments = stats_of(vm).segments;
  if (vmem_check(vm) || vmem_close(vm)) return 0;
  return segments;
}

/* 64 interleaved requests: with SPREAD each one's pages form one run; without, hardly any do. */
static void spread_keeps_neighbours(void) {
  uint64_t packed = segments_after_growth(0, 64, 16), spread = segments_after_growth(VMEM_OP_SPREAD, 64, 16);
  EQ(spread, 2 * 64 + 0); /* 64 runs, 64 holes */
  CHECK(packed > 4 * spread);
}

static void spread_yields_when_short(void) {
  vmem_t vm = open_with(MIB(4), VMEM_KEEP_ALL, MIB(4));
  uint64_t va;
  OK(vMemReserve(vm, GIB(1), NULL, &va));
  OK(vmem_warm(vm, MIB(4)));
  for (int i = 0; i < 64; i++) {
    struct vmem_op op = {.op = VMEM_OP_POPULATE, .flags = VMEM_OP_SPREAD, .addr = va + i * MIB(8), .bytes = PAGE};
    OK(vmem_batch(vm, &op, 1, NULL, 0, 0));
  }
  EQ(stats_of(vm).free_bytes, 0);
  OK(vmem_check(vm));
  OK(vmem_close(vm));
}

static void watermarks_and_trim(void) {
  ONLY_HOST(); /* more memory than a software GPU has */
  vmem_t vm = open_with(0, MIB(100), 0);
  vmem_handle h;
  uint64_t freed;
  OK(vmem_warm(vm, MIB(300)));
  CHECK(stats_of(vm).free_bytes >= MIB(300));
  OK(vMemCreate(vm, MIB(32), NULL, &h));
  OK(vMemRelease(vm, h)); /* above the high watermark: slabs go back */
  CHECK(stats_of(vm).slab_bytes < MIB(100) + MIB(64));
  CHECK(stats_of(vm).free_bytes >= MIB(100));
  OK(vmem_trim(vm, 0, &freed));
  CHECK(freed >= MIB(100));
  EQ(stats_of(vm).slab_bytes, 0);
  OK(vmem_check(vm));
  OK(vmem_close(vm));
}

static void limit(void) {
  vmem_t vm = open_with(MIB(3), VMEM_KEEP_ALL, 0);
  vmem_handle h;
  struct vmem_error e = {.size = sizeof(e)};
  EQ(vMemCreate(vm, MIB(4), NULL, &h), -ENOMEM);
  OK(vmem_get_error(&e));
  EQ(e.limit, MIB(3));
  EQ(stats_of(vm).slab_bytes, 0); /* nothing of the failed attempt stays */
  OK(vMemCreate(vm, MIB(3), NULL, &h));
  EQ(stats_of(vm).slab_bytes, MIB(3));
  EQ(vMemCreate(vm, PAGE, NULL, &h), -ENOMEM);
  EQ(vmem_warm(vm, PAGE), -ENOMEM);
  OK(vmem_close(vm));
}

/* Slabs made for a batch that then fails are not kept. */
static void failed_batches_leave_no_slabs(void) {
  vmem_t vm = open_with(0, VMEM_KEEP_ALL, MIB(2));
  uint64_t va;
  struct vmem_op ops[2] = {{.op = VMEM_OP_POPULATE, .bytes = MIB(6)}, {.op = VMEM_OP_UNMAP, .bytes = PAGE}};
  OK(vMemReserve(vm, MIB(16), NULL, &va));
  ops[0].addr = va;
  ops[1].addr = va + MIB(8);
  EQ(vmem_batch(vm, ops, 2, NULL, 0, 0), -EFAULT);
  EQ(stats_of(vm).slab_bytes, 0);
  OK(vmem_inject(vm, VMEM_INJECT_MAP, 0, 1, EIO));
  EQ(vmem_batch(vm, ops, 1, NULL, 0, 0), -EIO);
  EQ(stats_of(vm).slab_bytes, 0);
  OK(vmem_batch(vm, ops, 1, NULL, 0, 0));
  OK(vmem_check(vm));
  OK(vmem_close(vm));
}

/* The worker is filling the pool up to its low watermark when the caller wants all there may be: what it
 * makes at that moment is not lost to the caller. */
static void watermark_and_limit(void) {
  for (int i = 0; i < 40; i++) {
    struct vmem_open_opts o = {.size = sizeof(o), .mem_limit = MIB(2), .pool_low = KIB(512),
                               .pool_high = VMEM_KEEP_ALL, .slab_size = MIB(1)};
    vmem_t vm;
    vmem_handle h;
    OK(open_opts(&o, &vm));
    OK(vMemCreate(vm, MIB(2), NULL, &h));
    EQ(vMemCreate(vm, PAGE, NULL, &h), -ENOMEM);
    OK(vmem_close(vm));
  }
}

static uint64_t seed = 88172645463325252ull;
static uint32_t rnd(uint32_t n) {
  seed ^= seed << 13;
  seed ^= seed >> 7;
  seed ^= seed << 17;
  return (uint32_t)(seed >> 33) % n;
}

/* Each granule of a small reservation has an owner whose mark stands in it. */
static void random_walk(void) {
  enum { GRANULES = 512 };
  const int steps = on_host() ? 6000 : 1500;
  vmem_t vm = open_with(MIB(24), MIB(4), MIB(4));
  uint64_t va;
  static unsigned char mark[GRANULES];
  memset(mark, 0, sizeof(mark));
  OK(vMemReserve(vm, GRANULES * PAGE, NULL, &va));
  for (int step = 0; step < steps; step++) {
    uint32_t i = rnd(GRANULES), n = 1 + rnd(rnd(8) ? 6 : 60), k;
    struct vmem_op op = {.addr = va + i * PAGE, .bytes = n * PAGE, .flags = rnd(2) ? VMEM_OP_SPREAD : 0};
    bool inside = i + n <= GRANULES, all = inside, none = inside;
    for (k = 0; inside && k < n; k++) {
      all = all && mark[i + k];
      none = none && !mark[i + k];
    }
    op.op = rnd(2) ? VMEM_OP_POPULATE : VMEM_OP_UNMAP;
    if (op.op == VMEM_OP_UNMAP) op.flags = rnd(2) ? VMEM_OP_HOLES : 0;
    int ret = vmem_batch(vm, &op, 1, NULL, 0, 0);
    if (!inside) {
      EQ(ret, -ENXIO);
    } else if (op.op == VMEM_OP_POPULATE) {
      CHECK(none ? ret == 0 || ret == -ENOMEM : ret == -EEXIST);
      for (k = 0; !ret && k < n; k++) {
        EQ(GET(va + (i + k) * PAGE), 0);
        mark[i + k] = (unsigned char)(1 + rnd(255));
        PUT(va + (i + k) * PAGE, mark[i + k]);
      }
    } else {
      EQ(ret, all || op.flags ? 0 : -EFAULT);
      for (k = 0; !ret && k < n; k++) mark[i + k] = 0;
    }
    if (step % 50 == 0) {
      OK(vmem_check(vm));
      for (k = 0; k < GRANULES; k++)
        if (mark[k]) EQ(GET(va + k * PAGE), mark[k]);
    }
  }
  OK(vMemFree(vm, va, VMEM_FREE_UNMAP));
  EQ(stats_of(vm).used_bytes, 0);
  OK(vmem_check(vm));
  OK(vmem_close(vm));
}

MAIN(TEST(one_run_is_one_call), TEST(fragments_are_used), TEST(alignment_and_shortage), TEST(spread_keeps_neighbours),
     TEST(spread_yields_when_short), TEST(watermarks_and_trim), TEST(limit), TEST(failed_batches_leave_no_slabs),
     TEST(watermark_and_limit), TEST(random_walk))
