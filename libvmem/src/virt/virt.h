/* SPDX-License-Identifier: MIT */
/*
 * virt.h - addresses.
 *
 *   space   a reservation, with a two-level table of ptes (space.c)
 *   pte     one granule of a reservation: which unit of which slab lies behind it (pte.c)
 *   access  a range whose contents a call or a batch is reading or writing (access.c)
 *
 * A busy pte without PTE_MAPPED is about to be mapped and already names its unit, which holds a reference; with
 * PTE_MAPPED it is about to be unmapped, or is being filled or replaced.
 *
 * The caller of everything here holds vm_ctx.lock.
 */
#ifndef VMEM_VIRT_H
#define VMEM_VIRT_H

#include "phys/phys.h"

#define LEAF_PTES 32u

enum {
  PTE_MAPPED = 1u << 0,
  PTE_BUSY = 1u << 1,  /* a plan is changing it */
  PTE_START = 1u << 2, /* first granule of a mapping */
  PTE_CALL = 1u << 3,  /* first granule of a driver call */
  PTE_READONLY = 1u << 4,
  PTE_QUARANTINED = 1u << 5, /* state unknown after a failed undo; stays until close */
  PTE_LARGE = 1u << 6        /* first granule of a block: 2 MiB on their boundary, mapped by one entry, of which
                                the driver unmaps and replaces no part */
};

#define PTE_MARKS (PTE_START | PTE_CALL | PTE_LARGE) /* marks of a boundary, not part of a granule's state */

struct vm_pte {
  uint32_t slab; /* index in vm_phys.slabs */
  uint32_t unit;
  uint32_t handle; /* index in vm_phys.hdls of the handle it was mapped with; 0 = none */
  uint32_t flags;  /* PTE_*; 0 = nothing here */
};

struct vm_leaf {
  struct vm_pte pte[LEAF_PTES];
};

struct vm_space {
  uint64_t base, bytes; /* immutable */
  uint64_t priv;        /* immutable, the back end's */
  uint32_t kind;        /* immutable, VMEM_RANGE_VISIBLE | VMEM_RANGE_SPARSE */
  bool large;           /* immutable: the driver has large entries here; else PTE_LARGE are large pages, which only the
                           core treats as wholes */
  bool freeing;
  bool gone;                          /* all but its addresses went back to the driver: only vMemFree takes it */
  uint64_t mapped, busy, quarantined; /* granules */
  uint64_t segments;                  /* pieces as the back end sees them, holes included */
  uint64_t live_leaves;
  struct vm_leaf **leaves;
};

static inline bool vm_is_sparse(const struct vm_space *s) { return s->kind & VMEM_RANGE_SPARSE; }

static inline struct vm_pte *vm_pte(const struct vm_ctx *c, const struct vm_space *s,
                                    uint64_t addr) { /* NULL: nothing there */
  uint64_t unit = vm_units(c, addr - s->base);
  struct vm_leaf *leaf = s->leaves[unit / LEAF_PTES];
  return leaf ? &leaf->pte[unit % LEAF_PTES] : NULL;
}

/* Granules from addr on whose ptes follow one another in a leaf, at most to end. */
static inline uint32_t vm_leaf_rest(const struct vm_ctx *c, const struct vm_space *s, uint64_t addr, uint64_t end) {
  uint32_t rest = LEAF_PTES - vm_units(c, addr - s->base) % LEAF_PTES;
  return vm_units(c, end - addr) < rest ? (uint32_t)vm_units(c, end - addr) : rest;
}

/* True if mapped and not being changed by a plan. */
static inline bool vm_pte_is_live(const struct vm_pte *p) {
  return p && (p->flags & (PTE_MAPPED | PTE_BUSY | PTE_QUARANTINED)) == PTE_MAPPED;
}

/* ---- space.c ----------------------------------------------------------------------------------- */

