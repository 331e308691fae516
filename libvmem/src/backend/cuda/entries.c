/* SPDX-License-Identifier: MIT */
/* Functions of struct vm_backend that all back ends on a GPU share. */
#include "backend/cuda/entries.h"

static struct gpu *gpu_of(void *be) { return ((struct gpu_be *)be)->gpu; }

int gpu_be_mem_info(void *be, uint32_t location, int32_t device, uint64_t *free_bytes, uint64_t *total_bytes) {
  return gpu_mem_info(gpu_of(be), location, device, free_bytes, total_bytes);
}

int gpu_be_fill(void *be, const struct vm_be_range *ranges, size_t n, uint8_t value, const vm_event *after,
                size_t num_after, vm_event *done) {
  return gpu_fill(gpu_of(be), ranges, n, value, after, num_after, done);
}

int gpu_be_read(void *be, void *dst, uint64_t addr, uint64_t bytes) { return gpu_read(gpu_of(be), dst, addr, bytes); }

int gpu_be_write(void *be, uint64_t addr, const void *src, uint64_t bytes) {
  return gpu_write(gpu_of(be), addr, src, bytes);
}

int gpu_be_copy(void *be, const struct vm_be_copy *copies, size_t n, const vm_event *after, size_t num_after,
                vm_event *done) {
  return gpu_copy(gpu_of(be), copies, n, after, num_after, done);
}

int gpu_be_event_from(void *be, uint32_t kind, uint64_t handle, vm_event *event) {
  return gpu_event_from(gpu_of(be), kind, handle, event);
}

int gpu_be_event_query(void *be, vm_event event) { return gpu_event_query(gpu_of(be), event); }

int gpu_be_event_wait(void *be, vm_event event) { return gpu_event_wait(gpu_of(be), event); }

int gpu_be_stream_wait(void *be, uint64_t stream, vm_event event) { return gpu_stream_wait(gpu_of(be), stream, event); }

void gpu_be_event_put(void *be, vm_event event) { gpu_event_put(gpu_of(be), event); }
