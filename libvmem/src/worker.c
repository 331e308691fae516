/* SPDX-License-Identifier: MIT */
/*
 * The worker thread: runs submitted batches whose GPU work is over, first come first served.
 *
 * A job's ranges are busy from submit on, so no two queued jobs touch the same pages and the order of
 * those that wait for GPU work is free. A finished job whose fills still run on the GPU moves to
 * `filling` until their event is over; its ticket is TICKET_MAPPED meanwhile.
 */
#include <signal.h>
#include <stdlib.h>
#include <string.h>

#include "internal.h"

struct vm_job {
  struct vm_job *next;
  struct vm_plan plan;
  struct vm_deps deps;
  bool gpu_waits; /* only fills: their events go to the GPU, not to this thread */
  struct vm_ticket_slot *slot;
};

static struct vm_ticket_slot *slot_of(struct vm_ctx *c, vmem_ticket t) {
  return &c->tickets[t % VMEM_MAX_TICKETS];
}

/* ---- submitting ------------------------------------------------------------------------------ */

VMEM_API int vmem_submit(vmem_t vm, const struct vmem_op *ops, size_t n, const struct vmem_after *after,
                         size_t num_after, vmem_ticket *ticket) {
  int err;
  struct vm_ctx *c = vm_get(vm, "vmem_submit", &err);
  struct vm_job *job = NULL;
  struct vm_ticket_slot *slot;
  if (!c) return err;
  if (!ticket || (n && !ops) || (num_after && !after)) {
    err = vm_fail(-EINVAL, "NULL argument");
    goto out;
  }
  if (!(job = vm_calloc(c, 1, sizeof(*job)))) {
    err = -ENOMEM;
    goto out;
  }
  if ((err = vm_worker_start(c)) || (err = vm_deps_make(c, after, num_after, &job->deps))) goto out;
  if ((err = vm_plan_make(c, ops, n, &job->plan))) {
    vm_deps_put(c, &job->deps);
    goto out;
  }
  job->gpu_waits = vm_plan_only_fills(&job->plan);
  pthread_mutex_lock(&c->lock);
  slot = slot_of(c, c->next_ticket + 1);
  if (!c->closing && slot->state != TICKET_FREE && slot->state != TICKET_DONE) {
    err = vm_fail_at(-EAGAIN, 0, c->pending, VMEM_MAX_TICKETS, "%llu batches are unfinished",
                     (unsigned long long)c->pending);
  } else if (c->closing) {
    err = vm_fail(-EBADF, "the context is being closed");
  } else if (slot->pins) {
    err = vm_fail(-EAGAIN, "the ticket's place is in use");
  } else {
    *slot = (struct vm_ticket_slot){.ticket = ++c->next_ticket, .state = TICKET_QUEUED};
    *ticket = slot->ticket;
    job->slot = slot;
    c->pending++;
    *c->queue_tail = job;
    c->queue_tail = &job->next;
  }
  pthread_mutex_unlock(&c->lock);
  /* After the lock is let go, or the worker would wake only to wait for it. */
  if (!err) pthread_cond_signal(&c->work_cond);
  if (err) {
    struct vmem_error why;
    vm_error_save(&why);
    vm_plan_cancel(c, &job->plan);
    vm_deps_put(c, &job->deps);
    vm_error_restore(&why);
  } else {
    job = NULL;
  }
out:
  free(job);
  vm_put(c);
  return err;
}

/* ---- waiting --------------------------------------------------------------------------------- */

/* Lock held. The slot of a ticket, or NULL. */
static struct vm_ticket_slot *find_ticket(struct vm_ctx *c, vmem_ticket t, int *err) {
  struct vm_ticket_slot *s = c->tickets && t ? slot_of(c, t) : NULL;
  if (s && s->ticket == t && s->state != TICKET_FREE) return s;
  *err = vm_fail(-EBADF, t && t <= c->next_ticket ? "ticket %llu is too old" : "%llu is no ticket",
                 (unsigned long long)t);
  return NULL;
}

static int wait_state(struct vm_ctx *c, vmem_ticket t, enum vm_ticket_state state, int64_t timeout_ns,
                      struct vm_ticket_slot **out) {
  uint64_t deadline = vm_now_ns() + (uint64_t)(timeout_ns > 0 ? timeout_ns : 0);
  struct timespec ts = {(time_t)(deadline / 1000000000u), (long)(deadline % 1000000000u)};
  struct vm_ticket_slot *s;
  int err = 0;
  while ((s = find_ticket(c, t, &err)) && s->state < state) {
    if (c->closing) return vm_fail(-EBADF, "the context was closed while waiting for ticket %llu", (unsigned long long)t);
    if (timeout_ns < 0)
      pthread_cond_wait(&c->done_cond, &c->lock);
    else if (timeout_ns == 0 || pthread_cond_timedwait(&c->done_cond, &c->lock, &ts) == ETIMEDOUT)
      if (s->state < state)
        return vm_fail_at(-ETIMEDOUT, 0, t, (uint64_t)timeout_ns, "ticket %llu is not finished after %lld ns",
                          (unsigned long long)t, (long long)timeout_ns);
  }
  *out = s;
  return err;
}

