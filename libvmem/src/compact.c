/* SPDX-License-Identifier: MIT */
/*
 * compact.c - vmem_compact: the pages of slabs that are hardly used move to free pages of fuller slabs, and the
 * emptied slabs go back to the driver.
 *
 * One slab at a time, all of it or nothing. Its references are found by one look at all ptes and handles; a slab some
 * of whose references were not found, because they are newer or somebody is changing them, stays as it is. Then it is
 * set aside (nobody takes units of it), its ptes become busy, its handles too, and a plan copies its pages through
 * the slabs' own mappings and replaces them under every address. vm_move_commit writes the new places down.
 */
#include <stdlib.h>
#include <string.h>

#include "work/work.h"

#define AT(list, type, i) (&((type *)(list).v)[i])
#define PUSH(c, list, type) ((type *)vm_list_push(c, list, sizeof(type)))

struct place { /* of a page */
  struct vm_slab *slab;
  uint32_t unit;
};

struct new_runs {
  uint32_t handle; /* index */
  struct vm_run *runs;
  uint32_t n;
};

struct vm_move {
  struct vm_ctx *c;
  struct vm_slab *from;
  struct place *to;      /* by unit of `from` */
  struct vm_list taken;  /* vm_run: the pages that `to` names, and the rest of large ones; with one reference */
  struct vm_list hdls;   /* new_runs */
  bool stays;            /* the slab: a page of it is in use, or there is no room for them */
  struct vm_plan plan;
};

struct victim {
  struct vm_slab *slab;
  uint32_t index, used, units;
};

struct shown { /* a pte */
  uint64_t addr;
  uint32_t slab;
};

struct holder {
  uint32_t slab, handle; /* indices */
};

/* Who may go, the least used first, and who refers to them. */
struct survey {
  struct vm_list victims, shown, holders;
};

/* ---- looking --------------------------------------------------------------------------------- */

static uint32_t used_units(const struct vm_slab *s) { return s->units - s->free_units; }

static bool worth_it(const struct vm_slab *s) { return used_units(s) && used_units(s) <= s->units / 2 && !s->evacuating; }

static int by_use(const void *a, const void *b) {
  const struct victim *x = a, *y = b;
  uint64_t p = (uint64_t)x->used * y->units, q = (uint64_t)y->used * x->units;
  if (p != q) return p < q ? -1 : 1;
  return x->index < y->index ? -1 : x->index > y->index;
}

static int by_slab(const void *a, const void *b) {
  const struct shown *x = a, *y = b;
  if (x->slab != y->slab) return x->slab < y->slab ? -1 : 1;
  return x->addr < y->addr ? -1 : x->addr > y->addr;
}

static int holder_by_slab(const void *a, const void *b) {
  const struct holder *x = a, *y = b;
  if (x->slab != y->slab) return x->slab < y->slab ? -1 : 1;
  return x->handle < y->handle ? -1 : x->handle > y->handle;
}

static bool is_victim(struct vm_ctx *c, uint32_t slab) { return worth_it(c->slabs[slab]); }

static int look_at_space(struct vm_ctx *c, struct vm_space *s, struct vm_list *shown) {
  uint64_t seen = 0;
  for (uint64_t i = 0; seen < s->live_leaves; i++) {
    if (!s->leaves[i]) continue;
    seen++;
    for (uint32_t k = 0; k < LEAF_PTES; k++) {
      const struct vm_pte *p = &s->leaves[i]->pte[k];
      struct shown *e;
      if (!(p->flags & PTE_MAPPED) || !is_victim(c, p->slab)) continue;
      if (!(e = PUSH(c, shown, struct shown))) return -ENOMEM;
      *e = (struct shown){s->base + ((i * LEAF_PTES + k) << c->shift), p->slab};
    }
  }
  return 0;
}

