/* SPDX-License-Identifier: MIT */
/* The paper's five calls, the batch, and what is asked about reservations, handles and the pool. */
#include <stdlib.h>
#include <string.h>

#include "internal.h"

/* ---- reservations ---------------------------------------------------------------------------- */

static int space_insert(struct vm_ctx *c, struct vm_space *s) {
  size_t i;
  if (c->nspaces >= c->cap_spaces) {
    size_t cap = c->cap_spaces ? 2 * c->cap_spaces : 16;
    struct vm_space **v = vm_realloc(c, c->spaces, cap, sizeof(*v));
    if (!v) return -ENOMEM;
    c->spaces = v;
    c->cap_spaces = cap;
  }
  for (i = c->nspaces; i && c->spaces[i - 1]->base > s->base; i--) c->spaces[i] = c->spaces[i - 1];
  c->spaces[i] = s;
  c->nspaces++;
  c->reserved_bytes += s->bytes;
  c->segments += s->segments;
  return 0;
}

static int check_reserve(struct vm_ctx *c, uint64_t size, struct vmem_reserve_opts *o) {
  const uint32_t both = VMEM_RESERVE_VISIBLE | VMEM_RESERVE_PLAIN, known = both | VMEM_RESERVE_SPARSE | VMEM_RESERVE_FORCE;
  uint64_t least = c->granule > 2u << 20 ? c->granule : 2u << 20;
  if (!size || size & (c->granule - 1))
    return vm_fail_at(-EINVAL, 0, size, c->granule, "size %llu is no positive multiple of the granule %llu",
                      (unsigned long long)size, (unsigned long long)c->granule);
  if (size > 1ull << 56)
    return vm_fail_at(-ENOMEM, 0, size, 1ull << 56, "%llu bytes are more than any address space has", (unsigned long long)size);
  if (o->flags & ~known || o->reserved || (o->flags & both) == both)
    return vm_fail(-EINVAL, "bad flags 0x%x or reserved field", o->flags);
  if (!o->align) o->align = least;
  if (!vm_is_pow2(o->align) || o->align > 1ull << 46)
    return vm_fail_at(-EINVAL, 0, o->align, 0, "alignment %llu is no power of two up to 64 TiB", (unsigned long long)o->align);
  if (o->align < c->granule) o->align = c->granule;
  if ((o->flags & VMEM_RESERVE_SPARSE) && !(c->info.pub.caps & VMEM_CAP_SPARSE))
    return vm_fail(-EOPNOTSUPP, "back end %s has no sparse reservations", c->be->name);
  if ((o->flags & VMEM_RESERVE_VISIBLE) && !(c->info.pub.caps & VMEM_CAP_VISIBLE))
    return vm_fail(-EOPNOTSUPP, "back end %s has no visible reservations", c->be->name);
  if ((o->flags & VMEM_RESERVE_PLAIN) && !(c->info.pub.caps & VMEM_CAP_PLAIN))
    return vm_fail(-EOPNOTSUPP, "back end %s has no plain reservations", c->be->name);
  return 0;
}

VMEM_API int vMemReserve(vmem_t vm, uint64_t size, const struct vmem_reserve_opts *opts, uint64_t *addr) {
  int err;
  struct vm_ctx *c = vm_get(vm, "vMemReserve", &err);
  struct vmem_reserve_opts o;
  struct vm_space *s = NULL;
  if (!c) return err;
  if (!addr) err = vm_fail(-EINVAL, "NULL argument");
  else if (!(err = vm_copy_in(&o, sizeof(o), opts, "vmem_reserve_opts"))) err = check_reserve(c, size, &o);
  if (err) goto out;
  err = -ENOMEM;
  if (!(s = vm_calloc(c, 1, sizeof(*s)))) goto out;
  s->bytes = size;
  s->segments = 1;
  s->nleaves = (vm_units(c, size) + LEAF_PTES - 1) / LEAF_PTES;
  if (!(s->leaves = vm_calloc(c, s->nleaves, sizeof(*s->leaves)))) goto out;
  if ((err = vm_drv_reserve(c, size, o.align, o.flags, &s->base, &s->kind, &s->priv))) goto out;
  pthread_mutex_lock(&c->lock);
  err = c->closing ? vm_fail(-EBADF, "the context is being closed") : space_insert(c, s);
  pthread_mutex_unlock(&c->lock);
  if (err) {
    struct vmem_error why;
    vm_error_save(&why);
    vm_drv_unreserve(c, s);
    vm_error_restore(&why);
  } else {
    *addr = s->base;
  }
out:
  if (err && s) vm_space_destroy(s);
  vm_put(c);
  return err;
}

