/* SPDX-License-Identifier: MIT */
/* Description: one wrong argument at a time in an otherwise valid call gives the right errno and changes nothing. */
#include "check.h"

static vmem_t vm;
static struct vmem_info info = {.size = sizeof(info)};
static uint64_t va;       /* 64 MiB; the first 4 pages mapped */
static vmem_handle h;     /* 4 pages, mapped at va */
static vmem_handle spare; /* 4 pages, not mapped */

static void set_up(void) {
  vm = open_vm(0);
  OK(vmem_query(vm, &info));
  OK(vMemReserve(vm, MIB(64), NULL, &va));
  OK(vMemCreate(vm, 4 * PAGE, NULL, &h));
  OK(vMemCreate(vm, 4 * PAGE, NULL, &spare));
  OK(vMemMap(vm, va, 4 * PAGE, h, 0, 0));
}

/* The call fails with exactly this errno, sets a message, and changes nothing. */
#define FAILS(call, code)                                                                                              \
  do {                                                                                                                 \
    struct vmem_stats a_ = stats_of(vm), b_;                                                                           \
    EQ(call, code);                                                                                                    \
    CHECK(vmem_last_error()[0]);                                                                                       \
    b_ = stats_of(vm);                                                                                                 \
    CHECK(same_state(&a_, &b_));                                                                                       \
    OK(vmem_check(vm));                                                                                                \
  } while (0)

static void reserve(void) {
  uint64_t out;
  struct vmem_reserve_opts both = {.size = sizeof(both), .flags = VMEM_RESERVE_VISIBLE | VMEM_RESERVE_PLAIN},
                           unknown = {.size = sizeof(unknown), .flags = 1u << 20},
                           odd = {.size = sizeof(odd), .align = 3 * PAGE},
                           field = {.size = sizeof(field), .reserved = 1}, tiny = {.size = 3};
  FAILS(vMemReserve(vm, 0, NULL, &out), -EINVAL);
  FAILS(vMemReserve(vm, PAGE + 1, NULL, &out), -EINVAL);
  FAILS(vMemReserve(vm, PAGE, NULL, NULL), -EINVAL);
  FAILS(vMemReserve(vm, UINT64_MAX - PAGE + 1, NULL, &out), -ENOMEM);
  FAILS(vMemReserve(vm, 1ull << 50, NULL, &out), -ENOMEM);
  FAILS(vMemReserve(vm, PAGE, &both, &out), -EINVAL);
  FAILS(vMemReserve(vm, PAGE, &unknown, &out), -EINVAL);
  FAILS(vMemReserve(vm, PAGE, &odd, &out), -EINVAL);
  FAILS(vMemReserve(vm, PAGE, &field, &out), -EINVAL);
  FAILS(vMemReserve(vm, PAGE, &tiny, &out), -EINVAL);
}

static void free_range(void) {
  FAILS(vMemFree(vm, va, 0), -EBUSY);
  FAILS(vMemFree(vm, va + PAGE, 0), -EINVAL);
  FAILS(vMemFree(vm, va + MIB(64), 0), -ENXIO);
  FAILS(vMemFree(vm, va, 8), -EINVAL);
}

static void create(void) {
  vmem_handle out;
  struct vmem_create_opts big = {.size = sizeof(big), .page_size = MIB(4)},
                          odd = {.size = sizeof(odd), .page_size = 3 * PAGE},
                          small = {.size = sizeof(small), .page_size = KIB(4)},
                          two = {.size = sizeof(two), .page_size = 2 * PAGE},
                          place = {.size = sizeof(place), .location = 9},
                          host = {.size = sizeof(host), .location = VMEM_HOST},
                          peer = {.size = sizeof(peer), .location = VMEM_PEER, .device = 1};
  FAILS(vMemCreate(vm, 0, NULL, &out), -EINVAL);
  FAILS(vMemCreate(vm, PAGE / 2, NULL, &out), -EINVAL);
  FAILS(vMemCreate(vm, PAGE, NULL, NULL), -EINVAL);
  FAILS(vMemCreate(vm, MIB(4), &big, &out), -EOPNOTSUPP);
  FAILS(vMemCreate(vm, 3 * PAGE, &odd, &out), -EOPNOTSUPP);
  FAILS(vMemCreate(vm, PAGE, &small, &out), -EOPNOTSUPP);
  FAILS(vMemCreate(vm, 3 * PAGE, &two, &out), -EINVAL);
  FAILS(vMemCreate(vm, PAGE, &place, &out), -EINVAL);
  if (!(info.caps & VMEM_CAP_HOST_PAGES)) FAILS(vMemCreate(vm, PAGE, &host, &out), -EOPNOTSUPP);
  FAILS(vMemCreate(vm, PAGE, &peer, &out), -EOPNOTSUPP);
  FAILS(vMemCreate(vm, 1ull << 50, NULL, &out), -ENOMEM);
}

