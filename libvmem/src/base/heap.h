/* SPDX-License-Identifier: MIT */
/* heap.h - the library's own allocations in a context, and failures that vmem_inject asks for. */
#ifndef VMEM_BASE_HEAP_H
#define VMEM_BASE_HEAP_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct vm_ctx;

struct vm_inject { /* atomics: the heap is also used under the context's lock */
  uint32_t kinds;
  uint64_t skip, count;
  int error;
};

void vm_inject_arm(struct vm_ctx *c, uint32_t kinds, uint64_t skip, uint64_t count, int error);
/* The failure that a call of this kind is to meet, recorded; 0 = none. */
int vm_injected(struct vm_ctx *c, uint32_t kind);

/* NULL with -ENOMEM recorded. Memory of vm_realloc is not initialised. */
void *vm_calloc(struct vm_ctx *c, size_t n, size_t size);
void *vm_realloc(struct vm_ctx *c, void *p, size_t n, size_t size);

/* An array that grows. */
struct vm_list {
  void *v;
  size_t n, cap;
};

#define VM_AT(list, type, i) (&((type *)(list).v)[i])
#define VM_PUSH(c, list, type) ((type *)vm_list_push(c, list, sizeof(type)))

/* Room for `more` items. */
bool vm_list_reserve(struct vm_ctx *c, struct vm_list *l, size_t item, size_t more);
/* A new last item, not initialised. */
void *vm_list_push(struct vm_ctx *c, struct vm_list *l, size_t item);

#endif