static int check_free(struct vm_ctx *c, struct vm_space *s, uint64_t addr, uint32_t flags) {
  unsigned long long base;
  if (!s) return vm_fail_at(-ENXIO, addr, 0, 0, "0x%llx is not inside a reservation", (unsigned long long)addr);
  base = s->base;
  if (s->base != addr)
    return vm_fail_at(-EINVAL, addr, 0, s->base, "0x%llx is not the start of the reservation at 0x%llx", (unsigned long long)addr, base);
  if (s->quarantined)
    return vm_fail_at(-ENOTRECOVERABLE, addr, s->quarantined << c->shift, 0, "the reservation at 0x%llx holds quarantined pages", base);
  if (s->freeing || s->busy)
    return vm_fail_at(-EBUSY, addr, s->busy << c->shift, 0, "the reservation at 0x%llx is being changed by another call", base);
  for (struct vm_access *a = c->accesses; a; a = a->next)
    if (a->addr >= s->base && a->addr < s->base + s->bytes)
      return vm_fail_at(-EBUSY, a->addr, a->bytes, 0, "the reservation at 0x%llx is being read or written", base);
  if (s->mapped && !(flags & VMEM_FREE_UNMAP))
    return vm_fail_at(-EBUSY, addr, s->mapped << c->shift, 0, "%llu bytes are still mapped in the reservation at 0x%llx",
                      (unsigned long long)(s->mapped << c->shift), base);
  return 0;
}

/* Marks everything mapped in a space as about to vanish, and the space as being freed. */
static int free_begin(struct vm_ctx *c, uint64_t addr, uint32_t flags, struct vm_plan *p, struct vm_space **out) {
  struct vmem_op op = {.op = VMEM_OP_UNMAP, .flags = VMEM_OP_HOLES, .addr = addr};
  struct vm_space *s;
  int err;
  memset(p, 0, sizeof(*p));
  pthread_mutex_lock(&c->lock);
  s = vm_space_find(c, addr);
  if (!(err = check_free(c, s, addr, flags))) {
    if (s->mapped)
      op.bytes = s->bytes;
    else
      s->freeing = true;
  }
  *out = s;
  pthread_mutex_unlock(&c->lock);
  if (err || !op.bytes) return err;
  if ((err = vm_plan_make(c, &op, 1, p))) return err;
  pthread_mutex_lock(&c->lock);
  *out = s = vm_space_find(c, addr); /* it cannot vanish any more, but a hole may have been mapped */
  if (s->busy == s->mapped && !s->freeing)
    s->freeing = true;
  else
    err = vm_fail_at(-EBUSY, addr, s->busy << c->shift, 0, "the reservation at 0x%llx is being changed by another call",
                     (unsigned long long)addr);
  pthread_mutex_unlock(&c->lock);
  if (err) {
    vm_plan_cancel(c, p);
    vm_fail_at(-EBUSY, addr, 0, 0, "the reservation at 0x%llx is being changed by another call", (unsigned long long)addr);
  }
  return err;
}

/* Takes the space out of the table. Lock held. */
static void space_remove(struct vm_ctx *c, struct vm_space *s) {
  size_t i = 0;
  while (c->spaces[i] != s) i++;
  memmove(&c->spaces[i], &c->spaces[i + 1], (--c->nspaces - i) * sizeof(*c->spaces));
  c->reserved_bytes -= s->bytes;
  c->segments -= s->segments;
}

