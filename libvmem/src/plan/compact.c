/* SPDX-License-Identifier: MIT */
/*
 * Compaction: pages of nearly empty slabs move to free pages of fuller slabs, and the emptied slabs
 * return to the driver.
 *
 * Slabs move one at a time, each all or nothing. One pass over all ptes and handles finds the slab's
 * references; if some are not found, because they are newer or being changed, the slab stays as it is.
 * Otherwise it is set aside (no units of it are taken), its ptes and handles become busy, and a plan
 * copies its pages through the slabs' own mappings and replaces them at every address. vm_move_commit
 * records the new places.
 */
#include <stdlib.h>
#include <string.h>

#include "plan/plan.h"

struct victim {
  struct vm_slab *slab;
  uint32_t index, used, units;
};

struct reference { /* a reference to a page of a slab */
  uint32_t slab;
  uint64_t from; /* the address that maps it, or the index of the handle that holds it */
};

/* Candidate slabs, least used first, and the references to their pages. */
struct survey {
  struct vm_list victims, shown, held;
};

struct evacuation {
  struct vm_ctx *c;
  struct vm_move move;
  bool stays;    /* the slab stays: a page of it is in use, or there is no room */
  bool no_block; /* no room for a whole block; single pages may still fit */
  struct vm_plan plan;
};

/* ---- looking ----------------------------------------------------------------------------------- */

static uint32_t used_units(const struct vm_slab *s) { return s->units - s->free_units; }

static bool worth_it(const struct vm_slab *s) {
  return used_units(s) && used_units(s) <= s->units / 2 && !s->evacuating;
}

static int by_use(const void *a, const void *b) {
  const struct victim *x = a, *y = b;
  uint64_t p = (uint64_t)x->used * y->units, q = (uint64_t)y->used * x->units;
  if (p != q) return p < q ? -1 : 1;
  return x->index < y->index ? -1 : x->index > y->index;
}

static int by_slab(const void *a, const void *b) {
  const struct reference *x = a, *y = b;
  if (x->slab != y->slab) return x->slab < y->slab ? -1 : 1;
  return x->from < y->from ? -1 : x->from > y->from;
}

static void sort(struct vm_list *l, size_t item, int (*order)(const void *, const void *)) {
  if (l->n) qsort(l->v, l->n, item, order);
}

/* Sorts and deduplicates: a handle may have several runs in a slab. */
static void sort_references(struct vm_list *l) {
  struct reference *e = l->v;
  size_t n = 0;
  sort(l, sizeof(*e), by_slab);
  for (size_t i = 0; i < l->n; i++)
    if (!n || by_slab(&e[n - 1], &e[i])) e[n++] = e[i];
  l->n = n;
}

static int add(struct vm_ctx *c, struct vm_list *l, uint32_t slab, uint64_t from) {
  struct reference *e = VM_PUSH(c, l, struct reference);
  if (!e) return -ENOMEM;
  *e = (struct reference){slab, from};
  return 0;
}

static int look_at_space(struct vm_ctx *c, struct vm_space *s, struct vm_list *shown) {
  uint64_t seen = 0;
  int err = 0;
  for (uint64_t i = 0; seen < s->live_leaves && !err; i++) {
    if (!s->leaves[i]) continue;
    seen++;
    for (uint32_t k = 0; k < LEAF_PTES && !err; k++) {
      const struct vm_pte *p = &s->leaves[i]->pte[k];
      if (p->flags & PTE_MAPPED && worth_it(c->phys->slabs[p->slab]))
        err = add(c, shown, p->slab, s->base + vm_bytes(c, i * LEAF_PTES + k));
    }
  }
  return err;
}

/* Lock held. */
static int survey_run(struct vm_ctx *c, struct survey *v) {
  struct vm_phys *phys = c->phys;
  int err = 0;
  for (uint32_t i = 1; i < phys->nslabs; i++) {
    struct vm_slab *s = phys->slabs[i];
    struct victim *e;
    if (!s || c->info->one_page_slabs || !worth_it(s)) continue;
    if (!(e = VM_PUSH(c, &v->victims, struct victim))) return -ENOMEM;
    *e = (struct victim){s, i, used_units(s), s->units};
  }
  if (!v->victims.n) return 0;
  for (size_t i = 0; i < c->virt->nspaces && !err; i++) err = look_at_space(c, c->virt->spaces[i], &v->shown);
  for (uint32_t i = 1; i < phys->nhdls && !err; i++)
    for (uint32_t k = 0; k < phys->hdls[i].nruns && !err; k++) {
      const struct vm_run *r = &phys->hdls[i].runs[k];
      if (r->slab && worth_it(r->slab)) err = add(c, &v->held, r->slab->index, i);
    }
  sort(&v->victims, sizeof(struct victim), by_use);
  sort_references(&v->shown);
  sort_references(&v->held);
  return err;
}

