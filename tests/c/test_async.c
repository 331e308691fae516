/* SPDX-License-Identifier: MIT */
/* Description: submitted batches: results, order after external work, shortages at submit or later, limits, close. */
#include <pthread.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "api/api.h"
#include "check.h"

static void many(void) {
  vmem_t vm = open_vm(0);
  uint64_t va;
  vmem_ticket t[100];
  OK(vMemReserve(vm, MIB(64), NULL, &va));
  for (int i = 0; i < 100; i++) {
    struct vmem_op op = populate(va + i * 2 * PAGE, PAGE);
    OK(vmem_submit(vm, &op, 1, NULL, 0, 0, &t[i]));
    if (i) CHECK(t[i] > t[i - 1]);
  }
  for (int i = 99; i >= 0; i--) OK(vmem_wait(vm, t[i], -1));
  for (int i = 0; i < 100; i++) PUT(va + i * 2 * PAGE, 1);
  OK(vmem_order(vm, t[7], 0));
  EQ(stats_of(vm).mapped_bytes, 100 * PAGE);
  EQ(stats_of(vm).pending, 0);
  CHECK(stats_of(vm).worker_driver_ns > 0);
  OK(vmem_check(vm));
  OK(vmem_close(vm));
}

/* Nothing is unmapped, filled or reused before the work has completed; other batches run in the meantime. */
static void waits_for_work(void) {
  vmem_t vm = open_vm(0);
  uint64_t va;
  struct vmem_op ops[2];
  struct vmem_after a;
  struct vmem_range_info r = {.size = sizeof(r)};
  vmem_ticket unmap, fill, other;
  int fd = eventfd(0, EFD_CLOEXEC), fd2 = eventfd(0, EFD_CLOEXEC);
  OK(vMemReserve(vm, MIB(64), NULL, &va));
  ops[0] = populate(va, 4 * PAGE);
  OK(vmem_batch(vm, ops, 1, NULL, 0, 0));
  OK(vmem_fill(vm, va, 4 * PAGE, 7));
  a = after_fd(fd);
  ops[0] = (struct vmem_op){.op = VMEM_OP_UNMAP, .addr = va, .bytes = PAGE};
  OK(vmem_submit(vm, ops, 1, &a, 1, 0, &unmap));
  ops[0] = (struct vmem_op){.op = VMEM_OP_FILL, .addr = va + 2 * PAGE, .bytes = PAGE, .value = 8};
  a = after_fd(fd2);
  OK(vmem_submit(vm, ops, 1, &a, 1, 0, &fill));
  close(fd2); /* the library has its own descriptor, but nothing can signal it: cancelled at close */
  ops[0] = populate(va + MIB(1), PAGE);
  OK(vmem_submit(vm, ops, 1, NULL, 0, 0, &other));
  OK(vmem_wait(vm, other, -1));
  EQ(vmem_wait(vm, unmap, 0), -ETIMEDOUT);
  EQ(vmem_wait(vm, unmap, 20000000), -ETIMEDOUT);
  EQ(touch(vm, va, false), 7);
  EQ(touch(vm, va + 2 * PAGE, false), 7);
  OK(vmem_range_query(vm, va, &r));
  CHECK(r.flags & VMEM_RANGE_BUSY);
  EQ(vMemUnmap(vm, va, PAGE), -EBUSY);
  EQ(vMemFree(vm, va, VMEM_FREE_UNMAP), -EBUSY);
  OK(vmem_check(vm));
  fire(fd);
  OK(vmem_wait(vm, unmap, -1));
  OK(vmem_range_query(vm, va, &r));
  EQ(r.flags & VMEM_RANGE_MAPPED, 0);
  EQ(touch(vm, va + 2 * PAGE, false), 7);
  OK(vmem_check(vm));
  OK(vmem_close(vm));
  close(fd);
}

static void synchronous_batch_waits(void) {
  vmem_t vm = open_vm(0);
  uint64_t va;
  struct vmem_op op;
  struct vmem_after a;
  int fd = eventfd(1, EFD_CLOEXEC); /* over already */
  OK(vMemReserve(vm, MIB(2), NULL, &va));
  op = populate(va, PAGE);
  a = after_fd(fd);
  OK(vmem_batch(vm, &op, 1, &a, 1, 0));
  PUT(va, 1);
  OK(vmem_close(vm));
  close(fd);
}

