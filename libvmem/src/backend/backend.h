/* SPDX-License-Identifier: MIT */
/*
 * backend.h - the table of functions between a back end and the layers above it, the core.
 *
 * The core owns every decision: what is mapped where, reference counts, validation, rollback, threads,
 * limits. A back end makes driver calls and keeps no state about mappings. It may rely on:
 *   - addresses, sizes and offsets are multiples of the granule and lie in reservations and slabs that it created;
 *   - it is never asked to map over a live mapping, except by remap and REMAP;
 *   - calls for disjoint ranges may come from several threads at the same time, calls for one range do not.
 * Every function returns 0 or a negative errno and has then called vm_fail* (error.h). A function that
 * fails has changed nothing, unless its comment says otherwise.
 * The exception is -ENOTRECOVERABLE from map or unmap: the range is in an unknown state (mapped on some
 * devices only, no longer sparse), and the core quarantines it.
 * Optional functions are NULL where the back end does not support them.
 */
#ifndef VMEM_BACKEND_H
#define VMEM_BACKEND_H

#include <stdbool.h>
#include <vmem.h>

#define VM_POOL_DELAY 500000000u /* pool_delay of back ends whose memory is costly to allocate */

/* Properties that open() reports to the core. */
struct vm_be_info {
  struct vmem_info pub;           /* caps, granule, page_sizes, slab_size, devices, driver, ...; the core fills
                                     in the other fields */
  uint64_t pool_high;             /* default for vmem_open_opts.pool_high */
  uint64_t pool_delay;            /* ns for which a surplus must last before it is returned */
  uint64_t most_mappings;         /* upper limit of vmem_open_opts.max_mappings; 0 = none */
  bool fresh_is_zero;             /* a new slab, and discarded memory, reads as zeros */
  bool one_page_slabs;            /* a slab can only be mapped whole (cuMemMap takes no offset): the core makes
                                     each slab one page of the requested size */
  bool unreserve_unmaps;          /* unreserve may be called with live mappings */
  uint64_t bind_bytes;            /* the longest range of one `remap` or one operation of `bind`; 0 = any */
  bool no_contents;               /* nothing in this process can read or write what is mapped */
  uint64_t all_page_sizes;        /* page sizes possible with any granule; 0 = pub.page_sizes */
  const char *how;                /* for logs, how pages are mapped: " through UVM"; NULL = "" */
  char about[192];                /* notes on the driver, "" = none */
  bool unknown_branch;            /* unknown driver: stricter opening test, `about` is a warning */
  const struct vm_backend *table; /* table to use from now on; NULL = the one opened */
  uint64_t open_ns, test_ns;      /* durations of opening and of the opening test: vm_backend_open */
};

struct vm_be_range {
  uint64_t addr, bytes;
};

struct vm_be_copy {
  uint64_t dst, src, bytes;
};

/* The cost of scattered mappings: now, planned (upper bound), and requested (upper bound). */
struct vm_be_load {
  uint64_t segments, planned_segments, more_segments; /* runs and the holes between them: VMAs on host */
};

enum vm_bind_kind {
  VM_BIND_MAP = 1, /* do what `map` does */
  VM_BIND_REMAP,   /* map the same pages again, as `remap`. A back end with `bind` must also accept the pages mapped
                      there before: this undoes a REPLACE, perhaps of a large page in parts */
  VM_BIND_REPLACE, /* map any pages over a mapped range; large pages are mapped and unmapped whole */
  VM_BIND_UNMAP    /* do what `unmap` does */
};

/* One operation of `bind`, and of vm_bind (driver.h), which works on any back end. */
struct vm_bind_op {
  uint32_t kind;
  uint32_t flags; /* VMEM_MAP_* */
  uint64_t addr, bytes;
  uint64_t slab, offset; /* all but UNMAP */
  uint64_t priv;         /* the back end's value for the reservation */
  uint64_t clears;       /* REMAP, REPLACE: length of the piece, which a back end that cannot replace in place
                            unmaps as a whole; 0 for all operations of the piece but the first */
  bool sparse;
  bool cut;      /* UNMAP and REPLACE, only with `bind`: may cover part of a large entry. Other operations of the batch
                    cover the rest of its block; `clears` and `from` then describe the run of such blocks */
  uint64_t from; /* start of the piece. Without `bind` its operations may map less of it, to split an entry */
};

/* Progress of a failed `bind`: operations [0, done) are carried out, [done, done + unknown) are in an unknown state,
 * the others are not carried out. */
struct vm_bind_result {
  size_t done, unknown;
  /* set by vm_bind only */
  size_t unmapped; /* operations from `done` on whose ranges are now unmapped; only if unknown is 0 */
  size_t failed;   /* operations of the failed call, from `done` on */
};

typedef uint64_t vm_event; /* 0 = none or complete */

struct vm_backend {
  const char *name;

  /* opts has all fields of this version of the library. *be is the back end's own state. Called only by
   * vm_backend_open, which runs the opening test. */
  int (*open)(const struct vmem_open_opts *opts, struct vm_be_info *info, void **be);
  /* Called after everything was unreserved and destroyed, as far as that succeeded. */
  void (*close)(void *be);

  /* Free and total bytes of physical memory at the location. */
  int (*mem_info)(void *be, uint32_t location, int32_t device, uint64_t *free_bytes, uint64_t *total_bytes);

