/* SPDX-License-Identifier: MIT */
/*
 * Description: fills that still run when their batch has returned, and events of GPU work, as on a GPU back end.
 *
 * Uses the host back end with a substitute for the GPU's queue, in which fills and events complete only when the test
 * says so. Everything else is the real library.
 */
#include <pthread.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "api/api.h"
#include "check.h"

enum { MAX_EVENTS = 4096, MAX_RANGES = 64 };

static struct {
  pthread_mutex_t lock;
  struct {
    bool done, put, fill;
    uint8_t value;
    size_t n;
    struct vm_be_range r[MAX_RANGES];
    uint64_t after; /* a fill's first dependency */
  } e[MAX_EVENTS];
  unsigned n;
  uint64_t waited_stream, waited_event;
  int fail_query;
  bool idle;     /* recorded events are complete immediately */
  vm_event hold; /* the put of this event takes long */
} gpu = {.lock = PTHREAD_MUTEX_INITIALIZER};

static struct vm_backend fake;

/* Returns with the lock held, so that other threads see the event only after the caller has filled it in. */
static vm_event next_event(void) {
  vm_event e = ++gpu.n;
  memset(&gpu.e[e], 0, sizeof(gpu.e[e]));
  return e;
}

static vm_event new_event(void) {
  vm_event e;
  pthread_mutex_lock(&gpu.lock);
  e = next_event();
  pthread_mutex_unlock(&gpu.lock);
  return e;
}

static int fake_fill(void *be, const struct vm_be_range *r, size_t n, uint8_t value, const vm_event *after,
                     size_t num_after, vm_event *done) {
  vm_event e;
  (void)be;
  if (n > MAX_RANGES) return vm_fail(-EIO, "too many ranges for the stand-in");
  pthread_mutex_lock(&gpu.lock);
  e = next_event();
  gpu.e[e].fill = true;
  gpu.e[e].value = value;
  gpu.e[e].n = n;
  memcpy(gpu.e[e].r, r, n * sizeof(*r));
  gpu.e[e].after = num_after ? after[0] : 0;
  pthread_mutex_unlock(&gpu.lock);
  *done = e;
  return 0;
}

static int fake_query(void *be, vm_event e) {
  int ret;
  (void)be;
  pthread_mutex_lock(&gpu.lock);
  ret = gpu.fail_query ? gpu.fail_query : gpu.e[e].done ? 0 : -EAGAIN;
  pthread_mutex_unlock(&gpu.lock);
  return ret == -EIO ? vm_fail(-EIO, "the stand-in is broken") : ret;
}

static int fake_wait(void *be, vm_event e) {
  int ret;
  while ((ret = fake_query(be, e)) == -EAGAIN) usleep(200);
  return ret;
}

/* Makes the "GPU" reach this event. */
static void finish(vm_event e) {
  pthread_mutex_lock(&gpu.lock);
  for (size_t i = 0; gpu.e[e].fill && i < gpu.e[e].n; i++)
    memset((void *)(uintptr_t)gpu.e[e].r[i].addr, gpu.e[e].value, gpu.e[e].r[i].bytes);
  gpu.e[e].done = true;
  pthread_mutex_unlock(&gpu.lock);
}

static int fake_from(void *be, uint32_t kind, uint64_t handle, vm_event *e) {
  (void)be;
  *e = kind == VMEM_AFTER_EVENT ? handle : new_event();
  if (gpu.idle) finish(*e);
  return 0;
}

static int fake_stream_wait(void *be, uint64_t stream, vm_event e) {
  (void)be;
  gpu.waited_stream = stream;
  gpu.waited_event = e;
  return 0;
}

static void fake_put(void *be, vm_event e) {
  (void)be;
  while (e && __atomic_load_n(&gpu.hold, __ATOMIC_ACQUIRE) == e) usleep(200);
  pthread_mutex_lock(&gpu.lock);
  gpu.e[e].put = true;
  pthread_mutex_unlock(&gpu.lock);
}

static unsigned events(void) {
  unsigned n;
  pthread_mutex_lock(&gpu.lock);
  n = gpu.n;
  pthread_mutex_unlock(&gpu.lock);
  return n;
}

/* Waits until the worker has created its n-th event. */
static bool reached(unsigned n) {
  for (int i = 0; i < 5000 && events() < n; i++) usleep(1000);
  return events() >= n;
}

static bool fills_over(void) {
  bool over = true;
  pthread_mutex_lock(&gpu.lock);
  for (unsigned e = 1; e <= gpu.n; e++)
    if (gpu.e[e].fill && !gpu.e[e].done) over = false;
  pthread_mutex_unlock(&gpu.lock);
  return over;
}

static bool fills_over_at_remap, fills_over_at_copy;

static int fake_remap(void *be, uint64_t addr, uint64_t bytes, uint64_t slab, uint64_t offset, uint32_t flags) {
  fills_over_at_remap = fills_over();
  return vm_backend_host.map(be, addr, bytes, slab, offset, flags, false);
}

/* Copies immediately, but its event completes only when the test says so. */
static int fake_copy(void *be, const struct vm_be_copy *copies, size_t n, const vm_event *after, size_t num_after,
                     vm_event *done) {
  fills_over_at_copy = fills_over();
  vm_backend_host.copy(be, copies, n, after, num_after, done);
  *done = new_event();
  return 0;
}

static int fake_bind(void *be, const struct vm_bind_op *ops, size_t n, struct vm_bind_result *r) {
  for (r->done = 0; r->done < n; r->done++) {
    const struct vm_bind_op *op = &ops[r->done];
    int err = op->kind == VM_BIND_UNMAP
                  ? vm_backend_host.unmap(be, op->addr, op->bytes, op->sparse)
                  : vm_backend_host.map(be, op->addr, op->bytes, op->slab, op->offset, op->flags, op->sparse);
    if (err) return err;
  }
  return 0;
}

