/* SPDX-License-Identifier: MIT */
/* The back end "uvm": checks that the driver is the patched one, and opens it. See uvm.h. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "backend/uvm/uvm.h"
#include "base/error.h"

enum { DEFAULT_GRANULE = 64 << 10, SLOT = 1 << UVM_VMEM_SLOT_SHIFT };
#define DEFAULT_SLAB (64ull << 20)
#define LARGEST_OBJECT (1ull << 30) /* the core creates larger slabs only for a single larger page */

static void uvm_close(void *be) {
  struct uvm *u = be;
  uvm_contents_close(u);
  nvidia_close(&u->nv);
  free(u);
}

/* Runs first, so that an unpatched driver is reported before a CUDA context is created. */
static int ask_driver(struct uvm *u) {
  int fd, err = nvidia_check_uvm_node();
  if (!err) err = rm_open_node(UVM_NODE, &fd);
  if (err) return err;
  err = uvm_query(fd, &u->query);
  close(fd);
  return err;
}

static int check_options(struct uvm *u, const struct vmem_open_opts *opts) {
  uint64_t granule = opts->granule ? opts->granule : DEFAULT_GRANULE;
  uint32_t devices = opts->num_devices ? opts->num_devices : 1;
  if (!(u->query.out_page_sizes & granule))
    return vm_fail_at(-EOPNOTSUPP, 0, granule, u->query.out_page_sizes,
                      "granule of %llu bytes: the driver supports pages of 64 KiB, 128 KiB, 256 KiB and 2 MiB",
                      (unsigned long long)granule);
  if (devices > 1 && (devices > u->query.out_max_gpus || !(u->query.out_capabilities & UVM_VMEM_CAP_MULTI_GPU)))
    return vm_fail_at(-EOPNOTSUPP, 0, devices, u->query.out_max_gpus,
                      "%u devices: the driver maps a reservation on at most %u", devices, u->query.out_max_gpus);
  u->entries = opts->flags & VMEM_OPEN_LARGE_ENTRIES && granule < SLOT;
  if (u->entries && (~u->query.out_capabilities & (UVM_VMEM_CAP_BIG | UVM_VMEM_CAP_LARGE)))
    return vm_fail_at(
        -EOPNOTSUPP, 0, granule, SLOT,
        "VMEM_OPEN_LARGE_ENTRIES: the loaded nvidia-uvm gives entries of 2 MiB only to large pages (it is "
        "older than this library)");
  u->nv.granule = granule;
  u->shift = (unsigned)__builtin_ctzll(granule);
  u->object_bytes = (uint64_t)u->query.out_max_create_pages << u->shift;
  if (u->object_bytes > LARGEST_OBJECT) u->object_bytes = LARGEST_OBJECT;
  /* Large objects get entries of 2 MiB only if uvm_bind requests them. */
  u->run_bytes = u->entries ? u->object_bytes & ~(SLOT - 1ull) : SLOT;
  /* One operation of the core fits on the stack of uvm_bind, and in one BIND. */
  u->bind_bytes = SLOT * ((u->query.out_max_bind_ops < 64 ? u->query.out_max_bind_ops : 64) - 1);
  if (u->bind_bytes > (uint64_t)u->query.out_max_bind_units << UVM_VMEM_UNIT_SHIFT)
    u->bind_bytes = (uint64_t)u->query.out_max_bind_units << UVM_VMEM_UNIT_SHIFT;
  u->bind_bytes &= ~(granule - 1);
  return 0;
}

/* Reserves and frees addresses: that works only on the descriptor on which CUDA registered this process's GPUs and
 * their address spaces. */
static int trial(struct nvidia *n, void *arg) {
  struct uvm *u = (struct uvm *)n;
  uint64_t addr = *(uint64_t *)arg;
  int err = uvm_take(u, addr, SLOT, 0);
  return err ? err : uvm_give_back(u, addr, SLOT, 0);
}

static int open_cuda(struct uvm *u, const struct vmem_open_opts *opts) {
  uint64_t addr;
  int err = nvidia_open(&u->nv, opts, NULL);
  if (!err) err = nvidia_host_range(SLOT, SLOT, &addr);
  if (err) return err;
  err = nvidia_find_uvm(&u->nv, trial, &addr);
  munmap((void *)(uintptr_t)addr, SLOT);
  return err;
}

/* "auto" and probes serve GPU work, which needs CUDA; a caller that names this back end may have other uses. */
static int open_without_cuda(struct uvm *u, const struct vmem_open_opts *opts) {
  if (!vm_uvm_contents && opts->backend && strcmp(opts->backend, "auto") == 0)
    return vm_fail(-ENODEV, "patched driver, ABI %u, but no libcuda: pages could be mapped, but nothing could use them",
                   u->query.out_abi_version);
  return nvidia_open_own(&u->nv, opts);
}

