/* SPDX-License-Identifier: MIT */
/*
 * plan.c - checks a batch, takes its pages and marks its ptes: everything that can fail for want of
 * memory or for a wrong argument happens here, before anything changes. plan_run.c does the rest.
 *
 * A marked pte is PTE_BUSY: without PTE_MAPPED it is about to be mapped and already names its unit
 * (which holds a reference), with PTE_MAPPED it is about to be unmapped or is being filled.
 */
#include <stdlib.h>
#include <string.h>

#include "backend/fills.h"

static bool list_room(struct vm_ctx *c, struct vm_list *l, size_t item, size_t more) {
  size_t cap;
  void *v;
  if (l->n + more <= l->cap) return true;
  cap = l->cap * 2 > l->n + more ? l->cap * 2 : l->n + more;
  if (cap < 4) cap = 4;
  if (!(v = vm_realloc(c, l->v, cap, item))) return false;
  l->v = v;
  l->cap = cap;
  return true;
}

void *vm_list_push(struct vm_ctx *c, struct vm_list *l, size_t item) {
  return list_room(c, l, item, 1) ? (char *)l->v + item * l->n++ : NULL;
}

#define PUSH(c, list, type) ((type *)vm_list_push(c, list, sizeof(type)))
#define AT(list, type, i) (&((type *)(list).v)[i])

void vm_plan_clear(struct vm_plan *p) {
  free(p->maps.v);
  free(p->mapped.v);
  free(p->unmaps.v);
  free(p->zeros.v);
  free(p->copies.v);
  free(p->sources.v);
  free(p->replaced.v);
  free(p->replaces.v);
  free(p->fills.v);
  free(p->consumed.v);
  free(p->bind_ops);
  free(p->fill);
  memset(p, 0, sizeof(*p));
}

bool vm_plan_only_fills(const struct vm_plan *p) { return !p->maps.n && !p->replaced.n && !p->unmaps.n && p->fills.n; }

/* What a plan in the making works on. */
struct maker {
  struct vm_ctx *c;
  struct vm_plan *p;
  struct vm_space *space; /* of the last address */
  const struct vmem_op *op;
  struct vm_pool *pool;   /* POPULATE */
  struct vm_hdl *hdl;     /* MAP */
  uint64_t page_size;
  /* set when pages are short */
  uint64_t short_units;
};

static int pte_taken(const struct vm_pte *p, uint64_t addr, uint64_t granule) {
  unsigned long long a = addr;
  if (p->flags & PTE_QUARANTINED)
    return vm_fail_at(-ENOTRECOVERABLE, addr, granule, 0, "0x%llx is quarantined after a failed undo", a);
  if (p->flags & PTE_MAPPED) return vm_fail_at(-EEXIST, addr, granule, 0, "0x%llx is already mapped", a);
  return vm_fail_at(-EBUSY, addr, granule, 0, "0x%llx is being changed by another call", a);
}

static int pte_not_live(const struct vm_pte *p, uint64_t addr, uint64_t granule) {
  unsigned long long a = addr;
  if (p && p->flags & PTE_QUARANTINED)
    return vm_fail_at(-ENOTRECOVERABLE, addr, granule, 0, "0x%llx is quarantined after a failed undo", a);
  if (p && p->flags & PTE_BUSY)
    return vm_fail_at(-EBUSY, addr, granule, 0, "0x%llx is being changed by another call", a);
  return vm_fail_at(-EFAULT, addr, granule, 0, "nothing is mapped at 0x%llx", a);
}

/* Whether this plan itself is about to zero the unit. */
static bool own_claim(struct maker *m, const struct vm_slab *s, uint32_t unit) {
  for (size_t i = 0; i < m->p->zeros.n; i++) {
    const struct vm_run *r = AT(m->p->zeros, struct vm_run, i);
    if (r->slab == s && unit - r->unit < r->n) return true;
  }
  return false;
}

/* What another plan is about to zero would show its old contents here, and lose what is written to it. */
static int check_claims(struct maker *m, uint64_t addr, struct vm_run r) {
  for (uint32_t i = 0; (i += vm_bits_run(r.slab->claim_map, r.unit + i, r.n - i, false)) < r.n; i++)
    if (!own_claim(m, r.slab, r.unit + i))
      return vm_fail_at(-EBUSY, addr + ((uint64_t)i << m->c->shift), m->c->granule, 0,
                        "the page for 0x%llx is being zeroed by another call",
                        (unsigned long long)(addr + ((uint64_t)i << m->c->shift)));
  return 0;
}

/* Whether the unit must be zeroed by this plan: `zero`, or because the clean batch in flight writes to it. */
static bool must_zero(const struct vm_slab *s, uint32_t unit, bool zero) { return zero || vm_bit(s->zero_map, unit); }

static bool is_dirty(const struct vm_slab *s, uint32_t unit) { return vm_bit(s->dirty_map, unit) && !vm_bit(s->claim_map, unit); }

/* Units that may hold old contents are zeroed by this plan, once, and stay dirty until it is committed; or, without
 * `zero`, they are taken as they are. The run's ptes are marked. */
