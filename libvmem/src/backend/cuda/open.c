/* SPDX-License-Identifier: MIT */
/* Opening: devices, streams, kernels. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "backend/cuda/gpu.h"
#include "base/error.h"

static int describe_device(const struct gpu_api *api, struct gpu_device *d) {
  struct gpu_uuid instance;
  gpu_result r;
  int value = 0;
  r = api->device_get(&d->dev, d->ordinal);
  if (r != GPU_SUCCESS) return gpu_fail(api, r, "cuDeviceGet");
  r = api->device_uuid(&d->uuid, d->dev);
  if (r != GPU_SUCCESS) return gpu_fail(api, r, "cuDeviceGetUuid");
  api->device_name(d->name, sizeof(d->name), d->dev);
  d->name[sizeof(d->name) - 1] = 0;
  /* Version 1 gives the physical device, version 2 the MIG instance. */
  if (api->device_uuid_v2 && api->device_uuid_v2(&instance, d->dev) == GPU_SUCCESS)
    d->mig = memcmp(&instance, &d->uuid, sizeof(instance)) != 0;
  if (strstr(d->name, " MIG ")) d->mig = true;
  d->mps = api->device_attribute(&value, GPU_ATTR_MPS_ENABLED, d->dev) == GPU_SUCCESS && value;
  r = api->device_attribute(&value, GPU_ATTR_UNIFIED_ADDRESSING, d->dev);
  if (r != GPU_SUCCESS) return gpu_fail(api, r, "cuDeviceGetAttribute");
  if (!value) return vm_fail(-ENODEV, "device %d (%s) has no unified addressing", d->ordinal, d->name);
  return 0;
}

static int make_streams(struct gpu *g) {
  int low = 0, high = 0;
  gpu_result r = g->api->ctx_priorities(&low, &high);
  if (r == GPU_SUCCESS) r = g->api->stream_create(&g->work, GPU_STREAM_NON_BLOCKING, high);
  for (unsigned i = 0; i < GPU_AFTER_STREAMS && r == GPU_SUCCESS; i++)
    r = g->api->stream_create(&g->after[i], GPU_STREAM_NON_BLOCKING, high);
  return gpu_fail(g->api, r, "cuStreamCreateWithPriority");
}

int gpu_open(const int32_t *devices, uint32_t num_devices, struct gpu **gpu) {
  const struct gpu_api *api;
  struct gpu_scope scope;
  struct gpu *g;
  gpu_result r;
  int count = 0, value = 0, err;
  err = gpu_api_get(&api);
  if (err) return err;
  r = api->device_count(&count);
  if (r != GPU_SUCCESS) return gpu_fail(api, r, "cuDeviceGetCount");
  if (count == 0) return vm_fail(-ENODEV, "libcuda finds no CUDA device");
  if (num_devices > VMEM_MAX_DEVICES) return vm_fail(-EINVAL, "%u devices, at most %d", num_devices, VMEM_MAX_DEVICES);
  g = calloc(1, sizeof(*g));
  if (!g) return vm_fail(-ENOMEM, "heap: %zu bytes", sizeof(*g));
  g->api = api;
  pthread_mutex_init(&g->event_lock, NULL);
  pthread_mutex_init(&g->stage_lock, NULL);
  for (uint32_t i = 0; i < (num_devices ? num_devices : 1); i++) {
    struct gpu_device *d = &g->devices[i];
    d->ordinal = num_devices ? devices[i] : 0;
    for (uint32_t k = 0; k < i && !err; k++)
      if (g->devices[k].ordinal == d->ordinal) err = vm_fail(-EINVAL, "device %d is listed twice", d->ordinal);
    if (!err && (d->ordinal < 0 || d->ordinal >= count))
      err = vm_fail_at(-ENODEV, 0, 0, (uint64_t)count, "device %d of %d", d->ordinal, count);
    if (!err) err = describe_device(api, d);
    if (err) goto fail;
    r = api->primary_retain(&d->ctx, d->dev);
    if (r != GPU_SUCCESS) {
      err = gpu_fail(api, r, "cuDevicePrimaryCtxRetain");
      goto fail;
    }
    g->num_devices = i + 1;
  }
  err = gpu_enter(g, 0, &scope);
  if (err) goto fail;
  if (api->device_attribute(&value, GPU_ATTR_MULTIPROCESSORS, g->devices[0].dev) == GPU_SUCCESS)
    g->multiprocessors = (unsigned)value;
  err = make_streams(g);
  if (!err) err = gpu_copy_init(g);
  gpu_leave(g, &scope);
  if (err) goto fail;
  *gpu = g;
  return 0;
fail:
  gpu_close(g);
  return err;
}

/* Errors are ignored: whatever remains belongs to the context, which may be broken already. */
void gpu_close(struct gpu *g) {
  struct gpu_scope scope;
  if (!g) return;
  if (g->num_devices && g->api->ctx_push(g->devices[0].ctx) == GPU_SUCCESS) {
    scope.capture_mode = GPU_CAPTURE_RELAXED;
    g->api->capture_mode(&scope.capture_mode);
    if (g->work) {
      g->api->stream_sync(g->work);
      g->api->stream_destroy(g->work);
    }
    for (unsigned i = 0; i < GPU_AFTER_STREAMS && g->after[i]; i++) {
      g->api->stream_sync(g->after[i]);
      g->api->stream_destroy(g->after[i]);
    }
    gpu_events_free(g);
    gpu_copy_exit(g);
    gpu_leave(g, &scope);
  }
  for (uint32_t i = 0; i < g->num_devices; i++) g->api->primary_release(g->devices[i].dev);
  pthread_mutex_destroy(&g->event_lock);
  pthread_mutex_destroy(&g->stage_lock);
  free(g);
}
