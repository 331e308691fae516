/* SPDX-License-Identifier: MIT */
/*
 * vmem_drop_range: gives back pages in the middle of a handle. The handle's runs are written anew, with
 * runs of no slab where pages are missing, so that the others keep their offsets; only when all memory
 * for that is there are references dropped. The caller of each function holds vm_ctx.lock.
 */
#include <stdlib.h>

#include "internal.h"

struct pieces { /* in units of the granule */
  uint64_t first, units, count, stride;
};

/* From `at` on: units until the state changes, and whether these are dropped. */
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

static int check(const struct vm_hdl *h, uint64_t offset, uint64_t bytes, uint64_t count,
                 uint64_t stride) {
  uint64_t mask = h->page_size - 1, span = 0;
  if (h->busy || h->pins) return vm_fail(-EBUSY, "another call is using the handle");
  if (!bytes || (bytes | offset) & mask)
    return vm_fail_at(-EINVAL, offset, bytes, h->page_size,
                      "offset %llu and %llu bytes are no multiples of the page size %llu, or there are none",
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

/* Cuts the runs where pieces begin and end: into kept[] with holes, and gone[]. Both have room. */
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
                          "the pages at offset %llu were given back before", (unsigned long long)(at << c->shift));
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

VMEM_API int vmem_drop_range(vmem_t vm, vmem_handle handle, uint64_t offset, uint64_t bytes, uint64_t count,
                             uint64_t stride) {
  int err = 0;
  struct vm_ctx *c = vm_get(vm, "vmem_drop_range", &err);
  struct vm_hdl *h;
  struct vm_run *kept = NULL, *gone = NULL;
  uint32_t nkept = 0, ngone = 0;
  if (!c) return err;
  if (!count) count = 1;
  pthread_mutex_lock(&c->lock);
  h = vm_hdl_find(c, handle, &err);
  if (h && !(err = check(h, offset, bytes, count, stride))) {
    struct pieces p = {vm_units(c, offset), vm_units(c, bytes), count, vm_units(c, stride)};
    size_t room = h->nruns + 2 * count; /* each edge of a piece cuts one run at most */
    if (!(kept = vm_calloc(c, room, sizeof(*kept))) || !(gone = vm_calloc(c, room, sizeof(*gone))))
      err = -ENOMEM;
    else
      err = cut(c, h, &p, kept, &nkept, gone, &ngone);
    if (!err) {
      struct vm_run *old = h->runs;
      h->runs = kept;
      h->nruns = nkept;
      kept = old;
    }
  }
  /* The lock may be let go in between: the handle is complete without these. */
  for (uint32_t i = 0; !err && i < ngone; i++) vm_units_put(c, gone[i].slab, gone[i].unit, gone[i].n);
  pthread_mutex_unlock(&c->lock);
  free(kept);
  free(gone);
  if (!err) vm_pool_trim(c, c->opts.pool_high, false);
  vm_put(c);
  return err;
}
