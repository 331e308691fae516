/* SPDX-License-Identifier: MIT */
/* Reservations and their page tables. The caller holds vm_ctx.lock. */
#include <stdlib.h>

#include "backend/fills.h"

static uint64_t leaf_bytes(const struct vm_ctx *c) { return (uint64_t)LEAF_PTES << c->shift; }

struct vm_space *vm_space_find(struct vm_ctx *c, uint64_t addr) {
  size_t lo = 0, hi = c->nspaces;
  while (lo < hi) {
    size_t mid = (lo + hi) / 2;
    struct vm_space *s = c->spaces[mid];
    if (addr < s->base)
      hi = mid;
    else if (addr - s->base >= s->bytes)
      lo = mid + 1;
    else
      return s;
  }
  return NULL;
}

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
    *err = vm_fail_at(-EOVERFLOW, addr, bytes, 0, "0x%llx + %llu bytes leaves the address space",
                      (unsigned long long)addr, (unsigned long long)bytes);
    return NULL;
  }
  s = vm_space_find(c, addr);
  if (!s || s->bytes - (addr - s->base) < bytes) {
    *err = vm_fail_at(-ENXIO, addr, bytes, s ? s->base + s->bytes : 0,
                      "0x%llx + %llu bytes is not inside a reservation%s", (unsigned long long)addr,
                      (unsigned long long)bytes, s ? " (it ends too early)" : "");
    return NULL;
  }
  if (s->gone) {
    *err = vm_fail_at(-ENXIO, addr, bytes, s->base + s->bytes,
                      "of the reservation at 0x%llx only the addresses are left: vMemFree gives them back",
                      (unsigned long long)s->base);
    return NULL;
  }
  if (s->freeing) {
    *err = vm_fail_at(-EBUSY, addr, bytes, 0, "the reservation at 0x%llx is being freed",
                      (unsigned long long)s->base);
    return NULL;
  }
  return s;
}

struct vm_pte *vm_pte_make(struct vm_ctx *c, struct vm_space *s, uint64_t addr) {
  uint64_t unit = vm_units(c, addr - s->base);
  struct vm_leaf **leaf = &s->leaves[unit / LEAF_PTES];
  if (!*leaf) {
    if (!(*leaf = vm_calloc(c, 1, sizeof(**leaf)))) return NULL;
    s->live_leaves++;
  }
  return &(*leaf)->pte[unit % LEAF_PTES];
}

static inline bool live(const struct vm_pte *p) { return p && (p->flags & PTE_MAPPED); }

/* Whether the back end sees b as the continuation of a. */
static inline bool joined(const struct vm_pte *a, const struct vm_pte *b) {
  if (!live(a) || !live(b)) return live(a) == live(b);
  return a->slab == b->slab && a->unit + 1 == b->unit &&
         (a->flags & PTE_READONLY) == (b->flags & PTE_READONLY);
}

uint64_t vm_space_edges(struct vm_ctx *c, struct vm_space *s, uint64_t addr, uint64_t bytes) {
  uint64_t edges = 0, end = addr + bytes;
  struct vm_pte *prev;
  uint32_t n;
  /* The edge after the last granule counts too, if there is a granule. */
  if (end < s->base + s->bytes) end += c->granule;
  if (addr > s->base) addr -= c->granule;
  prev = vm_pte(c, s, addr);
  for (uint64_t a = addr + c->granule; a < end; a += (uint64_t)n << c->shift) {
    struct vm_pte *p = vm_pte(c, s, a);
    n = vm_leaf_rest(c, s, a, end);
    edges += !joined(prev, p);
    for (uint32_t i = 1; p && i < n; i++) edges += !joined(p + i - 1, p + i);
    prev = p ? p + n - 1 : NULL;
  }
  return edges;
}

uint64_t vm_space_edges_bare(struct vm_ctx *c, struct vm_space *s, uint64_t addr, uint64_t bytes) {
  uint64_t end = addr + bytes;
  return (addr > s->base && live(vm_pte(c, s, addr - c->granule))) + (end < s->base + s->bytes && live(vm_pte(c, s, end)));
}

