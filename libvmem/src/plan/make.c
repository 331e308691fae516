/* SPDX-License-Identifier: MIT */
/*
 * Takes a batch's pages and marks its ptes: everything that can fail for lack of memory or a bad
 * argument happens here, before anything changes.
 */
#include <string.h>

#include "plan/plan.h"

/* The working state while a plan is being made. */
struct maker {
  struct vm_ctx *c;
  struct vm_plan *p;
  struct vm_want w;
  struct vm_space *space;   /* contains the last address that was looked up */
  uint64_t short_units;     /* units that the pool lacks */
  uint64_t taken[VM_POOLS]; /* units taken for this plan, per pool */
};

/* True if this plan itself will zero the unit. */
static bool own_claim(struct maker *m, const struct vm_slab *s, uint32_t unit) {
  for (size_t i = 0; i < m->p->zeros.n; i++) {
    const struct vm_run *r = VM_AT(m->p->zeros, struct vm_run, i);
    if (r->slab == s && unit - r->unit < r->n) return true;
  }
  return false;
}

/* Refuses pages that another plan is about to zero: they would show old contents, and writes would be lost. */
static int check_claims(struct maker *m, uint64_t addr, struct vm_run r) {
  for (uint32_t i = 0; (i += vm_bits_run(r.slab->claim_map, r.unit + i, r.n - i, false)) < r.n; i++)
    if (!own_claim(m, r.slab, r.unit + i))
      return vm_fail_at(-EBUSY, addr + ((uint64_t)i << m->c->shift), m->c->granule, 0,
                        "the page for 0x%llx is being zeroed by another call",
                        (unsigned long long)(addr + ((uint64_t)i << m->c->shift)));
  return 0;
}

/* Claims dirty units for this plan, which zeroes them once; they stay dirty until it commits. Without `zero` they
 * keep their contents. The run's ptes must be marked. */
static bool claim_dirty(struct maker *m, struct vm_run r, bool zero) {
  uint32_t end = r.unit + r.n, n;
  bool must;
  for (uint32_t u = r.unit; (n = vm_units_stale(r.slab, &u, end, zero, &must)); u += n) {
    struct vm_run *zeros;
    if (!must) {
      vm_units_set_dirty(r.slab, u, n, false);
      continue;
    }
    if (!(zeros = VM_PUSH(m->c, &m->p->zeros, struct vm_run))) return false;
    *zeros = (struct vm_run){r.slab, u, n};
    m->p->claims = true;
    vm_units_claim(r.slab, u, n);
  }
  return true;
}

static struct vm_seg seg_of(const struct maker *m, const struct vm_piece *piece, uint64_t addr, struct vm_run r) {
  return (struct vm_seg){addr,         vm_bytes(m->c, r.n),
                         piece->space, r.slab,
                         r.unit,       m->w.op->flags & VMEM_OP_READONLY ? VMEM_MAP_READONLY : 0};
}

/* Appends a run, which one call maps, to the piece and marks its ptes. The units already have a reference for these
 * ptes; if some ptes cannot be marked, their references are dropped. */
static int mark_run(struct maker *m, struct vm_piece *piece, struct vm_run r, bool zero) {
  struct vm_ctx *c = m->c;
  uint64_t addr = piece->addr + piece->bytes;
  uint32_t flags = vm_call_marks(c, piece->space, addr, r) | (piece->bytes ? 0 : PTE_START) |
                   (m->w.op->flags & VMEM_OP_READONLY ? PTE_READONLY : 0);
  uint32_t marked = 0;
  struct vm_seg *seg = VM_PUSH(c, &m->p->maps, struct vm_seg);
  int err = seg ? 0 : -ENOMEM;
  if (seg) {
    *seg = seg_of(m, piece, addr, r);
    err = vm_ptes_name(c, piece->space, addr, r, piece->handle, flags, &marked);
    piece->bytes += vm_bytes(c, marked);
  }
  if (!err && !claim_dirty(m, r, zero)) err = -ENOMEM;
  if (marked < r.n) vm_units_put(c, r.slab, r.unit + marked, r.n - marked);
  return err;
}