VMEM_API int vMemFree(vmem_t vm, uint64_t addr, uint32_t flags) {
  int err;
  struct vm_ctx *c = vm_get(vm, "vMemFree", &err);
  struct vm_space *s = NULL;
  struct vm_plan p;
  bool at_once; /* the driver unmaps with the reservation */
  if (!c) return err;
  if (flags & ~VMEM_FREE_UNMAP)
    err = vm_fail(-EINVAL, "unknown flags 0x%x", flags & ~VMEM_FREE_UNMAP);
  else
    err = free_begin(c, addr, flags, &p, &s);
  if (err) goto out;
  at_once = c->info.unreserve_unmaps || !p.unmaps.n;
  if (at_once) {
    if (!(err = vm_fills_finish(c)) && !(err = vm_drv_unreserve(c, s))) {
      vm_plan_commit(c, &p);
    } else {
      struct vmem_error why;
      vm_error_save(&why);
      vm_plan_cancel(c, &p);
      vm_error_restore(&why);
    }
  } else if (!(err = vm_plan_run(c, &p, NULL, 0, NULL))) {
    err = vm_drv_unreserve(c, s);
  }
  pthread_mutex_lock(&c->lock);
  s->freeing = false;
  if (!err) space_remove(c, s);
  pthread_mutex_unlock(&c->lock);
  if (!err) vm_space_destroy(s);
out:
  vm_put(c);
  return err;
}

VMEM_API int vmem_range_query(vmem_t vm, uint64_t addr, struct vmem_range_info *info) {
  int err;
  struct vm_ctx *c = vm_get(vm, "vmem_range_query", &err);
  struct vmem_range_info r = {.size = sizeof(r)};
  struct vm_space *s;
  if (!c) return err;
  pthread_mutex_lock(&c->lock);
  s = vm_space_range(c, addr & ~(c->granule - 1), c->granule, c->granule, &err);
  if (s) {
    struct vm_pte *p = vm_pte(c, s, addr);
    uint32_t f = p ? p->flags : 0;
    r.base = s->base;
    r.bytes = s->bytes;
    r.mapped_bytes = s->mapped << c->shift;
    r.segments = s->segments;
    r.run_bytes = vm_space_run(c, s, addr & ~(c->granule - 1), s->bytes);
    r.flags = s->kind | (f & PTE_MAPPED ? VMEM_RANGE_MAPPED : 0) | (f & PTE_READONLY ? VMEM_RANGE_READONLY : 0) |
              (f & PTE_BUSY ? VMEM_RANGE_BUSY : 0) | (f & PTE_QUARANTINED ? VMEM_RANGE_QUARANTINED : 0);
    err = 0;
  }
  pthread_mutex_unlock(&c->lock);
  if (!err) err = vm_copy_out(info, &r, sizeof(r), "vmem_range_info");
  vm_put(c);
  return err;
}

/* ---- handles --------------------------------------------------------------------------------- */

static struct vm_run *add_run(struct vm_ctx *c, struct vm_run *runs, uint32_t *n, struct vm_run r) {
  if (*n && runs[*n - 1].slab == r.slab && runs[*n - 1].unit + runs[*n - 1].n == r.unit) {
    runs[*n - 1].n += r.n;
    return runs;
  }
  if (!(*n & (*n - 1))) { /* capacity: the next power of two */
    struct vm_run *v = vm_realloc(c, runs, *n ? 2 * (size_t)*n : 1, sizeof(*runs));
    if (!v) return NULL;
    runs = v;
  }
  runs[(*n)++] = r;
  return runs;
}

static void put_runs(struct vm_ctx *c, struct vm_run *runs, uint32_t n) {
  for (uint32_t i = 0; i < n; i++) vm_units_put(c, runs[i].slab, runs[i].unit, runs[i].n);
  free(runs);
}

/* Lock held. -ENOMEM with *missing = units that the pool lacks (0: the heap is short). */
static int take_runs(struct vm_ctx *c, struct vm_pool *p, uint64_t units, uint32_t align, struct vm_run **out,
                     uint32_t *nout, uint64_t *missing) {
  struct vm_run *runs = NULL, *v;
  struct vm_place place = {0};
  struct vm_pte left = {0};
  uint32_t n = 0;
  *missing = 0;
  while (units) {
    struct vm_run r = vm_pool_take(c, p, units, align, &place);
    if (!r.n) *missing = units;
    if (!r.n || !(v = add_run(c, runs, &n, r))) {
      if (r.n) vm_units_put(c, r.slab, r.unit, r.n);
      put_runs(c, runs, n);
      return -ENOMEM;
    }
    runs = v;
    units -= r.n;
    left = (struct vm_pte){.slab = r.slab->index, .unit = r.unit + r.n - 1};
    place.left = &left;
  }
  *out = runs;
  *nout = n;
  return 0;
}

