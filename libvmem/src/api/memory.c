/* SPDX-License-Identifier: MIT */
/* The pool's memory: allocating it ahead of need, and returning it to the driver. */
#include "api/api.h"

VMEM_API int vmem_warm(vmem_t vm, uint64_t bytes) {
  int err = 0;
  struct vm_ctx *c = vm_get(vm, "vmem_warm", &err);
  uint64_t have, units, id = 0;
  if (!c) return err;
  units = vm_units_up(c, bytes);
  do {
    pthread_mutex_lock(&c->lock);
    have = c->phys->pools[0].free_units;
    pthread_mutex_unlock(&c->lock);
    if (have < units) err = vm_pool_grow(c, &c->phys->pools[0], units - have, 0, 1, have, &id);
  } while (!err && have < units);
  vm_put(c);
  return err;
}

VMEM_API int vmem_trim(vmem_t vm, uint64_t keep, uint64_t *freed) {
  int err;
  struct vm_ctx *c = vm_get(vm, "vmem_trim", &err);
  uint64_t n;
  if (!c) return err;
  n = vm_pool_trim(c, keep, 0, true);
  if (freed) *freed = n;
  vm_put(c);
  return 0;
}

VMEM_API int vmem_compact(vmem_t vm, uint64_t want, const struct vmem_after *after, size_t num_after, uint32_t flags,
                          uint64_t *freed) {
  int err;
  struct vm_ctx *c = vm_get(vm, "vmem_compact", &err);
  struct vm_deps deps;
  uint64_t n = 0;
  if (!c) return err;
  if (flags)
    err = vm_fail(-EINVAL, "unknown flags 0x%x", flags);
  else if (num_after && !after)
    err = vm_fail(-EINVAL, "NULL argument");
  else if (!(err = vm_deps_make(c, after, num_after, &deps))) {
    if (!(err = vm_deps_wait(c, &deps)) && want) err = vm_compact(c, want, &n);
    VM_UNDO(vm_deps_put(c, &deps));
  }
  if (freed) *freed = n;
  vm_put(c);
  return err;
}

VMEM_API int vmem_memory_query(vmem_t vm, uint32_t location, int32_t device, struct vmem_memory_info *info) {
  int err = 0;
  struct vm_ctx *c = vm_get(vm, "vmem_memory_query", &err);
  struct vmem_memory_info r = {.size = sizeof(r)};
  uint64_t most, taken;
  if (!c) return err;
  if (vm_pool_of(c, location, device, 0, &err)) err = vm_drv_memory(c, location, device, &r.free_bytes, &r.total_bytes);
  if (!err && (most = c->opts.mem_limit)) {
    pthread_mutex_lock(&c->lock);
    taken = c->phys->slab_bytes;
    pthread_mutex_unlock(&c->lock);
    if (taken > most) taken = most;
    if (r.free_bytes > most - taken) r.free_bytes = most - taken;
  }
  if (!err) err = vm_copy_out(info, &r, sizeof(r), "vmem_memory_info");
  vm_put(c);
  return err;
}
