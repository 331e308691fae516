/* SPDX-License-Identifier: MIT */
/*
 * Description: pages with old contents are zeroed once, before anyone sees them, and never after.
 *
 * A page is "dirty" here because the host back end was made to fail when it should have discarded it; on a
 * GPU every page is that was used before.
 */
#include <sys/eventfd.h>
#include <unistd.h>

#include "check.h"

enum { PAGES = 4 };

static vmem_t vm;
static uint64_t va;

/* A pool of one slab that is dirty all over. */
static void open_dirty(void) {
  struct vmem_open_opts o = {.size = sizeof(o), .slab_size = PAGES * PAGE, .mem_limit = PAGES * PAGE,
                             .pool_high = VMEM_KEEP_ALL};
  struct vmem_op op = {.op = VMEM_OP_POPULATE, .bytes = PAGES * PAGE};
  OK(open_opts(&o, &vm));
  OK(vMemReserve(vm, MIB(8), NULL, &va));
  op.addr = va;
  OK(vmem_batch(vm, &op, 1, NULL, 0, 0));
  OK(vmem_fill(vm, va, PAGES * PAGE, 0xdd));
  OK(vmem_inject(vm, VMEM_INJECT_SLAB, 0, 1, EIO));
  OK(vMemUnmap(vm, va, PAGES * PAGE));
  OK(vmem_inject(vm, 0, 0, 0, 0));
  EQ(stats_of(vm).free_bytes, PAGES * PAGE);
}

static bool all(uint64_t addr, uint64_t bytes, int value) {
  for (uint64_t i = 0; i < bytes; i += 4096)
    if (GET(addr + i) != value) return false;
  return true;
}

/* A map that fails half-way leaves what it did not reach as dirty as it was. */
static void after_a_failed_map(void) {
  vmem_handle h, in_the_way;
  open_dirty();
  OK(vMemCreate(vm, 2 * PAGE, NULL, &h));
  OK(vMemCreate(vm, PAGE, NULL, &in_the_way));
  OK(vMemMap(vm, va + PAGE, PAGE, in_the_way, 0, 0));
  EQ(vMemMap(vm, va, 2 * PAGE, h, 0, 0), -EEXIST);
  OK(vMemMap(vm, va + MIB(1), 2 * PAGE, h, 0, 0));
  CHECK(all(va + MIB(1), 2 * PAGE, 0));
  OK(vmem_check(vm));
  OK(vmem_close(vm));
}

/* A map that fails on another batch's pages leaves those as they are. */
static void a_failed_map_and_another_batch(void) {
  int fd = eventfd(0, EFD_CLOEXEC);
  struct vmem_after after = {.kind = VMEM_AFTER_FD, .handle = (uint64_t)fd};
  uint64_t one = 1;
  vmem_handle h, theirs, again;
  vmem_ticket t;
  struct vmem_op op = {.op = VMEM_OP_MAP, .bytes = PAGE};
  open_dirty();
  OK(vMemCreate(vm, PAGE, NULL, &theirs));
  OK(vMemCreate(vm, 2 * PAGE, NULL, &h));
  op.addr = va + PAGE;
  op.handle = theirs;
  OK(vmem_submit(vm, &op, 1, &after, 1, 0, &t));
  EQ(vMemMap(vm, va, 2 * PAGE, h, 0, 0), -EBUSY);
  EQ(write(fd, &one, 8), 8);
  OK(vmem_wait(vm, t, -1));
  CHECK(all(va + PAGE, PAGE, 0));
  OK(vmem_fill(vm, va + PAGE, PAGE, 7));
  OK(vmem_retain(vm, va + PAGE, PAGE, &again));
  OK(vMemMap(vm, va + MIB(1), PAGE, again, 0, 0));
  CHECK(all(va + PAGE, PAGE, 7));
  OK(vmem_close(vm));
  close(fd);
}

/* While one batch is about to zero a page, no other maps it: it would show what is there still, and lose
 * what is written to it. Other pages of the handle are free to be mapped. */
static void two_batches_one_page(void) {
  int fd = eventfd(0, EFD_CLOEXEC);
  struct vmem_after after = {.kind = VMEM_AFTER_FD, .handle = (uint64_t)fd};
  uint64_t one = 1;
  vmem_handle h;
  vmem_ticket t;
  struct vmem_op op = {.op = VMEM_OP_MAP, .bytes = 2 * PAGE};
  open_dirty();
  OK(vMemCreate(vm, 4 * PAGE, NULL, &h));
  op.addr = va;
  op.handle = h;
  OK(vmem_submit(vm, &op, 1, &after, 1, 0, &t));
  EQ(vMemMap(vm, va + MIB(1), 2 * PAGE, h, PAGE, 0), -EBUSY);
  OK(vMemMap(vm, va + MIB(1), PAGE, h, 2 * PAGE, 0));
  CHECK(all(va + MIB(1), PAGE, 0));
  EQ(write(fd, &one, 8), 8);
  OK(vmem_wait(vm, t, -1));
  OK(vmem_fill(vm, va, 2 * PAGE, 7));
  OK(vMemMap(vm, va + MIB(2), 3 * PAGE, h, PAGE, 0));
  CHECK(all(va, 2 * PAGE, 7) && all(va + MIB(2), PAGE, 7) && all(va + MIB(2) + PAGE, 2 * PAGE, 0));
  OK(vmem_check(vm));
  OK(vmem_close(vm));
  close(fd);
}

/* One batch may map a dirty page twice, and is zeroed once; when it is cancelled the page is dirty again. */
static void twice_in_one_batch(void) {
  vmem_handle h;
  struct vmem_op op[2] = {{.op = VMEM_OP_MAP, .bytes = 2 * PAGE}, {.op = VMEM_OP_MAP, .bytes = PAGE, .flags = VMEM_OP_READONLY}};
  open_dirty();
  OK(vMemCreate(vm, 2 * PAGE, NULL, &h));
  op[0].addr = va;
  op[1].addr = va + MIB(1);
  op[0].handle = op[1].handle = h;
  OK(vmem_inject(vm, VMEM_INJECT_MAP, 1, 1, EIO));
  EQ(vmem_batch(vm, op, 2, NULL, 0, 0), -EIO);
  OK(vmem_batch(vm, op, 2, NULL, 0, 0));
  CHECK(all(va, 2 * PAGE, 0) && all(va + MIB(1), PAGE, 0));
  OK(vmem_check(vm));
  OK(vmem_close(vm));
}

/* Read-only pages are zeroed through a writable mapping first; what fails later makes them dirty again or not,
 * but never shows old contents. */
static void read_only(void) {
  for (uint64_t nth = 0; nth < 3; nth++) {
    vmem_handle h;
    open_dirty();
    OK(vMemCreate(vm, 2 * PAGE, NULL, &h));
    OK(vmem_inject(vm, VMEM_INJECT_MAP | VMEM_INJECT_UNMAP | VMEM_INJECT_FILL, nth, 1, EIO));
    EQ(vMemMap(vm, va, 2 * PAGE, h, 0, VMEM_MAP_READONLY), -EIO);
    OK(vMemMap(vm, va, 2 * PAGE, h, 0, VMEM_MAP_READONLY));
    CHECK(all(va, 2 * PAGE, 0));
    OK(vmem_check(vm));
    OK(vmem_close(vm));
  }
}

MAIN(TEST(after_a_failed_map), TEST(a_failed_map_and_another_batch), TEST(two_batches_one_page), TEST(twice_in_one_batch),
     TEST(read_only))
