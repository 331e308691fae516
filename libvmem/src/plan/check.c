/* SPDX-License-Identifier: MIT */
/* Checks of an operation that do not need its pages. */
#include "plan/plan.h"

int vm_page_size(struct vm_ctx *c, uint64_t *page_size) {
  uint64_t size = *page_size ? *page_size : c->granule;
  *page_size = size;
  if (vm_is_pow2(size) && size >= c->granule && (c->info->pub.page_sizes & size)) return 0;
  return vm_fail_at(-EOPNOTSUPP, 0, size, c->granule, "no pages of %llu bytes on %s with a granule of %llu",
                    (unsigned long long)size, c->be->name, (unsigned long long)c->granule);
}

static int check_map(struct vm_ctx *c, struct vm_want *w) {
  const struct vmem_op *op = w->op;
  uint64_t total, count = w->count, step = vm_offset_step(op);
  int err;
  if (!(w->hdl = vm_hdl_find(c, op->handle, &err))) return err;
  if (w->hdl->busy) return vm_fail(-EBUSY, "the handle is being released");
  w->page_size = w->hdl->page_size;
  if (op->offset & (w->page_size - 1))
    return vm_fail_at(-EINVAL, op->offset, op->bytes, w->page_size, "offset %llu is not aligned to the page size %llu",
                      (unsigned long long)op->offset, (unsigned long long)w->page_size);
  if (step & (w->page_size - 1))
    return vm_fail_at(-EINVAL, step, op->bytes, w->page_size, "offset_stride %llu is not aligned to the page size %llu",
                      (unsigned long long)step, (unsigned long long)w->page_size);
  if (__builtin_mul_overflow(step, count - 1, &total) || __builtin_add_overflow(total, op->bytes, &total) ||
      op->offset + total < total)
    return vm_fail_at(-EOVERFLOW, op->addr, op->bytes, 0, "%llu x %llu bytes overflows 64 bits",
                      (unsigned long long)count, (unsigned long long)step);
  if (op->offset + total > w->hdl->bytes)
    return vm_fail_at(-ERANGE, op->addr, total, w->hdl->bytes, "offset %llu + %llu bytes is beyond the handle's %llu",
                      (unsigned long long)op->offset, (unsigned long long)total, (unsigned long long)w->hdl->bytes);
  if ((op->flags & VMEM_OP_READONLY) && !(c->info->pub.caps & VMEM_CAP_READONLY))
    return vm_fail(-EOPNOTSUPP, "back end %s has no read-only mappings", c->be->name);
  return 0;
}

static int check_source(const struct vmem_op *op, uint64_t count) {
  uint64_t span;
  if (!(op->flags & VMEM_OP_COPY)) return 0;
  if (op->src_bytes > op->bytes)
    return vm_fail_at(-EINVAL, op->src, op->src_bytes, op->bytes, "cannot copy %llu bytes into a piece of %llu",
                      (unsigned long long)op->src_bytes, (unsigned long long)op->bytes);
  if (__builtin_mul_overflow(count - 1, op->src_stride, &span) || op->src + span < span ||
      op->src + span + vm_source_bytes(op) < op->src + span)
    return vm_fail_at(-EOVERFLOW, op->src, op->bytes, 0, "%llu sources %llu apart exceed the address space",
                      (unsigned long long)count, (unsigned long long)op->src_stride);
  return 0;
}

static int check_reserved(const struct vmem_op *op, size_t i) {
  for (size_t k = 0; k < sizeof(op->reserved) / sizeof(op->reserved[0]); k++)
    if (op->reserved[k]) return vm_fail(-EINVAL, "reserved[%zu] of operation %zu is not 0", k, i);
  return 0;
}

