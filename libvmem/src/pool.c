/* SPDX-License-Identifier: MIT */
/*
 * The pool: slabs taken from the driver, cut into units (granules).
 *
 * A slab keeps a bitmap of free units, a count of free units per 2 MiB chunk, and an upper bound on its
 * longest free run. Slabs hang in bins by that bound, so that a run of n units is looked for only where
 * it may be; a search that fails makes the bound exact.
 *
 * Where a run is taken, in this order (vm_pool_take):
 *   1. right after its left neighbour: the two then form one run
 *   2. 2 MiB or more: at the same offset in a chunk as the address has, so that 2 MiB entries fit
 *   3. with `spread`: in an empty chunk, at the address's offset, so that what grows there later finds
 *      its neighbours free (a soft reservation: chunks stay open to others when memory is short)
 *   4. the first fit in the smallest sufficient bin
 *   5. the longest piece there is; the caller comes again for the rest
 */
#include <stdlib.h>
#include <string.h>

#include "internal.h"

#define WORD 64u
#define MAX_SLAB (1ull << 30) /* larger ones would seldom be empty again */

void vm_bits_set(uint64_t *map, uint32_t i, uint32_t n, bool value) {
  while (n) {
    uint32_t off = i % WORD, take = WORD - off < n ? WORD - off : n;
    uint64_t mask = (take == WORD ? ~0ull : (1ull << take) - 1) << off;
    if (value)
      map[i / WORD] |= mask;
    else
      map[i / WORD] &= ~mask;
    i += take;
    n -= take;
  }
}

uint32_t vm_bits_run(const uint64_t *map, uint32_t i, uint32_t max, bool value) {
  uint32_t n = 0;
  while (n < max) {
    uint64_t w = map[(i + n) / WORD];
    uint32_t off = (i + n) % WORD, k;
    if (value) w = ~w;
    w >>= off;
    k = w ? (uint32_t)__builtin_ctzll(w) : WORD - off;
    if (k > WORD - off) k = WORD - off;
    n += k;
    if (k < WORD - off) break;
  }
  return n < max ? n : max;
}

static int bin_of(uint32_t run) { return run ? 32 - __builtin_clz(run) : 0; }

static void bin_remove(struct vm_slab *s) {
  if (s->prev)
    s->prev->next = s->next;
  else
    s->pool->bins[s->bin] = s->next;
  if (s->next) s->next->prev = s->prev;
}

static void bin_insert(struct vm_slab *s) {
  s->bin = bin_of(s->max_run);
  s->prev = NULL;
  s->next = s->pool->bins[s->bin];
  if (s->next) s->next->prev = s;
  s->pool->bins[s->bin] = s;
}

static void elist_update(struct vm_slab *s, bool want) {
  if (want == s->in_elist) return;
  if (want) {
    s->eprev = NULL;
    s->enext = s->pool->elist;
    if (s->enext) s->enext->eprev = s;
    s->pool->elist = s;
  } else {
    if (s->eprev)
      s->eprev->enext = s->enext;
    else
      s->pool->elist = s->enext;
    if (s->enext) s->enext->eprev = s->eprev;
  }
  s->in_elist = want;
}

static void set_max_run(struct vm_slab *s, uint32_t run) {
  if (run > s->free_units) run = s->free_units;
  s->max_run = run;
  if (bin_of(run) == s->bin) return;
  bin_remove(s);
  bin_insert(s);
}

static void chunks_account(struct vm_ctx *c, struct vm_slab *s, uint32_t unit, uint32_t n, bool free) {
  while (n) {
    uint32_t chunk = unit >> c->chunk_shift, end = (chunk + 1) << c->chunk_shift;
    uint32_t take = end - unit < n ? end - unit : n, size = c->chunk_units;
    if (end > s->units) size = s->units - chunk * c->chunk_units;
    if (s->chunk_free[chunk] == size) s->empty_chunks--;
    s->chunk_free[chunk] = free ? s->chunk_free[chunk] + take : s->chunk_free[chunk] - take;
    if (s->chunk_free[chunk] == size) s->empty_chunks++;
    unit += take;
    n -= take;
  }
  elist_update(s, s->empty_chunks != 0);
}

static struct vm_run take_units(struct vm_ctx *c, struct vm_slab *s, uint32_t unit, uint32_t n) {
  vm_bits_set(s->free_map, unit, n, false);
  for (uint32_t i = 0; i < n; i++) s->refs[unit + i] = 1;
  s->free_units -= n;
  s->pool->free_units -= n;
  c->used_units += n;
  chunks_account(c, s, unit, n, false);
  set_max_run(s, s->max_run);
  if (s->pool == &c->pools[0]) vm_worker_low(c);
  return (struct vm_run){s, unit, n};
}

