/* SPDX-License-Identifier: MIT */
/*
 * Holes that temporarily read as zeros, for a SIGSEGV handler.
 *
 * All of this happens under the context's lock, so that no call maps a page there at the same time. The signal handler
 * may take that lock, because no code reads a reservation's memory while holding it.
 */
#include "api/api.h"

#define TAKEN (PTE_MAPPED | PTE_BUSY | PTE_QUARANTINED)

static bool is_hole(const struct vm_pte *p) { return !p || !(p->flags & TAKEN); }

/* Returns the end of the hole, or of the mapped stretch, that begins at addr. */
static uint64_t end_of(struct vm_ctx *c, struct vm_space *s, uint64_t addr, uint64_t end, bool hole) {
  while (addr < end) {
    const struct vm_pte *p = vm_pte(c, s, addr);
    uint32_t n = vm_leaf_rest(c, s, addr, end);
    for (uint32_t i = 0; p && i < n; i++, addr += c->granule)
      if (is_hole(p + i) != hole) return addr;
    if (!p && !hole) return addr;
    if (!p) addr += (uint64_t)n << c->shift;
  }
  return addr;
}

static uint64_t start_of(struct vm_ctx *c, struct vm_space *s, uint64_t addr) {
  while (addr > s->base) {
    const struct vm_pte *p = vm_pte(c, s, addr - c->granule);
    uint64_t rest = vm_units(c, addr - s->base) % LEAF_PTES;
    if (!is_hole(p)) break;
    addr -= p ? c->granule : (rest ? rest : LEAF_PTES) << c->shift;
  }
  return addr;
}

static int reveal(struct vm_ctx *c, uint64_t addr, uint64_t *start, uint64_t *bytes) {
  uint64_t granule = addr & ~(c->granule - 1);
  const struct vm_pte *p;
  struct vm_space *s;
  int err = 0;
  if (!(s = vm_space_range(c, granule, c->granule, c->granule, &err))) return err;
  p = vm_pte(c, s, granule);
  if (is_hole(p) ? vm_is_sparse(s) : vm_pte_is_live(p) && p->flags & PTE_READONLY)
    return vm_fail_at(-EACCES, addr, c->granule, 0, "0x%llx can be read, but not written", (unsigned long long)addr);
  if (!is_hole(p)) return vm_pte_taken(c, p, granule);
  *start = start_of(c, s, granule);
  *bytes = end_of(c, s, granule, s->base + s->bytes, true) - *start;
  return c->be->reveal(c->bes, *start, *bytes, true);
}

VMEM_API int vmem_reveal(vmem_t vm, uint64_t addr, uint64_t *start, uint64_t *bytes) {
  int err;
  struct vm_ctx *c = vm_get(vm, "vmem_reveal", &err);
  if (!c) return err;
  if (!start || !bytes)
    err = vm_fail(-EINVAL, "NULL argument");
  else if (!c->be->reveal)
    err = vm_fail(-EOPNOTSUPP, "back end %s cannot make holes readable", c->be->name);
  else {
    pthread_mutex_lock(&c->lock);
    err = reveal(c, addr, start, bytes);
    pthread_mutex_unlock(&c->lock);
  }
  vm_put(c);
  return err;
}

static int conceal(struct vm_ctx *c, uint64_t addr, uint64_t bytes) {
  uint64_t end = addr + bytes;
  struct vm_space *s;
  int err = 0;
  if (!(s = vm_space_range(c, addr, bytes, c->granule, &err)) || vm_is_sparse(s)) return err;
  while (!err && addr < end) {
    uint64_t hole = end_of(c, s, addr, end, false);
    addr = end_of(c, s, hole, end, true);
    if (hole < addr) err = c->be->reveal(c->bes, hole, addr - hole, false);
  }
  return err;
}

VMEM_API int vmem_conceal(vmem_t vm, uint64_t addr, uint64_t bytes) {
  int err;
  struct vm_ctx *c = vm_get(vm, "vmem_conceal", &err);
  if (!c) return err;
  if (!c->be->reveal)
    err = vm_fail(-EOPNOTSUPP, "back end %s cannot make holes readable", c->be->name);
  else {
    pthread_mutex_lock(&c->lock);
    err = conceal(c, addr, bytes);
    pthread_mutex_unlock(&c->lock);
  }
  vm_put(c);
  return err;
}
