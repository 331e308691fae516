/* SPDX-License-Identifier: MIT */
/*
 * phys.h - physical memory.
 *
 *   slab, unit   one allocation from the driver and its granules. slab.c owns the state of each unit: its number of
 *                references; whether it is free, dirty, about to be zeroed, being zeroed, being filled
 *   pool         the slabs of one location and kind; pool.c chooses where in them the next run is taken, supply.c
 *                allocates slabs from the driver and returns them
 *   alias        a slab's own mapping, through which its pages are zeroed and moved (alias.c, clean.c)
 *   fill         work of the GPU that still writes pages of a committed plan (fills.c)
 *   handle       runs of units held for the caller, and the number of live mappings made with it (handle.c)
 *
 * A unit has one reference for each handle that holds it and one for each pte.
 */
#ifndef VMEM_PHYS_H
#define VMEM_PHYS_H

#include "backend/driver.h"
#include "base/bits.h"
#include "base/context.h"

/* ---- slab.c ------------------------------------------------------------------------------------ */

#define REF_QUARANTINED 0x80000000u

struct vm_pool;

struct vm_slab {
  uint64_t priv, bytes;   /* immutable */
  uint32_t units, chunks; /* immutable; a chunk is 2 MiB */
  uint32_t index;         /* immutable; in vm_phys.slabs */
  bool large;             /* immutable: made of driver pages of 2 MiB; a chunk may get one entry of that size */
  struct vm_pool *pool;   /* immutable */
  uint64_t grow_id;
  bool odd;                   /* while the slab is returned to the driver: its return began in an odd epoch */
  uint64_t alias, alias_priv; /* where the slab itself is mapped; 0 = not mapped */
  bool alias_making;
  uint32_t cleaning; /* runs of the clean batch in flight; the slab must not be destroyed */
  bool evacuating;   /* vmem_compact is emptying it: in no list; the pool does not count its free units */
  /* fields that pool.c owns */
  uint32_t free_units; /* including the soiled ones */
  uint32_t soiled;     /* units in soil_map */
  uint32_t max_run;    /* upper bound on the longest run in free_map */
  uint32_t empty_chunks;
  int bin, level;
  int elevel; /* the elist it is in; -1 = none */
  bool in_slist;
  bool merged;                   /* some units in free_map are dirty */
  struct vm_slab *prev, *next;   /* links in the pool's bin */
  struct vm_slab *eprev, *enext; /* links in the pool's list of slabs with empty chunks */
  struct vm_slab *sprev, *snext; /* links in the pool's list of slabs with dirty free units */
  uint32_t *chunk_free;          /* per chunk: free units */
  uint64_t *mixed_map;           /* per chunk: several stretches share it; cleared when it is empty */
  /* Owned by slab.c, changed only by the functions below. */
  uint32_t *refs;      /* per unit; REF_QUARANTINED | count */
  uint64_t *free_map;  /* free and available */
  uint64_t *soil_map;  /* soiled: free but dirty; to be zeroed in the background, taken last */
  uint64_t *dirty_map; /* must be zeroed before it is mapped */
  uint64_t *claim_map; /* dirty, and a plan is about to zero it */
  uint64_t *zero_map;  /* dirty, and the clean batch in flight zeroes it */
  uint64_t *fill_map;  /* a fill of a committed plan still writes it */
  uint64_t maps[];
};

struct vm_run {
  struct vm_slab *slab;
  uint32_t unit, n;
};

/* Creates a slab with its driver memory, not yet in any table. Lock not held. */
struct vm_slab *vm_slab_make(struct vm_ctx *c, struct vm_pool *p, uint64_t bytes, uint64_t page_size, int *err);
/* Frees the slab's memory, mapping and structure; it must be in no table. Memory that the driver refuses to free is
 * leaked. Lock not held. */
int vm_slab_destroy(struct vm_ctx *c, struct vm_slab *s);
/* Add a slab to the table of slabs and give it an index; remove it. Lock held. */
int vm_slab_enter(struct vm_ctx *c, struct vm_slab *s);
void vm_slab_forget(struct vm_ctx *c, struct vm_slab *s);

