/* SPDX-License-Identifier: MIT */
/* Description: handles gathered from several ranges, and dropping parts of handles. */
#include "api/api.h"
#include "check.h"

static vmem_t vm;
static uint64_t va;

static void start(void) {
  vm = open_vm(0);
  if (vMemReserve(vm, MIB(16), NULL, &va)) printf("no reservation: %s\n", vmem_last_error());
}

#define FAILS(call, code)                                                                                              \
  do {                                                                                                                 \
    EQ(call, code);                                                                                                    \
    OK(vmem_check(vm));                                                                                                \
  } while (0)

/* Three "tensors" 2 MiB apart of which pages 1 and 2 are gathered, then mapped elsewhere by one operation. */
static void gathered_and_mapped_again(void) {
  struct vmem_op op = {.op = VMEM_OP_POPULATE, .bytes = 4 * PAGE, .count = 3, .stride = MIB(2)};
  struct vmem_handle_info info = {.size = sizeof(info)};
  vmem_handle h;
  start();
  op.addr = va;
  OK(vmem_batch(vm, &op, 1, NULL, 0, 0));
  for (int i = 0; i < 12; i++) PUT(va + (uint64_t)(i / 4) * MIB(2) + (uint64_t)(i % 4) * PAGE, i + 1);
  OK(vmem_gather(vm, va + PAGE, 2 * PAGE, 3, MIB(2), &h));
  OK(vmem_handle_query(vm, h, &info));
  EQ(info.bytes, 6 * PAGE);
  EQ(stats_of(vm).used_bytes, 12 * PAGE);
  op = (struct vmem_op){.op = VMEM_OP_MAP,
                        .flags = VMEM_OP_READONLY,
                        .addr = va + MIB(8),
                        .bytes = 2 * PAGE,
                        .count = 3,
                        .stride = MIB(1),
                        .handle = h};
  OK(vmem_batch(vm, &op, 1, NULL, 0, 0));
  for (int i = 0; i < 3; i++) {
    EQ(GET(va + MIB(8) + (uint64_t)i * MIB(1)), 4 * i + 2);
    EQ(GET(va + MIB(8) + (uint64_t)i * MIB(1) + PAGE), 4 * i + 3);
  }
  /* Maps only part of each piece: these pages are not adjacent in the handle. */
  op.addr += 4 * PAGE, op.bytes = PAGE, op.offset = PAGE, op.offset_stride = 2 * PAGE;
  OK(vmem_batch(vm, &op, 1, NULL, 0, 0));
  for (int i = 0; i < 3; i++) EQ(GET(op.addr + (uint64_t)i * MIB(1)), 4 * i + 3);
  OK(vmem_check(vm));
  OK(vMemUnmap(vm, va, 4 * PAGE));
  EQ(stats_of(vm).used_bytes, 10 * PAGE);
  EQ(GET(va + MIB(8)), 2);
  OK(vmem_check(vm));
  OK(vmem_drop(vm, h));
  EQ(stats_of(vm).used_bytes, 10 * PAGE);
  OK(vmem_close(vm));
}

static void parts_given_back(void) {
  vmem_handle h;
  struct vmem_handle_info info = {.size = sizeof(info)};
  struct vmem_op op = {.op = VMEM_OP_MAP, .bytes = PAGE};
  start();
  OK(vMemCreate(vm, 8 * PAGE, NULL, &h));
  OK(vMemMap(vm, va, 8 * PAGE, h, 0, 0));
  for (int i = 0; i < 8; i++) PUT(va + (uint64_t)i * PAGE, 10 + i);
  OK(vMemUnmap(vm, va, 8 * PAGE));
  OK(vmem_drop_range(vm, h, PAGE, PAGE, 2, 4 * PAGE)); /* pages 1 and 5 */
  EQ(stats_of(vm).used_bytes, 6 * PAGE);
  OK(vmem_check(vm));
  OK(vmem_handle_query(vm, h, &info));
  EQ(info.bytes, 8 * PAGE);
  FAILS(vmem_drop_range(vm, h, 4 * PAGE, 2 * PAGE, 0, 0), -ERANGE);
  FAILS(vMemMap(vm, va, 2 * PAGE, h, 0, 0), -ERANGE);
  op.addr = va + MIB(1);
  op.handle = h;
  op.offset = PAGE;
  FAILS(vmem_batch(vm, &op, 1, NULL, 0, 0), -ERANGE);
  OK(vMemMap(vm, va, PAGE, h, 0, 0));
  OK(vMemMap(vm, va + 2 * PAGE, 3 * PAGE, h, 2 * PAGE, 0));
  OK(vMemMap(vm, va + 6 * PAGE, 2 * PAGE, h, 6 * PAGE, 0));
  for (int i = 0; i < 8; i++)
    if (i != 1 && i != 5) EQ(GET(va + (uint64_t)i * PAGE), 10 + i);
  /* A dropped page that is mapped stays allocated until it is unmapped. */
  OK(vmem_drop_range(vm, h, 0, PAGE, 1, 0));
  OK(vmem_drop_range(vm, h, 2 * PAGE, 3 * PAGE, 1, 0));
  OK(vmem_drop_range(vm, h, 6 * PAGE, 2 * PAGE, 1, 0));
  EQ(stats_of(vm).used_bytes, 6 * PAGE);
  OK(vmem_handle_query(vm, h, &info));
  EQ(info.runs, 0);
  OK(vMemUnmap(vm, va + 2 * PAGE, 3 * PAGE));
  EQ(stats_of(vm).used_bytes, 3 * PAGE);
  OK(vmem_check(vm));
  OK(vmem_drop(vm, h));
  OK(vmem_check(vm));
  EQ(stats_of(vm).used_bytes, 3 * PAGE);
  OK(vmem_close(vm));
}

