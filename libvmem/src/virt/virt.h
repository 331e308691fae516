/* SPDX-License-Identifier: MIT */
/*
 * virt.h - addresses.
 *
 *   space   a reservation, with a two-level table of ptes (space.c)
 *   pte     one granule of a reservation: which unit of which slab backs it (pte.c)
 *   access  a range whose contents a call or a batch is reading or writing (access.c)
 *
 * A busy pte without PTE_MAPPED is about to be mapped and already names its unit, which holds a reference; with
 * PTE_MAPPED it is about to be unmapped, or is being filled or replaced.
 *
 * Callers of all functions here hold vm_ctx.lock.
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
  PTE_LARGE = 1u << 6        /* first granule of a block: an aligned 2 MiB, mapped by one entry, which the driver
                                unmaps and replaces only as a whole */
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
  bool large;           /* immutable: the driver creates large entries here; else PTE_LARGE marks large pages, which
                           only the core treats as a whole */
  bool freeing;
  bool gone;                          /* freed in the driver, except for its addresses: only vMemFree accepts it */
  uint64_t mapped, busy, quarantined; /* numbers of granules */
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

/* Counts the granules from addr on, at most up to end, whose ptes are adjacent in one leaf. */
static inline uint32_t vm_leaf_rest(const struct vm_ctx *c, const struct vm_space *s, uint64_t addr, uint64_t end) {
  uint32_t rest = LEAF_PTES - vm_units(c, addr - s->base) % LEAF_PTES;
  return vm_units(c, end - addr) < rest ? (uint32_t)vm_units(c, end - addr) : rest;
}

/* True if it is mapped and no plan is changing it. */
static inline bool vm_pte_is_live(const struct vm_pte *p) {
  return p && (p->flags & (PTE_MAPPED | PTE_BUSY | PTE_QUARANTINED)) == PTE_MAPPED;
}

/* ---- space.c ----------------------------------------------------------------------------------- */

struct vm_space *vm_space_find(struct vm_ctx *c, uint64_t addr);
/* Finds the space that contains all of [addr, addr + bytes); records -EINVAL, -EOVERFLOW or -ENXIO. */
struct vm_space *vm_space_range(struct vm_ctx *c, uint64_t addr, uint64_t bytes, uint64_t align, int *err);
/* Finds a space that overlaps [addr, addr + bytes); NULL: none. */
struct vm_space *vm_space_overlap(struct vm_ctx *c, uint64_t addr, uint64_t bytes);
int vm_space_insert(struct vm_ctx *c, struct vm_space *s);
void vm_space_remove(struct vm_ctx *c, struct vm_space *s);
struct vm_space *vm_space_new(struct vm_ctx *c, uint64_t bytes); /* lock not held */
void vm_space_destroy(struct vm_space *s);
/* Unmaps and frees everything; the context must have no users. */
void vm_virt_close(struct vm_ctx *c);

/* ---- pte.c: what backs a range ----------------------------------------------------------------- */

struct vm_pte *vm_pte_make(struct vm_ctx *c, struct vm_space *s, uint64_t addr); /* NULL: no heap */
/* Records why a pte cannot be mapped, or is not live. */
int vm_pte_taken(const struct vm_ctx *c, const struct vm_pte *p, uint64_t addr);
int vm_pte_not_live(const struct vm_ctx *c, const struct vm_pte *p, uint64_t addr);
/* Count the boundaries of pieces, as the back end sees them, in a range, its edges included: as it is, and as if
 * nothing were mapped in it. */
uint64_t vm_space_edges(struct vm_ctx *c, struct vm_space *s, uint64_t addr, uint64_t bytes);
uint64_t vm_space_edges_bare(struct vm_ctx *c, struct vm_space *s, uint64_t addr, uint64_t bytes);
/* Finds a running fill that writes a page of the range, through whatever address; NULL = none. */
struct vm_fill *vm_space_fill(struct vm_ctx *c, struct vm_space *s, uint64_t addr, uint64_t bytes);
/* True if a boundary at addr would cut a run in two. */
bool vm_space_cuts(struct vm_ctx *c, struct vm_space *s, uint64_t addr);
/* True if a boundary at addr, in the space or at its end, would cut an area that the driver maps and unmaps as a whole;
 * *page, *bytes: that area. */
bool vm_space_cuts_page(struct vm_ctx *c, struct vm_space *s, uint64_t addr, uint64_t *page, uint64_t *bytes);
/* Counts the bytes from addr on, at most max, that one run backs (same slab, adjacent units, same protection), or that
 * nothing backs. */
