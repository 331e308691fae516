/* SPDX-License-Identifier: MIT */
/* Description: several threads on one or two contexts, races for the same range, close during calls. */
#include <pthread.h>

#include "check.h"

enum { THREADS = 4 };
static int rounds = 150; /* THREADS_ROUNDS */

struct shared {
  vmem_t vm[2];
  uint64_t va[2];
  int bad;
};

struct job {
  struct shared *s;
  unsigned id;
};

#define MUST(cond)                                                                                                     \
  do {                                                                                                                 \
    if (!(cond)) {                                                                                                     \
      printf("%s:%d: %s; %s\n", __FILE__, __LINE__, #cond, vmem_last_error());                                         \
      __atomic_fetch_add(&s->bad, 1, __ATOMIC_RELAXED);                                                                \
      return NULL;                                                                                                     \
    }                                                                                                                  \
  } while (0)

/* Each thread works in its own ranges, in both contexts, synchronously and on the worker. */
static void *apart(void *arg) {
  struct job *j = arg;
  struct shared *s = j->s;
  for (int i = 0; i < rounds; i++) {
    vmem_t vm = s->vm[i & 1];
    uint64_t a = s->va[i & 1] + j->id * MIB(16) + (uint64_t)(i % 8) * PAGE;
    struct vmem_op ops[2] = {{.op = VMEM_OP_POPULATE, .addr = a, .bytes = PAGE, .count = 3, .stride = MIB(2)},
                             {.op = VMEM_OP_UNMAP, .addr = a, .bytes = PAGE, .count = 3, .stride = MIB(2)}};
    vmem_ticket t;
    vmem_handle h;
    if (i % 3) {
      MUST(!vmem_submit(vm, &ops[0], 1, NULL, 0, 0, &t));
      MUST(!vmem_wait(vm, t, -1));
    } else {
      MUST(!vmem_batch(vm, &ops[0], 1, NULL, 0, 0));
    }
    MUST(GET(a + MIB(2)) == 0);
    MUST(put_byte(vm, a + MIB(2), 1));
    MUST(!vmem_retain(vm, a, PAGE, &h));
    MUST(!vMemMap(vm, a + MIB(8), PAGE, h, 0, 0));
    MUST(!vMemRelease(vm, h));
    if (i % 5) {
      MUST(!vmem_submit(vm, &ops[1], 1, NULL, 0, 0, &t));
      MUST(!vmem_wait(vm, t, -1));
    } else {
      MUST(!vmem_batch(vm, &ops[1], 1, NULL, 0, 0));
    }
    if (i % 40 == 0) MUST(!vmem_trim(vm, 0, NULL));
  }
  return NULL;
}

/* All threads compete for one range: exactly one wins each time, the others get a defined error. */
static void *together(void *arg) {
  struct job *j = arg;
  struct shared *s = j->s;
  for (int i = 0; i < 4 * rounds; i++) {
    struct vmem_op op = {.op = i & 1 ? VMEM_OP_UNMAP : VMEM_OP_POPULATE, .addr = s->va[0], .bytes = 2 * PAGE};
    char b[16];
    int ret = vmem_batch(s->vm[0], &op, 1, NULL, 0, 0);
    MUST(ret == 0 || ret == -EBUSY || ret == (i & 1 ? -EFAULT : -EEXIST));
    ret = vmem_read(s->vm[0], b, s->va[0] + PAGE - 8, sizeof(b));
    MUST(ret == 0 || ret == -EBUSY || ret == -EFAULT);
  }
  return NULL;
}

/* The invariants hold at any moment, even between an unmap and the return of its pages. */
static void *checking(void *arg) {
  struct job *j = arg;
  struct shared *s = j->s;
  for (int i = 0; i < 2 * rounds; i++) {
    uint64_t a = s->va[0] + j->id * MIB(16);
    struct vmem_op op = {
        .op = i & 1 ? VMEM_OP_UNMAP : VMEM_OP_POPULATE, .addr = a, .bytes = PAGE, .count = 8, .stride = MIB(1)};
    if (j->id)
      MUST(!vmem_batch(s->vm[0], &op, 1, NULL, 0, 0));
    else
      MUST(!vmem_check(s->vm[0]));
  }
  return NULL;
}

static void *until_closed(void *arg) {
  struct job *j = arg;
  struct shared *s = j->s;
  for (;;) {
    uint64_t a = s->va[0] + j->id * MIB(16);
    struct vmem_op op = {.op = VMEM_OP_POPULATE, .addr = a, .bytes = PAGE};
    vmem_ticket t;
    int ret = vmem_submit(s->vm[0], &op, 1, NULL, 0, 0, &t);
    if (!ret) ret = vmem_wait(s->vm[0], t, -1);
    if (!ret) ret = vMemUnmap(s->vm[0], a, PAGE);
    if (ret == -EBADF) return NULL;
    MUST(ret == 0 || ret == -EAGAIN);
  }
}

static void run(struct shared *s, void *(*f)(void *), vmem_t close_it) {
  pthread_t threads[THREADS];
  struct job jobs[THREADS];
  for (unsigned i = 0; i < THREADS; i++) {
    jobs[i] = (struct job){s, i};
    pthread_create(&threads[i], NULL, f, &jobs[i]);
  }
  if (close_it) {
    for (int i = 0; i < 50; i++) {
      struct vmem_stats st = {.size = sizeof(st)};
      vmem_get_stats(close_it, &st);
    }
    if (vmem_close(close_it)) s->bad++;
  }
  for (unsigned i = 0; i < THREADS; i++) pthread_join(threads[i], NULL);
}

static void races(void) {
  struct shared s = {.vm = {open_vm(0), open_vm(0)}};
  for (int k = 0; k < 2; k++) OK(vMemReserve(s.vm[k], MIB(128), NULL, &s.va[k]));
  run(&s, apart, 0);
  EQ(s.bad, 0);
  for (int k = 0; k < 2; k++) {
    EQ(stats_of(s.vm[k]).mapped_bytes, 0);
    EQ(stats_of(s.vm[k]).used_bytes, 0);
    OK(vmem_check(s.vm[k]));
  }
  run(&s, checking, 0);
  EQ(s.bad, 0);
  run(&s, together, 0);
  EQ(s.bad, 0);
  OK(vmem_check(s.vm[0]));
  OK(vMemFree(s.vm[0], s.va[0], VMEM_FREE_UNMAP));
  OK(vMemReserve(s.vm[0], MIB(128), NULL, &s.va[0]));
  run(&s, until_closed, s.vm[0]);
  EQ(s.bad, 0);
  OK(vmem_check(s.vm[1])); /* the other context is unaffected */
  OK(vmem_close(s.vm[1]));
}

/* Each thread reserves and frees in a loop, so that it gets addresses that another thread has just freed. */
static void *comes_and_goes(void *arg) {
  struct job *j = arg;
  struct shared *s = j->s;
  for (int i = 0; i < 5 * rounds; i++) {
    vmem_t vm = s->vm[i & 1];
    struct vmem_op op = {.op = VMEM_OP_POPULATE, .bytes = PAGE};
    struct vmem_range_info info = {.size = sizeof(info)};
    uint64_t bytes = (1 + (unsigned)(i * 7 + (int)j->id) % 40) * PAGE;
    MUST(!vMemReserve(vm, bytes, NULL, &op.addr));
    MUST(!vmem_range_query(vm, op.addr, &info));
    MUST(info.base == op.addr && info.bytes == bytes && !info.mapped_bytes);
    MUST(!vmem_batch(vm, &op, 1, NULL, 0, 0));
    MUST(GET(op.addr) == 0);
    MUST(put_byte(vm, op.addr, 1));
    MUST(!vMemFree(vm, op.addr, VMEM_FREE_UNMAP));
  }
  return NULL;
}

static void reservations(void) {
  struct shared s = {.vm = {open_vm(0), open_vm(0)}};
  run(&s, comes_and_goes, 0);
  EQ(s.bad, 0);
  for (int k = 0; k < 2; k++) {
    EQ(stats_of(s.vm[k]).reserved_bytes, 0);
    OK(vmem_check(s.vm[k]));
    OK(vmem_close(s.vm[k]));
  }
}

static bool stopped;

static void *asks_for_too_much(void *arg) {
  struct shared *s = arg;
  struct vmem_op op = {.op = VMEM_OP_POPULATE, .addr = s->va[0], .bytes = MIB(2)};
  while (!__atomic_load_n(&stopped, __ATOMIC_RELAXED)) MUST(vmem_batch(s->vm[0], &op, 1, NULL, 0, 0) == -ENOMEM);
  return NULL;
}

/* A failing batch allocates nothing, so other threads never run short because of it. */
static void a_batch_that_fails(void) {
  struct vmem_open_opts o = {.size = sizeof(o), .slab_size = MIB(1), .mem_limit = MIB(1), .pool_high = VMEM_KEEP_ALL};
  struct shared s = {0};
  struct vmem_op op = {.op = VMEM_OP_POPULATE, .bytes = MIB(1) / 2};
  pthread_t t;
  if (!strcmp(backend(), "cuda")) return; /* a single page exceeds the limit */
  OK(open_opts(&o, &s.vm[0]));
  OK(vMemReserve(s.vm[0], MIB(8), NULL, &s.va[0]));
  stopped = false;
  EQ(pthread_create(&t, NULL, asks_for_too_much, &s), 0);
  op.addr = s.va[0] + MIB(4);
  for (int i = 0; i < 14 * rounds && !s.bad; i++) {
    if (vmem_batch(s.vm[0], &op, 1, NULL, 0, 0) || vMemUnmap(s.vm[0], op.addr, op.bytes)) s.bad = 1;
  }
  __atomic_store_n(&stopped, true, __ATOMIC_RELAXED);
  if (s.bad) printf("%s\n", vmem_last_error());
  pthread_join(t, NULL);
  EQ(s.bad, 0);
  OK(vmem_check(s.vm[0]));
  OK(vmem_close(s.vm[0]));
}

int main(void) {
  static const struct test tests[] = {TEST(races), TEST(reservations), TEST(a_batch_that_fails)};
  const char *given = getenv("THREADS_ROUNDS");
  if (given) rounds = atoi(given);
  return run_tests(tests, sizeof(tests) / sizeof(tests[0]));
}
