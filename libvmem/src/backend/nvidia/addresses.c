/* SPDX-License-Identifier: MIT */
/*
 * Addresses for reservations. The driver accepts any addresses at which UVM has no range.
 *
 * Plain: addresses that the kernel reserved for this process without access. Kernels accept them;
 * cuMemcpy and cuMemset refuse them, because CUDA never handed them out.
 *
 * Visible: addresses from cuMemAllocManaged, so CUDA knows them. Nothing is ever populated: an
 * inaccessible mapping replaces CUDA's right away, which makes UVM drop its managed range, and the
 * reservation takes its place.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "backend/nvidia/nvidia.h"
#include "base/error.h"

int nvidia_host_range(uint64_t bytes, uint64_t align, uint64_t *addr) {
  uint64_t whole = bytes + align, start, first;
  void *p;
  if (whole < bytes) return vm_fail_at(-ENOMEM, 0, bytes, 0, "no room for the reservation in the address space");
  p = mmap(NULL, whole, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (p == MAP_FAILED)
    return vm_fail_at(-ENOMEM, 0, bytes, 0, "no room for the reservation in the address space: %s", strerror(errno));
  start = (uint64_t)(uintptr_t)p;
  first = (start + align - 1) & ~(align - 1);
  if (first > start) munmap(p, first - start);
  if (start + whole > first + bytes) munmap((void *)(uintptr_t)(first + bytes), start + whole - first - bytes);
  *addr = first;
  return 0;
}

static int plain_get(uint64_t bytes, uint64_t align, struct nvidia_range *r) {
  int err = nvidia_host_range(bytes, align, &r->base);
  r->bytes = bytes;
  r->addr = r->base;
  return err;
}

static void plain_put(const struct nvidia_range *r) { munmap((void *)(uintptr_t)r->base, r->bytes); }

/* Charges `bytes` to this context's budget for visible reservations: the device's free memory, with our own slabs
 * counted as free, since they are what will be mapped there. Other contexts and libraries in the process have their
 * own budgets. */
static int visible_charge(struct nvidia *s, uint64_t bytes, bool force) {
  uint64_t free_bytes, total, limit;
  int err = gpu_mem_info(s->base.gpu, VMEM_DEVICE, 0, &free_bytes, &total);
  if (err) return err;
  pthread_mutex_lock(&s->va_lock);
  limit = free_bytes + atomic_load(&s->device_slab_bytes);
  if (!force && (bytes > limit || s->visible_bytes > limit - bytes))
    err = vm_fail_at(-ENOSPC, 0, bytes, limit,
                     "visible reservations of %llu + %llu bytes exceed the card's free memory (%llu); a "
                     "plain reservation has no such limit",
                     (unsigned long long)s->visible_bytes, (unsigned long long)bytes, (unsigned long long)limit);
  else
    s->visible_bytes += bytes;
  pthread_mutex_unlock(&s->va_lock);
  return err;
}

static void visible_uncharge(struct nvidia *s, uint64_t bytes) {
  pthread_mutex_lock(&s->va_lock);
  s->visible_bytes -= bytes;
  pthread_mutex_unlock(&s->va_lock);
}

static int managed_alloc(struct nvidia *s, uint64_t bytes, uint64_t *base) {
  const struct gpu *g = s->base.gpu;
  struct gpu_scope scope;
  gpu_ptr p = 0;
  gpu_result r;
  int err = gpu_enter(g, 0, &scope);
  if (err) return err;
  r = g->api->managed_alloc(&p, bytes, GPU_MEM_ATTACH_GLOBAL);
  gpu_leave(g, &scope);
  *base = p;
  return gpu_fail_at(g->api, r, 0, bytes, "cuMemAllocManaged");
}

static int managed_free(struct nvidia *s, uint64_t base, uint64_t bytes) {
  const struct gpu *g = s->base.gpu;
  struct gpu_scope scope;
  gpu_result r;
  int err = gpu_enter(g, 0, &scope);
  if (err) return err;
  r = g->api->mem_free(base);
  gpu_leave(g, &scope);
  return gpu_fail_at(g->api, r, base, bytes, "cuMemFree");
}

/* Restores CUDA's own mapping for cuMemFree. If that fails the addresses remain an inaccessible mapping of this
 * process, which cuMemFree accepts too. */
static int managed_restore(struct nvidia *s, uint64_t base, uint64_t bytes) {
  void *want = (void *)(uintptr_t)base;
  (void)!mmap(want, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, s->uvm_fd, (off_t)base);
  return managed_free(s, base, bytes);
}

