/* SPDX-License-Identifier: MIT */
/* The back end "stock": opening, refusing by name, proving. See stock.h for how it works. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "error.h"
#include "stock.h"

enum { SMALLEST_GRANULE = 4 << 10, DEFAULT_GRANULE = 64 << 10, LARGEST_PAGE = 2 << 20 };
#define DEFAULT_SLAB (64ull << 20)

static void stock_close(void *be) {
  nvidia_close(be);
  free(be);
}

static int stock_open(const struct vmem_open_opts *opts, struct vm_be_info *info, void **be) {
  struct nvidia *s = calloc(1, sizeof(*s));
  struct vmem_error before;
  int err;

  vm_error_save(&before); /* trying things out leaves errors that are none */
  if (!s)
    return vm_fail(-ENOMEM, "heap: %zu bytes", sizeof(*s));
  nvidia_init(s);
  s->granule = opts->granule ? opts->granule : DEFAULT_GRANULE;
  if (s->granule < SMALLEST_GRANULE)
    err = vm_fail_at(-EOPNOTSUPP, 0, s->granule, SMALLEST_GRANULE,
                     "granule of %llu bytes: the GPU's smallest page is 4 KiB",
                     (unsigned long long)s->granule);
  else
    err = nvidia_open(s, opts);
  if (!err)
    err = stock_find_uvm(s);
  if (err) {
    stock_close(s);
    return err;
  }
  gpu_describe(s->base.gpu, &info->pub);
  memcpy(info->pub.driver, s->rm.version_text, sizeof(info->pub.driver));
  info->pub.caps = VMEM_CAP_ALIAS | VMEM_CAP_READONLY | VMEM_CAP_HOST_PAGES | VMEM_CAP_VISIBLE |
                   VMEM_CAP_PLAIN | VMEM_CAP_CONSOLIDATE |
                   (s->granule >= 64 << 10 ? VMEM_CAP_SPARSE : 0) |
                   (s->num_devices > 1 ? VMEM_CAP_PEER : 0);
  info->pub.granule = s->granule;
  info->pub.page_sizes = s->granule;
  for (uint64_t size = s->granule; size <= LARGEST_PAGE; size <<= 1)
    info->pub.page_sizes |= size;
  info->pub.slab_size = opts->slab_size ? opts->slab_size : DEFAULT_SLAB;
  if (info->pub.slab_size < s->granule)
    info->pub.slab_size = s->granule;
  info->pub.max_segments = STOCK_MAX_MAPPINGS / s->num_devices;
  info->pool_high = 1ull << 30;
  info->fresh_is_zero = false; /* RM scrubs freed memory, but promises nothing */
  info->one_page_slabs = false;
  info->unreserve_unmaps = true;
  vm_error_restore(&before);
  *be = s;
  return 0;
}

static int stock_room(void *be, const struct vm_be_load *load) {
  const struct nvidia *s = be;
  uint64_t now = load->mappings, more = load->more_mappings;
  uint64_t limit = STOCK_MAX_MAPPINGS / s->num_devices;

  if (more <= limit && now <= limit - more)
    return 0;
  return vm_fail_at(
      -ENOSPC, 0, 0, limit,
      "%llu + %llu separate mappings exceed the %llu that the driver has handles for: map "
      "longer runs, or consolidate",
      (unsigned long long)now, (unsigned long long)more, (unsigned long long)limit);
}

/* Leaves nothing behind, whatever fails; the first failure is the one reported. */
static int prove(struct nvidia *s) {
  struct vmem_error why = {0};
  uint64_t addr, slab, priv;
  uint32_t kind;
  int err = stock_reserve(s, LARGEST_PAGE, 0, VMEM_RESERVE_PLAIN, &addr, &kind, &priv), undo;

  if (err)
    return err;
  err = stock_slab_create(s, 16 * s->granule, s->granule, VMEM_DEVICE, 0, &slab);
  if (!err) {
    /* Neither the address nor the offset aligned to more than the granule: a page of that size. */
    err = stock_map(s, addr + s->granule, s->granule, slab, 3 * s->granule, 0, false);
    if (!err)
      err = gpu_prove(s->base.gpu, addr + s->granule, s->granule);
    if (!err)
      err = stock_unmap(s, addr + s->granule, s->granule, false);
    if (err)
      vm_error_save(&why);
  }
  undo = stock_unreserve(s, addr, LARGEST_PAGE, priv);
  if (!undo && err == 0)
    undo = stock_slab_destroy(s, slab, 16 * s->granule);
  if (err && why.code)
    vm_error_restore(&why);
  return err ? err : undo;
}

static int stock_probe(int32_t device, uint32_t flags, struct vmem_probe_info *info) {
  struct vmem_open_opts opts = {.size = sizeof(opts), .flags = flags, .num_devices = 1};
  struct vm_be_info be_info = {0};
  void *be;
  int err;

  opts.devices[0] = device;
  err = stock_open(&opts, &be_info, &be);
  if (err)
    return err;
  info->caps = be_info.pub.caps;
  info->page_sizes = be_info.pub.page_sizes;
  memcpy(info->driver, be_info.pub.driver, sizeof(info->driver));
  memcpy(info->device_name, be_info.pub.device_name, sizeof(info->device_name));
  err = prove(be);
  if (!err)
    snprintf(info->reason, sizeof(info->reason),
             "a page of %llu bytes was mapped through UVM, written, read and unmapped",
             (unsigned long long)be_info.pub.granule);
  stock_close(be);
  return err;
}

const struct vm_backend vm_backend_stock = {
    .name = "stock",
    .probe = stock_probe,
    .open = stock_open,
    .close = stock_close,
    .reserve = stock_reserve,
    .unreserve = stock_unreserve,
    .slab_create = stock_slab_create,
    .slab_destroy = stock_slab_destroy,
    .map = stock_map,
    .unmap = stock_unmap,
    .remap = stock_remap,
    .room = stock_room,
    GPU_BE_ENTRIES,
};