/* Like mark_run, for a run taken from the pool, which may need several calls. */
static int mark_taken(struct maker *m, struct vm_piece *piece, struct vm_run r, bool zero) {
  struct vm_ctx *c = m->c;
  while (r.n) {
    struct vm_run call = {r.slab, r.unit, vm_one_call(c, piece->addr + piece->bytes, r)};
    int err = mark_run(m, piece, call, zero);
    r.unit += call.n;
    r.n -= call.n;
    if (!err) continue;
    vm_units_put(c, r.slab, r.unit, r.n);
    return err;
  }
  return 0;
}

static int populate_piece(struct maker *m, struct vm_piece *piece, uint64_t bytes) {
  struct vm_ctx *c = m->c;
  uint32_t align = (uint32_t)vm_units(c, m->w.page_size);
  struct vm_place place = {.spread = m->w.op->flags & VMEM_OP_SPREAD};
  /* With COPY, a page is mapped before it is copied to, so it is zeroed even with DIRTY. */
  bool zero = m->w.op->flags & VMEM_OP_COPY || !(m->w.op->flags & VMEM_OP_DIRTY);
  struct vm_space *s = piece->space;
  uint64_t end = piece->addr + bytes;
  struct vm_pte *left = piece->addr > s->base ? vm_pte(c, s, piece->addr - c->granule) : NULL;
  struct vm_pte *right = end < s->base + s->bytes ? vm_pte(c, s, end) : NULL;
  if (left && left->flags) place.slab = c->phys->slabs[left->slab], place.unit = left->unit + 1;
  if (right && right->flags) place.right = c->phys->slabs[right->slab], place.end = right->unit;
  while (piece->bytes < bytes) {
    struct vm_run r;
    int err;
    place.offset = (uint32_t)vm_units(c, piece->addr + piece->bytes) & (c->chunk_units - 1);
    r = vm_pool_take(c, m->w.pool, vm_units(c, bytes - piece->bytes), align, &place);
    if (!r.n) {
      m->short_units = vm_units(c, bytes - piece->bytes);
      return -ENOMEM;
    }
    m->taken[m->w.pool - c->phys->pools] += r.n;
    if ((err = mark_taken(m, piece, r, zero))) return err;
    place.slab = r.slab;
    place.unit = r.unit + r.n;
  }
  return 0;
}

/* Marks [addr, addr + bytes), all of it mapped, busy with this plan and adds it to the piece. */
static int hold(struct maker *m, struct vm_piece *piece, uint64_t addr, uint64_t bytes) {
  struct vm_ctx *c = m->c;
  uint64_t held = vm_bytes(c, vm_ptes_hold(c, piece->space, addr, bytes));
  piece->bytes += held;
  return held == bytes ? 0 : vm_pte_not_live(c, vm_pte(c, piece->space, addr + held), addr + held);
}

/* Creates a mapping of the run, with its own references. */
static int map_run(struct maker *m, struct vm_piece *piece, struct vm_run r) {
  int err = check_claims(m, piece->addr + piece->bytes, r);
  if (err) return err;
  vm_units_ref(r.slab, r.unit, r.n);
  m->p->shows = true;
  return mark_run(m, piece, r, !m->w.hdl->dirty_ok);
}

/* As map_run, over an existing mapping, which stays in the ptes until the plan commits. Until then the pinned handle
 * holds the references. */
static int replace_run(struct maker *m, struct vm_piece *piece, struct vm_run r) {
  struct vm_ctx *c = m->c;
  uint64_t addr = piece->addr + piece->bytes;
  struct vm_seg *seg;
  int err = check_claims(m, addr, r);
  if (err) return err;
  if (vm_bits_run(r.slab->dirty_map, r.unit, r.n, false) < r.n)
    return vm_fail_at(-EINVAL, addr, (uint64_t)r.n << c->shift, 0,
                      "the pages that are to replace those at 0x%llx were never mapped: their contents are not known",
                      (unsigned long long)addr);
  if (!(seg = VM_PUSH(c, &m->p->replaces, struct vm_seg))) return -ENOMEM;
  *seg = seg_of(m, piece, addr, r);
  return hold(m, piece, addr, seg->bytes);
}

