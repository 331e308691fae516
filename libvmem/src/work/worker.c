/* SPDX-License-Identifier: MIT */
/*
 * The worker thread: runs submitted batches, first come first served.
 *
 * A batch whose GPU work is not done, or that touches what an earlier batch's fill still writes,
 * moves to a second list, which is polled; so does a batch with more to do after its own fills and
 * copies. Later batches overtake it. A job's ranges are busy from submit on, so no two jobs touch
 * the same pages and they may run in any order. The thread itself never waits for GPU work.
 */
#include <signal.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "base/log.h"
#include "base/probe.h"
#include "work/work.h"

/* GPU work is polled 20 us after something has happened, backing off to 1 ms. Polling takes at most a ninth of the
 * time, however many batches wait. */
#define NAP_MIN 20000u
#define NAP_MAX 1000000u
#define COST_FACTOR 8u

struct vm_job {
  struct vm_job *next;
  struct vm_plan plan;
  struct vmem_op *ops; /* operations of a late batch, which has no plan until it starts */
  size_t nops;
  bool late;
  struct vm_deps deps;
  struct vm_fill *behind; /* a fill that must finish first, with a reference; NULL = none known */
  bool gpu_waits;         /* the batch only fills: the GPU waits for its events, not this thread */
  struct vm_ticket *ticket;
};

/* ---- submitting ------------------------------------------------------------------------------ */

static void fill_ended(struct vm_ctx *c, void *owner, int result) { vm_ticket_done(c, owner, result); }

static int queue_job(struct vm_ctx *c, struct vm_job *job, size_t nops, vmem_ticket *ticket) {
  vmem_ticket id;
  pthread_mutex_lock(&c->lock);
  if (c->closing) {
    pthread_mutex_unlock(&c->lock);
    return vm_fail(-EBADF, "the context is being closed");
  }
  id = vm_ticket_issue(c, job->ticket);
  VM_PROBE3(submit, c, job->ticket->id, nops);
  if (ticket) *ticket = id;
  *c->work->queue_tail = job;
  c->work->queue_tail = &job->next;
  pthread_mutex_unlock(&c->lock);
  /* Signal after dropping the lock: otherwise the worker wakes only to wait for it. */
  pthread_cond_signal(&c->work_cond);
  return 0;
}

/* Makes the plan, and allocates everything that can run short. On failure the job has no plan. */
static int job_plan(struct vm_ctx *c, struct vm_job *job, const struct vmem_op *ops, size_t n) {
  int err = vm_plan_make(c, ops, n, &job->plan);
  if (err) return err;
  job->gpu_waits = vm_plan_only_fills(&job->plan);
  err = vm_plan_aliases(c, &job->plan);
  if (!err) err = vm_plan_may_run_on(c, &job->plan, fill_ended, job->ticket);
  if (err) VM_UNDO(vm_plan_cancel(c, &job->plan));
  return err;
}

/* Leaves making the plan to the worker if the pools have the pages; only checks and copies the operations. */
static int job_plan_later(struct vm_ctx *c, struct vm_job *job, const struct vmem_op *ops, size_t n) {
  int err;
  if (n && !(job->ops = vm_realloc(c, NULL, n, sizeof(*ops)))) return -ENOMEM;
  if (n) memcpy(job->ops, ops, n * sizeof(*ops));
  job->nops = n;
  pthread_mutex_lock(&c->lock);
  err = vm_want_all(c, job->ops, n);
  job->late = !err && vm_promise(c, job->ops, n);
  pthread_mutex_unlock(&c->lock);
  if (err || job->late) return err;
  free(job->ops);
  job->ops = NULL;
  return job_plan(c, job, ops, n);
}

/* Ends the promise of pages to a late batch. */
static void job_end_promise(struct vm_ctx *c, struct vm_job *job) {
  pthread_mutex_lock(&c->lock);
  vm_promise_end(c, job->ops, job->nops);
  pthread_mutex_unlock(&c->lock);
}

