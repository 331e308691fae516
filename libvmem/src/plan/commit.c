/* SPDX-License-Identifier: MIT */
/*
 * Ends a plan: records its changes, or takes back what was marked and taken for it.
 *
 * Until a replace is committed, its ptes (busy) refer to the old pages, and the handle, which is
 * pinned, holds the references to the new ones. After an unknown outcome both are quarantined.
 */
#include <stdlib.h>
#include <string.h>

#include "plan/plan.h"

void vm_plan_clear(struct vm_plan *p) {
  free(p->maps.v);
  free(p->mapped.v);
  free(p->unmaps.v);
  free(p->zeros.v);
  free(p->copies.v);
  free(p->sources.v);
  free(p->replaced.v);
  free(p->replaces.v);
  free(p->cuts.v);
  free(p->kept.v);
  free(p->groups.v);
  free(p->group_segs.v);
  free(p->joins.v);
  free(p->fills.v);
  free(p->consumed.v);
  free(p->ops);
  free(p->fill);
  memset(p, 0, sizeof(*p));
}

/* Ends the plan's claims on the piece's units. */
static void end_claims(struct vm_ctx *c, const struct vm_plan *p, const struct vm_piece *piece, bool committed) {
  uint32_t n;
  for (uint64_t a = piece->addr, end = a + piece->bytes; a < end && p->claims; a += vm_bytes(c, n)) {
    const struct vm_pte *pte = vm_pte(c, piece->space, a);
    n = vm_space_units(c, piece->space, a, end, 0);
    vm_units_end_claim(c->phys->slabs[pte->slab], pte->unit, n, p->zeroed, committed);
  }
}

/* Releases the plan's copy sources and its planned mappings, which are already counted or will never exist. */
static void end_reservations(struct vm_ctx *c, struct vm_plan *p) {
  for (size_t i = 0; i < p->sources.n; i++) vm_access_end(c, VM_AT(p->sources, struct vm_access, i));
  vm_room_end(c, p->room);
  p->room = (struct vm_room){0, 0};
}

static void release(struct vm_ctx *c, const struct vm_list *pieces) {
  for (size_t i = 0; i < pieces->n; i++) {
    const struct vm_piece *piece = VM_AT(*pieces, struct vm_piece, i);
    vm_ptes_release(c, piece->space, piece->addr, piece->bytes);
  }
}

static void release_segs(struct vm_ctx *c, const struct vm_list *segs) {
  for (size_t i = 0; i < segs->n; i++) {
    const struct vm_seg *seg = VM_AT(*segs, struct vm_seg, i);
    vm_ptes_release(c, seg->space, seg->addr, seg->bytes);
  }
}

/* ---- replaces ---------------------------------------------------------------------------------- */

/* True if segment `seg` belongs to the piece. A piece's segments are adjacent in the list. */
static bool in_piece(const struct vm_plan *p, const struct vm_piece *piece, size_t seg) {
  const struct vm_seg *s;
  if (seg >= p->replaces.n) return false;
  s = VM_AT(p->replaces, struct vm_seg, seg);
  return s->addr >= piece->addr && s->addr < piece->addr + piece->bytes;
}

/* Points the ptes of a segment at its units and drops the references to the old ones. The ptes stay busy with this
 * plan, because dropping references drops the lock. */
static void take_over(struct vm_ctx *c, const struct vm_piece *piece, const struct vm_seg *seg) {
  struct vm_run r = {seg->slab, seg->unit, (uint32_t)vm_units(c, seg->bytes)};
  uint32_t flags = (seg->flags & VMEM_MAP_READONLY ? PTE_READONLY : 0) | vm_call_marks(c, piece->space, seg->addr, r);
  uint64_t a = seg->addr;
  if (a == piece->addr) flags |= PTE_START;
  while (r.n) {
    struct vm_run old = vm_ptes_rename(c, piece->space, a, r, piece->handle, flags);
    vm_units_ref(r.slab, r.unit, old.n);
    vm_units_put(c, old.slab, old.unit, old.n);
    a += vm_bytes(c, old.n);
    r.unit += old.n;
    r.n -= old.n;
    flags &= PTE_READONLY | PTE_LARGE;
  }
}

static void commit_replaces(struct vm_ctx *c, struct vm_plan *p) {
  size_t seg = 0;
  if (p->move) {
    vm_move_commit(c, p);
    return;
  }
  for (size_t i = 0; i < p->replaced.n; i++) {
    struct vm_piece *piece = VM_AT(p->replaced, struct vm_piece, i);
    vm_ptes_detach(c, piece->space, piece->addr, piece->bytes);
    for (; in_piece(p, piece, seg); seg++) take_over(c, piece, VM_AT(p->replaces, struct vm_seg, seg));
    vm_ptes_commit(c, piece->space, piece->addr, piece->bytes);
    c->phys->hdls[piece->handle].pending--;
    c->phys->hdls[piece->handle].pins--;
  }
}

/* Where the undo failed, the new units may still be mapped: quarantines them too. */
static void quarantine_lost(struct vm_ctx *c, const struct vm_piece *piece, const struct vm_seg *s) {
  uint64_t marked = piece->addr + piece->bytes;
  for (uint64_t a = s->addr; a < s->addr + s->bytes && a < marked; a += c->granule)
    if (vm_pte(c, s->space, a)->flags & PTE_QUARANTINED)
      vm_unit_quarantine(c, s->slab, s->unit + (uint32_t)vm_units(c, a - s->addr));
}

