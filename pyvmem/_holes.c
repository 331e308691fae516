/* SPDX-License-Identifier: MIT */
/*
 * Handles reads of rows without pages on the "host" back end: raises an exception instead of killing the process.
 *
 * The read may be anywhere: in a torch kernel on an OpenMP thread, in numpy, in memcpy. A handler cannot longjmp out of
 * such code, so the SIGSEGV handler lets the read return zeros (vmem_reveal), records it, and has the interpreter call
 * holes.py in the main thread, which makes holes fault again and raises.
 *
 * The handler assumes that a fault in a reservation comes from an instruction of the thread itself
 * that reads a tensor, and that no thread reads tensors while it holds a lock of libvmem or the lock
 * below, so the handler may take these locks. It takes them only if the faulting address is watched. Other faults, and
 * signals sent by kill or raise, go to the previous handler.
 *
 * A write to a hole, or to a page that requests share, cannot complete, as there is no memory for its bytes. It is
 * reported on stderr before it kills the process.
 */
#if !defined(Py_LIMITED_API) && !defined(_CFFI_NO_LIMITED_API)
#define Py_LIMITED_API 0x030a0000
#endif
#include <Python.h>
#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "_holes.h"

#define KEPT 32u     /* maximum number of recorded reads; further reads are dropped */
#define DISPLACED 8u /* maximum number of handlers replaced and chained to */
/* an access that faults this many times in a row, although reads now return zeros, is a write */
#define TRIES 4u
#define WAITS 10000u /* maximum number of 0.1 ms sleeps while another call changes the page */
#define WAIT_NS 100000l

struct range {
  uint64_t addr, bytes;
  vmem_t vm;
  bool revealed;
};

static struct {
  pthread_mutex_t lock;
  bool asked, off; /* asked: VMEM_HOLES was read; off: its value is "fault" */
  struct range *ranges;
  size_t n, cap;
  struct sigaction before[DISPLACED]; /* oldest first */
  size_t handlers;
  struct pyvmem_hole kept[KEPT];
  size_t num_kept;
  bool told; /* atomic: Python will call holes.py */
  uint64_t conceals;
} guard = {.lock = PTHREAD_MUTEX_INITIALIZER};

static _Thread_local struct {
  uint64_t addr, conceals;
  unsigned faults, waits;
  unsigned depth; /* nesting depth of chained handlers */
} last;

/* A forked child inherits none of the parent's reservations. */
static void in_child(void) {
  pthread_mutex_init(&guard.lock, NULL);
  guard.n = guard.num_kept = 0;
  guard.told = false;
}

__attribute__((constructor)) static void set_up(void) { pthread_atfork(NULL, NULL, in_child); }

/* ---- a fault ------------------------------------------------------------------------------------ */

static int call_python(void *unused) {
  PyObject *module, *done;
  (void)unused;
  __atomic_store_n(&guard.told, false, __ATOMIC_RELAXED); /* cleared first: the code below may be interrupted */
  module = PyImport_ImportModule("pyvmem.memory.holes");
  done = module ? PyObject_CallMethod(module, "tell", NULL) : NULL;
  Py_XDECREF(module);
  Py_XDECREF(done);
  return done ? 0 : -1;
}

/* If the interpreter's queue of pending calls is full, the next read tries again. */
static void call_soon(void) {
  if (!Py_IsInitialized() || __atomic_exchange_n(&guard.told, true, __ATOMIC_RELAXED)) return;
  if (Py_AddPendingCall(call_python, NULL)) __atomic_store_n(&guard.told, false, __ATOMIC_RELAXED);
}

static bool find(uint64_t addr, struct range *out) {
  bool found = false;
  pthread_mutex_lock(&guard.lock);
  for (size_t i = 0; i < guard.n && !found; i++)
    if (addr - guard.ranges[i].addr < guard.ranges[i].bytes) {
      *out = guard.ranges[i];
      found = true;
    }
  if (last.addr != addr || last.conceals != guard.conceals) last.faults = last.waits = 0;
  last.addr = addr;
  last.conceals = guard.conceals;
  pthread_mutex_unlock(&guard.lock);
  return found;
}

static void note(const struct range *r, uint64_t addr, uint64_t start, uint64_t bytes) {
  pthread_mutex_lock(&guard.lock);
  for (size_t i = 0; i < guard.n; i++)
    if (guard.ranges[i].addr == r->addr) guard.ranges[i].revealed = true;
  if (guard.num_kept < KEPT)
    guard.kept[guard.num_kept++] = (struct pyvmem_hole){.addr = addr,
                                                        .start = start,
                                                        .bytes = bytes,
                                                        .base = r->addr,
                                                        .thread = (uint64_t)(uintptr_t)pthread_self(),
                                                        .python = PyGILState_GetThisThreadState() != NULL};
  pthread_mutex_unlock(&guard.lock);
  call_soon();
}

static void say(const struct range *r, uint64_t addr, const char *what) {
  char text[256];
  int n = snprintf(text, sizeof(text),
                   "pyvmem: 0x%llx, byte %llu of the reservation at 0x%llx: %s; the process cannot go on\n",
                   (unsigned long long)addr, (unsigned long long)(addr - r->addr), (unsigned long long)r->addr, what);
  if (n > 0 && write(STDERR_FILENO, text, (size_t)n) < 0) return;
}

