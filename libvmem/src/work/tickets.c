/* SPDX-License-Identifier: MIT */
/*
 * Tickets: a result is kept from its batch's submit until vmem_ticket_drop, however many batches
 * follow.
 *
 * A hash table finds kept tickets by number; they are also in a list, oldest first. A detached
 * ticket is in neither: it lives as long as its batch. Numbers count up, so the table's chains are evenly filled.
 */
#include <stdlib.h>

#include "base/clock.h"
#include "base/probe.h"
#include "work/work.h"

#define FIRST_SLOTS 64u

static struct vm_ticket **slot_of(struct vm_ctx *c, vmem_ticket id) {
  return &c->work->tickets[id & (c->work->ticket_slots - 1)];
}

/* Lock held. */
static void put(struct vm_ticket *t) {
  if (--t->refs) return;
  free(t->why);
  free(t);
}

/* ---- creating ---------------------------------------------------------------------------------- */

/* Lock held. */
static int make_room(struct vm_ctx *c) {
  size_t slots = c->work->ticket_slots ? 2 * c->work->ticket_slots : FIRST_SLOTS;
  struct vm_ticket **old = c->work->tickets, **v;
  if (c->work->kept_tickets < c->work->ticket_slots) return 0;
  if (!(v = vm_calloc(c, slots, sizeof(*v)))) return -ENOMEM;
  c->work->tickets = v;
  c->work->ticket_slots = slots;
  for (struct vm_ticket *t = c->work->oldest_ticket; t; t = t->next) {
    struct vm_ticket **slot = slot_of(c, t->id);
    t->chain = *slot;
    *slot = t;
  }
  free(old);
  return 0;
}

/* Lock held. A finished ticket exists, because far fewer batches can be unfinished than tickets can be kept. */
static vmem_ticket oldest_result(struct vm_ctx *c) {
  struct vm_ticket *t = c->work->oldest_ticket;
  while (t && t->state != TICKET_DONE) t = t->next;
  return t ? t->id : 0;
}

static int check_limits(struct vm_ctx *c, bool detached) {
  vmem_ticket oldest;
  if (c->closing) return vm_fail(-EBADF, "the context is being closed");
  if (c->work->pending >= VMEM_MAX_PENDING)
    return vm_fail_at(-EAGAIN, 0, c->work->pending, VMEM_MAX_PENDING, "%llu batches are unfinished; the limit is %d",
                      (unsigned long long)c->work->pending, VMEM_MAX_PENDING);
  if (detached || c->work->kept_tickets < VMEM_MAX_TICKETS) return 0;
  oldest = oldest_result(c);
  return vm_fail_at(-ENOBUFS, 0, oldest, VMEM_MAX_TICKETS,
                    "%llu tickets are not dropped; the limit is %d. The oldest whose batch is finished is ticket %llu",
                    (unsigned long long)c->work->kept_tickets, VMEM_MAX_TICKETS, (unsigned long long)oldest);
}

int vm_ticket_new(struct vm_ctx *c, bool detached, struct vm_ticket **out) {
  struct vm_ticket *t = vm_calloc(c, 1, sizeof(*t));
  int err = -ENOMEM;
  if (!t) return err;
  if (detached || (t->why = vm_calloc(c, 1, sizeof(*t->why)))) {
    pthread_mutex_lock(&c->lock);
    err = check_limits(c, detached);
    if (!err && !detached) err = make_room(c);
    if (!err) {
      c->work->pending++;
      c->work->kept_tickets += !detached;
    }
    pthread_mutex_unlock(&c->lock);
  }
  t->kept = !detached;
  t->refs = 1;
  if (err)
    put(t);
  else
    *out = t;
  return err;
}

void vm_ticket_cancel(struct vm_ctx *c, struct vm_ticket *t) {
  pthread_mutex_lock(&c->lock);
  c->work->pending--;
  c->work->kept_tickets -= t->kept;
  put(t);
  pthread_mutex_unlock(&c->lock);
}

vmem_ticket vm_ticket_issue(struct vm_ctx *c, struct vm_ticket *t) {
  struct vm_ticket **slot;
  t->id = ++c->work->last_ticket;
  if (!t->kept) return 0;
  slot = slot_of(c, t->id);
  t->chain = *slot;
  *slot = t;
  t->prev = c->work->newest_ticket;
  *(t->prev ? &t->prev->next : &c->work->oldest_ticket) = t;
  c->work->newest_ticket = t;
  t->refs++;
  return t->id;
}

/* Lock held. */
static void forget(struct vm_ctx *c, struct vm_ticket *t) {
  struct vm_ticket **link = slot_of(c, t->id);
  while (*link != t) link = &(*link)->chain;
  *link = t->chain;
  *(t->prev ? &t->prev->next : &c->work->oldest_ticket) = t->next;
  *(t->next ? &t->next->prev : &c->work->newest_ticket) = t->prev;
  c->work->kept_tickets--;
  t->kept = false;
  put(t);
}

