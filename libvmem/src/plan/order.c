/* SPDX-License-Identifier: MIT */
/* The fills of other batches that a plan must wait for, and the plan's own fills, which may outlast it. */
#include "plan/plan.h"

bool vm_plan_only_fills(const struct vm_plan *p) {
  return !p->maps.n && !p->replaced.n && !p->unmaps.n && !p->joins.n && p->fills.n;
}

/* Collects the runs behind a range; returns their number. Lock held. */
static size_t runs_behind(struct vm_ctx *c, uint64_t addr, uint64_t bytes, struct vm_run *runs) {
  struct vm_space *s = vm_space_find(c, addr);
  size_t count = 0;
  uint32_t n;
  for (uint64_t a = addr, end = addr + bytes; a < end; a += (uint64_t)n << c->shift, count++) {
    struct vm_pte *p = vm_pte(c, s, a);
    n = vm_space_units(c, s, a, end, 0);
    if (runs) runs[count] = (struct vm_run){c->phys->slabs[p->slab], p->unit, n};
  }
  return count;
}

/* Collects the runs that the plan's fills write; returns their number. Lock held. */
static size_t filled_runs(struct vm_ctx *c, const struct vm_plan *p, struct vm_run *runs) {
  size_t n = 0;
  for (size_t i = 0; i < p->fills.n; i++) {
    const struct vm_piece *piece = VM_AT(p->fills, struct vm_piece, i);
    n += runs_behind(c, piece->addr, piece->bytes, runs ? runs + n : NULL);
  }
  return n;
}

int vm_plan_may_run_on(struct vm_ctx *c, struct vm_plan *p, void (*ended)(struct vm_ctx *c, void *owner, int result),
                       void *owner) {
  if (!p->fills.n) return 0;
  pthread_mutex_lock(&c->lock);
  if ((p->fill = vm_fill_new(c, filled_runs(c, p, NULL)))) {
    p->fill->nruns = filled_runs(c, p, p->fill->runs);
    p->fill->ended = ended;
    p->fill->owner = owner;
  }
  pthread_mutex_unlock(&c->lock);
  return p->fill ? 0 : -ENOMEM;
}

static struct vm_fill *behind_pieces(struct vm_ctx *c, const struct vm_list *pieces) {
  struct vm_fill *f = NULL;
  for (size_t i = 0; i < pieces->n && !f; i++) {
    const struct vm_piece *piece = VM_AT(*pieces, struct vm_piece, i);
    f = vm_space_fill(c, piece->space, piece->addr, piece->bytes);
  }
  return f;
}

static struct vm_fill *behind_segs(struct vm_ctx *c, const struct vm_list *segs) {
  struct vm_fill *f = NULL;
  for (size_t i = 0; i < segs->n && !f; i++) {
    const struct vm_seg *s = VM_AT(*segs, struct vm_seg, i);
    f = vm_fill_on(c, s->slab, s->unit, (uint32_t)vm_units(c, s->bytes));
  }
  return f;
}

struct vm_fill *vm_plan_blocker(struct vm_ctx *c, struct vm_plan *p) {
  struct vm_fill *f;
  if (!c->phys->fills) return NULL;
  /* Look for fills of pages that the plan unmaps, maps at a second address, or writes again. */
  if ((f = behind_pieces(c, &p->unmaps)) || (f = behind_pieces(c, &p->replaced)) || (f = behind_segs(c, &p->kept)) ||
      (f = behind_segs(c, &p->joins)) || (f = behind_segs(c, &p->replaces)) ||
      (p->shows && (f = behind_segs(c, &p->maps))) || (f = behind_pieces(c, &p->fills)))
    return f;
  for (size_t i = 0; i < p->copies.n && !f; i++) {
    const struct vm_be_copy *copy = VM_AT(p->copies, struct vm_be_copy, i);
    uint64_t first = copy->src & ~(c->granule - 1);
    f = vm_space_fill(c, vm_space_find(c, first), first, vm_round_up(copy->src + copy->bytes, c->granule) - first);
  }
  return f;
}

int vm_plan_await_fills(struct vm_ctx *c, struct vm_plan *p) {
  int err = 0;
  while (!err) {
    struct vm_fill *f;
    pthread_mutex_lock(&c->lock);
    if ((f = vm_plan_blocker(c, p))) f->refs++;
    pthread_mutex_unlock(&c->lock);
    if (!f) break;
    err = vm_fill_wait(c, f);
  }
  return err;
}
