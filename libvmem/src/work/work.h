/* SPDX-License-Identifier: MIT */
/* work.h - batches that run later: their tickets, what they wait for, and the thread that runs them. */
#ifndef VMEM_WORK_H
#define VMEM_WORK_H

#include "plan/plan.h"

/* ---- tickets.c: results of submitted batches ---------------------------------------------------- */

enum vm_ticket_state { TICKET_QUEUED, TICKET_MAPPED, TICKET_DONE };

/* Protected by vm_ctx.lock. */
struct vm_ticket {
  vmem_ticket id;                /* immutable */
  struct vm_ticket *chain;       /* hash chain in the table */
  struct vm_ticket *prev, *next; /* links in the table: older, newer */
  bool kept;                     /* is in the table: neither detached nor dropped */
  enum vm_ticket_state state;
  uint32_t refs; /* held by the unfinished batch, the table and waiting threads */
  int result;
  struct vm_fill *fill;   /* while MAPPED: the fill that runs on */
  struct vmem_error *why; /* allocated up front, kept if the result is an error */
};

/* Creates the ticket of a batch that is about to be submitted. Fails with -EAGAIN, -ENOBUFS or -ENOMEM before anything
 * else has been done. Lock not held. */
int vm_ticket_new(struct vm_ctx *c, bool detached, struct vm_ticket **out);
/* Discards the ticket of a batch that will not be submitted. Lock not held. */
void vm_ticket_cancel(struct vm_ctx *c, struct vm_ticket *t);
/* Gives the ticket the next number, and a reference for its batch, which vm_ticket_done drops. Lock held. */
vmem_ticket vm_ticket_issue(struct vm_ctx *c, struct vm_ticket *t);
/* Marks the batch as complete except for its fill. Lock held. */
void vm_ticket_mapped(struct vm_ctx *c, struct vm_ticket *t, struct vm_fill *fill);
/* Marks the batch as finished. If `result` is an error, it is the one recorded in this thread. Lock held. */
void vm_ticket_done(struct vm_ctx *c, struct vm_ticket *t, int result);
void vm_tickets_free(struct vm_ctx *c); /* no thread may be waiting for a ticket */

/* vmem_wait, vmem_order, vmem_ticket_drop. Lock not held. */
int vm_ticket_wait(struct vm_ctx *c, vmem_ticket id, int64_t timeout_ns);
int vm_ticket_order(struct vm_ctx *c, vmem_ticket id, uint64_t stream);
int vm_ticket_drop(struct vm_ctx *c, vmem_ticket id);

/* ---- dependencies.c: GPU work to wait for ------------------------------------------------------- */

#define VM_INLINE_DEPS 4u

/* Points into itself: must not be copied or moved. */
struct vm_deps {
  vm_event *events, few_events[VM_INLINE_DEPS];
  int *fds, few_fds[VM_INLINE_DEPS];
  size_t nevents, nfds;
};

/* On failure there is nothing to put. */
int vm_deps_make(struct vm_ctx *c, const struct vmem_after *after, size_t n, struct vm_deps *d);
int vm_deps_poll(struct vm_ctx *c, struct vm_deps *d, bool events_too); /* 0, -EAGAIN or an error */
int vm_deps_wait(struct vm_ctx *c, struct vm_deps *d);
void vm_deps_put(struct vm_ctx *c, struct vm_deps *d);

/* ---- worker.c (lock not held) ------------------------------------------------------------------- */

int vm_submit(struct vm_ctx *c, const struct vmem_op *ops, size_t n, const struct vmem_after *after, size_t num_after,
              uint32_t flags, vmem_ticket *ticket);
int vm_worker_start(struct vm_ctx *c);
/* Wakes or starts the worker for work of a lower layer. Without a worker, pages are zeroed by the plan that takes
 * them. */
void vm_worker_wake(struct vm_ctx *c);
void vm_worker_stop(struct vm_ctx *c);

/* ---- the layer's state -------------------------------------------------------------------------- */

struct vm_job;

struct vm_work {
  bool worker_started, worker_stop;
  pthread_t worker;
  struct vm_job *queue, **queue_tail;
  struct vm_job *waiting, **waiting_tail; /* used only by the worker */
  uint64_t pending;                       /* unfinished batches, submitted or about to be */
  vmem_ticket last_ticket;
  struct vm_ticket **tickets; /* table of kept tickets; ticket_slots is a power of two */
  size_t ticket_slots;
  uint64_t kept_tickets; /* includes tickets about to be issued */
  struct vm_ticket *oldest_ticket, *newest_ticket;
};

void vm_work_init(struct vm_ctx *c);

#endif
