/* SPDX-License-Identifier: MIT */
/* Description: corner cases of accounting and freeing: dropped handles, undone unmaps, odd sizes. */
#include <pthread.h>

#include "api/api.h"
#include "check.h"

static vmem_t open_with(uint64_t slab, uint64_t limit, uint64_t low, uint64_t high) {
  struct vmem_open_opts o = {
      .size = sizeof(o), .slab_size = slab, .mem_limit = limit, .pool_low = low, .pool_high = high};
  vmem_t vm = 0;
  if (open_opts(&o, &vm)) printf("cannot open %s: %s\n", backend(), vmem_last_error());
  return vm;
}

/* The table entry of a dropped handle stays in use by a mapping whose first pages were unmapped. */
static void head_of_a_dropped_handles_mapping(void) {
  vmem_t vm = open_vm(0);
  struct vmem_handle_info info = {.size = sizeof(info)};
  vmem_handle h, other;
  uint64_t va;
  OK(vMemReserve(vm, MIB(4), NULL, &va));
  OK(vMemCreate(vm, 4 * PAGE, NULL, &h));
  OK(vMemMap(vm, va, 4 * PAGE, h, 0, 0));
  OK(vmem_drop(vm, h));
  OK(vMemUnmap(vm, va, PAGE));
  OK(vmem_check(vm));
  OK(vMemCreate(vm, PAGE, NULL, &other));
  OK(vmem_check(vm));
  OK(vMemUnmap(vm, va + PAGE, 3 * PAGE));
  OK(vmem_check(vm));
  OK(vmem_handle_query(vm, other, &info));
  EQ(info.mappings, 0);
  OK(vMemRelease(vm, other));
  EQ(stats_of(vm).used_bytes, 0);
  OK(vmem_close(vm));
}

static bool one_call(void) {
  struct vmem_probe_info p = {.size = sizeof(p)};
  return !vmem_probe(backend(), 0, 0, &p) && p.caps & VMEM_CAP_ONE_CALL;
}

/* Number of map calls, not counting slabs' own mappings, which are created when pages must be zeroed. */
static uint64_t calls_mapped(vmem_t vm) {
  int err;
  struct vm_ctx *c = vm_get(vm, "test", &err);
  uint64_t n = c->driver->mappings;
  vm_put(c);
  return n;
}

/* After an unmap in the middle of a run was undone, the run counts as three map calls. */
static void calls_after_an_undone_unmap(void) {
  vmem_t vm = open_vm(0);
  uint64_t va;
  struct vmem_op make = {.op = VMEM_OP_POPULATE, .bytes = 3 * PAGE, .count = 2, .stride = MIB(2)};
  struct vmem_op take = {.op = VMEM_OP_UNMAP, .bytes = PAGE, .count = 2, .stride = MIB(2)};
  OK(vMemReserve(vm, MIB(4), NULL, &va));
  make.addr = va;
  take.addr = va + PAGE;
  OK(vmem_batch(vm, &make, 1, NULL, 0, 0));
  EQ(calls_mapped(vm), 2);
  OK(vmem_inject(vm, VMEM_INJECT_UNMAP, 1, 1, EIO));
  EQ(vmem_batch(vm, &take, 1, NULL, 0, 0), -EIO);
  OK(vmem_check(vm));
  EQ(calls_mapped(vm), one_call() ? 2 : 4); /* with one call nothing was unmapped, so nothing is undone */
  OK(vmem_close(vm));
}

static void kept_bytes_are_not_rounded_down(void) {
  vmem_t vm = open_with(PAGE, 0, 0, VMEM_KEEP_ALL);
  uint64_t freed = 1;
  OK(vmem_warm(vm, 2 * PAGE));
  EQ(stats_of(vm).free_bytes, 2 * PAGE);
  OK(vmem_trim(vm, PAGE + 1, &freed));
  EQ(freed, 0);
  OK(vmem_trim(vm, 1, &freed));
  EQ(freed, PAGE);
  OK(vmem_trim(vm, 0, &freed));
  EQ(freed, PAGE);
  OK(vmem_close(vm));
}

static void too_much_to_warm(void) {
  vmem_t vm = open_with(0, MIB(64), 0, 0);
  EQ(vmem_warm(vm, UINT64_MAX), -ENOMEM);
  EQ(vmem_warm(vm, UINT64_MAX - PAGE + 1), -ENOMEM);
  EQ(stats_of(vm).slab_bytes, 0);
  OK(vmem_close(vm));
}

/* Failing calls leave prepared pages in the pool. */
static void failed_calls_keep_the_pool(void) {
  vmem_t vm = open_vm(0);
  uint64_t va;
  struct vmem_stats before, now;
  struct vmem_op op[2] = {{.op = VMEM_OP_POPULATE, .bytes = PAGE}, {.op = VMEM_OP_POPULATE, .bytes = PAGE}};
  OK(vMemReserve(vm, MIB(4), NULL, &va));
  OK(vmem_warm(vm, MIB(1)));
  before = stats_of(vm);
  EQ(vMemUnmap(vm, va, PAGE), -EFAULT);
  now = stats_of(vm);
  CHECK(same_state(&before, &now));
  op[0].addr = op[1].addr = va;
  EQ(vmem_batch(vm, op, 2, NULL, 0, 0), -EBUSY);
  now = stats_of(vm);
  CHECK(same_state(&before, &now));
  op[1].addr = va + PAGE;
  OK(vmem_inject(vm, VMEM_INJECT_MAP, 0, 1, EIO));
  EQ(vmem_batch(vm, op, 2, NULL, 0, 0), -EIO);
  now = stats_of(vm);
  CHECK(same_state(&before, &now));
  OK(vmem_close(vm));
}

