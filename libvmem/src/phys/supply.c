/* SPDX-License-Identifier: MIT */
/* Allocating slabs from the driver and freeing them. */
#include <stdlib.h>

#include "base/clock.h"
#include "base/log.h"
#include "phys/phys.h"

#define MAX_SLAB (1ull << 30) /* larger slabs would seldom become empty */
#define PIECE (128ull << 20)  /* bytes of a surplus to return at a time; 16 to 20 us per MiB in slabs of 2 MiB */

/* Removes a slab that was set aside from all tables. */
static void leave(struct vm_ctx *c, struct vm_slab *s) {
  vm_slab_forget(c, s);
  c->phys->leaving_bytes += s->bytes;
  s->odd = c->phys->epoch & 1;
  c->phys->leaving[s->odd]++;
}

static void slab_unlink(struct vm_ctx *c, struct vm_slab *s) {
  vm_pool_set_aside(s);
  leave(c, s);
}

/* Free units to keep: in total, and in each pool. */
struct keep {
  uint64_t total, pool[VM_POOLS];
};

/* Removes empty slabs from the tables until they add up to `most` bytes; the caller destroys them without the lock.
 * With grow_id != 0, only slabs created by that call of vm_pool_grow. *busy: a slab was skipped because it is being
 * zeroed. */
static struct vm_slab *unlink_empty(struct vm_ctx *c, const struct keep *keep, uint64_t most, uint64_t grow_id,
                                    bool *busy) {
  struct vm_slab *list = NULL, *next;
  uint64_t total = vm_pool_free_units(c), found = 0;
  *busy = false;
  for (size_t i = 0; i < VM_POOLS; i++) {
    const struct vm_pool *p = &c->phys->pools[i];
    for (int b = POOL_BINS - 1; b >= 0 && total > keep->total && p->bin_mask[LEVEL_EMPTY]; b--)
      for (struct vm_slab *s = p->bins[LEVEL_EMPTY][b]; s && total > keep->total && found < most; s = next) {
        next = s->next;
        if (total - s->units < keep->total || p->free_units < keep->pool[i] + s->units) continue;
        if (grow_id && s->grow_id != grow_id) continue;
        if (s->cleaning) {
          *busy = true;
          continue;
        }
        total -= s->units;
        found += s->bytes;
        slab_unlink(c, s);
        s->next = list;
        list = s;
      }
  }
  return list;
}

static uint64_t destroy_list(struct vm_ctx *c, struct vm_slab *list) {
  uint64_t freed = 0, gone = 0, n = 0;
  bool odd = list && list->odd; /* the same for the whole list, which was built under one hold of the lock */
  if (!list) return 0;
  while (list) {
    struct vm_slab *next = list->next;
    uint64_t bytes = list->bytes;
    int err = vm_slab_destroy(c, list);
    if (!err) freed += bytes;
    gone += bytes;
    n++;
    vm_log(c, err ? VMEM_LOG_WARNING : VMEM_LOG_DEBUG, "slab of %llu bytes %s%s", (unsigned long long)bytes,
           err ? "could not be given back: " : "given back", err ? vm_error_last()->text : "");
    list = next;
  }
  pthread_mutex_lock(&c->lock);
  c->phys->leaving_bytes -= gone;
  c->phys->leaving[odd] -= n;
  c->phys->departures++;
  pthread_cond_broadcast(&c->done_cond);
  pthread_mutex_unlock(&c->lock);
  return freed;
}

/* Waits for the slabs that are being returned to the driver now, but not for those that other threads start to return
 * during the wait: these count in the next epoch, which starts only when the previous epoch's slabs are gone. Lock
 * held. */
static void await_leaving(struct vm_ctx *c) {
  bool odd;
  while (c->phys->leaving[!(c->phys->epoch & 1)]) pthread_cond_wait(&c->done_cond, &c->lock);
  odd = c->phys->epoch++ & 1;
  while (c->phys->leaving[odd]) pthread_cond_wait(&c->done_cond, &c->lock);
}