/* Waits until the worker has put the event, which happens after the ticket is done. */
static bool was_put(vm_event e) {
  bool put = false;
  for (int i = 0; i < 5000 && !put; i++) {
    pthread_mutex_lock(&gpu.lock);
    put = gpu.e[e].put;
    pthread_mutex_unlock(&gpu.lock);
    if (!put) usleep(1000);
  }
  return put;
}

static vmem_t open_fake_with(uint32_t flags) {
  struct vmem_open_opts o = {.size = sizeof(o), .backend = "host", .flags = flags};
  struct vm_ctx *c;
  vmem_t vm = 0;
  int err = vmem_open(&o, &vm);
  if (err || !(c = vm_get(vm, "test", &err))) return 0;
  fake = vm_backend_host;
  fake.discard = NULL; /* freed pages are dirty, as on a GPU */
  fake.fill = fake_fill;
  fake.copy = fake_copy;
  fake.remap = fake_remap;
  fake.event_from = fake_from;
  fake.event_query = fake_query;
  fake.event_wait = fake_wait;
  fake.event_put = fake_put;
  fake.stream_wait = fake_stream_wait;
  c->be = &fake;
  c->opts.pool_high = VMEM_KEEP_ALL;
  gpu.n = 0;
  gpu.fail_query = 0;
  gpu.idle = false;
  vm_put(c);
  return vm;
}

static vmem_t open_fake(void) { return open_fake_with(0); }

/* Populates a page and submits a fill of it, which is running on return. The fill's event is the next one created. */
static bool fill_begun(vmem_t vm, uint64_t addr, vmem_ticket *t) {
  struct vmem_op op = populate(addr, PAGE);
  unsigned e = events() + 1;
  if (vmem_batch(vm, &op, 1, NULL, 0, 0)) return false;
  op.op = VMEM_OP_FILL;
  return !vmem_submit(vm, &op, 1, NULL, 0, 0, t) && reached(e);
}

static void order_does_not_wait_for_fills(void) {
  vmem_t vm = open_fake();
  uint64_t va;
  vmem_ticket t;
  OK(vMemReserve(vm, MIB(8), NULL, &va));
  CHECK(fill_begun(vm, va, &t));
  OK(vmem_order(vm, t, 4711)); /* returns with the fill still queued */
  EQ(events(), 1);
  EQ(gpu.waited_stream, 4711);
  EQ(gpu.waited_event, 1);
  EQ(vmem_wait(vm, t, 0), -ETIMEDOUT);
  BYTE(va) = 9;
  finish(1);
  OK(vmem_wait(vm, t, -1));
  EQ(BYTE(va), 0);
  CHECK(was_put(1));
  OK(vmem_check(vm));
  OK(vmem_close(vm));
}

static void *finish_later(void *arg) {
  usleep(30000);
  finish((vm_event)(uintptr_t)arg);
  return NULL;
}

/* Memory under a fill is neither unmapped nor read before the fill completes. */
static void unmap_waits_for_fills(void) {
  vmem_t vm = open_fake();
  uint64_t va;
  vmem_ticket t;
  pthread_t thread;
  char c = 1;
  OK(vMemReserve(vm, MIB(8), NULL, &va));
  for (int how = 0; how < 2; how++) {
    unsigned e = events() + 1;
    CHECK(fill_begun(vm, va, &t));
    OK(vmem_order(vm, t, 0));
    CHECK(!gpu.e[e].done);
    EQ(pthread_create(&thread, NULL, finish_later, (void *)(uintptr_t)e), 0);
    if (how) {
      OK(vmem_read(vm, &c, va, 1));
      EQ(c, 0);
      CHECK(gpu.e[e].done);
    }
    OK(vMemUnmap(vm, va, PAGE));
    CHECK(gpu.e[e].done);
    pthread_join(thread, NULL);
    OK(vmem_wait(vm, t, -1));
  }
  OK(vmem_check(vm));
  OK(vmem_close(vm));
}

static void fill_batches_wait_on_the_gpu(void) {
  vmem_t vm = open_fake();
  uint64_t va;
  struct vmem_op op;
  struct vmem_after a = {.kind = VMEM_AFTER_EVENT};
  vmem_ticket t, u;
  OK(vMemReserve(vm, MIB(8), NULL, &va));
  CHECK(fill_begun(vm, va, &t));
  finish(1);
  OK(vmem_wait(vm, t, -1));
  a.handle = new_event(); /* 2: the last user's work */
  op = (struct vmem_op){.op = VMEM_OP_FILL, .addr = va, .bytes = PAGE, .value = 3};
  OK(vmem_submit(vm, &op, 1, &a, 1, 0, &t));
  CHECK(reached(3)); /* the fill is queued behind event 2, without this thread or the worker waiting */
  EQ(gpu.e[3].after, 2);
  EQ(gpu.e[2].done, false);
  /* A batch with an unmap waits for the event itself, and later batches can run in the meantime. */
  op = (struct vmem_op){.op = VMEM_OP_UNMAP, .addr = va, .bytes = PAGE};
  OK(vmem_order(vm, t, 1));
  OK(vmem_submit(vm, &op, 1, &a, 1, 0, &u));
  op = populate(va + MIB(4), PAGE);
  OK(vmem_submit(vm, &op, 1, NULL, 0, 0, &t));
  OK(vmem_wait(vm, t, -1));
  EQ(vmem_wait(vm, u, 0), -ETIMEDOUT);
  finish(2);
  finish(3);
  OK(vmem_wait(vm, u, -1));
  OK(vmem_check(vm));
  OK(vmem_close(vm));
}

