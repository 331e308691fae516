/* SPDX-License-Identifier: MIT */
/* Reservations. */
#include <stdlib.h>
#include <string.h>

#include "virt/virt.h"

struct vm_space *vm_space_overlap(struct vm_ctx *c, uint64_t addr, uint64_t bytes) {
  size_t lo = 0, hi = c->virt->nspaces;
  while (lo < hi) {
    size_t mid = (lo + hi) / 2;
    struct vm_space *s = c->virt->spaces[mid];
    if (addr + (bytes - 1) < s->base)
      hi = mid;
    else if (addr > s->base + (s->bytes - 1))
      lo = mid + 1;
    else
      return s;
  }
  return NULL;
}

struct vm_space *vm_space_find(struct vm_ctx *c, uint64_t addr) { return vm_space_overlap(c, addr, 1); }

struct vm_space *vm_space_range(struct vm_ctx *c, uint64_t addr, uint64_t bytes, uint64_t align, int *err) {
  struct vm_space *s;
  if (!bytes) {
    *err = vm_fail_at(-EINVAL, addr, 0, 0, "size 0 at 0x%llx", (unsigned long long)addr);
    return NULL;
  }
  if ((addr | bytes) & (align - 1)) {
    *err = vm_fail_at(-EINVAL, addr, bytes, align, "0x%llx + %llu bytes is not aligned to %llu",
                      (unsigned long long)addr, (unsigned long long)bytes, (unsigned long long)align);
    return NULL;
  }
  if (addr + bytes < addr) {
    *err = vm_fail_at(-EOVERFLOW, addr, bytes, 0, "0x%llx + %llu bytes exceeds the address space",
                      (unsigned long long)addr, (unsigned long long)bytes);
    return NULL;
  }
  s = vm_space_find(c, addr);
  if (!s || s->bytes - (addr - s->base) < bytes) {
    *err =
        vm_fail_at(-ENXIO, addr, bytes, s ? s->base + s->bytes : 0, "0x%llx + %llu bytes is not inside a reservation%s",
                   (unsigned long long)addr, (unsigned long long)bytes, s ? " (it ends before that)" : "");
    return NULL;
  }
  if (s->gone) {
    *err = vm_fail_at(-ENXIO, addr, bytes, s->base + s->bytes,
                      "the reservation at 0x%llx is freed except for its addresses: call vMemFree again",
                      (unsigned long long)s->base);
    return NULL;
  }
  if (s->freeing) {
    *err = vm_fail_at(-EBUSY, addr, bytes, 0, "the reservation at 0x%llx is being freed", (unsigned long long)s->base);
    return NULL;
  }
  return s;
}

struct vm_space *vm_space_new(struct vm_ctx *c, uint64_t bytes) {
  struct vm_space *s = vm_calloc(c, 1, sizeof(*s));
  if (!s) return NULL;
  s->bytes = bytes;
  s->segments = 1;
  if ((s->leaves = vm_calloc(c, (vm_units(c, bytes) + LEAF_PTES - 1) / LEAF_PTES, sizeof(*s->leaves)))) return s;
  free(s);
  return NULL;
}

int vm_space_insert(struct vm_ctx *c, struct vm_space *s) {
  size_t i;
  if (c->virt->nspaces >= c->virt->cap_spaces) {
    size_t cap = c->virt->cap_spaces ? 2 * c->virt->cap_spaces : 16;
    struct vm_space **v = vm_realloc(c, c->virt->spaces, cap, sizeof(*v));
    if (!v) return -ENOMEM;
    c->virt->spaces = v;
    c->virt->cap_spaces = cap;
  }
  for (i = c->virt->nspaces; i && c->virt->spaces[i - 1]->base > s->base; i--)
    c->virt->spaces[i] = c->virt->spaces[i - 1];
  c->virt->spaces[i] = s;
  c->virt->nspaces++;
  c->virt->reserved_bytes += s->bytes;
  c->driver->segments += s->segments;
  return 0;
}

void vm_space_remove(struct vm_ctx *c, struct vm_space *s) {
  size_t i = 0;
  while (c->virt->spaces[i] != s) i++;
  memmove(&c->virt->spaces[i], &c->virt->spaces[i + 1], (--c->virt->nspaces - i) * sizeof(*c->virt->spaces));
  c->virt->reserved_bytes -= s->bytes;
  c->driver->segments -= s->segments;
}

void vm_space_destroy(struct vm_space *s) {
  if (s->leaves) {
    /* The table of a large reservation is mostly untouched memory: stop as early as possible. */
    for (uint64_t i = 0; s->live_leaves; i++) {
      if (!s->leaves[i]) continue;
      free(s->leaves[i]);
      s->live_leaves--;
    }
    free(s->leaves);
  }
  free(s);
}

/* Best effort: the driver reclaims what is left when the back end is closed. */
void vm_virt_close(struct vm_ctx *c) {
  for (size_t i = 0; i < c->virt->nspaces; i++) {
    struct vm_space *s = c->virt->spaces[i];
    uint64_t a = s->base, end = s->base + s->bytes, n;
    bool gone;
    for (; a < end && s->mapped && !c->info->unreserve_unmaps; a += n) {
      struct vm_pte *p = vm_pte(c, s, a);
      n = vm_space_run(c, s, a, end - a);
      if (p && p->flags & PTE_MAPPED) vm_drv_unmap(c, a, n, vm_is_sparse(s));
    }
    vm_drv_unreserve(c, s->base, s->bytes, s->priv, &gone);
    vm_space_destroy(s);
  }
  free(c->virt->spaces);
}
