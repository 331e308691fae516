/* SPDX-License-Identifier: MIT */
/* Physical pages and the handles to them. */
#include "api/api.h"

static int check_create(struct vm_ctx *c, uint64_t size, struct vmem_create_opts *o) {
  int err;
  if (o->flags & ~VMEM_CREATE_DIRTY || o->reserved)
    return vm_fail(-EINVAL, "bad flags 0x%x or reserved field", o->flags);
  if ((err = vm_page_size(c, &o->page_size))) return err;
  if (!size || size & (o->page_size - 1))
    return vm_fail_at(-EINVAL, 0, size, o->page_size, "size %llu is not a positive multiple of the page size %llu",
                      (unsigned long long)size, (unsigned long long)o->page_size);
  return 0;
}

VMEM_API int vMemCreate(vmem_t vm, uint64_t size, const struct vmem_create_opts *opts, vmem_handle *handle) {
  int err;
  struct vm_ctx *c = vm_get(vm, "vMemCreate", &err);
  struct vmem_create_opts o;
  struct vm_pool *pool = NULL;
  uint64_t grow_id = 0;
  bool again = false;
  if (!c) return err;
  if (!handle)
    err = vm_fail(-EINVAL, "NULL argument");
  else if (!(err = vm_copy_in(&o, sizeof(o), opts, "vmem_create_opts")) && !(err = check_create(c, size, &o)))
    pool = vm_pool_of(c, o.location, o.device, o.page_size, &err);
  while (pool) {
    uint32_t align = (uint32_t)vm_units(c, o.page_size), n = 0;
    uint64_t missing = 0, units = vm_units(c, size), seen;
    struct vm_run *runs = NULL;
    struct vm_hdl *h;
    pthread_mutex_lock(&c->lock);
    if (pool->free_units < units)
      missing = units - pool->free_units, err = -ENOMEM;
    else
      err = vm_runs_take(c, pool, units, align, &runs, &n, &missing);
    if (!err) {
      if ((h = vm_hdl_new(c, handle))) {
        h->bytes = size;
        h->page_size = o.page_size;
        h->location = o.location;
        h->device = pool->device;
        h->dirty_ok = o.flags & VMEM_CREATE_DIRTY;
        h->runs = runs;
        h->nruns = n;
        vm_phys_note_peak(c);
      } else {
        vm_runs_put(c, runs, n);
        err = -ENOMEM;
      }
    }
    seen = pool->free_units;
    pthread_mutex_unlock(&c->lock);
    /* Putting the runs back drops the lock, so other threads may have added pages: try once more. */
    if (err && missing && seen >= units && !again) {
      again = true;
      continue;
    }
    again = false;
    if (err && !missing) VM_UNDO(vm_pool_undo_grow(c, grow_id));
    if (!err || !missing || (err = vm_pool_grow(c, pool, missing, units, align, seen, &grow_id))) break;
  }
  vm_put(c);
  return err;
}

VMEM_API int vmem_drop(vmem_t vm, vmem_handle handle) {
  int err = 0;
  struct vm_ctx *c = vm_get(vm, "vmem_drop", &err);
  struct vm_hdl *h;
  if (!c) return err;
  pthread_mutex_lock(&c->lock);
  if ((h = vm_hdl_find(c, handle, &err))) {
    if (h->busy || h->pins)
      err = vm_fail(-EBUSY, "another call is using the handle");
    else
      vm_hdl_drop(c, h);
  }
  pthread_mutex_unlock(&c->lock);
  if (!err) vm_pool_settle(c);
  vm_put(c);
  return err;
}

VMEM_API int vmem_drop_range(vmem_t vm, vmem_handle handle, uint64_t offset, uint64_t bytes, uint64_t count,
                             uint64_t stride) {
  int err = 0;
  struct vm_ctx *c = vm_get(vm, "vmem_drop_range", &err);
  struct vm_hdl *h;
  if (!c) return err;
  pthread_mutex_lock(&c->lock);
  if ((h = vm_hdl_find(c, handle, &err))) err = vm_hdl_drop_range(c, h, offset, bytes, count ? count : 1, stride);
  pthread_mutex_unlock(&c->lock);
  if (!err) vm_pool_settle(c);
  vm_put(c);
  return err;
}

VMEM_API int vMemRelease(vmem_t vm, vmem_handle handle) {
  int err;
  struct vm_ctx *c = vm_get(vm, "vMemRelease", &err);
  struct vm_plan p;
  if (!c) return err;
  err = vm_plan_make_release(c, handle, &p);
  if (vm_recount(c, err)) err = vm_plan_make_release(c, handle, &p);
  if (!err) err = vm_plan_run_now(c, &p);
  vm_put(c);
  return err;
}

