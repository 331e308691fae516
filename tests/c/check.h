/* SPDX-License-Identifier: MIT */
/*
 * check.h - a test program runs a list of functions; a failing CHECK returns from its function.
 * The program prints "N passed, N failed" and exits with 1 if any function failed, else 0.
 */
#ifndef CHECK_H
#define CHECK_H

#include <errno.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <vmem.h>

#define KIB(n) ((uint64_t)(n) << 10)
#define MIB(n) ((uint64_t)(n) << 20)
#define GIB(n) ((uint64_t)(n) << 30)
#define PAGE KIB(64)
#define BYTE(addr) (*(volatile unsigned char *)(uintptr_t)(addr))

static int failures_here;

#define CHECK(cond)                                                                                                    \
  do {                                                                                                                 \
    if (!(cond)) {                                                                                                     \
      printf("%s:%d: %s is false; last error: %s\n", __FILE__, __LINE__, #cond, vmem_last_error());                    \
      failures_here++;                                                                                                 \
      return;                                                                                                          \
    }                                                                                                                  \
  } while (0)

#define EQ(a, b)                                                                                                       \
  do {                                                                                                                 \
    long long a_ = (long long)(a), b_ = (long long)(b);                                                                \
    if (a_ != b_) {                                                                                                    \
      printf("%s:%d: %s is %lld, not %lld (%s); last error: %s\n", __FILE__, __LINE__, #a, a_, b_, #b,                 \
             vmem_last_error());                                                                                       \
      failures_here++;                                                                                                 \
      return;                                                                                                          \
    }                                                                                                                  \
  } while (0)

#define OK(call) EQ(call, 0)

/* open.c. The back end under test is $VMEM_TEST_BACKEND (default: host). A context opened with pool_high 0 keeps no
 * free memory, on any back end. get_byte and put_byte also reach memory that the CPU cannot access. */
const char *backend(void);
bool on_host(void);
int open_opts(struct vmem_open_opts *o, vmem_t *vm);
vmem_t open_vm(uint64_t granule);
vmem_t open_host(uint64_t granule); /* always on host */
int get_byte(vmem_t vm, uint64_t addr);
bool put_byte(vmem_t vm, uint64_t addr, int value);
/* True if tests access the memory through CUDA: streams exist, and accessing an unmapped page kills the program. */
bool with_cuda(vmem_t vm);
/* Reads a byte, or writes a 1, bypassing the library's checks: < 0 if the device faults. Not with CUDA. */
int touch(vmem_t vm, uint64_t addr, bool write);
#define GET(addr) get_byte(vm, addr)
#define PUT(addr, value) CHECK(put_byte(vm, addr, value))

/* First statement of a test that needs CPU access to the memory, or counts and limits that only host has. */
#define ONLY_HOST()                                                                                                    \
  do {                                                                                                                 \
    if (!on_host()) {                                                                                                  \
      printf("not run on %s: %s\n", backend(), __func__);                                                              \
      return;                                                                                                          \
    }                                                                                                                  \
  } while (0)

static inline struct vmem_stats stats_of(vmem_t vm) {
  struct vmem_stats s = {.size = sizeof(s)};
  vmem_get_stats(vm, &s);
  return s;
}

/* Compares the statistics that a failed call must not change. */
static inline bool same_state(const struct vmem_stats *a, const struct vmem_stats *b) {
  return a->reserved_bytes == b->reserved_bytes && a->mapped_bytes == b->mapped_bytes &&
         a->used_bytes == b->used_bytes && a->slab_bytes == b->slab_bytes && a->free_bytes == b->free_bytes &&
         a->reservations == b->reservations && a->handles == b->handles && a->slabs == b->slabs &&
         a->segments == b->segments && a->quarantined_bytes == b->quarantined_bytes && a->pending == b->pending;
}

static inline struct vmem_op populate(uint64_t addr, uint64_t bytes) {
  return (struct vmem_op){.op = VMEM_OP_POPULATE, .addr = addr, .bytes = bytes};
}

/* A dependency on work that completes when fire(fd) is called; fd is an eventfd. */
static inline struct vmem_after after_fd(int fd) {
  return (struct vmem_after){.kind = VMEM_AFTER_FD, .handle = (uint64_t)fd};
}

static inline void fire(int fd) {
  uint64_t one = 1;
  if (write(fd, &one, sizeof(one)) != sizeof(one)) failures_here++;
}

/* A thread that waits for a ticket. */
struct waiter {
  vmem_t vm;
  vmem_ticket t;
  int ret;
};

static inline void *wait_thread(void *arg) {
  struct waiter *w = arg;
  w->ret = vmem_wait(w->vm, w->t, -1);
  return NULL;
}

struct test {
  const char *name;
  void (*run)(void);
};

static inline int run_tests(const struct test *tests, size_t n) {
  size_t failed = 0;
  for (size_t i = 0; i < n; i++) {
    failures_here = 0;
    tests[i].run();
    if (failures_here) printf("FAILED %s\n", tests[i].name);
    failed += failures_here != 0;
    fflush(stdout);
  }
  printf("%zu passed, %zu failed\n", n - failed, failed);
  return failed ? 1 : 0;
}

#define TEST(name) {#name, name}
#define MAIN(...)                                                                                                      \
  int main(void) {                                                                                                     \
    static const struct test tests[] = {__VA_ARGS__};                                                                  \
    return run_tests(tests, sizeof(tests) / sizeof(tests[0]));                                                         \
  }

#endif