uint64_t vm_space_run(struct vm_ctx *c, struct vm_space *s, uint64_t addr, uint64_t max);
/* Counts the granules from addr on whose ptes name adjacent units and agree in the flags of `mask`. */
uint32_t vm_space_units(struct vm_ctx *c, struct vm_space *s, uint64_t addr, uint64_t end, uint32_t mask);
/* True if a call that maps the run at addr creates large entries: the driver uses the largest size that divides
 * address, offset and length, one size for the whole call. */
static inline bool vm_is_whole(const struct vm_ctx *c, const struct vm_space *s, uint64_t addr, struct vm_run r) {
  return r.slab->large && (s->large || r.slab->pool->large) &&
         !((vm_units(c, addr) | r.unit | r.n) & (c->chunk_units - 1));
}
/* Counts the first units of a run that one driver call maps at addr: those before its whole blocks, or all whole
 * blocks, or those after them. */
uint32_t vm_one_call(const struct vm_ctx *c, uint64_t addr, struct vm_run r);
/* Returns the marks for the ptes of a call that maps the run at addr: see vm_ptes_name. */
static inline uint32_t vm_call_marks(const struct vm_ctx *c, const struct vm_space *s, uint64_t addr, struct vm_run r) {
  return PTE_CALL | (vm_is_whole(c, s, addr, r) ? PTE_LARGE : 0);
}
/* Returns how many bytes from addr on, at most max, one driver call may remap with their present entries. */
uint64_t vm_space_call(struct vm_ctx *c, struct vm_space *s, uint64_t addr, uint64_t max);
/* True if the granule is the first of a large entry. */
bool vm_is_entry(struct vm_ctx *c, struct vm_space *s, uint64_t addr);

/* ---- pte.c: changes ---------------------------------------------------------------------------- */

/* Makes free ptes from addr on name the run's units, and marks them busy. *marked: the number of granules, all or those
 * before the failure. From `flags`, PTE_START and PTE_CALL are set only at the first granule, PTE_LARGE at the first of
 * each block. */
int vm_ptes_name(struct vm_ctx *c, struct vm_space *s, uint64_t addr, struct vm_run r, uint32_t handle, uint32_t flags,
                 uint32_t *marked);
/* Makes busy ptes from addr on refer to the run's units, up to where the units that they referred to stop being
 * contiguous. Returns the run of those old units. */
struct vm_run vm_ptes_rename(struct vm_ctx *c, struct vm_space *s, uint64_t addr, struct vm_run r, uint32_t handle,
                             uint32_t flags);
/* Marks live ptes busy up to the first that is not live; returns their number. */
uint64_t vm_ptes_hold(struct vm_ctx *c, struct vm_space *s, uint64_t addr, uint64_t bytes);
/* Makes busy ptes live again, except those that have been quarantined. */
void vm_ptes_release(struct vm_ctx *c, struct vm_space *s, uint64_t addr, uint64_t bytes);
/* Marks busy ptes that name their units as mapped. */
void vm_ptes_commit(struct vm_ctx *c, struct vm_space *s, uint64_t addr, uint64_t bytes);
/* Marks busy ptes as unmapped; they keep their units. */
void vm_ptes_detach(struct vm_ctx *c, struct vm_space *s, uint64_t addr, uint64_t bytes);
/* Detaches busy ptes, drops their references and frees the ptes. Drops the lock around driver calls. */
void vm_ptes_unmap(struct vm_ctx *c, struct vm_space *s, uint64_t addr, uint64_t bytes);
/* Records that one driver call now maps the range. */
void vm_ptes_one_call(struct vm_ctx *c, struct vm_space *s, uint64_t addr, uint64_t bytes);
/* Records that the whole blocks of a range now have large, or small, entries; returns how many changed. */
uint64_t vm_ptes_entries(struct vm_ctx *c, struct vm_space *s, uint64_t addr, uint64_t bytes, bool large);
void vm_ptes_quarantine(struct vm_ctx *c, struct vm_space *s, uint64_t addr, uint64_t bytes);
/* Updates the piece counts of the context and the space after a change to a range that had `before` boundaries. */
void vm_space_count_edges(struct vm_ctx *c, struct vm_space *s, uint64_t addr, uint64_t bytes, uint64_t before);

/* ---- access.c ---------------------------------------------------------------------------------- */

/* Ranges that vmem_read, _write, _copy or a plan's copies are using: unmapping them gives -EBUSY until they end. */
struct vm_access {
  uint64_t addr, bytes, count, stride; /* as in struct vmem_op; stride 0: the same range again */
  struct vm_access *next;
};

void vm_access_begin(struct vm_ctx *c, struct vm_access *a);
void vm_access_end(struct vm_ctx *c, struct vm_access *a); /* does nothing if the access has not begun */
/* -EBUSY if part of the range is in use. */
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
