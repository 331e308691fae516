/* SPDX-License-Identifier: MIT */
/*
 * The back end "cuda": CUDA's own virtual memory calls, at the driver's granularity (2 MiB today)
 * and powers of two above it. An allocation can only be mapped whole (cuMemMap accepts no offset),
 * so a slab is one page.
 *
 * CUDA promises nothing about the contents of new memory. The core zeroes a page through a second
 * mapping of its allocation, which lives as long as the page: its addresses and its cuMemMap cost
 * one call each per cuMemCreate.
 */
#include <errno.h>
#include <stdlib.h>

#include "backend/backend.h"
#include "backend/cuda/entries.h"
#include "base/error.h"

struct cuda {
  struct gpu_be base;
  uint64_t granule;
  bool host_pages;
  bool read_only;
  int host_node; /* NUMA node of host pages: the node closest to devices[0] */
};

static struct gpu_alloc_prop prop_for(const struct cuda *c, uint32_t location, uint32_t index) {
  struct gpu_alloc_prop p = {.type = GPU_ALLOCATION_PINNED};
  p.location.type = location == VMEM_HOST ? GPU_LOCATION_HOST_NUMA : GPU_LOCATION_DEVICE;
  p.location.id = location == VMEM_HOST ? c->host_node : c->base.gpu->devices[index].ordinal;
  return p;
}

static int unmap_range(struct cuda *c, uint64_t addr, uint64_t bytes) {
  return gpu_fail_at(c->base.gpu->api, c->base.gpu->api->vmm_unmap(addr, bytes), addr, bytes, "cuMemUnmap");
}

/* Calls cuMemMap and cuMemSetAccess, and undoes the first if the second fails. */
static int map_range(struct cuda *c, uint64_t addr, uint64_t bytes, uint64_t slab, uint64_t offset, int prot) {
  const struct gpu_api *api = c->base.gpu->api;
  struct gpu_access access[VMEM_MAX_DEVICES];
  gpu_result r, undo;
  for (uint32_t i = 0; i < c->base.gpu->num_devices; i++)
    access[i] = (struct gpu_access){{GPU_LOCATION_DEVICE, c->base.gpu->devices[i].ordinal}, prot};
  r = api->vmm_map(addr, bytes, offset, slab, 0);
  if (r != GPU_SUCCESS) return gpu_fail_at(api, r, addr, bytes, "cuMemMap");
  r = api->vmm_access(addr, bytes, access, c->base.gpu->num_devices);
  if (r == GPU_SUCCESS) return 0;
  undo = api->vmm_unmap(addr, bytes);
  if (undo != GPU_SUCCESS) {
    gpu_fail_at(api, undo, addr, bytes, "cuMemSetAccess failed, and cuMemUnmap could not undo cuMemMap");
    return vm_fail_at(-ENOTRECOVERABLE, addr, bytes, 0,
                      "cuMemSetAccess failed, and cuMemUnmap could not undo cuMemMap");
  }
  return gpu_fail_at(api, r, addr, bytes, "cuMemSetAccess");
}

static int cuda_map(void *be, uint64_t addr, uint64_t bytes, uint64_t slab, uint64_t offset, uint32_t flags,
                    bool sparse) {
  struct cuda *c = be;
  struct gpu_scope scope;
  bool ro = flags & VMEM_MAP_READONLY;
  int err;
  if (sparse || (ro && !c->read_only))
    return vm_fail(-EOPNOTSUPP, "cuda has no %s mappings", sparse ? "sparse" : "read-only");
  err = gpu_enter(c->base.gpu, 0, &scope);
  if (err) return err;
  err = map_range(c, addr, bytes, slab, offset, ro ? GPU_PROT_READ : GPU_PROT_READWRITE);
  gpu_leave(c->base.gpu, &scope);
  return err;
}

static int cuda_unmap(void *be, uint64_t addr, uint64_t bytes, bool sparse) {
  struct cuda *c = be;
  struct gpu_scope scope;
  int err = gpu_enter(c->base.gpu, 0, &scope);
  (void)sparse;
  if (err) return err;
  err = unmap_range(c, addr, bytes);
  gpu_leave(c->base.gpu, &scope);
  return err;
}

