/* SPDX-License-Identifier: MIT */
/*
 * The table of contexts. A vmem_t is 32 bits of generation and 32 bits of index, so that a closed context is
 * recognised. Every public function pins its context here, and vmem_close waits until no pin is left.
 *
 * Contexts share only this table and the process-wide state of back ends. A forked child starts with an empty table,
 * which remembers the parent's contexts only to refuse them: the child must not use the parent's threads, locks and
 * driver descriptors.
 */
#include <string.h>

#include "api/api.h"

#define MAX_CONTEXTS 256u
#define MAX_TAG 0xfffu

static struct {
  pthread_mutex_t lock;
  pthread_cond_t unpinned;
  struct vm_ctx *ctx[MAX_CONTEXTS];
  uint32_t gen[MAX_CONTEXTS];
  uint32_t inherited[MAX_CONTEXTS]; /* generations of the parent process's contexts; 0 = none */
  uint32_t next_gen, last_tag;
} table = {.lock = PTHREAD_MUTEX_INITIALIZER, .unpinned = PTHREAD_COND_INITIALIZER};

static int no_handler; /* errno of pthread_atfork; 0: in_child is registered */

/* The child has only this thread, so no lock is needed; the inherited lock may be held by a thread that no longer
 * exists. */
static void in_child(void) {
  pthread_mutex_init(&table.lock, NULL);
  pthread_cond_init(&table.unpinned, NULL);
  for (uint32_t i = 0; i < MAX_CONTEXTS; i++) {
    if (table.ctx[i]) table.inherited[i] = table.gen[i];
    table.ctx[i] = NULL;
  }
}

/* Runs when the library is loaded, before the constructors of a program it is linked into: a fork already in progress
 * would miss a handler registered later, and the program's handlers may use contexts. */
__attribute__((constructor(101))) static void set_up(void) { no_handler = pthread_atfork(NULL, NULL, in_child); }

static _Thread_local struct {
  unsigned calls;
  int state, type; /* restored later */
} uncancelled;

/* glibc acts on a pending asynchronous cancel even after the state changed, so the type changes too. */
void vm_cancel_later(void) {
  if (uncancelled.calls++) return;
  pthread_setcanceltype(PTHREAD_CANCEL_DEFERRED, &uncancelled.type);
  pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &uncancelled.state);
}

void vm_cancel_now(void) {
  int own;
  if (--uncancelled.calls) return;
  pthread_setcancelstate(uncancelled.state, &own);
  pthread_setcanceltype(uncancelled.type, &own);
}

struct vm_ctx *vm_get(vmem_t vm, const char *op, int *err) {
  uint32_t i = (uint32_t)vm - 1, gen = (uint32_t)(vm >> 32);
  struct vm_ctx *c = NULL;
  vm_error_begin(op);
  vm_cancel_later();
  pthread_mutex_lock(&table.lock);
  if (i < MAX_CONTEXTS && table.ctx[i] && table.gen[i] == gen) {
    c = table.ctx[i];
    c->pins++;
  } else if (i < MAX_CONTEXTS && gen && table.inherited[i] == gen) {
    *err = vm_fail(-ECHILD, "the context belongs to the process that this one was forked from");
  } else {
    *err = vm_fail(-EBADF, "0x%llx is not an open context", (unsigned long long)vm);
  }
  pthread_mutex_unlock(&table.lock);
  if (!c) vm_cancel_now();
  return c;
}

static void unpin(struct vm_ctx *c) {
  if (!--c->pins) pthread_cond_broadcast(&table.unpinned);
}

void vm_put(struct vm_ctx *c) {
  if (__atomic_load_n(&c->worker_wanted, __ATOMIC_RELAXED)) vm_worker_wake(c);
  pthread_mutex_lock(&table.lock);
  unpin(c);
  pthread_mutex_unlock(&table.lock);
  vm_cancel_now();
}

/* Returns the next of the 4,095 tags that no open context uses: each is reused as late as possible. */
static uint32_t next_tag(void) {
  bool taken;
  do {
    taken = false;
    table.last_tag = table.last_tag % MAX_TAG + 1;
    for (uint32_t i = 0; i < MAX_CONTEXTS; i++) taken = taken || (table.ctx[i] && table.ctx[i]->tag == table.last_tag);
  } while (taken);
  return table.last_tag;
}

int vm_registry_add(struct vm_ctx *c, vmem_t *vm) {
  uint32_t i = 0;
  if (no_handler) return vm_fail(-ENOMEM, "pthread_atfork: %s", strerror(no_handler));
  pthread_mutex_lock(&table.lock);
  while (i < MAX_CONTEXTS && (table.ctx[i] || table.inherited[i])) i++;
  if (i == MAX_CONTEXTS) /* reuse the entry of a parent's context, which then looks closed */
    for (i = 0; i < MAX_CONTEXTS && table.ctx[i];) i++;
  if (i < MAX_CONTEXTS) {
    table.inherited[i] = 0;
    if (!++table.next_gen) table.next_gen = 1;
    c->tag = next_tag();
    table.ctx[i] = c;
    table.gen[i] = table.next_gen;
    *vm = (uint64_t)table.next_gen << 32 | (i + 1);
  }
  pthread_mutex_unlock(&table.lock);
  if (i < MAX_CONTEXTS) return 0;
  return vm_fail_at(-ENOMEM, 0, 0, MAX_CONTEXTS, "%u contexts are already open", MAX_CONTEXTS);
}

bool vm_registry_remove(struct vm_ctx *c, vmem_t vm) {
  uint32_t i = (uint32_t)vm - 1;
  bool found;
  pthread_mutex_lock(&table.lock);
  found = table.ctx[i] == c;
  if (found) table.ctx[i] = NULL;
  unpin(c);
  pthread_mutex_unlock(&table.lock);
  return found;
}

void vm_registry_drain(struct vm_ctx *c) {
  pthread_mutex_lock(&table.lock);
  while (c->pins) pthread_cond_wait(&table.unpinned, &table.lock);
  pthread_mutex_unlock(&table.lock);
}
