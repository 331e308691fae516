/* SPDX-License-Identifier: MIT */
/*
 * Description: fills that run on after their batch, and GPU work as events, as a GPU back end has them.
 *
 * The host back end with a stand-in for the GPU's queue: a fill is written down and carried out when the
 * test lets it; an event is over when the test says so. Everything else is the real thing.
 */
#include <pthread.h>
#include <unistd.h>

#include "check.h"
#include "internal.h"

enum { MAX_EVENTS = 64, MAX_RANGES = 64 };

static struct {
  pthread_mutex_t lock;
  struct {
    bool done, put, fill;
    uint8_t value;
    size_t n;
    struct vm_be_range r[MAX_RANGES];
    uint64_t after; /* of a fill: its first dependency */
  } e[MAX_EVENTS];
  unsigned n;
  uint64_t waited_stream, waited_event;
  int fail_query;
  vm_event hold; /* putting this one takes long */
} gpu = {.lock = PTHREAD_MUTEX_INITIALIZER};

static struct vm_backend fake;

static vm_event new_event(void) {
  vm_event e;
  pthread_mutex_lock(&gpu.lock);
  e = ++gpu.n;
  memset(&gpu.e[e], 0, sizeof(gpu.e[e]));
  pthread_mutex_unlock(&gpu.lock);
  return e;
}