/* A page that a fill is writing to is not mapped at a second address before the fill is complete. */
static void second_address_waits_for_fills(void) {
  vmem_t vm = open_fake();
  uint64_t va;
  struct vmem_op op = {0};
  vmem_ticket t;
  pthread_t thread;
  OK(vMemReserve(vm, MIB(8), NULL, &va));
  CHECK(fill_begun(vm, va, &t));
  OK(vmem_order(vm, t, 0));
  OK(vmem_retain(vm, va, PAGE, &op.handle));
  BYTE(va) = 9; /* old contents */
  CHECK(!gpu.e[1].done);
  EQ(pthread_create(&thread, NULL, finish_later, (void *)(uintptr_t)1), 0);
  OK(vMemMap(vm, va + MIB(1), PAGE, op.handle, 0, 0));
  CHECK(gpu.e[1].done);
  EQ(BYTE(va + MIB(1)), 0);
  pthread_join(thread, NULL);
  OK(vmem_wait(vm, t, -1));
  OK(vmem_check(vm));
  OK(vmem_close(vm));
}

static void join_waits_for_fills(void) {
  vmem_t vm = open_fake();
  uint64_t va;
  vmem_ticket t[2];
  pthread_t thread;
  OK(vMemReserve(vm, MIB(8), NULL, &va));
  for (unsigned i = 0; i < 2; i++) {
    CHECK(fill_begun(vm, va + i * PAGE, &t[i]));
    OK(vmem_order(vm, t[i], 0));
  }
  finish(2);
  EQ(pthread_create(&thread, NULL, finish_later, (void *)(uintptr_t)1), 0);
  OK(vmem_join(vm, va, 2 * PAGE, NULL));
  CHECK(fills_over_at_remap);
  EQ(stats_of(vm).mappings, 1);
  pthread_join(thread, NULL);
  OK(vmem_close(vm));
}

/* Splitting a block unmaps the remainder briefly, so it waits for a fill that writes to it. */
static void split_waits_for_fills(void) {
  vmem_t vm = open_fake_with(VMEM_OPEN_LARGE_ENTRIES);
  struct vmem_op op = {.op = VMEM_OP_POPULATE, .bytes = MIB(2)};
  struct vmem_range_info r = {.size = sizeof(r)};
  vmem_ticket fill, split;
  OK(vMemReserve(vm, MIB(8), NULL, &op.addr));
  OK(vmem_batch(vm, &op, 1, NULL, 0, 0));
  EQ(stats_of(vm).large_entries, 1);
  op = (struct vmem_op){.op = VMEM_OP_FILL, .addr = op.addr + 20 * PAGE, .bytes = PAGE};
  OK(vmem_submit(vm, &op, 1, NULL, 0, 0, &fill));
  CHECK(reached(1));
  OK(vmem_order(vm, fill, 0)); /* the fill is still running */
  op = (struct vmem_op){
      .op = VMEM_OP_UNMAP, .flags = VMEM_OP_SPLIT, .addr = op.addr - 17 * PAGE, .bytes = PAGE, .count = 1};
  OK(vmem_submit(vm, &op, 1, NULL, 0, 0, &split));
  EQ(vmem_wait(vm, split, 50000000), -ETIMEDOUT);
  EQ(stats_of(vm).splits, 0);
  OK(vmem_range_query(vm, op.addr, &r));
  EQ(r.entry_bytes, MIB(2));
  finish(1);
  OK(vmem_wait(vm, split, -1));
  OK(vmem_wait(vm, fill, -1));
  EQ(stats_of(vm).splits, 1);
  OK(vmem_check(vm));
  OK(vmem_close(vm));
}

/* A call that waits for another batch's fills still reports errors under its own name. */
static void errors_keep_their_name(void) {
  vmem_t vm = open_fake();
  uint64_t va;
  vmem_ticket t;
  pthread_t thread;
  OK(vMemReserve(vm, MIB(8), NULL, &va));
  CHECK(fill_begun(vm, va, &t));
  OK(vmem_order(vm, t, 0));
  EQ(pthread_create(&thread, NULL, finish_later, (void *)(uintptr_t)1), 0);
  OK(vmem_inject(vm, VMEM_INJECT_UNMAP, 0, 1, EIO));
  EQ(vMemUnmap(vm, va, PAGE), -EIO);
  CHECK(!strncmp(vmem_last_error(), "vMemUnmap", 9));
  pthread_join(thread, NULL);
  OK(vmem_close(vm));
}

/* If the GPU work fails, nothing is unmapped, and the ticket reports the error. */
static void broken_work(void) {
  vmem_t vm = open_fake();
  uint64_t va;
  struct vmem_op op;
  struct vmem_after a = {.kind = VMEM_AFTER_STREAM, .handle = 5};
  vmem_ticket t;
  OK(vMemReserve(vm, MIB(8), NULL, &va));
  op = populate(va, PAGE);
  op.flags = VMEM_OP_DIRTY;
  OK(vmem_batch(vm, &op, 1, NULL, 0, 0));
  EQ(events(), 0);
  gpu.fail_query = -EIO;
  op = (struct vmem_op){.op = VMEM_OP_UNMAP, .addr = va, .bytes = PAGE};
  OK(vmem_submit(vm, &op, 1, &a, 1, 0, &t));
  EQ(vmem_wait(vm, t, -1), -EIO);
  CHECK(strstr(vmem_last_error(), "broken"));
  EQ(stats_of(vm).mapped_bytes, PAGE);
  EQ(vmem_batch(vm, &op, 1, &a, 1, 0), -EIO);
  EQ(stats_of(vm).mapped_bytes, PAGE);
  gpu.fail_query = 0;
  OK(vmem_check(vm));
  OK(vMemUnmap(vm, va, PAGE));
  OK(vmem_close(vm));
}

/* Each event that a call depends on fails once: when it is recorded, queried or waited for. The call then changes
 * nothing and has put all other events. */
