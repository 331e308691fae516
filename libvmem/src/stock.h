/* SPDX-License-Identifier: MIT */
/*
 * stock.h - the parts of the back end "stock": NVIDIA's unmodified driver below 2 MiB.
 *
 * Physical memory is allocated from the resource manager (rm.h) as a client of our own; addresses
 * are external ranges in the address space that CUDA's own /dev/nvidia-uvm descriptor holds, and
 * pages are mapped into them with UVM's ioctls. One ioctl maps a run on all devices of the context.
 */
#ifndef VMEM_STOCK_H
#define VMEM_STOCK_H

#include "gpu_be.h"
#include "rm.h"

/* Live map calls that one context may have, all devices together: what the driver can number less a
 * part for the other users of UVM on the machine, whose calls would fail as well. */
enum { STOCK_MAX_MAPPINGS = RM_HANDLES - (48 << 10) };

struct stock_device {
  int fd;          /* /dev/nvidiaN, held so that RM lets this process use the GPU */
  uint32_t object; /* RM device, parent of slabs */
};

struct stock {
  struct gpu_be base;
  struct rm rm;
  int uvm_fd;
  struct stock_device devices[VMEM_MAX_DEVICES]; /* as in base.gpu->devices */
  uint64_t granule;
  atomic_ullong device_slab_bytes; /* in devices[0] */
  pthread_mutex_t va_lock;
  uint64_t visible_bytes;     /* in visible reservations; under va_lock */
  struct stock_range *ranges; /* reservations; under va_lock */
};

/* ---- stock_uvm.c: UVM's calls, on every device of the context ---- */

int uvm_create(const struct stock *s, uint64_t addr, uint64_t bytes);
int uvm_free(const struct stock *s, uint64_t addr, uint64_t bytes);
/* Replaces what overlaps. mapping_type: UVM_MAPPING_*. On failure the range is unmapped. */
int uvm_map(const struct stock *s, uint64_t addr, uint64_t bytes, uint32_t memory, uint64_t offset,
            uint32_t mapping_type);
int uvm_unmap(const struct stock *s, uint64_t addr, uint64_t bytes);
/* Reads as zeros, swallows writes. Multiples of 64 KiB. Replaces what overlaps. */
int uvm_sparse(const struct stock *s, uint64_t addr, uint64_t bytes);
/* 0, or the error that names what is wrong with the device node. */
int uvm_check_node(void);
/* Sets s->uvm_fd to a duplicate of the descriptor through which CUDA manages this process. */
int uvm_find(struct stock *s);

/* ---- stock_va.c: reservations ---- */

int stock_reserve(void *be, uint64_t bytes, uint64_t align, uint32_t flags, uint64_t *addr,
                  uint32_t *kind, uint64_t *priv);
int stock_unreserve(void *be, uint64_t addr, uint64_t bytes, uint64_t priv);
/* At close: frees what describes reservations that a broken CUDA context would not give back. */
void stock_forget_ranges(struct stock *s);
/* Addresses with nothing behind them; the caller gives them back with munmap. */
int stock_host_range(uint64_t bytes, uint64_t align, uint64_t *addr);

/* ---- stock_mem.c: physical memory and mappings ---- */

int stock_slab_create(void *be, uint64_t bytes, uint64_t page_size, uint32_t location,
                      int32_t device, uint64_t *slab);
int stock_slab_destroy(void *be, uint64_t slab, uint64_t bytes);
int stock_map(void *be, uint64_t addr, uint64_t bytes, uint64_t slab, uint64_t offset,
              uint32_t flags, bool sparse);
int stock_unmap(void *be, uint64_t addr, uint64_t bytes, bool sparse);
int stock_remap(void *be, uint64_t addr, uint64_t bytes, uint64_t slab, uint64_t offset,
                uint32_t flags);
uint32_t stock_slab_object(uint64_t slab);

#endif
