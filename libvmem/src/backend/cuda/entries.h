/* SPDX-License-Identifier: MIT */
/* Functions of struct vm_backend that all back ends on a GPU share. Their state starts with a gpu_be. */
#ifndef VMEM_GPU_BE_H
#define VMEM_GPU_BE_H

#include "backend/cuda/gpu.h"

struct gpu_be {
  struct gpu *gpu;
};

int gpu_be_mem_info(void *be, uint32_t location, int32_t device, uint64_t *free_bytes, uint64_t *total_bytes);
int gpu_be_fill(void *be, const struct vm_be_range *ranges, size_t n, uint8_t value, const vm_event *after,
                size_t num_after, vm_event *done);
int gpu_be_read(void *be, void *dst, uint64_t addr, uint64_t bytes);
int gpu_be_write(void *be, uint64_t addr, const void *src, uint64_t bytes);
int gpu_be_copy(void *be, const struct vm_be_copy *copies, size_t n, const vm_event *after, size_t num_after,
                vm_event *done);
int gpu_be_event_from(void *be, uint32_t kind, uint64_t handle, vm_event *event);
int gpu_be_event_query(void *be, vm_event event);
int gpu_be_event_wait(void *be, vm_event event);
int gpu_be_stream_wait(void *be, uint64_t stream, vm_event event);
void gpu_be_event_put(void *be, vm_event event);

#define GPU_BE_ENTRIES                                                                                                 \
  .mem_info = gpu_be_mem_info, .fill = gpu_be_fill, .read = gpu_be_read, .write = gpu_be_write, .copy = gpu_be_copy,   \
  .event_from = gpu_be_event_from, .event_query = gpu_be_event_query, .event_wait = gpu_be_event_wait,                 \
  .stream_wait = gpu_be_stream_wait, .event_put = gpu_be_event_put

#endif