static void give_units(struct vm_ctx *c, struct vm_slab *s, uint32_t unit, uint32_t n) {
  uint64_t bound = 2 * (uint64_t)s->max_run + n;
  vm_bits_set(s->free_map, unit, n, true);
  s->free_units += n;
  s->pool->free_units += n;
  chunks_account(c, s, unit, n, true);
  set_max_run(s, bound < s->units ? (uint32_t)bound : s->units);
}

/* First run of n free units whose start is `offset` modulo align; UINT32_MAX = none. A whole search
 * that fails also finds the longest run, which becomes the slab's bound. */
static uint32_t slab_search(struct vm_slab *s, uint32_t n, uint32_t align, uint32_t offset, uint32_t *longest) {
  uint32_t pos = 0, best = 0;
  while (pos < s->units) {
    uint32_t skip, len, start;
    pos += vm_bits_run(s->free_map, pos, s->units - pos, false);
    if (pos >= s->units) break;
    len = vm_bits_run(s->free_map, pos, s->units - pos, true);
    if (len > best) best = len;
    start = (pos & ~(align - 1)) + offset;
    if (start < pos) start += align;
    skip = start - pos;
    if (skip < len && len - skip >= n) return start;
    pos += len;
  }
  *longest = best;
  return UINT32_MAX;
}

static bool find_fit(struct vm_pool *p, uint32_t n, uint32_t align, uint32_t offset, struct vm_run *out) {
  for (int b = bin_of(n); b < POOL_BINS; b++) {
    struct vm_slab *next;
    for (struct vm_slab *s = p->bins[b]; s; s = next) {
      uint32_t longest = 0, unit;
      next = s->next;
      if (s->max_run < n) continue;
      unit = slab_search(s, n, align, offset, &longest);
      if (unit != UINT32_MAX) {
        *out = (struct vm_run){s, unit, n};
        return true;
      }
      if (longest < s->max_run) set_max_run(s, longest);
    }
  }
  return false;
}

/* The longest aligned piece, at most n, at least align. */
static bool find_longest(struct vm_pool *p, uint32_t n, uint32_t align, struct vm_run *out) {
  for (uint32_t want = n; want >= align; want = want / 2 / align * align)
    if (find_fit(p, want, align, 0, out)) return true;
  return false;
}

static bool find_empty_chunk(struct vm_ctx *c, struct vm_pool *p, uint32_t offset, uint32_t n,
                             struct vm_run *out) {
  uint32_t cu = c->chunk_units;
  for (struct vm_slab *s = p->elist; s; s = s->enext)
    for (uint32_t k = 0; k < s->chunks; k++)
      if (s->chunk_free[k] == cu) {
        *out = (struct vm_run){s, k * cu + offset, n < cu - offset ? n : cu - offset};
        return true;
      }
  return false;
}

/* With one_page_slabs a page is a slab of its own: one that is empty and of just this size. */
static bool find_page_slab(struct vm_pool *p, uint32_t units, struct vm_run *out) {
  for (struct vm_slab *s = p->bins[bin_of(units)]; s; s = s->next)
    if (s->units == units && s->free_units == units) {
      *out = (struct vm_run){s, 0, units};
      return true;
    }
  return false;
}

struct vm_run vm_pool_take(struct vm_ctx *c, struct vm_pool *p, uint64_t want, uint32_t align,
                           const struct vm_place *place) {
  uint32_t n = want > UINT32_MAX / 4 ? UINT32_MAX / 4 & ~(align - 1) : (uint32_t)want;
  uint32_t cu = c->chunk_units;
  struct vm_run r = {NULL, 0, 0};
  if (p->free_units < align) return r;
  if (c->info.one_page_slabs) return find_page_slab(p, align, &r) ? take_units(c, r.slab, r.unit, r.n) : r;
  if (place->left && place->left->slab) {
    struct vm_slab *s = c->slabs[place->left->slab];
    uint32_t unit = place->left->unit + 1;
    if (s && s->pool == p && unit < s->units && (unit & (align - 1)) == 0 && vm_bit(s->free_map, unit)) {
      uint32_t max = s->units - unit < n ? s->units - unit : n;
      uint32_t len = vm_bits_run(s->free_map, unit, max, true) & ~(align - 1);
      if (len) return take_units(c, s, unit, len);
    }
  }
  if (n >= cu && cu > align && find_fit(p, n, cu, place->offset, &r)) return take_units(c, r.slab, r.unit, r.n);
  if (place->spread && n < cu && (place->offset & (align - 1)) == 0 && find_empty_chunk(c, p, place->offset, n, &r))
    return take_units(c, r.slab, r.unit, r.n & ~(align - 1));
  if (find_longest(p, n, align, &r)) return take_units(c, r.slab, r.unit, r.n);
  return (struct vm_run){NULL, 0, 0};
}

