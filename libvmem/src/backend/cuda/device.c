/* SPDX-License-Identifier: MIT */
/* Devices and their primary contexts. */
#include "backend/cuda/gpu.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/available.h"
#include "base/error.h"

int gpu_enter(const struct gpu *g, uint32_t index, struct gpu_scope *scope) {
  gpu_result r = g->api->ctx_push(g->devices[index].ctx);
  if (r != GPU_SUCCESS) return gpu_fail(g->api, r, "cuCtxPushCurrent");
  scope->capture_mode = GPU_CAPTURE_RELAXED;
  g->api->capture_mode(&scope->capture_mode);
  return 0;
}

void gpu_leave(const struct gpu *g, const struct gpu_scope *scope) {
  int mode = scope->capture_mode;
  gpu_ctx ignored;
  g->api->capture_mode(&mode);
  g->api->ctx_pop(&ignored);
}

int gpu_find(const struct gpu *g, int32_t ordinal, uint32_t *index) {
  for (uint32_t i = 0; i < g->num_devices; i++)
    if (g->devices[i].ordinal == ordinal) {
      *index = i;
      return 0;
    }
  return vm_fail(-EINVAL, "device %d is not one of the context's %u devices", ordinal, g->num_devices);
}

int gpu_enable_peers(const struct gpu *g) {
  for (uint32_t i = 0; i < g->num_devices; i++) {
    struct gpu_scope scope;
    int err = 0;
    for (uint32_t k = 0; k < g->num_devices && !err; k++) {
      const struct gpu_device *a = &g->devices[i], *b = &g->devices[k];
      gpu_result r;
      int can = 0;
      if (i == k) continue;
      r = g->api->can_access_peer(&can, a->dev, b->dev);
      if (r != GPU_SUCCESS) return gpu_fail(g->api, r, "cuDeviceCanAccessPeer");
      if (!can) return vm_fail(-EOPNOTSUPP, "device %d cannot reach the memory of device %d", a->ordinal, b->ordinal);
      err = gpu_enter(g, i, &scope);
      if (err) return err;
      /* Stays enabled after close: other code in the process may rely on it by then. */
      r = g->api->ctx_enable_peer(b->ctx, 0);
      gpu_leave(g, &scope);
      if (r != GPU_SUCCESS && r != GPU_ERROR_PEER_ACCESS_ALREADY_ENABLED)
        err = gpu_fail(g->api, r, "cuCtxEnablePeerAccess");
    }
    if (err) return err;
  }
  return 0;
}

int gpu_mem_info(const struct gpu *g, uint32_t location, int32_t device, uint64_t *free_bytes, uint64_t *total_bytes) {
  size_t free_size = 0, total_size = 0;
  struct gpu_scope scope;
  uint32_t index = 0;
  gpu_result r;
  int err;
  if (location == VMEM_HOST) return vm_available_now(free_bytes, total_bytes);
  if (location == VMEM_PEER) {
    err = gpu_find(g, device, &index);
    if (err) return err;
  }
  err = gpu_enter(g, index, &scope);
  if (err) return err;
  r = g->api->mem_info(&free_size, &total_size);
  gpu_leave(g, &scope);
  *free_bytes = free_size;
  *total_bytes = total_size;
  return gpu_fail(g->api, r, "cuMemGetInfo");
}

void gpu_describe(const struct gpu *g, struct vmem_info *info) {
  info->num_devices = g->num_devices;
  for (uint32_t i = 0; i < g->num_devices; i++) memcpy(info->uuid[i], g->devices[i].uuid.bytes, sizeof(info->uuid[i]));
  memcpy(info->device_name, g->devices[0].name, sizeof(info->device_name));
}

void gpu_driver_text(const struct gpu *g, char *text, size_t size) {
  int version = 0;
  char line[256] = "";
  FILE *f = fopen("/proc/driver/nvidia/version", "re");
  if (f) {
    if (!fgets(line, sizeof(line), f)) line[0] = 0;
    fclose(f);
  }
  /* Take the first word made of digits and dots, as in "... Kernel Module  580.159.04  Release ..." */
  for (char *save = NULL, *w = strtok_r(line, " \t\n", &save); w; w = strtok_r(NULL, " \t\n", &save))
    if (strchr(w, '.') && strspn(w, "0123456789.") == strlen(w)) {
      snprintf(text, size, "%s", w);
      return;
    }
  if (g->api->driver_version(&version) == GPU_SUCCESS)
    snprintf(text, size, "CUDA %d.%d", version / 1000, version % 1000 / 10);
}