void vm_tickets_free(struct vm_ctx *c) {
  while (c->work->oldest_ticket) forget(c, c->work->oldest_ticket);
  free(c->work->tickets);
  c->work->tickets = NULL;
}

/* ---- the batch's progress ------------------------------------------------------------------------ */

void vm_ticket_mapped(struct vm_ctx *c, struct vm_ticket *t, struct vm_fill *fill) {
  t->fill = fill;
  t->state = TICKET_MAPPED;
  pthread_cond_broadcast(&c->done_cond);
}

void vm_ticket_done(struct vm_ctx *c, struct vm_ticket *t, int result) {
  t->result = result;
  t->fill = NULL;
  t->state = TICKET_DONE;
  if (result && t->why) {
    vm_error_save(t->why);
  } else {
    free(t->why);
    t->why = NULL;
  }
  c->work->pending--;
  VM_PROBE3(done, c, t->id, result);
  pthread_cond_broadcast(&c->done_cond);
  put(t);
}

/* ---- waiting ------------------------------------------------------------------------------------- */

static int dropped(vmem_ticket id) { return vm_fail(-EBADF, "ticket %llu was dropped", (unsigned long long)id); }

/* Lock held. */
static struct vm_ticket *find(struct vm_ctx *c, vmem_ticket id, int *err) {
  struct vm_ticket *t = c->work->tickets ? *slot_of(c, id) : NULL;
  while (t && t->id != id) t = t->chain;
  if (t) return t;
  if (id && id <= c->work->last_ticket)
    *err = dropped(id);
  else
    *err = vm_fail(-EBADF, "%llu is not a ticket: no batch of this context has that number", (unsigned long long)id);
  return NULL;
}

/* Waits until the batch reaches `state`; returns the result if finished. Lock held. */
static int reach(struct vm_ctx *c, struct vm_ticket *t, enum vm_ticket_state state, int64_t timeout_ns) {
  uint64_t deadline = timeout_ns > 0 && t->state < state ? vm_now_ns() + (uint64_t)timeout_ns : 0;
  struct timespec ts = vm_timespec(deadline);
  bool late = !timeout_ns;
  while (t->state < state) {
    if (c->closing)
      return vm_fail(-EBADF, "the context was closed while waiting for ticket %llu", (unsigned long long)t->id);
    if (!t->kept) return dropped(t->id);
    if (late)
      return vm_fail_at(-ETIMEDOUT, 0, t->id, (uint64_t)timeout_ns, "ticket %llu is not finished after %lld ns",
                        (unsigned long long)t->id, (long long)timeout_ns);
    if (timeout_ns < 0)
      pthread_cond_wait(&c->done_cond, &c->lock);
    else
      late = pthread_cond_timedwait(&c->done_cond, &c->lock, &ts) == ETIMEDOUT;
  }
  if (t->state == TICKET_DONE && t->result) vm_error_restore(t->why);
  return t->state == TICKET_DONE ? t->result : 0;
}

int vm_ticket_wait(struct vm_ctx *c, vmem_ticket id, int64_t timeout_ns) {
  struct vm_ticket *t;
  int err = 0;
  pthread_mutex_lock(&c->lock);
  if ((t = find(c, id, &err))) {
    t->refs++;
    err = reach(c, t, TICKET_DONE, timeout_ns);
    put(t);
  }
  pthread_mutex_unlock(&c->lock);
  return err;
}

int vm_ticket_order(struct vm_ctx *c, vmem_ticket id, uint64_t stream) {
  struct vm_fill *fill = NULL;
  struct vm_ticket *t;
  int err = 0;
  pthread_mutex_lock(&c->lock);
  if ((t = find(c, id, &err))) {
    t->refs++;
    err = reach(c, t, TICKET_MAPPED, -1);
    if (!err && (fill = t->fill)) fill->refs++;
    put(t);
  }
  pthread_mutex_unlock(&c->lock);
  if (fill) {
    err = c->be->stream_wait(c->bes, stream, fill->event);
    vm_fill_put(c, fill);
  }
  return err;
}

int vm_ticket_drop(struct vm_ctx *c, vmem_ticket id) {
  struct vm_ticket *t;
  int err = 0;
  pthread_mutex_lock(&c->lock);
  if ((t = find(c, id, &err))) {
    if (t->state != TICKET_DONE) pthread_cond_broadcast(&c->done_cond); /* no thread waits for a dropped ticket */
    forget(c, t);
  }
  pthread_mutex_unlock(&c->lock);
  return err;
}
