/* SPDX-License-Identifier: MIT */
/*
 * internal.h - the core's objects.
 *
 *   context      one opened back end; found by number in the registry (registry.c), pinned during calls
 *   reservation  a sorted array of them per context (space.c); each has a two-level table of ptes
 *   pte          one granule of a reservation: which unit of which slab lies behind it
 *   slab, unit   a physical allocation and its granules (pool.c); a unit has a reference count:
 *                one for each handle that holds it and one for each pte
 *   handle       runs of units held for the caller, and the number of live mappings made with it
 *   plan         a checked batch: what to call, in which order, and what to write down after (plan.c)
 *
 * vm_ctx.lock protects everything here except where a comment says "immutable". It is never held
 * across a call of the back end that may wait: a plan marks its ptes PTE_BUSY under the lock, makes its driver calls
 * without it, and commits or takes back under it again. A busy pte belongs to its plan alone.
 */
#ifndef VMEM_INTERNAL_H
#define VMEM_INTERNAL_H

#include <errno.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>
#include <vmem.h>

#include "backend/backend.h"
#include "base/error.h"

#define LEAF_PTES 32u

enum {
  PTE_MAPPED = 1u << 0,
  PTE_BUSY = 1u << 1,       /* a plan is changing it */
  PTE_START = 1u << 2,      /* first granule of a mapping */
  PTE_CALL = 1u << 3,       /* first granule of a driver call */
  PTE_READONLY = 1u << 4,
  PTE_QUARANTINED = 1u << 5 /* state unknown after a failed undo; stays until close */
};

struct vm_pte {
  uint32_t slab;   /* index in vm_ctx.slabs */
  uint32_t unit;
  uint32_t handle; /* index in vm_ctx.handles of the handle it was mapped with; 0 = none */
  uint32_t flags;  /* PTE_*; 0 = nothing here */
};

struct vm_leaf {
  struct vm_pte pte[LEAF_PTES];
};

struct vm_space { /* a reservation */
  uint64_t base, bytes; /* immutable */
  uint64_t priv;        /* immutable, the back end's */
  uint32_t kind;        /* immutable, VMEM_RANGE_VISIBLE | VMEM_RANGE_SPARSE */
  bool freeing;
  bool gone;            /* all but its addresses went back to the driver: vMemFree alone may have it */
  uint64_t mapped;      /* granules */
  uint64_t busy;        /* granules */
  uint64_t quarantined; /* granules */
  uint64_t segments;    /* pieces as the back end sees them, holes included */
  uint64_t live_leaves;
  struct vm_leaf **leaves;
};

struct vm_pool;

#define REF_QUARANTINED 0x80000000u

struct vm_slab {
  uint64_t priv, bytes;     /* immutable */
  uint32_t units, index;    /* immutable */
  struct vm_pool *pool;     /* immutable */
  uint32_t free_units;      /* the soiled among them */
  uint32_t soiled;          /* units in soil_map */
  uint32_t max_run;         /* upper bound on the longest run in free_map */
  uint32_t chunks, empty_chunks;
  int bin, level;
  uint64_t grow_id;
  struct vm_slab *prev, *next;   /* in the pool's bin */
  struct vm_slab *eprev, *enext; /* in the pool's list of slabs with empty chunks */
  struct vm_slab *sprev, *snext; /* in the pool's list of slabs with dirty free units */
  int elevel;                    /* the elist it is in; -1 = none */
  bool in_slist;
  bool merged;              /* some units in free_map are dirty */
  bool evacuating;          /* vmem_compact is emptying it: in no list, and its free units not the pool's */
  bool alias_making;
  uint32_t cleaning;        /* runs of the clean batch in flight; it is not to be destroyed */
  uint64_t alias;           /* where the slab itself is mapped, to be zeroed and copied through; 0 = not mapped */
  uint64_t alias_priv;
  uint64_t *free_map;       /* bit set: free, to be taken */
  uint64_t *soil_map;       /* bit set: free too, but dirty: to be zeroed in the background, taken last */
  uint64_t *dirty_map;      /* bit set: must be zeroed before it is mapped */
  uint64_t *claim_map;      /* bit set: dirty, and a plan is about to zero it */
  uint64_t *zero_map;       /* bit set: dirty, and the clean batch in flight zeroes it */
  uint64_t *fill_map;       /* bit set: a fill of a committed plan still writes it (backend/fills.h) */
  uint32_t *refs;           /* per unit; REF_QUARANTINED | count */
  uint32_t *chunk_free;     /* per 2 MiB chunk: free units */
};

