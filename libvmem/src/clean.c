/* SPDX-License-Identifier: MIT */
/*
 * clean.c - pages are zeroed while nobody can see them: through a mapping of the whole slab at addresses of the
 * context's own (its alias), made when the first page of the slab is to be zeroed and kept as long as the slab.
 *
 * A page whose last reference goes is dirty, unless the back end has discarded its memory (host). The worker zeroes
 * dirty free pages in batches, one at a time, and the pool hands them out last. A plan that gets one nevertheless
 * claims it and zeroes it before it maps it (vm_plan_zero). If the alias cannot be made, or the fill fails, that plan
 * fails: a page is never mapped with old contents but where the caller asked for that (VMEM_OP_DIRTY).
 *
 * A page that the batch in flight zeroes may be taken. Whoever is to map it, even dirty, claims it, waits until the
 * batch's fill has been started, and starts another behind it in the same order of work: when that is over so is the
 * first. The end of the batch leaves the state of such a page alone.
 */
#include "work/work.h"

#define CLEAN_BYTES (256ull << 20) /* of a batch: about 0.1 ms of a GPU's memory bandwidth */

/* ---- aliases --------------------------------------------------------------------------------- */

/* Lock held, let go for the driver. */
static int make_alias(struct vm_ctx *c, struct vm_slab *s, uint32_t kind) {
  struct vm_be_load load = {c->segments, 2};
  uint64_t addr, priv, limit = c->info.pub.max_mappings, now = c->mappings + c->alias_mappings + c->planned_mappings;
  int err = c->be->room ? c->be->room(c->bes, &load) : 0;
  if (!err && limit && now + 1 > limit)
    err = vm_fail_at(-ENOSPC, 0, s->bytes, limit,
                     "%llu mappings and one of a slab, to zero its pages, exceed the %llu that this context may have",
                     (unsigned long long)now, (unsigned long long)limit);
  if (err) return err;
  s->alias_making = true;
  c->planned_mappings++;
  pthread_mutex_unlock(&c->lock);
  err = vm_drv_alias(c, s, kind, &addr, &priv);
  pthread_mutex_lock(&c->lock);
  c->planned_mappings--;
  s->alias_making = false;
  pthread_cond_broadcast(&c->done_cond);
  if (err) return err;
  s->alias = addr;
  s->alias_priv = priv;
  c->alias_mappings++;
  return 0;
}

static int try_alias(struct vm_ctx *c, struct vm_slab *s, uint32_t kind) {
  int err = 0;
  pthread_mutex_lock(&c->lock);
  while (s->alias_making) pthread_cond_wait(&c->done_cond, &c->lock);
  if (!s->alias) err = make_alias(c, s, kind);
  pthread_mutex_unlock(&c->lock);
  return err;
}

int vm_slab_alias(struct vm_ctx *c, struct vm_slab *s, uint32_t kind) {
  int err = try_alias(c, s, kind);
  return vm_recount(c, err) ? try_alias(c, s, kind) : err;
}

static struct vm_be_range through_alias(const struct vm_ctx *c, const struct vm_run *r) {
  return (struct vm_be_range){r->slab->alias + ((uint64_t)r->unit << c->shift), (uint64_t)r->n << c->shift};
}

/* ---- a plan's pages -------------------------------------------------------------------------- */

/* Calls run in order on one stream: the last event covers all. */
static void follow(struct vm_ctx *c, vm_event *last, vm_event e) {
  if (*last) c->be->event_put(c->bes, *last);
  *last = e;
}

int vm_plan_aliases(struct vm_ctx *c, struct vm_plan *p) {
  const struct vm_run *runs = p->zeros.v;
  int err = 0;
  for (size_t i = 0; i < p->zeros.n && !err; i++) err = vm_slab_alias(c, runs[i].slab, VMEM_INJECT_SLAB);
  return err;
}

static int zero_begin(struct vm_ctx *c, struct vm_plan *p) {
  const struct vm_run *runs = p->zeros.v;
  int err = vm_plan_aliases(c, p);
  if (err) return err;
  pthread_mutex_lock(&c->lock);
  while (c->clean.issuing) pthread_cond_wait(&c->done_cond, &c->lock);
  pthread_mutex_unlock(&c->lock);
  for (size_t i = 0; i < p->zeros.n && !err;) {
    struct vm_be_range r[64];
    size_t n = 0;
    vm_event e = 0;
    while (n < 64 && i < p->zeros.n) r[n++] = through_alias(c, &runs[i++]);
    err = vm_drv_fill(c, r, n, 0, NULL, 0, &e);
    if (!err) follow(c, &p->zero_event, e);
  }
  return err;
}

int vm_plan_zero(struct vm_ctx *c, struct vm_plan *p, bool *over) {
  int err = 0;
  if (over) *over = false;
  if (!p->zeroing && p->zeros.n) {
    p->zeroing = true;
    if ((err = zero_begin(c, p))) return err;
  }
  if (p->zero_event && over) {
    err = c->be->event_query(c->bes, p->zero_event);
    if (err == -EAGAIN) return 0;
    follow(c, &p->zero_event, 0);
  } else if (p->zero_event) {
    err = vm_event_finish(c, &p->zero_event);
  }
  if (err) return err;
  p->zeroed = true;
  if (over) *over = true;
  return 0;
}

