/* SPDX-License-Identifier: MIT */
/* Description: vmem_join remaps pages that were mapped one by one, with one call per run; failures of vmem_join. */
#include "api/api.h"
#include "check.h"

/* The host back end with a remap, as GPU back ends have. */
static struct vm_backend fake;
static int remaps, fail_remap;

static int fake_remap(void *be, uint64_t addr, uint64_t bytes, uint64_t slab, uint64_t offset, uint32_t flags) {
  remaps++;
  if (fail_remap && fail_remap-- == 1) return vm_fail_at(-EIO, addr, bytes, 0, "refused");
  return vm_backend_host.map(be, addr, bytes, slab, offset, flags, false);
}

static vmem_t vm;
static uint64_t va;

/* Maps two runs of 8 pages each, page by page, and a page without neighbours. */
static void grow(void) {
  struct vm_ctx *c;
  int err;
  vm = open_host(0);
  c = vm_get(vm, "test", &err);
  fake = vm_backend_host;
  fake.remap = fake_remap;
  c->be = &fake;
  vm_put(c);
  remaps = fail_remap = 0;
  OK(vMemReserve(vm, MIB(64), NULL, &va));
  OK(vmem_warm(vm, MIB(64)));
  for (int i = 0; i < 8; i++) {
    struct vmem_op op = {.op = VMEM_OP_POPULATE,
                         .flags = VMEM_OP_SPREAD,
                         .addr = va + i * PAGE,
                         .bytes = PAGE,
                         .count = 2,
                         .stride = MIB(8)};
    OK(vmem_batch(vm, &op, 1, NULL, 0, 0));
    BYTE(va + i * PAGE) = (unsigned char)(10 + i);
  }
  struct vmem_op lone = {.op = VMEM_OP_POPULATE, .addr = va + MIB(32), .bytes = PAGE};
  OK(vmem_batch(vm, &lone, 1, NULL, 0, 0));
}

static bool intact(void) {
  for (int i = 0; i < 8; i++)
    if (BYTE(va + i * PAGE) != 10 + i) return false;
  return true;
}

static void one_call_per_run(void) {
  uint64_t calls = 0;
  grow();
  EQ(stats_of(vm).mappings, 17);
  OK(vmem_join(vm, va, MIB(64), &calls));
  EQ(calls, 2);
  EQ(stats_of(vm).mappings, 3);
  EQ(remaps, 2);
  CHECK(intact());
  OK(vmem_check(vm));
  OK(vmem_join(vm, va, MIB(64), &calls)); /* nothing left to do */
  EQ(calls, 0);
  OK(vMemUnmap(vm, va + 3 * PAGE, PAGE)); /* splits a mapping; each run is still one call */
  OK(vmem_join(vm, va, MIB(64), &calls));
  EQ(calls, 0);
  OK(vmem_close(vm));
}

static void part_of_a_run(void) {
  uint64_t calls = 0;
  grow();
  OK(vmem_join(vm, va + 2 * PAGE, 3 * PAGE, &calls));
  EQ(calls, 1);
  OK(vmem_join(vm, va, 8 * PAGE, &calls)); /* the mappings before, in and after that part */
  EQ(calls, 1);
  CHECK(intact());
  OK(vmem_check(vm));
  OK(vmem_close(vm));
}

static void failure_maps_again(void) {
  uint64_t calls;
  grow();
  fail_remap = 1;
  EQ(vmem_join(vm, va, MIB(64), &calls), -EIO);
  EQ(stats_of(vm).quarantined_bytes, 0);
  CHECK(intact());
  OK(vmem_check(vm));
  OK(vmem_join(vm, va, MIB(64), &calls));
  OK(vmem_close(vm));
}

static void lost(void) {
  uint64_t calls;
  grow();
  fail_remap = 1;
  OK(vmem_inject(vm, VMEM_INJECT_MAP, 1, 1, EIO)); /* fails the map that should undo it */
  EQ(vmem_join(vm, va, MIB(64), &calls), -ENOTRECOVERABLE);
  OK(vmem_inject(vm, 0, 0, 0, 0));
  EQ(stats_of(vm).quarantined_bytes, 8 * PAGE);
  EQ(vMemUnmap(vm, va, PAGE), -ENOTRECOVERABLE);
  OK(vmem_check(vm));
  OK(vmem_close(vm));
}

static int while_read;

static int fake_read(void *be, void *dst, uint64_t addr, uint64_t bytes) {
  while_read = vmem_join(vm, va, MIB(64), NULL);
  return vm_backend_host.read(be, dst, addr, bytes);
}

/* Pages that another call is reading are not remapped. */
static void beside_a_read(void) {
  char b;
  grow();
  fake.read = fake_read;
  OK(vmem_read(vm, &b, va + 3 * PAGE, 1));
  EQ(while_read, -EBUSY);
  EQ(remaps, 0);
  OK(vmem_join(vm, va, MIB(64), NULL));
  OK(vmem_check(vm));
  OK(vmem_close(vm));
}

MAIN(TEST(beside_a_read), TEST(one_call_per_run), TEST(part_of_a_run), TEST(failure_maps_again), TEST(lost))
