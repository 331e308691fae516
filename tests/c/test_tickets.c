/* SPDX-License-Identifier: MIT */
/* Description: results of submitted batches: how long they are kept, how many are kept, and what a batch that never
 * finishes delays. */
#include <dirent.h>
#include <pthread.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "api/api.h"
#include "check.h"

enum { RING = 1024 }; /* batches in flight */

/* Submits n empty batches, waits for each and drops its ticket; false if any failed. */
static bool run_batches(vmem_t vm, unsigned n) {
  vmem_ticket ring[RING];
  for (unsigned i = 0; i < n + RING; i++) {
    vmem_ticket *t = &ring[i % RING];
    if (i >= RING && (vmem_wait(vm, *t, -1) || vmem_ticket_drop(vm, *t))) return false;
    if (i < n && vmem_submit(vm, NULL, 0, NULL, 0, 0, t)) return false;
    if (i >= n) continue;
    if (i % 16 == 0 && vmem_submit(vm, NULL, 0, NULL, 0, VMEM_SUBMIT_DETACHED, NULL)) return false;
  }
  return true;
}

static void *asks_for_ever(void *arg) {
  struct vmem_stats s = {.size = sizeof(s)};
  int own;
  pthread_setcanceltype(PTHREAD_CANCEL_ASYNCHRONOUS, &own);
  while (!vmem_get_stats(*(vmem_t *)arg, &s)) {
  }
  return NULL;
}

/* With asynchronous cancellation. ThreadSanitizer does not support that: a thread that is cancelled while it switches
 * to its next trace keeps the trace's lock, and the next thread with the same number never starts. */
static void threads_that_are_cancelled_at_once(void) {
#ifdef __SANITIZE_THREAD__
  printf("not run with ThreadSanitizer: %s\n", __func__);
  return;
#endif
  vmem_t vm = open_vm(0);
  for (int i = 0; i < 300; i++) {
    pthread_t thread;
    void *ended;
    EQ(pthread_create(&thread, NULL, asks_for_ever, &vm), 0);
    usleep(100);
    EQ(pthread_cancel(thread), 0);
    EQ(pthread_join(thread, &ended), 0);
    CHECK(ended == PTHREAD_CANCELED);
  }
  EQ(stats_of(vm).tickets, 0);
  OK(vmem_close(vm));
}

static void *waits_and_ends(void *arg) {
  struct waiter *w = arg;
  __atomic_store_n(&w->ret, vmem_wait(w->vm, w->t, -1) + 1, __ATOMIC_RELAXED);
  pthread_testcancel();
  return NULL;
}

/* A thread that is cancelled while it waits completes the call and keeps no lock. */
static void a_thread_that_is_cancelled(void) {
  vmem_t vm = open_vm(0);
  struct vmem_after after = after_fd(eventfd(0, EFD_CLOEXEC));
  struct waiter w = {.vm = vm};
  pthread_t thread;
  void *ended;
  OK(vmem_submit(vm, NULL, 0, &after, 1, 0, &w.t));
  EQ(pthread_create(&thread, NULL, waits_and_ends, &w), 0);
  usleep(20000); /* it is very probably waiting by now */
  EQ(pthread_cancel(thread), 0);
  usleep(20000);
  EQ(stats_of(vm).tickets, 1); /* no lock is held */
  EQ(__atomic_load_n(&w.ret, __ATOMIC_RELAXED), 0);
  fire((int)after.handle);
  EQ(pthread_join(thread, &ended), 0);
  CHECK(ended == PTHREAD_CANCELED);
  EQ(w.ret, 1);
  OK(vmem_close(vm));
  close((int)after.handle);
}