static void dependencies_fail_in_turn(void) {
  vmem_t vm = open_fake();
  uint64_t va;
  enum { DEPS = 7 }; /* more than fit inline in struct vm_deps */
  struct vmem_op op;
  struct vmem_after a[DEPS];
  vmem_ticket t;
  OK(vMemReserve(vm, MIB(8), NULL, &va));
  op = populate(va, PAGE);
  op.flags = VMEM_OP_DIRTY;
  gpu.idle = true;
  for (int i = 0; i < DEPS; i++) a[i] = (struct vmem_after){.kind = VMEM_AFTER_STREAM, .handle = 5};
  for (int in_background = 0; in_background < 2; in_background++) {
    int err = -EIO, failed = 0;
    for (; err && failed <= 2 * DEPS; failed += err != 0) {
      unsigned before = events();
      OK(vmem_inject(vm, VMEM_INJECT_EVENT, failed, 1, EIO));
      if (in_background) {
        err = vmem_submit(vm, &op, 1, a, DEPS, 0, &t);
        if (!err) err = vmem_wait(vm, t, -1);
      } else {
        err = vmem_batch(vm, &op, 1, a, DEPS, 0);
      }
      OK(vmem_inject(vm, 0, 0, 0, 0));
      if (err) EQ(err, -EIO);
      EQ(stats_of(vm).mapped_bytes, err ? 0 : PAGE);
      for (vm_event e = before + 1; e <= events(); e++) CHECK(was_put(e));
      OK(vmem_check(vm));
    }
    OK(err);
    EQ(failed, 2 * DEPS);
    OK(vMemUnmap(vm, va, PAGE));
  }
  OK(vmem_close(vm));
}

static void *let_go_then_finish(void *arg) {
  usleep(20000);
  __atomic_store_n(&gpu.hold, 0, __ATOMIC_RELEASE);
  return finish_later(arg);
}

/* A running fill blocks an unmap even between its batch's commit and the moment when the worker records it. */
static void fills_are_never_overlooked(void) {
  vmem_t vm = open_fake();
  uint64_t va;
  struct vmem_op op;
  struct vmem_after a = {.kind = VMEM_AFTER_EVENT};
  struct vmem_range_info r = {.size = sizeof(r)};
  vmem_ticket t;
  pthread_t thread;
  OK(vMemReserve(vm, MIB(8), NULL, &va));
  CHECK(fill_begun(vm, va, &t));
  finish(1);
  OK(vmem_wait(vm, t, -1));
  a.handle = new_event(); /* event 2, which the worker puts after the commit */
  __atomic_store_n(&gpu.hold, 2, __ATOMIC_RELEASE);
  op = (struct vmem_op){.op = VMEM_OP_FILL, .addr = va, .bytes = PAGE};
  OK(vmem_submit(vm, &op, 1, &a, 1, 0, &t));
  CHECK(reached(3));
  do OK(vmem_range_query(vm, va, &r));
  while (r.flags & VMEM_RANGE_BUSY);
  EQ(pthread_create(&thread, NULL, let_go_then_finish, (void *)3), 0);
  OK(vMemUnmap(vm, va, PAGE));
  CHECK(gpu.e[3].done);
  pthread_join(thread, NULL);
  OK(vmem_wait(vm, t, -1));
  OK(vmem_check(vm));
  OK(vmem_close(vm));
}

/* A copy starts when the fill of its source is complete, and its source cannot change until the copy is complete. */
static void copies_hold_their_source(void) {
  for (int one_call = 0; one_call < 2; one_call++) {
    vmem_t vm = open_fake();
    uint64_t va;
    struct vmem_op op;
    vmem_ticket t, u;
    pthread_t thread;
    fake.bind = one_call ? fake_bind : NULL;
    OK(vMemReserve(vm, MIB(8), NULL, &va));
    CHECK(fill_begun(vm, va, &t));
    OK(vmem_order(vm, t, 0)); /* event 1: the fill of the source */
    op = populate(va + MIB(4), PAGE);
    op.src = va;
    op.flags = VMEM_OP_COPY;
    EQ(pthread_create(&thread, NULL, finish_later, (void *)1), 0);
    OK(vmem_submit(vm, &op, 1, NULL, 0, 0, &u));
    CHECK(reached(2)); /* event 2: the copy */
    CHECK(fills_over_at_copy);
    pthread_join(thread, NULL);
    EQ(vmem_wait(vm, u, 20000000), -ETIMEDOUT);
    EQ(vMemUnmap(vm, va, PAGE), -EBUSY);
    finish(2);
    OK(vmem_wait(vm, u, -1));
    OK(vmem_wait(vm, t, -1));
    OK(vMemUnmap(vm, va, PAGE));
    OK(vmem_check(vm));
    OK(vmem_close(vm));
  }
}

/* Memory under a fill is not replaced before the fill completes. */
static void replace_waits_for_fills(void) {
  for (int one_call = 0; one_call < 2; one_call++) {
    vmem_t vm = open_fake();
    uint64_t va;
    struct vmem_op op;
    vmem_ticket t;
    pthread_t thread;
    fake.bind = one_call ? fake_bind : NULL;
    OK(vMemReserve(vm, MIB(8), NULL, &va));
    CHECK(fill_begun(vm, va + MIB(4), &t));
    finish(1);
    OK(vmem_wait(vm, t, -1));
    CHECK(fill_begun(vm, va, &t));
    OK(vmem_order(vm, t, 0));
    op = (struct vmem_op){.op = VMEM_OP_MAP, .flags = VMEM_OP_REPLACE | VMEM_OP_CONSUME, .addr = va, .bytes = PAGE};
    OK(vmem_retain(vm, va + MIB(4), PAGE, &op.handle));
    EQ(pthread_create(&thread, NULL, finish_later, (void *)2), 0);
    OK(vmem_batch(vm, &op, 1, NULL, 0, 0));
    CHECK(gpu.e[2].done);
    pthread_join(thread, NULL);
    OK(vmem_wait(vm, t, -1));
    OK(vmem_check(vm));
    OK(vmem_close(vm));
  }
}