/* Lock held. */
static int look(struct vm_ctx *c, struct survey *v) {
  int err = 0;
  for (uint32_t i = 1; i < c->nslabs; i++) {
    struct vm_slab *s = c->slabs[i];
    struct victim *e;
    if (!s || c->info.one_page_slabs || !worth_it(s)) continue;
    if (!(e = PUSH(c, &v->victims, struct victim))) return -ENOMEM;
    *e = (struct victim){s, i, used_units(s), s->units};
  }
  if (!v->victims.n) return 0;
  for (size_t i = 0; i < c->nspaces && !err; i++) err = look_at_space(c, c->spaces[i], &v->shown);
  for (uint32_t i = 1; i < c->nhdls && !err; i++)
    for (uint32_t k = 0; k < c->hdls[i].nruns; k++) {
      const struct vm_run *r = &c->hdls[i].runs[k];
      struct holder *e = v->holders.n ? AT(v->holders, struct holder, v->holders.n - 1) : NULL;
      if (!r->slab || !worth_it(r->slab) || (e && e->slab == r->slab->index && e->handle == i)) continue;
      if (!(e = PUSH(c, &v->holders, struct holder))) return -ENOMEM;
      *e = (struct holder){r->slab->index, i};
    }
  if (err) return err;
  qsort(v->victims.v, v->victims.n, sizeof(struct victim), by_use);
  if (v->shown.n) qsort(v->shown.v, v->shown.n, sizeof(struct shown), by_slab);
  if (v->holders.n) qsort(v->holders.v, v->holders.n, sizeof(struct holder), holder_by_slab);
  return 0;
}

static void survey_free(struct survey *v) {
  free(v->victims.v);
  free(v->shown.v);
  free(v->holders.v);
}

/* The first entry of a slab, and their number. */
static struct shown *shown_of(const struct survey *v, uint32_t slab, size_t *n) {
  struct shown *e = v->shown.v;
  size_t lo = 0, hi = v->shown.n;
  while (lo < hi) {
    size_t mid = (lo + hi) / 2;
    if (e[mid].slab < slab)
      lo = mid + 1;
    else
      hi = mid;
  }
  for (*n = 0; lo + *n < v->shown.n && e[lo + *n].slab == slab; ++*n) {
  }
  return e + lo;
}

static struct holder *holders_of(const struct survey *v, uint32_t slab, size_t *n) {
  struct holder *e = v->holders.v;
  size_t lo = 0, hi = v->holders.n;
  while (lo < hi) {
    size_t mid = (lo + hi) / 2;
    if (e[mid].slab < slab)
      lo = mid + 1;
    else
      hi = mid;
  }
  for (*n = 0; lo + *n < v->holders.n && e[lo + *n].slab == slab; ++*n) {
  }
  return e + lo;
}

/* ---- one slab -------------------------------------------------------------------------------- */

/* The pte, where it still shows a page of the slab. */
static struct vm_pte *still_shown(struct vm_ctx *c, const struct shown *e, struct vm_space **space) {
  struct vm_pte *p;
  *space = vm_space_find(c, e->addr);
  if (!*space || (*space)->freeing) return NULL;
  p = vm_pte(c, *space, e->addr);
  return p && p->flags & PTE_MAPPED && p->slab == e->slab ? p : NULL;
}

static bool being_read(struct vm_ctx *c, uint64_t addr) {
  bool busy = false;
  if (c->accesses) VM_UNDO(busy = vm_check_access(c, addr, c->granule) != 0);
  return busy;
}

