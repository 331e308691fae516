/* SPDX-License-Identifier: MIT */
/* Description: with a SIGSEGV handler, reads of holes complete while other threads map and unmap there. */
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>

#include "check.h"

static vmem_t vm;
static volatile int faults, refused; /* volatile: the signal handler changes them */
static sigjmp_buf give_up;

static void on_fault(int sig, siginfo_t *info, void *context) {
  uint64_t start, bytes;
  int err = vmem_reveal(vm, (uint64_t)(uintptr_t)info->si_addr, &start, &bytes);
  (void)sig;
  (void)context;
  __atomic_fetch_add(&faults, 1, __ATOMIC_RELAXED);
  if (!err || err == -EEXIST || err == -EBUSY) return;
  __atomic_store_n(&refused, err, __ATOMIC_RELAXED);
  siglongjmp(give_up, 1);
}

/* Reads or writes a byte; returns 0, or the error of vmem_reveal. */
static int touched(uint64_t addr, bool write) {
  refused = 0;
  if (!sigsetjmp(give_up, 1)) {
    if (write)
      BYTE(addr) = 1;
    else
      (void)BYTE(addr);
  }
  return refused;
}

static void a_hole_reads_as_zeros_until_it_is_concealed(void) {
  uint64_t va, start = 0, bytes = 0;
  vmem_handle h;
  OK(vMemReserve(vm, GIB(8), NULL, &va));
  OK(vMemCreate(vm, 2 * PAGE, NULL, &h));
  OK(vMemMap(vm, va + GIB(1), PAGE, h, 0, 0));
  OK(vMemMap(vm, va + GIB(5), PAGE, h, PAGE, 0));
  BYTE(va + GIB(1)) = 7;

  OK(vmem_reveal(vm, va + GIB(2) + 5, &start, &bytes));
  EQ(start, va + GIB(1) + PAGE);
  EQ(bytes, GIB(4) - PAGE);
  faults = 0;
  EQ(BYTE(va + GIB(3)), 0);
  EQ(BYTE(va + GIB(5) - 1), 0);
  EQ(faults, 0);
  EQ(BYTE(va), 0); /* another hole */
  EQ(BYTE(va + GIB(8) - 1), 0);
  EQ(faults, 2);
  EQ(BYTE(va + GIB(1)), 7);
  EQ(vmem_reveal(vm, va + GIB(1), &start, &bytes), -EEXIST);

  OK(vmem_conceal(vm, va, GIB(8)));
  EQ(BYTE(va + GIB(1)), 7);
  EQ(BYTE(va + GIB(3)), 0);
  EQ(BYTE(va), 0);
  EQ(BYTE(va + GIB(6)), 0);
  EQ(faults, 5);

  /* A hole that was read can be mapped, and unmapping makes it a hole again. */
  OK(vMemUnmap(vm, va + GIB(1), PAGE));
  OK(vMemMap(vm, va + GIB(3), PAGE, h, 0, 0));
  EQ(BYTE(va + GIB(3)), 7);
  BYTE(va + GIB(3)) = 8;
  OK(vMemUnmap(vm, va + GIB(3), PAGE));
  EQ(BYTE(va + GIB(3)), 0);
  EQ(faults, 6);
  OK(vMemFree(vm, va, VMEM_FREE_UNMAP));
  OK(vmem_drop(vm, h));
}

static void what_is_no_hole_is_refused(void) {
  struct vmem_reserve_opts sparse = {.size = sizeof(sparse), .flags = VMEM_RESERVE_SPARSE};
  uint64_t va, zeros, start, bytes;
  vmem_handle h;
  OK(vMemReserve(vm, MIB(4), NULL, &va));
  OK(vMemReserve(vm, MIB(4), &sparse, &zeros));
  OK(vMemCreate(vm, PAGE, NULL, &h));
  OK(vMemMap(vm, va, PAGE, h, 0, VMEM_MAP_READONLY));
  EQ(touched(va, true), -EACCES);
  EQ(touched(zeros, false), 0);
  EQ(touched(zeros, true), -EACCES);
  OK(vmem_conceal(vm, zeros, MIB(4)));
  EQ(touched(zeros, false), 0);
  EQ(vmem_reveal(vm, va + MIB(4) + GIB(64), &start, &bytes), -ENXIO);
  EQ(vmem_reveal(vm, va + PAGE, NULL, &bytes), -EINVAL);
  EQ(vmem_conceal(vm, va, 0), -EINVAL);
  EQ(vmem_conceal(vm, va, 1), -EINVAL);
  EQ(vmem_conceal(vm, va, MIB(64)), -ENXIO);
  EQ(vmem_conceal(vm, va, 0 - va), -EOVERFLOW);
  EQ(vmem_reveal(vm + 1, va, &start, &bytes), -EBADF);
  EQ(vmem_conceal(vm + 1, va, PAGE), -EBADF);
  OK(vMemFree(vm, va, VMEM_FREE_UNMAP));
  OK(vMemFree(vm, zeros, 0));
  EQ(vmem_reveal(vm, va, &start, &bytes), -ENXIO);
  OK(vmem_drop(vm, h));
}