/* Makes the plan of a late batch that is about to be started. */
static int job_plan_now(struct vm_ctx *c, struct vm_job *job) {
  int err;
  if (!job->late) return 0;
  job_end_promise(c, job);
  err = job_plan(c, job, job->ops, job->nops);
  free(job->ops);
  job->ops = NULL;
  job->nops = 0;
  if (!err) job->late = false;
  return err;
}

/* A late batch has no plan until it is started. */
static void job_drop_plan(struct vm_ctx *c, struct vm_job *job) {
  if (!job->late) {
    VM_UNDO(vm_plan_cancel(c, &job->plan));
    return;
  }
  job_end_promise(c, job);
  free(job->ops);
}

int vm_submit(struct vm_ctx *c, const struct vmem_op *ops, size_t n, const struct vmem_after *after, size_t num_after,
              uint32_t flags, vmem_ticket *ticket) {
  struct vm_job *job = vm_calloc(c, 1, sizeof(*job));
  int err = job ? vm_ticket_new(c, flags & VMEM_SUBMIT_DETACHED, &job->ticket) : -ENOMEM;
  if (err) {
    free(job);
    return err;
  }
  if (!(err = vm_worker_start(c)) && !(err = vm_deps_make(c, after, num_after, &job->deps))) {
    err = flags & VMEM_SUBMIT_LATE ? job_plan_later(c, job, ops, n) : job_plan(c, job, ops, n);
    if (!err) {
      if (!(err = queue_job(c, job, n, ticket))) return 0;
      job_drop_plan(c, job);
    } else {
      free(job->ops);
    }
    VM_UNDO(vm_deps_put(c, &job->deps));
  }
  vm_ticket_cancel(c, job->ticket);
  free(job);
  return err;
}

/* ---- the thread ------------------------------------------------------------------------------ */

/* Sets whether the job can run. On error its pages cannot be zeroed, or its dependencies cannot be polled. */
static int job_ready(struct vm_ctx *c, struct vm_job *job, bool *ready) {
  struct vm_fill *before = job->behind, *f;
  bool blocked;
  int err;
  if ((*ready = job->plan.filling)) return 0;
  /* New pages have no user yet: they are zeroed while the job waits for other work. -EAGAIN is an error here: the
   * driver was suspended for too long. */
  err = vm_plan_zero(c, &job->plan, ready);
  if (err || !*ready) return err;
  *ready = false;
  err = vm_deps_poll(c, &job->deps, !job->gpu_waits);
  if (err) return err == -EAGAIN ? 0 : err;
  pthread_mutex_lock(&c->lock);
  /* Remembers the blocking fill: searching the plan's pages takes time. */
  blocked = before && !before->over;
  if (!blocked) {
    if ((f = vm_plan_blocker(c, &job->plan))) f->refs++;
    job->behind = f;
    blocked = f != NULL;
  } else {
    before = NULL;
  }
  pthread_mutex_unlock(&c->lock);
  if (before) vm_fill_put(c, before);
  *ready = !blocked;
  return 0;
}

/* Runs the job or, given an error, cancels it without any change. Returns true if it is finished, else it must be run
 * again; with `wait` it always finishes. */
static bool job_run(struct vm_ctx *c, struct vm_job *job, int err, bool wait) {
  struct vm_fill *fill = NULL;
  size_t nevents = job->gpu_waits ? job->deps.nevents : 0;
  bool over = true;
  if (job->behind) VM_UNDO(vm_fill_put(c, job->behind));
  job->behind = NULL;
  if (err)
    job_drop_plan(c, job);
  else
    err = vm_plan_run(c, &job->plan, job->deps.events, nevents, wait ? NULL : &over, &fill);
  if (!over) return false;
  VM_UNDO(vm_deps_put(c, &job->deps));
  if (err) vm_log(c, VMEM_LOG_INFO, "a submitted batch failed: %s (%s)", vm_error_last()->text, strerror(-err));
  pthread_mutex_lock(&c->lock);
  if (!fill)
    vm_ticket_done(c, job->ticket, err);
  else if (!fill->over) /* stays in the list: only this thread removes it */
    vm_ticket_mapped(c, job->ticket, fill);
  pthread_mutex_unlock(&c->lock);
  free(job);
  return true;
}

