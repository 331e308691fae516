/* SPDX-License-Identifier: MIT */
/*
 * The handle table. A handle is 12 bits of context tag, 20 bits of generation, 32 bits of index, so that a stale
 * handle, or one of another context, is recognised. Entries are reused in the order in which they became free,
 * and only while at least LEAST_FREE are free: so a number recurs after 2^30 more handles (sooner if heap memory is too
 * short for that many entries).
 * An entry outlives its handle while mappings made with it exist, because their ptes refer to it. The caller holds
 * vm_ctx.lock.
 */
#include <stdlib.h>
#include <string.h>

#include "phys/phys.h"

#define GEN_MASK 0xfffffu
#define LEAST_FREE 1024u

uint32_t vm_hdl_index(struct vm_ctx *c, const struct vm_hdl *h) { return (uint32_t)(h - c->phys->hdls); }

struct vm_hdl *vm_hdl_find(struct vm_ctx *c, vmem_handle h, int *err) {
  uint32_t index = (uint32_t)h;
  if (h >> 52 != c->tag)
    *err = vm_fail(-EBADF, "0x%llx is not a handle of this context", (unsigned long long)h);
  else if (!index || index >= c->phys->nhdls || !c->phys->hdls[index].held ||
           c->phys->hdls[index].gen != (h >> 32 & GEN_MASK))
    *err = vm_fail(-EBADF, "handle 0x%llx was released", (unsigned long long)h);
  else
    return &c->phys->hdls[index];
  return NULL;
}

static bool grow_table(struct vm_ctx *c) {
  struct vm_phys *p = c->phys;
  uint32_t cap = p->cap_hdls ? 2 * p->cap_hdls : 64;
  struct vm_hdl *v = vm_realloc(c, p->hdls, cap, sizeof(*v));
  if (!v) return false;
  memset(v + p->cap_hdls, 0, (cap - p->cap_hdls) * sizeof(*v));
  p->hdls = v;
  p->cap_hdls = cap;
  if (!p->nhdls) p->nhdls = 1; /* index 0 is "none" */
  return true;
}

/* True if an unused entry is available. If heap memory is short, a freed entry is reused. */
static bool fresh_entry(struct vm_ctx *c) {
  struct vm_phys *p = c->phys;
  struct vmem_error before;
  if (p->free_hdls >= LEAST_FREE) return false;
  if (p->nhdls < p->cap_hdls) return true;
  vm_error_save(&before);
  if (grow_table(c)) return true;
  if (p->free_hdls) vm_error_restore(&before);
  return false;
}

struct vm_hdl *vm_hdl_new(struct vm_ctx *c, vmem_handle *out) {
  struct vm_phys *p = c->phys;
  uint32_t i, gen;
  struct vm_hdl *h;
  if (fresh_entry(c)) {
    i = p->nhdls++;
  } else if (p->free_hdls) {
    i = p->first_free_hdl;
    p->first_free_hdl = p->hdls[i].next_free;
    p->free_hdls--;
  } else {
    return NULL;
  }
  h = &p->hdls[i];
  gen = (h->gen + 1) & GEN_MASK;
  *h = (struct vm_hdl){.gen = gen, .used = true, .held = true};
  p->live_hdls++;
  *out = (uint64_t)c->tag << 52 | (uint64_t)gen << 32 | i;
  return h;
}

void vm_hdl_settle(struct vm_ctx *c, struct vm_hdl *h) {
  struct vm_phys *p = c->phys;
  if (!h->used || h->held || h->mappings || h->pending) return;
  h->used = false;
  h->next_free = 0;
  *(p->free_hdls++ ? &p->hdls[p->last_free_hdl].next_free : &p->first_free_hdl) = vm_hdl_index(c, h);
  p->last_free_hdl = vm_hdl_index(c, h);
}

void vm_hdl_drop(struct vm_ctx *c, struct vm_hdl *h) {
  struct vm_run *runs = h->runs;
  uint32_t n = h->nruns;
  h->held = h->busy = false;
  h->runs = NULL;
  h->nruns = 0;
  c->phys->live_hdls--;
  vm_hdl_settle(c, h);
  vm_runs_put(c, runs, n);
}

void vm_hdl_mapping(struct vm_ctx *c, uint32_t index, uint64_t addr, bool begins) {
  struct vm_hdl *h = index ? &c->phys->hdls[index] : NULL;
  if (!h) return;
  h->mappings += begins ? 1 : -1;
  h->start_sum += begins ? addr : -addr;
  if (!begins) vm_hdl_settle(c, h);
}

