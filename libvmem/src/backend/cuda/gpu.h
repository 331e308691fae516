/* SPDX-License-Identifier: MIT */
/*
 * gpu.h - shared by the back ends on CUDA devices: contexts, events, and copies by kernels.
 *
 * One struct gpu per vmem context. Any thread may call; each call makes the device's primary
 * context current for its own duration and sets the thread's stream-capture mode to relaxed, so
 * that a graph capture elsewhere in the process neither breaks our calls nor is broken by them.
 */
#ifndef VMEM_GPU_H
#define VMEM_GPU_H

#include <pthread.h>
#include <stdbool.h>

#include "backend/backend.h"
#include "backend/cuda/api.h"

struct gpu_event;

struct gpu_device {
  int32_t ordinal;
  gpu_dev dev;
  gpu_ctx ctx;          /* primary, retained */
  struct gpu_uuid uuid; /* identifies the physical device, even under MIG */
  bool mig;
  bool mps;
  char name[64];
  struct gpu_event *free_events; /* protected by event_lock */
};

/* Streams for fills that wait for events, which may never complete: up to this many blocked fills do
 * not delay others. */
#define GPU_AFTER_STREAMS 8

struct gpu {
  const struct gpu_api *api;
  uint32_t num_devices;
  struct gpu_device devices[VMEM_MAX_DEVICES]; /* [0]: where our kernels run */
  unsigned multiprocessors;
  gpu_stream work;                     /* fills and copies that wait for nothing */
  gpu_stream after[GPU_AFTER_STREAMS]; /* fills that wait for events, which must not delay those in `work` */
  unsigned next_after;
  gpu_module module;
  gpu_function fill, copy;
  pthread_mutex_t event_lock;
  pthread_mutex_t stage_lock; /* protects the staging buffer; held for a whole read or write */
  void *stage;                /* pinned */
};

struct gpu_scope {
  int capture_mode;
};

int gpu_open(const int32_t *devices, uint32_t num_devices, struct gpu **gpu);
void gpu_close(struct gpu *g);

/* Finds the index in g->devices of a CUDA ordinal; -EINVAL if it is not one of the context's devices. */
int gpu_find(const struct gpu *g, int32_t ordinal, uint32_t *index);

/* Enclose every CUDA call in these. */
int gpu_enter(const struct gpu *g, uint32_t index, struct gpu_scope *scope);
void gpu_leave(const struct gpu *g, const struct gpu_scope *scope);

/* Makes device pages accessible to the kernels of every device: checks each pair, and enables the
 * peer access that UVM requires before it maps one GPU's memory on another. */
int gpu_enable_peers(const struct gpu *g);

int gpu_mem_info(const struct gpu *g, uint32_t location, int32_t device, uint64_t *free_bytes, uint64_t *total_bytes);

/* Fills the device fields of *info. */
void gpu_describe(const struct gpu *g, struct vmem_info *info);

/* Writes the version, such as "580.159.04", from /proc/driver/nvidia/version, else "CUDA 13.0". */
void gpu_driver_text(const struct gpu *g, char *text, size_t size);

/* Functions of struct vm_backend (backend.h) whose first argument is a struct gpu. */
int gpu_fill(struct gpu *g, const struct vm_be_range *ranges, size_t n, uint8_t value, const vm_event *after,
             size_t num_after, vm_event *done);
int gpu_read(struct gpu *g, void *dst, uint64_t addr, uint64_t bytes);
int gpu_write(struct gpu *g, uint64_t addr, const void *src, uint64_t bytes);
int gpu_copy(struct gpu *g, const struct vm_be_copy *copies, size_t n, const vm_event *after, size_t num_after,
             vm_event *done);
int gpu_event_from(struct gpu *g, uint32_t kind, uint64_t handle, vm_event *event);
int gpu_event_query(struct gpu *g, vm_event event);
int gpu_event_wait(struct gpu *g, vm_event event);
int gpu_stream_wait(struct gpu *g, uint64_t stream, vm_event event);
void gpu_event_put(struct gpu *g, vm_event event);

/* Records a new event, owned by the library, on a stream of devices[0]. */
int gpu_event_record(struct gpu *g, gpu_stream stream, vm_event *event);
gpu_cuevent gpu_event_handle(vm_event event);
void gpu_events_free(struct gpu *g);

/* Creates the kernels and the staging buffer for copies, in the current context (devices[0]). Both
 * are created now, because creating them later could wait for the caller's running work. */
int gpu_copy_init(struct gpu *g);
void gpu_copy_exit(struct gpu *g);

#endif
