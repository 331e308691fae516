/* SPDX-License-Identifier: MIT */
/*
 * plan_bind.c - carries a plan out on a back end that takes many operations in one call.
 *
 * A plan without fills is one call: maps, replaces and unmaps together. One with fills is two, because pages must be
 * there before they are filled and may only vanish after: the maps, then (the fills being over) the unmaps.
 * The back end's call is all or nothing as far as one call of the driver goes; beyond that it
 * says how far it has come, and the rest is undone and quarantined here as in plan_run.c.
 */
#include <stdlib.h>

#include "internal.h"

#define AT(list, type, i) (&((type *)(list).v)[i])

struct bind {
  struct vm_ctx *c;
  struct vm_bind_op *ops; /* a part of the plan's */
  size_t n;
};

/* How many operations a range takes at most. */
static size_t parts(const struct vm_ctx *c, uint64_t bytes) {
  uint64_t most = c->info.bind_bytes;
  return most ? (size_t)((bytes + most - 1) / most) + 1 : 1;
}

static size_t most_maps(const struct vm_ctx *c, struct vm_plan *p) {
  size_t n = 0;
  for (size_t i = 0; i < p->maps.n; i++) n += parts(c, AT(p->maps, struct vm_seg, i)->bytes);
  return n;
}

int vm_plan_bind_room(struct vm_ctx *c, struct vm_plan *p) {
  size_t n;
  if (!c->be->bind) return 0;
  n = most_maps(c, p);
  for (size_t i = 0; i < p->replaces.n; i++) n += parts(c, AT(p->replaces, struct vm_seg, i)->bytes);
  for (size_t i = 0; i < p->unmaps.n; i++) n += parts(c, AT(p->unmaps, struct vm_piece, i)->bytes);
  return !n || (p->bind_ops = vm_calloc(c, n, sizeof(*p->bind_ops))) ? 0 : -ENOMEM;
}

static struct vm_bind_op *push(struct bind *b, uint32_t kind, struct vm_space *s, uint64_t addr, uint64_t bytes) {
  b->ops[b->n] = (struct vm_bind_op){
      .kind = kind, .addr = addr, .bytes = bytes, .priv = s->priv, .sparse = s->kind & VMEM_RANGE_SPARSE};
  return &b->ops[b->n++];
}

static void push_map(struct bind *b, uint32_t kind, const struct vm_seg *s, uint32_t flags) {
  uint64_t most = b->c->info.bind_bytes ? b->c->info.bind_bytes : s->bytes, n;
  for (uint64_t at = 0; at < s->bytes; at += n) {
    struct vm_bind_op *op;
    n = s->bytes - at < most ? s->bytes - at : most;
    op = push(b, kind, s->space, s->addr + at, n);
    op->flags = flags;
    op->slab = s->slab->priv;
    op->offset = ((uint64_t)s->unit << b->c->shift) + at;
  }
}

static void push_maps(struct bind *b, struct vm_plan *p) {
  for (size_t i = 0; i < p->maps.n; i++) {
    struct vm_seg *s = AT(p->maps, struct vm_seg, i);
    push_map(b, VM_BIND_MAP, s, s->flags);
  }
}

/* What takes the place of something, or takes it away. */
static void push_takes(struct bind *b, struct vm_plan *p) {
  for (size_t i = 0; i < p->replaces.n; i++) {
    struct vm_seg *s = AT(p->replaces, struct vm_seg, i);
    push_map(b, VM_BIND_REPLACE, s, s->flags);
  }
  for (size_t i = 0; i < p->unmaps.n; i++) {
    struct vm_piece *piece = AT(p->unmaps, struct vm_piece, i);
    uint64_t most = b->c->info.bind_bytes ? b->c->info.bind_bytes : piece->bytes, end = piece->addr + piece->bytes, n;
    for (uint64_t a = piece->addr; a < end; a += n) {
      n = end - a < most ? end - a : most;
      /* Large pages are not cut. */
      if (a + n < end && n > LARGE_PAGE) n -= (a + n) & (LARGE_PAGE - 1);
      push(b, VM_BIND_UNMAP, piece->space, a, n);
    }
  }
}

static int by_reservation(const void *a, const void *b) {
  const struct vm_bind_op *x = a, *y = b;
  if (x->priv != y->priv) return x->priv < y->priv ? -1 : 1;
  return x->addr < y->addr ? -1 : x->addr > y->addr;
}

/* Operations of one reservation become neighbours; most plans have but one. */
static void group(struct bind *b) {
  for (size_t i = 1; i < b->n; i++)
    if (b->ops[i].priv != b->ops[0].priv) {
      qsort(b->ops, b->n, sizeof(*b->ops), by_reservation);
      return;
    }
}

static struct vm_space *space_at(struct vm_ctx *c, uint64_t addr) {
  struct vm_space *s;
  pthread_mutex_lock(&c->lock);
  s = vm_space_find(c, addr);
  pthread_mutex_unlock(&c->lock);
  return s;
}