static void map(void) {
  uint64_t free_va = va + MIB(8), end = va + MIB(64);
  FAILS(vMemMap(vm, free_va, 0, spare, 0, 0), -EINVAL);
  FAILS(vMemMap(vm, free_va + 1, PAGE, spare, 0, 0), -EINVAL);
  FAILS(vMemMap(vm, free_va, PAGE + 1, spare, 0, 0), -EINVAL);
  FAILS(vMemMap(vm, free_va, PAGE, spare, 1, 0), -EINVAL);
  FAILS(vMemMap(vm, free_va, PAGE, spare, 0, 2), -EINVAL);
  FAILS(vMemMap(vm, free_va, PAGE, spare, 4 * PAGE, 0), -ERANGE);
  FAILS(vMemMap(vm, free_va, 2 * PAGE, spare, 3 * PAGE, 0), -ERANGE);
  FAILS(vMemMap(vm, free_va, PAGE, spare, UINT64_MAX - PAGE + 1, 0), -EOVERFLOW);
  FAILS(vMemMap(vm, UINT64_MAX - PAGE + 1, 2 * PAGE, spare, 0, 0), -EOVERFLOW);
  FAILS(vMemMap(vm, end, PAGE, spare, 0, 0), -ENXIO);
  FAILS(vMemMap(vm, end - PAGE, 2 * PAGE, spare, 0, 0), -ENXIO);
  FAILS(vMemMap(vm, va + 3 * PAGE, PAGE, spare, 0, 0), -EEXIST);
  FAILS(vMemMap(vm, va + 2 * PAGE, 4 * PAGE, spare, 0, 0), -EEXIST);
  FAILS(vMemMap(vm, free_va, PAGE, 0, 0, 0), -EBADF);
  FAILS(vMemMap(vm, free_va, PAGE, spare + 1, 0, 0), -EBADF);
  FAILS(vMemMap(vm, free_va, PAGE, spare + (1ull << 32), 0, 0), -EBADF);
}

static void unmap(void) {
  FAILS(vMemUnmap(vm, va, 0), -EINVAL);
  FAILS(vMemUnmap(vm, va + 1, PAGE), -EINVAL);
  FAILS(vMemUnmap(vm, va + 4 * PAGE, PAGE), -EFAULT);
  FAILS(vMemUnmap(vm, va + 2 * PAGE, 4 * PAGE), -EFAULT);
  FAILS(vMemUnmap(vm, va + MIB(64), PAGE), -ENXIO);
  FAILS(vMemUnmap(vm, va, UINT64_MAX - va - PAGE + 2), -EINVAL);
}

static void handles(void) {
  vmem_t other = open_vm(0);
  vmem_handle foreign, stale, out;
  OK(vMemCreate(other, PAGE, NULL, &foreign));
  OK(vMemCreate(vm, PAGE, NULL, &stale));
  OK(vMemRelease(vm, stale));
  FAILS(vMemMap(vm, va + MIB(8), PAGE, foreign, 0, 0), -EBADF);
  FAILS(vMemRelease(vm, foreign), -EBADF);
  FAILS(vMemMap(vm, va + MIB(8), PAGE, stale, 0, 0), -EBADF);
  FAILS(vMemRelease(vm, stale), -EBADF);
  FAILS(vmem_drop(vm, stale), -EBADF);
  FAILS(vmem_handle_query(vm, stale, &(struct vmem_handle_info){.size = 64}), -EBADF);
  OK(vMemCreate(vm, PAGE, NULL, &out)); /* may reuse the stale handle's entry, but not its number */
  CHECK(out != stale);
  FAILS(vMemRelease(vm, stale), -EBADF);
  OK(vMemRelease(vm, out));
  FAILS(vmem_retain(vm, va + 4 * PAGE, PAGE, &out), -EFAULT);
  FAILS(vmem_retain(vm, va, PAGE, NULL), -EINVAL);
  FAILS(vmem_retain(vm, va, 0, &out), -EINVAL);
  OK(vmem_close(other));
  EQ(vMemCreate(other, PAGE, NULL, &out), -EBADF);
}

