/* SPDX-License-Identifier: MIT */
/* Physical memory from the resource manager, and its mappings. */
#include <errno.h>
#include <string.h>

#include "backend/stock/stock.h"
#include "base/error.h"

/* A slab's number: RM object in the low half, index of the parent device in the high half. */
uint32_t stock_slab_object(uint64_t slab) { return (uint32_t)slab; }

/*
 * RM's page size for a slab. UVM gives a mapping the largest page-table entries that the slab's
 * page size, the address, the offset and the length allow, and later refuses to cut a mapping
 * inside an entry. The core requests pages of 2 MiB only if it tracks the entries: for large pages,
 * and for all slabs with VMEM_OPEN_LARGE_ENTRIES. Otherwise it may cut a run at any granule.
 */
static uint64_t rm_page_size(const struct nvidia *s, uint64_t bytes, uint64_t page_size) {
  if (page_size >= 2 << 20 && bytes % (2 << 20) == 0) return 2 << 20;
  return s->granule >= 64 << 10 && bytes % (64 << 10) == 0 ? 64 << 10 : 4 << 10;
}

int stock_slab_create(void *be, uint64_t bytes, uint64_t page_size, uint32_t location, int32_t device, uint64_t *slab) {
  struct nvidia *s = be;
  struct nv_memory_params p = {.owner = s->rm.client,
                               .flags = NVOS32_ALIGNMENT_FORCE | NVOS32_MAP_NOT_REQUIRED,
                               .attr = NVOS32_ATTR_ALLOW_NONCONTIGUOUS,
                               .size = bytes};
  uint32_t class_id = NV01_MEMORY_LOCAL_USER, index = 0, object;
  int err;
  if (location == VMEM_PEER) {
    err = gpu_find(s->base.gpu, device, &index);
    if (err) return err;
  }
  p.alignment = rm_page_size(s, bytes, page_size);
  if (p.alignment == 2 << 20) {
    p.attr |= NVOS32_ATTR_PAGES_HUGE;
    p.attr2 |= NVOS32_ATTR2_HUGE_2MB;
  } else {
    p.attr |= p.alignment == 64 << 10 ? NVOS32_ATTR_PAGES_BIG : NVOS32_ATTR_PAGES_4K;
  }
  if (location == VMEM_HOST) {
    class_id = NV01_MEMORY_SYSTEM;
    p.attr |= NVOS32_ATTR_LOCATION_PCI | NVOS32_ATTR_COHERENCY_CACHED;
  }
  err = rm_alloc(&s->rm, s->devices[index].object, class_id, &p, s->rm.abi.memparams_bytes, &object,
                 location == VMEM_HOST ? "RM allocation of host memory" : "RM allocation of video memory");
  if (err) {
    struct vmem_error why;
    vm_error_save(&why);
    why.bytes = bytes;
    vm_error_restore(&why);
    return err;
  }
  if (index == 0 && location != VMEM_HOST) atomic_fetch_add(&s->device_slab_bytes, bytes);
  *slab = (uint64_t)(location == VMEM_HOST ? VMEM_MAX_DEVICES : index) << 32 | object;
  return 0;
}

int stock_slab_destroy(void *be, uint64_t slab, uint64_t bytes) {
  struct nvidia *s = be;
  uint32_t index = (uint32_t)(slab >> 32);
  uint32_t parent = s->devices[index == VMEM_MAX_DEVICES ? 0 : index].object;
  int err = rm_free(&s->rm, parent, stock_slab_object(slab));
  if (!err && index == 0) atomic_fetch_sub(&s->device_slab_bytes, bytes);
  return err;
}

static uint32_t mapping_type(uint32_t flags) {
  return flags & VMEM_MAP_READONLY ? UVM_MAPPING_READ_ONLY : UVM_MAPPING_DEFAULT;
}

int stock_map(void *be, uint64_t addr, uint64_t bytes, uint64_t slab, uint64_t offset, uint32_t flags, bool sparse) {
  const struct nvidia *s = be;
  int err = ext_map(s, addr, bytes, stock_slab_object(slab), offset, mapping_type(flags));
  if (err && sparse) {
    struct vmem_error why;
    int undo;
    /* Make the range sparse again: the failed call has already removed the zero mapping. */
    vm_error_save(&why);
    vm_undo_begin();
    undo = ext_sparse(s, addr, bytes);
    vm_undo_end();
    if (undo)
      return vm_fail_at(-ENOTRECOVERABLE, addr, bytes, 0,
                        "a map failed (%s), and the range could not be made sparse again", why.text);
    vm_error_restore(&why);
  }
  return err;
}

/* On several devices, a failure on a later one is -ENOTRECOVERABLE: the earlier ones are unmapped. */
int stock_unmap(void *be, uint64_t addr, uint64_t bytes, bool sparse) {
  const struct nvidia *s = be;
  return sparse ? ext_sparse(s, addr, bytes) : ext_unmap(s, addr, bytes);
}

int stock_remap(void *be, uint64_t addr, uint64_t bytes, uint64_t slab, uint64_t offset, uint32_t flags) {
  return ext_map(be, addr, bytes, stock_slab_object(slab), offset, mapping_type(flags));
}
