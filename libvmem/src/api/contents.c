/* SPDX-License-Identifier: MIT */
/* Contents: reading, writing, copying, filling. */
#include "api/api.h"

/* Checks that a range is mapped (and writable) and registers the access, which keeps the range from being unmapped. */
static int begin(struct vm_ctx *c, struct vm_access *a, uint64_t addr, uint64_t bytes, bool write) {
  uint64_t first = addr & ~(c->granule - 1), last;
  struct vm_space *s;
  int err = 0;
  if (!bytes || addr + bytes < addr)
    return vm_fail_at(bytes ? -EOVERFLOW : -EINVAL, addr, bytes, 0, "0x%llx + %llu bytes is not a range",
                      (unsigned long long)addr, (unsigned long long)bytes);
  last = (addr + bytes - 1) & ~(c->granule - 1);
  pthread_mutex_lock(&c->lock);
  s = vm_space_range(c, first, last - first + c->granule, c->granule, &err);
  for (uint64_t p = first; s && !err && p <= last; p += c->granule) {
    const struct vm_pte *pte = vm_pte(c, s, p);
    if (!vm_pte_is_live(pte))
      err = vm_pte_not_live(c, pte, p);
    else if (write && pte->flags & PTE_READONLY)
      err = vm_fail_at(-EACCES, p, bytes, 0, "0x%llx is mapped read-only", (unsigned long long)p);
  }
  if (!err) {
    *a = (struct vm_access){.addr = addr, .bytes = bytes, .count = 1};
    vm_access_begin(c, a);
  }
  pthread_mutex_unlock(&c->lock);
  return err;
}

static void end(struct vm_ctx *c, struct vm_access *a) {
  pthread_mutex_lock(&c->lock);
  vm_access_end(c, a);
  pthread_mutex_unlock(&c->lock);
}

/* Waits for other batches' fills that write to the registered range. */
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

/* Reads into dst, or writes from src. */
static int transfer(vmem_t vm, const char *op, uint64_t addr, uint64_t bytes, void *dst, const void *src, bool write) {
  int err;
  struct vm_ctx *c = vm_get(vm, op, &err);
  struct vm_access a;
  if (!c) return err;
  if (write ? !src : !dst)
    err = vm_fail(-EINVAL, "NULL argument");
  else if (!(err = begin(c, &a, addr, bytes, write))) {
    err = await_fills(c, &a);
    if (!err) err = write ? c->be->write(c->bes, addr, src, bytes) : c->be->read(c->bes, dst, addr, bytes);
    end(c, &a);
  }
  vm_put(c);
  return err;
}

VMEM_API int vmem_read(vmem_t vm, void *dst, uint64_t addr, uint64_t bytes) {
  return transfer(vm, "vmem_read", addr, bytes, dst, NULL, false);
}

VMEM_API int vmem_write(vmem_t vm, uint64_t addr, const void *src, uint64_t bytes) {
  return transfer(vm, "vmem_write", addr, bytes, NULL, src, true);
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
      else if (!(err = await_fills(c, &a)) && !(err = await_fills(c, &b)) &&
               !(err = vm_drv_copy(c, &one, 1, NULL, 0, &e)))
        err = vm_drv_event_finish(c, &e);
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
    if (!err) err = vm_drv_fill(c, VMEM_INJECT_FILL, &r, 1, value, NULL, 0, &e);
    if (!err) err = vm_drv_event_finish(c, &e);
    end(c, &a);
  }
  vm_put(c);
  return err;
}
