/* SPDX-License-Identifier: MIT */
/* Asynchronous batches. */
#include "api/api.h"

VMEM_API int vmem_submit(vmem_t vm, const struct vmem_op *ops, size_t n, const struct vmem_after *after,
                         size_t num_after, uint32_t flags, vmem_ticket *ticket) {
  int err;
  struct vm_ctx *c = vm_get(vm, "vmem_submit", &err);
  if (!c) return err;
  if (flags & ~(VMEM_SUBMIT_DETACHED | VMEM_SUBMIT_LATE))
    err = vm_fail(-EINVAL, "unknown flags 0x%x", flags & ~(VMEM_SUBMIT_DETACHED | VMEM_SUBMIT_LATE));
  else if ((!ticket && !(flags & VMEM_SUBMIT_DETACHED)) || (n && !ops) || (num_after && !after))
    err = vm_fail(-EINVAL, "NULL argument");
  else
    err = vm_submit(c, ops, n, after, num_after, flags, ticket);
  vm_put(c);
  return err;
}

VMEM_API int vmem_wait(vmem_t vm, vmem_ticket ticket, int64_t timeout_ns) {
  int err;
  struct vm_ctx *c = vm_get(vm, "vmem_wait", &err);
  if (!c) return err;
  err = vm_ticket_wait(c, ticket, timeout_ns);
  vm_put(c);
  return err;
}

VMEM_API int vmem_order(vmem_t vm, vmem_ticket ticket, uint64_t stream) {
  int err;
  struct vm_ctx *c = vm_get(vm, "vmem_order", &err);
  if (!c) return err;
  err = vm_ticket_order(c, ticket, stream);
  vm_put(c);
  return err;
}

VMEM_API int vmem_ticket_drop(vmem_t vm, vmem_ticket ticket) {
  int err;
  struct vm_ctx *c = vm_get(vm, "vmem_ticket_drop", &err);
  if (!c) return err;
  err = vm_ticket_drop(c, ticket);
  vm_put(c);
  return err;
}