static int open_all(struct uvm *u, const struct vmem_open_opts *opts) {
  int err = ask_driver(u);
  if (!err) err = check_options(u, opts);
  if (!err) err = gpu_api_present() ? open_cuda(u, opts) : open_without_cuda(u, opts);
  for (uint32_t i = 0; i < u->nv.num_devices && !err; i++) err = uvm_check_gpu(u->nv.uvm_fd, &u->nv.devices[i]);
  return err ? err : uvm_contents_open(u);
}

static uint32_t caps_of(const struct uvm *u) {
  static const struct {
    uint64_t kernel;
    uint32_t ours;
  } same[] = {
      {UVM_VMEM_CAP_READ_ONLY, VMEM_CAP_READONLY},
      {UVM_VMEM_CAP_SPARSE, VMEM_CAP_SPARSE},
      {UVM_VMEM_CAP_HOST, VMEM_CAP_HOST_PAGES},
  };
  uint32_t caps = VMEM_CAP_ALIAS | VMEM_CAP_PLAIN | VMEM_CAP_ONE_CALL;

  for (size_t i = 0; i < sizeof(same) / sizeof(same[0]); i++)
    if (u->query.out_capabilities & same[i].kernel) caps |= same[i].ours;
  if (caps & VMEM_CAP_SPARSE) caps |= VMEM_CAP_SPARSE_ATOMIC;
  if (u->nv.base.gpu) caps |= VMEM_CAP_VISIBLE;
  if (u->entries) caps |= VMEM_CAP_JOIN;
  if (u->nv.num_devices > 1 && (u->query.out_capabilities & UVM_VMEM_CAP_PEER)) caps |= VMEM_CAP_PEER;
  return caps;
}

static const struct vm_backend without_cuda;

static void describe(const struct uvm *u, struct vm_be_info *info) {
  uint64_t granule = u->nv.granule;
  char driver[160];
  info->pub.num_devices = u->nv.num_devices;
  for (uint32_t i = 0; i < u->nv.num_devices; i++)
    memcpy(info->pub.uuid[i], u->nv.devices[i].uuid, sizeof(info->pub.uuid[i]));
  memcpy(info->pub.device_name, u->nv.devices[0].name, sizeof(info->pub.device_name));
  snprintf(info->pub.driver, sizeof(info->pub.driver), "%s", (const char *)u->query.out_driver_version);
  info->pub.caps = caps_of(u);
  info->pub.granule = granule;
  info->pub.page_sizes = u->query.out_page_sizes & ~(granule - 1);
  info->pub.slab_size = DEFAULT_SLAB;
  info->pool_high = 1ull << 30;
  info->pool_delay = VM_POOL_DELAY;
  info->fresh_is_zero = true;
  info->one_page_slabs = false;
  info->unreserve_unmaps = true;
  info->bind_bytes = u->bind_bytes;
  info->no_contents = !u->nv.base.gpu && !u->contents;
  info->all_page_sizes = u->query.out_page_sizes;
  rm_describe(&u->nv.rm, driver, sizeof(driver));
  snprintf(info->about, sizeof(info->about), "patched driver, ABI %u%s%s", u->query.out_abi_version,
           driver[0] ? "; " : "", driver);
  info->unknown_branch = u->nv.rm.careful;
  info->table = u->nv.base.gpu ? NULL : &without_cuda;
}

static int uvm_open(const struct vmem_open_opts *opts, struct vm_be_info *info, void **be) {
  struct uvm *u = calloc(1, sizeof(*u));
  struct vmem_error before;
  int err;
  vm_error_save(&before); /* the attempts below may record errors that do not concern the caller */
  if (!u) return vm_fail(-ENOMEM, "heap: %zu bytes", sizeof(*u));
  nvidia_init(&u->nv);
  err = open_all(u, opts);
  if (err) {
    VM_UNDO(uvm_close(u));
    return err;
  }
  describe(u, info);
  vm_error_restore(&before);
  *be = u;
  return 0;
}

#define UVM_ENTRIES                                                                                                    \
  .name = "uvm", .open = uvm_open, .close = uvm_close, .reserve = uvm_reserve, .unreserve = uvm_unreserve,             \
  .slab_create = uvm_slab_create, .slab_destroy = uvm_slab_destroy, .map = uvm_map, .unmap = uvm_unmap,                \
  .bind = uvm_bind

const struct vm_backend vm_backend_uvm = {UVM_ENTRIES, GPU_BE_ENTRIES};

static const struct vm_backend without_cuda = {
    UVM_ENTRIES,
    .mem_info = uvm_own_mem_info,
    .fill = uvm_own_fill,
    .read = uvm_own_read,
    .write = uvm_own_write,
    .copy = uvm_own_copy,
    .event_from = uvm_own_event_from,
};