static void kept_until_dropped(void) {
  vmem_t vm = open_vm(0);
  uint64_t va;
  struct vmem_op op;
  struct vmem_error e = {.size = sizeof(e)};
  vmem_ticket good, bad;
  OK(vMemReserve(vm, MIB(2), NULL, &va));
  OK(vmem_warm(vm, MIB(1)));
  op = populate(va, PAGE);
  OK(vmem_submit(vm, &op, 1, NULL, 0, 0, &good));
  OK(vmem_wait(vm, good, -1));
  OK(vmem_inject(vm, VMEM_INJECT_MAP, 0, 1, EIO));
  op = populate(va + MIB(1), PAGE);
  OK(vmem_submit(vm, &op, 1, NULL, 0, 0, &bad));
  CHECK(run_batches(vm, on_host() ? 1000000 : 20000));
  EQ(stats_of(vm).tickets, 2);
  for (int i = 0; i < 3; i++) {
    OK(vmem_wait(vm, good, 0));
    OK(vmem_order(vm, good, 0));
    EQ(vmem_wait(vm, bad, -1), -EIO);
    OK(vmem_get_error(&e));
    CHECK(strstr(e.text, "injected"));
  }
  OK(vmem_ticket_drop(vm, bad));
  EQ(vmem_wait(vm, bad, -1), -EBADF);
  CHECK(strstr(vmem_last_error(), "was dropped"));
  EQ(vmem_ticket_drop(vm, bad), -EBADF);
  CHECK(strstr(vmem_last_error(), "was dropped"));
  EQ(vmem_wait(vm, bad + 10000000, 0), -EBADF);
  CHECK(strstr(vmem_last_error(), "not a ticket"));
  EQ(vmem_ticket_drop(vm, 0), -EBADF);
  CHECK(strstr(vmem_last_error(), "not a ticket"));
  OK(vmem_wait(vm, good, -1));
  EQ(stats_of(vm).tickets, 1);
  OK(vmem_check(vm));
  OK(vmem_close(vm)); /* while a ticket exists */
}

static void limit_on_tickets(void) {
  vmem_t vm = open_vm(0);
  uint64_t va;
  struct vmem_op op;
  struct vmem_after a;
  struct vmem_stats before, after;
  struct vmem_error e = {.size = sizeof(e)};
  vmem_ticket endless, oldest = 0, t = 0;
  char name[32];
  int fd = eventfd(0, EFD_CLOEXEC);
  OK(vMemReserve(vm, MIB(2), NULL, &va));
  a = after_fd(fd);
  OK(vmem_submit(vm, NULL, 0, &a, 1, 0, &endless)); /* the oldest batch, but it has no result yet */
  for (int i = 1; i < VMEM_MAX_TICKETS; i++) {
    OK(vmem_submit(vm, NULL, 0, NULL, 0, 0, &t));
    if (!oldest) oldest = t;
    if (i % 2000 == 0) OK(vmem_wait(vm, t, -1));
  }
  OK(vmem_wait(vm, t, -1));
  before = stats_of(vm);
  EQ(before.tickets, VMEM_MAX_TICKETS);
  op = populate(va, PAGE);
  EQ(vmem_submit(vm, &op, 1, &a, 1, 0, &t), -ENOBUFS);
  OK(vmem_get_error(&e));
  EQ(e.limit, VMEM_MAX_TICKETS);
  EQ(e.bytes, oldest);
  snprintf(name, sizeof(name), "ticket %llu", (unsigned long long)oldest);
  CHECK(strstr(e.text, name));
  after = stats_of(vm);
  CHECK(same_state(&before, &after));
  EQ(after.tickets, before.tickets);
  OK(vmem_submit(vm, &op, 1, NULL, 0, VMEM_SUBMIT_DETACHED, NULL)); /* a detached batch has no result */
  OK(vmem_ticket_drop(vm, oldest));
  OK(vmem_submit(vm, NULL, 0, NULL, 0, 0, &t));
  EQ(vmem_submit(vm, NULL, 0, NULL, 0, 0, &t), -ENOBUFS);
  OK(vmem_get_error(&e));
  EQ(e.bytes, oldest + 1);
  fire(fd);
  OK(vmem_wait(vm, endless, -1));
  EQ(vmem_submit(vm, NULL, 0, NULL, 0, 0, &t), -ENOBUFS);
  OK(vmem_get_error(&e));
  EQ(e.bytes, endless);
  OK(vmem_check(vm));
  OK(vmem_close(vm));
  close(fd);
}