/* A malformed operation is reported even if memory is too short for the operations before it; nothing is allocated. */
static void malformed_behind_a_shortage(void) {
  vmem_t vm = open_with(0, MIB(64), 0, 0);
  uint64_t va;
  struct vmem_op op[2] = {{.op = VMEM_OP_POPULATE, .bytes = PAGE}, {.op = VMEM_OP_POPULATE}};
  OK(vMemReserve(vm, MIB(4), NULL, &va));
  op[0].addr = va;
  op[1].addr = va + MIB(2);
  op[1].bytes = 1ull << 50;
  EQ(vmem_batch(vm, op, 2, NULL, 0, 0), -ENXIO);
  EQ(stats_of(vm).slab_calls, 0);
  op[1].bytes = PAGE + 1;
  EQ(vmem_batch(vm, op, 2, NULL, 0, 0), -EINVAL);
  op[1].bytes = 1ull << 60; /* times 16 units is 0 in 64 bits */
  op[1].count = 1ull << 20;
  op[1].stride = 1ull << 60;
  EQ(vmem_batch(vm, op, 2, NULL, 0, 0), -EOVERFLOW);
  op[1] =
      (struct vmem_op){.op = VMEM_OP_POPULATE, .addr = va + MIB(2), .bytes = PAGE, .count = 1ull << 40, .stride = PAGE};
  EQ(vmem_batch(vm, op, 2, NULL, 0, 0), -ENXIO);
  op[1] = (struct vmem_op){.op = 99};
  EQ(vmem_batch(vm, op, 2, NULL, 0, 0), -EINVAL);
  EQ(stats_of(vm).slab_calls, 0);
  EQ(stats_of(vm).batches, 0);
  OK(vmem_close(vm));
}

/* Free slabs too small for a page are exchanged for a slab that is large enough. */
static void empty_slabs_too_small(void) {
  vmem_t vm = open_with(PAGE, MIB(2), 0, VMEM_KEEP_ALL);
  struct vmem_create_opts large = {.size = sizeof(large), .page_size = MIB(2)};
  vmem_handle h;
  OK(vmem_warm(vm, MIB(2)));
  EQ(stats_of(vm).slabs, 32);
  OK(vMemCreate(vm, MIB(2), &large, &h));
  EQ(stats_of(vm).slab_bytes, MIB(2));
  OK(vmem_check(vm));
  OK(vMemRelease(vm, h));
  OK(vmem_close(vm));
}

/* Existing memory is not exchanged for less. */
static void warm_at_the_limit(void) {
  vmem_t vm = open_with(PAGE, 3 * PAGE, 0, VMEM_KEEP_ALL);
  OK(vmem_warm(vm, 3 * PAGE));
  EQ(vmem_warm(vm, 4 * PAGE), -ENOMEM);
  EQ(stats_of(vm).free_bytes, 3 * PAGE);
  OK(vmem_close(vm));
}

/* The low watermark is kept without a batch ever being submitted. */
static void low_watermark(void) {
  vmem_t vm = open_with(PAGE, 0, 4 * PAGE, VMEM_KEEP_ALL);
  vmem_handle h;
  for (int round = 0; round < 3; round++) {
    for (int i = 0; i < 10000 && stats_of(vm).free_bytes < 4 * PAGE; i++)
      nanosleep(&(struct timespec){0, 1000000}, NULL);
    CHECK(stats_of(vm).free_bytes >= 4 * PAGE);
    OK(vMemCreate(vm, 4 * PAGE, NULL, &h));
  }
  OK(vmem_close(vm));
}

/* If the driver can only map whole pages, a handle to part of a page cannot be mapped. */
static void parts_of_pages_that_are_mapped_whole(void) {
  ONLY_HOST(); /* host can imitate such a driver */
  vmem_t vm = open_vm(0);
  struct vmem_create_opts large = {.size = sizeof(large), .page_size = 2 * PAGE};
  vmem_handle h, part, both;
  uint64_t va;
  int err;
  struct vm_ctx *c = vm_get(vm, "test", &err);
  c->info->one_page_slabs = true;
  vm_put(c);
  OK(vMemReserve(vm, MIB(4), NULL, &va));
  OK(vMemCreate(vm, 4 * PAGE, &large, &h));
  EQ(stats_of(vm).slabs, 2);
  OK(vMemMap(vm, va, 4 * PAGE, h, 0, 0));
  EQ(vMemUnmap(vm, va + PAGE, 2 * PAGE), -EINVAL);
  OK(vmem_retain(vm, va + PAGE, PAGE, &part));
  EQ(vMemMap(vm, va + MIB(1), PAGE, part, 0, 0), -EINVAL);
  OK(vmem_retain(vm, va, 4 * PAGE, &both));
  EQ(vMemMap(vm, va + MIB(1), 3 * PAGE, both, 0, 0), -EINVAL);
  EQ(vMemMap(vm, va + MIB(1), 2 * PAGE, both, PAGE, 0), -EINVAL);
  OK(vmem_check(vm));
  OK(vMemMap(vm, va + MIB(1), 2 * PAGE, both, 2 * PAGE, 0));
  OK(vMemRelease(vm, both));
  OK(vmem_drop(vm, part));
  OK(vMemRelease(vm, h));
  EQ(stats_of(vm).used_bytes, 0);
  OK(vmem_check(vm));
  OK(vmem_close(vm));
}