static void take_back_replaces(struct vm_ctx *c, struct vm_plan *p) {
  size_t seg = 0;
  for (size_t i = 0; i < p->replaced.n; i++) {
    struct vm_piece *piece = VM_AT(p->replaced, struct vm_piece, i);
    for (; in_piece(p, piece, seg); seg++) quarantine_lost(c, piece, VM_AT(p->replaces, struct vm_seg, seg));
  }
}

/* ---- joins ------------------------------------------------------------------------------------- */

static void commit_joins(struct vm_ctx *c, struct vm_plan *p) {
  for (size_t i = 0; i < p->joins.n; i++) {
    const struct vm_seg *seg = VM_AT(p->joins, struct vm_seg, i);
    struct vm_run r = {seg->slab, seg->unit, (uint32_t)vm_units(c, seg->bytes)};
    vm_ptes_one_call(c, seg->space, seg->addr, seg->bytes);
    if (vm_is_whole(c, seg->space, seg->addr, r))
      c->driver->joins += vm_ptes_entries(c, seg->space, seg->addr, seg->bytes, true);
    vm_ptes_release(c, seg->space, seg->addr, seg->bytes);
  }
}

/* ---- whole plans ------------------------------------------------------------------------------- */

void vm_plan_commit(struct vm_ctx *c, struct vm_plan *p) {
  size_t i;
  bool gives = p->unmaps.n || p->replaced.n || p->release;
  pthread_mutex_lock(&c->lock);
  end_reservations(c, p);
  if (p->event) { /* first, since the lock is dropped below */
    vm_fill_begin(c, p->fill, p->event);
    p->fill = NULL;
  }
  for (i = 0; i < p->mapped.n; i++) {
    struct vm_piece *piece = VM_AT(p->mapped, struct vm_piece, i);
    vm_ptes_commit(c, piece->space, piece->addr, piece->bytes);
    if (piece->handle) c->phys->hdls[piece->handle].pending--;
    end_claims(c, p, piece, true);
  }
  vm_phys_note_peak(c);
  vm_virt_note_peak(c);
  release(c, &p->fills);
  vm_split_commit(c, p);
  commit_joins(c, p);
  commit_replaces(c, p);
  for (i = 0; i < p->unmaps.n; i++) {
    struct vm_piece *piece = VM_AT(p->unmaps, struct vm_piece, i);
    vm_ptes_unmap(c, piece->space, piece->addr, piece->bytes);
  }
  for (i = 0; i < p->consumed.n; i++) vm_hdl_drop(c, &c->phys->hdls[*VM_AT(p->consumed, uint32_t, i)]);
  if (p->release) vm_hdl_drop(c, &c->phys->hdls[p->release]);
  c->batches += !p->only_joins;
  pthread_mutex_unlock(&c->lock);
  vm_plan_clear(p);
  if (gives) vm_pool_settle(c);
}

/* Returns the length of the stretch from addr on, up to end, that is all quarantined or all not. */
static uint64_t same_fate(struct vm_ctx *c, struct vm_space *s, uint64_t addr, uint64_t end, bool *quarantined) {
  uint64_t a = addr;
  *quarantined = vm_pte(c, s, a)->flags & PTE_QUARANTINED;
  while (a < end && !(vm_pte(c, s, a)->flags & PTE_QUARANTINED) == !*quarantined) a += c->granule;
  return a - addr;
}

static void settle(struct vm_ctx *c, uint32_t handle) {
  if (!handle) return;
  c->phys->hdls[handle].pending--;
  vm_hdl_settle(c, &c->phys->hdls[handle]);
}

/* Needs no checks: marked ptes belong to the plan. Ranges quarantined by a failed undo stay quarantined. */
void vm_plan_take_back(struct vm_ctx *c, struct vm_plan *p) {
  size_t i;
  end_reservations(c, p);
  for (i = 0; i < p->mapped.n; i++) end_claims(c, p, VM_AT(p->mapped, struct vm_piece, i), false);
  for (i = 0; i < p->mapped.n; i++) {
    struct vm_piece *piece = VM_AT(p->mapped, struct vm_piece, i);
    uint64_t end = piece->addr + piece->bytes, n;
    for (uint64_t a = piece->addr; a < end; a += n) {
      bool quarantined;
      n = same_fate(c, piece->space, a, end, &quarantined);
      if (!quarantined) vm_ptes_unmap(c, piece->space, a, n);
    }
    settle(c, piece->handle);
  }
  take_back_replaces(c, p);
  release(c, &p->replaced);
  for (i = 0; i < p->replaced.n; i++) {
    uint32_t handle = VM_AT(p->replaced, struct vm_piece, i)->handle;
    if (handle) c->phys->hdls[handle].pins--;
    settle(c, handle);
  }
  release(c, &p->unmaps);
  release(c, &p->fills);
  release_segs(c, &p->kept);
  release_segs(c, &p->joins);
  for (i = 0; i < p->consumed.n; i++) c->phys->hdls[*VM_AT(p->consumed, uint32_t, i)].busy = false;
  if (p->release) c->phys->hdls[p->release].busy = false;
}

void vm_plan_cancel(struct vm_ctx *c, struct vm_plan *p) {
  uint64_t keep = p->keep;
  VM_UNDO(vm_drv_event_finish(c, &p->zero_event));
  pthread_mutex_lock(&c->lock);
  vm_plan_take_back(c, p);
  pthread_mutex_unlock(&c->lock);
  vm_pool_undo_grow(c, p->grow_id);
  vm_plan_clear(p);
  vm_pool_abandon(c, keep);
}