/* ---- a fill that waits for work that never completes --------------------------------------------- */

/* Creates a reservation with pages at [va, va + MIB(1)). */
static bool mapped(vmem_t vm, uint64_t *va) {
  struct vmem_op op = {.op = VMEM_OP_POPULATE, .flags = VMEM_OP_DIRTY, .bytes = PAGE, .count = 16, .stride = PAGE};
  if (vMemReserve(vm, MIB(8), NULL, va)) return false;
  op.addr = *va;
  return !vmem_batch(vm, &op, 1, NULL, 0, 0);
}

/* Submits a FILL of a page that waits for the returned event. The fill's own event is the next one created. */
static vm_event fill_behind(vmem_t vm, uint64_t addr, int value, vmem_ticket *t) {
  struct vmem_op op = {.op = VMEM_OP_FILL, .addr = addr, .bytes = PAGE, .value = (uint64_t)value};
  struct vmem_after a = {.kind = VMEM_AFTER_EVENT, .handle = new_event()};
  return vmem_submit(vm, &op, 1, &a, 1, 0, t) || vmem_order(vm, *t, 0) ? 0 : a.handle;
}

static struct vmem_op unmap(uint64_t addr) {
  return (struct vmem_op){.op = VMEM_OP_UNMAP, .addr = addr, .bytes = PAGE};
}

/* While a fill is blocked, every kind of operation on other pages runs, in this thread and on the worker. */
static void fills_hold_up_only_their_range(void) {
  for (int one_call = 0; one_call < 2; one_call++) {
    vmem_t vm = open_fake();
    uint64_t va, other;
    struct vmem_op op;
    vmem_ticket filling, own, t;
    vm_event work;
    char b[8] = {0};
    fake.bind = one_call ? fake_bind : NULL;
    CHECK(mapped(vm, &va) && mapped(vm, &other));
    work = fill_behind(vm, va, 7, &filling);
    CHECK(work);
    op = unmap(va);
    OK(vmem_submit(vm, &op, 1, NULL, 0, 0, &own)); /* waits without blocking other calls */
    OK(vmem_read(vm, b, va + PAGE, sizeof(b)));
    OK(vmem_write(vm, va + PAGE, b, sizeof(b)));
    OK(vMemUnmap(vm, va + 2 * PAGE, PAGE));
    OK(vmem_retain(vm, va + 3 * PAGE, PAGE, &op.handle));
    OK(vMemMap(vm, va + MIB(4), PAGE, op.handle, 0, 0)); /* a second address */
    OK(vmem_drop(vm, op.handle));
    OK(vmem_join(vm, va + 4 * PAGE, 4 * PAGE, NULL));
    op = (struct vmem_op){
        .op = VMEM_OP_MAP, .flags = VMEM_OP_REPLACE | VMEM_OP_CONSUME, .addr = va + 4 * PAGE, .bytes = PAGE};
    OK(vmem_retain(vm, va + 5 * PAGE, PAGE, &op.handle));
    OK(vmem_submit(vm, &op, 1, NULL, 0, 0, &t));
    OK(vmem_wait(vm, t, -1));
    op = unmap(va + 6 * PAGE);
    OK(vmem_submit(vm, &op, 1, NULL, 0, 0, &t));
    OK(vmem_wait(vm, t, -1));
    op = (struct vmem_op){
        .op = VMEM_OP_POPULATE, .flags = VMEM_OP_COPY, .addr = va + MIB(5), .bytes = PAGE, .src = va + PAGE};
    OK(vmem_submit(vm, &op, 1, NULL, 0, 0, &t));
    CHECK(reached((unsigned)work + 2)); /* the copy */
    finish(work + 2);
    OK(vmem_wait(vm, t, -1));
    OK(vMemFree(vm, other, VMEM_FREE_UNMAP));
    EQ(vmem_wait(vm, own, 0), -ETIMEDOUT);
    EQ(vmem_wait(vm, filling, 0), -ETIMEDOUT);
    EQ(vMemUnmap(vm, va, PAGE), -EBUSY);
    OK(vmem_check(vm));
    finish(work + 1);
    OK(vmem_wait(vm, own, -1));
    OK(vmem_wait(vm, filling, -1));
    CHECK(was_put(work + 1));
    OK(vmem_check(vm));
    OK(vmem_close(vm));
  }
}

