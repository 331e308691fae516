/* SPDX-License-Identifier: MIT */
/* The back end "stock": opening, refusing by name, proving. See stock.h for how it works. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "error.h"
#include "stock.h"

enum { SMALLEST_GRANULE = 4 << 10, DEFAULT_GRANULE = 64 << 10, LARGEST_PAGE = 2 << 20 };
#define DEFAULT_SLAB (64ull << 20)

/* libcuda says no more than "no device" when a card's node is missing or this user may not open it.
 * A container that was given one card sees only that card's node, so a node that works clears the
 * rest. */
static int explain_no_device(struct rm *rm, int err) {
  struct nv_card_info cards[NV_MAX_CARDS];

  char node[32] = "", missing[32] = "";
  int nodes = 0;

  if (uvm_check_node())
    return uvm_check_node();
  memset(cards, 0, sizeof(cards));
  if (rm_ioctl(rm->fd, NV_IOCTL(NV_ESC_CARD_INFO, sizeof(cards)), cards))
    return err;
  for (int i = 0; i < NV_MAX_CARDS; i++) {
    if (!cards[i].valid)
      continue;
    snprintf(node, sizeof(node), "/dev/nvidia%u", cards[i].minor_number);
    if (access(node, R_OK | W_OK) == 0)
      nodes++;
    else if (errno == EACCES || errno == EPERM)
      return vm_fail(-EACCES, "no permission to open %s", node);
    else if (!missing[0])
      memcpy(missing, node, sizeof(missing));
  }
  if (!nodes && missing[0])
    return vm_fail(-ENODEV, "%s is missing: this container was not given the node", missing);
  return err;
}

/* Where the driver does not answer, opening goes on: it maps a page and so shows whether it can. */
static int refuse_vgpu(struct rm *rm, uint32_t object, const char *name) {
  struct nv0080_virtualization v = {0};

  if (rm_control(rm, object, NV0080_GET_VIRTUALIZATION_MODE, &v, rm->abi.virtualization_bytes,
                 "probing"))
    return 0;
  return v.mode == NV0080_VIRTUALIZATION_VGX ? vm_fail(-ENODEV, "%s is a vGPU, not supported", name)
                                             : 0;
}

/* Drivers without the class know no confidential computing, so errors mean "off". */
static int refuse_confidential(struct rm *rm) {
  struct nvcb33_alloc params = {rm->client};
  struct nvcb33_capabilities c = {0};
  uint32_t object;

  if (rm_alloc(rm, rm->client, NV_CONFIDENTIAL_COMPUTE, &params, sizeof(params), &object,
               "probing"))
    return 0;
  /* Older drivers take one byte less, and refuse another size. */
  if (rm_control(rm, object, NVCB33_GET_CAPABILITIES, &c, sizeof(c), "probing") &&
      rm_control(rm, object, NVCB33_GET_CAPABILITIES, &c, sizeof(c) - 1, "probing"))
    c.feature = 0;
  rm_free(rm, rm->client, object);
  return c.feature ? vm_fail(-ENODEV, "confidential computing is on, not supported") : 0;
}

static int open_device(struct stock *s, uint32_t index) {
  const struct gpu_device *d = &s->base.gpu->devices[index];
  struct nv0080_alloc params = {.client_share = s->rm.client};
  struct rm_gpu gpu;
  char node[32];
  int err;

  if (d->mig)
    return vm_fail(-ENODEV, "device %d (%s) is a MIG instance, not supported", d->ordinal, d->name);
  if (d->mps)
    return vm_fail(-ENODEV, "device %d (%s) is shared through MPS, not supported", d->ordinal,
                   d->name);
  err = rm_find_gpu(&s->rm, d->uuid.bytes, &gpu);
  if (err)
    return err;
  snprintf(node, sizeof(node), "/dev/nvidia%u", gpu.minor_number);
  err = rm_open_node(node, &s->devices[index].fd);
  if (err)
    return err;
  params.device_id = gpu.instance;
  err = rm_alloc(&s->rm, s->rm.client, NV01_DEVICE_0, &params, sizeof(params),
                 &s->devices[index].object, "the RM's device allocation");
  return err ? err : refuse_vgpu(&s->rm, s->devices[index].object, d->name);
}