#define POOL_BINS 33
#define POOL_LEVELS 8 /* how full a slab is: 0 = more than 6/7 in use, ..., 6; 7 = empty */
#define LEVEL_EMPTY (POOL_LEVELS - 1)
#define VM_PLACES (1 + VMEM_MAX_DEVICES)
#define VM_POOLS (2 * VM_PLACES)
#define LARGE_PAGE (2ull << 20)

struct vm_pool { /* the slabs of one location and kind */
  uint32_t location;
  int32_t device;
  bool large; /* of large pages */
  uint64_t free_units, soiled;
  struct vm_slab *bins[POOL_LEVELS][POOL_BINS]; /* bin k: 2^(k-1) <= max_run < 2^k; bin 0: nothing to be taken */
  uint64_t bin_mask[POOL_LEVELS];               /* bit k set: bin k holds slabs */
  struct vm_slab *elist[POOL_LEVELS];
  struct vm_slab *slist;
};

struct vm_run {
  struct vm_slab *slab;
  uint32_t unit, n;
};

struct vm_hdl {
  uint32_t gen;
  bool used;      /* the entry is taken (by a handle, or by mappings that outlive it) */
  bool held;      /* the caller has not dropped it */
  bool busy;      /* vMemRelease is at work */
  bool dirty_ok;  /* VMEM_CREATE_DIRTY */
  uint32_t pending;    /* plans that map it */
  uint32_t pins;       /* those of them that need its references: it is not to be dropped */
  uint32_t location;
  int32_t device;
  uint64_t bytes, page_size;
  uint64_t mappings;   /* ptes with PTE_START */
  uint64_t start_sum;  /* sum of their addresses: with one mapping, its address */
  uint32_t nruns;
  struct vm_run *runs; /* freed with the caller's reference; slab NULL: given back by vmem_drop_range */
  uint32_t next_free;
};

/* Ranges that vmem_read, _write, _copy or a plan's copies are using: unmapping them is -EBUSY meanwhile. */
struct vm_access {
  uint64_t addr, bytes, count, stride; /* as in struct vmem_op; stride 0: the same range again */
  struct vm_access *next;
};

struct vm_fill;
struct vm_ticket;
struct vm_job;

#define CLEAN_RUNS 128

/* Dirty free units that are being zeroed in the background. One batch at a time. */
struct vm_clean {
  bool background;  /* immutable: pages come back dirty here, and the worker zeroes them */
  bool wanted;      /* there may be dirty free units: cleared when none is found, or zeroing has failed */
  bool issuing;     /* the fill is being started, without the lock */
  bool retiring;    /* a thread waits for it, without the lock */
  bool ended;       /* a batch has, since the worker last trimmed the pool */
  uint32_t hold;    /* callers that want no other batch begun */
  uint32_t n;       /* runs of the batch in flight; 0 = none */
  struct vm_run runs[CLEAN_RUNS];
  vm_event event;
};

struct vm_inject_state { /* atomics */
  uint32_t kinds;
  uint64_t skip, count;
  int error;
};

struct vm_ctx {
  /* immutable after open */
  const struct vm_backend *be;
  void *bes;
  struct vm_be_info info;
  struct vmem_open_opts opts;
  uint64_t granule;
  unsigned shift;       /* log2(granule) */
  uint32_t chunk_units; /* units in 2 MiB, at least 1 */
  unsigned chunk_shift; /* its log2 */
  bool large_pages;     /* 2 MiB are more than a granule, and pages of them have slabs of their own */
  uint32_t tag;         /* in every handle of this context */