struct vm_pool *vm_pool_of(struct vm_ctx *c, uint32_t location, int32_t device, uint64_t page_size, int *err) {
  struct vm_pool *pools = vm_is_large(c, page_size) ? c->pools + VM_PLACES : c->pools;
  uint32_t i;
  if (location == VMEM_DEVICE) return &pools[0];
  if (location == VMEM_HOST) {
    if (c->info.pub.caps & VMEM_CAP_HOST_PAGES) return &pools[1];
    *err = vm_fail(-EOPNOTSUPP, "back end %s has no host-memory pages", c->be->name);
    return NULL;
  }
  if (location != VMEM_PEER) {
    *err = vm_fail(-EINVAL, "unknown location %u", location);
    return NULL;
  }
  if (!(c->info.pub.caps & VMEM_CAP_PEER)) {
    *err = vm_fail(-EOPNOTSUPP, "back end %s has no pages in peer devices", c->be->name);
    return NULL;
  }
  for (i = 0; i < c->opts.num_devices; i++)
    if (c->opts.devices[i] == device) return i ? &pools[1 + i] : &pools[0];
  *err = vm_fail_at(-EINVAL, 0, 0, 0, "device %d is not one of this context's", device);
  return NULL;
}

void vm_slab_free(struct vm_slab *s) {
  if (!s) return;
  free(s->free_map);
  free(s->dirty_map);
  free(s->claim_map);
  free(s->fill_map);
  free(s->refs);
  free(s->chunk_free);
  free(s);
}

/* A slab with its driver memory, not yet known to anyone. Lock not held. */
static struct vm_slab *slab_make(struct vm_ctx *c, struct vm_pool *p, uint64_t bytes, uint64_t page_size,
                                 int *err) {
  struct vm_slab *s = vm_calloc(c, 1, sizeof(*s));
  size_t words = (size_t)((vm_units(c, bytes) + WORD - 1) / WORD);
  *err = -ENOMEM;
  if (!s) return NULL;
  s->bytes = bytes;
  s->pool = p;
  s->units = (uint32_t)vm_units(c, bytes);
  s->chunks = (s->units + c->chunk_units - 1) / c->chunk_units;
  s->free_map = vm_calloc(c, words, sizeof(uint64_t));
  s->dirty_map = s->free_map ? vm_calloc(c, words, sizeof(uint64_t)) : NULL;
  s->claim_map = s->dirty_map ? vm_calloc(c, words, sizeof(uint64_t)) : NULL;
  s->fill_map = s->claim_map ? vm_calloc(c, words, sizeof(uint64_t)) : NULL;
  s->refs = s->fill_map ? vm_calloc(c, s->units, sizeof(uint32_t)) : NULL;
  s->chunk_free = s->refs ? vm_calloc(c, s->chunks, sizeof(uint32_t)) : NULL;
  if (!s->chunk_free || (*err = vm_drv_slab_create(c, bytes, page_size, p->location, p->device, &s->priv))) {
    vm_slab_free(s);
    return NULL;
  }
  if (!c->info.fresh_is_zero) vm_bits_set(s->dirty_map, 0, s->units, true);
  return s;
}

/* Publishes a slab under the index that slab_entry found. Lock held. */
static void slab_publish(struct vm_ctx *c, struct vm_slab *s) {
  c->slabs[s->index] = s;
  c->live_slabs++;
  c->slab_bytes += s->bytes;
  bin_insert(s);
  give_units(c, s, 0, s->units);
}

static int slab_entry(struct vm_ctx *c, uint32_t *index) {
  uint32_t i = c->slab_hint ? c->slab_hint : 1;
  while (i < c->nslabs && c->slabs[i]) i++;
  if (i >= c->nslabs) {
    if (i >= c->cap_slabs) {
      uint32_t cap = c->cap_slabs ? 2 * c->cap_slabs : 64;
      struct vm_slab **v = vm_realloc(c, c->slabs, cap, sizeof(*v));
      if (!v) return -ENOMEM;
      memset(v + c->cap_slabs, 0, (cap - c->cap_slabs) * sizeof(*v));
      c->slabs = v;
      c->cap_slabs = cap;
    }
    c->nslabs = i + 1;
  }
  c->slab_hint = i + 1;
  *index = i;
  return 0;
}

