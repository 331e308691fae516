/* SPDX-License-Identifier: MIT */
/*
 * The pool: slabs taken from the driver, cut into units (granules).
 *
 * A slab keeps a bitmap of free units, a count of free units per 2 MiB chunk, and an upper bound on its
 * longest free run. Slabs hang in bins by how full they are and by that bound, so that a run of n units is
 * looked for only where it may be, in the fullest slabs first: the others can become empty and go back to
 * the driver. A search that fails makes the bound exact.
 *
 * Where a run is taken, in this order (vm_pool_take):
 *   1. right after its left neighbour: the two then form one run
 *   2. 2 MiB or more: at the same offset in a chunk as the address has, so that 2 MiB entries fit
 *   3. with `spread`: in an empty chunk, at the address's offset, so that what grows there later finds
 *      its neighbours free (a soft reservation: chunks stay open to others when memory is short); the chunks
 *      of an empty slab come last
 *   4. the first fit in the fullest slab
 *   5. the longest piece there is; the caller comes again for the rest
 *
 * Units with old contents (dirty) are kept apart from the others (soil_map) until clean.c has zeroed them.
 * When nothing else is left they are taken all the same, and whoever maps them zeroes them first.
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

static int level_of(const struct vm_slab *s) {
  return s->free_units == s->units ? LEVEL_EMPTY : (int)((uint64_t)s->free_units * LEVEL_EMPTY / s->units);
}

static void bin_remove(struct vm_slab *s) {
  struct vm_slab **head = &s->pool->bins[s->level][s->bin];
  if (s->prev)
    s->prev->next = s->next;
  else
    *head = s->next;
  if (s->next) s->next->prev = s->prev;
  if (!*head) s->pool->bin_mask[s->level] &= ~(1ull << s->bin);
}

static void bin_insert(struct vm_slab *s) {
  struct vm_slab **head;
  s->bin = bin_of(s->max_run);
  s->level = level_of(s);
  head = &s->pool->bins[s->level][s->bin];
  s->prev = NULL;
  s->next = *head;
  if (s->next) s->next->prev = s;
  *head = s;
  s->pool->bin_mask[s->level] |= 1ull << s->bin;
}

/* Slabs with empty chunks, by level; -1: into none. */
static void elist_move(struct vm_slab *s, int level) {
  struct vm_pool *p = s->pool;
  if (level == s->elevel) return;
  if (s->elevel >= 0) {
    if (s->eprev)
      s->eprev->enext = s->enext;
    else
      p->elist[s->elevel] = s->enext;
    if (s->enext) s->enext->eprev = s->eprev;
  }
  s->elevel = level;
  if (level < 0) return;
  s->eprev = NULL;
  s->enext = p->elist[level];
  if (s->enext) s->enext->eprev = s;
  p->elist[level] = s;
}

static void slist_update(struct vm_slab *s, bool want) {
  struct vm_pool *p = s->pool;
  if (want == s->in_slist) return;
  if (want) {
    s->sprev = NULL;
    s->snext = p->slist;
    if (s->snext) s->snext->sprev = s;
    p->slist = s;
  } else {
    if (s->sprev)
      s->sprev->snext = s->snext;
    else
      p->slist = s->snext;
    if (s->snext) s->snext->sprev = s->sprev;
  }
  s->in_slist = want;
}

/* Where the slab belongs, after a change of its units; `run` bounds its longest free run. */
static void settle(struct vm_slab *s, uint32_t run) {
  uint32_t most = s->free_units - s->soiled;
  s->max_run = run < most ? run : most;
  if (s->evacuating) return;
  if (bin_of(s->max_run) != s->bin || level_of(s) != s->level) {
    bin_remove(s);
    bin_insert(s);
  }
  elist_move(s, s->empty_chunks ? s->level : -1);
  slist_update(s, s->soiled || s->merged);
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
}

static struct vm_run take_units(struct vm_ctx *c, struct vm_slab *s, uint32_t unit, uint32_t n) {
  vm_bits_set(s->free_map, unit, n, false);
  for (uint32_t i = 0; i < n; i++) s->refs[unit + i] = 1;
  s->free_units -= n;
  s->pool->free_units -= n;
  c->used_units += n;
  chunks_account(c, s, unit, n, false);
  settle(s, s->max_run);
  if (s->pool == &c->pools[0]) vm_worker_low(c);
  return (struct vm_run){s, unit, n};
}

/* Units that are free (and counted so) become such that can be taken. */
static void offer(struct vm_ctx *c, struct vm_slab *s, uint32_t unit, uint32_t n) {
  uint64_t bound = 2 * (uint64_t)s->max_run + n;
  vm_bits_set(s->free_map, unit, n, true);
  chunks_account(c, s, unit, n, true);
  settle(s, bound < s->units ? (uint32_t)bound : s->units);
}