/* Whether every reference of every page is known, and nobody is using one. Lock held. */
static int count_references(struct vm_ctx *c, const struct vm_slab *s, const struct survey *v, bool *known) {
  size_t nshown, nholders;
  const struct shown *shown = shown_of(v, s->index, &nshown);
  const struct holder *holders = holders_of(v, s->index, &nholders);
  uint32_t *count = vm_calloc(c, s->units, sizeof(*count));
  *known = true;
  if (!count) return -ENOMEM;
  for (size_t i = 0; i < nshown && *known; i++) {
    struct vm_space *space;
    struct vm_pte *p = still_shown(c, &shown[i], &space);
    if (!p) continue;
    count[p->unit]++;
    if (p->flags & PTE_BUSY || being_read(c, shown[i].addr)) *known = false;
  }
  for (size_t i = 0; i < nholders && *known; i++) {
    const struct vm_hdl *h = &c->hdls[holders[i].handle];
    for (uint32_t k = 0; k < h->nruns; k++) {
      if (h->runs[k].slab != s) continue;
      if (h->busy || h->pins || h->pending) *known = false;
      for (uint32_t u = 0; u < h->runs[k].n; u++) count[h->runs[k].unit + u]++;
    }
  }
  for (uint32_t u = 0; u < s->units && *known; u++)
    if (s->refs[u] != count[u] || vm_bit(s->claim_map, u) || vm_bit(s->fill_map, u)) *known = false;
  /* Units in passing have no references, and are not free. */
  for (uint32_t u = 0; u < s->units && *known; u++)
    if (!s->refs[u] && !vm_bit(s->free_map, u) && !vm_bit(s->soil_map, u)) *known = false;
  free(count);
  return 0;
}

/* Units that were never mapped, nor written to. */
static void give_back_taken(struct vm_move *m) {
  for (size_t i = 0; i < m->taken.n; i++) {
    struct vm_run *r = AT(m->taken, struct vm_run, i);
    memset(r->slab->refs + r->unit, 0, r->n * sizeof(*r->slab->refs));
    m->c->used_units -= r->n;
    vm_pool_give(m->c, r->slab, r->unit, r->n);
  }
  m->taken.n = 0;
}

/* New places for n units from `unit` on. A large page's stays whole. Where there are none, the slab stays. */
static int take_places(struct vm_move *m, uint32_t unit, uint32_t n, uint32_t align) {
  while (n) {
    struct vm_run *r = PUSH(m->c, &m->taken, struct vm_run);
    if (!r) return -ENOMEM;
    *r = vm_pool_take_packed(m->c, m->from->pool, n, align);
    if (!r->n) {
      m->taken.n--;
      m->stays = true;
      return 0;
    }
    for (uint32_t i = 0; i < r->n; i++) m->to[unit + i] = (struct place){r->slab, r->unit + i};
    unit += r->n;
    n -= r->n;
  }
  return 0;
}

static int take_all(struct vm_move *m) {
  struct vm_slab *s = m->from;
  uint32_t chunk = m->c->chunk_units;
  int err = 0;
  for (uint32_t u = 0; u < s->units && !err && !m->stays;) {
    uint32_t n = 0;
    if (s->pool->large) {
      uint32_t end = u + chunk < s->units ? u + chunk : s->units;
      bool used = false;
      for (uint32_t i = u; i < end; i++) used |= s->refs[i] != 0;
      if (used) err = take_places(m, u, end - u, end - u);
      u = end;
      continue;
    }
    while (u + n < s->units && s->refs[u + n]) n++;
    if (n) err = take_places(m, u, n, 1);
    u += n ? n : 1;
  }
  return err;
}

static bool follows(const struct place *a, const struct place *b) { return a->slab == b->slab && a->unit + 1 == b->unit; }

/* Every stretch of addresses that shows the slab becomes a piece, every run of its new pages a driver call. */
static int plan_addresses(struct vm_move *m, const struct survey *v) {
  struct vm_ctx *c = m->c;
  struct vm_piece *piece = NULL;
  struct vm_seg *seg = NULL;
  struct vm_run run = {0};
  size_t n;
  const struct shown *e = shown_of(v, m->from->index, &n);
  for (size_t i = 0; i < n; i++) {
    struct vm_space *space;
    struct vm_pte *p = still_shown(c, &e[i], &space);
    const struct place *to;
    uint32_t flags;
    if (!p) continue;
    to = &m->to[p->unit];
    flags = p->flags & PTE_READONLY ? VMEM_MAP_READONLY : 0;
    if (!piece || piece->space != space || piece->addr + piece->bytes != e[i].addr) {
      if (!(piece = PUSH(c, &m->plan.replaced, struct vm_piece))) return -ENOMEM;
      *piece = (struct vm_piece){e[i].addr, 0, space, 0};
      seg = NULL;
    }
    if (seg && (seg->flags != flags || !follows(&(struct place){run.slab, run.unit + run.n - 1}, to))) seg = NULL;
    if (seg) {
      run.n++;
      if (vm_one_call(c, seg->addr, run) < run.n) seg = NULL; /* a large page begins or ends here */
    }
    if (!seg) {
      if (!(seg = PUSH(c, &m->plan.replaces, struct vm_seg))) return -ENOMEM;
      *seg = (struct vm_seg){e[i].addr, 0, space, to->slab, to->unit, flags};
      run = (struct vm_run){to->slab, to->unit, 1};
    }
    seg->bytes += c->granule;
    p->flags |= PTE_BUSY;
    space->busy++;
    piece->bytes += c->granule;
  }
  return 0;
}

