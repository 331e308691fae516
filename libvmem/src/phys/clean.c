/* SPDX-License-Identifier: MIT */
/*
 * Zeroing, through the slabs' aliases.
 *
 * A page whose last reference is dropped is dirty, unless the back end has discarded its memory (host). The worker
 * zeroes dirty free pages in batches, one at a time, and the pool hands them out last. A plan that still
 * gets one claims it and zeroes it before mapping it. If the alias cannot be mapped, or the fill
 * fails, that plan fails: a page is mapped with old contents only if the caller asked for that
 * (VMEM_OP_DIRTY).
 *
 * A page that the batch in flight is zeroing may be taken. The plan that maps it (even with VMEM_OP_DIRTY) claims
 * it, waits until the batch's fill has been started, and starts another fill, which the back end runs
 * after the batch's: when the plan's fill is done, so is the batch's. The end of the batch does not change the
 * state of such a page.
 */
#include "phys/phys.h"

#define CLEAN_BYTES (256ull << 20) /* limit of a batch: about 0.1 ms of a GPU's memory bandwidth */

static struct vm_be_range through_alias(const struct vm_ctx *c, const struct vm_run *r) {
  return (struct vm_be_range){vm_alias_addr(c, r->slab, r->unit), vm_bytes(c, r->n)};
}

int vm_zero_start(struct vm_ctx *c, const struct vm_run *runs, size_t n, vm_event *done) {
  int err = 0;
  for (size_t i = 0; i < n && !err; i++) err = vm_slab_alias(c, runs[i].slab, VMEM_INJECT_SLAB);
  if (err) return err;
  pthread_mutex_lock(&c->lock);
  while (c->phys->clean.issuing) pthread_cond_wait(&c->done_cond, &c->lock);
  pthread_mutex_unlock(&c->lock);
  for (size_t i = 0; i < n && !err;) {
    struct vm_be_range r[64];
    size_t k = 0;
    vm_event e = 0;
    while (k < 64 && i < n) r[k++] = through_alias(c, &runs[i++]);
    err = vm_drv_fill(c, VMEM_INJECT_FILL, r, k, 0, NULL, 0, &e);
    if (!err) vm_drv_event_follow(c, done, e);
  }
  return err;
}

/* Ends a batch; after a failure its pages stay dirty. Lock held. */
static void end_batch(struct vm_ctx *c, int err) {
  struct vm_clean *k = &c->phys->clean;
  for (uint32_t i = 0; i < k->n; i++) {
    struct vm_run *r = &k->runs[i];
    vm_units_end_zeroing(r->slab, r->unit, r->n, err);
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
  if (err) k->wanted = false; /* no retry until the next page returns to the pool */
  pthread_cond_broadcast(&c->done_cond);
}

/* Retires the batch in flight: 0 if none is left, -EAGAIN if it still runs. Lock held, but dropped during the wait. */
static int retire(struct vm_ctx *c, bool wait) {
  struct vm_clean *k = &c->phys->clean;
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
  c->phys->clean.hold++;
  while (retire(c, true)) {
  }
}

void vm_clean_release(struct vm_ctx *c) {
  if (!--c->phys->clean.hold && (c->phys->clean.wanted || c->phys->clean.ended)) pthread_cond_signal(&c->work_cond);
}

static int issue(struct vm_ctx *c, const struct vm_run *runs, uint32_t n, vm_event *event) {
  struct vm_be_range r[CLEAN_RUNS];
  int err = 0;
  for (uint32_t i = 0; i < n && !err; i++) {
    err = vm_slab_alias(c, runs[i].slab, VMEM_INJECT_CLEAN);
    if (!err) r[i] = through_alias(c, &runs[i]);
  }
  return err ? err : vm_drv_fill(c, VMEM_INJECT_CLEAN, r, n, 0, NULL, 0, event);
}

bool vm_clean_step(struct vm_ctx *c, bool *ended) {
  struct vm_clean *k = &c->phys->clean;
  uint32_t units = (uint32_t)vm_units_up(c, CLEAN_BYTES);
  *ended = false;
  if (!k->background) return false;
  pthread_mutex_lock(&c->lock);
  retire(c, false);
  if (k->wanted && !k->n && !k->hold) {
    for (size_t i = 0; i < VM_POOLS && k->n < CLEAN_RUNS && units; i++)
      if (c->phys->pools[i].slist)
        k->n += vm_pool_pick_dirty(&c->phys->pools[i], k->runs + k->n, CLEAN_RUNS - k->n, &units);
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
  *ended = k->ended;
  k->ended = false;
  pthread_mutex_unlock(&c->lock);
  return units;
}
