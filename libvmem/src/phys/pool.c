/* SPDX-License-Identifier: MIT */
/*
 * The pool: chooses where the next run of pages comes from.
 *
 * A slab keeps a bitmap of free units, a count of free units per 2 MiB chunk, and an upper bound on its
 * longest free run. Slabs are binned by how full they are and by that bound, so that a run of n
 * units is searched for only in slabs that may have one, the fullest first: the emptier ones can
 * then become empty and return to the driver. A failed search makes the bound exact.
 *
 * Where a run is taken, in this order (vm_pool_take):
 *   0. with large entries: right before its right neighbour, if that is in the same block, so that the run fills the
 *      gap in the block
 *   1. right after its left neighbour: the two then form one run
 *   2. 2 MiB or more: at the offset in a chunk that the address has in its block, so that 2 MiB entries fit
 *   3. with `spread`: in an empty chunk, at the address's offset, so that the stretch can grow into the
 *      units after it (a soft reservation: other runs may use the chunk when memory is short); chunks of empty
 *      slabs come last; with large entries, if no chunk is empty, in one that several stretches share
 *   4. the first fit in the fullest slab
 *   5. the longest piece available; the caller calls again for the rest
 *
 * Free units with old contents (dirty) are kept apart (soil_map) until clean.c has zeroed them.
 * They are taken only when no others are left, and the plan that maps them zeroes them first.
 */
#include "phys/phys.h"

#define WORD 64u

static int bin_of(uint32_t run) { return run ? 32 - __builtin_clz(run) : 0; }

