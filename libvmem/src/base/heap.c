/* SPDX-License-Identifier: MIT */
#include "base/heap.h"

#include <stdlib.h>

#include "base/context.h"

/* Costs one relaxed load if nothing is armed. */
static bool injection_hit(struct vm_ctx *c, uint32_t kind) {
  uint64_t left;
  if (!(__atomic_load_n(&c->inject.kinds, __ATOMIC_RELAXED) & kind)) return false;
  left = __atomic_load_n(&c->inject.skip, __ATOMIC_RELAXED);
  while (left)
    if (__atomic_compare_exchange_n(&c->inject.skip, &left, left - 1, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED))
      return false;
  left = __atomic_load_n(&c->inject.count, __ATOMIC_RELAXED);
  while (left)
    if (__atomic_compare_exchange_n(&c->inject.count, &left, left - 1, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED))
      return true;
  return false;
}

void vm_inject_arm(struct vm_ctx *c, uint32_t kinds, uint64_t skip, uint64_t count, int error) {
  __atomic_store_n(&c->inject.kinds, 0, __ATOMIC_RELAXED);
  __atomic_store_n(&c->inject.skip, skip, __ATOMIC_RELAXED);
  __atomic_store_n(&c->inject.count, count, __ATOMIC_RELAXED);
  __atomic_store_n(&c->inject.error, error, __ATOMIC_RELAXED);
  __atomic_store_n(&c->inject.kinds, count ? kinds : 0, __ATOMIC_RELEASE);
}

/* As in the back ends, an undo is retried while the driver is suspended; other calls have been retried by now. */
int vm_injected(struct vm_ctx *c, uint32_t kind) {
  struct vm_suspend_retry p = {0};
  int error;
  do {
    if (!injection_hit(c, kind)) return 0;
    error = -__atomic_load_n(&c->inject.error, __ATOMIC_RELAXED);
  } while (error == -EAGAIN && vm_undoing() && vm_suspend_wait(&p));
  return vm_fail(error, "failure injected");
}

static void *checked(void *p, size_t n, size_t size) {
  if (!p) vm_fail_at(-ENOMEM, 0, n * size, 0, "no heap memory for %zu bytes of bookkeeping", n * size);
  return p;
}

void *vm_calloc(struct vm_ctx *c, size_t n, size_t size) {
  return checked(injection_hit(c, VMEM_INJECT_HEAP) ? NULL : calloc(n, size), n, size);
}

void *vm_realloc(struct vm_ctx *c, void *p, size_t n, size_t size) {
  return checked(injection_hit(c, VMEM_INJECT_HEAP) ? NULL : reallocarray(p, n, size), n, size);
}

bool vm_list_reserve(struct vm_ctx *c, struct vm_list *l, size_t item, size_t more) {
  size_t cap = l->cap * 2;
  void *v;
  if (l->n + more <= l->cap) return true;
  if (cap < l->n + more) cap = l->n + more;
  if (cap < 4) cap = 4;
  if (!(v = vm_realloc(c, l->v, cap, item))) return false;
  l->v = v;
  l->cap = cap;
  return true;
}
