/* SPDX-License-Identifier: MIT */
/*
 * Description: random batches, submits, accesses, moves, splits, joins and injected failures from several threads.
 *
 * Each thread knows the contents of its own pages and checks them after every call; in addition, all threads compete
 * for one reservation, which is created and freed continually. Between rounds, when no thread is running, the test
 * checks the invariants and frees everything. The seed is printed; STRESS_SEED=N repeats a run, except for the
 * scheduling of threads.
 */
#include <pthread.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "api/api.h"
#include "base/clock.h"
#include "check.h"

enum { THREADS = 4, ROUNDS = 8, OWN = 48, SHARED = 32 };
static uint64_t G = 4096; /* granule */
static int steps = 1500;

enum what { NOTHING, LIVE, READONLY, LOST };

struct page {
  enum what what;
  int value; /* -1: not known */
};

struct shared {
  vmem_t vm;
  uint64_t own, fought; /* fought: atomic, 0 = none */
  int bad;
};

struct worker {
  struct shared *s;
  unsigned id, seed;
  uint64_t base;
  struct page pages[OWN];
};

static struct vm_backend fake;

static int fake_remap(void *be, uint64_t addr, uint64_t bytes, uint64_t slab, uint64_t offset, uint32_t flags) {
  return vm_backend_host.map(be, addr, bytes, slab, offset, flags, false);
}

