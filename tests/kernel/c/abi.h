/* SPDX-License-Identifier: MIT */
/*
 * abi.h - one function for each ioctl of the patched driver. All return 0 or a negative errno.
 */
#ifndef ABI_H
#define ABI_H

#include <errno.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>
#include <sys/ioctl.h>
#include <uvm_vmem_ioctl.h>

#define UNIT (1ull << UVM_VMEM_UNIT_SHIFT)
#define SLOT (1ull << UVM_VMEM_SLOT_SHIFT)
#define SLOT_UNITS (SLOT / UNIT)
#define FOREVER (~0ull)

static inline int vm_call(int fd, unsigned long command, void *argument) {
  return ioctl(fd, command, argument) ? -errno : 0;
}

static inline int vm_query(int fd, const uint8_t *gpu, struct uvm_vmem_query *q) {
  *q = (struct uvm_vmem_query){.size = sizeof(*q), .flags = gpu ? UVM_VMEM_QUERY_GPU : 0};
  if (gpu) memcpy(q->gpu_uuid, gpu, UVM_VMEM_UUID_BYTES);
  return vm_call(fd, UVM_VMEM_QUERY, q);
}

static inline int vm_reserve_on(int fd, uint64_t start, uint64_t length, unsigned shift, unsigned flags,
                                const void *gpus, unsigned gpu_count) {
  struct uvm_vmem_reserve r = {.size = sizeof(r),
                               .flags = flags,
                               .start = start,
                               .length = length,
                               .page_shift = shift,
                               .gpu_count = gpu_count,
                               .gpus = (uintptr_t)gpus};
  return vm_call(fd, UVM_VMEM_RESERVE, &r);
}

static inline int vm_reserve(int fd, const uint8_t *gpu, uint64_t start, uint64_t length, unsigned shift,
                             unsigned flags) {
  return vm_reserve_on(fd, start, length, shift, flags, gpu, 1);
}

static inline int vm_free(int fd, uint64_t start, unsigned flags) {
  struct uvm_vmem_free f = {.size = sizeof(f), .flags = flags, .start = start};
  return vm_call(fd, UVM_VMEM_FREE, &f);
}

static inline int vm_create(int fd, const uint8_t *gpu, unsigned shift, unsigned count, unsigned flags,
                            uint32_t *handle) {
  struct uvm_vmem_create c = {.size = sizeof(c), .flags = flags, .page_shift = shift, .count = count};
  memcpy(c.gpu_uuid, gpu, UVM_VMEM_UUID_BYTES);
  int error = vm_call(fd, UVM_VMEM_CREATE, &c);
  *handle = error ? 0 : c.out_handle;
  return error;
}

static inline int vm_release(int fd, uint32_t handle) {
  struct uvm_vmem_release r = {.size = sizeof(r), .handle = handle};
  return vm_call(fd, UVM_VMEM_RELEASE, &r);
}

static inline struct uvm_vmem_op op_map(uint64_t addr, uint32_t handle, uint32_t first, uint32_t count,
                                        uint32_t flags) {
  return (struct uvm_vmem_op){
      .addr = addr, .op = UVM_VMEM_OP_MAP, .flags = flags, .handle = handle, .first = first, .count = count};
}

static inline struct uvm_vmem_op op_unmap(uint64_t addr, uint32_t count, uint32_t flags) {
  return (struct uvm_vmem_op){.addr = addr, .op = UVM_VMEM_OP_UNMAP, .flags = flags, .count = count};
}

/* failed and ticket may be NULL; with a NULL ticket the call is synchronous. */
static inline int vm_bind(int fd, uint64_t start, const struct uvm_vmem_op *ops, unsigned count, uint32_t *failed,
                          uint64_t *ticket) {
  struct uvm_vmem_bind b = {.size = sizeof(b),
                            .flags = ticket ? UVM_VMEM_BIND_ASYNC : 0,
                            .start = start,
                            .ops = (uintptr_t)ops,
                            .op_count = count,
                            .out_failed_op = 12345,
                            .out_ticket = 12345};
  int error = vm_call(fd, UVM_VMEM_BIND, &b);
  if (failed) *failed = b.out_failed_op;
  if (ticket) *ticket = error ? 0 : b.out_ticket;
  return error;
}

static inline int vm_map(int fd, uint64_t start, uint64_t addr, uint32_t handle, uint32_t first, uint32_t count,
                         uint32_t flags) {
  struct uvm_vmem_op op = op_map(addr, handle, first, count, flags);
  return vm_bind(fd, start, &op, 1, NULL, NULL);
}

static inline int vm_unmap(int fd, uint64_t start, uint64_t addr, uint32_t count, uint32_t flags) {
  struct uvm_vmem_op op = op_unmap(addr, count, flags);
  return vm_bind(fd, start, &op, 1, NULL, NULL);
}

static inline int vm_wait(int fd, uint64_t ticket, uint64_t timeout_ns) {
  struct uvm_vmem_wait w = {.size = sizeof(w), .ticket = ticket, .timeout_ns = timeout_ns};
  return vm_call(fd, UVM_VMEM_WAIT, &w);
}

/* gpu may be NULL: the whole descriptor. */
static inline int vm_stat(int fd, const uint8_t *gpu, struct uvm_vmem_stat *s) {
  *s = (struct uvm_vmem_stat){.size = sizeof(*s), .flags = gpu ? UVM_VMEM_STAT_GPU : 0};
  if (gpu) memcpy(s->gpu_uuid, gpu, UVM_VMEM_UUID_BYTES);
  return vm_call(fd, UVM_VMEM_STAT, s);
}

/* Compares the state that a failed call must not change. */
static inline bool stat_same(const struct uvm_vmem_stat *a, const struct uvm_vmem_stat *b) {
  return a->out_reserved_bytes == b->out_reserved_bytes && a->out_created_bytes == b->out_created_bytes &&
         a->out_mapped_bytes == b->out_mapped_bytes && a->out_host_bytes == b->out_host_bytes &&
         a->out_reservations == b->out_reservations && a->out_objects == b->out_objects &&
         a->out_slots == b->out_slots && a->out_tickets == b->out_tickets && a->out_binds == b->out_binds;
}

#endif
