/* SPDX-License-Identifier: MIT */
#include <stdlib.h>

#include "phys/phys.h"

struct vm_fill *vm_fill_new(struct vm_ctx *c, size_t nruns) {
  struct vm_fill *f = vm_calloc(c, 1, sizeof(*f) + nruns * sizeof(f->runs[0]));
  if (f) f->refs = 1;
  return f;
}

static void mark(const struct vm_fill *f, bool running) {
  for (size_t i = 0; i < f->nruns; i++) vm_units_set_filling(f->runs[i].slab, f->runs[i].unit, f->runs[i].n, running);
}

void vm_fill_begin(struct vm_ctx *c, struct vm_fill *f, vm_event event) {
  f->event = event;
  mark(f, true);
  f->next = c->phys->fills;
  c->phys->fills = f;
}

static bool runs_on(const struct vm_fill *f, const struct vm_slab *s, uint32_t unit) {
  for (size_t i = 0; i < f->nruns; i++)
    if (f->runs[i].slab == s && unit >= f->runs[i].unit && unit - f->runs[i].unit < f->runs[i].n) return true;
  return false;
}

struct vm_fill *vm_fill_on(struct vm_ctx *c, const struct vm_slab *s, uint32_t unit, uint32_t n) {
  uint32_t skip = c->phys->fills ? vm_bits_run(s->fill_map, unit, n, false) : n;
  if (skip == n) return NULL;
  for (struct vm_fill *f = c->phys->fills; f; f = f->next)
    if (!f->over && runs_on(f, s, unit + skip)) return f;
  return NULL;
}

/* Lock held. */
static void end(struct vm_ctx *c, struct vm_fill *f, int result) {
  if (f->over) return; /* another thread has ended it */
  f->over = true;
  f->result = result;
  mark(f, false);
  if (f->ended) f->ended(c, f->owner, result);
}

/* Lock held; dropped around driver calls. */
static void put(struct vm_ctx *c, struct vm_fill *f) {
  if (--f->refs) return;
  pthread_mutex_unlock(&c->lock);
  c->be->event_put(c->bes, f->event);
  free(f);
  pthread_mutex_lock(&c->lock);
}

void vm_fill_put(struct vm_ctx *c, struct vm_fill *f) {
  pthread_mutex_lock(&c->lock);
  put(c, f);
  pthread_mutex_unlock(&c->lock);
}

int vm_fill_wait(struct vm_ctx *c, struct vm_fill *f) {
  int err = c->be->event_wait(c->bes, f->event);
  pthread_mutex_lock(&c->lock);
  end(c, f, err);
  put(c, f);
  pthread_mutex_unlock(&c->lock);
  return err;
}

bool vm_fills_poll(struct vm_ctx *c) {
  struct vm_fill **link = &c->phys->fills, *f;
  bool any = false;
  pthread_mutex_lock(&c->lock);
  while ((f = *link)) {
    int err = 0;
    if (!f->over) {
      pthread_mutex_unlock(&c->lock);
      err = c->be->event_query(c->bes, f->event);
      pthread_mutex_lock(&c->lock);
    }
    if (err == -EAGAIN && !f->over) {
      link = &f->next;
      continue;
    }
    end(c, f, err);
    *link = f->next;
    put(c, f);
    any = true;
  }
  pthread_mutex_unlock(&c->lock);
  return any;
}

void vm_fills_finish(struct vm_ctx *c) {
  pthread_mutex_lock(&c->lock);
  while (c->phys->fills) {
    struct vm_fill *f = c->phys->fills;
    f->refs++;
    pthread_mutex_unlock(&c->lock);
    vm_fill_wait(c, f);
    pthread_mutex_lock(&c->lock);
    c->phys->fills = f->next;
    put(c, f);
  }
  pthread_mutex_unlock(&c->lock);
}