static bool claim_dirty(struct maker *m, struct vm_slab *s, uint32_t unit, uint32_t n, bool zero) {
  for (uint32_t i = 0; (i += vm_bits_run(s->dirty_map, unit + i, n - i, false)) < n; i++) {
    uint32_t k = i;
    bool must;
    if (!is_dirty(s, unit + i)) continue;
    must = must_zero(s, unit + i, zero);
    while (i + 1 < n && is_dirty(s, unit + i + 1) && must_zero(s, unit + i + 1, zero) == must) i++;
    if (must) {
      struct vm_run *r = PUSH(m->c, &m->p->zeros, struct vm_run);
      if (!r) return false;
      *r = (struct vm_run){s, unit + k, i + 1 - k};
      m->p->claims = true;
    }
    vm_bits_set(must ? s->claim_map : s->dirty_map, unit + k, i + 1 - k, must);
  }
  return true;
}

void vm_end_claims(struct vm_ctx *c, const struct vm_plan *p, const struct vm_piece *piece, bool committed) {
  for (uint64_t a = piece->addr; a < piece->addr + piece->bytes; a += c->granule) {
    const struct vm_pte *pte = vm_pte(c, piece->space, a);
    struct vm_slab *s = c->slabs[pte->slab];
    vm_bits_set(s->claim_map, pte->unit, 1, false);
    /* With the plan's zeroing the clean batch's is over too: what was written since is not to be taken for its zeros. */
    if (p->zeroed) vm_bits_set(s->zero_map, pte->unit, 1, false);
    if (committed) vm_bits_set(s->dirty_map, pte->unit, 1, false);
  }
}

/* Marks one run at addr. Its units hold a reference for these ptes already; on failure the caller gives
 * back those of the granules beyond piece->bytes. */
static int mark_run(struct maker *m, struct vm_piece *piece, uint64_t addr, struct vm_run r, bool zero) {
  struct vm_ctx *c = m->c;
  uint32_t flags = PTE_BUSY | (m->op->flags & VMEM_OP_READONLY ? PTE_READONLY : 0);
  struct vm_seg *seg;
  int err = check_claims(m, addr, r);
  if (err) return err;
  if (!(seg = PUSH(c, &m->p->maps, struct vm_seg))) return -ENOMEM;
  *seg = (struct vm_seg){addr, (uint64_t)r.n << c->shift, piece->space, r.slab, r.unit,
                         m->op->flags & VMEM_OP_READONLY ? VMEM_MAP_READONLY : 0};
  for (uint64_t a = addr, end = addr + seg->bytes; a < end;) {
    struct vm_pte *p = vm_pte_make(c, piece->space, a);
    if (!p) return -ENOMEM;
    for (uint32_t n = vm_leaf_rest(c, piece->space, a, end); n; n--, p++, a += c->granule) {
      if (p->flags) return pte_taken(p, a, c->granule);
      *p = (struct vm_pte){r.slab->index, r.unit + (uint32_t)vm_units(c, a - addr), piece->handle, flags};
      if (a == addr) p->flags |= PTE_CALL | (piece->bytes ? 0 : PTE_START);
      piece->bytes += c->granule;
      piece->space->busy++;
    }
  }
  return claim_dirty(m, r.slab, r.unit, r.n, zero) ? 0 : -ENOMEM;
}

/* Granules of the run at addr that were marked. */
static uint32_t marked_units(struct vm_ctx *c, const struct vm_piece *piece, uint64_t addr) {
  return (uint32_t)vm_units(c, piece->addr + piece->bytes - addr);
}

static uint64_t source_bytes(const struct vmem_op *op) { return op->src_bytes ? op->src_bytes : op->bytes; }

static int populate_piece(struct maker *m, struct vm_piece *piece, uint64_t bytes) {
  struct vm_ctx *c = m->c;
  uint64_t addr = piece->addr, left = vm_units(c, bytes);
  uint32_t align = (uint32_t)vm_units(c, m->page_size);
  struct vm_place place = {.spread = m->op->flags & VMEM_OP_SPREAD};
  bool zero = m->op->flags & VMEM_OP_COPY || !(m->op->flags & VMEM_OP_DIRTY); /* mapped first, then copied to */
  place.left = addr > piece->space->base ? vm_pte(c, piece->space, addr - c->granule) : NULL;
  if (place.left && !place.left->flags) place.left = NULL;
  while (left) {
    struct vm_run r;
    int err;
    place.offset = (uint32_t)vm_units(c, addr) & (c->chunk_units - 1);
    r = vm_pool_take(c, m->pool, left, align, &place);
    if (!r.n) {
      m->short_units = left;
      return -ENOMEM;
    }
    err = mark_run(m, piece, addr, r, zero);
    if (err) {
      uint32_t done = marked_units(c, piece, addr);
      vm_units_put(c, r.slab, r.unit + done, r.n - done);
      return err;
    }
    left -= r.n;
    addr += (uint64_t)r.n << c->shift;
    place.left = vm_pte(c, piece->space, addr - c->granule);
  }
  return 0;
}

/* Mapped, and nobody is changing it. */
static bool is_live(const struct vm_pte *p) {
  return p && (p->flags & (PTE_MAPPED | PTE_BUSY | PTE_QUARANTINED)) == PTE_MAPPED;
}

/* What is mapped in [addr, addr + bytes), all of it, becomes busy with this plan and part of the piece. */
static int mark_live_ptes(struct maker *m, struct vm_piece *piece, uint64_t addr, uint64_t bytes) {
  struct vm_ctx *c = m->c;
  for (uint64_t a = addr; a < addr + bytes; a += c->granule) {
    struct vm_pte *p = vm_pte(c, piece->space, a);
    if (!is_live(p)) return pte_not_live(p, a, c->granule);
    p->flags |= PTE_BUSY;
    piece->space->busy++;
    piece->bytes += c->granule;
  }
  return 0;
}

