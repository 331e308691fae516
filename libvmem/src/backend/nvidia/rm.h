/* SPDX-License-Identifier: MIT */
/* rm.h - a client of NVIDIA's resource manager (RM), through /dev/nvidiactl. */
#ifndef VMEM_RM_H
#define VMEM_RM_H

#include <stdatomic.h>

#include "backend/nvidia/abi.h"

struct rm {
  int fd;          /* /dev/nvidiactl: the client and all its objects end with it */
  uint32_t client; /* 0 = none */
  struct nv_version version;
  char version_text[64];
  struct nv_abi abi;
  atomic_uint next_handle;
};

struct rm_gpu {
  uint32_t gpu_id, instance;
  uint32_t minor_number; /* of the device node */
};

/* ioctl, repeated after EINTR and, as retry.h says, while the driver is suspended. 0 or a negative errno, nothing
 * recorded. */
int rm_ioctl(int fd, unsigned long request, void *arg);
/* The same, where the driver may also report it in *status, inside the structure. */
int rm_call(int fd, unsigned long request, void *arg, uint32_t *status);

/* Opens a device node read-write, close-on-exec. -ENODEV or -EACCES naming the node. */
int rm_open_node(const char *path, int *fd);

/* Opens the control node, reads the driver's version, makes a client. force: take unknown versions.
 */
int rm_open(struct rm *rm, bool force);
void rm_close(struct rm *rm);

int rm_find_gpu(struct rm *rm, const uint8_t uuid[16], struct rm_gpu *gpu);

/* *object gets a new handle. On failure the error is recorded with the RM's status. */
int rm_alloc(struct rm *rm, uint32_t parent, uint32_t class_id, void *params, uint32_t bytes, uint32_t *object,
             const char *what);
int rm_free(struct rm *rm, uint32_t parent, uint32_t object);
int rm_control(struct rm *rm, uint32_t object, uint32_t cmd, void *params, uint32_t bytes, const char *what);

/* Records an NV_STATUS as an errno; 0 for NV_OK. */
int rm_fail(uint32_t status, uint64_t addr, uint64_t bytes, const char *what);

/* Records a failed ioctl. */
int rm_fail_errno(int err, uint64_t addr, uint64_t bytes, const char *what);

/* "NV_ERR_NO_MEMORY", NULL when unknown. */
const char *rm_status_name(uint32_t status);

#endif
