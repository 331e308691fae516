/* SPDX-License-Identifier: MIT */
/* Joining: remaps by one call what several calls have mapped, with large entries for whole blocks. */
#include "plan/plan.h"

static bool can_join(const struct vm_ctx *c) { return c->be->remap || (c->be->bind && c->large_entries); }

/* True if remapping by one call would save entries, or calls if the driver keeps a record per call. */
static bool saves(struct vm_ctx *c, struct vm_space *s, uint64_t addr, struct vm_run r) {
  uint64_t end = addr + vm_bytes(c, r.n);
  bool whole = vm_is_whole(c, s, addr, r);
  for (uint64_t a = addr; a < end; a += c->granule) {
    if (a > addr && !c->be->bind && vm_pte(c, s, a)->flags & PTE_CALL) return true;
    if (whole && !(a & (LARGE_PAGE - 1)) && !vm_is_entry(c, s, a)) return true;
  }
  return false;
}

/* Finds the next stretch in [*addr, end) that is worth remapping, fits in one call and cuts no entry. Returns its
 * length and sets *addr; 0 = none. */
static uint64_t next_call(struct vm_ctx *c, struct vm_space *s, uint64_t *addr, uint64_t end) {
  uint64_t most = c->info->bind_bytes ? c->info->bind_bytes : end;
  while (*addr < end) {
    uint64_t n = vm_space_run(c, s, *addr, end - *addr < most ? end - *addr : most), page, bytes;
    const struct vm_pte *p = vm_pte(c, s, *addr);
    bool cuts = vm_space_cuts_page(c, s, *addr, &page, &bytes);
    if (!cuts && vm_pte_is_live(p)) {
      struct vm_run r = {c->phys->slabs[p->slab], p->unit, (uint32_t)vm_units(c, n)};
      r.n = vm_one_call(c, *addr, r);
      if (vm_space_cuts_page(c, s, *addr + vm_bytes(c, r.n), &page, &bytes)) {
        cuts = page == *addr; /* the range ends in this block, or a batch is changing the rest of it */
        r.n = (uint32_t)vm_units(c, page - *addr);
      }
      n = vm_bytes(c, r.n);
      if (!cuts && saves(c, s, *addr, r)) return n;
    }
    *addr = cuts ? page + bytes : *addr + n;
  }
  return 0;
}

static int add(struct vm_ctx *c, struct vm_plan *p, struct vm_space *s, uint64_t addr, uint64_t bytes) {
  const struct vm_pte *pte = vm_pte(c, s, addr);
  struct vm_seg *seg;
  int err = vm_access_check(c, addr, bytes);
  if (err) return err;
  if (!(seg = VM_PUSH(c, &p->joins, struct vm_seg))) return -ENOMEM;
  *seg = (struct vm_seg){
      addr, 0, s, c->phys->slabs[pte->slab], pte->unit, pte->flags & PTE_READONLY ? VMEM_MAP_READONLY : 0};
  seg->bytes = vm_bytes(c, vm_ptes_hold(c, s, addr, bytes));
  return 0;
}

int vm_plan_join(struct vm_ctx *c, struct vm_plan *p, struct vm_space *s, uint64_t addr, uint64_t bytes, bool holes) {
  uint64_t end = addr + bytes, n;
  int err = 0;
  for (uint64_t a = addr; a < end; a += c->granule) {
    const struct vm_pte *pte = vm_pte(c, s, a);
    if (!vm_pte_is_live(pte) && !(holes && (!pte || !pte->flags))) return vm_pte_not_live(c, pte, a);
  }
  for (uint64_t a = addr; !err && can_join(c) && (n = next_call(c, s, &a, end)); a += n) err = add(c, p, s, a, n);
  return err;
}

/* Waits for fills of unfinished batches here; their failures are reported by those batches. */
static void await_fills(struct vm_ctx *c, struct vm_plan *p) {
  while (vm_plan_await_fills(c, p)) {
  }
}

/* Joins a stretch with one call. Lock held; dropped around driver calls. */
static int join(struct vm_ctx *c, struct vm_space *s, uint64_t addr, uint64_t bytes) {
  struct vm_plan p = {.only_joins = true, .keep = VMEM_KEEP_ALL};
  struct vm_fill *none;
  int err = add(c, &p, s, addr, bytes);
  if (!err) err = vm_plan_ops_room(c, &p);
  pthread_mutex_unlock(&c->lock);
  if (err) {
    VM_UNDO(vm_plan_cancel(c, &p));
  } else {
    VM_UNDO(await_fills(c, &p));
    err = vm_plan_run(c, &p, NULL, 0, NULL, &none);
  }
  pthread_mutex_lock(&c->lock);
  return err;
}

int vm_join(struct vm_ctx *c, uint64_t addr, uint64_t bytes, uint64_t *calls) {
  uint64_t a = addr, n;
  int err = 0;
  struct vm_space *s;
  *calls = 0;
  pthread_mutex_lock(&c->lock);
  s = vm_space_range(c, addr, bytes, c->granule, &err);
  while (s && !err && can_join(c) && (n = next_call(c, s, &a, addr + bytes))) {
    err = join(c, s, a, n);
    ++*calls;
    a += n;
    /* The lock was dropped: the reservation may be gone. */
    if (!err && a < addr + bytes) s = vm_space_range(c, a, addr + bytes - a, c->granule, &err);
  }
  pthread_mutex_unlock(&c->lock);
  return err;
}