static uint64_t give_back(struct vm_ctx *c, const struct keep *keep, uint64_t grow_id, bool wait) {
  struct vm_slab *list, *rest = NULL;
  bool busy;
  uint64_t freed;
  pthread_mutex_lock(&c->lock);
  list = unlink_empty(c, keep, UINT64_MAX, grow_id, &busy);
  if (busy && wait) {
    vm_clean_hold(c);
    rest = unlink_empty(c, keep, UINT64_MAX, grow_id, &busy);
    vm_clean_release(c);
  }
  pthread_mutex_unlock(&c->lock);
  freed = destroy_list(c, list);
  freed += destroy_list(c, rest);
  if (wait) { /* also for slabs that the worker is returning */
    pthread_mutex_lock(&c->lock);
    await_leaving(c);
    pthread_mutex_unlock(&c->lock);
  }
  return freed;
}

uint64_t vm_pool_part(struct vm_ctx *c, struct vm_slab *s) {
  uint64_t freed;
  s->next = NULL;
  leave(c, s);
  pthread_mutex_unlock(&c->lock);
  freed = destroy_list(c, s);
  pthread_mutex_lock(&c->lock);
  return freed;
}

uint64_t vm_pool_trim(struct vm_ctx *c, uint64_t keep, uint64_t low, bool wait) {
  struct keep k = {.total = vm_units_up(c, keep), .pool = {vm_units_up(c, low)}};
  return give_back(c, &k, 0, wait);
}

/* Lock held. */
static bool has_surplus(const struct vm_ctx *c) { return vm_pool_free_units(c) > vm_units_up(c, c->opts.pool_high); }

static void watch(struct vm_ctx *c, uint64_t now) {
  struct vm_surplus *s = &c->phys->surplus;
  s->watched = true;
  s->due = now + s->delay;
  for (size_t i = 0; i < VM_POOLS; i++) c->phys->pools[i].peak_units = c->phys->pools[i].used_units;
}

void vm_pool_settle(struct vm_ctx *c) {
  if (!c->phys->surplus.delay) {
    vm_pool_trim(c, c->opts.pool_high, c->opts.pool_low, false);
    return;
  }
  pthread_mutex_lock(&c->lock);
  if (!c->phys->surplus.watched && has_surplus(c)) {
    watch(c, vm_now_ns());
    __atomic_store_n(&c->worker_wanted, true, __ATOMIC_RELAXED);
    pthread_cond_signal(&c->work_cond);
  }
  pthread_mutex_unlock(&c->lock);
}

/* Returns the free units to keep: what the pools have needed recently, plus pool_high in total. Lock held. */
static struct keep needs(const struct vm_ctx *c, uint64_t *needed) {
  struct keep keep = {0};
  for (size_t i = 0; i < VM_POOLS; i++) {
    const struct vm_pool *p = &c->phys->pools[i];
    keep.pool[i] = p->peak_units > p->used_units ? p->peak_units - p->used_units : 0;
    *needed += keep.pool[i];
  }
  keep.total = vm_units_up(c, c->opts.pool_high) + *needed;
  if (keep.pool[0] < vm_units_up(c, c->opts.pool_low)) keep.pool[0] = vm_units_up(c, c->opts.pool_low);
  return keep;
}

bool vm_pool_give_surplus(struct vm_ctx *c) {
  struct vm_surplus *s = &c->phys->surplus;
  struct vm_slab *list = NULL;
  uint64_t now, needed = 0;
  bool busy;
  pthread_mutex_lock(&c->lock);
  if (s->watched && (now = vm_now_ns()) >= s->due) {
    struct keep keep = needs(c, &needed);
    list = unlink_empty(c, &keep, PIECE, 0, &busy);
    if (!list && needed && has_surplus(c))
      watch(c, now);
    else if (!list)
      s->watched = false; /* under the same lock: units freed from now on start a new period */
  }
  pthread_mutex_unlock(&c->lock);
  if (!list) return false;
  destroy_list(c, list);
  return true;
}