struct vm_space *vm_space_find(struct vm_ctx *c, uint64_t addr);
/* The space that contains all of [addr, addr + bytes); records -EINVAL, -EOVERFLOW or -ENXIO. */
struct vm_space *vm_space_range(struct vm_ctx *c, uint64_t addr, uint64_t bytes, uint64_t align, int *err);
/* A space that overlaps [addr, addr + bytes); NULL: none. */
struct vm_space *vm_space_overlap(struct vm_ctx *c, uint64_t addr, uint64_t bytes);
int vm_space_insert(struct vm_ctx *c, struct vm_space *s);
void vm_space_remove(struct vm_ctx *c, struct vm_space *s);
struct vm_space *vm_space_new(struct vm_ctx *c, uint64_t bytes); /* lock not held */
void vm_space_destroy(struct vm_space *s);
/* Unmaps and frees everything; the context has no users any more. */
void vm_virt_close(struct vm_ctx *c);

/* ---- pte.c: what lies behind a range ----------------------------------------------------------- */

struct vm_pte *vm_pte_make(struct vm_ctx *c, struct vm_space *s, uint64_t addr); /* NULL: no heap */
/* Records why a pte cannot be mapped, or is not live. */
int vm_pte_taken(const struct vm_ctx *c, const struct vm_pte *p, uint64_t addr);
int vm_pte_not_live(const struct vm_ctx *c, const struct vm_pte *p, uint64_t addr);
/* Pieces the back end sees between the granules of a range, its edges included; and as if nothing were mapped in it. */
uint64_t vm_space_edges(struct vm_ctx *c, struct vm_space *s, uint64_t addr, uint64_t bytes);
uint64_t vm_space_edges_bare(struct vm_ctx *c, struct vm_space *s, uint64_t addr, uint64_t bytes);
/* A running fill that writes a page behind the range, at whatever address; NULL = none. */
struct vm_fill *vm_space_fill(struct vm_ctx *c, struct vm_space *s, uint64_t addr, uint64_t bytes);
/* True if a boundary at addr would cut a run in two. */
bool vm_space_cuts(struct vm_ctx *c, struct vm_space *s, uint64_t addr);
/* True if a boundary at addr, in the space or at its end, would cut a unit that the driver maps and unmaps as a whole;
 * *page, *bytes: that unit. */
bool vm_space_cuts_page(struct vm_ctx *c, struct vm_space *s, uint64_t addr, uint64_t *page, uint64_t *bytes);
/* Bytes from addr on, at most max, with one run behind them (same slab, neighbours, same protection), or nothing. */
uint64_t vm_space_run(struct vm_ctx *c, struct vm_space *s, uint64_t addr, uint64_t max);
/* Granules from addr on whose ptes name units that follow one another, with the same flags of `mask`. */
uint32_t vm_space_units(struct vm_ctx *c, struct vm_space *s, uint64_t addr, uint64_t end, uint32_t mask);
/* True if a call that maps the run at addr gets large entries: the driver takes the largest that divide address, offset
 * and length, one size for the whole call. */
static inline bool vm_is_whole(const struct vm_ctx *c, const struct vm_space *s, uint64_t addr, struct vm_run r) {
  return r.slab->large && (s->large || r.slab->pool->large) &&
         !((vm_units(c, addr) | r.unit | r.n) & (c->chunk_units - 1));
}
/* The first units of a run that are one driver call at addr: what lies before its whole blocks, all of these, or the
 * rest. */
uint32_t vm_one_call(const struct vm_ctx *c, uint64_t addr, struct vm_run r);
/* The marks for the ptes of such a call: see vm_ptes_name. */
static inline uint32_t vm_call_marks(const struct vm_ctx *c, const struct vm_space *s, uint64_t addr, struct vm_run r) {
  return PTE_CALL | (vm_is_whole(c, s, addr, r) ? PTE_LARGE : 0);
}
/* The number of bytes from addr on, at most max, that one driver call may remap with their present entries. */
uint64_t vm_space_call(struct vm_ctx *c, struct vm_space *s, uint64_t addr, uint64_t max);
/* True if the granule is the first of a large entry. */
bool vm_is_entry(struct vm_ctx *c, struct vm_space *s, uint64_t addr);