static int map_piece(struct maker *m, struct vm_piece *piece, uint64_t bytes, uint64_t offset) {
  struct vm_ctx *c = m->c;
  uint64_t addr = piece->addr, skip = vm_units(c, offset), left = vm_units(c, bytes);
  const struct vm_run *run = m->w.hdl->runs;
  while (left) {
    struct vm_run r = *run;
    int err;
    if (skip >= r.n) {
      skip -= r.n;
      run++;
      continue;
    }
    if (!r.slab)
      return vm_fail_at(-ERANGE, addr, bytes, 0, "the pages for 0x%llx were dropped (vmem_drop_range)",
                        (unsigned long long)addr);
    r.unit += (uint32_t)skip;
    r.n -= (uint32_t)skip;
    if (r.n > left) r.n = (uint32_t)left;
    if (c->info->one_page_slabs && r.n != r.slab->units)
      return vm_fail_at(-EINVAL, addr, bytes, r.slab->bytes,
                        "0x%llx + %llu bytes cuts a page of %llu bytes, which %s cannot map in parts",
                        (unsigned long long)piece->addr, (unsigned long long)bytes, (unsigned long long)r.slab->bytes,
                        c->be->name);
    r.n = vm_one_call(c, addr, r);
    err = m->w.op->flags & VMEM_OP_REPLACE ? replace_run(m, piece, r) : map_run(m, piece, r);
    if (err) return err;
    left -= r.n;
    skip += r.n;
    addr += (uint64_t)r.n << c->shift;
  }
  return 0;
}

/* Adds the copies that fill the piece's new pages. */
static int copy_piece(struct maker *m, uint64_t addr, uint64_t src, uint64_t bytes) {
  struct vm_ctx *c = m->c;
  uint64_t first = src & ~(c->granule - 1), end = vm_round_up(src + bytes, c->granule);
  struct vm_be_copy *copy = VM_PUSH(c, &m->p->copies, struct vm_be_copy);
  struct vm_space *s;
  int err;
  if (!copy) return -ENOMEM;
  *copy = (struct vm_be_copy){addr, src, bytes};
  if (!(s = vm_space_range(c, first, end - first, c->granule, &err))) return err;
  for (uint64_t a = first; a < end; a += c->granule) {
    struct vm_pte *p = vm_pte(c, s, a);
    if (!vm_pte_is_live(p)) return vm_pte_not_live(c, p, a);
  }
  return 0;
}

/* UNMAP and FILL: marks what is live in [addr, addr + bytes). */
static int mark_live(struct maker *m, struct vm_space *s, uint64_t addr, uint64_t bytes, bool fill) {
  struct vm_ctx *c = m->c;
  int err = fill ? 0 : vm_access_check(c, addr, bytes);
  if (err) return err;
  for (uint64_t a = addr, end = addr + bytes; a < end;) {
    struct vm_pte *p = vm_pte(c, s, a);
    struct vm_piece *piece;
    uint64_t n;
    if ((m->w.op->flags & VMEM_OP_HOLES) && (!p || !p->flags)) {
      a += p ? c->granule : vm_bytes(c, vm_leaf_rest(c, s, a, end));
      continue;
    }
    if (!(piece = VM_PUSH(c, fill ? &m->p->fills : &m->p->unmaps, struct vm_piece))) return -ENOMEM;
    *piece = (struct vm_piece){a, 0, s, fill ? (uint32_t)m->w.op->value : 0, false};
    n = vm_bytes(c, vm_ptes_hold(c, s, a, end - a));
    piece->bytes = n;
    for (uint64_t b = a; fill && b < a + n; b += c->granule)
      if (vm_pte(c, s, b)->flags & PTE_READONLY)
        return vm_fail_at(-EACCES, b, c->granule, 0, "0x%llx is mapped read-only", (unsigned long long)b);
    a += n;
    p = a < end ? vm_pte(c, s, a) : NULL;
    if (a < end && !((m->w.op->flags & VMEM_OP_HOLES) && (!p || !p->flags))) return vm_pte_not_live(c, p, a);
    if (!fill && (err = vm_split_note(c, m->p, piece, m->w.op->flags & VMEM_OP_SPLIT))) return err;
  }
  return 0;
}

