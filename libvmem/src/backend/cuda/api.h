/* SPDX-License-Identifier: MIT */
/*
 * api.h - the part of CUDA's driver API that we call, loaded at run time from libcuda.so.1.
 *
 * The prototypes are ours, written from NVIDIA's public documentation of the driver API, so that
 * building needs neither CUDA's headers nor its libraries. Functions with a version suffix are
 * looked up by that name: the plain name is the ABI of CUDA 3.
 */
#ifndef VMEM_GPU_API_H
#define VMEM_GPU_API_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef int gpu_result;   /* CUresult */
typedef int gpu_dev;      /* CUdevice */
typedef uint64_t gpu_ptr; /* CUdeviceptr */
typedef void *gpu_ctx, *gpu_stream, *gpu_cuevent, *gpu_module, *gpu_function;

enum {
  GPU_SUCCESS = 0,
  GPU_ERROR_INVALID_VALUE = 1,
  GPU_ERROR_OUT_OF_MEMORY = 2,
  GPU_ERROR_NOT_INITIALIZED = 3,
  GPU_ERROR_DEINITIALIZED = 4,
  GPU_ERROR_NO_DEVICE = 100,
  GPU_ERROR_INVALID_DEVICE = 101,
  GPU_ERROR_NOT_READY = 600,
  GPU_ERROR_PEER_ACCESS_ALREADY_ENABLED = 704,
  GPU_ERROR_NOT_PERMITTED = 800,
  GPU_ERROR_NOT_SUPPORTED = 801,
  GPU_ERROR_SYSTEM_DRIVER_MISMATCH = 803,
  GPU_ERROR_CAPTURE_IMPLICIT = 906,
  GPU_ERROR_CAPTURED_EVENT = 907
};

enum {
  GPU_EVENT_BLOCKING_SYNC = 1,
  GPU_EVENT_DISABLE_TIMING = 2,
  GPU_STREAM_NON_BLOCKING = 1,
  GPU_MEM_ATTACH_GLOBAL = 1,
  GPU_HOST_PORTABLE = 1,
  GPU_CAPTURE_RELAXED = 2,
  GPU_MEMORY_HOST = 1,
  GPU_POINTER_MEMORY_TYPE = 2,
  GPU_POINTER_DEVICE_POINTER = 3,
  GPU_POINTER_BUFFER_ID = 7,
  GPU_POINTER_RANGE_START = 11,
  GPU_POINTER_RANGE_SIZE = 12,
  GPU_ATTR_MULTIPROCESSORS = 16,
  GPU_ATTR_UNIFIED_ADDRESSING = 41,
  GPU_ATTR_CC_MAJOR = 75,
  GPU_ATTR_MANAGED_MEMORY = 83,
  GPU_ATTR_VMM_SUPPORTED = 102,
  GPU_ATTR_MPS_ENABLED = 133, /* CUDA 12.4 and later */
  GPU_ATTR_HOST_NUMA_ID = 134,
  GPU_ALLOCATION_PINNED = 1,
  GPU_LOCATION_DEVICE = 1,
  GPU_LOCATION_HOST_NUMA = 3,
  GPU_GRANULARITY_MINIMUM = 0,
  GPU_PROT_READ = 1,
  GPU_PROT_READWRITE = 3
};

struct gpu_uuid {
  uint8_t bytes[16];
};

struct gpu_location {
  int32_t type, id;
};

struct gpu_alloc_prop { /* CUmemAllocationProp */
  int32_t type, handle_types;
  struct gpu_location location;
  void *win32;
  uint8_t compression, gpu_direct_rdma;
  uint16_t usage;
  uint8_t reserved[4];
};
_Static_assert(sizeof(struct gpu_alloc_prop) == 32, "CUmemAllocationProp");

struct gpu_access { /* CUmemAccessDesc */
  struct gpu_location location;
  int32_t flags;
};
_Static_assert(sizeof(struct gpu_access) == 12, "CUmemAccessDesc");

