/* SPDX-License-Identifier: MIT */
/* Page tables: what backs a range of addresses, and every change to that. */
#include <string.h>

#include "virt/virt.h"

static uint64_t leaf_bytes(const struct vm_ctx *c) { return (uint64_t)LEAF_PTES << c->shift; }

struct vm_pte *vm_pte_make(struct vm_ctx *c, struct vm_space *s, uint64_t addr) {
  uint64_t unit = vm_units(c, addr - s->base);
  struct vm_leaf **leaf = &s->leaves[unit / LEAF_PTES];
  if (!*leaf) {
    if (!(*leaf = vm_calloc(c, 1, sizeof(**leaf)))) return NULL;
    s->live_leaves++;
  }
  return &(*leaf)->pte[unit % LEAF_PTES];
}

int vm_pte_taken(const struct vm_ctx *c, const struct vm_pte *p, uint64_t addr) {
  unsigned long long a = addr;
  if (p->flags & PTE_QUARANTINED)
    return vm_fail_at(-ENOTRECOVERABLE, addr, c->granule, 0, "0x%llx is quarantined after a failed undo", a);
  if (p->flags & PTE_MAPPED) return vm_fail_at(-EEXIST, addr, c->granule, 0, "0x%llx is already mapped", a);
  return vm_fail_at(-EBUSY, addr, c->granule, 0, "0x%llx is being changed by another call", a);
}

int vm_pte_not_live(const struct vm_ctx *c, const struct vm_pte *p, uint64_t addr) {
  unsigned long long a = addr;
  if (p && p->flags & PTE_QUARANTINED)
    return vm_fail_at(-ENOTRECOVERABLE, addr, c->granule, 0, "0x%llx is quarantined after a failed undo", a);
  if (p && p->flags & PTE_BUSY)
    return vm_fail_at(-EBUSY, addr, c->granule, 0, "0x%llx is being changed by another call", a);
  return vm_fail_at(-EFAULT, addr, c->granule, 0, "nothing is mapped at 0x%llx", a);
}

static inline bool live(const struct vm_pte *p) { return p && (p->flags & PTE_MAPPED); }

/* True if the back end sees b as the continuation of a. */
static inline bool joined(const struct vm_pte *a, const struct vm_pte *b) {
  if (!live(a) || !live(b)) return live(a) == live(b);
  return a->slab == b->slab && a->unit + 1 == b->unit && (a->flags & PTE_READONLY) == (b->flags & PTE_READONLY);
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
  return (addr > s->base && live(vm_pte(c, s, addr - c->granule))) +
         (end < s->base + s->bytes && live(vm_pte(c, s, end)));
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
  if (c->info->one_page_slabs) {
    *page = addr - ((uint64_t)p->unit << c->shift);
    *bytes = c->phys->slabs[p->slab]->bytes;
    return p->unit != 0;
  }
  *page = addr & ~(LARGE_PAGE - 1);
  *bytes = LARGE_PAGE;
  return addr != *page && *page >= s->base && vm_is_entry(c, s, *page);
}

bool vm_is_entry(struct vm_ctx *c, struct vm_space *s, uint64_t addr) {
  const struct vm_pte *p = vm_pte(c, s, addr);
  return live(p) && p->flags & PTE_LARGE;
}

