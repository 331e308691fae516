/* SPDX-License-Identifier: MIT */
/*
 * uvm.h - the parts of the back end "uvm": NVIDIA's driver with our patch (kernel_module/uvm_vmem_ioctl.h).
 *
 * Reservations, physical pages and mappings are kernel objects, created through one /dev/nvidia-uvm: the one that
 * CUDA holds, or our own without CUDA. A slab is one or more objects made by CREATE, whose pages have the size of
 * the context's granule; a batch of the core becomes one BIND, which is all or nothing.
 *
 * The driver zeroes new objects. The core zeroes pages that return to its pool, through a
 * reservation and a BIND of the whole slab, both made when the slab's first page returns.
 */
#ifndef VMEM_UVM_H
#define VMEM_UVM_H

#include <uvm_vmem_ioctl.h>

#include "backend/nvidia/nvidia.h"

/* Access to contents without CUDA. The library has none and leaves the pointer NULL: pages can then
 * be mapped and unmapped, and every function that accesses contents returns -EOPNOTSUPP. A program
 * that links the library's objects and can access contents, such as the tests on a software GPU, sets the
 * pointer. */
struct uvm_contents {
  int (*open)(const struct nvidia *n, void **state);
  void (*close)(void *state);
  int (*fill)(void *state, uint64_t addr, uint64_t bytes, uint8_t value);
  int (*read)(void *state, void *dst, uint64_t addr, uint64_t bytes);
  int (*write)(void *state, uint64_t addr, const void *src, uint64_t bytes);
  int (*copy)(void *state, uint64_t dst, uint64_t src, uint64_t bytes);
};
extern const struct uvm_contents *vm_uvm_contents;

struct uvm {
  struct nvidia nv;
  struct uvm_vmem_query query; /* the driver's reply */
  unsigned shift;              /* log2(nv.granule) */
  bool entries;                /* VMEM_OPEN_LARGE_ENTRIES: reservations are BIG */
  uint64_t object_bytes;       /* size of each object of a slab of small pages, except its last */
  uint64_t run_bytes;          /* likewise, in slabs that consist of runs of 2 MiB */
  uint64_t bind_bytes;         /* limit of one map operation */
  void *contents;              /* state of vm_uvm_contents; NULL = not in use */
};

/* ---- ioctl.c ---- */

/* Issues an ioctl of uvm_vmem_ioctl.h on fd. Records a failure with the meaning that its errno has there. */
int uvm_ioctl(int fd, unsigned long request, void *arg, uint64_t addr, uint64_t bytes, const char *what);
/* Records a failed ioctl as uvm_ioctl does. */
int uvm_fail(int err, uint64_t addr, uint64_t bytes, const char *what);
/* Queries the driver's features. -ENODEV if it is not the patched one. */
int uvm_query(int fd, struct uvm_vmem_query *query);
/* -ENODEV, with the reason, if the driver refuses this kind of GPU. */
int uvm_check_gpu(int fd, const struct nvidia_device *d);

/* ---- reserve.c ---- */

/* Reserves the addresses on every device of the context. */
int uvm_take(const struct uvm *u, uint64_t addr, uint64_t bytes, uint32_t flags);
int uvm_give_back(const struct uvm *u, uint64_t addr, uint64_t bytes, uint32_t flags);
int uvm_reserve(void *be, uint64_t bytes, uint64_t align, uint32_t flags, uint64_t *addr, uint32_t *kind,
                uint64_t *priv);
int uvm_unreserve(void *be, uint64_t addr, uint64_t bytes, uint64_t priv, bool *gone);

/* ---- slab.c ---- */

int uvm_slab_create(void *be, uint64_t bytes, uint64_t page_size, uint32_t location, int32_t device, uint64_t *slab);
int uvm_slab_destroy(void *be, uint64_t slab, uint64_t bytes);
/* Returns the object that holds a slab's byte `offset`. */
uint32_t uvm_slab_handle(uint64_t slab, uint64_t offset);
/* Returns the size of the slab's objects; the last may be smaller. */
uint64_t uvm_slab_object_bytes(uint64_t slab);
/* True if every 2 MiB of the slab is physically contiguous and aligned to 2 MiB. */
bool uvm_slab_is_contiguous(uint64_t slab);

/* ---- bind.c: mappings ---- */

int uvm_bind(void *be, const struct vm_bind_op *ops, size_t n, struct vm_bind_result *result);
int uvm_map(void *be, uint64_t addr, uint64_t bytes, uint64_t slab, uint64_t offset, uint32_t flags, bool sparse);
int uvm_unmap(void *be, uint64_t addr, uint64_t bytes, bool sparse);

/* ---- contents.c: contents without CUDA, through vm_uvm_contents ---- */

int uvm_contents_open(struct uvm *u);
void uvm_contents_close(struct uvm *u);

int uvm_own_mem_info(void *be, uint32_t location, int32_t device, uint64_t *free_bytes, uint64_t *total_bytes);
int uvm_own_fill(void *be, const struct vm_be_range *ranges, size_t n, uint8_t value, const vm_event *after,
                 size_t num_after, vm_event *done);
int uvm_own_read(void *be, void *dst, uint64_t addr, uint64_t bytes);
int uvm_own_write(void *be, uint64_t addr, const void *src, uint64_t bytes);
int uvm_own_copy(void *be, const struct vm_be_copy *copies, size_t n, const vm_event *after, size_t num_after,
                 vm_event *done);
int uvm_own_event_from(void *be, uint32_t kind, uint64_t handle, vm_event *event);

#endif