static void shortage_at_submit(void) {
  struct vmem_open_opts o = {.size = sizeof(o), .mem_limit = MIB(2)};
  vmem_t vm;
  uint64_t va;
  struct vmem_op op;
  struct vmem_after a;
  struct vmem_stats before, after;
  vmem_ticket first, second;
  int fd = eventfd(0, EFD_CLOEXEC);
  OK(open_opts(&o, &vm));
  OK(vMemReserve(vm, MIB(64), NULL, &va));
  op = populate(va, MIB(2) - PAGE);
  OK(vmem_submit(vm, &op, 1, NULL, 0, 0, &first));
  before = stats_of(vm);
  op = populate(va + MIB(8), 2 * PAGE);
  EQ(vmem_submit(vm, &op, 1, NULL, 0, 0, &second), -ENOMEM); /* whether or not the first has run */
  OK(vmem_wait(vm, first, -1));
  before.mapped_bytes = MIB(2) - PAGE;
  before.pending = 0;
  after = stats_of(vm);
  before.segments = after.segments;
  CHECK(same_state(&before, &after));
  /* Pages of a queued unmap cannot be allocated before it has run. */
  op = (struct vmem_op){.op = VMEM_OP_UNMAP, .addr = va, .bytes = 4 * PAGE};
  a = after_fd(fd);
  OK(vmem_submit(vm, &op, 1, &a, 1, 0, &first));
  op = populate(va + MIB(8), 2 * PAGE);
  EQ(vmem_submit(vm, &op, 1, NULL, 0, 0, &second), -ENOMEM);
  fire(fd);
  OK(vmem_wait(vm, first, -1));
  OK(vmem_submit(vm, &op, 1, NULL, 0, 0, &second));
  OK(vmem_wait(vm, second, -1));
  OK(vmem_check(vm));
  OK(vmem_close(vm));
  close(fd);
}

static void failures_reach_the_waiter(void) {
  vmem_t vm = open_vm(0);
  uint64_t va;
  struct vmem_op op;
  struct vmem_stats before, after;
  struct vmem_error e = {.size = sizeof(e)};
  vmem_ticket t;
  OK(vMemReserve(vm, MIB(2), NULL, &va));
  OK(vmem_warm(vm, MIB(1)));
  before = stats_of(vm);
  OK(vmem_inject(vm, VMEM_INJECT_MAP, 0, 1, EIO));
  op = populate(va, PAGE);
  OK(vmem_submit(vm, &op, 1, NULL, 0, 0, &t));
  EQ(vmem_wait(vm, t, -1), -EIO);
  OK(vmem_get_error(&e));
  EQ(strcmp(e.op, "vmem_wait"), 0);
  CHECK(strstr(e.text, "injected"));
  EQ(vmem_wait(vm, t, 0), -EIO); /* every time */
  EQ(vmem_order(vm, t, 0), -EIO);
  after = stats_of(vm);
  after.slab_bytes = before.slab_bytes; /* the cancelled batch may have shrunk the pool */
  after.free_bytes = before.free_bytes;
  after.slabs = before.slabs;
  CHECK(same_state(&before, &after));
  OK(vmem_submit(vm, &op, 1, NULL, 0, 0, &t));
  OK(vmem_wait(vm, t, -1));
  OK(vmem_check(vm));
  OK(vmem_close(vm));
}

static void close_wakes_waiters(void) {
  struct waiter w = {.vm = open_vm(0)};
  uint64_t va;
  struct vmem_op op;
  struct vmem_after a;
  pthread_t thread;
  int fd = eventfd(0, EFD_CLOEXEC);
  OK(vMemReserve(w.vm, MIB(2), NULL, &va));
  op = populate(va, PAGE);
  a = after_fd(fd);
  OK(vmem_submit(w.vm, &op, 1, &a, 1, 0, &w.t));
  EQ(pthread_create(&thread, NULL, wait_thread, &w), 0);
  usleep(20000);
  OK(vmem_close(w.vm));
  pthread_join(thread, NULL);
  EQ(w.ret, -EBADF);
  close(fd);
}

static void low_watermark(void) {
  struct vmem_open_opts o = {.size = sizeof(o), .pool_low = MIB(100)};
  vmem_t vm;
  uint64_t va;
  struct vmem_op op;
  vmem_ticket t;
  OK(open_opts(&o, &vm));
  OK(vMemReserve(vm, MIB(2), NULL, &va));
  op = populate(va, PAGE);
  OK(vmem_submit(vm, &op, 1, NULL, 0, 0, &t));
  for (int i = 0; i < 1000 && stats_of(vm).free_bytes < MIB(100); i++) usleep(5000);
  CHECK(stats_of(vm).free_bytes >= MIB(100));
  OK(vmem_close(vm));
}