static void batches(void) {
  struct vmem_op good = {.op = VMEM_OP_POPULATE, .addr = va + MIB(8), .bytes = PAGE}, ops[3];
  vmem_ticket t;
  char text[64];
#define BAD(code, ...)                                                                                                 \
  do {                                                                                                                 \
    ops[0] = ops[2] = good;                                                                                            \
    ops[2].addr += MIB(1);                                                                                             \
    ops[1] = (struct vmem_op){__VA_ARGS__};                                                                            \
    FAILS(vmem_batch(vm, ops, 3, NULL, 0, 0), code);                                                                   \
    FAILS(vmem_submit(vm, ops, 3, NULL, 0, 0, &t), code);                                                              \
  } while (0)
  BAD(-EINVAL, .op = 0, .addr = va, .bytes = PAGE);
  BAD(-EINVAL, .op = 99, .addr = va, .bytes = PAGE);
  BAD(-EINVAL, .op = VMEM_OP_MAP, .flags = VMEM_OP_DIRTY, .addr = va + MIB(16), .bytes = PAGE, .handle = spare);
  BAD(-EINVAL, .op = VMEM_OP_UNMAP, .flags = 1u << 30, .addr = va, .bytes = PAGE);
  BAD(-EINVAL, .op = VMEM_OP_FILL, .addr = va, .bytes = PAGE, .value = 256);
  BAD(-EINVAL, .op = VMEM_OP_POPULATE, .addr = va + MIB(16), .bytes = 2 * PAGE, .count = 2, .stride = PAGE);
  BAD(-EINVAL, .op = VMEM_OP_POPULATE, .addr = va + MIB(16), .bytes = PAGE, .count = 2, .stride = PAGE + 1);
  BAD(-EOVERFLOW, .op = VMEM_OP_POPULATE, .addr = va + MIB(16), .bytes = PAGE, .count = 1ull << 40,
      .stride = 1ull << 40);
  BAD(-ENXIO, .op = VMEM_OP_POPULATE, .addr = va + MIB(16), .bytes = PAGE, .count = 3, .stride = MIB(32));
  BAD(-EEXIST, .op = VMEM_OP_POPULATE, .addr = va, .bytes = PAGE);
  BAD(-EBUSY, .op = VMEM_OP_POPULATE, .addr = good.addr, .bytes = PAGE); /* twice in one batch */
  BAD(-EFAULT, .op = VMEM_OP_UNMAP, .addr = va, .bytes = MIB(1));
  BAD(-EBADF, .op = VMEM_OP_MAP, .addr = va + MIB(16), .bytes = PAGE, .handle = 12345);
  BAD(-ERANGE, .op = VMEM_OP_MAP, .addr = va + MIB(16), .bytes = PAGE, .count = 5, .stride = MIB(1), .handle = spare);
  BAD(-ERANGE, .op = VMEM_OP_MAP, .addr = va + MIB(16), .bytes = PAGE, .count = 2, .stride = MIB(1), .handle = spare,
      .offset_stride = MIB(64));
  BAD(-EINVAL, .op = VMEM_OP_MAP, .addr = va + MIB(16), .bytes = PAGE, .count = 2, .stride = MIB(1), .handle = spare,
      .offset_stride = 1);
  BAD(-EOVERFLOW, .op = VMEM_OP_MAP, .addr = va + MIB(16), .bytes = PAGE, .count = 3, .stride = MIB(1), .handle = spare,
      .offset_stride = 1ull << 63);
  BAD(-EINVAL, .op = VMEM_OP_UNMAP, .addr = va, .bytes = PAGE, .offset_stride = PAGE);
  if (!(info.caps & VMEM_CAP_HOST_PAGES))
    BAD(-EOPNOTSUPP, .op = VMEM_OP_POPULATE, .addr = va + MIB(16), .bytes = PAGE, .location = VMEM_HOST);
  BAD(-EOPNOTSUPP, .op = VMEM_OP_POPULATE, .addr = va + MIB(16), .bytes = MIB(4), .page_size = MIB(4));
  BAD(-EINVAL, .op = VMEM_OP_POPULATE, .addr = va + MIB(16) + PAGE, .bytes = 2 * PAGE, .page_size = 2 * PAGE);
#undef BAD
  FAILS(vmem_batch(vm, NULL, 1, NULL, 0, 0), -EINVAL);
  FAILS(vmem_batch(vm, &good, 1, NULL, 1, 0), -EINVAL);
  FAILS(vmem_batch(vm, &good, 1, &(struct vmem_after){.kind = 77}, 1, 0), -EINVAL);
  if (!with_cuda(vm)) /* with CUDA, 1 is the legacy stream */
    FAILS(vmem_batch(vm, &good, 1, &(struct vmem_after){.kind = VMEM_AFTER_STREAM, .handle = 1}, 1, 0), -EOPNOTSUPP);
  FAILS(vmem_batch(vm, &good, 1, &(struct vmem_after){.kind = VMEM_AFTER_FD, .handle = 99999}, 1, 0), -EINVAL);
  FAILS(vmem_batch(vm, &good, 1, &(struct vmem_after){.kind = VMEM_AFTER_FD, .flags = 1}, 1, 0), -EINVAL);
  FAILS(vmem_batch(vm, &good, 1, &(struct vmem_after){.kind = VMEM_AFTER_FD, .reserved = {0, 1}}, 1, 0), -EINVAL);
  for (int i = 0; i < 2; i++) {
    struct vmem_op bad[3] = {
        good, {.op = VMEM_OP_UNMAP, .addr = va, .bytes = PAGE}, {.op = VMEM_OP_FILL, .addr = va, .bytes = PAGE}};
    bad[i].reserved[i] = 1;
    FAILS(vmem_batch(vm, bad, 3, NULL, 0, 0), -EINVAL);
    EQ(vmem_batch(vm, bad, 3, NULL, 0, 0), -EINVAL);
    snprintf(text, sizeof(text), "reserved[%d] of operation %d", i, i);
    CHECK(strstr(vmem_last_error(), text));
  }
  FAILS(vmem_batch(vm, &good, 1, NULL, 0, 1), -EINVAL);
  FAILS(vmem_submit(vm, &good, 1, NULL, 0, 1u << 31, &t), -EINVAL);
  FAILS(vmem_submit(vm, &good, 1, NULL, 0, 0, NULL), -EINVAL);
  FAILS(vmem_wait(vm, 0, 0), -EBADF);
  FAILS(vmem_wait(vm, 1u << 30, 0), -EBADF);
  FAILS(vmem_order(vm, 1u << 30, 0), -EBADF);
  FAILS(vmem_ticket_drop(vm, 1u << 30), -EBADF);
}