/* The first units of a run that are one driver call at addr. The whole large pages of a run that lie on a
 * boundary of their size are calls of their own: they get entries of that size, and the rest must not. */
uint32_t vm_one_call(const struct vm_ctx *c, uint64_t addr, struct vm_run r) {
  uint32_t page = c->chunk_units, at = (uint32_t)vm_units(c, addr) & (page - 1), rest = (page - at) & (page - 1);
  if (!r.slab->pool->large || at != (r.unit & (page - 1))) return r.n;
  if (rest) return rest < r.n ? rest : r.n;
  return r.n < page ? r.n : r.n & ~(page - 1);
}

/* Makes the run what addr is to show: a new mapping, with references of its own. */
static int map_run(struct maker *m, struct vm_piece *piece, uint64_t addr, struct vm_run r) {
  struct vm_ctx *c = m->c;
  int err;
  for (uint32_t k = 0; k < r.n; k++) r.slab->refs[r.unit + k]++;
  m->p->shows = true;
  err = mark_run(m, piece, addr, r, !m->hdl->dirty_ok);
  if (err) {
    uint32_t done = marked_units(c, piece, addr);
    vm_units_put(c, r.slab, r.unit + done, r.n - done);
  }
  return err;
}

/* The same in the place of what is mapped there, which stays in the ptes until the plan is committed. The handle,
 * which is pinned, holds the references till then. */
static int replace_run(struct maker *m, struct vm_piece *piece, uint64_t addr, struct vm_run r) {
  struct vm_ctx *c = m->c;
  struct vm_seg *seg;
  int err = check_claims(m, addr, r);
  if (err) return err;
  if (vm_bits_run(r.slab->dirty_map, r.unit, r.n, false) < r.n)
    return vm_fail_at(-EINVAL, addr, (uint64_t)r.n << c->shift, 0,
                      "the pages that are to replace those at 0x%llx were never mapped: their contents are not known",
                      (unsigned long long)addr);
  if (!(seg = PUSH(c, &m->p->replaces, struct vm_seg))) return -ENOMEM;
  *seg = (struct vm_seg){addr, (uint64_t)r.n << c->shift, piece->space, r.slab, r.unit,
                         m->op->flags & VMEM_OP_READONLY ? VMEM_MAP_READONLY : 0};
  return mark_live_ptes(m, piece, addr, seg->bytes);
}

static int map_piece(struct maker *m, struct vm_piece *piece, uint64_t bytes, uint64_t offset) {
  struct vm_ctx *c = m->c;
  uint64_t addr = piece->addr, skip = vm_units(c, offset), left = vm_units(c, bytes);
  const struct vm_run *run = m->hdl->runs;
  while (left) {
    struct vm_run r = *run;
    int err;
    if (skip >= r.n) {
      skip -= r.n;
      run++;
      continue;
    }
    if (!r.slab)
      return vm_fail_at(-ERANGE, addr, bytes, 0, "the pages for 0x%llx were given back (vmem_drop_range)",
                        (unsigned long long)addr);
    r.unit += (uint32_t)skip;
    r.n -= (uint32_t)skip;
    if (r.n > left) r.n = (uint32_t)left;
    if (c->info.one_page_slabs && r.n != r.slab->units)
      return vm_fail_at(-EINVAL, addr, bytes, r.slab->bytes, "0x%llx + %llu bytes cuts a page of %llu bytes, which %s cannot map in parts",
                        (unsigned long long)piece->addr, (unsigned long long)bytes, (unsigned long long)r.slab->bytes, c->be->name);
    r.n = vm_one_call(c, addr, r);
    err = m->op->flags & VMEM_OP_REPLACE ? replace_run(m, piece, addr, r) : map_run(m, piece, addr, r);
    if (err) return err;
    left -= r.n;
    skip += r.n;
    addr += (uint64_t)r.n << c->shift;
  }
  return 0;
}

/* What fills the piece's new pages, and where it comes from. */
static int copy_piece(struct maker *m, uint64_t addr, uint64_t src, uint64_t bytes) {
  struct vm_ctx *c = m->c;
  uint64_t first = src & ~(c->granule - 1), end = vm_round_up(src + bytes, c->granule);
  struct vm_be_copy *copy = PUSH(c, &m->p->copies, struct vm_be_copy);
  struct vm_space *s;
  int err;
  if (!copy) return -ENOMEM;
  *copy = (struct vm_be_copy){addr, src, bytes};
  if (!(s = vm_space_range(c, first, end - first, c->granule, &err))) return err;
  for (uint64_t a = first; a < end; a += c->granule) {
    struct vm_pte *p = vm_pte(c, s, a);
    if (!is_live(p)) return pte_not_live(p, a, c->granule);
  }
  return 0;
}

/* The first of an access's ranges that ends beyond addr; UINT64_MAX = none. */
static uint64_t next_range(const struct vm_access *a, uint64_t addr) {
  uint64_t i = 0;
  if (addr >= a->addr + a->bytes && a->stride) i = (addr - a->addr - a->bytes) / a->stride + 1;
  if (i >= a->count || (!a->stride && addr >= a->addr + a->bytes)) return UINT64_MAX;
  return a->addr + i * a->stride;
}

int vm_check_access(struct vm_ctx *c, uint64_t addr, uint64_t bytes) {
  for (struct vm_access *a = c->accesses; a; a = a->next) {
    uint64_t at = next_range(a, addr);
    if (at < addr + bytes)
      return vm_fail_at(-EBUSY, at, a->bytes, 0, "0x%llx + %llu bytes is being read or written",
                        (unsigned long long)at, (unsigned long long)a->bytes);
  }
  return 0;
}

