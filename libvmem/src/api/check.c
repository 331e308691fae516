/* SPDX-License-Identifier: MIT */
/* vmem_check: verifies every invariant of the core against a full recount. */
#include <stdlib.h>

#include "api/api.h"

#define BROKEN(...) return vm_fail(-EIO, __VA_ARGS__)
typedef unsigned long long ull;

/* Expected references per slab and unit, mappings and address sums per handle. */
struct census {
  uint32_t **refs;
  uint64_t *mappings, *starts;
  uint64_t calls;   /* live map calls */
  uint64_t entries; /* live large entries */
};

/* A large entry must be one run, 2 MiB aligned in addresses and slab, mapped by a single call. */
static int check_entry(struct vm_ctx *c, struct vm_space *s, uint64_t addr) {
  const struct vm_pte *first = vm_pte(c, s, addr);
  const struct vm_slab *slab = c->phys->slabs[first->slab];
  if (!vm_is_whole(c, s, addr, (struct vm_run){c->phys->slabs[first->slab], first->unit, c->chunk_units}))
    BROKEN("0x%llx is marked as a large entry: unit %u of slab %u cannot have one", (ull)addr, first->unit,
           slab->index);
  for (uint32_t i = 1; i < c->chunk_units; i++) {
    const struct vm_pte *p = addr + LARGE_PAGE <= s->base + s->bytes ? vm_pte(c, s, addr + vm_bytes(c, i)) : NULL;
    if (!p || !(p->flags & PTE_MAPPED) || p->flags & PTE_CALL || p->slab != first->slab || p->unit != first->unit + i ||
        (p->flags ^ first->flags) & PTE_READONLY)
      BROKEN("0x%llx is marked as a large entry: granule %u is not part of it", (ull)addr, i);
  }
  return 0;
}

static int count_space(struct vm_ctx *c, struct vm_space *s, struct census *n) {
  uint64_t mapped = 0, busy = 0, quarantined = 0;
  for (uint64_t a = s->base; a < s->base + s->bytes; a += c->granule) {
    struct vm_pte *p = vm_pte(c, s, a);
    if (!p) {
      a += (uint64_t)(LEAF_PTES - 1) << c->shift;
      continue;
    }
    if (!p->flags) continue;
    if (!p->slab || p->slab >= c->phys->nslabs || !c->phys->slabs[p->slab] || p->unit >= c->phys->slabs[p->slab]->units)
      BROKEN("0x%llx names unit %u of slab %u, which does not exist", (ull)a, p->unit, p->slab);
    n->refs[p->slab][p->unit]++;
    if (p->flags & PTE_MAPPED) mapped++;
    if ((p->flags & (PTE_MAPPED | PTE_CALL)) == (PTE_MAPPED | PTE_CALL)) n->calls++;
    if ((p->flags & (PTE_MAPPED | PTE_LARGE)) == (PTE_MAPPED | PTE_LARGE)) {
      if (check_entry(c, s, a)) return -EIO;
      n->entries += s->large;
    }
    if (p->flags & PTE_BUSY) busy++;
    if (p->flags & PTE_QUARANTINED) quarantined++;
    if ((p->flags & (PTE_MAPPED | PTE_START)) == (PTE_MAPPED | PTE_START) && p->handle) {
      n->mappings[p->handle]++;
      n->starts[p->handle] += a;
    }
  }
  if (mapped != s->mapped || busy != s->busy || quarantined != s->quarantined)
    BROKEN("reservation 0x%llx: %llu mapped, %llu busy, %llu quarantined granules; counted %llu, %llu, %llu",
           (ull)s->base, (ull)s->mapped, (ull)s->busy, (ull)s->quarantined, (ull)mapped, (ull)busy, (ull)quarantined);
  if (s->segments != 1 + vm_space_edges(c, s, s->base, s->bytes))
    BROKEN("reservation 0x%llx: %llu segments, counted %llu", (ull)s->base, (ull)s->segments,
           (ull)(1 + vm_space_edges(c, s, s->base, s->bytes)));
  return 0;
}

