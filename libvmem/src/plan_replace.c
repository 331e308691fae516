/* SPDX-License-Identifier: MIT */
/*
 * plan_replace.c - other pages under addresses that are mapped.
 *
 * Until the plan is committed, the ptes (busy) name what was there before, and the handle, which is pinned, holds
 * the references of what comes. What an unknown outcome leaves behind is quarantined on both sides.
 */
#include "internal.h"

#define AT(list, type, i) (&((type *)(list).v)[i])

static bool sparse(const struct vm_space *s) { return s->kind & VMEM_RANGE_SPARSE; }

/* Segments of a piece are neighbours in the list. */
static bool in_piece(const struct vm_plan *p, const struct vm_piece *piece, size_t seg) {
  const struct vm_seg *s;
  if (seg >= p->replaces.n) return false;
  s = AT(p->replaces, struct vm_seg, seg);
  return s->addr >= piece->addr && s->addr < piece->addr + piece->bytes;
}

/* Maps again what the ptes name; nothing is mapped there, but for the first `shown` bytes. */
static void restore(struct vm_ctx *c, const struct vm_piece *piece, uint64_t shown, int *worst, const struct vmem_error *why) {
  uint64_t a = piece->addr, end = a + piece->bytes;
  if (shown && vm_drv_unmap(c, a, shown, sparse(piece->space))) {
    vm_undo_failed(c, piece->space, a, shown, worst, why);
    a += shown;
  }
  while (a < end) {
    struct vm_seg s = vm_run_before(c, piece->space, a, end);
    if (vm_drv_map(c, s.addr, s.bytes, s.slab, s.unit, s.flags, sparse(piece->space)))
      vm_undo_failed(c, piece->space, s.addr, s.bytes, worst, why);
    a += s.bytes;
  }
}

static int replace_one(struct vm_ctx *c, struct vm_plan *p, const struct vm_piece *piece, size_t *seg) {
  struct vmem_error why;
  uint64_t shown = 0;
  int worst, err = vm_drv_unmap(c, piece->addr, piece->bytes, sparse(piece->space));
  if (err == -ENOTRECOVERABLE) vm_range_lost(c, piece->space, piece->addr, piece->bytes);
  if (err) return err;
  for (; !err && in_piece(p, piece, *seg); ++*seg) {
    struct vm_seg *s = AT(p->replaces, struct vm_seg, *seg);
    err = vm_drv_map(c, s->addr, s->bytes, s->slab, s->unit, s->flags, sparse(s->space));
    if (!err) shown += s->bytes;
  }
  if (!err) return 0;
  worst = err;
  vm_error_save(&why);
  if (err == -ENOTRECOVERABLE) {
    vm_range_lost(c, piece->space, piece->addr, piece->bytes);
  } else {
    vm_undo_begin();
    restore(c, piece, shown, &worst, &why);
    vm_undo_end();
  }
  if (worst == err) vm_error_restore(&why);
  return worst;
}

int vm_replace_all(struct vm_ctx *c, struct vm_plan *p, size_t *replaced) {
  size_t seg = 0;
  int err = 0;
  for (*replaced = 0; *replaced < p->replaced.n; ++*replaced)
    if ((err = replace_one(c, p, AT(p->replaced, struct vm_piece, *replaced), &seg))) break;
  return err;
}

void vm_replace_undo(struct vm_ctx *c, struct vm_plan *p, size_t n, int *worst, const struct vmem_error *why) {
  while (n--) {
    struct vm_piece *piece = AT(p->replaced, struct vm_piece, n);
    restore(c, piece, piece->bytes, worst, why);
  }
}

/* The ptes of a segment name its units from now on; what they named loses its references. */
static void take_over(struct vm_ctx *c, const struct vm_piece *piece, const struct vm_seg *seg) {
  uint64_t a = seg->addr, end = a + seg->bytes;
  uint32_t unit = seg->unit;
  while (a < end) {
    struct vm_pte old = *vm_pte(c, piece->space, a);
    uint32_t n = 0;
    for (; a < end; a += c->granule, n++, unit++) {
      struct vm_pte *p = vm_pte(c, piece->space, a);
      if (p->slab != old.slab || p->unit != old.unit + n) break;
      seg->slab->refs[unit]++;
      *p = (struct vm_pte){seg->slab->index, unit, piece->handle,
                           PTE_BUSY | (seg->flags & VMEM_MAP_READONLY ? PTE_READONLY : 0) | (a == seg->addr ? PTE_CALL : 0) |
                               (a == piece->addr ? PTE_START : 0)};
    }
    vm_units_put(c, c->slabs[old.slab], old.unit, n); /* the ptes are busy with this plan while the lock is let go */
  }
}

void vm_replace_commit(struct vm_ctx *c, struct vm_plan *p) {
  size_t seg = 0;
  if (p->move) {
    vm_move_commit(c, p);
    return;
  }
  for (size_t i = 0; i < p->replaced.n; i++) {
    struct vm_piece *piece = AT(p->replaced, struct vm_piece, i);
    vm_detach(c, piece->space, piece->addr, piece->bytes);
    for (; in_piece(p, piece, seg); seg++) take_over(c, piece, AT(p->replaces, struct vm_seg, seg));
    vm_commit_map(c, piece);
    c->hdls[piece->handle].pins--;
  }
}

/* Where the undo was not possible, the new units may be mapped too. */
static void quarantine_lost(struct vm_ctx *c, const struct vm_piece *piece, const struct vm_seg *s) {
  uint64_t marked = piece->addr + piece->bytes;
  for (uint64_t a = s->addr; a < s->addr + s->bytes && a < marked; a += c->granule)
    if (vm_pte(c, s->space, a)->flags & PTE_QUARANTINED) vm_quarantine_unit(c, s->slab, s->unit + (uint32_t)vm_units(c, a - s->addr));
}

void vm_replace_take_back(struct vm_ctx *c, struct vm_plan *p) {
  size_t seg = 0;
  for (size_t i = 0; i < p->replaced.n; i++) {
    struct vm_piece *piece = AT(p->replaced, struct vm_piece, i);
    for (; in_piece(p, piece, seg); seg++) quarantine_lost(c, piece, AT(p->replaces, struct vm_seg, seg));
  }
}