/* The runs of a handle, with the new places. Called with `out` NULL to count. */
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

static int plan_handles(struct vm_move *m, const struct survey *v) {
  struct vm_ctx *c = m->c;
  size_t n;
  const struct holder *e = holders_of(v, m->from->index, &n);
  for (size_t i = 0; i < n; i++) {
    struct vm_hdl *h = &c->hdls[e[i].handle];
    struct new_runs *r;
    bool holds = false;
    for (uint32_t k = 0; k < h->nruns; k++) holds |= h->runs[k].slab == m->from;
    if (!holds) continue;
    if (!(r = PUSH(c, &m->hdls, struct new_runs))) return -ENOMEM;
    *r = (struct new_runs){.handle = e[i].handle, .n = rewrite(m, h, NULL)};
    if (!(r->runs = vm_calloc(c, r->n, sizeof(*r->runs)))) {
      m->hdls.n--;
      return -ENOMEM;
    }
    rewrite(m, h, r->runs);
    h->busy = true;
  }
  return 0;
}

/* Makes the slabs' own mappings, and the list of copies through them. Lock not held: everything is marked. */
static int plan_copies(struct vm_move *m) {
  struct vm_ctx *c = m->c;
  struct vm_slab *s = m->from;
  int err = vm_slab_alias(c, s, VMEM_INJECT_SLAB);
  for (size_t i = 0; i < m->taken.n && !err; i++) err = vm_slab_alias(c, AT(m->taken, struct vm_run, i)->slab, VMEM_INJECT_SLAB);
  for (uint32_t u = 0; u < s->units && !err;) {
    const struct place *to = &m->to[u];
    struct vm_be_copy *copy;
    uint32_t n = 1;
    if (!s->refs[u] || vm_bit(s->dirty_map, u)) {
      u++;
      continue;
    }
    while (u + n < s->units && s->refs[u + n] && !vm_bit(s->dirty_map, u + n) && follows(&m->to[u + n - 1], &m->to[u + n])) n++;
    if (!(copy = PUSH(c, &m->plan.copies, struct vm_be_copy))) return -ENOMEM;
    *copy = (struct vm_be_copy){to->slab->alias + ((uint64_t)to->unit << c->shift), s->alias + ((uint64_t)u << c->shift),
                                (uint64_t)n << c->shift};
    u += n;
  }
  return err;
}

static void move_pte(struct vm_ctx *c, const struct vm_move *m, const struct vm_seg *seg, uint64_t a) {
  struct vm_pte *p = vm_pte(c, seg->space, a);
  const struct place *to = &m->to[p->unit];
  p->slab = to->slab->index;
  p->unit = to->unit;
  p->flags &= ~PTE_BUSY;
  vm_set_call(c, p, a == seg->addr);
}