/* ---- pte.c: changing it ------------------------------------------------------------------------ */

/* Free ptes of [addr, addr + r.n) name the run's units, busy. *marked: granules; all, or those before the failure. Of
 * `flags` PTE_START and PTE_CALL are the first granule's, PTE_LARGE that of each block. */
int vm_ptes_name(struct vm_ctx *c, struct vm_space *s, uint64_t addr, struct vm_run r, uint32_t handle, uint32_t flags,
                 uint32_t *marked);
/* Makes busy ptes from addr on refer to the run's units, up to where the units that they referred to stop being
 * contiguous. Returns the run of those old units. */
struct vm_run vm_ptes_rename(struct vm_ctx *c, struct vm_space *s, uint64_t addr, struct vm_run r, uint32_t handle,
                             uint32_t flags);
/* Marks live ptes busy up to the first that is not live; returns their number. */
uint64_t vm_ptes_hold(struct vm_ctx *c, struct vm_space *s, uint64_t addr, uint64_t bytes);
/* Makes busy ptes live again, except those quarantined meanwhile. */
void vm_ptes_release(struct vm_ctx *c, struct vm_space *s, uint64_t addr, uint64_t bytes);
/* Marks busy ptes that name their units as mapped. */
void vm_ptes_commit(struct vm_ctx *c, struct vm_space *s, uint64_t addr, uint64_t bytes);
/* Marks busy ptes as unmapped; they keep their units. */
void vm_ptes_detach(struct vm_ctx *c, struct vm_space *s, uint64_t addr, uint64_t bytes);
/* Detaches busy ptes, gives their references back and frees the ptes. Drops the lock around driver calls. */
void vm_ptes_unmap(struct vm_ctx *c, struct vm_space *s, uint64_t addr, uint64_t bytes);
/* Records that one driver call now maps the range. */
void vm_ptes_one_call(struct vm_ctx *c, struct vm_space *s, uint64_t addr, uint64_t bytes);
/* Records that the whole blocks of a range now have large, or small, entries; returns how many changed. */
uint64_t vm_ptes_entries(struct vm_ctx *c, struct vm_space *s, uint64_t addr, uint64_t bytes, bool large);
void vm_ptes_quarantine(struct vm_ctx *c, struct vm_space *s, uint64_t addr, uint64_t bytes);
/* The context's and the space's count of pieces, after a change of a range that had `before` of them. */
void vm_space_count_edges(struct vm_ctx *c, struct vm_space *s, uint64_t addr, uint64_t bytes, uint64_t before);

/* ---- access.c ---------------------------------------------------------------------------------- */

/* Ranges that vmem_read, _write, _copy or a plan's copies are using: unmapping them is -EBUSY meanwhile. */
struct vm_access {
  uint64_t addr, bytes, count, stride; /* as in struct vmem_op; stride 0: the same range again */
  struct vm_access *next;
};

void vm_access_begin(struct vm_ctx *c, struct vm_access *a);
void vm_access_end(struct vm_ctx *c, struct vm_access *a); /* does nothing if it did not begin */
/* -EBUSY when a part of the range is in use. */
int vm_access_check(struct vm_ctx *c, uint64_t addr, uint64_t bytes);

/* ---- the layer's state ------------------------------------------------------------------------- */

struct vm_virt {
  struct vm_space **spaces; /* sorted by base */
  size_t nspaces, cap_spaces;
  struct vm_access *accesses;
  uint64_t reserved_bytes, mapped_units, peak_mapped_units;
};

static inline void vm_virt_note_peak(struct vm_ctx *c) {
  if (c->virt->mapped_units > c->virt->peak_mapped_units) c->virt->peak_mapped_units = c->virt->mapped_units;
}

#endif