/* Runs the first job of the queue or moves it to the waiting list; false if the queue was empty. */
static bool start_next(struct vm_ctx *c) {
  struct vm_job *job;
  bool ready;
  int err;
  pthread_mutex_lock(&c->lock);
  if ((job = c->work->queue) && !(c->work->queue = job->next)) c->work->queue_tail = &c->work->queue;
  pthread_mutex_unlock(&c->lock);
  if (!job) return false;
  job->next = NULL;
  vm_error_begin("vmem worker");
  ready = false;
  if (!(err = job_plan_now(c, job))) err = job_ready(c, job, &ready);
  if ((err || ready) && job_run(c, job, err, false)) return true;
  *c->work->waiting_tail = job;
  c->work->waiting_tail = &job->next;
  return true;
}

/* Runs waiting jobs that are ready; true if there were any. */
static bool poll_waiting(struct vm_ctx *c) {
  struct vm_job **link = &c->work->waiting, *job, *next;
  bool any = false;
  while ((job = *link)) {
    bool ready;
    int err;
    vm_error_begin("vmem worker");
    next = job->next;
    err = job_ready(c, job, &ready);
    if ((err || ready) && job_run(c, job, err, false)) {
      *link = next;
      any = true;
    } else {
      link = &job->next;
    }
  }
  c->work->waiting_tail = link;
  return any;
}

static void keep_low_watermark(struct vm_ctx *c) {
  uint64_t units = vm_units_up(c, c->opts.pool_low), have, id = 0;
  bool low;
  if (!units) return;
  vm_error_begin("vmem worker");
  pthread_mutex_lock(&c->lock);
  low = c->phys->low;
  c->phys->low = false;
  have = c->phys->pools[0].free_units;
  pthread_mutex_unlock(&c->lock);
  /* Failure is ignored: the call that needs the memory will report it. Retried when more pages are taken. */
  if (low && have < units) vm_pool_grow(c, &c->phys->pools[0], units - have, 0, 1, have, &id);
}

/* Paces polling. */
struct pace {
  uint64_t nap, due, not_before;
};

static void poll_all(struct vm_ctx *c, struct pace *p, uint64_t now) {
  bool any;
  uint64_t end;
  vm_error_begin("vmem worker");
  any = vm_fills_poll(c);
  any |= poll_waiting(c);
  end = vm_now_ns();
  p->not_before = any ? end : end + COST_FACTOR * (end - now);
  p->nap = any ? NAP_MIN : p->nap < NAP_MAX / 2 ? 2 * p->nap : NAP_MAX;
  p->due = end + p->nap > p->not_before ? end + p->nap : p->not_before;
}

/* Resets to the shortest nap: new work may finish soon. */
static void poll_soon(struct pace *p, uint64_t now) {
  p->nap = NAP_MIN;
  if (p->due > now + p->nap) p->due = now + p->nap;
  if (p->due < p->not_before) p->due = p->not_before;
}

/* True if the pool needs work now. Lock held. */
static bool pool_wants(const struct vm_ctx *c) {
  const struct vm_clean *k = &c->phys->clean;
  return c->phys->low || k->ended || (k->wanted && !k->hold);
}

