/* SPDX-License-Identifier: MIT */
/* Reservations, and queries about an address. */
#include <string.h>

#include "api/api.h"
#include "base/probe.h"

static int check_reserve(struct vm_ctx *c, uint64_t size, struct vmem_reserve_opts *o) {
  const uint32_t both = VMEM_RESERVE_VISIBLE | VMEM_RESERVE_PLAIN;
  const uint32_t known = both | VMEM_RESERVE_SPARSE | VMEM_RESERVE_FORCE | VMEM_RESERVE_LARGE;
  uint64_t least = c->granule > 2u << 20 ? c->granule : 2u << 20;
  if (!size || size & (c->granule - 1))
    return vm_fail_at(-EINVAL, 0, size, c->granule, "size %llu is not a positive multiple of the granule %llu",
                      (unsigned long long)size, (unsigned long long)c->granule);
  if (size > 1ull << 56)
    return vm_fail_at(-ENOMEM, 0, size, 1ull << 56, "%llu bytes exceed any address space", (unsigned long long)size);
  if (o->flags & ~known || o->reserved || (o->flags & both) == both)
    return vm_fail(-EINVAL, "bad flags 0x%x or reserved field", o->flags);
  if (!o->align) o->align = least;
  if (!vm_is_pow2(o->align) || o->align > 1ull << 46)
    return vm_fail_at(-EINVAL, 0, o->align, 0, "alignment %llu is not a power of two up to 64 TiB",
                      (unsigned long long)o->align);
  if (o->align < c->granule) o->align = c->granule;
  if ((o->flags & VMEM_RESERVE_SPARSE) && !(c->info->pub.caps & VMEM_CAP_SPARSE))
    return vm_fail(-EOPNOTSUPP, "back end %s has no sparse reservations", c->be->name);
  if ((o->flags & VMEM_RESERVE_VISIBLE) && !(c->info->pub.caps & VMEM_CAP_VISIBLE))
    return vm_fail(-EOPNOTSUPP, "back end %s has no visible reservations", c->be->name);
  if ((o->flags & VMEM_RESERVE_PLAIN) && !(c->info->pub.caps & VMEM_CAP_PLAIN))
    return vm_fail(-EOPNOTSUPP, "back end %s has no plain reservations", c->be->name);
  return 0;
}

/* Inserts a new space. If the driver has released the same addresses, but another thread has yet to remove their old
 * space, waits until it is removed, so that spaces never overlap. Lock held. */
static int enter(struct vm_ctx *c, struct vm_space *s) {
  struct vm_space *old;
  while ((old = vm_space_overlap(c, s->base, s->bytes)) && old->freeing) pthread_cond_wait(&c->done_cond, &c->lock);
  if (c->closing) return vm_fail(-EBADF, "the context is being closed");
  if (old)
    return vm_fail_at(
        -EIO, s->base, s->bytes, old->base,
        "the system reused addresses of the reservation at 0x%llx: something other than vMemFree has unmapped it",
        (unsigned long long)old->base);
  return vm_space_insert(c, s);
}

VMEM_API int vMemReserve(vmem_t vm, uint64_t size, const struct vmem_reserve_opts *opts, uint64_t *addr) {
  int err;
  struct vm_ctx *c = vm_get(vm, "vMemReserve", &err);
  struct vmem_reserve_opts o;
  struct vm_space *s = NULL;
  uint64_t base = 0; /* copied: once `s` is visible, another thread may free the reservation and `s` */
  bool gone;
  if (!c) return err;
  if (!addr)
    err = vm_fail(-EINVAL, "NULL argument");
  else if (!(err = vm_copy_in(&o, sizeof(o), opts, "vmem_reserve_opts")))
    err = check_reserve(c, size, &o);
  if (err) goto out;
  err = -ENOMEM;
  if (!(s = vm_space_new(c, size))) goto out;
  if ((err = vm_drv_reserve(c, size, o.align, o.flags, &s->base, &s->kind, &s->priv))) goto out;
  s->large = !c->be->bind || ((o.flags & VMEM_RESERVE_LARGE || c->large_entries) && !vm_is_sparse(s));
  base = s->base;
  pthread_mutex_lock(&c->lock);
  err = enter(c, s);
  pthread_mutex_unlock(&c->lock);
  if (err)
    VM_UNDO(vm_drv_unreserve(c, s->base, s->bytes, s->priv, &gone));
  else
    *addr = base;
out:
  VM_PROBE4(reserve, c, err ? 0 : base, size, err);
  if (err && s) vm_space_destroy(s);
  vm_put(c);
  return err;
}

static int check_free(struct vm_ctx *c, struct vm_space *s, uint64_t addr, uint32_t flags) {
  unsigned long long base;
  if (!s) return vm_fail_at(-ENXIO, addr, 0, 0, "0x%llx is not inside a reservation", (unsigned long long)addr);
  base = s->base;
  if (s->base != addr)
    return vm_fail_at(-EINVAL, addr, 0, s->base, "0x%llx is not the start of the reservation at 0x%llx",
                      (unsigned long long)addr, base);
  if (s->quarantined)
    return vm_fail_at(-ENOTRECOVERABLE, addr, s->quarantined << c->shift, 0,
                      "the reservation at 0x%llx holds quarantined pages", base);
  if (s->freeing || s->busy)
    return vm_fail_at(-EBUSY, addr, s->busy << c->shift, 0,
                      "the reservation at 0x%llx is being changed by another call", base);
  for (struct vm_access *a = c->virt->accesses; a; a = a->next)
    if (a->addr >= s->base && a->addr < s->base + s->bytes)
      return vm_fail_at(-EBUSY, a->addr, a->bytes, 0, "the reservation at 0x%llx is being read or written", base);
  if (s->mapped && !(flags & VMEM_FREE_UNMAP))
    return vm_fail_at(-EBUSY, addr, s->mapped << c->shift, 0,
                      "%llu bytes are still mapped in the reservation at 0x%llx",
                      (unsigned long long)(s->mapped << c->shift), base);
  return 0;
}

