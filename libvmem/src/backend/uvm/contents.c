/* SPDX-License-Identifier: MIT */
/* Contents and GPU work without CUDA, through the program's own vm_uvm_contents. */
#include <errno.h>

#include "backend/uvm/uvm.h"
#include "base/available.h"
#include "base/error.h"

/* Weak: a definition elsewhere replaces it. */
__attribute__((weak)) const struct uvm_contents *vm_uvm_contents;

int uvm_contents_open(struct uvm *u) {
  if (u->nv.base.gpu || !vm_uvm_contents) return 0;
  return vm_uvm_contents->open(&u->nv, &u->contents);
}

void uvm_contents_close(struct uvm *u) {
  if (u->contents) vm_uvm_contents->close(u->contents);
}

static int no_contents(uint64_t addr, uint64_t bytes) {
  return vm_fail_at(-EOPNOTSUPP, addr, bytes, 0, "without CUDA nothing in this process can read or write GPU memory");
}

int uvm_own_mem_info(void *be, uint32_t location, int32_t device, uint64_t *free_bytes, uint64_t *total_bytes) {
  struct uvm *u = be;
  uint32_t index = 0;
  int err = 0;
  if (location == VMEM_HOST) return vm_available_now(free_bytes, total_bytes);
  if (location == VMEM_PEER) err = nvidia_find(&u->nv, device, &index);
  return err ? err : nvidia_own_mem_info(&u->nv, index, free_bytes, total_bytes);
}

/* Complete on return; `after` is empty. */
int uvm_own_fill(void *be, const struct vm_be_range *ranges, size_t n, uint8_t value, const vm_event *after,
                 size_t num_after, vm_event *done) {
  struct uvm *u = be;
  int err = 0;
  (void)after;
  (void)num_after;
  *done = 0;
  for (size_t i = 0; i < n && !err; i++)
    err = u->contents ? vm_uvm_contents->fill(u->contents, ranges[i].addr, ranges[i].bytes, value)
                      : no_contents(ranges[i].addr, ranges[i].bytes);
  return err;
}

int uvm_own_read(void *be, void *dst, uint64_t addr, uint64_t bytes) {
  struct uvm *u = be;
  return u->contents ? vm_uvm_contents->read(u->contents, dst, addr, bytes) : no_contents(addr, bytes);
}

int uvm_own_write(void *be, uint64_t addr, const void *src, uint64_t bytes) {
  struct uvm *u = be;
  return u->contents ? vm_uvm_contents->write(u->contents, addr, src, bytes) : no_contents(addr, bytes);
}

int uvm_own_copy(void *be, const struct vm_be_copy *copies, size_t n, const vm_event *after, size_t num_after,
                 vm_event *done) {
  struct uvm *u = be;
  int err = 0;
  (void)after;
  (void)num_after;
  *done = 0;
  for (size_t i = 0; i < n && !err; i++)
    err = u->contents ? vm_uvm_contents->copy(u->contents, copies[i].dst, copies[i].src, copies[i].bytes)
                      : no_contents(copies[i].dst, copies[i].bytes);
  return err;
}

/* Only the default stream exists, and it is always empty. There are no events, so no other function is called with
 * one. */
int uvm_own_event_from(void *be, uint32_t kind, uint64_t handle, vm_event *event) {
  (void)be;
  *event = 0;
  if (kind == VMEM_AFTER_STREAM && !handle) return 0;
  return vm_fail(-EOPNOTSUPP, "back end uvm has no streams and events without CUDA");
}