/* ---- dropping a part ---------------------------------------------------------------------------- */

struct pieces { /* all fields count granules */
  uint64_t first, units, count, stride;
};

/* Counts the units from `at` on until the state changes; *drop: whether they are to be dropped. */
static uint64_t stretch(const struct pieces *p, uint64_t at, bool *drop) {
  uint64_t i, into;
  *drop = false;
  if (at < p->first) return p->first - at;
  i = p->count > 1 ? (at - p->first) / p->stride : 0;
  if (i >= p->count) return UINT64_MAX;
  into = at - p->first - i * p->stride;
  if (into < p->units) {
    *drop = true;
    return p->units - into;
  }
  return i + 1 < p->count ? p->stride - into : UINT64_MAX;
}

static int check(const struct vm_hdl *h, uint64_t offset, uint64_t bytes, uint64_t count, uint64_t stride) {
  uint64_t mask = h->page_size - 1, span = 0;
  if (h->busy || h->pins) return vm_fail(-EBUSY, "another call is using the handle");
  if (!bytes || (bytes | offset) & mask)
    return vm_fail_at(-EINVAL, offset, bytes, h->page_size,
                      "offset %llu and %llu bytes are not multiples of the page size %llu, or 0 bytes",
                      (unsigned long long)offset, (unsigned long long)bytes, (unsigned long long)h->page_size);
  if (count > 1 && (stride & mask || stride < bytes))
    return vm_fail_at(-EINVAL, offset, bytes, stride, "a stride of %llu does not fit pieces of %llu bytes",
                      (unsigned long long)stride, (unsigned long long)bytes);
  if (count > 1 && __builtin_mul_overflow(count - 1, stride, &span)) span = UINT64_MAX;
  if (bytes > h->bytes || span > h->bytes - bytes || offset > h->bytes - bytes - span)
    return vm_fail_at(-ERANGE, offset, bytes, h->bytes, "offset %llu, %llu pieces of %llu bytes: the handle has %llu",
                      (unsigned long long)offset, (unsigned long long)count, (unsigned long long)bytes,
                      (unsigned long long)h->bytes);
  return 0;
}

/* Splits the runs at the pieces' ends into kept[], which has holes, and gone[]. Both are large enough. */
static int cut(struct vm_ctx *c, const struct vm_hdl *h, const struct pieces *p, struct vm_run *kept, uint32_t *nkept,
               struct vm_run *gone, uint32_t *ngone) {
  uint64_t at = 0;
  for (uint32_t i = 0; i < h->nruns; i++) {
    struct vm_run left = h->runs[i];
    while (left.n) {
      bool drop;
      uint64_t n = stretch(p, at, &drop);
      struct vm_run r = {left.slab, left.unit, n < left.n ? (uint32_t)n : left.n};
      if (drop && !r.slab)
        return vm_fail_at(-ERANGE, at << c->shift, (uint64_t)r.n << c->shift, 0,
                          "the pages at offset %llu were dropped before", (unsigned long long)(at << c->shift));
      if (drop) gone[(*ngone)++] = r;
      if (drop) r.slab = NULL;
      if (!r.slab && *nkept && !kept[*nkept - 1].slab)
        kept[*nkept - 1].n += r.n;
      else
        kept[(*nkept)++] = r;
      left.unit += r.n;
      left.n -= r.n;
      at += r.n;
    }
  }
  return 0;
}

/* Rewrites the run list with slab-less runs for missing pages, so that the other pages keep their offsets. References
 * are dropped only once all memory for that is allocated. */
int vm_hdl_drop_range(struct vm_ctx *c, struct vm_hdl *h, uint64_t offset, uint64_t bytes, uint64_t count,
                      uint64_t stride) {
  struct pieces p = {vm_units(c, offset), vm_units(c, bytes), count, vm_units(c, stride)};
  struct vm_run *kept = NULL, *gone = NULL, *old;
  uint32_t nkept = 0, ngone = 0;
  size_t room = h->nruns + 2 * count; /* each edge of a piece cuts one run at most */
  int err = check(h, offset, bytes, count, stride);
  if (err) return err;
  if (!(kept = vm_calloc(c, room, sizeof(*kept))) || !(gone = vm_calloc(c, room, sizeof(*gone))))
    err = -ENOMEM;
  else
    err = cut(c, h, &p, kept, &nkept, gone, &ngone);
  if (err) {
    free(kept);
    free(gone);
    return err;
  }
  old = h->runs;
  h->runs = kept;
  h->nruns = nkept;
  free(old);
  vm_runs_put(c, gone, ngone);
  return 0;
}
