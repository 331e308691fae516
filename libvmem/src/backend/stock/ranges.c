/* SPDX-License-Identifier: MIT */
/* Wrappers of UVM's ioctls. */
#include <errno.h>
#include <string.h>

#include "backend/stock/stock.h"
#include "base/error.h"

int ext_create(const struct nvidia *s, uint64_t addr, uint64_t bytes) {
  struct uvm_create_range p = {.base = addr, .length = bytes};
  return NVIDIA_UVM_CALL(s, UVM_CREATE_EXTERNAL_RANGE, &p, addr, bytes);
}

int ext_free(const struct nvidia *s, uint64_t addr, uint64_t bytes) {
  struct uvm_free_580 with_length = {.base = addr, .length = bytes};
  struct uvm_free_590 p = {.base = addr};
  if (s->rm.abi.free_has_length) return NVIDIA_UVM_CALL(s, UVM_FREE, &with_length, addr, bytes);
  return NVIDIA_UVM_CALL(s, UVM_FREE, &p, addr, bytes);
}

static void fill_records(const struct nvidia *s, struct uvm_gpu_record *records, uint32_t type) {
  for (uint32_t i = 0; i < s->num_devices; i++) {
    memcpy(records[i].uuid, s->devices[i].uuid, sizeof(records[i].uuid));
    records[i].mapping_type = type;
  }
}

int ext_map(const struct nvidia *s, uint64_t addr, uint64_t bytes, uint32_t memory, uint64_t offset,
            uint32_t mapping_type) {
  const struct uvm_map_head head = {addr, bytes, offset};
  const struct uvm_map_tail tail = {s->num_devices, s->rm.fd, s->rm.client, memory, 0};
  static const char what[] = "UVM_MAP_EXTERNAL_ALLOCATION";
  uint32_t status;
  int err;
  if (s->rm.abi.map_records == 256) {
    struct uvm_map_256 p;
    memset(&p, 0, sizeof(p));
    p.head = head;
    fill_records(s, p.gpus, mapping_type);
    p.tail = tail;
    err = nvidia_uvm_call(s, UVM_MAP_EXTERNAL_ALLOCATION, &p, sizeof(p), &p.tail.status, addr, bytes, what);
    status = p.tail.status;
  } else {
    struct uvm_map_32 p;
    memset(&p, 0, sizeof(p));
    p.head = head;
    fill_records(s, p.gpus, mapping_type);
    p.tail = tail;
    err = nvidia_uvm_call(s, UVM_MAP_EXTERNAL_ALLOCATION, &p, sizeof(p), &p.tail.status, addr, bytes, what);
    status = p.tail.status;
  }
  if (status == NV_ERR_INSUFFICIENT_RESOURCES) {
    char others[160];
    nvidia_uvm_users(others, sizeof(others));
    vm_fail_at(-ENOSPC, addr, bytes, STOCK_MAX_MAPPINGS,
               "the driver has no handle left for another mapping (it has %d for all processes together; "
               "these also have /dev/nvidia-uvm open, and `fuser -v /dev/nvidia-uvm` as root shows all: %s): "
               "map longer runs, or join them, in this process or in those",
               RM_HANDLES, others);
    return vm_fail_status(status, rm_status_name(status));
  }
  return err;
}

static int each_device(const struct nvidia *s, uint64_t addr, uint64_t bytes, unsigned long request, const char *what) {
  for (uint32_t i = 0; i < s->num_devices; i++) {
    struct uvm_gpu_range p = {.base = addr, .length = bytes};
    int err;
    memcpy(p.uuid, s->devices[i].uuid, sizeof(p.uuid));
    if (i > 0) /* the call has succeeded on the first device, so keep retrying it on the others */
      vm_undo_begin();
    err = nvidia_uvm_call(s, request, &p, sizeof(p), &p.status, addr, bytes, what);
    if (i > 0) vm_undo_end();
    if (err && i > 0)
      return vm_fail_at(-ENOTRECOVERABLE, addr, bytes, 0, "%s succeeded on only %u of %u devices", what, i,
                        s->num_devices);
    if (err) return err;
  }
  return 0;
}

int ext_unmap(const struct nvidia *s, uint64_t addr, uint64_t bytes) {
  return each_device(s, addr, bytes, UVM_UNMAP_EXTERNAL, "UVM_UNMAP_EXTERNAL");
}

int ext_sparse(const struct nvidia *s, uint64_t addr, uint64_t bytes) {
  return each_device(s, addr, bytes, UVM_MAP_EXTERNAL_SPARSE, "UVM_MAP_EXTERNAL_SPARSE");
}