/* A batch whose unmaps follow its own fill waits for the fill, and delays only batches that touch the filled page. */
static void unmaps_behind_their_own_fill(void) {
  enum { FINISHED, FAILED, CLOSED, HOWS };
  for (int run = 0; run < 2 * HOWS; run++) {
    int how = run % HOWS;
    vmem_t vm = open_fake();
    uint64_t va, other, alias;
    struct vmem_op ops[2], op;
    vmem_ticket mixed, t, behind;
    pthread_t thread;
    unsigned fill;
    fake.bind = run < HOWS ? NULL : fake_bind;
    CHECK(mapped(vm, &va) && mapped(vm, &other));
    alias = va + MIB(4);
    OK(vmem_retain(vm, va, PAGE, &op.handle));
    OK(vMemMap(vm, alias, PAGE, op.handle, 0, 0));
    OK(vmem_drop(vm, op.handle));
    ops[0] = (struct vmem_op){.op = VMEM_OP_FILL, .addr = va, .bytes = PAGE, .value = 7};
    ops[1] = unmap(other);
    fill = events() + 1;
    OK(vmem_submit(vm, ops, 2, NULL, 0, 0, &mixed));
    CHECK(reached(fill));
    op = unmap(other + PAGE);
    OK(vmem_submit(vm, &op, 1, NULL, 0, 0, &t)); /* another page is not affected */
    OK(vmem_wait(vm, t, -1));
    op = unmap(alias);
    OK(vmem_submit(vm, &op, 1, NULL, 0, 0, &behind)); /* the page that is being filled */
    op = unmap(other + 2 * PAGE);
    OK(vmem_submit(vm, &op, 1, NULL, 0, 0, &t));
    OK(vmem_wait(vm, t, -1));
    EQ(vmem_wait(vm, mixed, 0), -ETIMEDOUT);
    EQ(vmem_wait(vm, behind, 0), -ETIMEDOUT);
    EQ(vMemUnmap(vm, other, PAGE), -EBUSY);
    OK(vmem_check(vm));
    if (how == CLOSED) {
      EQ(pthread_create(&thread, NULL, finish_later, (void *)(uintptr_t)fill), 0);
      OK(vmem_close(vm));
      pthread_join(thread, NULL);
      CHECK(was_put(fill));
      continue;
    }
    if (how == FAILED) {
      pthread_mutex_lock(&gpu.lock);
      gpu.fail_query = -EIO;
      pthread_mutex_unlock(&gpu.lock);
      EQ(vmem_wait(vm, mixed, -1), -EIO);
      pthread_mutex_lock(&gpu.lock);
      gpu.fail_query = 0;
      pthread_mutex_unlock(&gpu.lock);
      OK(vMemUnmap(vm, other, PAGE)); /* the page is still mapped */
    }
    finish(fill);
    if (how == FINISHED) {
      OK(vmem_wait(vm, mixed, -1));
      EQ(vMemUnmap(vm, other, PAGE), -EFAULT);
      EQ(BYTE(va), 7);
    }
    OK(vmem_wait(vm, behind, -1));
    CHECK(was_put(fill));
    OK(vmem_check(vm));
    OK(vmem_close(vm));
  }
}

enum meeting { UNMAP, REPLACE, ALIAS, COPY, FILL, MEETINGS };

/* Operations on the worker wait if they touch the page of a running fill at its second address. */
static void fills_hold_up_their_pages(void) {
  for (int what = 0; what < MEETINGS; what++) {
    vmem_t vm = open_fake();
    uint64_t va, second;
    struct vmem_op op = {0};
    vmem_ticket filling, meets, elsewhere;
    vm_event work;
    vmem_handle h;
    CHECK(mapped(vm, &va));
    second = va + MIB(4);
    OK(vmem_retain(vm, va, PAGE, &h));
    OK(vMemMap(vm, second, PAGE, h, 0, 0));
    work = fill_behind(vm, va, 7, &filling);
    CHECK(work);
    op.addr = second;
    op.bytes = PAGE;
    if (what == UNMAP) {
      op.op = VMEM_OP_UNMAP;
    } else if (what == REPLACE) {
      op.op = VMEM_OP_MAP;
      op.flags = VMEM_OP_REPLACE;
      OK(vmem_retain(vm, va + PAGE, PAGE, &op.handle));
    } else if (what == ALIAS) {
      op.op = VMEM_OP_MAP;
      op.addr = va + MIB(5);
      op.handle = h;
    } else if (what == COPY) {
      op.op = VMEM_OP_POPULATE;
      op.flags = VMEM_OP_COPY;
      op.addr = va + MIB(5);
      op.src = second;
    } else {
      op.op = VMEM_OP_FILL;
      op.value = 8;
    }
    OK(vmem_submit(vm, &op, 1, NULL, 0, 0, &meets));
    op = unmap(va + 2 * PAGE);
    OK(vmem_submit(vm, &op, 1, NULL, 0, 0, &elsewhere));
    OK(vmem_wait(vm, elsewhere, -1));
    EQ(vmem_wait(vm, meets, 10000000), -ETIMEDOUT);
    EQ(events(), work + 1);
    finish(work + 1);
    if (what == COPY || what == FILL) {
      CHECK(reached((unsigned)work + 2));
      CHECK(what == FILL || fills_over_at_copy);
      finish(work + 2);
    }
    OK(vmem_wait(vm, meets, -1));
    OK(vmem_wait(vm, filling, -1));
    EQ(BYTE(va), what == FILL ? 8 : 7);
    OK(vmem_check(vm));
    OK(vmem_close(vm));
  }
}

struct host_side {
  vmem_t vm;
  vmem_ticket first;
  vm_event fill;
  int ret;
};

/* Lets the GPU continue when the other batch is finished, like a stream that waits for the host. */
static void *signal_after(void *arg) {
  struct host_side *h = arg;
  h->ret = vmem_wait(h->vm, h->first, -1);
  finish(h->fill);
  return NULL;
}

static void no_deadlock_with_the_host(void) {
  struct host_side h = {.vm = open_fake()};
  uint64_t va;
  struct vmem_op op;
  vmem_ticket filling, own;
  vm_event work;
  pthread_t thread;
  CHECK(mapped(h.vm, &va));
  work = fill_behind(h.vm, va, 7, &filling);
  CHECK(work);
  h.fill = work + 1;
  op = unmap(va);
  OK(vmem_submit(h.vm, &op, 1, NULL, 0, 0, &own));
  op = unmap(va + PAGE);
  OK(vmem_submit(h.vm, &op, 1, NULL, 0, 0, &h.first));
  EQ(pthread_create(&thread, NULL, signal_after, &h), 0);
  OK(vmem_wait(h.vm, own, -1));
  pthread_join(thread, NULL);
  OK(h.ret);
  OK(vmem_wait(h.vm, filling, -1));
  OK(vmem_check(h.vm));
  OK(vmem_close(h.vm));
}