  uint32_t pins;        /* registry's lock */

  pthread_mutex_t lock;
  pthread_cond_t done_cond; /* tickets, worker exit */
  pthread_cond_t work_cond; /* for the worker */

  struct vm_space **spaces; /* sorted by base */
  size_t nspaces, cap_spaces;

  struct vm_slab **slabs;   /* by index; NULL = free entry; entry 0 unused */
  uint32_t nslabs, cap_slabs, live_slabs, slab_hint;
  uint64_t grow_ids;
  struct vm_pool pools[VM_POOLS]; /* devices[0], host, devices[1], ...; then the same for large pages */

  struct vm_hdl *hdls;      /* entry 0 unused */
  uint32_t nhdls, cap_hdls, free_hdl, live_hdls;

  struct vm_access *accesses;

  uint64_t reserved_bytes, mapped_units, used_units, limbo_units, quarantined_units, slab_bytes;
  uint64_t growing_bytes; /* of slabs being made */
  uint64_t alias_mappings; /* map calls that slabs' own mappings took */
  struct vm_clean clean;
  bool compacting;        /* vmem_compact is at work */
  uint64_t peak_mapped_units, peak_used_units, segments, mappings, batches;
  uint64_t planned_mappings; /* the most that plans neither committed nor cancelled add to `mappings` */

  /* worker */
  bool worker_started, worker_stop, closing;
  bool low;             /* the pool has fallen below pool_low since the worker last looked */
  pthread_t worker;
  struct vm_job *queue, **queue_tail;
  struct vm_job *waiting, **waiting_tail; /* the worker's alone */
  struct vm_fill *fills;    /* that run on */
  uint64_t pending;         /* batches submitted, or about to be, and not finished */
  vmem_ticket last_ticket;
  struct vm_ticket **tickets; /* table of those kept; ticket_slots is a power of two */
  size_t ticket_slots;
  uint64_t kept_tickets;    /* those about to be issued included */
  struct vm_ticket *oldest_ticket, *newest_ticket;

  struct vm_inject_state inject;
  /* atomics */
  uint64_t map_calls, unmap_calls, slab_calls, fill_calls, driver_ns, worker_driver_ns;
};

/* registry.c: copies the part of a sized structure that both sides know; the rest becomes 0. -EINVAL
 * when the size field is too small to be one. */
int vm_copy_in(void *to, size_t to_size, const void *from, const char *what);
int vm_copy_out(void *to, const void *from, size_t from_size, const char *what);
/* A pinned context, or NULL with the error recorded in *err. */
struct vm_ctx *vm_get(vmem_t vm, const char *op, int *err);
void vm_put(struct vm_ctx *c);

/* driver.c: libvmem's own allocations in a context, failed on request by vmem_inject. */
void *vm_calloc(struct vm_ctx *c, size_t n, size_t size);
void *vm_realloc(struct vm_ctx *c, void *p, size_t n, size_t size);

/* driver.c: the back end's functions with injection, counting and timing. */
int vm_drv_reserve(struct vm_ctx *c, uint64_t bytes, uint64_t align, uint32_t flags, uint64_t *addr,
                   uint32_t *kind, uint64_t *priv);
int vm_drv_unreserve(struct vm_ctx *c, struct vm_space *s, bool *gone);
int vm_drv_slab_create(struct vm_ctx *c, uint64_t bytes, uint64_t page_size, uint32_t location,
                       int32_t device, uint64_t *priv);
int vm_drv_slab_destroy(struct vm_ctx *c, struct vm_slab *s);
/* Maps a slab at addresses of its own, and unmaps it; kind: of the failures that are injected. */
int vm_drv_alias(struct vm_ctx *c, struct vm_slab *s, uint32_t kind, uint64_t *addr, uint64_t *priv);
int vm_drv_unalias(struct vm_ctx *c, struct vm_slab *s);
int vm_drv_discard(struct vm_ctx *c, struct vm_slab *s, uint32_t unit, uint32_t n);
int vm_drv_map(struct vm_ctx *c, uint64_t addr, uint64_t bytes, struct vm_slab *s, uint32_t unit,
               uint32_t flags, bool sparse);