int vm_want(struct vm_ctx *c, const struct vmem_op *op, struct vm_want *w) {
  static const uint32_t allowed[] = {
      [VMEM_OP_MAP] = VMEM_OP_READONLY | VMEM_OP_CONSUME | VMEM_OP_REPLACE | VMEM_OP_SPLIT,
      [VMEM_OP_POPULATE] = VMEM_OP_DIRTY | VMEM_OP_SPREAD | VMEM_OP_COPY,
      [VMEM_OP_UNMAP] = VMEM_OP_HOLES | VMEM_OP_SPLIT,
      [VMEM_OP_FILL] = VMEM_OP_HOLES,
      [VMEM_OP_JOIN] = VMEM_OP_HOLES,
  };
  uint64_t count = op->count ? op->count : 1, span;
  int err;
  *w = (struct vm_want){.op = op, .count = count};
  if (op->op < VMEM_OP_MAP || op->op > VMEM_OP_JOIN) return vm_fail(-EINVAL, "unknown operation %u", op->op);
  if (op->flags & ~allowed[op->op])
    return vm_fail(-EINVAL, "flags 0x%x are not valid for operation %u", op->flags & ~allowed[op->op], op->op);
  if (op->op == VMEM_OP_MAP && (op->flags & (VMEM_OP_SPLIT | VMEM_OP_REPLACE)) == VMEM_OP_SPLIT)
    return vm_fail(-EINVAL, "VMEM_OP_SPLIT without VMEM_OP_REPLACE: a plain map splits nothing");
  if (op->op != VMEM_OP_MAP && op->offset_stride)
    return vm_fail_at(-EINVAL, op->addr, op->bytes, 0, "offset_stride %llu is not valid for operation %u",
                      (unsigned long long)op->offset_stride, op->op);
  w->page_size = c->granule;
  if (op->op == VMEM_OP_MAP && (err = check_map(c, w))) return err;
  if (op->op == VMEM_OP_FILL && op->value > 255)
    return vm_fail_at(-EINVAL, op->addr, op->bytes, 255, "fill value %llu is not a byte",
                      (unsigned long long)op->value);
  if (op->op == VMEM_OP_POPULATE) {
    w->page_size = op->page_size;
    if ((err = vm_page_size(c, &w->page_size))) return err;
    if (!(w->pool = vm_pool_of(c, op->location, op->device, w->page_size, &err))) return err;
    if ((err = check_source(op, count))) return err;
  }
  if (count > 1 && ((op->stride & (w->page_size - 1)) || op->stride < op->bytes))
    return vm_fail_at(-EINVAL, op->addr, op->bytes, op->stride, "a stride of %llu does not fit pieces of %llu bytes",
                      (unsigned long long)op->stride, (unsigned long long)op->bytes);
  if (count > 1 && (__builtin_mul_overflow(count - 1, op->stride, &span) || op->addr + span < span))
    return vm_fail_at(-EOVERFLOW, op->addr, op->bytes, 0, "%llu pieces %llu apart exceed the address space",
                      (unsigned long long)count, (unsigned long long)op->stride);
  if (!vm_space_range(c, op->addr, op->bytes, w->page_size, &err)) return err;
  if (count > 1 && !vm_space_range(c, op->addr + span, op->bytes, w->page_size, &err)) return err;
  return 0;
}

int vm_want_all(struct vm_ctx *c, const struct vmem_op *ops, size_t n) {
  struct vm_want w;
  int err = 0;
  for (size_t i = 0; i < n && !err; i++) {
    err = check_reserved(&ops[i], i);
    if (!err) err = vm_want(c, &ops[i], &w);
  }
  return err;
}

/* Returns the pool that a checked operation populates from, and the units it takes; NULL: none. */
static struct vm_pool *populated(struct vm_ctx *c, const struct vmem_op *op, uint64_t *units) {
  uint64_t page_size = op->page_size ? op->page_size : c->granule;
  int err;
  if (op->op != VMEM_OP_POPULATE) return NULL;
  *units =
      vm_units(c, op->bytes) * (op->count ? op->count : 1); /* cannot overflow: the pieces fit in the address space */
  return vm_pool_of(c, op->location, op->device, page_size, &err);
}

bool vm_promise(struct vm_ctx *c, const struct vmem_op *ops, size_t n) {
  for (size_t i = 0; i < n; i++) {
    uint64_t units;
    struct vm_pool *p = populated(c, &ops[i], &units);
    if (p && units + p->promised > p->free_units) {
      vm_promise_end(c, ops, i);
      return false;
    }
    if (p) p->promised += units;
  }
  return true;
}

void vm_promise_end(struct vm_ctx *c, const struct vmem_op *ops, size_t n) {
  for (size_t i = 0; i < n; i++) {
    uint64_t units;
    struct vm_pool *p = populated(c, &ops[i], &units);
    if (p) p->promised -= units;
  }
}