void vm_move_commit(struct vm_ctx *c, struct vm_plan *p) {
  struct vm_move *m = p->move;
  struct vm_slab *s = m->from;
  size_t k = 0;
  for (size_t i = 0; i < p->replaced.n; i++) {
    struct vm_piece *piece = AT(p->replaced, struct vm_piece, i);
    struct vm_space *space = piece->space;
    uint64_t end = piece->addr + piece->bytes, before = vm_space_edges(c, space, piece->addr, piece->bytes), more;
    struct vm_pte *next = end < space->base + space->bytes ? vm_pte(c, space, end) : NULL;
    for (; k < p->replaces.n; k++) {
      const struct vm_seg *seg = AT(p->replaces, struct vm_seg, k);
      if (seg->addr < piece->addr || seg->addr >= end) break;
      for (uint64_t a = seg->addr; a < seg->addr + seg->bytes; a += c->granule) move_pte(c, m, seg, a);
    }
    /* The rest of a call that was cut at the end is a call of its own now. */
    if (next && next->flags & PTE_MAPPED) vm_set_call(c, next, true);
    space->busy -= vm_units(c, piece->bytes);
    more = vm_space_edges(c, space, piece->addr, piece->bytes) - before;
    space->segments += more;
    c->segments += more;
  }
  for (uint32_t u = 0; u < s->units; u++) {
    const struct place *to = &m->to[u];
    if (!s->refs[u]) continue;
    to->slab->refs[to->unit] = s->refs[u] + 1; /* one is ours */
    vm_bits_set(to->slab->dirty_map, to->unit, 1, vm_bit(s->dirty_map, u));
    s->refs[u] = 0;
    c->used_units--;
  }
  for (size_t i = 0; i < m->hdls.n; i++) {
    struct new_runs *r = AT(m->hdls, struct new_runs, i);
    struct vm_hdl *h = &c->hdls[r->handle];
    struct vm_run *old = h->runs;
    h->runs = r->runs;
    h->nruns = r->n;
    h->busy = false;
    r->runs = old;
  }
}

/* Checks, marks and takes, unless the slab stays; *full: because there is no room. Lock held. */
static int prepare(struct vm_move *m, const struct survey *v, bool *full) {
  struct vm_ctx *c = m->c;
  struct vm_slab *s = m->from;
  bool known;
  int err = count_references(c, s, v, &known);
  m->stays = !known;
  if (err || m->stays) return err;
  if (!(m->to = vm_calloc(c, s->units, sizeof(*m->to)))) return -ENOMEM;
  vm_pool_set_aside(s);
  err = take_all(m);
  *full = m->stays;
  if (err || m->stays) return err;
  err = plan_addresses(m, v);
  if (!err) err = plan_handles(m, v);
  if (!err) err = vm_plan_room(c, &m->plan);
  if (!err) err = vm_plan_bind_room(c, &m->plan);
  return err;
}

/* What is left of a move that came to nothing. Lock held, let go for the driver. */
static void take_back(struct vm_move *m, bool written) {
  struct vm_ctx *c = m->c;
  for (size_t i = 0; i < m->hdls.n; i++) c->hdls[AT(m->hdls, struct new_runs, i)->handle].busy = false;
  if (!written) give_back_taken(m);
  if (m->from->evacuating) vm_pool_put_back(m->from);
}

/* Our reference of the new pages. Lock held, let go for the driver. */
static void put_taken(struct vm_move *m) {
  for (size_t i = 0; i < m->taken.n; i++) {
    struct vm_run *r = AT(m->taken, struct vm_run, i);
    vm_units_put(m->c, r->slab, r->unit, r->n);
  }
}

static void move_free(struct vm_move *m) {
  for (size_t i = 0; i < m->hdls.n; i++) free(AT(m->hdls, struct new_runs, i)->runs);
  free(m->hdls.v);
  free(m->taken.v);
  free(m->to);
}

/* Empties one slab and gives it back, unless it stays: then, and after an error, nothing has changed. Lock held, let go
 * for the driver. */
