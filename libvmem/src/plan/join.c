/* SPDX-License-Identifier: MIT */
/* Consolidation: remaps what was mapped page by page, one call per run. */
#include "plan/plan.h"

static uint64_t calls_within(struct vm_ctx *c, struct vm_space *s, uint64_t addr, uint64_t bytes) {
  uint64_t calls = 0;
  for (uint64_t a = addr + c->granule; a < addr + bytes; a += c->granule)
    calls += (vm_pte(c, s, a)->flags & PTE_CALL) != 0;
  return calls;
}

/* The next run in [*addr, end) that several driver calls have mapped: no longer than one call takes, and no page of it
 * is cut. 0 = none. */
static uint64_t next_run(struct vm_ctx *c, struct vm_space *s, uint64_t *addr, uint64_t end) {
  uint64_t most = c->info->bind_bytes ? c->info->bind_bytes : end;
  while (*addr < end) {
    uint64_t n = vm_space_run(c, s, *addr, end - *addr < most ? end - *addr : most), page, bytes;
    bool cuts = vm_space_cuts_page(c, s, *addr, &page, &bytes);
    if (!cuts && vm_space_cuts_page(c, s, *addr + n, &page, &bytes)) {
      cuts = page == *addr; /* a batch is changing the rest of it */
      n = page - *addr;
    }
    if (!cuts && vm_pte_is_live(vm_pte(c, s, *addr)) && calls_within(c, s, *addr, n)) return n;
    *addr = cuts ? page + bytes : *addr + n;
  }
  return 0;
}

static int make(struct vm_ctx *c, struct vm_space *s, uint64_t addr, uint64_t bytes, struct vm_plan *p) {
  const struct vm_pte *pte = vm_pte(c, s, addr);
  struct vm_piece *piece = VM_PUSH(c, &p->replaced, struct vm_piece);
  struct vm_seg *seg = VM_PUSH(c, &p->replaces, struct vm_seg);
  int err = piece && seg ? vm_access_check(c, addr, bytes) : -ENOMEM;
  if (piece) *piece = (struct vm_piece){addr, 0, s, 0};
  if (seg)
    *seg = (struct vm_seg){
        addr, bytes, s, c->phys->slabs[pte->slab], pte->unit, pte->flags & PTE_READONLY ? VMEM_MAP_READONLY : 0};
  if (!err) err = vm_plan_ops_room(c, p);
  if (!err) piece->bytes = vm_bytes(c, vm_ptes_hold(c, s, addr, bytes));
  return err;
}

/* A fill of an unfinished batch may be at work here; if it fails, that batch says so. */
static void await_fills(struct vm_ctx *c, struct vm_plan *p) {
  while (vm_plan_await_fills(c, p)) {
  }
}

/* One run. Lock held; dropped around driver calls. */
static int consolidate(struct vm_ctx *c, struct vm_space *s, uint64_t addr, uint64_t bytes) {
  struct vm_plan p = {.same = true, .keep = VMEM_KEEP_ALL};
  struct vm_fill *none;
  int err = make(c, s, addr, bytes, &p);
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
  while (s && !err && c->be->remap && (n = next_run(c, s, &a, addr + bytes))) {
    err = consolidate(c, s, a, n);
    ++*calls;
    a += n;
    /* The lock was dropped: the reservation may be gone. */
    if (!err && a < addr + bytes) s = vm_space_range(c, a, addr + bytes - a, c->granule, &err);
  }
  pthread_mutex_unlock(&c->lock);
  return err;
}