/* Handles a piece, whose units come from `offset` of the handle or are copied from `src`. */
static int do_piece(struct maker *m, uint64_t addr, uint64_t offset, uint64_t src) {
  struct vm_ctx *c = m->c;
  const struct vmem_op *op = m->w.op;
  bool replace = op->flags & VMEM_OP_REPLACE;
  struct vm_piece *piece;
  int err;
  if (!m->space || addr < m->space->base || addr - m->space->base > m->space->bytes - op->bytes ||
      op->bytes > m->space->bytes || m->space->freeing)
    if (!(m->space = vm_space_range(c, addr, op->bytes, m->w.page_size, &err))) return err;
  if (op->op == VMEM_OP_UNMAP || op->op == VMEM_OP_FILL)
    return mark_live(m, m->space, addr, op->bytes, op->op == VMEM_OP_FILL);
  if (op->op == VMEM_OP_JOIN) return vm_plan_join(c, m->p, m->space, addr, op->bytes, op->flags & VMEM_OP_HOLES);
  if (replace && (err = vm_access_check(c, addr, op->bytes))) return err;
  if (!(piece = VM_PUSH(c, replace ? &m->p->replaced : &m->p->mapped, struct vm_piece))) return -ENOMEM;
  *piece = (struct vm_piece){addr, 0, m->space, 0, false};
  if (op->op == VMEM_OP_POPULATE) {
    err = populate_piece(m, piece, op->bytes);
    return err || !(op->flags & VMEM_OP_COPY) ? err : copy_piece(m, addr, src, vm_source_bytes(op));
  }
  piece->handle = vm_hdl_index(c, m->w.hdl);
  m->w.hdl->pending++;
  m->w.hdl->pins += replace;
  err = map_piece(m, piece, op->bytes, offset);
  return err || !replace ? err : vm_split_note(c, m->p, piece, op->flags & VMEM_OP_SPLIT);
}

/* The batch consumes the caller's reference: no other plan may rely on it. */
static int consume(struct maker *m) {
  struct vm_ctx *c = m->c;
  uint32_t index = vm_hdl_index(c, m->w.hdl), own = 0, *consumed;
  for (size_t i = 0; i < m->p->replaced.n; i++) own += VM_AT(m->p->replaced, struct vm_piece, i)->handle == index;
  if (m->w.hdl->pins != own) return vm_fail(-EBUSY, "another call is taking pages from the handle to be consumed");
  if (!(consumed = VM_PUSH(c, &m->p->consumed, uint32_t))) return -ENOMEM;
  m->w.hdl->busy = true;
  *consumed = index;
  return 0;
}

/* Returns the list for an operation's pieces. */
static struct vm_list *pieces_of(struct vm_plan *p, const struct vmem_op *op) {
  if (op->op == VMEM_OP_UNMAP) return &p->unmaps;
  if (op->op == VMEM_OP_FILL) return &p->fills;
  return op->flags & VMEM_OP_REPLACE ? &p->replaced : &p->mapped;
}

static int do_op(struct maker *m, const struct vmem_op *op) {
  struct vm_ctx *c = m->c;
  uint64_t count, most;
  int err = vm_want(c, op, &m->w);
  if (err) return err;
  m->space = NULL;
  count = m->w.count;
  most = count < 4096 ? count : 4096;
  if (op->op != VMEM_OP_JOIN && !vm_list_reserve(c, pieces_of(m->p, op), sizeof(struct vm_piece), most)) return -ENOMEM;
  if (op->op == VMEM_OP_POPULATE && !vm_list_reserve(c, &m->p->maps, sizeof(struct vm_seg), most)) return -ENOMEM;
  if (op->flags & VMEM_OP_COPY) {
    struct vm_access *source = VM_PUSH(c, &m->p->sources, struct vm_access);
    if (!source) return -ENOMEM;
    *source =
        (struct vm_access){.addr = op->src, .bytes = vm_source_bytes(op), .count = count, .stride = op->src_stride};
  }
  for (uint64_t i = 0; i < count; i++)
    if ((err =
             do_piece(m, op->addr + i * op->stride, op->offset + i * vm_offset_step(op), op->src + i * op->src_stride)))
      return err;
  return op->flags & VMEM_OP_CONSUME ? consume(m) : 0;
}