static void malformed(void) {
  vmem_handle h, out;
  struct vmem_op op = {.op = VMEM_OP_POPULATE, .bytes = 4 * PAGE};
  start();
  op.addr = va;
  OK(vmem_batch(vm, &op, 1, NULL, 0, 0));
  FAILS(vmem_gather(vm, va, PAGE, 1, 0, NULL), -EINVAL);
  FAILS(vmem_gather(vm, va, 0, 2, PAGE, &out), -EINVAL);
  FAILS(vmem_gather(vm, va, PAGE + 1, 2, 2 * PAGE, &out), -EINVAL);
  FAILS(vmem_gather(vm, va, 2 * PAGE, 2, PAGE, &out), -EINVAL);
  FAILS(vmem_gather(vm, va, PAGE, 2, PAGE + 1, &out), -EINVAL);
  FAILS(vmem_gather(vm, va, PAGE, UINT64_MAX, MIB(2), &out), -EOVERFLOW);
  FAILS(vmem_gather(vm, va, PAGE, 5, PAGE, &out), -EFAULT); /* only four are mapped */
  FAILS(vmem_gather(vm, va, PAGE, 2, MIB(64), &out), -ENXIO);
  EQ(vmem_gather(0, va, PAGE, 1, 0, &out), -EBADF);
  OK(vmem_gather(vm, va, PAGE, 0, 0, &h));
  FAILS(vmem_drop_range(vm, h, 0, 0, 1, 0), -EINVAL);
  FAILS(vmem_drop_range(vm, h, 1, PAGE, 1, 0), -EINVAL);
  FAILS(vmem_drop_range(vm, h, 0, PAGE, 2, PAGE + 1), -EINVAL);
  FAILS(vmem_drop_range(vm, h, 0, 2 * PAGE, 2, PAGE), -EINVAL);
  FAILS(vmem_drop_range(vm, h, 0, 2 * PAGE, 1, 0), -ERANGE);
  FAILS(vmem_drop_range(vm, h, PAGE, PAGE, 1, 0), -ERANGE);
  FAILS(vmem_drop_range(vm, h, 0, PAGE, UINT64_MAX, PAGE), -ERANGE);
  FAILS(vmem_drop_range(vm, h, 0 - PAGE, PAGE, 1, 0), -ERANGE);
  FAILS(vmem_drop_range(vm, h + 1, 0, PAGE, 1, 0), -EBADF);
  EQ(vmem_drop_range(0, h, 0, PAGE, 1, 0), -EBADF);
  OK(vmem_drop(vm, h));
  FAILS(vmem_drop_range(vm, h, 0, PAGE, 1, 0), -EBADF);
  OK(vmem_close(vm));
}

/* Each heap allocation fails once, and the call then changes nothing. */
static void short_of_heap(void) {
  struct vmem_op op = {.op = VMEM_OP_POPULATE, .bytes = 2 * PAGE, .count = 6, .stride = MIB(1)};
  vmem_handle h;
  int err = -ENOMEM, tries = 0;
  start();
  op.addr = va;
  OK(vmem_batch(vm, &op, 1, NULL, 0, 0));
  for (; err; tries++) {
    OK(vmem_inject(vm, VMEM_INJECT_HEAP, (uint64_t)tries, 1, ENOMEM));
    err = vmem_gather(vm, va, PAGE, 6, MIB(1), &h);
    OK(vmem_inject(vm, VMEM_INJECT_HEAP, 0, 0, 0));
    if (err) EQ(err, -ENOMEM);
    OK(vmem_check(vm));
  }
  CHECK(tries > 1);
  for (err = -ENOMEM, tries = 0; err; tries++) {
    OK(vmem_inject(vm, VMEM_INJECT_HEAP, (uint64_t)tries, 1, ENOMEM));
    err = vmem_drop_range(vm, h, PAGE, PAGE, 2, 2 * PAGE);
    OK(vmem_inject(vm, VMEM_INJECT_HEAP, 0, 0, 0));
    if (err) EQ(err, -ENOMEM);
    OK(vmem_check(vm));
  }
  EQ(tries, 3);
  OK(vmem_close(vm));
}

MAIN(TEST(gathered_and_mapped_again), TEST(parts_given_back), TEST(malformed), TEST(short_of_heap))
