/* SPDX-License-Identifier: MIT */
/* Opens NVIDIA's kernel modules in a process that may use CUDA, and refuses unsupported GPUs with the reason. */
#include "backend/nvidia/nvidia.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "base/error.h"

/* If a card's device node is missing, or this user lacks permission to open it, libcuda just reports "no device". A
 * container that has been given a single card sees only that card's node, so one usable node is enough. */
static int explain_no_device(struct rm *rm, int err) {
  struct nv_card_info cards[NV_MAX_CARDS];
  char node[32] = "", missing[32] = "";
  int nodes = 0;

  if (nvidia_check_uvm_node()) return nvidia_check_uvm_node();
  if (rm_cards(rm, cards)) return err;
  for (int i = 0; i < NV_MAX_CARDS; i++) {
    if (!cards[i].valid) continue;
    snprintf(node, sizeof(node), "/dev/nvidia%u", cards[i].minor_number);
    if (access(node, R_OK | W_OK) == 0)
      nodes++;
    else if (errno == EACCES || errno == EPERM)
      return vm_fail(-EACCES, "no permission to open %s", node);
    else if (!missing[0])
      memcpy(missing, node, sizeof(missing));
  }
  if (!nodes && missing[0]) return vm_fail(-ENODEV, "%s is missing: this container was not given the node", missing);
  return err;
}

/* If the driver does not answer, opening continues: mapping a page shows whether it works. */
static int refuse_vgpu(struct rm *rm, uint32_t object, const char *name) {
  struct nv0080_virtualization v = {0};
  if (rm_control(rm, object, NV0080_GET_VIRTUALIZATION_MODE, &v, rm->abi.virtualization_bytes, "probing")) return 0;
  return v.mode == NV0080_VIRTUALIZATION_VGX ? vm_fail(-ENODEV, "%s is a vGPU, not supported", name) : 0;
}

/* Drivers without the class do not support confidential computing, so errors mean "off". */
static int refuse_confidential(struct rm *rm) {
  struct nvcb33_alloc params = {rm->client};
  struct nvcb33_capabilities c = {0};
  uint32_t object;
  if (rm_alloc(rm, rm->client, NV_CONFIDENTIAL_COMPUTE, &params, sizeof(params), &object, "probing")) return 0;
  /* Older drivers expect one byte less, and refuse any other size. */
  if (rm_control(rm, object, NVCB33_GET_CAPABILITIES, &c, sizeof(c), "probing") &&
      rm_control(rm, object, NVCB33_GET_CAPABILITIES, &c, sizeof(c) - 1, "probing"))
    c.feature = 0;
  rm_free(rm, rm->client, object);
  return c.feature ? vm_fail(-ENODEV, "confidential computing is on, not supported") : 0;
}

int nvidia_open_device(struct nvidia *n, uint32_t index) {
  struct nvidia_device *d = &n->devices[index];
  struct nv0080_alloc params = {.client_share = n->rm.client};
  struct rm_gpu gpu;
  char node[32];
  int err;
  err = rm_find_gpu(&n->rm, d->uuid, &gpu);
  if (err) return err;
  snprintf(node, sizeof(node), "/dev/nvidia%u", gpu.minor_number);
  if (d->fd < 0) err = rm_open_node(node, &d->fd);
  if (err) return err;
  params.device_id = gpu.instance;
  err =
      rm_alloc(&n->rm, n->rm.client, NV01_DEVICE_0, &params, sizeof(params), &d->object, "the RM's device allocation");
  return err ? err : refuse_vgpu(&n->rm, d->object, d->name);
}

static int take_cuda_device(struct nvidia *n, uint32_t index) {
  const struct gpu_device *d = &n->base.gpu->devices[index];
  if (d->mig) return vm_fail(-ENODEV, "device %d (%s) is a MIG instance, not supported", d->ordinal, d->name);
  if (d->mps) return vm_fail(-ENODEV, "device %d (%s) is shared through MPS, not supported", d->ordinal, d->name);
  n->devices[index].ordinal = d->ordinal;
  memcpy(n->devices[index].uuid, d->uuid.bytes, sizeof(n->devices[index].uuid));
  memcpy(n->devices[index].name, d->name, sizeof(n->devices[index].name));
  return 0;
}

void nvidia_init(struct nvidia *n) {
  memset(n, 0, sizeof(*n));
  n->uvm_fd = n->mm_fd = n->rm.fd = -1;
  for (int i = 0; i < VMEM_MAX_DEVICES; i++) n->devices[i].fd = -1;
  pthread_mutex_init(&n->va_lock, NULL);
}

void nvidia_close(struct nvidia *n) {
  if (n->mm_fd >= 0) close(n->mm_fd);
  if (n->uvm_fd >= 0) close(n->uvm_fd);
  rm_close(&n->rm);
  for (int i = 0; i < VMEM_MAX_DEVICES; i++)
    if (n->devices[i].fd >= 0) close(n->devices[i].fd);
  gpu_close(n->base.gpu);
  nvidia_forget_ranges(n);
  pthread_mutex_destroy(&n->va_lock);
}

int nvidia_open(struct nvidia *n, const struct vmem_open_opts *opts, int (*trial)(const struct nvidia *n)) {
  int err = rm_open(&n->rm);
  if (err) return err;
  err = gpu_open(opts->devices, opts->num_devices, &n->base.gpu);
  if (err) return err == -ENODEV || err == -EIO ? explain_no_device(&n->rm, err) : err;
  n->num_devices = n->base.gpu->num_devices;
  for (uint32_t i = 0; i < n->num_devices && !err; i++) err = take_cuda_device(n, i);
  if (!err && n->rm.careful && trial) err = trial(n);
  if (!err) err = rm_client(&n->rm);
  if (!err) err = refuse_confidential(&n->rm);
  for (uint32_t i = 0; i < n->num_devices && !err; i++) err = nvidia_open_device(n, i);
  /* UVM maps one GPU's memory on another only between peers. */
  if (!err && n->num_devices > 1) err = gpu_enable_peers(n->base.gpu);
  return err;
}

int nvidia_find(const struct nvidia *n, int32_t ordinal, uint32_t *index) {
  for (uint32_t i = 0; i < n->num_devices; i++)
    if (n->devices[i].ordinal == ordinal) {
      *index = i;
      return 0;
    }
  return vm_fail(-EINVAL, "device %d is not one of the context's %u devices", ordinal, n->num_devices);
}

int nvidia_uvm_call(const struct nvidia *n, unsigned long request, void *params, uint32_t size, uint32_t *status,
                    uint64_t addr, uint64_t bytes, const char *what) {
  int err = rm_call(&n->rm, n->uvm_fd, request, params, size, status);
  return err ? rm_fail_errno(err, addr, bytes, what) : rm_fail(*status, addr, bytes, what);
}