/* Submit checks the arguments and copies the operations. If the pool has the pages, the worker does everything else
 * when it starts the batch. */
static void late(void) {
  struct vmem_open_opts o = {.size = sizeof(o), .mem_limit = MIB(2)};
  vmem_t vm;
  uint64_t va;
  struct vmem_op ops[2];
  struct vmem_after a;
  struct vmem_error e = {.size = sizeof(e)};
  struct vmem_stats before, after;
  vmem_ticket t, u;
  int fd = eventfd(0, EFD_CLOEXEC);
  OK(open_opts(&o, &vm));
  OK(vMemReserve(vm, MIB(64), NULL, &va));
  OK(vmem_warm(vm, MIB(2)));
  ops[0] = populate(va, 2 * PAGE);
  ops[1] = populate(va + MIB(8) + 1, PAGE);
  EQ(vmem_submit(vm, ops, 2, NULL, 0, VMEM_SUBMIT_LATE, &t), -EINVAL);
  ops[1] = populate(va + MIB(8), PAGE);
  ops[1].reserved[1] = 1;
  EQ(vmem_submit(vm, ops, 2, NULL, 0, VMEM_SUBMIT_LATE, &t), -EINVAL);
  ops[1] = populate(va + MIB(64), PAGE);
  EQ(vmem_submit(vm, ops, 2, NULL, 0, VMEM_SUBMIT_LATE, &t), -ENXIO);
  EQ(stats_of(vm).pending, 0);
  EQ(stats_of(vm).tickets, 0);
  ops[1] = populate(va + MIB(8), PAGE);
  OK(vmem_submit(vm, ops, 2, NULL, 0, VMEM_SUBMIT_LATE, &t));
  memset(ops, 0xff, sizeof(ops));
  OK(vmem_wait(vm, t, -1));
  PUT(va + PAGE, 1);
  PUT(va + MIB(8), 1);
  EQ(stats_of(vm).mapped_bytes, 3 * PAGE);
  /* Conflicts and shortages change nothing. */
  before = stats_of(vm);
  ops[0] = populate(va + MIB(16), PAGE);
  ops[1] = populate(va + PAGE, PAGE);
  OK(vmem_submit(vm, ops, 2, NULL, 0, VMEM_SUBMIT_LATE, &u));
  EQ(vmem_wait(vm, u, -1), -EEXIST);
  OK(vmem_get_error(&e));
  EQ(e.addr, va + PAGE);
  OK(vmem_ticket_drop(vm, u));
  ops[1] = populate(va + MIB(32), MIB(2));
  EQ(vmem_submit(vm, ops, 2, NULL, 0, VMEM_SUBMIT_LATE, &u), -ENOMEM); /* reported at submit: the pool has less */
  after = stats_of(vm);
  CHECK(same_state(&before, &after));
  OK(vmem_check(vm));
  /* The batch starts after earlier ones, and its range is busy while it waits for external work. */
  a = after_fd(fd);
  ops[0] = (struct vmem_op){.op = VMEM_OP_UNMAP, .addr = va, .bytes = PAGE};
  OK(vmem_submit(vm, ops, 1, &a, 1, VMEM_SUBMIT_LATE, &t));
  ops[0] = populate(va, PAGE);
  OK(vmem_submit(vm, ops, 1, NULL, 0, VMEM_SUBMIT_LATE, &u));
  EQ(vmem_wait(vm, u, -1), -EEXIST);
  EQ(vMemUnmap(vm, va, PAGE), -EBUSY);
  fire(fd);
  OK(vmem_wait(vm, t, -1));
  OK(vmem_submit(vm, ops, 1, NULL, 0, VMEM_SUBMIT_LATE | VMEM_SUBMIT_DETACHED, NULL));
  OK(vmem_submit(vm, NULL, 0, NULL, 0, VMEM_SUBMIT_LATE, &t));
  OK(vmem_wait(vm, t, -1));
  EQ(GET(va), 0);
  OK(vmem_check(vm));
  OK(vmem_close(vm));
  close(fd);
}

/* The context is closed while late batches have not started; one waits for a descriptor that is never signalled. */
static void late_and_closed(void) {
  for (int i = 0; i < 20; i++) {
    vmem_t vm = open_vm(0);
    int fd = eventfd(0, EFD_CLOEXEC);
    struct vmem_after a = after_fd(fd);
    uint64_t va;
    OK(vMemReserve(vm, MIB(64), NULL, &va));
    OK(vmem_warm(vm, MIB(i)));
    for (int k = 0; k < 50; k++) {
      struct vmem_op op = populate(va + k * MIB(1), 4 * PAGE);
      OK(vmem_submit(vm, &op, 1, &a, k == 25, VMEM_SUBMIT_LATE | VMEM_SUBMIT_DETACHED, NULL));
    }
    OK(vmem_close(vm));
    close(fd);
  }
}

