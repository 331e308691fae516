/* SPDX-License-Identifier: MIT */
/*
 * driver.h - how the layers above call a context's back end: calls are counted and timed, and failures injected;
 * vm_bind maps and unmaps on any back end; limits on what may be mapped are enforced.
 */
#ifndef VMEM_BACKEND_DRIVER_H
#define VMEM_BACKEND_DRIVER_H

#include "backend/backend.h"
#include "base/context.h"

/* Counts pieces of reservations and live map calls. */
struct vm_room {
  uint64_t segments, mappings;
};

struct vm_driver {
  /* Counts of scattered mappings, for the limits of the driver and the process; under vm_ctx.lock. */
  uint64_t segments;      /* pieces of all reservations as the back end sees them, holes included */
  uint64_t mappings;      /* live map calls in reservations */
  uint64_t aliases;       /* live map calls of slabs' own mappings */
  uint64_t large_entries; /* live entries of 2 MiB in reservations */
  uint64_t splits, joins; /* totals of large entries since the context was opened */
  struct vm_room planned; /* upper bound on what unfinished plans add */
  /* atomics */
  uint64_t map_calls, unmap_calls, slab_calls, fill_calls, ns, worker_ns;
};

/* ---- call.c ------------------------------------------------------------------------------------ */

int vm_drv_reserve(struct vm_ctx *c, uint64_t bytes, uint64_t align, uint32_t flags, uint64_t *addr, uint32_t *kind,
                   uint64_t *priv);
int vm_drv_unreserve(struct vm_ctx *c, uint64_t addr, uint64_t bytes, uint64_t priv, bool *gone);
int vm_drv_slab_create(struct vm_ctx *c, uint64_t bytes, uint64_t page_size, uint32_t location, int32_t device,
                       uint64_t *slab);
int vm_drv_slab_destroy(struct vm_ctx *c, uint64_t slab, uint64_t bytes);
int vm_drv_discard(struct vm_ctx *c, uint64_t slab, uint64_t offset, uint64_t bytes);
/* Physical memory of a location: free and total. */
int vm_drv_memory(struct vm_ctx *c, uint32_t location, int32_t device, uint64_t *free_bytes, uint64_t *total_bytes);
int vm_drv_map(struct vm_ctx *c, const struct vm_bind_op *op);
int vm_drv_unmap(struct vm_ctx *c, uint64_t addr, uint64_t bytes, bool sparse);
int vm_drv_remap(struct vm_ctx *c, const struct vm_bind_op *op);
/* Only for back ends that have `bind`. */
int vm_drv_bind(struct vm_ctx *c, const struct vm_bind_op *ops, size_t n, struct vm_bind_result *result);
/* kind: VMEM_INJECT_*, the kind of failure to inject. */
int vm_drv_fill(struct vm_ctx *c, uint32_t kind, const struct vm_be_range *r, size_t n, uint8_t value,
                const vm_event *after, size_t num_after, vm_event *done);
int vm_drv_copy(struct vm_ctx *c, const struct vm_be_copy *copies, size_t n, const vm_event *after, size_t num_after,
                vm_event *done);
/* A dependency's event: see vm_backend. */
int vm_drv_event_from(struct vm_ctx *c, uint32_t kind, uint64_t handle, vm_event *e);
int vm_drv_event_query(struct vm_ctx *c, vm_event e);
int vm_drv_event_wait(struct vm_ctx *c, vm_event e);
/* Waits for the event and puts it; *e becomes 0. */
int vm_drv_event_finish(struct vm_ctx *c, vm_event *e);
/* Replaces *last by the event of a later call, which covers both. */
void vm_drv_event_follow(struct vm_ctx *c, vm_event *last, vm_event e);
void vm_drv_mark_worker(void); /* counts this thread's driver time as the worker's */

/* Map a whole slab at addresses reserved for it, and unmap it. They count as slab calls. kind: VMEM_INJECT_*. */
int vm_drv_alias(struct vm_ctx *c, uint64_t slab, uint64_t bytes, uint32_t kind, uint64_t *addr, uint64_t *priv);
int vm_drv_unalias(struct vm_ctx *c, uint64_t addr, uint64_t bytes, uint64_t priv);

/* ---- bind.c ------------------------------------------------------------------------------------ */

/* Executes the operations in as few driver calls as the back end can. It may reorder ops; *result refers to the new
 * order. */
int vm_bind(struct vm_ctx *c, struct vm_bind_op *ops, size_t n, struct vm_bind_result *result);

/* ---- room.c (lock held) ------------------------------------------------------------------------ */

/* Reserves pieces and mappings for a plan; -ENOSPC if `more` do not fit. `limited`: max_mappings applies too. On
 * success they count as planned. */
int vm_room_take(struct vm_ctx *c, struct vm_room more, bool limited);
/* Drops a plan's reservation: its mappings have been counted, or will never be created. */
void vm_room_end(struct vm_ctx *c, struct vm_room planned);
/* Returns true if the caller should retry after `err`, because a stale count was refreshed. Lock not held. */
bool vm_recount(struct vm_ctx *c, int err);

#endif
