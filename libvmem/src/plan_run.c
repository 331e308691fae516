/* SPDX-License-Identifier: MIT */
/*
 * plan_run.c - makes a plan's driver calls, then commits it or takes it back.
 *
 * plan_bind.c does the same for back ends that take a batch in one call.
 *
 * Order: zeroing of new pages, maps, copies to them, fills, replaces, unmaps. An undo runs the other way. Where an undo fails, the
 * range and its pages are quarantined: their ptes keep their references and are never changed again.
 */
#include <stdlib.h>
#include <string.h>

#include "backend/fills.h"

#define AT(list, type, i) (&((type *)(list).v)[i])

static bool sparse(const struct vm_space *s) { return s->kind & VMEM_RANGE_SPARSE; }

/* A handle's mapping begins or ends at addr. */
static void count_start(struct vm_ctx *c, const struct vm_pte *p, uint64_t addr, bool begins) {
  struct vm_hdl *h = p->handle ? &c->hdls[p->handle] : NULL;
  if (!h) return;
  h->mappings += begins ? 1 : -1;
  h->start_sum += begins ? addr : -addr;
}

void vm_detach(struct vm_ctx *c, struct vm_space *s, uint64_t addr, uint64_t bytes) {
  uint64_t end = addr + bytes, units = 0, before = vm_space_edges(c, s, addr, bytes), after;
  struct vm_pte *next = end < s->base + s->bytes ? vm_pte(c, s, end) : NULL;
  /* First: it may be all that keeps the entry of a dropped handle. */
  if (next && next->flags & PTE_MAPPED) {
    if (!(next->flags & PTE_START)) {
      next->flags |= PTE_START;
      count_start(c, next, end, true);
    }
    vm_set_call(c, next, true);
  }
  for (uint64_t a = addr; a < end;) {
    struct vm_pte *p = vm_pte(c, s, a);
    for (uint32_t n = vm_leaf_rest(c, s, a, end); n; n--, p++, a += c->granule) {
      if (!(p->flags & PTE_MAPPED)) continue;
      if (p->flags & PTE_START) {
        count_start(c, p, a, false);
        if (p->handle) vm_hdl_settle(c, &c->hdls[p->handle]);
      }
      if (p->flags & PTE_CALL) c->mappings--;
      p->flags &= ~(PTE_MAPPED | PTE_START | PTE_CALL);
      units++;
    }
  }
  s->mapped -= units;
  c->mapped_units -= units;
  after = vm_space_edges_bare(c, s, addr, bytes);
  s->segments += after - before;
  c->segments += after - before;
}

/* Detaches busy ptes, gives their references back and frees the ptes. Lock held, let go for the driver. */
void vm_unmap_ptes(struct vm_ctx *c, struct vm_space *s, uint64_t addr, uint64_t bytes) {
  uint64_t a = addr, end = addr + bytes;
  if (!bytes) return;
  vm_detach(c, s, addr, bytes);
  while (a < end) {
    struct vm_pte first = *vm_pte(c, s, a);
    uint32_t n = vm_space_units(c, s, a, end, 0), rest;
    /* The ptes go first: with the lock let go they would name units without a reference. */
    for (uint64_t stop = a + ((uint64_t)n << c->shift); a < stop; a += (uint64_t)rest << c->shift) {
      rest = vm_leaf_rest(c, s, a, stop);
      memset(vm_pte(c, s, a), 0, rest * sizeof(struct vm_pte));
    }
    s->busy -= n;
    vm_units_put(c, c->slabs[first.slab], first.unit, n);
  }
}

void vm_quarantine_unit(struct vm_ctx *c, struct vm_slab *s, uint32_t unit) {
  if (s->refs[unit] & REF_QUARANTINED) return;
  s->refs[unit] |= REF_QUARANTINED;
  c->used_units--;
  c->quarantined_units++;
}

void vm_quarantine(struct vm_ctx *c, struct vm_space *s, uint64_t addr, uint64_t bytes) {
  vm_detach(c, s, addr, bytes);
  for (uint64_t a = addr; a < addr + bytes; a += c->granule) {
    struct vm_pte *p = vm_pte(c, s, a);
    vm_quarantine_unit(c, c->slabs[p->slab], p->unit);
    p->handle = 0;
    p->flags = PTE_QUARANTINED;
  }
  s->busy -= vm_units(c, bytes);
  s->quarantined += vm_units(c, bytes);
}

/* ---- driver calls ---------------------------------------------------------------------------- */

/* A range whose undo failed: quarantined, cut out of the piece lists by its flags. */
void vm_undo_failed(struct vm_ctx *c, struct vm_space *s, uint64_t addr, uint64_t bytes, int *worst,
                    const struct vmem_error *why) {
  struct vmem_error undo;
  vm_error_save(&undo);
  pthread_mutex_lock(&c->lock);
  vm_quarantine(c, s, addr, bytes);
  pthread_mutex_unlock(&c->lock);
  *worst = vm_fail_at(-ENOTRECOVERABLE, addr, bytes, 0,
                      "0x%llx + %llu bytes is quarantined: its undo failed (%.150s) after: %.150s",
                      (unsigned long long)addr, (unsigned long long)bytes, undo.text, why->text);
}

