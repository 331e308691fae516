/* SPDX-License-Identifier: MIT */
/*
 * Splits large entries that a plan changes in part.
 *
 * The driver cannot change part of an entry. So the whole block is unmapped and what remains of it mapped again, by
 * calls shorter than a block, which make no large entry. Adjacent or enclosed ranges that the plan unmaps anyway are
 * unmapped by the same call. Such a range is a group; the pieces in it need no calls of their own.
 *
 * This is the last step of making a plan, when the changes to each block are known.
 */
#include <stdlib.h>
#include <string.h>

#include "plan/plan.h"

static int by_block(const void *a, const void *b) {
  const struct vm_cut *x = a, *y = b;
  if (x->block != y->block) return x->block < y->block ? -1 : 1;
  return x->allowed - y->allowed; /* a forbidden cut sorts first, so it decides */
}

static int by_address(const void *a, const void *b) {
  uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
  return x < y ? -1 : x > y;
}

_Static_assert(offsetof(struct vm_seg, addr) == 0 && offsetof(struct vm_group, addr) == 0, "by_address");

/* Records the large entry that an end of a piece cuts. */
static int note_end(struct vm_ctx *c, struct vm_plan *p, const struct vm_piece *piece, uint64_t end, bool allowed) {
  uint64_t block, size;
  struct vm_cut *cut;
  if (!vm_space_cuts_page(c, piece->space, end, &block, &size)) return 0;
  if (c->info->one_page_slabs || c->phys->slabs[vm_pte(c, piece->space, end)->slab]->pool->large)
    return vm_fail_at(-EINVAL, piece->addr, piece->bytes, size,
                      "0x%llx + %llu bytes cuts the page of %llu bytes at 0x%llx, which %s cannot unmap in parts",
                      (unsigned long long)piece->addr, (unsigned long long)piece->bytes, (unsigned long long)size,
                      (unsigned long long)block, c->be->name);
  if (!(cut = VM_PUSH(c, &p->cuts, struct vm_cut))) return -ENOMEM;
  *cut = (struct vm_cut){block, piece->space, piece->addr, piece->bytes, allowed};
  return 0;
}

int vm_split_note(struct vm_ctx *c, struct vm_plan *p, const struct vm_piece *piece, bool allowed) {
  int err = note_end(c, p, piece, piece->addr, allowed);
  return err ? err : note_end(c, p, piece, piece->addr + piece->bytes, allowed);
}

static void unique(struct vm_list *cuts) {
  struct vm_cut *v = cuts->v;
  size_t n = 0;
  qsort(v, cuts->n, sizeof(*v), by_block);
  for (size_t i = 0; i < cuts->n; i++)
    if (!n || v[n - 1].block != v[i].block) v[n++] = v[i];
  cuts->n = n;
}

/* Finds the first block that ends after addr. */
static size_t find(const struct vm_list *cuts, uint64_t addr) {
  const struct vm_cut *v = cuts->v;
  size_t lo = 0, hi = cuts->n;
  while (lo < hi) {
    size_t mid = (lo + hi) / 2;
    if (v[mid].block + LARGE_PAGE <= addr)
      lo = mid + 1;
    else
      hi = mid;
  }
  return lo;
}

struct splitter {
  struct vm_ctx *c;
  struct vm_plan *p;
  uint64_t *named; /* a bit for each granule of each block: the plan unmaps or replaces it */
};

static int add_group(struct splitter *s, struct vm_space *space, uint64_t addr, uint64_t bytes) {
  struct vm_group *g = VM_PUSH(s->c, &s->p->groups, struct vm_group);
  if (!g) return -ENOMEM;
  *g = (struct vm_group){addr, bytes, space, 0};
  return 0;
}

/* Groups the pieces that touch the same block. Segments of replaced pieces become segments of their group. */
static int take_in(struct splitter *s, struct vm_list *pieces, const struct vm_list *segs) {
  struct vm_ctx *c = s->c;
  const struct vm_cut *cuts = s->p->cuts.v;
  size_t seg = 0;
  for (size_t i = 0; i < pieces->n; i++) {
    struct vm_piece *piece = VM_AT(*pieces, struct vm_piece, i);
    uint64_t end = piece->addr + piece->bytes;
    size_t first = find(&s->p->cuts, piece->addr);
    for (size_t k = first; k < s->p->cuts.n && cuts[k].block < end; k++) {
      uint64_t from = piece->addr > cuts[k].block ? piece->addr : cuts[k].block;
      uint64_t to = end < cuts[k].block + LARGE_PAGE ? end : cuts[k].block + LARGE_PAGE;
      uint32_t at = (uint32_t)(k * c->chunk_units + vm_units(c, from - cuts[k].block));
      vm_bits_set(s->named, at, (uint32_t)vm_units(c, to - from), true);
      piece->grouped = true;
    }
    if (piece->grouped && add_group(s, piece->space, piece->addr, piece->bytes)) return -ENOMEM;
    for (uint64_t a = piece->addr; segs && a < end; a += VM_AT(*segs, struct vm_seg, seg++)->bytes) {
      struct vm_seg *copy = piece->grouped ? VM_PUSH(c, &s->p->group_segs, struct vm_seg) : NULL;
      if (piece->grouped && !copy) return -ENOMEM;
      if (copy) *copy = *VM_AT(*segs, struct vm_seg, seg);
    }
  }
  return 0;
}