static int visible_get(struct nvidia *s, uint64_t bytes, uint64_t align, bool force, struct nvidia_range *r) {
  uint64_t whole = (bytes + NVIDIA_VA_ALIGN - 1) & ~(uint64_t)(NVIDIA_VA_ALIGN - 1);
  void *want, *p;
  int err;

  if (align > NVIDIA_VA_ALIGN) whole += align - NVIDIA_VA_ALIGN;
  if (whole < bytes) return vm_fail_at(-ENOMEM, 0, bytes, 0, "no room for the reservation in the address space");
  err = visible_charge(s, whole, force);
  if (err) return err;
  err = managed_alloc(s, whole, &r->base);
  if (err) {
    visible_uncharge(s, whole);
    return err;
  }
  r->bytes = whole;
  r->addr = (r->base + align - 1) & ~(align - 1);
  r->visible = true;
  if (r->addr + bytes > r->base + whole) {
    managed_free(s, r->base, whole);
    visible_uncharge(s, whole);
    return vm_fail_at(-EIO, r->base, whole, align, "cuMemAllocManaged gave an unaligned address");
  }
  want = (void *)(uintptr_t)r->base;
  p = mmap(want, whole, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
  if (p == want) return 0;
  err = vm_fail_at(-ENOMEM, r->base, whole, 0, "mmap over managed memory: %s", strerror(errno));
  managed_free(s, r->base, whole);
  visible_uncharge(s, whole);
  return err;
}

/* Gives addresses back. For a visible range cuMemFree waits until the device is idle. */
static int give_back(struct nvidia *s, const struct nvidia_range *r) {
  int err;
  if (!r->visible) {
    plain_put(r);
    return 0;
  }
  err = managed_restore(s, r->base, r->bytes);
  if (!err) visible_uncharge(s, r->bytes);
  return err;
}

static int get_any(struct nvidia *s, uint64_t bytes, uint64_t align, uint32_t flags, struct nvidia_range *r) {
  struct vmem_error before;
  int err;

  if (flags & VMEM_RESERVE_PLAIN) return plain_get(bytes, align, r);
  vm_error_save(&before);
  err = visible_get(s, bytes, align, flags & VMEM_RESERVE_FORCE, r);
  if (!err || (flags & (VMEM_RESERVE_VISIBLE | VMEM_RESERVE_FORCE))) return err;
  vm_error_restore(&before);
  return plain_get(bytes, align, r);
}

static void range_link(struct nvidia *s, struct nvidia_range *r) {
  pthread_mutex_lock(&s->va_lock);
  r->next = s->ranges;
  r->at = &s->ranges;
  if (r->next) r->next->at = &r->next;
  s->ranges = r;
  pthread_mutex_unlock(&s->va_lock);
}

static void range_unlink(struct nvidia *s, struct nvidia_range *r) {
  pthread_mutex_lock(&s->va_lock);
  *r->at = r->next;
  if (r->next) r->next->at = r->at;
  pthread_mutex_unlock(&s->va_lock);
}

void nvidia_forget_ranges(struct nvidia *s) {
  while (s->ranges) {
    struct nvidia_range *r = s->ranges;
    s->ranges = r->next;
    free(r);
  }
}

struct nvidia_range *nvidia_range_at(struct nvidia *s, uint64_t addr) {
  struct nvidia_range *r;
  pthread_mutex_lock(&s->va_lock);
  for (r = s->ranges; r && addr - r->addr >= r->length; r = r->next) {
  }
  pthread_mutex_unlock(&s->va_lock);
  return r;
}

int nvidia_addresses_get(struct nvidia *s, uint64_t bytes, uint64_t align, uint32_t flags, struct nvidia_range **out) {
  struct nvidia_range *r = calloc(1, sizeof(*r));
  int err;

  if (!r) return vm_fail(-ENOMEM, "heap: %zu bytes", sizeof(*r));
  if (align < NVIDIA_VA_ALIGN) align = NVIDIA_VA_ALIGN;
  err = get_any(s, bytes, align, flags, r);
  if (err) {
    free(r);
    return err;
  }
  r->length = bytes;
  range_link(s, r);
  *out = r;
  return 0;
}

int nvidia_addresses_put(struct nvidia *s, struct nvidia_range *r) {
  int err = give_back(s, r);
  if (err) return err;
  range_unlink(s, r);
  free(r);
  return 0;
}
