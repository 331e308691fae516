/* SPDX-License-Identifier: MIT */
/* Events: a pool of the library's own, and wrappers around the caller's. */
#include <errno.h>
#include <stdlib.h>
#include <time.h>

#include "backend/cuda/gpu.h"
#include "base/error.h"

enum { FOREIGN = UINT32_MAX }; /* event of a context that is not one of our primary contexts: never pooled */

struct gpu_event {
  gpu_cuevent handle;
  uint32_t device; /* index, or FOREIGN */
  bool borrowed;   /* belongs to the caller */
  struct gpu_event *next;
};

static struct gpu_event *event_of(vm_event e) { return (struct gpu_event *)(uintptr_t)e; }

gpu_cuevent gpu_event_handle(vm_event event) { return event_of(event)->handle; }

/* The device's context must be current. */
static int event_get(struct gpu *g, uint32_t device, struct gpu_event **event) {
  struct gpu_event *e = NULL;
  gpu_result r;
  if (device != FOREIGN) {
    pthread_mutex_lock(&g->event_lock);
    e = g->devices[device].free_events;
    if (e) g->devices[device].free_events = e->next;
    pthread_mutex_unlock(&g->event_lock);
  }
  if (!e) {
    e = calloc(1, sizeof(*e));
    if (!e) return vm_fail(-ENOMEM, "heap: %zu bytes", sizeof(*e));
    /* Blocking: the worker must sleep in a wait, not spin. */
    r = g->api->event_create(&e->handle, GPU_EVENT_BLOCKING_SYNC | GPU_EVENT_DISABLE_TIMING);
    if (r != GPU_SUCCESS) {
      free(e);
      return gpu_fail(g->api, r, "cuEventCreate");
    }
    e->device = device;
  }
  e->next = NULL;
  *event = e;
  return 0;
}

void gpu_event_put(struct gpu *g, vm_event event) {
  struct gpu_event *e = event_of(event);
  if (!e) return;
  if (!e->borrowed && e->device != FOREIGN) {
    pthread_mutex_lock(&g->event_lock);
    e->next = g->devices[e->device].free_events;
    g->devices[e->device].free_events = e;
    pthread_mutex_unlock(&g->event_lock);
    return;
  }
  if (!e->borrowed) g->api->event_destroy(e->handle);
  free(e);
}

void gpu_events_free(struct gpu *g) {
  for (uint32_t i = 0; i < g->num_devices; i++)
    while (g->devices[i].free_events) {
      struct gpu_event *e = g->devices[i].free_events;
      g->devices[i].free_events = e->next;
      g->api->event_destroy(e->handle);
      free(e);
    }
}

/* `device` is the stream's, and its context is current. */
static int record(struct gpu *g, gpu_stream stream, uint32_t device, vm_event *event) {
  struct gpu_event *e = NULL;
  gpu_result r;
  int err = event_get(g, device, &e);
  if (err) return err;
  r = g->api->event_record(e->handle, stream);
  if (r != GPU_SUCCESS) {
    gpu_event_put(g, (vm_event)(uintptr_t)e);
    return gpu_fail(g->api, r, "cuEventRecord");
  }
  *event = (vm_event)(uintptr_t)e;
  return 0;
}

int gpu_event_record(struct gpu *g, gpu_stream stream, vm_event *event) { return record(g, stream, 0, event); }

/* Finds the device that a stream belongs to. 0, 1 and 2 are default streams of the current context.
 */
static int stream_device(struct gpu *g, gpu_stream stream, uint32_t *device, gpu_ctx *ctx) {
  gpu_result r;
  *device = 0;
  *ctx = g->devices[0].ctx;
  if ((uintptr_t)stream <= 2) return 0;
  r = g->api->stream_ctx(stream, ctx);
  if (r != GPU_SUCCESS) return gpu_fail(g->api, r, "cuStreamGetCtx: not a stream of this process");
  for (*device = 0; *device < g->num_devices; ++*device)
    if (g->devices[*device].ctx == *ctx) return 0;
  *device = FOREIGN;
  return 0;
}

/* Our events on a stream that is being captured would break the capture. The legacy stream reports
 * "implicit" while a blocking stream is captured, with the same consequence. */
static int refuse_captured(struct gpu *g, gpu_stream stream) {
  int capturing = 0;
  gpu_result r = g->api->stream_capturing(stream, &capturing);
  if (capturing || r == GPU_ERROR_CAPTURE_IMPLICIT)
    return vm_fail(-EINVAL, "the stream is being captured into a graph: use one that is not");
  return gpu_fail(g->api, r, "cuStreamIsCapturing");
}