int vm_drv_unmap(struct vm_ctx *c, uint64_t addr, uint64_t bytes, bool sparse);
int vm_drv_remap(struct vm_ctx *c, uint64_t addr, uint64_t bytes, struct vm_slab *s, uint32_t unit,
                 uint32_t flags);
int vm_drv_bind(struct vm_ctx *c, const struct vm_bind_op *ops, size_t n, struct vm_bind_result *result);
int vm_drv_fill(struct vm_ctx *c, const struct vm_be_range *r, size_t n, uint8_t value,
                const vm_event *after, size_t num_after, vm_event *done);
int vm_drv_clean(struct vm_ctx *c, const struct vm_be_range *r, size_t n, vm_event *done); /* zeroes, in the background */
int vm_drv_copy(struct vm_ctx *c, const struct vm_be_copy *copies, size_t n, const vm_event *after,
                size_t num_after, vm_event *done);
int vm_drv_event_finish(struct vm_ctx *c, vm_event e); /* wait and put */
void vm_inject_arm(struct vm_ctx *c, uint32_t kinds, uint64_t skip, uint64_t count, int error);
void vm_drv_mark_worker(void);                         /* this thread's time is the worker's */
uint64_t vm_now_ns(void);

/* space.c (lock held) */
struct vm_space *vm_space_find(struct vm_ctx *c, uint64_t addr);
/* The space that holds [addr, addr + bytes) whole; records -EINVAL, -EOVERFLOW or -ENXIO. */
struct vm_space *vm_space_range(struct vm_ctx *c, uint64_t addr, uint64_t bytes, uint64_t align, int *err);
struct vm_pte *vm_pte_make(struct vm_ctx *c, struct vm_space *s, uint64_t addr); /* NULL: no heap */
/* Pieces the back end sees between [first, last] granules, for vm_space.segments. */
uint64_t vm_space_edges(struct vm_ctx *c, struct vm_space *s, uint64_t addr, uint64_t bytes);
/* The same for a range with nothing mapped in it. */
uint64_t vm_space_edges_bare(struct vm_ctx *c, struct vm_space *s, uint64_t addr, uint64_t bytes);
/* A running fill that writes a page behind the range, at whatever address; NULL = none. */
struct vm_fill *vm_space_fill(struct vm_ctx *c, struct vm_space *s, uint64_t addr, uint64_t bytes);
/* Whether a boundary at addr would cut a run in two. */
bool vm_space_cuts(struct vm_ctx *c, struct vm_space *s, uint64_t addr);
/* Bytes from addr on with one run behind them (same slab, neighbours, same protection), or with
 * nothing; at most max. */
uint64_t vm_space_run(struct vm_ctx *c, struct vm_space *s, uint64_t addr, uint64_t max);
/* Granules from addr on whose ptes name units that follow one another, with the same flags of `mask`. */
uint32_t vm_space_units(struct vm_ctx *c, struct vm_space *s, uint64_t addr, uint64_t end, uint32_t mask);
void vm_space_destroy(struct vm_space *s);
/* Whether a boundary at addr, in the space or at its end, would cut a page that the driver maps as a whole; the
 * address and the size of the page. */
bool vm_space_cuts_page(struct vm_ctx *c, struct vm_space *s, uint64_t addr, uint64_t *page, uint64_t *bytes);

/* pool.c */
struct vm_pool *vm_pool_of(struct vm_ctx *c, uint32_t location, int32_t device, uint64_t page_size, int *err);
/* Where a run would best lie: after `left` (may be NULL), at chunk offset `offset` (in units). */
struct vm_place {
  const struct vm_pte *left;
  uint32_t offset;
  bool spread;
};
/* Takes at most n units, at least `align`, aligned; refs become 1. n = 0: none to be had. Lock held. */
struct vm_run vm_pool_take(struct vm_ctx *c, struct vm_pool *p, uint64_t n, uint32_t align,
                           const struct vm_place *place);
