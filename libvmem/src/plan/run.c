/* SPDX-License-Identifier: MIT */
/*
 * Makes a plan's driver calls, then commits or undoes it.
 *
 * Order: zeroing of new pages, maps, copies to them, fills, replaces, joins, unmaps. Maps, replaces, joins and
 * unmaps are operations of vm_bind (backend/backend.h). Without fills and copies, one vm_bind call carries out all of
 * them. With fills or copies it takes two calls: pages must be mapped before they are filled, and the undo of a failed
 * fill needs the old mappings to be still in place.
 *
 * The undo runs in reverse order. Where it fails, the range and its pages are quarantined: their
 * ptes keep their references and never change again.
 */
#include "base/log.h"
#include "plan/plan.h"

/* ---- one call of the back end ------------------------------------------------------------------ */

struct calls {
  struct vm_ctx *c;
  struct vm_bind_op *ops; /* part of the plan's `ops` */
  size_t n;
  struct vm_bind_result r;
};

/* Returns the maximum number of operations for a range. */
static size_t parts(const struct vm_ctx *c, uint64_t bytes) {
  uint64_t most = c->info->bind_bytes;
  return most ? (size_t)((bytes + most - 1) / most) + 1 : 1;
}

static size_t most_maps(const struct vm_ctx *c, const struct vm_list *segs) {
  size_t n = 0;
  for (size_t i = 0; i < segs->n; i++) n += parts(c, VM_AT(*segs, struct vm_seg, i)->bytes);
  return n;
}

int vm_plan_ops_room(struct vm_ctx *c, struct vm_plan *p) {
  size_t n = most_maps(c, &p->maps) + most_maps(c, &p->replaces) + most_maps(c, &p->joins);
  n += p->kept.n + p->groups.n; /* one for each kept run (shorter than a block), and perhaps an unmap for each group */
  for (size_t i = 0; i < p->unmaps.n; i++) n += parts(c, VM_AT(p->unmaps, struct vm_piece, i)->bytes);
  return !n || (p->ops = vm_realloc(c, NULL, n, sizeof(*p->ops))) ? 0 : -ENOMEM;
}

static struct vm_bind_op *push(struct calls *b, uint32_t kind, const struct vm_space *s, uint64_t addr,
                               uint64_t bytes) {
  b->ops[b->n] =
      (struct vm_bind_op){.kind = kind, .addr = addr, .bytes = bytes, .priv = s->priv, .sparse = vm_is_sparse(s)};
  return &b->ops[b->n++];
}

/* `from`, `clears`: see vm_bind_op. */
static void push_map(struct calls *b, uint32_t kind, const struct vm_seg *s, uint64_t from, uint64_t clears) {
  uint64_t most = b->c->info->bind_bytes ? b->c->info->bind_bytes : s->bytes, n;
  for (uint64_t at = 0; at < s->bytes; at += n, clears = 0) {
    struct vm_bind_op *op;
    n = s->bytes - at < most ? s->bytes - at : most;
    op = push(b, kind, s->space, s->addr + at, n);
    op->flags = s->flags;
    op->slab = s->slab->priv;
    op->offset = ((uint64_t)s->unit << b->c->shift) + at;
    op->from = from;
    op->clears = clears;
  }
}

static void push_maps(struct calls *b, struct vm_plan *p) {
  for (size_t i = 0; i < p->maps.n; i++) push_map(b, VM_BIND_MAP, VM_AT(p->maps, struct vm_seg, i), 0, 0);
}

/* Pushes the replaces that are in no group. */
static void push_replaces(struct calls *b, struct vm_plan *p) {
  const struct vm_piece *piece = p->replaced.v;
  for (size_t i = 0; i < p->replaces.n; i++) {
    struct vm_seg *s = VM_AT(p->replaces, struct vm_seg, i);
    bool first = s->addr == piece->addr;
    if (!piece->grouped) push_map(b, VM_BIND_REPLACE, s, piece->addr, first ? piece->bytes : 0);
    piece += s->addr + s->bytes == piece->addr + piece->bytes;
  }
}

static void push_unmap(struct calls *b, const struct vm_space *s, uint64_t addr, uint64_t end) {
  uint64_t most = b->c->info->bind_bytes ? b->c->info->bind_bytes : end - addr, n;
  for (; addr < end; addr += n) {
    n = end - addr < most ? end - addr : most;
    /* Do not cut a large page. */
    if (addr + n < end && n > LARGE_PAGE) n -= (addr + n) & (LARGE_PAGE - 1);
    push(b, VM_BIND_UNMAP, s, addr, n);
  }
}