static int record_on(struct gpu *g, gpu_stream stream, uint32_t device, vm_event *event) {
  int err = refuse_captured(g, stream);
  return err ? err : record(g, stream, device, event);
}

int gpu_event_from(struct gpu *g, uint32_t kind, uint64_t handle, vm_event *event) {
  struct gpu_scope scope;
  struct gpu_event *e;
  uint32_t device;
  gpu_ctx ctx, ignored;
  int err;
  if (kind == VMEM_AFTER_EVENT) {
    if (!handle) return vm_fail(-EINVAL, "event 0");
    e = calloc(1, sizeof(*e));
    if (!e) return vm_fail(-ENOMEM, "heap: %zu bytes", sizeof(*e));
    e->handle = (gpu_cuevent)(uintptr_t)handle;
    e->borrowed = true;
    *event = (vm_event)(uintptr_t)e;
    return 0;
  }
  if (kind != VMEM_AFTER_STREAM) return vm_fail(-EINVAL, "unknown kind %u of work to wait for", kind);
  err = gpu_enter(g, 0, &scope);
  if (err) return err;
  err = stream_device(g, (gpu_stream)(uintptr_t)handle, &device, &ctx);
  if (!err && device == 0)
    err = record_on(g, (gpu_stream)(uintptr_t)handle, device, event);
  else if (!err) {
    /* An event must belong to its stream's context. */
    gpu_result r = g->api->ctx_push(ctx);
    if (r == GPU_SUCCESS) {
      err = record_on(g, (gpu_stream)(uintptr_t)handle, device, event);
      g->api->ctx_pop(&ignored);
    } else {
      err = gpu_fail(g->api, r, "cuCtxPushCurrent");
    }
  }
  gpu_leave(g, &scope);
  return err;
}

static int query(struct gpu *g, const struct gpu_event *e) {
  gpu_result r = g->api->event_query(e->handle);
  if (r == GPU_SUCCESS) return 0;
  if (r == GPU_ERROR_NOT_READY) return -EAGAIN; /* not an error, so it is not recorded */
  if (r == GPU_ERROR_CAPTURED_EVENT)
    return vm_fail(-EINVAL, "the event was recorded in a stream that is being captured into a graph");
  return gpu_fail(g->api, r, "cuEventQuery");
}

int gpu_event_query(struct gpu *g, vm_event event) {
  struct gpu_scope scope;
  int err;
  if (!event) return 0;
  err = gpu_enter(g, 0, &scope);
  if (err) return err;
  err = query(g, event_of(event));
  gpu_leave(g, &scope);
  return err;
}

static uint64_t now_ns(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

int gpu_event_wait(struct gpu *g, vm_event event) {
  struct gpu_event *e = event_of(event);
  struct gpu_scope scope;
  uint64_t start = now_ns();
  int err;
  if (!event) return 0;
  err = gpu_enter(g, 0, &scope);
  if (err) return err;
  /* Spin first: a fill or copy of a few pages takes less time than a sleep. */
  do err = query(g, e);
  while (err == -EAGAIN && now_ns() - start < 30000);
  if (err == -EAGAIN && !e->borrowed) {
    gpu_result r = g->api->event_sync(e->handle);
    err = gpu_fail(g->api, r, "cuEventSynchronize");
  }
  /* Poll: CUDA might spin on the caller's event. */
  for (long pause = 50000; err == -EAGAIN; pause = pause < 500000 ? 2 * pause : pause) {
    struct timespec t = {.tv_nsec = pause};
    nanosleep(&t, NULL);
    err = query(g, e);
  }
  gpu_leave(g, &scope);
  return err;
}

int gpu_stream_wait(struct gpu *g, uint64_t stream, vm_event event) {
  struct gpu_scope scope;
  gpu_result r;
  int err;
  if (!event) return 0;
  err = gpu_enter(g, 0, &scope);
  if (err) return err;
  err = refuse_captured(g, (gpu_stream)(uintptr_t)stream);
  if (!err) {
    r = g->api->stream_wait((gpu_stream)(uintptr_t)stream, event_of(event)->handle, 0);
    err = gpu_fail(g->api, r, "cuStreamWaitEvent");
  }
  gpu_leave(g, &scope);
  return err;
}
