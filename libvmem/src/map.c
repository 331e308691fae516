/* SPDX-License-Identifier: MIT */
/* vMemMap, vMemUnmap, vmem_batch; the pool's controls; statistics. */
#include "work/work.h"

static int run_ops(struct vm_ctx *c, const struct vmem_op *ops, size_t n) {
  struct vm_plan p;
  int err = vm_plan_make(c, ops, n, &p);
  return err ? err : vm_plan_run_now(c, &p);
}

VMEM_API int vMemMap(vmem_t vm, uint64_t addr, uint64_t bytes, vmem_handle handle, uint64_t offset, uint32_t flags) {
  int err;
  struct vm_ctx *c = vm_get(vm, "vMemMap", &err);
  struct vmem_op op = {.op = VMEM_OP_MAP, .addr = addr, .bytes = bytes, .handle = handle, .offset = offset,
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

VMEM_API int vmem_batch(vmem_t vm, const struct vmem_op *ops, size_t n, const struct vmem_after *after, size_t num_after,
                        uint32_t flags) {
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
  vm_put(c);
  return err;
}

/* ---- pool ------------------------------------------------------------------------------------ */

VMEM_API int vmem_warm(vmem_t vm, uint64_t bytes) {
  int err = 0;
  struct vm_ctx *c = vm_get(vm, "vmem_warm", &err);
  uint64_t have, units, id = 0;
  if (!c) return err;
  units = vm_units_up(c, bytes);
  do {
    pthread_mutex_lock(&c->lock);
    have = c->pools[0].free_units;
    pthread_mutex_unlock(&c->lock);
    if (have < units) err = vm_pool_grow(c, &c->pools[0], units - have, 0, 1, have, &id);
  } while (!err && have < units);
  vm_put(c);
  return err;
}

VMEM_API int vmem_trim(vmem_t vm, uint64_t keep, uint64_t *freed) {
  int err;
  struct vm_ctx *c = vm_get(vm, "vmem_trim", &err);
  uint64_t n;
  if (!c) return err;
  n = vm_pool_trim(c, keep, true);
  if (freed) *freed = n;
  vm_put(c);
  return 0;
}

VMEM_API int vmem_inject(vmem_t vm, uint32_t kinds, uint64_t skip, uint64_t count, int error) {
  int err = 0;
  struct vm_ctx *c = vm_get(vm, "vmem_inject", &err);
  if (!c) return err;
  if (kinds & ~(VMEM_INJECT_CLEAN * 2 - 1) || (count && (!kinds || error <= 0 || error > 4095)))
    err = vm_fail(-EINVAL, "kinds 0x%x, error %d", kinds, error);
  else
    vm_inject_arm(c, kinds, skip, count, error);
  vm_put(c);
  return err;
}

VMEM_API int vmem_get_stats(vmem_t vm, struct vmem_stats *stats) {
  int err;
  struct vm_ctx *c = vm_get(vm, "vmem_get_stats", &err);
  struct vmem_stats s = {.size = sizeof(s)};
  if (!c) return err;
  pthread_mutex_lock(&c->lock);
  s.reserved_bytes = c->reserved_bytes;
  s.mapped_bytes = c->mapped_units << c->shift;
  s.used_bytes = (c->used_units + c->limbo_units) << c->shift;
  s.free_bytes = vm_pool_free_units(c) << c->shift;
  s.slab_bytes = c->slab_bytes;
  s.quarantined_bytes = c->quarantined_units << c->shift;
  s.peak_mapped_bytes = c->peak_mapped_units << c->shift;
  s.peak_used_bytes = c->peak_used_units << c->shift;
  s.reservations = c->nspaces;
  s.handles = c->live_hdls;
  s.slabs = c->live_slabs;
  s.segments = c->segments;
  s.mappings = c->mappings + c->alias_mappings;
  s.dirty_bytes = vm_pool_dirty_units(c) << c->shift;
  s.pending = c->pending;
  s.tickets = c->kept_tickets;
  s.batches = c->batches;
  pthread_mutex_unlock(&c->lock);
  s.map_calls = __atomic_load_n(&c->map_calls, __ATOMIC_RELAXED);
  s.unmap_calls = __atomic_load_n(&c->unmap_calls, __ATOMIC_RELAXED);
  s.slab_calls = __atomic_load_n(&c->slab_calls, __ATOMIC_RELAXED);
  s.fill_calls = __atomic_load_n(&c->fill_calls, __ATOMIC_RELAXED);
  s.driver_ns = __atomic_load_n(&c->driver_ns, __ATOMIC_RELAXED);
  s.worker_driver_ns = __atomic_load_n(&c->worker_driver_ns, __ATOMIC_RELAXED);
  err = vm_copy_out(stats, &s, sizeof(s), "vmem_stats");
  vm_put(c);
  return err;
}
