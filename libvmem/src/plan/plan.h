/* SPDX-License-Identifier: MIT */
/*
 * plan.h - a batch being executed.
 *
 *   check.c        arguments
 *   make.c         takes pages and marks ptes: everything that can run out of memory
 *   order.c        the fills of other batches that must finish first, and the plan's own, which may run on
 *   split.c        large entries that a batch changes in part
 *   run.c          makes the driver calls, or undoes them
 *   commit.c       records what was done, or takes back what make.c did
 *   join.c         merges calls and entries: VMEM_OP_JOIN, and the plans of vmem_join
 *   compact.c      the plans of vmem_compact, which move pages (move.c)
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
  bool grouped;    /* replaces and unmaps: carried out by the calls of a vm_group */
};

struct vm_cut { /* a large entry that a piece covers in part */
  uint64_t block;
  struct vm_space *space;
  uint64_t addr, bytes; /* range of the piece */
  bool allowed;         /* VMEM_OP_SPLIT */
};

struct vm_group { /* a range that one call unmaps, and of which a part is then mapped again */
  uint64_t addr, bytes;
  struct vm_space *space;
  size_t segs; /* number of the plan's group_segs that belong to the group */
};

struct vm_plan {
  struct vm_list maps;       /* vm_seg */
  struct vm_list mapped;     /* vm_piece: the ranges that `maps` make up */
  struct vm_list unmaps;     /* vm_piece, fully mapped; one driver call each */
  struct vm_list zeros;      /* vm_run: claimed units, to be zeroed before anything is mapped */
  struct vm_list copies;     /* vm_be_copy: to maps, or between slabs' own mappings */
  struct vm_list sources;    /* vm_access: what `copies` read; registered while the complete plan exists */
  struct vm_list replaced;   /* vm_piece, fully mapped; will map other pages */
  struct vm_list replaces;   /* vm_seg: the new pages, in the order of `replaced` */
  struct vm_list cuts;       /* vm_cut, in order, each block once */
  struct vm_list kept;       /* vm_seg: what remains of the blocks in `cuts` */
  struct vm_list groups;     /* vm_group, in order */
  struct vm_list group_segs; /* vm_seg: from `kept` and `replaces`, in the order of the groups */
  struct vm_list joins;      /* vm_seg: mapped already, by several calls or with small entries */
  struct vm_list fills;      /* vm_piece */
  struct vm_list consumed;   /* uint32_t handle indices */
  struct vm_bind_op *ops;    /* array for the driver calls, allocated in advance so that they need no heap memory */
  struct vm_fill *fill;      /* the plan's fills, if they may run on after the commit; NULL = the plan waits for them */
  vm_event event;            /* covers the plan's fills and copies; 0 = complete */
  bool filling;              /* the maps are done, and the fills and copies have started */
  bool claims;               /* some of the mapped units are claimed: dirty, to be zeroed by this plan */
  bool zeroing;              /* zeroing of the claimed units has started */
  vm_event zero_event;       /* event that completes the zeroing */
  bool zeroed;               /* zeroing is complete; the units may have been written since */
  bool shows;                /* maps pages of a handle; when the plan runs, they may be mapped and filled elsewhere */
  bool only_joins;           /* made by vmem_join, not for a batch */
  struct vm_move *move;      /* vmem_compact: the replaces map copies of the old pages */
  struct vm_room room;       /* room that the plan has reserved in backend/room.c */
  uint64_t grow_id;          /* identifies the pool's growth for this plan; 0 = none */
  uint64_t keep;             /* free bytes that stay in the pool if the plan is cancelled */
  uint32_t release;          /* handle that vMemRelease drops with this plan; 0 = none */
};

/* ---- check.c (lock held) ----------------------------------------------------------------------- */

/* An operation whose arguments passed every check that does not need its pages. */
struct vm_want {
  const struct vmem_op *op;
  uint64_t count, page_size;
  struct vm_pool *pool; /* POPULATE */
  struct vm_hdl *hdl;   /* MAP */
};

int vm_want(struct vm_ctx *c, const struct vmem_op *op, struct vm_want *w);
/* Checks a whole batch before pages are taken, so that its error does not depend on the pool. */
int vm_want_all(struct vm_ctx *c, const struct vmem_op *ops, size_t n);
/* Promises a late batch, whose arguments were checked, the pages that it populates. Returns false and promises nothing
 * if a pool has too few besides those already promised. The promise ends when the batch is started or cancelled. */
bool vm_promise(struct vm_ctx *c, const struct vmem_op *ops, size_t n);
void vm_promise_end(struct vm_ctx *c, const struct vmem_op *ops, size_t n);
/* 0 becomes the granule; -EOPNOTSUPP if the context does not support the size. */
int vm_page_size(struct vm_ctx *c, uint64_t *page_size);
static inline uint64_t vm_offset_step(const struct vmem_op *op) {
  return op->offset_stride ? op->offset_stride : op->bytes;
}
static inline uint64_t vm_source_bytes(const struct vmem_op *op) { return op->src_bytes ? op->src_bytes : op->bytes; }