/* States of units. Lock held. */
void vm_units_offer(struct vm_slab *s, uint32_t unit, uint32_t n);           /* makes them available */
void vm_units_soil(struct vm_slab *s, uint32_t unit, uint32_t n, bool soil); /* soiled, or in limbo */
void vm_units_take(struct vm_slab *s, uint32_t unit, uint32_t n);            /* no longer free: one reference */
void vm_units_untake(struct vm_slab *s, uint32_t unit, uint32_t n);          /* drops the reference: in limbo */
void vm_units_ref(struct vm_slab *s, uint32_t unit, uint32_t n);
/* Drops one reference of each unit; stops after the first stretch of units that have none left. *freed: the length of
 * that stretch. Returns the number of units processed, the stretch included. */
uint32_t vm_units_unref(struct vm_slab *s, uint32_t unit, uint32_t n, uint32_t *freed);
void vm_units_set_dirty(struct vm_slab *s, uint32_t unit, uint32_t n, bool dirty);
/* Finds the first units in [*unit, end) with old contents that no plan has claimed; sets *unit and returns their
 * number, 0 = none. *must: whoever maps them has to zero them, because of `zero` or because the clean batch in flight
 * writes to them. */
uint32_t vm_units_stale(const struct vm_slab *s, uint32_t *unit, uint32_t end, bool zero, bool *must);
void vm_units_claim(struct vm_slab *s, uint32_t unit, uint32_t n);
/* zeroed: the plan that claimed the units has zeroed them, so the end of the clean batch must not mark them clean: they
 * may have been written since. clean: the units are no longer dirty. */
void vm_units_end_claim(struct vm_slab *s, uint32_t unit, uint32_t n, bool zeroed, bool clean);
void vm_units_set_zeroing(struct vm_slab *s, uint32_t unit, uint32_t n);
/* A batch that zeroed these units has ended; unless it failed, units that nobody has claimed since are clean. */
void vm_units_end_zeroing(struct vm_slab *s, uint32_t unit, uint32_t n, bool failed);
void vm_units_set_filling(struct vm_slab *s, uint32_t unit, uint32_t n, bool filling);
void vm_unit_quarantine(struct vm_ctx *c, struct vm_slab *s, uint32_t unit);
/* Moves a unit's state to another unit, which also keeps its own reference. */
void vm_unit_move(struct vm_ctx *c, struct vm_slab *from, uint32_t unit, struct vm_slab *to, uint32_t to_unit);

/* ---- pool.c ------------------------------------------------------------------------------------ */

#define POOL_BINS 33
#define POOL_LEVELS 8 /* how full a slab is: 0 = more than 6/7 in use, ..., 6; 7 = empty */
#define LEVEL_EMPTY (POOL_LEVELS - 1)
#define VM_PLACES (1 + VMEM_MAX_DEVICES)
#define VM_POOLS (2 * VM_PLACES)

struct vm_pool { /* slabs of one location and kind */
  uint32_t location;
  int32_t device;
  bool large; /* its slabs hold large pages */
  uint64_t free_units, soiled;
  uint64_t used_units, peak_units; /* units in use; their maximum since the period of vm_surplus began */
  uint64_t promised;               /* free units promised to late batches not started yet; only late batches check it */
  struct vm_slab *bins[POOL_LEVELS][POOL_BINS]; /* bin k: 2^(k-1) <= max_run < 2^k; bin 0: nothing available */
  uint64_t bin_mask[POOL_LEVELS];               /* bit k set: bin k holds slabs */
  uint64_t mixed_units;                         /* free units of chunks in the slabs' mixed_map */
  uint32_t mixed_slab, mixed_chunk;             /* where a mixed unit was last found: the slab's index, and the chunk */
  struct vm_slab *elist[POOL_LEVELS];
  struct vm_slab *slist;
};

/* The preferred position of a run: from `unit` of `slab` on (NULL: anywhere), at chunk offset `offset` (in units); or
 * before `end` of `right` (NULL: anywhere), which follows it. */
struct vm_place {
  struct vm_slab *slab, *right;
  uint32_t unit, end;
  uint32_t offset;
  bool spread;
};

void vm_pools_init(struct vm_ctx *c);
struct vm_pool *vm_pool_of(struct vm_ctx *c, uint32_t location, int32_t device, uint64_t page_size, int *err);
/* Takes at most n units, at least `align`, aligned; refs become 1. n = 0: none available. Lock held. */
struct vm_run vm_pool_take(struct vm_ctx *c, struct vm_pool *p, uint64_t n, uint32_t align,
                           const struct vm_place *place);