void vm_pool_abandon(struct vm_ctx *c, uint64_t keep) {
  if (c->phys->surplus.delay)
    vm_pool_settle(c);
  else
    vm_pool_trim(c, keep, c->opts.pool_low, false);
}

/* Adds a slab of `bytes` bytes or, if memory is short, a smaller one of at least `least` bytes. */
static int grow_once(struct vm_ctx *c, struct vm_pool *p, uint64_t bytes, uint64_t least, uint64_t page_size,
                     uint64_t grow_id, uint64_t *got) {
  struct vm_slab *s = NULL;
  int err = 0;
  for (;;) {
    uint64_t seen;
    pthread_mutex_lock(&c->lock);
    /* Wait for slabs that other threads are creating or returning: a new slab may satisfy this call, and after a
     * failure or a return its bytes no longer count against the limit. */
    while (c->opts.mem_limit && (c->phys->growing_bytes || c->phys->leaving_bytes) &&
           c->phys->slab_bytes + c->phys->growing_bytes + c->phys->leaving_bytes + bytes > c->opts.mem_limit)
      pthread_cond_wait(&c->done_cond, &c->lock);
    seen = c->phys->departures;
    if (c->opts.mem_limit && c->phys->slab_bytes + c->phys->growing_bytes + bytes > c->opts.mem_limit)
      err = vm_fail_at(-ENOMEM, 0, bytes, c->opts.mem_limit,
                       "%llu more bytes would exceed the context's limit of %llu (%llu taken)",
                       (unsigned long long)bytes, (unsigned long long)c->opts.mem_limit,
                       (unsigned long long)(c->phys->slab_bytes + c->phys->growing_bytes));
    else
      c->phys->growing_bytes += bytes, err = 0;
    pthread_mutex_unlock(&c->lock);
    if (!err) {
      s = vm_slab_make(c, p, bytes, page_size, &err);
      pthread_mutex_lock(&c->lock);
      c->phys->growing_bytes -= bytes;
      pthread_cond_broadcast(&c->done_cond);
      if (s && !(err = vm_slab_enter(c, s))) {
        s->grow_id = grow_id;
        vm_pool_add(c, s);
      }
      pthread_mutex_unlock(&c->lock);
      *got = bytes;
      if (s && !err) {
        vm_log(c, VMEM_LOG_DEBUG, "slab of %llu bytes taken", (unsigned long long)bytes);
        return 0;
      }
      if (s) {
        VM_UNDO(vm_slab_destroy(c, s));
        return err;
      }
    }
    if (err == -ENOMEM) { /* slabs on their way back to the driver may suffice */
      bool again;
      pthread_mutex_lock(&c->lock);
      while (c->phys->leaving_bytes && c->phys->departures == seen) pthread_cond_wait(&c->done_cond, &c->lock);
      again = c->phys->departures != seen;
      pthread_mutex_unlock(&c->lock);
      if (again) continue;
    }
    if (err != -ENOMEM || bytes <= least) return err;
    bytes = bytes / 2 > least ? vm_round_up(bytes / 2, least) : least;
  }
}

void vm_pool_undo_grow(struct vm_ctx *c, uint64_t id) {
  if (id) give_back(c, &(struct keep){0}, id, true);
}

/* Memory is short, but other slabs are empty: returns empty slabs that are useless for pages of `align` units in this
 * pool, if they cover what is missing. */
static bool reclaim(struct vm_ctx *c, const struct vm_pool *p, uint32_t align, uint64_t bytes) {
  struct vm_slab *list = NULL;
  uint64_t found = 0;
  pthread_mutex_lock(&c->lock);
  vm_clean_hold(c);
  for (int pass = 0; pass < 2 && (!pass || found >= bytes); pass++)
    for (uint32_t i = 1; i < c->phys->nslabs; i++) {
      struct vm_slab *s = c->phys->slabs[i];
      if (!s || s->free_units != s->units || s->evacuating) continue;
      if (s->pool == p && (c->info->one_page_slabs ? s->units == align : s->units >= align)) continue;
      if (!pass) {
        found += s->bytes;
        continue;
      }
      slab_unlink(c, s);
      s->next = list;
      list = s;
    }
  vm_clean_release(c);
  pthread_mutex_unlock(&c->lock);
  return destroy_list(c, list) != 0;
}