/* A structure with a garbage size field is refused: the library does not access memory up to its supposed end. */
static void rubbish_sizes(void) {
  struct vmem_open_opts o = {.size = SIZE_MAX / 2, .backend = "host"};
  struct vmem_stats s = {.size = SIZE_MAX / 2};
  vmem_t vm;
  EQ(vmem_open(&o, &vm), -EINVAL);
  vm = open_vm(0);
  EQ(vmem_get_stats(vm, &s), -EINVAL);
  OK(vmem_close(vm));
}

/* The memory still available under the context's limit, per location. */
static void memory_that_is_left(void) {
  struct vmem_open_opts o = {.size = sizeof(o), .mem_limit = MIB(256)};
  struct vmem_memory_info m = {.size = sizeof(m)}, rubbish = {.size = SIZE_MAX / 2};
  vmem_handle h;
  vmem_t vm;
  OK(open_opts(&o, &vm));
  OK(vmem_memory_query(vm, VMEM_DEVICE, 0, &m));
  EQ(m.free_bytes, MIB(256) - stats_of(vm).slab_bytes);
  CHECK(m.total_bytes > MIB(256));
  OK(vMemCreate(vm, MIB(64), NULL, &h));
  OK(vmem_memory_query(vm, VMEM_DEVICE, 0, &m));
  EQ(m.free_bytes, MIB(256) - stats_of(vm).slab_bytes);
  OK(vmem_drop(vm, h));
  EQ(vmem_memory_query(vm, 9, 0, &m), -EINVAL);
  EQ(vmem_memory_query(vm, VMEM_DEVICE, 0, &rubbish), -EINVAL);
  EQ(vmem_memory_query(vm, VMEM_DEVICE, 0, NULL), -EINVAL);
  if (on_host()) EQ(vmem_memory_query(vm, VMEM_PEER, 0, &m), -EOPNOTSUPP);
  OK(vmem_close(vm));
  EQ(vmem_memory_query(vm, VMEM_DEVICE, 0, &m), -EBADF);
}

/* Frees parts of several runs, from handles and from mappings, while another thread runs vmem_check. */
struct churn {
  vmem_t vm;
  uint64_t va;
  int stop, bad;
};

static void *churn(void *arg) {
  struct churn *k = arg;
  for (int i = 0; i < 200; i++) {
    vmem_handle h[8], all;
    for (int n = 0; n < 8; n++)
      if (vMemCreate(k->vm, PAGE, NULL, &h[n]) ||
          vMemMap(k->vm, k->va + (uint64_t)(n * 5 % 8) * PAGE, PAGE, h[n], 0, 0) || vmem_drop(k->vm, h[n]))
        k->bad++;
    if (vmem_retain(k->vm, k->va, 8 * PAGE, &all)) k->bad++;
    if (i & 1 && vmem_drop(k->vm, all)) k->bad++;
    if (vMemUnmap(k->vm, k->va, 8 * PAGE)) k->bad++;
    if (!(i & 1) && vmem_drop(k->vm, all)) k->bad++;
  }
  __atomic_store_n(&k->stop, 1, __ATOMIC_RELEASE);
  return NULL;
}

static void checked_at_any_moment(void) {
  struct churn k = {.vm = open_vm(0)};
  pthread_t t;
  int err = 0;
  OK(vMemReserve(k.vm, MIB(4), NULL, &k.va));
  EQ(pthread_create(&t, NULL, churn, &k), 0);
  while (!err && !__atomic_load_n(&k.stop, __ATOMIC_ACQUIRE)) err = vmem_check(k.vm);
  if (err) printf("%s\n", vmem_last_error());
  pthread_join(t, NULL);
  EQ(err, 0);
  EQ(k.bad, 0);
  OK(vmem_close(k.vm));
}

MAIN(TEST(head_of_a_dropped_handles_mapping), TEST(calls_after_an_undone_unmap), TEST(kept_bytes_are_not_rounded_down),
     TEST(too_much_to_warm), TEST(failed_calls_keep_the_pool), TEST(malformed_behind_a_shortage),
     TEST(empty_slabs_too_small), TEST(warm_at_the_limit), TEST(low_watermark), TEST(rubbish_sizes),
     TEST(memory_that_is_left), TEST(parts_of_pages_that_are_mapped_whole), TEST(checked_at_any_moment))
