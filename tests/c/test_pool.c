/* SPDX-License-Identifier: MIT */
/* Description: runs, neighbour placement, watermarks, limits, trim, and a random walk with all checks on. */
#include <unistd.h>

#include "api/api.h"
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
  if (on_host()) OK(vMemCreate(vm, MIB(256), NULL, &h)); /* larger than a slab: gets its own slab */
  if (on_host()) EQ(runs_of(vm, h), 1);
  OK(vmem_close(vm));
}

/* ---- choice of pages: on a GPU used pages are dirty and are chosen last -------------------------------- */

enum { SLABS = 4, IN_SLAB = 16 };

/* Creates full slabs of 16 pages, with one handle per page: h[i] holds those of the i-th slab. */
static vmem_t open_full(vmem_handle h[SLABS][IN_SLAB]) {
  vmem_t vm = open_with(SLABS * MIB(1), VMEM_KEEP_ALL, MIB(1));
  for (int s = 0; s < SLABS; s++)
    for (int i = 0; i < IN_SLAB; i++)
      if (vMemCreate(vm, PAGE, NULL, &h[s][i])) return 0;
  return vm;
}

static bool release(vmem_t vm, vmem_handle *h, int n) {
  for (int i = 0; i < n; i++)
    if (vMemRelease(vm, h[i])) return false;
  return true;
}

/* Bytes of empty slabs, which a trim would return. */
static uint64_t empty_bytes(vmem_t vm) {
  uint64_t freed;
  return vmem_trim(vm, 0, &freed) ? UINT64_MAX : freed;
}

/* Pages come from the slab with the fewest free pages, so that the others become empty and are returned. */
static void fullest_slab_first(void) {
  static const int freed[SLABS] = {12, 3, 15, 8}; /* each at a different level of fullness */
  static const int order[SLABS] = {1, 3, 0, 2};
  vmem_handle h[SLABS][IN_SLAB], more[IN_SLAB];
  vmem_t vm;
  ONLY_HOST();
  CHECK((vm = open_full(h)));
  for (int s = 0; s < SLABS; s++) CHECK(release(vm, h[s], freed[s]));
  for (int k = 0; k < SLABS; k++) {
    int s = order[k];
    for (int i = 0; i < freed[s]; i++) OK(vMemCreate(vm, PAGE, NULL, &more[i]));
    /* Once its old pages are released, the slab holds only the new ones. */
    CHECK(release(vm, h[s] + freed[s], IN_SLAB - freed[s]));
    EQ(empty_bytes(vm), 0);
    CHECK(release(vm, more, freed[s]));
    EQ(empty_bytes(vm), MIB(1));
    OK(vmem_check(vm));
  }
  OK(vmem_close(vm));
}

/* An empty slab is used only when nothing else is free. */
static void empty_slab_last(void) {
  vmem_handle h[SLABS][IN_SLAB], more[IN_SLAB + 1];
  vmem_t vm;
  ONLY_HOST();
  CHECK((vm = open_full(h)));
  CHECK(release(vm, h[0], IN_SLAB - 1) && release(vm, h[3], 1));
  CHECK(release(vm, h[1], IN_SLAB));                                          /* empty */
  for (int i = 0; i < IN_SLAB; i++) OK(vMemCreate(vm, PAGE, NULL, &more[i])); /* slabs 0 and 3 are then full */
  EQ(stats_of(vm).free_bytes, MIB(1));
  OK(vMemCreate(vm, PAGE, NULL, &more[IN_SLAB])); /* only the empty slab is left */
  EQ(empty_bytes(vm), 0);
  OK(vMemRelease(vm, more[IN_SLAB]));
  EQ(empty_bytes(vm), MIB(1));
  OK(vmem_check(vm));
  OK(vmem_close(vm));
}

/* A stretch that will grow starts in an empty chunk of a used slab, if there is such a chunk. */
static void empty_slab_last_when_spread(void) {
  struct vmem_op op = {.op = VMEM_OP_POPULATE, .flags = VMEM_OP_SPREAD, .bytes = PAGE};
  vmem_handle h[4];
  uint64_t va;
  vmem_t vm;
  ONLY_HOST();
  CHECK((vm = open_with(MIB(8), VMEM_KEEP_ALL, MIB(4))));
  OK(vMemReserve(vm, MIB(8), NULL, &va));
  for (int i = 0; i < 4; i++) OK(vMemCreate(vm, MIB(2), NULL, &h[i])); /* two slabs of two chunks */
  OK(vMemRelease(vm, h[3]));
  OK(vMemRelease(vm, h[1]));
  OK(vMemRelease(vm, h[0])); /* the first slab is empty */
  for (int i = 0; i < 2; i++) {
    op.addr = va + (uint64_t)i * MIB(2);
    OK(vmem_batch(vm, &op, 1, NULL, 0, 0));
    if (!i) EQ(empty_bytes(vm), MIB(4));
  }
  OK(vmem_check(vm));
  OK(vmem_close(vm));
}

