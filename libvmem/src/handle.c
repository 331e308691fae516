/* SPDX-License-Identifier: MIT */
/*
 * The handle table. A handle is 12 bits of context tag, 20 bits of generation, 32 bits of index, so that
 * a stale handle, or one of another context, is recognised. An entry outlives its handle while mappings
 * made with it live, because their ptes name it. The caller holds vm_ctx.lock.
 */
#include <stdlib.h>
#include <string.h>

#include "internal.h"

#define GEN_MASK 0xfffffu

uint32_t vm_hdl_index(struct vm_ctx *c, const struct vm_hdl *h) { return (uint32_t)(h - c->hdls); }

struct vm_hdl *vm_hdl_find(struct vm_ctx *c, vmem_handle h, int *err) {
  uint32_t index = (uint32_t)h;
  if (h >> 52 != c->tag)
    *err = vm_fail(-EBADF, "0x%llx is no handle of this context", (unsigned long long)h);
  else if (!index || index >= c->nhdls || !c->hdls[index].held || c->hdls[index].gen != (h >> 32 & GEN_MASK))
    *err = vm_fail(-EBADF, "handle 0x%llx was released", (unsigned long long)h);
  else
    return &c->hdls[index];
  return NULL;
}

struct vm_hdl *vm_hdl_new(struct vm_ctx *c, vmem_handle *out) {
  uint32_t i = c->free_hdl, gen;
  struct vm_hdl *h;
  if (!i) {
    if (c->nhdls >= c->cap_hdls) {
      uint32_t cap = c->cap_hdls ? 2 * c->cap_hdls : 64;
      struct vm_hdl *v = vm_realloc(c, c->hdls, cap, sizeof(*v));
      if (!v) return NULL;
      memset(v + c->cap_hdls, 0, (cap - c->cap_hdls) * sizeof(*v));
      c->hdls = v;
      c->cap_hdls = cap;
      if (!c->nhdls) c->nhdls = 1; /* index 0 is "none" */
    }
    i = c->nhdls++;
  }
  h = &c->hdls[i];
  if (c->free_hdl) c->free_hdl = h->next_free;
  gen = (h->gen + 1) & GEN_MASK;
  *h = (struct vm_hdl){.gen = gen, .used = true, .held = true};
  c->live_hdls++;
  *out = (uint64_t)c->tag << 52 | (uint64_t)gen << 32 | i;
  return h;
}

void vm_hdl_settle(struct vm_ctx *c, struct vm_hdl *h) {
  if (!h->used || h->held || h->mappings || h->pending) return;
  h->used = false;
  h->next_free = c->free_hdl;
  c->free_hdl = vm_hdl_index(c, h);
}

void vm_hdl_drop(struct vm_ctx *c, struct vm_hdl *h) {
  struct vm_run *runs = h->runs;
  uint32_t n = h->nruns, i;
  h->held = h->busy = false;
  h->runs = NULL;
  h->nruns = 0;
  c->live_hdls--;
  vm_hdl_settle(c, h);
  for (i = 0; i < n; i++)
    if (runs[i].slab) vm_units_put(c, runs[i].slab, runs[i].unit, runs[i].n);
  free(runs);
}