static void survey_free(struct survey *v) {
  free(v->victims.v);
  free(v->shown.v);
  free(v->held.v);
}

/* Returns the references to a slab and stores their number in *n. */
static const struct reference *references_to(const struct vm_list *l, uint32_t slab, size_t *n) {
  const struct reference *e = l->v;
  size_t lo = 0, hi = l->n;
  while (lo < hi) {
    size_t mid = (lo + hi) / 2;
    if (e[mid].slab < slab)
      lo = mid + 1;
    else
      hi = mid;
  }
  for (*n = 0; lo + *n < l->n && e[lo + *n].slab == slab; ++*n) {
  }
  return e + lo;
}

/* ---- one slab ---------------------------------------------------------------------------------- */

/* Returns the pte if it still maps a page of the slab, else NULL. */
static struct vm_pte *still_shown(struct vm_ctx *c, const struct reference *e, struct vm_space **space) {
  struct vm_pte *p;
  *space = vm_space_find(c, e->from);
  if (!*space || (*space)->freeing) return NULL;
  p = vm_pte(c, *space, e->from);
  return p && p->flags & PTE_MAPPED && p->slab == e->slab ? p : NULL;
}

static bool being_read(struct vm_ctx *c, uint64_t addr) {
  bool busy = false;
  if (c->virt->accesses) VM_UNDO(busy = vm_access_check(c, addr, c->granule) != 0);
  return busy;
}

/* Sets *known if every reference to every page was found and none is in use. Lock held. */
static int count_references(struct vm_ctx *c, const struct vm_slab *s, const struct survey *v, bool *known) {
  size_t nshown, nheld;
  const struct reference *shown = references_to(&v->shown, s->index, &nshown);
  const struct reference *held = references_to(&v->held, s->index, &nheld);
  uint32_t *count = vm_calloc(c, s->units, sizeof(*count));
  *known = true;
  if (!count) return -ENOMEM;
  for (size_t i = 0; i < nshown && *known; i++) {
    struct vm_space *space;
    struct vm_pte *p = still_shown(c, &shown[i], &space);
    if (!p) continue;
    count[p->unit]++;
    if (p->flags & PTE_BUSY || being_read(c, shown[i].from)) *known = false;
  }
  for (size_t i = 0; i < nheld && *known; i++) {
    const struct vm_hdl *h = &c->phys->hdls[held[i].from];
    for (uint32_t k = 0; k < h->nruns; k++) {
      if (h->runs[k].slab != s) continue;
      if (h->busy || h->pins || h->pending) *known = false;
      for (uint32_t u = 0; u < h->runs[k].n; u++) count[h->runs[k].unit + u]++;
    }
  }
  for (uint32_t u = 0; u < s->units && *known; u++) {
    if (s->refs[u] != count[u] || vm_bit(s->claim_map, u) || vm_bit(s->fill_map, u)) *known = false;
    /* Units in limbo have no references and are not free. */
    if (!s->refs[u] && !vm_bit(s->free_map, u) && !vm_bit(s->soil_map, u)) *known = false;
  }
  free(count);
  return 0;
}

/* Finds new places for n units from `unit` on; a block that must stay whole moves as one. If there is no room, the
 * slab stays. */
static int take_places(struct evacuation *e, uint32_t unit, uint32_t n, uint32_t align) {
  struct vm_list *taken = &e->move.taken;
  while (n) {
    struct vm_run *r = VM_PUSH(e->c, taken, struct vm_run);
    if (!r) return -ENOMEM;
    *r = vm_pool_take_packed(e->c, e->move.from->pool, n, align);
    if (!r->n) {
      taken->n--;
      e->stays = true;
      e->no_block = align > 1 && !e->move.from->pool->large;
      return 0;
    }
    for (uint32_t i = 0; i < r->n; i++) e->move.to[unit + i] = (struct vm_moved){r->slab, r->unit + i};
    unit += r->n;
    n -= r->n;
  }
  return 0;
}