/* Makes at least `units` more free units, in runs of `align`; lock not held. A run of `piece` units
 * should fit in one slab; 0: the pool is only filled up, and nothing else is given back for it. *id (0 at
 * first) names the growth for vm_pool_undo_grow, which gives back those of its slabs that are empty; a
 * growth that fails has done so itself. `seen`: free units when the caller looked; where there are more after a shortage, because
 * another thread brought them, the answer is 0 and the caller looks again. */
int vm_pool_grow(struct vm_ctx *c, struct vm_pool *p, uint64_t units, uint64_t piece, uint32_t align, uint64_t seen,
                 uint64_t *id);
void vm_pool_undo_grow(struct vm_ctx *c, uint64_t id);
/* Drops one reference of each unit; what is free then goes back to its pool. Lock held, but let go for
 * the driver and taken again. */
void vm_units_put(struct vm_ctx *c, struct vm_slab *s, uint32_t unit, uint32_t n);
uint64_t vm_pool_free_units(const struct vm_ctx *c); /* lock held */
uint64_t vm_pool_dirty_units(const struct vm_ctx *c); /* those of them that are dirty; lock held */
/* Gives empty slabs back while `keep` free bytes remain; with `wait` also those that are being zeroed. Lock not held. */
uint64_t vm_pool_trim(struct vm_ctx *c, uint64_t keep, bool wait);
/* Units put at the pool's disposal again: as dirty_map says, to be taken or to be zeroed first. Lock held. */
void vm_pool_give(struct vm_ctx *c, struct vm_slab *s, uint32_t unit, uint32_t n);
/* Units that are free and not dirty any more need not be kept apart. Lock held. */
void vm_pool_cleaned(struct vm_ctx *c, struct vm_slab *s, uint32_t unit, uint32_t n);
/* Runs of dirty free units, now marked in zero_map and counted in `cleaning`: at most `most`, and *units units, which
 * is reduced. Lock held. */
uint32_t vm_pool_pick_dirty(struct vm_pool *p, struct vm_run *runs, uint32_t most, uint32_t *units);
/* Takes a slab out of the pool's lists, so that nobody takes units of it, and puts it back. Lock held. */
void vm_pool_set_aside(struct vm_slab *s);
void vm_pool_put_back(struct vm_slab *s);
/* As vm_pool_take, with the longest run that is free in a slab that is in use. Lock held. */
struct vm_run vm_pool_take_packed(struct vm_ctx *c, struct vm_pool *p, uint32_t n, uint32_t align);
/* Ends a slab that is set aside and whose units nobody refers to. Lock held; then without it. */
void vm_slab_forget(struct vm_ctx *c, struct vm_slab *s);
int vm_slab_destroy(struct vm_ctx *c, struct vm_slab *s); /* its memory, its mapping and the structure */
/* Number of equal bits from i on, at most max. */
uint32_t vm_bits_run(const uint64_t *map, uint32_t i, uint32_t max, bool value);
void vm_bits_set(uint64_t *map, uint32_t i, uint32_t n, bool value);
void vm_slab_free(struct vm_slab *s);

struct vm_plan;

/* clean.c: zeroing through the slabs' own mappings. Lock not held, except where said. */
int vm_slab_alias(struct vm_ctx *c, struct vm_slab *s, uint32_t kind); /* makes the mapping, once */
/* Makes the mappings through which vm_plan_zero works: what it takes from the driver. */
int vm_plan_aliases(struct vm_ctx *c, struct vm_plan *p);
/* Zeroes what the plan has claimed, and waits for it; or, with `over`, says whether it is over: if not, it is to be
 * called again. Nothing of the plan may be mapped before. After an error the plan can only be cancelled. */
int vm_plan_zero(struct vm_ctx *c, struct vm_plan *p, bool *over);
/* The worker's turn: ends a batch that is over, begins another. Whether one is in flight. */
bool vm_clean_step(struct vm_ctx *c);
void vm_clean_want(struct vm_ctx *c); /* there is something to zero; lock held */
void vm_clean_start(struct vm_ctx *c); /* sees that there is a worker for what is to be zeroed */
/* No batch is in flight from the one to the other. Lock held, let go while it waits. */
void vm_clean_hold(struct vm_ctx *c);
void vm_clean_release(struct vm_ctx *c);