/* The product fits in 32 bits: a 1 TiB slab has 2^28 units of 4 KiB. */
static int level_of(const struct vm_slab *s) {
  return s->free_units == s->units ? LEVEL_EMPTY : (int)(s->free_units * LEVEL_EMPTY / s->units);
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

/* Moves a slab to the list of slabs with empty chunks at `level`; -1: to none. */
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

/* Moves the slab to its bin after its units changed; `run` bounds its longest free run. */
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

/* Marks a chunk as no longer shared by several stretches. */
static void unmix(struct vm_slab *s, uint32_t chunk) {
  if (!vm_bit(s->mixed_map, chunk)) return;
  vm_bits_set(s->mixed_map, chunk, 1, false);
  s->pool->mixed_units -= s->chunk_free[chunk];
}

static void chunks_account(struct vm_ctx *c, struct vm_slab *s, uint32_t unit, uint32_t n, bool free) {
  while (n) {
    uint32_t chunk = unit >> c->chunk_shift, end = (chunk + 1) << c->chunk_shift;
    uint32_t take = end - unit < n ? end - unit : n, size = c->chunk_units;
    if (end > s->units) size = s->units - chunk * c->chunk_units;
    if (s->chunk_free[chunk] == size) s->empty_chunks--;
    s->chunk_free[chunk] = free ? s->chunk_free[chunk] + take : s->chunk_free[chunk] - take;
    if (vm_bit(s->mixed_map, chunk)) s->pool->mixed_units += free ? take : -(uint64_t)take;
    if (s->chunk_free[chunk] == size) {
      s->empty_chunks++;
      unmix(s, chunk);
    }
    unit += take;
    n -= take;
  }
}

/* Wakes the worker to grow the pool if it falls below pool_low. */
static void watch_low(struct vm_ctx *c) {
  if (c->phys->low || c->phys->pools[0].free_units >= vm_units_up(c, c->opts.pool_low)) return;
  c->phys->low = true;
  pthread_cond_signal(&c->work_cond);
}

static struct vm_run take_units(struct vm_ctx *c, struct vm_slab *s, uint32_t unit, uint32_t n) {
  vm_units_take(s, unit, n);
  s->free_units -= n;
  s->pool->free_units -= n;
  c->phys->used_units += n;
  s->pool->used_units += n;
  if (s->pool->used_units > s->pool->peak_units) s->pool->peak_units = s->pool->used_units;
  chunks_account(c, s, unit, n, false);
  settle(s, s->max_run);
  if (s->pool == &c->phys->pools[0]) watch_low(c);
  return (struct vm_run){s, unit, n};
}

/* Makes free units, already counted as free, available. */
static void offer(struct vm_ctx *c, struct vm_slab *s, uint32_t unit, uint32_t n) {
  uint64_t bound = 2 * (uint64_t)s->max_run + n;
  vm_units_offer(s, unit, n);
  chunks_account(c, s, unit, n, true);
  settle(s, bound < s->units ? (uint32_t)bound : s->units);
}

static void want_cleaning(struct vm_ctx *c) {
  struct vm_clean *k = &c->phys->clean;
  if (!k->background || k->wanted) return;
  k->wanted = true;
  __atomic_store_n(&c->worker_wanted, true, __ATOMIC_RELAXED);
  pthread_cond_signal(&c->work_cond);
}

static void soil(struct vm_ctx *c, struct vm_slab *s, uint32_t unit, uint32_t n) {
  vm_units_soil(s, unit, n, true);
  s->soiled += n;
  if (!s->evacuating) s->pool->soiled += n;
  settle(s, s->max_run);
  want_cleaning(c);
}

static void unsoil(struct vm_ctx *c, struct vm_slab *s, uint32_t unit, uint32_t n) {
  vm_units_soil(s, unit, n, false);
  s->soiled -= n;
  if (!s->evacuating) s->pool->soiled -= n;
  offer(c, s, unit, n);
}

/* Makes clean units available and keeps dirty ones apart, by dirty_map. */
static void give(struct vm_ctx *c, struct vm_slab *s, uint32_t unit, uint32_t n) {
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

void vm_pool_add(struct vm_ctx *c, struct vm_slab *s) {
  bin_insert(s);
  give(c, s, 0, s->units);
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

/* Makes all dirty free units available too; true if there were any. */
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

/* Returns word w of the bitmap of units that are both free and dirty. */
static uint64_t dirty_free(const struct vm_slab *s, uint32_t w) {
  return s->soil_map[w] | (s->free_map[w] & s->dirty_map[w]);
}

uint64_t vm_pool_dirty_units(const struct vm_ctx *c) {
  uint64_t n = 0;
  for (size_t i = 0; i < VM_POOLS; i++)
    for (const struct vm_slab *s = c->phys->pools[i].slist; s; s = s->snext)
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
      vm_units_set_zeroing(s, u, k);
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

/* First run of n free units whose start is `offset` modulo align; UINT32_MAX = none. A failed full search has found
 * the longest run, which becomes the slab's bound. */
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

/* Finds a fit in the fullest slab that has one; `last`: the emptiest level searched. */
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

/* Finds the longest aligned piece, at most n and at least align units. */
static bool find_longest(struct vm_pool *p, uint32_t n, uint32_t align, int last, struct vm_run *out) {
  for (uint32_t want = n; want >= align; want = want / 2 / align * align)
    if (find_fit(p, want, align, 0, last, out)) return true;
  return false;
}

static bool find_empty_chunk(struct vm_ctx *c, struct vm_pool *p, uint32_t offset, uint32_t n, struct vm_run *out) {
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

/* Returns up to n free units of a chunk. */
static struct vm_run run_in_chunk(struct vm_ctx *c, struct vm_slab *s, uint32_t chunk, uint32_t n, uint32_t align) {
  uint32_t unit = chunk * c->chunk_units, end = unit + c->chunk_units;
  if (end > s->units) end = s->units;
  while (unit < end) {
    uint32_t len = vm_bits_run(s->free_map, unit, (end - unit < n ? end - unit : n), true) & ~(align - 1);
    if (len) return (struct vm_run){s, unit, len};
    unit += align;
  }
  return (struct vm_run){NULL, 0, 0};
}

/* Finds units of a chunk that several stretches share already. */
static bool find_mixed(struct vm_ctx *c, struct vm_pool *p, uint32_t n, uint32_t align, struct vm_run *out) {
  const struct vm_phys *all = c->phys;
  struct vm_slab *s = p->mixed_slab < all->nslabs ? all->slabs[p->mixed_slab] : NULL;
  if (p->mixed_units < align) return false;
  if (s && s->pool == p && !s->evacuating && p->mixed_chunk < s->chunks && vm_bit(s->mixed_map, p->mixed_chunk) &&
      (*out = run_in_chunk(c, s, p->mixed_chunk, n, align)).n)
    return true;
  for (uint32_t i = 1; i < all->nslabs; i++) {
    if (!(s = all->slabs[i]) || s->pool != p || s->evacuating || s->free_units < align) continue;
    for (uint32_t k = 0; k < s->chunks; k++)
      if (vm_bit(s->mixed_map, k) && s->chunk_free[k] && (*out = run_in_chunk(c, s, k, n, align)).n) {
        p->mixed_slab = i;
        p->mixed_chunk = k;
        return true;
      }
  }
  return false;
}

/* For less than a block, if no chunk is empty and find_mixed fails: finds units of the chunk that has the most free,
 * and marks it as shared. Later runs go there too, so that only few stretches lose the remainder of their chunk. */
static bool mix_chunk(struct vm_ctx *c, struct vm_pool *p, uint32_t n, uint32_t align, struct vm_run *out) {
  struct vm_slab *emptiest = NULL;
  uint32_t most = 0, chunk = 0;
  for (uint32_t i = 1; i < c->phys->nslabs && most + 1 < c->chunk_units; i++) {
    struct vm_slab *s = c->phys->slabs[i];
    if (!s || s->pool != p || s->evacuating) continue;
    for (uint32_t k = 0; k < s->chunks; k++)
      if (s->chunk_free[k] > most && run_in_chunk(c, s, k, n, align).n) {
        most = s->chunk_free[k];
        emptiest = s;
        chunk = k;
      }
  }
  if (!emptiest) return false;
  if (!vm_bit(emptiest->mixed_map, chunk)) p->mixed_units += most;
  vm_bits_set(emptiest->mixed_map, chunk, 1, true);
  p->mixed_slab = emptiest->index;
  p->mixed_chunk = chunk;
  *out = run_in_chunk(c, emptiest, chunk, n, align);
  return true;
}

/* With one_page_slabs each page is a slab: finds an empty one of exactly this size. */
static bool find_page_slab(struct vm_pool *p, uint32_t units, struct vm_run *out) {
  for (struct vm_slab *s = p->bins[LEVEL_EMPTY][bin_of(units)]; s; s = s->next)
    if (s->units == units && s->max_run == units) {
      *out = (struct vm_run){s, 0, units};
      return true;
    }
  return false;
}

/* Returns the number of units of a run at `place` that come before its first whole block. */
static uint32_t head_of(const struct vm_ctx *c, const struct vm_place *place) {
  return (c->chunk_units - place->offset) & (c->chunk_units - 1);
}

/* Returns how many of the `len` free units right after the last run to take. Without large entries, all. With large
 * entries, the run is not continued if that would keep blocks of addresses from getting a large entry: if the units'
 * offset in their chunk differs from the addresses' offset in their block, or if the rest of a block is not free. */
static uint32_t continuation(const struct vm_ctx *c, const struct vm_slab *s, uint32_t unit, uint32_t len, uint32_t n,
                             const struct vm_place *place) {
  uint32_t cu = c->chunk_units, head = head_of(c, place), whole;
  if (!s->large || s->pool->large) return len;
  if ((unit & (cu - 1)) != place->offset) { /* do not continue into another chunk; 0 at the first page of a block */
    uint32_t rest = (cu - (unit & (cu - 1))) & (cu - 1);
    if (rest < head) head = rest;
    return head < len ? head : len;
  }
  if (len <= head) return len;
  whole = head + ((len - head) & ~(cu - 1));
  if (len < n) return whole;
  /* The last block would be incomplete. If it is to grow page by page, it needs a chunk that was empty. */
  return place->spread && whole < len && s->chunk_free[(unit + len - 1) >> c->chunk_shift] < cu ? whole : len;
}

/* Returns the number of units to take right after the last run; 0: none. */
static uint32_t fits_behind(struct vm_ctx *c, struct vm_pool *p, uint32_t n, uint32_t align,
                            const struct vm_place *place) {
  const struct vm_slab *s = place->slab;
  uint32_t unit = place->unit, max, len;
  if (!s || s->pool != p || s->evacuating || unit >= s->units || unit & (align - 1) || !vm_bit(s->free_map, unit))
    return 0;
  max = s->units - unit < n ? s->units - unit : n;
  len = vm_bits_run(s->free_map, unit, max, true) & ~(align - 1);
  return continuation(c, s, unit, len, n, place) & ~(align - 1);
}

/* For large entries: takes the longest part that it finds of a run of n units, placed so that each whole block fills a
 * chunk; failing that, only the units before the first whole block. */
static struct vm_run take_blocks(struct vm_ctx *c, struct vm_pool *p, uint32_t n, uint32_t align,
                                 const struct vm_place *place) {
  uint32_t cu = c->chunk_units, head = head_of(c, place), behind = fits_behind(c, p, n, align, place);
  struct vm_run r = {NULL, 0, 0};
  if (behind && behind >= head) return take_units(c, place->slab, place->unit, behind);
  if (find_fit(p, n, cu, place->offset, LEVEL_EMPTY, &r)) return take_units(c, r.slab, r.unit, r.n);
  for (uint32_t blocks = (n - head) / cu; blocks; blocks /= 2)
    if (find_fit(p, head + blocks * cu, cu, place->offset, LEVEL_EMPTY, &r)) return take_units(c, r.slab, r.unit, r.n);
  if (head && find_fit(p, head, cu, place->offset, LEVEL_EMPTY, &r)) return take_units(c, r.slab, r.unit, r.n);
  return (struct vm_run){NULL, 0, 0};
}

/* Takes a run from the available units. */
static struct vm_run take_ready(struct vm_ctx *c, struct vm_pool *p, uint32_t n, uint32_t align,
                                const struct vm_place *place) {
  uint32_t cu = c->chunk_units, behind;
  struct vm_run r = {NULL, 0, 0};
  if (c->info->one_page_slabs) return find_page_slab(p, align, &r) ? take_units(c, r.slab, r.unit, r.n) : r;
  if ((behind = fits_behind(c, p, n, align, place))) return take_units(c, place->slab, place->unit, behind);
  if (n >= cu && cu > align && find_fit(p, n, cu, place->offset, LEVEL_EMPTY, &r))
    return take_units(c, r.slab, r.unit, r.n);
  if (place->spread && n < cu && (place->offset & (align - 1)) == 0 && find_empty_chunk(c, p, place->offset, n, &r))
    return take_units(c, r.slab, r.unit, r.n & ~(align - 1));
  if (c->large_entries && !p->large && place->spread && n < cu &&
      (find_mixed(c, p, n, align, &r) || mix_chunk(c, p, n, align, &r)))
    return take_units(c, r.slab, r.unit, r.n);
  if (find_longest(p, n, align, LEVEL_EMPTY, &r)) return take_units(c, r.slab, r.unit, r.n);
  return (struct vm_run){NULL, 0, 0};
}

/* Makes the dirty units among these available too. */
static void merge_at(struct vm_ctx *c, struct vm_slab *s, uint32_t unit, uint32_t n) {
  if (vm_bits_run(s->soil_map, unit, n, false) == n) return;
  s->merged = true;
  vm_pool_cleaned(c, s, unit, n);
}

/* Takes the missing units of a block before its right neighbour, if all are free at their position in the block. */
static struct vm_run take_before(struct vm_ctx *c, struct vm_pool *p, uint32_t n, uint32_t align,
                                 const struct vm_place *place) {
  struct vm_slab *s = place->right;
  uint32_t cu = c->chunk_units, end = place->end & (cu - 1), unit = place->end - n;
  if (!s || s->pool != p || s->evacuating || !s->large || end < n || place->offset != end - n || unit & (align - 1))
    return (struct vm_run){NULL, 0, 0};
  merge_at(c, s, unit, n);
  if (vm_bits_run(s->free_map, unit, n, true) < n) return (struct vm_run){NULL, 0, 0};
  return take_units(c, s, unit, n);
}

/* Takes units that allow large entries now or after page-by-page growth. Dirty units are equally good for that. */
static struct vm_run take_for_entries(struct vm_ctx *c, struct vm_pool *p, uint32_t *n, uint32_t align,
                                      const struct vm_place *place) {
  uint32_t head = head_of(c, place);
  bool blocks = *n >= head + c->chunk_units, begun = place->slab && place->offset;
  struct vm_slab *s = place->slab;
  struct vm_run r = take_before(c, p, *n, align, place);
  if (r.n) return r;
  if (s && s->pool == p && !s->evacuating && place->unit < s->units && vm_bit(s->soil_map, place->unit)) {
    uint32_t rest = c->chunk_units - (place->unit & (c->chunk_units - 1));
    merge_at(c, s, place->unit, rest < s->units - place->unit ? rest : s->units - place->unit);
  }
  for (int again = 0; again < 2 && (blocks || place->spread); again++) {
    uint32_t behind = blocks ? 0 : fits_behind(c, p, *n, align, place);
    if (behind) return take_units(c, s, place->unit, behind);
    if (blocks && (r = take_blocks(c, p, *n, align, place)).n) return r;
    /* The stretch's other pages of this block are in another chunk, so an empty chunk would not complete the block. */
    if (!blocks && begun && find_mixed(c, p, *n, align, &r)) return take_units(c, r.slab, r.unit, r.n);
    if (!blocks && find_empty_chunk(c, p, place->offset, *n, &r)) return take_units(c, r.slab, r.unit, r.n);
    if (!merge_soiled(c, p)) break;
  }
  if (blocks && head) *n = head; /* take only what precedes the blocks; the next call looks for the blocks alone */
  return (struct vm_run){NULL, 0, 0};
}

struct vm_run vm_pool_take(struct vm_ctx *c, struct vm_pool *p, uint64_t want, uint32_t align,
                           const struct vm_place *place) {
  uint32_t n = want > UINT32_MAX / 4 ? UINT32_MAX / 4 & ~(align - 1) : (uint32_t)want;
  struct vm_run r = {NULL, 0, 0};
  if (c->large_entries && !p->large) r = take_for_entries(c, p, &n, align, place);
  if (!r.n && p->free_units >= align) r = take_ready(c, p, n, align, place);
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

void vm_pools_init(struct vm_ctx *c) {
  struct vm_pool *pools = c->phys->pools;
  pools[0] = (struct vm_pool){.location = VMEM_DEVICE, .device = c->opts.devices[0]};
  pools[1] = (struct vm_pool){.location = VMEM_HOST, .device = c->opts.devices[0]};
  for (uint32_t i = 1; i < c->opts.num_devices; i++)
    pools[1 + i] = (struct vm_pool){.location = VMEM_PEER, .device = c->opts.devices[i]};
  for (uint32_t i = 0; i < VM_PLACES; i++) {
    pools[VM_PLACES + i] = pools[i];
    pools[VM_PLACES + i].large = true;
  }
}

struct vm_pool *vm_pool_of(struct vm_ctx *c, uint32_t location, int32_t device, uint64_t page_size, int *err) {
  struct vm_pool *pools = vm_is_large(c, page_size) ? c->phys->pools + VM_PLACES : c->phys->pools;
  uint32_t i;
  if (location == VMEM_DEVICE) return &pools[0];
  if (location == VMEM_HOST) {
    if (c->info->pub.caps & VMEM_CAP_HOST_PAGES) return &pools[1];
    *err = vm_fail(-EOPNOTSUPP, "back end %s has no host-memory pages", c->be->name);
    return NULL;
  }
  if (location != VMEM_PEER) {
    *err = vm_fail(-EINVAL, "unknown location %u", location);
    return NULL;
  }
  if (!(c->info->pub.caps & VMEM_CAP_PEER)) {
    *err = vm_fail(-EOPNOTSUPP, "back end %s has no pages on peer devices", c->be->name);
    return NULL;
  }
  for (i = 0; i < c->opts.num_devices; i++)
    if (c->opts.devices[i] == device) return i ? &pools[1 + i] : &pools[0];
  *err = vm_fail_at(-EINVAL, 0, 0, 0, "device %d is not one of this context's devices", device);
  return NULL;
}

void vm_pool_set_aside(struct vm_slab *s) {
  bin_remove(s);
  elist_move(s, -1);
  slist_update(s, false);
  for (uint32_t k = 0; k < s->chunks; k++) unmix(s, k);
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

uint64_t vm_pool_free_units(const struct vm_ctx *c) {
  uint64_t total = 0;
  for (size_t i = 0; i < VM_POOLS; i++) total += c->phys->pools[i].free_units;
  return total;
}

/* Frees n units that have no reference left. Lock held; dropped around driver calls. */
static void units_free(struct vm_ctx *c, struct vm_slab *s, uint32_t unit, uint32_t n) {
  bool dirty = true;
  c->phys->used_units -= n;
  s->pool->used_units -= n;
  if (c->be->discard) {
    c->phys->limbo_units += n;
    pthread_mutex_unlock(&c->lock);
    dirty = vm_drv_discard(c, s->priv, vm_bytes(c, unit), vm_bytes(c, n)) != 0 || !c->info->fresh_is_zero;
    pthread_mutex_lock(&c->lock);
    c->phys->limbo_units -= n;
    pthread_cond_broadcast(&c->done_cond); /* wakes calls that wait for pages, and vmem_check */
  }
  vm_units_set_dirty(s, unit, n, dirty);
  give(c, s, unit, n);
}

void vm_units_put(struct vm_ctx *c, struct vm_slab *s, uint32_t unit, uint32_t n) {
  while (n) {
    uint32_t freed, done = vm_units_unref(s, unit, n, &freed);
    if (freed) units_free(c, s, unit + done - freed, freed);
    unit += done;
    n -= done;
  }
}

void vm_pool_untake(struct vm_ctx *c, struct vm_run r) {
  vm_units_untake(r.slab, r.unit, r.n);
  c->phys->used_units -= r.n;
  r.slab->pool->used_units -= r.n;
  give(c, r.slab, r.unit, r.n);
}