/* The driver unmaps some pages only as a whole. */
static int check_whole_pages(struct vm_ctx *c, const struct vm_piece *piece) {
  uint64_t end = piece->addr + piece->bytes, page, size;
  if (!vm_space_cuts_page(c, piece->space, piece->addr, &page, &size) && !vm_space_cuts_page(c, piece->space, end, &page, &size))
    return 0;
  return vm_fail_at(-EINVAL, piece->addr, piece->bytes, size,
                    "0x%llx + %llu bytes cuts the page of %llu bytes at 0x%llx, which %s cannot unmap in parts",
                    (unsigned long long)piece->addr, (unsigned long long)piece->bytes, (unsigned long long)size,
                    (unsigned long long)page, c->be->name);
}

/* UNMAP and FILL: marks what is live in [addr, addr + bytes). */
static int mark_live(struct maker *m, struct vm_space *s, uint64_t addr, uint64_t bytes, bool fill) {
  struct vm_ctx *c = m->c;
  struct vm_piece *piece = NULL;
  int err = fill ? 0 : vm_check_access(c, addr, bytes);
  if (err) return err;
  for (uint64_t a = addr, end = addr + bytes; a < end; a += c->granule) {
    struct vm_pte *p = vm_pte(c, s, a);
    if (!is_live(p)) {
      if ((m->op->flags & VMEM_OP_HOLES) && (!p || !p->flags)) {
        if (piece && !fill && (err = check_whole_pages(c, piece))) return err;
        piece = NULL;
        continue;
      }
      return pte_not_live(p, a, c->granule);
    }
    if (fill && p->flags & PTE_READONLY)
      return vm_fail_at(-EACCES, a, c->granule, 0, "0x%llx is mapped read-only", (unsigned long long)a);
    if (!piece) {
      piece = PUSH(c, fill ? &m->p->fills : &m->p->unmaps, struct vm_piece);
      if (!piece) return -ENOMEM;
      *piece = (struct vm_piece){a, 0, s, fill ? (uint32_t)m->op->value : 0};
    }
    p->flags |= PTE_BUSY;
    s->busy++;
    piece->bytes += c->granule;
  }
  return piece && !fill ? check_whole_pages(c, piece) : 0;
}

/* Where the units of piece i come from is at `offset` of the handle, or at `src`. */
static int do_piece(struct maker *m, uint64_t addr, uint64_t offset, uint64_t src) {
  struct vm_ctx *c = m->c;
  const struct vmem_op *op = m->op;
  bool replace = op->flags & VMEM_OP_REPLACE;
  struct vm_piece *piece;
  int err;
  if (!m->space || addr < m->space->base || addr - m->space->base > m->space->bytes - op->bytes ||
      op->bytes > m->space->bytes || m->space->freeing)
    if (!(m->space = vm_space_range(c, addr, op->bytes, m->page_size, &err))) return err;
  if (op->op == VMEM_OP_UNMAP || op->op == VMEM_OP_FILL)
    return mark_live(m, m->space, addr, op->bytes, op->op == VMEM_OP_FILL);
  if (replace && (err = vm_check_access(c, addr, op->bytes))) return err;
  if (!(piece = PUSH(c, replace ? &m->p->replaced : &m->p->mapped, struct vm_piece))) return -ENOMEM;
  *piece = (struct vm_piece){addr, 0, m->space, 0};
  if (op->op == VMEM_OP_POPULATE) {
    err = populate_piece(m, piece, op->bytes);
    return err || !(op->flags & VMEM_OP_COPY) ? err : copy_piece(m, addr, src, source_bytes(op));
  }
  piece->handle = vm_hdl_index(c, m->hdl);
  m->hdl->pending++;
  m->hdl->pins += replace;
  err = map_piece(m, piece, op->bytes, offset);
  return err || !replace ? err : check_whole_pages(c, piece);
}

static int check_map(struct maker *m, uint64_t count) {
  const struct vmem_op *op = m->op;
  struct vm_ctx *c = m->c;
  uint64_t total;
  int err;
  if (!(m->hdl = vm_hdl_find(c, op->handle, &err))) return err;
  if (m->hdl->busy) return vm_fail(-EBUSY, "the handle is being released");
  m->page_size = m->hdl->page_size;
  if (op->offset & (m->page_size - 1))
    return vm_fail_at(-EINVAL, op->offset, op->bytes, m->page_size, "offset %llu is not aligned to the page size %llu",
                      (unsigned long long)op->offset, (unsigned long long)m->page_size);
  if (__builtin_mul_overflow(op->bytes, count, &total) || op->offset + total < total)
    return vm_fail_at(-EOVERFLOW, op->addr, op->bytes, 0, "%llu x %llu bytes leaves 64 bits",
                      (unsigned long long)count, (unsigned long long)op->bytes);
  if (op->offset + total > m->hdl->bytes)
    return vm_fail_at(-ERANGE, op->addr, total, m->hdl->bytes, "offset %llu + %llu bytes is beyond the handle's %llu",
                      (unsigned long long)op->offset, (unsigned long long)total, (unsigned long long)m->hdl->bytes);
  if ((op->flags & VMEM_OP_READONLY) && !(c->info.pub.caps & VMEM_CAP_READONLY))
    return vm_fail(-EOPNOTSUPP, "back end %s has no read-only mappings", c->be->name);
  return 0;
}