/* Checks the stride and the total size; the caller checks each piece. */
static int check_pieces(struct vm_ctx *c, uint64_t addr, uint64_t bytes, uint64_t count, uint64_t stride) {
  uint64_t span, total;
  if (count < 2) return 0;
  if (stride & (c->granule - 1) || stride < bytes)
    return vm_fail_at(-EINVAL, addr, bytes, stride, "a stride of %llu does not fit pieces of %llu bytes",
                      (unsigned long long)stride, (unsigned long long)bytes);
  if (__builtin_mul_overflow(count, bytes, &total) || __builtin_mul_overflow(count - 1, stride, &span) ||
      addr + span < span)
    return vm_fail_at(-EOVERFLOW, addr, bytes, 0, "%llu pieces %llu apart exceed the address space",
                      (unsigned long long)count, (unsigned long long)stride);
  return 0;
}

/* Adds a reference to each page behind [addr, addr + bytes) to the runs. Lock held. */
static int retain_piece(struct vm_ctx *c, uint64_t addr, uint64_t bytes, struct vm_pool **pool, struct vm_run **runs,
                        uint32_t *nruns) {
  int err;
  struct vm_space *s = vm_space_range(c, addr, bytes, c->granule, &err);
  if (!s) return err;
  for (uint64_t a = addr, n; a < addr + bytes; a += n << c->shift) {
    struct vm_pte *p = vm_pte(c, s, a);
    struct vm_run *v, r;
    if (!vm_pte_is_live(p)) return vm_pte_not_live(c, p, a);
    n = vm_space_units(c, s, a, addr + bytes, PTE_MAPPED | PTE_BUSY);
    r = (struct vm_run){c->phys->slabs[p->slab], p->unit, (uint32_t)n};
    if (*pool && (r.slab->pool->location != (*pool)->location || r.slab->pool->device != (*pool)->device))
      return vm_fail_at(-EINVAL, a, c->granule, 0, "the pages are in different locations");
    if (!(v = vm_runs_add(c, *runs, nruns, r))) return -ENOMEM;
    *runs = v;
    vm_units_ref(r.slab, r.unit, r.n);
    *pool = r.slab->pool;
  }
  return 0;
}

static int retain_pieces(struct vm_ctx *c, uint64_t addr, uint64_t bytes, uint64_t count, uint64_t stride,
                         vmem_handle *handle) {
  int err;
  struct vm_run *runs = NULL;
  struct vm_hdl *h;
  struct vm_pool *pool = NULL;
  uint32_t n = 0;
  if (!handle) return vm_fail(-EINVAL, "NULL argument");
  if (!count) count = 1;
  if ((err = check_pieces(c, addr, bytes, count, stride))) return err;
  pthread_mutex_lock(&c->lock);
  for (uint64_t i = 0; i < count && !err; i++) err = retain_piece(c, addr + i * stride, bytes, &pool, &runs, &n);
  if (!err && !(h = vm_hdl_new(c, handle))) err = -ENOMEM;
  if (!err) {
    h->bytes = count * bytes;
    h->page_size = c->granule;
    h->location = pool->location;
    h->device = pool->device;
    h->runs = runs;
    h->nruns = n;
  } else {
    vm_runs_put(c, runs, n);
  }
  pthread_mutex_unlock(&c->lock);
  return err;
}

VMEM_API int vmem_retain(vmem_t vm, uint64_t addr, uint64_t bytes, vmem_handle *handle) {
  int err;
  struct vm_ctx *c = vm_get(vm, "vmem_retain", &err);
  if (!c) return err;
  err = retain_pieces(c, addr, bytes, 1, 0, handle);
  vm_put(c);
  return err;
}

VMEM_API int vmem_gather(vmem_t vm, uint64_t addr, uint64_t bytes, uint64_t count, uint64_t stride,
                         vmem_handle *handle) {
  int err;
  struct vm_ctx *c = vm_get(vm, "vmem_gather", &err);
  if (!c) return err;
  err = retain_pieces(c, addr, bytes, count, stride, handle);
  vm_put(c);
  return err;
}

VMEM_API int vmem_handle_query(vmem_t vm, vmem_handle handle, struct vmem_handle_info *info) {
  int err = 0;
  struct vm_ctx *c = vm_get(vm, "vmem_handle_query", &err);
  struct vmem_handle_info r = {.size = sizeof(r)};
  struct vm_hdl *h;
  if (!c) return err;
  pthread_mutex_lock(&c->lock);
  if ((h = vm_hdl_find(c, handle, &err))) {
    r.bytes = h->bytes;
    r.page_size = h->page_size;
    for (uint32_t i = 0; i < h->nruns; i++) r.runs += h->runs[i].slab != NULL;
    r.mappings = h->mappings;
    r.location = h->location;
    r.device = h->device;
  }
  pthread_mutex_unlock(&c->lock);
  if (!err) err = vm_copy_out(info, &r, sizeof(r), "vmem_handle_info");
  vm_put(c);
  return err;
}