uint64_t vm_space_run(struct vm_ctx *c, struct vm_space *s, uint64_t addr, uint64_t max) {
  struct vm_pte *prev = vm_pte(c, s, addr);
  uint64_t a = addr, end = addr + max;
  uint32_t state = prev ? prev->flags & ~PTE_MARKS : 0;
  if (end > s->base + s->bytes || end < addr) end = s->base + s->bytes;
  for (;;) {
    struct vm_pte *p;
    /* Nothing was ever mapped under a missing leaf: skip all of it. */
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
    if (!joined(prev, p) || (p ? p->flags & ~PTE_MARKS : 0) != state) break;
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
  for (uint64_t a = addr, end = addr + bytes; c->phys->fills && !f && a < end; a += (uint64_t)n << c->shift) {
    struct vm_pte *p = vm_pte(c, s, a);
    n = 1;
    if (!p || !p->flags) continue;
    n = vm_space_units(c, s, a, end, 0);
    f = vm_fill_on(c, c->phys->slabs[p->slab], p->unit, n);
  }
  return f;
}

uint32_t vm_one_call(const struct vm_ctx *c, uint64_t addr, struct vm_run r) {
  uint32_t page = c->chunk_units, at = (uint32_t)vm_units(c, addr) & (page - 1), rest = (page - at) & (page - 1);
  if (!r.slab->large || at != (r.unit & (page - 1))) return r.n;
  if (rest) return rest < r.n ? rest : r.n;
  return r.n < page ? r.n : r.n & ~(page - 1);
}

uint64_t vm_space_call(struct vm_ctx *c, struct vm_space *s, uint64_t addr, uint64_t max) {
  const struct vm_pte *p = vm_pte(c, s, addr);
  uint64_t n = vm_space_run(c, s, addr, max), next = vm_round_up(addr + 1, LARGE_PAGE);
  bool large = p->flags & PTE_LARGE;
  for (; c->large_pages && next < addr + n; next += LARGE_PAGE)
    if (vm_is_entry(c, s, next) != large) n = next - addr;
  /* A range that small entries map would get a large entry. */
  if (!large && vm_is_whole(c, s, addr, (struct vm_run){c->phys->slabs[p->slab], p->unit, (uint32_t)vm_units(c, n)}))
    n -= c->granule;
  return n;
}

/* ---- changing it ------------------------------------------------------------------------------- */

/* Returns the marks that a call leaves at one of its granules. */
static uint32_t marks_at(uint64_t addr, uint32_t flags) { return addr & (LARGE_PAGE - 1) ? flags & ~PTE_LARGE : flags; }

int vm_ptes_name(struct vm_ctx *c, struct vm_space *s, uint64_t addr, struct vm_run r, uint32_t handle, uint32_t flags,
                 uint32_t *marked) {
  uint32_t n;
  for (*marked = 0; *marked < r.n; s->busy += n, *marked += n) {
    struct vm_pte *p = vm_pte_make(c, s, addr);
    if (!p) return -ENOMEM;
    n = vm_leaf_rest(c, s, addr, addr + vm_bytes(c, r.n - *marked));
    for (uint32_t i = 0; i < n; i++, addr += c->granule) {
      if (p[i].flags) {
        s->busy += i;
        *marked += i;
        return vm_pte_taken(c, &p[i], addr);
      }
      p[i] = (struct vm_pte){r.slab->index, r.unit + *marked + i, handle, marks_at(addr, flags) | PTE_BUSY};
      flags &= ~(PTE_START | PTE_CALL); /* only the first granule gets these */
    }
  }
  return 0;
}

struct vm_run vm_ptes_rename(struct vm_ctx *c, struct vm_space *s, uint64_t addr, struct vm_run r, uint32_t handle,
                             uint32_t flags) {
  const struct vm_pte *first = vm_pte(c, s, addr);
  struct vm_run old = {c->phys->slabs[first->slab], first->unit, 0};
  old.n = vm_space_units(c, s, addr, addr + vm_bytes(c, r.n), 0);
  for (uint32_t i = 0; i < old.n; i++, addr += c->granule, flags &= ~(PTE_START | PTE_CALL))
    *vm_pte(c, s, addr) = (struct vm_pte){r.slab->index, r.unit + i, handle, marks_at(addr, flags) | PTE_BUSY};
  return old;
}

uint64_t vm_ptes_hold(struct vm_ctx *c, struct vm_space *s, uint64_t addr, uint64_t bytes) {
  uint64_t a = addr, end = addr + bytes;
  while (a < end) {
    struct vm_pte *p = vm_pte(c, s, a);
    uint32_t n = vm_leaf_rest(c, s, a, end), i = 0;
    for (; p && i < n && vm_pte_is_live(&p[i]); i++) p[i].flags |= PTE_BUSY;
    a += vm_bytes(c, i);
    if (i < n) break;
  }
  s->busy += vm_units(c, a - addr);
  return vm_units(c, a - addr);
}

void vm_ptes_release(struct vm_ctx *c, struct vm_space *s, uint64_t addr, uint64_t bytes) {
  for (uint64_t a = addr; a < addr + bytes; a += c->granule) {
    struct vm_pte *p = vm_pte(c, s, a);
    if (p->flags & PTE_QUARANTINED) continue;
    p->flags &= ~PTE_BUSY;
    s->busy--;
  }
}

void vm_space_count_edges(struct vm_ctx *c, struct vm_space *s, uint64_t addr, uint64_t bytes, uint64_t before) {
  uint64_t more = vm_space_edges(c, s, addr, bytes) - before;
  s->segments += more;
  c->driver->segments += more;
}

/* Marks a mapped pte as the first of a driver call, or not. */
static void set_call(struct vm_ctx *c, struct vm_pte *p, bool first) {
  if (first && !(p->flags & PTE_CALL)) c->driver->mappings++;
  if (!first && p->flags & PTE_CALL) c->driver->mappings--;
  p->flags = first ? p->flags | PTE_CALL : p->flags & ~PTE_CALL;
}

static void count_entry(struct vm_ctx *c, const struct vm_space *s, bool more) {
  if (s->large) c->driver->large_entries += more ? 1 : -1ull;
}

uint64_t vm_ptes_entries(struct vm_ctx *c, struct vm_space *s, uint64_t addr, uint64_t bytes, bool large) {
  uint64_t changed = 0;
  if (!c->large_pages) return 0;
  for (uint64_t a = vm_round_up(addr, LARGE_PAGE); a + LARGE_PAGE <= addr + bytes; a += LARGE_PAGE) {
    if (vm_is_entry(c, s, a) == large) continue;
    vm_pte(c, s, a)->flags ^= PTE_LARGE;
    count_entry(c, s, large);
    changed++;
  }
  return changed;
}

/* Returns the pte after a changed range, if it is mapped. */
static struct vm_pte *behind(struct vm_ctx *c, struct vm_space *s, uint64_t end) {
  struct vm_pte *p = end < s->base + s->bytes ? vm_pte(c, s, end) : NULL;
  return live(p) ? p : NULL;
}

void vm_ptes_one_call(struct vm_ctx *c, struct vm_space *s, uint64_t addr, uint64_t bytes) {
  struct vm_pte *next = behind(c, s, addr + bytes);
  for (uint64_t a = addr; a < addr + bytes; a += c->granule) set_call(c, vm_pte(c, s, a), a == addr);
  /* If that cuts an old call, its remainder counts as a call of its own. */
  if (next) set_call(c, next, true);
}

void vm_ptes_commit(struct vm_ctx *c, struct vm_space *s, uint64_t addr, uint64_t bytes) {
  uint64_t before = vm_space_edges_bare(c, s, addr, bytes), units = vm_units(c, bytes);
  for (uint64_t a = addr, end = a + bytes; a < end;) {
    struct vm_pte *p = vm_pte(c, s, a);
    for (uint32_t n = vm_leaf_rest(c, s, a, end); n; n--, p++, a += c->granule) {
      p->flags = (p->flags & ~PTE_BUSY) | PTE_MAPPED;
      if (p->flags & PTE_START) vm_hdl_mapping(c, p->handle, a, true);
      if (p->flags & PTE_CALL) c->driver->mappings++;
      if (p->flags & PTE_LARGE) count_entry(c, s, true);
    }
  }
  vm_space_count_edges(c, s, addr, bytes, before);
  s->mapped += units;
  s->busy -= units;
  c->virt->mapped_units += units;
}

void vm_ptes_detach(struct vm_ctx *c, struct vm_space *s, uint64_t addr, uint64_t bytes) {
  uint64_t end = addr + bytes, units = 0, before = vm_space_edges(c, s, addr, bytes), after;
  struct vm_pte *next = behind(c, s, end);
  /* Count this mapping first: it may be all that keeps the entry of a dropped handle. */
  if (next) {
    if (!(next->flags & PTE_START)) {
      next->flags |= PTE_START;
      vm_hdl_mapping(c, next->handle, end, true);
    }
    set_call(c, next, true);
  }
  for (uint64_t a = addr; a < end;) {
    struct vm_pte *p = vm_pte(c, s, a);
    for (uint32_t n = vm_leaf_rest(c, s, a, end); n; n--, p++, a += c->granule) {
      if (!(p->flags & PTE_MAPPED)) continue;
      if (p->flags & PTE_START) vm_hdl_mapping(c, p->handle, a, false);
      if (p->flags & PTE_CALL) c->driver->mappings--;
      if (p->flags & PTE_LARGE) count_entry(c, s, false);
      p->flags &= ~(PTE_MAPPED | PTE_MARKS);
      units++;
    }
  }
  s->mapped -= units;
  c->virt->mapped_units -= units;
  after = vm_space_edges_bare(c, s, addr, bytes);
  s->segments += after - before;
  c->driver->segments += after - before;
}

void vm_ptes_unmap(struct vm_ctx *c, struct vm_space *s, uint64_t addr, uint64_t bytes) {
  uint64_t a = addr, end = addr + bytes;
  if (!bytes) return;
  vm_ptes_detach(c, s, addr, bytes);
  while (a < end) {
    struct vm_pte first = *vm_pte(c, s, a);
    uint32_t n = vm_space_units(c, s, a, end, 0), rest;
    /* Clear the ptes first: vm_units_put drops the lock, and they would name units without a reference. */
    for (uint64_t stop = a + ((uint64_t)n << c->shift); a < stop; a += (uint64_t)rest << c->shift) {
      rest = vm_leaf_rest(c, s, a, stop);
      memset(vm_pte(c, s, a), 0, rest * sizeof(struct vm_pte));
    }
    s->busy -= n;
    vm_units_put(c, c->phys->slabs[first.slab], first.unit, n);
  }
}

void vm_ptes_quarantine(struct vm_ctx *c, struct vm_space *s, uint64_t addr, uint64_t bytes) {
  uint64_t page, size;
  /* The remainder of a large entry at either end is mapped by small entries now. */
  if (vm_space_cuts_page(c, s, addr, &page, &size)) vm_ptes_entries(c, s, page, size, false);
  if (vm_space_cuts_page(c, s, addr + bytes, &page, &size)) vm_ptes_entries(c, s, page, size, false);
  vm_ptes_detach(c, s, addr, bytes);
  for (uint64_t a = addr; a < addr + bytes; a += c->granule) {
    struct vm_pte *p = vm_pte(c, s, a);
    vm_unit_quarantine(c, c->phys->slabs[p->slab], p->unit);
    p->handle = 0;
    p->flags = PTE_QUARANTINED;
  }
  s->busy -= vm_units(c, bytes);
  s->quarantined += vm_units(c, bytes);
}
