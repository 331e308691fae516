/* SPDX-License-Identifier: MIT */
/* Records at every address and in every handle that pages have moved to another slab. */
#include "plan/plan.h"

static void move_pte(struct vm_ctx *c, struct vm_space *s, uint64_t addr, const struct vm_move *m) {
  const struct vm_pte *p = vm_pte(c, s, addr);
  const struct vm_moved *to = &m->to[p->unit];
  vm_ptes_rename(c, s, addr, (struct vm_run){to->slab, to->unit, 1}, p->handle, p->flags);
}

static void move_ptes(struct vm_ctx *c, struct vm_plan *p) {
  size_t k = 0;
  for (size_t i = 0; i < p->replaced.n; i++) {
    struct vm_piece *piece = VM_AT(p->replaced, struct vm_piece, i);
    struct vm_space *s = piece->space;
    uint64_t end = piece->addr + piece->bytes, before = vm_space_edges(c, s, piece->addr, piece->bytes);
    for (uint64_t a = piece->addr; a < end; a += c->granule) move_pte(c, s, a, p->move);
    for (uint64_t a = piece->addr; a < end; k++) {
      const struct vm_seg *seg = VM_AT(p->replaces, struct vm_seg, k);
      struct vm_run r = {seg->slab, seg->unit, (uint32_t)vm_units(c, seg->bytes)};
      vm_ptes_one_call(c, s, a, seg->bytes);
      vm_ptes_entries(c, s, a, seg->bytes, vm_is_whole(c, s, a, r));
      a += seg->bytes;
    }
    vm_ptes_release(c, s, piece->addr, piece->bytes);
    vm_space_count_edges(c, s, piece->addr, piece->bytes, before);
  }
}

void vm_move_commit(struct vm_ctx *c, struct vm_plan *p) {
  struct vm_move *m = p->move;
  move_ptes(c, p);
  for (uint32_t u = 0; u < m->from->units; u++)
    if (m->from->refs[u]) vm_unit_move(c, m->from, u, m->to[u].slab, m->to[u].unit);
  for (size_t i = 0; i < m->hdls.n; i++) {
    struct vm_moved_handle *r = VM_AT(m->hdls, struct vm_moved_handle, i);
    struct vm_hdl *h = &c->phys->hdls[r->handle];
    struct vm_run *old = h->runs;
    h->runs = r->runs;
    h->nruns = r->n;
    h->busy = false;
    r->runs = old;
  }
}