static int check_create(struct vm_ctx *c, uint64_t size, struct vmem_create_opts *o) {
  int err;
  if (o->flags & ~VMEM_CREATE_DIRTY || o->reserved)
    return vm_fail(-EINVAL, "bad flags 0x%x or reserved field", o->flags);
  if ((err = vm_page_size(c, &o->page_size))) return err;
  if (!size || size & (o->page_size - 1))
    return vm_fail_at(-EINVAL, 0, size, o->page_size, "size %llu is no positive multiple of the page size %llu",
                      (unsigned long long)size, (unsigned long long)o->page_size);
  return 0;
}

VMEM_API int vMemCreate(vmem_t vm, uint64_t size, const struct vmem_create_opts *opts, vmem_handle *handle) {
  int err;
  struct vm_ctx *c = vm_get(vm, "vMemCreate", &err);
  struct vmem_create_opts o;
  struct vm_pool *pool = NULL;
  if (!c) return err;
  if (!handle) err = vm_fail(-EINVAL, "NULL argument");
  else if (!(err = vm_copy_in(&o, sizeof(o), opts, "vmem_create_opts")) && !(err = check_create(c, size, &o)))
    pool = vm_pool_of(c, o.location, o.device, &err);
  while (pool) {
    uint32_t align = (uint32_t)vm_units(c, o.page_size), n = 0;
    uint64_t missing = 0, units = vm_units(c, size);
    struct vm_run *runs = NULL;
    struct vm_hdl *h;
    pthread_mutex_lock(&c->lock);
    if (pool->free_units < units)
      missing = units - pool->free_units, err = -ENOMEM;
    else
      err = take_runs(c, pool, units, align, &runs, &n, &missing);
    if (!err) {
      if ((h = vm_hdl_new(c, handle))) {
        h->bytes = size;
        h->page_size = o.page_size;
        h->location = o.location;
        h->device = pool->device;
        h->dirty_ok = o.flags & VMEM_CREATE_DIRTY;
        h->runs = runs;
        h->nruns = n;
      } else {
        put_runs(c, runs, n);
        err = -ENOMEM;
      }
    }
    pthread_mutex_unlock(&c->lock);
    if (!err || !missing || (err = vm_pool_grow(c, pool, missing, units, align))) break;
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
    if (h->busy)
      err = vm_fail(-EBUSY, "another call is releasing the handle");
    else
      vm_hdl_drop(c, h);
  }
  pthread_mutex_unlock(&c->lock);
  if (!err) vm_pool_trim(c, c->opts.pool_high);
  vm_put(c);
  return err;
}

VMEM_API int vMemRelease(vmem_t vm, vmem_handle handle) {
  int err;
  struct vm_ctx *c = vm_get(vm, "vMemRelease", &err);
  struct vm_plan p;
  if (!c) return err;
  if (!(err = vm_plan_make_release(c, handle, &p))) err = vm_plan_run(c, &p, NULL, 0, NULL);
  vm_put(c);
  return err;
}

