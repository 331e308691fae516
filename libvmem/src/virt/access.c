/* SPDX-License-Identifier: MIT */
/* Ranges whose contents are being accessed. */
#include "virt/virt.h"

void vm_access_begin(struct vm_ctx *c, struct vm_access *a) {
  a->next = c->virt->accesses;
  c->virt->accesses = a;
}

void vm_access_end(struct vm_ctx *c, struct vm_access *a) {
  struct vm_access **link = &c->virt->accesses;
  while (*link && *link != a) link = &(*link)->next;
  if (*link) *link = a->next;
}

/* Finds the first of an access's ranges that ends beyond addr; UINT64_MAX = none. */
static uint64_t next_range(const struct vm_access *a, uint64_t addr) {
  uint64_t i = 0;
  if (addr >= a->addr + a->bytes && a->stride) i = (addr - a->addr - a->bytes) / a->stride + 1;
  if (i >= a->count || (!a->stride && addr >= a->addr + a->bytes)) return UINT64_MAX;
  return a->addr + i * a->stride;
}

int vm_access_check(struct vm_ctx *c, uint64_t addr, uint64_t bytes) {
  for (struct vm_access *a = c->virt->accesses; a; a = a->next) {
    uint64_t at = next_range(a, addr);
    if (at < addr + bytes)
      return vm_fail_at(-EBUSY, at, a->bytes, 0, "0x%llx + %llu bytes is being read or written", (unsigned long long)at,
                        (unsigned long long)a->bytes);
  }
  return 0;
}