/* For drivers that cut entries themselves: unmaps the removed part and remaps the rest to its own pages, so that the
 * operations name the whole block. */
static void push_cut(struct calls *b, const struct vm_group *g, const struct vm_seg *s) {
  size_t first = b->n;
  uint64_t at = g->addr;
  for (size_t k = 0; k < g->segs; k++, s++) {
    push_unmap(b, g->space, at, s->addr);
    push_map(b, VM_BIND_REPLACE, s, 0, 0);
    at = s->addr + s->bytes;
  }
  push_unmap(b, g->space, at, g->addr + g->bytes);
  for (size_t i = first; i < b->n; i++) {
    b->ops[i].cut = true;
    b->ops[i].from = g->addr;
  }
  b->ops[first].clears = g->bytes;
}

static void push_groups(struct calls *b, struct vm_plan *p) {
  const struct vm_seg *s = p->group_segs.v;
  for (size_t i = 0; i < p->groups.n; i++) {
    const struct vm_group *g = VM_AT(p->groups, struct vm_group, i);
    if (b->c->be->bind) {
      push_cut(b, g, s);
      s += g->segs;
      continue;
    }
    if (!g->segs) push(b, VM_BIND_UNMAP, g->space, g->addr, g->bytes);
    for (size_t k = 0; k < g->segs; k++, s++) push_map(b, VM_BIND_REPLACE, s, g->addr, k ? 0 : g->bytes);
  }
}

/* Pushes the operations on existing mappings: replaces, joins and unmaps. */
static void push_takes(struct calls *b, struct vm_plan *p) {
  push_replaces(b, p);
  push_groups(b, p);
  for (size_t i = 0; i < p->joins.n; i++) {
    const struct vm_seg *s = VM_AT(p->joins, struct vm_seg, i);
    push_map(b, VM_BIND_REMAP, s, s->addr, s->bytes);
  }
  for (size_t i = 0; i < p->unmaps.n; i++) {
    struct vm_piece *gone = VM_AT(p->unmaps, struct vm_piece, i);
    if (!gone->grouped) push_unmap(b, gone->space, gone->addr, gone->addr + gone->bytes);
  }
}

static void quarantine(struct vm_ctx *c, uint64_t addr, uint64_t bytes) {
  pthread_mutex_lock(&c->lock);
  vm_ptes_quarantine(c, vm_space_find(c, addr), addr, bytes);
  pthread_mutex_unlock(&c->lock);
  vm_log(c, VMEM_LOG_WARNING, "0x%llx + %llu bytes and their pages are quarantined until the context is closed: %s",
         (unsigned long long)addr, (unsigned long long)bytes, vm_error_last()->text);
}

/* Runs what was pushed. Quarantines whatever a failure leaves in an unknown state. */
static int run(struct calls *b) {
  int err = b->n ? vm_bind(b->c, b->ops, b->n, &b->r) : 0;
  for (size_t i = b->r.done; err && i < b->r.done + b->r.unknown; i++) {
    const struct vm_bind_op *op = &b->ops[i];
    if (b->c->be->bind || op->kind != VM_BIND_REPLACE)
      quarantine(b->c, op->addr, op->bytes);
    else if (op->clears) /* the whole range that was unmapped: the operations may map only part of it */
      quarantine(b->c, op->from, op->clears);
  }
  return err;
}

/* ---- taking back ------------------------------------------------------------------------------- */

/* An undo uses no heap memory: a shortage of it may be the failure being undone. */
struct undo {
  struct vm_ctx *c;
  const struct vmem_error *why; /* error being undone */
  int worst;                    /* the code of `why`; -ENOTRECOVERABLE once a range could not be undone */
  size_t n;
  struct vm_bind_op ops[64];
};

static void undo_failed(struct undo *u, uint64_t addr, uint64_t bytes) {
  struct vmem_error undo;
  vm_error_save(&undo);
  quarantine(u->c, addr, bytes);
  u->worst = vm_fail_at(-ENOTRECOVERABLE, addr, bytes, 0,
                        "0x%llx + %llu bytes is quarantined: its undo failed (%.150s) after: %.150s",
                        (unsigned long long)addr, (unsigned long long)bytes, undo.text, u->why->text);
}

static void flush(struct undo *u) {
  struct vm_bind_result r;
  for (size_t i = 0; i < u->n && vm_bind(u->c, u->ops + i, u->n - i, &r);)
    for (i += r.done; r.failed; r.failed--, i++) undo_failed(u, u->ops[i].addr, u->ops[i].bytes);
  u->n = 0;
}

static void put_back(struct undo *u, struct vm_bind_op op) {
  if (u->n == sizeof(u->ops) / sizeof(u->ops[0])) flush(u);
  u->ops[u->n++] = op;
}