bool vm_space_cuts(struct vm_ctx *c, struct vm_space *s, uint64_t addr) {
  struct vm_pte *p;
  if (addr <= s->base || addr >= s->base + s->bytes) return false;
  p = vm_pte(c, s, addr);
  return live(p) && joined(vm_pte(c, s, addr - c->granule), p);
}

bool vm_space_cuts_page(struct vm_ctx *c, struct vm_space *s, uint64_t addr, uint64_t *page, uint64_t *bytes) {
  struct vm_pte *p;
  if (addr <= s->base || addr >= s->base + s->bytes || !live(p = vm_pte(c, s, addr))) return false;
  if (c->info.one_page_slabs) {
    *page = addr - ((uint64_t)p->unit << c->shift);
    *bytes = c->slabs[p->slab]->bytes;
    return p->unit != 0;
  }
  *page = addr & ~(LARGE_PAGE - 1);
  *bytes = LARGE_PAGE;
  if (addr == *page || !c->slabs[p->slab]->pool->large || *page < s->base || s->base + s->bytes - *page < LARGE_PAGE) return false;
  if ((p->unit & (c->chunk_units - 1)) != vm_units(c, addr - *page)) return false;
  /* What two calls have mapped has no entry that covers both. */
  for (uint64_t a = *page + c->granule; a < *page + LARGE_PAGE; a += c->granule)
    if (!live(p = vm_pte(c, s, a)) || p->flags & PTE_CALL || !joined(vm_pte(c, s, a - c->granule), p)) return false;
  return true;
}

uint64_t vm_space_run(struct vm_ctx *c, struct vm_space *s, uint64_t addr, uint64_t max) {
  struct vm_pte *prev = vm_pte(c, s, addr);
  uint64_t a = addr, end = addr + max;
  uint32_t state = prev ? prev->flags & ~(PTE_START | PTE_CALL) : 0;
  if (end > s->base + s->bytes || end < addr) end = s->base + s->bytes;
  for (;;) {
    struct vm_pte *p;
    /* Nothing was ever mapped under a missing leaf: skip it whole. */
    if (!prev && !(vm_units(c, a - s->base) % LEAF_PTES) && a + leaf_bytes(c) <= end) {
      a += leaf_bytes(c);
      if (a >= end) break;
      prev = p = vm_pte(c, s, a);
      if (p && p->flags) break;
      continue;
    }
    a += c->granule;
    if (a >= end) break;
    p = vm_pte(c, s, a);
    if (!joined(prev, p) || (p ? p->flags & ~(PTE_START | PTE_CALL) : 0) != state) break;
    prev = p;
  }
  return (a < end ? a : end) - addr;
}

uint32_t vm_space_units(struct vm_ctx *c, struct vm_space *s, uint64_t addr, uint64_t end, uint32_t mask) {
  struct vm_pte *p = vm_pte(c, s, addr), first = *p;
  uint32_t n = 0;
  for (uint64_t a = addr; a < end;) {
    if (!(p = vm_pte(c, s, a))) break;
    for (uint32_t left = vm_leaf_rest(c, s, a, end); left; left--, p++, n++, a += c->granule)
      if (p->slab != first.slab || p->unit != first.unit + n || (p->flags ^ first.flags) & mask) return n;
  }
  return n;
}

struct vm_fill *vm_space_fill(struct vm_ctx *c, struct vm_space *s, uint64_t addr, uint64_t bytes) {
  struct vm_fill *f = NULL;
  uint32_t n;
  for (uint64_t a = addr, end = addr + bytes; c->fills && !f && a < end; a += (uint64_t)n << c->shift) {
    struct vm_pte *p = vm_pte(c, s, a);
    n = 1;
    if (!p || !p->flags) continue;
    n = vm_space_units(c, s, a, end, 0);
    f = vm_fill_on(c, c->slabs[p->slab], p->unit, n);
  }
  return f;
}

void vm_space_destroy(struct vm_space *s) {
  if (s->leaves) {
    /* The table of a large reservation is mostly untouched memory: not a step further than needed. */
    for (uint64_t i = 0; s->live_leaves; i++) {
      if (!s->leaves[i]) continue;
      free(s->leaves[i]);
      s->live_leaves--;
    }
    free(s->leaves);
  }
  free(s);
}