int vm_page_size(struct vm_ctx *c, uint64_t *page_size) {
  uint64_t size = *page_size ? *page_size : c->granule;
  *page_size = size;
  if (vm_is_pow2(size) && size >= c->granule && (c->info.pub.page_sizes & size)) return 0;
  return vm_fail_at(-EOPNOTSUPP, 0, size, c->granule, "no pages of %llu bytes on %s with a granule of %llu",
                    (unsigned long long)size, c->be->name, (unsigned long long)c->granule);
}

static int check_source(const struct vmem_op *op, uint64_t count) {
  uint64_t span;
  if (!(op->flags & VMEM_OP_COPY)) return 0;
  if (op->src_bytes > op->bytes)
    return vm_fail_at(-EINVAL, op->src, op->src_bytes, op->bytes, "%llu bytes to be copied into a piece of %llu",
                      (unsigned long long)op->src_bytes, (unsigned long long)op->bytes);
  if (__builtin_mul_overflow(count - 1, op->src_stride, &span) || op->src + span < span ||
      op->src + span + source_bytes(op) < op->src + span)
    return vm_fail_at(-EOVERFLOW, op->src, op->bytes, 0, "%llu sources %llu apart leave the address space",
                      (unsigned long long)count, (unsigned long long)op->src_stride);
  return 0;
}

static int check_reserved(const struct vmem_op *op, size_t i) {
  for (size_t k = 0; k < sizeof(op->reserved) / sizeof(op->reserved[0]); k++)
    if (op->reserved[k]) return vm_fail(-EINVAL, "reserved[%zu] of operation %zu is not 0", k, i);
  return 0;
}

/* Everything about an operation that can be said without looking at its pages. */
static int check_op(struct maker *m) {
  static const uint32_t allowed[] = {
      [VMEM_OP_MAP] = VMEM_OP_READONLY | VMEM_OP_CONSUME | VMEM_OP_REPLACE,
      [VMEM_OP_POPULATE] = VMEM_OP_DIRTY | VMEM_OP_SPREAD | VMEM_OP_COPY,
      [VMEM_OP_UNMAP] = VMEM_OP_HOLES,
      [VMEM_OP_FILL] = VMEM_OP_HOLES,
  };
  const struct vmem_op *op = m->op;
  struct vm_ctx *c = m->c;
  uint64_t count = op->count ? op->count : 1, span;
  int err;
  m->space = NULL;
  if (op->op < VMEM_OP_MAP || op->op > VMEM_OP_FILL) return vm_fail(-EINVAL, "unknown operation %u", op->op);
  if (op->flags & ~allowed[op->op])
    return vm_fail(-EINVAL, "flags 0x%x do not go with operation %u", op->flags & ~allowed[op->op], op->op);
  m->page_size = c->granule;
  if (op->op == VMEM_OP_MAP && (err = check_map(m, count))) return err;
  if (op->op == VMEM_OP_FILL && op->value > 255)
    return vm_fail_at(-EINVAL, op->addr, op->bytes, 255, "fill value %llu is no byte", (unsigned long long)op->value);
  if (op->op == VMEM_OP_POPULATE) {
    m->page_size = op->page_size;
    if ((err = vm_page_size(c, &m->page_size))) return err;
    if (!(m->pool = vm_pool_of(c, op->location, op->device, m->page_size, &err))) return err;
    if ((err = check_source(op, count))) return err;
  }
  if (count > 1 && ((op->stride & (m->page_size - 1)) || op->stride < op->bytes))
    return vm_fail_at(-EINVAL, op->addr, op->bytes, op->stride, "a stride of %llu does not fit pieces of %llu bytes",
                      (unsigned long long)op->stride, (unsigned long long)op->bytes);
  if (count > 1 && (__builtin_mul_overflow(count - 1, op->stride, &span) || op->addr + span < span))
    return vm_fail_at(-EOVERFLOW, op->addr, op->bytes, 0, "%llu pieces %llu apart leave the address space",
                      (unsigned long long)count, (unsigned long long)op->stride);
  if (!vm_space_range(c, op->addr, op->bytes, m->page_size, &err)) return err;
  if (count > 1 && !vm_space_range(c, op->addr + span, op->bytes, m->page_size, &err)) return err;
  return 0;
}

/* The caller's reference goes with the batch: no other plan may count on it. */
static int consume(struct maker *m) {
  struct vm_ctx *c = m->c;
  uint32_t index = vm_hdl_index(c, m->hdl), own = 0, *consumed;
  for (size_t i = 0; i < m->p->replaced.n; i++) own += AT(m->p->replaced, struct vm_piece, i)->handle == index;
  if (m->hdl->pins != own) return vm_fail(-EBUSY, "another call takes pages from the handle that is to be consumed");
  if (!(consumed = PUSH(c, &m->p->consumed, uint32_t))) return -ENOMEM;
  m->hdl->busy = true;
  *consumed = index;
  return 0;
}

static int do_op(struct maker *m) {
  const struct vmem_op *op = m->op;
  struct vm_ctx *c = m->c;
  uint64_t count = op->count ? op->count : 1;
  int err = check_op(m);
  if (err) return err;
  if (!list_room(c, op->op == VMEM_OP_UNMAP             ? &m->p->unmaps
                    : op->op == VMEM_OP_FILL            ? &m->p->fills
                    : op->flags & VMEM_OP_REPLACE       ? &m->p->replaced
                                                        : &m->p->mapped,
                 sizeof(struct vm_piece), count < 4096 ? count : 4096))
    return -ENOMEM;
  if (op->flags & VMEM_OP_COPY) {
    struct vm_access *source = PUSH(c, &m->p->sources, struct vm_access);
    if (!source) return -ENOMEM;
    *source = (struct vm_access){.addr = op->src, .bytes = source_bytes(op), .count = count, .stride = op->src_stride};
  }
  for (uint64_t i = 0; i < count; i++)
    if ((err = do_piece(m, op->addr + i * op->stride, op->offset + i * op->bytes, op->src + i * op->src_stride))) return err;
  return op->flags & VMEM_OP_CONSUME ? consume(m) : 0;
}