static struct vm_backend slow;
static int held; /* fills block the worker */

static int slow_fill(void *be, const struct vm_be_range *r, size_t n, uint8_t value, const vm_event *after,
                     size_t num_after, vm_event *done) {
  while (__atomic_load_n(&held, __ATOMIC_ACQUIRE)) usleep(200);
  return vm_backend_host.fill(be, r, n, value, after, num_after, done);
}

static void limit_on_unfinished(void) {
  vmem_t vm = open_host(0);
  uint64_t va;
  struct vmem_op op;
  struct vmem_stats before, after;
  vmem_ticket last = 0, t;
  int err;
  struct vm_ctx *c = vm_get(vm, "test", &err);
  slow = vm_backend_host;
  slow.fill = slow_fill;
  c->be = &slow;
  vm_put(c);
  OK(vMemReserve(vm, MIB(2), NULL, &va));
  op = populate(va, PAGE);
  OK(vmem_batch(vm, &op, 1, NULL, 0, 0));
  held = 1;
  op = (struct vmem_op){.op = VMEM_OP_FILL, .addr = va, .bytes = PAGE};
  OK(vmem_submit(vm, &op, 1, NULL, 0, 0, &t));
  for (int i = 1; i < VMEM_MAX_PENDING; i++)
    OK(vmem_submit(vm, NULL, 0, NULL, 0, i % 2 ? 0 : VMEM_SUBMIT_DETACHED, i % 2 ? &last : NULL));
  before = stats_of(vm);
  EQ(before.pending, VMEM_MAX_PENDING);
  op = populate(va + MIB(1), PAGE);
  EQ(vmem_submit(vm, &op, 1, NULL, 0, 0, &t), -EAGAIN);
  EQ(vmem_submit(vm, &op, 1, NULL, 0, VMEM_SUBMIT_DETACHED, NULL), -EAGAIN);
  after = stats_of(vm);
  CHECK(same_state(&before, &after));
  __atomic_store_n(&held, 0, __ATOMIC_RELEASE);
  OK(vmem_wait(vm, last, -1));
  OK(vmem_submit(vm, &op, 1, NULL, 0, 0, &t));
  OK(vmem_wait(vm, t, -1));
  EQ(stats_of(vm).pending, 0);
  OK(vmem_close(vm));
}

static void never_ending(void) {
  vmem_t vm = open_vm(0);
  uint64_t va;
  struct vmem_op op;
  struct vmem_after a;
  vmem_ticket endless, t;
  int fd = eventfd(0, EFD_CLOEXEC);
  OK(vMemReserve(vm, MIB(2), NULL, &va));
  op = populate(va, PAGE);
  OK(vmem_batch(vm, &op, 1, NULL, 0, 0));
  a = after_fd(fd);
  op = (struct vmem_op){.op = VMEM_OP_UNMAP, .addr = va, .bytes = PAGE};
  OK(vmem_submit(vm, &op, 1, &a, 1, 0, &endless));
  CHECK(run_batches(vm, on_host() ? 100000 : 10000));
  op = populate(va + MIB(1), PAGE);
  OK(vmem_submit(vm, &op, 1, NULL, 0, 0, &t));
  OK(vmem_wait(vm, t, -1));
  EQ(vmem_wait(vm, endless, 0), -ETIMEDOUT);
  EQ(vMemUnmap(vm, va, PAGE), -EBUSY);
  EQ(stats_of(vm).pending, 1);
  OK(vmem_check(vm));
  OK(vmem_close(vm));
  close(fd);
}

