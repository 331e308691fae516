/* SPDX-License-Identifier: MIT */
/*
 * Mappings: translates the core's operations into the kernel's. Each BIND carries as many operations on one reservation
 * as the driver allows.
 *
 * The kernel's array is on the heap, or on the stack if memory is short: a batch then needs more
 * calls, but an undo never fails for lack of memory.
 */
#include <errno.h>
#include <stdlib.h>

#include "backend/uvm/uvm.h"
#include "base/error.h"

#define SLOT (1ull << UVM_VMEM_SLOT_SHIFT)

enum { FEW = 64 }; /* operations of the array on the stack; a single core operation never needs more, see uvm.c */

struct group {
  const struct uvm *u;
  struct uvm_vmem_op *ops;
  uint32_t n, room;
  uint64_t units;      /* units that ops map or unmap */
  size_t first, count; /* the core's operations that ops carry out */
};

/* Counts the kernel operations for an operation: a map needs one for each object that it touches. */
static uint32_t pieces(const struct vm_bind_op *op) {
  uint64_t object;
  if (op->kind == VM_BIND_UNMAP) return 1;
  object = uvm_slab_object_bytes(op->slab);
  return (uint32_t)((op->offset + op->bytes - 1) / object - op->offset / object + 1);
}

static uint64_t units(const struct vm_bind_op *op) { return op->bytes >> UVM_VMEM_UNIT_SHIFT; }

/* True if the core expects the operation to create a large entry; the kernel then creates one or refuses the batch. */
static bool is_large(const struct uvm *u, const struct vm_bind_op *op) {
  return u->entries && !op->sparse && !((op->addr | op->offset | op->bytes) & (SLOT - 1)) &&
         uvm_slab_is_contiguous(op->slab);
}

static void add(struct group *g, const struct vm_bind_op *op) {
  const struct uvm *u = g->u;
  uint64_t object, n;
  g->units += units(op);
  g->count++;
  if (op->kind == VM_BIND_UNMAP) {
    g->ops[g->n++] =
        (struct uvm_vmem_op){.addr = op->addr,
                             .op = UVM_VMEM_OP_UNMAP,
                             .flags = (op->sparse ? UVM_VMEM_OP_SPARSE : 0) | (op->cut ? UVM_VMEM_OP_CUT : 0),
                             .count = (uint32_t)(op->bytes >> u->shift)};
    return;
  }
  object = uvm_slab_object_bytes(op->slab);
  for (uint64_t at = 0; at < op->bytes; at += n) {
    uint64_t offset = op->offset + at, inside = offset % object;
    n = object - inside < op->bytes - at ? object - inside : op->bytes - at;
    g->ops[g->n++] = (struct uvm_vmem_op){
        .addr = op->addr + at,
        .op = UVM_VMEM_OP_MAP,
        .flags = (op->flags & VMEM_MAP_READONLY ? UVM_VMEM_OP_READ_ONLY : 0) |
                 (op->kind == VM_BIND_MAP ? 0 : UVM_VMEM_OP_REPLACE) |
                 /* CUT is allowed in an undo, because nothing uses the range then. */
                 (op->kind == VM_BIND_REMAP || op->cut ? UVM_VMEM_OP_CUT : 0) |
                 (is_large(u, op) ? UVM_VMEM_OP_LARGE : 0),
        .handle = uvm_slab_handle(op->slab, offset),
        .first = (uint32_t)(inside >> u->shift),
        .count = (uint32_t)(n >> u->shift),
    };
  }
}

static bool fits(const struct group *g, const struct vm_bind_op *op) {
  return g->n + pieces(op) <= g->room && g->units + units(op) <= g->u->query.out_max_bind_units;
}