/* Bytes from addr on, at most to end, that are quarantined or not, as the first granule is. */
static uint64_t same_fate(struct vm_ctx *c, struct vm_space *s, uint64_t addr, uint64_t end, bool *lost) {
  uint64_t a = addr;
  *lost = vm_pte(c, s, a)->flags & PTE_QUARANTINED;
  while (a < end && !(vm_pte(c, s, a)->flags & PTE_QUARANTINED) == !*lost) a += c->granule;
  return a - addr;
}

static void unmark(struct vm_ctx *c, const struct vm_piece *piece) {
  for (uint64_t a = piece->addr; a < piece->addr + piece->bytes; a += c->granule) {
    struct vm_pte *p = vm_pte(c, piece->space, a);
    if (p->flags & PTE_QUARANTINED) continue;
    p->flags &= ~PTE_BUSY;
    piece->space->busy--;
  }
}

/* Lock held, let go in between for the driver: marked ptes are ours. What a failed undo has quarantined
 * stays as it is. */
static void take_back(struct vm_ctx *c, struct vm_plan *p) {
  size_t i;
  vm_sources_end(c, p);
  vm_mappings_end(c, p);
  for (i = 0; i < p->mapped.n && p->claims; i++) vm_end_claims(c, p, AT(p->mapped, struct vm_piece, i), false);
  for (i = 0; i < p->mapped.n; i++) {
    struct vm_piece *piece = AT(p->mapped, struct vm_piece, i);
    uint64_t end = piece->addr + piece->bytes, n;
    for (uint64_t a = piece->addr; a < end; a += n) {
      bool lost;
      n = same_fate(c, piece->space, a, end, &lost);
      if (!lost) vm_unmap_ptes(c, piece->space, a, n);
    }
    if (piece->handle) {
      c->hdls[piece->handle].pending--;
      vm_hdl_settle(c, &c->hdls[piece->handle]);
    }
  }
  vm_replace_take_back(c, p);
  for (i = 0; i < p->replaced.n; i++) {
    struct vm_piece *piece = AT(p->replaced, struct vm_piece, i);
    unmark(c, piece);
    if (!piece->handle) continue;
    c->hdls[piece->handle].pins--;
    c->hdls[piece->handle].pending--;
    vm_hdl_settle(c, &c->hdls[piece->handle]);
  }
  for (i = 0; i < p->unmaps.n; i++) unmark(c, AT(p->unmaps, struct vm_piece, i));
  for (i = 0; i < p->fills.n; i++) unmark(c, AT(p->fills, struct vm_piece, i));
  for (i = 0; i < p->consumed.n; i++) c->hdls[*AT(p->consumed, uint32_t, i)].busy = false;
  if (p->release) c->hdls[p->release].busy = false;
}

void vm_plan_cancel(struct vm_ctx *c, struct vm_plan *p) {
  uint64_t keep = p->keep;
  if (p->zero_event) VM_UNDO(vm_event_finish(c, &p->zero_event));
  pthread_mutex_lock(&c->lock);
  take_back(c, p);
  pthread_mutex_unlock(&c->lock);
  vm_pool_undo_grow(c, p->grow_id);
  vm_plan_clear(p);
  vm_pool_trim(c, keep, false);
}

/* What a plan that comes to nothing leaves in the pool: as much as was there before. */
static uint64_t keep_bytes(const struct vm_ctx *c) {
  uint64_t have = vm_pool_free_units(c) << c->shift;
  return have > c->opts.pool_high ? have : c->opts.pool_high;
}

/* What cutting a piece out adds: an end inside a run makes it two; both ends inside one call make that two mappings. */
static void add_cuts(struct vm_ctx *c, struct vm_be_load *load, uint64_t *mappings, const struct vm_piece *piece) {
  bool front = vm_space_cuts(c, piece->space, piece->addr);
  bool back = vm_space_cuts(c, piece->space, piece->addr + piece->bytes);
  load->more_segments += front + back;
  *mappings += front && back;
}

static int too_many_mappings(struct vm_ctx *c, uint64_t more) {
  uint64_t limit = c->info.pub.max_mappings;
  return vm_fail_at(-ENOSPC, 0, 0, limit,
                    "%llu mappings and %llu more exceed the %llu that this context may have (max_mappings of vmem_open): "
                    "map longer runs, consolidate, or unmap",
                    (unsigned long long)(c->mappings + c->alias_mappings + c->planned_mappings), (unsigned long long)more,
                    (unsigned long long)limit);
}