VMEM_API int vmem_wait(vmem_t vm, vmem_ticket ticket, int64_t timeout_ns) {
  int err;
  struct vm_ctx *c = vm_get(vm, "vmem_wait", &err);
  struct vm_ticket_slot *s;
  if (!c) return err;
  pthread_mutex_lock(&c->lock);
  err = wait_state(c, ticket, TICKET_DONE, timeout_ns, &s);
  if (!err && (err = s->result)) vm_error_restore(&s->error);
  pthread_mutex_unlock(&c->lock);
  vm_put(c);
  return err;
}

VMEM_API int vmem_order(vmem_t vm, vmem_ticket ticket, uint64_t stream) {
  int err;
  struct vm_ctx *c = vm_get(vm, "vmem_order", &err);
  struct vm_ticket_slot *s;
  vm_event e = 0;
  if (!c) return err;
  pthread_mutex_lock(&c->lock);
  err = wait_state(c, ticket, TICKET_MAPPED, -1, &s);
  if (!err && (err = s->result)) vm_error_restore(&s->error);
  if (!err && s->state == TICKET_MAPPED && (e = s->fill_event)) s->pins++;
  pthread_mutex_unlock(&c->lock);
  if (e) {
    err = c->be->stream_wait(c->bes, stream, e);
    pthread_mutex_lock(&c->lock);
    if (!--s->pins) pthread_cond_broadcast(&c->done_cond);
    pthread_mutex_unlock(&c->lock);
  }
  vm_put(c);
  return err;
}

/* ---- the thread ------------------------------------------------------------------------------ */

/* Lock held. */
static void ticket_done(struct vm_ctx *c, struct vm_ticket_slot *s, int result) {
  s->result = result;
  if (result) vm_error_save(&s->error);
  s->state = TICKET_DONE;
  c->pending--;
  pthread_cond_broadcast(&c->done_cond);
}

static void job_run(struct vm_ctx *c, struct vm_job *job) {
  vm_event event = 0;
  int err = vm_plan_run(c, &job->plan, job->gpu_waits ? job->deps.events : NULL,
                        job->gpu_waits ? job->deps.nevents : 0, &event);
  vm_deps_put(c, &job->deps);
  pthread_mutex_lock(&c->lock);
  if (!err && event) {
    c->landing--;
    job->slot->fill_event = event;
    job->slot->state = TICKET_MAPPED;
    job->next = c->filling;
    c->filling = job;
    job = NULL;
    pthread_cond_broadcast(&c->done_cond);
  } else {
    ticket_done(c, job->slot, err);
  }
  pthread_mutex_unlock(&c->lock);
  free(job);
}

/* Ends the fills whose event is over (all of them, waiting, with `wait`). Lock not held. Several threads
 * may be here; a job is taken out of the list by the one that ends it. */
static int retire_fills(struct vm_ctx *c, bool wait) {
  int worst = 0;
  pthread_mutex_lock(&c->lock);
  while (wait && c->landing) pthread_cond_wait(&c->done_cond, &c->lock);
  for (struct vm_job **link = &c->filling; *link;) {
    struct vm_job *job = *link;
    struct vm_ticket_slot *s = job->slot;
    vm_event e = s->fill_event;
    int err;
    s->pins++;
    pthread_mutex_unlock(&c->lock);
    err = wait ? c->be->event_wait(c->bes, e) : c->be->event_query(c->bes, e);
    pthread_mutex_lock(&c->lock);
    if (!--s->pins) pthread_cond_broadcast(&c->done_cond);
    /* The list may have changed: find the job again. (Nobody frees it while it was pinned.) */
    for (link = &c->filling; *link && *link != job; link = &(*link)->next) {
    }
    if (err == -EAGAIN) {
      if (*link) link = &job->next;
      continue;
    }
    if (err && !worst) worst = err;
    if (!*link) { /* another thread ended it */
      link = &c->filling;
      continue;
    }
    *link = job->next;
    while (s->pins) pthread_cond_wait(&c->done_cond, &c->lock);
    s->fill_event = 0;
    ticket_done(c, s, err);
    pthread_mutex_unlock(&c->lock);
    c->be->event_put(c->bes, e);
    free(job);
    pthread_mutex_lock(&c->lock);
    link = &c->filling;
  }
  pthread_mutex_unlock(&c->lock);
  return worst;
}

int vm_fills_finish(struct vm_ctx *c) { return retire_fills(c, true); }

/* Takes the first job that can run out of the queue; *waiting tells whether others wait for GPU work.
 * Only this thread removes jobs, so a job stays valid without the lock. */