/* Returns the operation that restores the run which the ptes record at addr, with the same entries. 0 bytes: the range
 * is lost. */
static struct vm_bind_op run_before(struct vm_ctx *c, const struct vm_bind_op *op, uint64_t addr, uint64_t bytes) {
  struct vm_bind_op run = {.kind = VM_BIND_MAP, .addr = addr, .priv = op->priv, .sparse = op->sparse};
  uint64_t most = c->info->bind_bytes;
  struct vm_space *s;
  struct vm_pte *pte;
  pthread_mutex_lock(&c->lock);
  s = vm_space_find(c, addr);
  pte = vm_pte(c, s, addr);
  if (!(pte->flags & PTE_QUARANTINED)) {
    run.bytes = vm_space_call(c, s, addr, most && most < bytes ? most : bytes);
    run.slab = c->phys->slabs[pte->slab]->priv;
    run.offset = (uint64_t)pte->unit << c->shift;
    run.flags = pte->flags & PTE_READONLY ? VMEM_MAP_READONLY : 0;
    vm_ptes_one_call(c, s, addr, run.bytes);
  }
  pthread_mutex_unlock(&c->lock);
  return run;
}

/* Unmaps what n operations have mapped, a stretch at a time. */
static void clear(struct undo *u, const struct vm_bind_op *ops, size_t n) {
  flush(u);
  for (size_t i = 0, k; i < n; i = k) {
    uint64_t bytes = ops[i].bytes;
    for (k = i + 1; k < n && ops[k].addr == ops[i].addr + bytes; k++) bytes += ops[k].bytes;
    if (vm_drv_unmap(u->c, ops[i].addr, bytes, ops[i].sparse)) undo_failed(u, ops[i].addr, bytes);
  }
}

/* Remaps what the ptes record in [addr, end); kind: VM_BIND_MAP, or an operation that maps over something else. */
static void map_again(struct undo *u, const struct vm_bind_op *op, uint64_t addr, uint64_t end, uint32_t kind) {
  while (addr < end) {
    struct vm_bind_op run = run_before(u->c, op, addr, end - addr);
    run.kind = kind;
    if (run.bytes) put_back(u, run);
    addr += run.bytes ? run.bytes : u->c->granule;
  }
}

static void undo_calls(struct undo *u, const struct calls *b) {
  for (size_t i = b->r.done + b->r.unmapped; i;) {
    const struct vm_bind_op *op = &b->ops[--i];
    uint64_t end = op->addr + op->bytes;
    size_t last = i;
    if (op->kind == VM_BIND_MAP) {
      put_back(
          u, (struct vm_bind_op){
                 .kind = VM_BIND_UNMAP, .addr = op->addr, .bytes = op->bytes, .priv = op->priv, .sparse = op->sparse});
    } else if (op->kind == VM_BIND_UNMAP && !op->cut) {
      map_again(u, op, op->addr, end, VM_BIND_MAP);
    } else { /* a whole piece or group at a time: the old pages may be larger than the new ones */
      while (!op->clears) op = &b->ops[--i];
      if (u->c->be->bind) {
        map_again(u, op, op->from, op->from + op->clears, VM_BIND_REMAP);
        continue;
      }
      clear(u, op, (last < b->r.done ? last + 1 : b->r.done) - i);
      map_again(u, op, op->from, op->from + op->clears, VM_BIND_MAP);
    }
  }
  flush(u);
}

/* ---- running ----------------------------------------------------------------------------------- */

int vm_plan_aliases(struct vm_ctx *c, struct vm_plan *p) {
  const struct vm_run *runs = p->zeros.v;
  int err = 0;
  for (size_t i = 0; i < p->zeros.n && !err; i++) err = vm_slab_alias(c, runs[i].slab, VMEM_INJECT_SLAB);
  return err;
}

/* Waits for the event and puts it; with `over`, only polls and sets *over. */
static int end_event(struct vm_ctx *c, vm_event *e, bool *over) {
  int err;
  if (!over) return vm_drv_event_finish(c, e);
  err = *e ? c->be->event_query(c->bes, *e) : 0;
  *over = err != -EAGAIN;
  if (!*over) return 0;
  vm_drv_event_follow(c, e, 0);
  return err;
}

int vm_plan_zero(struct vm_ctx *c, struct vm_plan *p, bool *over) {
  int err;
  if (!p->zeroing && p->zeros.n) {
    p->zeroing = true;
    if ((err = vm_zero_start(c, p->zeros.v, p->zeros.n, &p->zero_event))) return err;
  }
  err = end_event(c, &p->zero_event, over);
  if (!err && (!over || *over)) p->zeroed = true;
  return err;
}