static void stock_close(void *be) {
  struct stock *s = be;

  if (s->uvm_fd >= 0)
    close(s->uvm_fd);
  rm_close(&s->rm);
  for (int i = 0; i < VMEM_MAX_DEVICES; i++)
    if (s->devices[i].fd >= 0)
      close(s->devices[i].fd);
  gpu_close(s->base.gpu);
  stock_forget_ranges(s);
  pthread_mutex_destroy(&s->va_lock);
  free(s);
}

static int open_all(struct stock *s, const struct vmem_open_opts *opts) {
  int err = rm_open(&s->rm, opts->flags & VMEM_OPEN_FORCE);

  if (err)
    return err;
  err = gpu_open(opts->devices, opts->num_devices, &s->base.gpu);
  if (err)
    return err == -ENODEV || err == -EIO ? explain_no_device(&s->rm, err) : err;
  err = refuse_confidential(&s->rm);
  for (uint32_t i = 0; i < s->base.gpu->num_devices && !err; i++)
    err = open_device(s, i);
  /* UVM maps one GPU's memory on another only between peers. */
  if (!err && s->base.gpu->num_devices > 1)
    err = gpu_enable_peers(s->base.gpu);
  return err ? err : uvm_find(s);
}

static int stock_open(const struct vmem_open_opts *opts, struct vm_be_info *info, void **be) {
  struct stock *s = calloc(1, sizeof(*s));
  struct vmem_error before;
  int err;

  vm_error_save(&before); /* trying things out leaves errors that are none */
  if (!s)
    return vm_fail(-ENOMEM, "heap: %zu bytes", sizeof(*s));
  s->uvm_fd = s->rm.fd = -1;
  for (int i = 0; i < VMEM_MAX_DEVICES; i++)
    s->devices[i].fd = -1;
  pthread_mutex_init(&s->va_lock, NULL);
  s->granule = opts->granule ? opts->granule : DEFAULT_GRANULE;
  if (s->granule < SMALLEST_GRANULE)
    err = vm_fail_at(-EOPNOTSUPP, 0, s->granule, SMALLEST_GRANULE,
                     "granule of %llu bytes: the GPU's smallest page is 4 KiB",
                     (unsigned long long)s->granule);
  else
    err = open_all(s, opts);
  if (err) {
    stock_close(s);
    return err;
  }
  gpu_describe(s->base.gpu, &info->pub);
  memcpy(info->pub.driver, s->rm.version_text, sizeof(info->pub.driver));
  info->pub.caps = VMEM_CAP_ALIAS | VMEM_CAP_READONLY | VMEM_CAP_HOST_PAGES | VMEM_CAP_VISIBLE |
                   VMEM_CAP_PLAIN | VMEM_CAP_CONSOLIDATE |
                   (s->granule >= 64 << 10 ? VMEM_CAP_SPARSE : 0) |
                   (s->base.gpu->num_devices > 1 ? VMEM_CAP_PEER : 0);
  info->pub.granule = s->granule;
  info->pub.page_sizes = s->granule;
  for (uint64_t size = s->granule; size <= LARGEST_PAGE; size <<= 1)
    info->pub.page_sizes |= size;
  info->pub.slab_size = opts->slab_size ? opts->slab_size : DEFAULT_SLAB;
  if (info->pub.slab_size < s->granule)
    info->pub.slab_size = s->granule;
  info->pub.max_segments = STOCK_MAX_MAPPINGS / s->base.gpu->num_devices;
  info->pool_high = 1ull << 30;
  info->fresh_is_zero = false; /* RM scrubs freed memory, but promises nothing */
  info->one_page_slabs = false;
  info->unreserve_unmaps = true;
  vm_error_restore(&before);
  *be = s;
  return 0;
}

static int stock_room(void *be, const struct vm_be_load *load) {
  const struct stock *s = be;
  uint64_t now = load->mappings, more = load->more_mappings;
  uint64_t limit = STOCK_MAX_MAPPINGS / s->base.gpu->num_devices;

  if (more <= limit && now <= limit - more)
    return 0;
  return vm_fail_at(
      -ENOSPC, 0, 0, limit,
      "%llu + %llu separate mappings exceed the %llu that the driver has handles for: map "
      "longer runs, or consolidate",
      (unsigned long long)now, (unsigned long long)more, (unsigned long long)limit);
}

/* Leaves nothing behind, whatever fails; the first failure is the one reported. */
static int prove(struct stock *s) {
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