/* Returns the free bytes that the pool keeps if the plan is cancelled: as many as before, at least pool_high. */
static uint64_t keep_bytes(const struct vm_ctx *c) {
  uint64_t have = vm_pool_free_units(c) << c->shift;
  return have > c->opts.pool_high ? have : c->opts.pool_high;
}

/* Adds the cost of cutting a piece out: an end inside a run splits it in two; both ends inside one call make it two
 * mappings. */
static void add_cuts(struct vm_ctx *c, struct vm_room *room, const struct vm_piece *piece) {
  bool front = vm_space_cuts(c, piece->space, piece->addr);
  bool back = vm_space_cuts(c, piece->space, piece->addr + piece->bytes);
  room->segments += front + back;
  room->mappings += front && back;
}

/* A map adds its run and the hole after it; an unmap adds a piece at each end that cuts a run. */
int vm_plan_room(struct vm_ctx *c, struct vm_plan *p) {
  uint64_t mappings = p->maps.n + p->replaces.n + p->kept.n;
  struct vm_room room = {2 * mappings, mappings};
  /* The limit does not apply to an unmap that cuts a mapping in two or splits an entry, since it frees memory. */
  bool maps = p->maps.n + p->replaces.n;
  int err;
  for (size_t i = 0; i < p->replaced.n; i++) add_cuts(c, &room, VM_AT(p->replaced, struct vm_piece, i));
  for (size_t i = 0; i < p->unmaps.n; i++) add_cuts(c, &room, VM_AT(p->unmaps, struct vm_piece, i));
  if (!(err = vm_room_take(c, room, maps))) p->room = room;
  return err ? err : vm_plan_ops_room(c, p);
}

/* Counts the units that the batch's POPULATE operations take from the pool of `like`, at most as many as are
 * reserved. */
static uint64_t wanted(struct vm_ctx *c, const struct vmem_op *ops, size_t n, const struct vmem_op *like) {
  uint64_t total = 0, most = vm_units(c, c->virt->reserved_bytes);
  for (size_t i = 0; i < n; i++) {
    uint64_t units;
    if (ops[i].op != VMEM_OP_POPULATE || ops[i].location != like->location || ops[i].device != like->device ||
        vm_is_large(c, ops[i].page_size) != vm_is_large(c, like->page_size))
      continue;
    if (__builtin_mul_overflow(vm_units(c, ops[i].bytes), ops[i].count ? ops[i].count : 1, &units) ||
        units > most - total)
      return most;
    total += units;
  }
  return total;
}

/* Called when the plan is complete: the list of sources must not move after this. */
static void sources_begin(struct vm_ctx *c, struct vm_plan *p) {
  for (size_t i = 0; i < p->sources.n; i++) vm_access_begin(c, VM_AT(p->sources, struct vm_access, i));
}

