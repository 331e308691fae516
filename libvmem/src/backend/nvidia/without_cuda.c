/* SPDX-License-Identifier: MIT */
/*
 * Without CUDA: opens /dev/nvidia-uvm and registers each GPU and an address space on it, as CUDA does on
 * its own descriptor. The address space belongs to UVM: RM does not touch its page
 * tables.
 */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "backend/nvidia/nvidia.h"
#include "base/error.h"

/* Numbers the cards in the driver's order, without those whose node this process cannot open. */
static int find_cards(struct nvidia *n, const int32_t *ordinals) {
  struct nv_card_info cards[NV_MAX_CARDS];
  int32_t ordinal = 0;
  uint32_t found = 0;
  int err;
  err = rm_cards(&n->rm, cards);
  if (err) return rm_fail_errno(err, 0, 0, "listing the cards");
  for (int i = 0; i < NV_MAX_CARDS; i++) {
    struct nv0000_uuid_from_id id = {.gpu_id = cards[i].gpu_id, .flags = NV0000_UUID_BINARY};
    char node[32];
    snprintf(node, sizeof(node), "/dev/nvidia%u", cards[i].minor_number);
    if (!cards[i].valid || access(node, R_OK | W_OK)) continue;
    for (uint32_t k = 0; k < n->num_devices; k++) {
      if (ordinals[k] != ordinal) continue;
      /* RM only reports the UUID of a card in use, and opening the node puts it in use. */
      err = rm_open_node(node, &n->devices[k].fd);
      if (!err)
        err = rm_control(&n->rm, n->rm.client, NV0000_GET_UUID_FROM_GPU_ID, &id, sizeof(id), "querying the GPU's UUID");
      if (err) return err;
      n->devices[k].ordinal = ordinal;
      memcpy(n->devices[k].uuid, id.uuid, sizeof(n->devices[k].uuid));
      found++;
    }
    ordinal++;
  }
  if (found < n->num_devices)
    return vm_fail_at(-ENODEV, 0, 0, (uint64_t)ordinal,
                      "%u devices were requested, but this process may open only %d of the driver's cards",
                      n->num_devices, ordinal);
  return 0;
}

static void find_name(struct nvidia *n, struct nvidia_device *d) {
  struct nv2080_name name = {0};
  uint32_t shorter = sizeof(name) - sizeof(name.wide);
  snprintf(d->name, sizeof(d->name), "NVIDIA GPU");
  if (rm_control(&n->rm, d->subdevice, NV2080_GET_NAME_STRING, &name, sizeof(name), "probing") &&
      rm_control(&n->rm, d->subdevice, NV2080_GET_NAME_STRING, &name, shorter, "probing"))
    return;
  name.ascii[sizeof(name.ascii) - 1] = 0;
  if (name.ascii[0]) snprintf(d->name, sizeof(d->name), "%s", name.ascii);
}

static int register_device(struct nvidia *n, uint32_t index) {
  struct nvidia_device *d = &n->devices[index];
  struct nv2080_alloc sub = {0};
  struct nv_va_space_params space = {.flags = NV_VA_SPACE_EXTERNALLY_OWNED | NV_VA_SPACE_PAGE_FAULTING};
  struct uvm_register_gpu gpu = {.rm_fd = -1};
  struct uvm_register_space va = {.rm_fd = n->rm.fd, .client = n->rm.client};
  int err = nvidia_open_device(n, index);
  if (!err)
    err = rm_alloc(&n->rm, d->object, NV20_SUBDEVICE_0, &sub, sizeof(sub), &d->subdevice,
                   "the RM's subdevice allocation");
  if (!err)
    err = rm_alloc(&n->rm, d->object, FERMI_VASPACE_A, &space, n->rm.abi.va_space_bytes, &d->va_space,
                   "the RM's address space allocation");
  if (err) return err;
  find_name(n, d);
  memcpy(gpu.uuid, d->uuid, sizeof(gpu.uuid));
  err = NVIDIA_UVM_CALL(n, UVM_REGISTER_GPU, &gpu, 0, 0);
  if (err) return err;
  memcpy(va.uuid, d->uuid, sizeof(va.uuid));
  va.va_space = d->va_space;
  return NVIDIA_UVM_CALL(n, UVM_REGISTER_GPU_VASPACE, &va, 0, 0);
}

/* GPUs connected by NVLink become peers when they are registered, and UVM refuses this call for them. For other GPUs,
 * mapping the first page shows whether they can be peers. */
static int enable_peers(struct nvidia *n) {
  for (uint32_t i = 0; i < n->num_devices; i++)
    for (uint32_t k = i + 1; k < n->num_devices; k++) {
      struct uvm_peer_access p = {.status = 0};
      int err;
      memcpy(p.a, n->devices[i].uuid, sizeof(p.a));
      memcpy(p.b, n->devices[k].uuid, sizeof(p.b));
      err = NVIDIA_UVM_CALL(n, UVM_ENABLE_PEER_ACCESS, &p, 0, 0);
      if (err && p.status != NV_ERR_INVALID_DEVICE) return err;
    }
  return 0;
}

/* A second descriptor lets UVM clean up when this process's memory is freed, before its files are closed. Drivers that
 * do not need it refuse it. */
static int tie_to_memory(struct nvidia *n) {
  struct uvm_mm_initialize mm = {.uvm_fd = n->uvm_fd};
  int err = rm_open_node(UVM_NODE, &n->mm_fd);
  if (err) return err;
  err = rm_call(&n->rm, n->mm_fd, UVM_MM_INITIALIZE, &mm, sizeof(mm), &mm.status);
  if (err) return rm_fail_errno(err, 0, 0, "UVM_MM_INITIALIZE");
  if (mm.status != NV_WARN_NOTHING_TO_DO) return rm_fail(mm.status, 0, 0, "UVM_MM_INITIALIZE");
  close(n->mm_fd);
  n->mm_fd = -1;
  return 0;
}

int nvidia_register_own(struct nvidia *n) {
  struct uvm_initialize init = {.flags = UVM_INIT_DISABLE_HMM};
  int err = rm_open_node(UVM_NODE, &n->uvm_fd);
  if (!err) err = NVIDIA_UVM_CALL(n, UVM_INITIALIZE, &init, 0, 0);
  if (!err) err = tie_to_memory(n);
  for (uint32_t i = 0; i < n->num_devices && !err; i++) err = register_device(n, i);
  return err ? err : enable_peers(n);
}

int nvidia_open_own(struct nvidia *n, const struct vmem_open_opts *opts) {
  int32_t first = 0;
  int err = rm_open(&n->rm);
  if (!err) err = rm_client(&n->rm);
  if (err) return err;
  n->num_devices = opts->num_devices ? opts->num_devices : 1;
  err = find_cards(n, opts->num_devices ? opts->devices : &first);
  return err ? err : nvidia_register_own(n);
}

int nvidia_own_mem_info(struct nvidia *n, uint32_t index, uint64_t *free_bytes, uint64_t *total_bytes) {
  struct nv2080_fb_info info = {.count = 2};
  uint32_t bytes = 4 + 8 * n->rm.abi.fb_entries;
  int err;
  info.list[0].index = NV2080_FB_HEAP_FREE;
  info.list[1].index = NV2080_FB_HEAP_SIZE;
  err = rm_control(&n->rm, n->devices[index].subdevice, NV2080_FB_GET_INFO_V2, &info, bytes,
                   "querying the GPU's free memory");
  *free_bytes = (uint64_t)info.list[0].value << 10;
  *total_bytes = (uint64_t)info.list[1].value << 10;
  return err;
}
