/* SPDX-License-Identifier: MIT */
/* Contents: reading, writing, copying, filling; and consolidation of what was mapped page by page. */
#include <string.h>

#include "backend/fills.h"

/* Checks that a range is mapped (and writable) and notes it, so that nobody unmaps it meanwhile. */
static int begin(struct vm_ctx *c, struct vm_access *a, uint64_t addr, uint64_t bytes, bool write) {
  uint64_t first = addr & ~(c->granule - 1), last;
  struct vm_space *s;
  int err = 0;
  if (!bytes || addr + bytes < addr) return vm_fail_at(bytes ? -EOVERFLOW : -EINVAL, addr, bytes, 0, "0x%llx + %llu bytes is no range",
                                                       (unsigned long long)addr, (unsigned long long)bytes);
  last = (addr + bytes - 1) & ~(c->granule - 1);
  pthread_mutex_lock(&c->lock);
  s = vm_space_range(c, first, last - first + c->granule, c->granule, &err);
  for (uint64_t p = first; s && !err && p <= last; p += c->granule) {
    struct vm_pte *pte = vm_pte(c, s, p);
    if (pte && pte->flags & PTE_QUARANTINED)
      err = vm_fail_at(-ENOTRECOVERABLE, p, bytes, 0, "0x%llx is quarantined after a failed undo", (unsigned long long)p);
    else if (pte && pte->flags & PTE_BUSY)
      err = vm_fail_at(-EBUSY, p, bytes, 0, "0x%llx is being changed by another call", (unsigned long long)p);
    else if (!pte || !(pte->flags & PTE_MAPPED))
      err = vm_fail_at(-EFAULT, p, bytes, 0, "nothing is mapped at 0x%llx", (unsigned long long)p);
    else if (write && pte->flags & PTE_READONLY)
      err = vm_fail_at(-EACCES, p, bytes, 0, "0x%llx is mapped read-only", (unsigned long long)p);
  }
  if (!err) {
    *a = (struct vm_access){.addr = addr, .bytes = bytes, .count = 1, .next = c->accesses};
    c->accesses = a;
  }
  pthread_mutex_unlock(&c->lock);
  return err;
}

static void end(struct vm_ctx *c, struct vm_access *a) {
  struct vm_access **link = &c->accesses;
  pthread_mutex_lock(&c->lock);
  while (*link != a) link = &(*link)->next;
  *link = a->next;
  pthread_mutex_unlock(&c->lock);
}

/* Waits for what other batches' fills write in the range, which is noted. */
static int await_fills(struct vm_ctx *c, const struct vm_access *a) {
  uint64_t first = a->addr & ~(c->granule - 1), end = vm_round_up(a->addr + a->bytes, c->granule);
  int err = 0;
  while (!err) {
    struct vm_fill *f;
    pthread_mutex_lock(&c->lock);
    if ((f = vm_space_fill(c, vm_space_find(c, first), first, end - first))) f->refs++;
    pthread_mutex_unlock(&c->lock);
    if (!f) break;
    err = vm_fill_wait(c, f);
  }
  return err;
}

VMEM_API int vmem_read(vmem_t vm, void *dst, uint64_t addr, uint64_t bytes) {
  int err;
  struct vm_ctx *c = vm_get(vm, "vmem_read", &err);
  struct vm_access a;
  if (!c) return err;
  if (!dst)
    err = vm_fail(-EINVAL, "NULL argument");
  else if (!(err = begin(c, &a, addr, bytes, false))) {
    err = await_fills(c, &a);
    if (!err) err = c->be->read(c->bes, dst, addr, bytes);
    end(c, &a);
  }
  vm_put(c);
  return err;
}

VMEM_API int vmem_write(vmem_t vm, uint64_t addr, const void *src, uint64_t bytes) {
  int err;
  struct vm_ctx *c = vm_get(vm, "vmem_write", &err);
  struct vm_access a;
  if (!c) return err;
  if (!src)
    err = vm_fail(-EINVAL, "NULL argument");
  else if (!(err = begin(c, &a, addr, bytes, true))) {
    err = await_fills(c, &a);
    if (!err) err = c->be->write(c->bes, addr, src, bytes);
    end(c, &a);
  }
  vm_put(c);
  return err;
}

VMEM_API int vmem_copy(vmem_t vm, uint64_t dst, uint64_t src, uint64_t bytes) {
  int err;
  struct vm_ctx *c = vm_get(vm, "vmem_copy", &err);
  struct vm_access a, b;
  if (!c) return err;
  if (!(err = begin(c, &a, dst, bytes, true))) {
    if (!(err = begin(c, &b, src, bytes, false))) {
      struct vm_be_copy one = {dst, src, bytes};
      vm_event e = 0;
      if (dst < src + bytes && src < dst + bytes)
        err = vm_fail_at(-EINVAL, dst, bytes, 0, "source and destination overlap");
      else if (!(err = await_fills(c, &a)) && !(err = await_fills(c, &b)) && !(err = vm_drv_copy(c, &one, 1, NULL, 0, &e)))
        err = vm_drv_event_finish(c, e);
      end(c, &b);
    }
    end(c, &a);
  }
  vm_put(c);
  return err;
}