VMEM_API int vmem_retain(vmem_t vm, uint64_t addr, uint64_t bytes, vmem_handle *handle) {
  int err = 0;
  struct vm_ctx *c = vm_get(vm, "vmem_retain", &err);
  struct vm_space *s;
  struct vm_run *runs = NULL;
  struct vm_hdl *h;
  struct vm_pool *pool = NULL;
  uint32_t n = 0;
  if (!c) return err;
  pthread_mutex_lock(&c->lock);
  s = handle ? vm_space_range(c, addr, bytes, c->granule, &err) : NULL;
  if (!handle) err = vm_fail(-EINVAL, "NULL argument");
  for (uint64_t a = addr; s && !err && a < addr + bytes; a += c->granule) {
    struct vm_pte *p = vm_pte(c, s, a);
    struct vm_run *v;
    if (!p || (p->flags & (PTE_MAPPED | PTE_BUSY)) != PTE_MAPPED)
      err = p && p->flags & PTE_BUSY
                ? vm_fail_at(-EBUSY, a, c->granule, 0, "0x%llx is being changed by another call", (unsigned long long)a)
                : vm_fail_at(-EFAULT, a, c->granule, 0, "nothing is mapped at 0x%llx", (unsigned long long)a);
    else if (pool && c->slabs[p->slab]->pool != pool)
      err = vm_fail_at(-EINVAL, a, c->granule, 0, "the pages lie in different locations");
    else if (!(v = add_run(c, runs, &n, (struct vm_run){c->slabs[p->slab], p->unit, 1})))
      err = -ENOMEM;
    else {
      runs = v;
      runs[n - 1].slab->refs[p->unit]++;
      pool = runs[n - 1].slab->pool;
    }
  }
  if (s && !err) {
    if ((h = vm_hdl_new(c, handle))) {
      h->bytes = bytes;
      h->page_size = c->granule;
      h->location = pool->location;
      h->device = pool->device;
      h->runs = runs;
      h->nruns = n;
    } else {
      err = -ENOMEM;
    }
  }
  if (err) put_runs(c, runs, n);
  pthread_mutex_unlock(&c->lock);
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
    r.runs = h->nruns;
    r.mappings = h->mappings;
    r.location = h->location;
    r.device = h->device;
  }
  pthread_mutex_unlock(&c->lock);
  if (!err) err = vm_copy_out(info, &r, sizeof(r), "vmem_handle_info");
  vm_put(c);
  return err;
}

/* ---- mapping --------------------------------------------------------------------------------- */

static int run_ops(struct vm_ctx *c, const struct vmem_op *ops, size_t n) {
  struct vm_plan p;
  int err = vm_plan_make(c, ops, n, &p);
  return err ? err : vm_plan_run(c, &p, NULL, 0, NULL);
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

VMEM_API int vmem_batch(vmem_t vm, const struct vmem_op *ops, size_t n, const struct vmem_after *after, size_t num_after) {
  int err;
  struct vm_ctx *c = vm_get(vm, "vmem_batch", &err);
  struct vm_deps deps;
  struct vm_plan p;
  if (!c) return err;
  if ((n && !ops) || (num_after && !after))
    err = vm_fail(-EINVAL, "NULL argument");
  else if (!(err = vm_deps_make(c, after, num_after, &deps))) {
    if (!(err = vm_plan_make(c, ops, n, &p))) {
      if (!(err = vm_deps_wait(c, &deps))) {
        err = vm_plan_run(c, &p, NULL, 0, NULL);
      } else {
        struct vmem_error why;
        vm_error_save(&why);
        vm_plan_cancel(c, &p);
        vm_error_restore(&why);
      }
    }
    vm_deps_put(c, &deps);
  }
  vm_put(c);
  return err;
}

/* ---- pool ------------------------------------------------------------------------------------ */

VMEM_API int vmem_warm(vmem_t vm, uint64_t bytes) {
  int err = 0;
  struct vm_ctx *c = vm_get(vm, "vmem_warm", &err);
  uint64_t have, units;
  if (!c) return err;
  units = vm_units(c, vm_round_up(bytes, c->granule));
  pthread_mutex_lock(&c->lock);
  have = c->pools[0].free_units;
  pthread_mutex_unlock(&c->lock);
  if (have < units) err = vm_pool_grow(c, &c->pools[0], units - have, 1, 1);
  vm_put(c);
  return err;
}

VMEM_API int vmem_trim(vmem_t vm, uint64_t keep, uint64_t *freed) {
  int err;
  struct vm_ctx *c = vm_get(vm, "vmem_trim", &err);
  uint64_t n;
  if (!c) return err;
  n = vm_pool_trim(c, keep);
  if (freed) *freed = n;
  vm_put(c);
  return 0;
}

VMEM_API int vmem_inject(vmem_t vm, uint32_t kinds, uint64_t skip, uint64_t count, int error) {
  int err = 0;
  struct vm_ctx *c = vm_get(vm, "vmem_inject", &err);
  if (!c) return err;
  if (kinds & ~(VMEM_INJECT_HEAP * 2 - 1) || (count && (!kinds || error <= 0 || error > 4095)))
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
  s.mappings = c->mappings;
  s.pending = c->pending;
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