static int send(struct group *g, const struct nvidia_range *r, const struct vm_bind_op *ops,
                struct vm_bind_result *result) {
  struct uvm_vmem_bind b = {
      .size = sizeof(b), .start = r->addr, .ops = (uint64_t)(uintptr_t)g->ops, .op_count = g->n, .out_failed_op = ~0u};
  uint64_t bytes = 0, addr;
  int err;

  for (size_t i = 0; i < g->count; i++) bytes += ops[g->first + i].bytes;
  err = rm_ioctl(g->u->nv.uvm_fd, UVM_VMEM_BIND, &b);
  if (!err) {
    result->done = g->first + g->count;
    return 0;
  }
  addr = b.out_failed_op < g->n ? g->ops[b.out_failed_op].addr : ops[g->first].addr;
  if (err != -EIO) return uvm_fail(err, addr, bytes, "BIND");
  /* A GPU failure is the only error after which part of the batch may be mapped. */
  result->unknown = g->count;
  return vm_fail_at(-ENOTRECOVERABLE, ops[g->first].addr, bytes, 0,
                    "BIND of %llu bytes at 0x%llx: the GPU failed, and what is mapped there is unknown (EIO)",
                    (unsigned long long)bytes, (unsigned long long)ops[g->first].addr);
}

int uvm_bind(void *be, const struct vm_bind_op *ops, size_t n, struct vm_bind_result *result) {
  const struct uvm *u = be;
  struct uvm_vmem_op few[FEW];
  struct group g = {.u = u, .ops = few, .room = FEW};
  uint64_t want = 0;
  int err = 0;
  *result = (struct vm_bind_result){0};
  for (size_t i = 0; i < n; i++) want += pieces(&ops[i]);
  if (want > u->query.out_max_bind_ops) want = u->query.out_max_bind_ops;
  if (want > FEW) {
    g.ops = malloc(want * sizeof(*g.ops));
    g.room = (uint32_t)want;
    if (!g.ops) {
      g.ops = few;
      g.room = FEW;
    }
  }
  if (g.room > u->query.out_max_bind_ops) g.room = u->query.out_max_bind_ops;
  while (g.first < n && !err) {
    uint64_t priv = ops[g.first].priv;
    for (size_t i = g.first; i < n && ops[i].priv == priv && (!g.n || fits(&g, &ops[i])); i++) add(&g, &ops[i]);
    err = send(&g, (const struct nvidia_range *)(uintptr_t)priv, ops, result);
    g.first += g.count;
    g.n = 0;
    g.count = 0;
    g.units = 0;
  }
  if (g.ops != few) free(g.ops);
  return err;
}

/* ---- one operation ---- */

static int bind_one(void *be, struct vm_bind_op op) {
  struct uvm *u = be;
  struct vm_bind_result ignored;
  op.priv = (uint64_t)(uintptr_t)nvidia_range_at(&u->nv, op.addr);
  if (!op.priv)
    return vm_fail_at(-EIO, op.addr, op.bytes, 0, "0x%llx is not inside a reservation", (unsigned long long)op.addr);
  return uvm_bind(be, &op, 1, &ignored);
}

int uvm_map(void *be, uint64_t addr, uint64_t bytes, uint64_t slab, uint64_t offset, uint32_t flags, bool sparse) {
  return bind_one(be, (struct vm_bind_op){.kind = VM_BIND_MAP,
                                          .flags = flags,
                                          .addr = addr,
                                          .bytes = bytes,
                                          .slab = slab,
                                          .offset = offset,
                                          .sparse = sparse});
}

/* Unmaps in several calls if needed: a whole reservation may exceed what one call accepts. */
int uvm_unmap(void *be, uint64_t addr, uint64_t bytes, bool sparse) {
  const struct uvm *u = be;
  uint64_t most = ((uint64_t)u->query.out_max_bind_units << UVM_VMEM_UNIT_SHIFT) & ~(u->nv.granule - 1), n;
  int err = 0;
  for (uint64_t at = 0; at < bytes && !err; at += n) {
    n = bytes - at < most ? bytes - at : most;
    err = bind_one(be, (struct vm_bind_op){.kind = VM_BIND_UNMAP, .addr = addr + at, .bytes = n, .sparse = sparse});
  }
  return err;
}