static void slab_unlink(struct vm_ctx *c, struct vm_slab *s) {
  bin_remove(s);
  elist_update(s, false);
  s->pool->free_units -= s->free_units;
  c->slabs[s->index] = NULL;
  if (s->index < c->slab_hint) c->slab_hint = s->index;
  c->slab_bytes -= s->bytes;
  c->live_slabs--;
}

/* Empty slabs, taken out of the tables, to be destroyed without the lock: while `keep_bytes` stay free;
 * with grow_id != 0 only those made by that call of vm_pool_grow. An empty slab's run is the slab, so
 * the fullest bins hold them. */
static struct vm_slab *unlink_empty(struct vm_ctx *c, uint64_t keep_bytes, uint64_t grow_id) {
  struct vm_slab *list = NULL, *next;
  uint64_t keep = vm_units_up(c, keep_bytes), total = vm_pool_free_units(c);
  for (size_t i = 0; i < VM_POOLS; i++)
    for (int b = POOL_BINS - 1; b > 0 && total > keep; b--)
      for (struct vm_slab *s = c->pools[i].bins[b]; s && total > keep; s = next) {
        next = s->next;
        if (s->free_units != s->units || total - s->units < keep) continue;
        if (grow_id && s->grow_id != grow_id) continue;
        total -= s->units;
        slab_unlink(c, s);
        s->next = list;
        list = s;
      }
  return list;
}

uint64_t vm_pool_free_units(const struct vm_ctx *c) {
  uint64_t total = 0;
  for (size_t i = 0; i < VM_POOLS; i++) total += c->pools[i].free_units;
  return total;
}

/* A slab the driver does not take back is lost to us; nothing better can be done than to forget it. */
static uint64_t destroy_list(struct vm_ctx *c, struct vm_slab *list) {
  uint64_t freed = 0;
  while (list) {
    struct vm_slab *next = list->next;
    if (!vm_drv_slab_destroy(c, list)) freed += list->bytes;
    vm_slab_free(list);
    list = next;
  }
  return freed;
}

uint64_t vm_pool_trim(struct vm_ctx *c, uint64_t keep) {
  struct vm_slab *list;
  pthread_mutex_lock(&c->lock);
  list = vm_pool_free_units(c) << c->shift > keep ? unlink_empty(c, keep, 0) : NULL;
  pthread_mutex_unlock(&c->lock);
  return destroy_list(c, list);
}

/* One slab more, of `bytes` or, when memory is short, as little as `least`. */
static int grow_once(struct vm_ctx *c, struct vm_pool *p, uint64_t bytes, uint64_t least, uint64_t page_size,
                     uint64_t grow_id, uint64_t *got) {
  struct vm_slab *s = NULL;
  int err = 0;
  for (;;) {
    pthread_mutex_lock(&c->lock);
    /* What another thread is making at this moment may be what is wanted, or may fail. */
    while (c->opts.mem_limit && c->growing_bytes && c->slab_bytes + c->growing_bytes + bytes > c->opts.mem_limit)
      pthread_cond_wait(&c->done_cond, &c->lock);
    if (c->opts.mem_limit && c->slab_bytes + c->growing_bytes + bytes > c->opts.mem_limit)
      err = vm_fail_at(-ENOMEM, 0, bytes, c->opts.mem_limit,
                       "%llu bytes more would exceed the context's limit of %llu (%llu taken)",
                       (unsigned long long)bytes, (unsigned long long)c->opts.mem_limit,
                       (unsigned long long)(c->slab_bytes + c->growing_bytes));
    else
      c->growing_bytes += bytes, err = 0;
    pthread_mutex_unlock(&c->lock);
    if (!err) {
      s = slab_make(c, p, bytes, page_size, &err);
      pthread_mutex_lock(&c->lock);
      c->growing_bytes -= bytes;
      pthread_cond_broadcast(&c->done_cond);
      if (s && !(err = slab_entry(c, &s->index))) {
        s->grow_id = grow_id;
        slab_publish(c, s);
      }
      pthread_mutex_unlock(&c->lock);
      *got = bytes;
      if (s && !err) return 0;
      if (s) {
        vm_drv_slab_destroy(c, s);
        vm_slab_free(s);
        return err;
      }
    }
    if (err != -ENOMEM || bytes <= least) return err;
    bytes = bytes / 2 > least ? vm_round_up(bytes / 2, least) : least;
  }
}