static struct vm_job *next_job(struct vm_ctx *c, bool *waiting) {
  struct vm_job *job, *prev = NULL;
  *waiting = false;
  pthread_mutex_lock(&c->lock);
  for (job = c->queue; job; prev = job, job = job->next) {
    int err;
    pthread_mutex_unlock(&c->lock);
    vm_error_begin("vmem worker");
    /* New pages are nobody's yet: they are zeroed while the job waits for others' work. */
    err = vm_plan_zero(c, &job->plan, false);
    if (!err) err = vm_deps_poll(c, &job->deps, !job->gpu_waits);
    pthread_mutex_lock(&c->lock);
    if (err == -EAGAIN) {
      *waiting = true;
      continue;
    }
    if (prev)
      prev->next = job->next;
    else
      c->queue = job->next;
    if (c->queue_tail == &job->next) c->queue_tail = prev ? &prev->next : &c->queue;
    pthread_mutex_unlock(&c->lock);
    if (!err) return job;
    /* Work that cannot be waited for: nothing may change. */
    vm_deps_put(c, &job->deps);
    VM_UNDO(vm_plan_cancel(c, &job->plan));
    pthread_mutex_lock(&c->lock);
    ticket_done(c, job->slot, err);
    pthread_mutex_unlock(&c->lock);
    free(job);
    return next_job(c, waiting);
  }
  pthread_mutex_unlock(&c->lock);
  return NULL;
}

static void keep_low_watermark(struct vm_ctx *c) {
  uint64_t units = vm_units_up(c, c->opts.pool_low), have, id = 0;
  if (!units) return;
  pthread_mutex_lock(&c->lock);
  c->low = false;
  have = c->pools[0].free_units;
  pthread_mutex_unlock(&c->lock);
  /* Failure is no error here: whoever needs the memory will meet it. */
  if (have < units) vm_pool_grow(c, &c->pools[0], units - have, 0, 1, have, &id);
}

static void *thread(void *arg) {
  struct vm_ctx *c = arg;
  uint64_t nap = 20000;
  vm_drv_mark_worker();
  for (;;) {
    bool waiting, stop;
    struct vm_job *job = next_job(c, &waiting);
    waiting |= vm_clean_step(c);
    if (job) {
      vm_error_begin("vmem worker");
      job_run(c, job);
      nap = 20000;
      continue;
    }
    vm_error_begin("vmem worker");
    retire_fills(c, false);
    keep_low_watermark(c);
    pthread_mutex_lock(&c->lock);
    stop = c->worker_stop;
    if (!stop && (waiting || c->filling)) {
      /* GPU work is polled: 20 us at first, backing off to 1 ms. */
      uint64_t t = vm_now_ns() + nap;
      struct timespec ts = {(time_t)(t / 1000000000u), (long)(t % 1000000000u)};
      if (pthread_cond_timedwait(&c->work_cond, &c->lock, &ts) == ETIMEDOUT)
        nap = nap < 500000 ? nap * 2 : 1000000;
      else
        nap = 20000;
    } else if (!stop && !c->queue && !c->low && !(c->clean.wanted && !c->clean.hold)) {
      pthread_cond_wait(&c->work_cond, &c->lock);
      nap = 20000;
    }
    pthread_mutex_unlock(&c->lock);
    if (stop) return NULL;
  }
}

int vm_worker_start(struct vm_ctx *c) {
  sigset_t all, old;
  int err = 0;
  pthread_mutex_lock(&c->lock);
  if (!c->worker_started) {
    if (!c->tickets && !(c->tickets = vm_calloc(c, VMEM_MAX_TICKETS, sizeof(*c->tickets)))) {
      err = -ENOMEM;
    } else {
      sigfillset(&all);
      pthread_sigmask(SIG_SETMASK, &all, &old);
      err = -pthread_create(&c->worker, NULL, thread, c);
      pthread_sigmask(SIG_SETMASK, &old, NULL);
      if (err)
        err = vm_fail(-ENOMEM, "cannot start the worker thread: %s", strerror(-err));
      else
        c->worker_started = true;
    }
  }
  pthread_mutex_unlock(&c->lock);
  return err;
}

void vm_worker_low(struct vm_ctx *c) {
  if (c->low || c->pools[0].free_units >= vm_units_up(c, c->opts.pool_low)) return;
  c->low = true;
  pthread_cond_signal(&c->work_cond);
}

/* At close: what waits for GPU work of ours is run after it; what waits for a descriptor that nobody may
 * ever signal is cancelled. */
void vm_worker_stop(struct vm_ctx *c) {
  struct vm_job *job;
  if (c->worker_started) {
    pthread_mutex_lock(&c->lock);
    c->worker_stop = true;
    pthread_cond_signal(&c->work_cond);
    pthread_mutex_unlock(&c->lock);
    pthread_join(c->worker, NULL);
  }
  while ((job = c->queue)) {
    c->queue = job->next;
    if (job->deps.nfds && vm_deps_poll(c, &job->deps, false)) {
      vm_plan_cancel(c, &job->plan);
      vm_deps_put(c, &job->deps);
    } else {
      if (!vm_deps_wait(c, &job->deps))
        vm_plan_run(c, &job->plan, NULL, 0, NULL);
      else
        vm_plan_cancel(c, &job->plan);
      vm_deps_put(c, &job->deps);
    }
    free(job);
  }
  retire_fills(c, true);
  pthread_mutex_lock(&c->lock);
  vm_clean_hold(c); /* for good */
  pthread_mutex_unlock(&c->lock);
  free(c->tickets);
  c->tickets = NULL;
}
