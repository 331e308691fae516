/* SPDX-License-Identifier: MIT */
/*
 * fills.h - fills that run on after their batch was committed.
 *
 * A fill writes its units until its event is over: the zeroing of new pages, or FILL operations, possibly behind
 * GPU work that never ends. Whoever takes such a unit away from an address, shows it at a second one, or reads,
 * copies or fills it waits for that fill; nobody else does. At most one fill runs on a unit, because a second one
 * waits like the others.
 *
 * Only the worker begins fills and takes them out of the context's list, so that it can walk the list with the lock
 * let go. Any thread may wait for one and mark it as over.
 */
#ifndef VMEM_FILLS_H
#define VMEM_FILLS_H

#include "internal.h"

struct vm_fill {
  struct vm_fill *next; /* in vm_ctx.fills; changed by the worker, under the lock */
  vm_event event;       /* immutable once it runs */
  uint32_t refs;        /* one of the list; one of each that uses it with the lock let go */
  bool over;
  /* Called once, with the lock held, and the error of `result` recorded in this thread. */
  void (*ended)(struct vm_ctx *c, void *owner, int result);
  void *owner;
  size_t nruns;
  struct vm_run runs[]; /* what it writes */
};

struct vm_fill *vm_fill_new(struct vm_ctx *c, size_t nruns); /* NULL: no heap */
/* The fill runs until `event` is over; the reference of vm_fill_new becomes the list's. Worker; lock held. */
void vm_fill_begin(struct vm_ctx *c, struct vm_fill *f, vm_event event);
/* A fill that is running on one of the units; NULL = none. Lock held: who lets it go takes a reference first. */
struct vm_fill *vm_fill_on(struct vm_ctx *c, const struct vm_slab *s, uint32_t unit, uint32_t n);
/* Waits in this thread, as long as it takes; gives the caller's reference back. 0, or what the fill ended with.
 * Lock not held. */
int vm_fill_wait(struct vm_ctx *c, struct vm_fill *f);
void vm_fill_put(struct vm_ctx *c, struct vm_fill *f); /* lock not held */
/* Ends the fills whose event is over; whether there was one. Worker; lock not held. */
bool vm_fills_poll(struct vm_ctx *c);
/* Waits for all. The worker has ended; lock not held. */
void vm_fills_finish(struct vm_ctx *c);

#endif