void vm_pool_undo_grow(struct vm_ctx *c, uint64_t id) {
  struct vm_slab *list;
  if (!id) return;
  pthread_mutex_lock(&c->lock);
  list = unlink_empty(c, 0, id);
  pthread_mutex_unlock(&c->lock);
  destroy_list(c, list);
}

/* Memory is short, but not in all: empty slabs that are of no use for pages of `align` units in this pool are
 * given back when they make up for what is missing. */
static bool reclaim(struct vm_ctx *c, const struct vm_pool *p, uint32_t align, uint64_t bytes) {
  struct vm_slab *list = NULL;
  uint64_t found = 0;
  pthread_mutex_lock(&c->lock);
  for (int pass = 0; pass < 2 && (!pass || found >= bytes); pass++)
    for (uint32_t i = 1; i < c->nslabs; i++) {
      struct vm_slab *s = c->slabs[i];
      if (!s || s->free_units != s->units) continue;
      if (s->pool == p && (c->info.one_page_slabs ? s->units == align : s->units >= align)) continue;
      if (!pass) {
        found += s->bytes;
        continue;
      }
      slab_unlink(c, s);
      s->next = list;
      list = s;
    }
  pthread_mutex_unlock(&c->lock);
  return destroy_list(c, list) != 0;
}

/* Whether others have brought pages since the caller looked. */
static bool has_grown(struct vm_ctx *c, struct vm_pool *p, uint64_t seen) {
  bool more;
  pthread_mutex_lock(&c->lock);
  more = p->free_units > seen;
  pthread_mutex_unlock(&c->lock);
  return more;
}

int vm_pool_grow(struct vm_ctx *c, struct vm_pool *p, uint64_t units, uint64_t piece, uint32_t align, uint64_t seen,
                 uint64_t *id) {
  uint64_t need = units << c->shift, page = (uint64_t)align << c->shift, slab = c->info.pub.slab_size;
  uint64_t chunk = (uint64_t)c->chunk_units << c->shift, got = 0;
  bool single = c->info.one_page_slabs, may_reclaim = piece && !*id; /* once, or two calls could do so forever */
  if (units > UINT64_MAX >> c->shift) {
    vm_pool_undo_grow(c, *id);
    return vm_fail_at(-ENOMEM, 0, UINT64_MAX, 0, "%llu pages are more than any machine has", (unsigned long long)units);
  }
  piece <<= c->shift;
  if (piece > slab) slab = piece < MAX_SLAB ? vm_round_up(piece, slab) : MAX_SLAB;
  if (slab < page || single) slab = page;
  if (chunk < page) chunk = page;
  pthread_mutex_lock(&c->lock);
  if (!*id) *id = ++c->grow_ids;
  pthread_mutex_unlock(&c->lock);
  for (uint64_t done = 0; done < need; done += got) {
    uint64_t left = need - done, least = single ? page : vm_round_up(left < slab ? left : slab, chunk);
    int err = grow_once(c, p, slab, least < slab ? least : slab, page, *id, &got);
    /* The limit may leave less than a chunk: then take exactly what is wanted. */
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

/* n units whose last reference is gone. Lock held, let go for the driver. */
static void units_free(struct vm_ctx *c, struct vm_slab *s, uint32_t unit, uint32_t n) {
  bool dirty = true;
  c->used_units -= n;
  if (c->be->discard) {
    c->limbo_units += n;
    pthread_mutex_unlock(&c->lock);
    dirty = vm_drv_discard(c, s, unit, n) != 0 || !c->info.fresh_is_zero;
    pthread_mutex_lock(&c->lock);
    c->limbo_units -= n;
    if (!c->limbo_units) pthread_cond_broadcast(&c->done_cond); /* vmem_check waits for it */
  }
  vm_bits_set(s->dirty_map, unit, n, dirty);
  give_units(c, s, unit, n);
}

void vm_units_put(struct vm_ctx *c, struct vm_slab *s, uint32_t unit, uint32_t n) {
  while (n) {
    uint32_t k = 0;
    for (; n && s->refs[unit] != 1; unit++, n--) s->refs[unit]--;
    while (k < n && s->refs[unit + k] == 1) s->refs[unit + k++] = 0;
    if (k) units_free(c, s, unit, k);
    unit += k;
    n -= k;
  }
}
