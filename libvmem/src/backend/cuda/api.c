/* SPDX-License-Identifier: MIT */
#include "backend/cuda/api.h"

#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>

#include "base/error.h"

/* Loaded once and never unloaded: libcuda does not survive dlclose. */
static struct {
  pthread_once_t once;
  struct gpu_api api;
  bool present;
  gpu_result init_result;
  char reason[256]; /* why it cannot be used, "" = it can */
} lib = {.once = PTHREAD_ONCE_INIT};

static void load(void) {
  void *handle = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (!handle) {
    const char *why = dlerror();
    snprintf(lib.reason, sizeof(lib.reason), "libcuda.so.1 cannot be loaded (%s)", why ? why : "no reason given");
    return;
  }
  lib.present = true;
  /* POSIX has dlsym return function pointers through void *; ISO C needs the detour. */
#define GPU_API_LOAD(field, symbol, required, args)                                                                    \
  {                                                                                                                    \
    void *p = dlsym(handle, symbol);                                                                                   \
                                                                                                                       \
    memcpy(&lib.api.field, &p, sizeof(p));                                                                             \
    if (!p && (required)) {                                                                                            \
      snprintf(lib.reason, sizeof(lib.reason), "libcuda.so.1 lacks %s: NVIDIA driver too old", symbol);                \
      return;                                                                                                          \
    }                                                                                                                  \
  }
  GPU_API(GPU_API_LOAD)
#undef GPU_API_LOAD
  lib.init_result = lib.api.init(0);
}

bool gpu_api_present(void) {
  pthread_once(&lib.once, load);
  return lib.present;
}

int gpu_api_get(const struct gpu_api **api) {
  gpu_result r;
  const char *name = NULL;
  pthread_once(&lib.once, load);
  if (lib.reason[0]) return vm_fail(-ENODEV, "%s", lib.reason);
  /* The first cuInit may have failed because the device nodes did not exist yet: try again. */
  r = lib.init_result == GPU_SUCCESS ? GPU_SUCCESS : lib.api.init(0);
  if (r != GPU_SUCCESS) {
    lib.api.error_name(r, &name);
    vm_fail(-ENODEV, r == GPU_ERROR_NO_DEVICE                ? "libcuda finds no CUDA device"
                     : r == GPU_ERROR_SYSTEM_DRIVER_MISMATCH ? "libcuda and the kernel driver have different versions"
                                                             : "libcuda cannot be initialised");
    return vm_fail_status((uint32_t)r, name);
  }
  *api = &lib.api;
  return 0;
}

int gpu_fail_at(const struct gpu_api *api, gpu_result result, uint64_t addr, uint64_t bytes, const char *what) {
  const char *name = NULL;
  if (result == GPU_SUCCESS) return 0;
  api->error_name(result, &name);
  vm_fail_at(result == GPU_ERROR_OUT_OF_MEMORY ? -ENOMEM : -EIO, addr, bytes, 0, "%s failed", what);
  return vm_fail_status((uint32_t)result, name);
}

int gpu_fail(const struct gpu_api *api, gpu_result result, const char *what) {
  return gpu_fail_at(api, result, 0, 0, what);
}