static void *thread(void *arg) {
  struct vm_ctx *c = arg;
  struct pace pace = {.nap = NAP_MIN};
  vm_drv_mark_worker();
  for (;;) {
    bool stop, ended, ran = start_next(c), cleaning = vm_clean_step(c, &ended),
                      polls = c->work->waiting || c->phys->fills || cleaning;
    uint64_t now = polls ? vm_now_ns() : 0, due;
    if (ended) vm_pool_settle(c); /* the last trim skipped slabs being zeroed */
    if (polls && ran) poll_soon(&pace, now);
    if (polls && now >= pace.due) {
      poll_all(c, &pace, now);
      ran = true;
    }
    if (ran) continue;
    keep_low_watermark(c);
    if (vm_pool_give_surplus(c)) continue;
    pthread_mutex_lock(&c->lock);
    stop = c->work->worker_stop;
    due = polls ? pace.due : UINT64_MAX;
    if (c->phys->surplus.watched && c->phys->surplus.due < due) due = c->phys->surplus.due;
    if (!stop && !c->work->queue && (polls || !pool_wants(c))) {
      struct timespec ts = vm_timespec(due);
      if (due != UINT64_MAX)
        pthread_cond_timedwait(&c->work_cond, &c->lock, &ts);
      else
        pthread_cond_wait(&c->work_cond, &c->lock);
    }
    pthread_mutex_unlock(&c->lock);
    if (stop) return NULL;
  }
}

int vm_worker_start(struct vm_ctx *c) {
  sigset_t all, old;
  int err = 0;
  pthread_mutex_lock(&c->lock);
  if (!c->work->worker_started) {
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &old);
    err = -pthread_create(&c->work->worker, NULL, thread, c);
    pthread_sigmask(SIG_SETMASK, &old, NULL);
    if (err) {
      err = vm_fail(-ENOMEM, "cannot start the worker thread: %s", strerror(-err));
    } else {
      c->work->worker_started = true;
      c->phys->low = c->phys->pools[0].free_units < vm_units_up(c, c->opts.pool_low);
    }
  }
  pthread_mutex_unlock(&c->lock);
  return err;
}

void vm_worker_wake(struct vm_ctx *c) {
  bool start;
  __atomic_store_n(&c->worker_wanted, false, __ATOMIC_RELAXED);
  pthread_mutex_lock(&c->lock);
  start = (c->phys->clean.wanted || c->phys->surplus.watched) && !c->work->worker_started && !c->closing;
  pthread_mutex_unlock(&c->lock);
  if (!start) return;
  VM_UNDO(start = vm_worker_start(c) != 0);
  if (start) __atomic_store_n(&c->worker_wanted, true, __ATOMIC_RELAXED); /* the next call tries again */
}

/* At close: runs jobs that wait for our own GPU work; cancels jobs that wait for a descriptor, which may never be
 * signalled. */
static void finish_jobs(struct vm_ctx *c, struct vm_job *job) {
  struct vm_job *next;
  for (; job; job = next) {
    int err = job->deps.nfds ? vm_deps_poll(c, &job->deps, false) : 0;
    next = job->next;
    if (!err) err = vm_deps_wait(c, &job->deps);
    if (!err) err = job_plan_now(c, job);
    if (!err && !job->plan.filling) err = vm_plan_await_fills(c, &job->plan);
    job_run(c, job, err, true);
  }
}

void vm_worker_stop(struct vm_ctx *c) {
  if (c->work->worker_started) {
    pthread_mutex_lock(&c->lock);
    c->work->worker_stop = true;
    pthread_cond_signal(&c->work_cond);
    pthread_mutex_unlock(&c->lock);
    pthread_join(c->work->worker, NULL);
  }
  finish_jobs(c, c->work->waiting);
  finish_jobs(c, c->work->queue);
  vm_fills_finish(c);
  pthread_mutex_lock(&c->lock);
  vm_clean_hold(c); /* never released: the context is being closed */
  pthread_mutex_unlock(&c->lock);
}

void vm_work_init(struct vm_ctx *c) {
  c->work->queue_tail = &c->work->queue;
  c->work->waiting_tail = &c->work->waiting;
}