/* Finds the chunks of a slab that must move whole: large pages, and blocks mapped by a large entry at some address. */
static uint64_t *whole_chunks(struct evacuation *e, const struct survey *survey) {
  struct vm_ctx *c = e->c;
  struct vm_slab *s = e->move.from;
  uint64_t *whole = vm_calloc(c, s->chunks / 64 + 1, sizeof(*whole));
  size_t n;
  const struct reference *shown = references_to(&survey->shown, s->index, &n);
  for (uint32_t u = 0; whole && s->pool->large && u < s->units; u++)
    if (s->refs[u]) vm_bits_set(whole, u >> c->chunk_shift, 1, true);
  for (size_t i = 0; whole && i < n; i++) {
    struct vm_space *space;
    const struct vm_pte *p = still_shown(c, &shown[i], &space);
    if (p && p->flags & PTE_LARGE) vm_bits_set(whole, p->unit >> c->chunk_shift, 1, true);
  }
  return whole;
}

static int take_all(struct evacuation *e, const struct survey *survey) {
  struct vm_slab *s = e->move.from;
  uint32_t chunk = e->c->chunk_units;
  uint64_t *whole = whole_chunks(e, survey);
  int err = whole ? 0 : -ENOMEM;
  for (uint32_t u = 0; u < s->units && !err && !e->stays;) {
    uint32_t n = 0;
    if (vm_bit(whole, u >> e->c->chunk_shift)) {
      uint32_t end = u + chunk < s->units ? u + chunk : s->units;
      err = take_places(e, u, end - u, end - u);
      u = end;
      continue;
    }
    while (u + n < s->units && s->refs[u + n] && !vm_bit(whole, (u + n) >> e->c->chunk_shift)) n++;
    if (n) err = take_places(e, u, n, 1);
    u += n ? n : 1;
  }
  free(whole);
  return err;
}

static bool follows(const struct vm_moved *a, const struct vm_moved *b) {
  return a->slab == b->slab && a->unit + 1 == b->unit;
}

/* True if the call for the run may also cover the granule at `addr`: a call has either large entries or small ones, and
 * a range mapped by small entries keeps them. */
static bool may_grow(const struct vm_ctx *c, const struct vm_pte *p, uint64_t addr, const struct vm_seg *seg,
                     struct vm_run run, bool large) {
  run.n++;
  if (large) return addr & (LARGE_PAGE - 1) || p->flags & PTE_LARGE;
  return !(p->flags & PTE_LARGE) && !vm_is_whole(c, seg->space, seg->addr, run);
}

/* Adds a piece for every stretch of addresses that maps the slab, and a driver call for each run of its new pages. */
static int plan_addresses(struct evacuation *v, const struct survey *survey) {
  struct vm_ctx *c = v->c;
  struct vm_piece *piece = NULL;
  struct vm_seg *seg = NULL;
  struct vm_run run = {0};
  bool large = false;
  size_t n;
  const struct reference *e = references_to(&survey->shown, v->move.from->index, &n);
  for (size_t i = 0; i < n; i++) {
    struct vm_space *space;
    struct vm_pte *p = still_shown(c, &e[i], &space);
    uint64_t addr = e[i].from;
    const struct vm_moved *to;
    uint32_t flags;
    if (!p) continue;
    to = &v->move.to[p->unit];
    flags = p->flags & PTE_READONLY ? VMEM_MAP_READONLY : 0;
    if (!piece || piece->space != space || piece->addr + piece->bytes != addr) {
      if (!(piece = VM_PUSH(c, &v->plan.replaced, struct vm_piece))) return -ENOMEM;
      *piece = (struct vm_piece){addr, 0, space, 0, false};
      seg = NULL;
    }
    if (seg && (seg->flags != flags || !follows(&(struct vm_moved){run.slab, run.unit + run.n - 1}, to))) seg = NULL;
    if (seg && !may_grow(c, p, addr, seg, run, large)) seg = NULL;
    if (seg) run.n++;
    if (!seg) {
      large = p->flags & PTE_LARGE;
      if (!(seg = VM_PUSH(c, &v->plan.replaces, struct vm_seg))) return -ENOMEM;
      *seg = (struct vm_seg){addr, 0, space, to->slab, to->unit, flags};
      run = (struct vm_run){to->slab, to->unit, 1};
    }
    seg->bytes += c->granule;
    piece->bytes += vm_bytes(c, vm_ptes_hold(c, space, addr, c->granule));
  }
  return 0;
}