static void contents(void) {
  char b[8];
  FAILS(vmem_read(vm, b, va, 0), -EINVAL);
  FAILS(vmem_read(vm, NULL, va, 8), -EINVAL);
  FAILS(vmem_read(vm, b, va + MIB(64), 8), -ENXIO);
  FAILS(vmem_read(vm, b, va + MIB(1), 8), -EFAULT);
  FAILS(vmem_write(vm, UINT64_MAX - 3, b, 8), -EOVERFLOW);
  FAILS(vmem_fill(vm, va + 4 * PAGE, PAGE, 0), -EFAULT);
  FAILS(vmem_copy(vm, va, va + MIB(1), 8), -EFAULT);
}

static void others(void) {
  struct vmem_info small = {.size = 1};
  FAILS(vmem_query(vm, &small), -EINVAL);
  FAILS(vmem_query(vm, NULL), -EINVAL);
  FAILS(vmem_inject(vm, 1u << 30, 0, 1, EIO), -EINVAL);
  FAILS(vmem_inject(vm, VMEM_INJECT_MAP, 0, 1, 0), -EINVAL);
  FAILS(vmem_join(vm, va + 1, PAGE, NULL), -EINVAL);
  FAILS(vmem_range_query(vm, va + MIB(64), &(struct vmem_range_info){.size = 64}), -ENXIO);
  EQ(vmem_query(0, &small), -EBADF);
  EQ(vmem_query(vm + 1, &small), -EBADF);
}

static void opening(void) {
  vmem_t out;
  struct vmem_open_opts o;
#define OPEN(code, ...)                                                                                                \
  do {                                                                                                                 \
    o = (struct vmem_open_opts){.size = sizeof(o), .backend = backend(), __VA_ARGS__};                                 \
    EQ(vmem_open(&o, &out), code);                                                                                     \
    CHECK(vmem_last_error()[0]);                                                                                       \
  } while (0)
  OPEN(-EINVAL, .flags = 1u << 9);
  OPEN(-EINVAL, .num_devices = VMEM_MAX_DEVICES + 1);
  OPEN(-EINVAL, .num_devices = 2, .devices = {0, 0});
  OPEN(on_host() ? -EINVAL : -ENODEV, .num_devices = 2, .devices = {0, 77});
  OPEN(-EINVAL, .granule = 3 * PAGE);
  OPEN(-EOPNOTSUPP, .granule = MIB(4));
  OPEN(-EOPNOTSUPP, .granule = 512);
  OPEN(-EINVAL, .slab_size = 5 * MIB(1));
  OPEN(-EINVAL, .granule = PAGE, .slab_size = KIB(4));
#undef OPEN
  o = (struct vmem_open_opts){.size = sizeof(o), .backend = "floppy"};
  EQ(vmem_open(&o, &out), -EINVAL);
  CHECK(strstr(vmem_last_error(), "unknown back end \"floppy\"; known are auto, uvm, stock, cuda, host"));
  o = (struct vmem_open_opts){.size = 1};
  EQ(vmem_open(&o, &out), -EINVAL);
  EQ(vmem_open(&o, NULL), -EINVAL);
}

static void tear_down(void) {
  OK(vmem_check(vm));
  OK(vmem_close(vm));
}

MAIN(TEST(set_up), TEST(reserve), TEST(free_range), TEST(create), TEST(map), TEST(unmap), TEST(handles), TEST(batches),
     TEST(contents), TEST(others), TEST(opening), TEST(tear_down))