#define MUST(cond)                                                                                                     \
  do {                                                                                                                 \
    if (!(cond)) {                                                                                                     \
      printf("%s:%d: thread %u: %s; %s\n", __FILE__, __LINE__, w->id, #cond, vmem_last_error());                       \
      __atomic_fetch_add(&w->s->bad, 1, __ATOMIC_RELAXED);                                                             \
      return false;                                                                                                    \
    }                                                                                                                  \
  } while (0)

static unsigned pick(struct worker *w, unsigned n) { return (unsigned)rand_r(&w->seed) % n; }
static uint64_t at(const struct worker *w, unsigned page) { return w->base + (uint64_t)page * G; }

/* Errors that other threads' injected failures may cause; a caller's mistake is not among them. */
static bool injected(int err) { return err == -EIO || err == -ENOMEM || err == -ENOTRECOVERABLE; }

/* Checks after a failure that each page is unchanged or lost. */
static bool unchanged(struct worker *w) {
  for (unsigned i = 0; i < OWN; i++) {
    struct vmem_range_info r = {.size = sizeof(r)};
    struct page *p = &w->pages[i];
    MUST(!vmem_range_query(w->s->vm, at(w, i), &r));
    MUST(!(r.flags & VMEM_RANGE_BUSY));
    if (r.flags & VMEM_RANGE_QUARANTINED) p->what = LOST;
    if (p->what == LOST) continue;
    MUST(!!(r.flags & VMEM_RANGE_MAPPED) == (p->what != NOTHING));
    MUST(!!(r.flags & VMEM_RANGE_READONLY) == (p->what == READONLY));
  }
  return true;
}

static bool contents(struct worker *w, unsigned first, unsigned n) {
  for (unsigned i = first; i < first + n; i++) {
    unsigned char b[2];
    if ((w->pages[i].what != LIVE && w->pages[i].what != READONLY) || w->pages[i].value < 0) continue;
    MUST(!vmem_read(w->s->vm, &b[0], at(w, i) + 7, 1));
    b[1] = (unsigned char)get_byte(w->s->vm, at(w, i) + G - 1);
    MUST(b[0] == w->pages[i].value && b[1] == w->pages[i].value);
  }
  return true;
}

/* Runs a batch directly or on the worker, sometimes delayed by a descriptor. */
static int go(struct worker *w, const struct vmem_op *ops, size_t n) {
  struct vmem_after after = {.kind = VMEM_AFTER_FD};
  uint64_t one = 1;
  vmem_ticket t;
  int err, fd = -1;
  switch (pick(w, 3)) {
  case 0:
    return vmem_batch(w->s->vm, ops, n, NULL, 0, 0);
  case 1:
    err = vmem_submit(w->s->vm, ops, n, NULL, 0, 0, &t);
    break;
  default:
    if ((fd = eventfd(0, EFD_CLOEXEC)) < 0) return -ENOMEM;
    after.handle = (uint64_t)fd;
    err = vmem_submit(w->s->vm, ops, n, &after, 1, 0, &t);
    if (!err && vmem_wait(w->s->vm, t, 0) != -ETIMEDOUT) err = 1;
    if (write(fd, &one, 8) != 8) err = 1;
    close(fd);
  }
  if (err) return err;
  err = vmem_wait(w->s->vm, t, -1);
  return vmem_ticket_drop(w->s->vm, t) ? 1 : err;
}

static void note(struct worker *w, unsigned first, unsigned n, enum what what, int value) {
  for (unsigned i = first; i < first + n; i++) w->pages[i] = (struct page){what, value};
}

static unsigned count(struct worker *w, unsigned first, unsigned n, enum what what) {
  unsigned found = 0;
  for (unsigned i = first; i < first + n; i++) found += w->pages[i].what == what;
  return found;
}

/* Finds n pages of a kind, or returns a random position after a few tries. */
static unsigned find(struct worker *w, unsigned n, enum what what) {
  unsigned first = pick(w, OWN - 8);
  for (int i = 0; i < 32 && count(w, first, n, what) < n; i++) first = pick(w, OWN - 8);
  return first;
}

/* Makes the next heap allocation fail, in whichever thread. */
static void short_of_heap(struct worker *w) {
  if (!pick(w, 4)) vmem_inject(w->s->vm, VMEM_INJECT_HEAP, pick(w, 8), 1, ENOMEM);
}

static bool map_some(struct worker *w, unsigned first, unsigned n) {
  bool readonly = pick(w, 4) == 0;
  struct vmem_op op = {
      .op = VMEM_OP_POPULATE, .flags = pick(w, 2) ? VMEM_OP_SPREAD : 0, .addr = at(w, first), .bytes = (uint64_t)n * G};
  struct vmem_op map = {.op = VMEM_OP_MAP,
                        .flags = (readonly ? VMEM_OP_READONLY : 0) | (pick(w, 2) ? VMEM_OP_CONSUME : 0),
                        .addr = op.addr,
                        .bytes = op.bytes};
  bool fits = count(w, first, n, NOTHING) == n;
  int err;
  if (pick(w, 2)) {
    err = go(w, &op, 1);
    readonly = false;
  } else {
    err = vMemCreate(w->s->vm, op.bytes, NULL, &map.handle);
    MUST(!err || err == -ENOMEM || err == -EIO);
    if (err) return true;
    err = go(w, &map, 1);
    if (err || !(map.flags & VMEM_OP_CONSUME)) MUST(!vmem_drop(w->s->vm, map.handle));
  }
  MUST(err ? !fits || injected(err) : fits);
  if (!err) note(w, first, n, readonly ? READONLY : LIVE, 0); /* new pages read as zeros */
  return err ? unchanged(w) : true;
}

static bool unmap_some(struct worker *w, unsigned first, unsigned n) {
  struct vmem_op op = {.op = VMEM_OP_UNMAP, .flags = VMEM_OP_HOLES, .addr = at(w, first), .bytes = (uint64_t)n * G};
  int err = go(w, &op, 1);
  MUST(!err || injected(err));
  if (!err) note(w, first, n, NOTHING, 0);
  return err ? unchanged(w) : true;
}

static bool write_some(struct worker *w, unsigned first, unsigned n) {
  int value = (int)pick(w, 256), err;
  struct vmem_op op = {.op = VMEM_OP_FILL, .addr = at(w, first), .bytes = (uint64_t)n * G, .value = (uint64_t)value};
  err = pick(w, 2) ? go(w, &op, 1) : vmem_fill(w->s->vm, op.addr, op.bytes, (uint8_t)value);
  MUST(err || count(w, first, n, LIVE) == n);
  if (count(w, first, n, LIVE) == n) {
    MUST(!err || injected(err));
    for (unsigned i = first; i < first + n; i++) w->pages[i].value = err ? -1 : value;
  } else {
    MUST(err == -EFAULT || err == -EACCES || injected(err));
  }
  return err ? unchanged(w) : true;
}

/* Maps a page at a second address, checks it through both, and unmaps the second by its handle. */
static bool alias(struct worker *w, unsigned a, unsigned b) {
  vmem_handle h;
  int err;
  if (w->pages[a].what != LIVE || w->pages[b].what != NOTHING) return true;
  err = vmem_retain(w->s->vm, at(w, a), G, &h);
  MUST(!err || injected(err));
  if (err) return true;
  err = vMemMap(w->s->vm, at(w, b), G, h, 0, 0);
  MUST(!err || injected(err));
  if (!err) {
    MUST(put_byte(w->s->vm, at(w, b) + 7, 99) && put_byte(w->s->vm, at(w, b) + G - 1, 99));
    MUST(get_byte(w->s->vm, at(w, a) + 7) == 99);
    w->pages[a].value = -1;
    w->pages[b] = (struct page){LIVE, -1};
    err = vMemRelease(w->s->vm, h);
    MUST(!err || injected(err));
    if (!err) w->pages[b] = (struct page){NOTHING, 0};
  }
  if (err) {
    if (!unchanged(w)) return false;
    MUST(!vmem_drop(w->s->vm, h));
    /* No page may stay mapped twice: a write at one address would be visible at the other. */
    while (w->pages[b].what == LIVE) {
      if (!vMemUnmap(w->s->vm, at(w, b), G))
        w->pages[b] = (struct page){NOTHING, 0};
      else if (!unchanged(w))
        return false;
    }
  }
  return true;
}

/* Populates pages with the contents of other pages, which cannot be unmapped during the copy. */
static bool copy_some(struct worker *w, unsigned from, unsigned to, unsigned n) {
  struct vmem_op op = {.op = VMEM_OP_POPULATE,
                       .flags = VMEM_OP_COPY,
                       .addr = at(w, to),
                       .bytes = G,
                       .count = n,
                       .stride = G,
                       .src = at(w, from),
                       .src_stride = G};
  bool can = count(w, to, n, NOTHING) == n && count(w, from, n, LIVE) + count(w, from, n, READONLY) == n;
  int err = go(w, &op, 1);
  MUST(err ? !can || injected(err) : can);
  for (unsigned i = 0; !err && i < n; i++) w->pages[to + i] = (struct page){LIVE, w->pages[from + i].value};
  return err ? unchanged(w) : true;
}

/* Moves pages, or every other page of a range, over others. */
static bool replace_some(struct worker *w, unsigned from, unsigned to, unsigned n) {
  unsigned gap = n <= 4 ? 1 + pick(w, 2) : 1, last = from + gap * (n - 1);
  struct vmem_op ops[] = {
      {.op = VMEM_OP_MAP,
       .flags = VMEM_OP_REPLACE | (pick(w, 2) ? VMEM_OP_CONSUME : 0),
       .addr = at(w, to),
       .bytes = n * G},
      {.op = VMEM_OP_UNMAP, .addr = at(w, from), .bytes = G, .count = n, .stride = gap * G},
  };
  bool can = count(w, to, n, LIVE) + count(w, to, n, READONLY) == n;
  int err;
  for (unsigned i = from; i <= last; i += gap) {
    if (w->pages[i].what != LIVE) return true;
    can &= i < to || i >= to + n;
  }
  err = vmem_gather(w->s->vm, at(w, from), G, n, gap * G, &ops[0].handle);
  MUST(!err || injected(err));
  if (err) return true;
  err = go(w, ops, 2);
  MUST(err ? !can || injected(err) : can);
  if (err || !(ops[0].flags & VMEM_OP_CONSUME)) MUST(!vmem_drop(w->s->vm, ops[0].handle));
  for (unsigned i = 0; !err && i < n; i++) {
    w->pages[to + i] = (struct page){LIVE, w->pages[from + gap * i].value};
    w->pages[from + gap * i] = (struct page){NOTHING, 0};
  }
  return err ? unchanged(w) : true;
}

static bool join(struct worker *w) {
  int err = vmem_join(w->s->vm, w->base, (uint64_t)OWN * G, NULL);
  MUST(!err || injected(err));
  return err ? unchanged(w) : true;
}

/* Uses the shared reservation: any error that another thread can cause is accepted, and nothing breaks. */
static bool fight(struct worker *w) {
  vmem_t vm = w->s->vm;
  uint64_t base = __atomic_load_n(&w->s->fought, __ATOMIC_ACQUIRE);
  struct vmem_op op = {.op = VMEM_OP_POPULATE, .addr = base + pick(w, SHARED - 4) * G, .bytes = (1 + pick(w, 4)) * G};
  char b[64];
  int err;
  if (!base) {
    err = vMemReserve(vm, SHARED * G, NULL, &base);
    MUST(!err || injected(err));
    if (err) return true;
    op.addr = 0;
    if (!__atomic_compare_exchange_n(&w->s->fought, &op.addr, base, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE)) {
      err = vMemFree(vm, base, 0); /* other threads may still use the address of an earlier reservation */
      MUST(!err || injected(err) || err == -EBUSY || err == -ENXIO);
    }
    return true;
  }
  switch (pick(w, 8)) {
  case 0:
    err = vMemFree(vm, base, VMEM_FREE_UNMAP);
    if (!err) __atomic_compare_exchange_n(&w->s->fought, &base, 0, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE);
    break;
  case 1:
  case 2:
    op.op = VMEM_OP_UNMAP;
    op.flags = pick(w, 2) ? VMEM_OP_HOLES : 0;
    err = go(w, &op, 1);
    break;
  case 3:
    err = vmem_read(vm, b, op.addr + G - 32, sizeof(b));
    break;
  case 4:
    err = vmem_join(vm, base, SHARED * G, NULL);
    break;
  default:
    err = go(w, &op, 1);
  }
  MUST(!err || injected(err) || err == -EBUSY || err == -EEXIST || err == -EFAULT || err == -ENXIO);
  return true;
}

static bool step(struct worker *w) {
  unsigned first = pick(w, OWN - 8), n = 1 + pick(w, 8);
  vmem_t vm = w->s->vm;
  int err;
  switch (pick(w, 14)) {
  case 12:
    short_of_heap(w);
    if (!copy_some(w, find(w, n, LIVE), find(w, n, NOTHING), n)) return false;
    break;
  case 13:
    short_of_heap(w);
    first = find(w, n, LIVE);
    if (!replace_some(w, find(w, n, LIVE), first, n)) return false;
    break;
  case 0:
  case 1:
  case 2:
    if (!map_some(w, first, n)) return false;
    break;
  case 3:
  case 4:
    if (!unmap_some(w, first, n)) return false;
    break;
  case 5:
    if (!write_some(w, first, n)) return false;
    break;
  case 6:
    if (!alias(w, first, pick(w, OWN))) return false;
    break;
  case 7:
    if (!join(w)) return false;
    break;
  case 8:
    MUST(!vmem_inject(vm, pick(w, 3) ? 1u << pick(w, 6) : VMEM_INJECT_MAP | VMEM_INJECT_UNMAP, pick(w, 4),
                      w->id ? 0 : 1 + pick(w, 3), pick(w, 2) ? EIO : ENOMEM));
    break;
  case 9:
    MUST(!vmem_trim(vm, pick(w, 3) * 256 * G, NULL));
    err = vmem_warm(vm, pick(w, 2) * 256 * G);
    MUST(!err || injected(err));
    err = vmem_check(vm);
    MUST(!err || err == -ENOMEM);
    break;
  default:
    if (!fight(w)) return false;
  }
  return contents(w, first, n);
}

static void *run(void *arg) {
  struct worker *w = arg;
  for (int i = 0; i < steps && !__atomic_load_n(&w->s->bad, __ATOMIC_RELAXED); i++)
    if (!step(w)) break;
  return NULL;
}

static bool open_fake(struct shared *s, unsigned round) {
  struct vmem_open_opts o = {.size = sizeof(o),
                             .granule = G,
                             .slab_size = round & 1 ? 16 * G : 256 * G,
                             .mem_limit = round & 2 ? 512 * G : 0,
                             .pool_low = round & 2 ? 0 : 64 * G,
                             .pool_high = round & 4 ? VMEM_KEEP_ALL : 0};
  struct vm_ctx *c;
  int err;
  if (open_opts(&o, &s->vm)) return false;
  if (o.pool_low || !on_host()) return true; /* the worker is already running: don't change the host back end */
  c = vm_get(s->vm, "test", &err);
  fake = vm_backend_host;
  fake.remap = fake_remap;
  c->be = &fake;
  vm_put(c);
  return true;
}

static void stress(void) {
  const char *given = getenv("STRESS_SEED");
  unsigned seed = given ? (unsigned)strtoul(given, NULL, 0) : (unsigned)vm_now_ns();
  printf("STRESS_SEED=%u\n", seed);
  if (!on_host()) G = PAGE, steps = 200;
  for (unsigned round = 0; round < ROUNDS; round++) {
    struct shared s = {0};
    pthread_t threads[THREADS];
    struct worker w[THREADS] = {0};
    CHECK(open_fake(&s, round));
    OK(vMemReserve(s.vm, THREADS * OWN * G, NULL, &s.own));
    for (unsigned i = 0; i < THREADS; i++) {
      w[i] = (struct worker){.s = &s, .id = i, .seed = seed + round * THREADS + i, .base = s.own + i * OWN * G};
      EQ(pthread_create(&threads[i], NULL, run, &w[i]), 0);
    }
    for (unsigned i = 0; i < THREADS; i++) pthread_join(threads[i], NULL);
    EQ(s.bad, 0);
    OK(vmem_inject(s.vm, 0, 0, 0, 0));
    OK(vmem_check(s.vm));
    EQ(stats_of(s.vm).pending, 0);
    EQ(stats_of(s.vm).handles, 0);
    for (unsigned i = 0; i < THREADS; i++) {
      CHECK(unchanged(&w[i]) && contents(&w[i], 0, OWN));
      for (unsigned p = 0; p < OWN; p++)
        if (w[i].pages[p].what == LIVE || w[i].pages[p].what == READONLY) OK(vMemUnmap(s.vm, at(&w[i], p), G));
    }
    if (s.fought) {
      int err = vMemFree(s.vm, s.fought, VMEM_FREE_UNMAP);
      CHECK(!err || err == -ENOTRECOVERABLE);
    }
    if (stats_of(s.vm).reservations == 1) EQ(stats_of(s.vm).used_bytes, 0);
    OK(vmem_check(s.vm));
    OK(vmem_close(s.vm));
  }
}

static void *batch_that_waits(void *arg) {
  struct worker *w = arg;
  struct vmem_after after = {.kind = VMEM_AFTER_FD, .handle = w->seed};
  struct vmem_op op = {.op = VMEM_OP_POPULATE, .addr = w->base, .bytes = G};
  w->id = (unsigned)-vmem_batch(w->s->vm, &op, 1, &after, 1, 0);
  return NULL;
}

/* Close cancels a batch whose descriptor may never be signalled. */
static void close_ends_a_waiting_batch(void) {
  struct shared s = {0};
  struct worker w = {.s = &s};
  struct vmem_range_info r = {.size = sizeof(r)};
  int fd = eventfd(0, EFD_CLOEXEC);
  pthread_t t;
  if (!on_host()) G = PAGE;
  CHECK(open_fake(&s, 0));
  OK(vMemReserve(s.vm, MIB(2), NULL, &w.base));
  w.seed = (unsigned)fd;
  EQ(pthread_create(&t, NULL, batch_that_waits, &w), 0);
  while (!(r.flags & VMEM_RANGE_BUSY)) OK(vmem_range_query(s.vm, w.base, &r));
  OK(vmem_close(s.vm));
  pthread_join(t, NULL);
  EQ(w.id, EBADF);
  close(fd);
}

MAIN(TEST(stress), TEST(close_ends_a_waiting_batch))