/* More than 64 ranges need several back-end calls, each of which waits for the previous one. */
static void long_fills_are_chained(void) {
  vmem_t vm = open_fake();
  uint64_t va;
  struct vmem_op op = {.op = VMEM_OP_POPULATE, .flags = VMEM_OP_DIRTY, .bytes = PAGE, .count = 100, .stride = 2 * PAGE};
  struct vmem_after a = {.kind = VMEM_AFTER_EVENT};
  vmem_ticket t;
  OK(vMemReserve(vm, MIB(16), NULL, &va));
  op.addr = va;
  OK(vmem_batch(vm, &op, 1, NULL, 0, 0));
  a.handle = new_event();
  op.op = VMEM_OP_FILL;
  op.flags = 0;
  op.value = 3;
  OK(vmem_submit(vm, &op, 1, &a, 1, 0, &t));
  OK(vmem_order(vm, t, 9));
  EQ(events(), 3);
  EQ(gpu.e[2].after, 1);
  EQ(gpu.e[3].after, 2);
  EQ(gpu.waited_event, 3);
  EQ(vmem_wait(vm, t, 0), -ETIMEDOUT);
  finish(2);
  finish(3);
  OK(vmem_wait(vm, t, -1));
  EQ(BYTE(va + 99 * 2 * PAGE), 3);
  OK(vmem_check(vm));
  OK(vmem_close(vm));
}

/* Later calls do not walk through all unfinished fills, however many there are. */
static void many_fills(void) {
  enum { MANY = 1000 };
  vmem_t vm = open_fake();
  uint64_t va;
  struct vmem_op op = {.op = VMEM_OP_POPULATE, .flags = VMEM_OP_DIRTY, .bytes = 2 * MANY * PAGE};
  vmem_ticket t, filling[MANY];
  OK(vMemReserve(vm, 2 * MANY * PAGE, NULL, &va));
  op.addr = va;
  OK(vmem_batch(vm, &op, 1, NULL, 0, 0));
  for (int i = 0; i < MANY; i++) CHECK(fill_behind(vm, va + (uint64_t)i * PAGE, 7, &filling[i]));
  for (int i = 0; i < MANY; i++) {
    op = unmap(va + (uint64_t)(MANY + i) * PAGE);
    OK(vmem_submit(vm, &op, 1, NULL, 0, 0, &t));
    if (i % 100 == 99) OK(vmem_wait(vm, t, -1));
    OK(vmem_ticket_drop(vm, t));
  }
  OK(vmem_check(vm));
  EQ(stats_of(vm).pending, MANY);
  for (int i = 0; i < MANY; i++) finish((vm_event)(2 * i + 2));
  for (int i = 0; i < MANY; i++) {
    OK(vmem_wait(vm, filling[i], -1));
    EQ(BYTE(va + (uint64_t)i * PAGE), 7);
  }
  EQ(stats_of(vm).pending, 0);
  OK(vmem_check(vm));
  OK(vmem_close(vm));
}

/* ---- fills that complete in any order ----------------------------------------------------------- */

enum { STEPS = 1500, PAGES = 12 };

static int gpu_stops;

/* The "GPU": reaches the events in any order, each after its dependency. A fill writes to its address, so it crashes if
 * its page has been unmapped. */
static void *run_gpu(void *arg) {
  unsigned seed = (unsigned)(uintptr_t)arg;
  while (!__atomic_load_n(&gpu_stops, __ATOMIC_ACQUIRE)) {
    vm_event ready[MAX_EVENTS];
    unsigned n = 0;
    pthread_mutex_lock(&gpu.lock);
    for (vm_event e = 1; e <= gpu.n; e++)
      if (!gpu.e[e].done && (!gpu.e[e].after || gpu.e[gpu.e[e].after].done)) ready[n++] = e;
    pthread_mutex_unlock(&gpu.lock);
    seed = seed * 1664525u + 1013904223u;
    if (n) finish(ready[(seed >> 8) % n]);
    usleep((seed >> 24) % 64);
  }
  return NULL;
}

