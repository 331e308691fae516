/* SPDX-License-Identifier: MIT */
/* Description: a driver call that leaves its range in an unknown state: the range is quarantined, the rest undone. */
#include "api/api.h"
#include "check.h"

static struct vm_backend fake;
static int maps_left, unmaps_left;

static int fake_map(void *be, uint64_t addr, uint64_t bytes, uint64_t slab, uint64_t offset, uint32_t flags,
                    bool sparse) {
  if (maps_left-- == 0) return vm_fail_at(-ENOTRECOVERABLE, addr, bytes, 0, "mapped on some devices only");
  return vm_backend_host.map(be, addr, bytes, slab, offset, flags, sparse);
}

static int fake_unmap(void *be, uint64_t addr, uint64_t bytes, bool sparse) {
  if (unmaps_left-- == 0) return vm_fail_at(-ENOTRECOVERABLE, addr, bytes, 0, "unmapped on some devices only");
  return vm_backend_host.unmap(be, addr, bytes, sparse);
}

static vmem_t open_fake(void) {
  vmem_t vm = open_host(0);
  int err;
  struct vm_ctx *c = vm_get(vm, "test", &err);
  fake = vm_backend_host;
  fake.map = fake_map;
  fake.unmap = fake_unmap;
  c->be = &fake;
  vm_put(c);
  maps_left = unmaps_left = 1000;
  return vm;
}

static void maps(void) {
  for (int nth = 0; nth < 4; nth++) {
    vmem_t vm = open_fake();
    uint64_t va;
    struct vmem_op op = {.op = VMEM_OP_POPULATE, .bytes = 2 * PAGE, .count = 4, .stride = MIB(1)};
    OK(vMemReserve(vm, MIB(8), NULL, &va));
    op.addr = va;
    maps_left = nth;
    EQ(vmem_batch(vm, &op, 1, NULL, 0, 0), -ENOTRECOVERABLE);
    EQ(stats_of(vm).quarantined_bytes, 2 * PAGE);
    EQ(stats_of(vm).mapped_bytes, 0);
    EQ(stats_of(vm).used_bytes, 0);
    EQ(vMemUnmap(vm, va + nth * MIB(1), PAGE), -ENOTRECOVERABLE);
    OK(vmem_check(vm));
    op.count = 1;
    op.addr = va + MIB(6);
    OK(vmem_batch(vm, &op, 1, NULL, 0, 0));
    OK(vmem_close(vm));
  }
}

static void unmaps(void) {
  for (int nth = 0; nth < 4; nth++) {
    vmem_t vm = open_fake();
    uint64_t va;
    struct vmem_op op = {.op = VMEM_OP_POPULATE, .bytes = 2 * PAGE, .count = 4, .stride = MIB(1)};
    OK(vMemReserve(vm, MIB(8), NULL, &va));
    op.addr = va;
    OK(vmem_batch(vm, &op, 1, NULL, 0, 0));
    for (int i = 0; i < 4; i++) BYTE(va + i * MIB(1)) = (unsigned char)(1 + i);
    op.op = VMEM_OP_UNMAP;
    unmaps_left = nth;
    EQ(vmem_batch(vm, &op, 1, NULL, 0, 0), -ENOTRECOVERABLE);
    EQ(stats_of(vm).quarantined_bytes, 2 * PAGE);
    EQ(stats_of(vm).mapped_bytes, 6 * PAGE);
    for (int i = 0; i < 4; i++)
      if (i != nth) EQ(BYTE(va + i * MIB(1)), 1 + i); /* mapped again */
    OK(vmem_check(vm));
    OK(vmem_close(vm));
  }
}

/* The whole block that is being split is lost; the other block, which was split before, is restored. */
static void splits(void) {
  struct vmem_open_opts o = {.size = sizeof(o), .backend = "host", .flags = VMEM_OPEN_LARGE_ENTRIES};
  for (int nth = 0; nth < 6; nth++) {
    struct vmem_op op = {.op = VMEM_OP_POPULATE, .bytes = MIB(2), .count = 2, .stride = MIB(4)};
    struct vmem_range_info r = {.size = sizeof(r)};
    bool second = nth == 1 || nth > 3;
    struct vm_ctx *c;
    uint64_t va;
    vmem_t vm;
    int err;
    OK(vmem_open(&o, &vm));
    CHECK(c = vm_get(vm, "test", &err));
    fake = *c->be;
    fake.map = fake_map;
    fake.unmap = fake_unmap;
    c->be = &fake;
    vm_put(c);
    maps_left = unmaps_left = 1000;
    OK(vMemReserve(vm, MIB(8), NULL, &va));
    op.addr = va;
    OK(vmem_batch(vm, &op, 1, NULL, 0, 0));
    op = (struct vmem_op){
        .op = VMEM_OP_UNMAP, .flags = VMEM_OP_SPLIT, .addr = va + PAGE, .bytes = PAGE, .count = 2, .stride = MIB(4)};
    *(nth < 2 ? &unmaps_left : &maps_left) = nth < 2 ? nth : nth - 2; /* two maps for each block */
    EQ(vmem_batch(vm, &op, 1, NULL, 0, 0), -ENOTRECOVERABLE);
    maps_left = unmaps_left = 1000;
    EQ(stats_of(vm).quarantined_bytes, MIB(2));
    EQ(stats_of(vm).mapped_bytes, MIB(2));
    EQ(stats_of(vm).large_entries, 1);
    OK(vmem_range_query(vm, va + (second ? MIB(4) : 0) + 9 * PAGE, &r));
    EQ(r.flags & VMEM_RANGE_QUARANTINED, VMEM_RANGE_QUARANTINED);
    OK(vmem_check(vm));
    EQ(vMemUnmap(vm, va + (second ? 0 : MIB(4)) + PAGE, PAGE), -EINVAL);
    OK(vMemUnmap(vm, va + (second ? 0 : MIB(4)), MIB(2)));
    OK(vmem_check(vm));
    OK(vmem_close(vm));
  }
}

MAIN(TEST(splits), TEST(maps), TEST(unmaps))