/* Rewrites the runs of a handle with the new places. If `out` is NULL, only counts the new runs. */
static uint32_t rewrite(const struct vm_move *m, const struct vm_hdl *h, struct vm_run *out) {
  struct vm_run last = {0};
  uint32_t n = 0;
  for (uint32_t k = 0; k < h->nruns; k++) {
    const struct vm_run *r = &h->runs[k];
    for (uint32_t u = 0; u < r->n;) {
      struct vm_run next = {r->slab, r->unit, r->n};
      if (r->slab == m->from) next = (struct vm_run){m->to[r->unit + u].slab, m->to[r->unit + u].unit, 1};
      u += next.n;
      if (n && last.slab && last.slab == next.slab && last.unit + last.n == next.unit) {
        last.n += next.n;
      } else {
        last = next;
        n++;
      }
      if (out) out[n - 1] = last;
    }
  }
  return n;
}

static int plan_handles(struct evacuation *v, const struct survey *survey) {
  struct vm_move *m = &v->move;
  size_t n;
  const struct reference *e = references_to(&survey->held, m->from->index, &n);
  for (size_t i = 0; i < n; i++) {
    struct vm_hdl *h = &v->c->phys->hdls[e[i].from];
    struct vm_moved_handle *r;
    bool holds = false;
    for (uint32_t k = 0; k < h->nruns; k++) holds |= h->runs[k].slab == m->from;
    if (!holds) continue;
    if (!(r = VM_PUSH(v->c, &m->hdls, struct vm_moved_handle))) return -ENOMEM;
    *r = (struct vm_moved_handle){.handle = (uint32_t)e[i].from, .n = rewrite(m, h, NULL)};
    if (!(r->runs = vm_calloc(v->c, r->n, sizeof(*r->runs)))) {
      m->hdls.n--;
      return -ENOMEM;
    }
    rewrite(m, h, r->runs);
    h->busy = true;
  }
  return 0;
}

/* Creates the slabs' own mappings and the list of copies through them. Needs no lock: everything is marked. */
static int plan_copies(struct evacuation *v) {
  struct vm_ctx *c = v->c;
  struct vm_move *m = &v->move;
  struct vm_slab *s = m->from;
  int err = vm_slab_alias(c, s, VMEM_INJECT_SLAB);
  for (size_t i = 0; i < m->taken.n && !err; i++)
    err = vm_slab_alias(c, VM_AT(m->taken, struct vm_run, i)->slab, VMEM_INJECT_SLAB);
  for (uint32_t u = 0; u < s->units && !err;) {
    const struct vm_moved *to = &m->to[u];
    struct vm_be_copy *copy;
    uint32_t n = 1;
    if (!s->refs[u] || vm_bit(s->dirty_map, u)) {
      u++;
      continue;
    }
    while (u + n < s->units && s->refs[u + n] && !vm_bit(s->dirty_map, u + n) && follows(&to[n - 1], &to[n])) n++;
    if (!(copy = VM_PUSH(c, &v->plan.copies, struct vm_be_copy))) return -ENOMEM;
    *copy = (struct vm_be_copy){vm_alias_addr(c, to->slab, to->unit), vm_alias_addr(c, s, u), vm_bytes(c, n)};
    u += n;
  }
  return err;
}

/* Marks a slab's pages and takes their new places; *full: set if there is no room for them. Lock held. */
static int prepare(struct evacuation *v, struct vm_slab *s, const struct survey *survey, bool *full) {
  struct vm_ctx *c = v->c;
  bool known;
  int err = count_references(c, s, survey, &known);
  v->stays = !known;
  if (err || v->stays) return err;
  if (!(v->move.to = vm_calloc(c, s->units, sizeof(*v->move.to)))) return -ENOMEM;
  v->move.from = s;
  vm_pool_set_aside(s);
  err = take_all(v, survey);
  *full = v->stays && !v->no_block;
  if (err || v->stays) return err;
  err = plan_addresses(v, survey);
  if (!err) err = plan_handles(v, survey);
  return err ? err : vm_plan_room(c, &v->plan);
}

/* Drops this move's references to the new pages; `written`: they have been mapped or copied to. Lock held; dropped
 * around driver calls. */
static void put_taken(struct evacuation *v, bool written) {
  for (size_t i = 0; i < v->move.taken.n; i++) {
    struct vm_run *r = VM_AT(v->move.taken, struct vm_run, i);
    if (written)
      vm_units_put(v->c, r->slab, r->unit, r->n);
    else
      vm_pool_untake(v->c, *r);
  }
}