static int cuda_reserve(void *be, uint64_t bytes, uint64_t align, uint32_t flags, uint64_t *addr, uint32_t *kind,
                        uint64_t *priv) {
  struct cuda *c = be;
  struct gpu_scope scope;
  gpu_ptr p = 0;
  gpu_result r;
  int err;
  if (flags & VMEM_RESERVE_SPARSE) return vm_fail(-EOPNOTSUPP, "cuda has no sparse reservations");
  err = gpu_enter(c->base.gpu, 0, &scope);
  if (err) return err;
  r = c->base.gpu->api->va_reserve(&p, bytes, align, 0, 0);
  gpu_leave(c->base.gpu, &scope);
  if (r != GPU_SUCCESS) return gpu_fail_at(c->base.gpu->api, r, 0, bytes, "cuMemAddressReserve");
  *addr = p;
  *kind = VMEM_RANGE_VISIBLE;
  *priv = 0;
  return 0;
}

static int cuda_unreserve(void *be, uint64_t addr, uint64_t bytes, uint64_t priv, bool *gone) {
  struct cuda *c = be;
  struct gpu_scope scope;
  gpu_result r;
  int err = gpu_enter(c->base.gpu, 0, &scope);
  (void)priv;
  (void)gone;
  if (err) return err;
  r = c->base.gpu->api->va_free(addr, bytes);
  gpu_leave(c->base.gpu, &scope);
  return gpu_fail_at(c->base.gpu->api, r, addr, bytes, "cuMemAddressFree");
}

static int cuda_slab_create(void *be, uint64_t bytes, uint64_t page_size, uint32_t location, int32_t device,
                            uint64_t *slab) {
  struct cuda *c = be;
  struct gpu_alloc_prop prop;
  unsigned long long handle = 0;
  struct gpu_scope scope;
  uint32_t index = 0;
  gpu_result r;
  int err;
  (void)page_size;
  if (location == VMEM_HOST && !c->host_pages)
    return vm_fail(-EOPNOTSUPP, "cuMemCreate of this CUDA driver does not support host memory");
  if (location == VMEM_PEER) {
    err = gpu_find(c->base.gpu, device, &index);
    if (err) return err;
  }
  err = gpu_enter(c->base.gpu, index, &scope);
  if (err) return err;
  prop = prop_for(c, location, index);
  r = c->base.gpu->api->vmm_create(&handle, bytes, &prop, 0);
  gpu_leave(c->base.gpu, &scope);
  if (r != GPU_SUCCESS) return gpu_fail_at(c->base.gpu->api, r, 0, bytes, "cuMemCreate");
  *slab = handle;
  return 0;
}

static int cuda_slab_destroy(void *be, uint64_t slab, uint64_t bytes) {
  struct cuda *c = be;
  struct gpu_scope scope;
  gpu_result r;
  int err = gpu_enter(c->base.gpu, 0, &scope);
  if (err) return err;
  r = c->base.gpu->api->vmm_release(slab);
  gpu_leave(c->base.gpu, &scope);
  return gpu_fail_at(c->base.gpu->api, r, 0, bytes, "cuMemRelease");
}

/* Tests whether cuMemSetAccess accepts read-only for device memory: some drivers refuse it. */
static bool try_read_only(struct cuda *c) {
  uint64_t addr = 0, slab = 0, priv;
  uint32_t kind;
  bool works = false, gone;
  if (cuda_reserve(c, c->granule, 0, 0, &addr, &kind, &priv)) return false;
  if (!cuda_slab_create(c, c->granule, c->granule, VMEM_DEVICE, 0, &slab)) {
    works = !map_range(c, addr, c->granule, slab, 0, GPU_PROT_READ);
    if (works) unmap_range(c, addr, c->granule);
    cuda_slab_destroy(c, slab, c->granule);
  }
  cuda_unreserve(c, addr, c->granule, 0, &gone);
  return works;
}