static int check_slab(struct vm_ctx *c, struct vm_slab *s, const uint32_t *want, uint64_t *limbo, uint64_t *used,
                      uint64_t *quarantined) {
  uint32_t free_units = 0, soiled = 0, run = 0, longest = 0, empty = 0;
  for (uint32_t u = 0; u < s->units; u++) {
    uint32_t ref = s->refs[u] & ~REF_QUARANTINED;
    if (ref != want[u]) BROKEN("slab %u unit %u: %u references, counted %u", s->index, u, ref, want[u]);
    if (vm_bit(s->fill_map, u) && !vm_fill_on(c, s, u, 1))
      BROKEN("slab %u unit %u is marked as being filled, but no fill writes it", s->index, u);
    if (vm_bit(s->free_map, u)) {
      if (ref) BROKEN("slab %u unit %u is free and has %u references", s->index, u, ref);
      if (vm_bit(s->claim_map, u)) BROKEN("slab %u unit %u is free and about to be zeroed", s->index, u);
      if (vm_bit(s->soil_map, u)) BROKEN("slab %u unit %u is both free and soiled", s->index, u);
      if (vm_bit(s->dirty_map, u) && !s->merged) BROKEN("slab %u unit %u is free and dirty", s->index, u);
      if (vm_bit(s->fill_map, u)) BROKEN("slab %u unit %u is free and being filled", s->index, u);
      free_units++;
      if (++run > longest) longest = run;
    } else if (vm_bit(s->soil_map, u)) {
      run = 0;
      if (ref || vm_bit(s->claim_map, u) || !vm_bit(s->dirty_map, u))
        BROKEN("slab %u unit %u is soiled: %u references, %sclaimed, %sdirty", s->index, u, ref,
               vm_bit(s->claim_map, u) ? "" : "not ", vm_bit(s->dirty_map, u) ? "" : "not ");
      free_units++;
      soiled++;
    } else {
      run = 0;
      if (!s->refs[u]) ++*limbo;
      if (s->refs[u] & REF_QUARANTINED)
        ++*quarantined;
      else if (ref)
        ++*used;
    }
  }
  for (uint32_t u = 0; u < s->units; u++)
    if (vm_bit(s->zero_map, u) && !s->cleaning)
      BROKEN("slab %u unit %u is being zeroed, but not by a batch", s->index, u);
  for (uint32_t k = 0; k < s->chunks; k++) {
    uint32_t n = 0, size = 0;
    for (uint32_t u = k << c->chunk_shift; u < s->units && u < (k + 1) << c->chunk_shift; u++, size++)
      n += vm_bit(s->free_map, u);
    if (n != s->chunk_free[k]) BROKEN("slab %u chunk %u: %u free, counted %u", s->index, k, s->chunk_free[k], n);
    if (n == size) empty++;
  }
  if (free_units != s->free_units || longest > s->max_run || empty != s->empty_chunks ||
      s->elevel != (empty ? s->level : -1))
    BROKEN("slab %u: %u free, longest run <= %u, %u empty chunks; counted %u, %u, %u", s->index, s->free_units,
           s->max_run, s->empty_chunks, free_units, longest, empty);
  if (soiled != s->soiled || s->in_slist < (soiled != 0))
    BROKEN("slab %u: %u dirty free units, counted %u", s->index, s->soiled, soiled);
  if (s->cleaning && !c->phys->clean.n) BROKEN("slab %u counts a batch of zeroing, but there is none", s->index);
  return 0;
}