/* Like vm_pool_take, but takes the longest free run in a partly used slab. Lock held. */
struct vm_run vm_pool_take_packed(struct vm_ctx *c, struct vm_pool *p, uint32_t n, uint32_t align);
/* Drops one reference of each unit and returns free units to their pool. Lock held; dropped around driver calls. */
void vm_units_put(struct vm_ctx *c, struct vm_slab *s, uint32_t unit, uint32_t n);
/* Undoes vm_pool_take for units that were neither mapped nor written to. Lock held. */
void vm_pool_untake(struct vm_ctx *c, struct vm_run r);
uint64_t vm_pool_free_units(const struct vm_ctx *c);  /* lock held */
uint64_t vm_pool_dirty_units(const struct vm_ctx *c); /* counts the dirty free units; lock held */
/* Adds a new slab, all of whose units are free. Lock held. */
void vm_pool_add(struct vm_ctx *c, struct vm_slab *s);
/* Makes soiled units that are no longer dirty available. Lock held. */
void vm_pool_cleaned(struct vm_ctx *c, struct vm_slab *s, uint32_t unit, uint32_t n);
/* Picks at most `most` runs of dirty free units, at most *units units, and marks them as being zeroed (`cleaning`
 * counts the runs). Subtracts them from *units. Lock held. */
uint32_t vm_pool_pick_dirty(struct vm_pool *p, struct vm_run *runs, uint32_t most, uint32_t *units);
/* Takes a slab out of the pool's lists, so that no units of it are taken, and puts it back. Lock held. */
void vm_pool_set_aside(struct vm_slab *s);
void vm_pool_put_back(struct vm_slab *s);

/* ---- supply.c (lock not held) ------------------------------------------------------------------ */

/* Adds at least `units` free units, in runs of `align`. A run of `piece` units should fit in one slab; 0: the pool is
 * only filled up, and no other slabs are returned to make room. *id (0 at first) identifies the growth for
 * vm_pool_undo_grow, which returns those of its slabs that are empty; a growth that fails undoes itself.
 * `seen`: free units when the caller looked; if memory is short but there are more by now, because another thread added
 * them, returns 0 and the caller looks again. */
int vm_pool_grow(struct vm_ctx *c, struct vm_pool *p, uint64_t units, uint64_t piece, uint32_t align, uint64_t seen,
                 uint64_t *id);
void vm_pool_undo_grow(struct vm_ctx *c, uint64_t id);
/* Returns empty slabs to the driver while `keep` free bytes remain, `low` of them in pools[0]; with `wait`, also those
 * that are being zeroed. */
uint64_t vm_pool_trim(struct vm_ctx *c, uint64_t keep, uint64_t low, bool wait);
/* Returns to the driver one slab that was set aside and has no references. The return value is the slab's size in
 * bytes. Lock held, but dropped during the driver call. */
uint64_t vm_pool_part(struct vm_ctx *c, struct vm_slab *s);

/* Free memory above pool_high. With a delay, only memory that its pool did not need at any time during the delay is
 * returned to the driver: an engine's load rises and falls within that time, and a slab costs the driver 0.1 ms each
 * way. The worker returns it, a piece at a time, so that no batch waits for long. */
struct vm_surplus {
  uint64_t delay; /* immutable, ns; 0: it is returned immediately */
  bool watched;   /* there is a surplus, and a period has begun */
  uint64_t due;   /* when the period ends */
};

/* Called when memory becomes free: returns the excess over pool_high, or starts watching it. */
void vm_pool_settle(struct vm_ctx *c);
/* Called when a plan was cancelled: with a delay, does what vm_pool_settle does; else returns free memory above `keep`,
 * the amount before the plan. */
void vm_pool_abandon(struct vm_ctx *c, uint64_t keep);
/* Called by the worker: returns a piece of the surplus to the driver; true if there was any. */
bool vm_pool_give_surplus(struct vm_ctx *c);

/* ---- alias.c (lock not held) ------------------------------------------------------------------- */