/* compact.c */
void vm_move_commit(struct vm_ctx *c, struct vm_plan *p); /* the pages of the plan have moved; lock held */

/* handle.c (lock held) */
struct vm_hdl *vm_hdl_find(struct vm_ctx *c, vmem_handle h, int *err);
struct vm_hdl *vm_hdl_new(struct vm_ctx *c, vmem_handle *out);
void vm_hdl_settle(struct vm_ctx *c, struct vm_hdl *h); /* frees the entry when nothing needs it */
void vm_hdl_drop(struct vm_ctx *c, struct vm_hdl *h);   /* the caller's reference; may let the lock go */
uint32_t vm_hdl_index(struct vm_ctx *c, const struct vm_hdl *h);

/* plan.c, plan_run.c, plan_bind.c */
struct vm_seg {
  uint64_t addr, bytes;
  struct vm_space *space;
  struct vm_slab *slab; /* maps */
  uint32_t unit;
  uint32_t flags;       /* VMEM_MAP_* */
};

struct vm_piece { /* what commit writes down */
  uint64_t addr, bytes;
  struct vm_space *space;
  uint32_t handle; /* maps: index, 0 = none */
};

struct vm_list {
  void *v;
  size_t n, cap;
};

struct vm_plan {
  struct vm_list maps;    /* vm_seg, one driver call each */
  struct vm_list mapped;  /* vm_piece */
  struct vm_list unmaps;  /* vm_piece, wholly mapped; one driver call each */
  struct vm_list zeros;   /* vm_run: claimed units, to be zeroed before anything is mapped */
  struct vm_list copies;  /* vm_be_copy: to maps, or between slabs' own mappings */
  struct vm_list sources; /* vm_access: what they read, in the context's list when the plan is complete */
  struct vm_list replaced; /* vm_piece, wholly mapped: shows the pages of the handle afterwards */
  struct vm_list replaces; /* vm_seg: these pages, in the order of the pieces */
  struct vm_list fills;   /* vm_piece: FILL, `handle` is the byte */
  struct vm_list consumed; /* uint32_t handle indices */
  struct vm_bind_op *bind_ops; /* room for plan_bind.c, which must not fail for want of heap memory */
  struct vm_fill *fill;   /* its fills may run on after the commit, as this; NULL = they are waited for */
  vm_event event;         /* they do; 0 = over */
  bool claims;            /* some of the mapped units are claimed: dirty, and zeroed by this plan */
  bool zeroing;           /* their zeroing was started */
  vm_event zero_event;    /* and is over with this */
  bool zeroed;            /* it is over: they may have been written to since */
  struct vm_move *move;   /* vmem_compact's: the replaces show the same contents in other pages */
  bool shows;             /* pages of a handle: when it is run they may be mapped elsewhere, and be filled there */
  uint64_t mappings;      /* its part of vm_ctx.planned_mappings */
  uint64_t grow_id;       /* slabs made for this plan; 0 = none */
  uint64_t keep;          /* free bytes that stay in the pool when it comes to nothing */
  uint32_t release;       /* handle that vMemRelease drops with this plan; 0 = none */
};

/* 0 becomes the granule; -EOPNOTSUPP for what the context does not have. */
int vm_page_size(struct vm_ctx *c, uint64_t *page_size);
/* Checks, takes pages, marks ptes. Lock not held. On failure nothing is changed. */
int vm_plan_make(struct vm_ctx *c, const struct vmem_op *ops, size_t n, struct vm_plan *p);
int vm_plan_make_release(struct vm_ctx *c, vmem_handle h, struct vm_plan *p);
/* Whether a plan that came to `err` may find room at a second attempt, what was counted being older. Lock not held. */
bool vm_recount(struct vm_ctx *c, int err);
/* A plan that unmaps all of a reservation that nobody is changing. The caller has zeroed *p, and holds the lock. */
int vm_plan_make_free(struct vm_ctx *c, struct vm_space *s, struct vm_plan *p);
/* The plan is committed or cancelled: its mappings are counted, or will never be. Lock held. */
static inline void vm_mappings_end(struct vm_ctx *c, struct vm_plan *p) {
  c->planned_mappings -= p->mappings;
  p->mappings = 0;
}
/* The plan is committed, or comes to nothing: its claims on the piece's units end. Lock held. */
void vm_end_claims(struct vm_ctx *c, const struct vm_plan *p, const struct vm_piece *piece, bool committed);
/* -EBUSY when vmem_read, _write, _copy or _fill is using a part of the range, or an unfinished plan copies from it.
 * Lock held. */
