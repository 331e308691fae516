/* SPDX-License-Identifier: MIT */
/* Slabs, and the state of each of their units. */
#include <stdlib.h>
#include <string.h>

#include "phys/phys.h"

enum { MAPS = 6 };

struct vm_slab *vm_slab_make(struct vm_ctx *c, struct vm_pool *p, uint64_t bytes, uint64_t page_size, int *err) {
  uint32_t units = (uint32_t)vm_units(c, bytes), chunks = (units + c->chunk_units - 1) / c->chunk_units;
  size_t words = (units + 63u) / 64u, mixed = (chunks + 63u) / 64u;
  struct vm_slab *s =
      vm_calloc(c, 1, sizeof(*s) + (MAPS * words + mixed) * sizeof(uint64_t) + (units + chunks) * sizeof(uint32_t));
  *err = -ENOMEM;
  if (!s) return NULL;
  s->bytes = bytes;
  s->pool = p;
  s->units = units;
  if (c->large_entries && p->location != VMEM_HOST && page_size < LARGE_PAGE) page_size = LARGE_PAGE;
  s->large = c->large_pages && page_size >= LARGE_PAGE && !(bytes & (LARGE_PAGE - 1));
  s->chunks = chunks;
  s->elevel = -1;
  s->free_map = s->maps;
  s->soil_map = s->free_map + words;
  s->dirty_map = s->soil_map + words;
  s->claim_map = s->dirty_map + words;
  s->zero_map = s->claim_map + words;
  s->fill_map = s->zero_map + words;
  s->mixed_map = s->fill_map + words;
  s->refs = (uint32_t *)(s->mixed_map + mixed);
  s->chunk_free = s->refs + units;
  if ((*err = vm_drv_slab_create(c, bytes, page_size, p->location, p->device, &s->priv))) {
    free(s);
    return NULL;
  }
  if (!c->info->fresh_is_zero) vm_bits_set(s->dirty_map, 0, units, true);
  return s;
}

int vm_slab_destroy(struct vm_ctx *c, struct vm_slab *s) {
  int err = s->alias ? vm_drv_unalias(c, s->alias, s->bytes, s->alias_priv) : 0;
  if (!err) err = vm_drv_slab_destroy(c, s->priv, s->bytes);
  free(s);
  return err;
}

int vm_slab_enter(struct vm_ctx *c, struct vm_slab *s) {
  struct vm_phys *p = c->phys;
  uint32_t i = p->slab_hint ? p->slab_hint : 1;
  while (i < p->nslabs && p->slabs[i]) i++;
  if (i >= p->cap_slabs) {
    uint32_t cap = p->cap_slabs ? 2 * p->cap_slabs : 64;
    struct vm_slab **v = vm_realloc(c, p->slabs, cap, sizeof(*v));
    if (!v) return -ENOMEM;
    memset(v + p->cap_slabs, 0, (cap - p->cap_slabs) * sizeof(*v));
    p->slabs = v;
    p->cap_slabs = cap;
  }
  if (i >= p->nslabs) p->nslabs = i + 1;
  p->slab_hint = i + 1;
  p->slabs[i] = s;
  p->live_slabs++;
  p->slab_bytes += s->bytes;
  s->index = i;
  return 0;
}

void vm_slab_forget(struct vm_ctx *c, struct vm_slab *s) {
  struct vm_phys *p = c->phys;
  p->slabs[s->index] = NULL;
  if (s->alias) c->driver->aliases--;
  if (s->index < p->slab_hint) p->slab_hint = s->index;
  p->slab_bytes -= s->bytes;
  p->live_slabs--;
}

/* ---- units ------------------------------------------------------------------------------------- */

void vm_units_offer(struct vm_slab *s, uint32_t unit, uint32_t n) { vm_bits_set(s->free_map, unit, n, true); }

void vm_units_soil(struct vm_slab *s, uint32_t unit, uint32_t n, bool soil) { vm_bits_set(s->soil_map, unit, n, soil); }