#define READERS 2
#define ROUNDS 2000

static uint64_t shared;
static bool over;

/* Each byte is 9, or 0 if nothing is mapped. Not for ThreadSanitizer, which treats mmap as a write. */
__attribute__((no_sanitize("thread"))) static void *read_on(void *unused) {
  uintptr_t wrong = 0;
  (void)unused;
  while (!__atomic_load_n(&over, __ATOMIC_RELAXED))
    for (uint64_t i = 0; i < 16; i++)
      wrong |= __atomic_load_n((unsigned char *)(uintptr_t)(shared + i * PAGE), __ATOMIC_RELAXED) % 9;
  return (void *)wrong;
}

static void readers_while_pages_come_and_go(void) {
  pthread_t thread[READERS];
  void *wrong;
  vmem_handle h;
  uint64_t at;
  over = false;
  OK(vMemReserve(vm, 16 * PAGE, NULL, &shared));
  OK(vMemCreate(vm, PAGE, NULL, &h));
  OK(vMemMap(vm, shared, PAGE, h, 0, 0));
  memset((void *)(uintptr_t)shared, 9, PAGE);
  OK(vMemUnmap(vm, shared, PAGE));
  for (size_t i = 0; i < READERS; i++) CHECK(!pthread_create(&thread[i], NULL, read_on, NULL));
  for (uint64_t i = 0; i < ROUNDS; i++) {
    at = shared + i % 16 * PAGE;
    OK(vMemMap(vm, at, PAGE, h, 0, 0));
    __atomic_store_n((unsigned char *)(uintptr_t)at, 9,
                     __ATOMIC_RELAXED); /* mapped memory is writable even if it was revealed as a hole before */
    if (i % 3 == 0) OK(vmem_conceal(vm, shared, 16 * PAGE));
    OK(vMemUnmap(vm, at, PAGE));
  }
  __atomic_store_n(&over, true, __ATOMIC_RELAXED);
  for (size_t i = 0; i < READERS; i++) {
    CHECK(!pthread_join(thread[i], &wrong));
    EQ((uintptr_t)wrong, 0);
  }
  OK(vMemFree(vm, shared, 0));
  OK(vmem_drop(vm, h));
}

static void other_back_ends_have_none(void) {
  vmem_t other = open_vm(0);
  uint64_t va, start, bytes;
  CHECK(other);
  OK(vMemReserve(other, MIB(2), NULL, &va));
  EQ(vmem_reveal(other, va, &start, &bytes), on_host() ? 0 : -EOPNOTSUPP);
  EQ(vmem_conceal(other, va, MIB(2)), on_host() ? 0 : -EOPNOTSUPP);
  OK(vMemFree(other, va, 0));
  OK(vmem_close(other));
}

static void set_up(void) {
  struct sigaction act = {.sa_sigaction = on_fault, .sa_flags = SA_SIGINFO};
  EQ(sigaction(SIGSEGV, &act, NULL), 0);
  CHECK(vm = open_host(0));
}

static void tear_down(void) {
  signal(SIGSEGV, SIG_DFL);
  OK(vmem_check(vm));
  OK(vmem_close(vm));
}

MAIN(TEST(set_up), TEST(a_hole_reads_as_zeros_until_it_is_concealed), TEST(what_is_no_hole_is_refused),
     TEST(readers_while_pages_come_and_go), TEST(other_back_ends_have_none), TEST(tear_down))