int vm_check_access(struct vm_ctx *c, uint64_t addr, uint64_t bytes);
/* Lets the plan's fills run on after its commit; `ended` is called when they are over. On failure (heap) the plan is as
 * it was. Lock not held. */
int vm_plan_may_run_on(struct vm_ctx *c, struct vm_plan *p, void (*ended)(struct vm_ctx *c, void *owner, int result),
                       void *owner);
/* A running fill of another plan that must end before this one is run; NULL = none. Lock held. */
struct vm_fill *vm_plan_behind(struct vm_ctx *c, struct vm_plan *p);
/* Waits for all of those in this thread. Lock not held. */
int vm_plan_await_fills(struct vm_ctx *c, struct vm_plan *p);
/* Driver calls, then commit, or undo. Lock not held; no fill may be running where vm_plan_behind looks. `after` is for
 * the fills alone. *fill is the plan's fill where it runs on, else NULL: only the worker has one. */
int vm_plan_run(struct vm_ctx *c, struct vm_plan *p, const vm_event *after, size_t num_after, struct vm_fill **fill);
/* Waits for other plans' fills, then runs it whole. A plan that cannot be run is cancelled. */
int vm_plan_run_now(struct vm_ctx *c, struct vm_plan *p);
/* Units of the run, from its first on, that one driver call maps at addr. */
uint32_t vm_one_call(const struct vm_ctx *c, uint64_t addr, struct vm_run r);
/* -ENOSPC where the back end has no room for the plan's pieces. Lock held. */
int vm_plan_room(struct vm_ctx *c, struct vm_plan *p);
/* A new last item of a list, not initialised; NULL: no heap memory. */
void *vm_list_push(struct vm_ctx *c, struct vm_list *l, size_t item);
/* The driver calls of a back end that takes a batch in one call, or their undo; and, when the plan is complete, the heap
 * memory for it. */
int vm_plan_bind_room(struct vm_ctx *c, struct vm_plan *p);
int vm_plan_run_bind(struct vm_ctx *c, struct vm_plan *p, const vm_event *after, size_t num_after);
/* Parts of the two: zeroes and fills what the plan says, on one stream; *last covers it all. Waits for an event
 * and puts it. Takes note of a range that is in an unknown state. */
int vm_plan_fill(struct vm_ctx *c, struct vm_plan *p, const vm_event *after, size_t num_after, vm_event *last);
int vm_event_finish(struct vm_ctx *c, vm_event *e);
void vm_range_lost(struct vm_ctx *c, struct vm_space *s, uint64_t addr, uint64_t bytes);
/* A range whose undo failed is lost too; the error that names it, and the failure `why`, becomes *worst. */
void vm_undo_failed(struct vm_ctx *c, struct vm_space *s, uint64_t addr, uint64_t bytes, int *worst,
                    const struct vmem_error *why);