/* A call that left its range in an unknown state, as its error says. */
void vm_range_lost(struct vm_ctx *c, struct vm_space *s, uint64_t addr, uint64_t bytes) {
  pthread_mutex_lock(&c->lock);
  vm_quarantine(c, s, addr, bytes);
  pthread_mutex_unlock(&c->lock);
}

static int map_one(struct vm_ctx *c, const struct vm_seg *s) {
  return vm_drv_map(c, s->addr, s->bytes, s->slab, s->unit, s->flags, sparse(s->space));
}

static void undo_maps(struct vm_ctx *c, struct vm_plan *p, size_t n, int *worst, const struct vmem_error *why) {
  while (n--) {
    struct vm_seg *s = AT(p->maps, struct vm_seg, n);
    if (vm_drv_unmap(c, s->addr, s->bytes, sparse(s->space))) vm_undo_failed(c, s->space, s->addr, s->bytes, worst, why);
  }
}

struct vm_seg vm_run_before(struct vm_ctx *c, struct vm_space *space, uint64_t a, uint64_t end) {
  struct vm_seg s;
  struct vm_pte *pte;
  pthread_mutex_lock(&c->lock);
  pte = vm_pte(c, space, a);
  s = (struct vm_seg){a, vm_space_run(c, space, a, end - a), space, c->slabs[pte->slab], pte->unit,
                      pte->flags & PTE_READONLY ? VMEM_MAP_READONLY : 0};
  for (uint64_t b = a; b < a + s.bytes; b += c->granule) vm_set_call(c, vm_pte(c, space, b), b == a);
  /* The rest of a call that was cut at the end is a call of its own now. */
  pte = a + s.bytes < space->base + space->bytes ? vm_pte(c, space, a + s.bytes) : NULL;
  if (pte && pte->flags & PTE_MAPPED) vm_set_call(c, pte, true);
  pthread_mutex_unlock(&c->lock);
  return s;
}

/* Maps again what the first n unmap calls took away. */
static void undo_unmaps(struct vm_ctx *c, struct vm_plan *p, size_t n, int *worst, const struct vmem_error *why) {
  while (n--) {
    struct vm_piece *piece = AT(p->unmaps, struct vm_piece, n);
    uint64_t a = piece->addr, end = a + piece->bytes;
    while (a < end) {
      struct vm_seg s = vm_run_before(c, piece->space, a, end);
      if (map_one(c, &s)) vm_undo_failed(c, piece->space, s.addr, s.bytes, worst, why);
      a += s.bytes;
    }
  }
}

int vm_event_finish(struct vm_ctx *c, vm_event *e) {
  int err = vm_drv_event_finish(c, *e);
  *e = 0;
  return err;
}

static int map_all(struct vm_ctx *c, struct vm_plan *p, size_t *mapped) {
  for (*mapped = 0; *mapped < p->maps.n; ++*mapped) {
    struct vm_seg *s = AT(p->maps, struct vm_seg, *mapped);
    int err = map_one(c, s);
    if (err == -ENOTRECOVERABLE) vm_range_lost(c, s->space, s->addr, s->bytes);
    if (err) return err;
  }
  return 0;
}

/* Each call runs behind the one before, so its event covers all. */
static void follow(struct vm_ctx *c, vm_event *last, vm_event e) {
  if (*last) c->be->event_put(c->bes, *last);
  *last = e;
}

int vm_plan_fill(struct vm_ctx *c, struct vm_plan *p, const vm_event *after, size_t num_after, vm_event *last) {
  size_t i = 0;
  int err = 0;
  *last = 0;
  if (!err && p->copies.n) {
    vm_event e = 0;
    err = vm_drv_copy(c, p->copies.v, p->copies.n, after, num_after, &e);
    if (!err) follow(c, last, e);
  }
  /* Fills of equal value go in one call. */
  while (!err && i < p->fills.n) {
    struct vm_be_range r[64];
    uint32_t value = AT(p->fills, struct vm_piece, i)->handle;
    bool chain = num_after && *last; /* calls that wait for events have no order of their own */
    vm_event e = 0;
    size_t n = 0;
    for (; i < p->fills.n && n < 64 && AT(p->fills, struct vm_piece, i)->handle == value; i++, n++)
      r[n] = (struct vm_be_range){AT(p->fills, struct vm_piece, i)->addr, AT(p->fills, struct vm_piece, i)->bytes};
    err = vm_drv_fill(c, r, n, (uint8_t)value, chain ? last : after, chain ? 1 : num_after, &e);
    if (!err) follow(c, last, e);
  }
  return err;
}

