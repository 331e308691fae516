/* SPDX-License-Identifier: MIT */
/* heap.h - the library's own allocations in a context, and failures requested by vmem_inject. */
#ifndef VMEM_BASE_HEAP_H
#define VMEM_BASE_HEAP_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct vm_ctx;

struct vm_inject { /* accessed atomically: the heap is used both with and without the context's lock */
  uint32_t kinds;
  uint64_t skip, count;
  int error;
};

void vm_inject_arm(struct vm_ctx *c, uint32_t kinds, uint64_t skip, uint64_t count, int error);
/* Returns and records the failure to inject into a call of this kind; 0 = none. */
int vm_injected(struct vm_ctx *c, uint32_t kind);

/* Return NULL on failure, with -ENOMEM recorded. vm_realloc does not initialise memory. */
void *vm_calloc(struct vm_ctx *c, size_t n, size_t size);
void *vm_realloc(struct vm_ctx *c, void *p, size_t n, size_t size);

/* A growable array. */
struct vm_list {
  void *v;
  size_t n, cap;
};

#define VM_AT(list, type, i) (&((type *)(list).v)[i])
#define VM_PUSH(c, list, type) ((type *)vm_list_push(c, list, sizeof(type)))

/* Makes room for `more` items. */
bool vm_list_reserve(struct vm_ctx *c, struct vm_list *l, size_t item, size_t more);
/* Appends an item, which is not initialised. */
static inline void *vm_list_push(struct vm_ctx *c, struct vm_list *l, size_t item) {
  if (l->n == l->cap && !vm_list_reserve(c, l, item, 1)) return NULL;
  return (char *)l->v + item * l->n++;
}

#endif