/* ---- make.c ------------------------------------------------------------------------------------ */

/* Checks, takes pages, marks ptes. Lock not held. On failure nothing is changed. */
int vm_plan_make(struct vm_ctx *c, const struct vmem_op *ops, size_t n, struct vm_plan *p);
int vm_plan_make_release(struct vm_ctx *c, vmem_handle h, struct vm_plan *p);
/* Makes a plan that unmaps all of a reservation that no other plan is changing. *p is zeroed. Lock held. */
int vm_plan_make_free(struct vm_ctx *c, struct vm_space *s, struct vm_plan *p);
/* Called once the plan is complete: -ENOSPC if the driver has no room for its pieces, -ENOMEM if heap memory for its
 * calls is short. Lock held. */
int vm_plan_room(struct vm_ctx *c, struct vm_plan *p);
int vm_plan_ops_room(struct vm_ctx *c, struct vm_plan *p);

/* ---- split.c (lock held) ----------------------------------------------------------------------- */

/* Called for a marked piece to be unmapped or replaced: records the large entries that it cuts. -EINVAL for a large
 * page, which cannot be cut. */
int vm_split_note(struct vm_ctx *c, struct vm_plan *p, const struct vm_piece *piece, bool allowed);
/* Called once all pieces are marked: marks the remaining parts of the recorded entries busy too. -EINVAL if splitting
 * was not allowed. */
int vm_plan_split(struct vm_ctx *c, struct vm_plan *p);
/* Records the splits, before anything else of the plan. */
void vm_split_commit(struct vm_ctx *c, struct vm_plan *p);
/* ---- order.c ----------------------------------------------------------------------------------- */

bool vm_plan_only_fills(const struct vm_plan *p);
/* Lets the plan's fills run on after its commit; `ended` is called when they have finished. On failure (heap) the plan
 * is unchanged. Lock not held. */
int vm_plan_may_run_on(struct vm_ctx *c, struct vm_plan *p, void (*ended)(struct vm_ctx *c, void *owner, int result),
                       void *owner);
/* Finds a running fill of another plan that must finish before this plan is run; NULL = none. Lock held. */
struct vm_fill *vm_plan_blocker(struct vm_ctx *c, struct vm_plan *p);
/* Waits in this thread until vm_plan_blocker finds no fill. Lock not held. */
int vm_plan_await_fills(struct vm_ctx *c, struct vm_plan *p);

/* ---- run.c (lock not held) --------------------------------------------------------------------- */

/* Creates the slabs' own mappings, which vm_plan_zero uses. */
int vm_plan_aliases(struct vm_ctx *c, struct vm_plan *p);
/* Zeroes the units that the plan has claimed and waits for completion; with `over`, does not wait, but sets *over: if
 * false, call it again. No map of the plan may run before the zeroing is complete. After an error the plan can only be
 * cancelled. */
int vm_plan_zero(struct vm_ctx *c, struct vm_plan *p, bool *over);
/* Makes the driver calls, then commits or undoes. Call it only when vm_plan_blocker finds no fill. Only the plan's
 * fills wait for `after`. With `over`, it does not wait for the plan's own fills: if more must be done after them,
 * *over is false; call it again. *fill is the plan's fill if it runs on, else NULL; only plans of the worker have
 * one. */
int vm_plan_run(struct vm_ctx *c, struct vm_plan *p, const vm_event *after, size_t num_after, bool *over,
                struct vm_fill **fill);
/* Waits for other plans' fills, then runs the plan to its end. A plan that cannot be run is cancelled. */
int vm_plan_run_now(struct vm_ctx *c, struct vm_plan *p);

/* ---- commit.c (lock not held) ------------------------------------------------------------------ */

/* Records a plan that the driver has executed. */
void vm_plan_commit(struct vm_ctx *c, struct vm_plan *p);
/* Take back what vm_plan_make did. vm_plan_take_back: lock held; dropped around driver calls. */
void vm_plan_take_back(struct vm_ctx *c, struct vm_plan *p);
void vm_plan_cancel(struct vm_ctx *c, struct vm_plan *p);
void vm_plan_clear(struct vm_plan *p);

/* ---- move.c ------------------------------------------------------------------------------------ */

struct vm_moved { /* the new place of a page */
  struct vm_slab *slab;
  uint32_t unit;
};

struct vm_moved_handle {
  uint32_t handle; /* index */
  struct vm_run *runs;
  uint32_t n;
};

struct vm_move {
  struct vm_slab *from; /* slab whose pages move; NULL until it is set aside */
  struct vm_moved *to;  /* per unit of `from` */
  struct vm_list taken; /* vm_run: the pages that `to` names, and the remainder of large ones; one reference each */
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
