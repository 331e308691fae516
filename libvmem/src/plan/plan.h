/* SPDX-License-Identifier: MIT */
/*
 * plan.h - a batch being executed.
 *
 *   check.c        arguments
 *   make.c         takes pages and marks ptes: everything that can run out of memory
 *   order.c        the fills of other batches that must end first, and its own that may run on
 *   split.c        large entries of which a batch takes a part
 *   run.c          the driver's calls, or their undo
 *   commit.c       records what was done, or takes back what was made
 *   join.c         calls and entries made one: VMEM_OP_JOIN, and vmem_join's plans
 *   compact.c      vmem_compact's, which move pages (move.c)
 */
#ifndef VMEM_PLAN_H
#define VMEM_PLAN_H

#include "virt/virt.h"

struct vm_seg { /* a run and its address: one driver call */
  uint64_t addr, bytes;
  struct vm_space *space;
  struct vm_slab *slab;
  uint32_t unit;
  uint32_t flags; /* VMEM_MAP_* */
};

struct vm_piece { /* a range for commit to record */
  uint64_t addr, bytes;
  struct vm_space *space;
  uint32_t handle; /* maps: index, 0 = none; fills: the byte */
  bool grouped;    /* replaces and unmaps: done by the calls of a vm_group */
};

struct vm_cut { /* a large entry of which a piece takes a part */
  uint64_t block;
  struct vm_space *space;
  uint64_t addr, bytes; /* the piece */
  bool allowed;         /* VMEM_OP_SPLIT */
};

struct vm_group { /* unmapped by one call, then mapped again in part */
  uint64_t addr, bytes;
  struct vm_space *space;
  size_t segs; /* that many of the plan's group_segs */
};

struct vm_plan {
  struct vm_list maps;       /* vm_seg */
  struct vm_list mapped;     /* vm_piece: they make up these */
  struct vm_list unmaps;     /* vm_piece, wholly mapped; one driver call each */
  struct vm_list zeros;      /* vm_run: claimed units, to be zeroed before anything is mapped */
  struct vm_list copies;     /* vm_be_copy: to maps, or between slabs' own mappings */
  struct vm_list sources;    /* vm_access: what they read, in use from the plan's completion to its end */
  struct vm_list replaced;   /* vm_piece, wholly mapped: shows other pages afterwards */
  struct vm_list replaces;   /* vm_seg: these pages, in the order of the pieces */
  struct vm_list cuts;       /* vm_cut, in order, each block once */
  struct vm_list kept;       /* vm_seg: what stays of those blocks */
  struct vm_list groups;     /* vm_group, in order */
  struct vm_list group_segs; /* vm_seg: kept ones and replaces, in the order of the groups */
  struct vm_list joins;      /* vm_seg: mapped already, by several calls or with small entries */
  struct vm_list fills;      /* vm_piece */
  struct vm_list consumed;   /* uint32_t handle indices */
  struct vm_bind_op *ops;    /* room for its driver calls, which must not fail for lack of heap memory */
  struct vm_fill *fill;      /* its fills may run on after the commit, as this; NULL = they are waited for */
  vm_event event;            /* covers its fills and copies; 0 = over */
  bool filling;              /* its maps are made, and its fills and copies started */
  bool claims;               /* some of the mapped units are claimed: dirty, to be zeroed by this plan */
  bool zeroing;              /* their zeroing was started */
  vm_event zero_event;       /* event that completes the zeroing */
  bool zeroed;               /* zeroing is complete; the units may have been written since */
  bool shows;                /* pages of a handle, which by the time it runs may be mapped and filled elsewhere */
  bool only_joins;           /* made by vmem_join, not a batch */
  struct vm_move *move;      /* the replaces show the same contents in other pages: vmem_compact */
  struct vm_room room;       /* planned (backend/room.c) */
  uint64_t grow_id;          /* slabs made for this plan; 0 = none */
  uint64_t keep;             /* free bytes that stay in the pool if the plan is cancelled */
  uint32_t release;          /* handle that vMemRelease drops with this plan; 0 = none */
};

/* ---- check.c (lock held) ----------------------------------------------------------------------- */

/* An operation whose arguments are right, as far as can be said without looking at its pages. */
struct vm_want {
  const struct vmem_op *op;
  uint64_t count, page_size;
  struct vm_pool *pool; /* POPULATE */
  struct vm_hdl *hdl;   /* MAP */
};

int vm_want(struct vm_ctx *c, const struct vmem_op *op, struct vm_want *w);
/* Checks a whole batch before pages are taken, so that its error does not depend on the pool. */
int vm_want_all(struct vm_ctx *c, const struct vmem_op *ops, size_t n);
/* Promises a late batch, whose arguments are right, the pages that it populates; false, and nothing promised, where a
 * pool has fewer beside those promised before. Taken back when the batch is started, or will not be. */
bool vm_promise(struct vm_ctx *c, const struct vmem_op *ops, size_t n);
void vm_promise_end(struct vm_ctx *c, const struct vmem_op *ops, size_t n);
/* 0 becomes the granule; -EOPNOTSUPP for what the context does not have. */
int vm_page_size(struct vm_ctx *c, uint64_t *page_size);
static inline uint64_t vm_offset_step(const struct vmem_op *op) {
  return op->offset_stride ? op->offset_stride : op->bytes;
}
static inline uint64_t vm_source_bytes(const struct vmem_op *op) { return op->src_bytes ? op->src_bytes : op->bytes; }