/* A waiting fill blocks calls on its own pages and no others. */
static void fill_behind_a_descriptor(void) {
  vmem_t vm = open_vm(0);
  uint64_t va;
  struct vmem_op op;
  struct vmem_after a;
  vmem_ticket fill, t;
  unsigned char b = 0;
  int fd = eventfd(0, EFD_CLOEXEC);
  OK(vMemReserve(vm, MIB(8), NULL, &va));
  op = (struct vmem_op){.op = VMEM_OP_POPULATE, .addr = va, .bytes = 16 * PAGE};
  OK(vmem_batch(vm, &op, 1, NULL, 0, 0));
  a = after_fd(fd);
  op = (struct vmem_op){.op = VMEM_OP_FILL, .addr = va, .bytes = PAGE, .value = 7};
  OK(vmem_submit(vm, &op, 1, &a, 1, 0, &fill));
  EQ(vMemUnmap(vm, va, PAGE), -EBUSY);
  EQ(vmem_read(vm, &b, va, 1), -EBUSY);
  OK(vmem_read(vm, &b, va + PAGE, 1));
  OK(vmem_copy(vm, va + 2 * PAGE, va + 3 * PAGE, PAGE));
  OK(vMemUnmap(vm, va + 4 * PAGE, PAGE));
  op = (struct vmem_op){
      .op = VMEM_OP_MAP, .flags = VMEM_OP_REPLACE | VMEM_OP_CONSUME, .addr = va + 5 * PAGE, .bytes = PAGE};
  OK(vmem_retain(vm, va + 6 * PAGE, PAGE, &op.handle));
  OK(vmem_submit(vm, &op, 1, NULL, 0, 0, &t));
  OK(vmem_wait(vm, t, -1));
  EQ(vmem_wait(vm, fill, 0), -ETIMEDOUT);
  fire(fd);
  OK(vmem_wait(vm, fill, -1));
  OK(vmem_read(vm, &b, va, 1));
  EQ(b, 7);
  OK(vMemUnmap(vm, va, PAGE));
  OK(vmem_check(vm));
  OK(vmem_close(vm));
  close(fd);
}

static void detached_batches(void) {
  vmem_t vm = open_vm(0);
  uint64_t va;
  struct vmem_op op;
  struct vmem_after a;
  vmem_ticket t = 4711, u;
  int fd = eventfd(0, EFD_CLOEXEC);
  OK(vMemReserve(vm, MIB(2), NULL, &va));
  op = populate(va, PAGE);
  EQ(vmem_submit(vm, &op, 1, NULL, 0, 1u << 2, &t), -EINVAL);
  EQ(vmem_submit(vm, &op, 1, NULL, 0, VMEM_SUBMIT_DETACHED | 1u << 31, NULL), -EINVAL);
  CHECK(strstr(vmem_last_error(), "unknown flags 0x80000000"));
  EQ(vmem_batch(vm, &op, 1, NULL, 0, VMEM_SUBMIT_DETACHED), -EINVAL);
  EQ(vmem_submit(vm, &op, 1, NULL, 0, 0, NULL), -EINVAL);
  EQ(t, 4711);
  OK(vmem_submit(vm, &op, 1, NULL, 0, VMEM_SUBMIT_DETACHED, &t));
  EQ(t, 0);
  /* A batch whose ticket is dropped before it has finished keeps running, detached. */
  a = after_fd(fd);
  op = populate(va + MIB(1), PAGE);
  OK(vmem_submit(vm, &op, 1, &a, 1, 0, &t));
  EQ(stats_of(vm).tickets, 1);
  OK(vmem_ticket_drop(vm, t));
  EQ(stats_of(vm).tickets, 0);
  EQ(vmem_wait(vm, t, 0), -EBADF);
  EQ(vmem_order(vm, t, 0), -EBADF);
  EQ(vMemUnmap(vm, va + MIB(1), PAGE), -EBUSY);
  OK(vmem_submit(vm, NULL, 0, NULL, 0, 0, &u));
  OK(vmem_wait(vm, u, -1));
  /* If pages are zeroed first, the detached batch may finish after the empty one. */
  for (int i = 0; i < 5000 && stats_of(vm).pending > 1; i++) usleep(1000);
  EQ(stats_of(vm).pending, 1);
  fire(fd);
  for (int i = 0; i < 5000 && stats_of(vm).pending; i++) usleep(1000);
  EQ(stats_of(vm).pending, 0);
  OK(vMemUnmap(vm, va + MIB(1), PAGE));
  OK(vmem_check(vm));
  OK(vmem_close(vm));
  close(fd);
}

