/* SPDX-License-Identifier: MIT */
/* Contents and GPU work: CUDA's, where it is there, else what the program brings (vm_uvm_contents). */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "error.h"
#include "uvm.h"

/* A definition elsewhere takes its place. */
__attribute__((weak)) const struct uvm_contents *vm_uvm_contents;

int uvm_contents_open(struct uvm *u) {
  if (u->nv.base.gpu || !vm_uvm_contents)
    return 0;
  return vm_uvm_contents->open(&u->nv, &u->contents);
}

void uvm_contents_close(struct uvm *u) {
  if (u->contents)
    vm_uvm_contents->close(u->contents);
}

static int no_contents(uint64_t addr, uint64_t bytes) {
  return vm_fail_at(-EOPNOTSUPP, addr, bytes, 0, "without CUDA nothing in this process can read or write GPU memory");
}

int uvm_mem_info(void *be, uint32_t location, int32_t device, uint64_t *free_bytes,
                 uint64_t *total_bytes) {
  struct uvm *u = be;
  struct vmem_open_opts opts = {.num_devices = u->nv.num_devices};
  uint32_t index = 0;
  int err = 0;

  if (u->nv.base.gpu)
    return gpu_be_mem_info(be, location, device, free_bytes, total_bytes);
  if (location == VMEM_HOST)
    return gpu_host_mem_info(free_bytes, total_bytes);
  memcpy(opts.devices, u->ordinals, sizeof(opts.devices));
  if (location == VMEM_PEER)
    err = nvidia_find(&u->nv, &opts, device, &index);
  return err ? err : nvidia_own_mem_info(&u->nv, index, free_bytes, total_bytes);
}

/* Without CUDA there are no events: `after` is empty, and the fill is over on return. */
int uvm_fill(void *be, const struct vm_be_range *ranges, size_t n, uint8_t value,
             const vm_event *after, size_t num_after, vm_event *done) {
  struct uvm *u = be;
  int err = 0;

  if (u->nv.base.gpu)
    return gpu_be_fill(be, ranges, n, value, after, num_after, done);
  *done = 0;
  if (!u->contents && n)
    return no_contents(ranges[0].addr, ranges[0].bytes);
  for (size_t i = 0; i < n && !err; i++)
    err = vm_uvm_contents->fill(u->contents, ranges[i].addr, ranges[i].bytes, value);
  return err;
}

int uvm_read(void *be, void *dst, uint64_t addr, uint64_t bytes) {
  struct uvm *u = be;

  if (u->nv.base.gpu)
    return gpu_be_read(be, dst, addr, bytes);
  return u->contents ? vm_uvm_contents->read(u->contents, dst, addr, bytes) : no_contents(addr, bytes);
}

int uvm_write(void *be, uint64_t addr, const void *src, uint64_t bytes) {
  struct uvm *u = be;

  if (u->nv.base.gpu)
    return gpu_be_write(be, addr, src, bytes);
  return u->contents ? vm_uvm_contents->write(u->contents, addr, src, bytes) : no_contents(addr, bytes);
}

int uvm_copy(void *be, uint64_t dst, uint64_t src, uint64_t bytes) {
  struct uvm *u = be;

  if (u->nv.base.gpu)
    return gpu_be_copy(be, dst, src, bytes);
  return u->contents ? vm_uvm_contents->copy(u->contents, dst, src, bytes) : no_contents(dst, bytes);
}

static int no_events(void) {
  return vm_fail(-EOPNOTSUPP, "back end uvm has no streams and events without CUDA");
}

/* The default stream is always there; without CUDA nothing was ever put into it. */
int uvm_event_from(void *be, uint32_t kind, uint64_t handle, vm_event *event) {
  struct uvm *u = be;

  if (u->nv.base.gpu)
    return gpu_be_event_from(be, kind, handle, event);
  *event = 0;
  return kind == VMEM_AFTER_STREAM && !handle ? 0 : no_events();
}

int uvm_event_query(void *be, vm_event event) {
  struct uvm *u = be;

  return u->nv.base.gpu ? gpu_be_event_query(be, event) : no_events();
}

int uvm_event_wait(void *be, vm_event event) {
  struct uvm *u = be;

  return u->nv.base.gpu ? gpu_be_event_wait(be, event) : no_events();
}

int uvm_stream_wait(void *be, uint64_t stream, vm_event event) {
  struct uvm *u = be;

  return u->nv.base.gpu ? gpu_be_stream_wait(be, stream, event) : no_events();
}

void uvm_event_put(void *be, vm_event event) {
  struct uvm *u = be;

  if (u->nv.base.gpu)
    gpu_be_event_put(be, event);
}