/* Marks all mappings of a space as being unmapped, and the space as being freed. */
static int free_begin(struct vm_ctx *c, uint64_t addr, uint32_t flags, struct vm_plan *p, struct vm_space **out) {
  struct vm_space *s;
  int err;
  memset(p, 0, sizeof(*p));
  pthread_mutex_lock(&c->lock);
  s = vm_space_find(c, addr);
  if (!(err = check_free(c, s, addr, flags)) && !(err = vm_plan_make_free(c, s, p))) s->freeing = true;
  *out = s;
  pthread_mutex_unlock(&c->lock);
  return err;
}

VMEM_API int vMemFree(vmem_t vm, uint64_t addr, uint32_t flags) {
  int err;
  struct vm_ctx *c = vm_get(vm, "vMemFree", &err);
  struct vm_space *s = NULL;
  struct vm_plan p;
  struct vmem_error why;
  bool gone = false;
  if (!c) return err;
  if (flags & ~VMEM_FREE_UNMAP)
    err = vm_fail(-EINVAL, "unknown flags 0x%x", flags & ~VMEM_FREE_UNMAP);
  else
    err = free_begin(c, addr, flags, &p, &s);
  if (vm_recount(c, err)) err = free_begin(c, addr, flags, &p, &s);
  if (err) goto out;
  if (c->info->unreserve_unmaps || !p.unmaps.n) { /* unreserve will unmap everything, or nothing is mapped */
    if (!(err = vm_plan_await_fills(c, &p))) err = vm_drv_unreserve(c, s->base, s->bytes, s->priv, &gone);
    vm_error_save(&why);
    if (err && !gone)
      vm_plan_cancel(c, &p);
    else
      vm_plan_commit(c, &p);
    if (err) vm_error_restore(&why);
  } else if (!(err = vm_plan_run_now(c, &p))) {
    err = vm_drv_unreserve(c, s->base, s->bytes, s->priv, &gone);
  }
  pthread_mutex_lock(&c->lock);
  s->freeing = false;
  s->gone |= gone;
  if (!err) vm_space_remove(c, s);
  pthread_cond_broadcast(&c->done_cond);
  pthread_mutex_unlock(&c->lock);
  if (!err) vm_space_destroy(s);
out:
  VM_PROBE3(free, c, addr, err);
  vm_put(c);
  return err;
}

/* True if the address is in a block that is mapped and unmapped as a whole. */
static bool in_block(struct vm_ctx *c, struct vm_space *s, uint64_t addr) {
  uint64_t page, bytes;
  return c->large_pages && vm_space_cuts_page(c, s, (addr & ~(LARGE_PAGE - 1)) + c->granule, &page, &bytes);
}

/* The size of the page-table entry: 4 KiB, 64 KiB or 2 MiB. */
static uint64_t entry_bytes(const struct vm_ctx *c, const struct vm_space *s, bool block) {
  if (c->granule >= LARGE_PAGE || (block && s->large)) return LARGE_PAGE;
  return c->granule >= 64u << 10 ? 64u << 10 : 4u << 10;
}

VMEM_API int vmem_range_query(vmem_t vm, uint64_t addr, struct vmem_range_info *info) {
  int err;
  struct vm_ctx *c = vm_get(vm, "vmem_range_query", &err);
  struct vmem_range_info r = {.size = sizeof(r)};
  struct vm_space *s;
  if (!c) return err;
  pthread_mutex_lock(&c->lock);
  s = vm_space_find(c, addr);
  if (!s || !s->gone) s = vm_space_range(c, addr & ~(c->granule - 1), c->granule, c->granule, &err);
  if (s) {
    struct vm_pte *p = vm_pte(c, s, addr);
    uint32_t f = p ? p->flags : 0;
    bool block = in_block(c, s, addr);
    r.base = s->base;
    r.bytes = s->bytes;
    r.mapped_bytes = s->mapped << c->shift;
    r.segments = s->segments;
    r.run_bytes = vm_space_run(c, s, addr & ~(c->granule - 1), s->bytes);
    r.flags = s->kind | (f & PTE_MAPPED ? VMEM_RANGE_MAPPED : 0) | (f & PTE_READONLY ? VMEM_RANGE_READONLY : 0) |
              (block && c->phys->slabs[p->slab]->pool->large ? VMEM_RANGE_LARGE : 0) |
              (f & PTE_BUSY ? VMEM_RANGE_BUSY : 0) | (f & PTE_QUARANTINED ? VMEM_RANGE_QUARANTINED : 0);
    if (f & PTE_MAPPED) r.entry_bytes = entry_bytes(c, s, block);
    err = 0;
  }
  pthread_mutex_unlock(&c->lock);
  if (!err) err = vm_copy_out(info, &r, sizeof(r), "vmem_range_info");
  vm_put(c);
  return err;
}