static void drop_wakes_waiters(void) {
  struct waiter w = {.vm = open_vm(0)};
  struct vmem_after a;
  pthread_t thread;
  int fd = eventfd(0, EFD_CLOEXEC);
  a = after_fd(fd);
  OK(vmem_submit(w.vm, NULL, 0, &a, 1, 0, &w.t));
  EQ(pthread_create(&thread, NULL, wait_thread, &w), 0);
  usleep(20000);
  OK(vmem_ticket_drop(w.vm, w.t));
  pthread_join(thread, NULL);
  EQ(w.ret, -EBADF);
  OK(vmem_close(w.vm));
  close(fd);
}

/* ---- drops and waits from many threads ------------------------------------------------------------ */

enum { THREADS = 4, ROUNDS = 2000, SHARED = 64 };

static struct {
  vmem_t vm;
  vmem_ticket t[SHARED];
  int bad;
  int waited, dropped;
} race;

static vmem_ticket shared(unsigned i) { return __atomic_load_n(&race.t[i % SHARED], __ATOMIC_RELAXED); }

static void *wait_and_drop(void *arg) {
  unsigned seed = (unsigned)(uintptr_t)arg;
  for (int i = 0; i < ROUNDS; i++) {
    unsigned r = seed = seed * 1664525u + 1013904223u, place = r >> 8;
    int ret;
    if (r >> 30 == 0) {
      vmem_ticket t;
      ret = vmem_submit(race.vm, NULL, 0, NULL, 0, 0, &t);
      if (ret == -EAGAIN) continue;
      if (!ret) t = __atomic_exchange_n(&race.t[place % SHARED], t, __ATOMIC_RELAXED);
      if (!ret && t && (ret = vmem_ticket_drop(race.vm, t)) == -EBADF) ret = 0; /* dropped by another thread */
    } else if (r >> 30 == 1) {
      ret = vmem_ticket_drop(race.vm, shared(place));
      if (!ret) __atomic_fetch_add(&race.dropped, 1, __ATOMIC_RELAXED);
      if (ret == -EBADF) ret = 0;
    } else {
      ret = r & 1 << 20 ? vmem_wait(race.vm, shared(place), r & 1 << 21 ? -1 : 1000)
                        : vmem_order(race.vm, shared(place), 0);
      if (!ret) __atomic_fetch_add(&race.waited, 1, __ATOMIC_RELAXED);
      if (ret == -EBADF || ret == -ETIMEDOUT) ret = 0;
    }
    if (ret) __atomic_fetch_add(&race.bad, 1, __ATOMIC_RELAXED);
  }
  return NULL;
}

static void drops_and_waits(void) {
  pthread_t threads[THREADS];
  race.vm = open_vm(0);
  for (unsigned i = 0; i < SHARED; i++) OK(vmem_submit(race.vm, NULL, 0, NULL, 0, 0, &race.t[i]));
  for (uintptr_t i = 0; i < THREADS; i++) EQ(pthread_create(&threads[i], NULL, wait_and_drop, (void *)(i + 1)), 0);
  for (unsigned i = 0; i < THREADS; i++) pthread_join(threads[i], NULL);
  EQ(race.bad, 0);
  CHECK(race.waited && race.dropped);
  for (unsigned i = 0; i < SHARED; i++) vmem_ticket_drop(race.vm, race.t[i]);
  EQ(stats_of(race.vm).tickets, 0);
  OK(vmem_close(race.vm));
}

/* ---- what a failed submit leaves behind ----------------------------------------------------------- */

static unsigned open_descriptors(void) {
  DIR *d = opendir("/proc/self/fd");
  unsigned n = 0;
  while (d && readdir(d)) n++;
  if (d) closedir(d);
  return n;
}