static void soil(struct vm_ctx *c, struct vm_slab *s, uint32_t unit, uint32_t n) {
  vm_bits_set(s->soil_map, unit, n, true);
  s->soiled += n;
  if (!s->evacuating) s->pool->soiled += n;
  settle(s, s->max_run);
  vm_clean_want(c);
}

static void unsoil(struct vm_ctx *c, struct vm_slab *s, uint32_t unit, uint32_t n) {
  vm_bits_set(s->soil_map, unit, n, false);
  s->soiled -= n;
  if (!s->evacuating) s->pool->soiled -= n;
  offer(c, s, unit, n);
}

void vm_pool_give(struct vm_ctx *c, struct vm_slab *s, uint32_t unit, uint32_t n) {
  s->free_units += n;
  if (!s->evacuating) s->pool->free_units += n;
  for (uint32_t i = 0, k; i < n; i += k) {
    bool dirty = vm_bit(s->dirty_map, unit + i);
    k = vm_bits_run(s->dirty_map, unit + i, n - i, dirty);
    if (dirty)
      soil(c, s, unit + i, k);
    else
      offer(c, s, unit + i, k);
  }
}

void vm_pool_cleaned(struct vm_ctx *c, struct vm_slab *s, uint32_t unit, uint32_t n) {
  for (uint32_t i = unit; i < unit + n; i++) {
    uint32_t k = 1;
    if (!vm_bit(s->soil_map, i)) continue;
    while (i + k < unit + n && vm_bit(s->soil_map, i + k)) k++;
    unsoil(c, s, i, k);
    i += k - 1;
  }
}

/* Puts everything that is dirty at disposal too. Whether there was anything. */
static bool merge_soiled(struct vm_ctx *c, struct vm_pool *p) {
  if (!p->soiled) return false;
  for (struct vm_slab *s = p->slist, *next; s; s = next) {
    next = s->snext;
    if (!s->soiled) continue;
    s->merged = true;
    vm_pool_cleaned(c, s, 0, s->units);
  }
  return true;
}

/* A word of the map of units that are free and dirty. */
static uint64_t dirty_free(const struct vm_slab *s, uint32_t w) { return s->soil_map[w] | (s->free_map[w] & s->dirty_map[w]); }

uint64_t vm_pool_dirty_units(const struct vm_ctx *c) {
  uint64_t n = 0;
  for (size_t i = 0; i < VM_POOLS; i++)
    for (const struct vm_slab *s = c->pools[i].slist; s; s = s->snext)
      for (uint32_t w = 0; w * WORD < s->units; w++) n += (uint32_t)__builtin_popcountll(dirty_free(s, w));
  return n;
}

