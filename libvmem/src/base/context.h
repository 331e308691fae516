/* SPDX-License-Identifier: MIT */
/*
 * context.h - one opened back end, as all layers see it.
 *
 *   api      checks arguments, pins the context, reports errors
 *   work     batches that run later: tickets, dependencies, the worker thread
 *   plan     a checked batch: which driver calls to make, in which order, and what to record afterwards
 *   virt     reservations and their page tables
 *   phys     slabs, the pools that hand out their pages, handles
 *   backend  calls to the driver, counted and timed, with failure injection; the back ends
 *   base     what all layers use
 *
 * Each layer knows only those below it and keeps its state in a structure of its own, to which this one points.
 *
 * vm_ctx.lock protects all of that state except where a comment says "immutable". It is never held across a call of
 * the back end that may wait: a plan marks its ptes PTE_BUSY under the lock, makes its driver calls without it, and
 * commits or rolls back under it again. A busy pte belongs to its plan alone.
 */
#ifndef VMEM_BASE_CONTEXT_H
#define VMEM_BASE_CONTEXT_H

#include <errno.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>
#include <vmem.h>

#include "base/error.h"
#include "base/heap.h"

#define LARGE_PAGE (2ull << 20)

struct vm_ctx {
  /* immutable after open */
  const struct vm_backend *be;
  void *bes;
  struct vm_be_info *info;
  struct vm_driver *driver;
  struct vm_phys *phys;
  struct vm_virt *virt;
  struct vm_work *work;
  struct vmem_open_opts opts;
  uint64_t granule;
  unsigned shift;       /* log2(granule) */
  uint32_t chunk_units; /* granules per 2 MiB, at least 1 */
  unsigned chunk_shift; /* log2(chunk_units) */
  bool large_pages;     /* the granule is below 2 MiB, and pages of 2 MiB have slabs of their own */
  bool large_entries;   /* the other slabs may have entries of 2 MiB too (VMEM_OPEN_LARGE_ENTRIES) */
  uint32_t tag;         /* part of every handle of this context */

  uint32_t pins; /* protected by the registry's lock */

  pthread_mutex_t lock;
  pthread_cond_t done_cond; /* something has finished: a ticket, the return of a page or slab, zeroing, a growth,
                                compaction, the freeing of a reservation */
  pthread_cond_t work_cond; /* wakes the worker */
  bool closing;
  uint64_t batches;   /* batches committed so far */
  bool worker_wanted; /* atomic: there is work for a worker that was not started (api/registry.c) */
  struct vm_inject inject;
};

static inline uint64_t vm_units(const struct vm_ctx *c, uint64_t bytes) { return bytes >> c->shift; }
static inline uint64_t vm_units_up(const struct vm_ctx *c, uint64_t bytes) {
  return (bytes >> c->shift) + ((bytes & (c->granule - 1)) != 0);
}
static inline uint64_t vm_bytes(const struct vm_ctx *c, uint64_t units) { return units << c->shift; }
static inline bool vm_is_large(const struct vm_ctx *c, uint64_t page_size) {
  return c->large_pages && page_size >= LARGE_PAGE;
}
static inline bool vm_is_pow2(uint64_t x) { return x && !(x & (x - 1)); }
static inline uint64_t vm_round_up(uint64_t x, uint64_t a) { return (x + a - 1) & ~(a - 1); }

#endif