static int find_granule(struct cuda *c) {
  const struct gpu_api *api = c->base.gpu->api;
  struct gpu_alloc_prop p;
  size_t g = 0;
  int node = 0;
  for (uint32_t i = 0; i < c->base.gpu->num_devices; i++) {
    const struct gpu_device *d = &c->base.gpu->devices[i];
    gpu_result r;
    int vmm = 0;
    if (api->device_attribute(&vmm, GPU_ATTR_VMM_SUPPORTED, d->dev) != GPU_SUCCESS || !vmm)
      return vm_fail(-ENODEV, "device %d (%s) does not support CUDA's virtual memory management", d->ordinal, d->name);
    p = prop_for(c, VMEM_PEER, i);
    r = api->vmm_granularity(&g, &p, GPU_GRANULARITY_MINIMUM);
    if (r != GPU_SUCCESS) return gpu_fail(api, r, "cuMemGetAllocationGranularity");
    if (g > c->granule) c->granule = g;
  }
  if (api->device_attribute(&node, GPU_ATTR_HOST_NUMA_ID, c->base.gpu->devices[0].dev) == GPU_SUCCESS && node >= 0)
    c->host_node = node;
  p = prop_for(c, VMEM_HOST, 0);
  c->host_pages = api->vmm_granularity(&g, &p, GPU_GRANULARITY_MINIMUM) == GPU_SUCCESS && g && g <= c->granule;
  return 0;
}

static void cuda_close(void *be) {
  struct cuda *c = be;
  gpu_close(c->base.gpu);
  free(c);
}

static int cuda_open(const struct vmem_open_opts *opts, struct vm_be_info *info, void **be) {
  struct gpu_scope scope;
  struct cuda *c = calloc(1, sizeof(*c));
  struct vmem_error before;
  int err;
  vm_error_save(&before); /* the attempts below may record errors that do not concern the caller */
  if (!c) return vm_fail(-ENOMEM, "heap: %zu bytes", sizeof(*c));
  err = gpu_open(opts->devices, opts->num_devices, &c->base.gpu);
  if (err) {
    free(c);
    return err;
  }
  if (c->base.gpu->num_devices > 1) err = gpu_enable_peers(c->base.gpu);
  if (!err) err = gpu_enter(c->base.gpu, 0, &scope);
  if (!err) {
    err = find_granule(c);
    if (!err) c->read_only = try_read_only(c);
    gpu_leave(c->base.gpu, &scope);
  }
  if (!err && opts->granule && opts->granule < c->granule)
    err = vm_fail_at(-EOPNOTSUPP, 0, opts->granule, c->granule,
                     "granule of %llu bytes: cuMemCreate requires at least %llu", (unsigned long long)opts->granule,
                     (unsigned long long)c->granule);
  if (err) {
    cuda_close(c);
    return err;
  }
  if (opts->granule) c->granule = opts->granule;
  gpu_describe(c->base.gpu, &info->pub);
  gpu_driver_text(c->base.gpu, info->pub.driver, sizeof(info->pub.driver));
  info->pub.caps = VMEM_CAP_ALIAS | VMEM_CAP_VISIBLE | (c->read_only ? VMEM_CAP_READONLY : 0) |
                   (c->host_pages ? VMEM_CAP_HOST_PAGES : 0) | (c->base.gpu->num_devices > 1 ? VMEM_CAP_PEER : 0);
  info->pub.granule = c->granule;
  for (uint64_t size = c->granule; size <= 1ull << 30; size <<= 1) info->pub.page_sizes |= size;
  info->pub.slab_size = c->granule;
  info->pool_high = 1ull << 30;
  info->pool_delay = VM_POOL_DELAY;
  info->fresh_is_zero = false; /* CUDA does not guarantee that new memory is zero */
  info->one_page_slabs = true;
  info->how = " with cuMemMap";
  info->unreserve_unmaps = false;
  vm_error_restore(&before);
  *be = c;
  return 0;
}

const struct vm_backend vm_backend_cuda = {
    .name = "cuda",
    .open = cuda_open,
    .close = cuda_close,
    .reserve = cuda_reserve,
    .unreserve = cuda_unreserve,
    .slab_create = cuda_slab_create,
    .slab_destroy = cuda_slab_destroy,
    .map = cuda_map,
    .unmap = cuda_unmap,
    GPU_BE_ENTRIES,
};
