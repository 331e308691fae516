/* SPDX-License-Identifier: MIT */
/*
 * rm.h - a client of NVIDIA's resource manager (RM), through /dev/nvidiactl.
 *
 * No result is trusted unchecked. The status is preset to a value that no driver returns, and must change. With a
 * driver of an unknown branch, structures may differ, so the driver gets a copy of each with zeros after it: if its
 * structure is longer, it reads 0 in the extra fields, and writes to them are detected.
 */
#ifndef VMEM_RM_H
#define VMEM_RM_H

#include <stdatomic.h>

#include "backend/nvidia/abi.h"

struct rm {
  int fd;          /* /dev/nvidiactl: closing it frees the client and all its objects */
  uint32_t client; /* 0 = none */
  struct nv_version version;
  char version_text[64];
  struct nv_abi abi;
  bool careful; /* the driver is of an unknown branch */
  atomic_uint next_handle;
};

struct rm_gpu {
  uint32_t gpu_id, instance;
  uint32_t minor_number; /* N of /dev/nvidiaN */
};

/* Calls ioctl, again after EINTR and while the driver is suspended (suspend_retry.h). Returns 0 or a negative errno;
 * records no error. */
int rm_ioctl(int fd, unsigned long request, void *arg);
/* Like rm_ioctl, for one of NVIDIA's structures. `status` points to the structure's field for the driver's result
 * (NULL: it has none). May also return -RM_UNTOUCHED or -RM_BEHIND. */
int rm_call(const struct rm *rm, int fd, unsigned long request, void *arg, uint32_t bytes, uint32_t *status);
enum { RM_UNTOUCHED = 5001, RM_BEHIND };

/* Opens a device node read-write, close-on-exec. -ENODEV or -EACCES naming the node. */
int rm_open_node(const char *path, int *fd);

/* Opens the control node and reads the driver's version; -ENODEV if it is too old, or if its branch is unknown and
 * VMEM_UNKNOWN_DRIVER=refuse is in the environment. */
int rm_open(struct rm *rm);
/* Like rm_open, with the version that *before has read. */
int rm_open_again(struct rm *rm, const struct rm *before);
/* Creates a client. The caller must call rm_close even after a failure. */
int rm_client(struct rm *rm);
void rm_close(struct rm *rm);
/* Writes notes on the driver for the user; "" = none. */
void rm_describe(const struct rm *rm, char *text, size_t size);

/* Lists the cards of the machine. Returns 0 or a negative errno; records no error. */
int rm_cards(const struct rm *rm, struct nv_card_info cards[NV_MAX_CARDS]);
int rm_find_gpu(struct rm *rm, const uint8_t uuid[16], struct rm_gpu *gpu);

/* *object receives a new handle. On failure the error is recorded with RM's status. */
int rm_alloc(struct rm *rm, uint32_t parent, uint32_t class_id, void *params, uint32_t bytes, uint32_t *object,
             const char *what);
int rm_free(struct rm *rm, uint32_t parent, uint32_t object);
int rm_control(struct rm *rm, uint32_t object, uint32_t cmd, void *params, uint32_t bytes, const char *what);

/* Records an NV_STATUS as an errno; 0 for NV_OK. */
int rm_fail(uint32_t status, uint64_t addr, uint64_t bytes, const char *what);

/* Records a failed ioctl. */
int rm_fail_errno(int err, uint64_t addr, uint64_t bytes, const char *what);

/* Returns a name such as "NV_ERR_NO_MEMORY"; NULL if unknown. */
const char *rm_status_name(uint32_t status);

#endif