uint32_t vm_pool_pick_dirty(struct vm_pool *p, struct vm_run *runs, uint32_t most, uint32_t *units) {
  uint32_t n = 0;
  for (struct vm_slab *s = p->slist, *next; s && n < most && *units; s = next) {
    bool dirty = false;
    uint32_t u = 0;
    next = s->snext;
    while (u < s->units && n < most && *units) {
      uint32_t k = 0;
      uint64_t w = dirty_free(s, u / WORD) >> (u % WORD), open = w & ~(s->zero_map[u / WORD] >> (u % WORD));
      dirty |= w != 0;
      if (!open) {
        u = (u / WORD + 1) * WORD;
        continue;
      }
      u += (uint32_t)__builtin_ctzll(open);
      while (k < *units && u + k < s->units && vm_bit(&(uint64_t){dirty_free(s, (u + k) / WORD)}, (u + k) % WORD) &&
             !vm_bit(s->zero_map, u + k))
        k++;
      vm_bits_set(s->zero_map, u, k, true);
      runs[n++] = (struct vm_run){s, u, k};
      s->cleaning++;
      *units -= k;
      u += k;
    }
    if (u >= s->units && !dirty) s->merged = false;
    slist_update(s, s->soiled || s->merged);
  }
  return n;
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

/* In the fullest slab that has one; `last`: the emptiest level that is looked at. */
static bool find_fit(struct vm_pool *p, uint32_t n, uint32_t align, uint32_t offset, int last, struct vm_run *out) {
  for (int level = 0; level <= last; level++)
    for (uint64_t mask = p->bin_mask[level] & ~0ull << bin_of(n); mask; mask &= mask - 1) {
      struct vm_slab *next;
      for (struct vm_slab *s = p->bins[level][__builtin_ctzll(mask)]; s; s = next) {
        uint32_t longest = 0, unit;
        next = s->next;
        if (s->max_run < n) continue;
        unit = slab_search(s, n, align, offset, &longest);
        if (unit != UINT32_MAX) {
          *out = (struct vm_run){s, unit, n};
          return true;
        }
        if (longest < s->max_run) settle(s, longest);
      }
    }
  return false;
}

/* The longest aligned piece, at most n, at least align. */
static bool find_longest(struct vm_pool *p, uint32_t n, uint32_t align, int last, struct vm_run *out) {
  for (uint32_t want = n; want >= align; want = want / 2 / align * align)
    if (find_fit(p, want, align, 0, last, out)) return true;
  return false;
}

static bool find_empty_chunk(struct vm_ctx *c, struct vm_pool *p, uint32_t offset, uint32_t n,
                             struct vm_run *out) {
  uint32_t cu = c->chunk_units;
  for (int level = 0; level < POOL_LEVELS; level++)
    for (struct vm_slab *s = p->elist[level]; s; s = s->enext)
      for (uint32_t k = 0; k < s->chunks; k++)
        if (s->chunk_free[k] == cu) {
          *out = (struct vm_run){s, k * cu + offset, n < cu - offset ? n : cu - offset};
          return true;
        }
  return false;
}

/* With one_page_slabs a page is a slab of its own: one that is empty and of just this size. */
static bool find_page_slab(struct vm_pool *p, uint32_t units, struct vm_run *out) {
  for (struct vm_slab *s = p->bins[LEVEL_EMPTY][bin_of(units)]; s; s = s->next)
    if (s->units == units && s->max_run == units) {
      *out = (struct vm_run){s, 0, units};
      return true;
    }
  return false;
}

/* Among what can be taken at once. */
static struct vm_run take_ready(struct vm_ctx *c, struct vm_pool *p, uint32_t n, uint32_t align,
                                const struct vm_place *place) {
  uint32_t cu = c->chunk_units;
  struct vm_run r = {NULL, 0, 0};
  if (c->info.one_page_slabs) return find_page_slab(p, align, &r) ? take_units(c, r.slab, r.unit, r.n) : r;
  if (place->left && place->left->slab) {
    struct vm_slab *s = c->slabs[place->left->slab];
    uint32_t unit = place->left->unit + 1;
    if (s && s->pool == p && !s->evacuating && unit < s->units && (unit & (align - 1)) == 0 && vm_bit(s->free_map, unit)) {
      uint32_t max = s->units - unit < n ? s->units - unit : n;
      uint32_t len = vm_bits_run(s->free_map, unit, max, true) & ~(align - 1);
      if (len) return take_units(c, s, unit, len);
    }
  }
  if (n >= cu && cu > align && find_fit(p, n, cu, place->offset, LEVEL_EMPTY, &r)) return take_units(c, r.slab, r.unit, r.n);
  if (place->spread && n < cu && (place->offset & (align - 1)) == 0 && find_empty_chunk(c, p, place->offset, n, &r))
    return take_units(c, r.slab, r.unit, r.n & ~(align - 1));
  if (find_longest(p, n, align, LEVEL_EMPTY, &r)) return take_units(c, r.slab, r.unit, r.n);
  return (struct vm_run){NULL, 0, 0};
}

struct vm_run vm_pool_take(struct vm_ctx *c, struct vm_pool *p, uint64_t want, uint32_t align,
                           const struct vm_place *place) {
  uint32_t n = want > UINT32_MAX / 4 ? UINT32_MAX / 4 & ~(align - 1) : (uint32_t)want;
  struct vm_run r = {NULL, 0, 0};
  if (p->free_units >= align) r = take_ready(c, p, n, align, place);
  if (!r.n && merge_soiled(c, p)) r = take_ready(c, p, n, align, place);
  return r;
}

struct vm_run vm_pool_take_packed(struct vm_ctx *c, struct vm_pool *p, uint32_t n, uint32_t align) {
  struct vm_run r = {NULL, 0, 0};
  for (int again = 0; again < 2; again++) {
    if (find_longest(p, n, align, LEVEL_EMPTY - 1, &r)) return take_units(c, r.slab, r.unit, r.n);
    if (!merge_soiled(c, p)) break;
  }
  return r;
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
  free(s->soil_map);
  free(s->dirty_map);
  free(s->claim_map);
  free(s->zero_map);
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
  s->elevel = -1;
  s->free_map = vm_calloc(c, words, sizeof(uint64_t));
  s->soil_map = s->free_map ? vm_calloc(c, words, sizeof(uint64_t)) : NULL;
  s->dirty_map = s->soil_map ? vm_calloc(c, words, sizeof(uint64_t)) : NULL;
  s->claim_map = s->dirty_map ? vm_calloc(c, words, sizeof(uint64_t)) : NULL;
  s->zero_map = s->claim_map ? vm_calloc(c, words, sizeof(uint64_t)) : NULL;
  s->fill_map = s->zero_map ? vm_calloc(c, words, sizeof(uint64_t)) : NULL;
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
  vm_pool_give(c, s, 0, s->units);
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

/* The slab is nobody's any more, but its destroyer's. */
static void entry_free(struct vm_ctx *c, struct vm_slab *s) {
  c->slabs[s->index] = NULL;
  if (s->alias) c->alias_mappings--;
  if (s->index < c->slab_hint) c->slab_hint = s->index;
  c->slab_bytes -= s->bytes;
  c->live_slabs--;
}

void vm_pool_set_aside(struct vm_slab *s) {
  bin_remove(s);
  elist_move(s, -1);
  slist_update(s, false);
  s->pool->free_units -= s->free_units;
  s->pool->soiled -= s->soiled;
  s->evacuating = true;
}

void vm_pool_put_back(struct vm_slab *s) {
  s->evacuating = false;
  s->pool->free_units += s->free_units;
  s->pool->soiled += s->soiled;
  bin_insert(s);
  settle(s, s->max_run);
}

void vm_slab_forget(struct vm_ctx *c, struct vm_slab *s) { entry_free(c, s); }

static void slab_unlink(struct vm_ctx *c, struct vm_slab *s) {
  vm_pool_set_aside(s);
  entry_free(c, s);
}

/* Empty slabs, taken out of the tables, to be destroyed without the lock: while `keep_bytes` stay free; with
 * grow_id != 0 only those made by that call of vm_pool_grow. *busy: one was passed over because it is being zeroed. */
static struct vm_slab *unlink_empty(struct vm_ctx *c, uint64_t keep_bytes, uint64_t grow_id, bool *busy) {
  struct vm_slab *list = NULL, *next;
  uint64_t keep = vm_units_up(c, keep_bytes), total = vm_pool_free_units(c);
  *busy = false;
  for (size_t i = 0; i < VM_POOLS; i++)
    for (int b = POOL_BINS - 1; b >= 0 && total > keep && c->pools[i].bin_mask[LEVEL_EMPTY]; b--)
      for (struct vm_slab *s = c->pools[i].bins[LEVEL_EMPTY][b]; s && total > keep; s = next) {
        next = s->next;
        if (total - s->units < keep) continue;
        if (grow_id && s->grow_id != grow_id) continue;
        if (s->cleaning) {
          *busy = true;
          continue;
        }
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
int vm_slab_destroy(struct vm_ctx *c, struct vm_slab *s) {
  int err = vm_drv_unalias(c, s);
  if (!err) err = vm_drv_slab_destroy(c, s);
  vm_slab_free(s);
  return err;
}

static uint64_t destroy_list(struct vm_ctx *c, struct vm_slab *list) {
  uint64_t freed = 0;
  while (list) {
    struct vm_slab *next = list->next;
    uint64_t bytes = list->bytes;
    if (!vm_slab_destroy(c, list)) freed += bytes;
    list = next;
  }
  return freed;
}

static uint64_t give_back(struct vm_ctx *c, uint64_t keep, uint64_t grow_id, bool wait) {
  struct vm_slab *list, *rest = NULL;
  bool busy;
  uint64_t freed;
  pthread_mutex_lock(&c->lock);
  list = unlink_empty(c, keep, grow_id, &busy);
  if (busy && wait) {
    vm_clean_hold(c);
    rest = unlink_empty(c, keep, grow_id, &busy);
    vm_clean_release(c);
  }
  pthread_mutex_unlock(&c->lock);
  freed = destroy_list(c, list);
  return freed + destroy_list(c, rest);
}

uint64_t vm_pool_trim(struct vm_ctx *c, uint64_t keep, bool wait) {
  vm_clean_start(c);
  return give_back(c, keep, 0, wait);
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
        VM_UNDO(vm_slab_destroy(c, s));
        return err;
      }
    }
    if (err != -ENOMEM || bytes <= least) return err;
    bytes = bytes / 2 > least ? vm_round_up(bytes / 2, least) : least;
  }
}

void vm_pool_undo_grow(struct vm_ctx *c, uint64_t id) {
  if (id) give_back(c, 0, id, true);
}

/* Memory is short, but not in all: empty slabs that are of no use for pages of `align` units in this pool are
 * given back when they make up for what is missing. */
static bool reclaim(struct vm_ctx *c, const struct vm_pool *p, uint32_t align, uint64_t bytes) {
  struct vm_slab *list = NULL;
  uint64_t found = 0;
  pthread_mutex_lock(&c->lock);
  vm_clean_hold(c);
  for (int pass = 0; pass < 2 && (!pass || found >= bytes); pass++)
    for (uint32_t i = 1; i < c->nslabs; i++) {
      struct vm_slab *s = c->slabs[i];
      if (!s || s->free_units != s->units || s->evacuating) continue;
      if (s->pool == p && (c->info.one_page_slabs ? s->units == align : s->units >= align)) continue;
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
  vm_clean_start(c);
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
  vm_pool_give(c, s, unit, n);
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