/* A late batch that fails anywhere, at submit or later, leaves nothing behind. */
static void late_nth(void) {
  static const uint32_t kinds[] = {VMEM_INJECT_HEAP, VMEM_INJECT_SLAB, VMEM_INJECT_MAP, VMEM_INJECT_HEAP,
                                   VMEM_INJECT_MAP};
  for (size_t k = 0; k < sizeof(kinds) / sizeof(kinds[0]); k++) {
    bool done = false, warm = k > 2;
    int failed = 0;
    for (uint64_t nth = 0; !done; nth++) {
      struct vmem_open_opts o = {.size = sizeof(o), .pool_high = VMEM_KEEP_ALL};
      vmem_t vm;
      struct vmem_op ops[2];
      vmem_ticket t;
      uint64_t va;
      int err, why = kinds[k] == VMEM_INJECT_HEAP ? ENOMEM : EIO;
      OK(open_opts(&o, &vm));
      if (warm) OK(vmem_warm(vm, MIB(2)));
      OK(vMemReserve(vm, MIB(64), NULL, &va));
      ops[0] = populate(va, PAGE);
      ops[1] = populate(va + MIB(1), PAGE);
      ops[1].count = 16;
      ops[1].stride = MIB(2);
      OK(vmem_inject(vm, kinds[k], nth, 1, why));
      if (!(err = vmem_submit(vm, ops, 2, NULL, 0, VMEM_SUBMIT_LATE, &t))) err = vmem_wait(vm, t, -1);
      done = !err;
      failed += !done;
      OK(vmem_inject(vm, 0, 0, 0, 0));
      if (err) EQ(err, -why);
      EQ(stats_of(vm).mapped_bytes, done ? 17 * PAGE : 0);
      EQ(stats_of(vm).used_bytes, done ? 17 * PAGE : 0);
      OK(vmem_check(vm));
      OK(vmem_close(vm));
    }
    CHECK(failed > 0);
  }
}

/* If memory cannot be allocated, the worker retries when more pages have been taken, not each time it polls the waiting
 * batches. */
static void low_watermark_out_of_reach(void) {
  struct vmem_open_opts o = {.size = sizeof(o), .pool_low = MIB(100), .mem_limit = MIB(400)};
  const uint64_t many = 1u << 20;
  int fd = eventfd(0, EFD_CLOEXEC), err;
  struct vmem_after a = after_fd(fd);
  struct vm_ctx *c;
  struct vmem_op op;
  uint64_t va, left, one = 1;
  vmem_ticket t;
  vmem_t vm;
  OK(open_opts(&o, &vm));
  OK(vMemReserve(vm, MIB(200), NULL, &va));
  for (int i = 0; i < 1000 && stats_of(vm).free_bytes < MIB(100); i++) usleep(5000);
  OK(vmem_inject(vm, VMEM_INJECT_SLAB, 0, many, ENOMEM));
  op = populate(va, MIB(50));
  OK(vmem_submit(vm, &op, 1, &a, 1, 0, &t));
  usleep(200000);
  CHECK((c = vm_get(vm, "test", &err)));
  left = __atomic_load_n(&c->inject.count, __ATOMIC_RELAXED);
  vm_put(c);
  CHECK(left < many); /* the allocation was tried */
  CHECK(many - left < 50);
  OK(vmem_inject(vm, 0, 0, 0, 0));
  EQ(write(fd, &one, 8), 8);
  OK(vmem_wait(vm, t, -1));
  op = populate(va + MIB(100), PAGE);
  OK(vmem_batch(vm, &op, 1, NULL, 0, 0));
  for (int i = 0; i < 1000 && stats_of(vm).free_bytes < MIB(100); i++) usleep(5000);
  CHECK(stats_of(vm).free_bytes >= MIB(100));
  OK(vmem_close(vm));
  close(fd);
}

MAIN(TEST(many), TEST(waits_for_work), TEST(synchronous_batch_waits), TEST(shortage_at_submit),
     TEST(failures_reach_the_waiter), TEST(close_wakes_waiters), TEST(low_watermark), TEST(late), TEST(late_and_closed),
     TEST(late_nth), TEST(low_watermark_out_of_reach))