static int check_all(struct vm_ctx *c, struct census *n) {
  uint64_t mapped = 0, segments = 0, reserved = 0, limbo = 0, used = 0, quarantined = 0, bytes = 0, free_units = 0,
           aliases = 0, soiled = 0, in_pools = 0;
  int err;
  for (size_t i = 0; i < c->virt->nspaces; i++) {
    if ((err = count_space(c, c->virt->spaces[i], n))) return err;
    mapped += c->virt->spaces[i]->mapped;
    segments += c->virt->spaces[i]->segments;
    reserved += c->virt->spaces[i]->bytes;
  }
  if (n->calls != c->driver->mappings)
    BROKEN("context: %llu driver mappings, counted %llu", (ull)c->driver->mappings, (ull)n->calls);
  if (n->entries != c->driver->large_entries)
    BROKEN("context: %llu large entries, counted %llu", (ull)c->driver->large_entries, (ull)n->entries);
  if (mapped != c->virt->mapped_units || segments != c->driver->segments || reserved != c->virt->reserved_bytes)
    BROKEN("context: %llu mapped, %llu segments, %llu reserved bytes; counted %llu, %llu, %llu",
           (ull)c->virt->mapped_units, (ull)c->driver->segments, (ull)c->virt->reserved_bytes, (ull)mapped,
           (ull)segments, (ull)reserved);
  for (uint32_t i = 1; i < c->phys->nhdls; i++) {
    struct vm_hdl *h = &c->phys->hdls[i];
    for (uint32_t k = 0; k < h->nruns; k++)
      for (uint32_t u = 0; h->runs[k].slab && u < h->runs[k].n; u++)
        n->refs[h->runs[k].slab->index][h->runs[k].unit + u]++;
    if (h->mappings != n->mappings[i] || (h->mappings && h->start_sum != n->starts[i]))
      BROKEN("handle %u: %llu mappings, counted %llu", i, (ull)h->mappings, (ull)n->mappings[i]);
  }
  for (uint32_t i = 1; i < c->phys->nslabs; i++) {
    if (!c->phys->slabs[i]) continue;
    if ((err = check_slab(c, c->phys->slabs[i], n->refs[i], &limbo, &used, &quarantined))) return err;
    bytes += c->phys->slabs[i]->bytes;
    aliases += c->phys->slabs[i]->alias != 0;
    soiled += c->phys->slabs[i]->soiled;
    free_units += c->phys->slabs[i]->free_units;
  }
  for (uint32_t i = 0; i < VM_POOLS; i++) {
    soiled -= c->phys->pools[i].soiled;
    in_pools += c->phys->pools[i].used_units;
    if (c->phys->pools[i].promised && !c->work->pending)
      BROKEN("pool %u: %llu units are promised to batches, but none is pending", i, (ull)c->phys->pools[i].promised);
  }
  if (aliases != c->driver->aliases || soiled)
    BROKEN("context: %llu slabs mapped, counted %llu; the pools miss %lld dirty units", (ull)c->driver->aliases,
           (ull)aliases, (long long)soiled);
  if (limbo != c->phys->limbo_units || used != c->phys->used_units || used != in_pools ||
      quarantined != c->phys->quarantined_units || bytes != c->phys->slab_bytes || free_units != vm_pool_free_units(c))
    BROKEN("context: %llu used, %llu quarantined, %llu in limbo, %llu free, %llu slab bytes; counted %llu, %llu, "
           "%llu, %llu, %llu",
           (ull)c->phys->used_units, (ull)c->phys->quarantined_units, (ull)c->phys->limbo_units,
           (ull)vm_pool_free_units(c), (ull)c->phys->slab_bytes, (ull)used, (ull)quarantined, (ull)limbo,
           (ull)free_units, (ull)bytes);
  return 0;
}

static void census_free(struct vm_ctx *c, struct census *n) {
  for (uint32_t i = 1; n->refs && i < c->phys->nslabs; i++) free(n->refs[i]);
  free(n->refs);
  free(n->mappings);
  free(n->starts);
}

VMEM_API int vmem_check(vmem_t vm) {
  int err = 0;
  struct vm_ctx *c = vm_get(vm, "vmem_check", &err);
  struct census n = {0};
  if (!c) return err;
  pthread_mutex_lock(&c->lock);
  /* Wait for pages on their way back to the pool, and for compaction: until then, references are in flux. */
  while (c->phys->limbo_units || c->phys->compacting) pthread_cond_wait(&c->done_cond, &c->lock);
  n.refs = vm_calloc(c, c->phys->nslabs + 1u, sizeof(*n.refs));
  n.mappings = vm_calloc(c, c->phys->nhdls + 1u, sizeof(*n.mappings));
  n.starts = vm_calloc(c, c->phys->nhdls + 1u, sizeof(*n.starts));
  if (!n.refs || !n.mappings || !n.starts) err = -ENOMEM;
  for (uint32_t i = 1; !err && i < c->phys->nslabs; i++)
    if (c->phys->slabs[i] && !(n.refs[i] = vm_calloc(c, c->phys->slabs[i]->units, sizeof(uint32_t)))) err = -ENOMEM;
  if (!err) err = check_all(c, &n);
  census_free(c, &n);
  pthread_mutex_unlock(&c->lock);
  vm_put(c);
  return err;
}