  /* Reserve addresses. In: VMEM_RESERVE_*; out: *kind = VMEM_RANGE_VISIBLE and/or _SPARSE, *priv = what
   * unreserve needs. A sparse reservation reads as zeros from the start. */
  int (*reserve)(void *be, uint64_t bytes, uint64_t align, uint32_t flags, uint64_t *addr, uint32_t *kind,
                 uint64_t *priv);
  /* A failure sets *gone if the driver's reservation and its mappings are gone and only the addresses could not be
   * freed: the call may be repeated to retry that. */
  int (*unreserve)(void *be, uint64_t addr, uint64_t bytes, uint64_t priv, bool *gone);

  /* Make one physical allocation. -ENOMEM with the driver's own status when memory is short. If page_size is at least
   * 2 MiB and bytes a multiple of it, a map call whose address, offset and length are multiples of 2 MiB creates
   * entries of that size, each of which the core unmaps and replaces as a whole. */
  int (*slab_create)(void *be, uint64_t bytes, uint64_t page_size, uint32_t location, int32_t device, uint64_t *slab);
  int (*slab_destroy)(void *be, uint64_t slab, uint64_t bytes);
  /* Optional: gives the memory behind part of a slab back to the system; it reads as zeros later. */
  int (*discard)(void *be, uint64_t slab, uint64_t offset, uint64_t bytes);

  /* Map one run, accessible on all devices of the context. flags: VMEM_MAP_*. In a sparse reservation
   * the range reads as zeros before map and after unmap. */
  int (*map)(void *be, uint64_t addr, uint64_t bytes, uint64_t slab, uint64_t offset, uint32_t flags, bool sparse);
  /* Unmap a range, all of which is mapped: by one or several map calls, possibly by parts of them. */
  int (*unmap)(void *be, uint64_t addr, uint64_t bytes, bool sparse);
  /* With VMEM_CAP_JOIN but no `bind`: map one run onto the same pages again by a single call, with the entries that
   * such a call creates. On failure the range may be unmapped. */
  int (*remap)(void *be, uint64_t addr, uint64_t bytes, uint64_t slab, uint64_t offset, uint32_t flags);

  /* Optional: carry out many operations in as few driver calls as possible. Their ranges do not overlap, and those
   * of one reservation are adjacent in `ops`. If a back end has bind, the core calls it once per batch, or twice if the
   * batch fills pages in between, and only the opening test calls map and unmap. A single driver call is all or
   * nothing; if several are needed, or the driver fails in the middle, *result says what was done.
   * -ENOTRECOVERABLE if and only if result->unknown. */
  int (*bind)(void *be, const struct vm_bind_op *ops, size_t n, struct vm_bind_result *result);

  /* Start filling n ranges (all mapped, writable) with a byte, after the events in `after`. *done is an
   * event, which the core polls or waits for and then puts; 0 if the fill is already complete. */
  int (*fill)(void *be, const struct vm_be_range *ranges, size_t n, uint8_t value, const vm_event *after,
              size_t num_after, vm_event *done);
  /* Start n copies, as `fill` starts fills; no destination overlaps a source or another destination. Fills and copies
   * with nothing in `after` run in the order of the calls. All others are unordered: a fill or copy that waits for an
   * event that never completes should not delay those that do not wait for it. */
  int (*copy)(void *be, const struct vm_be_copy *copies, size_t n, const vm_event *after, size_t num_after,
              vm_event *done);
  /* Complete on return. addr is a device address, dst and src are host pointers. */
  int (*read)(void *be, void *dst, uint64_t addr, uint64_t bytes);
  int (*write)(void *be, uint64_t addr, const void *src, uint64_t bytes);

  /* GPU work as events (NULL on host). event_from: kind VMEM_AFTER_STREAM records an event of the library on
   * the stream; VMEM_AFTER_EVENT wraps the caller's, which event_put then leaves alone. */
  int (*event_from)(void *be, uint32_t kind, uint64_t handle, vm_event *event);
  int (*event_query)(void *be, vm_event event); /* 0 = complete, -EAGAIN = not yet */
  int (*event_wait)(void *be, vm_event event);  /* blocks, without spinning */
  int (*stream_wait)(void *be, uint64_t stream, vm_event event);
  void (*event_put)(void *be, vm_event event);

  /* Optional: makes an unmapped range of a non-sparse reservation read as zeros, or fault again. Called under the
   * core's lock: it must not wait for another call. */
  int (*reveal)(void *be, uint64_t addr, uint64_t bytes, bool zeros);

  /* Optional: -ENOSPC if the scattered pieces counted in `load` would not fit. Called under the core's lock, so
   * it only compares counts. */
  int (*room)(void *be, const struct vm_be_load *load);
  /* Optional: called after `room` refused; refreshes the counts it compares with, unless they are recent. `segments`:
   * the core's count. */
  void (*recount)(void *be, uint64_t segments);
};

/* open.c: opens a back end and tests that it works on its device; fills *info, including the table. Closes it on
 * failure. */
int vm_backend_open(const struct vm_backend *t, const struct vmem_open_opts *opts, struct vm_be_info *info, void **be);
/* Opens and closes a back end on a device, as "auto" would. Fills *found and returns its error. */
int vm_backend_probe(const struct vm_backend *t, int32_t device, struct vmem_probe_info *found);

/* table.c: in the order of "auto", up to a NULL. A program that links the objects may define its own. */
extern const struct vm_backend *const vm_backends[];

extern const struct vm_backend vm_backend_host;
extern const struct vm_backend vm_backend_cuda;
extern const struct vm_backend vm_backend_stock;
extern const struct vm_backend vm_backend_uvm;

#endif