void vm_units_take(struct vm_slab *s, uint32_t unit, uint32_t n) {
  vm_bits_set(s->free_map, unit, n, false);
  for (uint32_t i = 0; i < n; i++) s->refs[unit + i] = 1;
}

void vm_units_untake(struct vm_slab *s, uint32_t unit, uint32_t n) { memset(s->refs + unit, 0, n * sizeof(*s->refs)); }

void vm_units_ref(struct vm_slab *s, uint32_t unit, uint32_t n) {
  for (uint32_t i = 0; i < n; i++) s->refs[unit + i]++;
}

uint32_t vm_units_unref(struct vm_slab *s, uint32_t unit, uint32_t n, uint32_t *freed) {
  uint32_t i = 0;
  *freed = 0;
  while (i < n && s->refs[unit + i] != 1) s->refs[unit + i++]--;
  for (; i < n && s->refs[unit + i] == 1; i++, ++*freed) s->refs[unit + i] = 0;
  return i;
}

void vm_units_set_dirty(struct vm_slab *s, uint32_t unit, uint32_t n, bool dirty) {
  vm_bits_set(s->dirty_map, unit, n, dirty);
}

static bool is_stale(const struct vm_slab *s, uint32_t unit) {
  return vm_bit(s->dirty_map, unit) && !vm_bit(s->claim_map, unit);
}

uint32_t vm_units_stale(const struct vm_slab *s, uint32_t *unit, uint32_t end, bool zero, bool *must) {
  uint32_t u = *unit;
  do {
    u += vm_bits_run(s->dirty_map, u, end - u, false);
  } while (u < end && !is_stale(s, u) && ++u < end);
  *unit = u;
  if (u >= end) return 0;
  *must = zero || vm_bit(s->zero_map, u);
  while (u < end && is_stale(s, u) && (zero || vm_bit(s->zero_map, u)) == *must) u++;
  return u - *unit;
}

void vm_units_claim(struct vm_slab *s, uint32_t unit, uint32_t n) { vm_bits_set(s->claim_map, unit, n, true); }

void vm_units_end_claim(struct vm_slab *s, uint32_t unit, uint32_t n, bool zeroed, bool clean) {
  vm_bits_set(s->claim_map, unit, n, false);
  if (zeroed) vm_bits_set(s->zero_map, unit, n, false);
  if (clean) vm_bits_set(s->dirty_map, unit, n, false);
}

void vm_units_set_zeroing(struct vm_slab *s, uint32_t unit, uint32_t n) { vm_bits_set(s->zero_map, unit, n, true); }

void vm_units_end_zeroing(struct vm_slab *s, uint32_t unit, uint32_t n, bool failed) {
  /* A plan that claimed a unit zeroes it again and records that itself; it may already have. */
  for (uint32_t u = unit; u < unit + n && !failed; u++)
    if (vm_bit(s->zero_map, u) && !vm_bit(s->claim_map, u)) vm_bits_set(s->dirty_map, u, 1, false);
  vm_bits_set(s->zero_map, unit, n, false);
}

void vm_units_set_filling(struct vm_slab *s, uint32_t unit, uint32_t n, bool filling) {
  vm_bits_set(s->fill_map, unit, n, filling);
}

void vm_unit_quarantine(struct vm_ctx *c, struct vm_slab *s, uint32_t unit) {
  if (s->refs[unit] & REF_QUARANTINED) return;
  s->refs[unit] |= REF_QUARANTINED;
  c->phys->used_units--;
  s->pool->used_units--;
  c->phys->quarantined_units++;
}

void vm_unit_move(struct vm_ctx *c, struct vm_slab *from, uint32_t unit, struct vm_slab *to, uint32_t to_unit) {
  to->refs[to_unit] += from->refs[unit];
  vm_bits_set(to->dirty_map, to_unit, 1, vm_bit(from->dirty_map, unit));
  from->refs[unit] = 0;
  c->phys->used_units--;
  from->pool->used_units--;
}