/* Starts copies and fills; the plan's event covers all. */
static int start_fills(struct vm_ctx *c, struct vm_plan *p, const vm_event *after, size_t num_after) {
  size_t i = 0;
  int err = 0;
  if (p->copies.n) err = vm_drv_copy(c, p->copies.v, p->copies.n, after, num_after, &p->event);
  /* Fills with the same value share a call. */
  while (!err && i < p->fills.n) {
    struct vm_be_range r[64];
    uint32_t value = VM_AT(p->fills, struct vm_piece, i)->handle;
    bool chain = num_after && p->event; /* calls that wait for events are unordered, so chain them */
    vm_event e = 0;
    size_t n = 0;
    for (; i < p->fills.n && n < 64 && VM_AT(p->fills, struct vm_piece, i)->handle == value; i++, n++)
      r[n] =
          (struct vm_be_range){VM_AT(p->fills, struct vm_piece, i)->addr, VM_AT(p->fills, struct vm_piece, i)->bytes};
    err = vm_drv_fill(c, VMEM_INJECT_FILL, r, n, (uint8_t)value, chain ? &p->event : after, chain ? 1 : num_after, &e);
    if (!err) vm_drv_event_follow(c, &p->event, e);
  }
  return err;
}

/* Waits for the plan's own copies and fills; with `over`, only reports whether they have ended. Until then the fills
 * block other plans, as those of a committed plan do. */
static int end_own(struct vm_ctx *c, struct vm_plan *p, bool *over) {
  struct vm_fill *f = p->fill;
  int err = 0;
  if (!f || (!over && !f->event)) return end_event(c, &p->event, over);
  if (over) {
    pthread_mutex_lock(&c->lock);
    if (p->event) {
      f->ended = NULL; /* the plan polls the event itself */
      f->refs++;
      vm_fill_begin(c, f, p->event);
      p->event = 0;
    }
    *over = !f->event || f->over;
    err = f->result;
    pthread_mutex_unlock(&c->lock);
    if (!*over || !f->event) return 0;
    vm_fill_put(c, f);
    if (err) err = vm_fail(err, "a fill of the batch failed: the operations after it were not carried out");
  } else {
    err = vm_fill_wait(c, f);
  }
  p->fill = NULL;
  return err;
}

/* Makes the driver calls of a plan, or undoes them. With `over`, it may have to be called again, like vm_plan_run. */
static int run_calls(struct vm_ctx *c, struct vm_plan *p, const vm_event *after, size_t num_after, bool *over) {
  bool fills = p->copies.n || p->fills.n;
  struct calls first = {.c = c, .ops = p->ops}, second = {.c = c};
  struct vmem_error why;
  struct undo u = {.c = c, .why = &why};
  int err = 0;
  push_maps(&first, p);
  second.ops = p->ops + first.n;
  push_takes(fills ? &second : &first, p);
  if (p->filling)
    first.r.done = first.n;
  else if (!(err = run(&first)) && fills)
    err = start_fills(c, p, after, num_after);
  if (!err && fills) {
    p->filling = true;
    /* No fill may run on pages about to be unmapped, and a copy's source is held only until the commit. */
    if (!p->fill || second.n || p->copies.n) err = end_own(c, p, over);
    if (!err && over && !*over) return 0;
    if (!err) err = run(&second);
  }
  if (!err) return 0;
  vm_error_save(&why);
  u.worst = err;
  vm_drv_event_finish(c, &p->event);
  vm_undo_begin();
  undo_calls(&u, &second);
  undo_calls(&u, &first);
  vm_undo_end();
  if (u.worst == err) vm_error_restore(&why);
  return u.worst;
}

int vm_plan_run(struct vm_ctx *c, struct vm_plan *p, const vm_event *after, size_t num_after, bool *over,
                struct vm_fill **fill) {
  int err = p->filling ? 0 : vm_plan_zero(c, p, NULL);
  *fill = NULL;
  if (over) *over = true;
  if (!err) err = run_calls(c, p, after, num_after, over);
  if (!err && over && !*over) return 0;
  if (err) {
    VM_UNDO(vm_plan_cancel(c, p));
    return err;
  }
  if (p->event) *fill = p->fill;
  vm_plan_commit(c, p);
  return 0;
}

int vm_plan_run_now(struct vm_ctx *c, struct vm_plan *p) {
  struct vm_fill *none;
  int err = vm_plan_await_fills(c, p);
  if (!err) return vm_plan_run(c, p, NULL, 0, NULL, &none);
  VM_UNDO(vm_plan_cancel(c, p));
  return err;
}