/* ---- commit ---------------------------------------------------------------------------------- */

void vm_commit_map(struct vm_ctx *c, struct vm_piece *piece) {
  struct vm_space *s = piece->space;
  uint64_t before = vm_space_edges_bare(c, s, piece->addr, piece->bytes), units = vm_units(c, piece->bytes), after;
  for (uint64_t a = piece->addr, end = a + piece->bytes; a < end;) {
    struct vm_pte *p = vm_pte(c, s, a);
    for (uint32_t n = vm_leaf_rest(c, s, a, end); n; n--, p++, a += c->granule) {
      p->flags = (p->flags & ~PTE_BUSY) | PTE_MAPPED;
      if (p->flags & PTE_START) count_start(c, p, a, true);
      if (p->flags & PTE_CALL) c->mappings++;
    }
  }
  after = vm_space_edges(c, s, piece->addr, piece->bytes);
  s->segments += after - before;
  c->segments += after - before;
  s->mapped += units;
  s->busy -= units;
  c->mapped_units += units;
  if (piece->handle) c->hdls[piece->handle].pending--;
}

void vm_plan_commit(struct vm_ctx *c, struct vm_plan *p) {
  size_t i;
  pthread_mutex_lock(&c->lock);
  vm_mappings_end(c, p);
  if (p->event) { /* first: below the lock is let go */
    vm_fill_begin(c, p->fill, p->event);
    p->fill = NULL;
  }
  for (i = 0; i < p->mapped.n; i++) {
    struct vm_piece *piece = AT(p->mapped, struct vm_piece, i);
    vm_commit_map(c, piece);
    if (p->claims) vm_end_claims(c, p, piece, true);
  }
  vm_sources_end(c, p);
  vm_note_peaks(c);
  for (i = 0; i < p->fills.n; i++) {
    struct vm_piece *piece = AT(p->fills, struct vm_piece, i);
    for (uint64_t a = piece->addr; a < piece->addr + piece->bytes; a += c->granule)
      vm_pte(c, piece->space, a)->flags &= ~PTE_BUSY;
    piece->space->busy -= vm_units(c, piece->bytes);
  }
  vm_replace_commit(c, p);
  for (i = 0; i < p->unmaps.n; i++) {
    struct vm_piece *piece = AT(p->unmaps, struct vm_piece, i);
    vm_unmap_ptes(c, piece->space, piece->addr, piece->bytes);
  }
  for (i = 0; i < p->consumed.n; i++) vm_hdl_drop(c, &c->hdls[*AT(p->consumed, uint32_t, i)]);
  if (p->release) vm_hdl_drop(c, &c->hdls[p->release]);
  c->batches++;
  pthread_mutex_unlock(&c->lock);
  if (p->unmaps.n || p->replaced.n || p->release) vm_pool_trim(c, c->opts.pool_high, false);
  vm_plan_clear(p);
}

/* The driver calls of a plan, one for each run; or their undo. */
static int run_calls(struct vm_ctx *c, struct vm_plan *p, const vm_event *after, size_t num_after) {
  size_t mapped = 0, replaced = 0, unmapped = 0;
  struct vmem_error why;
  int worst, err = map_all(c, p, &mapped);
  if (!err) err = vm_plan_fill(c, p, after, num_after, &p->event);
  /* No fill may be running on what is about to vanish; and a copy's source is only held until the commit. */
  if (!err && (!p->fill || p->unmaps.n || p->replaced.n || p->copies.n)) err = vm_event_finish(c, &p->event);
  if (!err) err = vm_replace_all(c, p, &replaced);
  while (!err && unmapped < p->unmaps.n) {
    struct vm_piece *piece = AT(p->unmaps, struct vm_piece, unmapped);
    if (!(err = vm_drv_unmap(c, piece->addr, piece->bytes, sparse(piece->space)))) unmapped++;
    if (err == -ENOTRECOVERABLE) vm_range_lost(c, piece->space, piece->addr, piece->bytes);
  }
  if (!err) return 0;
  vm_error_save(&why);
  worst = err;
  vm_event_finish(c, &p->event);
  vm_undo_begin();
  undo_unmaps(c, p, unmapped, &worst, &why);
  vm_replace_undo(c, p, replaced, &worst, &why);
  undo_maps(c, p, mapped, &worst, &why);
  vm_undo_end();
  if (worst == err) vm_error_restore(&why);
  return worst;
}

int vm_plan_run(struct vm_ctx *c, struct vm_plan *p, const vm_event *after, size_t num_after, struct vm_fill **fill) {
  int err = vm_plan_zero(c, p, NULL);
  if (!err) err = c->be->bind ? vm_plan_run_bind(c, p, after, num_after) : run_calls(c, p, after, num_after);
  *fill = NULL;
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
  if (!err) return vm_plan_run(c, p, NULL, 0, &none);
  VM_UNDO(vm_plan_cancel(c, p));
  return err;
}
