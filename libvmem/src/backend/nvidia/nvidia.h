/* SPDX-License-Identifier: MIT */
/*
 * nvidia.h - what the back ends "stock" and "uvm" share: NVIDIA's kernel modules, opened for this process.
 *
 * Both are clients of the resource manager (rm.h) and talk to UVM through a /dev/nvidia-uvm descriptor: the one
 * that CUDA holds, found among this process's own (descriptor.c), or, without CUDA, one that the library
 * opens (without_cuda.c). Addresses come from CUDA or from the process (addresses.c).
 */
#ifndef VMEM_NVIDIA_H
#define VMEM_NVIDIA_H

#include "backend/cuda/entries.h"
#include "backend/nvidia/rm.h"

#define UVM_NODE "/dev/nvidia-uvm"

struct nvidia_device {
  int32_t ordinal;    /* CUDA's number, or the library's own without CUDA */
  int fd;             /* /dev/nvidiaN, held so that RM lets this process use the GPU */
  uint32_t object;    /* RM device, parent of slabs */
  uint32_t subdevice; /* RM objects of without_cuda.c, else 0 */
  uint32_t va_space;
  uint8_t uuid[16];
  char name[64];
};

struct nvidia {
  struct gpu_be base; /* .gpu is NULL without CUDA */
  struct rm rm;
  int uvm_fd;
  int mm_fd; /* without_cuda.c: ties uvm_fd to this process's memory; -1 = none */
  uint32_t num_devices;
  struct nvidia_device devices[VMEM_MAX_DEVICES]; /* same order as base.gpu->devices, if any */
  uint64_t granule;
  atomic_ullong device_slab_bytes; /* bytes of slabs in devices[0] */
  pthread_mutex_t va_lock;
  uint64_t visible_bytes;      /* size of all visible reservations; protected by va_lock */
  struct nvidia_range *ranges; /* all reservations; protected by va_lock */
};

/* Addresses of a reservation. */
struct nvidia_range {
  struct nvidia_range *next, **at; /* links in the context's list */
  uint64_t base, bytes;            /* as returned by CUDA or mmap */
  uint64_t addr, length;           /* the driver's reservation */
  bool visible;
  bool freed; /* the driver's reservation is freed, but freeing the addresses has failed so far */
};

/* ---- open.c ---- */

/* Initialises *n with nothing open. */
void nvidia_init(struct nvidia *n);
/* Opens everything but uvm_fd, with CUDA. `trial`, if any, is called before the first call to a driver of an unknown
 * branch. On failure nvidia_close undoes what was done. */
int nvidia_open(struct nvidia *n, const struct vmem_open_opts *opts, int (*trial)(const struct nvidia *n));
/* Opens and keeps the node of devices[index], whose uuid and name are set, and creates its RM device. */
int nvidia_open_device(struct nvidia *n, uint32_t index);
void nvidia_close(struct nvidia *n);
/* Issues one of UVM's ioctls. The ioctl's return value says whether the driver accepted the call; *status, inside
 * the structure, says whether the call succeeded. */
int nvidia_uvm_call(const struct nvidia *n, unsigned long request, void *params, uint32_t size, uint32_t *status,
                    uint64_t addr, uint64_t bytes, const char *what);
/* Calls nvidia_uvm_call with a structure that has a field `status`. */
#define NVIDIA_UVM_CALL(n, request, p, addr, bytes)                                                                    \
  nvidia_uvm_call(n, request, p, sizeof(*(p)), &(p)->status, addr, bytes, #request)
/* Finds the index in n->devices; -EINVAL if the ordinal is not one of the context's. */
int nvidia_find(const struct nvidia *n, int32_t ordinal, uint32_t *index);

/* ---- descriptor.c: CUDA's descriptor ---- */

/* Checks UVM's device node. Returns 0, or an error that says what is wrong with it. */
int nvidia_check_uvm_node(void);
/* Sets n->uvm_fd to a duplicate of the first /dev/nvidia-uvm of this process for which `trial` returns 0;
 * `trial` finds the candidate in n->uvm_fd. */
int nvidia_find_uvm(struct nvidia *n, int (*trial)(struct nvidia *n, void *arg), void *arg);
/* Writes "PID NAME, PID NAME, ...": the other processes that have UVM's node open, as far as this user may see
 * them in /proc and `size` allows. */
void nvidia_uvm_users(char *text, size_t size);

/* ---- without_cuda.c: without CUDA ---- */

/* Like nvidia_open, but also opens n->uvm_fd. Devices are numbered as the driver lists its cards. */
int nvidia_open_own(struct nvidia *n, const struct vmem_open_opts *opts);
/* The part of nvidia_open_own for devices whose uuids are set: opens n->uvm_fd and registers the devices. */
int nvidia_register_own(struct nvidia *n);
int nvidia_own_mem_info(struct nvidia *n, uint32_t index, uint64_t *free_bytes, uint64_t *total_bytes);

/* ---- addresses.c: addresses ---- */

enum { NVIDIA_VA_ALIGN = 2 << 20 }; /* least alignment; CUDA rounds managed memory up to this as well */

/* Creates a range of addresses that is not yet known to the driver; nvidia_addresses_put releases *out. */
int nvidia_addresses_get(struct nvidia *n, uint64_t bytes, uint64_t align, uint32_t flags, struct nvidia_range **out);
/* Releases the range once the driver's reservation is gone. On failure the range stays, and the call
 * may be repeated. */
int nvidia_addresses_put(struct nvidia *n, struct nvidia_range *r);
/* Finds the range whose reservation holds addr; NULL = none. */
struct nvidia_range *nvidia_range_at(struct nvidia *n, uint64_t addr);
/* At close: frees the records of ranges that a broken CUDA context could not release. */
void nvidia_forget_ranges(struct nvidia *n);
/* Reserves addresses without memory; the caller frees them with munmap. */
int nvidia_host_range(uint64_t bytes, uint64_t align, uint64_t *addr);

#endif