/* Each page has two addresses. Operations on one page take effect in the order in which they were submitted. */
static void fills_in_any_order(void) {
  vmem_t vm = open_fake();
  uint64_t va, alias, spare;
  unsigned seed = 20261122;
  int value[PAGES] = {0};
  bool second[PAGES] = {false};
  struct vmem_op op = {.op = VMEM_OP_POPULATE, .flags = VMEM_OP_DIRTY, .bytes = PAGE, .count = PAGES, .stride = PAGE};
  struct vmem_after a = {.kind = VMEM_AFTER_EVENT};
  vmem_ticket t;
  vmem_handle h;
  pthread_t thread;
  OK(vMemReserve(vm, MIB(8), NULL, &va));
  alias = va + MIB(2);
  spare = va + MIB(4);
  op.addr = va;
  OK(vmem_batch(vm, &op, 1, NULL, 0, 0));
  __atomic_store_n(&gpu_stops, 0, __ATOMIC_RELEASE);
  EQ(pthread_create(&thread, NULL, run_gpu, (void *)(uintptr_t)seed), 0);
  for (int step = 0; step < STEPS && events() < MAX_EVENTS - 8; step++) {
    unsigned r = seed = seed * 1664525u + 1013904223u, i = (r >> 8) % PAGES;
    uint64_t at = (r >> 4 & 1 && second[i] ? alias : va) + i * PAGE;
    unsigned char b;
    switch ((r >> 16) % 6) {
    case 0:
    case 1: /* a fill, behind an event or not */
      a.handle = r >> 20 & 1 ? new_event() : 0;
      op = (struct vmem_op){.op = VMEM_OP_FILL, .addr = at, .bytes = PAGE, .value = value[i] = (int)(r >> 24)};
      OK(vmem_submit(vm, &op, 1, &a, a.handle != 0, 0, &t));
      OK(vmem_order(vm, t, 0));
      OK(vmem_ticket_drop(vm, t));
      break;
    case 2:
      OK(vmem_read(vm, &b, at + PAGE - 1, 1));
      EQ(b, value[i]);
      break;
    case 3: /* map or unmap the second address */
      op = (struct vmem_op){.op = second[i] ? VMEM_OP_UNMAP : VMEM_OP_MAP, .addr = alias + i * PAGE, .bytes = PAGE};
      if (!second[i]) {
        OK(vmem_retain(vm, va + i * PAGE, PAGE, &h));
        op.handle = h;
        op.flags = VMEM_OP_CONSUME;
      }
      OK(vmem_submit(vm, &op, 1, NULL, 0, 0, &t));
      OK(vmem_wait(vm, t, -1));
      OK(vmem_ticket_drop(vm, t));
      second[i] = !second[i];
      break;
    case 4: /* replace the page by a copy */
      op = (struct vmem_op){.op = VMEM_OP_POPULATE, .flags = VMEM_OP_COPY, .addr = spare, .bytes = PAGE, .src = at};
      OK(vmem_submit(vm, &op, 1, NULL, 0, 0, &t));
      OK(vmem_wait(vm, t, -1));
      OK(vmem_ticket_drop(vm, t));
      EQ(BYTE(spare), value[i]);
      if (second[i]) OK(vMemUnmap(vm, alias + i * PAGE, PAGE));
      second[i] = false;
      op = (struct vmem_op){
          .op = VMEM_OP_MAP, .flags = VMEM_OP_REPLACE | VMEM_OP_CONSUME, .addr = va + i * PAGE, .bytes = PAGE};
      OK(vmem_retain(vm, spare, PAGE, &op.handle));
      OK(vmem_batch(vm, &op, 1, NULL, 0, 0));
      OK(vMemUnmap(vm, spare, PAGE));
      break;
    default: /* unmap it, and populate a new page */
      if (second[i]) OK(vMemUnmap(vm, alias + i * PAGE, PAGE));
      second[i] = false;
      op = unmap(va + i * PAGE);
      OK(vmem_submit(vm, &op, 1, NULL, 0, 0, &t));
      OK(vmem_wait(vm, t, -1));
      OK(vmem_ticket_drop(vm, t));
      op.op = VMEM_OP_POPULATE;
      OK(vmem_submit(vm, &op, 1, NULL, 0, 0, &t));
      OK(vmem_order(vm, t, 0));
      OK(vmem_ticket_drop(vm, t));
      value[i] = 0;
    }
    if (step % 64 == 0) OK(vmem_check(vm));
  }
  for (unsigned i = 0; i < PAGES; i++) {
    unsigned char b;
    OK(vmem_read(vm, &b, va + i * PAGE, 1));
    EQ(b, value[i]);
  }
  OK(vmem_check(vm));
  OK(vmem_close(vm));
  __atomic_store_n(&gpu_stops, 1, __ATOMIC_RELEASE);
  pthread_join(thread, NULL);
}

/* If a ticket is dropped while its fill is running, the fill keeps running and close waits for it. */
static void dropped_while_filling(void) {
  vmem_t vm = open_fake();
  uint64_t va;
  vmem_ticket filling;
  vm_event work;
  pthread_t thread;
  CHECK(mapped(vm, &va));
  work = fill_behind(vm, va, 7, &filling);
  CHECK(work);
  OK(vmem_ticket_drop(vm, filling));
  EQ(vmem_order(vm, filling, 0), -EBADF);
  EQ(stats_of(vm).pending, 1);
  OK(vmem_check(vm));
  EQ(pthread_create(&thread, NULL, finish_later, (void *)(uintptr_t)(work + 1)), 0);
  OK(vmem_close(vm));
  CHECK(gpu.e[work + 1].done && gpu.e[work + 1].put);
  pthread_join(thread, NULL);
}

/* A page that was not mapped when a batch was submitted is being filled at another address when the batch runs: the
 * batch maps it once the fill is complete. */
static void second_address_after_submit(void) {
  vmem_t vm = open_fake();
  uint64_t va, one = 1;
  int fd = eventfd(0, EFD_CLOEXEC);
  struct vmem_after after = after_fd(fd);
  struct vmem_op map = {.op = VMEM_OP_MAP, .bytes = PAGE}, fill = {.op = VMEM_OP_FILL, .bytes = PAGE, .value = 7};
  vmem_ticket first, second;
  OK(vMemReserve(vm, MIB(8), NULL, &va));
  OK(vMemCreate(vm, PAGE, NULL, &map.handle));
  map.addr = va + MIB(1);
  OK(vmem_submit(vm, &map, 1, &after, 1, 0, &second));
  OK(vMemMap(vm, va, PAGE, map.handle, 0, 0));
  fill.addr = va;
  OK(vmem_submit(vm, &fill, 1, NULL, 0, 0, &first));
  OK(vmem_order(vm, first, 0));
  EQ(events(), 1);
  EQ(write(fd, &one, 8), 8);
  EQ(vmem_wait(vm, second, 50000000), -ETIMEDOUT);
  finish(1);
  OK(vmem_wait(vm, second, -1));
  EQ(BYTE(va + MIB(1)), 7);
  OK(vmem_wait(vm, first, -1));
  OK(vmem_check(vm));
  OK(vmem_close(vm));
  close(fd);
}

MAIN(TEST(order_does_not_wait_for_fills), TEST(unmap_waits_for_fills), TEST(fill_batches_wait_on_the_gpu),
     TEST(broken_work), TEST(dependencies_fail_in_turn), TEST(second_address_waits_for_fills),
     TEST(second_address_after_submit), TEST(join_waits_for_fills), TEST(split_waits_for_fills),
     TEST(errors_keep_their_name), TEST(fills_are_never_overlooked), TEST(copies_hold_their_source),
     TEST(replace_waits_for_fills), TEST(fills_hold_up_only_their_range), TEST(unmaps_behind_their_own_fill),
     TEST(fills_hold_up_their_pages), TEST(no_deadlock_with_the_host), TEST(long_fills_are_chained), TEST(many_fills),
     TEST(fills_in_any_order), TEST(dropped_while_filling))