static int evacuate(struct vm_ctx *c, struct vm_slab *s, const struct survey *v, bool *full, uint64_t *freed) {
  struct vm_move m = {.c = c, .from = s, .plan = {.keep = VMEM_KEEP_ALL, .move = &m}};
  struct vm_fill *none;
  uint64_t bytes = s->bytes;
  bool written = false;
  int err = prepare(&m, v, full);
  pthread_mutex_unlock(&c->lock);
  if (!err && !m.stays && !(err = plan_copies(&m))) {
    written = true;
    err = vm_plan_run(c, &m.plan, NULL, 0, &none); /* which clears the plan, or cancels it */
  } else {
    VM_UNDO(vm_plan_cancel(c, &m.plan));
  }
  pthread_mutex_lock(&c->lock);
  if (err || m.stays) {
    struct vmem_error why;
    vm_error_save(&why);
    take_back(&m, written);
    if (written) put_taken(&m);
    vm_error_restore(&why);
  } else {
    put_taken(&m);
    vm_slab_forget(c, s);
    pthread_mutex_unlock(&c->lock);
    if (!vm_slab_destroy(c, s)) *freed += bytes;
    pthread_mutex_lock(&c->lock);
  }
  move_free(&m);
  return err;
}

/* ---- all of them ----------------------------------------------------------------------------- */

/* Lock held, let go for the driver. */
static int compact_all(struct vm_ctx *c, uint64_t want, uint64_t *freed) {
  struct survey v = {0};
  const struct vm_pool *full[VM_POOLS];
  size_t nfull = 0;
  int err = look(c, &v);
  for (size_t i = 0; i < v.victims.n && !err && *freed < want && !c->closing; i++) {
    const struct victim *e = AT(v.victims, struct victim, i);
    struct vm_slab *s = e->index < c->nslabs && c->slabs[e->index] == e->slab ? e->slab : NULL;
    uint64_t free_bytes;
    bool known = false, no_room = false;
    if (!s || !worth_it(s) || s->units != e->units) continue;
    for (size_t k = 0; k < nfull; k++) known |= full[k] == s->pool;
    free_bytes = vm_pool_free_units(c) << c->shift;
    if (known || free_bytes < s->bytes || free_bytes - s->bytes < c->opts.pool_low) continue;
    err = evacuate(c, s, &v, &no_room, freed);
    if (no_room) full[nfull++] = s->pool;
  }
  survey_free(&v);
  return err;
}

static int compact(struct vm_ctx *c, uint64_t want, uint64_t *freed) {
  int err;
  pthread_mutex_lock(&c->lock);
  while (c->compacting) pthread_cond_wait(&c->done_cond, &c->lock);
  c->compacting = true;
  vm_clean_hold(c);
  err = compact_all(c, want, freed);
  vm_clean_release(c);
  c->compacting = false;
  pthread_cond_broadcast(&c->done_cond);
  pthread_mutex_unlock(&c->lock);
  return err;
}

/* The empty slabs first, which cost nothing. */
static uint64_t trim(struct vm_ctx *c, uint64_t want) {
  uint64_t have, keep;
  pthread_mutex_lock(&c->lock);
  have = vm_pool_free_units(c) << c->shift;
  pthread_mutex_unlock(&c->lock);
  want = want > UINT64_MAX - c->info.pub.slab_size ? UINT64_MAX : want + c->info.pub.slab_size - c->granule;
  keep = have > want ? have - want : 0;
  return vm_pool_trim(c, keep > c->opts.pool_low ? keep : c->opts.pool_low, true);
}

VMEM_API int vmem_compact(vmem_t vm, uint64_t want, const struct vmem_after *after, size_t num_after, uint32_t flags,
                          uint64_t *freed) {
  int err;
  struct vm_ctx *c = vm_get(vm, "vmem_compact", &err);
  struct vm_deps deps;
  uint64_t n = 0;
  if (!c) return err;
  if (flags)
    err = vm_fail(-EINVAL, "unknown flags 0x%x", flags);
  else if (num_after && !after)
    err = vm_fail(-EINVAL, "NULL argument");
  else if (!(err = vm_deps_make(c, after, num_after, &deps))) {
    if (!(err = vm_deps_wait(c, &deps)) && want) {
      n = trim(c, want);
      err = compact(c, want, &n);
      if (vm_recount(c, err)) err = compact(c, want, &n);
    }
    VM_UNDO(vm_deps_put(c, &deps));
  }
  if (freed) *freed = n;
  vm_put(c);
  return err;
}