int vm_slab_alias(struct vm_ctx *c, struct vm_slab *s, uint32_t kind); /* creates the mapping on first use */
static inline uint64_t vm_alias_addr(const struct vm_ctx *c, const struct vm_slab *s, uint32_t unit) {
  return s->alias + vm_bytes(c, unit);
}

/* ---- clean.c ----------------------------------------------------------------------------------- */

#define CLEAN_RUNS 128

/* Zeroing of dirty free units in the background, one batch at a time. */
struct vm_clean {
  bool background; /* immutable; true if freed pages are dirty, so that the worker zeroes them */
  bool wanted;     /* there may be dirty free units: cleared when none is found, or zeroing has failed */
  bool issuing;    /* the fill is being started, without the lock */
  bool retiring;   /* a thread waits for the batch, without the lock */
  bool ended;      /* a batch has ended since the worker last trimmed the pool */
  uint32_t hold;   /* number of callers that prevent another batch */
  uint32_t n;      /* number of runs of the batch in flight; 0 = no batch */
  struct vm_run runs[CLEAN_RUNS];
  vm_event event;
};

/* Starts zeroing the runs, whose units are claimed; the event *done covers all of them. Lock not held. */
int vm_zero_start(struct vm_ctx *c, const struct vm_run *runs, size_t n, vm_event *done);
/* Called by the worker: ends a finished batch and starts another; true if a batch is in flight. *ended: a batch
 * ended, and its slabs may be empty. Lock not held. */
bool vm_clean_step(struct vm_ctx *c, bool *ended);
/* Between these two calls no batch is in flight. Lock held; dropped while it waits. */
void vm_clean_hold(struct vm_ctx *c);
void vm_clean_release(struct vm_ctx *c);

/* ---- fills.c ----------------------------------------------------------------------------------- */

/*
 * A fill that runs on after its batch was committed writes its units until its event is complete, and it may have to
 * wait for GPU work that never finishes. A call that unmaps such a unit, maps it at a second address, or reads, copies
 * or fills it waits for that fill; no other call does. So at most one fill runs on a unit.
 *
 * Only the worker begins fills and takes them out of the context's list, so that it can walk the list without the lock.
 * Any thread may wait for one and mark it as over.
 */
struct vm_fill {
  struct vm_fill *next; /* in vm_phys.fills; changed by the worker, under the lock */
  vm_event event;       /* immutable once it runs */
  uint32_t refs;        /* one for the list; one for each user that drops the lock */
  bool over;
  int result; /* set when the fill is over */
  /* Called once, with the lock held and the error of `result` recorded in this thread. May be NULL. */
  void (*ended)(struct vm_ctx *c, void *owner, int result);
  void *owner;
  size_t nruns;
  struct vm_run runs[]; /* memory that the fill writes */
};

struct vm_fill *vm_fill_new(struct vm_ctx *c, size_t nruns); /* NULL: no heap */
/* The fill runs until `event` is complete; the reference of vm_fill_new becomes the list's. Worker; lock held. */
void vm_fill_begin(struct vm_ctx *c, struct vm_fill *f, vm_event event);
/* Finds a fill that is running on one of the units; NULL = none. Lock held: take a reference to the fill before
 * dropping the lock. */
struct vm_fill *vm_fill_on(struct vm_ctx *c, const struct vm_slab *s, uint32_t unit, uint32_t n);
/* Waits in this thread, however long it takes; drops the caller's reference. Returns the fill's result. Lock not
 * held. */
int vm_fill_wait(struct vm_ctx *c, struct vm_fill *f);
void vm_fill_put(struct vm_ctx *c, struct vm_fill *f); /* lock not held */
/* Ends the fills whose event is complete; true if there were any. Worker; lock not held. */
bool vm_fills_poll(struct vm_ctx *c);
/* Waits for all fills. The worker must have exited; lock not held. */
void vm_fills_finish(struct vm_ctx *c);

/* ---- runs.c: lists of runs (lock held) --------------------------------------------------------- */

/* Appends r, merging it into the last run if contiguous. NULL: no heap memory; the runs are unchanged. */
struct vm_run *vm_runs_add(struct vm_ctx *c, struct vm_run *runs, uint32_t *n, struct vm_run r);
/* Takes units from the pool. -ENOMEM: the pool lacks *missing units, or heap memory is short (*missing is 0). */
int vm_runs_take(struct vm_ctx *c, struct vm_pool *p, uint64_t units, uint32_t align, struct vm_run **out,
                 uint32_t *nout, uint64_t *missing);