/* X(our name, symbol, required, argument types) */
#define GPU_API(X)                                                                                                     \
  X(init, "cuInit", 1, (unsigned))                                                                                     \
  X(driver_version, "cuDriverGetVersion", 1, (int *))                                                                  \
  X(error_name, "cuGetErrorName", 1, (gpu_result, const char **))                                                      \
  X(device_count, "cuDeviceGetCount", 1, (int *))                                                                      \
  X(device_get, "cuDeviceGet", 1, (gpu_dev *, int))                                                                    \
  X(device_name, "cuDeviceGetName", 1, (char *, int, gpu_dev))                                                         \
  X(device_uuid, "cuDeviceGetUuid", 1, (struct gpu_uuid *, gpu_dev))                                                   \
  X(device_uuid_v2, "cuDeviceGetUuid_v2", 0, (struct gpu_uuid *, gpu_dev))                                             \
  X(device_attribute, "cuDeviceGetAttribute", 1, (int *, int, gpu_dev))                                                \
  X(can_access_peer, "cuDeviceCanAccessPeer", 1, (int *, gpu_dev, gpu_dev))                                            \
  X(primary_retain, "cuDevicePrimaryCtxRetain", 1, (gpu_ctx *, gpu_dev))                                               \
  X(primary_release, "cuDevicePrimaryCtxRelease_v2", 1, (gpu_dev))                                                     \
  X(ctx_push, "cuCtxPushCurrent_v2", 1, (gpu_ctx))                                                                     \
  X(ctx_pop, "cuCtxPopCurrent_v2", 1, (gpu_ctx *))                                                                     \
  X(ctx_enable_peer, "cuCtxEnablePeerAccess", 1, (gpu_ctx, unsigned))                                                  \
  X(ctx_priorities, "cuCtxGetStreamPriorityRange", 1, (int *, int *))                                                  \
  X(stream_create, "cuStreamCreateWithPriority", 1, (gpu_stream *, unsigned, int))                                     \
  X(stream_destroy, "cuStreamDestroy_v2", 1, (gpu_stream))                                                             \
  X(stream_sync, "cuStreamSynchronize", 1, (gpu_stream))                                                               \
  X(stream_query, "cuStreamQuery", 1, (gpu_stream))                                                                    \
  X(stream_wait, "cuStreamWaitEvent", 1, (gpu_stream, gpu_cuevent, unsigned))                                          \
  X(stream_ctx, "cuStreamGetCtx", 1, (gpu_stream, gpu_ctx *))                                                          \
  X(stream_capturing, "cuStreamIsCapturing", 1, (gpu_stream, int *))                                                   \
  X(capture_mode, "cuThreadExchangeStreamCaptureMode", 1, (int *))                                                     \
  X(event_create, "cuEventCreate", 1, (gpu_cuevent *, unsigned))                                                       \
  X(event_destroy, "cuEventDestroy_v2", 1, (gpu_cuevent))                                                              \
  X(event_record, "cuEventRecord", 1, (gpu_cuevent, gpu_stream))                                                       \
  X(event_query, "cuEventQuery", 1, (gpu_cuevent))                                                                     \
  X(event_sync, "cuEventSynchronize", 1, (gpu_cuevent))                                                                \
  X(module_load, "cuModuleLoadData", 1, (gpu_module *, const void *))                                                  \
  X(module_unload, "cuModuleUnload", 1, (gpu_module))                                                                  \
  X(module_function, "cuModuleGetFunction", 1, (gpu_function *, gpu_module, const char *))                             \
  X(launch, "cuLaunchKernel", 1,                                                                                       \
    (gpu_function, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, gpu_stream, void **,          \
     void **))                                                                                                         \
  X(mem_info, "cuMemGetInfo_v2", 1, (size_t *, size_t *))                                                              \
  X(host_alloc, "cuMemHostAlloc", 1, (void **, size_t, unsigned))                                                      \
  X(host_free, "cuMemFreeHost", 1, (void *))                                                                           \
  X(pointer_attributes, "cuPointerGetAttributes", 1, (unsigned, int *, void **, gpu_ptr))                              \
  X(managed_alloc, "cuMemAllocManaged", 1, (gpu_ptr *, size_t, unsigned))                                              \
  X(mem_free, "cuMemFree_v2", 1, (gpu_ptr))                                                                            \
  X(va_reserve, "cuMemAddressReserve", 1, (gpu_ptr *, size_t, size_t, gpu_ptr, unsigned long long))                    \
  X(va_free, "cuMemAddressFree", 1, (gpu_ptr, size_t))                                                                 \
  X(vmm_create, "cuMemCreate", 1, (unsigned long long *, size_t, const struct gpu_alloc_prop *, unsigned long long))   \
  X(vmm_release, "cuMemRelease", 1, (unsigned long long))                                                              \
  X(vmm_map, "cuMemMap", 1, (gpu_ptr, size_t, size_t, unsigned long long, unsigned long long))                         \
  X(vmm_unmap, "cuMemUnmap", 1, (gpu_ptr, size_t))                                                                     \
  X(vmm_access, "cuMemSetAccess", 1, (gpu_ptr, size_t, const struct gpu_access *, size_t))                             \
  X(vmm_granularity, "cuMemGetAllocationGranularity", 1, (size_t *, const struct gpu_alloc_prop *, int))

struct gpu_api {
#define GPU_API_FIELD(field, symbol, required, args) gpu_result(*field) args;
  GPU_API(GPU_API_FIELD)
#undef GPU_API_FIELD
};

/* Loads and initialises the library. -ENODEV, with the reason, if it cannot be used. */
int gpu_api_get(const struct gpu_api **api);

/* True if a libcuda is installed, usable or not. */
bool gpu_api_present(void);

/* Turns a CUresult into an errno and records it: out of memory is -ENOMEM, anything else -EIO. */
int gpu_fail(const struct gpu_api *api, gpu_result result, const char *what);
int gpu_fail_at(const struct gpu_api *api, gpu_result result, uint64_t addr, uint64_t bytes, const char *what);

#endif