/* A map adds its run and the hole behind it; an unmap adds a piece at each end that cuts a run. */
int vm_plan_room(struct vm_ctx *c, struct vm_plan *p) {
  uint64_t mappings = p->maps.n + p->replaces.n, limit = c->info.pub.max_mappings;
  struct vm_be_load load = {c->segments, 2 * mappings};
  for (size_t i = 0; i < p->replaced.n; i++) add_cuts(c, &load, &mappings, AT(p->replaced, struct vm_piece, i));
  for (size_t i = 0; i < p->unmaps.n; i++) add_cuts(c, &load, &mappings, AT(p->unmaps, struct vm_piece, i));
  /* An unmap that cuts one mapping in two gives memory back: the limit does not stop it. */
  if (limit && p->maps.n + p->replaces.n && c->mappings + c->alias_mappings + c->planned_mappings + mappings > limit)
    return too_many_mappings(c, mappings);
  if (c->be->room && load.more_segments) {
    int err = c->be->room(c->bes, &load);
    if (err) return err;
  }
  p->mappings = mappings;
  c->planned_mappings += mappings;
  return 0;
}

bool vm_recount(struct vm_ctx *c, int err) {
  uint64_t segments;
  if (err != -ENOSPC || !c->be->recount) return false;
  pthread_mutex_lock(&c->lock);
  segments = c->segments;
  pthread_mutex_unlock(&c->lock);
  c->be->recount(c->bes, segments);
  return true;
}

/* Units that the batch's POPULATE operations take from a pool: no more than there are addresses for. */
static uint64_t wanted(struct vm_ctx *c, const struct vmem_op *ops, size_t n, const struct vmem_op *like) {
  uint64_t total = 0, most = vm_units(c, c->reserved_bytes);
  for (size_t i = 0; i < n; i++) {
    uint64_t units;
    if (ops[i].op != VMEM_OP_POPULATE || ops[i].location != like->location || ops[i].device != like->device ||
        vm_is_large(c, ops[i].page_size) != vm_is_large(c, like->page_size))
      continue;
    if (__builtin_mul_overflow(vm_units(c, ops[i].bytes), ops[i].count ? ops[i].count : 1, &units) || units > most - total)
      return most;
    total += units;
  }
  return total;
}

/* The plan is complete: its list moves no more. */
static void sources_begin(struct vm_ctx *c, struct vm_plan *p) {
  for (size_t i = 0; i < p->sources.n; i++) {
    struct vm_access *a = AT(p->sources, struct vm_access, i);
    a->next = c->accesses;
    c->accesses = a;
  }
}

void vm_sources_end(struct vm_ctx *c, struct vm_plan *p) {
  for (size_t i = 0; i < p->sources.n; i++) {
    struct vm_access *a = AT(p->sources, struct vm_access, i), **link = &c->accesses;
    while (*link && *link != a) link = &(*link)->next;
    if (*link) *link = a->next;
  }
}

static int make_batch(struct vm_ctx *c, const struct vmem_op *ops, size_t n, struct vm_plan *p) {
  uint64_t grow_id = 0, keep = 0;
  for (;;) {
    struct maker m = {.c = c, .p = p};
    uint64_t free_units = 0, need = 0;
    struct vmem_error why;
    int err = 0;
    memset(p, 0, sizeof(*p));
    p->grow_id = grow_id;
    pthread_mutex_lock(&c->lock);
    if (!grow_id) keep = keep_bytes(c);
    p->keep = keep;
    /* The arguments of all come first: which error a batch gives must not hang on what the pool has. */
    for (size_t i = 0; i < n && !err; i++) {
      m.op = &ops[i];
      err = check_reserved(&ops[i], i);
      if (!err) err = check_op(&m);
    }
    for (size_t i = 0; i < n && !err; i++) {
      m.op = &ops[i];
      err = do_op(&m);
    }
    if (!err) err = vm_plan_room(c, p);
    if (!err) err = vm_plan_bind_room(c, p);
    if (!err) sources_begin(c, p);
    if (err) {
      vm_error_save(&why);
      take_back(c, p);
      if (m.short_units) {
        need = wanted(c, ops, n, m.op);
        free_units = m.pool->free_units;
      }
    }
    pthread_mutex_unlock(&c->lock);
    if (!err) return 0;
    vm_plan_clear(p);
    vm_error_restore(&why);
    if (!m.short_units) {
      vm_pool_undo_grow(c, grow_id);
      vm_pool_trim(c, keep, false);
      vm_error_restore(&why);
      return err;
    }
    /* Short in all, or only of pieces that are large enough. */
    need = need > free_units ? need - free_units : m.short_units;
    err = vm_pool_grow(c, m.pool, need, vm_units(c, m.op->bytes), (uint32_t)vm_units(c, m.page_size),
                       free_units, &grow_id);
    if (err) return err;
  }
}

int vm_plan_make(struct vm_ctx *c, const struct vmem_op *ops, size_t n, struct vm_plan *p) {
  int err = make_batch(c, ops, n, p);
  return vm_recount(c, err) ? make_batch(c, ops, n, p) : err;
}

int vm_plan_make_release(struct vm_ctx *c, vmem_handle h, struct vm_plan *p) {
  struct vmem_op op = {.op = VMEM_OP_UNMAP};
  struct maker m = {.c = c, .p = p, .op = &op, .page_size = c->granule};
  struct vm_hdl *hdl;
  int err = 0;
  memset(p, 0, sizeof(*p));
  pthread_mutex_lock(&c->lock);
  p->keep = keep_bytes(c);
  if (!(hdl = vm_hdl_find(c, h, &err))) goto out;
  if (hdl->busy || hdl->pending) {
    err = vm_fail(-EBUSY, "another call is using the handle");
    goto out;
  }
  if (hdl->mappings > 1) {
    err = vm_fail_at(-EBUSY, 0, hdl->bytes, hdl->mappings, "the handle has %llu live mappings; vMemUnmap names one",
                     (unsigned long long)hdl->mappings);
    goto out;
  }
  if (hdl->mappings) {
    struct vm_space *s = vm_space_find(c, hdl->start_sum);
    uint64_t end = hdl->start_sum + c->granule, limit = s->base + s->bytes;
    for (; end < limit; end += c->granule) {
      struct vm_pte *pte = vm_pte(c, s, end);
      if (!pte || !(pte->flags & PTE_MAPPED) || (pte->flags & PTE_START) || pte->handle != vm_hdl_index(c, hdl)) break;
    }
    if ((err = mark_live(&m, s, hdl->start_sum, end - hdl->start_sum, false)) || (err = vm_plan_room(c, p)) ||
        (err = vm_plan_bind_room(c, p))) {
      VM_UNDO(take_back(c, p));
      goto out;
    }
  }
  p->release = vm_hdl_index(c, hdl);
  hdl->busy = true;
out:
  pthread_mutex_unlock(&c->lock);
  if (err) vm_plan_clear(p);
  return err;
}