/* The run that was mapped at addr, of a piece that was unmapped: what maps it again. Lock not held. */
struct vm_seg vm_run_before(struct vm_ctx *c, struct vm_space *s, uint64_t addr, uint64_t end);
/* The second half of vm_plan_run alone: the driver has done it all. */
void vm_plan_commit(struct vm_ctx *c, struct vm_plan *p);
/* Takes back what vm_plan_make did. Lock not held. */
void vm_plan_cancel(struct vm_ctx *c, struct vm_plan *p);
void vm_plan_clear(struct vm_plan *p);
/* What the plan copies from may be changed again. Lock held. */
void vm_sources_end(struct vm_ctx *c, struct vm_plan *p);
bool vm_plan_only_fills(const struct vm_plan *p);
/* Writes PTE_QUARANTINED over [addr, addr + bytes). Lock held. */
void vm_quarantine(struct vm_ctx *c, struct vm_space *s, uint64_t addr, uint64_t bytes);
void vm_quarantine_unit(struct vm_ctx *c, struct vm_slab *s, uint32_t unit);
/* The ptes stop being mapped but keep their units: [addr, addr + bytes) is busy with this plan. Lock held. */
void vm_detach(struct vm_ctx *c, struct vm_space *s, uint64_t addr, uint64_t bytes);
/* Busy ptes that name their units become mapped. Lock held. */
void vm_commit_map(struct vm_ctx *c, struct vm_piece *piece);
void vm_unmap_ptes(struct vm_ctx *c, struct vm_space *s, uint64_t addr, uint64_t bytes);

/* plan_replace.c: new pages under addresses that are mapped. */
int vm_replace_all(struct vm_ctx *c, struct vm_plan *p, size_t *replaced); /* pieces; lock not held */
void vm_replace_undo(struct vm_ctx *c, struct vm_plan *p, size_t n, int *worst, const struct vmem_error *why);
void vm_replace_commit(struct vm_ctx *c, struct vm_plan *p); /* lock held, let go for the driver */
void vm_replace_take_back(struct vm_ctx *c, struct vm_plan *p); /* lock held */

/* work/worker.c */
void vm_worker_low(struct vm_ctx *c); /* pages were taken from the device pool; lock held */

static inline uint64_t vm_units(const struct vm_ctx *c, uint64_t bytes) { return bytes >> c->shift; }
static inline uint64_t vm_units_up(const struct vm_ctx *c, uint64_t bytes) {
  return (bytes >> c->shift) + ((bytes & (c->granule - 1)) != 0);
}
static inline struct vm_pte *vm_pte(const struct vm_ctx *c, const struct vm_space *s, uint64_t addr) { /* NULL: nothing there */
  uint64_t unit = vm_units(c, addr - s->base);
  struct vm_leaf *leaf = s->leaves[unit / LEAF_PTES];
  return leaf ? &leaf->pte[unit % LEAF_PTES] : NULL;
}
/* Granules from addr on whose ptes follow one another in a leaf, at most to end. */
static inline uint32_t vm_leaf_rest(const struct vm_ctx *c, const struct vm_space *s, uint64_t addr, uint64_t end) {
  uint32_t rest = LEAF_PTES - vm_units(c, addr - s->base) % LEAF_PTES;
  return vm_units(c, end - addr) < rest ? (uint32_t)vm_units(c, end - addr) : rest;
}
static inline bool vm_bit(const uint64_t *map, uint32_t i) { return map[i / 64] >> (i % 64) & 1; }
/* Called where a success becomes final, so that what a failed call took for a while does not count. */
static inline void vm_note_peaks(struct vm_ctx *c) {
  if (c->mapped_units > c->peak_mapped_units) c->peak_mapped_units = c->mapped_units;
  if (c->used_units > c->peak_used_units) c->peak_used_units = c->used_units;
}
/* Marks a mapped pte as the first of a driver call, or not. */
static inline void vm_set_call(struct vm_ctx *c, struct vm_pte *p, bool first) {
  if (first && !(p->flags & PTE_CALL)) c->mappings++;
  if (!first && p->flags & PTE_CALL) c->mappings--;
  p->flags = first ? p->flags | PTE_CALL : p->flags & ~PTE_CALL;
}
static inline bool vm_is_large(const struct vm_ctx *c, uint64_t page_size) {
  return c->large_pages && page_size >= LARGE_PAGE;
}
static inline bool vm_is_pow2(uint64_t x) { return x && !(x & (x - 1)); }
static inline uint64_t vm_round_up(uint64_t x, uint64_t a) { return (x + a - 1) & ~(a - 1); }

#endif