/* ---- make.c ------------------------------------------------------------------------------------ */

/* Checks, takes pages, marks ptes. Lock not held. On failure nothing is changed. */
int vm_plan_make(struct vm_ctx *c, const struct vmem_op *ops, size_t n, struct vm_plan *p);
int vm_plan_make_release(struct vm_ctx *c, vmem_handle h, struct vm_plan *p);
/* A plan that unmaps all of a reservation that no other plan is changing. *p is zeroed. Lock held. */
int vm_plan_make_free(struct vm_ctx *c, struct vm_space *s, struct vm_plan *p);
/* Called once the plan is complete: -ENOSPC if the driver has no room for its pieces, -ENOMEM if heap memory for its
 * calls is short. Lock held. */
int vm_plan_room(struct vm_ctx *c, struct vm_plan *p);
int vm_plan_ops_room(struct vm_ctx *c, struct vm_plan *p);

/* ---- split.c (lock held) ----------------------------------------------------------------------- */

/* Called for a marked piece to be unmapped or replaced: records the large entries that it cuts. -EINVAL for a large
 * page, which cannot be cut. */
int vm_split_note(struct vm_ctx *c, struct vm_plan *p, const struct vm_piece *piece, bool allowed);
/* Called once all pieces are marked: marks the remaining parts of those entries busy too. -EINVAL if splitting was
 * not allowed. */
int vm_plan_split(struct vm_ctx *c, struct vm_plan *p);
/* Records the splits, before anything else of the plan. */
void vm_split_commit(struct vm_ctx *c, struct vm_plan *p);
/* ---- order.c ----------------------------------------------------------------------------------- */

bool vm_plan_only_fills(const struct vm_plan *p);
/* Lets the plan's fills run on after its commit; `ended` is called when they are over. On failure (heap) the plan is as
 * it was. Lock not held. */
int vm_plan_may_run_on(struct vm_ctx *c, struct vm_plan *p, void (*ended)(struct vm_ctx *c, void *owner, int result),
                       void *owner);
/* A running fill of another plan that must end before this one is run; NULL = none. Lock held. */
struct vm_fill *vm_plan_blocker(struct vm_ctx *c, struct vm_plan *p);
/* Waits for all such fills in this thread. Lock not held. */
int vm_plan_await_fills(struct vm_ctx *c, struct vm_plan *p);

/* ---- run.c (lock not held) --------------------------------------------------------------------- */

/* Makes the mappings through which vm_plan_zero works: what it takes from the driver. */
int vm_plan_aliases(struct vm_ctx *c, struct vm_plan *p);
/* Zeroes what the plan has claimed, and waits for it; or, with `over`, says whether it is over: if not, call it again.
 * Nothing of the plan may be mapped before. After an error the plan can only be cancelled. */
int vm_plan_zero(struct vm_ctx *c, struct vm_plan *p, bool *over);
/* Driver calls, then commit; or undo. No fill may be running where vm_plan_blocker looks. `after` is for the fills
 * alone. With `over` it does not wait for the plan's own fills: where something must follow them, *over is false; call
 * it again. *fill is the plan's fill where it runs on, else NULL: only the worker has one. */
int vm_plan_run(struct vm_ctx *c, struct vm_plan *p, const vm_event *after, size_t num_after, bool *over,
                struct vm_fill **fill);
/* Waits for other plans' fills, then runs it whole. A plan that cannot be run is cancelled. */
int vm_plan_run_now(struct vm_ctx *c, struct vm_plan *p);

/* ---- commit.c (lock not held) ------------------------------------------------------------------ */

/* Records a plan that the driver has executed. */
void vm_plan_commit(struct vm_ctx *c, struct vm_plan *p);
/* Takes back what vm_plan_make did; the first under the lock, dropped around driver calls. */
void vm_plan_take_back(struct vm_ctx *c, struct vm_plan *p);
void vm_plan_cancel(struct vm_ctx *c, struct vm_plan *p);
void vm_plan_clear(struct vm_plan *p);

/* ---- move.c ------------------------------------------------------------------------------------ */

struct vm_moved { /* of a page */
  struct vm_slab *slab;
  uint32_t unit;
};

struct vm_moved_handle {
  uint32_t handle; /* index */
  struct vm_run *runs;
  uint32_t n;
};

struct vm_move {
  struct vm_slab *from; /* NULL until it is set aside */
  struct vm_moved *to;  /* by unit of `from` */
  struct vm_list taken; /* vm_run: the pages that `to` names, and the rest of large ones; with one reference */
  struct vm_list hdls;  /* vm_moved_handle */
};

/* Records that the plan's pages have moved. Lock held. */
void vm_move_commit(struct vm_ctx *c, struct vm_plan *p);

/* ---- join.c, compact.c (lock not held) --------------------------------------------------------- */

/* Marks the parts of a range worth joining; it must be mapped, except with `holes`. Lock held. */
int vm_plan_join(struct vm_ctx *c, struct vm_plan *p, struct vm_space *s, uint64_t addr, uint64_t bytes, bool holes);
/* *calls: number of stretches remapped. */
int vm_join(struct vm_ctx *c, uint64_t addr, uint64_t bytes, uint64_t *calls);
/* Compacts until *freed reaches `want`. */
int vm_compact(struct vm_ctx *c, uint64_t want, uint64_t *freed);

#endif