/* ---- the background -------------------------------------------------------------------------- */

void vm_clean_want(struct vm_ctx *c) {
  if (!c->clean.background || c->clean.wanted) return;
  c->clean.wanted = true;
  pthread_cond_signal(&c->work_cond);
}

/* Without a worker the pages are zeroed by those who take them. */
void vm_clean_start(struct vm_ctx *c) {
  bool start;
  if (!c->clean.background) return;
  pthread_mutex_lock(&c->lock);
  start = c->clean.wanted && !c->worker_started && !c->closing;
  pthread_mutex_unlock(&c->lock);
  if (start) VM_UNDO(vm_worker_start(c));
}

/* The batch is over, or has failed: then its pages are as dirty as they were. Lock held. */
static void end_batch(struct vm_ctx *c, int err) {
  struct vm_clean *k = &c->clean;
  for (uint32_t i = 0; i < k->n; i++) {
    struct vm_run *r = &k->runs[i];
    for (uint32_t u = r->unit; u < r->unit + r->n; u++) {
      /* A plan that has claimed the unit zeroes it again, and says so itself; it may have done so by now. */
      if (!err && vm_bit(r->slab->zero_map, u) && !vm_bit(r->slab->claim_map, u)) vm_bits_set(r->slab->dirty_map, u, 1, false);
      vm_bits_set(r->slab->zero_map, u, 1, false);
    }
    r->slab->cleaning--;
    if (err) continue;
    for (uint32_t u = r->unit, n; u < r->unit + r->n; u += n) {
      bool dirty = vm_bit(r->slab->dirty_map, u);
      n = vm_bits_run(r->slab->dirty_map, u, r->unit + r->n - u, dirty);
      if (!dirty) vm_pool_cleaned(c, r->slab, u, n);
    }
  }
  k->n = 0;
  k->ended = true;
  if (err) k->wanted = false; /* until the next page comes back */
  pthread_cond_broadcast(&c->done_cond);
}

/* Ends the batch in flight: 0 when there is none any more, -EAGAIN when it runs on. Lock held, let go. */
static int retire(struct vm_ctx *c, bool wait) {
  struct vm_clean *k = &c->clean;
  vm_event e;
  int err;
  if (!k->n) return 0;
  if (k->issuing || k->retiring) {
    if (!wait) return -EAGAIN;
    pthread_cond_wait(&c->done_cond, &c->lock);
    return -EAGAIN;
  }
  k->retiring = true;
  e = k->event;
  pthread_mutex_unlock(&c->lock);
  err = !e ? 0 : wait ? c->be->event_wait(c->bes, e) : c->be->event_query(c->bes, e);
  if (e && err != -EAGAIN) c->be->event_put(c->bes, e);
  pthread_mutex_lock(&c->lock);
  k->retiring = false;
  if (err != -EAGAIN) {
    k->event = 0;
    end_batch(c, err);
    return 0;
  }
  pthread_cond_broadcast(&c->done_cond);
  return err;
}

void vm_clean_hold(struct vm_ctx *c) {
  c->clean.hold++;
  while (retire(c, true)) {
  }
}

void vm_clean_release(struct vm_ctx *c) {
  if (!--c->clean.hold && (c->clean.wanted || c->clean.ended)) pthread_cond_signal(&c->work_cond);
}

static int issue(struct vm_ctx *c, const struct vm_run *runs, uint32_t n, vm_event *event) {
  struct vm_be_range r[CLEAN_RUNS];
  int err = 0;
  for (uint32_t i = 0; i < n && !err; i++) {
    err = vm_slab_alias(c, runs[i].slab, VMEM_INJECT_CLEAN);
    if (!err) r[i] = through_alias(c, &runs[i]);
  }
  return err ? err : vm_drv_clean(c, r, n, event);
}

bool vm_clean_step(struct vm_ctx *c) {
  struct vm_clean *k = &c->clean;
  uint32_t units = (uint32_t)vm_units_up(c, CLEAN_BYTES);
  bool trim;
  if (!k->background) return false;
  pthread_mutex_lock(&c->lock);
  retire(c, false);
  if (k->wanted && !k->n && !k->hold) {
    for (size_t i = 0; i < VM_POOLS && k->n < CLEAN_RUNS && units; i++)
      if (c->pools[i].slist) k->n += vm_pool_pick_dirty(&c->pools[i], k->runs + k->n, CLEAN_RUNS - k->n, &units);
    if (!k->n) k->wanted = false;
  }
  if (k->n && !k->event && !k->retiring) {
    vm_event e = 0;
    int err;
    k->issuing = true;
    pthread_mutex_unlock(&c->lock);
    err = issue(c, k->runs, k->n, &e);
    pthread_mutex_lock(&c->lock);
    k->issuing = false;
    k->event = e;
    if (err || !k->event) end_batch(c, err);
    pthread_cond_broadcast(&c->done_cond);
  }
  units = k->n;
  trim = k->ended;
  k->ended = false;
  pthread_mutex_unlock(&c->lock);
  /* Slabs that were being zeroed were passed over. */
  if (trim) vm_pool_trim(c, c->opts.pool_high, false);
  return units;
}