/* Marks what remains of the k-th block busy, and records it in segments, each of which one call can remap. */
static int keep_rest(struct splitter *s, size_t k) {
  struct vm_ctx *c = s->c;
  const struct vm_cut *cut = VM_AT(s->p->cuts, struct vm_cut, k);
  struct vm_seg *seg = NULL;
  int err = 0;
  for (uint32_t i = 0; i < c->chunk_units; i++) {
    uint64_t a = cut->block + vm_bytes(c, i);
    const struct vm_pte *pte = vm_pte(c, cut->space, a);
    uint32_t flags = pte->flags & PTE_READONLY ? VMEM_MAP_READONLY : 0;
    if (vm_bit(s->named, (uint32_t)(k * c->chunk_units) + i)) {
      seg = NULL;
      continue;
    }
    if (!cut->allowed)
      return vm_fail_at(-EINVAL, cut->block, LARGE_PAGE, 0,
                        "0x%llx + %llu bytes cuts the entry of %llu bytes at 0x%llx: only a batch with VMEM_OP_SPLIT "
                        "can split it",
                        (unsigned long long)cut->addr, (unsigned long long)cut->bytes, LARGE_PAGE,
                        (unsigned long long)cut->block);
    if (!vm_pte_is_live(pte)) return vm_pte_not_live(c, pte, a);
    if (!seg && (err = vm_access_check(c, cut->block, LARGE_PAGE))) return err;
    if (!seg) {
      if (!(seg = VM_PUSH(c, &s->p->kept, struct vm_seg))) return -ENOMEM;
      *seg = (struct vm_seg){a, 0, cut->space, c->phys->slabs[pte->slab], pte->unit, flags};
    }
    seg->bytes += vm_bytes(c, vm_ptes_hold(c, cut->space, a, c->granule));
  }
  return 0;
}

/* Merges groups that overlap or touch. */
static void merge_groups(struct vm_list *groups) {
  struct vm_group *g = groups->v;
  size_t n = 0;
  qsort(g, groups->n, sizeof(*g), by_address);
  for (size_t i = 0; i < groups->n; i++) {
    uint64_t end = g[i].addr + g[i].bytes;
    if (n && g[n - 1].space == g[i].space && g[n - 1].addr + g[n - 1].bytes >= g[i].addr) {
      if (end > g[n - 1].addr + g[n - 1].bytes) g[n - 1].bytes = end - g[n - 1].addr;
    } else {
      g[n++] = g[i];
    }
  }
  groups->n = n;
}

static int make_groups(struct splitter *s) {
  struct vm_plan *p = s->p;
  size_t seg = 0;
  int err = take_in(s, &p->replaced, &p->replaces);
  if (!err) err = take_in(s, &p->unmaps, NULL);
  for (size_t k = 0; k < p->cuts.n && !err; k++) {
    const struct vm_cut *cut = VM_AT(p->cuts, struct vm_cut, k);
    err = keep_rest(s, k);
    if (!err) err = add_group(s, cut->space, cut->block, LARGE_PAGE);
  }
  for (size_t i = 0; i < p->kept.n && !err; i++) {
    struct vm_seg *copy = VM_PUSH(s->c, &p->group_segs, struct vm_seg);
    if (copy)
      *copy = *VM_AT(p->kept, struct vm_seg, i);
    else
      err = -ENOMEM;
  }
  if (err) return err;
  merge_groups(&p->groups);
  if (p->group_segs.n) qsort(p->group_segs.v, p->group_segs.n, sizeof(struct vm_seg), by_address);
  for (size_t i = 0; i < p->groups.n; i++) {
    struct vm_group *g = VM_AT(p->groups, struct vm_group, i);
    for (; seg < p->group_segs.n && VM_AT(p->group_segs, struct vm_seg, seg)->addr < g->addr + g->bytes; seg++)
      g->segs++;
  }
  return 0;
}

int vm_plan_split(struct vm_ctx *c, struct vm_plan *p) {
  struct splitter s = {.c = c, .p = p};
  int err;
  if (!p->cuts.n) return 0;
  unique(&p->cuts);
  if (!(s.named = vm_calloc(c, p->cuts.n * c->chunk_units / 64 + 1, sizeof(*s.named)))) return -ENOMEM;
  err = make_groups(&s);
  free(s.named);
  return err;
}

void vm_split_commit(struct vm_ctx *c, struct vm_plan *p) {
  for (size_t i = 0; i < p->cuts.n; i++) {
    const struct vm_cut *cut = VM_AT(p->cuts, struct vm_cut, i);
    vm_ptes_entries(c, cut->space, cut->block, LARGE_PAGE, false);
  }
  for (size_t i = 0; i < p->kept.n; i++) {
    const struct vm_seg *seg = VM_AT(p->kept, struct vm_seg, i);
    vm_ptes_one_call(c, seg->space, seg->addr, seg->bytes);
    vm_ptes_release(c, seg->space, seg->addr, seg->bytes);
    if (!i || vm_units(c, seg->addr) >> c->chunk_shift != vm_units(c, seg[-1].addr) >> c->chunk_shift)
      c->driver->splits++; /* a block with no remaining part was unmapped whole, not split */
  }
}