int vm_plan_make_free(struct vm_ctx *c, struct vm_space *s, struct vm_plan *p) {
  struct vmem_op op = {.op = VMEM_OP_UNMAP, .flags = VMEM_OP_HOLES};
  struct maker m = {.c = c, .p = p, .op = &op, .page_size = c->granule};
  int err = 0;
  p->keep = keep_bytes(c);
  if (s->mapped && ((err = mark_live(&m, s, s->base, s->bytes, false)) || (err = vm_plan_room(c, p)) ||
                    (err = vm_plan_bind_room(c, p)))) {
    VM_UNDO(take_back(c, p));
    vm_plan_clear(p);
  }
  return err;
}

/* ---- fills that run on --------------------------------------------------------------------------- */

/* Notes the runs behind a range; how many they are. Lock held. */
static size_t runs_behind(struct vm_ctx *c, uint64_t addr, uint64_t bytes, struct vm_run *runs) {
  struct vm_space *s = vm_space_find(c, addr);
  size_t count = 0;
  uint32_t n;
  for (uint64_t a = addr, end = addr + bytes; a < end; a += (uint64_t)n << c->shift, count++) {
    struct vm_pte *p = vm_pte(c, s, a);
    n = vm_space_units(c, s, a, end, 0);
    if (runs) runs[count] = (struct vm_run){c->slabs[p->slab], p->unit, n};
  }
  return count;
}

/* What the plan's fills write; how many runs that is. Lock held. */
static size_t filled_runs(struct vm_ctx *c, const struct vm_plan *p, struct vm_run *runs) {
  size_t n = 0;
  for (size_t i = 0; i < p->fills.n; i++) {
    const struct vm_piece *piece = AT(p->fills, struct vm_piece, i);
    n += runs_behind(c, piece->addr, piece->bytes, runs ? runs + n : NULL);
  }
  return n;
}

int vm_plan_may_run_on(struct vm_ctx *c, struct vm_plan *p, void (*ended)(struct vm_ctx *c, void *owner, int result),
                       void *owner) {
  if (!p->fills.n) return 0;
  pthread_mutex_lock(&c->lock);
  if ((p->fill = vm_fill_new(c, filled_runs(c, p, NULL)))) {
    p->fill->nruns = filled_runs(c, p, p->fill->runs);
    p->fill->ended = ended;
    p->fill->owner = owner;
  }
  pthread_mutex_unlock(&c->lock);
  return p->fill ? 0 : -ENOMEM;
}

static struct vm_fill *behind_pieces(struct vm_ctx *c, const struct vm_list *pieces) {
  struct vm_fill *f = NULL;
  for (size_t i = 0; i < pieces->n && !f; i++) {
    const struct vm_piece *piece = AT(*pieces, struct vm_piece, i);
    f = vm_space_fill(c, piece->space, piece->addr, piece->bytes);
  }
  return f;
}

static struct vm_fill *behind_segs(struct vm_ctx *c, const struct vm_list *segs) {
  struct vm_fill *f = NULL;
  for (size_t i = 0; i < segs->n && !f; i++) {
    const struct vm_seg *s = AT(*segs, struct vm_seg, i);
    f = vm_fill_on(c, s->slab, s->unit, (uint32_t)vm_units(c, s->bytes));
  }
  return f;
}

struct vm_fill *vm_plan_behind(struct vm_ctx *c, struct vm_plan *p) {
  struct vm_fill *f;
  if (!c->fills) return NULL;
  /* What vanishes; what shows at a second address; what is written again. */
  if ((f = behind_pieces(c, &p->unmaps)) || (f = behind_pieces(c, &p->replaced)) || (f = behind_segs(c, &p->replaces)) ||
      (p->shows && (f = behind_segs(c, &p->maps))) || (f = behind_pieces(c, &p->fills)))
    return f;
  for (size_t i = 0; i < p->copies.n && !f; i++) {
    const struct vm_be_copy *copy = AT(p->copies, struct vm_be_copy, i);
    uint64_t first = copy->src & ~(c->granule - 1);
    f = vm_space_fill(c, vm_space_find(c, first), first, vm_round_up(copy->src + copy->bytes, c->granule) - first);
  }
  return f;
}

int vm_plan_await_fills(struct vm_ctx *c, struct vm_plan *p) {
  int err = 0;
  while (!err) {
    struct vm_fill *f;
    pthread_mutex_lock(&c->lock);
    if ((f = vm_plan_behind(c, p))) f->refs++;
    pthread_mutex_unlock(&c->lock);
    if (!f) break;
    err = vm_fill_wait(c, f);
  }
  return err;
}