static int fake_fill(void *be, const struct vm_be_range *r, size_t n, uint8_t value, const vm_event *after,
                     size_t num_after, vm_event *done) {
  vm_event e = new_event();
  (void)be;
  if (n > MAX_RANGES) return vm_fail(-EIO, "too many ranges for the stand-in");
  pthread_mutex_lock(&gpu.lock);
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

static int fake_from(void *be, uint32_t kind, uint64_t handle, vm_event *e) {
  (void)be;
  *e = kind == VMEM_AFTER_EVENT ? handle : new_event();
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

/* The "GPU" reaches this event. */
static void finish(vm_event e) {
  pthread_mutex_lock(&gpu.lock);
  for (size_t i = 0; gpu.e[e].fill && i < gpu.e[e].n; i++)
    memset((void *)(uintptr_t)gpu.e[e].r[i].addr, gpu.e[e].value, gpu.e[e].r[i].bytes);
  gpu.e[e].done = true;
  pthread_mutex_unlock(&gpu.lock);
}

static unsigned events(void) {
  unsigned n;
  pthread_mutex_lock(&gpu.lock);
  n = gpu.n;
  pthread_mutex_unlock(&gpu.lock);
  return n;
}

/* Waits until the worker has made its n-th event. */
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

/* Over when the test says so, though the bytes are there at once. */
static int fake_copy(void *be, const struct vm_be_copy *copies, size_t n, const vm_event *after, size_t num_after, vm_event *done) {
  fills_over_at_copy = fills_over();
  vm_backend_host.copy(be, copies, n, after, num_after, done);
  *done = new_event();
  return 0;
}

static int fake_bind(void *be, const struct vm_bind_op *ops, size_t n, struct vm_bind_result *r) {
  for (r->done = 0; r->done < n; r->done++) {
    const struct vm_bind_op *op = &ops[r->done];
    int err = op->kind == VM_BIND_UNMAP ? vm_backend_host.unmap(be, op->addr, op->bytes, op->sparse)
                                        : vm_backend_host.map(be, op->addr, op->bytes, op->slab, op->offset, op->flags, op->sparse);
    if (err) return err;
  }
  return 0;
}

/* Waits until the worker has given the event back, which it does after the ticket is done. */
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

static vmem_t open_fake(void) {
  vmem_t vm = open_host(0);
  int err;
  struct vm_ctx *c = vm_get(vm, "test", &err);
  fake = vm_backend_host;
  fake.discard = NULL; /* pages come back dirty, as on a GPU */
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
  vm_put(c);
  return vm;
}

static struct vmem_op populate(uint64_t addr) {
  return (struct vmem_op){.op = VMEM_OP_POPULATE, .addr = addr, .bytes = PAGE};
}

/* A new page, and a fill of it that is under way when the call returns: the stand-in's next event. */
static bool fill_begun(vmem_t vm, uint64_t addr, vmem_ticket *t) {
  struct vmem_op op = populate(addr);
  unsigned e = events() + 1;
  if (vmem_batch(vm, &op, 1, NULL, 0)) return false;
  op.op = VMEM_OP_FILL;
  return !vmem_submit(vm, &op, 1, NULL, 0, t) && reached(e);
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

/* What a fill may be writing is neither unmapped nor read before the fill is over. */
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
  OK(vmem_submit(vm, &op, 1, &a, 1, &t));
  CHECK(reached(3)); /* the fill is queued behind event 2, without this thread or the worker waiting */
  EQ(gpu.e[3].after, 2);
  EQ(gpu.e[2].done, false);
  /* A batch that unmaps waits for the event itself, and lets others pass. */
  op = (struct vmem_op){.op = VMEM_OP_UNMAP, .addr = va, .bytes = PAGE};
  OK(vmem_order(vm, t, 1));
  OK(vmem_submit(vm, &op, 1, &a, 1, &u));
  op = populate(va + MIB(4));
  OK(vmem_submit(vm, &op, 1, NULL, 0, &t));
  OK(vmem_wait(vm, t, -1));
  EQ(vmem_wait(vm, u, 0), -ETIMEDOUT);
  finish(2);
  finish(3);
  OK(vmem_wait(vm, u, -1));
  OK(vmem_check(vm));
  OK(vmem_close(vm));
}

/* A page that a fill is writing to is not shown at a second address before that is over. */
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
  BYTE(va) = 9; /* stands for old contents */
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

static void consolidation_waits_for_fills(void) {
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
  OK(vmem_consolidate(vm, va, 2 * PAGE, NULL));
  CHECK(fills_over_at_remap);
  EQ(stats_of(vm).mappings, 1);
  pthread_join(thread, NULL);
  OK(vmem_close(vm));
}

/* A call that waits for another batch's fills still fails in its own name. */
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

/* Work that ends in an error: nothing is unmapped, the ticket tells. */
static void broken_work(void) {
  vmem_t vm = open_fake();
  uint64_t va;
  struct vmem_op op;
  struct vmem_after a = {.kind = VMEM_AFTER_STREAM, .handle = 5};
  vmem_ticket t;
  OK(vMemReserve(vm, MIB(8), NULL, &va));
  op = populate(va);
  op.flags = VMEM_OP_DIRTY;
  OK(vmem_batch(vm, &op, 1, NULL, 0));
  EQ(events(), 0);
  gpu.fail_query = -EIO;
  op = (struct vmem_op){.op = VMEM_OP_UNMAP, .addr = va, .bytes = PAGE};
  OK(vmem_submit(vm, &op, 1, &a, 1, &t));
  EQ(vmem_wait(vm, t, -1), -EIO);
  CHECK(strstr(vmem_last_error(), "broken"));
  EQ(stats_of(vm).mapped_bytes, PAGE);
  EQ(vmem_batch(vm, &op, 1, &a, 1), -EIO);
  EQ(stats_of(vm).mapped_bytes, PAGE);
  gpu.fail_query = 0;
  OK(vmem_check(vm));
  OK(vMemUnmap(vm, va, PAGE));
  OK(vmem_close(vm));
}

static void *let_go_then_finish(void *arg) {
  usleep(20000);
  __atomic_store_n(&gpu.hold, 0, __ATOMIC_RELEASE);
  return finish_later(arg);
}

/* Nor in the moment between a batch's commit and the worker's note of its fill. */
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
  a.handle = new_event(); /* 2, which the worker puts after the commit */
  __atomic_store_n(&gpu.hold, 2, __ATOMIC_RELEASE);
  op = (struct vmem_op){.op = VMEM_OP_FILL, .addr = va, .bytes = PAGE};
  OK(vmem_submit(vm, &op, 1, &a, 1, &t));
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

/* A copy begins when what fills its source is over, and the source is held until the copy is. */
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
    op = populate(va + MIB(4));
    op.src = va;
    op.flags = VMEM_OP_COPY;
    EQ(pthread_create(&thread, NULL, finish_later, (void *)1), 0);
    OK(vmem_submit(vm, &op, 1, NULL, 0, &u));
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

/* What a fill may be writing is not replaced before the fill is over. */
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
    OK(vmem_batch(vm, &op, 1, NULL, 0));
    CHECK(gpu.e[2].done);
    pthread_join(thread, NULL);
    OK(vmem_wait(vm, t, -1));
    OK(vmem_check(vm));
    OK(vmem_close(vm));
  }
}

MAIN(TEST(order_does_not_wait_for_fills), TEST(unmap_waits_for_fills), TEST(fill_batches_wait_on_the_gpu), TEST(broken_work),
     TEST(second_address_waits_for_fills), TEST(consolidation_waits_for_fills), TEST(errors_keep_their_name),
     TEST(fills_are_never_overlooked), TEST(copies_hold_their_source), TEST(replace_waits_for_fills))