static int make_batch(struct vm_ctx *c, const struct vmem_op *ops, size_t n, struct vm_plan *p) {
  uint64_t grow_id = 0, keep = 0;
  bool again = false;
  for (;;) {
    struct maker m = {.c = c, .p = p};
    uint64_t free_units = 0, need = 0;
    struct vmem_error why;
    bool lacked = false; /* the pool had too few pages, contiguous or not */
    int err = 0;
    memset(p, 0, sizeof(*p));
    p->grow_id = grow_id;
    pthread_mutex_lock(&c->lock);
    if (!grow_id) keep = keep_bytes(c);
    p->keep = keep;
    err = vm_want_all(c, ops, n);
    for (size_t i = 0; i < n && !err; i++) err = do_op(&m, &ops[i]);
    if (!err) err = vm_plan_split(c, p);
    if (!err) err = vm_plan_room(c, p);
    if (!err) sources_begin(c, p);
    if (err) {
      if (m.short_units) {
        need = wanted(c, ops, n, m.w.op);
        lacked = m.w.pool->free_units + m.taken[m.w.pool - c->phys->pools] < need;
      }
      vm_error_save(&why);
      vm_plan_take_back(c, p);
      if (m.short_units) free_units = m.w.pool->free_units;
    }
    pthread_mutex_unlock(&c->lock);
    if (!err) return 0;
    vm_plan_clear(p);
    vm_error_restore(&why);
    if (!m.short_units) {
      vm_pool_undo_grow(c, grow_id);
      vm_pool_abandon(c, keep);
      vm_error_restore(&why);
      return err;
    }
    /* Rolling the plan back drops the lock, so other threads may have added pages: retry as often as pages were
     * short, but only once if they were fragmented. */
    if (need <= free_units && (lacked || !again)) {
      again = true;
      continue;
    }
    again = false;
    /* The pool is short of units in total, or only of pieces that are large enough. */
    need = need > free_units ? need - free_units : m.short_units;
    err = vm_pool_grow(c, m.w.pool, need, vm_units(c, m.w.op->bytes), (uint32_t)vm_units(c, m.w.page_size), free_units,
                       &grow_id);
    if (err) return err;
  }
}

int vm_plan_make(struct vm_ctx *c, const struct vmem_op *ops, size_t n, struct vm_plan *p) {
  int err = make_batch(c, ops, n, p);
  return vm_recount(c, err) ? make_batch(c, ops, n, p) : err;
}

int vm_plan_make_release(struct vm_ctx *c, vmem_handle h, struct vm_plan *p) {
  struct vmem_op op = {.op = VMEM_OP_UNMAP};
  struct maker m = {.c = c, .p = p, .w = {.op = &op, .page_size = c->granule}};
  struct vm_hdl *hdl;
  int err = 0;
  memset(p, 0, sizeof(*p));
  pthread_mutex_lock(&c->lock);
  p->keep = keep_bytes(c);
  if (!(hdl = vm_hdl_find(c, h, &err))) goto out;
  if (hdl->busy || hdl->pending) {
    err = vm_fail(-EBUSY, "another call is using the handle");
    goto out;
  }
  if (hdl->mappings > 1) {
    err = vm_fail_at(-EBUSY, 0, hdl->bytes, hdl->mappings, "the handle has %llu live mappings: use vMemUnmap",
                     (unsigned long long)hdl->mappings);
    goto out;
  }
  if (hdl->mappings) {
    struct vm_space *s = vm_space_find(c, hdl->start_sum);
    uint64_t end = hdl->start_sum + c->granule, limit = s->base + s->bytes;
    for (; end < limit; end += c->granule) {
      struct vm_pte *pte = vm_pte(c, s, end);
      if (!pte || !(pte->flags & PTE_MAPPED) || (pte->flags & PTE_START) || pte->handle != vm_hdl_index(c, hdl)) break;
    }
    if ((err = mark_live(&m, s, hdl->start_sum, end - hdl->start_sum, false)) || (err = vm_plan_split(c, p)) ||
        (err = vm_plan_room(c, p))) {
      VM_UNDO(vm_plan_take_back(c, p));
      goto out;
    }
  }
  p->release = vm_hdl_index(c, hdl);
  hdl->busy = true;
out:
  pthread_mutex_unlock(&c->lock);
  if (err) vm_plan_clear(p);
  return err;
}

int vm_plan_make_free(struct vm_ctx *c, struct vm_space *s, struct vm_plan *p) {
  struct vmem_op op = {.op = VMEM_OP_UNMAP, .flags = VMEM_OP_HOLES};
  struct maker m = {.c = c, .p = p, .w = {.op = &op, .page_size = c->granule}};
  int err = 0;
  p->keep = keep_bytes(c);
  if (s->mapped && ((err = mark_live(&m, s, s->base, s->bytes, false)) || (err = vm_plan_room(c, p)))) {
    VM_UNDO(vm_plan_take_back(c, p));
    vm_plan_clear(p);
  }
  return err;
}