/* Drops a reference of all units of runs that have a slab, and frees the list. May drop the lock. */
void vm_runs_put(struct vm_ctx *c, struct vm_run *runs, uint32_t n);

/* ---- handle.c (lock held) ---------------------------------------------------------------------- */

struct vm_hdl {
  uint32_t gen;
  bool used;        /* the entry is taken (by a handle, or by mappings that outlive it) */
  bool held;        /* the caller has not dropped it */
  bool busy;        /* vMemRelease is in progress */
  bool dirty_ok;    /* VMEM_CREATE_DIRTY */
  uint32_t pending; /* number of plans that map its pages */
  uint32_t pins;    /* number of those plans that rely on its references: it must not be dropped */
  uint32_t location;
  int32_t device;
  uint64_t bytes, page_size;
  uint64_t mappings;  /* number of its ptes with PTE_START */
  uint64_t start_sum; /* sum of the addresses of these ptes: if there is one mapping, its address */
  uint32_t nruns;
  struct vm_run *runs; /* freed with the caller's reference; slab NULL: dropped by vmem_drop_range */
  uint32_t next_free;
};

struct vm_hdl *vm_hdl_find(struct vm_ctx *c, vmem_handle h, int *err);
struct vm_hdl *vm_hdl_new(struct vm_ctx *c, vmem_handle *out);
uint32_t vm_hdl_index(struct vm_ctx *c, const struct vm_hdl *h);
void vm_hdl_settle(struct vm_ctx *c, struct vm_hdl *h); /* frees the entry when nothing needs it */
void vm_hdl_drop(struct vm_ctx *c, struct vm_hdl *h);   /* drops the caller's reference; may drop the lock */
/* Records that a mapping made with a handle (index 0 = none) begins at addr, or ends. */
void vm_hdl_mapping(struct vm_ctx *c, uint32_t index, uint64_t addr, bool begins);
/* Drops `count` pieces, `stride` apart. May drop the lock. */
int vm_hdl_drop_range(struct vm_ctx *c, struct vm_hdl *h, uint64_t offset, uint64_t bytes, uint64_t count,
                      uint64_t stride);

/* ---- the layer's state ------------------------------------------------------------------------- */

struct vm_phys {
  struct vm_slab **slabs; /* by index; NULL = free entry; entry 0 unused */
  uint32_t nslabs, cap_slabs, live_slabs, slab_hint;
  uint64_t grow_ids;
  struct vm_pool pools[VM_POOLS]; /* devices[0], host, devices[1], ...; then the same for large pages */
  bool low;                       /* pools[0] has fallen below pool_low since the worker last looked */
  struct vm_clean clean;
  struct vm_surplus surplus;
  bool compacting;       /* vmem_compact is in progress */
  struct vm_fill *fills; /* fills that run on after their plans were committed */

  struct vm_hdl *hdls; /* entry 0 unused */
  uint32_t nhdls, cap_hdls, live_hdls;
  uint32_t first_free_hdl, last_free_hdl, free_hdls; /* free list, oldest first */

  uint64_t used_units, peak_used_units, quarantined_units, slab_bytes;
  uint64_t limbo_units;   /* in limbo: not referenced, but not free yet either */
  uint64_t growing_bytes; /* bytes of slabs being created */
  uint64_t leaving_bytes; /* bytes of slabs removed from the tables, but not yet returned to the driver */
  uint64_t leaving[2];    /* number of those slabs, by the parity of the epoch in which they were removed */
  uint64_t epoch;         /* incremented when a trim begins to wait for those slabs */
  uint64_t departures;    /* incremented whenever a list of such slabs has been returned */
};

/* Called once a success is final, so that memory taken briefly by failed calls does not count. */
static inline void vm_phys_note_peak(struct vm_ctx *c) {
  if (c->phys->used_units > c->phys->peak_used_units) c->phys->peak_used_units = c->phys->used_units;
}

/* Frees everything; the context must have no users. */
void vm_phys_close(struct vm_ctx *c);

#endif
