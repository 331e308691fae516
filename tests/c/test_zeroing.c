/* SPDX-License-Identifier: MIT */
/*
 * Description: pages with old contents are zeroed once, before they are mapped, and never afterwards.
 *
 * A page is "dirty" here because the host back end was made to fail when it should have discarded it; on a
 * GPU, every page that was used before is dirty.
 */
#include <pthread.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "api/api.h"
#include "check.h"

enum { PAGES = 4 };

static vmem_t vm;
static uint64_t va;

/* Opens a context whose pool is one slab, all of it dirty. */
static void open_dirty(void) {
  struct vmem_open_opts o = {
      .size = sizeof(o), .slab_size = PAGES * PAGE, .mem_limit = PAGES * PAGE, .pool_high = VMEM_KEEP_ALL};
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

/* After a map that fails halfway, pages that it did not reach are still dirty. */
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

/* A map that fails because another batch is mapping the pages changes nothing about them. */
static void a_failed_map_and_another_batch(void) {
  int fd = eventfd(0, EFD_CLOEXEC);
  struct vmem_after after = after_fd(fd);
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

/* While one batch is about to zero a page, no other can map it: it would see the old contents, and its writes
 * would be lost. Other pages of the handle can be mapped. */
static void two_batches_one_page(void) {
  int fd = eventfd(0, EFD_CLOEXEC);
  struct vmem_after after = after_fd(fd);
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

/* One batch may map a dirty page twice, which is zeroed once; if the batch is cancelled, the page is dirty again. */
static void twice_in_one_batch(void) {
  vmem_handle h;
  struct vmem_op op[2] = {{.op = VMEM_OP_MAP, .bytes = 2 * PAGE},
                          {.op = VMEM_OP_MAP, .bytes = PAGE, .flags = VMEM_OP_READONLY}};
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

/* Pages are zeroed before they are mapped, even read-only. No old contents are visible, whichever call fails. */
static void read_only(void) {
  int err = -EIO;
  uint64_t nth = 0;
  for (; err; nth++) {
    vmem_handle h;
    open_dirty();
    OK(vMemCreate(vm, 2 * PAGE, NULL, &h));
    OK(vmem_inject(vm, VMEM_INJECT_MAP | VMEM_INJECT_UNMAP | VMEM_INJECT_FILL | VMEM_INJECT_SLAB, nth, 1, EIO));
    err = vMemMap(vm, va, 2 * PAGE, h, 0, VMEM_MAP_READONLY);
    OK(vmem_inject(vm, 0, 0, 0, 0));
    CHECK(!err || err == -EIO);
    if (err) OK(vMemMap(vm, va, 2 * PAGE, h, 0, VMEM_MAP_READONLY));
    CHECK(all(va, 2 * PAGE, 0));
    OK(vmem_check(vm));
    OK(vmem_close(vm));
  }
  CHECK(nth > 2);
}

/* ---- fills on a queue, as on a GPU ------------------------------------------------------------ */

/* The back end host, except that freed pages are dirty and a thread executes fills in order. */
static struct vm_backend fake;

static struct {
  pthread_mutex_t lock;
  pthread_cond_t cond;
  pthread_t thread;
  bool stop, stalled;
  bool unseen; /* queries never report a fill as complete; only waits do */
  struct {
    struct vm_be_range r[CLEAN_RUNS];
    size_t n;
    uint8_t value;
  } q[256];
  uint64_t queued, over; /* numbers of fills; a fill's event is the value of `queued` that includes it */
} gpu = {.lock = PTHREAD_MUTEX_INITIALIZER, .cond = PTHREAD_COND_INITIALIZER};

static void *gpu_thread(void *arg) {
  pthread_mutex_lock(&gpu.lock);
  for (;;) {
    while (!gpu.stop && (gpu.stalled || gpu.over == gpu.queued)) pthread_cond_wait(&gpu.cond, &gpu.lock);
    if (gpu.over == gpu.queued) break;
    for (size_t i = 0, k = gpu.over % 256; i < gpu.q[k].n; i++)
      memset((void *)(uintptr_t)gpu.q[k].r[i].addr, gpu.q[k].value, gpu.q[k].r[i].bytes);
    gpu.over++;
    pthread_cond_broadcast(&gpu.cond);
  }
  pthread_mutex_unlock(&gpu.lock);
  return arg;
}

static int fake_fill(void *be, const struct vm_be_range *r, size_t n, uint8_t value, const vm_event *after,
                     size_t num_after, vm_event *done) {
  (void)be;
  (void)after;
  (void)num_after;
  if (n > CLEAN_RUNS) return vm_fail(-EIO, "too many ranges for the stand-in");
  pthread_mutex_lock(&gpu.lock);
  while (gpu.queued - gpu.over == 256) pthread_cond_wait(&gpu.cond, &gpu.lock);
  memcpy(gpu.q[gpu.queued % 256].r, r, n * sizeof(*r));
  gpu.q[gpu.queued % 256].n = n;
  gpu.q[gpu.queued % 256].value = value;
  *done = ++gpu.queued;
  pthread_cond_broadcast(&gpu.cond);
  pthread_mutex_unlock(&gpu.lock);
  return 0;
}

static int fake_query(void *be, vm_event e) {
  bool over;
  (void)be;
  pthread_mutex_lock(&gpu.lock);
  over = gpu.over >= e && !gpu.unseen;
  pthread_mutex_unlock(&gpu.lock);
  return over ? 0 : -EAGAIN;
}

static int fake_wait(void *be, vm_event e) {
  (void)be;
  pthread_mutex_lock(&gpu.lock);
  while (gpu.over < e) pthread_cond_wait(&gpu.cond, &gpu.lock);
  pthread_mutex_unlock(&gpu.lock);
  return 0;
}

static void fake_put(void *be, vm_event e) {
  (void)be;
  (void)e;
}

static int fake_from(void *be, uint32_t kind, uint64_t handle, vm_event *e) {
  (void)be;
  (void)kind;
  *e = handle;
  return 0;
}

static void stall(bool on) {
  pthread_mutex_lock(&gpu.lock);
  gpu.stalled = on;
  pthread_cond_broadcast(&gpu.cond);
  pthread_mutex_unlock(&gpu.lock);
}

static void hide(bool on) {
  pthread_mutex_lock(&gpu.lock);
  gpu.unseen = on;
  pthread_mutex_unlock(&gpu.lock);
}

static struct vm_ctx *open_gpu(bool background, uint64_t limit) {
  struct vmem_open_opts o = {
      .size = sizeof(o), .backend = "host", .slab_size = MIB(1), .pool_high = VMEM_KEEP_ALL, .mem_limit = limit};
  struct vm_ctx *c;
  int err;
  if (vmem_open(&o, &vm) || !(c = vm_get(vm, "test", &err))) return NULL;
  fake = vm_backend_host;
  fake.discard = NULL;
  fake.fill = fake_fill;
  fake.event_from = fake_from;
  fake.event_query = fake_query;
  fake.event_wait = fake_wait;
  fake.event_put = fake_put;
  c->be = &fake;
  c->info->fresh_is_zero = false;
  c->phys->clean.background = background;
  vm_put(c);
  gpu.queued = gpu.over = 0;
  gpu.stop = gpu.stalled = gpu.unseen = false;
  if (pthread_create(&gpu.thread, NULL, gpu_thread, NULL) || vMemReserve(vm, MIB(64), NULL, &va)) return NULL;
  return c;
}

static int close_gpu(void) {
  int err = vmem_close(vm);
  pthread_mutex_lock(&gpu.lock);
  gpu.stop = true;
  gpu.stalled = false;
  pthread_cond_broadcast(&gpu.cond);
  pthread_mutex_unlock(&gpu.lock);
  pthread_join(gpu.thread, NULL);
  return err;
}

static int change(uint32_t kind, uint64_t addr, uint64_t bytes, uint32_t flags) {
  struct vmem_op op = {.op = kind, .flags = flags, .addr = addr, .bytes = bytes};
  return vmem_batch(vm, &op, 1, NULL, 0, 0);
}

static bool cleaned(uint64_t dirty) {
  for (int i = 0; i < 5000 && stats_of(vm).dirty_bytes != dirty; i++) usleep(1000);
  return stats_of(vm).dirty_bytes == dirty;
}

static void taint(uint64_t addr, uint64_t bytes) { memset((void *)(uintptr_t)addr, 0xdd, bytes); }

/* Freed pages are zeroed in the background, and then handed out without another fill. */
static void in_the_background(void) {
  uint64_t fills;
  CHECK(open_gpu(true, MIB(1)));
  OK(change(VMEM_OP_POPULATE, va, MIB(1), VMEM_OP_DIRTY));
  taint(va, MIB(1));
  OK(change(VMEM_OP_UNMAP, va, MIB(1), 0));
  CHECK(cleaned(0));
  EQ(stats_of(vm).free_bytes, MIB(1));
  OK(vmem_check(vm));
  fills = stats_of(vm).fill_calls;
  OK(change(VMEM_OP_POPULATE, va, MIB(1), 0));
  EQ(stats_of(vm).fill_calls, fills);
  CHECK(all(va, MIB(1), 0));
  EQ(stats_of(vm).mappings, 2); /* including the slab's own mapping */
  OK(close_gpu());
}

/* Clean pages are mapped first; when none are left, dirty pages are zeroed before they are mapped. */
static void clean_pages_first(void) {
  uint64_t fills;
  CHECK(open_gpu(false, MIB(1)));
  OK(change(VMEM_OP_POPULATE, va, MIB(1), 0));
  fills = stats_of(vm).fill_calls;
  taint(va, MIB(1));
  OK(change(VMEM_OP_UNMAP, va, 4 * PAGE, 0));
  EQ(stats_of(vm).dirty_bytes, 4 * PAGE);
  OK(change(VMEM_OP_POPULATE, va, 2 * PAGE, 0));
  CHECK(all(va, 2 * PAGE, 0) && all(va + 4 * PAGE, MIB(1) - 4 * PAGE, 0xdd));
  EQ(stats_of(vm).fill_calls, fills + 1);
  EQ(stats_of(vm).dirty_bytes, 2 * PAGE);
  OK(vmem_check(vm));
  OK(close_gpu());
}

static void *go_on(void *arg) {
  usleep(20000);
  stall(false);
  return arg;
}

/* Waits until a batch of background zeroing is in flight. */
static void begun(struct vm_ctx *c) {
  for (bool yes = false; !yes; usleep(1000)) {
    pthread_mutex_lock(&c->lock);
    yes = c->phys->clean.n && !c->phys->clean.issuing;
    pthread_mutex_unlock(&c->lock);
  }
}

/* A call that maps a page while it is being zeroed waits, even if it accepts dirty pages, so that later writes to the
 * page are not overwritten. */
static void taken_in_flight(void) {
  for (uint32_t dirty = 0; dirty < 2; dirty++) {
    pthread_t thread;
    struct vm_ctx *c = open_gpu(true, MIB(1));
    CHECK(c);
    OK(change(VMEM_OP_POPULATE, va, MIB(1), VMEM_OP_DIRTY));
    taint(va, MIB(1));
    stall(true);
    OK(change(VMEM_OP_UNMAP, va, MIB(1), 0));
    begun(c);
    EQ(pthread_create(&thread, NULL, go_on, NULL), 0);
    OK(change(VMEM_OP_POPULATE, va, MIB(1), dirty ? VMEM_OP_DIRTY : 0));
    taint(va, MIB(1));
    pthread_join(thread, NULL);
    OK(vmem_check(vm));
    CHECK(all(va, MIB(1), 0xdd));
    OK(change(VMEM_OP_UNMAP, va, PAGE, 0));
    CHECK(cleaned(0));
    OK(change(VMEM_OP_POPULATE, va, PAGE, 0));
    CHECK(all(va, PAGE, 0) && all(va + PAGE, MIB(1) - PAGE, 0xdd));
    OK(vmem_check(vm));
    OK(close_gpu());
  }
}

/* A batch copies to pages that are being zeroed in the background, then fails: the end of the zeroing does not mark the
 * pages as clean. */
static void copied_to_in_flight(void) {
  struct vmem_op op[2] = {{.op = VMEM_OP_POPULATE, .flags = VMEM_OP_COPY, .bytes = 7 * PAGE},
                          {.op = VMEM_OP_UNMAP, .bytes = PAGE}};
  struct vm_ctx *c = open_gpu(true, MIB(1));
  CHECK(c);
  OK(change(VMEM_OP_POPULATE, va, MIB(1), VMEM_OP_DIRTY));
  taint(va, MIB(1));
  hide(true);
  OK(change(VMEM_OP_UNMAP, va, 8 * PAGE, 0));
  begun(c);
  op[0].addr = va + MIB(2);
  op[0].src = va + 8 * PAGE;
  op[1].addr = va + 15 * PAGE;
  OK(vmem_inject(vm, VMEM_INJECT_UNMAP, 0, 1, EIO));
  EQ(vmem_batch(vm, op, 2, NULL, 0, 0), -EIO);
  OK(vmem_check(vm));
  hide(false);
  CHECK(cleaned(0));
  OK(change(VMEM_OP_POPULATE, va, 8 * PAGE, 0));
  CHECK(all(va, 8 * PAGE, 0) && all(va + 8 * PAGE, 8 * PAGE, 0xdd));
  OK(vmem_check(vm));
  OK(close_gpu());
}

/* The driver is suspended for too long while the worker zeroes pages: the batch fails with that error, and its pages do
 * not stay marked as being zeroed. */
static void suspended(void) {
  struct vmem_op op = {.op = VMEM_OP_POPULATE, .bytes = MIB(1)};
  vmem_ticket t;
  CHECK(open_gpu(false, MIB(1)));
  OK(change(VMEM_OP_POPULATE, va, MIB(1), VMEM_OP_DIRTY));
  taint(va, MIB(1));
  OK(change(VMEM_OP_UNMAP, va, MIB(1), 0));
  op.addr = va;
  OK(vmem_inject(vm, VMEM_INJECT_FILL, 0, 1, EAGAIN));
  OK(vmem_submit(vm, &op, 1, NULL, 0, 0, &t));
  EQ(vmem_wait(vm, t, -1), -EAGAIN);
  EQ(stats_of(vm).mapped_bytes, 0);
  OK(vmem_submit(vm, &op, 1, NULL, 0, 0, &t));
  OK(vmem_wait(vm, t, -1));
  CHECK(all(va, MIB(1), 0));
  OK(vmem_check(vm));
  OK(close_gpu());
}

/* The resources for zeroing a submitted batch's pages are allocated before the call returns; if they cannot be, it
 * fails. */
static void short_at_submit(void) {
  struct vmem_op op = {.op = VMEM_OP_POPULATE, .bytes = PAGE};
  struct vmem_stats before, after;
  vmem_ticket t;
  for (uint64_t nth = 0; nth < 2; nth++) { /* fail the addresses, then the mapping */
    CHECK(open_gpu(false, MIB(1)));
    OK(change(VMEM_OP_POPULATE, va, MIB(1), VMEM_OP_DIRTY));
    taint(va, MIB(1));
    OK(change(VMEM_OP_UNMAP, va, MIB(1), 0));
    op.addr = va;
    before = stats_of(vm);
    OK(vmem_inject(vm, VMEM_INJECT_SLAB, nth, 1, ENOMEM));
    EQ(vmem_submit(vm, &op, 1, NULL, 0, 0, &t), -ENOMEM);
    after = stats_of(vm);
    CHECK(same_state(&before, &after));
    EQ(after.tickets, 0);
    OK(vmem_submit(vm, &op, 1, NULL, 0, 0, &t));
    OK(vmem_wait(vm, t, -1));
    CHECK(all(va, PAGE, 0));
    OK(vmem_check(vm));
    OK(close_gpu());
  }
}

/* A slab above the high watermark is kept while it is being zeroed and returned afterwards, whichever thread waited. */
static void trimmed_after_a_hold(void) {
  struct vm_ctx *c = open_gpu(true, 0);
  CHECK(c);
  OK(change(VMEM_OP_POPULATE, va, MIB(1), VMEM_OP_DIRTY));
  hide(true);
  OK(change(VMEM_OP_UNMAP, va, MIB(1), 0));
  begun(c);
  pthread_mutex_lock(&c->lock);
  c->opts.pool_high = 0;
  vm_clean_hold(c);
  vm_clean_release(c);
  pthread_mutex_unlock(&c->lock);
  hide(false);
  for (int i = 0; i < 5000 && stats_of(vm).slab_bytes; i++) usleep(1000);
  EQ(stats_of(vm).slab_bytes, 0);
  OK(close_gpu());
}

static struct vm_ctx *the_context;
static struct vm_slab *other_slab;
static int others_error;

static int map_and_alias(void *be, uint64_t addr, uint64_t bytes, uint64_t slab, uint64_t offset, uint32_t flags,
                         bool sparse) {
  struct vm_slab *s = other_slab;
  other_slab = NULL;
  if (s) others_error = vm_slab_alias(the_context, s, VMEM_INJECT_SLAB);
  return vm_backend_host.map(be, addr, bytes, slab, offset, flags, sparse);
}

/* Both slabs need their own mapping at the same time, but the limit allows one. */
static void limit_on_aliases(void) {
  struct vm_ctx *c = open_gpu(false, 0);
  vmem_handle h[2];
  struct vm_slab *s[2];
  CHECK(c);
  for (int i = 0; i < 2; i++) OK(vMemCreate(vm, MIB(1), NULL, &h[i]));
  pthread_mutex_lock(&c->lock);
  for (int i = 0; i < 2; i++) s[i] = c->phys->hdls[(uint32_t)h[i]].runs[0].slab;
  c->info->pub.max_mappings = 1;
  pthread_mutex_unlock(&c->lock);
  CHECK(s[0] != s[1]);
  fake.map = map_and_alias;
  the_context = c;
  other_slab = s[1];
  OK(vm_slab_alias(c, s[0], VMEM_INJECT_SLAB));
  EQ(others_error, -ENOSPC);
  EQ(stats_of(vm).mappings, 1);
  OK(vmem_check(vm));
  OK(close_gpu());
}

/* The pages of a submitted batch are zeroed while it waits for other work; later batches run before it. */
static void submitted(void) {
  int fd = eventfd(0, EFD_CLOEXEC);
  struct vmem_after after = after_fd(fd);
  struct vmem_op op = {.op = VMEM_OP_POPULATE, .bytes = PAGE};
  uint64_t one = 1;
  vmem_ticket t, u;
  CHECK(open_gpu(false, MIB(1)));
  op.addr = va;
  OK(vmem_submit(vm, &op, 1, &after, 1, 0, &t));
  for (int i = 0; i < 5000 && !stats_of(vm).fill_calls; i++) usleep(1000);
  EQ(stats_of(vm).fill_calls, 1);
  stall(true);
  op.addr = va + MIB(2);
  OK(vmem_submit(vm, &op, 1, NULL, 0, 0, &t));
  op.addr = va + MIB(4);
  op.flags = VMEM_OP_DIRTY;
  OK(vmem_submit(vm, &op, 1, NULL, 0, 0, &u));
  OK(vmem_wait(vm, u, -1));
  EQ(vmem_wait(vm, t, 0), -ETIMEDOUT);
  stall(false);
  OK(vmem_wait(vm, t, -1));
  EQ(BYTE(va + MIB(2)), 0);
  EQ(write(fd, &one, 8), 8);
  OK(vmem_check(vm));
  OK(close_gpu());
  close(fd);
}

/* Whichever call fails, in the background or not, no page shows old contents, and later calls succeed. */
static void failures(void) {
  static const uint32_t kinds[] = {VMEM_INJECT_CLEAN, VMEM_INJECT_SLAB, VMEM_INJECT_FILL, VMEM_INJECT_HEAP};
  for (size_t k = 0; k < sizeof(kinds) / sizeof(kinds[0]); k++)
    for (uint64_t nth = 0; nth < 8; nth++) {
      struct vmem_stats before, after;
      int ret;
      CHECK(open_gpu(nth & 1, MIB(2)));
      OK(change(VMEM_OP_POPULATE, va, MIB(2), VMEM_OP_DIRTY));
      taint(va, MIB(2));
      OK(vmem_inject(vm, kinds[k], nth / 2, 1, EIO));
      ret = change(VMEM_OP_UNMAP, va, MIB(1), 0);
      if (!ret) {
        before = stats_of(vm);
        ret = change(VMEM_OP_POPULATE, va, MIB(1), 0);
        after = stats_of(vm);
        if (ret) CHECK(same_state(&before, &after));
        OK(vmem_inject(vm, 0, 0, 0, 0));
        if (ret) OK(change(VMEM_OP_POPULATE, va, MIB(1), 0));
        CHECK(all(va, MIB(1), 0));
      }
      OK(vmem_inject(vm, 0, 0, 0, 0));
      OK(vmem_check(vm));
      OK(close_gpu());
    }
}

/* vmem_trim returns pages to the driver even if they are being zeroed. */
static void trimmed(void) {
  uint64_t freed;
  CHECK(open_gpu(true, 0));
  for (int i = 0; i < 20; i++) {
    OK(change(VMEM_OP_POPULATE, va, MIB(8), VMEM_OP_DIRTY));
    OK(change(VMEM_OP_UNMAP, va, MIB(8), 0));
    OK(vmem_trim(vm, 0, &freed));
    EQ(freed, MIB(8));
    EQ(stats_of(vm).slab_bytes, 0);
    EQ(stats_of(vm).mappings, 0);
    OK(vmem_check(vm));
  }
  OK(close_gpu());
}

static uint64_t seed = 88172645463325252ull;
static uint32_t rnd(uint32_t n) {
  seed ^= seed << 13;
  seed ^= seed >> 7;
  seed ^= seed << 17;
  return (uint32_t)(seed >> 33) % n;
}

static void *stutter(void *arg) {
  while (!__atomic_load_n((bool *)arg, __ATOMIC_RELAXED)) {
    stall(true);
    usleep(500);
    stall(false);
    usleep(500);
  }
  return NULL;
}

/* Maps and unmaps pages, directly and by handle, clean or dirty, while others are zeroed in the background. */
static void random_walk(void) {
  enum { GRANULES = 64 };
  static unsigned char mark[GRANULES];
  pthread_t thread;
  bool stop = false;
  CHECK(open_gpu(true, GRANULES * PAGE * 3 / 4));
  memset(mark, 0, sizeof(mark));
  EQ(pthread_create(&thread, NULL, stutter, &stop), 0);
  for (int step = 0; step < 3000; step++) {
    uint32_t i = rnd(GRANULES), n = 1 + rnd(8), how = rnd(5);
    bool none = true;
    if (i + n > GRANULES) n = GRANULES - i;
    for (uint32_t k = 0; k < n; k++) none = none && !mark[i + k];
    if (!none) {
      OK(change(VMEM_OP_UNMAP, va + i * PAGE, n * PAGE, VMEM_OP_HOLES));
      memset(mark + i, 0, n);
    } else {
      struct vmem_create_opts o = {.size = sizeof(o), .flags = how == 1 ? VMEM_CREATE_DIRTY : 0};
      vmem_handle h;
      int ret;
      if (how < 2) {
        if (!(ret = vMemCreate(vm, n * PAGE, &o, &h))) {
          if (rnd(3) == 0) {
            OK(vmem_drop(vm, h));
            continue;
          }
          if (rnd(2)) usleep(300);
          OK(vMemMap(vm, va + i * PAGE, n * PAGE, h, 0, 0));
          OK(vmem_drop(vm, h));
        }
      } else {
        ret = change(VMEM_OP_POPULATE, va + i * PAGE, n * PAGE, how == 2 ? VMEM_OP_DIRTY : 0);
      }
      CHECK(!ret || ret == -ENOMEM);
      for (uint32_t k = 0; !ret && k < n; k++) {
        if (how != 1 && how != 2) CHECK(all(va + (i + k) * PAGE, PAGE, 0));
        mark[i + k] = (unsigned char)(1 + rnd(255));
        memset((void *)(uintptr_t)(va + (i + k) * PAGE), mark[i + k], PAGE);
      }
    }
    if (step % 20 == 0) {
      OK(vmem_check(vm));
      for (uint32_t k = 0; k < GRANULES; k++)
        if (mark[k]) CHECK(all(va + k * PAGE, PAGE, mark[k]));
    }
  }
  __atomic_store_n(&stop, true, __ATOMIC_RELAXED);
  pthread_join(thread, NULL);
  OK(close_gpu());
}

MAIN(TEST(after_a_failed_map), TEST(a_failed_map_and_another_batch), TEST(two_batches_one_page),
     TEST(twice_in_one_batch), TEST(read_only), TEST(in_the_background), TEST(clean_pages_first), TEST(taken_in_flight),
     TEST(copied_to_in_flight), TEST(suspended), TEST(short_at_submit), TEST(submitted), TEST(failures), TEST(trimmed),
     TEST(trimmed_after_a_hold), TEST(limit_on_aliases), TEST(random_walk))
