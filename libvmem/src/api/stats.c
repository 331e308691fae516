/* SPDX-License-Identifier: MIT */
/* Statistics and fault injection. */
#include "api/api.h"

VMEM_API int vmem_get_stats(vmem_t vm, struct vmem_stats *stats) {
  int err;
  struct vm_ctx *c = vm_get(vm, "vmem_get_stats", &err);
  struct vmem_stats s = {.size = sizeof(s)};
  if (!c) return err;
  pthread_mutex_lock(&c->lock);
  s.reserved_bytes = c->virt->reserved_bytes;
  s.mapped_bytes = c->virt->mapped_units << c->shift;
  s.used_bytes = (c->phys->used_units + c->phys->limbo_units) << c->shift;
  s.free_bytes = vm_pool_free_units(c) << c->shift;
  s.slab_bytes = c->phys->slab_bytes;
  s.quarantined_bytes = c->phys->quarantined_units << c->shift;
  s.peak_mapped_bytes = c->virt->peak_mapped_units << c->shift;
  s.peak_used_bytes = c->phys->peak_used_units << c->shift;
  s.reservations = c->virt->nspaces;
  s.handles = c->phys->live_hdls;
  s.slabs = c->phys->live_slabs;
  s.segments = c->driver->segments;
  s.mappings = c->driver->mappings + c->driver->aliases;
  s.large_entries = c->driver->large_entries;
  s.splits = c->driver->splits;
  s.joins = c->driver->joins;
  s.dirty_bytes = vm_pool_dirty_units(c) << c->shift;
  s.pending = c->work->pending;
  s.tickets = c->work->kept_tickets;
  s.batches = c->batches;
  pthread_mutex_unlock(&c->lock);
  s.map_calls = __atomic_load_n(&c->driver->map_calls, __ATOMIC_RELAXED);
  s.unmap_calls = __atomic_load_n(&c->driver->unmap_calls, __ATOMIC_RELAXED);
  s.slab_calls = __atomic_load_n(&c->driver->slab_calls, __ATOMIC_RELAXED);
  s.fill_calls = __atomic_load_n(&c->driver->fill_calls, __ATOMIC_RELAXED);
  s.driver_ns = __atomic_load_n(&c->driver->ns, __ATOMIC_RELAXED);
  s.worker_driver_ns = __atomic_load_n(&c->driver->worker_ns, __ATOMIC_RELAXED);
  err = vm_copy_out(stats, &s, sizeof(s), "vmem_stats");
  vm_put(c);
  return err;
}

VMEM_API int vmem_inject(vmem_t vm, uint32_t kinds, uint64_t skip, uint64_t count, int error) {
  int err = 0;
  struct vm_ctx *c = vm_get(vm, "vmem_inject", &err);
  if (!c) return err;
  if (kinds & ~(VMEM_INJECT_EVENT * 2 - 1) || (count && (!kinds || error <= 0 || error > 4095)))
    err = vm_fail(-EINVAL, "kinds 0x%x, error %d", kinds, error);
  else
    vm_inject_arm(c, kinds, skip, count, error);
  vm_put(c);
  return err;
}