VMEM_API int vmem_fill(vmem_t vm, uint64_t addr, uint64_t bytes, uint8_t value) {
  int err;
  struct vm_ctx *c = vm_get(vm, "vmem_fill", &err);
  struct vm_access a;
  if (!c) return err;
  if (!(err = begin(c, &a, addr, bytes, true))) {
    struct vm_be_range r = {addr, bytes};
    vm_event e = 0;
    err = await_fills(c, &a);
    if (!err) err = vm_drv_fill(c, &r, 1, value, NULL, 0, &e);
    if (!err) err = vm_drv_event_finish(c, e);
    end(c, &a);
  }
  vm_put(c);
  return err;
}

/* ---- consolidation --------------------------------------------------------------------------- */

/* The next run in [*addr, end) that several driver calls have mapped, marked busy: no longer than one call takes,
 * and no page of it is cut. Lock held. */
static uint64_t next_candidate(struct vm_ctx *c, struct vm_space *s, uint64_t *addr, uint64_t end, int *err) {
  uint64_t most = c->info.bind_bytes ? c->info.bind_bytes : end;
  while (*addr < end) {
    uint64_t n = vm_space_run(c, s, *addr, end - *addr < most ? end - *addr : most), calls = 0, page, bytes;
    struct vm_pte *p = vm_pte(c, s, *addr);
    bool cuts = vm_space_cuts_page(c, s, *addr, &page, &bytes);
    if (!cuts && vm_space_cuts_page(c, s, *addr + n, &page, &bytes)) {
      cuts = page == *addr; /* a batch is changing the rest of it */
      n = page - *addr;
    }
    if (cuts) {
      *addr = page + bytes;
      continue;
    }
    if (p && (p->flags & (PTE_MAPPED | PTE_BUSY | PTE_QUARANTINED)) == PTE_MAPPED) {
      for (uint64_t a = *addr + c->granule; a < *addr + n; a += c->granule)
        if (vm_pte(c, s, a)->flags & PTE_CALL) calls++;
      if (calls) {
        if ((*err = vm_check_access(c, *addr, n))) return 0;
        for (uint64_t a = *addr; a < *addr + n; a += c->granule) vm_pte(c, s, a)->flags |= PTE_BUSY;
        s->busy += vm_units(c, n);
        return n;
      }
    }
    *addr += n;
  }
  return 0;
}

static int remap_run(struct vm_ctx *c, struct vm_space *s, uint64_t addr, uint64_t bytes) {
  struct vm_pte *p = vm_pte(c, s, addr);
  struct vm_slab *slab = c->slabs[p->slab];
  struct vm_fill *f;
  uint32_t flags = p->flags & PTE_READONLY ? VMEM_MAP_READONLY : 0, unit = p->unit;
  bool lost = false;
  int err;
  /* A fill of an unfinished batch may be at work here; if it fails, that batch says so. */
  while ((f = vm_space_fill(c, s, addr, bytes))) {
    f->refs++;
    pthread_mutex_unlock(&c->lock);
    VM_UNDO(vm_fill_wait(c, f));
    pthread_mutex_lock(&c->lock);
  }
  pthread_mutex_unlock(&c->lock);
  err = vm_drv_remap(c, addr, bytes, slab, unit, flags);
  if (err) {
    struct vmem_error why;
    vm_error_save(&why);
    /* The range may or may not be unmapped now: unmap what there is, map the run again. */
    vm_drv_unmap(c, addr, bytes, s->kind & VMEM_RANGE_SPARSE);
    lost = vm_drv_map(c, addr, bytes, slab, unit, flags, s->kind & VMEM_RANGE_SPARSE) != 0;
    vm_error_restore(&why);
    if (lost)
      err = vm_fail_at(-ENOTRECOVERABLE, addr, bytes, 0, "0x%llx + %llu bytes is quarantined: it could not be mapped again (%.200s)",
                       (unsigned long long)addr, (unsigned long long)bytes, why.text);
  }
  pthread_mutex_lock(&c->lock);
  if (lost) {
    vm_quarantine(c, s, addr, bytes);
    return err;
  }
  for (uint64_t a = addr; a < addr + bytes; a += c->granule) {
    struct vm_pte *q = vm_pte(c, s, a);
    q->flags &= ~PTE_BUSY;
    vm_set_call(c, q, a == addr);
  }
  s->busy -= vm_units(c, bytes);
  /* The rest of a call that was cut at the end is a call of its own now. */
  p = addr + bytes < s->base + s->bytes ? vm_pte(c, s, addr + bytes) : NULL;
  if (p && p->flags & PTE_MAPPED) vm_set_call(c, p, true);
  return err;
}

VMEM_API int vmem_consolidate(vmem_t vm, uint64_t addr, uint64_t bytes, uint64_t *calls) {
  int err = 0;
  struct vm_ctx *c = vm_get(vm, "vmem_consolidate", &err);
  struct vm_space *s;
  uint64_t made = 0, a = addr, n;
  if (!c) return err;
  pthread_mutex_lock(&c->lock);
  s = vm_space_range(c, addr, bytes, c->granule, &err);
  while (s && !err && c->be->remap && (n = next_candidate(c, s, &a, addr + bytes, &err))) {
    err = remap_run(c, s, a, n);
    made++;
    a += n;
    /* The lock was let go: the reservation may be gone. */
    if (!err && a < addr + bytes) s = vm_space_range(c, a, addr + bytes - a, c->granule, &err);
  }
  pthread_mutex_unlock(&c->lock);
  if (calls) *calls = made;
  vm_put(c);
  return err;
}