/* Runs what was pushed. What a failure leaves in an unknown state is quarantined; b->n becomes the number of
 * operations that were carried out. */
static int run(struct bind *b, struct vm_bind_result *r) {
  int err;
  *r = (struct vm_bind_result){0};
  if (!b->n) return 0;
  group(b);
  err = vm_drv_bind(b->c, b->ops, b->n, r);
  if (!err) return 0;
  for (size_t i = r->done; i < r->done + r->lost; i++)
    vm_range_lost(b->c, space_at(b->c, b->ops[i].addr), b->ops[i].addr, b->ops[i].bytes);
  b->n = r->done;
  return err;
}

/* ---- taking back ------------------------------------------------------------------------------ */

/* Without heap memory, which may be what was short. */
struct undo {
  struct vm_ctx *c;
  int *worst;
  const struct vmem_error *why;
  size_t n;
  struct vm_bind_op ops[64];
};

static void flush(struct undo *u) {
  struct vm_bind_result r;
  if (u->n && vm_drv_bind(u->c, u->ops, u->n, &r))
    for (size_t i = r.done; i < u->n; i++)
      vm_undo_failed(u->c, space_at(u->c, u->ops[i].addr), u->ops[i].addr, u->ops[i].bytes, u->worst, u->why);
  u->n = 0;
}

static void put_back(struct undo *u, struct vm_bind_op op) {
  if (u->n == sizeof(u->ops) / sizeof(u->ops[0])) flush(u);
  u->ops[u->n++] = op;
}

/* Maps again what an unmap took away, or a replace. */
static void map_again(struct undo *u, const struct vm_bind_op *op) {
  struct vm_ctx *c = u->c;
  struct vm_space *s = space_at(c, op->addr);
  uint64_t most = c->info.bind_bytes ? c->info.bind_bytes : op->bytes, end = op->addr + op->bytes;
  for (uint64_t a = op->addr; a < end;) {
    struct vm_seg run = vm_run_before(c, s, a, end - a < most ? end : a + most);
    put_back(u, (struct vm_bind_op){.kind = op->kind == VM_BIND_UNMAP ? VM_BIND_MAP : VM_BIND_REMAP,
                                    .flags = run.flags,
                                    .addr = a,
                                    .bytes = run.bytes,
                                    .slab = run.slab->priv,
                                    .offset = (uint64_t)run.unit << c->shift,
                                    .priv = op->priv,
                                    .sparse = op->sparse});
    a += run.bytes;
  }
}

static void undo(struct bind *done, int *worst, const struct vmem_error *why) {
  struct undo u = {.c = done->c, .worst = worst, .why = why};
  for (size_t i = 0; i < done->n; i++) {
    struct vm_bind_op *op = &done->ops[i];
    if (op->kind == VM_BIND_UNMAP || op->kind == VM_BIND_REPLACE)
      map_again(&u, op);
    else
      put_back(&u, (struct vm_bind_op){.kind = VM_BIND_UNMAP, .addr = op->addr, .bytes = op->bytes, .priv = op->priv,
                                       .sparse = op->sparse});
  }
  flush(&u);
}

/* ---- running ---------------------------------------------------------------------------------- */

/* Everything in one call. */
static int run_whole(struct vm_plan *p, struct bind *b) {
  struct vm_bind_result r;
  push_maps(b, p);
  push_takes(b, p);
  return run(b, &r);
}

/* Maps, then fills, then the rest. */
static int run_in_two(struct vm_ctx *c, struct vm_plan *p, struct bind *first, struct bind *second, const vm_event *after,
                      size_t num_after) {
  struct vm_bind_result r;
  int err;
  push_maps(first, p);
  push_takes(second, p);
  if ((err = run(first, &r))) {
    second->n = 0;
    return err;
  }
  err = vm_plan_fill(c, p, after, num_after, &p->event);
  /* A copy's source is only held until the commit. */
  if (!err && (!p->fill || second->n || p->copies.n)) err = vm_event_finish(c, &p->event);
  if (err) {
    second->n = 0;
    return err;
  }
  return run(second, &r);
}

int vm_plan_run_bind(struct vm_ctx *c, struct vm_plan *p, const vm_event *after, size_t num_after) {
  struct bind first = {.c = c, .ops = p->bind_ops}, second = {.c = c};
  struct vmem_error why;
  int err, worst;
  if (p->bind_ops) second.ops = p->bind_ops + most_maps(c, p);
  if (!p->copies.n && !p->fills.n)
    err = run_whole(p, &first);
  else
    err = run_in_two(c, p, &first, &second, after, num_after);
  if (!err) return 0;
  vm_error_save(&why);
  worst = err;
  vm_event_finish(c, &p->event);
  vm_undo_begin();
  undo(&second, &worst, &why);
  undo(&first, &worst, &why);
  vm_undo_end();
  if (worst == err) vm_error_restore(&why);
  return worst;
}