/* Undoes the remains of a failed move. A slab that was not set aside is not ours: another thread may have
 * returned it. */
static void take_back(struct evacuation *v) {
  for (size_t i = 0; i < v->move.hdls.n; i++)
    v->c->phys->hdls[VM_AT(v->move.hdls, struct vm_moved_handle, i)->handle].busy = false;
  if (v->move.from) vm_pool_put_back(v->move.from);
}

static void evacuation_free(struct evacuation *v) {
  for (size_t i = 0; i < v->move.hdls.n; i++) free(VM_AT(v->move.hdls, struct vm_moved_handle, i)->runs);
  free(v->move.hdls.v);
  free(v->move.taken.v);
  free(v->move.to);
}

/* Empties one slab and returns it to the driver. If it has to stay, or after an error, nothing has changed. Lock held;
 * dropped around driver calls. */
static int evacuate(struct vm_ctx *c, struct vm_slab *s, const struct survey *survey, bool *full, uint64_t *freed) {
  struct evacuation v = {.c = c, .plan = {.keep = VMEM_KEEP_ALL, .move = &v.move}};
  struct vmem_error why;
  struct vm_fill *none;
  bool written = false;
  int err = prepare(&v, s, survey, full);
  pthread_mutex_unlock(&c->lock);
  if (!err && !v.stays && !(err = plan_copies(&v))) {
    written = true;
    err = vm_plan_run(c, &v.plan, NULL, 0, NULL, &none); /* clears or cancels the plan */
  } else {
    VM_UNDO(vm_plan_cancel(c, &v.plan));
  }
  vm_error_save(&why);
  pthread_mutex_lock(&c->lock);
  if (err || v.stays) take_back(&v);
  put_taken(&v, written);
  vm_error_restore(&why);
  if (!err && !v.stays) *freed += vm_pool_part(c, s);
  evacuation_free(&v);
  return err;
}

/* ---- all slabs --------------------------------------------------------------------------------- */

/* Lock held; dropped around driver calls. */
static int compact_all(struct vm_ctx *c, uint64_t want, uint64_t *freed) {
  struct survey v = {0};
  const struct vm_pool *full[VM_POOLS];
  size_t nfull = 0;
  int err = survey_run(c, &v);
  for (size_t i = 0; i < v.victims.n && !err && *freed < want && !c->closing; i++) {
    const struct victim *e = VM_AT(v.victims, struct victim, i);
    struct vm_slab *s = e->index < c->phys->nslabs && c->phys->slabs[e->index] == e->slab ? e->slab : NULL;
    uint64_t low;
    bool known = false, no_room = false;
    if (!s || !worth_it(s) || s->units != e->units) continue;
    for (size_t k = 0; k < nfull; k++) known |= full[k] == s->pool;
    low = s->pool == &c->phys->pools[0] ? vm_units_up(c, c->opts.pool_low) : 0;
    if (known || s->pool->free_units < low + s->units) continue;
    err = evacuate(c, s, &v, &no_room, freed);
    if (no_room) full[nfull++] = s->pool;
  }
  survey_free(&v);
  return err;
}

static int compact(struct vm_ctx *c, uint64_t want, uint64_t *freed) {
  int err;
  pthread_mutex_lock(&c->lock);
  while (c->phys->compacting) pthread_cond_wait(&c->done_cond, &c->lock);
  c->phys->compacting = true;
  vm_clean_hold(c);
  err = compact_all(c, want, freed);
  vm_clean_release(c);
  c->phys->compacting = false;
  pthread_cond_broadcast(&c->done_cond);
  pthread_mutex_unlock(&c->lock);
  return err;
}

/* Returns empty slabs first: no page has to move for that. */
static uint64_t trim(struct vm_ctx *c, uint64_t want) {
  uint64_t have, keep;
  pthread_mutex_lock(&c->lock);
  have = vm_bytes(c, vm_pool_free_units(c));
  pthread_mutex_unlock(&c->lock);
  want = want > UINT64_MAX - c->info->pub.slab_size ? UINT64_MAX : want + c->info->pub.slab_size - c->granule;
  keep = have > want ? have - want : 0;
  return vm_pool_trim(c, keep, c->opts.pool_low, true);
}

int vm_compact(struct vm_ctx *c, uint64_t want, uint64_t *freed) {
  int err;
  *freed += trim(c, want);
  err = compact(c, want, freed);
  return vm_recount(c, err) ? compact(c, want, freed) : err;
}