/* A run of several pages is not split to keep a slab empty. */
static void a_run_is_not_cut(void) {
  vmem_handle h[SLABS][IN_SLAB], run;
  vmem_t vm;
  ONLY_HOST();
  CHECK((vm = open_full(h)));
  CHECK(release(vm, h[1], IN_SLAB) && release(vm, h[0], 3));
  OK(vMemCreate(vm, 4 * PAGE, NULL, &run));
  EQ(runs_of(vm, run), 1);
  EQ(empty_bytes(vm), 0);
  OK(vMemRelease(vm, run));
  OK(vMemCreate(vm, 3 * PAGE, NULL, &run));
  EQ(runs_of(vm, run), 1);
  EQ(empty_bytes(vm), MIB(1));
  OK(vmem_check(vm));
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

/* Pages of 128 KiB are aligned to 128 KiB in their slab, whatever was allocated before. */
static void alignment_and_shortage(void) {
  struct vmem_create_opts two = {.size = sizeof(two), .page_size = 2 * PAGE};
  vmem_t vm = open_with(MIB(2), VMEM_KEEP_ALL, MIB(2));
  vmem_handle h[32], big;
  for (int i = 0; i < 32; i++) OK(vMemCreate(vm, PAGE, NULL, &h[i]));
  for (int i = 0; i < 32; i += 2) OK(vMemRelease(vm, h[i]));
  EQ(vMemCreate(vm, 2 * PAGE, &two, &big), -ENOMEM); /* 16 pages are free, no two of them adjacent */
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

/* 64 requests grow in turn: with SPREAD the pages of each request form one run; without it, hardly any do. */
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
  OK(vMemRelease(vm, h)); /* above the high watermark: slabs are returned */
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
  EQ(stats_of(vm).slab_bytes, 0); /* the failed attempt leaves no slab */
  OK(vMemCreate(vm, MIB(3), NULL, &h));
  EQ(stats_of(vm).slab_bytes, MIB(3));
  EQ(vMemCreate(vm, PAGE, NULL, &h), -ENOMEM);
  EQ(vmem_warm(vm, PAGE), -ENOMEM);
  OK(vmem_close(vm));
}

/* Slabs created for a batch that then fails are freed. */
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

/* The worker fills the pool up to its low watermark while the caller allocates everything up to the limit: the caller
 * also gets the slab that the worker is creating. */
static void watermark_and_limit(void) {
  for (int i = 0; i < 40; i++) {
    struct vmem_open_opts o = {
        .size = sizeof(o), .mem_limit = MIB(2), .pool_low = KIB(512), .pool_high = VMEM_KEEP_ALL, .slab_size = MIB(1)};
    vmem_t vm;
    vmem_handle h;
    OK(open_opts(&o, &vm));
    OK(vMemCreate(vm, MIB(2), NULL, &h));
    EQ(vMemCreate(vm, PAGE, NULL, &h), -ENOMEM);
    OK(vmem_close(vm));
  }
}

/* ---- a surplus ---------------------------------------------------------------------------------- */

#define NEVER (1ull << 60) /* the test itself ends each period */

/* Opens a context with slabs of 2 MiB; free memory above `high` is returned when it was not needed for `delay` ns. */
static vmem_t open_watching(uint64_t high, uint64_t delay, struct vm_ctx **c) {
  int err;
  vmem_t vm = open_with(0, 0, MIB(2));
  *c = vm_get(vm, "test", &err);
  (*c)->opts.pool_high = high;
  (*c)->phys->surplus.delay = delay;
  vm_put(*c);
  return vm;
}

/* Allocates and releases this many slabs of 2 MiB. */
static bool take_and_release_at(vmem_t vm, uint32_t location, int slabs) {
  struct vmem_create_opts o = {.size = sizeof(o), .location = location};
  vmem_handle h[128];
  for (int i = 0; i < slabs; i++)
    if (vMemCreate(vm, MIB(2), &o, &h[i])) return false;
  return release(vm, h, slabs);
}

static bool take_and_release(vmem_t vm, int slabs) { return take_and_release_at(vm, VMEM_DEVICE, slabs); }

static bool is_due(struct vm_ctx *c) {
  bool due;
  pthread_mutex_lock(&c->lock);
  due = c->phys->surplus.watched && !c->phys->surplus.due;
  pthread_mutex_unlock(&c->lock);
  return due;
}

/* Ends the period in which a surplus was watched; returns the bytes of slabs when they reach `want`, or after a time
 * limit. */
static uint64_t after_the_period(vmem_t vm, uint64_t want) {
  int err;
  struct vm_ctx *c = vm_get(vm, "test", &err);
  for (int i = 0; i < 10000 && stats_of(vm).dirty_bytes; i++) usleep(1000);
  pthread_mutex_lock(&c->lock);
  c->phys->surplus.due = 0;
  pthread_cond_signal(&c->work_cond);
  pthread_mutex_unlock(&c->lock);
  for (int i = 0; i < 10000 && is_due(c); i++) usleep(1000); /* also if there is nothing to return */
  vm_put(c);
  for (int i = 0; i < 10000 && stats_of(vm).slab_bytes != want; i++) usleep(1000);
  return stats_of(vm).slab_bytes;
}

static void a_surplus_goes_back_when_it_was_not_needed_for_a_while(void) {
  struct vm_ctx *c;
  vmem_t vm = open_watching(MIB(4), NEVER, &c);
  CHECK(take_and_release(vm, 2));
  CHECK(!c->phys->surplus.watched); /* no surplus */
  OK(vmem_warm(vm, MIB(256)));
  EQ(stats_of(vm).slab_bytes, MIB(256)); /* memory prepared by vmem_warm is kept too */
  CHECK(take_and_release(vm, 100));
  EQ(stats_of(vm).slab_bytes, MIB(256));
  EQ(after_the_period(vm, MIB(202)), MIB(202)); /* the period began when 2 of the 200 MiB were released */
  CHECK(take_and_release(vm, 16));              /* the need of the next period */
  EQ(after_the_period(vm, MIB(36)), MIB(36));   /* piece by piece */
  EQ(after_the_period(vm, MIB(4)), MIB(4));     /* a period in which nothing was needed */
  CHECK(take_and_release(vm, 2));
  CHECK(!c->phys->surplus.watched);
  OK(vmem_check(vm));
  OK(vmem_close(vm));
}

/* Each pool keeps what it needed itself: only the idle pool returns memory. */
static void a_surplus_is_of_the_pool_that_does_not_need_it(void) {
  static const uint32_t places[] = {VMEM_DEVICE, VMEM_HOST};
  for (int i = 0; i < 2; i++) {
    struct vm_ctx *c;
    vmem_t vm = open_watching(MIB(4), NEVER, &c);
    const struct vm_pool *busy = &c->phys->pools[i], *idle = &c->phys->pools[!i];
    CHECK(take_and_release_at(vm, places[!i], 40));
    CHECK(take_and_release_at(vm, places[i], 20));
    after_the_period(vm, MIB(44)); /* both pools were needed in this period */
    for (int turn = 0; turn < 3; turn++) {
      CHECK(take_and_release_at(vm, places[i], 20));
      EQ(after_the_period(vm, MIB(44)), MIB(44));
      EQ(busy->free_units, MIB(40) / PAGE);
      EQ(idle->free_units, MIB(4) / PAGE);
    }
    OK(vmem_check(vm));
    OK(vmem_close(vm));
  }
}

/* A surplus of host memory does not return device memory that pool_low keeps. */
static void a_low_watermark_is_of_the_device(void) {
  struct vm_ctx *c;
  vmem_t vm = open_watching(MIB(8), 0, &c);
  c->opts.pool_low = MIB(8);
  OK(vmem_warm(vm, MIB(8)));
  CHECK(take_and_release_at(vm, VMEM_HOST, 40));
  EQ(c->phys->pools[0].free_units, MIB(8) / PAGE);
  EQ(c->phys->pools[1].free_units, 0);
  OK(vmem_compact(vm, UINT64_MAX, NULL, 0, 0, NULL));
  EQ(c->phys->pools[0].free_units, MIB(8) / PAGE);
  OK(vmem_trim(vm, 0, NULL));
  EQ(stats_of(vm).slab_bytes, 0);
  OK(vmem_close(vm));
}

/* A plan uses the surplus, the period ends, and the plan fails: the surplus is watched again. */
static void what_a_failed_plan_leaves_is_watched(void) {
  int ends[2];
  struct vm_ctx *c;
  vmem_t vm = open_watching(MIB(4), NEVER, &c);
  uint64_t va;
  vmem_ticket t;
  struct vmem_op op;
  struct vmem_after a;
  OK(vMemReserve(vm, MIB(64), NULL, &va));
  CHECK(take_and_release(vm, 32));
  EQ(pipe(ends), 0);
  op = populate(va, MIB(64));
  a = (struct vmem_after){.kind = VMEM_AFTER_FD, .handle = (uint64_t)ends[0]};
  OK(vmem_submit(vm, &op, 1, &a, 1, 0, &t));
  EQ(after_the_period(vm, MIB(64)), MIB(64)); /* the plan uses all of the surplus */
  OK(vmem_inject(vm, VMEM_INJECT_MAP, 0, 1, EIO));
  EQ(write(ends[1], "", 1), 1);
  EQ(vmem_wait(vm, t, -1), -EIO);
  CHECK(c->phys->surplus.watched);
  for (int i = 0; i < 3 && stats_of(vm).slab_bytes > MIB(4); i++) after_the_period(vm, MIB(4));
  EQ(stats_of(vm).slab_bytes, MIB(4));
  close(ends[0]);
  close(ends[1]);
  OK(vmem_close(vm));
}

/* A device with 64 MiB that needs time to free memory. */
static uint64_t device_bytes;
static const struct vm_backend *real;

static int small_create(void *be, uint64_t bytes, uint64_t page_size, uint32_t location, int32_t device,
                        uint64_t *slab) {
  int err;
  if (__atomic_add_fetch(&device_bytes, bytes, __ATOMIC_SEQ_CST) > MIB(64))
    err = vm_fail(-ENOMEM, "the device has 64 MiB");
  else
    err = real->slab_create(be, bytes, page_size, location, device, slab);
  if (err) __atomic_sub_fetch(&device_bytes, bytes, __ATOMIC_SEQ_CST);
  return err;
}

static int slow_destroy(void *be, uint64_t slab, uint64_t bytes) {
  int err = real->slab_destroy(be, slab, bytes);
  usleep(100);
  __atomic_sub_fetch(&device_bytes, bytes, __ATOMIC_SEQ_CST);
  return err;
}

/* A call that is short of memory waits for memory being returned to the driver, and so does vmem_trim. */
static void what_is_leaving_is_waited_for(void) {
  struct vm_ctx *c;
  vmem_t vm = open_watching(MIB(2), 1000, &c); /* the worker returns memory continually */
  struct vm_backend small = *c->be;
  real = c->be;
  small.slab_create = small_create;
  small.slab_destroy = slow_destroy;
  c->be = &small;
  for (int i = 0; i < 100; i++) CHECK(take_and_release(vm, 32)); /* the device's whole memory */
  OK(vmem_trim(vm, 0, NULL));
  EQ(__atomic_load_n(&device_bytes, __ATOMIC_SEQ_CST), 0);
  OK(vmem_close(vm));
}

/* Adds the missing slab while a plan that ran short is rolled back. */
static vmem_t helped;
static int help(void *be, uint64_t slab, uint64_t offset, uint64_t bytes) {
  vmem_t vm = helped;
  helped = 0;
  if (vm && vmem_warm(vm, MIB(2))) return -EIO; /* must create a slab: memory being discarded is not free yet */
  return real->discard(be, slab, offset, bytes);
}

static void what_others_bring_meanwhile_is_used(void) {
  int err;
  uint64_t va;
  vmem_t vm = open_with(MIB(4), VMEM_KEEP_ALL, MIB(2));
  struct vm_ctx *c = vm_get(vm, "test", &err);
  struct vm_backend helping = *c->be;
  struct vmem_op op;
  if (!helping.discard) {
    vm_put(c);
    OK(vmem_close(vm));
    return;
  }
  real = c->be;
  helping.discard = help;
  c->be = &helping;
  vm_put(c);
  OK(vMemReserve(vm, MIB(4), NULL, &va));
  OK(vmem_warm(vm, MIB(2)));
  helped = vm;
  op = populate(va, MIB(4));
  OK(vmem_batch(vm, &op, 1, NULL, 0, 0));
  EQ(helped, 0);
  OK(vMemFree(vm, va, VMEM_FREE_UNMAP));
  c->be = real;
  OK(vmem_check(vm));
  OK(vmem_close(vm));
}

static uint64_t seed = 88172645463325252ull;
static uint32_t rnd(uint32_t n) {
  seed ^= seed << 13;
  seed ^= seed >> 7;
  seed ^= seed << 17;
  return (uint32_t)(seed >> 33) % n;
}

/* Each granule of a small reservation has an owner and contains the owner's mark. */
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

MAIN(TEST(one_run_is_one_call), TEST(fullest_slab_first), TEST(empty_slab_last), TEST(empty_slab_last_when_spread),
     TEST(a_run_is_not_cut), TEST(fragments_are_used), TEST(alignment_and_shortage), TEST(spread_keeps_neighbours),
     TEST(spread_yields_when_short), TEST(watermarks_and_trim), TEST(limit), TEST(failed_batches_leave_no_slabs),
     TEST(watermark_and_limit), TEST(a_surplus_goes_back_when_it_was_not_needed_for_a_while),
     TEST(a_surplus_is_of_the_pool_that_does_not_need_it), TEST(a_low_watermark_is_of_the_device),
     TEST(what_a_failed_plan_leaves_is_watched), TEST(what_is_leaving_is_waited_for),
     TEST(what_others_bring_meanwhile_is_used), TEST(random_walk))
