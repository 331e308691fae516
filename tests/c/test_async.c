/* SPDX-License-Identifier: MIT */
/* Description: submitted batches: results, order after outside work, shortage at submit, limits, close. */
#include <pthread.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "api/api.h"
#include "check.h"

static struct vmem_op populate(uint64_t addr, uint64_t bytes) {
  return (struct vmem_op){.op = VMEM_OP_POPULATE, .addr = addr, .bytes = bytes};
}

static struct vmem_after after_fd(int fd) { return (struct vmem_after){.kind = VMEM_AFTER_FD, .handle = (uint64_t)fd}; }

static void fire(int fd) {
  uint64_t one = 1;
  if (write(fd, &one, sizeof(one)) != sizeof(one)) failures_here++;
}

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

/* Nothing is unmapped, filled or reused before the work is over; others pass meanwhile. */
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
  close(fd2); /* the library has its own descriptor, but nobody can fire it: cancelled at close */
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
  /* Pages of a queued unmap are no one's before it has run. */
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
  EQ(vmem_wait(vm, t, 0), -EIO); /* as often as it is asked */
  EQ(vmem_order(vm, t, 0), -EIO);
  after = stats_of(vm);
  after.slab_bytes = before.slab_bytes; /* the cancelled batch may have trimmed the pool */
  after.free_bytes = before.free_bytes;
  after.slabs = before.slabs;
  CHECK(same_state(&before, &after));
  OK(vmem_submit(vm, &op, 1, NULL, 0, 0, &t));
  OK(vmem_wait(vm, t, -1));
  OK(vmem_check(vm));
  OK(vmem_close(vm));
}

struct waiter {
  vmem_t vm;
  vmem_ticket t;
  int ret;
};

static void *wait_thread(void *arg) {
  struct waiter *w = arg;
  w->ret = vmem_wait(w->vm, w->t, -1);
  return NULL;
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

/* Memory that is not to be had is asked for again when more pages are taken, not each time the worker looks at what
 * waits. */
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
  CHECK(left < many); /* it was asked for */
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
     TEST(failures_reach_the_waiter), TEST(close_wakes_waiters), TEST(low_watermark), TEST(low_watermark_out_of_reach))