/* Returns true if the instruction may be restarted. */
static bool resolve(uint64_t addr) {
  struct timespec pause = {.tv_nsec = WAIT_NS};
  uint64_t start, bytes;
  struct range r;
  if (!find(addr, &r)) return false;
  switch (vmem_reveal(r.vm, addr, &start, &bytes)) {
  case 0:
    if (last.faults++ < TRIES) {
      note(&r, addr, start, bytes);
      return true;
    }
    say(&r, addr, "a write to a row that has no page: map it first (KVCache.step)");
    return false;
  case -EACCES:
    say(&r, addr, "a write to a read-only page: requests share it, or no memory backs it (sparse)");
    return false;
  case -EEXIST: /* mapped since the fault */
  case -EBUSY:
    if (last.waits++ >= WAITS) return false;
    if (last.waits > 1) nanosleep(&pause, NULL);
    return true;
  default:
    return false;
  }
}

/* ---- the handler -------------------------------------------------------------------------------- */

static void pass_on(int sig, siginfo_t *info, void *context, size_t which) {
  struct sigaction before = guard.before[which];
  sigset_t mask = before.sa_mask, old;
  if (before.sa_flags & SA_SIGINFO || (before.sa_handler != SIG_DFL && before.sa_handler != SIG_IGN)) {
    pthread_sigmask(SIG_BLOCK, &mask, &old);
    if (before.sa_flags & SA_SIGINFO)
      before.sa_sigaction(sig, info, context);
    else
      before.sa_handler(sig);
    pthread_sigmask(SIG_SETMASK, &old, NULL);
    return;
  }
  if (before.sa_handler == SIG_IGN && info->si_code <= 0) return;
  /* A fault recurs when this function returns; a sent signal must be sent again. */
  sigaction(sig, &before, NULL);
  if (info->si_code <= 0) raise(sig);
}

static void on_fault(int sig, siginfo_t *info, void *context) {
  int err = errno;
  size_t handlers = __atomic_load_n(&guard.handlers, __ATOMIC_ACQUIRE);
  /* A signal that was sent rather than raised by a fault goes to the oldest handler: a chained handler may have sent it
   * to pass on a fault, as faulthandler does. */
  if (info->si_code <= 0)
    pass_on(sig, info, context, 0);
  else if (last.depth || !resolve((uint64_t)(uintptr_t)info->si_addr)) {
    size_t which = last.depth < handlers ? handlers - 1 - last.depth : 0;
    last.depth++;
    pass_on(sig, info, context, which);
    last.depth--;
  }
  errno = err;
}

static void install(void) {
  struct sigaction now, mine = {.sa_sigaction = on_fault, .sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER};
  if (guard.off || guard.handlers == DISPLACED || sigaction(SIGSEGV, NULL, &now)) return;
  if (now.sa_flags & SA_SIGINFO && now.sa_sigaction == on_fault) return;
  guard.before[guard.handlers] = now;
  __atomic_store_n(&guard.handlers, guard.handlers + 1, __ATOMIC_RELEASE);
  sigaction(SIGSEGV, &mine, NULL);
}

/* ---- called from Python -------------------------------------------------------------------------- */

static bool read_by_cpu(vmem_t vm) {
  struct vmem_info info = {.size = sizeof(info)};
  return !vmem_query(vm, &info) && info.caps & VMEM_CAP_CPU_ACCESS;
}

static uint64_t drop(uint64_t addr, uint64_t bytes) {
  uint64_t dropped = 0;
  size_t left = 0;
  for (size_t i = 0; i < guard.n; i++)
    if (guard.ranges[i].addr >= addr + bytes || guard.ranges[i].addr + guard.ranges[i].bytes <= addr)
      guard.ranges[left++] = guard.ranges[i];
    else
      dropped = guard.ranges[i].bytes;
  guard.n = left;
  return dropped;
}

void pyvmem_holes_watch(vmem_t vm, uint64_t addr, uint64_t bytes) {
  if (!read_by_cpu(vm)) return;
  pthread_mutex_lock(&guard.lock);
  if (!guard.asked) {
    const char *wish = getenv("VMEM_HOLES");
    guard.off = wish && !strcmp(wish, "fault");
    guard.asked = true;
  }
  drop(addr, bytes); /* the range was left by a closed context */
  if (guard.n == guard.cap) {
    size_t cap = guard.cap ? 2 * guard.cap : 16;
    struct range *more = guard.off ? NULL : realloc(guard.ranges, cap * sizeof(*more));
    if (more) {
      guard.ranges = more;
      guard.cap = cap;
    }
  }
  if (guard.n < guard.cap) guard.ranges[guard.n++] = (struct range){.addr = addr, .bytes = bytes, .vm = vm};
  install();
  pthread_mutex_unlock(&guard.lock);
}

uint64_t pyvmem_holes_forget(uint64_t addr) {
  uint64_t bytes;
  pthread_mutex_lock(&guard.lock);
  bytes = drop(addr, 1);
  pthread_mutex_unlock(&guard.lock);
  return bytes;
}

void pyvmem_holes_renew(void) {
  pthread_mutex_lock(&guard.lock);
  if (guard.n) install();
  pthread_mutex_unlock(&guard.lock);
}

void pyvmem_holes_again(void) { call_soon(); }

int pyvmem_holes_take(struct pyvmem_hole *hole) {
  int taken;
  pthread_mutex_lock(&guard.lock);
  if ((taken = guard.num_kept > 0)) {
    *hole = guard.kept[0];
    memmove(guard.kept, guard.kept + 1, --guard.num_kept * sizeof(*guard.kept));
  }
  pthread_mutex_unlock(&guard.lock);
  return taken;
}

void pyvmem_holes_conceal(void) {
  pthread_mutex_lock(&guard.lock);
  guard.conceals++;
  for (size_t i = 0; i < guard.n; i++)
    if (guard.ranges[i].revealed) {
      guard.ranges[i].revealed = false;
      vmem_conceal(guard.ranges[i].vm, guard.ranges[i].addr, guard.ranges[i].bytes);
    }
  pthread_mutex_unlock(&guard.lock);
}
