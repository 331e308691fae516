/* SPDX-License-Identifier: MIT */
/* vm_bind: one back-end call for many operations if supported, else one call each. */
#include <stdlib.h>

#include "backend/driver.h"

static int by_reservation(const void *a, const void *b) {
  const struct vm_bind_op *x = a, *y = b;
  if (x->priv != y->priv) return x->priv < y->priv ? -1 : 1;
  return x->addr < y->addr ? -1 : x->addr > y->addr;
}

/* Groups operations by reservation; most plans touch only one. */
static void group(struct vm_bind_op *ops, size_t n) {
  for (size_t i = 1; i < n; i++)
    if (ops[i].priv != ops[0].priv) {
      qsort(ops, n, sizeof(*ops), by_reservation);
      return;
    }
}

/* Counts the operations from the i-th on that belong to the same piece as the i-th. */
static size_t rest_of_piece(const struct vm_bind_op *ops, size_t n, size_t i) {
  size_t end = i + 1;
  while (end < n && ops[end].kind == VM_BIND_REPLACE && !ops[end].clears) end++;
  return end - i;
}

/* Unmaps the old mapping, once per piece, then maps. */
static int replace(struct vm_ctx *c, const struct vm_bind_op *ops, size_t n, struct vm_bind_result *r) {
  size_t i = r->done;
  int err = ops[i].clears ? vm_drv_unmap(c, ops[i].from, ops[i].clears, ops[i].sparse) : 0;
  if (err) {
    r->failed = rest_of_piece(ops, n, i);
  } else {
    if (!(err = vm_drv_map(c, &ops[i]))) return 0;
    r->failed = r->unmapped = rest_of_piece(ops, n, i);
  }
  if (err != -ENOTRECOVERABLE) return err;
  while (!ops[i].clears) i--; /* the whole piece is in an unknown state */
  r->unknown = r->failed = r->done + r->failed - i;
  r->done = i;
  r->unmapped = 0;
  return err;
}

static int one(struct vm_ctx *c, const struct vm_bind_op *ops, size_t n, struct vm_bind_result *r) {
  const struct vm_bind_op *op = &ops[r->done];
  int err;
  if (op->kind == VM_BIND_REPLACE) return replace(c, ops, n, r);
  if (op->kind == VM_BIND_UNMAP)
    err = vm_drv_unmap(c, op->addr, op->bytes, op->sparse);
  else
    err = op->kind == VM_BIND_MAP ? vm_drv_map(c, op) : vm_drv_remap(c, op);
  if (!err) return 0;
  r->failed = 1;
  if (op->kind == VM_BIND_REMAP) { /* the range may or may not be unmapped now */
    VM_UNDO(vm_drv_unmap(c, op->addr, op->bytes, op->sparse));
    r->unmapped = 1;
  } else {
    r->unknown = err == -ENOTRECOVERABLE;
  }
  return err;
}

int vm_bind(struct vm_ctx *c, struct vm_bind_op *ops, size_t n, struct vm_bind_result *r) {
  int err = 0;
  *r = (struct vm_bind_result){0};
  if (c->be->bind) {
    group(ops, n);
    err = vm_drv_bind(c, ops, n, r);
    if (err) r->failed = n - r->done;
  } else {
    while (r->done < n && !(err = one(c, ops, n, r))) r->done++;
  }
  if (!err) r->done = n;
  return err;
}
