/* SPDX-License-Identifier: MIT */
/* Mappings: alone, as a batch that runs now, and joined. */
#include "api/api.h"
#include "base/probe.h"

static int run_ops(struct vm_ctx *c, const struct vmem_op *ops, size_t n) {
  struct vm_plan p;
  int err = vm_plan_make(c, ops, n, &p);
  return err ? err : vm_plan_run_now(c, &p);
}

VMEM_API int vMemMap(vmem_t vm, uint64_t addr, uint64_t bytes, vmem_handle handle, uint64_t offset, uint32_t flags) {
  int err;
  struct vm_ctx *c = vm_get(vm, "vMemMap", &err);
  struct vmem_op op = {.op = VMEM_OP_MAP,
                       .addr = addr,
                       .bytes = bytes,
                       .handle = handle,
                       .offset = offset,
                       .flags = flags & VMEM_MAP_READONLY ? VMEM_OP_READONLY : 0};
  if (!c) return err;
  if (flags & ~VMEM_MAP_READONLY)
    err = vm_fail(-EINVAL, "unknown flags 0x%x", flags & ~VMEM_MAP_READONLY);
  else
    err = run_ops(c, &op, 1);
  vm_put(c);
  return err;
}

VMEM_API int vMemUnmap(vmem_t vm, uint64_t addr, uint64_t bytes) {
  int err;
  struct vm_ctx *c = vm_get(vm, "vMemUnmap", &err);
  struct vmem_op op = {.op = VMEM_OP_UNMAP, .addr = addr, .bytes = bytes};
  if (!c) return err;
  err = run_ops(c, &op, 1);
  vm_put(c);
  return err;
}

VMEM_API int vmem_batch(vmem_t vm, const struct vmem_op *ops, size_t n, const struct vmem_after *after,
                        size_t num_after, uint32_t flags) {
  int err;
  struct vm_ctx *c = vm_get(vm, "vmem_batch", &err);
  struct vm_deps deps;
  struct vm_plan p;
  if (!c) return err;
  if (flags)
    err = vm_fail(-EINVAL, "unknown flags 0x%x", flags);
  else if ((n && !ops) || (num_after && !after))
    err = vm_fail(-EINVAL, "NULL argument");
  else if (!(err = vm_deps_make(c, after, num_after, &deps))) {
    if (!(err = vm_plan_make(c, ops, n, &p))) {
      if (!(err = vm_deps_wait(c, &deps))) {
        err = vm_plan_run_now(c, &p);
      } else {
        VM_UNDO(vm_plan_cancel(c, &p));
      }
    }
    VM_UNDO(vm_deps_put(c, &deps));
  }
  VM_PROBE3(batch, c, n, err);
  vm_put(c);
  return err;
}

VMEM_API int vmem_join(vmem_t vm, uint64_t addr, uint64_t bytes, uint64_t *calls) {
  int err;
  struct vm_ctx *c = vm_get(vm, "vmem_join", &err);
  uint64_t made;
  if (!c) return err;
  err = vm_join(c, addr, bytes, &made);
  if (calls) *calls = made;
  vm_put(c);
  return err;
}