/* True if other threads have added pages since the caller looked. First waits for threads that are about to do so, and
 * for pages on their way back to a pool (limbo_units), as after a failed batch. */
static bool has_grown(struct vm_ctx *c, struct vm_pool *p, uint64_t seen) {
  bool more;
  pthread_mutex_lock(&c->lock);
  while ((c->phys->growing_bytes || c->phys->limbo_units) && p->free_units <= seen)
    pthread_cond_wait(&c->done_cond, &c->lock);
  more = p->free_units > seen;
  pthread_mutex_unlock(&c->lock);
  return more;
}

/* Refuses a request larger than the total memory before taking any of it from other users. Queries the driver only for
 * requests so large that the query costs little in comparison. */
static int there_is(struct vm_ctx *c, const struct vm_pool *p, uint64_t bytes) {
  uint64_t unused, all = UINT64_MAX;
  if (bytes > MAX_SLAB) VM_UNDO(vm_drv_memory(c, p->location, p->device, &unused, &all));
  if (!all || bytes <= all) return 0; /* 0: the driver does not report it */
  return vm_fail_at(-ENOMEM, 0, bytes, all, "%llu bytes exceed the total memory of %llu bytes",
                    (unsigned long long)bytes, (unsigned long long)all);
}

int vm_pool_grow(struct vm_ctx *c, struct vm_pool *p, uint64_t units, uint64_t piece, uint32_t align, uint64_t seen,
                 uint64_t *id) {
  uint64_t need = units << c->shift, page = (uint64_t)align << c->shift, slab = c->info->pub.slab_size;
  uint64_t chunk = (uint64_t)c->chunk_units << c->shift, got = 0;
  /* Reclaim only once: otherwise two calls could alternate forever. */
  bool single = c->info->one_page_slabs, may_reclaim = piece && !*id;
  int err;
  if (units > UINT64_MAX >> c->shift) {
    vm_pool_undo_grow(c, *id);
    return vm_fail_at(-ENOMEM, 0, UINT64_MAX, 0, "%llu pages are more than any machine has", (unsigned long long)units);
  }
  if ((err = there_is(c, p, need))) {
    VM_UNDO(vm_pool_undo_grow(c, *id));
    return err;
  }
  piece <<= c->shift;
  if (piece > slab) slab = piece < MAX_SLAB ? vm_round_up(piece, slab) : MAX_SLAB;
  if (slab < page || single) slab = page;
  if (chunk < page) chunk = page;
  pthread_mutex_lock(&c->lock);
  if (!*id) *id = ++c->phys->grow_ids;
  pthread_mutex_unlock(&c->lock);
  for (uint64_t done = 0; done < need; done += got) {
    uint64_t left = need - done, least = single ? page : vm_round_up(left < slab ? left : slab, chunk);
    err = grow_once(c, p, slab, least < slab ? least : slab, page, *id, &got);
    /* If the limit leaves less than a chunk, take exactly what is needed. */
    if (err == -ENOMEM && !single && vm_round_up(left, page) < least)
      err = grow_once(c, p, vm_round_up(left, page), page, page, *id, &got);
    if (err == -ENOMEM && may_reclaim) {
      may_reclaim = false;
      got = 0;
      if (reclaim(c, p, align, left)) continue;
    }
    if (err) {
      VM_UNDO(vm_pool_undo_grow(c, *id));
      return err == -ENOMEM && has_grown(c, p, seen) ? 0 : err;
    }
  }
  return 0;
}

void vm_phys_close(struct vm_ctx *c) {
  struct vm_phys *p = c->phys;
  for (uint32_t i = 1; i < p->nslabs; i++)
    if (p->slabs[i]) vm_slab_destroy(c, p->slabs[i]);
  free(p->slabs);
  for (uint32_t i = 1; i < p->nhdls; i++) free(p->hdls[i].runs);
  free(p->hdls);
}