static void many_dependencies(void) {
  enum { MANY = 200 };
  vmem_t vm = open_vm(0);
  uint64_t va;
  struct vmem_op op;
  struct vmem_after after[MANY];
  int fds[2] = {eventfd(0, EFD_CLOEXEC), eventfd(1, EFD_CLOEXEC)};
  unsigned before;
  vmem_ticket t;
  OK(vMemReserve(vm, MIB(2), NULL, &va));
  op = populate(va + MIB(1) + PAGE, PAGE);
  OK(vmem_batch(vm, &op, 1, NULL, 0, 0)); /* allocating from the driver may open a descriptor */
  before = open_descriptors();
  for (int i = 0; i < MANY; i++) after[i] = after_fd(fds[i != 77]);
  op = populate(va, PAGE);
  OK(vmem_submit(vm, &op, 1, after, MANY, 0, &t));
  EQ(vmem_wait(vm, t, 20000000), -ETIMEDOUT);
  after[MANY - 1].flags = 1;
  op = populate(va + MIB(1), PAGE);
  EQ(vmem_submit(vm, &op, 1, after, MANY, 0, &t), -EINVAL);
  CHECK(strstr(vmem_last_error(), "dependency 199"));
  after[MANY - 1].flags = 0;
  after[3].reserved[1] = 1;
  EQ(vmem_batch(vm, &op, 1, after, MANY, 0), -EINVAL);
  after[3].reserved[1] = 0;
  fire(fds[0]);
  OK(vmem_wait(vm, t, -1));
  OK(vmem_batch(vm, &op, 1, after, MANY, 0));
  EQ(open_descriptors(), before);
  OK(vmem_close(vm));
  close(fds[0]);
  close(fds[1]);
}

/* Fails each allocation of a submit in turn. */
static void heap_is_short(void) {
  vmem_t vm = open_host(0);
  uint64_t va;
  struct vmem_op ops[2];
  struct vmem_after after[6];
  struct vmem_stats before, now;
  int fd = eventfd(1, EFD_CLOEXEC), err, failed = 0;
  unsigned descriptors;
  vmem_ticket t;
  struct vm_ctx *c = vm_get(vm, "test", &err);
  c->info->fresh_is_zero = false; /* makes the batch zero its pages */
  c->opts.pool_high = VMEM_KEEP_ALL;
  vm_put(c);
  OK(vMemReserve(vm, MIB(64), NULL, &va));
  OK(vmem_warm(vm, MIB(64)));
  for (int i = 0; i < 6; i++) after[i] = after_fd(fd);
  ops[0] = populate(va, PAGE);
  OK(vmem_batch(vm, ops, 1, NULL, 0, 0));
  ops[0] = (struct vmem_op){.op = VMEM_OP_FILL, .addr = va, .bytes = PAGE, .value = 5};
  ops[1] = (struct vmem_op){.op = VMEM_OP_POPULATE, .addr = va + MIB(4), .bytes = PAGE, .count = 8, .stride = MIB(4)};
  before = stats_of(vm);
  descriptors = open_descriptors();
  for (;; failed++) {
    OK(vmem_inject(vm, VMEM_INJECT_HEAP, (uint64_t)failed, 1, ENOMEM));
    err = vmem_submit(vm, ops, 2, after, 6, 0, &t);
    CHECK(!err || strstr(vmem_last_error(), "no heap memory"));
    OK(vmem_inject(vm, 0, 0, 0, 0));
    if (!err) break;
    EQ(err, -ENOMEM);
    now = stats_of(vm);
    CHECK(same_state(&before, &now));
    EQ(now.tickets, 0);
    EQ(open_descriptors(), descriptors);
    EQ(BYTE(va), 0);
    OK(vmem_check(vm));
  }
  CHECK(failed > 6); /* the job, the ticket, its error, the table, descriptors, the plan's lists, the fill */
  OK(vmem_wait(vm, t, -1));
  EQ(BYTE(va), 5);
  EQ(open_descriptors(), descriptors);
  OK(vmem_check(vm));
  OK(vmem_close(vm));
  close(fd);
}

MAIN(TEST(a_thread_that_is_cancelled), TEST(threads_that_are_cancelled_at_once), TEST(kept_until_dropped),
     TEST(limit_on_tickets), TEST(limit_on_unfinished), TEST(never_ending), TEST(fill_behind_a_descriptor),
     TEST(detached_batches), TEST(drop_wakes_waiters), TEST(drops_and_waits), TEST(many_dependencies),
     TEST(heap_is_short))
